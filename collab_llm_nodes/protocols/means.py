"""A mean of what is measured again and again: what several protocols decide by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Mean:
    """A mean that forgets: ``weight`` observations count, older ones fade.

    Attributes:
        value: the mean; before the first observation, what is assumed.
        count: observations so far; what is assumed may count as some.
    """

    value: float = 0.0
    count: int = 0
    weight: float = 64

    def add(self, sample: float) -> None:
        """Take ``sample`` in."""
        self.count += 1
        self.value += (sample - self.value) / min(self.count, self.weight)
