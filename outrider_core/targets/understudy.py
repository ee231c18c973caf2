"""A complete small model with the target's tokenizer, which writes when the target is silent.

It is a target bundle (`outrider_core.targets`) in its own folder, mapped into memory on first use. It draws as the
target does, with the same keyed noise, so that a good understudy writes much of what the target would have written.
Small models tend to repeat themselves. Tokens that would continue a repetition of the answer are penalised by DRY
("Don't Repeat Yourself", the sampler of that name), but never inside code.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider_core.protocol.constraint import Disobeyed, Rules
from outrider_core.protocol.prefix import common_prefix
from outrider_core.protocol.sampling import Sampling, draw, log_probs
from outrider_core.protocol.tree import MAX_NODES, ROOT, TokenTree
from outrider_core.targets.bundle import MANIFEST_FILE, TargetBundle, TargetBundleError, open_target_bundle
from outrider_core.targets.config import TargetConfig, UnsupportedTarget
from outrider_core.targets.memory import give_back
from outrider_core.targets.part import Part
from outrider_core.targets.products import check_products
from outrider_core.targets.runner import OnnxRunner

Floats = NDArray[np.float32]

#: tokens read in one step, so that reading can be cancelled in between
READ_CHUNK = 64
#: DRY: a token that would continue a repetition of `n` tokens loses MULTIPLIER * BASE ** (n - ALLOWED) of its logit,
#: from n = ALLOWED on. Ordinary text repeats fewer tokens than that
DRY_MULTIPLIER, DRY_BASE, DRY_ALLOWED = 0.8, 1.75, 10
#: most that a logit loses
DRY_MOST = 100.0
#: opens and closes code
FENCE = "```"


class UnderstudyError(RuntimeError):
    """The understudy cannot be used. The message is one line."""


@dataclass(frozen=True)
class Decoding:
    """The settings for drawing the tokens of one answer.

    prompt_length: tokens of the text before the answer. rules: of its constraint, at the end of one writer's text.
    """

    prompt_length: int
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
    rules: Rules | None = None


class UnderstudyDrafter(Protocol):
    """Drafts tokens for an understudy to verify."""

    def tree(
        self, understudy: Understudy, text: list[int], decoding: Decoding, cancelled: Callable[[], bool]
    ) -> TokenTree:
        """Return guesses after `text`, of which only the last token is unread; no tree once `cancelled`."""

    def stepped(self, seconds: float) -> None:
        """Note the seconds of the step that verified that tree."""

    def forget(self) -> None:
        """Forget all texts and free their memory."""


@dataclass
class _Guess:
    """A tree that was run after the tokens read so far, and how far the text has followed it.

    logits [nodes, vocab]. first_row: the runner's row of node 0. node: the text's last token in it.
    """

    tree: TokenTree
    logits: Floats
    first_row: int
    node: int = ROOT


@dataclass
class _Written:
    """A draft: the last tokens of `text`, with their `log_probs`."""

    text: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    decoding: Decoding = Decoding(0)


class Understudy:
    """The model in `folder`, which may be missing until it is used. Not thread-safe: one thread calls it.

    manifest_sha256: of the manifest that belongs there. max_context: most tokens of a text. vocab: of the target; if it
    is smaller than this model's, the logits of higher ids are left out. decode: returns the text of token ids. threads:
    of the engine, 0: all cores. drafter: makes a drafter for it once the model is loaded, so that one step may write
    several tokens; None, or if it returns None: without one. barred: ids that it must not write.
    """

    def __init__(
        self,
        folder: Path,
        manifest_sha256: str,
        max_context: int,
        vocab: int,
        decode: Callable[[list[int]], str],
        threads: int = 0,
        drafter: Callable[[TargetConfig], UnderstudyDrafter | None] | None = None,
        barred: Sequence[int] = (),
    ) -> None:
        self._barred = [token for token in barred if token < vocab]
        self._folder, self._manifest_sha256 = folder, manifest_sha256
        self._max_context, self._vocab, self._decode, self._threads = max_context, vocab, decode, threads
        self._runner: OnnxRunner | None = None
        self._read: list[int] = []  # the tokens of the runner's rows
        self._logits: Floats | None = None  # after the last of these
        self._draft = _Written()
        self.drafted = 0  # tokens so far
        self._make_drafter = drafter
        self._drafter: UnderstudyDrafter | None = None
        self._guess: _Guess | None = None  # after the tokens read so far

    @property
    def loaded(self) -> bool:
        """Return whether the model is in memory."""
        return self._runner is not None

    def load(self) -> None:
        """Load the model into memory unless it is there. Raises UnderstudyError."""
        if self._runner is not None:
            return
        try:
            self._check_manifest()
            model = open_target_bundle(self._folder)
            self._runner = OnnxRunner.of(model, self._max_context + MAX_NODES, self._threads)
        except UnderstudyError:
            raise
        except TargetBundleError as error:  # its message tells how to make a verifier's bundle again
            raise UnderstudyError(
                f"{self._folder} is damaged, or of another version; copy this bundle's own again, or export it again"
            ) from error
        except Exception as error:  # the engine raises kinds of its own
            raise UnderstudyError(f"the understudy does not load: {' '.join(str(error).split())[:300]}") from None
        make, self._make_drafter = self._make_drafter, None
        if make:
            with suppress(Exception):  # the engine fails, or files are gone: write without a drafter
                self._drafter = make(model.config) if _runs_trees(model) else None

    def _check_manifest(self) -> None:
        path = self._folder / MANIFEST_FILE
        if not path.is_file():
            raise UnderstudyError(f"{self._folder} is not there; fetch the bundle's understudy")
        if hashlib.sha256(path.read_bytes()).hexdigest() != self._manifest_sha256:
            raise UnderstudyError(
                f"{self._folder} is another bundle's understudy; copy this bundle's own, or delete it"
            )

    def forget(self) -> None:
        """Forget the texts that guesses are made from."""
        if self._drafter:
            self._drafter.forget()

    def unload(self) -> None:
        """Free its memory."""
        self._runner, self._read, self._logits = None, [], None
        self._draft, self._guess = _Written(), None
        self.forget()
        gc.collect()
        give_back()

    def read(self, text: list[int], cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Read `text`, except what is read already. Returns False if it was `cancelled` before the end."""
        if cancelled():
            return False
        self.load()
        self._keep(text)
        while self._logits is None or len(self._read) < len(text):
            if cancelled():
                return False
            chunk = tuple(text[len(self._read) : len(self._read) + READ_CHUNK])
            self._logits = self._run(Part(0, len(self._read), chunk))[-1]
            self._read += chunk
        return True

    def read_to_write(self, text: list[int], decoding: Decoding, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Do `read` before `next_token` gets the same text; the last step verifies guesses too."""
        if self._drafter is None:
            return self.read(text, cancelled)
        if not self._goes_on_with(text) and (not self.read(text[:-1] or text, cancelled) or cancelled()):
            return False
        if len(self._read) < len(text):
            tree = self._guessed(text, decoding, cancelled)
            if cancelled():
                return False
            base, began = len(self._read), time.perf_counter()
            logits = self._run(Part(0, base, (text[-1],), tree))
            if self._drafter:
                self._drafter.stepped(time.perf_counter() - began)
            self._read.append(text[-1])
            self._logits, self._guess = logits[0], _Guess(tree, logits[1:], base + 1)
        return True

    def _guessed(self, text: list[int], decoding: Decoding, cancelled: Callable[[], bool]) -> TokenTree:
        """Return guesses; none, now and later, if guessing fails."""
        assert self._drafter
        try:
            return self._drafter.tree(self, text, decoding, cancelled)
        except Exception:  # the engine fails, or the server half does not fit after all
            self._drafter = None
            return TokenTree()

    def gather(self, layers: Sequence[int], positions: Sequence[int]) -> Floats:
        """Return keys and values of tokens that it has read, see `OnnxRunner.gather`."""
        assert self._runner is not None
        return self._runner.gather(layers, positions)

    def time_step(self, nodes: int) -> float:
        """Return the seconds of one step that writes, with a tree of `nodes` nodes, after the tokens read so far."""
        began = time.perf_counter()
        self._run(Part(0, len(self._read), (0,), TokenTree(tuple(range(nodes)), (ROOT,) * nodes)))
        return time.perf_counter() - began

    def _goes_on_with(self, text: list[int]) -> bool:
        """Return whether all of `text` but at most its last token is read; guesses that came true count as read."""
        guess = self._guess
        while guess and len(self._read) < len(text) and text[: len(self._read)] == self._read:
            child = guess.tree.child(guess.node, text[len(self._read)])
            if child is None:
                break
            assert self._runner is not None
            self._runner.move([guess.first_row + child], [len(self._read)])
            self._read.append(text[len(self._read)])
            self._logits, guess.node = guess.logits[child], child
        return self._logits is not None and self._read in (text, text[:-1])

    def agreed(
        self, text: list[int], base: int, decoding: Decoding, cancelled: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Return how many of the tokens from `base` on it would have written itself, up to the first difference.

        It has read all of them then, or as many as agree. None: it was `cancelled`.
        """
        if not self.read(text[:base], cancelled):
            return None
        agreed = base
        while agreed < len(text):
            if cancelled():
                return None
            chunk = tuple(text[agreed : agreed + READ_CHUNK])
            # the token before is run again: its logits judge the first one
            logits = self._run(Part(0, agreed - 1, (text[agreed - 1],), TokenTree.chain(chunk)))
            for row, token in enumerate(chunk):
                if draw(self._judged(logits[row], text[:agreed], decoding), decoding.sampling, agreed) != token:
                    self._read, self._logits = text[:agreed], logits[row]
                    return agreed - base
                agreed += 1
            self._read, self._logits = text[:agreed], logits[-1]
        return agreed - base

    def next_token(self, text: list[int], decoding: Decoding) -> tuple[int, float]:
        """Return its next token after `text`, and that token's probability.

        Raises Disobeyed if the rules allow nothing.
        """
        self.read_to_write(text, decoding)
        assert self._logits is not None
        judged = self._judged(self._logits, text, decoding)
        token = draw(judged, decoding.sampling, len(text))
        return token, float(np.exp(log_probs(judged if decoding.rules else self._logits, Sampling())[token]))

    def draft(
        self, text: list[int], count: int, decoding: Decoding, cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[list[int], list[float]]:
        """Return (at most `count` tokens that the target may draw after `text`, log-probabilities of the path to each).

        Drafts are not penalised for repetition. Fewer come once they are `cancelled`, and if the rules allow none. The
        draft of a text that this one continues is reused.
        """
        draft, size = self._draft, len(text)
        behind = draft.text[:size] == text and size + len(draft.log_probs) >= len(draft.text)
        if not (behind and draft.decoding == decoding):
            self._draft = draft = _Written(list(text), [], decoding)
        elif size + len(draft.log_probs) > len(draft.text):
            del draft.log_probs[: size + len(draft.log_probs) - len(draft.text)]
        self._go_on(count, cancelled)
        return draft.text[size : size + count], np.cumsum(draft.log_probs[:count]).tolist()

    def draft_ahead(self, count: int, cancelled: Callable[[], bool]) -> None:
        """Draft `count` tokens more, until `cancelled`, unless the draft was forgotten."""
        if self._draft.text:
            self._go_on(len(self._draft.log_probs) + count, cancelled)

    def _go_on(self, count: int, cancelled: Callable[[], bool]) -> None:
        """Extend the draft to `count` tokens."""
        draft, rules = self._draft, self._draft.decoding.rules
        while len(draft.log_probs) < count and len(draft.text) < self._max_context and self.read(draft.text, cancelled):
            assert self._logits is not None
            logits = self._logits
            try:
                judged = rules.adjusted(logits, draft.text) if rules else logits
                token = draw(judged, draft.decoding.sampling, len(draft.text))
            except Disobeyed:
                return
            draft.log_probs.append(float(log_probs(judged, Sampling())[token]))
            draft.text.append(token)
            self.drafted += 1

    def _run(self, part: Part) -> Floats:
        assert self._runner is not None
        self._guess = None  # its rows are overwritten
        logits = self._runner.forward([part])[:, : self._vocab]
        logits[:, self._barred] = -np.inf
        return logits

    def _keep(self, text: list[int]) -> None:
        """Forget what was read beyond the common prefix with `text`, whose last token is read again if needed."""
        same = common_prefix(text, self._read)
        if same < len(self._read) or self._logits is None:
            same = min(same, len(text) - 1)
            self._read, self._logits, self._guess = text[:same], None, None

    def _judged(self, logits: Floats, text: list[int], decoding: Decoding) -> NDArray[np.float32] | NDArray[np.float64]:
        """Return the logits from which the token after `text` is drawn."""
        answer = text[decoding.prompt_length :]
        penalties = repetitions(answer)
        if penalties and self._decode(answer).count(FENCE) % 2 == 0:
            logits = logits.copy()
            for token, length in penalties.items():
                loss = DRY_MULTIPLIER * DRY_BASE ** min(length - DRY_ALLOWED, 20)
                logits[token] -= min(DRY_MOST, loss)
        return decoding.rules.adjusted(logits, text) if decoding.rules else logits


def _runs_trees(model: TargetBundle) -> bool:
    """Return whether a row's product is independent of its neighbours here: otherwise guesses would change the text."""
    try:
        check_products(model.products.read_bytes())
    except UnsupportedTarget:
        return False
    return True


def repetitions(answer: Sequence[int]) -> dict[int, int]:
    """Return tokens that would continue a repetition of at least DRY_ALLOWED tokens -> the longest one's length."""
    ids = np.asarray(answer)
    found = dict[int, int]()
    if len(ids) <= DRY_ALLOWED:
        return found
    tail = ids[-DRY_ALLOWED:]
    windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], DRY_ALLOWED)
    for start in np.flatnonzero((windows == tail).all(1)):
        end = int(start) + DRY_ALLOWED  # the token that followed there
        length = DRY_ALLOWED
        while length < end and ids[end - length - 1] == ids[len(ids) - length - 1]:
            length += 1
        token = int(ids[end])
        found[token] = max(found.get(token, 0), length)
    return found
