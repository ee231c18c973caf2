"""One probe process: the structure of its results, and that it loads no more than an app does."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from edge_runtime import probe
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from export.bundle.blocks import Profile
from export.bundle.to_onnx import write_onnx
from outrider_core import machine
from outrider_core.drafting.bundle import (
    FORMAT_VERSION,
    MANIFEST,
    Bounds,
    EngineEntry,
    FileEntry,
    Manifest,
    open_bundle,
)
from outrider_core.drafting.drafter import TreeShape
from outrider_core.drafting.engines import MASKED, Floats, Ints, open_engine
from outrider_core.models.moa import DeviceHalf, device_half
from outrider_core.models.moa_config import MoAConfig
from tests.tiny import EOS, arrays_of, tiny_drafter_config, tiny_model, tiny_tokenizer
from tests.waiting import HANG

STEP_BYTES = 54_321
MAX_WIDTH = 16


def tiny_half() -> tuple[MoAConfig, DeviceHalf]:
    model = tiny_model(dtype=torch.float32)
    config, tensors = tiny_drafter_config(model)
    return config, device_half(config, tensors, model)


@functools.cache
def onnx_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        config, half = tiny_half()
        write_onnx(config, arrays_of(half), Profile("int8", 8), Path(folder) / "drafter.onnx", {})
        return (Path(folder) / "drafter.onnx").read_bytes()


def tiny_bundle(folder: Path, pte: bytes | None = None, max_context: int | None = None) -> Path:
    """A bundle of a random drafter: ONNX, and ExecuTorch if its file is given."""
    config, half = tiny_half()
    folder.mkdir(parents=True)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template)
    half.draft_ids.numpy().astype("<u4").tofile(folder / "draft_ids.u32")
    if half.null_row is not None:
        half.null_row.detach().numpy().astype("<f4").tofile(folder / "null_row.f32")
    (folder / "drafter.onnx").write_bytes(onnx_file())
    bounds = Bounds(top1_agreement=0.5, top4_agreement=0.5, acceptance_ratio=0.5)
    common: dict[str, Any] = {"step_bytes": STEP_BYTES, "max_width": MAX_WIDTH, "bounds": bounds}
    engines = {"onnx": EngineEntry(file="drafter.onnx", quant="int8", embedding_bits=8, **common)}
    if pte is not None:
        (folder / "drafter.pte").write_bytes(pte)
        engines["executorch"] = EngineEntry(file="drafter.pte", quant="fp32", embedding_bits=32, **common)
    files = {
        path.name: FileEntry(hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)
        for path in sorted(folder.iterdir())
    }
    manifest = Manifest(
        format_version=FORMAT_VERSION, target="tiny", target_hash="tiny-target", drafter_hash="tiny-drafter",
        vocab_size=config.vocab_size, eos_ids=[EOS], max_context=max_context or config.max_context,
        hidden_size=config.hidden_size, sa_kv_heads=config.sa_kv_heads, ca_kv_heads=config.ca_kv_heads,
        head_dim=config.head_dim, draft_vocab_size=config.draft_vocab_size, draft_ids_file="draft_ids.u32",
        null_row_file=None if half.null_row is None else "null_row.f32",
        tokenizer_hash=files["tokenizer.json"].sha256, versions={}, engines=engines, files=files,
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("probe") / "bundle")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edge_runtime.probe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG)


def figures_of(*arguments: object) -> dict[str, Any]:
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    figures: dict[str, Any] = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    return figures


def check_memory_and_load(figures: dict[str, Any]) -> None:
    assert figures["others_cores"] is None or figures["others_cores"] >= 0
    assert figures["open_ms"] > 0 and figures["import_ms"] > 0 and figures["load_ms"] > 0
    assert 10 < figures["rss_mb"] <= figures["peak_rss_mb"] < 4000


# one process


def test_steps_of_every_width_and_context_are_timed(bundle: Path) -> None:
    figures = figures_of(bundle, "--threads", 2, "--widths", "4,1", "--contexts", "7,100", "--repeats", 3)
    check_memory_and_load(figures)
    assert figures["engine"] == "onnx" and figures["threads"] == 2
    assert [(step["context"], step["width"]) for step in figures["steps"]] == [(7, 1), (7, 4), (100, 1), (100, 4)]
    for step in figures["steps"]:
        assert 0 < step["min"] <= step["p50"] <= step["p95"]
    assert figures["bandwidth_gb_s"] > 0
    assert figures["torch_imported"] is False


def test_peak_memory_is_taken_before_the_bandwidth_buffer(bundle: Path) -> None:
    figures = figures_of(bundle, "--widths", 1, "--contexts", 1, "--repeats", 1)
    assert figures["peak_rss_mb"] - figures["rss_mb"] < machine.LEAST_BUFFER / 1e6


def test_drafting_measures_a_prompt_and_trees(bundle: Path) -> None:
    result = run(bundle, "--draft", 100, "--progress")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    check_memory_and_load(figures)
    draft = figures["draft"]
    assert draft["context"] == 100 and draft["trees"] == probe.TREES
    assert draft["prompt_ms"] > 0 and draft["ms_per_tree"] >= draft["tree_ms"]["min"] > 0
    assert draft["tree_ms"]["p50"] <= draft["tree_ms"]["p95"]
    assert 1 <= draft["nodes_per_tree"] <= TreeShape().nodes and 1 <= draft["steps_per_tree"] <= TreeShape().depth
    assert figures["torch_imported"] is False
    assert "steps" not in figures and "bandwidth_gb_s" not in figures
    notes = result.stderr.splitlines()
    assert notes == ["progress loaded", "progress prompt", *(f"progress tree {n + 1}" for n in range(probe.TREES))]


def test_process_holds_what_an_app_holds(bundle: Path) -> None:
    program = (
        "import json, sys; from edge_runtime import probe; code = probe.main(sys.argv[1:]); "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, str(bundle), "--draft", "8"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert result.returncode == 0, result.stderr
    loaded = set(json.loads(result.stderr))
    assert {"onnxruntime", "tokenizers", "websockets", "jinja2", "numpy"} <= loaded
    assert not {"torch", "transformers", "onnx", "rich", "executorch", "models", "export", "cloud"} & loaded


# errors are one line that says what to do


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--contexts", "16,257"], "--contexts: 257 is above this bundle's 256 tokens"),
        (["--widths", "17", "--contexts", "8"], "--widths: 17 is above the 16 tokens drafter.onnx takes"),
        (["--draft", "227"], "--draft 227 is more than this bundle has room for; at most 226"),
        (["--engine", "executorch"], "holds no executorch engine (it has: onnx)"),
    ],
)
def test_what_the_bundle_cannot_do_is_one_line(
    bundle: Path, options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fitting = [] if "--contexts" in options else ["--contexts", "8", "--widths", "1"]
    assert probe.main([str(bundle), *fitting, *options]) == 1
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and said in output.err and output.err.count("\n") == 1


def test_missing_folder_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert probe.main([str(tmp_path / "none")]) == 1
    assert "python -m export bundle" in capfd.readouterr().err


@pytest.mark.parametrize(
    "options", [["--widths", "0"], ["--contexts", "8,x"], ["--repeats", "-1"], ["--threads", "-1"]]
)
def test_bad_numbers_are_refused(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        probe.main(["somewhere", *options])
    assert ended.value.code == 2
    assert options[0] in capfd.readouterr().err


# the parts


def test_random_step_is_what_engines_take(bundle: Path) -> None:
    opened = open_bundle(bundle)
    manifest = opened.manifest
    inputs = probe.random_step(manifest, width=5, context=30)
    tokens, positions, wanted, mask, sa_keys, sa_values, row_keys, row_values = inputs
    assert tokens.shape == (5,) and tokens.min() >= 0 and tokens.max() < manifest.vocab_size
    assert positions.tolist() == [30, 31, 32, 33, 34] and wanted.tolist() == [0, 1, 2, 3, 4]
    assert mask.shape == (5, 35) and mask.dtype == np.float32
    seen = np.arange(35) <= 30 + np.arange(5)[:, None]
    np.testing.assert_array_equal(mask, np.where(seen, 0, MASKED))
    assert sa_keys.shape == sa_values.shape == (30, manifest.sa_kv_heads, manifest.head_dim)
    assert row_keys.shape == row_values.shape == (30, manifest.ca_kv_heads, manifest.head_dim)
    assert {x.dtype for x in (sa_keys, sa_values, row_keys, row_values)} == {np.dtype(np.float32)}
    logits, keys, values = open_engine(opened, "onnx", 1).step(*inputs)
    assert logits.shape == (5, manifest.draft_vocab_size) and keys.shape == values.shape == (5, *sa_keys.shape[1:])
    for first, second in zip(inputs, probe.random_step(manifest, 5, 30), strict=True):
        np.testing.assert_array_equal(first, second)


class Recorder:
    """An engine in front of a real one that keeps what each step saw: (tokens, past, feature rows)."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.seen = engine, list[tuple[int, int, int]]()

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        self.seen.append((len(tokens), len(sa_keys), len(row_keys)))
        step: tuple[Floats, Floats, Floats] = self.engine.step(
            tokens, positions, wanted, sa_mask, sa_keys, sa_values, row_keys, row_values
        )
        return step


def test_drafting_runs_the_context_it_claims(bundle: Path) -> None:
    opened = open_bundle(bundle)
    recorder = Recorder(open_engine(opened, "onnx", 1))
    context, null = 100, 1
    probe.measure_drafting(EdgeRuntime(opened, None, RuntimeOptions(engine=recorder)).drafter, opened, context)
    prompt = [seen for seen in recorder.seen if seen[1] < context - 1]
    assert sum(tokens for tokens, _, _ in prompt) == context, "one prompt pass and no second one"
    assert {rows for _, _, rows in prompt} == {context - 1 + null}
    rest = recorder.seen[len(prompt) :]
    assert all(past >= context - 1 for _, past, _ in rest)
    assert max(rows for _, _, rows in rest) == context - 1 + (probe.TREES - 1) + null


def test_longest_drafting_context_leaves_every_tree_its_depth() -> None:
    limit = probe.longest_drafting_context(256)
    last_prefix = limit + probe.TREES - 1
    assert last_prefix + TreeShape().depth <= 256
