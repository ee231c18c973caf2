"""Target bundles appear whole or not at all, go on where they were interrupted, and are refused where damaged."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from outrider_core.models.target import open_target
from outrider_core.targets.answers import WrittenAnswer
from outrider_core.targets.bundle import (
    DATA_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    TargetBundle,
    TargetBundleError,
    open_target_bundle,
)
from outrider_core.targets.convert import make_target_bundle
from outrider_core.targets.gguf_tokenizer import write_tokenizer
from outrider_core.targets.quality import compare
from outrider_core.targets.quantise import ROWS_AT_ONCE, quantise8
from outrider_core.targets.source import TargetSource
from outrider_core.targets.weights import Floats, GgufWeights, Rows, SafetensorsWeights, folder_weights
from tests.power import forgotten, watched_disk
from tests.targets.plain import lowered
from tests.tiny import tiny_model, tiny_tokenizer
from tests.waiting import HANG

MAKE = """
import sys
from pathlib import Path
from outrider_core.targets import convert
from outrider_core.targets.source import TargetSource

def stop_at(layer, layers):
    if layer == int(sys.argv[3]):
        print("layer", layer, flush=True)
        sys.stdin.read()

source, folder, calibrate = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4] == "calibrate"
convert.make_target_bundle(TargetSource("tiny", source), folder, 128, done=stop_at, calibrate=calibrate)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_source(tmp_path / "source")


def save_source(folder: Path) -> Path:
    model = tiny_model(hidden=64, layers=4, dtype=torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # all its answers are equally long
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make(source: Path, folder: Path, calibrate: bool = False) -> TargetBundle:
    return make_target_bundle(TargetSource("tiny", source), folder, 128, calibrate=calibrate)


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path.name.endswith(".partial"))


def test_a_bundle_is_made_once_and_opens(source: Path, tmp_path: Path) -> None:
    layers = list[tuple[int, int]]()
    folder = tmp_path / "bundle"
    made = make_target_bundle(
        TargetSource("tiny", source), folder, 128, done=lambda *done: layers.append(done), calibrate=True
    )
    assert sorted(set(layers)) == [(step, 12) for step in range(12)] and layers == sorted(layers)
    assert hidden(folder) == []
    assert (
        make_target_bundle(TargetSource("tiny", source), folder, 128, done=lambda *_: pytest.fail("made again")) == made
    )
    assert made.config.num_hidden_layers == 4 and made.max_positions == 128 and len(made.value_scales) == 4
    assert {path.name for path in folder.iterdir()} >= {"tokenizer.json", "target.onnx", DATA_FILE}


@pytest.mark.parametrize(
    ("step", "calibrate", "under_way"),
    [(2, False, "."), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, True, "plain"), (10, True, ".")))],
)
def test_a_killed_conversion_goes_on(source: Path, tmp_path: Path, step: int, calibrate: bool, under_way: str) -> None:
    """While a copy is rounded to nearest, or the one that its answers have calibrated."""
    whole = make(source, tmp_path / "whole", calibrate)
    folder = tmp_path / "bundle"
    command = [sys.executable, "-c", MAKE, str(source), str(folder), str(step), "calibrate" if calibrate else "plain"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == f"layer {step}\n".encode()
        process.send_signal(signal.SIGKILL)
    [aside] = hidden(folder)
    assert not folder.exists()
    data = tmp_path / aside / under_way / DATA_FILE
    inode = data.stat().st_ino
    with data.open("ab") as file:
        file.write(b"half a tensor")
    made = make(source, folder, calibrate)
    assert hidden(folder) == []
    if under_way == ".":
        assert (folder / DATA_FILE).stat().st_ino == inode  # the same file, not one begun anew
    assert (folder / DATA_FILE).read_bytes() == (whole.folder / DATA_FILE).read_bytes()
    assert made.graph.read_bytes() == whole.graph.read_bytes()


KILLED = """
import os, signal, sys
from pathlib import Path
from outrider_core.targets import convert
from outrider_core.targets.source import TargetSource

left, fsync = int(sys.argv[3]), os.fsync

def counted(handle):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(handle)

os.fsync = counted
convert.make_target_bundle(TargetSource("tiny", Path(sys.argv[1])), Path(sys.argv[2]), 128, calibrate=True)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """(a model, its bundle, how many times the disk was waited for while that was made)."""
    folder = tmp_path_factory.mktemp("whole")
    source = save_source(folder / "source")
    with watched_disk() as disk:
        make(source, folder / "bundle", calibrate=True)
    assert disk.unsettled == [] and "bundle" in disk.renamed
    return source, folder / "bundle", disk.waited


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
def test_what_a_power_cut_took_is_made_again(whole: tuple[Path, Path, int], tmp_path: Path, number: int) -> None:
    """Killed anywhere, and then some file that was written before is cut or has zeros in it, behind its index too."""
    source, made, waited = whole
    chance, folder = random.Random(number), tmp_path / "bundle"
    command = [sys.executable, "-c", KILLED, str(source), str(folder), str(chance.randint(2, waited))]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    files = [path for place in hidden(folder) for path in (tmp_path / place).rglob("*") if path.stat().st_size]
    files = sorted(path for path in files if path.is_file())
    data = [path for path in files if path.name == DATA_FILE]
    for path in {chance.choice(data or files), chance.choice(files)}:
        size = path.stat().st_size
        begin = chance.randrange(size)
        if chance.random() < 0.3:
            os.truncate(path, begin)
        else:
            forgotten(path, begin, min(4096, size - begin))
    make(source, folder, calibrate=True)
    assert hidden(folder) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in made.iterdir()
    }


@pytest.mark.parametrize("tied", [False, True])
def test_tables_of_large_vocabularies_are_never_whole_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """In float32, while the 8-bit copy is made and while it is compared."""
    lots, read = list[int](), SafetensorsWeights.read

    def watched(weights: SafetensorsWeights, name: str, rows: slice = slice(None)) -> Floats:
        values = read(weights, name, rows)
        if name in ("embed_tokens", "lm_head"):
            lots.append(len(values))
        return values

    monkeypatch.setattr(SafetensorsWeights, "read", watched)
    monkeypatch.setattr("outrider_core.targets.streamed.HEAD_ROWS", 1000)
    bundle = lowered(tiny_model(vocab=5000, hidden=64, tied=tied, dtype=torch.float32), tmp_path)
    assert sum(lots) == 2 * 5000 and max(lots) == ROWS_AT_ONCE < 5000
    compare(bundle, *folder_weights(tmp_path / "source"), [WrittenAnswer([*range(60)], 3)])
    assert max(lots) == ROWS_AT_ONCE


def test_what_is_written_is_not_read_again_to_hash_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("outrider_core.cache.REMEMBERED_BYTES", 100_000)
    read, opened = list[str](), Path.open

    def watched(path: Path, mode: str = "r", *options: Any, **more: Any) -> Any:
        if mode == "rb":
            read.append(path.name)
        return opened(path, mode, *options, **more)

    monkeypatch.setattr(Path, "open", watched)
    data = make(source, tmp_path / "bundle").folder / DATA_FILE
    assert data.stat().st_size > 100_000 and "target.onnx" in read and DATA_FILE not in read
    assert open_target_bundle(data.parent).digest
    known = json.loads((tmp_path / "cache/hashes.json").read_text())
    assert known[str(data)][-1] == hashlib.sha256(data.read_bytes()).hexdigest()


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(
            TargetBundleError, match="cannot be written: File too large; free some space there, or name another"
        ):
            make(source, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not folder.exists() and hidden(folder) == []
    make(source, folder)


def doubled(table: NDArray[np.int8], scales: Floats) -> None:
    scales[5] *= 2


def negated(table: NDArray[np.int8], scales: Floats) -> None:
    table[5] = -table[5]


def exchanged(table: NDArray[np.int8], scales: Floats) -> None:
    table[[5, 6]] = table[[6, 5]]


@pytest.mark.parametrize("damage", [doubled, negated, exchanged])
def test_a_copy_unlike_its_source_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[..., None]
) -> None:
    """In one row of the twelfth layer."""
    made = list[None]()

    def damaged(weight: Floats | Rows, moments: NDArray[np.float64] | None = None) -> tuple[NDArray[np.int8], Floats]:
        table, scales = quantise8(weight, moments)
        made.append(None)
        if len(made) == 12:
            damage(table, scales)
        return table, scales

    monkeypatch.setattr("outrider_core.targets.linears.quantise8", damaged)
    with pytest.raises(TargetBundleError, match=r"^tiny: products of layers\.2\.mlp\.down_proj at 8 bits are \d+% off"):
        make(source, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists() and hidden(tmp_path / "bundle") == []


@pytest.mark.parametrize("name", ["target.onnx", DATA_FILE, "tokenizer.json"])
def test_a_damaged_file_is_named(source: Path, tmp_path: Path, name: str) -> None:
    folder = make(source, tmp_path / "bundle").folder
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(TargetBundleError, match=f"{name} is not what was written; delete"):
        open_target_bundle(folder)
    os.truncate(folder / name, len(content) - 1)
    with pytest.raises(TargetBundleError, match=f"{name} is not what was written"):
        open_target_bundle(folder)
    (folder / name).unlink()
    with pytest.raises(TargetBundleError, match=f"{name} is missing"):
        open_target_bundle(folder)


def test_foreign_and_broken_folders(source: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetBundleError, match=r"there is no manifest\.json"):
        open_target_bundle(source)
    path = make(source, tmp_path / "bundle").folder / MANIFEST_FILE
    text = path.read_text()
    listed = json.dumps({**json.loads(text), "files": []})
    for broken in (
        text[:-40],
        "[]",
        "{}",
        text.replace('"config"', '"shapes"'),
        text.replace('"theta"', '"omega"'),
        text.replace('"bits": 8', '"bits": 5'),
        listed,
    ):
        path.write_text(broken)
        with pytest.raises(TargetBundleError, match="damaged"):
            open_target_bundle(path.parent)
    path.write_text(json.dumps({"format_version": 2, "engines": {}, "files": {}}))
    with pytest.raises(TargetBundleError, match="is a device's bundle, not a target bundle"):
        open_target_bundle(path.parent)
    path.write_text(json.dumps({**json.loads(text), "format_version": 99}))
    with pytest.raises(
        TargetBundleError,
        match=rf"format 99, and this program reads {FORMAT_VERSION}; delete this folder, and it is made again",
    ):
        open_target_bundle(path.parent)


def test_what_cannot_be_lowered_is_one_line(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(TargetBundleError, match=r"'gpt2' is not supported \(supported: llama"):
        make(source, tmp_path / "bundle")
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(TargetBundleError, match=r"there is no tensor model\.layers\.4"):
        make(source, tmp_path / "bundle")
    assert hidden(tmp_path / "bundle") == []


def test_a_gguf_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    """Tokens, merges and template of the default target; transformers splits GGUF files' text by another rule."""
    file = TargetSource.resolve("smollm2-135m-instruct").path
    write_tokenizer(GgufWeights(file).fields, tmp_path)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = AutoTokenizer.from_pretrained(tmp_path)
    written = [json.loads(each.backend_tokenizer.to_str()) for each in (ours, theirs)]
    rules = [each.pop("pre_tokenizer") for each in written]
    assert written[0] == written[1] and rules[0] != rules[1]
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    text = "Grüße, 123 <|im_end|> def f(x):\n\treturn x"
    assert ours.encode(text) == theirs.encode(text)
    assert (
        open_target(TargetSource.resolve()).tokenizer.encode("\n\n1") == ours.encode("\n\n1") != theirs.encode("\n\n1")
    )


def test_who_waits_for_another_process_is_told_once(source: Path, tmp_path: Path) -> None:
    """And takes what that one has made."""
    folder = tmp_path / "bundle"
    told = list[str]()
    command = [sys.executable, "-c", MAKE, str(source), str(folder), "1", "plain"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdin and process.stdout.readline() == b"layer 1\n"
        stdin = process.stdin

        def waiting() -> None:
            told.append("waits")
            stdin.close()  # it goes on

        made = make_target_bundle(
            TargetSource("tiny", source), folder, 128, done=lambda *_: pytest.fail("made again"), waiting=waiting
        )
        assert process.wait(HANG) == 0
    assert told == ["waits"] and made.folder == folder and hidden(folder) == []


@pytest.mark.parametrize(
    "path",
    [
        "android_demo/core/src/main/kotlin/dev/outrider/core/targets/TargetBundle.kt",
        "browser_runtime/src/bundle/understudyStore.ts",
    ],
)
def test_the_ports_read_this_format(path: str) -> None:
    found = re.search(
        r"const (?:val )?FORMAT_VERSION = (\d+)", (Path(__file__).parents[2] / path).read_text(encoding="utf-8")
    )
    assert found and int(found[1]) == FORMAT_VERSION
