"""The understudy on ONNX Runtime's Java interface, an app's own natives in a desktop JVM: Python's logits and texts."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from android_demo.ci import core, native
from android_demo.ci.engines import Libraries, build_tests
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.protocol.sampling import Sampling
from tests.android.device import Screen
from tests.android.test_kotlin_engines import DEFAULT, QUESTION, a_device, pythons
from tests.targets.understudies import (
    PROMPT,
    SAMPLINGS,
    VOCAB,
    a_loop,
    asking,
    drafts,
    pythons_logits,
    steps,
    understudy_bundle,
    written,
)

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


@dataclass(frozen=True)
class Jvm:
    """Runs Understudies.kt (android_demo/engines). command: up to the program's arguments."""

    command: list[str]
    logits: Path

    def run(self, bundle: Bundle, asked: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        entry = bundle.manifest.understudy
        assert entry
        folder = str(bundle.folder / entry.folder)
        arguments = [folder, entry.manifest_sha256, str(bundle.manifest.max_context), "1", str(self.logits)]
        return subprocess.run(
            [*self.command, *arguments], input=json.dumps(asked) + "\n", capture_output=True, text=True
        )

    def done(self, bundle: Bundle, **asked: Any) -> list[dict[str, Any]]:
        """The lines of the answers."""
        run = self.run(bundle, {"steps": [], "answers": [], "chains": []} | asked)
        assert run.returncode == 0, run.stderr
        return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def engines_classpath(tools: core.Toolchain) -> list[Path]:
    return [*build_tests(tools, Libraries.fetched()), native.build_compat(tools)]


@pytest.fixture(scope="module")
def options() -> list[str]:
    return native.options(native.build(Libraries.fetched()))


@pytest.fixture
def jvm(engines_classpath: list[Path], options: list[str], tmp_path: Path) -> Jvm:
    command = core.java(engines_classpath, *options, "dev.outrider.engines.UnderstudiesKt")
    return Jvm(command, tmp_path / "logits")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return understudy_bundle(tmp_path_factory.mktemp("understudy"))


def test_logits_are_pythons_bit_for_bit(bundle: Bundle, jvm: Jvm) -> None:
    asked = steps(VOCAB)
    jvm.done(bundle, steps=asked)
    wanted = pythons_logits(bundle, asked)
    found = np.fromfile(jvm.logits, "<f4").reshape(-1, VOCAB)
    assert found.shape == wanted.shape and np.isfinite(wanted).all() and np.ptp(wanted) > 0.1
    assert found.tobytes() == wanted.tobytes()


def test_texts_are_pythons(bundle: Bundle, jvm: Jvm) -> None:
    """How much of a draft it would have written, and what it writes behind that."""
    answers, wanted = drafts(bundle)
    for found, (agreed, tokens, probabilities) in zip(jvm.done(bundle, answers=answers), wanted, strict=True):
        assert found["agreed"] == agreed and found["tokens"] == tokens
        assert np.allclose(found["probabilities"], probabilities, rtol=1e-9)


def test_it_leaves_a_loop_as_pythons_does(bundle: Bundle, jvm: Jvm) -> None:
    text, tokens, looped = a_loop(bundle)
    asked = [asking(text, begin, [], 20, Sampling()) for begin in (len(PROMPT), len(text))]
    assert [found["tokens"] for found in jvm.done(bundle, answers=asked)] == [tokens, looped]


def test_what_it_drafts_is_what_pythons_writes(bundle: Bundle, jvm: Jvm) -> None:
    """Token by token, as long as no loop is broken; and behind what was right nothing is computed again."""
    count = 12
    asked = [asking(PROMPT, len(PROMPT), [], count, sampling) for sampling in SAMPLINGS]
    for found, sampling in zip(jvm.done(bundle, chains=asked), SAMPLINGS, strict=True):
        tokens, probabilities = written(bundle, PROMPT, len(PROMPT), 2 * count, sampling)
        assert found["tokens"] == tokens[:count] and found["more"] == tokens[count:]
        assert found["after"] == tokens[count + 1 :] and found["steps"] == 2 * count
        assert np.allclose(found["scores"], np.cumsum(np.log(probabilities[:count])), rtol=1e-9)


@pytest.mark.parametrize("name", ["manifest.json", "target.onnx", "target.onnx.data"])
def test_a_damaged_one_is_refused_in_one_line(bundle: Bundle, jvm: Jvm, tmp_path: Path, name: str) -> None:
    copy = open_bundle(shutil.copytree(bundle.folder, tmp_path / "copy"))
    path = copy.folder / "understudy" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    run = jvm.run(copy, {"steps": [], "answers": [], "chains": []})
    assert run.returncode == 1
    line = run.stderr.strip().splitlines()[-1]
    assert line.startswith("UnderstudyError: ") and str(path.parent) in line and "copy" in line


@pytest.mark.skipif(not (DEFAULT / "understudy" / "manifest.json").is_file(), reason="no understudy in build/bundle")
def test_the_default_bundles_understudy_writes_what_pythons_does(
    engines_classpath: list[Path], options: list[str]
) -> None:
    default, sampling = open_bundle(DEFAULT), SAMPLINGS[1]
    prompt = default.render_chat([{"role": "user", "content": QUESTION}])

    async def run() -> None:
        async with a_device(engines_classpath, options, default, None, "onnx") as device:
            device.ask(prompt, sampling, 24)
            end = (await device.watch(screen=Screen(texts=False))).end
        wanted = await pythons(default, None, "onnx", prompt, sampling, 24)
        assert end["token_ids"] == wanted.token_ids and end["provisional"] == wanted.provisional
        assert end["spans"] == [[0, 24, "understudy"]] and end["stats"]["understudy"] == wanted.stats.understudy == 24

    asyncio.run(run())
