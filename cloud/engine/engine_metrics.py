"""The engine thread's reports to `Metrics`."""

from __future__ import annotations

from cloud.engine.kvpool import KVPool
from cloud.engine.outcome import DraftCounts, StepOutcome
from cloud.telemetry.metrics import Metrics
from outrider_core.protocol.wire import Verify


class EngineMetrics:
    """Counts steps and keeps the gauges of the engine thread."""

    def __init__(self, metrics: Metrics, pool: KVPool) -> None:
        self._metrics, self._pool, self._evictions = metrics, pool, 0

    def observe(self, outcome: StepOutcome, drafts: DraftCounts) -> None:
        """Count a step, before it is answered."""
        metrics, segments = self._metrics, [segment for segment, _ in outcome.steps]
        for _, request, path in outcome.rounds():
            metrics.queue_seconds.observe(outcome.queue_seconds(request))
            metrics.generation_tokens.inc(len(path.accepted) + 1)
            metrics.account_tokens.labels(request.account, "generated").inc(len(path.accepted) + 1)
            if isinstance(request.message, Verify):
                metrics.verify_seconds.observe(outcome.queue_seconds(request) + outcome.seconds)
        metrics.drafts.inc(len(drafts.sizes))
        metrics.draft_tokens.inc(drafts.sent)
        metrics.verified_nodes.inc(sum(drafts.sizes))
        metrics.accepted_tokens.inc(drafts.accepted)
        lookups = outcome.lookups()
        metrics.lookup_tokens.inc(sum(lookups.sizes))
        metrics.accepted_lookup_tokens.inc(lookups.accepted)
        metrics.prompt_tokens.inc(sum(segment.prefill for segment in segments))
        for segment in segments:
            if segment.prefill:
                metrics.account_tokens.labels(segment.session.account, "prompt").inc(segment.prefill)
        metrics.step_tokens.observe(sum(map(len, segments)))
        metrics.step_sessions.observe(len(segments))
        metrics.step_seconds.observe(outcome.seconds)
        metrics.running.set(len(segments))

    def report(self, waiting: int, sessions: int, tree_budget: int) -> None:
        """Set the gauges, after each step and each sleep."""
        metrics = self._metrics
        metrics.waiting.set(waiting)
        metrics.kv_usage.set(self._pool.rows_used / self._pool.rows)
        metrics.sessions.set(sessions)
        metrics.tree_budget.set(tree_budget)
        metrics.evictions.inc(self._pool.evictions - self._evictions)
        self._evictions = self._pool.evictions
        if not waiting:
            metrics.running.set(0)
