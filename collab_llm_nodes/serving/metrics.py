"""Prometheus metrics of the compute thread."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SESSIONS = (1, 2, 4, 8, 16, 32, 64, 128)


class ComputeMetrics:
    """Metrics of ``Compute``; the counters are thread-safe.

    Args:
        name: of the service; the names of its metrics begin with ``collab_llm_NAME_``.
        work: name of the unit that clients submit, in the singular.
        registry: registry of the metrics; a new one by default.
    """

    def __init__(
        self, name: str, work: str = "turn", registry: CollectorRegistry | None = None
    ) -> None:
        r = CollectorRegistry() if registry is None else registry
        prefix = f"collab_llm_{name}"
        self.caches = Gauge(f"{prefix}_kv_caches", "Sessions that hold a KV cache.", registry=r)
        self.waiting = Gauge(f"{prefix}_waiting", "Sessions waiting for a KV cache.", registry=r)
        self.evictions = Counter(f"{prefix}_evictions", "KV caches lent to others.", registry=r)
        offers = f"{work.capitalize()}s received."
        offered = Counter(f"{prefix}_{work}s", offers, ["fate"], registry=r)
        self.taken, self.dropped = offered.labels("taken"), offered.labels("dropped")
        self.prompt_tokens = Counter(f"{prefix}_prompt_tokens", "Prompt tokens read.", registry=r)
        each = f"{work.capitalize()}s per forward pass."
        self.batch = Histogram(f"{prefix}_batch", each, buckets=_SESSIONS, registry=r)
        takes = "Time of a forward pass."
        self.compute = Histogram(f"{prefix}_compute_seconds", takes, buckets=_SECONDS, registry=r)
        wait = f"Wait of a {work} for its pass."
        self.queued = Histogram(f"{prefix}_queue_seconds", wait, buckets=_SECONDS, registry=r)

    def count_pass(self, turns: int, prompt_tokens: int, compute_s: float) -> None:
        """Count one forward pass."""
        if turns:
            self.batch.observe(turns)
        self.prompt_tokens.inc(prompt_tokens)
        self.compute.observe(compute_s)
