"""``collab-llm bench collective``: collective adaptive speculation (paper 002), step by step."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = (
    "drafts",
    "ladder",
    "emulated",
    "lengths",
    "acceptance_by_length",
    "variants",
    "time_lines",
    "pool",
    "sub_domains",
)
"""In this order; ``sub_domains`` is the ladder on each of them."""
QUICK_PARTS = PARTS[:-1]
"""The parts of ``--quick``."""


@dataclass(frozen=True)
class Sizes:
    """The extent of a run.

    Attributes:
        batches: sizes of a batch; the one nearest to the paper's is that of figures with only one.
        prompts: of a run, at least; a short run is a noisy one.
        per_place: prompts of a run for each place of a batch, at least: requests come and go. The
            ladder on the mixed stream takes so many, all else half of them.
        repeats: measured turns, at least 2.
        max_tokens: longest answer.
        lengths: fixed speculation lengths that adaptive ones are compared with.
    """

    batches: tuple[int, ...] = (1, 8, 16, 32)
    prompts: int = 24
    per_place: int = 8
    repeats: int = 4
    max_tokens: int = 128
    lengths: tuple[int, ...] = tuple(range(13))

    def count(self, batch: int, *, half: bool = False) -> int:
        """Return the number of prompts that a run at ``batch`` takes."""
        whole = max(self.prompts, self.per_place * batch)
        return -(-whole // 2) if half else whole


QUICK = Sizes(
    batches=(1, 8),
    prompts=4,
    per_place=4,
    repeats=2,
    max_tokens=32,
    lengths=(0, 2, 4, 8),
)
"""Sizes of ``--quick``: the figures mean little."""
