"""The simulator of the controller: the same text and weather for every arm, and figures that follow from its clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from benchmarks import controller, simulation
from benchmarks.controller import compare, hindsight_regret, summary
from benchmarks.links import Profile
from benchmarks.scenarios import CHOICES, Passage, Scenario, choices, draft, scenario
from benchmarks.simulation import arms, write
from edge_runtime.session.actions import Action
from outrider_core.protocol.costs import CostCurve

FLAT = CostCurve((1, 64), (0.05, 0.05))


def plain(levels: int, ranks: list[int], **given: object) -> Scenario:
    """Two answers over an ideal link, undisturbed: every step takes 50 ms."""
    none = [False] * len(ranks)
    passage = Passage(4, [levels] * len(ranks), ranks, none, none)
    made = Scenario(
        0, "none", "flat", Profile("ideal"), FLAT, FLAT, 1.0, 0.001, 0.0, None, 1.0,
        lambda answer, at: 1.0, lambda answer, at: 0.0, (inf, inf), [passage] * 2,
    )  # fmt: skip
    return replace(made, **given)  # type: ignore[arg-type]


def test_a_stream_takes_a_step_for_each_token_and_trees_fewer() -> None:
    world = plain(6, [0] * 60)
    stream, tree = write(world, "stream"), write(world, "tree")
    assert stream == pytest.approx([60 * 0.05] * 2, rel=0.03)
    assert all(each < 0.4 * 60 * 0.05 for each in tree)  # the first choice is always right


def test_lookup_brings_tokens_of_one_step() -> None:
    world = plain(0, [CHOICES] * 60)
    hits = replace(world.passages[0], looked_up=[place % 2 == 1 for place in range(60)])
    assert write(replace(world, passages=[hits]), "stream") == pytest.approx([30 * 0.05], rel=0.03)


def test_a_verifier_tells_nearly_what_its_streams_bring_or_nothing() -> None:
    hits = Passage(4, [0] * 60, [0] * 60, [False] * 60, [place % 2 == 1 for place in range(60)])
    told = [plain(0, [0], number=number, passages=[hits]).told() for number in range(100)]
    known = [tokens for tokens, _ in told if tokens]
    assert 160 <= min(known) < 190 and 210 < max(known) <= 250 and 70 <= len(known) <= 90
    assert told[0][1] == 0 and plain(0, [0], queue=lambda answer, at: 0.02).told()[1] == 20_000


def test_trees_that_are_never_right_lose_their_drafting() -> None:
    world = plain(0, [CHOICES] * 60, draft_step=0.02)
    assert all(tree > stream for tree, stream in zip(write(world, "tree"), write(world, "stream"), strict=True))


def test_an_understudy_that_is_always_right_is_worth_its_chains() -> None:
    world = plain(0, [CHOICES] * 60, token=0.004)
    sure = replace(world.passages[0], written=[True] * 60)
    world = replace(world, passages=[sure] * 2)
    assert arms(world) == ["tree", "stream", "chain 4", "chain 8", "chain 16"]
    assert write(world, "chain 8")[1] < 0.5 * write(world, "stream")[1]


def test_a_suspended_device_sees_later_what_came_meanwhile() -> None:
    world = plain(0, [CHOICES] * 60)
    assert write(replace(world, asleep=(1.0, 9.0)), "stream") == pytest.approx([9.0, 3.0], rel=0.03)


def test_nothing_happens_before_it_was_asked_for() -> None:
    """An answer's last tree is empty, and the drafter may have been idle for long."""

    class Ordered(simulation.Simulation):
        def _at(self, when: float, event: Callable[[], list[Action]]) -> None:
            assert when >= self.now
            super()._at(when, event)

    world = scenario(3134)
    assert Ordered(world, 0, simulation.Device(simulation.CHOSEN, world.draft_step)).run(first=True) > 0


def test_an_outage_holds_up_what_is_under_way() -> None:
    world = plain(0, [CHOICES] * 60)
    held = write(replace(world, profile=Profile("flap", 1, outage=2.0, period=6.0)), "stream")
    assert held[0] == pytest.approx(5.0, rel=0.05)


def test_a_tree_is_grown_best_first_and_never_larger_than_asked() -> None:
    for level in range(8):
        assert sum(choices(level)) <= 1 and choices(level) == sorted(choices(level), reverse=True)
        for nodes, gain in ((1, 0.05), (16, 0.05), (48, 0.01), (48, 0.6)):
            tree, scores, steps = draft(level, 1.0, nodes, gain)
            assert 1 <= len(tree) == len(scores) <= nodes and 1 <= steps <= 20
            assert list(scores) == sorted(scores, reverse=True)


def test_a_scenario_is_the_same_each_time_it_is_made() -> None:
    for number in range(8):
        assert compare(None, 6, number) == compare(None, 6, number)
        assert scenario(number).passages == scenario(number).passages
    assert len({scenario(number).disturbance for number in range(8)}) == 8


def test_regret_is_what_the_choice_lacks_of_the_best_arm() -> None:
    row = compare(None, 6, 2)
    fixed = {arm: sum(seconds) for arm, seconds in row["seconds"].items() if arm != "chosen"}
    assert row["best"] == min(fixed, key=lambda arm: fixed[arm])
    assert row["regret"] == pytest.approx(1 - min(fixed.values()) / sum(row["seconds"]["chosen"]), abs=1e-4)
    assert row["oracle_regret"] >= row["regret"]
    rows = [{**row, "regret": regret} for regret in (0.0, 0.02, 0.1, 0.0)]
    assert summary(rows)["mean_regret"] == 0.03 and summary(rows)["share_within_5_percent"] == 0.75


def test_hindsight_takes_the_arm_that_is_ahead() -> None:
    """Tree, then stream as it is ahead by one, and tree again for the last answer."""
    seconds = {"tree": [3.0, 1.0, 9.0], "stream": [2.0, 4.0, 3.0], "chosen": [2.5, 0.0, 0.0]}
    assert hindsight_regret({"seconds": seconds, "best": "stream"}) == pytest.approx(1 - 9 / (2.5 + 4 + 9))


def test_the_command_writes_figures_and_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    assert controller.main(["--scenarios", "3", "--json", str(old)]) == 0
    assert controller.main(["--scenarios", "2", "--first", "1", "--json", str(new), "--beside", str(old)]) == 0
    figures = json.loads(new.read_text())
    assert [row["number"] for row in figures["rows"]] == [1, 2] and figures["over_other"] == 1.0
    assert "all, other run" in capsys.readouterr().out
    texts = tmp_path / "texts.json"
    answer = {"prompt": [5], "levels": [3] * 40, "ranks": [0, 1] * 20, "looked_up": [0] * 40}
    texts.write_text(json.dumps({"answers": [answer] * 8}))
    assert controller.main(["--scenarios", "1", "--recorded", str(texts), "--json", str(new)]) == 0
    assert all(len(passage.levels) == 40 for passage in scenario(0, texts).passages)
