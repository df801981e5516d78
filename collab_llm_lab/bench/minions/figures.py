"""Figures of the tables: shares with intervals, mean costs, paired comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collab_llm_lab.bench.minions.methods import Answered, truncated, usage_of
from collab_llm_nodes.chat.ledger import PriceTable
from collab_llm_nodes.protocols.minions.jobs import Dropped

_RESAMPLES = 2000
_Z = 1.96


def interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of ``count``."""
    middle = share + _Z**2 / (2 * count)
    reach = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def row(answered: Sequence[Answered], tokens: int, prices: PriceTable) -> dict[str, Any]:
    """Return the figures of a method: shares of all questions, and means per question.

    Args:
        tokens: mean length of a log.
    """
    count = len(answered)
    accuracy = sum(each.right for each in answered) / count
    remote = [usage_of(each, remote=True) for each in answered]
    local = [usage_of(each, remote=False) for each in answered]
    jobs = sum(sum(each.dropped.values()) for each in answered)

    def share(reason: Dropped) -> float:
        return sum(each.dropped.get(reason, 0) for each in answered) / max(1, jobs)

    groups = sorted({each.asked.group for each in answered})
    return {
        "accuracy": accuracy,
        "accuracy_interval": interval(accuracy, count),
        "remote_prefill_tokens": sum(u.prefill for u in remote) / count,
        "remote_decode_tokens": sum(u.decode for u in remote) / count,
        "remote_cached_tokens": sum(u.cached for u in remote) / count,
        "local_tokens": sum(u.prefill + u.decode for u in local) / count,
        "local_cached_tokens": sum(u.cached for u in local) / count,
        "cost_usd": sum(each.cost.usd(prices) for each in answered) / count,
        "rounds": sum(each.rounds for each in answered) / count,
        "wall_s": sum(each.wall_s for each in answered) / count,
        "questions": count,
        "context": tokens,
        "truncated_share": sum(map(truncated, answered)) / count,
        "abstain_share": share(Dropped.ABSTAINED),
        "unsupported_share": share(Dropped.UNSUPPORTED),
        "parse_failures": sum(each.dropped.get(Dropped.UNREADABLE, 0) for each in answered),
        "errors": sum(each.answer is None for each in answered),
        "accuracy_by_class": {
            group: _mean([each.right for each in answered if each.asked.group == group])
            for group in groups
        },
    }


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / max(1, len(values))


def paired(worse: Sequence[Answered], better: Sequence[Answered], seed: int) -> dict[str, Any]:
    """Return the gain in accuracy with its 95 % interval, by bootstrap over the questions.

    ``share_not_better`` is the share of resamples in which there is no gain.
    """
    gains = np.array([b.right - float(w.right) for w, b in zip(worse, better, strict=True)])
    rng = np.random.default_rng(seed)
    drawn = gains[rng.integers(0, len(gains), (_RESAMPLES, len(gains)))].mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {
        "gain": float(gains.mean()),
        "interval": [float(low), float(high)],
        "share_not_better": float((drawn <= 0).mean()),
    }


def break_even(shorter: dict[str, Any], longer: dict[str, Any]) -> float | None:
    """Return the length of a log at which MinionS and remote only have equal remote prefill.

    Both are interpolated linearly.

    Args:
        shorter, longer: rows of ``remote_only`` and ``minions`` at two lengths.

    Returns:
        None if MinionS grows as fast as remote only.
    """

    def excess(rows: dict[str, Any]) -> float:
        name = "remote_prefill_tokens"
        return float(rows["minions"][name] - rows["remote_only"][name])

    x0, x1 = (float(rows["minions"]["context"]) for rows in (shorter, longer))
    slope = (excess(longer) - excess(shorter)) / (x1 - x0)
    return max(0.0, x0 - excess(shorter) / slope) if slope < 0 else None
