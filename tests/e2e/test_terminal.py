"""What a terminal shows, and a chat that is killed in mid-answer and goes on."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks.links import EmulatedLink
from edge_runtime.events import LinkState, Provisional, RolledBack, Verified
from edge_runtime.pace import Controller, Pace
from outrider.cli.terminal import STATES, Journal, Screen
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.e2e.stack import make_verifier, oracle

Folders = tuple[Path, Path, Path]


def screen_of(local: bool = False) -> Screen:
    pace = Pace(rtt=0.062)
    return Screen(SimpleNamespace(controller=Controller(pace), link=object()), local)  # type: ignore[arg-type]


def painted(screen: Screen) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="standard")
    console.print(screen)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_verified_provisional_and_withdrawn_text_look_apart() -> None:
    screen = screen_of()
    screen.show(LinkState("", "", "verified", ""))
    screen.show(Verified("The sky ", "", [1, 2], 0))
    screen.show(LinkState("The sky ", "", "alone", ""))
    screen.show(Provisional("The sky ", "was green", 3))
    alone = painted(screen)
    assert "\x1b[4;33mwas green" in alone and "◑ on its own" in alone  # underlined and yellow
    screen.show(RolledBack("The sky ", "", 2))
    screen.show(LinkState("The sky ", "", "verified", ""))
    assert "\x1b[9;31mwas green" in painted(screen)  # struck through and red
    screen._gone_at = 0.0
    last = painted(screen)
    assert "was green" not in last and "● cloud-verified" in last and "62 ms away" in last and "tokens/s" in last


def test_text_that_waits_for_its_verdict_is_catching_up() -> None:
    screen = screen_of()
    screen.show(LinkState("", "", "verified", ""))
    screen.show(Verified("a", " b c", [1], 1))
    assert "◐ catching up" in painted(screen)
    assert "cloud" not in painted(screen_of(local=True))


def test_every_state_has_a_shape_and_words_of_its_own() -> None:
    assert len({words for _, words, _ in STATES.values()}) == len(STATES)
    marks = [mark for mark, _, _ in STATES.values()]
    assert len(set(marks)) == 4  # two ways to wait look alike


def test_a_journal_comes_back_and_is_private(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "chat.json")
    assert journal.load() == ([], None)
    journal.save([{"role": "user", "content": "hé"}], {"seq": 1})
    assert not journal.due  # too soon for another
    assert journal.load() == ([{"role": "user", "content": "hé"}], {"seq": 1})
    assert (tmp_path / "chat.json").stat().st_mode & 0o077 == 0
    (tmp_path / "chat.json").write_text("[")
    with pytest.raises(ValueError, match="no journal of a chat"):
        journal.load()
    nowhere = Journal(None)
    nowhere.save([], None)
    assert not nowhere.due


def start_chat(bundle: Path, server: str, journal: Path, question: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "edge_runtime", "chat", "--bundle", str(bundle), "--server", server, "--threads",
               "1", "--max-new-tokens", "40", "--journal", str(journal), "--mode", "tree"]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdin
    process.stdin.write(question.encode())
    process.stdin.close()
    process.stdin = None
    return process


def committed(journal: Path) -> int:
    if not journal.exists():
        return 0
    answer: dict[str, Any] | None = json.loads(journal.read_text())["answer"]
    return len(answer["committed"]) if answer else 0


def test_a_chat_that_is_killed_goes_on_with_its_answer(folders: Folders, bundle: Bundle, tmp_path: Path) -> None:
    journal, question = tmp_path / "chat.json", "w5 w9 w11"
    prompt = bundle.render_chat([{"role": "user", "content": question}])
    truth = bundle.tokenizer.decode(oracle(folders, prompt, Sampling()), skip_special_tokens=True)

    async def run(address: str) -> None:
        async with EmulatedLink(int(address.rsplit(":", 1)[1]), delay=0.15) as link:
            first = start_chat(folders[2], link.address, journal, question + "\n")
            end = time.monotonic() + 30
            while committed(journal) < 4:
                assert time.monotonic() < end and first.poll() is None
                await asyncio.sleep(0.05)
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.communicate)
            assert 4 <= committed(journal) < 40
            second = start_chat(folders[2], link.address, journal, "")
            shown, _ = await asyncio.to_thread(second.communicate, None, 60)
            assert second.returncode == 0 and b"going on with the answer" in shown

    with serve(make_verifier(folders)) as address:
        asyncio.run(run(address))
    messages = json.loads(journal.read_text())["messages"]
    assert messages == [{"role": "user", "content": question}, {"role": "assistant", "content": truth}]


def test_ctrl_c_stops_an_answer_that_waits(folders: Folders, tmp_path: Path) -> None:
    """Nothing comes and nothing is written; the signal ends it all the same."""

    async def run(address: str) -> tuple[int, bytes]:
        async with EmulatedLink(int(address.rsplit(":", 1)[1])) as link:
            link.silent = True
            command = [sys.executable, "-m", "edge_runtime", "generate", "--bundle", str(folders[2]), "--server",
                       link.address, "--threads", "1", "--policy", "cloud-only", "w5 w9"]  # fmt: skip
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            await asyncio.sleep(4)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            said, _ = await asyncio.to_thread(process.communicate, None, 20)
            return process.returncode, said

    with serve(make_verifier(folders)) as address:
        status, said = asyncio.run(run(address))
    assert status == 130 and b"Traceback" not in said
