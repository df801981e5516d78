"""The timeline of speculative aggregation as plain recurrences, and an answer as a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from collab_llm_nodes.decoding.aggregation import AggregationLaw, Party

Model = Callable[[Party, tuple[int, ...]], tuple[np.ndarray, float]]


def aggregated_at(
    accepted: Sequence[tuple[bool, bool]],
    judges: Sequence[int],
    decode_s: tuple[float, float],
    trans_s: tuple[float, float],
    max_ahead: int,
) -> list[float]:
    """Return the time at which each position is judged.

    Args:
        accepted: [positions] drafts of device and cloud that are accepted.
        judges: [positions] the side that judges each.
        trans_s: delay of a message from device, from cloud.
    """
    made: list[list[float]] = [[], []]  # [side][position] end of the pass
    judged: list[float] = []
    last_judge = [-math.inf, -math.inf]  # of each side: when it last judged

    def knows(side: int, position: int) -> float:
        """Time at which ``side`` knows the target at ``position``."""
        if position < 0:
            return 0.0
        judge = judges[position]
        return judged[position] + (0.0 if judge == side else trans_s[judge])

    for t, judge in enumerate(judges):
        ready = knows(judge, t - 1)
        for side in (0, 1):
            anew = t == 0 or not accepted[t - 1][side]
            begin = knows(side, t - 1) if anew else made[side][t - 1]
            begin = max(begin, knows(side, t - max_ahead))
            made[side].append(begin + decode_s[side])
            there = made[side][t]
            if side != judge:
                there = max(there, last_judge[side]) + trans_s[side]
            ready = max(ready, there)
        judged.append(ready)
        last_judge[judge] = ready
    return judged


def plain_answer(
    law: AggregationLaw, model: Model, eos: frozenset[int], max_tokens: int
) -> tuple[int, ...]:
    """Return the answer of two sides that synchronise after each token."""
    answer: tuple[int, ...] = ()
    while len(answer) < max_tokens and not (answer and answer[-1] in eos):
        drafts = [law.propose(*model(side, answer), len(answer), side) for side in Party]
        answer += (law.judge((drafts[0], drafts[1]), len(answer)).token,)
    return answer
