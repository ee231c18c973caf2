"""The public API: `EdgeRuntime` answers prompts and streams typed events (edge_runtime.events)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from edge_runtime.answer.answer import Answer
from edge_runtime.answer.constraints import ConstraintSupport
from edge_runtime.answer.inbox import InboxEvent
from edge_runtime.answer.offline_drafter import offline_drafter_for, understudy_of
from edge_runtime.answer.threads import DrafterThread, UnderstudyThread
from edge_runtime.arguments import checked_length, checked_sampling, checked_stops
from edge_runtime.context import FittedMessages, fit_messages
from edge_runtime.events import Event
from edge_runtime.link.events import EngineFailed, LinkDown, LinkEvent, LinkRefused, LinkUp
from edge_runtime.link.transport import LinkMaker, VerifierLink
from edge_runtime.link.websocket import Link
from edge_runtime.options import Pinned, RuntimeKeywords, RuntimeOptions
from edge_runtime.session.feature_rows import RowsSeen
from edge_runtime.session.policy import UnderstudyUse, WhoWrites
from edge_runtime.session.record import constraint_of as recorded_constraint
from edge_runtime.session.record import read_record, record_of, restore
from edge_runtime.session.session import Session
from edge_runtime.session.timeouts import Patience, RoundTimer
from edge_runtime.session.tuning import Tuning
from edge_runtime.speed.arms import Arm
from edge_runtime.speed.controller import Controller
from outrider_core.chat.api.constraints import constraint_of
from outrider_core.chat.api.tools import tool_use_of
from outrider_core.chat.messages import as_templates_take
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.drafting.drafter import Drafter
from outrider_core.drafting.engines import open_engine
from outrider_core.protocol.constraint import Constraint
from outrider_core.protocol.prefix import common_prefix
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import PROTOCOL_VERSION, STREAMS, Close, Hello

#: for a reliable verifier: no verdict is ever overdue
UNHURRIED = Patience(open=math.inf, connect=math.inf, silence=math.inf)
#: seconds that an answer whose iterator was abandoned may take to end before the next one is refused
LEFT_SECONDS = 0.5


class EdgeRuntime:
    """A bundle, its engine and one link; answers one prompt at a time.

    Args:
        bundle: An opened bundle. Its engine's weights are loaded here, so make a runtime outside of a busy event loop.
        server: `host:port`, `ws://...` or `wss://...` of a verifier; a `LinkMaker`, such as an entered `LocalVerifier`;
            None to write on this device alone.
            options: An app's settings; None for the defaults.
            pinned: Choices that are otherwise measured; for benchmarks and tests.

    Raises:
        BundleError: The bundle has no engine that is installed here.
        LinkRefused: The address is not one, the token would travel in clear text, or the CA file holds no certificates.
        EngineFailed: The verifier in this process is not running.
    """

    def __init__(
        self,
        bundle: Bundle,
        server: str | LinkMaker | None = None,
        options: RuntimeOptions | None = None,
        pinned: Pinned | None = None,
    ) -> None:
        options, pinned = options or RuntimeOptions(), pinned or Pinned()
        self.bundle, self.policy, self._shape = bundle, options.policy, options.shape
        if not server or self.policy.writer is WhoWrites.DEVICE_ONLY:
            server, self.policy = None, replace(self.policy, writer=WhoWrites.DEVICE_ONLY)
        reliable = server is not None and not isinstance(server, str) and server.reliable
        self.patience = options.patience or (UNHURRIED if reliable else Patience())
        self._timer = RoundTimer(math.inf, math.inf, math.inf) if reliable else RoundTimer()
        self._shaping, self.controller = pinned.shaping, Controller(pinned=Arm(pinned.mode) if pinned.mode else None)
        self._ahead = False if reliable and pinned.ahead is None else pinned.ahead
        manifest = bundle.manifest
        engine, threads = options.engine, options.threads
        if engine is None or isinstance(engine, str):
            engine = open_engine(bundle, engine, threads)
        self.drafter = Drafter.of(bundle, engine, options.lookup, pinned.row_cost)
        if manifest.has_drafter and server:
            with contextlib.suppress(Exception):  # an engine that fails ends an answer, and says why
                self.controller.tree.step = self.drafter.time_step()
        hello = Hello(PROTOCOL_VERSION, manifest.target_hash, manifest.drafter_hash, "outrider-python")
        #: link events and finished drafter jobs
        self._inbox: asyncio.Queue[InboxEvent] = asyncio.Queue()
        self.link: VerifierLink | None = None
        self.link_error = ""  # why there is no connection; "" while there is one or none was tried yet
        self.link_refused = False  # a verifier answered, but did not accept this device
        if isinstance(server, str):
            self.link = Link(server, hello, self._linked, options.token, options.ca_file, options.pins)
        elif server:
            self.link = server.link(hello, self._linked)
        self._link_task: asyncio.Task[None] | None = None
        self._worker = DrafterThread(self.drafter)
        self._support = ConstraintSupport(bundle.tokenizer, manifest.vocab_size, manifest.eos_ids)
        drafter_for = partial(
            offline_drafter_for, bundle, engine, shape=options.shape, lookup=options.lookup, mode=self.controller.pinned
        )
        offline = self.policy.writer is WhoWrites.DEVICE_ONLY
        self._understudy = UnderstudyThread(understudy_of(bundle, threads, drafter_for if offline else None))
        self._session_id = secrets.token_bytes(16)
        self._text: list[int] = []  # committed tokens of the last answer and its conversation
        self._rows_seen = RowsSeen()  # of `_text`
        self._forgotten = False  # since the last answer began
        self._stream = 0
        self._answer: Answer | None = None  # in progress
        self._closed = False
        self._dialled = asyncio.Event()  # the link has come up, or failed to
        self._idle_seconds = options.idle
        self._max_context = manifest.max_context  # of the verifier too, once it was reached
        self._idle = asyncio.Event()  # no answer is in progress
        self._idle.set()

    @classmethod
    def from_bundle(
        cls,
        folder: str | Path,
        server: str | LinkMaker | None = None,
        *,
        pinned: Pinned | None = None,
        **options: Unpack[RuntimeKeywords],
    ) -> EdgeRuntime:
        """Open and check the bundle in `folder`, and make a runtime of it.

        Args:
            folder: Output of `outrider export bundle`.
            server: See the class.
            pinned: See the class.
            **options: The fields of `RuntimeOptions`.

        Raises:
            BundleError: The bundle is damaged or incomplete, or has no engine that is installed here. One line.
            LinkRefused, EngineFailed: See the class.
        """
        return cls(open_bundle(folder), server, RuntimeOptions(**options), pinned)

    async def __aenter__(self) -> EdgeRuntime:
        if self.link and self._link_task is None:
            self._link_task = asyncio.create_task(self.link.run())
            self.link.stay(self._idle_seconds)  # an answer will follow soon
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Tell the verifier to forget the conversation, hang up and stop the threads."""
        self._closed = True
        if self.link and self._link_task:
            self.link.send(Close(self._stream))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.link.flush(), 1.0)
            self._link_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._link_task
            self._link_task = None
        self._worker.close()
        self._understudy.close()

    async def wait_for_link(self) -> None:
        """Wait until the first attempt to connect has succeeded or failed, for at most a new answer's patience.

        Afterwards `fit_messages` knows the verifier's context, if there is a verifier.
        """
        if self.link and not self.link.welcome:
            if not self.link_error:
                self._dialled.clear()
            if self._answer is None:
                self.link.stay(self._idle_seconds)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dialled.wait(), self.patience.connect)

    def _linked(self, event: LinkEvent) -> None:
        self._dialled.set()
        match event:
            case LinkUp():
                self.link_error, self.link_refused = "", False
                self._max_context = min(self.bundle.manifest.max_context, event.welcome.max_context)
            case LinkDown(reason=reason, refused=refused):
                self.link_error, self.link_refused = reason, refused
            case LinkRefused() | EngineFailed():
                self.link_error, self.link_refused = str(event), True
        self._inbox.put_nowait(event)

    def encode_prompt(self, prompt: str | list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return token ids of a question (a string) or a conversation (chat messages) with callable `tools`."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.bundle.render_chat(messages, tools)

    def fit_messages(
        self,
        messages: list[dict[str, Any]],
        reserve: int = 256,
        tools: Sequence[dict[str, Any]] = (),
        least: int | None = None,
    ) -> FittedMessages:
        """Drop the oldest turns of a conversation until the rest fits into the context.

        Args:
            messages: Chat messages. Instructions at the beginning and the last turn are never dropped.
            reserve: Tokens to keep free for the answer, at most half of the context; as many as the context has, or
                more, means no limit.
            tools: Functions that may be called, in OpenAI's form.
            least: Nothing is dropped while this many tokens are left for the answer; None: `reserve`.

        Returns:
            The part that fits into the bundle's context, or the verifier's if that is smaller and was reached.

        Raises:
            ConversationTooLong: The last turn alone does not fit. It is a ValueError.
            MessageFault: A message is invalid; the text names the field. It is a ValueError.
        """
        as_templates_take(messages)  # raises on invalid messages
        encode = partial(self.encode_prompt, tools=tools)
        return fit_messages(messages, encode, self._max_context, reserve, least)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self.bundle.decode(ids)

    def generate(
        self,
        prompt: str | list[dict[str, Any]] | list[int],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        response_format: Mapping[str, Any] | None = None,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tools: Sequence[dict[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
    ) -> AsyncGenerator[Event, None]:
        """Answer a prompt. Closing the iterator cancels the answer.

        Args:
            prompt: Text, chat messages, or token ids; ids must describe the tools themselves.
            max_new_tokens: Most verified tokens.
            temperature: 0 is greedy.
            top_k, top_p, min_p: Limits on the tokens drawn; 0, 1 and 0 allow all.
            seed: The same seed gives the same text; None or -1 picks one.
            stop: A string or strings that end the answer; they are not part of it.
            response_format, logit_bias, frequency_penalty, presence_penalty, tools, tool_choice, parallel_tool_calls:
                As in OpenAI's API (logit_bias by token id). All writers obey them. Under a response_format or tools the
                device writes offline only if llguidance is installed; without it such an answer waits for the link.
                Calls appear in the text as `<tool_call>`.

        Returns:
            Events (`edge_runtime.events`), the last one `Finished`.

        Raises:
            ValueError: At once: an argument is out of bounds, or the prompt leaves no room.
            RuntimeError: While events are read: the runtime is not entered, or is answering already.
            DrafterFailed: After `Finished` with reason "failed": the device's engine failed.
            LinkRefused, EngineFailed: Likewise, but only of a verifier in this process (`outrider.local`). Another
                verifier's refusal counts as a link that is down, with the reason in `LinkState.detail`, as a different
                one at its address may accept.
        """
        sampling = checked_sampling(temperature, top_k, top_p, min_p, seed)
        length, stops = checked_length(max_new_tokens), checked_stops(stop)
        use = tool_use_of(tools, tool_choice, parallel_tool_calls)
        if not prompt:
            raise ValueError("the prompt is empty")
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            ids: list[int] = [int(token) for token in prompt]  # type: ignore[arg-type]
        else:
            ids = self.encode_prompt(prompt, use.prompt if use else ())  # type: ignore[arg-type]
        constraint = constraint_of(
            len(ids),
            self.bundle.manifest.vocab_size,
            response_format,
            logit_bias,
            frequency_penalty,
            presence_penalty,
            use.rules if use else None,
        )
        return self.answer_ids(ids, sampling, length, stops, constraint)

    def answer_ids(
        self, ids: list[int], sampling: Sampling, length: int, stops: list[str], constraint: Constraint | None = None
    ) -> AsyncGenerator[Event, None]:
        """Answer a prompt of token ids, like `generate`, which has checked the arguments. Raises ValueError."""
        manifest = self.bundle.manifest
        if not ids or len(ids) >= manifest.max_context:
            raise ValueError(f"the prompt has {len(ids)} tokens; 1 to {manifest.max_context - 1} fit this bundle")
        if not all(0 <= token < manifest.vocab_size for token in ids):
            raise ValueError(f"token ids of the prompt must be at least 0 and below {manifest.vocab_size}")
        if why := self.unsupported(constraint):
            raise ValueError(why)

        def begin() -> tuple[Session, list[str]]:
            self._stream = (self._stream + 1) % STREAMS
            return self._begin(ids, sampling, length, constraint), stops

        return self._run(begin)

    def unsupported(self, constraint: Constraint | None) -> str:
        """Return why no writer here can obey `constraint`; "" if one can, or the verifier may be asked."""
        missing = self._support.missing(constraint) if constraint else ""
        if not missing or self.policy.writer is not WhoWrites.DEVICE_ONLY:
            return ""
        return (
            f"response_format and tools need a verifier: this device writes alone and does not support them: {missing}"
        )

    def resume(self, record: dict[str, Any]) -> AsyncGenerator[Event, None]:
        """Continue an answer that `record` described, perhaps in a process that has ended.

        It waits for a verifier with the arithmetic that the answer began in, if that is known.

        Args:
            record: A result of `record`.

        Returns:
            Events, as from `generate`.

        Raises:
            ValueError: When the first event is read: it is not a record of this bundle, or the verifier in this process
                has another arithmetic. Others as in `generate`.
        """

        def begin() -> tuple[Session, list[str]]:
            stops = read_record(record, self.bundle.manifest.target_hash, self.bundle.manifest.vocab_size)
            self._session_id, self._stream = bytes.fromhex(record["session"]), record["stream"]
            session = self._begin(
                list(record["prompt"]), Sampling(**record["sampling"]), record["max_new"], recorded_constraint(record)
            )
            restore(session, record)
            return session, stops

        return self._run(begin)

    def record(self) -> dict[str, Any] | None:
        """Describe the answer in progress, so that `resume` can continue it.

        Save it after every event that matters to you: an app that is killed in mid-answer then loses nothing.

        Returns:
            A JSON object; None if no answer is in progress.
        """
        if self._answer is None:
            return None
        extra = {"target": self.bundle.manifest.target_hash, "stop": list(self._answer.stops)}
        return {**record_of(self._answer.session), **extra}

    async def pause(self) -> None:
        """Stop writing offline until `proceed`, e.g. as the battery is low. The target's text continues."""
        if self._answer:
            self._answer.pause()

    async def proceed(self) -> None:
        """Allow writing offline again, as the policy says."""
        if self._answer:
            self._answer.proceed()

    def network_changed(self) -> None:
        """Dial over the device's new network at once, as connections over the old one die with it."""
        if self.link:
            self.link.network_changed()

    def hurry(self, seconds: float) -> None:
        """Limit how long the answer in progress waits for the verifier to `seconds`, e.g. as another request waits.

        An answer that was paused by `pause` keeps waiting.
        """
        if self._answer:
            self._answer.hurry(seconds)

    @property
    def refusal(self) -> str:
        """Return why the verifier permanently refused the answer in progress, so that the device writes on; else ""."""
        verifier = self._answer.session.verifier if self._answer else None
        return verifier.complaint if verifier and verifier.refused else ""

    def forget(self) -> None:
        """Forget all conversations so far, e.g. for another user: lookup no longer uses them.

        They are kept in memory alone, and bounded. An answer in progress continues, and is forgotten when it is over.
        """
        self._text, self._rows_seen, self._forgotten = [], RowsSeen(), True
        if not self._closed:
            self._worker.submit(self.drafter.forget)
            self._understudy.forget()

    async def _run(self, begin: Callable[[], tuple[Session, list[str]]]) -> AsyncGenerator[Event, None]:
        """Run an answer. begin: makes the session once no other answer is in progress, and returns its stop strings."""
        async with self._alone():
            session, stop = begin()
            self._forgotten = False
            self._catch_up()
            support = None if session.obeys else self._support
            answer = self._answer = Answer(
                session,
                self.link,
                self._worker,
                self._understudy,
                self._inbox,
                self.decode,
                stop,
                self.link_error,
                support,
            )
            try:
                async for event in answer.run():
                    yield event
            finally:
                self._answer = None
                if self._forgotten:
                    self.forget()
                else:
                    self._text, self._rows_seen = session.committed, session.rows_seen
                answer.close()
                if session.verifier.pinned and self.link and not self.link.welcome:
                    self.link_error, self.link_refused = "", False  # it may accept the next answer
                cold = self.bundle.manifest.has_drafter and self.policy.understudy is UnderstudyUse.COLD
                if cold and self.link and self.link.welcome:
                    self._understudy.unload()

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Allow one answer at a time, and only while the link runs. Raises RuntimeError."""
        if self._closed:
            raise RuntimeError("this runtime is closed; open another one")
        if self.link and self._link_task is None:
            raise RuntimeError("this runtime is not entered; write: async with EdgeRuntime(...) as runtime")
        # the event loop closes an iterator that a `break` left a moment later
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), LEFT_SECONDS)
        if not self._idle.is_set():
            raise RuntimeError(
                "an answer is already on its way on this runtime; read it to its end or close its iterator (aclose), "
                "or open a runtime for each conversation"
            )
        self._idle.clear()
        if self.link:
            self.link.stay(math.inf)
        try:
            yield
        finally:
            self._idle.set()
            if self.link and not self._closed:
                self.link.stay(self._idle_seconds)

    def _catch_up(self) -> None:
        """Process events since the last answer; the link itself has their effects."""
        while not self._inbox.empty():
            if isinstance(event := self._inbox.get_nowait(), LinkUp):
                self.controller.linked(event.welcome, event.rtt)

    def _begin(self, ids: list[int], sampling: Sampling, max_new: int, constraint: Constraint | None) -> Session:
        """Make a session for `ids`. The common prefix with the text before keeps its rows, here and on the verifier."""
        same = common_prefix(ids, self._text)
        if same < len(self._text):  # another conversation, or a repeated turn
            self._worker.submit(partial(self.drafter.remember, self._text))
        self._worker.submit(partial(self.drafter.keep_rows, same))
        unsupported = constraint is not None and bool(self._support.missing(constraint))
        return Session(
            prompt=ids,
            sampling=sampling,
            eos_ids=frozenset(self.bundle.manifest.eos_ids),
            max_new=max_new,
            max_context=self.bundle.manifest.max_context,
            row_shape=self.bundle.row_shape,
            session_id=self._session_id,
            stream=self._stream,
            rows_seen=self._rows_seen.up_to(same),
            patience=self.patience,
            timer=self._timer,
            policy=replace(self.policy, writer=WhoWrites.CLOUD_ONLY) if unsupported else self.policy,
            tuning=Tuning(self.controller, self._shape, self._shaping, self._ahead),
            drafter=self.bundle.manifest.has_drafter,
            understudy=self.bundle.has_understudy,
            sentence_ends=self.bundle.sentence_ends,
            constraint=constraint,
            obeys=constraint is None or unsupported,  # for others rules are made first
        )
