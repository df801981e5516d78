"""Figures about a running verifier, as Prometheus metrics on a port of their own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.edge_cloud.messages import Verdict
from collab_llm_nodes.serving.figures import ComputeFigures
from collab_llm_nodes.transport.exposition import Exposition


class Telemetry:
    """What is counted. Each verifier has its own; the counters are safe in all threads."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        name = "collab_llm_verifier"
        self.compute = ComputeFigures("verifier", "draft", r)
        self.streams = Gauge(f"{name}_streams", "Session streams open.", registry=r)
        self.tokens = Counter(f"{name}_tokens", "Tokens in verdicts.", registry=r)
        self.accepted = Counter(f"{name}_accepted", "Draft tokens accepted.", registry=r)
        self.failures = Counter(f"{name}_failures", "Streams refused.", ["code"], registry=r)
        self._exposition: Exposition | None = None

    def count_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Count those of one pass."""
        self.tokens.inc(sum(len(verdict.tokens) for verdict in verdicts))
        self.accepted.inc(sum(verdict.accepted for verdict in verdicts))

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
