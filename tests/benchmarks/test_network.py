"""The network laboratory on a tiny target: real processes, real figures."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.baseline import PlainAnswer, call_per_token
from benchmarks.cores import Cores
from benchmarks.link_faults import harmed
from benchmarks.links import EmulatedLink
from benchmarks.network import DEFAULT_MODES, main
from benchmarks.network_report import CHOICES, as_markdown, ratios, uncertainty
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from export.bundle.verifier_process import VerifierProcess
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.targets.source import TargetSource
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model

NEW = 24
#: enough where only the speed of a step is looked at; a verifier without torch starts sooner
SHORT = ("--count", "1", "--max-new-tokens", "10", "--dtype", "auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, its drafter and bundle, and questions."""
    folder = tmp_path_factory.mktemp("network")
    model = tiny_model(seed=5, dtype=torch.float32)
    save_tiny_drafter(folder / "drafter", model, save_tiny_target(folder / "target", model))
    write_bundle(
        BundleOptions(
            target=TargetSource.resolve(str(folder / "target")),
            drafter=folder / "drafter",
            output_dir=folder / "bundle",
            quant="fp32",
        )
    )
    questions = [{"turns": [f"w{i} w{i + 9} w{i + 30}"]} for i in range(3)]
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(question) for question in questions))
    return folder


def run(folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    found = folder / "out.json"
    found.unlink(missing_ok=True)
    status = main([
        "--prompts", str(folder / "questions.jsonl"), "--json", str(found), "--count", "2",
        "--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--bundle", str(folder / "bundle"),
        "--threads", "1", "--max-new-tokens", str(NEW), *more,
    ])  # fmt: skip
    return status, json.loads(found.read_text()) if found.is_file() else {}


@pytest.mark.slow
def test_every_mode_and_size_is_measured_and_right(folder: Path) -> None:
    modes = [*DEFAULT_MODES, "no-understudy", "drafter-first"]
    wanted = ["--profiles", "lan", "wifi", "--sweep", "4", "--modes", *modes]
    status, figures = run(folder, *wanted, "--plot", str(folder / "out.svg"))
    assert status == 0 and set(figures["profiles"]) == {"lan", "wifi"} and figures["questions"] == 2
    for rows in figures["profiles"].values():
        assert set(rows) == {*modes, "4 nodes"}
        for name, row in rows.items():
            assert row["different_from_target"] == 0 and row["tokens_per_second"] > 0
            assert row["unverified"] == (name == "device")
        assert rows["token"]["calls_per_100_tokens"] == 100
        assert rows["token"]["bytes_up_per_token"] > 10 < rows["token"]["bytes_down_per_token"]
        assert rows["device"]["calls_per_100_tokens"] == rows["device"]["bytes_up_per_token"] == 0
        assert rows["stream"]["calls_per_100_tokens"] < rows["tree"]["calls_per_100_tokens"] <= 100
        assert rows["4 nodes"]["nodes"] <= 4
    lines = as_markdown(figures).splitlines()
    rows = figures["profiles"]["wifi"]
    best = max(rows[name]["tokens_per_second"] for name in CHOICES)
    compared = ratios(rows)
    assert compared["controller / best mode"] == pytest.approx(rows["controller"]["tokens_per_second"] / best, abs=1e-3)
    assert lines[3].startswith("| wifi | ") and lines[3].endswith(f"| {compared['trees / stream']:.2f} |")
    assert (folder / "out.svg").is_file()


def test_what_needs_an_understudy_is_refused_without_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--modes", "warm", "stream") == (1, {})
    assert f"--modes warm: {folder / 'bundle'} carries no understudy" in capsys.readouterr().err


def test_ratios_compare_what_was_measured() -> None:
    speeds = {"ahead": 12.0, "tree": 10.0, "stream": 15.0, "controller": 14.4, "4 nodes": 8.0, "8 nodes": 16.0}
    rows = {name: {"tokens_per_second": speed, "draft_ms_per_round": 8.0} for name, speed in speeds.items()}
    rows["ahead"]["draft_ms_per_round"] = 2.0
    assert list(ratios(rows).values()) == [0.96, 0.625, 1.2, 0.75, 0.8]
    assert set(ratios({"stream": rows["stream"]}).values()) == {None}


def test_uncertainty_is_that_of_answers_to_the_same_questions() -> None:
    def row(*speeds: float) -> dict[str, Any]:
        return {"tokens_per_second": sum(speeds) / len(speeds), "answers_tokens_per_second": speeds}

    rows = {"tree": row(5, 5, 5), "stream": row(10, 20, 40), "controller": row(9, 18, 36)}
    assert uncertainty(rows) == 0  # always 0.9, however different the answers are
    rows["controller"] = row(8, 20, 48)  # 0.8, 1.0, 1.2
    assert uncertainty(rows) == pytest.approx(0.2 / 3**0.5, abs=1e-3)
    assert uncertainty({"tree": row(1), "controller": row(1)}) is None
    assert uncertainty({"tree": row(1, 2)}) is None and uncertainty({"controller": row(1, 2)}) is None


@pytest.mark.slow
def test_a_slowed_target_is_as_slow_as_stated(folder: Path) -> None:
    _, figures = run(folder, "--profiles", "lan", "--modes", "stream", "--step-ms", "40", *SHORT)
    stream = figures["profiles"]["lan"]["stream"]
    assert stream["tokens_per_second"] <= 25 and stream["gap_ms"]["p50"] >= 39 and figures["step_ms"] == 40


def test_a_slowed_device_is_as_slow_as_stated(folder: Path) -> None:
    _, figures = run(folder, "--profiles", "lan", "--modes", "device", "--device-step-ms", "30", *SHORT)
    device = figures["profiles"]["lan"]["device"]
    assert device["tokens_per_second"] <= 33.34 and device["gap_ms"]["p50"] >= 29 and figures["device_step_ms"] == 30


@pytest.mark.slow
def test_dilated_steps_take_longer_and_count_as_long_as_stated(folder: Path) -> None:
    _, figures = run(folder, "--profiles", "lan", "--modes", "stream", "--step-ms", "40", "--dilation", "3", *SHORT)
    stream = figures["profiles"]["lan"]["stream"]
    assert 39 <= stream["gap_ms"]["p50"] < 3 * 39 and figures["dilation"] == 3


@pytest.mark.parametrize("flags", [("--dilation", "0.5"), ("--dilation", "4", "--cuts", "3")])
def test_time_is_not_stretched_where_that_means_nothing(flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--prompts", "none.jsonl", *flags])
    assert error.value.code == 2


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not say which cores it grants")
def test_device_and_verifier_run_on_cores_of_their_own() -> None:
    everywhere = os.sched_getaffinity(0)
    cores = Cores.halves()
    assert (cores.verifier | cores.device == everywhere) == (len(everywhere) > 1)
    assert not cores.verifier & cores.device
    with cores.of(cores.verifier):
        allowed = subprocess.run([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"],
                                 capture_output=True, text=True, check=True).stdout  # fmt: skip
        assert allowed.strip() == str(sorted(cores.verifier or everywhere))
    assert os.sched_getaffinity(0) == everywhere
    assert str(Cores()) == "shared"


@pytest.mark.slow
def test_answers_survive_cuts(folder: Path) -> None:
    status, figures = run(folder, "--profiles", "4g", "congested", "--cuts", "4", "--max-new-tokens", "60")
    assert status == 0 and figures["cuts"] >= 4 and figures["answers"] > 0
    assert figures["answers_that_differ"] == figures["screens_that_differ"] == 0


@pytest.mark.slow
def test_a_client_of_single_calls_survives_cuts_and_silence(folder: Path) -> None:
    async def call(link: EmulatedLink, bundle: Bundle, prompt: list[int]) -> PlainAnswer:
        return await call_per_token(link.address, bundle, prompt, NEW, silence=0.5)

    async def run() -> None:
        bundle = open_bundle(folder / "bundle")
        prompt = bundle.render_chat([{"role": "user", "content": "w1 w2"}])
        flags = ("--model", str(folder / "target"), "--dtype", "float32")
        verifier = VerifierProcess(folder / "drafter", folder / "verifier.log", *flags, module="cloud.verifier")
        verifier.start()
        try:
            await asyncio.to_thread(verifier.wait_ready)
            async with EmulatedLink(verifier.port, delay=0.02) as link:
                truth = await call(link, bundle, prompt)
                answer = asyncio.create_task(call(link, bundle, prompt))
                await asyncio.sleep(0.3)
                link.cut()
                await asyncio.sleep(0.4)
                link.silent = True
                await asyncio.sleep(0.3)
                link.silent = False
                answered = await answer
        finally:
            verifier.stop()
        assert answered.tokens == truth.tokens and len(truth.tokens) == truth.calls == NEW < answered.calls
        assert answered.seconds > NEW * 0.04 + 0.5

    asyncio.run(run())


def test_cuts_that_harm_an_answer_are_counted() -> None:
    assert harmed({"answers_that_differ": 1, "screens_that_differ": 2}) == 3
    assert harmed({"profiles": {}}) == 0


def test_bad_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = folder / "nothing"
    assert main(["--prompts", str(folder / "questions.jsonl"), "--bundle", str(nothing)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit):
        main(["--prompts", "x", "--profiles", "moon"])
