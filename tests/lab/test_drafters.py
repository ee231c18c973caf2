"""The drafter lab on a tiny target: every drafter and rule gives the target's text, and figures mean what they say."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.questions import Question
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from export.train.batches import build_batch
from export.train.features import OnlineFeatures, Sequence
from export.train.recipe import TrainSettings
from export.train.training_set import TrainingSet
from lab import offline_curve
from lab.baselines.eagle3 import Eagle3
from lab.baselines.files import VARIANTS, load_variant
from lab.baselines.fused import FusedHalf, FusedHiddenMoA, FusedMoA, Place, rounded
from lab.baselines.trees import CandidateTree, How
from lab.contenders import BaselineContender, Contender, EagleDrafter, SampledContender
from lab.drafters import main, measure
from lab.lab import Lab
from lab.multi_candidate import merged
from outrider_core.drafting.drafter import TreeShape
from outrider_core.models.layers import tables_of
from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.target import Target
from outrider_core.protocol.rows import RowShape, pack_rows, unpack_rows
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.source import TargetSource
from tests.tiny import plain_decode, tiny_model

PROMPTS = [[10, 20, 30, 40, 50], [7, 8, 9], [101, 60, 61, 62, 63, 64, 65, 66, 67]]
SHAPE = TreeShape(nodes=12, depth=4, breadth=3)


@pytest.mark.parametrize("kind", ["moa", "eagle2", "eagle3", "lm", *VARIANTS])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)], ids=["greedy", "sampled"])
def test_text_is_the_targets_own(lab: Lab, contenders: dict[str, Contender], kind: str, sampling: Sampling) -> None:
    for prompt in PROMPTS:
        truth = plain_decode(tiny_model(dtype=torch.float32), prompt, sampling, 24)
        answer = lab.answer(prompt, contenders[kind], sampling, 24, SHAPE)
        assert answer.tokens == truth == lab.answer(prompt, None, sampling, 24).tokens
        assert sum(answer.accepted) + len(answer.accepted) >= len(truth)


@pytest.mark.parametrize("kind", ["moa", "eagle2", "eagle3", "lm", *VARIANTS])
def test_a_replay_accepts_what_the_run_did(lab: Lab, contenders: dict[str, Contender], kind: str) -> None:
    for prompt in PROMPTS:
        run = lab.answer(prompt, contenders[kind], Sampling(), 30, SHAPE)
        again = lab.replay(prompt, run.tokens, contenders[kind], SHAPE)
        limited = len(run.tokens) == 30  # else the run did not know that the answer would end so soon
        cut = None if limited else -2
        assert again.accepted[:cut] == run.accepted[:cut] and again.depths[:cut] == run.depths[:cut]


def test_drawn_candidates_decode_greedily(lab: Lab, contenders: dict[str, Contender]) -> None:
    for prompt in PROMPTS:
        contender = SampledContender("drawn", contenders["moa"], (3, 2, 1), 0, 0)
        truth = plain_decode(tiny_model(dtype=torch.float32), prompt, Sampling(), 24)
        assert lab.answer(prompt, contender, Sampling(), 24, SHAPE).tokens == truth


@pytest.mark.slow
def test_rejection_keeps_the_distribution_and_seeds_do_not(lab: Lab, contenders: dict[str, Contender]) -> None:
    """-log p above the entropy: 0 in the mean for what is drawn from p."""
    sampling = Sampling(temperature=1.0, seed=1)
    off = {}
    for seeds in (0, 3):
        contender = SampledContender("drawn", contenders["moa"], (3, 2, 1), seeds, 7)
        answers = [lab.answer([5 + i, 9], contender, sampling, 60, SHAPE, weigh=True) for i in range(24)]
        surprise = np.array([value for answer in answers for value in answer.surprise])
        off[seeds] = abs(surprise.mean()) / (surprise.std() / len(surprise) ** 0.5)
    assert off[0] < 4 < off[3], off


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
@torch.inference_mode()
def test_eagle_steps_equal_a_whole_forward(
    kind: str, lab: Lab, contenders: dict[str, Contender], target: Target
) -> None:
    """Behind a verified text: the target's features where they are known, the head's own states behind them."""
    eagle = contenders[kind]
    assert isinstance(eagle, BaselineContender)
    text = PROMPTS[2]
    session, drafter = lab.open(text, Sampling(), eagle), eagle.fresh()
    lab.prefill(session, eagle, drafter)
    lab.close(session)
    assert isinstance(drafter, EagleDrafter)
    if isinstance(eagle.model, Eagle3):
        config = MoAConfig.for_target(target.config, target.model_hash, layers=2, draft_vocab=64)
        kv, last = OnlineFeatures(target, config, [Sequence(text, ())]).batch([0])
        hidden = eagle.model.known(kv, last)[0]
    else:
        hidden = target.model.model(torch.tensor([text])).last_hidden_state[0]
    written: list[int] = []
    for _ in range(4):
        written.append(drafter.next_token(text + written, Sampling())[0])
    ids, features = text[:], [torch.zeros(hidden.shape[1]), *hidden[:-1]]
    for token in written:
        n = len(ids)
        mask = torch.full((1, n, n), -1e9).triu(1)
        empty = torch.zeros(1, 0, eagle.model.config.kv_heads, eagle.model.config.head_dim)
        states = eagle.model.hidden(
            torch.tensor([ids]), torch.stack(features)[None], torch.arange(n)[None], mask, empty, empty
        )[0][0]
        assert int(eagle.model.draft_ids[eagle.model.head(states[-1]).argmax()]) == token
        ids.append(token)
        features.append(states[-1])


@pytest.mark.parametrize("kind", VARIANTS)
@torch.inference_mode()
def test_variants_draft_as_they_were_trained(
    kind: str, contenders: dict[str, Contender], target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step behind a verified text what a whole forward gives, with the rows before the root."""
    contender, text = contenders[kind], PROMPTS[2]
    model, _ = load_variant(folder / kind, tables_of(target.model))
    root, written, drafter = len(text) - 1, list[int](), contender.fresh()
    kv, hidden = OnlineFeatures(target, model.config, [Sequence(text, ())]).batch([0])
    exact = model.rows(kv[0, :root], hidden[0, :root], torch.arange(root)).numpy()
    monkeypatch.setattr("lab.contenders.unpack_rows", lambda *_: exact)  # not rounded as they travel
    assert contender.producer
    contender.producer.rows(kv[0, :root], range(root))
    contender.learn(drafter, 0, b"", hidden[0, :root].numpy())
    for _ in range(5):
        ids = text + written
        kv, hidden = OnlineFeatures(target, model.config, [Sequence(ids, ())]).batch([0])
        causal = torch.full((1, len(ids), len(ids)), -1e9).triu(1)
        rows = torch.full((1, len(ids), len(ids) + 1), -1e9)
        for at in range(len(ids)):
            rows[:, at, : min(at, root) + 1] = 0.0
        whole = model.head(model.states(torch.tensor([ids]), kv, hidden, causal, rows)[0, -1])
        got = drafter._advance(ids)[0]
        np.testing.assert_allclose(got, whole.numpy(), rtol=1e-3, atol=1e-3)
        written.append(int(model.device_half.draft_ids[whole.argmax()]))


@pytest.mark.parametrize("place", ["query", "input"])
@torch.no_grad()
def test_a_fused_query_reads_the_newest_row_that_it_sees(place: Place, target: Target) -> None:
    """With cross-attention switched off a row moves those positions alone of which it is the newest."""
    data = TrainingSet(target, [Sequence(list(range(4, 40)), ((2, 36),))], layers=2, draft_vocab=64)
    batch = build_batch(data.features("online", Path()), [0], random.Random(3), TrainSettings(long_windows=0.0))
    plain, half = FusedHalf(data.config, "nowhere"), FusedHalf(data.config, place)
    half.load_state_dict(plain.state_dict(), strict=False)
    assert half.fuse is not None
    for each in (plain, half):
        each.cross_attention.self_attn.o_proj.weight.zero_()
    size = batch.tokens.shape[1]
    rows = torch.randn(2, 1, size + 1, data.config.ca_kv_heads, data.config.head_dim)
    empty = torch.zeros(1, 0, half.cache_heads, data.config.head_dim)
    given = (batch.tokens, torch.arange(size)[None], batch.sa_mask, empty, empty)
    newest = (batch.row_mask[0] == 0).sum(-1) - 1
    before, own, _ = half.hidden(*given, *rows, batch.row_mask)
    assert torch.equal(own, plain.hidden(*given, *rows, batch.row_mask)[1]) == (place == "query")
    for row in range(size):
        changed = rows.clone()
        changed[1, 0, row] += 1.0
        moved = (half.hidden(*given, *changed, batch.row_mask)[0][0] != before[0]).any(-1)
        of_it = newest == row
        assert moved[of_it].all() and (place == "input" or not moved[~of_it].any())


@torch.no_grad()
def test_rows_hold_the_last_hidden_state_if_asked_for(target: Target) -> None:
    data = TrainingSet(target, [Sequence(list(range(4, 40)), ((2, 36),))], layers=2, draft_vocab=64)
    kv, hidden = data.features("online", Path()).batch([0])
    for kind in (FusedMoA, FusedHiddenMoA):
        model = kind(data.config)
        rows = [model.rows(kv[0], changed, torch.arange(36)) for changed in (hidden[0], hidden[0] + 1)]
        assert torch.equal(*rows) == (kind is FusedMoA)
        assert rows[0].shape == (36, 2, data.config.ca_kv_heads, data.config.head_dim)


def test_rows_are_rounded_as_they_travel_and_still_learn() -> None:
    rows = torch.randn(5, 2, 3, 8, requires_grad=True)
    arrived = unpack_rows(pack_rows(rows.detach().numpy()), RowShape(3, 8))
    np.testing.assert_allclose(rounded(rows, 4).detach().numpy(), arrived, rtol=2e-3, atol=2e-3)
    errors = [float((rounded(rows, bits) - rows).detach().abs().mean()) for bits in (4, 6, 8)]
    assert errors[0] > 3 * errors[1] > 9 * errors[2] > 0
    (rounded(rows, 4) * 3).sum().backward()
    assert rows.grad is not None and bool((rows.grad == 3).all())


def test_candidates_that_say_the_same_are_verified_once() -> None:
    tree = CandidateTree((5, 5, 6, 7, 7, 8), (-1, -1, -1, 0, 1, 1), (How.INDEPENDENT,) * 6)
    sent, places = merged(tree)
    assert sent == TokenTree((5, 6, 7, 8), (-1, -1, 0, 0)) and places == [0, 0, 1, 2, 2, 3]


def test_figures_count_what_happened(lab: Lab, contenders: dict[str, Contender]) -> None:
    questions = [Question(group, prompt, None) for group, prompt in zip("aab", PROMPTS, strict=True)]
    figures = measure(lab, list(contenders.values()), questions, Sampling(), SHAPE, 24, 1, Console(quiet=True))
    truths = [plain_decode(tiny_model(dtype=torch.float32), prompt, Sampling(), 24) for prompt in PROMPTS]
    assert figures["different_from_plain"] == dict.fromkeys(contenders, 0)
    plain = figures["drafters"]["plain"]
    assert plain["a"]["tokens"] == len(truths[0]) + len(truths[1]) and plain["mean"]["tau"] == 1.0
    assert plain["b"]["questions"] == 1 and plain["mean"]["nodes"] == 0
    for by_group in figures["drafters"].values():
        assert by_group["mean"]["tau"] == pytest.approx((by_group["a"]["tau"] + by_group["b"]["tau"]) / 2, abs=2e-3)


def test_what_is_written_alone_is_judged_by_the_target(lab: Lab, contenders: dict[str, Contender]) -> None:
    questions = [(prompt, "the end: 7") for prompt in PROMPTS]
    figures = offline_curve.measure(lab, list(contenders.values()), questions, 20, Console(quiet=True))
    assert set(figures) == {"target", *contenders}
    own = figures["target"]
    assert all(row["agreed_share"] == 1.0 for row in own.values())
    assert own["0.00"]["tokens"] > own["0.50"]["tokens"] > own["0.75"]["tokens"] > 0
    for name in contenders:
        assert all(0 <= row["agreed_share"] <= 1 for row in figures[name].values())
        # random drafters write what the target finds unlikely
        assert figures[name]["0.00"]["perplexity"] > own["0.00"]["perplexity"]


@torch.inference_mode()
def test_nats_are_the_targets(lab: Lab, target: Target) -> None:
    text, written = PROMPTS[0], [60, 61, 7]
    logits = target.model(torch.tensor([text + written])).logits[0].double().log_softmax(-1)
    direct = -sum(float(logits[len(text) - 1 + i, token]) for i, token in enumerate(written))
    assert offline_curve.nats(lab, text, written) == pytest.approx(direct, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7.0"),
        ("#### 1,234", "1234.0"),
        ("it costs $5.50", "5.5"),
        ("none", None),
        ("-2 or 3?", "3.0"),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert offline_curve.last_number(text) == number


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompts", "empty.jsonl"], "empty.jsonl holds no question"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--prompts", "empty.jsonl", "--drafters", "target"], "target: no config.json|not a drafter|no baseline"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    (folder / "empty.jsonl").write_text("\n")
    monkeypatch.chdir(folder)
    if "--drafters" not in arguments:
        arguments = [*arguments, "--drafters", "moa", "lm"]
    assert main(["--target", "target", "--dtype", "float32", "--threads", "1", "--nodes", "12", *arguments]) == 1
    assert re.search(text, capsys.readouterr().err)


def test_the_command_compares_what_it_is_told_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [json.dumps({"question": f"w{i} w{i + 1} w{i + 2}?", "answer": "#### 4"}) for i in range(3)]
    (folder / "gsm8k.jsonl").write_text("\n".join(questions))
    write_bundle(
        BundleOptions(
            target=TargetSource.resolve(str(folder / "target")),
            drafter=folder / "moa",
            output_dir=folder / "bundle",
            quant="fp32",
        )
    )
    monkeypatch.chdir(folder)
    common = ["--target", "target", "--dtype", "float32", "--threads", "1", "--nodes", "12", "--max-new-tokens", "12"]
    asked = ["--prompts", "gsm8k.jsonl", "--drafters", "moa", "small=lm", "--lookup", "--bundle", "bundle"]
    assert main([*common, *asked, "--unfed", "--json", "out.json"]) == 0
    figures = json.loads((folder / "out.json").read_text())
    names = {f"{name}{unfed}" for name in ("moa", "moa lookup", "moa bundle", "small") for unfed in ("", " unfed")}
    assert set(figures["drafters"]) == names | {"plain"}
    assert figures["different_from_plain"] == dict.fromkeys(names, 0) and figures["questions"] == 3
    assert (folder / "out.svg").is_file()
    by_engine = [figures["drafters"][name]["mean"] for name in ("moa lookup", "moa bundle")]
    assert by_engine[0]["tau"] == by_engine[1]["tau"] and by_engine[0]["steps"] == by_engine[1]["steps"]
    assert main([*common, "--prompts", "gsm8k.jsonl", "--drafters", "lm", "--bundle", "bundle"]) == 1
