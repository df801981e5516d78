"""A running mean, by which several protocols decide."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Mean:
    """A running mean of about the last ``weight`` observations.

    Attributes:
        value: the mean; before the first observation, an assumption.
        count: number of observations; an assumption may count as some.
    """

    value: float = 0.0
    count: int = 0
    weight: float = 64

    def add(self, sample: float) -> None:
        """Add an observation."""
        self.count += 1
        self.value += (sample - self.value) / min(self.count, self.weight)
