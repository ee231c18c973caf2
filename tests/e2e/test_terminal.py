"""Answers in a terminal, and a chat that is killed in mid-answer and continues."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from benchmarks.links import EmulatedLink
from edge_runtime.events import LinkState, Provisional, RolledBack, Verified
from edge_runtime.speed.controller import Controller
from edge_runtime.speed.cost_model import CostModel
from outrider.cli import main as front_door
from outrider.cli.chat import COMMANDS
from outrider.cli.journal import Journal
from outrider.cli.prompt import Interrupted, Keyboard, _open_history
from outrider.cli.terminal import STATES, Screen, _drawn, printable
from outrider_core.chat.tokenizer import ChatTokenizer
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.e2e.stack import make_verifier, oracle
from tests.tiers import first
from tests.waiting import HANG

Folders = tuple[Path, Path, Path]


def screen_of(local: bool = False) -> Screen:
    controller = Controller(CostModel(rtt=0.062))
    return Screen(SimpleNamespace(controller=controller, link=object()), local)  # type: ignore[arg-type]


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


class Terminal:
    """What a window of `width` x `height` and its scrollback hold after rich has written to it."""

    def __init__(self, width: int, height: int) -> None:
        self.height = height
        self.lines, self.row, self.column = [""], 0, 0
        self.console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)

    def text(self) -> list[str]:
        file = self.console.file
        assert isinstance(file, io.StringIO)
        for code, plain in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z])|([^\x1b])", file.getvalue()):
            if code.endswith("A"):  # no higher than the window's first line
                top = max(0, len(self.lines) - self.height)
                self.row = max(top, self.row - int(code[2:-1] or 1))
            elif code == "\x1b[2K":
                self.lines[self.row] = ""
            elif plain == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif plain == "\r":
                self.column = 0
            elif plain:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + plain + line[self.column + 1 :]
                self.column += 1
        return [line.rstrip() for line in self.lines]


@pytest.mark.parametrize(("width", "height"), [(60, 10), (80, 24), (20, 4)])
@pytest.mark.parametrize("alone", [False, True], ids=["verified", "catching-up"])
def test_an_answer_taller_than_the_window_is_shown_once(width: int, height: int, alone: bool) -> None:
    words = [f"word{i}{',' if i % 7 else '.'}" + ("\n\n" if i % 31 == 30 else " ") for i in range(300)]
    words[100] = "x" * 150 + " "  # longer than a line
    text = "".join(words)
    terminal, screen = Terminal(width, height), screen_of()

    async def draw() -> None:
        async with _drawn(screen, terminal.console) as show:
            for count in range(len(words) + 1):
                ahead = "".join(words[count : count + 90]) if alone else ""
                show(Verified("".join(words[:count]), ahead, [1], 0))
                await asyncio.sleep(0.01 * (count % 10 == 0))

    asyncio.run(draw())
    shown = terminal.text()
    expected = [line.plain.rstrip() for line in Text(text).wrap(terminal.console, width)]
    assert [line for line in shown if line] == [line for line in expected if line]


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\r\x07c\td\n") == "a[31mbc" + " d\n"


def test_a_journal_comes_back_and_is_private(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "chat.json", pytest.fail)
    assert journal.load() == ([], None)
    journal.save([{"role": "user", "content": "hé"}], {"seq": 1})
    assert not journal.due  # too soon for another
    assert journal.load() == ([{"role": "user", "content": "hé"}], {"seq": 1})
    assert (tmp_path / "chat.json").stat().st_mode & 0o077 == 0
    (tmp_path / "chat.json").write_text("[")
    with pytest.raises(ValueError, match="not a journal of a chat"):
        journal.load()
    nowhere = Journal(None, pytest.fail)
    nowhere.save([], None)
    assert not nowhere.due


def test_an_interrupt_right_behind_the_rename_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.replace

    def interrupted(source: str, target: Path) -> None:
        rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    journal = Journal(tmp_path / "chat.json", pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        journal.save([], {"seq": 1})
    assert journal.load() == ([], {"seq": 1}) and [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_a_journal_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    told: list[str] = []
    journal = Journal(tmp_path / "gone" / "chat.json", told.append)
    journal.save([], None)
    journal.save([], None)
    assert len(told) == 1 and "cannot write the journal" in told[0] and "No such file" in told[0]


def test_a_disk_that_takes_its_time_holds_up_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on while the journal is written: here it is what lets the disk be done."""
    disk, sync = threading.Event(), os.fsync

    def slow(handle: int) -> None:
        assert disk.wait(HANG)
        sync(handle)

    monkeypatch.setattr(os, "fsync", slow)
    path = tmp_path / "chat.json"

    async def run() -> None:
        journal = Journal(path, pytest.fail)
        messages = [{"role": "user", "content": "one"}]
        journal.keep(messages, {"seq": 1})
        await asyncio.sleep(0)
        journal.keep(messages, {"seq": 2})  # one at a time: this is too soon
        assert not path.exists()
        disk.set()
        await journal.finish([*messages, {"role": "assistant", "content": "two"}])

    asyncio.run(run())
    assert [message["content"] for message in json.loads(path.read_text())["messages"]] == ["one", "two"]


def test_two_chats_do_not_share_a_journal(tmp_path: Path) -> None:
    """The second would go on with the first one's answer, and the last to save would take the other's turns away."""
    path = tmp_path / "chat.json"
    script = "import sys; from pathlib import Path; from outrider.cli.journal import Journal\n"
    script += "with Journal(Path(sys.argv[1]), print).alone(): print('mine')"
    other = [sys.executable, "-c", script, str(path)]
    with Journal(path, pytest.fail).alone(), Journal(tmp_path / "other.json", pytest.fail).alone():
        refused = subprocess.run(other, capture_output=True, text=True, timeout=HANG)
        assert refused.returncode == 1 and "another chat is using" in refused.stderr
    assert subprocess.run(other, capture_output=True, text=True, timeout=HANG).stdout == "mine\n"
    with Journal(None, pytest.fail).alone(), Journal(tmp_path / "gone" / "chat.json", pytest.fail).alone():
        pass


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_without_locks_keeps_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fcntl = pytest.importorskip("fcntl")
    locks = list[int]()

    def refuse(lock: int, _: int) -> None:
        locks.append(lock)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    journal = Journal(tmp_path / "chat.json", pytest.fail)
    with journal.alone():
        journal.save([{"role": "user", "content": "one"}], None)
        assert journal.load() == ([{"role": "user", "content": "one"}], None)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(locks[0])


def test_a_link_in_a_shared_folder_is_not_followed(tmp_path: Path) -> None:
    """Not even where its name is the one that an earlier version wrote beside the journal."""
    victim, path = tmp_path / "victim", tmp_path / "chat.json"
    victim.write_text("precious")
    (tmp_path / ".chat.json.new").symlink_to(victim)
    path.symlink_to(victim)
    Journal(path, pytest.fail).save([], None)
    assert victim.read_text() == "precious" and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in tmp_path.iterdir()) == [".chat.json.new", "chat.json", "victim"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from outrider.cli import main as front_door
from outrider.cli.chat import COMMANDS
from outrider.cli.journal import Journal
from outrider.cli.prompt import _open_history

path, told = Path(sys.argv[1]), []
journal = Journal(path, told.append)
journal.save([{"role": "user", "content": "short"}], None)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
for _ in range(2):
    journal.save([{"role": "user", "content": "long" * 9999}], None)
print(len(told), told[0])
assert journal.load() == ([{"role": "user", "content": "short"}], None)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.save([{"role": "user", "content": "long" * 9999}], None)
assert len(journal.load()[0][0]["content"]) == 4 * 9999
"""


def test_a_full_disk_leaves_the_journal_and_is_told_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "chat.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 cannot write the journal") and "File too large" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["chat.json"]


Talk = Callable[..., str]


@pytest.fixture
def talk(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Lines that a chat of the tiny bundle reads -> what it then says beside the answers."""

    def talk(*lines: str, options: Sequence[str] = (), command: Sequence[str] = ("chat",), status: int = 0) -> str:
        typed = tmp_path / "typed"
        typed.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
        with typed.open() as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", file)
            bundle = ["--bundle", str(folders[2]), "--threads", "1", "--max-tokens", "4"]
            assert front_door([*command, *bundle, *options]) == status
        return capsys.readouterr().err

    return talk


def test_an_answer_of_another_model_in_the_journal_does_not_end_the_chat(talk: Talk, tmp_path: Path) -> None:
    journal = tmp_path / "chat.json"
    messages = [{"role": "user", "content": "w5"}]
    journal.write_text(json.dumps({"messages": messages, "answer": {"target": "another"}}))
    assert "cannot continue the answer that was cut off" in talk("w9", options=["--journal", str(journal)])
    kept = json.loads(journal.read_text())
    assert [m["role"] for m in kept["messages"]] == ["user", "user", "assistant"] and kept["answer"] is None


def start_chat(bundle: Path, server: str, journal: Path, question: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "edge_runtime", "chat", "--bundle", str(bundle), "--server", server, "--threads",
               "1", "--max-tokens", "40", "--journal", str(journal)]  # fmt: skip
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
            end = time.monotonic() + HANG
            while not committed(journal):
                assert time.monotonic() < end and first.poll() is None
                await asyncio.sleep(0.001)
            link.held = True  # what follows is still on its way
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.communicate)
            link.held = False
            assert 0 < committed(journal) < 40
            second = start_chat(folders[2], link.address, journal, "")
            shown, _ = await asyncio.to_thread(second.communicate, None, 60)
            assert second.returncode == 0 and b"continuing the answer" in shown

    with serve(make_verifier(folders)) as address:
        asyncio.run(run(address))
    messages = json.loads(journal.read_text())["messages"]
    assert messages == [{"role": "user", "content": question}, {"role": "assistant", "content": truth}]


def test_ctrl_c_stops_an_answer_that_waits(folders: Folders, tmp_path: Path) -> None:
    """Nothing comes and nothing is written; the signal ends it all the same."""

    async def run() -> tuple[int, bytes]:
        dialled = asyncio.Event()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            dialled.set()
            await reader.read()
            writer.close()

        async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            command = [sys.executable, "-m", "edge_runtime", "generate", "--bundle", str(folders[2]), "--server",
                       address, "--threads", "1", "--policy", "cloud-only", "w5 w9"]  # fmt: skip
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            await asyncio.wait_for(dialled.wait(), HANG)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            said, _ = await asyncio.to_thread(process.communicate, None, HANG)
            return process.returncode, said

    status, said = asyncio.run(run())
    assert status == 130 and b"Traceback" not in said


def test_a_chat_whose_context_is_full_goes_on(talk: Talk, tmp_path: Path) -> None:
    """Also from a journal that holds more than the context."""
    journal = tmp_path / "chat.json"
    turns = [{"role": ("user", "assistant")[i % 2], "content": "w9 " * 70} for i in range(8)]
    journal.write_text(json.dumps({"messages": turns, "answer": None}))
    said = talk("w5 w6", "w7 " * 300, "w8", options=["--journal", str(journal)])
    assert "the model no longer sees the first" in said and "the last message has 30" in said
    kept = json.loads(journal.read_text())["messages"]
    assert [message["content"] for message in kept[8::2]] == ["w5 w6", "w8"] and len(kept) == 12


#: seconds without a word behind which a Ctrl-C counts as overlooked
QUIET = 5.0


def read_some(end: int, deadline: float, pressed: bytes) -> bytes:
    """What comes next. pressed: the last keys. Raises OSError where nothing comes any more.

    CPython's readline overlooks a Ctrl-C between its prompt and its wait for keys, so one is pressed again.
    """
    while not select.select([end], [], [], QUIET)[0]:
        if time.monotonic() > deadline:
            raise AssertionError("the command says nothing")
        if pressed.endswith(b"\x03"):
            os.write(end, b"\x03")
    return os.read(end, 4096)


def run_in_pty(command: list[str], script: list[tuple[bytes, bytes]], environment: dict[str, str]) -> tuple[int, bytes]:
    """Exit status and output of a command on a terminal. script: (text to wait for, keys to press then)."""
    process, end = pty.fork()
    if process == 0:
        os.execve(sys.executable, command, {"OUTRIDER_NOHISTORY": "1", **environment})
    said, seen, pressed, deadline = b"", 0, b"", time.monotonic() + HANG
    try:
        for wanted, keys in script:
            while wanted not in said[seen:]:
                said += read_some(end, deadline, pressed)
            seen = said.index(wanted, seen) + len(wanted)
            os.write(end, keys)
            pressed = keys or pressed
        while chunk := read_some(end, deadline, pressed):
            said += chunk
    except OSError:  # Linux says so when the other side is closed
        pass
    except AssertionError:
        os.kill(process, signal.SIGKILL)
        raise
    _, status = os.waitpid(process, 0)
    os.close(end)
    return os.waitstatus_to_exitcode(status), said


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_ends_the_chat(folders: Folders) -> None:
    command = [sys.executable, "-m", "outrider", "chat", "--bundle", str(folders[2]), "--threads", "1"]
    script = [(b"you> ", b"half a quest\x03"), (b"once more", b""), (b"you> ", b"\x03")]
    status, said = run_in_pty(command, script, dict(os.environ))
    assert status == 0 and b"Traceback" not in said, said


def test_lines_of_an_earlier_start_come_back(folders: Folders, tmp_path: Path) -> None:
    """And messages of several lines are one question; the arrow up is what a terminal sends for it."""
    command = [sys.executable, "-m", "outrider", "chat", "--bundle", str(folders[2]), "--threads", "1", "--max-tokens",
               "4", "--journal", str(tmp_path / "chat.json")]  # fmt: skip
    environment = {**os.environ, "OUTRIDER_CACHE": str(tmp_path / "cache"), "TERM": "xterm", "OUTRIDER_NOHISTORY": ""}
    script = [
        (b"you> ", b"w5 \\\nw6\n"),
        (b"ended by", b""),
        (b"you> ", b'"""w7\nw8"""\n'),
        (b"ended by", b""),
        (b"you> ", b"\x04"),
    ]
    status, said = run_in_pty(command, script, environment)
    assert status == 0 and b"Traceback" not in said, said
    history = tmp_path / "cache" / "history"
    assert history.read_text().splitlines() == ["w5 \\", "w6", '"""w7', 'w8"""']
    assert history.stat().st_mode & 0o777 == 0o600
    up = b"\x1b[A"
    script = [(b"you> ", up * 3 + b"\n"), (b"ended by", b""), (b"you> ", b"\x04")]
    assert run_in_pty(command, script, environment)[0] == 0
    asked = [turn["content"] for turn in json.loads((tmp_path / "chat.json").read_text())["messages"][::2]]
    assert asked == ["w5 \nw6", "w7\nw8", "w6"]


def test_ctrl_c_is_noticed_while_the_main_thread_waits() -> None:
    """Even where it does not interrupt that wait: here another thread takes the signal."""

    async def work(keyboard: Keyboard) -> int:
        for _ in range(3):
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            await asyncio.wait_for(keyboard.stopped.wait(), HANG)
            with pytest.raises(Interrupted):
                await keyboard.next("")
        return 7

    before = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    assert Keyboard().run(work) == 7
    assert (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(before[1])) == before


def test_ctrl_c_stops_an_answer_and_not_the_chat(folders: Folders) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "outrider", "chat", "--bundle", str(folders[2]), "--threads", "1", "--server",
                   f"127.0.0.1:{silent.getsockname()[1]}", "--policy", "cloud-only"]  # fmt: skip
        script = [(b"you> ", b"w5\n"), (b"connecting", b"\x03"), (b"stopped", b""), (b"you> ", b"/bye\n")]
        status, said = run_in_pty(command, script, dict(os.environ))
    assert status == 0 and b"Traceback" not in said, said


def test_commands_of_a_chat(talk: Talk, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    said = talk("/help", "/system be brief", "", "w5", "/stats", "/nonsense", f"/save {saved}", "/bye", "w6")
    assert all(f"\n{command}" in said for command in COMMANDS if command != "/system TEXT")
    assert "answers: 1, 4 tokens" in said and "unknown command /nonsense; /help lists all" in said
    turns = json.loads(saved.read_text())["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant"] and turns[0]["content"] == "be brief"
    assert saved.stat().st_mode & 0o777 == 0o600
    said = talk("/system", "/clear", '/system ""', "/system", options=["--journal", str(saved)])
    assert "system> be brief" in said and "instruction: be brief" in said and "instruction: none" in said
    assert json.loads(saved.read_text())["messages"] == []


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("/save", "needs the name of a file"),
        ("/save /nowhere/chat.json", "cannot write /nowhere/chat.json: No such file or directory"),
        ("/save " + 300 * "a", "File name too long"),
        ("/save /dev/null", "/dev/null is not a file"),
        ("/save .", ". is not a file"),
        ("/Help", "/system TEXT"),
        ("/offline on", "no verifier"),
        ("/stats", "no answer yet"),
        ("/model", "verifier: none"),
        ("/?", "/system TEXT"),
    ],
)
def test_a_command_answers_in_words(talk: Talk, line: str, reply: str) -> None:
    said = talk(line)
    assert reply in said and "Traceback" not in said


def test_save_spares_a_file_that_is_not_a_chat(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("precious")
    assert "is not a journal of a chat" in talk("w5", f"/save {tmp_path / 'notes'}")
    assert (tmp_path / "notes").read_text() == "precious"


def test_save_spares_a_read_only_file(talk: Talk, tmp_path: Path) -> None:
    saved = tmp_path / "my chat.json"
    assert f"outrider chat --journal '{saved}'" in talk("w5", f"/save {saved}")
    saved.chmod(0o400)
    before = saved.read_text()
    assert f"{saved} is read-only" in talk("w6", f"/save {saved}") and saved.read_text() == before


@pytest.mark.parametrize(
    "text",
    [
        '{"messages": [1], "answer": null}',
        '{"messages": [{"role": "user"}], "answer": null}',
        '{"messages": [{"role": "nobody", "content": "w5"}], "answer": null}',
        '{"messages": "w5", "answer": null}',
        "[" * 100_000,
    ],
)
def test_a_journal_that_is_none_is_one_line(text: str, talk: Talk, tmp_path: Path) -> None:
    journal = tmp_path / "chat.json"
    journal.write_text(text)
    [line] = talk("w5", options=["--journal", str(journal)], status=1).splitlines()
    assert "is not a journal of a chat" in line and journal.read_text() == text


@pytest.mark.parametrize(
    ("lines", "instruction"),
    [
        (['/system Say "hi"'], 'Say "hi"'),
        (['/system "be brief"'], "be brief"),
        (['/system """be', 'brief"""'], "be\nbrief"),
        (["/system be \\", "brief"], "be \nbrief"),
        (["/system be brief", '/system "w5" or "w6"'], '"w5" or "w6"'),
    ],
)
def test_an_instruction_is_what_was_typed(lines: list[str], instruction: str, talk: Talk, tmp_path: Path) -> None:
    journal = tmp_path / "chat.json"
    assert f"instruction: {instruction}\n" in talk(*lines, "/system", options=["--journal", str(journal)])
    assert json.loads(journal.read_text())["messages"] == [{"role": "system", "content": instruction}]


def test_a_message_of_nothing_but_quotes_is_not_asked(talk: Talk) -> None:
    said = talk(6 * '"', '"""', "", ' """', "/stats")
    assert "no answer yet" in said


def test_a_cleared_chat_has_no_context(talk: Talk) -> None:
    assert "context: 0 of" in talk("w5", "/clear", "/stats")


def test_an_instruction_that_the_template_refuses_does_not_end_the_chat(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    plain = ChatTokenizer.__init__
    monkeypatch.setattr(
        ChatTokenizer, "__init__", lambda self, tokens, template, *more: plain(self, tokens, check + template, *more)
    )
    said = talk("/system be brief", "w5", '/system ""', "w6")
    assert "chat template failed: no system role" in said and said.count("ended by") == 1


def test_a_path_or_a_quoted_line_is_no_command(talk: Talk, tmp_path: Path) -> None:
    journal = tmp_path / "chat.json"
    talk("/etc/hosts w5", '"""/help"""', options=["--journal", str(journal)])
    asked = [turn["content"] for turn in json.loads(journal.read_text())["messages"][::2]]
    assert asked == ["/etc/hosts w5", "/help"]


def test_a_chat_goes_offline_and_comes_back(folders: Folders, bundle: Bundle, talk: Talk) -> None:
    with serve(make_verifier(folders)) as address:
        said = talk("w5", "/offline on", "w6", "/model", "/offline off", "w7", options=["--server", address])
    first, alone, last = (line for line in said.splitlines() if "ended by" in line)
    assert "4 verified tokens" in first and "4 verified tokens" in last
    assert " 0 verified tokens" in alone and "4 written offline" in alone
    assert f"verifier: {address}" in said and "/offline is on" in said


def test_a_user_who_wants_no_history_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setenv("OUTRIDER_NOHISTORY", "1")
    assert _open_history() is None and not [*tmp_path.iterdir()]


def test_a_home_that_cannot_be_written_costs_the_history_alone(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    assert _open_history() is None
    assert "ended by" in talk("w5")


def test_a_pipe_gets_the_answer_alone_in_one_line(folders: Folders, bundle: Bundle) -> None:
    question = "w5 w9 w11"
    truth = bundle.tokenizer.decode(
        oracle(folders, bundle.render_chat([{"role": "user", "content": question}]), Sampling()),
        skip_special_tokens=True,
    )
    with serve(make_verifier(folders)) as address:
        command = [sys.executable, "-m", "outrider", "generate", "--bundle", str(folders[2]), "--server", address,
                   "--threads", "1", "--max-tokens", "40", question]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0 and len(truth) > 80
    assert done.stdout == truth + "\n" and "verified tokens" in done.stderr


def test_a_reader_that_has_gone_is_no_traceback(folders: Folders) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "outrider", "generate", "--bundle", str(folders[2]), "--threads", "1", "w5 w9"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=HANG)
    os.close(write)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


def test_a_server_that_cannot_be_reached_is_named_with_the_reason(folders: Folders) -> None:
    command = [sys.executable, "-m", "outrider", "generate", "--bundle", str(folders[2]), "--server", "127.0.0.1:1",
               "--threads", "1", "--give-up", "4", "w5 w9"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    notice, last = (line for line in done.stderr.splitlines() if "doctor" in line)
    assert done.returncode == 3
    assert notice == f"{last}; an answer that cannot continue without it waits 4 s at most (--give-up)"
    assert "127.0.0.1:1" in last and "refused; run: outrider doctor --server 127.0.0.1:1" in last


def test_a_verifier_says_at_once_that_it_loads(folders: Folders) -> None:
    command = [sys.executable, "-m", "outrider", "verifier", "--model", str(folders[0]), "--drafter", str(folders[1]),
               "--port", "0", "--max-model-len", "120", "--kv-tokens", "600"]  # fmt: skip
    script = [(b"loading target", b""), (b"verifier ready", b"\x03")]
    status, said = run_in_pty(command, script, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert status == 0 and said.startswith(f"loading target {folders[0]} ...".encode()), said


def outrider(folders: Folders, *arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command: list[str | bytes] = [sys.executable, "-m", "outrider", *arguments, "--bundle", str(folders[2])]
    command += ["--policy", "device-only", "--max-tokens", "8"]
    return subprocess.run(command, capture_output=True, timeout=HANG, **options)


def close_input() -> None:
    os.close(0)


def test_a_closed_standard_input_ends_chat_and_generate(folders: Folders) -> None:
    """Each of them at once, and in words."""
    chatted = outrider(folders, "chat", preexec_fn=close_input)
    assert chatted.returncode == 0, chatted.stderr
    for closed in ({"preexec_fn": close_input}, {"stdin": subprocess.DEVNULL}):
        asked = outrider(folders, "generate", "-", **closed)
        assert asked.returncode == 1 and b"the prompt is empty" in asked.stderr and b"Traceback" not in asked.stderr


@pytest.mark.parametrize("encoding", first(1, ["cp1252", "ascii", "latin-1"]))
def test_an_output_that_lacks_letters_gets_others_in_their_place(encoding: str) -> None:
    """Which no model may end by writing one."""
    script = "from io import BytesIO, TextIOWrapper; import sys; from outrider.cli import device\n"
    script += "def show(options):\n print('caf\u00e9 \u4f60\u597d \U0001f600', flush=True); return 0\n"
    script += "device.run = show; sys.exit(device.main(['generate', 'hi']))"
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=HANG, env=environment)
    assert done.returncode == 0 and done.stdout.startswith(b"caf") and done.stdout.endswith(b" ?? ?\n"), done


@pytest.mark.parametrize("where", ["prompt", "stop"])
def test_an_argument_that_is_not_utf_8_is_refused_by_name(talk: Talk, where: str) -> None:
    word = os.fsdecode(b"caf\xe9")
    arguments = [word] if where == "prompt" else ["hi", "--stop", word]
    assert talk(command=["generate", *arguments], status=1).startswith(f"error: {where} is not utf-8")


def test_input_that_is_not_utf_8_is_read_as_far_as_it_is(talk: Talk) -> None:
    for command in (["chat"], ["generate", "-"]):
        assert "ended by" in talk("caf\udce9 w5", command=command)
