"""The verifier as an object: target, drafter's server half, KV pool, sessions and engine thread, put together."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

from cloud.engine.batcher import Batcher
from cloud.engine.constraints import ConstraintDesk
from cloud.engine.engine import TargetEngine
from cloud.engine.kvpool import KVPool
from cloud.engine.prefixes import Prefixes
from cloud.engine.replies import microseconds
from cloud.engine.request import EngineRequest
from cloud.engine.served_model import ServedModel
from cloud.engine.sessions import SessionStore
from cloud.engine.stream_lookup import StreamLookup
from cloud.engine.tree_budget import StepCosts, TreeBudget, measure_costs
from cloud.server.accounts import Accounts, AuthError
from cloud.settings import Settings
from cloud.telemetry import log
from cloud.telemetry.metrics import Metrics
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import MAX_TOKENS, PROTOCOL_VERSION, Welcome

VERSION = version("outrider")


class Verifier:
    """Accepts requests from sockets, HTTP endpoints and a runtime in the same process: `start` first, `stop` last."""

    def __init__(self, model: ServedModel, settings: Settings, accounts: Accounts | None = None) -> None:
        self.target_hash, self.drafter_hash, self.tokenizer = model.target_hash, model.drafter_hash, model.tokenizer
        self.arithmetic = model.arithmetic
        self.model_name = settings.served_model_name or model.name
        self.vocab_size, self._top = model.vocab_size, model.top
        self.max_context = min(settings.max_model_len, model.max_positions, MAX_TOKENS)
        self.max_nodes = settings.max_nodes
        self.accounts = Accounts() if accounts is None else accounts
        self.metrics = Metrics()
        self.metrics.serving(
            version=VERSION, target=self.target_hash, drafter=self.drafter_hash, arithmetic=self.arithmetic
        )
        self._report_expiries()
        self.features = model.features
        self.constraints = ConstraintDesk(model.vocab_size, model.eos_ids, offered=not model.top)
        self._runner, self._kv_tokens = model.runner, settings.kv_tokens
        pool = KVPool(settings.kv_tokens, self._runner.move)
        self.engine = TargetEngine(self._runner, pool, self.features, model.eos_ids, self.max_context)
        shares = settings.prefix_cache == "on" or (settings.prefix_cache == "auto" and self.accounts.required)
        self.sessions = SessionStore(
            pool,
            self.features.shape,
            settings.max_sessions,
            keep_ended=shares,
            first_row=0 if self.features.layers else MAX_TOKENS,
        )
        looks_up = settings.lookup == "on" or (settings.lookup == "auto" and model.exact)
        self.scheduler = model.scheduler(
            pool,
            TreeBudget(self.max_nodes),
            max_context=self.max_context,
            fixed_budget=min(settings.tree_budget, self.max_nodes),
            prefixes=Prefixes(pool, self.sessions, self.metrics) if shares else None,
            lookup=partial(StreamLookup, model.ngrams) if looks_up else None,
        )
        self.batcher = Batcher(
            self.engine,
            self.sessions,
            self.scheduler,
            self.metrics,
            max_context=self.max_context,
        )
        self.draining = False

    def calibrate(self, known: StepCosts | None = None) -> None:
        """Time steps of several sizes, so that `tree_budget` follows the cost of trees here. Call it before `start`.

        known: from an earlier start; they are timed again while the verifier is idle.
        """
        budget = self.scheduler.budget
        budget.costs = costs = known or measure_costs(self._runner, self._kv_tokens, context=self.max_context)
        budget.choose()
        if known:
            return
        times = zip(costs.curve.tokens, costs.curve.seconds, strict=True)
        log.info(
            "steps timed",
            milliseconds={str(tokens): round(1000 * took, 2) for tokens, took in times},
            each_session=round(1000 * costs.session, 3),
            tree_budget=self.scheduler.tree_budget,
        )

    def reload_tokens(self) -> None:
        """Read the token file again and log the changes; an unusable file changes nothing."""
        try:
            new, revoked = self.accounts.reload()
        except AuthError as error:
            log.error("tokens not read, the old ones stay", why=str(error))
            return
        expired = [account.name for account in self.accounts if account.expired]
        log.info("tokens read again", tokens=len(self.accounts), new=new, revoked=revoked, expired=expired)
        self._report_expiries()

    def _report_expiries(self) -> None:
        self.metrics.token_expiry.clear()
        for account in self.accounts:
            if account.expires is not None:
                self.metrics.token_expiry.labels(account.name).set(account.ends_at)

    def start(self) -> None:
        """Start the engine thread."""
        self.constraints.open(self.tokenizer)
        self.batcher.start()

    def drain(self) -> None:
        """Stop accepting."""
        self.draining = True
        self.metrics.draining.set(1)

    def stop(self) -> None:
        """End the engine thread after the running step, and the runner."""
        self.drain()
        self.batcher.stop()
        self.constraints.close()
        self.engine.masks.close()
        self._runner.stop()

    @property
    def alive(self) -> bool:
        """Return whether requests can be answered: the opposite of `broken`."""
        return self.batcher.alive

    @property
    def broken(self) -> str | None:
        """Return why no request can be answered any more: the engine thread has ended or hangs, or every step fails."""
        return self.batcher.broken

    @property
    def idle(self) -> bool:
        """Return whether no request is in progress."""
        return self.batcher.idle

    @property
    def ready(self) -> bool:
        """Return whether new connections are accepted."""
        return self.alive and not self.draining

    def submit(self, request: EngineRequest) -> None:
        """Hand a request to the engine thread, from any thread."""
        self.batcher.submit(request)

    def refusal(self, sampling: Sampling) -> str:
        """Return why these parameters cannot be sampled with; "" if they can."""
        if not self._top or sampling.greedy or 0 < sampling.top_k <= self._top:
            return ""
        return (
            f"this verifier's target runs on another server, which returns only the {self._top} likeliest tokens: "
            f"use temperature 0 or a top_k of at most {self._top}"
        )

    def welcome(self) -> Welcome:
        """Return the handshake's message to a device."""
        recent = self.batcher.recent
        return Welcome(
            PROTOCOL_VERSION,
            self.target_hash,
            self.drafter_hash,
            self.vocab_size,
            self.max_context,
            self.max_nodes,
            self.scheduler.tree_budget,
            f"outrider {VERSION}",
            curve.pack() if (curve := self.scheduler.budget.advertised()) else b"",
            self.constraints.obeys,
            self.arithmetic,
            round(100 * recent.stream_tokens),
            microseconds(recent.queue_seconds),
        )
