"""The cost of one generation by edge-cloud speculation (paper 003, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collab_llm_nodes.metrics import GenerationMetrics


@dataclass
class EdgeCloudMetrics(GenerationMetrics):
    """Counters that are summed, and the ratios derived from them. Times in seconds.

    A round is a verification: a forward pass of the target after the prefill.

    Attributes:
        drafted, accepted: draft tokens sent to, and accepted by, the target.
        cache_lookups, cache_hits: verdicts followed by a draft, and those for which it was ready.
        pushed: drafts sent ahead of the verdicts they depended on.
        early_exits: early exits received.
        exit_agreements, exit_layer_sum: rounds in which an exit had the verdict's outcome, and the
            sum of the earliest such layers ("Avg EE" of the paper is their quotient).
        draft_s, predraft_s: time of drafting while the verifier waited, and while it worked.
        verify_s, wait_s: the verifier's own compute time, and waiting for it, link included.
    """

    drafted: int = 0
    accepted: int = 0
    cache_lookups: int = 0
    cache_hits: int = 0
    pushed: int = 0
    early_exits: int = 0
    exit_agreements: int = 0
    exit_layer_sum: int = 0
    draft_s: float = 0.0
    predraft_s: float = 0.0
    verify_s: float = 0.0
    wait_s: float = 0.0

    @property
    def tau(self) -> float:
        """Verified tokens per round (paper 003, Table 3)."""
        return (self.tokens - self.unverified) / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that the target accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of verdicts for which a draft was ready; 1 - r in the paper's notation."""
        return self.cache_hits / self.cache_lookups if self.cache_lookups else 0.0

    @property
    def mean_exit_layer(self) -> float:
        """Mean earliest layer that already had the verdict's outcome ("Avg EE")."""
        return self.exit_layer_sum / self.exit_agreements if self.exit_agreements else 0.0

    def figures(self) -> Mapping[str, float]:
        """Return the counters, times and ratios beyond those of every protocol."""
        return {name: float(getattr(self, name)) for name in _FIGURES}


_FIGURES = (
    "tau",
    "acceptance",
    "hit_rate",
    "unverified",
    "drafted",
    "accepted",
    "cache_hits",
    "cache_lookups",
    "pushed",
    "early_exits",
    "mean_exit_layer",
    "draft_s",
    "verify_s",
    "wait_s",
)
