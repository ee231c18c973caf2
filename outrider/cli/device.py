"""`outrider generate`, `chat`, `serve` and `doctor`: from the command line to an exit status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from io import TextIOWrapper
from typing import TYPE_CHECKING

from rich.console import Console

from edge_runtime.answer.threads import DrafterFailed
from edge_runtime.link.address import in_clear_text
from edge_runtime.link.events import EngineFailed, LinkRefused
from edge_runtime.link.transport import LinkMaker
from edge_runtime.runtime import EdgeRuntime
from outrider.cli.arguments import parse
from outrider.cli.chat import Chat
from outrider.cli.generate import generate
from outrider.cli.opening import CommandError, open_server
from outrider.cli.options import ChatOptions, DoctorOptions, GenerateOptions, Options, ServeOptions, WritingOptions
from outrider.cli.prompt import Keyboard
from outrider_core.drafting.bundle import Bundle, BundleError, open_bundle
from outrider_core.serving import bind, in_url, is_loopback

if TYPE_CHECKING:
    from outrider.cli.doctor import Finding

#: errors shown as one line: the user has to change something
EXPECTED = (BundleError, DrafterFailed, LinkRefused, EngineFailed, CommandError, ValueError)


def main(argv: Sequence[str] | None = None, prog: str = "outrider") -> int:
    """Run one command; returns the exit status. prog: how it was called, for help and errors."""
    options = parse(argv, prog)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a code page that lacks a letter of the answer must not end it
    try:
        check_text(options)
        return run(options)
    except BrokenPipeError:  # the reader has gone; Python would complain again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EXPECTED as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def check_text(options: Options) -> None:
    """Raise CommandError on text that does not match the terminal's encoding; paths may be any bytes."""
    for each in fields(options):
        value = getattr(options, each.name)
        for text in value if isinstance(value, list | tuple) else [value]:
            try:
                if isinstance(text, str):
                    text.encode()
            except UnicodeEncodeError:
                name = each.name.replace("_", "-")
                raise CommandError(f"{name} is not {sys.getfilesystemencoding()}; set the terminal to UTF-8") from None


def run(options: Options) -> int:
    """Run the command. Raises one of EXPECTED."""
    if isinstance(options, DoctorOptions):
        return doctor(options)
    with contextlib.ExitStack() as sockets:
        bound = _listen(options) if isinstance(options, ServeOptions) else []  # before anything large is loaded
        for each in bound:
            sockets.enter_context(each)
        return _run(options, bound)


def _run(options: WritingOptions, bound: list[socket.socket]) -> int:
    bundle = open_bundle(options.bundle) if options.bundle else _default_bundle()
    address = options.server
    if address and options.policy != "device-only" and in_clear_text(address):
        print(
            f"note: {address} is reached in clear text: others on the network can read along; use wss://",
            file=sys.stderr,
        )
    with open_server(options, bundle) as server:
        match options:
            case GenerateOptions():
                return asyncio.run(generate(options, bundle, server))
            case ChatOptions():
                return Keyboard().run(lambda keyboard: Chat(options, bundle, server, keyboard).run())
            case ServeOptions():
                return asyncio.run(serve(options, bundle, server, bound))
            case _:
                raise AssertionError(options)


def _default_bundle() -> Bundle:
    """Open the default bundle. Raises CommandError."""
    from outrider.cli.default_bundle import open_default_bundle

    return open_default_bundle(Console(stderr=True))


def _listen(options: ServeOptions) -> list[socket.socket]:
    """Take the port, and ignore the terminal's end. Raises CommandError."""
    if not is_loopback(options.host) and not options.api_key:
        raise CommandError(f"{options.host} is open to other machines; give --api-key too, or serve on 127.0.0.1")
    if hasattr(signal, "SIGHUP") and not (sys.stdin and sys.stdin.isatty()):  # a terminal that closes ends it
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        return bind(options.host, options.port)
    except OSError as error:
        raise CommandError(f"cannot listen on {options.host} port {options.port}: {error.strerror or error}") from None


async def serve(
    options: ServeOptions, bundle: Bundle, server: str | LinkMaker | None, bound: list[socket.socket]
) -> int:
    try:
        from outrider.cli.serve import Endpoint, run
    except ImportError as error:
        raise CommandError(f"serve needs {error.name or error}; run: pip install 'outrider[serve]'") from None
    runtime = EdgeRuntime(bundle, server, options.runtime(lookup=not options.no_lookup))
    endpoint = Endpoint(
        runtime,
        unverified=options.unverified,
        origins=options.allow_origin,
        key=options.api_key,
        aliases=options.alias,
    )
    port = bound[0].getsockname()[1]
    await run(endpoint, bound, f"{endpoint.model} on http://{in_url(options.host)}:{port}/v1")
    return 0


def doctor(options: DoctorOptions) -> int:
    from outrider.cli.doctor import examine, show

    console = Console(stderr=options.json)
    if options.model:
        from outrider.cli.model_report import look_at_model

        findings = look_at_model(options.model)
        show([] if options.json else findings, console)
        return _reported(findings, options)
    findings = asyncio.run(
        examine(
            options.bundle,
            options.server,
            token=options.token,
            ca_file=options.ca_file,
            engine=options.engine,
            threads=options.threads,
            tell=lambda finding: None if options.json else show([finding], console),
        )
    )
    return _reported(findings, options)


def _reported(findings: list[Finding], options: DoctorOptions) -> int:
    """Print the findings, as JSON if requested; return the exit status."""
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    return int(any(finding.level == "bad" for finding in findings))
