"""The metrics of `/metrics`, in Prometheus' text format.

Names are vLLM's, under our own prefix, if they mean the same, so that dashboards carry over. Nothing here has a label
for a session, a prompt or a client's address.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Metric,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from cloud.telemetry import log

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)


class _LogDrops(Collector):
    """Lines that the process could not log."""

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("outrider:log_lines_dropped", "Log lines dropped, by this process", log.dropped())


#: finished_reason of a completion whose client hung up, and of one that failed in mid-answer
ABORT, ERROR = "abort", "error"


class Metrics:
    """The metrics of one verifier. Any thread may update them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider:{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"outrider:{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"outrider:{name}", text, buckets=buckets, registry=self.registry)

        # as in vLLM
        self.running = gauge("num_requests_running", "Sessions in the running step")
        self.waiting = gauge("num_requests_waiting", "Sessions waiting for a step")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV pool rows that hold committed tokens, 0 to 1")
        self.evictions = counter("num_preemptions", "Sessions evicted from the KV pool")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens prefilled")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens whose rows another session had")
        self.generation_tokens = counter("generation_tokens", "Tokens committed by the target")
        self.drafts = counter("spec_decode_num_drafts", "Draft trees verified")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Nodes of draft trees, before pruning")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft nodes accepted")
        self.queue_seconds = histogram(
            "request_queue_time_seconds", "Seconds a request waited for the engine", _SECONDS
        )
        self.step_tokens = histogram("iteration_tokens_total", "Tokens in one step, all sessions together", _TOKENS)
        self.first_token_seconds = histogram(
            "time_to_first_token_seconds", "Seconds from a completion's request to its first token", _SECONDS
        )
        self.inter_token_seconds = histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of a completion", _SECONDS
        )
        self.request_seconds = histogram(
            "e2e_request_latency_seconds", "Seconds from a completion's request to its last token", _SECONDS
        )
        self.finished = counter("request_success", "Completions that ended, by reason", "finished_reason")
        # our own
        self.http_requests = counter("http_requests", "HTTP replies and WebSocket handshakes", "path", "status")
        self.verify_seconds = histogram("verify_seconds", "Seconds from a VERIFY to its verdict", _SECONDS)
        self.verified_nodes = counter("verified_nodes", "Draft nodes verified, after pruning")
        self.lookup_tokens = counter("stream_lookup_tokens", "Tokens of streams that lookup predicted, verified")
        self.accepted_lookup_tokens = counter("stream_lookup_accepted_tokens", "Of these, the target's own")
        self.step_seconds = histogram("step_seconds", "Seconds per step", _SECONDS)
        self.step_sessions = histogram("step_sessions", "Sessions in one step", _TOKENS)
        self.tree_budget = gauge("tree_budget", "Nodes per tree that devices are asked to stay within")
        self.sessions = gauge("sessions", "Session records kept")
        self.connections = gauge("connections", "Open WebSockets")
        self.sockets = gauge("sockets", "Open sockets, WebSockets included")
        self.opened = counter("opens", "OPENs answered, by what the verifier still had of the session", "found")
        self.prefix_reuses = counter("prefix_reuses", "Sessions that began with rows of another")
        self.bytes_in = counter("received_bytes", "Bytes of WebSocket messages received")
        self.bytes_out = counter("sent_bytes", "Bytes of WebSocket messages sent")
        self.errors = counter("errors", "ERROR messages sent, by code", "code")
        self.refused = counter("refused", "Handshakes, requests and sockets refused or cut, by reason", "reason")
        self.step_failures = counter("step_failures", "Steps without a result")
        self.unusable_logits = counter("unusable_logits", "Rounds failed because the target's logits were not numbers")
        self.account_tokens = counter(
            "account_tokens", "Tokens by account and kind: prompt (prefilled) or generated", "account", "kind"
        )
        self.token_expiry = gauge(
            "token_expiry_timestamp_seconds", "When the account's token expires, in seconds since 1970", "account"
        )
        self.certificate_expiry = gauge(
            "certificate_expiry_timestamp_seconds", "When the TLS certificate expires, in seconds since 1970; 0: no TLS"
        )
        self.draining = gauge("draining", "1 while the verifier shuts down, else 0")
        self.registry.register(_LogDrops())
        ProcessCollector(registry=self.registry)  # process_*: memory, descriptors, processor time
        self._build = Info("outrider:build", "Version, target and drafter", registry=self.registry)

    def serving(self, **facts: str) -> None:
        """Report version, target, drafter and arithmetic."""
        self._build.info(facts)

    def text(self) -> bytes:
        """Return all metrics, for a scrape."""
        return generate_latest(self.registry)
