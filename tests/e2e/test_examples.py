"""The example app and the README's script on the tiny stack. The app is killed in mid-answer and started again."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.links import EmulatedLink
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.e2e.stack import MAX_NEW, make_verifier, oracle
from tests.waiting import HANG

APP = Path(__file__).parents[2] / "examples/chat_app.py"
Folders = tuple[Path, Path, Path]


def start(bundle: Path, server: str, state: Path, questions: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(APP), "--bundle", str(bundle), "--server", server, "--state", str(state)]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", str(MAX_NEW)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(questions)
    process.stdin.close()
    process.stdin = None
    return process


def committed(state: Path) -> int:
    record = json.loads(state.read_text())["record"] if state.exists() else None
    return len(record["committed"]) if record else 0


def test_the_example_app_survives_a_restart(folders: Folders, bundle: Bundle, tmp_path: Path) -> None:
    state, question = tmp_path / "chat.json", "w5 w9 w11"
    prompt = bundle.render_chat([{"role": "user", "content": question}])
    truth = bundle.tokenizer.decode(oracle(folders, prompt, Sampling()), skip_special_tokens=True)

    async def run(address: str) -> str:
        async with EmulatedLink(int(address.rsplit(":", 1)[1]), delay=0.15) as link:
            first = start(folders[2], link.address, state, question + "\n")
            end = time.monotonic() + HANG
            while committed(state) < 4:
                assert time.monotonic() < end and first.poll() is None
                await asyncio.sleep(0.02)
            first.kill()
            await asyncio.to_thread(first.communicate)
            second = start(folders[2], link.address, state, "w7\n")
            shown, _ = await asyncio.to_thread(second.communicate, None, 60)
            assert second.returncode == 0, shown
            return shown

    with serve(make_verifier(folders)) as address:
        shown = asyncio.run(run(address))
    assert "continuing the answer that was cut off" in shown
    kept = json.loads(state.read_text())
    assert kept["record"] is None and [m["role"] for m in kept["messages"]] == ["user", "assistant"] * 2
    assert kept["messages"][1]["content"] == truth
    assert state.stat().st_mode & 0o077 == 0


def test_the_example_app_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(APP), "--bundle", str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_the_script_of_the_readme_prints_the_answer(folders: Folders, bundle: Bundle, tmp_path: Path) -> None:
    question = "w5 w9 w11"
    prompt = bundle.render_chat([{"role": "user", "content": question}])
    truth = bundle.tokenizer.decode(oracle(folders, prompt, Sampling()), skip_special_tokens=True)
    script = (APP.parents[1] / "README.md").read_text().split("```python\n")[1].split("```")[0]
    with serve(make_verifier(folders)) as address:
        for printed, ours in (
            ("build/bundle", str(folders[2])),
            ("127.0.0.1:8765", address),
            ("Why is the sky blue?", question),
            ("200", str(MAX_NEW)),
        ):
            assert printed in script
            script = script.replace(printed, ours)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"{truth}[]", done
    assert len(script.splitlines()) == 5
