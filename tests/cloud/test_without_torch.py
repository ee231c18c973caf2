"""A verifier on the CPU needs neither torch nor transformers: real processes, looked into and refused both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.cloud.running import ROOT, save_folder
from tests.waiting import HANG

#: `python -m cloud.verifier` that says at its end what it has loaded
WATCHED = """
import atexit, json, sys
from cloud.verifier import main
atexit.register(lambda: print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules}))))
sys.exit(main())
"""
#: put before it: torch and transformers are not there
REFUSED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""
LIMITS = ["--max-model-len", "128", "--max-nodes", "16", "--kv-tokens", "1024", "--port", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("served"))


def start(program: str, folder: Path, *flags: str) -> subprocess.Popen[str]:
    models = ["--model", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return subprocess.Popen(
        [sys.executable, "-c", program, *models, *LIMITS, *flags], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OUTRIDER_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("program", [WATCHED, REFUSED + WATCHED], ids=["watched", "refused"])
def test_the_8_bit_engine_answers_without_torch(folder: Path, program: str) -> None:
    with start(program, folder, "--engine", "onnx") as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert "verifier ready" in ready, process.communicate()[1]
        address = ready.split("//")[1].split("/")[0]
        asked = {"model": str(folder / "target"), "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 6}
        answer = httpx.post(f"http://{address}/v1/chat/completions", json={**asked, "temperature": 0}, timeout=HANG)
        process.send_signal(signal.SIGTERM)
        loaded, errors = process.communicate(timeout=HANG)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 6, answer.text
    assert process.returncode == 0, errors
    assert "onnxruntime" in json.loads(loaded)
    assert not {"torch", "transformers", "accelerate"} & set(json.loads(loaded))
