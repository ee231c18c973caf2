"""The verifier comes back with another context length: the answer continues as far as that allows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.links import EmulatedLink
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import torch_model
from edge_runtime.events import Event, Finished, Provisional, Verified
from edge_runtime.options import FIXED_TREES, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.timeouts import Patience
from outrider_core.drafting.bundle import Bundle
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import in_chunks, serve
from tests.e2e.stack import MAX_NEW, oracle

Folders = tuple[Path, Path, Path]
PROMPT = list(range(20, 40))
PATIENCE = Patience(open=0.6, connect=0.3, silence=1.0, offline=60.0)


@contextmanager
def serving(folders: Folders, context: int) -> Iterator[int]:
    settings = Settings(max_model_len=context, max_nodes=64, kv_tokens=600, max_sessions=8)
    target = load_target(TargetSource.resolve(str(folders[0])), "float64")
    verifier = in_chunks(Verifier(torch_model(target, load_drafter(folders[1]), settings), settings), 16)
    with serve(verifier) as address:
        yield int(address.rsplit(":", 1)[1])


async def answered(bundle: Bundle, first: int, then: int, verified: int, alone: int) -> list[Event]:
    """An answer whose verifier moves from port `first` to `then`.

    A stream could fill the first verifier's context before the cut, so the device sends trees.
    The link is cut once `verified` tokens are there. It comes back when as many as `alone` more are there, or when the
    drafter takes the answer to be over.
    """
    events, seen, cut = list[Event](), 0, False
    async with (
        EmulatedLink(first) as link,
        EdgeRuntime(
            bundle,
            link.address,
            RuntimeOptions(patience=PATIENCE, policy=Policy(offline="continue", offline_rate=500.0), threads=1),
            FIXED_TREES,
        ) as runtime,
    ):
        async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW):
            events.append(event)
            if isinstance(event, Verified):
                seen += len(event.tokens)
            if not cut and seen >= verified:
                cut, link.upstream_port = True, 1 if alone else then
                link.cut()
            written = seen + sum(isinstance(each, Provisional) for each in events)
            if isinstance(event, Provisional) and (
                written >= verified + alone or event.token in bundle.manifest.eos_ids
            ):
                link.upstream_port = then
    return events


@pytest.mark.parametrize(("context", "alone"), [(45, 0), (45, 24), (100, 0), (100, 4)])
def test_the_answer_is_as_long_as_the_new_context(folders: Folders, bundle: Bundle, context: int, alone: int) -> None:
    """Shorter: it ends there, however much was written alone. Longer than at first: it goes on."""
    with serving(folders, 120 if context == 45 else 30) as first, serving(folders, context) as then:
        *_, last = asyncio.run(answered(bundle, first, then, 4, alone))
    wanted = oracle(folders, PROMPT, Sampling())[: context - len(PROMPT)]
    assert isinstance(last, Finished) and last.reason in ("length", "stop")
    assert last.token_ids == wanted and not last.provisional
    assert len(wanted) in (45 - len(PROMPT), MAX_NEW) or last.reason == "stop"


def test_text_that_fits_into_no_context_is_kept_and_the_user_told(folders: Folders, bundle: Bundle) -> None:
    with serving(folders, 120) as first, serving(folders, len(PROMPT) + 2) as then:
        *_, last = asyncio.run(answered(bundle, first, then, 6, 8))
    assert isinstance(last, Finished) and last.reason == "length"
    assert last.stats.tokens >= 6 and last.provisional
    assert last.token_ids[: last.stats.tokens] == oracle(folders, PROMPT, Sampling())[: last.stats.tokens]
    assert last.detail == f"the verifier's context holds {len(PROMPT) + 2} tokens; this conversation needs more"
