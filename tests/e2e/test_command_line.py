"""The command `outrider`: help, versions, and what it refuses before anything is loaded."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_runtime.session.timeouts import Patience
from outrider.cli import COMMANDS, device, main
from outrider.cli.arguments import COMMANDS as DEVICE_COMMANDS
from outrider.cli.arguments import build_parsers, parse
from outrider.cli.options import ChatOptions, GenerateOptions, ServeOptions
from outrider.cli.serve import Endpoint
from tests.waiting import HANG

Folders = tuple[Path, Path, Path]
ROOT = Path(__file__).parents[2]
#: shows the prompt that its arguments make
ASK = f"{sys.executable} -c 'import sys; from outrider.cli.generate import prompt_of; print(prompt_of(sys.argv[1:]))'"


def generate(*arguments: str) -> GenerateOptions:
    options = parse(["generate", *arguments], "outrider")
    assert isinstance(options, GenerateOptions)
    return options


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-tokens", "0"], "--max-tokens: must be a whole number, at least 1, not '0'"),
        (["--max-tokens", "-4"], "--max-tokens"),
        (["--threads", "-1"], "--threads: must be a whole number, at least 0"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-p", "7"], "top_p must be above 0 and at most 1, not 7.0"),
        (["--seed", "-2"], "seed must be"),
        (["--give-up", "0"], "--give-up: must be seconds, more than 0, not '0'"),
        (["--give-up", "soon"], "--give-up"),
    ],
)
def test_a_wrong_figure_is_refused_by_name(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(["generate", *arguments, "hello"], "outrider")
    assert exit.value.code == 2 and text in capsys.readouterr().err.splitlines()[-1]


def test_a_stop_string_does_not_swallow_the_prompt() -> None:
    options = generate("--stop", "blue", "question", "--stop", "green")
    assert options.stop == ("blue", "green") and options.prompt == ["question"]


def test_options_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TOKEN", "secret")
    options = generate("--local", "--model", "my/model", "--policy", "cloud-only", "--threads", "3", "hi")
    assert options.local and options.model == "my/model" and options.give_up is None
    runtime = options.runtime()
    assert runtime.token == "secret" and runtime.policy.writer == "cloud-only" and runtime.threads == 3
    assert options.answer(options.stop)["max_new_tokens"] == 256
    monkeypatch.setenv("OUTRIDER_API_KEY", "key")
    serve = parse(["serve", "--server", "127.0.0.1:1"], "outrider")
    assert isinstance(serve, ServeOptions) and serve.api_key == "key" and not serve.local


@pytest.mark.parametrize(("command", "limit"), [("chat", 20), ("serve", 20), ("generate", 22), ("doctor", 8)])
def test_a_command_has_few_flags(command: str, limit: int) -> None:
    _, commands = build_parsers("outrider")
    flags = [action for action in commands[command]._actions if action.option_strings and action.dest != "help"]
    assert len(flags) <= limit


def test_flags_are_the_fields_of_the_options() -> None:
    _, commands = build_parsers("outrider")
    for name, command in commands.items():
        given = {action.dest for action in command._actions} - {"help"}
        assert given == {each.name for each in fields(DEVICE_COMMANDS[name].options)}


def test_a_journal_without_a_folder_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["chat", "--journal", "/nonexistent/x"], "outrider")
    assert "there is no folder /nonexistent; make it" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        parse(["chat", "--journal", str(tmp_path)], "outrider")
    assert "is a folder; name a file" in capsys.readouterr().err.splitlines()[-1]
    options = parse(["chat", "--journal", str(tmp_path / "chat.json")], "outrider")
    assert isinstance(options, ChatOptions) and options.journal == tmp_path / "chat.json"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_help_of_a_command_begins_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    first, example, *_ = shown.splitlines()
    assert first.startswith("example") and example.startswith(f"  outrider {command}")
    assert f"usage: outrider {command}" in shown


@pytest.mark.parametrize(
    ("module", "prog"),
    [
        ("edge_runtime", "python -m edge_runtime"),
        ("cloud.verifier", "python -m cloud.verifier"),
        ("export", "python -m export"),
        ("outrider", "outrider"),
    ],
)
def test_help_shows_how_it_was_called(module: str, prog: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and f"usage: {prog}" in done.stdout


def test_the_front_page(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["help"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("example") and all(f"\n  {name}" in shown for name in COMMANDS)
    assert main(["nonsense"]) == 2 and "`outrider --help` lists them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("run", "did you mean `outrider chat`?"), ("genrate", "did you mean `outrider generate`?"),
        ("server", "did you mean `outrider verifier`?"), ("xyzzy", "`outrider --help` lists them"),
    ],
)  # fmt: skip
def test_a_command_that_is_not_there_is_answered_with_one_that_is(
    asked: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([asked]) == 2
    assert capsys.readouterr().err == f"outrider: there is no command {asked!r}; {hint}\n"


@pytest.mark.parametrize(
    ("folder", "program"),
    [
        ("cloud", "from outrider.cli import main; sys.exit(main(['verifier', '--print-config']))"),
        ("export", "from outrider.cli import main; sys.exit(main(['export', 'bundle']))"),
        ("edge_runtime", "from outrider import EdgeRuntime"),
        ("edge_runtime", "from outrider.cli import main; sys.exit(main(['chat']))"),
    ],
)
def test_an_app_that_hides_a_package_is_told_which(tmp_path: Path, folder: str, program: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "__init__.py").write_text("")
    begin = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
    # an editable installation finds the modules of a package that is hidden
    begin += "sys.meta_path = [finder for finder in sys.meta_path if 'Editable' not in repr(finder)]; "
    done = subprocess.run([sys.executable, "-c", begin + program], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"{tmp_path / folder} comes before Outrider's own package {folder!r}" in last, done.stderr


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        ("printf 'some notes\\n' | {}", "summarise:\n\nsome notes"), ("{} < notes", "summarise:\n\nsome notes"),
        ("{} < /dev/null", "summarise:"), ("{} <&-", "summarise:"),
    ],
)  # fmt: skip
def test_standard_input_stands_where_a_dash_is(tmp_path: Path, shell: str, asked: str) -> None:
    (tmp_path / "notes").write_text("some notes\n")
    program = (
        f'{sys.executable} -c \'from outrider.cli.generate import prompt_of; print(prompt_of(["summarise:", "-"]))\''
    )
    done = subprocess.run(
        shell.format(program), shell=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert done.stdout == f"{asked}\n", done.stderr


def test_a_loop_around_a_command_keeps_its_lines(tmp_path: Path) -> None:
    (tmp_path / "questions").write_text("one\ntwo\nthree\n")
    program = (
        f"{sys.executable} -c 'import sys; from outrider.cli.generate import prompt_of; print(prompt_of(sys.argv[1:]))'"
    )
    done = subprocess.run(
        f'while read -r line; do {program} say "$line"; done < questions', shell=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert done.stdout == "say one\nsay two\nsay three\n", done.stderr


def test_a_missing_extra_is_named() -> None:
    program = "import sys; sys.modules['rich'] = None; from outrider.cli import main; sys.exit(main(['chat']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines() == [
        "outrider chat needs the package 'rich'; run: pip install 'outrider[edge]'"
    ]


@pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("localhost", "localhost")])
def test_loopback_needs_no_key(
    host: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folders: Folders
) -> None:
    served: list[tuple[Any, ...]] = []
    greetings: list[str] = []

    async def run(endpoint: Endpoint, bound: list[socket.socket], greeting: str) -> None:
        served.extend(each.getsockname() for each in bound)
        greetings.append(greeting)
        for each in bound:
            each.close()

    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError:
        pytest.skip(f"this machine has no {host}")

    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    monkeypatch.setattr("outrider.cli.serve.run", run)
    assert device.main(["serve", "--bundle", str(folders[2]), "--host", host, "--port", "0"]) == 0
    assert {address[0] for address in served} == {each[4][0] for each in socket.getaddrinfo(host, 0)}
    (port,) = {address[1] for address in served}
    assert port and f"http://{shown}:{port}/v1" in greetings[0]
    assert device.main(["serve", "--bundle", str(folders[2]), "--host", "0.0.0.0"]) == 1
    assert "0.0.0.0 is open to other machines; give --api-key" in capsys.readouterr().err


def test_a_port_in_use_is_said_and_nothing_else(capsys: pytest.CaptureFixture[str], folders: Folders) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert device.main(["serve", "--bundle", "/nowhere", "--port", str(port)]) == 1  # before anything is loaded
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use"


def test_a_hang_up_ends_serve_only_with_its_terminal(folders: Folders) -> None:
    """A service manager sends it for a reload, a terminal as it closes."""
    usual = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    serving = [sys.executable, "-m", "outrider", "serve", "--bundle", str(folders[2]), "--port", "0"]
    command = [sys.executable, "-c", usual, *serving]  # whoever runs the tests may ignore it
    near, far = os.openpty()
    for stdin in (subprocess.DEVNULL, far):
        process = subprocess.Popen(command, stdin=stdin, stderr=subprocess.PIPE, cwd=ROOT)
        try:
            assert process.stderr is not None
            while b"/v1" not in (line := process.stderr.readline()):
                assert process.poll() is None
            address = re.findall(r"http://\S+/v1", line.decode())[0]
            process.send_signal(signal.SIGHUP)
            if stdin == subprocess.DEVNULL:
                assert httpx.get(f"{address}/models").is_success
                process.send_signal(signal.SIGINT)
            process.stderr.read()
            assert process.wait(HANG) == 0
        finally:
            process.kill()
    os.close(near)
    os.close(far)


def test_a_stop_while_packages_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(argv: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "main", stopped)
    assert main(["chat"]) == 130


def test_help_says_how_long_an_answer_waits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert f"default: {Patience.offline:g}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("server", "told"), [("there.invalid:1", True), ("wss://there.invalid:1", False), ("127.0.0.1:1", False)]
)
def test_clear_text_to_another_machine_is_told(
    folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], server: str, told: bool
) -> None:
    bundle = str(folders[2])
    status = main(["generate", "--bundle", bundle, "--threads", "1", "--server", server, "--give-up", "0.5", "w5"])
    assert status == 3
    assert ("is reached in clear text" in capsys.readouterr().err) == told


def test_an_answer_that_was_given_up_is_json_too(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(folders[2])
    waits = ["--server", "127.0.0.1:1", "--give-up", "0.5", "--policy", "cloud-only"]
    assert main(["generate", "--bundle", bundle, "--threads", "1", *waits, "--json", "w5"]) == 3
    assert json.loads(capsys.readouterr().out) == {"text": "", "verified_text": "", "reason": "unreachable"}
