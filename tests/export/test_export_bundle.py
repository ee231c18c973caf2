"""Writing a bundle: it is complete, and what lies in its place is replaced whole or left alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
import torch
from safetensors.torch import load_file

from export.bundle import bundle as module
from export.bundle import to_onnx
from export.bundle.bundle import write_bundle
from export.bundle.facts import facts
from outrider_core.drafting.bundle import MANIFEST, SERVER_HALF_FILE, BundleError, open_bundle
from outrider_core.drafting.engines import open_engine
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.moa import SERVER_PREFIXES, DeviceHalf, server_half
from outrider_core.models.target import load_target
from outrider_core.targets.source import TargetSource
from tests.export.conftest import (
    ENGINE_FILE,
    Bundles,
    Folders,
    Reused,
    correlation,
    edit_manifest,
    folders_of,
    no_call,
    open_error,
    tree_inputs,
)
from tests.tiny import EOS

ROOT = Path(module.__file__).parents[1]


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


@pytest.mark.slow
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
    assert engine["lowering"]["opset"] == 21 and engine["lowering"]["operators"]["MatMulNBits"] == 9
    assert report["files"][ENGINE_FILE] == engine["bytes"] == (folder / ENGINE_FILE).stat().st_size
    assert report["versions"] == open_bundle(folder).manifest.versions
    text = (folder / "report.md").read_text()
    assert "| flips at near ties |" in text and "MatMulNBits 9" in text


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
    assert open_error(moved) == f"{moved}/{MANIFEST} does not list {data}; export the bundle again"


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


# what lies in its place


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
