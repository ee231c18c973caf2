"""What the engine thread reports to `Metrics`."""

from __future__ import annotations

from cloud.engine.kvpool import KVPool
from cloud.engine.prefixes import Prefixes
from cloud.engine.step import DraftCounts, Step
from cloud.telemetry.metrics import Metrics
from outrider_core.protocol.wire import Verify


class EngineMetrics:
    """Counts steps and keeps the gauges of the engine thread."""

    def __init__(self, metrics: Metrics, pool: KVPool, prefixes: Prefixes | None = None) -> None:
        self._metrics, self._pool, self._prefixes = metrics, pool, prefixes
        self._evictions = self._hits = self._reuses = 0

    def observe(self, step: Step, drafts: DraftCounts) -> None:
        """Count a step, before it is answered."""
        metrics = self._metrics
        for _, job, path in step.rounds():
            metrics.queue_seconds.observe(step.queue_seconds(job))
            metrics.generation_tokens.inc(len(path.accepted) + 1)
            if isinstance(job.request, Verify):
                metrics.verify_seconds.observe(step.queue_seconds(job) + step.seconds)
        metrics.drafts.inc(len(drafts.sizes))
        metrics.draft_tokens.inc(drafts.sent)
        metrics.verified_nodes.inc(sum(drafts.sizes))
        metrics.accepted_tokens.inc(drafts.accepted)
        lookups = step.lookups()
        metrics.lookup_tokens.inc(sum(lookups.sizes))
        metrics.accepted_lookup_tokens.inc(lookups.accepted)
        metrics.prompt_tokens.inc(sum(part.prefill for part in step.scheduled))
        metrics.step_tokens.observe(sum(map(len, step.scheduled)))
        metrics.step_sessions.observe(len(step.scheduled))
        metrics.step_seconds.observe(step.seconds)
        metrics.running.set(len(step.scheduled))

    def count_failed_step(self) -> None:
        """Count a step that nothing came of."""
        self._metrics.step_failures.inc()

    def count_unusable(self, sessions: int) -> None:
        """Count sessions whose logits were not numbers."""
        self._metrics.unusable_logits.inc(sessions)

    def report(self, pending: int, sessions: int, tree_budget: int) -> None:
        """Set the gauges, after each step and each sleep."""
        metrics = self._metrics
        metrics.waiting.set(pending)
        metrics.kv_usage.set(self._pool.rows_used / self._pool.rows)
        metrics.sessions.set(sessions)
        metrics.tree_budget.set(tree_budget)
        metrics.evictions.inc(self._pool.evictions - self._evictions)
        self._evictions = self._pool.evictions
        if prefixes := self._prefixes:
            metrics.prefix_hits.inc(prefixes.tokens - self._hits)
            metrics.prefix_reuses.inc(prefixes.sessions - self._reuses)
            self._hits, self._reuses = prefixes.tokens, prefixes.sessions
        if not pending:
            metrics.running.set(0)
