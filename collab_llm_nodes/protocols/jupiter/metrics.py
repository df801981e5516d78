"""The cost of one answer by Jupiter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collab_llm_nodes.metrics import GenerationMetrics


@dataclass
class JupiterMetrics(GenerationMetrics):
    """Counters that are summed. A round is a pass with a verdict.

    Attributes:
        drafted, accepted: draft tokens that were judged, and those that stand.
        outline_tokens: of ``tokens``, those of the outline, which is no part of the text.
        points: of the outline that were expanded; 0 for an answer in sequence.
        stages: workers that held the model when the answer ended.
        losses: workers that were lost during the answer.
    """

    drafted: int = 0
    accepted: int = 0
    outline_tokens: int = 0
    points: int = 0
    stages: int = 0
    losses: int = 0

    def figures(self) -> Mapping[str, float]:
        """Return the counters and ratios beyond those of every protocol."""
        names = ("drafted", "accepted", "outline_tokens", "points", "stages", "losses")
        return {
            "tau": self.tokens / self.rounds if self.rounds else 0.0,
            "acceptance": self.accepted / self.drafted if self.drafted else 0.0,
            **{name: float(getattr(self, name)) for name in names},
        }
