"""The table of plain decoders on a tiny target, without llama.cpp."""

from __future__ import annotations

import json
import os
import re
import venv
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cloud.settings import Settings
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from lab.peers import (
    REFERENCE,
    EnginePeer,
    TransformersPeer,
    ended,
    main,
    measure,
    weight_megabytes,
)
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.tiny import EOS, plain_decode, save_tiny_drafter, save_tiny_target, tiny_model

PROMPTS = [[10, 20, 30, 40, 50], [7], [101, 60, 61, 62, 63, 64, 65, 66, 67]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose own answer to the first prompt ends at once: everyone must write on."""
    folder = tmp_path_factory.mktemp("peers")
    model = tiny_model(dtype=torch.float32)
    [model.config.eos_token_id] = plain_decode(model, PROMPTS[0], Sampling(), 1)
    model.generation_config.eos_token_id = model.config.eos_token_id
    save_tiny_drafter(folder / "drafter", model, save_tiny_target(folder / "target", model))
    rows = [{"prompt": "a b c"}, {"prompt": "b c d e"}]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


@pytest.fixture(scope="module")
def peers(folder: Path) -> list[EnginePeer | TransformersPeer]:
    settings = Settings(
        model=str(folder / "target"), drafter=folder / "drafter", dtype="float32", device="cpu", threads=1,
        tree_budget=1, max_model_len=256, max_nodes=16, kv_tokens=512,
    )  # fmt: skip
    return [EnginePeer(settings), TransformersPeer(settings)]


def test_everyone_writes_the_same_number_of_the_targets_tokens(peers: list[EnginePeer | TransformersPeer]) -> None:
    assert isinstance(peers[0], EnginePeer)
    ends = peers[0].eos
    for prompt in PROMPTS:
        truth = plain_decode(tiny_model(dtype=torch.float32), prompt, Sampling(), 40)
        assert len(truth) == 40 and (prompt != PROMPTS[0] or truth[0] in ends)
        for peer in peers:
            tokens, seconds = peer.answer(prompt, 40)
            assert tokens == truth == peer.answer(prompt, 40)[0] and seconds > 0


def test_figures(peers: list[EnginePeer | TransformersPeer]) -> None:
    class Odd:
        """Stands for a peer whose text differs, at its third token."""

        name, megabytes, plain = "odd", 2.0, REFERENCE

        def answer(self, prompt: list[int], new: int) -> tuple[list[int], float]:
            tokens = peers[0].answer(prompt, new)[0]
            return [*tokens[:2], tokens[2] + 1, *tokens[3:]], 0.5

    figures = measure([*peers, Odd()], PROMPTS, 12, 2, frozenset(), Console(quiet=True), ["maths", "chat", "maths"])
    over = figures["odd"].pop("over_plain")
    assert list(over) == ["chat", "maths"] and min(over.values()) > 0
    assert figures["odd"] == {
        "tokens": 36, "tokens_per_second": 24.0, "ms_per_token": 41.667, "weights_megabytes": 2.0,
        "weights_gigabytes_per_second": 0.05, "same_until_divergence": round(6 / 36, 4), "same_answers": 0,
        "same_as_plain": 0,
    }  # fmt: skip
    for peer in peers:
        assert figures[peer.name]["same_until_divergence"] == 1.0 and figures[peer.name]["same_answers"] == 3
        assert figures[peer.name]["tokens"] == 36 and "same_as_plain" not in figures[peer.name]
    assert peers[0].name == REFERENCE


def test_texts_count_up_to_their_end() -> None:
    assert ended([5, EOS, 6, EOS], frozenset({EOS})) == [5, EOS] and ended([5, 6], frozenset({EOS})) == [5, 6]


def test_weights_read_are_all_matrices_and_the_head(peers: list[EnginePeer | TransformersPeer]) -> None:
    for tied in (False, True):
        model = tiny_model("qwen2", tied=tied)
        matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embed_tokens" not in n)
        head = model.lm_head.weight.numel() if tied else 0
        assert weight_megabytes(model.config, torch.bfloat16) == pytest.approx(2e-6 * (matrices + head))


def _arguments(folder: Path) -> list[str]:
    given = {"target": "target", "drafter": "drafter", "prompts": "prompts.jsonl", "json": "out/peers.json"}
    paths = [word for key, name in given.items() for word in (f"--{key}", str(folder / name))]
    return [*paths, "--count", "0", "--max-new-tokens", "6", "--repeats", "1", "--threads", "1"]


def test_command_without_llama(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other rows are measured, and a line says what is missing."""
    gguf = folder / "model.Q4_1.gguf"
    gguf.write_bytes(b"GGUF")
    assert main([*_arguments(folder), "--gguf", str(gguf)]) == 0
    figures = json.loads((folder / "out" / "peers.json").read_text())
    assert figures["llama_cpp_python"] is None and "llama.cpp does not run in" in figures["left_out"]
    assert set(figures["peers"]) == {"engine bfloat16", "engine float32", "transformers bfloat16"}
    assert figures["questions"] == 2 and all(row["tokens"] == 12 for row in figures["peers"].values())
    assert figures["peers"][REFERENCE]["same_answers"] == 2
    assert "no llama.cpp: " in capsys.readouterr().out


def test_command_with_a_bundle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This project's own speculation writes what it writes without."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
    write_bundle(
        BundleOptions(
            target=TargetSource.resolve(str(folder / "target")),
            drafter=folder / "drafter",
            output_dir=folder / "bundle",
            quant="fp32",
        )
    )
    assert main([*_arguments(folder), "--bundle", str(folder / "bundle"), "--only", "8 bits"]) == 0
    rows = json.loads((folder / "out" / "peers.json").read_text())["peers"]
    plain, *others, reference = rows
    assert reference == REFERENCE
    assert plain == "engine 8 bits" and "same_as_plain" not in rows[plain]
    assert others == ["engine 8 bits, stream", "engine 8 bits, trees", "engine 8 bits, own choice"]
    assert all(rows[name]["same_as_plain"] == 2 and rows[name]["tokens_per_second"] > 0 for name in others)


def test_a_python_without_the_package_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    venv.create(folder / "bare", symlinks=True)
    python = str(folder / "bare" / ("Scripts" if os.name == "nt" else "bin") / "python")
    gguf = folder / "model.Q4_1.gguf"
    gguf.write_bytes(b"GGUF")
    assert main([*_arguments(folder), "--gguf", str(gguf), "--llama-python", python]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.endswith(f"run: {python} -m pip install llama-cpp-python\n"), error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--llama-python", "/nowhere/python"], "give --gguf FILE for llama.cpp"),
        (["--llama-python", "/nowhere/python", "--gguf", "FILE"], "/nowhere/python"),
        (["--llama-python", "/nowhere/python", "--gguf", "/nowhere/file"], "/nowhere/file"),
        (["--llama-python", "true", "--gguf", "FILE"], "ended with exit status 0"),
        (["--prompts", "/nowhere/prompts"], "/nowhere/prompts"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    (folder / "empty.gguf").touch()
    given = [str(folder / "empty.gguf") if word == "FILE" else word for word in arguments]
    assert main([*_arguments(folder), *given]) == 1
    error = capsys.readouterr().err
    assert re.search(text, error) and error.count("\n") == 1, error


def test_help_says_how_to_get_llama(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "pip install llama-cpp-python" in capsys.readouterr().out
