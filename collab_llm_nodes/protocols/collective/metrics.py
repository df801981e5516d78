"""The cost of one generation by collective speculation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collab_llm_nodes.metrics import GenerationMetrics


@dataclass
class CollectiveMetrics(GenerationMetrics):
    """Counters that are summed, and ratios derived from them. A round is a verification.

    Attributes:
        drafted, accepted: voted draft tokens that were verified, and those that stand.
        waited_s: from the request to its first draft [s].
    """

    drafted: int = 0
    accepted: int = 0
    waited_s: float = 0.0

    @property
    def tau(self) -> float:
        """Tokens per verification."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the voted tokens that the target accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def figures(self) -> Mapping[str, float]:
        """Return the counters and ratios beyond those of every protocol."""
        names = ("tau", "acceptance", "drafted", "accepted", "waited_s")
        return {name: float(getattr(self, name)) for name in names}
