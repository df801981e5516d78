"""Figures about a running verifier, as Prometheus metrics on a port of their own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.edge_cloud.messages import Verdict
from collab_llm_nodes.transport.exposition import Exposition

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SESSIONS = (1, 2, 4, 8, 16, 32, 64, 128)


class Telemetry:
    """What is counted. Each verifier has its own; the counters are safe in all threads."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        name = "collab_llm_verifier"
        self.streams = Gauge(f"{name}_streams", "Session streams open.", registry=r)
        self.caches = Gauge(f"{name}_kv_caches", "Sessions that hold a KV cache.", registry=r)
        self.waiting = Gauge(f"{name}_waiting", "Sessions waiting for a KV cache.", registry=r)
        self.evictions = Counter(f"{name}_evictions", "KV caches lent to others.", registry=r)
        drafts = Counter(f"{name}_drafts", "Drafts received.", ["fate"], registry=r)
        self.taken, self.dropped = drafts.labels("taken"), drafts.labels("dropped")
        self.tokens = Counter(f"{name}_tokens", "Tokens in verdicts.", registry=r)
        self.accepted = Counter(f"{name}_accepted", "Draft tokens accepted.", registry=r)
        self.prompt_tokens = Counter(f"{name}_prompt_tokens", "Prompt tokens read.", registry=r)
        self.failures = Counter(f"{name}_failures", "Streams refused.", ["code"], registry=r)
        self.batch = Histogram(
            f"{name}_batch", "Drafts per forward pass.", buckets=_SESSIONS, registry=r
        )
        self.compute = Histogram(
            f"{name}_compute_seconds", "Time of a forward pass.", buckets=_SECONDS, registry=r
        )
        self.queued = Histogram(
            f"{name}_queue_seconds", "Wait of a draft for its pass.", buckets=_SECONDS, registry=r
        )
        self._exposition: Exposition | None = None

    def count_pass(self, drafts: int, prompt_tokens: int, compute_s: float) -> None:
        """One forward pass."""
        if drafts:
            self.batch.observe(drafts)
        self.prompt_tokens.inc(prompt_tokens)
        self.compute.observe(compute_s)

    def count_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Those of one pass."""
        self.tokens.inc(sum(len(verdict.tokens) for verdict in verdicts))
        self.accepted.inc(sum(verdict.accepted for verdict in verdicts))
        for verdict in verdicts:
            self.queued.observe(verdict.queue_s)

    def serve(self, address: str) -> int:
        """Answer ``GET /metrics`` at ``address`` (host:port); returns the port.

        Raises:
            ConfigError: cannot listen there.
        """
        host, _, port = address.rpartition(":")
        try:
            self._exposition = Exposition(host.strip("[]"), int(port), self.registry)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot listen on {address}: {error}",
                field="metrics_address",
                remedy="give host:port of a free port",
            ) from error
        return self._exposition.port

    def stop(self) -> None:
        """Stop answering."""
        if self._exposition is not None:
            self._exposition.stop()
            self._exposition = None
