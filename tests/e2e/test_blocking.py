"""The runtime without an event loop, on the tiny stack."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.blocking import BlockingRuntime
from edge_runtime.events import Finished, Provisional, Verified
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.ending import COMPLETE
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.e2e.stack import MAX_NEW, PATIENCE, make_verifier, oracle
from tests.waiting import HANG

PROMPT = [20, 21, 22, 23]
Folders = tuple[Path, Path, Path]


def test_answers_one_after_the_other(folders: Folders, bundle: Bundle) -> None:
    sampling = Sampling(temperature=0.9, seed=4)
    with serve(make_verifier(folders)) as address:
        with BlockingRuntime(EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE))) as runtime:
            events = list(runtime.generate(PROMPT, max_new_tokens=MAX_NEW))
            runtime.forget()
            drawn = runtime.answer(PROMPT, max_new_tokens=MAX_NEW, temperature=0.9, seed=4)
        runtime.close()  # once more
    assert isinstance(events[-1], Finished) and events[-1].token_ids == oracle(folders, PROMPT, Sampling())
    assert [token for event in events if isinstance(event, Verified) for token in event.tokens] == events[-1].token_ids
    assert drawn.token_ids == oracle(folders, PROMPT, sampling)
    assert not any(thread.name == "outrider" for thread in threading.enumerate())


def test_an_answer_that_is_left_is_cancelled(folders: Folders, bundle: Bundle) -> None:
    with (
        serve(make_verifier(folders)) as address,
        BlockingRuntime(EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE))) as runtime,
    ):
        for _ in runtime.generate(PROMPT, max_new_tokens=MAX_NEW):
            break
        gc.collect()
        assert runtime.record() is None
        assert runtime.answer(PROMPT, max_new_tokens=MAX_NEW).token_ids == oracle(folders, PROMPT, Sampling())


def test_a_record_leads_on_in_another_runtime(folders: Folders, bundle: Bundle) -> None:
    with serve(make_verifier(folders)) as address:
        with BlockingRuntime(EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE))) as first:
            events = first.generate(PROMPT, max_new_tokens=MAX_NEW)
            next(event for event in events if isinstance(event, Verified))
            record = first.record()
            # closed in mid-answer: the iterator ends
        assert [event for event in events if isinstance(event, Finished)] == []
        with BlockingRuntime(EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE))) as second:
            *_, end = second.resume(record or {})
    assert isinstance(end, Finished) and end.token_ids == oracle(folders, PROMPT, Sampling())


def test_pause_and_proceed_come_from_another_thread(bundle: Bundle) -> None:
    with BlockingRuntime(EdgeRuntime(bundle, None)) as runtime:
        events = runtime.generate(PROMPT, max_new_tokens=MAX_NEW)
        next(event for event in events if isinstance(event, Provisional))
        runtime.pause()
        threading.Timer(0.1, runtime.proceed).start()
        *_, end = events
    assert isinstance(end, Finished) and end.reason in COMPLETE and len(end.provisional) > 0


def test_errors_reach_the_caller(bundle: Bundle) -> None:
    with BlockingRuntime(EdgeRuntime(bundle, None)) as runtime:
        with pytest.raises(ValueError, match="the prompt is empty"):
            runtime.answer([])
        with pytest.raises(ValueError, match="not a record"):
            list(runtime.resume({}))
        waiting = runtime.generate(PROMPT, max_new_tokens=MAX_NEW)
        next(waiting)
        with pytest.raises(RuntimeError, match="an answer is on its way"):
            next(runtime.generate(PROMPT))
        waiting.close()
        assert runtime.answer(PROMPT, max_new_tokens=4).reason in COMPLETE


@pytest.mark.parametrize("where", ["its own thread", "another thread"])
def test_an_iterator_may_be_collected_anywhere(bundle: Bundle, where: str) -> None:
    """In a circle that the collector finds, in the very thread that would have to end the answer."""
    with BlockingRuntime(EdgeRuntime(bundle, None)) as runtime:
        collected = threading.Event()

        def collect() -> None:
            gc.collect()
            collected.set()

        for _ in range(3):
            circle: list[Any] = [runtime.generate(PROMPT, max_new_tokens=MAX_NEW)]
            circle.append(circle)
            next(circle[0])
            del circle
            if where == "its own thread":
                runtime._loop.call_soon_threadsafe(collect)
            else:
                threading.Thread(target=collect).start()
            assert collected.wait(HANG)
            collected.clear()
            assert runtime.answer(PROMPT, max_new_tokens=4).reason in COMPLETE
    assert not runtime._thread.is_alive()


def test_leaving_an_iterator_ends_its_own_answer_alone(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread drops the iterator, and is held up before the runtime's thread hears of it."""
    with BlockingRuntime(EdgeRuntime(bundle, None)) as runtime:
        begun, dropping = threading.Event(), threading.Event()
        hand_over = runtime._loop.call_soon_threadsafe

        def late(*work: Any, **options: Any) -> Any:
            if threading.current_thread().name == "dropper":
                dropping.set()
                assert begun.wait(HANG)
            return hand_over(*work, **options)

        monkeypatch.setattr(runtime._loop, "call_soon_threadsafe", late)
        held = [runtime.generate(PROMPT, max_new_tokens=MAX_NEW)]
        next(held[0])
        dropper = threading.Thread(target=held.clear, name="dropper")
        dropper.start()
        assert dropping.wait(HANG)
        answer = runtime.generate(PROMPT, max_new_tokens=MAX_NEW)
        next(answer)
        begun.set()
        dropper.join(HANG)
        runtime.record()  # behind what the dropper handed over
        assert isinstance([*answer][-1], Finished)


def test_an_answer_that_is_ended_twice_leaves_the_next_one_alone(bundle: Bundle) -> None:
    with BlockingRuntime(EdgeRuntime(bundle, None)) as runtime:
        events = runtime.generate(PROMPT, max_new_tokens=MAX_NEW)
        next(events)
        answer = events._answer
        assert answer is not None
        runtime._call(runtime._cancel(answer))
        following = runtime.generate(PROMPT, max_new_tokens=MAX_NEW)
        next(following)
        runtime._call(runtime._cancel(answer))
        with pytest.raises(RuntimeError, match="an answer is on its way"):
            next(runtime.generate(PROMPT))
        assert isinstance([*following][-1], Finished)
