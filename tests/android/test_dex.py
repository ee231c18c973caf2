"""R8's output of core, engines and app, converted back to classes, behaves as before.

`shrunk` has all tests inside; `shipped` is the code of the signed APK itself.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from android_demo.ci import apk, app, core, dex, engines, native
from android_demo.ci.engines import Libraries
from benchmarks.links import EmulatedLink
from export.bundle.verifier_process import VerifierProcess
from tests.android.phone import Phone, airplane, ended, text

OUTPUT = apk.OUTPUT.parent / "dex-tests"
RULES = (*apk.RULES, Path(__file__).with_name("dex-rules.pro"))


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    return Libraries.fetched()


@pytest.fixture(scope="module")
def shrunk(tools: core.Toolchain, libraries: Libraries, app_classpath: list[Path]) -> list[Path]:
    """Everything and its tests through R8 under the app's rules, as a classpath."""
    both = [*app_classpath, *engines.build_tests(tools, libraries), native.build_compat(tools)]
    classes = [path for path in dict.fromkeys(both) if path.is_dir()]
    jars = [*apk.jars_of(tools, libraries, apk.Kind(executorch=True)), tools.kotlin_test]
    made = apk.shrink(apk.Tools.fetched(), tools, classes, jars, OUTPUT, RULES, [tools.junit])
    return [dex.to_classes(made / "classes.dex", OUTPUT / "back.jar")]


@pytest.fixture(scope="module")
def shipped(tools: core.Toolchain, app_classpath: list[Path]) -> list[Path]:
    """The signed APK's own classes.dex, and the program that drives it.

    That wants more of Kotlin's libraries than the app does, so these stand before it in full.
    """
    own, fakes = dex.to_classes(apk.build(apk.Kind()), OUTPUT / "own.jar"), core.OUTPUT / "testFixtures"
    return [tools.stdlib, tools.coroutines, own, app.OUTPUT / "test", core.OUTPUT / "test", fakes]


@pytest.fixture(params=["shrunk", "shipped"])
def turned_back(request: pytest.FixtureRequest) -> list[Path]:
    classpath: list[Path] = request.getfixturevalue(request.param)
    return classpath


def test_core_and_app_pass_their_tests_as_dex(
    app_classpath: list[Path],
    shrunk: list[Path],
    tmp_path: Path,
) -> None:
    core.run_tests(app_classpath, tmp_path, "--scan-classpath", f"{app.OUTPUT / 'test'}:{core.OUTPUT / 'test'}")
    cases = [
        f"{case.attrib['classname']}#{case.attrib['name'].removesuffix('()')}"
        for file in tmp_path.glob("*.xml")
        for case in ElementTree.parse(file).iter("testcase")
    ]
    assert len(cases) > 60
    command = core.java(shrunk, *dex.JVM_OPTIONS, "dev.outrider.core.RunTestsKt", *cases)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, "\n".join(re.findall(r"failed .*(?:\n\s.*)*", done.stdout)) + done.stderr[-3000:]
    assert done.stdout.count("passed ") == len(cases)


def test_airplane_mode_as_dex(
    turned_back: list[Path],
    folders: dict[str, Path],
    verifier: VerifierProcess,
    wanted: str,
    tmp_path: Path,
) -> None:
    async def run() -> Phone:
        async with EmulatedLink(verifier.port, delay=0.02) as link:
            phone = Phone(turned_back, folders["bundle"], link.address, tmp_path / "journal", True, *dex.JVM_OPTIONS)
            async with phone:
                await airplane(phone, link)
            return phone

    assert asyncio.run(run()).states[-1]["turns"][1] == ["assistant", [["verified", wanted]]]


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.skipif(not (core.BUNDLE / "manifest.json").is_file(), reason="no build/bundle; run: make")
def test_the_default_bundle_writes_the_same_as_dex(
    app_classpath: list[Path],
    turned_back: list[Path],
    libraries: Libraries,
    tmp_path: Path,
) -> None:
    """The app as a user first meets it, with ONNX Runtime's Android natives and no server."""
    options = native.options(native.build(libraries))

    async def answer(classpath: list[Path], name: str, *more: str) -> str:
        async with Phone(classpath, core.BUNDLE, None, tmp_path / name, False, *options, *more) as phone:
            await phone.until(lambda state: state["ready"])
            phone.say("Why is the sky blue?")
            state = await phone.until(ended)
            assert state["problem"] is None
            return text(state["turns"][1][1], "provisional")

    plain = asyncio.run(answer(app_classpath, "plain"))
    assert len(plain.split()) > 10
    assert asyncio.run(answer(turned_back, "dex", *dex.JVM_OPTIONS)) == plain
