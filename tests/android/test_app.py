"""The app without its screens: its Kotlin tests, and airplane mode against a real verifier."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from android_demo.ci import core
from benchmarks.links import EmulatedLink
from export.bundle.verifier_process import VerifierProcess
from tests.android.phone import QUESTION, Phone, State, airplane, alone, ended, text


def test_kotlin_tests_pass(app_classpath: list[Path], tmp_path: Path) -> None:
    core.run_tests(app_classpath, tmp_path)
    assert sum(file.read_text(encoding="utf-8").count("<testcase") for file in tmp_path.glob("*.xml")) >= 20


def test_airplane_mode(
    app_classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, wanted: str, tmp_path: Path
) -> None:
    """It goes on writing, marks it, and repairs when the link is back."""

    async def run() -> Phone:
        async with EmulatedLink(verifier.port, delay=0.02) as link:
            async with Phone(app_classpath, folders["bundle"], link.address, tmp_path / "journal") as phone:
                await airplane(phone, link)
            return phone

    phone = asyncio.run(run())
    written = next(state for state in phone.states if alone(state))
    assert text(written["reply"], "verified") + " " in wanted + " "
    question, answer = phone.states[-1]["turns"]
    assert question == ["user", [["verified", QUESTION]]]
    assert answer == ["assistant", [["verified", wanted]]]
    badges = [state["badge"] for state in phone.states]
    assert badges[0] == "loading" and badges[-1] == "ready"
    assert {"connecting", "verified", "alone"} <= set(badges)
    assert any(text(state["reply"], "withdrawn") for state in phone.states), "what was taken back is shown as such"
    figures = phone.states[-1]["figures"]
    assert figures["tokens"] >= len(wanted.split()) and figures["rolled_back"] > 0
    assert figures["up"] > 0 and figures["down"] > 0 and figures["round_trip"] >= 0.04 and figures["rate"] > 0


def test_a_killed_app_goes_on(
    app_classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, wanted: str, tmp_path: Path
) -> None:
    """Killed while it writes alone; the next process shows what was there and ends with the target's own text."""

    async def run() -> list[State]:
        journal = tmp_path / "journal"
        async with EmulatedLink(verifier.port, delay=0.02) as link:
            phone = Phone(app_classpath, folders["bundle"], link.address, journal)
            async with phone:
                await phone.until(lambda state: state["ready"])
                phone.say(QUESTION)
                await phone.until(lambda state: len(text(state["reply"], "verified").split()) >= 4)
                link.silent = True
                await phone.until(alone)
                while json.loads(journal.read_text())["record"] is None:
                    await asyncio.sleep(0.01)
                await phone.kill()
            kept = json.loads(journal.read_text())
            assert kept["record"] and text(kept["reply"], "VERIFIED") in wanted
            link.silent = False
            async with Phone(app_classpath, folders["bundle"], link.address, journal) as phone:
                first = await phone.until(lambda state: state["reply"] is not None)
                assert text(first["reply"], "verified").startswith(text(kept["reply"], "VERIFIED"))
                await phone.until(ended)
            return phone.states

    states = asyncio.run(run())
    assert states[-1]["turns"] == [["user", [["verified", QUESTION]]], ["assistant", [["verified", wanted]]]]


def test_a_wrong_address_is_told_and_another_goes_on(
    app_classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, wanted: str, tmp_path: Path
) -> None:
    async def run() -> State:
        async with Phone(app_classpath, folders["bundle"], "ws://192.0.2.1:1", tmp_path / "journal") as phone:
            refused = await phone.until(lambda state: state["problem"] is not None)
            assert "clear text" in refused["problem"] and refused["badge"] == "problem"
            phone.say(f"server {verifier.address}")
            await phone.until(lambda state: state["ready"])
            phone.say(QUESTION)
            state = await phone.until(ended)
            assert state["problem"] is None
            return state

    assert asyncio.run(run())["turns"][1] == ["assistant", [["verified", wanted]]]
