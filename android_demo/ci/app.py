"""The part of the app without android.*, compiled and tested on the desktop JVM."""

from __future__ import annotations

from pathlib import Path

from android_demo.ci import core, engines
from android_demo.ci.pins import REPOSITORY

SOURCES = REPOSITORY / "android_demo" / "app" / "src"
CHAT = SOURCES / "main" / "kotlin" / "dev" / "outrider" / "app" / "chat"
OUTPUT = REPOSITORY / "build" / "android" / "chat"


def build_tests(tools: core.Toolchain, libraries: engines.Libraries) -> list[Path]:
    """Return the classpath that runs the tests. Android is not on it, so code that needs it does not compile."""
    core_tests, *others = core.build_tests(tools)
    needed = [core_tests, *others, engines.build(tools, libraries)]
    chat = core.compile_kotlin(tools, CHAT, OUTPUT / "main", needed, core.ENGINE_API)
    tests = core.compile_kotlin(
        tools,
        SOURCES / "test" / "kotlin",
        OUTPUT / "test",
        [chat, *needed],
        f"-Xfriend-paths={chat},{core.build(tools)},{core.build_fixtures(tools)},{core_tests}",
        core.ENGINE_API,
    )
    return [tests, chat, *needed, *libraries.classes]
