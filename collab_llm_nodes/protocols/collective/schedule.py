"""The settings of the machine: batches, pool, limits."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, fixed
from collab_llm_nodes.errors import ConfigError


@dataclass(frozen=True)
class ScheduleConfig:
    """Batches, the pool between drafting and verification, and limits of memory."""

    draft_batch: int = fixed(
        16,
        "b_SSM: requests drafted side by side. Lower it on a machine short of memory.",
        low=1,
        high=1024,
    )
    target_batch: int = fixed(
        16,
        "b_LLM: requests verified in one pass. Raise it on a GPU, lower it for shorter waits.",
        low=1,
        high=1024,
    )
    pool_high: int = fixed(
        0,
        "Drafts waiting for the target at which drafting pauses; 0: target_batch, as in paper 002.",
        low=0,
        high=65536,
    )
    pool_low: int = fixed(
        0, "Waiting drafts below which drafting resumes; 0: pool_high.", low=0, high=65536
    )
    max_active: int = fixed(
        64, "Requests that hold KV caches at a time; others wait for a place.", low=1, high=4096
    )
    max_waiting: int = fixed(
        256, "Requests that wait for a place; more are refused as BUSY.", low=0, high=65536
    )
    draft_timeout_s: float = fixed(
        5.0,
        "Silence after which a draft model is left out until it answers [s]."
        " Raise it on a slow machine.",
        low=0.001,
        high=600.0,
    )
    vote_every_token: bool = fixed(
        False,
        "Vote after each token, and continue all models from the voted one; else each drafts its"
        " whole length, as in paper 002.",
    )
    ask_all_every: int = fixed(
        64,
        "Rounds of a request after which all models draft and are scored again, as in its first"
        " round (one token); the pauses double. Between, a model that outweighs all others together"
        " drafts alone. 1: all draft whole drafts in every round, as in paper 002.",
        low=1,
        high=65536,
    )
    fill_waits: bool = fixed(
        True,
        "In a pipeline, a target that would wait for drafts reads the prompts of new requests, or"
        " decodes requests that are not being drafted for; else it waits, as in paper 002.",
    )
    paper_faithful: bool = fixed(
        False,
        "Judge sampled drafts by the voted model's own probabilities, as paper 002 prints it. This"
        " CHANGES the law of the output; for comparison only.",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.low > self.high:
            raise ConfigError(
                f"{self.low} is above pool_high, {self.high}",
                field="pool_low",
                remedy="lower it, or leave it 0",
            )

    def asks_all(self, round: int) -> bool:
        """Return True if all models draft in this round of a request, whatever they weigh."""
        pauses, rest = divmod(round, self.ask_all_every)
        return self.ask_all_every == 1 or (rest == 0 and pauses & (pauses + 1) == 0)  # 0, 1, 3, 7

    @property
    def high(self) -> int:
        """The high water mark."""
        return self.pool_high or self.target_batch

    @property
    def low(self) -> int:
        """The low water mark."""
        return self.pool_low or self.high
