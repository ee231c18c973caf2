"""Frames found by libFuzzer, guided by the lines of outrider_core/protocol/ and cloud/server that they reach.

An optional tool: `pip install atheris`, then `python -m tests.fuzz --coverage --seconds 600`.
"""

from __future__ import annotations

import inspect
import random
import struct
import sys
import tempfile
import time
from pathlib import Path
from types import FunctionType, ModuleType

import cloud.server.connection
import outrider_core.protocol.rows
import outrider_core.protocol.tree
import outrider_core.protocol.wire
from outrider_core.protocol.wire import encode
from tests.cloud.drive import make_verifier
from tests.fuzz import VOCAB, Front, Mutator, check_decoders
from tests.tiny import tiny_model

MODULES = [
    outrider_core.protocol.wire,
    outrider_core.protocol.tree,
    outrider_core.protocol.rows,
    cloud.server.connection,
]
MAX_INPUT = 4096


def functions_of(module: ModuleType) -> list[FunctionType]:
    """All functions and methods that the module defines."""
    holders = [module, *(c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__)]
    found = []
    for holder in holders:
        for value in vars(holder).values():
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                found.append(value)
    return found


def join(frames: list[bytes]) -> bytes:
    """One input of the fuzzer: frames behind their lengths."""
    return b"".join(struct.pack("<H", len(frame)) + frame for frame in frames)


def split(data: bytes) -> list[bytes]:
    """The inverse, of any bytes."""
    frames = []
    while len(data) >= 2:
        (length,) = struct.unpack("<H", data[:2])
        frames.append(data[2 : 2 + length])
        data = data[2 + length :]
    return frames


def explore(seconds: int, seed: int) -> None:
    """Run libFuzzer for so long; it ends the process, with a traceback and a file `crash-*` on a defect."""
    try:
        import atheris  # type: ignore[import-untyped, import-not-found]
    except ImportError:
        sys.exit("--coverage needs atheris: pip install atheris")

    for module in MODULES:
        for function in functions_of(module):
            atheris.instrument_func(function)

    verifier = make_verifier(tiny_model("llama", seed=4, vocab=VOCAB), (), max_sessions=8, kv_tokens=512)
    verifier.start()
    front = Front(verifier)
    paused = 0

    def one_input(data: bytes) -> None:
        nonlocal paused
        connection = front.connect()
        for frame in split(data):
            for variant in (frame, frame + b"\x80"):  # as it is, and as a frame that gets past the padding
                front.receive(connection, variant, check_decoders(variant, len(variant) // 5))
            if front.submitted >= paused + 8:
                time.sleep(0.004)
                paused = front.submitted
            front.deliver()
        front.answers(connection)
        connection.lost()
        assert not front.streams and verifier.alive

    with tempfile.TemporaryDirectory() as folder:
        mutator = Mutator(random.Random(seed))
        for number in range(300):
            frames = (
                [encode(mutator.message()) for _ in range(4)] if number % 2 else [mutator.frame() for _ in range(3)]
            )
            frames = [frame for frame in frames if len(frame) < MAX_INPUT // 4]
            (Path(folder) / f"{number:03}").write_bytes(join(frames))
        flags = [f"-max_total_time={seconds}", f"-seed={seed + 1}", f"-max_len={MAX_INPUT}", "-timeout=30"]
        atheris.Setup([sys.argv[0], *flags, "-rss_limit_mb=4096", "-print_final_stats=1", folder], one_input)
        atheris.Fuzz()
