"""The time that sub-sequences take through a pipeline: an exact flow shop with communication.

Every sub-sequence visits the stages in order; a stage and a link serve one at a time, in the order
of the sequence. So the end of sub-sequence i at machine m is

    C(i, m) = max(C(i - 1, m), C(i, m - 1)) + p(i, m)

where the machines are stages and the links between them in turn. A link delays what it has sent by
its latency, which occupies nobody. Eq. 4 of paper 004 is the special case of equal stages without
communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.protocols.jupiter.profile import Seconds


@dataclass(frozen=True)
class Work:
    """Times of k sub-sequences in N stages. Further axes, if any, are independent cases.

    Attributes:
        stage_s: [k, N, ...] in the stages; all 0 for a sub-sequence that is not there.
        link_s: [k, N - 1, ...] on the links.
        latency_s: [N - 1] of the links.
    """

    stage_s: Seconds
    link_s: Seconds
    latency_s: Sequence[float]


def ends(work: Work) -> tuple[Seconds, Seconds]:
    """Return when each sub-sequence leaves each stage [k, N, ...] and each link [k, N - 1, ...]."""
    stage_end, link_end = np.zeros_like(work.stage_s), np.zeros_like(work.link_s)
    k, stages = work.stage_s.shape[:2]
    for i in range(k):
        for m in range(stages):
            ready = link_end[i, m - 1] + work.latency_s[m - 1] if m else 0.0
            free = stage_end[i - 1, m] if i else 0.0
            stage_end[i, m] = np.maximum(ready, free) + work.stage_s[i, m]
            if m < stages - 1:
                free = link_end[i - 1, m] if i else 0.0
                link_end[i, m] = np.maximum(stage_end[i, m], free) + work.link_s[i, m]
    return stage_end, link_end


def makespan(work: Work) -> Seconds:
    """Return the time from the start to the end of the last sub-sequence in the last stage."""
    last: Seconds = ends(work)[0][-1, -1]
    return last


def paper_latency(h: Seconds, stages: int) -> Seconds:
    """Return Eq. 4: the sum of the slowest stage's times ``h`` [k, ...], and the pipeline's fill.

    Exact if all stages take ``h`` and links take nothing.
    """
    total: Seconds = h.sum(0) + (stages - 1) * h.max(0)
    return total


def decode_s(
    stage_s: Seconds, link_s: Seconds, latency_s: float, lanes: int, rounds: float
) -> float:
    """Return the time of ``rounds`` passes of each of ``lanes`` lanes, one after the other.

    A lane's next pass begins when its last one has come back to the first stage. In the first round
    lanes arrive one behind the other, as fast as the slowest machine lets them. After that, that
    machine serves all lanes in turn, and no lane is faster than its own way around. Exact for
    constant times.

    Args:
        stage_s, link_s: one pass of one lane in each stage, and on each link.
        latency_s: delays of all links together, the one back as well.
        rounds: at least 1; a fraction is that share of a round.
    """
    around = float(stage_s.sum() + link_s.sum()) + latency_s
    slowest = float(max(stage_s.max(), link_s.max(initial=0.0)))
    first = around + (lanes - 1) * slowest
    return first + (rounds - 1) * max(around, lanes * slowest)


Span = tuple[int, float, float]
"""A sub-sequence with the start and the end of its time at a machine [s]."""


def timeline(work: Work) -> tuple[list[list[Span]], list[list[Span]]]:
    """Return the spans of each stage and of each link, for a picture; of one case."""
    stage_end, link_end = ends(work)

    def spans(end: Seconds, taken: Seconds) -> list[list[Span]]:
        begin: NDArray[np.float64] = end - taken
        return [
            [(i, float(begin[i, m]), float(end[i, m])) for i in range(len(end))]
            for m in range(end.shape[1])
        ]

    return spans(stage_end, work.stage_s), spans(link_end, work.link_s)
