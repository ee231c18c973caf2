"""Early stopping in the drafter lab: examples are what they say, trees get shorter, the text stays the target's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lab import decision, drafters
from lab.baselines.decision import DecisionConfig, DecisionModel, Examples, hard_features, load
from lab.baselines.sampling import draft_distribution
from lab.contenders import BaselineContender, Contender, SampledContender
from lab.decision import Recorder, RecordingContender, constant_loss
from lab.lab import Lab
from lab.multi_candidate import EarlyStop
from outrider_core.drafting.drafter import TreeShape
from outrider_core.models.target import Target, load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.identity import model_identity
from outrider_core.targets.source import TargetSource
from tests.tiny import plain_decode, save_tiny_drafter, tiny_model

PROMPTS = [[10, 20, 30, 40, 50], [7, 8, 9], [101, 60, 61, 62, 63, 64, 65, 66, 67]]
PROFILE = (3, 2, 1)
SHAPE = TreeShape(nodes=15, depth=3)
SAMPLED = Sampling(temperature=1.0, seed=1)
TINY = ["--target", "target", "--dtype", "float32", "--device", "cpu", "--threads", "1", "--max-new-tokens", "12"]


def drafted(lab: Lab, base: Contender, kind: str, prompt: list[int]) -> tuple[Recorder, list[Examples]]:
    """One judged tree behind the prompt and its examples."""
    contender = RecordingContender(base, PROFILE, 0, kind)
    session, drafter = lab.open(prompt, SAMPLED, contender), contender.fresh()
    lab.prefill(session, contender, drafter)
    tree = drafter.draft(prompt, SAMPLED, SHAPE).tree
    drafter.accept(lab.forward(session, tree).numpy())
    lab.close(session)
    return drafter, contender.examples


def undecided(lab: Lab, base: Contender, kind: str) -> EarlyStop:
    """A random model that stops about half of the time."""
    features = np.concatenate([drafted(lab, base, kind, prompt)[1][0].features for prompt in PROMPTS])
    torch.manual_seed(0)
    model = DecisionModel(DecisionConfig.soft(features.shape[1]) if kind == "soft" else DecisionConfig.hard())
    return EarlyStop(model, float(np.median(model.scores(features))))


@pytest.mark.parametrize("kind", ["soft", "hard"])
@torch.inference_mode()
def test_examples_equal_a_whole_forward(lab: Lab, contenders: dict[str, Contender], target: Target, kind: str) -> None:
    lm = contenders["lm"]
    assert isinstance(lm, BaselineContender)
    model, ids = lm.model, lm.model.draft_ids.tolist()
    for prompt in PROMPTS:
        drafter, [found] = drafted(lab, lm, kind, prompt)
        tree = drafter.drafted.tree
        assert len(found.labels) == len(found.features) == len(tree) == 15
        for node, parent in enumerate(tree.parents):
            text = torch.tensor([[*prompt, *tree.text(parent)]])
            n = text.shape[1]
            empty = torch.zeros(1, 0, model.config.layers * model.config.kv_heads, model.config.head_dim)
            mask = torch.full((1, n, n), -1e9).triu(1)
            state = model.hidden(text, None, torch.arange(n)[None], mask, empty, empty)[0][0, -1]
            q = model.head(state).double().softmax(-1).numpy()
            p = target.model(text).logits[0, -1].double().softmax(-1).numpy()
            token = tree.tokens[node]
            assert found.labels[node] == pytest.approx(min(1.0, p[token] / q[ids.index(token)]), rel=1e-3)
            expected = state.numpy() if kind == "soft" else hard_features(q[None])[0]
            np.testing.assert_allclose(found.features[node], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["moa", "eagle2", "eagle3", "lm"])
@torch.inference_mode()
def test_states_are_what_the_distributions_come_from(lab: Lab, contenders: dict[str, Contender], kind: str) -> None:
    base = contenders[kind]
    assert base.head is not None
    drafter, _ = drafted(lab, base, "soft", PROMPTS[2])
    assert [len(level.q) for level in drafter.levels] == [1, 3, 6]
    for level in drafter.levels:
        logits = base.head(torch.from_numpy(level.states)).numpy()
        np.testing.assert_allclose(draft_distribution(logits, SAMPLED), level.q, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_thresholds_beyond_any_score(lab: Lab, contenders: dict[str, Contender], kind: str) -> None:
    moa = contenders["moa"]
    model, _ = undecided(lab, moa, kind)

    def answer(seeds: int, early: EarlyStop | None) -> tuple[list[int], list[int]]:
        run = lab.answer(PROMPTS[0], SampledContender("drawn", moa, PROFILE, seeds, 3, early), SAMPLED, 24, SHAPE)
        return run.tokens, run.depths

    for seeds in (0, 2):
        assert answer(seeds, EarlyStop(model, -0.1)) == answer(seeds, None)
        assert max(answer(seeds, None)[1]) == len(PROFILE)
    assert max(answer(0, EarlyStop(model, 1.1))[1]) == 1
    assert max(answer(2, EarlyStop(model, 1.1))[1]) == 2  # the seeds, and a level below them


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_greedy_text_is_the_targets_own(lab: Lab, contenders: dict[str, Contender], kind: str) -> None:
    early = undecided(lab, contenders["moa"], kind)
    depths: set[int] = set()
    for prompt in PROMPTS:
        contender = SampledContender("stopping", contenders["moa"], PROFILE, 0, 0, early)
        answer = lab.answer(prompt, contender, Sampling(), 24, SHAPE)
        assert answer.tokens == plain_decode(tiny_model(dtype=torch.float32), prompt, Sampling(), 24)
        depths |= set(answer.depths[:-3])  # the last trees are short for want of room
    assert {1, 3} <= depths


@pytest.mark.slow
def test_sampled_text_keeps_the_distribution(lab: Lab, contenders: dict[str, Contender]) -> None:
    """-log p above the entropy: 0 in the mean for what is drawn from p."""
    contender = SampledContender(
        "stopping", contenders["moa"], PROFILE, 0, 7, undecided(lab, contenders["moa"], "soft")
    )
    answers = [lab.answer([5 + i, 9], contender, SAMPLED, 48, SHAPE, weigh=True) for i in range(16)]
    surprise = np.array([value for answer in answers for value in answer.surprise])
    assert abs(surprise.mean()) / (surprise.std() / len(surprise) ** 0.5) < 4
    assert {1, 3} <= {depth for answer in answers for depth in answer.depths[:-3]}


def test_the_constant_predicts_the_mean() -> None:
    training, validation = (Examples(np.zeros((2, 1)), np.array(labels)) for labels in ([0.0, 0.5], [1.0, 0.0]))
    assert constant_loss(training, validation) == pytest.approx(-(np.log(0.25) + np.log(0.75)) / 2)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The folder, in which decision.safetensors is trained for one of two MoA drafters."""
    target = folder / "target"
    save_tiny_drafter(
        folder / "other",
        load_target(TargetSource.resolve(str(target))).model,
        model_identity(target),
        torch.arange(8, 72),
    )
    for name, first in (("train", 10), ("questions", 60)):
        rows = [json.dumps({"prompt": f"w{first + i} w{2 * i + 5}"}) for i in range(8)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        arguments = [
            "--prompts",
            "train.jsonl",
            "--drafter",
            "moa",
            "--output",
            "decision.safetensors",
            "--epochs",
            "2",
        ]
        assert decision.main([*arguments, *TINY, "--profile", "3,2"]) == 0
    return folder


def ask(*arguments: str) -> int:
    shape = ["--nodes", "12", "--profile", "3,2", "--count", "2", "--json", "figures.json"]
    return drafters.main([*TINY, *shape, *arguments])


def test_rows_with_and_without_it(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    assert len(load(Path("decision.safetensors")).prompts) == 8
    asked = ["--prompts", "questions.jsonl", "--drafters", "moa", "lm", "--decision", "decision.safetensors"]
    assert ask(*asked, "--mcsd", "--lossy-seeds", "2", "--threshold", "1.1") == 0
    rows = json.loads(Path("figures.json").read_text())["drafters"]
    drawn = ["mcsd", "2 seeds, LOSSY", "mcsd+decision", "2 seeds+decision, LOSSY"]
    assert [*rows] == ["plain", "moa", "lm", *(f"moa {name}" for name in drawn), *(f"lm {name}" for name in drawn[:2])]
    assert rows["plain"]["mean"]["acceptance_rate"] is None
    stopped = rows["moa mcsd+decision"]["mean"]
    assert stopped["nodes"] <= 3 < rows["moa mcsd"]["mean"]["nodes"]
    assert stopped["acceptance_rate"] == stopped["accepted_by_depth"][0]  # of one-level trees


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--drafters", "other", "--mcsd"], "was trained for drafter [0-9a-f]+, which is not among these"),
        (["--drafters", "moa", "--mcsd", "--prompts", "train.jsonl"], "was trained on one of these questions"),
        (["--drafters", "moa"], "--mcsd or --lossy-seeds"),
        (["--drafters", "moa", "--mcsd", "--decision", "questions.jsonl"], "questions.jsonl holds no decision model"),
    ],
)
def test_a_decision_that_does_not_fit_is_one_line(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(trained)
    assert ask("--prompts", "questions.jsonl", "--decision", "decision.safetensors", *arguments) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(said) == 1 and re.search(text, said[0])
