"""Writing a bundle: it is complete, an interrupted export goes on, and failure leaves nothing behind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
import torch
from safetensors.torch import load_file

from edge_runtime.runtime import EdgeRuntime
from export.__main__ import main
from export.bundle import bundle as module
from export.bundle import to_executorch, to_onnx
from export.bundle.bundle import DRAFT_IDS_FILE, NULL_ROW_FILE, write_bundle
from export.bundle.check import facts
from export.options import OptionsError
from outrider_core.drafting.bundle import FORMAT_VERSION, MANIFEST, SERVER_HALF_FILE, BundleError, open_bundle
from outrider_core.drafting.engines import open_engine
from outrider_core.drafting.engines.onnx import OnnxEngine
from outrider_core.models.drafter_files import load_drafter, save_drafter
from outrider_core.models.moa import SERVER_PREFIXES, DeviceHalf, server_half
from outrider_core.models.moa_config import DrafterError
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetError, TargetSource
from tests.export.conftest import Bundles, Folders, Reused, correlation, edit_manifest, snapshot, tree_inputs
from tests.tiny import EOS, TEMPERATURE, save_tiny_drafter, save_tiny_target, tiny_model

ROOT = Path(module.__file__).parents[1]
ENGINE_FILE = "drafter.onnx"


@pytest.fixture
def exact(bundles: Bundles) -> Path:
    """A float32 bundle, not to be changed."""
    return bundles()


@pytest.fixture
def copied(exact: Path, tmp_path: Path) -> Path:
    """A bundle that a test may break."""
    return Path(shutil.copytree(exact, tmp_path / "copied"))


@pytest.fixture
def two_engines(folders: Folders, reused: Reused, tmp_path: Path) -> Path:
    output = tmp_path / "deep" / "two"
    write_bundle(folders.options(output, "fp32", "onnx", "executorch"))
    return output


# what is written


def test_opened_bundle_describes_the_drafter(exact: Path, folders: Folders) -> None:
    bundle, (config, tensors, drafter_hash) = open_bundle(exact), load_drafter(folders.drafter)
    manifest = bundle.manifest
    assert (manifest.target_hash, manifest.drafter_hash) == (folders.target_hash, drafter_hash)
    assert (manifest.target, manifest.eos_ids, manifest.max_context) == ("target", [EOS], config.max_context)
    assert manifest.draft_vocab_size == 64 < manifest.vocab_size == 199
    assert (manifest.hidden_size, manifest.head_dim) == (config.hidden_size, config.head_dim) == (32, 8)
    assert (manifest.sa_kv_heads, manifest.ca_kv_heads) == (config.sa_kv_heads, config.ca_kv_heads) == (2, 2)
    assert bundle.draft_ids.tolist() == tensors["draft_ids"].tolist()
    assert bundle.null_row is not None and np.array_equal(bundle.null_row, tensors["null_row"].numpy())
    assert tuple(bundle.row_shape) == (config.ca_kv_heads, config.head_dim)
    assert manifest.tokenizer_hash == hashlib.sha256((exact / "tokenizer.json").read_bytes()).hexdigest()
    assert manifest.versions["onnxruntime"] == onnxruntime.__version__


@pytest.mark.parametrize(("quant", "embedding_bits"), [("fp32", 32), ("fp16", 16), ("int8", 8), ("int4", 8)])
def test_manifest_describes_the_engine(bundles: Bundles, half: DeviceHalf, quant: str, embedding_bits: int) -> None:
    entry = open_bundle(bundles(quant)).manifest.engines["onnx"]
    assert (entry.file, entry.quant, entry.embedding_bits, entry.max_width) == (ENGINE_FILE, quant, embedding_bits, 64)
    assert entry.data is None and not (bundles(quant) / f"{ENGINE_FILE}.data").exists()
    if embedding_bits >= 16:  # the others are looser in these tests
        assert (entry.bounds.top1_agreement, entry.bounds.top4_agreement) == module.AGREEMENT[embedding_bits]
    assert entry.bounds.acceptance_ratio == 0.97
    # every linear once and the LM head, each with a scale for 32 (4 bits) or 64 (8 bits) weights
    cost = {"fp32": 4, "fp16": 2, "int8": 1 + 4 / 64, "int4": 0.5 + 4 / 32}
    head, norms = half.head.weight.numel(), 4 * half.config.hidden_size
    linears = sum(x.weight.numel() for x in half.modules() if isinstance(x, torch.nn.Linear)) - head
    wanted = linears * cost[quant] + head * cost["int8" if quant == "int4" else quant]
    assert wanted <= entry.step_bytes <= wanted + 4 * norms


def test_manifest_lists_every_file_an_app_ships_with_its_hash(exact: Path) -> None:
    listed = json.loads((exact / MANIFEST).read_text())["files"]
    written = {path.name for path in exact.iterdir()} - {MANIFEST, SERVER_HALF_FILE, "report.json", "report.md"}
    assert set(listed) == written
    for name, entry in listed.items():
        data = (exact / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_onnx_file_carries_what_a_runner_needs(exact: Path) -> None:
    manifest = open_bundle(exact).manifest
    properties = {x.key: json.loads(x.value) for x in onnx.load(exact / ENGINE_FILE).metadata_props}
    assert properties == facts(manifest)
    assert properties["get_eos_ids"] == [EOS] and properties["get_max_seq_len"] == 64
    assert properties["get_vocab_size"] == 199 and properties["get_tokenizer_hash"] == manifest.tokenizer_hash


def test_engine_file_names_no_folder_of_this_machine(bundles: Bundles) -> None:
    for quant in ("fp32", "int8"):
        assert str(ROOT).encode() not in (bundles(quant) / ENGINE_FILE).read_bytes()


def test_bundle_renders_the_chat_as_the_target_does(exact: Path, folders: Folders) -> None:
    messages = [{"role": "user", "content": "w9 w10 w77"}, {"role": "assistant", "content": "w5"}]
    tokenizer = load_target(TargetSource.resolve(str(folders.target))).tokenizer
    expected = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    assert open_bundle(exact).render_chat(messages) == expected == [1, 9, 10, 77, EOS, 5, EOS]


def test_encoder_file_is_the_server_half(exact: Path, folders: Folders) -> None:
    config, tensors, _ = load_drafter(folders.drafter)
    stored = load_file(exact / SERVER_HALF_FILE)
    assert set(stored) == {name for name in tensors if name.startswith(SERVER_PREFIXES)}
    kv = torch.randn(3, len(config.target_layers), config.kv_width, generator=torch.Generator().manual_seed(0))
    rows = server_half(config, stored)(kv, torch.arange(3))
    torch.testing.assert_close(rows, server_half(config, tensors)(kv, torch.arange(3)), rtol=0, atol=0)


def test_two_engines_in_one_bundle(two_engines: Path, exact: Path) -> None:
    bundle = open_bundle(two_engines)
    assert {name: entry.file for name, entry in bundle.manifest.engines.items()} == {
        "onnx": "drafter.onnx", "executorch": "drafter.pte"
    }  # fmt: skip
    assert {"drafter.onnx", "drafter.pte"} <= bundle.manifest.files.keys()
    report = json.loads((two_engines / "report.json").read_text())
    for name, engine in report["engines"].items():
        assert engine["bytes"] == bundle.path(bundle.manifest.engines[name].file).stat().st_size
        assert (engine["parity"]["top1_agreement"], engine["parity"]["flips"]) == (1.0, 0)
        assert engine["parity"]["max_abs_logit_error"] < 1e-3
    text = (two_engines / "report.md").read_text()
    assert "## onnx: fp32 linears" in text and "## executorch: fp32 linears" in text
    assert list(two_engines.parent.iterdir()) == [two_engines]


def test_report_is_complete(bundles: Bundles) -> None:
    folder = bundles("int8")
    report = json.loads((folder / "report.json").read_text())
    engine = report["engines"]["onnx"]
    assert (engine["quant"], engine["embedding_bits"]) == ("int8", 8)
    assert report["compared_on"] == "the target's own answers"
    assert engine["parity"]["steps"] > 500 and 0.5 < engine["parity"]["top1_agreement"] < 1
    assert engine["lowering"]["opset"] == 20 and engine["lowering"]["operators"]["MatMulNBits"] == 13
    assert report["files"][ENGINE_FILE] == engine["bytes"] == (folder / ENGINE_FILE).stat().st_size
    assert report["versions"] == open_bundle(folder).manifest.versions
    text = (folder / "report.md").read_text()
    assert "| flips at near ties |" in text and "MatMulNBits 13" in text


def test_returned_report_is_the_written_one(folders: Folders, reused: Reused, tmp_path: Path) -> None:
    report = write_bundle(folders.options(tmp_path / "bundle"))
    assert report == json.loads((tmp_path / "bundle" / "report.json").read_text())


@pytest.mark.parametrize("quant", ["fp32", "int8"])
def test_nothing_is_left_beside_the_bundle(bundles: Bundles, quant: str) -> None:
    output = bundles(quant)
    assert list(output.parent.iterdir()) == [output]
    assert all(path.is_file() for path in output.iterdir())
    assert output.stat().st_mode & 0o777 == 0o755


def test_large_weights_lie_in_a_file_of_their_own(
    folders: Folders, half: DeviceHalf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_onnx, "DATA_FROM", 1000)
    output, data = tmp_path / "large" / "bundle", f"{ENGINE_FILE}.data"
    monkeypatch.setitem(module.AGREEMENT, 8, (0.5, 0.8))
    report = write_bundle(folders.options(output, "int8"))
    bundle = open_bundle(output)
    assert bundle.manifest.engines["onnx"].data == data and data in bundle.manifest.files
    sizes = {path.name: path.stat().st_size for path in output.glob("drafter*")}
    assert sizes.keys() == {ENGINE_FILE, data} and sizes[data] > 30_000
    assert report["engines"]["onnx"]["bytes"] == sum(sizes.values())
    assert report["engines"]["onnx"]["accuracy_levels"].keys() == {"4", "1"}
    assert list(output.parent.iterdir()) == [output]
    assert {path.name for path in output.iterdir()} == set(report["files"]) | {"report.json", "report.md"}
    moved = output.rename(tmp_path / "moved")
    engine = open_engine(open_bundle(moved), "onnx", threads=1)
    assert correlation(engine, half, [tree_inputs(half.config, 5, 7, 3)]) > 0.9
    edit_manifest(moved, lambda m: m["files"].pop(data))
    assert open_error(moved) == f"{moved}/{MANIFEST} lists no {data}; export the bundle again"


@pytest.mark.slow
def test_shorter_context(folders: Folders, tmp_path: Path) -> None:
    write_bundle(folders.options(tmp_path / "bundle", max_context=100))
    assert open_bundle(tmp_path / "bundle").manifest.max_context == 100
    model = onnx.load(tmp_path / "bundle" / ENGINE_FILE)
    assert {p.key: p.value for p in model.metadata_props}["get_max_context_len"] == "100"


@pytest.mark.parametrize("max_context", [1, 12, 13, 64])
def test_very_short_context(
    folders: Folders, reused: Reused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_context: int
) -> None:
    """Too short for the answers that bundles are compared on: the prompts do, or it is refused as what it is."""
    monkeypatch.setattr(module, "check_metadata", lambda *_: None)
    try:
        report = write_bundle(folders.options(tmp_path / "bundle", max_context=max_context))
    except BundleError as error:
        assert "--max-context" in str(error) and not list(tmp_path.iterdir())
    else:
        assert report["engines"]["onnx"]["parity"]["steps"] >= 6


def test_dry_run_shows_sizes_and_writes_nothing(
    folders: Folders, reused: Reused, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = folders.options(tmp_path / "deep" / "bundle", "int4", "onnx", "executorch")
    assert write_bundle(replace(options, dry_run=True)) == {}
    assert not list(tmp_path.iterdir()) and not reused.lowered
    shown = capsys.readouterr().err
    for text in ("drafter.onnx", "drafter.pte", "int4 linears, 8-bit", "199 tokens", "64", "256", "GB", "dry run"):
        assert text in shown


def test_tight_memory_leaves_the_target_unloaded(
    folders: Folders, reused: Reused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_500_000_000))
    monkeypatch.setattr("outrider_core.models.target.TargetFiles.load", no_call)
    report = write_bundle(folders.options(tmp_path / "bundle"))
    assert report["compared_on"].startswith("random feature rows")
    assert report["engines"]["onnx"]["parity"]["flips"] == 0


def no_call(*_: object, **__: object) -> None:
    raise AssertionError("this must not be called")


# interrupted exports


def folders_of(output: Path) -> set[str]:
    return {path.name for path in output.parent.iterdir()}


@pytest.fixture
def interrupted(folders: Folders, reused: Reused, copied: Path) -> Path:
    """A bundle that was about to be replaced when Ctrl-C came, behind the first of two engines."""
    reused.wrong["executorch"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        write_bundle(folders.options(copied, "fp32", "onnx", "executorch"))
    return copied


def test_interrupt_keeps_finished_engines_aside(interrupted: Path, exact: Path) -> None:
    assert snapshot(interrupted) == snapshot(exact)
    assert folders_of(interrupted) == {"copied", ".copied.partial"}
    kept = interrupted.parent / ".copied.partial" / ENGINE_FILE
    assert kept.read_bytes() == (exact / ENGINE_FILE).read_bytes()


def test_the_same_command_goes_on(
    interrupted: Path, folders: Folders, reused: Reused, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bundle(folders.options(interrupted, "fp32", "onnx", "executorch"))
    assert reused.lowered == ["onnx", "executorch", "executorch"]
    assert "going on with the interrupted export" in capsys.readouterr().err
    assert open_bundle(interrupted).manifest.engines.keys() == {"onnx", "executorch"}
    report = json.loads((interrupted / "report.json").read_text())
    assert report["engines"]["onnx"]["lowering"]["opset"] == 20
    assert folders_of(interrupted) == {"copied"}


OTHERS = [{"quant": "int8"}, {"embedding_bits": 8}, {"max_context": 200}, {"drafter": "other"}, {"target": "other"}]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_another_export_starts_afresh(
    interrupted: Path, folders: Folders, reused: Reused, tmp_path: Path, change: dict[str, Any]
) -> None:
    if "other" in change.values():
        model = tiny_model(seed=1, dtype=torch.float32)
        target_hash = save_tiny_target(tmp_path / "target", model)
        save_tiny_drafter(tmp_path / "drafter", model, target_hash)
        change = {"target": TargetSource.resolve(str(tmp_path / "target")), "drafter": tmp_path / "drafter"}
    reused.wrong["executorch"] = KeyboardInterrupt()
    options = folders.options(interrupted, "fp32", "onnx", "executorch")
    with pytest.raises(KeyboardInterrupt):
        write_bundle(replace(options, **change))
    assert reused.lowered == ["onnx", "executorch"] * 2


def test_another_version_of_an_exporter_starts_afresh(
    interrupted: Path, folders: Folders, reused: Reused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_versions", lambda: {"torch": "0.1"})
    reused.wrong["executorch"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        write_bundle(folders.options(interrupted, "fp32", "onnx", "executorch"))
    assert reused.lowered == ["onnx", "executorch"] * 2


def test_engine_that_is_not_wanted_any_more_is_not_shipped(interrupted: Path, folders: Folders, reused: Reused) -> None:
    write_bundle(folders.options(interrupted, "fp32", "executorch"))
    bundle = open_bundle(interrupted)
    assert bundle.manifest.engines.keys() == {"executorch"}
    assert ENGINE_FILE not in bundle.manifest.files and not (interrupted / ENGINE_FILE).exists()


def test_files_of_a_killed_export_are_not_shipped(interrupted: Path, folders: Folders, reused: Reused) -> None:
    for name in (".level1-drafter.onnx", "drafter.pte.new", "report.json.new"):
        (interrupted.parent / ".copied.partial" / name).write_bytes(b"half of it")
    write_bundle(folders.options(interrupted, "fp32", "onnx", "executorch"))
    listed = open_bundle(interrupted).manifest.files.keys() | {MANIFEST, SERVER_HALF_FILE, "report.json", "report.md"}
    assert {path.name for path in interrupted.iterdir()} == listed
    assert not any("level1" in name or "new" in name for name in listed)


@pytest.mark.parametrize("step", ["_report", "passages_for", "save_file"])
def test_interrupt_behind_lowering(
    folders: Folders, reused: Reused, copied: Path, exact: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_bundle(folders.options(copied))
    assert snapshot(copied) == snapshot(exact)
    write_bundle(folders.options(copied))
    assert reused.lowered == ["onnx"]
    open_bundle(copied)
    assert folders_of(copied) == {"copied"}


def test_interrupt_while_the_old_bundle_is_removed(
    folders: Folders, reused: Reused, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def interrupt(path: Path, *arguments: Any, **options: Any) -> None:
        if not (path / MANIFEST).is_file():
            return remove(path, *arguments, **options)
        (path / DRAFT_IDS_FILE).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_bundle(folders.options(copied))
    open_bundle(copied)
    write_bundle(folders.options(copied))
    assert folders_of(copied) == {"copied"}


def test_half_an_engine_is_lowered_again(folders: Folders, reused: Reused, tmp_path: Path, exact: Path) -> None:
    reused.wrong["onnx"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        write_bundle(folders.options(tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists()
    write_bundle(folders.options(tmp_path / "bundle"))
    assert reused.lowered == ["onnx", "onnx"]
    assert snapshot(tmp_path / "bundle")[ENGINE_FILE] == (exact / ENGINE_FILE).read_bytes()


def test_command_says_how_to_go_on(folders: Folders, reused: Reused, tmp_path: Path, capsys: Any) -> None:
    reused.wrong["onnx"] = KeyboardInterrupt()
    assert main(command(folders, tmp_path / "bundle")) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; run the same command again to go on from here"


def test_an_error_leaves_nothing_to_go_on_with(interrupted: Path, folders: Folders, reused: Reused) -> None:
    reused.wrong["executorch"] = RuntimeError("no")
    with pytest.raises(BundleError):
        write_bundle(folders.options(interrupted, "fp32", "onnx", "executorch"))
    assert folders_of(interrupted) == {"copied"}


def test_two_exports_at_once(folders: Folders, reused: Reused, copied: Path, exact: Path) -> None:
    lock = copied.parent / ".copied.partial.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BundleError, match=r"^another export is writing .*; wait for it or stop it$"):
            write_bundle(folders.options(copied))
    assert snapshot(copied) == snapshot(exact) and not reused.lowered
    write_bundle(folders.options(copied))  # the lock of a process that is gone counts no more
    assert folders_of(copied) == {"copied"}


# refusals of the writer


def command(folders: Folders, output: Path, *more: str) -> list[str]:
    return ["bundle", "--target", str(folders.target), "--drafter", str(folders.drafter), "--output-dir", str(output),
            "--quant", "fp32", *more]  # fmt: skip


@pytest.fixture
def refused(folders: Folders, copied: Path, reused: Reused) -> Callable[..., str]:
    """Call it with options: the one line with which writing fails, for a new folder and over a bundle."""

    def refused(target: Path | None = None, **options: Any) -> str:
        before, beside, lines = snapshot(copied), folders_of(copied), []
        for output in (copied.parent / "new", copied):
            with pytest.raises((OptionsError, BundleError, TargetError, DrafterError)) as caught:
                source = {} if target is None else {"target": TargetSource.resolve(str(target))}
                write_bundle(replace(folders.options(output), **source, **options))
            lines.append(str(caught.value))
            assert folders_of(copied) == beside
        assert snapshot(copied) == before
        assert all(line and "\n" not in line for line in lines)
        return lines[-1]

    return refused


Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"format": ("tflite",)}, "--format tflite is unknown (known: onnx, executorch)"),
        ({"format": ()}, "--format must name each engine once, such as onnx,executorch"),
        ({"format": ("onnx", "onnx")}, "--format must name each engine once, such as onnx,executorch"),
        ({"quant": "int2"}, "--quant 'int2' is unknown; give one of fp32, fp16, int8, int4, 8da8w, 8da4w, none"),
        ({"embedding_bits": 5}, "--embedding-bits 5 is unknown; give one of 4, 8, 16, 32"),
        ({"backend": "vulkan"}, "--backend 'vulkan' is unknown; give one of xnnpack, coreml, qualcomm"),
        ({"max_context": 0}, "--max-context 0: the drafter was made for 1..256 tokens"),
        ({"max_context": 257}, "--max-context 257: the drafter was made for 1..256 tokens"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_options_that_cannot_be(refused: Refused, reused: Reused, options: dict[str, Any], line: str) -> None:
    assert refused(**options) == line
    assert not reused.lowered


@pytest.mark.parametrize(
    ("options", "system", "line"),
    [
        ({"quant": "fp16"}, "Linux", "--format executorch has no fp16; choose fp32, int8, int4"),
        ({"backend": "coreml"}, "Linux", "run the same command on macOS with Xcode"),
        ({"backend": "qualcomm"}, "Linux", "install it and set QNN_SDK_ROOT, or use --backend xnnpack"),
        ({"backend": "coreml", "quant": "int8"}, "Darwin", "chooses its own precision; use --quant fp32"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_backends_that_cannot_be(
    refused: Refused, reused: Reused, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], system: str, line: str
) -> None:
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    monkeypatch.setattr(to_executorch.platform, "system", lambda: system)
    assert line in refused(format=("executorch",), **options)
    assert not reused.lowered


def test_exporter_of_executorch_not_installed(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_executorch.importlib.util, "find_spec", lambda name: None)
    assert refused(format=("executorch",)).endswith("run: pip install 'outrider[executorch]'")


def test_too_little_disk(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40_000_000))
    line = refused()
    assert "has 0.0 GB free" in line and line.endswith("free some or choose another --output-dir")


def test_too_little_memory(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=900_000_000))
    line = refused()
    assert "GB of memory are needed, 0.9 GB are free" in line and "close other programs" in line


def own_target(folders: Folders, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of target and drafter that a test may change."""
    return (
        Path(shutil.copytree(folders.target, tmp_path / "target")),
        Path(shutil.copytree(folders.drafter, tmp_path / "drafter")),
    )


def test_drafter_of_another_target(folders: Folders, refused: Refused, tmp_path: Path) -> None:
    other = save_tiny_target(tmp_path / "target", tiny_model(seed=1, dtype=torch.float32))
    line = refused(target=tmp_path / "target")
    assert f"was trained on target {folders.target_hash}, but" in line and other in line


def test_target_without_chat_template(folders: Folders, refused: Refused, tmp_path: Path) -> None:
    target, drafter = own_target(folders, tmp_path)
    (target / "chat_template.jinja").unlink()
    line = refused(target=target, drafter=drafter)
    assert line.endswith("has no chat template; add chat_template.jinja to its folder")


def test_target_without_eos(refused: Refused, tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    target_hash = save_tiny_target(tmp_path / "target", model)
    save_tiny_drafter(tmp_path / "drafter", model, target_hash)
    line = refused(target=tmp_path / "target", drafter=tmp_path / "drafter")
    assert line.endswith("names no eos_token_id, so no answer would ever end; add it to config.json")


def test_drafter_of_other_shapes(folders: Folders, refused: Refused, tmp_path: Path) -> None:
    save_tiny_drafter(tmp_path / "drafter", tiny_model(hidden=16, dtype=torch.float32), folders.target_hash)
    assert "the target's embedding is (199, 32)" in refused(drafter=tmp_path / "drafter")


def test_drafter_of_no_numbers(folders: Folders, refused: Refused, tmp_path: Path) -> None:
    config, tensors, _ = load_drafter(folders.drafter)
    tensors["self_attention.mlp.up_proj.weight"][3, 4] = torch.inf
    save_drafter(tmp_path / "drafter", config, tensors, {})
    line = refused(drafter=tmp_path / "drafter")
    assert line.startswith("self_attention.mlp.up_proj.weight holds infinite") and "train or import again" in line


def test_missing_drafter(refused: Refused, tmp_path: Path) -> None:
    assert refused(drafter=tmp_path / "nowhere").endswith("so this is not a drafter folder")


def test_missing_target(refused: Refused, tmp_path: Path) -> None:
    assert "no such folder" in refused(target=tmp_path / "nowhere")


def test_tokenizer_without_a_fast_file(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", lambda *_, **__: None)
    assert refused().endswith("its tokenizer writes no tokenizer.json; a fast tokenizer is needed")


@pytest.mark.parametrize("engine", ["onnx", "executorch"])
def test_operator_that_cannot_be_lowered(
    folders: Folders, reused: Reused, copied: Path, exact: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reused.wrong[engine] = torch.onnx.OnnxExporterError("No translation for\n\n  aten.fancy\nSee the <long> report\n")
    assert main(command(folders, copied, "--format", engine)) == 1
    name = {"onnx": "drafter.onnx", "executorch": "drafter.pte"}[engine]
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: lowering to {name} failed: OnnxExporterError: No translation for aten.fancy See the <long> report"
    )
    assert snapshot(copied) == snapshot(exact) and folders_of(copied) == {"copied"}


@pytest.mark.parametrize(("place", "name"), [(0, "top1"), (1, "top4")])
def test_engine_that_disagrees_is_not_shipped(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, place: int, name: str
) -> None:
    bounds = [0.0, 0.0]
    bounds[place] = 1.01
    monkeypatch.setitem(module.AGREEMENT, 32, tuple(bounds))
    assert refused() == (
        f"drafter.onnx: {name} agreement is 1.000, its bound is 1.01; nothing was written. Try --quant int8 or fp32, "
        "or more --embedding-bits"
    )


def test_engine_of_low_acceptance_is_not_shipped(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"prompts": 1, "max_new_tokens": 8, "eager": {"tau": 2.0, "rounds": 3},
               "engines": {"onnx": {"tau": 1.0, "ratio": 0.5, "rounds": 6}}}  # fmt: skip
    monkeypatch.setattr(module, "check_acceptance", lambda *_: figures)
    assert refused(check=True).startswith("drafter.onnx: acceptance ratio is 0.500, its bound is 0.97; nothing was")


def test_engine_with_other_metadata_is_not_shipped(refused: Refused) -> None:
    assert refused(max_context=100).endswith(
        "drafter.onnx says get_max_context_len is 256, the manifest 100; export the bundle again"
    )


def test_bundle_that_does_not_open_is_one_line(
    folders: Folders, copied: Path, reused: Reused, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, too, reports what the reader says of a bundle that was just written."""
    monkeypatch.setattr(module, "open_bundle", lambda folder: open_bundle(folder / "nowhere"))
    assert main(command(folders, copied)) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert list(copied.parent.iterdir()) == [copied]


def test_existing_bundle_is_replaced_whole(folders: Folders, copied: Path, reused: Reused) -> None:
    (copied / "old file").write_text("old")
    write_bundle(folders.options(copied))
    assert not (copied / "old file").exists()
    open_bundle(copied)
    assert list(copied.parent.iterdir()) == [copied]


def test_bundle_of_an_older_format_is_replaced(folders: Folders, copied: Path, reused: Reused) -> None:
    edit_manifest(copied, lambda m: m.update(format_version=1))
    write_bundle(folders.options(copied))
    open_bundle(copied)


def test_empty_output_folder_is_used(folders: Folders, tmp_path: Path, reused: Reused) -> None:
    (tmp_path / "bundle").mkdir()
    write_bundle(folders.options(tmp_path / "bundle"))
    open_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("output", [".", "../copied/", "sub/.."])
def test_output_as_a_relative_path(
    folders: Folders, copied: Path, reused: Reused, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    (copied / "sub").mkdir()
    (copied / "old file").write_text("old")
    monkeypatch.chdir(copied)
    write_bundle(folders.options(Path(output)))
    open_bundle(copied)
    assert not (copied / "old file").exists() and folders_of(copied) == {"copied"}


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_output_that_is_no_bundle_is_untouched(folders: Folders, tmp_path: Path, kind: str) -> None:
    output = tmp_path / "output"
    holiday = output / "holiday.jpg" if kind == "folder" else output
    holiday.parent.mkdir(exist_ok=True)
    holiday.write_bytes(b"picture")
    with pytest.raises(BundleError, match=r"exists and is not a bundle; choose an empty or new --output-dir$"):
        write_bundle(folders.options(output))
    assert holiday.read_bytes() == b"picture"


# refusals of the reader


def open_error(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


FILES = [
    ENGINE_FILE, DRAFT_IDS_FILE, NULL_ROW_FILE, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
]  # fmt: skip


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


@pytest.mark.parametrize("version", [1, 3, 0, None, "2"])
def test_other_format_version(copied: Path, version: object) -> None:
    edit_manifest(copied, lambda m: m.update(format_version=version))
    assert open_error(copied).endswith(f"format {version}, this runtime reads {FORMAT_VERSION}; export again or update")


@pytest.mark.parametrize("name", ["../outside", "sub/file", "/etc/hostname", ".", "", ".."])
def test_file_names_that_lead_elsewhere(copied: Path, name: str) -> None:
    (copied.parent / "outside").write_bytes(b"secret")
    entry = {"sha256": hashlib.sha256(b"secret").hexdigest(), "bytes": 6}
    edit_manifest(copied, lambda m: m["files"].update({name: entry}))
    assert open_error(copied) == f"{copied}/{MANIFEST} names {name!r}, which is not a plain file name"


@pytest.mark.parametrize("field", ["draft_ids_file", "null_row_file", "engine"])
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


def rewrite(folder: Path, name: str, data: bytes) -> None:
    """Put `data` into a file, and its hash into the manifest."""
    (folder / name).write_bytes(data)
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit_manifest(folder, lambda m: m["files"].update({name: entry}))


def test_the_confidence_temperature_reaches_the_device(copied: Path) -> None:
    manifest = json.loads((copied / MANIFEST).read_text())
    assert manifest["confidence_temperature"] == TEMPERATURE
    for given, wanted in ((TEMPERATURE, TEMPERATURE), (2, 2.0), (None, 1.0)):
        edit_manifest(copied, lambda m, given=given: m.update(confidence_temperature=given))
        if given is None:  # a bundle of before
            edit_manifest(copied, lambda m: m.pop("confidence_temperature"))
        drafter = EdgeRuntime(open_bundle(copied), None).drafter
        assert drafter._candidates.temperature(Sampling()) == wanted
        assert drafter._candidates.temperature(Sampling(temperature=0.3)) == 0.3


@pytest.mark.parametrize("given", [0, -1, 0.01, 1e9, "0.8", None, True])
def test_confidence_temperatures_that_are_none(copied: Path, given: object) -> None:
    edit_manifest(copied, lambda m: m.update(confidence_temperature=given))
    assert "confidence_temperature" in open_error(copied)


@pytest.mark.parametrize("name", [DRAFT_IDS_FILE, NULL_ROW_FILE])
@pytest.mark.parametrize("cut", ["empty", "short", "odd", "long"])
def test_tables_of_wrong_size(copied: Path, name: str, cut: str) -> None:
    data = (copied / name).read_bytes()
    rewrite(copied, name, {"empty": b"", "short": data[:-4], "odd": data[:-1], "long": data + data[-4:]}[cut])
    assert open_error(copied) == f"{copied / name} does not fit the manifest; export the bundle again"


def test_draft_ids_outside_the_vocabulary(copied: Path) -> None:
    edit_manifest(copied, lambda m: m.update(vocab_size=63))
    assert open_error(copied).endswith("does not fit the manifest; export the bundle again")


def test_bundle_without_a_null_row(copied: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["null_row_file"] = manifest["files"].pop(NULL_ROW_FILE) and None

    edit_manifest(copied, change)
    (copied / NULL_ROW_FILE).unlink()
    assert open_bundle(copied).null_row is None


def test_engine_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / ENGINE_FILE).write_bytes(b"no model")
    with pytest.raises(BundleError, match=r"drafter\.onnx does not load"):
        OnnxEngine(tmp_path / ENGINE_FILE)
