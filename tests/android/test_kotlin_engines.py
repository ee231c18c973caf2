"""android_demo/engines: an app's own natives, in a desktop JVM, give the logits and texts of Python's engines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from android_demo.ci import core, native
from android_demo.ci.engines import SOURCES, Libraries, build_tests
from android_demo.ci.pins import REPOSITORY
from benchmarks.links import EmulatedLink
from edge_runtime.events import Finished
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from export.bundle.verifier_process import VerifierProcess
from outrider_core.drafting.bundle import Bundle, BundleError, open_bundle
from outrider_core.drafting.engines import open_engine
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests import second
from tests.android.device import Device, Screen
from tests.android.phone import MAX_NEW, Phone, State, ended, text
from tests.android.steps import Runner, random_steps

DEFAULT = REPOSITORY / "build" / "bundle"
DRAFTER = REPOSITORY / "drafters" / "smollm2-135m-instruct-moa"
#: the default drafter for both engines; exported when it is not there, which takes minutes
BOTH = REPOSITORY / "build" / "android" / "bundle"
ENGINES = ["onnx", "executorch"]
#: logits reach from -20 to 20; other versions of the same kernels may add in another order
BOUND = 1e-3
QUESTION = "Write two sentences about the sea in winter."
SAMPLINGS = [Sampling(), Sampling(temperature=0.7, top_p=0.95, seed=1234)]

pytestmark = [
    pytest.mark.skipif(not (DEFAULT / "manifest.json").is_file(), reason="no build/bundle; run: make test-android"),
    pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable())),
]


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    return Libraries.fetched()


@pytest.fixture(scope="module")
def engines_classpath(tools: core.Toolchain, libraries: Libraries) -> list[Path]:
    return [*build_tests(tools, libraries), native.build_compat(tools)]


@pytest.fixture(scope="module")
def jvm(libraries: Libraries) -> list[str]:
    return native.options(native.build(libraries))


@pytest.fixture
def runner(engines_classpath: list[Path], jvm: list[str], tmp_path: Path) -> Runner:
    return Runner(engines_classpath, jvm, tmp_path)


@pytest.fixture(scope="module")
def both() -> Bundle:
    default = open_bundle(DEFAULT)
    try:
        bundle = open_bundle(BOTH)
        if bundle.manifest.drafter_hash == default.manifest.drafter_hash:
            return bundle
    except BundleError:
        pass
    shutil.rmtree(BOTH, ignore_errors=True)
    write_bundle(
        BundleOptions(
            target=TargetSource.resolve(default.manifest.target),
            drafter=DRAFTER,
            output_dir=BOTH,
            format=("onnx", "executorch"),
        )
    )
    return open_bundle(BOTH)


@pytest.fixture
def bundle(request: pytest.FixtureRequest, engine: str) -> Bundle:
    """The default bundle; one with both engines for ExecuTorch."""
    return request.getfixturevalue("both") if engine == "executorch" else open_bundle(DEFAULT)


@pytest.fixture(scope="module")
def real_verifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifierProcess]:
    process = VerifierProcess(DRAFTER, tmp_path_factory.mktemp("log") / "verifier.log", "--threads", "1")
    process.start()
    process.wait_ready()
    yield process
    process.stop()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_logits_are_pythons(runner: Runner, bundle: Bundle, engine: str, threads: int) -> None:
    steps = random_steps(bundle.manifest)
    python = open_engine(bundle, engine, 1)
    wanted = [list(python.step(*step)) for step in steps]
    done = runner.run(bundle.folder, engine, steps, threads)
    assert done.returncode == 0, done.stderr
    for got, expected in zip(runner.results(wanted), wanted, strict=True):
        for one, other in zip(got, expected, strict=True):
            assert np.abs(one - other).max() <= BOUND
        assert (got[0].argmax(-1) == expected[0].argmax(-1)).all()


def test_the_default_bundle_runs(runner: Runner) -> None:
    bundle = open_bundle(DEFAULT)
    steps = random_steps(bundle.manifest, seed=1)
    wanted = [list(open_engine(bundle, "onnx", 1).step(*step)) for step in steps]
    assert runner.run(DEFAULT, "", steps).returncode == 0
    assert max(np.abs(a[0] - b[0]).max() for a, b in zip(runner.results(wanted), wanted, strict=True)) <= BOUND


def test_an_app_may_ship_one_library(runner: Runner, libraries: Libraries, both: Bundle) -> None:
    """Without a name the engine is chosen whose classes are there, and nothing of the other is touched."""
    step = random_steps(both.manifest, [(2, 2, 3, 4)])
    for engine, absent in zip(ENGINES, [libraries.executorch_classes, libraries.onnx_classes], strict=True):
        alone = Runner([path for path in runner.classpath if path != absent], runner.options, runner.folder)
        wanted = [list(open_engine(both, engine, 1).step(*step[0]))]
        done = alone.run(both.folder, "", step)
        assert done.returncode == 0, done.stderr
        assert np.abs(runner.results(wanted)[0][0] - wanted[0][0]).max() <= BOUND
        other = next(name for name in ENGINES if name != engine)
        assert last_line(alone.run(both.folder, other)).startswith("EngineError: nothing in this app runs drafter.")


def last_line(done: Any) -> str:
    assert done.returncode == 1, done.stderr
    return str(done.stderr.strip().splitlines()[-1])


def copied(bundle: Bundle, folder: Path) -> Path:
    return Path(shutil.copytree(bundle.folder, folder / "bundle"))


def exchanged(folder: Path, name: str, content: bytes) -> None:
    """Another file in the bundle, by the manifest's consent."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("engine", ENGINES)
def test_errors_are_one_clear_line(runner: Runner, bundle: Bundle, tmp_path: Path, engine: str) -> None:
    file = bundle.manifest.engines[engine].file
    wide = random_steps(bundle.manifest, [(65, 65, 3, 4)])
    assert last_line(runner.run(bundle.folder, engine, wide)) == (
        "IllegalArgumentException: a step takes 1 to 64 tokens, not 65"
    )
    assert f"holds no coreml engine (it has: {', '.join(bundle.manifest.engines)})" in last_line(
        runner.run(bundle.folder, "coreml")
    )
    without = Runner(runner.classpath, [], tmp_path)
    assert "does not load here" in last_line(without.run(bundle.folder, engine))

    folder = copied(bundle, tmp_path)
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / file).write_bytes(content)
    assert last_line(runner.run(folder, engine)).startswith(f"BundleError: {folder / file} differs from its sha256")
    exchanged(folder, file, b"not a model")
    assert last_line(runner.run(folder, engine)).startswith(f"EngineError: {folder / file} does not load: ")
    (folder / file).unlink()
    assert last_line(runner.run(folder, engine)).startswith(f"BundleError: {folder / file} is missing")


def test_another_graph_is_refused(runner: Runner, tmp_path: Path) -> None:
    folder = copied(open_bundle(DEFAULT), tmp_path)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "other", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    exchanged(folder, "drafter.onnx", model.SerializeToString())
    line = last_line(runner.run(folder, "onnx"))
    assert line.startswith(f"BundleError: {folder / 'drafter.onnx'} takes x instead of tokens, positions, wanted")


def a_device(
    classpath: list[Path], jvm: list[str], bundle: Bundle, server: str | None, engine: str, **settings: Any
) -> Device:
    program = [*jvm, "dev.outrider.engines.ClientKt"]
    return Device(classpath, bundle.folder, server, program, engine=engine, threads=1, **settings)


async def pythons(
    bundle: Bundle, server: str | None, engine: str, prompt: list[int], sampling: Sampling, max_new: int
) -> Finished:
    async with EdgeRuntime(bundle, server, RuntimeOptions(engine=engine, threads=1)) as runtime:
        async for event in runtime.generate(
            prompt, max_new_tokens=max_new, temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed
        ):
            last = event
    assert isinstance(last, Finished)
    return last


@pytest.mark.parametrize("engine", ENGINES)
def test_it_writes_alone_what_python_writes(
    engines_classpath: list[Path], jvm: list[str], bundle: Bundle, engine: str
) -> None:
    """No verifier: every token is the engine's own."""
    prompt = bundle.render_chat([{"role": "user", "content": QUESTION}])

    async def run() -> None:
        async with a_device(engines_classpath, jvm, bundle, None, engine) as device:
            for sampling in SAMPLINGS:
                device.ask(prompt, sampling, 40)
                end = (await device.watch(screen=Screen(texts=False))).end
                wanted = await pythons(bundle, None, engine, prompt, sampling, 40)
                assert end["token_ids"] == wanted.token_ids and end["provisional"] == wanted.provisional
                assert end["reason"] == ("length" if len(end["token_ids"]) == 40 else "stop")

    asyncio.run(run())


def test_the_app_opens_an_executorch_program_by_a_setting(
    tools: core.Toolchain, app_classpath: list[Path], jvm: list[str], both: Bundle, tmp_path: Path
) -> None:
    """It writes what Python writes with that file, and refuses a bundle that has none."""
    classpath = [*app_classpath, native.build_compat(tools)]

    async def ask(bundle: Path, wanted: Callable[[State], bool]) -> State:
        async with Phone(classpath, bundle, None, tmp_path / "journal", False, *jvm, executorch=True) as phone:
            phone.say(QUESTION)
            return await phone.until(wanted)

    prompt = both.render_chat([{"role": "user", "content": QUESTION}])
    pieces = asyncio.run(ask(both.folder, ended))["turns"][1][1]
    wanted = asyncio.run(pythons(both, None, "executorch", prompt, Sampling(), MAX_NEW)).provisional
    assert len(text(pieces, "provisional").split()) > 10 and wanted.startswith(text(pieces, "provisional").rstrip())
    (tmp_path / "journal").unlink()
    state = asyncio.run(ask(DEFAULT, lambda state: state["problem"] is not None))
    assert state["problem"].endswith("holds no executorch engine (it has: onnx)")


@dataclass
class Cut:
    """One fault behind ten verified tokens. A silence ends when five tokens were written alone."""

    link: EmulatedLink
    fault: str
    made: bool = False

    async def watch(self, screen: Screen) -> None:
        if not self.made and screen.verified >= 10 and self.fault != "none":
            self.made = True
            if self.fault == "reset":
                self.link.cut()
            else:
                self.link.silent = True
        if self.link.silent and len(screen.tokens) - screen.verified >= 5:
            self.link.silent = False


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_are_pythons_through_cuts(
    engines_classpath: list[Path], jvm: list[str], bundle: Bundle, real_verifier: VerifierProcess, engine: str
) -> None:
    """The same prompt and seed as the Python runtime; the link is reset in mid-answer, or goes silent."""
    for fault, end in through(("none", "reset", "silence"), engines_classpath, jvm, bundle, real_verifier, engine):
        assert fault != "silence" or end["stats"]["provisional"] >= 5
        assert fault != "none" or end["stats"]["rounds"] < end["stats"]["tokens"]  # what it drafts is accepted


@pytest.mark.slow
@pytest.mark.timeout(3600)
@second.named
def test_a_second_models_answers_are_pythons(engines_classpath: list[Path], jvm: list[str], tmp_path: Path) -> None:
    """A vocabulary of 152k tokens, and a drafter of ten steps."""
    drafter, bundle = second.pair()
    verifier = VerifierProcess(drafter, tmp_path / "verifier.log", "--model", str(second.FILE), "--threads", "1")
    verifier.start()
    try:
        verifier.wait_ready(900)
        ends = through(("none", "reset"), engines_classpath, jvm, bundle, verifier, "onnx")
        assert len(ends) == 2 * len(SAMPLINGS) and all(end["stats"]["rounds"] > 0 for _, end in ends)
    finally:
        verifier.stop()


def through(
    faults: tuple[str, ...], classpath: list[Path], jvm: list[str], bundle: Bundle, verifier: VerifierProcess,
    engine: str,
) -> list[tuple[str, dict[str, Any]]]:  # fmt: skip
    """The ends of answers in trees, greedy and sampled, with each fault; the texts are Python's."""
    prompt = bundle.render_chat([{"role": "user", "content": QUESTION}])
    ends = list[tuple[str, dict[str, Any]]]()

    async def run() -> None:
        async with (
            EmulatedLink(verifier.port) as link,
            a_device(classpath, jvm, bundle, link.address, engine, mode="TREE") as device,
        ):
            for number, sampling in enumerate(SAMPLINGS):
                wanted = await pythons(bundle, verifier.address, engine, prompt, sampling, 40)
                for fault in faults:
                    cut = Cut(link, fault)
                    device.ask(prompt, sampling, 40)
                    end = (await device.watch(cut.watch, Screen(texts=False))).end
                    assert end["token_ids"] == wanted.token_ids, f"{number}, {fault}"
                    assert end["verified"] == wanted.verified and not end["provisional"]
                    assert cut.made == (fault != "none")
                    ends.append((fault, end))

    asyncio.run(run())
    return ends


def test_no_library_reports_to_anyone(libraries: Libraries) -> None:
    """ONNX Runtime's packages do from 1.29 on."""
    natives = [*libraries.onnx_natives.rglob("*.so"), *libraries.executorch_natives.rglob("*.so")]
    assert len(natives) >= 6
    for file in natives:
        assert b"events.data.microsoft.com" not in file.read_bytes(), file


def test_every_file_is_short_and_knows_no_android() -> None:
    files = sorted((SOURCES / "main").rglob("*.kt"))
    assert len(files) >= 4
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 300 and max(map(len, lines)) <= 120, file
        assert "import android" not in "\n".join(lines), file
