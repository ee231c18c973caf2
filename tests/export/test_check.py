"""`python -m export check`: what it finds, what it says, and acceptance through a real verifier."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from export.__main__ import main
from export.bundle import check as module
from export.bundle.bundle import write_bundle
from export.bundle.facts import RANDOM_ROWS, TARGET_ANSWERS, broken_bounds, facts
from export.bundle.steps import Passage
from export.bundle.verifier_process import VerifierProcess
from outrider_core.drafting.bundle import MANIFEST, Manifest, open_bundle
from outrider_core.models.drafter_files import save_drafter
from outrider_core.models.folders import drafters_folder
from tests.export.conftest import Bundles, Folders, Reused, edit_manifest, snapshot
from tests.tiny import save_tiny_target, tiny_drafter_config, tiny_model

ENGINE_FILE = "drafter.onnx"


@pytest.fixture
def copied(bundles: Bundles, tmp_path: Path) -> Path:
    """A float32 bundle that a test may break."""
    return Path(shutil.copytree(bundles(), tmp_path / "copied"))


def command(folders: Folders, bundle: Path, *more: str) -> list[str]:
    return ["check", str(bundle), "--drafter", str(folders.drafter), "--target", str(folders.target), *more]


def no_verifier(*_: object, **__: object) -> None:
    raise AssertionError("a verifier was started")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VerifierProcess", no_verifier)


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


# what it finds


@pytest.mark.slow
def test_fresh_bundle_passes(
    folders: Folders, reused: Reused, tmp_path: Path, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both engines, without acceptance: no verifier is started."""
    output = tmp_path / "bundle"
    before = write_bundle(folders.options(output, "fp32", "onnx", "executorch"))
    files, text = snapshot(output), (output / "report.md").read_text()
    assert main(command(folders, output, "--no-acceptance")) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "all bounds hold"
    assert "with the right hashes, metadata as in manifest.json" in " ".join(shown.err.split())
    after = json.loads((output / "report.json").read_text())
    figures = after.pop("check")
    assert after == before and figures.keys() == {"engines", "compared_on"}
    for name in ("onnx", "executorch"):
        assert figures["engines"][name]["parity"] == after["engines"][name]["parity"]
    assert (output / "report.md").read_text().startswith(text.rstrip())
    assert {k: v for k, v in snapshot(output).items() if "report" not in k} == {
        k: v for k, v in files.items() if "report" not in k
    }
    open_bundle(output)


def test_checking_twice_replaces_the_figures(folders: Folders, copied: Path, alone: None) -> None:
    texts = set()
    for _ in range(2):
        assert main(command(folders, copied, "--no-acceptance")) == 0
        texts.add((copied / "report.md").read_text())
    assert len(texts) == 1 and "check" in json.loads((copied / "report.json").read_text())


@pytest.mark.parametrize("bound", ["top1_agreement", "top4_agreement"])
def test_broken_bound(
    folders: Folders, copied: Path, alone: None, capsys: pytest.CaptureFixture[str], bound: str
) -> None:
    edit_manifest(copied, lambda m: m["engines"]["onnx"]["bounds"].update({bound: 1.01}))
    assert main(command(folders, copied, "--no-acceptance")) == 1
    assert errors(capsys) == [f"error: drafter.onnx: {bound.replace('_', ' ')} is 1.000, its bound is 1.01"]
    assert "check" in json.loads((copied / "report.json").read_text())


def roll(folder: Path, name: str) -> None:
    """Spoil the engine: every row of the weight `name` stands one place further on. The manifest says so."""
    path = folder / ENGINE_FILE
    model = onnx.load(path)
    (tensor,) = [x for x in model.graph.initializer if x.name == name]
    tensor.CopyFrom(numpy_helper.from_array(np.roll(numpy_helper.to_array(tensor), 1, 0), name))
    onnx.save(model, path)
    data = path.read_bytes()
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit_manifest(folder, lambda m: m["files"].update({ENGINE_FILE: entry}))


def test_engine_that_drafts_something_else(
    folders: Folders, copied: Path, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    roll(copied, "head")
    assert main(command(folders, copied, "--no-acceptance")) == 1
    lines = errors(capsys)
    assert len(lines) == 2 and all(re.search(r"top[14] agreement is 0\.\d+, its bound is 0\.999$", x) for x in lines)


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], before: dict[str, bytes], folder: Path) -> str:
    assert main(arguments) == 1
    (line,) = errors(capsys)
    assert snapshot(folder) == before
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("field", "value", "fact"),
    [
        ("max_context", 255, "get_max_context_len is 256, the manifest 255"),
        ("eos_ids", [3, 9], "get_eos_ids is [3], the manifest [3, 9]"),
        ("tokenizer_hash", "0", "the manifest 0"),
        ("vocab_size", 200, "get_vocab_size is 199, the manifest 200"),
    ],
)
def test_metadata_of_another_bundle(
    folders: Folders, copied: Path, alone: None, capsys: pytest.CaptureFixture[str], field: str, value: Any, fact: str
) -> None:
    edit_manifest(copied, lambda m: m.update({field: value}))
    line = refused(capsys, command(folders, copied), snapshot(copied), copied)
    assert line.startswith(f"{copied / ENGINE_FILE} says") and line.endswith(f"{fact}; export the bundle again")


def test_metadata_that_is_missing(
    folders: Folders, copied: Path, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    set_metadata(copied, lambda known: known.pop("get_vocab_size"))
    line = refused(capsys, command(folders, copied), snapshot(copied), copied)
    assert line == (
        f"{copied / ENGINE_FILE} lacks get_vocab_size, which an app's runner asks for; export the bundle again"
    )


def set_metadata(folder: Path, change: Any) -> None:
    path = folder / ENGINE_FILE
    model = onnx.load(path)
    known = {x.key: x.value for x in model.metadata_props}
    change(known)
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, known)
    onnx.save(model, path)
    data = path.read_bytes()
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit_manifest(folder, lambda m: m["files"].update({ENGINE_FILE: entry}))


def test_truncated_engine(folders: Folders, copied: Path, alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / ENGINE_FILE).write_bytes((copied / ENGINE_FILE).read_bytes()[:-1])
    assert refused(capsys, command(folders, copied), snapshot(copied), copied).endswith("; copy it again")


def test_another_drafter(
    folders: Folders, copied: Path, tmp_path: Path, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tensors = tiny_drafter_config(tiny_model(dtype=torch.float32), folders.target_hash, seed=8)
    save_drafter(tmp_path / "drafter", config, tensors, {})
    own = open_bundle(copied).manifest.drafter_hash
    arguments = ["check", str(copied), "--drafter", str(tmp_path / "drafter"), "--target", str(folders.target)]
    line = refused(capsys, arguments, snapshot(copied), copied)
    assert line.startswith(f"{copied} was made of drafter {own}, {tmp_path / 'drafter'} is ")


def test_another_target(
    folders: Folders, copied: Path, tmp_path: Path, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_target(tmp_path / "target", tiny_model(seed=1, dtype=torch.float32))
    arguments = ["check", str(copied), "--drafter", str(folders.drafter), "--target", str(tmp_path / "target")]
    line = refused(capsys, arguments, snapshot(copied), copied)
    assert line == f"{copied} was made for target {folders.target_hash}, {tmp_path / 'target'} is {other}"


def test_drafter_is_looked_for(
    folders: Folders, copied: Path, tmp_path: Path, alone: None, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    drafter_hash = open_bundle(copied).manifest.drafter_hash
    arguments = ["check", str(copied), "--target", str(folders.target), "--no-acceptance"]
    advice = "give the bundle's with --drafter, or export the bundle again"
    missing = f"no drafter {drafter_hash} in ./drafters or {drafters_folder()}; {advice}"
    assert refused(capsys, arguments, snapshot(copied), copied) == missing
    (tmp_path / "drafters" / "a broken one").mkdir(parents=True)
    config, tensors = tiny_drafter_config(tiny_model(dtype=torch.float32), folders.target_hash, seed=8)
    save_drafter(tmp_path / "drafters" / "b", config, tensors, {})
    assert refused(capsys, arguments, snapshot(copied), copied) == missing
    shutil.copytree(folders.drafter, tmp_path / "drafters" / "c")
    assert main(arguments) == 0


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_no_bundle(folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str) -> None:
    assert main(command(folders, tmp_path / folder)) == 1
    assert errors(capsys) == [
        f"error: {tmp_path / folder}: no {MANIFEST} there; write a bundle with: python -m export bundle"
    ]


def test_bundle_of_a_shorter_context_is_compared_within_it(
    folders: Folders, copied: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_manifest(copied, lambda m: m.update(max_context=80))
    set_metadata(copied, lambda known: known.update(get_max_context_len="80"))
    lengths: list[int] = []

    def passages_of(*arguments: Any) -> list[Passage]:
        passages = original(*arguments)
        lengths.extend(len(passage.tokens) for passage in passages)
        return passages

    original = module.passages_for
    monkeypatch.setattr(module, "passages_for", passages_of)
    assert main(command(folders, copied, "--no-acceptance")) == 0
    assert lengths and max(lengths) <= 80


# bounds


def manifest_of(bundles: Bundles) -> Manifest:
    return open_bundle(bundles()).manifest


def figures(top1: float, top4: float, ratio: float | None, compared_on: str = TARGET_ANSWERS) -> dict[str, Any]:
    acceptance = {} if ratio is None else {"acceptance": {"engines": {"onnx": {"ratio": ratio}}}}
    parity = {"top1_agreement": top1, "top4_agreement": top4}
    return {"compared_on": compared_on, "engines": {"onnx": {"parity": parity}}, **acceptance}


@pytest.mark.parametrize(
    ("found", "broken"),
    [
        (figures(0.999, 0.999, 0.97), []),
        (figures(0.999, 0.999, None), []),
        (figures(0.998, 1.0, 1.2), ["top1 agreement is 0.998, its bound is 0.999"]),
        (figures(1.0, 0.5, 1.0), ["top4 agreement is 0.500, its bound is 0.999"]),
        (figures(1.0, 1.0, 0.969), ["acceptance ratio is 0.969, its bound is 0.97"]),
        (figures(0.1, 0.1, 0.1), ["top1", "top4", "acceptance"]),
        (figures(0.1, 0.1, 0.1, RANDOM_ROWS), ["acceptance ratio is 0.100, its bound is 0.97"]),
    ],
)
def test_bounds(bundles: Bundles, found: dict[str, Any], broken: list[str]) -> None:
    lines = broken_bounds(found, manifest_of(bundles))
    assert len(lines) == len(broken)
    for line, part in zip(lines, broken, strict=True):
        assert line.startswith(f"drafter.onnx: {part}")


def test_facts_are_the_manifests(bundles: Bundles) -> None:
    manifest = manifest_of(bundles)
    known = facts(manifest)
    assert known["get_max_context_len"] == manifest.max_context and known["get_eos_ids"] == manifest.eos_ids
    assert known["use_kv_cache"] is True and len(known) == 15


# acceptance


@pytest.fixture(scope="module")
def copycat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Folders, Path]:
    """A target whose next token depends on the last one alone, a drafter that knows it, and their bundle."""
    root = tmp_path_factory.mktemp("copycat")
    model = tiny_model(seed=2, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target_hash = save_tiny_target(root / "target", model)
    config, tensors = tiny_drafter_config(model, target_hash, draft_ids=torch.arange(199))
    for block in ("self_attention", "cross_attention"):
        tensors[f"{block}.self_attn.o_proj.weight"].zero_()
        tensors[f"{block}.mlp.down_proj.weight"].zero_()
    save_drafter(root / "drafter", config, tensors, {})
    folders = Folders(root / "target", root / "drafter", target_hash)
    write_bundle(folders.options(root / "bundle"))
    return folders, root / "bundle"


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.txt").write_text("w20 w21 w22\nw99\n")
    return ["--prompts", str(tmp_path / "prompts.txt")]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[VerifierProcess]:
    """The verifiers that were made."""
    made: list[VerifierProcess] = []

    def make(*arguments: Any, **options: Any) -> VerifierProcess:
        made.append(VerifierProcess(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(module, "VerifierProcess", make)
    return made


def ended(verifiers: list[VerifierProcess]) -> bool:
    return all(x.process is not None and x.process.poll() is not None for x in verifiers)


def test_acceptance_through_a_real_verifier(
    copycat: tuple[Folders, Path], tmp_path: Path, prompts: list[str], started: list[VerifierProcess]
) -> None:
    folders, output = copycat[0], Path(shutil.copytree(copycat[1], tmp_path / "bundle"))
    assert main(command(folders, output, *prompts)) == 0
    assert len(started) == 1 and ended(started)
    found = json.loads((output / "report.json").read_text())["check"]["acceptance"]
    assert (found["prompts"], found["max_new_tokens"]) == (2, 64)
    engine = found["engines"]["onnx"]
    assert found["eager"]["tau"] > 2
    assert engine["ratio"] == pytest.approx(engine["tau"] / found["eager"]["tau"], abs=1e-3)
    # the first tree of an answer may come before or after the prompt's rows, which costs or saves a round
    assert abs(engine["rounds"] - found["eager"]["rounds"]) <= found["prompts"]
    assert engine["same_text"] is True
    assert engine["tokens"] == found["eager"]["tokens"] > 20
    assert "| onnx |" in (output / "report.md").read_text()
    open_bundle(output)


@pytest.mark.slow
def test_engine_of_low_acceptance_is_found(
    copycat: tuple[Folders, Path], tmp_path: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folders, output = copycat[0], Path(shutil.copytree(copycat[1], tmp_path / "bundle"))
    roll(output, "head")
    edit_manifest(output, lambda m: m["engines"]["onnx"]["bounds"].update(top1_agreement=0.0, top4_agreement=0.0))
    assert main(command(folders, output, *prompts)) == 1
    (line,) = errors(capsys)
    assert re.fullmatch(r"error: drafter\.onnx: acceptance ratio is 0\.\d+, its bound is 0\.97", line)


def test_verifier_that_does_not_start(
    folders: Folders, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(*arguments: Any) -> VerifierProcess:
        verifier = VerifierProcess(*arguments)
        verifier.command = [sys.executable, "-c", "raise SystemExit('no weights')"]
        return verifier

    monkeypatch.setattr(module, "VerifierProcess", make)
    line = refused(capsys, command(folders, copied), snapshot(copied), copied)
    assert line.startswith("acceptance needs a verifier: ") and "no weights" in line


def test_interrupt_ends_the_verifier(
    folders: Folders, copied: Path, monkeypatch: pytest.MonkeyPatch, started: list[VerifierProcess]
) -> None:
    def interrupt(verifier: VerifierProcess) -> None:
        raise KeyboardInterrupt

    before = snapshot(copied)
    monkeypatch.setattr(VerifierProcess, "wait_ready", interrupt)
    assert main(command(folders, copied)) == 130
    assert len(started) == 1 and ended(started) and snapshot(copied) == before
