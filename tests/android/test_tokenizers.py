"""Kotlin's tokenizer beside the library that it stands for, on 10,000 strings for each kind."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from android_demo.ci import core
from tests.android.text_vectors import TEXTS, sentencepiece_tokenizers, small_tokenizers

COUNT = 10_000
TOKENIZERS = dict([*small_tokenizers(), *sentencepiece_tokenizers()])


def strings() -> list[str]:
    """Pieces of ordinary text, special tokens, bytes' names, and characters of every kind."""
    rng = random.Random(17)
    pieces = [*TEXTS, "<s>", "</s>", "<unk>", "<0x41>", "<0xE2>", " ", "  ", "\u2581", "\n", "the ", "Hello"]
    known = [chr(code) for code in range(32, sys.maxunicode, 7) if unicodedata.category(chr(code))[0] != "C"]
    made = list[str]()
    while len(made) < COUNT:
        parts = rng.choices(pieces, k=rng.randrange(4)) + rng.choices(known, k=rng.randrange(6))
        rng.shuffle(parts)
        made.append("".join(part[: rng.randrange(1, 40)] for part in parts))
    return made


@pytest.mark.parametrize("name", TOKENIZERS)
def test_10000_strings_are_equal(classpath: list[Path], tmp_path: Path, name: str) -> None:
    tokenizer, texts = TOKENIZERS[name], strings()
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    command = core.java(classpath, "-Dfile.encoding=UTF-8", "dev.outrider.core.TokenizersKt", str(file))
    done = subprocess.run(command, input=lines.encode(), capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    got = [json.loads(line) for line in done.stdout.decode().rstrip("\n").split("\n")]
    assert len(got) == COUNT
    for text, (ids, said) in zip(texts, got, strict=True):
        wanted = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == wanted, text
        assert said == tokenizer.decode(wanted), text
