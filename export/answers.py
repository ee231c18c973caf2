"""Let the target answer training prompts, many at a time.

A drafter learns to predict what the target writes, so its training text is the target's own. All slots
decode one token per forward pass over a static cache; a slot that ends is refilled at once (continuous
batching). Answers are appended to a JSONL file as they finish, so an interrupted run goes on where it
stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from models.target import Target


def read_prompts(paths: Iterable[Path]) -> list[str]:
    """Prompts from JSONL files (`{"prompt": ...}` or `{"turns": [...]}`) or plain text (one a line)."""
    prompts: list[str] = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            if path.suffix not in (".jsonl", ".json"):
                prompts.append(line)
                continue
            try:
                row = json.loads(line)
                prompt = row["prompt"] if "prompt" in row else row["turns"][0]
                if not isinstance(prompt, str) or isinstance(row.get("turns"), str):
                    raise TypeError("no text")
                prompts.append(prompt)
            except (ValueError, KeyError, IndexError, TypeError, AttributeError):
                raise ValueError(f"{path}:{number}: not a JSON object with `prompt` or `turns`") from None
    return prompts


def render_prompt(target: Target, prompt: str) -> list[int]:
    """Token ids of a one-turn chat up to where the answer begins."""
    chat = [{"role": "user", "content": prompt}]
    ids = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return list(ids)


class SlotDecoder:
    """`slots` sequences decoded in lock step over a static key/value cache.

    Cache, in the model's dtype: values [layers, slots * kv_heads, capacity, head_dim]; keys the same with
    the last two axes swapped, which makes the score product twice as fast on a CPU. Both prefill and
    decoding pack their tokens into one row `[1, T]`, so nothing is padded.
    """

    def __init__(self, target: Target, slots: int, capacity: int) -> None:
        config, self.model = target.config, target.model
        device = self.model.device
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, slots * self.kv_heads, capacity, self.head_dim)
        self.values = torch.zeros(shape, dtype=self.model.dtype, device=device)
        self.keys = torch.zeros_like(self.values.transpose(2, 3), memory_format=torch.contiguous_format)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)
        self.columns = torch.arange(capacity, device=device)
        self.every_head = torch.arange(slots * self.kv_heads, device=device)
        self.segments: list[tuple[int, int]] = []  # (slot, prompt length), while a prefill runs
        AttentionInterface.register("outrider_slots", self._attention)
        self.model.set_attn_implementation("outrider_slots")

    def _attention(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
        scaling: float, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        keys, values = self.keys[module.layer_idx], self.values[module.layer_idx]
        if self.segments:
            return self._prefill_attention(keys, values, query, key, value, scaling), None
        columns = self.lengths.repeat_interleave(self.kv_heads)
        rows = self.every_head * values.shape[1] + columns
        keys[self.every_head, :, columns] = key[0].transpose(0, 1).flatten(0, 1)
        values.view(-1, self.head_dim).index_copy_(0, rows, value[0].transpose(0, 1).flatten(0, 1))
        slots, span = len(self.lengths), self.mask.shape[-1]
        grouped = query[0].transpose(0, 1).reshape(slots * self.kv_heads, -1, self.head_dim)
        scores = torch.bmm(grouped * scaling, keys[:, :, :span])
        weights = torch.softmax(scores + self.mask, -1)
        return torch.bmm(weights, values[:, :span]).view(1, slots, -1, self.head_dim), None

    def _prefill_attention(
        self, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        outputs, start = [], 0
        for slot, length in self.segments:
            q, k, v = (x[:, :, start : start + length] for x in (query, key, value))
            heads = slice(slot * self.kv_heads, (slot + 1) * self.kv_heads)
            keys[heads, :, :length], values[heads, :length] = k[0].transpose(1, 2), v[0]
            outputs.append(
                functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            )
            start += length
        return torch.cat(outputs, 2).transpose(1, 2)

    @torch.inference_mode()
    def prefill(self, prompts: dict[int, list[int]]) -> torch.Tensor:
        """Put prompts (slot -> ids) into their slots; return the logits [prompts, vocab] that follow."""
        device = self.model.device
        self.segments = [(slot, len(ids)) for slot, ids in prompts.items()]
        positions = torch.cat([self.columns[:length] for _, length in self.segments])[None]
        last = torch.tensor([length for _, length in self.segments], device=device).cumsum(0) - 1
        tokens = torch.tensor([[token for ids in prompts.values() for token in ids]], device=device)
        logits = self.model(tokens, position_ids=positions, use_cache=False, logits_to_keep=last).logits[0]
        for slot, length in self.segments:
            self.lengths[slot] = length
        self.segments = []
        return logits

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every slot: tokens [slots] int64 -> logits [slots, vocab]."""
        span = int(self.lengths.max()) + 1
        hidden = self.columns[:span] > self.lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=hidden.device)
        self.mask = mask.masked_fill_(hidden, float("-inf"))[:, None].repeat_interleave(self.kv_heads, 0)
        logits = self.model(tokens[None], position_ids=self.lengths[None], use_cache=False).logits[0]
        self.lengths += 1
        return logits


def generate_answers(
    target: Target,
    prompts: list[str],
    path: Path,
    *,
    max_prompt: int,
    max_new: int,
    slots: int,
    on_tokens: Callable[[int, int], None],
) -> None:
    """Append the target's greedy answer to every prompt to the JSONL file `path`.

    Each line: {"index": int, "prompt": [ids], "answer": [ids, eos included]}; a prompt longer than
    `max_prompt` tokens gets an empty answer, so that it counts as done. `on_tokens(tokens, answers)` is called as
    answers are written, including once at the start for those of an earlier run.
    """
    done = {row["index"]: len(row["answer"]) for row in read_answers(path)}
    on_tokens(sum(done.values()), len(done))
    waiting = iter([index for index in range(len(prompts)) if index not in done])
    decoder = SlotDecoder(target, slots, max_prompt + max_new)
    eos = set(target.eos_ids)
    jobs: list[dict[str, Any] | None] = [None] * slots
    tokens = torch.zeros(slots, dtype=torch.long, device=target.model.device)

    with path.open("a", encoding="utf-8") as file:

        def write(job: dict[str, Any]) -> None:
            file.write(json.dumps(job, separators=(",", ":")) + "\n")
            file.flush()
            on_tokens(len(job["answer"]), 1)

        def refill() -> None:
            while None in jobs:  # again where an answer ends with its first token
                fresh: dict[int, list[int]] = {}
                for slot in [slot for slot, job in enumerate(jobs) if job is None]:
                    decoder.lengths[slot] = 0
                    for index in waiting:
                        ids = render_prompt(target, prompts[index])
                        if len(ids) > max_prompt:
                            write({"index": index, "prompt": ids, "answer": []})
                            continue
                        jobs[slot] = {"index": index, "prompt": ids, "answer": []}
                        fresh[slot] = ids
                        break
                if not fresh:
                    return
                accept(list(fresh), decoder.prefill(fresh))

        def accept(slots: list[int], logits: torch.Tensor) -> None:
            for slot, token in zip(slots, logits.argmax(-1).tolist(), strict=True):
                tokens[slot] = token
                job = jobs[slot]
                if job is not None:
                    job["answer"].append(token)
                    if token in eos or len(job["answer"]) >= max_new:
                        write(job)
                        jobs[slot] = None

        refill()
        while any(jobs):
            accept(list(range(slots)), decoder.step(tokens))
            refill()
    target.model.set_attn_implementation("sdpa")


def read_answers(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of an answers file; a half-written last line (after a kill) is cut off the file."""
    if not path.is_file():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        data = data[: data.rfind(b"\n") + 1]
        path.write_bytes(data)
    for line in data.splitlines():
        yield json.loads(line)
