"""One metrics record for every protocol: counters that are summed, ratios that are derived."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class GenerationMetrics:
    """What one generation cost (paper 003, section 4.2). Times in seconds, sizes in bytes.

    Attributes:
        rounds: verifications by the target (its forward passes after the prefill).
        tokens: tokens of the answer; unverified: how many of them only the draft model stands for.
        drafted / accepted: draft tokens sent to, and accepted by, the target.
        cache_lookups / cache_hits: verdicts that a draft follows, and those for which it was ready.
        pushed: drafts sent ahead of the verdicts they depended on.
        early_exits: early exits received.
        exit_agreements / exit_layer_sum: rounds in which some exit had the verdict's outcome, and
            the sum of the earliest such layers ("Avg EE" of the paper is their quotient).
        time_to_first_token_s, total_s: from the request.
        draft_s: time spent drafting while the verifier waited; predraft_s: while it worked.
        verify_s: the verifier's own compute time; wait_s: waiting for it, link included.
    """

    rounds: int = 0
    tokens: int = 0
    unverified: int = 0
    drafted: int = 0
    accepted: int = 0
    cache_lookups: int = 0
    cache_hits: int = 0
    pushed: int = 0
    early_exits: int = 0
    exit_agreements: int = 0
    exit_layer_sum: int = 0
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0
    draft_s: float = 0.0
    predraft_s: float = 0.0
    verify_s: float = 0.0
    wait_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def tau(self) -> float:
        """Verified tokens per round (paper 003, Table 3)."""
        return (self.tokens - self.unverified) / self.rounds if self.rounds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of verdicts for which a draft was ready; 1 - r in the paper's notation."""
        return self.cache_hits / self.cache_lookups if self.cache_lookups else 0.0

    @property
    def mean_exit_layer(self) -> float:
        """Mean earliest layer that already had the verdict's outcome ("Avg EE")."""
        return self.exit_layer_sum / self.exit_agreements if self.exit_agreements else 0.0

    def add(self, other: GenerationMetrics) -> None:
        """Sum ``other`` into this record."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
