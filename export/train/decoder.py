"""Decode many sequences in lock step, one token of each per forward pass, over a static cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import AttentionInterface

from outrider_core.models.target import Target, head_dim_of

#: a captured step reads a multiple of this many columns of the cache
SPAN = 128


class Decoder(Protocol):
    """Sequences in slots; `lengths` [slots] are their tokens, and 0 frees a slot."""

    lengths: Any

    def prefill(self, prompts: dict[int, list[int]]) -> torch.Tensor:
        """Put prompts (slot -> ids) into their slots; return the logits [prompts, vocab] that follow."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every slot: tokens [slots] int64 -> logits [slots, vocab]."""

    def close(self) -> None:
        """Free memory and undo changes to the target."""


class SlotDecoder:
    """`slots` sequences decoded in lock step over a static key/value cache.

    Cache: keys and values [layers, slots * kv_heads, capacity, head_dim] in the model's dtype. If that is a 16-bit one,
    keys are kept as float32 on a CPU: in a trial at 96 slots and 600 tokens the score product took 3.8 ms instead of
    9.3 ms in bfloat16. On a GPU a step is captured as a CUDA graph: launching its many small kernels one by one takes
    several times as long as they run.
    """

    def __init__(self, target: Target, slots: int, capacity: int) -> None:
        config, self.model = target.config, target.model
        device = self.model.device
        self.kv_heads = config.num_key_value_heads
        self.head_dim = head_dim_of(config)
        shape = (config.num_hidden_layers, slots * self.kv_heads, capacity, self.head_dim)
        self.values = torch.zeros(shape, dtype=self.model.dtype, device=device)
        half = self.model.dtype in (torch.bfloat16, torch.float16)
        key_dtype = torch.float32 if half and device.type == "cpu" else self.model.dtype
        self.keys = torch.zeros_like(self.values, dtype=key_dtype)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)
        self.columns = torch.arange(capacity, device=device)
        self.every_head = torch.arange(slots * self.kv_heads, device=device)
        self.prompted: torch.Tensor | None = None  # slots [prompts], while a prefill runs
        self.graphs = Graphs(slots, device) if device.type == "cuda" else None
        AttentionInterface.register("outrider_slots", self._attention)
        self.model.set_attn_implementation("outrider_slots")

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        keys, values = self.keys[module.layer_idx], self.values[module.layer_idx]
        if self.prompted is not None:
            for cache, new in ((keys, key), (values, value)):
                by_slot = cache.unflatten(0, (-1, self.kv_heads))
                by_slot[self.prompted, :, : new.shape[2]] = new.to(cache.dtype)
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
            return mixed.transpose(1, 2), None
        columns = self.lengths.repeat_interleave(self.kv_heads)
        rows = self.every_head * values.shape[1] + columns
        for cache, new in ((keys, key), (values, value)):
            cache.view(-1, self.head_dim).index_copy_(0, rows, new[0].transpose(0, 1).flatten(0, 1).to(cache.dtype))
        slots, span = len(self.lengths), self.mask.shape[-1]
        grouped = query[0].transpose(0, 1).reshape(slots * self.kv_heads, -1, self.head_dim)
        scores = torch.bmm(grouped.to(keys.dtype) * scaling, keys[:, :span].transpose(1, 2))
        weights = torch.softmax(scores + self.mask, -1).to(values.dtype)
        return torch.bmm(weights, values[:, :span]).view(1, slots, -1, self.head_dim), None

    @torch.inference_mode()
    def prefill(self, prompts: dict[int, list[int]]) -> torch.Tensor:
        """Put prompts (slot -> ids) into their slots; return the logits [prompts, vocab] that follow.

        They are padded to the longest. Padding in the cache lies beyond a slot's length: it is never read, and
        overwritten as the sequence grows.
        """
        device = self.model.device
        self.prompted = torch.tensor(list(prompts), device=device)
        tokens = pad_sequence([torch.tensor(ids) for ids in prompts.values()], batch_first=True).to(device)
        lengths = torch.tensor([len(ids) for ids in prompts.values()], device=device)
        positions = self.columns[: tokens.shape[1]].expand_as(tokens)
        states = self.model.model(tokens, position_ids=positions, use_cache=False).last_hidden_state
        self.lengths[self.prompted] = lengths
        self.prompted = None
        last = states[torch.arange(len(lengths), device=device), lengths - 1]
        logits: torch.Tensor = self.model.get_output_embeddings()(last)
        return logits

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every slot: tokens [slots] int64 -> logits [slots, vocab], valid until the next step."""
        span = int(self.lengths.max()) + 1
        if self.graphs is None:
            logits = self._forward(tokens, span)
        else:
            logits = self.graphs.run(tokens, min(-(-span // SPAN) * SPAN, len(self.columns)), self._forward)
        self.lengths += 1
        return logits

    def _forward(self, tokens: torch.Tensor, span: int) -> torch.Tensor:
        """Run the step over the first `span` columns of the cache. It does not update `lengths`."""
        hidden = self.columns[:span] > self.lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=hidden.device)
        self.mask = mask.masked_fill_(hidden, float("-inf"))[:, None].repeat_interleave(self.kv_heads, 0)
        logits: torch.Tensor = self.model(tokens[None], position_ids=self.lengths[None], use_cache=False).logits[0]
        return logits

    def close(self) -> None:
        """Restore the target's usual attention, and free the cache."""
        self.model.set_attn_implementation("sdpa")
        self.keys = self.values = self.mask = torch.empty(0)  # transformers keeps the attention, and that this decoder
        self.graphs = None


class Graphs:
    """CUDA graphs of a decoder's step, one for each span, captured on first use.

    They share their memory: the next graph that runs overwrites the result of the last.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._tokens = torch.zeros(slots, dtype=torch.long, device=device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None

    def run(
        self, tokens: torch.Tensor, span: int, forward: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> torch.Tensor:
        """Run forward(tokens, span), which must be the same function in each call and may be run several times."""
        with torch.cuda.device(self._tokens.device):
            return self._run(tokens, span, forward)

    def _run(
        self, tokens: torch.Tensor, span: int, forward: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> torch.Tensor:
        self._tokens.copy_(tokens)
        if span not in self._captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                forward(self._tokens, span)  # libraries initialise themselves, which a capture does not allow
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                logits = forward(self._tokens, span)
            self._pool = self._pool or graph.pool()
            self._captured[span] = graph, logits
        graph, logits = self._captured[span]
        graph.replay()
        return logits


def choose(logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return next tokens [n] int64 of logits [n, vocab]: greedy if the temperature [n] is 0, else drawn."""
    tokens = logits.argmax(-1)
    drawn = temperatures.nonzero()[:, 0]
    if len(drawn):
        mass = torch.softmax(logits[drawn].float() / temperatures[drawn, None], -1).cumsum(-1)
        at = torch.rand(len(drawn), 1, generator=generator, device=logits.device) * mass[:, -1:]
        tokens[drawn] = torch.searchsorted(mass, at, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens
