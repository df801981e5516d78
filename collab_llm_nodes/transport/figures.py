"""Figures about a running server, as Prometheus metrics on a port of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.transport.exposition import Exposition


class ServerFigures:
    """What every server counts; the counters are safe in all threads.

    Args:
        name: of the service; the metrics are called ``collab_llm_NAME_...``.
    """

    def __init__(self, name: str) -> None:
        self.registry = r = CollectorRegistry()
        prefix = f"collab_llm_{name}"
        self.streams = Gauge(f"{prefix}_streams", "Session streams open.", registry=r)
        self.failures = Counter(f"{prefix}_failures", "Streams refused.", ["code"], registry=r)
        self._exposition: Exposition | None = None

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
