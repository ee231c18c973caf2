"""A target in float32, computed layer by layer: only one layer's weights are in memory at a time. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider_core.targets.batch import Batch
from outrider_core.targets.builder import InlineTables
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.graph import TargetGraph
from outrider_core.targets.part import POOL_BLOCK, Part
from outrider_core.targets.products import open_session
from outrider_core.targets.weights import Floats, Weights

#: rows of the LM head that are in memory at once
HEAD_ROWS = 8192


def final_states(
    weights: Weights,
    config: TargetConfig,
    texts: Sequence[Sequence[int]],
    done: Callable[[int], None] = lambda layers: None,
) -> list[Floats]:
    """Return the input of the LM head at every token of each text, float32 [tokens, hidden_size].

    done: called with the number of finished layers after each of them.
    """
    longest = max(map(len, texts))
    batches = [Batch([Part(0, 0, tuple(text))], config) for text in texts]
    states = [_embedded(weights, config, text) for text in texts]
    for layer in range(config.num_hidden_layers):
        graph = TargetGraph(config, weights, longest, InlineTables(), bits=32)
        session = open_session(graph.piece(layer).SerializeToString())
        for index, batch in enumerate(batches):
            shape = (batch.span.count, config.num_key_value_heads, POOL_BLOCK, config.head_dim)
            pools = {f"{name}_{layer}": np.zeros(shape, np.float32) for name in ("keys", "values")}
            feeds = {name: value for name, value in batch.feeds.items() if name not in ("ids", "wanted")} | pools
            normed, residual = states[index]
            feeds |= {"normed": normed, "residual": residual}
            normed, residual = session.run(["next_normed", "next_residual"], feeds)
            states[index] = normed, residual
        done(layer + 1)
    return [normed for normed, _ in states]


def head_logits(weights: Weights, config: TargetConfig, states: Floats) -> Floats:
    """Return the logits of `final_states`: [tokens, hidden_size] -> [tokens, vocab]."""
    name = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    logits = np.empty((len(states), config.vocab_size), np.float32)
    for start in range(0, config.vocab_size, HEAD_ROWS):
        rows = slice(start, min(start + HEAD_ROWS, config.vocab_size))
        np.matmul(states, weights.read(name, rows).T, out=logits[:, rows])
    logits *= np.float32(config.logit_scale)
    return logits


def _embedded(weights: Weights, config: TargetConfig, text: Sequence[int]) -> tuple[Floats, Floats]:
    """Return the input of the first layer, and the residual that it adds to."""
    rows = [weights.read("embed_tokens", slice(token, token + 1)) for token in text]
    residual = np.concatenate(rows) * np.float32(config.embedding_scale)
    if not (norm := config.norms(0)[0]):
        return residual, residual
    size = np.sqrt(np.square(residual).mean(-1, keepdims=True) + np.float32(config.rms_norm_eps))
    return residual / size * weights.read(norm), residual
