"""Compile android_demo/core against Android's own API, compile its tests for the desktop JVM, and run them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from android_demo.ci.pins import REPOSITORY
from android_demo.ci.store import provided

PROJECT = REPOSITORY / "android_demo"
SOURCES = PROJECT / "core" / "src"
OUTPUT = REPOSITORY / "build" / "android" / "core"
#: what the tests read: the vectors that all ports share
VECTORS = REPOSITORY / "outrider_core" / "protocol" / "vectors"
#: and the default bundle, which `make` writes
BUNDLE = REPOSITORY / "build" / "bundle"


class BuildError(RuntimeError):
    """The compiler refused the sources, or a test failed; the output says why."""


@dataclass(frozen=True)
class Toolchain:
    """Files of the unpacked pins that compiling and testing `core` takes."""

    kotlinc: Path
    stdlib: Path
    coroutines: Path
    kotlin_test: Path
    kotlin_test_junit: Path
    junit: Path
    android: Path

    @classmethod
    def fetched(cls) -> Toolchain:
        """From the cache, or fetched now. Raises FetchError."""
        folder = provided("core")
        compiler = folder["kotlin-compiler"] / "package"
        lib = compiler / "lib"
        return cls(
            kotlinc=compiler / "bin" / "kotlinc", stdlib=lib / "kotlin-stdlib.jar",
            coroutines=lib / "kotlinx-coroutines-core-jvm.jar", kotlin_test=lib / "kotlin-test.jar",
            kotlin_test_junit=lib / "kotlin-test-junit5.jar",
            junit=folder["junit5"] / "usr" / "share" / "java" / "junit-platform-console-standalone.jar",
            android=folder["libandroid-23-java"] / "usr" / "share" / "java" / "com.android.android-23.jar",
        )  # fmt: skip


def versions() -> dict[str, str]:
    """The [versions] of Gradle's catalog."""
    catalog = tomllib.loads((PROJECT / "gradle" / "libs.versions.toml").read_text(encoding="utf-8"))
    found: dict[str, str] = catalog["versions"]
    return found


def compile_kotlin(tools: Toolchain, sources: Path, output: Path, classpath: list[Path], *flags: str) -> Path:
    """Compile all of `sources` into `output`, unless that was made of the very same. Raises BuildError."""
    files = sorted(sources.rglob("*.kt"))
    stamp = hashlib.sha256(repr([flags, [str(path) for path in classpath]]).encode())
    for path in [*files, *(entry / "stamp" for entry in classpath if entry.is_dir())]:
        stamp.update(str(path).encode() + path.read_bytes())
    record = output / "stamp"
    if record.is_file() and record.read_text() == stamp.hexdigest():
        return output
    shutil.rmtree(output, ignore_errors=True)
    command = [
        "bash", str(tools.kotlinc), "-Werror", "-no-reflect", "-jvm-target", "1.8", *flags,
        "-cp", os.pathsep.join(map(str, classpath)), "-d", str(output), *map(str, files),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildError(done.stdout.strip())
    record.write_text(stamp.hexdigest())
    return output


def build(tools: Toolchain) -> Path:
    """The classes of `core`. No JDK on the classpath: what compiles uses nothing that Android lacks."""
    return compile_kotlin(
        tools, SOURCES / "main" / "kotlin", OUTPUT / "main", [tools.android, tools.coroutines], "-no-jdk",
        "-module-name", "outrider-core",
    )  # fmt: skip


def build_tests(tools: Toolchain) -> list[Path]:
    """The classpath that runs the tests and what stands beside them."""
    needed = [build(tools), tools.coroutines, tools.kotlin_test, tools.kotlin_test_junit, tools.junit]
    tests = compile_kotlin(tools, SOURCES / "test" / "kotlin", OUTPUT / "test", needed, f"-Xfriend-paths={needed[0]}")
    return [tests, *needed, tools.stdlib]


def java(classpath: list[Path], *arguments: str) -> list[str]:
    """A command line that runs a class on the desktop JVM; options of the JVM may stand before the class."""
    properties = [f"-Dvectors={VECTORS}", f"-Dbundle={BUNDLE}"]
    return ["java", "-ea", *properties, "-cp", os.pathsep.join(map(str, classpath)), *arguments]


def run_tests(classpath: list[Path], report: Path, *selection: str) -> None:
    """Run the tests (all, or a selection such as `--select-class NAME`); JUnit's XML goes to `report`.

    Raises BuildError.
    """
    chosen = selection or ("--scan-classpath", str(classpath[0]))
    launcher = "org.junit.platform.console.ConsoleLauncher"
    command = java(
        classpath, launcher, *chosen, "--disable-banner", "--disable-ansi-colors", "--details=summary",
        "--fail-if-no-tests", "--reports-dir", str(report),
    )  # fmt: skip
    if subprocess.run(command).returncode:
        raise BuildError("tests failed")


def run(command: Sequence[str | Path]) -> str:
    """What the command prints. Raises BuildError with it where the command fails."""
    try:
        done = subprocess.run(
            [os.fspath(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError:
        raise BuildError(f"{command[0]} is not installed; a JDK (17 or later) has it") from None
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if not re.match(r"(WARNING|Warning|Info)\b", line)]
        raise BuildError("\n".join(lines[-40:]) or f"{command[0]} ended with {done.returncode}")
    return done.stdout
