"""Predicted times of a pipeline: prefill by an exact flow shop with communication, and decoding.

Every sub-sequence visits the stages in order. A stage or a link serves one sub-sequence at a time,
in their order, so the end of sub-sequence i at machine m is

    C(i, m) = max(C(i - 1, m), C(i, m - 1)) + p(i, m)

where stages and the links between them take turns as machines. The latency of a link delays a
message without occupying the link. Eq. 4 of paper 004 is the special case of equal stages without
communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.profile import Profile, Seconds, transfer_s


@dataclass(frozen=True)
class FlowShop:
    """Times of k sub-sequences in N stages. Further axes are independent cases.

    Attributes:
        stage_s: [k, N, ...] in the stages; 0 for padding.
        link_s: [k, N - 1, ...] on the links.
        latency_s: [N - 1] of the links.
    """

    stage_s: Seconds
    link_s: Seconds
    latency_s: Sequence[float]


def end_times(shop: FlowShop) -> tuple[Seconds, Seconds]:
    """Return when each sub-sequence leaves each stage [k, N, ...] and each link [k, N - 1, ...]."""
    stage_end, link_end = np.zeros_like(shop.stage_s), np.zeros_like(shop.link_s)
    k, stages = shop.stage_s.shape[:2]
    for i in range(k):
        for m in range(stages):
            ready = link_end[i, m - 1] + shop.latency_s[m - 1] if m else 0.0
            free = stage_end[i - 1, m] if i else 0.0
            stage_end[i, m] = np.maximum(ready, free) + shop.stage_s[i, m]
            if m < stages - 1:
                free = link_end[i - 1, m] if i else 0.0
                link_end[i, m] = np.maximum(stage_end[i, m], free) + shop.link_s[i, m]
    return stage_end, link_end


def makespan(shop: FlowShop) -> Seconds:
    """Return the time from the start to the end of the last sub-sequence in the last stage."""
    last: Seconds = end_times(shop)[0][-1, -1]
    return last


def paper_latency(h: Seconds, stages: int) -> Seconds:
    """Return Eq. 4: the sum of the slowest stage's times ``h`` [k, ...], and the pipeline's fill.

    Exact for equal stages and free links.
    """
    total: Seconds = h.sum(0) + (stages - 1) * h.max(0)
    return total


def decode_s(
    stage_s: Seconds, link_s: Seconds, latency_s: float, lanes: int, rounds: float
) -> float:
    """Return the time of ``rounds`` passes of each of ``lanes`` lanes.

    A lane's next pass begins when the result of its last one has arrived at the first stage. In the
    first round lanes leave one after the other, at the pace of the slowest machine. From then on
    each round takes as long as one lane's circuit, or all lanes in the slowest machine. Exact for
    constant times.

    Args:
        stage_s, link_s: one pass of one lane in each stage, and on each link.
        latency_s: delays of all links together, including the return.
        rounds: at least 1, may be fractional.
    """
    around = float(stage_s.sum() + link_s.sum()) + latency_s
    slowest = float(max(stage_s.max(), link_s.max(initial=0.0)))
    first = around + (lanes - 1) * slowest
    return first + (rounds - 1) * max(around, lanes * slowest)


Span = tuple[int, float, float]
"""A sub-sequence, and its start and end at a machine [s]."""


def timeline(shop: FlowShop) -> tuple[list[list[Span]], list[list[Span]]]:
    """Return the spans of each stage and of each link; for one case only."""
    stage_end, link_end = end_times(shop)

    def spans(end: Seconds, taken: Seconds) -> list[list[Span]]:
        begin: NDArray[np.float64] = end - taken
        return [
            [(i, float(begin[i, m]), float(end[i, m])) for i in range(len(end))]
            for m in range(end.shape[1])
        ]

    return spans(stage_end, shop.stage_s), spans(link_end, shop.link_s)


Tokens = NDArray[np.int64]
TOKEN_BYTES = 4
"""A token id on the wire."""


class Estimate:
    """Predicted times of a pipeline of ``placements``."""

    def __init__(self, profile: Profile, placements: Sequence[Placement]) -> None:
        self.placements = tuple(placements)
        self._model = profile.model
        self._devices = [profile.device(part.device) for part in placements]
        self._links = [*pairwise(self._devices)]
        self._latency = [transfer_s(a, b, 0)[1] for a, b in self._links]
        last, first = self._devices[-1], self._devices[0]
        self._back = 0.0 if first is last else transfer_s(last, first, TOKEN_BYTES)[1]

    def stages(self, x: Tokens, y: Tokens, rows: Tokens) -> Seconds:
        """Return the times of a pass of ``x`` tokens after ``y`` others, one row per stage."""
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
        """Return how long the states of ``x`` tokens occupy each link, one row per link."""
        size = np.asarray(x) * self._model.state_bytes
        times = [transfer_s(a, b, size)[0] for a, b in self._links]
        return np.stack(times) if times else np.zeros((0, *np.shape(x)))

    def slowest(self, x: Tokens, y: Tokens) -> Seconds:
        """Return h of Eq. 2: the time at the slowest stage or link."""
        stages: Seconds = self.stages(x, y, np.zeros_like(x)).max(0)
        return np.maximum(stages, self.links(x).max(0, initial=0.0))

    def flow_shop(self, lengths: Tokens) -> FlowShop:
        """Return the flow shop of a prompt in sub-sequences of ``lengths`` [k, ...].

        The last one ends in one row of logits. Empty ones at the end are padding.
        """
        end = lengths.cumsum(0)
        rows = ((end == end[-1]) & (lengths > 0)).astype(np.int64)
        stage_s = self.stages(lengths, end - lengths, rows)
        links = self.links(lengths)
        return FlowShop(stage_s.swapaxes(0, 1), links.swapaxes(0, 1), self._latency)

    def prefill_s(self, lengths: Tokens) -> Seconds:
        """Return the time until the first token is at the first device, for lengths [k, ...]."""
        return makespan(self.flow_shop(lengths)) + self._back

    def decode_s(self, tokens: int, before: int, lanes: int, rounds: float) -> float:
        """Return the time of ``rounds`` passes of ``tokens`` tokens of each of ``lanes`` lanes.

        Args:
            tokens: the newest token and the draft; each has logits, and the drafting heads guess as
                many again.
            before: cached tokens of a lane.
        """
        x = np.array(tokens)
        stage_s = self.stages(x, np.array(before), 2 * x - 1)
        return decode_s(stage_s, self.links(x), sum(self._latency) + self._back, lanes, rounds)
