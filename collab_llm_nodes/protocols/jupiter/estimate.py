"""Predicted times of stages on devices: prefill by the flow shop, and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.protocols.jupiter.makespan import Work, decode_s, makespan
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.profile import Profile, Seconds, transfer_s

Tokens = NDArray[np.int64]
TOKEN_BYTES = 4
"""A token id on the wire."""


class Estimate:
    """The pipeline of ``placements`` as its profile foresees it."""

    def __init__(self, profile: Profile, placements: Sequence[Placement]) -> None:
        self.placements = tuple(placements)
        self._model = profile.model
        self._devices = [profile.device(part.device) for part in placements]
        self._links = [*pairwise(self._devices)]
        self._latency = [transfer_s(a, b, 0)[1] for a, b in self._links]
        last, first = self._devices[-1], self._devices[0]
        self._back = 0.0 if first is last else transfer_s(last, first, TOKEN_BYTES)[1]

    def stages(self, x: Tokens, y: Tokens, rows: Tokens) -> Seconds:
        """Return the times of a pass of ``x`` tokens behind ``y``, a row for each stage."""
        last = len(self.placements) - 1
        return np.stack(
            [
                device.stage(
                    part.last - part.first, x, y, first=m == 0, rows=rows if m == last else 0
                )
                for m, (part, device) in enumerate(zip(self.placements, self._devices, strict=True))
            ]
        )

    def links(self, x: Tokens) -> Seconds:
        """Return how long the states of ``x`` tokens occupy each link, a row for each."""
        size = np.asarray(x) * self._model.state_bytes
        times = [transfer_s(a, b, size)[0] for a, b in self._links]
        return np.stack(times) if times else np.zeros((0, *np.shape(x)))

    def slowest(self, x: Tokens, y: Tokens) -> Seconds:
        """Return h of Eq. 2: the time at the slowest stage or link."""
        stages: Seconds = self.stages(x, y, np.zeros_like(x)).max(0)
        return np.maximum(stages, self.links(x).max(0, initial=0.0))

    def work(self, lengths: Tokens) -> Work:
        """Return the flow shop of a prompt in sub-sequences of ``lengths`` [k, ...].

        Behind the last one there are logits, of one token. Empty ones at the end count nothing.
        """
        end = lengths.cumsum(0)
        rows = ((end == end[-1]) & (lengths > 0)).astype(np.int64)
        stage_s = self.stages(lengths, end - lengths, rows)
        links = self.links(lengths)
        return Work(stage_s.swapaxes(0, 1), links.swapaxes(0, 1), self._latency)

    def prefill_s(self, lengths: Tokens) -> Seconds:
        """Return the time to the first token, at the first device, for lengths [k, ...]."""
        return makespan(self.work(lengths)) + self._back

    def decode_s(self, tokens: int, before: int, lanes: int, rounds: float) -> float:
        """Return the time of ``rounds`` passes of ``tokens`` tokens of each of ``lanes`` lanes.

        Args:
            tokens: the last token and those drafted; there are logits behind each, and the drafting
                heads guess as many again.
            before: tokens of a lane so far.
        """
        x = np.array(tokens)
        stage_s = self.stages(x, np.array(before), 2 * x - 1)
        return decode_s(stage_s, self.links(x), sum(self._latency) + self._back, lanes, rounds)
