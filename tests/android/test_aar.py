"""The AAR: what an app's build reads of it, and an app that is compiled against it, and shrunk with it, and run."""

from __future__ import annotations

import asyncio
import subprocess
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from android_demo.ci import aar, apk, core, dex, native
from android_demo.ci.engines import Libraries
from edge_runtime.events import Finished
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from outrider_core.drafting.bundle import open_bundle
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.android.device import MAX_CONTEXT, tiny_folders, verifier_of
from tests.tiny import json_tokenizer, plain_decode, tiny_model

CONSUMER = Path(__file__).with_name("consumer")
MAIN = "com.example.consumer.MainKt"
QUESTION = "Why is the sky blue?"
POM = {"m": "http://maven.apache.org/POM/4.0.0"}
VERSION = core.versions()
#: of the AAR
MOST_BYTES = 650_000
#: parts of the lock: what apps are compiled with
COMPILERS = ("kotlin-2.1", "kotlin-2.2", "core")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return aar.build(tmp_path_factory.mktemp("aar"))


@pytest.fixture(scope="module")
def opened(file: Path) -> Path:
    """What Android's plugin would see: the AAR's content as a folder."""
    with zipfile.ZipFile(file) as archive:
        archive.extractall(file.parent / "opened")
    return file.parent / "opened"


@pytest.fixture(scope="module", params=COMPILERS)
def consumer(request: pytest.FixtureRequest, opened: Path) -> tuple[core.Toolchain, Path]:
    """An app's compiler and classes. It sees Android, the AAR and the POM's compile scope: no engine, no JDK."""
    tools = core.Toolchain.fetched(request.param)
    seen = [opened / "classes.jar", tools.coroutines, tools.android]
    return tools, core.compile_kotlin(tools, CONSUMER, opened.parent / request.param, seen, "-no-jdk")


@pytest.fixture(scope="module", params=["as it is", "through R8"])
def program(
    request: pytest.FixtureRequest, opened: Path, consumer: tuple[core.Toolchain, Path]
) -> tuple[list[Path], tuple[str, ...]]:
    """A classpath with the app and options of the JVM: its classes and jars, or R8's dex of them turned back.

    R8 shrinks, optimises and renames with the AAR's own rules; of the app only `main` is kept.
    """
    tools, classes = consumer
    jars = [opened / "classes.jar", *apk.jars_of(tools, Libraries.fetched(), apk.Kind())]
    if request.param == "as it is":
        return [classes, *jars], ()
    entry = opened.parent / "entry.pro"
    entry.write_text(f"-keep class {MAIN} {{ public static void main(java.lang.String[]); }}\n")
    rules = [opened / "proguard.txt", entry]
    made = apk.shrink(apk.Tools.fetched(), tools, [classes], jars, opened.parent / f"dex-{classes.name}", rules)
    assert "dev.outrider.core.session.Session -> " in (made / "mapping.txt").read_text(), "R8 renamed nothing"
    return [dex.to_classes(made / "classes.dex", made / "back.jar")], dex.JVM_OPTIONS


def run(program: tuple[list[Path], tuple[str, ...]], options: list[str], *arguments: str) -> list[str]:
    command = core.java(program[0], *program[1], *options, MAIN, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("part", COMPILERS)
def test_an_apps_own_test_runs_without_network_and_engine(opened: Path, file: Path, part: str) -> None:
    """It is compiled against the AAR and the jar for tests alone, and asks the fake verifier."""
    tools = core.Toolchain.fetched(part)
    jars = [opened / "classes.jar", aar.file(file.parent, aar.TESTING), tools.coroutines]
    sources = Path(__file__).with_name("consumer_test")
    classes = core.compile_kotlin(tools, sources, opened.parent / f"test-{part}", [*jars, tools.android], "-no-jdk")
    command = core.java([classes, *jars, tools.stdlib], "com.example.consumer.AppTestKt")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "Because of Rayleigh scattering.\n", done.stderr[-3000:]


def test_an_app_shows_what_is_wrong(program: tuple[list[Path], tuple[str, ...]], tmp_path: Path) -> None:
    (line,) = run(program, [], str(tmp_path), QUESTION)
    assert line == f"{tmp_path}: no manifest.json there; write one with: python -m export bundle"


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """A bundle with a tokenizer that Kotlin reads, a verifier's address, and its target's answer to QUESTION."""
    model = tiny_model(seed=5, vocab=320, dtype=torch.float32)
    folders = tiny_folders(tmp_path_factory.mktemp("spoken"), model, json_tokenizer(320))
    prompt = open_bundle(folders["bundle"]).render_chat([{"role": "user", "content": QUESTION}])
    target = load_target(TargetSource.resolve(str(folders["target"])), "float64").model
    wanted = plain_decode(target, prompt, Sampling(), 40, max_context=MAX_CONTEXT)
    server = verifier_of(folders)
    server.start()
    server.wait_ready()
    yield folders["bundle"], server.address, " ".join(map(str, wanted))
    server.stop()


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_an_app_answers_by_a_verifier(
    program: tuple[list[Path], tuple[str, ...]], spoken: tuple[Path, str, str]
) -> None:
    """ONNX Runtime drafts, a real verifier process decides: the text is plain decoding of the target."""
    bundle, address, wanted = spoken
    options = native.options(native.build(Libraries.fetched()))
    assert len(wanted.split()) > 10
    assert run(program, options, str(bundle), QUESTION, address) == [wanted]


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.skipif(not (core.BUNDLE / "manifest.json").is_file(), reason="no build/bundle; run: make")
def test_an_app_writes_alone_what_python_writes(program: tuple[list[Path], tuple[str, ...]]) -> None:
    """The default bundle's drafter on ONNX Runtime's own Android natives."""

    async def pythons() -> list[int]:
        bundle = open_bundle(core.BUNDLE)
        async with EdgeRuntime(
            bundle, None, RuntimeOptions(policy=Policy(understudy="off"), engine="onnx", threads=1)
        ) as runtime:
            prompt = bundle.render_chat([{"role": "user", "content": QUESTION}])
            events = [event async for event in runtime.generate(prompt, max_new_tokens=40)]
        assert isinstance(events[-1], Finished)
        return events[-1].token_ids

    options = native.options(native.build(Libraries.fetched()))
    (tokens,) = run(program, options, str(core.BUNDLE), QUESTION)
    wanted = asyncio.run(pythons())
    assert len(wanted) > 10
    assert tokens == " ".join(map(str, wanted))


def test_a_debug_build_takes_its_classes(tools: core.Toolchain, opened: Path, tmp_path: Path) -> None:
    """D8, without any rule: all classes as they are."""
    core.run(
        [core.java_program(), "-Xmx1g", "-cp", apk.Tools.fetched().r8, "com.android.tools.r8.D8",
         "--min-api", VERSION["minSdk"], "--lib", tools.android,
         "--classpath", tools.stdlib, "--classpath", tools.coroutines,
         "--classpath", Libraries.fetched().onnx_classes, "--classpath", Libraries.fetched().executorch_classes,
         "--output", tmp_path, opened / "classes.jar"]
    )  # fmt: skip
    code = (tmp_path / "classes.dex").read_bytes()
    for name in ("dev/outrider/core/runtime/EdgeRuntime", "dev/outrider/engines/EnginesKt"):
        assert f"L{name};".encode() in code


def test_it_is_the_same_again(file: Path, tmp_path: Path) -> None:
    again = aar.build(tmp_path)
    for name in aar.ARTIFACTS:
        for suffix in ("", "pom"):
            made = aar.file(again.parent, name, suffix).read_bytes()
            assert made == aar.file(file.parent, name, suffix).read_bytes()


def test_it_has_the_library_and_nothing_of_others(file: Path, opened: Path) -> None:
    assert file.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) == {
            "AndroidManifest.xml", "R.txt", "classes.jar", "proguard.txt", "META-INF/LICENSE",
            "META-INF/com/android/build/gradle/aar-metadata.properties",
        }  # fmt: skip
    with zipfile.ZipFile(opened / "classes.jar") as archive:
        names = archive.namelist()
    assert {name for name in names if name.startswith("META-INF/")} == {
        f"META-INF/outrider-{module}.kotlin_module" for module in ("core", "engines")
    }
    classes = [name for name in names if not name.startswith("META-INF/")]
    assert all(name.startswith(("dev/outrider/core/", "dev/outrider/engines/")) for name in classes)
    assert not [name for name in classes if name.endswith("Test.class")]
    assert (opened / "proguard.txt").read_bytes() == apk.RULES[0].read_bytes()
    assert (opened / "R.txt").read_bytes() == b""  # no resources


def test_its_manifest_is_what_android_reads(opened: Path, tmp_path: Path) -> None:
    tools = apk.Tools.fetched()
    linked = tmp_path / "linked.apk"
    core.run([tools.aapt2, "link", "-I", tools.framework, "--manifest", opened / "AndroidManifest.xml", "-o", linked])
    said = core.run([tools.aapt2, "dump", "badging", linked])
    assert f"package: name='{aar.NAMESPACE}'" in said and f"sdkVersion:'{VERSION['minSdk']}'" in said
    assert "uses-permission: name='android.permission.INTERNET'" in said
    root = ElementTree.parse(opened / "AndroidManifest.xml").getroot()
    assert [child.tag for child in root] == ["uses-permission", "uses-sdk"]
    assert root.attrib["package"] != apk.PACKAGE, "two of one namespace are refused"


def test_a_maven_folder_resolves_it(file: Path, tmp_path: Path) -> None:
    """Where a resolver looks, what it checks, and what the POM leads it to."""
    group = aar.install(file.parent, tmp_path)
    assert group == tmp_path / "dev" / "outrider"
    for artifact, suffix in [("outrider", "aar"), ("outrider", "pom"), ("outrider-testing", "jar"),
                             ("outrider-testing", "pom")]:  # fmt: skip
        place, name = group / artifact / VERSION["appVersion"], f"{artifact}-{VERSION['appVersion']}.{suffix}"
        assert (place / name).read_bytes() == (file.parent / name).read_bytes()
        for algorithm in ("sha1", "sha256"):
            said = subprocess.run([f"{algorithm}sum", place / name], capture_output=True, text=True, check=True).stdout
            assert (place / f"{name}.{algorithm}").read_text() == said.split()[0]
    testing = ElementTree.parse(place / f"outrider-testing-{VERSION['appVersion']}.pom").getroot()
    assert testing.findtext("m:dependencies/m:dependency/m:artifactId", namespaces=POM) == "outrider"
    place = group / "outrider" / VERSION["appVersion"]
    pom = ElementTree.parse(place / f"outrider-{VERSION['appVersion']}.pom").getroot()
    assert pom.findtext("m:packaging", namespaces=POM) == "aar"
    rows = {
        ":".join(row.findtext(f"m:{key}", "", POM) for key in ("groupId", "artifactId", "version")): row
        for row in pom.iterfind("m:dependencies/m:dependency", POM)
    }
    optional = [name for name, row in rows.items() if row.findtext("m:optional", "", POM) == "true"]
    compiled = [name for name, row in rows.items() if row.findtext("m:scope", "", POM) == "compile"]
    assert optional == [f"org.pytorch:executorch-android:{VERSION['executorch']}"]
    assert compiled == [
        f"org.jetbrains.kotlin:kotlin-stdlib:{VERSION['kotlinStdlib']}",
        f"org.jetbrains.kotlinx:kotlinx-coroutines-core:{VERSION['coroutines']}",
    ]
    assert set(rows) - {*optional, *compiled} == {
        f"com.microsoft.onnxruntime:onnxruntime-android:{VERSION['onnxruntime']}"
    }
