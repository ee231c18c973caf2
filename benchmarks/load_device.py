"""A simulated device: it drafts from the known answer instead of a model, and checks every verdict against it.

Real drafters of many devices would take the processor from the verifier on the same machine. So the target's own
greedy answers are recorded first, and trees are built that hold the true continuation to a drawn depth.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from benchmarks.load_report import Tally
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import (
    ERR_BUSY,
    ERR_UNKNOWN,
    FINISH_NONE,
    MAX_SERVER_FRAME,
    PROTOCOL_VERSION,
    SUBPROTOCOL,
    Close,
    Error,
    Generate,
    Hello,
    Open,
    Opened,
    Resync,
    Verdict,
    Verify,
    Welcome,
    WireError,
    decode_server,
    encode,
    pack_ids,
    pack_tree,
)

GREEDY = Sampling()
#: seconds without the awaited reply after which a device gives up its connection
PATIENCE = 60.0
#: seconds between two attempts to connect
RETRY = 0.5
#: errors of a connection that are not the device's fault
FAULTS = (OSError, TimeoutError, WebSocketException, WireError)


class Refusal(RuntimeError):
    """The verifier answered with ERROR."""

    def __init__(self, error: Error) -> None:
        super().__init__(f"the verifier answered with error {error.code}: {error.text}")
        self.error = error


@dataclass(frozen=True)
class Dial:
    """A verifier's address. token: sent as `Authorization: Bearer`. tls_ca: file that signs its certificate."""

    url: str
    target_hash: str
    drafter_hash: str
    token: str | None = None
    tls_ca: Path | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[ClientConnection, Welcome]]:
        """Yield a connection after its handshake; no compression or pings. Raises FAULTS or Refusal."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else None
        context = ssl.create_default_context(cafile=self.tls_ca) if self.url.startswith("wss:") else None
        connection = await connect(
            self.url, subprotocols=[SUBPROTOCOL], compression=None, max_size=MAX_SERVER_FRAME,  # type: ignore[list-item]
            open_timeout=30, close_timeout=0.5, ping_interval=None, proxy=None, additional_headers=headers, ssl=context,
        )  # fmt: skip
        try:
            hello = Hello(PROTOCOL_VERSION, self.target_hash, self.drafter_hash, "outrider-load")
            await connection.send(encode(hello))
            answer = decode_server(await asyncio.wait_for(connection.recv(decode=False), PATIENCE))
            if isinstance(answer, Error):
                raise Refusal(answer)
            if not isinstance(answer, Welcome):
                raise WireError(f"{type(answer).__name__} where WELCOME was due")
            yield connection, answer
        finally:
            await connection.close()


@dataclass(frozen=True)
class Answer:
    """The target's answer to a prompt, in token ids. finish: FINISH_* of the last of them."""

    prompt: tuple[int, ...]
    truth: tuple[int, ...]
    finish: int


async def record(dial: Dial, prompt: Sequence[int], max_new: int) -> Answer:
    """Let the target answer by itself, greedily. Raises FAULTS or Refusal."""
    async with dial.open() as (connection, _):
        have = len(prompt)  # claims all feature rows, so that none are sent
        await connection.send(encode(Open(0, secrets.token_bytes(16), 0, pack_ids(tuple(prompt)), have, GREEDY)))
        await connection.send(encode(Generate(0, 1, len(prompt), max_new)))
        truth: list[int] = []
        finish = FINISH_NONE
        while len(truth) < max_new and finish == FINISH_NONE:
            message = decode_server(await asyncio.wait_for(connection.recv(decode=False), PATIENCE))
            if isinstance(message, Error):
                raise Refusal(message)
            if isinstance(message, Verdict):
                truth.append(message.bonus)
                finish = message.finish
        await connection.send(encode(Close(0)))
    return Answer(tuple(prompt), tuple(truth), finish)


class Drafts:
    """Draft trees whose accepted length is known: a seeded, deterministic stream.

    The depth of the true continuation in a tree is geometric, as with a drafter that hits every next token with the
    same probability, cut off at `nodes`, with the mean `accepted`. The other nodes are wrong tokens at random places.
    Raises ValueError if no such tree exists.
    """

    def __init__(self, nodes: int, accepted: float, vocab_size: int, rng: random.Random) -> None:
        if not 0 <= accepted <= nodes:
            raise ValueError(f"{accepted} accepted tokens a verify do not fit a tree of {nodes} nodes")
        self.nodes, self._vocab_size, self._rng = nodes, vocab_size, rng
        self._hit = hit_rate(accepted, nodes)

    def tree(self, ahead: Sequence[int]) -> tuple[TokenTree, list[int]]:
        """Return (tree, nodes that must be accepted). ahead: the true continuation; its last token is never drafted."""
        rng = self._rng
        depth = 0
        while depth < min(self.nodes, len(ahead) - 1) and rng.random() < self._hit:
            depth += 1
        true_at = set(rng.sample(range(self.nodes), depth))
        tokens: list[int] = []
        parents: list[int] = []
        path: list[int] = []
        taken: set[tuple[int, int]] = set()  # (parent, token)
        for node in range(self.nodes):
            if node in true_at:
                parent, token = path[-1] if path else ROOT, ahead[len(path)]
                path.append(node)
            else:
                parent, token = self._wrong(ahead, path, node, taken)
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
        return TokenTree(tuple(tokens), tuple(parents)), path

    def _wrong(self, ahead: Sequence[int], path: list[int], node: int, taken: set[tuple[int, int]]) -> tuple[int, int]:
        """Return (parent, token) of a node that must not be accepted."""
        while True:
            parent = self._rng.randrange(ROOT, node)
            token = self._rng.randrange(self._vocab_size)
            level = 0 if parent == ROOT else path.index(parent) + 1 if parent in path else None
            if (parent, token) not in taken and (level is None or token != ahead[level]):
                return parent, token


def hit_rate(mean: float, most: int) -> float:
    """Solve p + p^2 + ... + p^most = mean for p, the chance of one more hit in a geometric run cut at `most`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**level for level in range(1, most + 1)) < mean:
            low = middle
        else:
            high = middle
    return high if mean > 0 else 0.0


@dataclass(frozen=True)
class Habits:
    """Behaviour of the devices. Times in seconds.

    tokens: most of an answer. think: mean pause between answers, exponential. rtt: half of it passes before every send
    and half after every receive; jitter: random extra time, each way.
    """

    nodes: int = 12
    accepted: float = 1.9
    tokens: int = 64
    think: float = 1.0
    rtt: float = 0.0
    jitter: float = 0.0


class Device:
    """A device of a phase: sends prompt after prompt until `stop` and checks every verdict.

    `tally` collects the measurements; `place` is the device's row in it. seed: any text.
    """

    def __init__(
        self, dial: Dial, answers: Sequence[Answer], habits: Habits, tally: Tally, place: int, seed: str
    ) -> None:
        self._dial, self._answers, self._habits, self._tally, self._place = dial, answers, habits, tally, place
        self._draft_rng, self._time_rng = random.Random(f"{seed} drafts"), random.Random(f"{seed} times")
        self._turn = place
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Run until `stop` is set; lost connections are counted and opened again."""
        await self._pause(self._time_rng.uniform(0, min(1.0, self._habits.think)))
        while not self.stop.is_set():
            try:
                async with self._dial.open() as (connection, welcome):
                    self._tally.advertised(welcome.tree_budget)
                    nodes = min(self._habits.nodes, welcome.max_nodes)
                    accepted = min(self._habits.accepted, nodes)
                    drafts = Drafts(nodes, accepted, welcome.vocab_size, self._draft_rng)
                    await self._converse(connection, drafts)
            except Refusal as refusal:
                self._tally.error(f"error {refusal.error.code}")
                await self._pause(max(RETRY, refusal.error.retry_after_ms / 1e3))
            except FAULTS as fault:
                self._tally.error(describe(fault))
                await self._pause(RETRY)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond `stop`."""
        if seconds > 0 and not self.stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), seconds)

    async def _converse(self, connection: ClientConnection, drafts: Drafts) -> None:
        while not self.stop.is_set():
            answer = self._answers[self._turn % len(self._answers)]
            self._turn += 1
            await _Conversation(self, connection, drafts, answer).run()
            await self._pause(self._time_rng.expovariate(1 / self._habits.think) if self._habits.think else 0)

    async def travel(self) -> None:
        """Wait as long as the simulated network takes one way."""
        habits = self._habits
        delay = habits.rtt / 2 + self._time_rng.uniform(0, habits.jitter)
        if delay > 0:
            await asyncio.sleep(delay)

    @property
    def parts(self) -> tuple[Habits, Tally, int]:
        return self._habits, self._tally, self._place


class _Conversation:
    """A conversation: OPEN, rounds until the answer ends, CLOSE."""

    def __init__(self, device: Device, connection: ClientConnection, drafts: Drafts, answer: Answer) -> None:
        self._device, self._connection, self._drafts, self._answer = device, connection, drafts, answer
        self._habits, self._tally, self._place = device.parts
        self._session = secrets.token_bytes(16)
        self._done = self._seq = 0  # committed tokens of the answer; the last VERIFY that is over

    async def run(self) -> None:
        """Run it. Raises FAULTS or Refusal; a wrong verdict only ends the conversation."""
        answer, tally = self._answer, self._tally
        fresh = await self._open()
        while not self._device.stop.is_set() and self._done < min(len(answer.truth), self._habits.tokens):
            ahead = answer.truth[self._done :]
            tree, path = self._drafts.tree(ahead)
            self._seq += 1
            base_len = len(answer.prompt) + self._done
            await self._device.travel()
            asked = time.perf_counter()
            await self._connection.send(encode(Verify(0, self._seq, base_len, *pack_tree(tree))))
            try:
                reply = await self._await(lambda message: isinstance(message, Verdict | Resync))
            except Refusal as refusal:
                if refusal.error.code not in (ERR_BUSY, ERR_UNKNOWN):
                    raise
                tally.error(f"error {refusal.error.code}")
                await asyncio.sleep(refusal.error.retry_after_ms / 1e3)
                fresh = await self._open()
                continue
            answered = time.perf_counter()
            await self._device.travel()
            if not isinstance(reply, Verdict):
                tally.error("RESYNC")
                fresh = await self._open()
                continue
            tally.advertised(reply.tree_budget)
            wrong = wrong_tokens(reply, tree, path, base_len, answer, self._done, tally.least_budget)
            if wrong:
                tally.wrong(wrong)
                break
            self._done += len(reply.accepted) + 1
            tally.verdict(self._place, reply, answered - (fresh or asked), first=fresh is not None)
            fresh = None
        await self._connection.send(encode(Close(0)))
        if self._done >= min(len(answer.truth), self._habits.tokens):
            tally.answer()

    async def _open(self) -> float | None:
        """Send OPEN with the committed tokens; return when it was sent."""
        tokens = self._answer.prompt + self._answer.truth[: self._done]
        await self._device.travel()
        sent = time.perf_counter()
        await self._connection.send(encode(Open(0, self._session, self._seq, pack_ids(tokens), 0, GREEDY)))
        await self._await(lambda message: isinstance(message, Opened))
        await self._device.travel()
        return sent

    async def _await(self, wanted: Callable[[object], bool]) -> object:
        """Return the next wanted message; feature rows and late replies are skipped."""
        async with asyncio.timeout(PATIENCE):
            while True:
                message = decode_server(await self._connection.recv(decode=False))
                if isinstance(message, Error):
                    raise Refusal(message)
                if wanted(message) and getattr(message, "seq", self._seq) == self._seq:
                    return message


def wrong_tokens(
    verdict: Verdict, tree: TokenTree, path: list[int], base_len: int, answer: Answer, done: int, budget: int
) -> int:
    """Count tokens that differ from the truth; at least 1 for a verdict that is wrong in any other way.

    path: the nodes that must be accepted, except the last ones of a tree beyond `budget`, which the verifier may have
    pruned (the verdict's own budget is newer, and may be larger again). done: tokens of the answer committed before.
    """
    if len(verdict.accepted) < len(path) and budget < len(tree):
        path = path[: len(verdict.accepted)]
    truth = answer.truth[done : done + len(path) + 1]
    said = [tree.tokens[node] if node < len(tree) else -1 for node in verdict.accepted] + [verdict.bonus]
    ends = done + len(truth) == len(answer.truth)
    right = (base_len, bytes(path), truth[-1], answer.finish if ends else FINISH_NONE)
    if (verdict.base_len, verdict.accepted, verdict.bonus, verdict.finish) == right:
        return 0
    known = answer.truth[done:]
    return max(1, sum(a != b for a, b in zip(said, known, strict=False)))


def describe(fault: BaseException) -> str:
    """Return a short name to count a lost connection by."""
    received = getattr(fault, "rcvd", None)
    if received is not None:
        return f"closed {received.code}"
    response = getattr(fault, "response", None)
    if response is not None:
        return f"HTTP {response.status_code}"
    return type(fault).__name__
