"""A verifier whose engine thread is the test: it takes a step when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cloud.engine.request import EngineRequest, Reply
from cloud.engine.runner import Logits
from cloud.server.service import Verifier
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Close, Generate, Open, Verdict, Verify, pack_ids, pack_tree
from outrider_core.targets.part import Part
from tests.waiting import until


@dataclass
class Asked:
    """What was asked and answered so far."""

    message: Any
    replies: list[Reply] = field(default_factory=list)
    done: bool = False
    request: EngineRequest = field(init=False)

    @property
    def drawn(self) -> list[int]:
        """The tokens that the target drew by itself."""
        return [reply.bonus for reply in self.replies if isinstance(reply, Verdict)]

    def take(self, reply: Reply, done: bool) -> None:
        self.replies.append(reply)
        self.done = self.done or done


class ByHand:
    """ran: tokens of all steps."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.ran = verifier, 0
        self._batcher = verifier.batcher
        forward = verifier.engine.runner.forward

        def counted(parts: Sequence[Part]) -> Logits:
            self.ran += sum(map(len, parts))
            return forward(parts)

        verifier.engine.runner.forward = counted  # type: ignore[method-assign]

    def submit(self, session: bytes, request: Any, account: str = "", **content: Any) -> Asked:
        asked = Asked(request)
        asked.request = EngineRequest(session, request, asked.take, account=account, **content)
        self._batcher.requests.admit(asked.request)
        return asked

    def open(
        self, session: bytes, tokens: Sequence[int], account: str = "", seq: int = 0, sampling: Sampling | None = None
    ) -> Asked:
        request = Open(0, session, seq, pack_ids(list(tokens)), 0, sampling or Sampling())
        return self.submit(session, request, account, tokens=list(tokens))

    def generate(self, session: bytes, seq: int, base_len: int, count: int, account: str = "") -> Asked:
        return self.submit(session, Generate(0, seq, base_len, count), account)

    def verify(self, session: bytes, seq: int, base_len: int, tree: TokenTree, account: str = "") -> Asked:
        return self.submit(session, Verify(0, seq, base_len, *pack_tree(tree)), account, tree=tree)

    def close(self, session: bytes) -> None:
        self.submit(session, Close(0))

    def step(self) -> None:
        self.verifier.sessions.expire(self._batcher.requests.session_ids)
        if self._batcher.requests:
            for session in self._batcher.requests.waiting():
                assert until(lambda: session.followed is None or not session.followed.held)  # noqa: B023
            self._batcher.step()

    def finish(self) -> None:
        """Step until nobody waits."""
        for _ in range(1000):
            self.step()
            if not self._batcher.requests:
                return
        raise AssertionError("a request is never answered")

    def kept(self, session: bytes) -> list[int]:
        """Pool rows of a session."""
        extent = self.verifier.engine.pool.extent(session)
        return list(range(extent.base, extent.base + extent.used))

    def metric(self, name: str) -> float:
        self._batcher._engine_metrics.report(0, 0, 0)
        return self.verifier.metrics.registry.get_sample_value(f"outrider:{name}_total") or 0.0
