"""A second model, Qwen2.5-Coder-0.5B-Instruct, and a drafter trained for it for ten steps.

OUTRIDER_SECOND_MODEL names its GGUF file, quantised to 4 bits by its publisher (Q4_K_M) and known by its SHA-256.
Without it none of this runs. `python -m tests.second` makes the drafter and the bundle, in build/second or
OUTRIDER_SECOND_PAIR.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider_core.drafting.bundle import Bundle, open_bundle

SHA256 = "1d9614638d18"  # the first digits; also of the file's identity
FILE = Path(os.environ.get("OUTRIDER_SECOND_MODEL", "/nowhere"))
PROMPTS = [
    "Write a Python function that reverses a string.", "What does the keyword `yield` do in Python?",
    "Write a SQL query that counts users per country.", "What is the capital of France?",
    "Explain recursion in one sentence.", "Write a bash line that counts the lines of all .py files.",
    "What is 17 plus 25?", "Fix this: `for i in range(10) print(i)`", "Write hello world in Rust.",
    "What is a hash table?", "Translate to Python: `const f = x => x * 2`", "List three sorting algorithms.",
    "What does HTTP status 404 mean?", "Write a regex for an e-mail address.", "What is Big O notation?",
    "Write a JSON object with a name and an age.", "How do I undo the last git commit?",
    "Write a function that returns the n-th Fibonacci number.", "What is the difference between a list and a tuple?",
    "Say hello.",
]  # fmt: skip
PAIR = Path(os.environ.get("OUTRIDER_SECOND_PAIR", "build/second"))
#: steps of the drafter's training, one for each pass over the text
STEPS = 10
TRAINING = {"epochs": STEPS, "max-new-tokens": 24, "max-tokens": 96, "follow-ups": 0, "sampled": 0, "threads": 2}
named = pytest.mark.skipif(not FILE.is_file(), reason="OUTRIDER_SECOND_MODEL names no file")
optional = [pytest.mark.slow, pytest.mark.timeout(3600), named]


def pair() -> tuple[Path, Bundle]:
    """Return the drafter's folder and a bundle with it; missing ones are made by the commands of docs/drafters.md."""
    drafter, bundle = PAIR / "drafter", PAIR / "bundle"
    if not (drafter / "config.json").is_file():
        PAIR.mkdir(parents=True, exist_ok=True)
        (PAIR / "prompts.txt").write_text("\n".join(PROMPTS))
        given = {"prompts": PAIR / "prompts.txt", "work-dir": PAIR / "work", "writer": "onnx", "device": "cpu"}
        _export("train", output_dir=drafter, **given, **TRAINING)
    if not (bundle / "manifest.json").is_file():
        _export("bundle", "--no-compare", drafter=drafter, output_dir=bundle)  # so few steps leave near-ties
    return drafter, open_bundle(bundle)


def _export(command: str, *flags: str, **options: object) -> None:
    pairs = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run([sys.executable, "-m", "export", command, "--target", str(FILE), *pairs, *flags], check=True)


if __name__ == "__main__":
    pair()
