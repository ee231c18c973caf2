"""The decision model learns when drafts are accepted, and stops drafting where they are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mcsd_distributions import VOCAB, Model
from safetensors.torch import save_file

from lab.baselines.choice import RandomChooser
from lab.baselines.decision import (
    DecisionConfig,
    DecisionError,
    DecisionModel,
    Examples,
    Trained,
    balanced,
    hard_features,
    hard_labels,
    load,
    save,
    soft_labels,
    train,
    validation_loss,
)
from lab.baselines.drafting import grow
from lab.baselines.sampling import draw_independent


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)


def pairs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Distributions p, q [count, 30] that agree the more, the more certain they are."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, 30)) * generator.uniform(0.2, 6.0, size=(count, 1))
    return softmax(logits + generator.normal(size=logits.shape)), softmax(logits)


def entropy(labels: np.ndarray) -> float:
    """Cross-entropy of always predicting the mean label."""
    mean = labels.mean()
    return float(-(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)))


def test_features_and_labels_are_what_they_say() -> None:
    q = np.zeros((2, 20))
    q[0, 3] = 1.0
    q[1, :12] = np.arange(1, 13) / 78
    features = hard_features(q)
    assert features.shape == (2, 11)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features[0], [0.0, 1.0] + [0.0] * 9, atol=1e-7)
    np.testing.assert_allclose(features[1, 0], -(q[1, :12] * np.log(q[1, :12])).sum(), rtol=1e-6)
    np.testing.assert_allclose(features[1, 1:], np.arange(12, 2, -1) / 78, rtol=1e-6)
    np.testing.assert_allclose(hard_features(np.array([[0.25, 0.75]]))[0, 1:4], [0.75, 0.25, 0.0])
    p = np.array([[0.2, 0.8, 0.0], [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    q = np.array([[0.4, 0.4, 0.2], [0.1, 0.8, 0.1], [0.5, 0.5, 0.0]])
    np.testing.assert_allclose(soft_labels(p, q, [0, 0, 1]), [0.5, 1.0, 0.0])
    np.testing.assert_array_equal(hard_labels(p, q), [0.0, 0.0, 1.0])


def test_balancing_keeps_all_of_the_smaller_class() -> None:
    labels = np.array([1, 0, 1, 1, 0, 1, 1], np.float32)
    kept = balanced(labels, np.random.default_rng(0))
    assert len(kept) == 4
    assert {1, 4} <= set(kept.tolist())
    assert labels[kept].mean() == 0.5


@pytest.mark.parametrize(
    ("config", "widths"),
    [
        (DecisionConfig.soft(768), [768, 512, 256, 1]),
        (DecisionConfig.soft(2048), [2048, 1024, 512, 1]),
        (DecisionConfig.hard(), [11, 44, 1]),
    ],
)
def test_widths_are_the_published_ones(config: DecisionConfig, widths: list[int]) -> None:
    weights = [w for name, w in DecisionModel(config).named_parameters() if name.endswith("weight")]
    assert [weights[0].shape[1], *(w.shape[0] for w in weights)] == widths


def test_the_hard_model_learns_where_the_models_agree() -> None:
    parts = []
    for seed in (0, 1):
        p, q = pairs(1500, seed)
        labels = hard_labels(p, q)
        kept = balanced(labels, np.random.default_rng(seed))
        parts.append(Examples(hard_features(q)[kept], labels[kept]))
    torch.manual_seed(0)
    model = DecisionModel(DecisionConfig.hard())
    losses = train(model, *parts)
    assert validation_loss(model, parts[1]) == pytest.approx(min(losses))
    assert min(losses) < 0.8 * entropy(parts[1].labels)
    right = (model.scores(parts[1].features) > 0.5) == (parts[1].labels > 0.5)
    assert right.mean() > 0.7


def test_the_soft_model_learns_acceptance_probabilities() -> None:
    generator = np.random.default_rng(2)
    direction = generator.normal(size=16)
    hidden = generator.normal(size=(4000, 16)).astype(np.float32)
    chances = (1.0 / (1.0 + np.exp(-hidden @ direction / 2))).astype(np.float32)  # neither 0 nor 1
    torch.manual_seed(0)
    model = DecisionModel(DecisionConfig("soft", 16, (64, 32)))
    train(model, Examples(hidden[:3000], chances[:3000]), Examples(hidden[3000:], chances[3000:]))
    assert np.abs(model.scores(hidden[3000:]) - chances[3000:]).mean() < 0.05


def test_the_weights_of_the_best_epoch_stay() -> None:
    generator = np.random.default_rng(0)
    features = generator.normal(size=(60, 8)).astype(np.float32)
    noise = [Examples(f, generator.integers(0, 2, 30).astype(np.float32)) for f in (features[:30], features[30:])]
    torch.manual_seed(0)
    model = DecisionModel(DecisionConfig("soft", 8, (64,)))
    losses = train(model, *noise, epochs=30, batch=5, learning_rate=1e-2)
    assert losses[-1] > min(losses)  # it learnt the noise by heart
    assert validation_loss(model, noise[1]) == pytest.approx(min(losses))


def test_a_saved_model_scores_the_same(tmp_path: Path) -> None:
    model = DecisionModel(DecisionConfig.soft(12))
    features = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
    save(Trained(model, "drafter", frozenset("ab")), tmp_path / "decision.safetensors")
    loaded, *rest = load(tmp_path / "decision.safetensors")
    assert loaded.config == model.config and rest == ["drafter", frozenset("ab")]
    np.testing.assert_array_equal(loaded.scores(features), model.scores(features))
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("none")
    for name in ("other", "text"):
        with pytest.raises(DecisionError, match="decision model"):
            load(tmp_path / f"{name}.safetensors")


def test_drafting_goes_on_while_any_node_is_promising() -> None:
    model = DecisionModel(DecisionConfig("hard", 1, ()))
    with torch.no_grad():
        model.layers[0].weight.fill_(1.0)
        model.layers[0].bias.fill_(0.0)
    scores = np.array([[-3.0], [0.1]], np.float32)  # sigmoid: 0.05, 0.52
    assert model.proceed(scores, threshold=0.5)
    assert not model.proceed(scores, threshold=0.6)
    assert not model.proceed(scores[:1], threshold=0.5)


def test_it_stops_a_growing_tree() -> None:
    model = DecisionModel(DecisionConfig.hard())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        first, last = model.layers[0], model.layers[2]
        first.weight[0, 0] = 1.0  # reads the entropy
        last.weight[0, 0], last.bias[0] = -20.0, 10.0  # scores above 0.5 where it is less than half a nat
    sure, unsure = np.array([0.98, 0.01, 0.01]), np.full(VOCAB, 1 / 3)
    distributions = {(): sure, (0,): sure, (1,): unsure, (2,): unsure}
    drafter = Model(distributions | {(a, b): unsure for a in range(VOCAB) for b in range(VOCAB)})

    def depth(root: np.ndarray, seed: int) -> tuple[int, bool]:
        chooser = RandomChooser(np.random.default_rng(seed))
        tree, _ = grow(
            Model(drafter.distributions | {(): root}).level_distribution, (2, 1, 1), draw_independent, chooser,
            proceed=lambda tree, expanded, q: model.proceed(hard_features(q), 0.5),
        )  # fmt: skip
        return len(tree) // 2, 0 in tree.tokens[:2]

    assert {depth(unsure, seed) for seed in range(5)} <= {(1, True), (1, False)}
    assert {depth(sure, seed) for seed in range(20)} <= {(3, True), (2, False)}
