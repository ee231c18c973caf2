"""Drafters behind one interface, for side by side measurements in one process.

All grow the same dynamic tree with the device's own `Drafter` (outrider_core.drafting.drafter); they differ in a step's
computation and in what they learn of the target after each verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cloud.engine.runner import FeatureProducer
from cloud.torch_engine.features import TorchFeatures
from lab.baselines.choice import RandomChooser
from lab.baselines.eagle3 import Eagle3
from lab.baselines.files import load_baseline, load_variant
from lab.baselines.networks import Baseline
from lab.multi_candidate import EarlyStop, SampledDrafter
from outrider_core.drafting.bundle import Bundle
from outrider_core.drafting.drafter import Drafter
from outrider_core.drafting.engines import open_engine
from outrider_core.drafting.spare_rows import SpareRow
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.eager import EagerEngine
from outrider_core.models.moa import device_half_on, server_half
from outrider_core.models.packing import pack_linears
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.rows import RowShape, pack_rows, unpack_rows
from outrider_core.protocol.sampling import Sampling

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

#: a row cost that no path is worth: EAGLE's spare rows would take a step each, so all contenders go without
NO_SPARE_ROWS = 2.0
#: the target's embedding and LM head, each [vocab, hidden_size]
Tables = tuple[torch.Tensor, torch.Tensor]


class Contender:
    """A drafter. `fresh` begins a text; `learn` passes the target's states of tokens start.. of it.

    packed: feature rows as sent (outrider_core.protocol.rows); hidden: the target's last hidden states [n,
    hidden_size]. producer: makes the rows on the verifier's side, None if none are read. hash: of the drafter's
    weights. head: its LM head, if it runs in torch.
    """

    name: str
    producer: FeatureProducer | None = None
    hash: str
    head: nn.Module | None = None

    def fresh(self) -> Any:
        """Return a Drafter, or an object with its interface."""
        raise NotImplementedError

    def learn(self, drafter: Any, start: int, packed: bytes, hidden: Floats) -> None:
        """Learn from the target; most drafters read tokens only."""


class MoAContender(Contender):
    """MoA, eager or through the engine of a bundle; row_cost: see `Drafter`."""

    def __init__(
        self, name: str, folder: Path, tables: Tables, bundle: Bundle | None = None, lookup: bool = False,
        row_cost: float | None = NO_SPARE_ROWS,
    ) -> None:  # fmt: skip
        self.name, self._lookup, self._row_cost = name, lookup, row_cost
        self.config, tensors, self.hash = load_drafter(folder)
        half = device_half_on(self.config, tensors, *tables)
        self.producer = TorchFeatures(self.config, server_half(self.config, tensors), torch.device("cpu"))
        self._engine = open_engine(bundle, None, torch.get_num_threads()) if bundle else EagerEngine(half)
        self._confidence_temperature = (bundle.manifest if bundle else self.config).confidence_temperature
        pack_linears(half)
        self.head = None if bundle else half.head
        self._draft_ids = half.draft_ids.numpy().astype(np.int64)
        self._null_row = None if half.null_row is None else half.null_row.numpy()
        self._shape = RowShape(self.config.ca_kv_heads, self.config.head_dim)

    def fresh(self) -> Drafter:
        heads, context = self.config.sa_kv_heads, self.config.max_context
        return Drafter(
            self._engine, self._draft_ids, self._shape, heads, context, self._lookup, self._null_row,
            self._confidence_temperature, self._row_cost,
        )  # fmt: skip

    def learn(self, drafter: Drafter, start: int, packed: bytes, hidden: Floats) -> None:
        rows = unpack_rows(packed, self._shape)
        drafter.add_rows(np.arange(start, start + len(rows)), rows)


class VariantContender(Contender):
    """MoA with one change, eager; see lab.baselines.files.VARIANTS."""

    def __init__(self, name: str, folder: Path, tables: Tables) -> None:
        self.name = name
        self._model, self.hash = load_variant(folder, tables)
        config, half = self._model.config, self._model.device_half
        pack_linears(half)
        self.producer = self._layers = KeptLayers(config.target_layers)
        self._engine, self._shape = EagerEngine(half), RowShape(config.ca_kv_heads, config.head_dim)
        assert half.null_row is not None
        self._null_row = half.null_row.numpy()
        self.head = self._model.head

    def fresh(self) -> Drafter:
        ids, config = self._model.device_half.draft_ids.numpy().astype(np.int64), self._model.config
        return Drafter(
            self._engine, ids, self._shape, config.sa_kv_heads, config.max_context, False, self._null_row,
            config.confidence_temperature, NO_SPARE_ROWS,
        )  # fmt: skip

    def learn(self, drafter: Drafter, start: int, packed: bytes, hidden: Floats) -> None:
        """Rows are rounded as they travel, or to as many bits as the drafter was trained for."""
        if not len(hidden):
            return
        places = range(start, start + len(hidden))
        with torch.inference_mode():
            kv = self._layers.of(places)
            rows = self._model.rows(kv, torch.from_numpy(hidden), torch.tensor(places)).numpy()
        if not self._model.bits:
            rows = unpack_rows(pack_rows(rows), self._shape)
        drafter.add_rows(np.array(places, np.int64), rows)


class BaselineContender(Contender):
    """EAGLE-2, EAGLE-3 or the small LM, eager."""

    def __init__(self, name: str, folder: Path, tables: Tables) -> None:
        self.name = name
        self.model, self.hash = load_baseline(folder, tables)
        pack_linears(self.model)
        self.head = self.model.head
        if isinstance(self.model, Eagle3):
            self.producer = self._layers = KeptLayers(self.model.config.target_layers)

    def fresh(self) -> Drafter:
        if self.model.fuse is not None:
            return EagleDrafter(self.model)
        config = self.model.config
        heads = config.layers * config.kv_heads
        shape = RowShape(1, config.head_dim)
        ids = self.model.draft_ids.numpy().astype(np.int64)
        return Drafter(
            _TokensOnly(self.model), ids, shape, heads, config.max_context, lookup=False,
            confidence_temperature=config.confidence_temperature, row_cost=NO_SPARE_ROWS,
        )  # fmt: skip

    def learn(self, drafter: Drafter, start: int, packed: bytes, hidden: Floats) -> None:
        if isinstance(self.model, Eagle3) and len(hidden):
            with torch.inference_mode():
                kv = self._layers.of(range(start, start + len(hidden)))
                hidden = self.model.known(kv, torch.from_numpy(hidden)).numpy()
        if isinstance(drafter, EagleDrafter):
            drafter.add_hidden(start, hidden)


class KeptLayers:
    """A FeatureProducer that keeps K and V of the target's `layers` at each position of the present text.

    They are kept unpacked: packing into feature rows would lose precision, which no EAGLE does.
    """

    shape = RowShape(1, 2)

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._kept: dict[int, torch.Tensor] = {}

    def rows(self, kv: torch.Tensor, positions: Sequence[int]) -> Floats:
        """See FeatureProducer.rows; they are empty."""
        self._kept |= zip(positions, kv.float().cpu(), strict=True)
        return np.zeros((len(positions), 2, *self.shape), np.float32)

    def of(self, positions: Sequence[int]) -> torch.Tensor:
        """Return K and V [n, layers, kv_width] of these positions."""
        return torch.stack([self._kept[position] for position in positions])


class Unfed(Contender):
    """A drafter without the target's states: a conversation begun with no features at all."""

    def __init__(self, name: str, base: Contender) -> None:
        self.name, self.hash, self._base = name, base.hash, base

    def fresh(self) -> Any:
        return self._base.fresh()


class SampledContender(Contender):
    """A drafter whose candidates are drawn (MCSD), with `seeds` of the target's for the published process.

    early: when to stop drafting.
    """

    def __init__(
        self, name: str, base: Contender, profile: Sequence[int], seeds: int, seed: int, early: EarlyStop | None = None
    ) -> None:
        self.name, self.producer, self.hash, self.head = name, base.producer, base.hash, base.head
        self._base, self._profile, self._seeds, self._early = base, profile, seeds, early
        self._chooser = RandomChooser(np.random.default_rng(seed))

    def fresh(self) -> SampledDrafter:
        inner = self._base.fresh()
        return SampledDrafter(inner, self._profile, self._chooser, self._seeds, self._early, self.head)

    def learn(self, drafter: SampledDrafter, start: int, packed: bytes, hidden: Floats) -> None:
        self._base.learn(drafter.inner, start, packed, hidden)


class _TokensOnly:
    """The small LM as an engine: its layers' keys are stored side by side, feature rows are not read."""

    def __init__(self, model: Baseline) -> None:
        self._model = model

    @torch.inference_mode()
    def step(
        self,
        tokens: Ints,
        positions: Ints,
        wanted: Ints,
        sa_mask: Floats,
        sa_keys: Floats,
        sa_values: Floats,
        row_keys: Floats,
        row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:
        return _run(self._model, None, tokens, positions, wanted, sa_mask, sa_keys, sa_values)[:3]


class EagleDrafter(Drafter):
    """EAGLE's drafting state: with every cached token, its hidden state.

    That is the target's own if known (EAGLE-3: a mixture of it and of other layers), else the head's prediction.
    """

    def __init__(self, model: Baseline) -> None:
        config = model.config
        heads = config.layers * config.kv_heads
        ids = model.draft_ids.numpy().astype(np.int64)
        shape = RowShape(1, config.head_dim)
        super().__init__(
            _TokensOnly(model), ids, shape, heads, config.max_context, lookup=False,
            confidence_temperature=config.confidence_temperature, row_cost=NO_SPARE_ROWS,
        )  # fmt: skip
        self._model = model
        self._states = np.zeros((len(self.keys), config.hidden_size), np.float32)
        self._known = np.zeros(len(self.keys), bool)

    def add_hidden(self, start: int, hidden: Floats) -> None:
        """Add the target's last hidden states [n, hidden_size], or their substitute, of positions start..."""
        self._states[start : start + len(hidden)] = hidden
        self._known[start : start + len(hidden)] = True

    def _step(self, tokens: Ints, positions: Ints, wanted: Ints, mask: Floats, past: int) -> Floats:
        size = len(tokens)
        # a token's parent is the last token it sees besides itself
        seen = mask == 0
        seen[np.arange(size), past + np.arange(size)] = False
        parents = np.where(seen.any(1), past + size - 1 - np.argmax(seen[:, ::-1], 1), -1)
        if size > 1 and ((parents >= past) & ~self._known[parents]).any():
            # the parent's state is predicted in this very step: run token by token
            rows = [
                self._step(
                    tokens[i : i + 1], positions[i : i + 1], np.arange(1), mask[i : i + 1, : past + i + 1], past + i
                )
                for i in range(size)
            ]
            return np.concatenate(rows)[wanted]
        self.steps += 1
        features = np.where(parents[:, None] < 0, np.float32(0), self._states[parents])
        logits, keys, values, states = _run(
            self._model, features, tokens, positions, wanted, mask, self.keys[:past], self.values[:past]
        )
        here = slice(past, past + size)
        self.keys[here], self.values[here] = keys, values
        self._states[here] = np.where(self._known[here, None], self._states[here], states)
        return logits

    def _advance(self, prefix: list[int], spare: Sequence[SpareRow] = ()) -> Floats:
        """Advance the cache. Slots after the text hold drafts, whose hidden states are never the target's."""
        self._known[len(prefix) - 1 :] = False
        return super()._advance(prefix, spare)

    def _reroot(self, prefix: list[int], sampling: Sampling, rules: Rules | None) -> None:
        """Drop every drafted row: it was computed from predicted states, and the target's are known now."""


@torch.inference_mode()
def _run(
    model: Baseline,
    features: Floats | None,
    tokens: Ints,
    positions: Ints,
    wanted: Ints,
    mask: Floats,
    keys: Floats,
    values: Floats,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Run one step: logits [wanted, draft_vocab], new keys, new values, states [n, hidden_size]."""
    inputs = (tokens, positions, mask, keys, values)
    ids, places, masked, past_keys, past_values = (torch.from_numpy(x)[None] for x in inputs)
    known = None if features is None else torch.from_numpy(features)[None]
    states, new_keys, new_values = model.hidden(ids, known, places, masked, past_keys, past_values)
    logits = model.head(states[0, torch.from_numpy(wanted)])
    return logits.numpy(), new_keys[0].numpy(), new_values[0].numpy(), states[0].numpy()
