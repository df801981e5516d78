"""The side that aggregates next (paper 001, section 5.1), and the time per token it costs. Pure.

``l`` is the side that aggregates and ``r`` the other, as in the paper; c is the time of a pass.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, ranked, setting
from collab_llm_nodes.decoding.aggregation import Pair, Party
from collab_llm_nodes.protocols.dragon.profiler import Estimates

POLICIES = ("auto", "delta_z", "follow", "device", "cloud", "random")

_WORTH_FOLLOWING = 0.9
"""Policy auto follows rejections where that is expected to take less than this share of the time of
the better static side: the estimates are rough, and what is known to be good should stay."""


def per_token(c_l: float, c_r: float, rtt: float, alpha_r: float) -> float:
    """Return the expected time per token while ``l`` aggregates (Eq. 7).

    An accepted draft of r costs nothing but the slower of the two passes. After a rejection, the
    target travels to r, which decodes anew, and its draft travels back.
    """
    return alpha_r * max(c_l, c_r) + (1.0 - alpha_r) * max(c_l, c_r + rtt)


def delta_z(c_l: float, c_r: float, rtt: float, alpha_l: float, alpha_r: float) -> float:
    """Return Z_l - Z_r (Eq. 8); the other side should aggregate if it is positive."""
    if c_l <= c_r - rtt:
        return (1.0 - alpha_r) * rtt
    if c_l <= c_r:
        return (1.0 - alpha_l) * (c_r - c_l) + (alpha_l - alpha_r) * rtt
    if c_l <= c_r + rtt:
        return (1.0 - alpha_r) * (c_r - c_l) + (alpha_l - alpha_r) * rtt
    return (alpha_l - 1.0) * rtt


def per_token_ahead(c_l: float, c_r: float, rtt: float, alpha_l: float, alpha_r: float) -> float:
    """Return the time per token while ``l`` aggregates, counting drafts made meanwhile (ours).

    Eq. 7 lets each token wait for itself. But while l waits for r after a rejection, it drafts on,
    and if these drafts are accepted, r catches up with them at its own pace. Then only the mean
    paces of both sides count. That all of them are accepted is the more likely the fewer they are.
    """
    absorbed = alpha_l ** (1.0 + (c_r + rtt) / c_l) if c_l > 0 else 0.0
    paces = max(c_l, c_r + (1.0 - alpha_r) * rtt)
    return absorbed * paces + (1.0 - absorbed) * per_token(c_l, c_r, rtt, alpha_r)


def per_token_following(c: Pair, rtt: float, alpha: Pair) -> float:
    """Return the expected time per token while the aggregator follows rejections (ours).

    As Eq. 7, by the fate of both drafts, which are taken to be independent. A side that alone is
    rejected decodes anew where it aggregates: at once if it does so already, else as soon as the
    notice is there. ``here`` is the share of time for which a side aggregates.

    Args:
        c, alpha: pass time and acceptance of device and cloud.
    """
    slower = max(c)
    alone = ((1.0 - alpha[0]) * alpha[1], (1.0 - alpha[1]) * alpha[0])
    here = (alone[0] / sum(alone), alone[1] / sum(alone)) if sum(alone) else (1.0, 0.0)
    neither = (1.0 - alpha[0]) * (1.0 - alpha[1])
    moves = here[0] * alone[1] + here[1] * alone[0]
    total = (1.0 - neither) * slower + moves * rtt / 2.0
    for side in (0, 1):
        total += neither * here[side] * max(c[side], c[1 - side] + rtt)
    return total


_HYSTERESIS = 0.05
"""Share of the time per token that a change of sides must save: noise must not move them."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The choice of the side that aggregates."""

    aggregate_on: str = setting(
        "auto",
        "device, cloud: always there; with device, the device sends the query and target tokens"
        " only. delta_z: the side with the shorter expected time per token (Eq. 8); follow: the"
        " side whose draft alone was rejected, so that its new draft need not travel; auto: follow"
        " where that is expected to be clearly shorter, else the better side, as delta_z, but with"
        " drafts counted that are made while waiting; random: for comparison.",
        choices=POLICIES,
        per_request=ranked(("cloud",), ("auto", "delta_z", "follow", "random"), ("device",)),
    )
    seed: int = setting(0, "Of policy random.")

    def __post_init__(self) -> None:
        check_ranges(self)


class Scheduler:
    """One side's choice of the next aggregator. Only the side that aggregates asks it."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config
        self._random = random.Random(config.seed)

    @property
    def pinned(self) -> bool:
        """True if one side always aggregates."""
        return self._config.aggregate_on in ("device", "cloud")

    @property
    def first(self) -> Party:
        """The side that aggregates the first token."""
        return Party.CLOUD if self._config.aggregate_on == "cloud" else Party.DEVICE

    def choose(
        self,
        now_at: Party,
        accepted: tuple[bool, bool],
        estimates: Estimates | None,
        fresh: bool = False,
        sole: Party | None = None,
    ) -> Party:
        """Return the side that aggregates after one aggregation at ``now_at``.

        Args:
            fresh: no draft of either side has been rejected in this answer.
            sole: the only side that has a say; it waits for nobody if it aggregates.
        """
        policy = self._config.aggregate_on
        if self.pinned:
            return self.first
        if sole is not None:
            return sole
        if policy == "random":
            return self._random.choice(list(Party))
        if policy == "follow":
            return _follow(now_at, accepted)
        if estimates is None:
            return now_at
        if policy == "delta_z":
            return self._by_delta_z(now_at, estimates)
        return self._by_all(now_at, accepted, estimates, fresh)

    def _by_delta_z(self, now_at: Party, known: Estimates) -> Party:
        """Return the better static side (Eq. 8), with hysteresis."""
        other = now_at.other
        c, alpha, rtt = known.decode_s, known.acceptance, known.rtt_s
        gain = delta_z(c[now_at], c[other], rtt, alpha[now_at], alpha[other])
        present = per_token(c[now_at], c[other], rtt, alpha[other])
        return other if gain > _HYSTERESIS * present else now_at

    def _by_all(
        self, now_at: Party, accepted: tuple[bool, bool], known: Estimates, fresh: bool
    ) -> Party:
        """Follow rejections where that is clearly shorter, else return the better static side.

        The better static side also begins: as long as no draft was rejected, a move costs nothing,
        since both sides draft on meanwhile. Behind a rejection it costs half a round trip.
        """
        c, alpha, rtt = known.decode_s, known.acceptance, known.rtt_s
        static = [
            per_token_ahead(c[side], c[side.other], rtt, alpha[side], alpha[side.other])
            for side in Party
        ]
        gain = static[now_at] - static[now_at.other]
        follows = per_token_following(c, rtt, alpha) < _WORTH_FOLLOWING * min(static)
        if follows and (sum(accepted) == 1 or not fresh):
            return _follow(now_at, accepted)
        return now_at.other if gain > _HYSTERESIS * static[now_at] else now_at


def _follow(now_at: Party, accepted: tuple[bool, bool]) -> Party:
    return Party(accepted.index(False)) if sum(accepted) == 1 else now_at
