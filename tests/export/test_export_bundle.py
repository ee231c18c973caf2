"""Writing a bundle: it agrees with the eager model, is complete, and failure leaves nothing behind."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from edge_runtime.bundle import MANIFEST, Bundle, BundleError, open_bundle
from edge_runtime.engines.onnx import OnnxEngine
from export import bundle as room
from export.__main__ import main
from export.bundle import DRAFT_IDS_FILE, ENCODER_FILE, ENGINE_FILE, example_inputs, write_bundle
from models.moa import (
    SERVER_PREFIXES,
    DeviceHalf,
    DrafterError,
    MoAConfig,
    device_half,
    load_drafter,
    server_half,
)
from models.target import TargetError, load_target
from tests.export.conftest import Folders
from tests.tiny import EOS, save_tiny_drafter, save_tiny_target, tiny_model


@pytest.fixture(scope="module")
def exact(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 bundle."""
    output = tmp_path_factory.mktemp("exact") / "bundle"
    write_bundle(str(folders.target), folders.drafter, output, "none")
    return output


@pytest.fixture(scope="module")
def quantised(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """An int8 bundle in a folder that did not exist, and its report."""
    output = tmp_path_factory.mktemp("int8") / "deep" / "bundle"
    return output, write_bundle(str(folders.target), folders.drafter, output)


@pytest.fixture(scope="module")
def half(folders: Folders) -> tuple[MoAConfig, DeviceHalf]:
    config, tensors, _ = load_drafter(folders.drafter)
    return config, device_half(config, tensors, load_target(str(folders.target)).model)


@pytest.fixture
def copied(exact: Path, tmp_path: Path) -> Path:
    """A bundle that a test may break."""
    return Path(shutil.copytree(exact, tmp_path / "copied"))


# what is written


def compare(engine: OnnxEngine, half: DeviceHalf, inputs: tuple[torch.Tensor, ...]) -> float:
    """Largest difference of any output; shapes must be equal."""
    with torch.inference_mode():
        expected = [x.numpy() for x in half(*inputs)]
    got = engine.step(*(x.numpy() for x in inputs))
    assert [x.shape for x in got] == [x.shape for x in expected]
    return max(float(np.abs(a - b).max(initial=0.0)) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("width", range(1, 9))
def test_float32_engine_equals_the_eager_model(exact: Path, half: tuple[MoAConfig, DeviceHalf], width: int) -> None:
    engine = OnnxEngine(open_bundle(exact), threads=1)
    for past in (0, 1, 5, 64):
        for rows in (0, 1, 4, 63):
            inputs = example_inputs(half[0], width, past, rows, seed=100 * past + rows)
            assert compare(engine, half[1], inputs) < 1e-4, (past, rows)


@pytest.mark.parametrize("wanted", [[0], [4], [3, 1], [0, 1, 2, 3, 4], [2, 2]], ids=str)
def test_engine_gives_the_wanted_steps_only(exact: Path, half: tuple[MoAConfig, DeviceHalf], wanted: list[int]) -> None:
    inputs = list(example_inputs(half[0], 5, 3, 2))
    inputs[2] = torch.tensor(wanted)
    assert compare(OnnxEngine(open_bundle(exact), threads=1), half[1], tuple(inputs)) < 1e-4


def test_engine_obeys_a_tree_mask(exact: Path, half: tuple[MoAConfig, DeviceHalf]) -> None:
    inputs = list(example_inputs(half[0], 4, 3, 2))
    inputs[1] = torch.tensor([3, 3, 4, 4])
    inputs[3] = torch.full((4, 7), -1e9)
    for row, seen in enumerate([[3], [4], [3, 5], [4, 6]]):
        inputs[3][row, [0, 1, 2, *seen]] = 0.0
    assert compare(OnnxEngine(open_bundle(exact), threads=1), half[1], tuple(inputs)) < 1e-4


def test_example_mask_is_causal() -> None:
    config = MoAConfig.for_target(tiny_model(dtype=torch.float32).config, "h", layers=2, draft_vocab=8)
    mask = example_inputs(config, 3, 2, 0)[3]
    assert (mask == 0.0).tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]


def test_int8_engine_runs_and_agrees(
    quantised: tuple[Path, dict[str, Any]], half: tuple[MoAConfig, DeviceHalf]
) -> None:
    engine = OnnxEngine(open_bundle(quantised[0]), threads=1)
    for width, past, rows in [(1, 0, 0), (8, 0, 3), (3, 40, 0), (8, 40, 39)]:
        inputs = example_inputs(half[0], width, past, rows)
        with torch.inference_mode():
            expected = half[1](*inputs)[0]
        got = torch.from_numpy(engine.step(*(x.numpy() for x in inputs))[0])
        assert torch.corrcoef(torch.stack([got.flatten(), expected.flatten()]))[0, 1] > 0.98


def test_int8_weights_are_int8(quantised: tuple[Path, dict[str, Any]], exact: Path) -> None:
    import onnx

    def float_weights(folder: Path) -> int:
        graph = onnx.load(folder / ENGINE_FILE).graph
        return sum(int(np.prod(t.dims)) for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT)

    assert float_weights(quantised[0]) < 0.15 * float_weights(exact)


def test_opened_bundle_describes_the_drafter(exact: Path, folders: Folders) -> None:
    bundle, (config, tensors, drafter_hash) = open_bundle(exact), load_drafter(folders.drafter)
    manifest = bundle.manifest
    assert (manifest.target_hash, manifest.drafter_hash) == (folders.target_hash, drafter_hash)
    assert (manifest.target, manifest.eos_ids, manifest.max_context) == ("target", [EOS], config.max_context)
    assert manifest.draft_vocab_size == 64 < manifest.vocab_size == 199
    assert bundle.draft_ids.tolist() == tensors["draft_ids"].tolist()
    assert tuple(bundle.row_shape) == (config.ca_kv_heads, config.head_dim)


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_manifest_names_the_weights(exact: Path, quantised: tuple[Path, dict[str, Any]], quant: str) -> None:
    manifest = open_bundle(exact if quant == "none" else quantised[0]).manifest
    assert (manifest.engines["onnx"].file, manifest.engines["onnx"].quant) == (ENGINE_FILE, quant)


def test_manifest_lists_every_file_an_app_ships_with_its_hash(exact: Path) -> None:
    listed = json.loads((exact / MANIFEST).read_text())["files"]
    written = {path.name for path in exact.iterdir()} - {MANIFEST, ENCODER_FILE, "report.json", "report.md"}
    assert set(listed) == written
    for name, entry in listed.items():
        data = (exact / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_bundle_renders_the_chat_as_the_target_does(exact: Path, folders: Folders) -> None:
    messages = [{"role": "user", "content": "w9 w10 w77"}, {"role": "assistant", "content": "w5"}]
    tokenizer = load_target(str(folders.target)).tokenizer
    expected = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    assert open_bundle(exact).render_chat(messages) == expected == [1, 9, 10, 77, EOS, 5, EOS]


def test_encoder_file_is_the_server_half(exact: Path, folders: Folders) -> None:
    config, tensors, _ = load_drafter(folders.drafter)
    stored = load_file(exact / ENCODER_FILE)
    assert set(stored) == {name for name in tensors if name.startswith(SERVER_PREFIXES)}
    kv = torch.randn(3, len(config.target_layers), config.kv_width, generator=torch.Generator().manual_seed(0))
    rows = server_half(config, stored)(kv, torch.arange(3))
    torch.testing.assert_close(rows, server_half(config, tensors)(kv, torch.arange(3)), rtol=0, atol=0)


def test_report_is_complete(quantised: tuple[Path, dict[str, Any]]) -> None:
    output, report = quantised
    assert json.loads((output / "report.json").read_text()) == report
    assert report["quant"] == "int8" and report["parity"]["steps"] > 50
    assert room.TOP1_BOUND <= report["parity"]["top1_agreement"] <= 1
    assert report["files"][ENGINE_FILE] == (output / ENGINE_FILE).stat().st_size
    assert "| top1 agreement |" in (output / "report.md").read_text()


def test_nothing_is_left_beside_the_bundle(exact: Path, quantised: tuple[Path, dict[str, Any]]) -> None:
    for output in (exact, quantised[0]):
        assert list(output.parent.iterdir()) == [output]
        assert not (output / "exact.onnx").exists()
        assert output.stat().st_mode & 0o777 == 0o755


def test_float32_report_is_exact(exact: Path) -> None:
    parity = json.loads((exact / "report.json").read_text())["parity"]
    assert parity["top1_agreement"] == 1.0 and parity["max_abs_logit_error"] < 1e-3


# refusals of the writer


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(target: Path, drafter: Path, copied: Path) -> str:
    """The one line with which writing fails, for a new folder and over an existing bundle."""
    before, lines = snapshot(copied), set()
    new = copied.parent / "new"
    for output in (new, copied):
        with pytest.raises((BundleError, TargetError, DrafterError)) as caught:
            write_bundle(str(target), drafter, output, "none")
        lines.add(str(caught.value))
    assert {path.name for path in copied.parent.iterdir()} <= {"copied", "target", "drafter"}
    assert snapshot(copied) == before
    (line,) = lines
    assert "\n" not in line
    return line


def own_target(folders: Folders, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of target and drafter that a test may change."""
    return (
        Path(shutil.copytree(folders.target, tmp_path / "target")),
        Path(shutil.copytree(folders.drafter, tmp_path / "drafter")),
    )


def test_drafter_of_another_target(folders: Folders, copied: Path, tmp_path: Path) -> None:
    other = save_tiny_target(tmp_path / "target", tiny_model(seed=1, dtype=torch.float32))
    line = refused(tmp_path / "target", folders.drafter, copied)
    assert f"was trained on target {folders.target_hash}, but" in line and other in line


def test_target_without_chat_template(folders: Folders, copied: Path, tmp_path: Path) -> None:
    target, drafter = own_target(folders, tmp_path)
    (target / "chat_template.jinja").unlink()
    assert refused(target, drafter, copied).endswith("has no chat template; add chat_template.jinja to its folder")


def test_target_without_eos(copied: Path, tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    target_hash = save_tiny_target(tmp_path / "target", model)
    save_tiny_drafter(tmp_path / "drafter", model, target_hash)
    assert "names no eos_token_id" in refused(tmp_path / "target", tmp_path / "drafter", copied)


def test_missing_drafter(folders: Folders, copied: Path, tmp_path: Path) -> None:
    assert refused(folders.target, tmp_path / "nowhere", copied).endswith("so this is not a drafter folder")


def test_missing_target(folders: Folders, copied: Path, tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nowhere", folders.drafter, copied)


@pytest.fixture
def reuse_engine(exact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the slow export: the engine file is the one that was exported before."""

    def export(half: DeviceHalf, config: MoAConfig, folder: Path, quant: str) -> None:
        shutil.copy(exact / ENGINE_FILE, folder / ENGINE_FILE)

    monkeypatch.setattr(room, "_export_onnx", export)


def test_engine_that_disagrees_is_not_shipped(
    folders: Folders, copied: Path, reuse_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "TOP1_BOUND", 1.01)
    assert refused(folders.target, folders.drafter, copied).endswith("(bound 101%); try --quant none")


def test_bundle_that_does_not_open_is_one_line(
    folders: Folders,
    copied: Path,
    reuse_engine: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command, too, reports what the reader says of a bundle that was just written."""
    monkeypatch.setattr(room, "open_bundle", lambda folder: open_bundle(folder / "nowhere"))
    command = ["bundle", "--target", str(folders.target), "--drafter", str(folders.drafter), "--output-dir"]
    assert main([*command, str(copied), "--quant", "none"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert list(copied.parent.iterdir()) == [copied]


def test_failure_late_in_writing_leaves_nothing(
    folders: Folders, copied: Path, reuse_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "_report", broken)
    before = snapshot(copied)
    for output in (copied.parent / "new", copied):
        with pytest.raises(KeyboardInterrupt):
            write_bundle(str(folders.target), folders.drafter, output, "none")
    assert list(copied.parent.iterdir()) == [copied] and snapshot(copied) == before


def test_existing_bundle_is_replaced_whole(folders: Folders, copied: Path, reuse_engine: None) -> None:
    (copied / "old file").write_text("old")
    write_bundle(str(folders.target), folders.drafter, copied, "none")
    assert not (copied / "old file").exists()
    open_bundle(copied)
    assert list(copied.parent.iterdir()) == [copied]


def test_empty_output_folder_is_used(folders: Folders, tmp_path: Path, reuse_engine: None) -> None:
    (tmp_path / "bundle").mkdir()
    write_bundle(str(folders.target), folders.drafter, tmp_path / "bundle", "none")
    open_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_output_that_is_no_bundle_is_untouched(folders: Folders, tmp_path: Path, kind: str) -> None:
    output = tmp_path / "output"
    holiday = output / "holiday.jpg" if kind == "folder" else output
    holiday.parent.mkdir(exist_ok=True)
    holiday.write_bytes(b"picture")
    with pytest.raises(BundleError, match=r"exists and is no bundle; choose an empty or new --output-dir$"):
        write_bundle(str(folders.target), folders.drafter, output)
    assert holiday.read_bytes() == b"picture"


# refusals of the reader


def open_error(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / MANIFEST
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


FILES = [ENGINE_FILE, DRAFT_IDS_FILE, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", FILES)
def test_truncated_file(copied: Path, name: str) -> None:
    data = (copied / name).read_bytes()
    (copied / name).write_bytes(data[:-1])
    assert open_error(copied) == f"{copied / name} has {len(data) - 1} bytes instead of {len(data)}; copy it again"


@pytest.mark.parametrize("name", FILES)
def test_changed_byte(copied: Path, name: str) -> None:
    data = bytearray((copied / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copied / name).write_bytes(data)
    assert open_error(copied) == f"{copied / name} differs from its sha256 in the manifest; copy it again"


@pytest.mark.parametrize("name", FILES)
def test_missing_file(copied: Path, name: str) -> None:
    (copied / name).unlink()
    assert open_error(copied) == f"{copied / name} is missing; copy the whole folder or export again"


@pytest.mark.parametrize("name", FILES)
def test_file_that_the_manifest_does_not_list(copied: Path, name: str) -> None:
    edit_manifest(copied, lambda m: m["files"].pop(name))
    assert open_error(copied) == f"{copied}/{MANIFEST} lists no {name}; export the bundle again"


def test_folder_without_a_manifest(copied: Path) -> None:
    (copied / MANIFEST).unlink()
    assert open_error(copied).endswith("write a bundle with: python -m export bundle")


@pytest.mark.parametrize("version", [2, 0, None, "1"])
def test_other_format_version(copied: Path, version: object) -> None:
    edit_manifest(copied, lambda m: m.update(format_version=version))
    assert open_error(copied).endswith(f"format {version}, this runtime reads 1; export again or update")


@pytest.mark.parametrize("name", ["../outside", "sub/file", "/etc/hostname", "."])
def test_file_names_that_lead_elsewhere(copied: Path, name: str) -> None:
    (copied.parent / "outside").write_bytes(b"secret")
    entry = {"sha256": hashlib.sha256(b"secret").hexdigest(), "bytes": 6}
    edit_manifest(copied, lambda m: m["files"].update({name: entry}))
    assert open_error(copied) == f"{copied}/{MANIFEST} names {name!r}, which is not a plain file name"


@pytest.mark.parametrize("name", ["", ".."])
def test_folders_as_file_names(copied: Path, name: str) -> None:
    edit_manifest(copied, lambda m: m["files"].update({name: {"sha256": "", "bytes": 0}}))
    assert " is missing; " in open_error(copied)


@pytest.mark.parametrize("field", ["draft_ids_file", "engine"])
def test_named_files_that_lead_elsewhere(copied: Path, field: str) -> None:
    outside = copied.parent / "outside"
    outside.write_bytes((copied / DRAFT_IDS_FILE).read_bytes())
    entry = {"sha256": hashlib.sha256(outside.read_bytes()).hexdigest(), "bytes": outside.stat().st_size}

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["../outside"] = entry
        if field == "engine":
            manifest["engines"]["onnx"]["file"] = "../outside"
        else:
            manifest[field] = "../outside"

    edit_manifest(copied, change)
    assert "'../outside', which is not a plain file name" in open_error(copied)


@pytest.mark.parametrize(
    "change",
    [
        {"eos_ids": []}, {"vocab_size": 0}, {"engines": {}}, {"hidden_size": "wide"}, {"files": None},
        {"eos_ids": 2}, {"max_context": -1},
    ],
    ids=str,
)  # fmt: skip
def test_manifest_out_of_bounds(copied: Path, change: dict[str, Any]) -> None:
    edit_manifest(copied, lambda m: m.update(change))
    assert "is broken: " in open_error(copied) and next(iter(change)) in open_error(copied)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_manifest_that_is_none(copied: Path, text: str) -> None:
    (copied / MANIFEST).write_text(text)
    assert MANIFEST in open_error(copied)


def test_draft_ids_outside_the_vocabulary(copied: Path) -> None:
    edit_manifest(copied, lambda m: m.update(vocab_size=63))
    assert open_error(copied).endswith("does not fit the manifest; export the bundle again")


def test_engine_that_does_not_load(exact: Path, tmp_path: Path) -> None:
    bundle = open_bundle(exact)
    (tmp_path / ENGINE_FILE).write_bytes(b"no model")
    elsewhere = Bundle(tmp_path, bundle.manifest, bundle.tokenizer, bundle.draft_ids, "", {})
    with pytest.raises(BundleError, match=r"drafter\.onnx does not load"):
        OnnxEngine(elsewhere)


def test_runtime_version_is_reported(exact: Path) -> None:
    versions = json.loads((exact / "report.json").read_text())["versions"]
    assert versions["onnxruntime"] == onnxruntime.__version__
