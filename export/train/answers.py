"""Let the target answer the conversations that train a drafter, many at a time.

A drafter learns to predict the target's text, so its training text is the target's own. A slot whose conversation ends
is refilled at once (continuous batching). Conversations are appended to a JSONL file as they end, so an interrupted run
resumes where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from export.train.decoder import Decoder, SlotDecoder, choose
from export.train.exact_decoder import ExactDecoder
from export.train.prompts import ChatFormat, Conversation, UserTurn
from outrider_core.models.target import Target
from outrider_core.targets.bundle import TargetBundle

#: temperature of self-written user turns: greedily they would always be the same
USER_TEMPERATURE = 0.8
#: most tokens of prompts in one forward pass, padding included; one longer prompt is read alone
PREFILL_TOKENS = 8192
#: one in this many slots must be free before prompts are read: a GPU's pass over few tokens takes as long as over many
SLOTS_PER_FREE = 16


@dataclass(frozen=True)
class AnswerLimits:
    """Most tokens of a user's turn (`prompt`), of an `answer`, and of a conversation in `total`."""

    prompt: int
    answer: int
    total: int


class OngoingConversation:
    """A conversation as it grows: `ids` so far, `answers` the [begin, end) of the target's turns in them."""

    def __init__(self, index: int, plan: Conversation, chat: ChatFormat, limits: AnswerLimits) -> None:
        self.index, self.plan, self.chat, self.limits = index, plan, chat, limits
        self.ids: list[int] = []
        self.answers: list[tuple[int, int]] = []
        self.turn = 0
        self.said = 0  # tokens before the user's turn
        self.begin = 0  # of the turn being written
        self.as_user = self.ended = False

    def open_turn(self, turn: UserTurn) -> bool:
        """Append the user's turn; False if it is too long."""
        self.said = len(self.ids)
        self.ids += self.chat.next(turn, self.ids[-1]) if self.ids else self.chat.first(turn)
        self.as_user, self.begin = turn.goes_on, len(self.ids)
        return self.begin - self.said <= self.limits.prompt and self.begin < self.limits.total

    @property
    def temperature(self) -> float:
        return USER_TEMPERATURE if self.as_user else self.plan.temperature

    @property
    def unread(self) -> bool:
        """Return whether the target has not read `ids` yet, as the user speaks next."""
        return len(self.ids) == self.begin

    def add(self, token: int, ends: set[int]) -> None:
        """Take the next token; at a turn's end begin the next, or set `ended`."""
        self.ids.append(token)
        longest = self.limits.prompt if self.as_user else self.limits.answer
        full = len(self.ids) - self.begin >= longest or len(self.ids) >= self.limits.total
        closed = token in ends or (self.as_user and token == self.chat.end_of_user)
        if closed or full:
            self.ended = not (self._user_has_spoken(closed) if self.as_user else self._has_answered(closed))

    def _user_has_spoken(self, closed: bool) -> bool:
        opening = self.plan.turns[self.turn].text
        text = self.chat.text(opening, self.ids[self.begin : len(self.ids) - closed])
        del self.ids[self.said :]
        return closed and bool(text.strip()) and self.open_turn(UserTurn(text))

    def _has_answered(self, closed: bool) -> bool:
        self.answers.append((self.begin, len(self.ids)))
        self.turn += 1
        return closed and self.turn < len(self.plan.turns) and self.open_turn(self.plan.turns[self.turn])

    def record(self) -> dict[str, Any]:
        end = self.answers[-1][1] if self.answers else 0
        return {"index": self.index, "ids": self.ids[:end], "answers": self.answers}


class ConversationRunner:
    """All conversations of one run over the slots of a decoder."""

    def __init__(
        self,
        target: Target,
        plans: Mapping[int, Conversation],
        limits: AnswerLimits,
        slots: int,
        seed: int = 0,
        bundle: TargetBundle | None = None,
    ) -> None:
        self.chat, self.limits, self.plans = ChatFormat(target.tokenizer), limits, plans
        self.decoder = decoder_for(target, bundle, slots, limits.total)
        device = torch.device("cpu") if bundle else target.model.device
        self.ends = set(target.eos_ids)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.slots: list[OngoingConversation | None] = [None] * slots
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)

    def run(self, write: Callable[[OngoingConversation], None]) -> None:
        """Run all conversations to their end; `write` is called as each ends."""
        waiting = self._waiting()
        try:
            while True:
                self._refill(waiting, write)
                if not any(self.slots):
                    return
                writing = [slot for slot, one in enumerate(self.slots) if one is not None and not one.unread]
                self._accept(writing, self.decoder.step(self.tokens)[writing])
        finally:
            self.decoder.close()

    def _waiting(self) -> Iterator[OngoingConversation]:
        """Yield the waiting ones. Attention reads as far as the longest slot, so similar lengths run together."""
        left = list(self.plans)
        window = 16 * len(self.slots)
        for start in range(0, len(left), window):
            size = {i: sum(len(turn.text) for turn in self.plans[i].turns) for i in left[start : start + window]}
            for index in sorted(size, key=lambda i: size[i]):
                yield OngoingConversation(index, self.plans[index], self.chat, self.limits)

    def _refill(self, waiting: Iterator[OngoingConversation], write: Callable[[OngoingConversation], None]) -> None:
        """Once enough slots are free, put conversations into them and prefill them all."""
        begun = False
        while unread := self._unread(waiting, write):
            used = sum(conversation is not None for conversation in self.slots)
            if not begun and len(unread) <= (used - len(unread)) // SLOTS_PER_FREE:
                return
            begun = True
            longest_first = sorted(unread.items(), key=lambda item: -len(item[1]))
            at_once = max(1, PREFILL_TOKENS // len(longest_first[0][1]))
            fresh = dict(longest_first[:at_once])
            self._accept(list(fresh), self.decoder.prefill(fresh))

    def _unread(
        self, waiting: Iterator[OngoingConversation], write: Callable[[OngoingConversation], None]
    ) -> dict[int, list[int]]:
        """Return slot -> ids for conversations that begin or have a new user turn, after ended ones are gone."""
        unread = {}
        for slot, conversation in enumerate(self.slots):
            if conversation is not None and conversation.ended:
                write(conversation)
                conversation = None
            if conversation is None:
                conversation = self.slots[slot] = self._next(waiting, write)
            if conversation is None or conversation.unread:
                self.decoder.lengths[slot] = 0
            if conversation is not None and conversation.unread:
                unread[slot] = conversation.ids
        return unread

    def _next(
        self, waiting: Iterator[OngoingConversation], write: Callable[[OngoingConversation], None]
    ) -> OngoingConversation | None:
        for conversation in waiting:
            if conversation.open_turn(conversation.plan.turns[0]):
                return conversation
            write(conversation)  # too long: without an answer, so that it counts as done
        return None

    def _accept(self, slots: list[int], logits: torch.Tensor) -> None:
        conversations = [conversation for slot in slots if (conversation := self.slots[slot])]
        temperatures = [conversation.temperature for conversation in conversations]
        chosen = choose(logits, torch.tensor(temperatures, device=logits.device), self.generator)
        self.tokens[slots] = chosen
        for conversation, token in zip(conversations, chosen.tolist(), strict=True):
            conversation.add(token, self.ends)


def decoder_for(target: Target, bundle: TargetBundle | None, slots: int, capacity: int) -> Decoder:
    """Return a decoder on the target's 8-bit copy, if there is one, or on the target itself."""
    if bundle:
        return ExactDecoder(bundle, slots, capacity, torch.get_num_threads())
    return SlotDecoder(target, slots, capacity)


def generate_answers(
    target: Target,
    plans: Mapping[int, Conversation],
    path: Path,
    *,
    limits: AnswerLimits,
    slots: int,
    seed: int = 0,
    bundle: TargetBundle | None = None,
    on_end: Callable[[int], None],
) -> None:
    """Let the target answer the conversations `plans` (index -> plan) and append them to the JSONL file `path` as
    they end.

    Each line: {"index": int, "ids": [token ids], "answers": [[begin, end], ...]}, end-of-answer tokens included; one
    whose prompt is too long has no answers. `on_end(answer tokens)` is called with each. bundle: the target's 8-bit
    copy, if it writes the answers.
    """
    with append_to(path) as file:

        def write(conversation: OngoingConversation) -> None:
            file.write(json.dumps(conversation.record(), separators=(",", ":")) + "\n")
            file.flush()
            on_end(sum(end - begin for begin, end in conversation.answers))

        ConversationRunner(target, plans, limits, slots, seed, bundle).run(write)


def read_answers(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an answers file, except a line that a crash has damaged: half of it, or zeros."""
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError):
            yield json.loads(line)


def append_to(path: Path) -> TextIO:
    """Open an answers file for further rows, the first of which begins a line whatever a crash has left before it."""
    file = path.open("a+", encoding="utf-8")
    if file.tell() and not path.read_bytes().endswith(b"\n"):
        file.write("\n")
    return file
