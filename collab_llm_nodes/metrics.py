"""The cost of a generation by any protocol: counters that are summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class GenerationMetrics:
    """Cost of one generation, or of several. Times in seconds, sizes in bytes.

    A protocol with more figures derives its own record from this one and names them in
    :meth:`figures`.

    Attributes:
        rounds: rounds of the protocol, such as verifications by the target.
        tokens: tokens of the answer; unverified: those of them that the target has not verified.
        time_to_first_token_s, total_s: from the request.
        bytes_up, bytes_down: sent to, and received from, other machines.
    """

    rounds: int = 0
    tokens: int = 0
    unverified: int = 0
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0

    def figures(self) -> Mapping[str, float]:
        """Return the figures that only this protocol has, by name."""
        return {}

    def add(self, other: Any) -> None:
        """Sum ``other``, a record of the same type, into this one."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
