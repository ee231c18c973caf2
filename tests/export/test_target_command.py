"""`export target` writes a whole target bundle with a report, or nothing."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from export.__main__ import main
from export.target import target as module
from export.target.target_options import TargetOptions
from export.target.target_plan import BASE_BYTES, LOADED, make_plan
from outrider_core.targets.bundle import DATA_FILE, MANIFEST_FILE, open_target_bundle
from outrider_core.targets.identity import model_identity
from outrider_core.targets.part import Part
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.source import TargetSource
from tests.export.conftest import ENVIRONMENT, ROOT
from tests.tiers import first
from tests.tiny import tiny_model, tiny_tokenizer
from tests.waiting import HANG

PROMPTS = ["what is this", "and that"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(hidden=64, tied=True, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def command(source: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    return [
        "target", str(source), "--output-dir", str(tmp_path / "out" / "bundle"), "--prompts", str(prompts),
        "--answer-tokens", "24",
    ]  # fmt: skip


def left(tmp_path: Path) -> list[str]:
    folder = tmp_path / "out"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("bits", first(1, [8, 4, 32]))
def test_a_bundle_with_its_report(command: list[str], source: Path, tmp_path: Path, bits: int) -> None:
    """In a process that has neither torch nor transformers."""
    without = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None"
    code = f"{without}; from export.__main__ import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, *command, "--bits", str(bits)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert left(tmp_path) == ["bundle"]
    bundle = open_target_bundle(tmp_path / "out" / "bundle")
    assert (bundle.bits, bundle.source_hash, bundle.name) == (bits, model_identity(source), source.name)
    assert bundle.eos_ids == (3,)
    report = json.loads((bundle.folder / "report.json").read_text())
    assert report["bits"] == bits and report["files"][DATA_FILE] == (bundle.folder / DATA_FILE).stat().st_size
    assert list(report["step_milliseconds"]) == ["1", "9", "17", "33"] and report["resident_megabytes"] > 0
    text = (bundle.folder / "report.md").read_text()
    if bits == 32:
        assert report["quality"] is None and "Other formats are compared with this one." in text
    else:
        quality = report["quality"]
        assert quality["prompts"] == 2 and 0 < quality["answer_tokens"] <= 48
        assert 0 < quality["kl_divergence"] < (0.2 if bits == 8 else 2.0)  # of a model whose weights are noise
        assert f"| top-1 agreement | {quality['top1_agreement']} |" in text


def test_float32_is_the_model(source: Path, command: list[str], tmp_path: Path) -> None:
    assert main([*command, "--bits", "32"]) == 0
    bundle = open_target_bundle(tmp_path / "out" / "bundle")
    runner = OnnxRunner.of(bundle, 64, 1)
    ids = list(range(5, 45))
    model = tiny_model(hidden=64, tied=True, dtype=torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    for end in (1, 7, 40):
        found = runner.forward([Part(0, 0, tuple(ids[:end]))])[0]
        assert abs(found - wanted[end - 1]).max() < 2e-5 * abs(wanted).max()


def test_an_interrupted_export_goes_on(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the copies and the answers that are there; another format begins anew."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_cost", interrupt)
        assert main(command) == 130
    assert "run the same command again" in capsys.readouterr().err
    aside = tmp_path / "out" / ".bundle.partial"
    assert [name for name in left(tmp_path) if not name.endswith(".lock")] == [".bundle.partial"]
    inode = (aside / "bundle" / DATA_FILE).stat().st_ino
    monkeypatch.setattr("outrider_core.targets.answers.write_answers", lambda *_: pytest.fail("answered again"))
    assert main(command) == 0
    assert (tmp_path / "out" / "bundle" / DATA_FILE).stat().st_ino == inode
    assert left(tmp_path) == ["bundle"]


def test_a_bundle_that_is_there_is_replaced_by_a_whole_one(command: list[str], tmp_path: Path) -> None:
    assert main([*command, "--bits", "32"]) == 0
    assert main([*command, "--no-compare"]) == 0
    bundle = open_target_bundle(tmp_path / "out" / "bundle")
    assert bundle.bits == 8 and json.loads((bundle.folder / "report.json").read_text())["quality"] is None
    assert left(tmp_path) == ["bundle"]


@pytest.mark.parametrize("bytes_a_file", [20_000, 60_000])
def test_a_full_disk_leaves_nothing(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], bytes_a_file: int
) -> None:
    """In the middle of the first matrix, or of a later one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_a_file, hard))
    try:
        assert main(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("cannot be written: File too large; free some space there, or choose another --output-dir")
    )
    assert left(tmp_path) == []


def test_what_cannot_work_is_one_line(
    command: list[str],
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def error_of(*arguments: str) -> str:
        assert main(list(arguments)) == 1
        return capsys.readouterr().err.splitlines()[-1]

    foreign = tmp_path / "gpt2"
    foreign.mkdir()
    (foreign / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    output = ["--output-dir", str(tmp_path / "out" / "bundle")]
    assert "model type 'gpt2' is not supported (supported: llama" in error_of("target", str(foreign), *output)
    (foreign / "config.json").write_text("{")
    assert f"the files in {foreign} do not load" in error_of("target", str(foreign), *output)
    (tmp_path / "broken.gguf").write_bytes(b"GGUFnothing")
    assert "not a GGUF file, or damaged" in error_of("target", str(tmp_path / "broken.gguf"), *output)
    assert error_of("target", str(tmp_path / "absent.gguf"), *output).endswith("absent.gguf: no such file")
    taken = ["--output-dir", str(foreign)]
    assert "is not a target bundle; choose an empty or new --output-dir" in error_of("target", str(source), *taken)
    monkeypatch.setattr("export.target.target_plan.BASE_BYTES", 10**15)
    assert "GB of memory are needed" in error_of(*command)
    monkeypatch.setattr("export.target.target_plan.bundle_bytes", lambda *_: 10**16)
    assert "GB free, 10000000.0 GB are needed; free some or choose another --output-dir" in error_of(*command)
    assert left(tmp_path) == []


def test_a_dry_run_writes_nothing(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*command, "--bits", "4", "--dry-run"]) == 0
    shown = capsys.readouterr().err
    assert "4-bit weights in blocks of 32" in shown and "GB" in shown and left(tmp_path) == []
    assert "about 0.0 processor minutes; to calibrate" in shown


def test_the_forecast_has_one_copy_in_memory_at_a_time(source: Path, tmp_path: Path) -> None:
    """The float32 copy that 4 bits are calibrated by is gone before they are loaded."""
    plans = {
        bits: make_plan(TargetOptions(target=TargetSource("tiny", source), output_dir=tmp_path / "out", bits=bits))
        for bits in (4, 32)
    }
    loaded = BASE_BYTES + int(LOADED[4] * plans[4].bundle_bytes)
    assert plans[4].memory_bytes == max(plans[32].memory_bytes, loaded)


def test_prompts_are_read_before_anything_is_lowered(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--prompts", str(tmp_path / "missing.jsonl"), "--dry-run"]) == 1
    told = capsys.readouterr().err
    assert "missing.jsonl" in told and "lowering" not in told and left(tmp_path) == []


def test_a_bundle_is_no_model(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--bits", "32"]) == 0
    made = tmp_path / "out" / "bundle"
    assert main(["target", str(made), "--output-dir", str(tmp_path / "other")]) == 1
    assert "is a target bundle already" in capsys.readouterr().err
    assert (made / MANIFEST_FILE).is_file()
