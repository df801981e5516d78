"""Figures about a running verifier, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter

from collab_llm_nodes.protocols.edge_cloud.messages import Verdict
from collab_llm_nodes.serving.figures import ComputeFigures
from collab_llm_nodes.transport.figures import ServerFigures


class Telemetry(ServerFigures):
    """What a verifier counts. Each has its own; the counters are safe in all threads."""

    def __init__(self, name: str = "verifier") -> None:
        super().__init__(name)
        r, prefix = self.registry, f"collab_llm_{name}"
        self.compute = ComputeFigures(name, "draft", r)
        self.tokens = Counter(f"{prefix}_tokens", "Tokens in verdicts.", registry=r)
        self.accepted = Counter(f"{prefix}_accepted", "Draft tokens accepted.", registry=r)

    def count_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Count those of one pass."""
        self.tokens.inc(sum(len(verdict.tokens) for verdict in verdicts))
        self.accepted.inc(sum(verdict.accepted for verdict in verdicts))
