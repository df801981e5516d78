"""The laws of speculative aggregation (paper 001, section 4): two sides' drafts, one target token.

Device and cloud each draft a token of their own distribution p_d and p_c. The target distribution
is the mixture eta_d p_d + eta_c p_c (Eq. 4). Two laws draw the target token from it exactly:

- ``shared``: drafts and target are argmax(log p + noise) with the same keyed Gumbel noise. The
  target token is a function of the mixture and the position, whatever the drafts are.
- ``coin``: each side's draft is judged against the mixture as in speculative decoding, which gives
  two tokens; a coin that shows the device with probability ``gamma`` takes one (Theorem 4.2).

Both treat the sides as device and cloud, never as local and remote, and all randomness is keyed by
position. So the answer does not depend on the side that aggregates.

A side without a say (log weight -inf) has weight zero. The mixture is then the other side's own
distribution, and the target token that side's draft: no draft of the first is needed.

The printed rule rejects the draft of side s with eta_s (1 - p_other / p_s). The proof (A.2) needs
eta_other there, as judging against the mixture gives. The printed rule draws from the
mixture with the two shares swapped instead: ``paper_faithful`` does so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.config import ANY, LOWER, check_ranges, setting
from collab_llm_nodes.decoding.rejection import (
    Draws,
    KeyedDraws,
    verify_token,
)
from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SamplingConfig,
    SparseDistribution,
    distribution,
    to_wire,
)
from collab_llm_nodes.errors import ConfigError, InvalidInput

MOST_LOG_WEIGHT = 1.1e4
"""Bound of log h of Eq. 4: of scores up to 1, at the lowest temperature of a retrieval."""

Probabilities = NDArray[np.float64]
Pair = tuple[float, float]
Both = tuple[Probabilities, Probabilities]


class Party(IntEnum):
    """One of the two sides; as an index, the order in which pairs are written."""

    DEVICE = 0
    CLOUD = 1

    @property
    def other(self) -> Party:
        """The other side."""
        return Party(1 - self)


@dataclass(frozen=True)
class AggregationConfig:
    """The law, and the part of a distribution that is kept."""

    law: str = setting(
        "shared",
        "shared: drafts and target take the same noise, which accepts most; coin: two chains of"
        " rejection sampling and a coin between them, as in paper 001. Both are exact.",
        choices=("shared", "coin"),
        per_request=ANY,
    )
    gamma: float = setting(
        0.5,
        "Law coin: probability that the device's chain gives the token. Higher: more of the"
        " device's drafts are accepted, fewer of the cloud's.",
        low=0.0,
        high=1.0,
        per_request=ANY,
    )
    top_p: float = setting(
        0.8,
        "Each side keeps its most probable tokens with this mass, and forgets the others, before"
        " anything is drawn; 1 keeps all. This bounds the message of a draft.",
        low=0.01,
        high=1.0,
        per_request=LOWER,
    )
    max_support: int = setting(
        1024,
        "Tokens that a side keeps at most. Lower it where less may leave the robot.",
        low=1,
        high=1 << 20,
        per_request=LOWER,
    )
    paper_faithful: bool = setting(
        False,
        "Law coin with the rejection rule as printed in paper 001. Not exact: it swaps the weights"
        " of the two sides.",
        per_request=ANY,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.paper_faithful and (self.law != "coin" or self.gamma != 0.5):
            raise ConfigError(
                "the printed rule belongs to law coin with gamma 0.5",
                field="paper_faithful",
                remedy="set law: coin and gamma: 0.5, or leave it off",
            )


@dataclass(frozen=True)
class SideDraft:
    """One side's draft of the token at one position.

    Attributes:
        token: drawn from ``kept``.
        kept: the side's distribution, truncated and rounded: the same numbers on both sides.
        log_weight: log h of Eq. 4, a float32 number; -inf: the side has no say.

    Raises:
        InvalidInput: the weight is no weight, or the token cannot have been drawn (both may come
            from a peer).
    """

    token: int
    kept: SparseDistribution
    log_weight: float

    def __post_init__(self) -> None:
        if not self.log_weight <= MOST_LOG_WEIGHT:  # true for NaN
            raise InvalidInput(
                f"is {self.log_weight}", field="log_weight", remedy="a logarithm, or -inf: Eq. 4"
            )
        if self.token not in self.kept.ids:
            raise InvalidInput(
                f"token {self.token} has probability 0 in its own distribution",
                field="token",
                remedy="draw it from the distribution that is sent",
            )


Drafts = tuple[SideDraft, SideDraft]


@dataclass(frozen=True)
class Judgement:
    """The target token, and whether the two drafts were accepted.

    Attributes:
        accepted: the draft of device, of cloud, is the target token.
        expected: probability of that before the drafts were drawn (Eq. 5, corrected).
    """

    token: int
    accepted: tuple[bool, bool]
    expected: Pair


_CHAINS = (("draft", "accept", "recover"), ("draft_cloud", "accept_cloud", "recover_cloud"))


@dataclass(frozen=True)
class AggregationLaw:
    """One answer's law; equal on both sides.

    Attributes:
        temperature: the mixture is raised to 1/temperature and normalised; 0 is greedy.
        seed: key of all random streams.
        vocab_size: token ids are below this.
        draws: another source of randomness, for enumeration.
        most_log_weight: bound of log h on both sides, whatever the documents.
    """

    config: AggregationConfig
    vocab_size: int
    temperature: float = 1.0
    seed: int = 0
    draws: Draws | None = None
    most_log_weight: float = MOST_LOG_WEIGHT

    def propose(
        self, p: NDArray[np.floating[Any]], log_weight: float, position: int, party: Party
    ) -> SideDraft:
        """Draw the draft of ``party`` for ``position`` from its distribution ``p`` [V].

        It is truncated, renormalised, rounded to fp16 and renormalised first: the draft is drawn
        of exactly the distribution that is sent.

        Raises:
            ModelError: ``p`` is no distribution.
        """
        with np.errstate(divide="ignore", invalid="ignore"):  # log 0; of less, it is NaN
            logits = np.log(np.array(p, np.float64))
        kept = distribution(logits, SamplingConfig(1.0, top_p=self.config.top_p))
        sent = to_wire(kept, self.config.max_support)
        purpose = "gumbel" if self.config.law == "shared" else _CHAINS[party][0]
        token = self._pick(self._tempered(sent), position, purpose)
        return SideDraft(token, sent, float(np.float32(log_weight)))

    def check(self, draft: SideDraft) -> None:
        """Refuse a draft of the other side that cannot be judged.

        Raises:
            InvalidInput: an id is outside the vocabulary, the token cannot have been drawn, or the
                weight is larger than any document can give.
        """
        if draft.log_weight > self.most_log_weight:
            raise InvalidInput(
                f"is {draft.log_weight:.3g}, at most {self.most_log_weight:.3g} can be",
                field="log_weight",
                remedy="weigh documents by Eq. 4, with the scorer that both sides name",
            )
        if not self._tempered(draft.kept)[draft.token]:
            raise InvalidInput(
                f"token {draft.token} has probability 0 at temperature {self.temperature:g}",
                field="token",
                remedy="use one temperature on both sides",
            )

    def judge(self, drafts: Drafts, position: int) -> Judgement:
        """Return the target token at ``position``, given the drafts of device and cloud.

        Raises:
            InvalidInput: an id is outside the vocabulary, or a token cannot have been drawn.
        """
        own = (self._tempered(drafts[0].kept), self._tempered(drafts[1].kept))
        p = self.mixture(drafts)
        if self.config.law == "shared":
            token = self._pick(p, position, "gumbel")
            expected = (shared_acceptance(own[0], p), shared_acceptance(own[1], p))
        else:
            token = self._toss(drafts, own, p, position)
            expected = coin_acceptance(own, p, self._gamma(drafts))
        return Judgement(token, (drafts[0].token == token, drafts[1].token == token), expected)

    def mixture(self, drafts: Drafts) -> Probabilities:
        """Return the distribution [V] of the target token, for the drafts of device and cloud."""
        mixed = np.zeros(self.vocab_size)
        eta = shares(drafts[0].log_weight, drafts[1].log_weight)
        if self.config.paper_faithful and only_voice(drafts) is None:
            eta = eta[::-1]
        for draft, share in zip(drafts, eta, strict=True):
            mixed[draft.kept.ids] += share * draft.kept.law
        return _raised(mixed, self.temperature)

    def _tempered(self, kept: SparseDistribution) -> Probabilities:
        """Return the distribution [V] of a side's drafts."""
        if kept.ids[-1] >= self.vocab_size:
            raise InvalidInput(
                f"id {kept.ids[-1]} is outside the vocabulary of {self.vocab_size}",
                field="kept.ids",
                remedy="use one tokenizer on both sides",
            )
        p = np.zeros(self.vocab_size)
        p[kept.ids] = kept.law
        return _raised(p, self.temperature)

    def _gamma(self, drafts: Drafts) -> float:
        """Return the probability that the coin shows the device: never a side without a say."""
        voice = only_voice(drafts)
        return self.config.gamma if voice is None else float(voice is Party.DEVICE)

    def _pick(self, p: Probabilities, position: int, purpose: str) -> int:
        if self.temperature == 0:
            return int(p.argmax())
        draws = self.draws or KeyedDraws(self.seed)
        return draws.pick(Distribution.from_dense(p), position, purpose)

    def _toss(self, drafts: Drafts, own: Both, target: Probabilities, position: int) -> int:
        """Return the token of the chain that the coin shows (Algorithm 1).

        The other chain need not be followed: its token would be thrown away.
        """
        draws = self.draws or KeyedDraws(self.seed)
        device = draws.accept(self._gamma(drafts), position, "coin")
        party = Party.DEVICE if device else Party.CLOUD
        token, q = drafts[party].token, own[party]
        if not q[token]:
            raise InvalidInput(
                f"token {token} has probability 0 at temperature {self.temperature:g}",
                field="token",
                remedy="use one temperature on both sides",
            )
        ratio = Distribution.from_dense(target), token, Distribution.from_dense(q)
        return verify_token(*ratio, position, draws, _CHAINS[party][1:])


def only_voice(drafts: Drafts) -> Party | None:
    """Return the only side that has a say; None: both have one, or neither."""
    silent = [draft.log_weight == -math.inf for draft in drafts]
    return Party(silent.index(False)) if sum(silent) == 1 else None


def shares(log_device: float, log_cloud: float) -> Pair:
    """Return eta of device and cloud, from log h of both (Appendix A.1).

    Without documents on both sides the two count alike: each has the plain model's distribution.
    """
    if log_device == log_cloud:
        return 0.5, 0.5
    top = max(log_device, log_cloud)
    device, cloud = math.exp(log_device - top), math.exp(log_cloud - top)
    return device / (device + cloud), cloud / (device + cloud)


def coin_acceptance(own: Both, target: Probabilities, gamma: float) -> Pair:
    """Return the probability that each side's draft is accepted under the law coin.

    Eq. 5 with its second sum over p_s p_target, not p_l p_r: the other chain gives a token that is
    distributed as the target, independent of this side's draft.

    Args:
        own: distributions [V] of which device and cloud drew.
        target: [V], the mixture.
    """

    def of(q: Probabilities, own_chain: float) -> float:
        return float(own_chain * np.minimum(q, target).sum() + (1.0 - own_chain) * (q @ target))

    return of(own[0], gamma), of(own[1], 1.0 - gamma)


def shared_acceptance(q: Probabilities, target: Probabilities) -> float:
    """Return the probability that picks of ``q`` and ``target`` [V] with the same noise agree.

    Both pick x with probability 1 / sum_y max(q_y / q_x, target_y / target_x): each ratio is the
    rate at which y beats x in one of the two. Sorted by q / target, the sum splits into a part
    where the first is the larger and a part where the second is: O(k log k).
    """
    both = np.flatnonzero((q > 0) & (target > 0))
    if not len(both):
        return 0.0
    support = np.flatnonzero((q > 0) | (target > 0))
    with np.errstate(divide="ignore", over="ignore"):
        ratio = q[support] / target[support]  # inf where target is 0, or nearly so
    order = support[np.argsort(ratio, kind="stable")]
    below = np.concatenate(([0.0], np.cumsum(target[order])))  # target mass of smaller ratios
    above = np.concatenate((np.cumsum(q[order][::-1])[::-1], [0.0]))  # q mass from here on
    place = np.empty(len(q), np.intp)
    place[order] = np.arange(len(order))
    at = place[both]
    with np.errstate(over="ignore"):  # rare picks hardly ever agree
        return float((1.0 / (above[at] / q[both] + below[at] / target[both])).sum())


def _raised(p: Probabilities, temperature: float) -> Probabilities:
    """Return ``p`` ** (1 / temperature), normalised; greedy is one-hot, the lower id in a tie."""
    if temperature == 1:
        return p / p.sum()
    if temperature == 0:
        one_hot = np.zeros(len(p))
        one_hot[p.argmax()] = 1.0
        return one_hot
    raised = np.zeros(len(p))
    support = p.nonzero()[0]
    logs = np.log(p[support])
    with np.errstate(over="ignore"):  # by a temperature near 0, all but the largest become -inf
        raised[support] = np.exp((logs - logs.max()) / temperature)
    return raised / raised.sum()
