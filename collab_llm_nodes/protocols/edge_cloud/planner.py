"""Choice of the fastest way of decoding here and now, predicted from what has been measured.

Letters are those of paper 003, Table 3. Seconds per token, in the steady state:

    cloud alone, streaming   T_q(1)
    speculation (SD)         (2 T_c + gamma T_p + T_q) / tau
    co-located               (T_q + gamma T_d) / tau
    push-ahead               (r + e L + m M) / tau
                             r = max(T_q, (gamma + 1) B, (2 T_c + (gamma + 3/2) B) / depth)
                             L = max(0, X + 2 T_c + (gamma + 1/2) B - r)
                             M = max(0, T_q + 2 T_c + gamma T_p + B/2 - r)

SD is the paper's Table 4. Co-located speculation drafts at the verifier, with its own draft model,
and streams the verified tokens, so no round waits for the link (arXiv 2606.25091). T_d is the time
of a draft token there, the waiting for other sessions included, and tau is that of this draft
model; until both are measured, the robot's own stand for them.

With push-ahead a verification follows the other without a pause, unless the draft model is slower:
B is the time of a step that looks ahead (a pass over several continuations, and what they show),
and from one draft to the next there are gamma of them and one that shows what may come of the
draft. Or unless the link is so slow that drafts would have to be further ahead than the configured
depth. A share e of the verdicts is expected only thanks to an early exit, X after the start of the
verification; a share m is unexpected and costs what SD costs. Drafting for both begins after the
pass that is under way, half of it on average.

Here gamma is the mean length of drafts of up to gamma tokens: some end early, with the answer.
Tokens that a guide forces count in tau alone, in each mode alike: no model spends a pass on them.

T_q is what a verification takes, the wait for its turn included: of a verifier that serves many,
the cloud alone pays that per token. Speculation loses to the cloud alone if, roughly,
2 T_c + gamma T_p > (tau - 1) T_q: with a fast server behind a slow link. Then the planner says so
and lets the verifier stream.

Where bytes on the link have a price beside the time that they take, modes are compared by time plus
price; the bytes of a round are measured in each mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.decoding.draft_length import Acceptance, Trials
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Verdict
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.means import Mean

_LEARNING_RATE = 0.05
_EXPLORE_SHARE = 0.01
"""Share of the time spent on trying what seems slower: link, load and text may have changed."""
_EVERY = 16  # answers before another mode than the chosen one is tried again, at least
_SPREAD = 0.5  # standard deviation of the tokens of a round, over their mean: 0.3 to 0.6
_KINDS = ("ar", "sd", "push_ahead", "co_located")
_ROUNDS = 256  # latest rounds, at most, that the acceptance is known by


@dataclass
class Profile:
    """Measurements of the decoding loop on this robot, over this link, with this verifier [s].

    Attributes:
        t_p: a pass of the draft model over one token, and the choice of the next one.
        step: a step that looks ahead: such a pass over several continuations, and all around it.
        t_d: a draft token of the verifier's own draft model, waiting for other sessions included.
        t_q1, t_q: a pass of the target over one token, and over a draft, waiting for it included.
        drafted: tokens of those drafts.
        ends: whether a drafted token ends the answer, and so the draft.
        rtt: from draft to verdict, less what the verifier took (2 T_c); until a round has shown it,
            the first verdict's, which also waits for the prefill.
        acceptance, acceptance_there: of draft tokens that a model chose: the robot's, or the
            verifier's own.
        forced: tokens forced by a guide for each token that a model chose; they need no pass.
        unexpected: verdicts that neither the draft model nor an early exit had suggested.
        by_exit: verdicts that only an early exit had suggested.
        exit_s: from the start of a verification to the exit that is right.
        under_way: from a verdict to the end of the pass that was under way when it came.
        temperature: at which the draft model is as sure of its tokens as they are accepted.
        speculating: the last verdict was on a draft: t_q is newer than t_q1.
    """

    t_p: Mean = field(default_factory=Mean)
    step: Mean = field(default_factory=Mean)
    t_d: Mean = field(default_factory=Mean)
    t_q1: Mean = field(default_factory=Mean)
    t_q: Mean = field(default_factory=Mean)
    drafted: Mean = field(default_factory=Mean)
    ends: Mean = field(default_factory=lambda: Mean(weight=1024))
    rtt: Mean = field(default_factory=Mean)
    acceptance: Acceptance = field(default_factory=Acceptance)
    acceptance_there: Acceptance = field(default_factory=Acceptance)
    forced: Mean = field(default_factory=Mean)
    unexpected: Mean = field(default_factory=lambda: Mean(weight=256))
    by_exit: Mean = field(default_factory=lambda: Mean(weight=256))
    exit_s: Mean = field(default_factory=Mean)
    under_way: Mean = field(default_factory=Mean)
    temperature: float = 1.0
    speculating: bool = False
    _round: int = -1  # of the last verdict
    _run: int | None = None  # draft tokens accepted since the last rejected one; None: unknown
    _run_there: int = 0  # the same of the verifier's own

    def on_pass(self, tokens: int, seconds: float) -> None:
        """Take in a pass of the draft model over ``tokens``."""
        if tokens == 1:
            self.t_p.add(seconds)

    def on_verdict(self, draft: Draft, verdict: Verdict, forced: tuple[int, int] = (0, 0)) -> None:
        """Take in the end of a round.

        Args:
            forced: tokens of the draft, and accepted ones, that a guide forced. They are always
                accepted, so they say nothing of the models.
        """
        took_s = verdict.compute_s + verdict.queue_s
        drafted, accepted = len(draft.tokens) - forced[0], verdict.accepted - forced[1]
        chosen = len(verdict.tokens) - forced[1]
        self.forced.add(forced[1] / max(1, chosen))
        if draft.tokens:
            self.t_q.add(took_s)
            self.drafted.add(drafted)
        else:
            self.t_q1.add(took_s)
        self.speculating = bool(draft.tokens)
        if not verdict.round:
            self._run = 0
        elif verdict.round != self._round + 1:  # another answer's
            self._run = None
        self._round = verdict.round
        self.acceptance.add(self._run, drafted, accepted)
        if accepted < drafted:
            self._run = 0
        elif not draft.tokens:
            self._run = None
        elif self._run is not None:
            self._run += accepted

    def on_co_located(self, gamma: int, verdict: Verdict, forced: int = 0) -> None:
        """Take in a round with up to ``gamma`` draft tokens of the verifier's own draft model.

        Args:
            forced: accepted tokens that a guide forced.
        """
        accepted = min(verdict.accepted - forced, gamma)
        self.forced.add(forced / max(1, len(verdict.tokens) - forced))
        self.t_d.add(verdict.draft_s / gamma)
        self.t_q.add(verdict.compute_s + verdict.queue_s)
        self.drafted.add(gamma)
        self.speculating = True
        if not verdict.round:
            self._run_there = 0
        if not verdict.finished:  # else the draft may have been shorter
            self.acceptance_there.add(self._run_there, gamma, accepted)
        self._run_there = 0 if accepted < gamma else self._run_there + accepted
        self._run = None

    def on_draft(self, tokens: int, gamma: int) -> None:
        """Take in that a draft of up to ``gamma`` tokens has ``tokens``.

        If it has all of them, whether the last one ends the answer cannot be seen.
        """
        for i in range(1, min(tokens, gamma - 1) + 1):
            self.ends.add(float(i == tokens))

    def on_round_trip(self, waited_s: float, verdict: Verdict) -> None:
        """Take in the verdict on a draft that left when its round had come, not ahead."""
        trip_s = max(0.0, waited_s - verdict.compute_s - verdict.queue_s)
        if verdict.round:
            self.rtt.add(trip_s)
        elif not self.rtt.count:
            self.rtt.value = trip_s

    def tokens(self, gamma: int) -> float:
        """Return the mean number of tokens of a draft of up to ``gamma``."""
        return sum((1.0 - self.ends.value) ** i for i in range(gamma))

    @property
    def alone_s(self) -> float:
        """T_q(1): as measured, but no more than a pass over a draft takes if that is newer.

        Load may have been different then; and the first pass of all is slow.
        """
        known = self.t_q1.value
        return min(known, self.t_q.value) if self.speculating else known

    def verify_s(self, tokens: float) -> float:
        """Return T_q of a draft of ``tokens``, on the line through what was measured."""
        if not self.t_q1.count or not self.drafted.value:
            return self.t_q.value
        alone_s = self.alone_s
        return alone_s + tokens * max(0.0, self.t_q.value - alone_s) / self.drafted.value

    def on_outcome(self, *, predicted: bool, exit_s: float | None) -> None:
        """Take in how a verdict had been foreseen; ``exit_s``: None without an exit."""
        by_exit = exit_s is not None and not predicted
        self.by_exit.add(float(by_exit))
        self.unexpected.add(float(exit_s is None and not predicted))
        if by_exit and exit_s is not None:
            self.exit_s.add(min(max(exit_s, 0.0), self.t_q.value))

    def on_belief(self, belief: float, accepted: bool) -> None:
        """Take in if a token stood that was believed to with probability ``belief``."""
        step = math.exp(_LEARNING_RATE * (belief - accepted))
        self.temperature = min(max(self.temperature * step, 0.5), 4.0)

    def tau(self, gamma: int, *, co_located: bool = False) -> float:
        """Return the tokens per round with drafts of ``gamma``."""
        there = co_located and self.t_d.count > 0
        acceptance = self.acceptance_there if there else self.acceptance
        return acceptance.tokens(gamma, self.ends.value) * (1.0 + self.forced.value)


@dataclass(frozen=True)
class Mode:
    """A way of decoding.

    Attributes:
        gamma: longest draft; 0: the verifier decodes alone.
        ahead: with push-ahead.
        co_located: the verifier's own draft model drafts.
    """

    gamma: int
    ahead: bool = False
    co_located: bool = False

    @property
    def kind(self) -> str:
        """``ar``, ``sd``, ``push_ahead`` or ``co_located``."""
        if not self.gamma:
            return "ar"
        if self.co_located:
            return "co_located"
        return "push_ahead" if self.ahead else "sd"

    @property
    def name(self) -> str:
        """``ar``, ``sd(4)`` or ``push_ahead(4)``."""
        return f"{self.kind}({self.gamma})" if self.gamma else self.kind


_SPECULATING = (Mode(1), Mode(1, ahead=True), Mode(1, co_located=True))
"""Kinds of speculation, at one length."""


@dataclass(frozen=True)
class PlannerConfig:
    """Settings of the planner."""

    enabled: bool = setting(False, "Choose how to decode by measurement; else as configured.")
    max_gamma: int = setting(
        8,
        "Longest draft to choose. Lower it for a robot short of memory or time: its drafts for"
        " many outcomes are as long.",
        low=1,
        high=16,
    )
    min_gain: float = setting(
        0.03,
        "Speculate only if it saves this share of the cost, and more than by luck so far. Raise it"
        " where the robot's energy costs more than time.",
        low=0.0,
        high=0.9,
    )
    seconds_per_megabyte: float = setting(
        0.0,
        "Price of a megabyte on the link, beyond the time that it takes: seconds that may be lost"
        " to save one. Raise it where traffic is paid for or others need the link; a stock"
        " server's rounds are kilobytes.",
        low=0.0,
        high=1e6,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class Planner:
    """Chooses a mode for each answer.

    Args:
        gamma: length of drafts while too little is known, and if the planner is not enabled.
        depth: rounds that drafts may be ahead (``AheadConfig.push_depth``).
    """

    def __init__(self, config: PlannerConfig, gamma: int, depth: int) -> None:
        self._trials = Trials[Mode](_EXPLORE_SHARE, _EVERY)
        self.configure(config, gamma, depth)
        self._bias: dict[Mode, Mean] = {}  # of modes that were used: time taken over predicted
        self._bias_of_kind = {kind: Mean(1.0, weight=16) for kind in _KINDS}
        self._bytes: dict[Mode, Mean] = {}  # of a round, both ways
        self._bytes_of_kind = {kind: Mean(weight=16) for kind in _KINDS}
        self.profile = Profile()

    def configure(self, config: PlannerConfig, gamma: int, depth: int) -> None:
        """Take other settings for the answers to come; measurements stay."""
        self._config = config
        self._depth = depth
        self._first = Mode(gamma, ahead=True)

    def on_answer(self, mode: Mode, metrics: EdgeCloudMetrics, later_bytes: int = 0) -> None:
        """Compare the rounds of a complete answer in ``mode`` with what was predicted.

        Args:
            later_bytes: sent and received in the rounds after the first one.
        """
        later = metrics.rounds - 1  # the first one also opens the session
        if later > 0:
            self._bytes_of_kind[mode.kind].add(later_bytes / later)
            self._bytes.setdefault(mode, Mean(weight=16)).add(later_bytes / later)
        predicted = round_seconds(self.profile, mode, self._depth)
        if later > 0 and predicted > 0:
            taken = (metrics.total_s - metrics.time_to_first_token_s) / later
            kind = self._bias_of_kind[mode.kind]
            ratio = taken / predicted
            kind.add(ratio)
            # A new mode starts where its kind is, with the weight of one answer.
            own = self._bias.setdefault(mode, Mean(kind.value, count=1, weight=16))
            own.add(ratio)

    def choose(self, *, co_located: bool = False) -> Mode:
        """Return the mode of the next answer: the fastest, and now and then another, to see.

        First the cloud alone and the configured drafts are measured, the robot's and the
        verifier's. Speculation has to save ``min_gain`` at least, and more than luck may have made
        of the rounds so far. Bytes cost what ``seconds_per_megabyte`` says.

        Args:
            co_located: the verifier has a draft model of its own.
        """
        if not self._config.enabled:
            return self._first
        if not self.profile.t_q1.count:
            return Mode(0)
        if not self.profile.t_q.count:
            return self._first
        if co_located and not self.profile.t_d.count:
            return Mode(self._first.gamma, co_located=True)
        kinds = _SPECULATING if co_located else _SPECULATING[:2]
        gammas = range(1, self._config.max_gamma + 1)
        modes = (replace(kind, gamma=gamma) for kind in kinds for gamma in gammas)
        best = min(modes, key=self.cost_per_token)
        alone = Mode(0)
        gain = max(self._config.min_gain, self._doubt())
        worth = self.cost_per_token(best) <= (1.0 - gain) * self.cost_per_token(alone)
        chosen, other = (best, alone) if worth else (alone, best)
        cost = self.cost_per_token(chosen)
        losses = [
            (rival, self.cost_per_token(rival) - cost)
            for rival in self._rivals(chosen, other, kinds)
        ]
        return self._trials.choose(chosen, cost, losses)

    def _doubt(self) -> float:
        """Relative standard error of tau, from the number of rounds that it is known by."""
        return _SPREAD / math.sqrt(max(1, min(self.profile.drafted.count, _ROUNDS)))

    def _rivals(self, chosen: Mode, other: Mode, kinds: Sequence[Mode]) -> list[Mode]:
        """Return the modes to try: ``other``, twice and half the length, and the other kinds."""
        if not chosen.gamma:
            return [other]
        lengths = (2 * chosen.gamma, chosen.gamma // 2)
        near = [replace(chosen, gamma=g) for g in lengths if 1 <= g <= self._config.max_gamma]
        alike = (replace(kind, gamma=chosen.gamma) for kind in kinds)
        return [other, *near, *(mode for mode in alike if mode != chosen)]

    def cost_per_token(self, mode: Mode) -> float:
        """Predicted time per token, and the price of its bytes [s]."""
        price_s = self._config.seconds_per_megabyte * self.round_bytes(mode) / 1e6
        return self.seconds_per_token(mode) + price_s / self._tau(mode)

    def seconds_per_token(self, mode: Mode) -> float:
        """Predicted time per token; see the module's docstring."""
        return self.round_seconds(mode) / self._tau(mode)

    def _tau(self, mode: Mode) -> float:
        return self.profile.tau(mode.gamma, co_located=mode.co_located)

    def round_bytes(self, mode: Mode) -> float:
        """Bytes of a round, as measured in this mode, or in its kind; 0 while unknown."""
        return self._bytes.get(mode, self._bytes_of_kind[mode.kind]).value

    def round_seconds(self, mode: Mode) -> float:
        """Predicted time per round, corrected by how predictions of it, or its kind, came true."""
        bias = self._bias.get(mode, self._bias_of_kind[mode.kind])
        return bias.value * round_seconds(self.profile, mode, self._depth)


def settings_of(
    mode: Mode, predraft: PreDraftConfig, ahead: AheadConfig
) -> tuple[PreDraftConfig, AheadConfig]:
    """Return the loop's settings in ``mode``: as configured with push-ahead, else no pre-drafts."""
    if mode.ahead:
        return predraft, ahead
    return replace(predraft, max_predrafts=0), replace(ahead, push_window=0)


def round_seconds(p: Profile, mode: Mode, depth: int) -> float:
    """Predicted time of a round in ``mode`` after what ``p`` has measured."""
    if not mode.gamma:
        return p.alone_s
    tokens, pass_s = p.tokens(mode.gamma), p.step.value or p.t_p.value
    drafting, verify_s = tokens * p.t_p.value, p.verify_s(tokens)
    rtt = p.rtt.value
    if mode.co_located:
        return verify_s + mode.gamma * (p.t_d.value if p.t_d.count else p.t_p.value)
    if not mode.ahead:
        return rtt + drafting + verify_s
    drafted = (tokens + 1) * pass_s
    expected = max(verify_s, drafted, (rtt + drafted + pass_s / 2) / depth)
    by_exit = p.exit_s.value + rtt + drafted - pass_s / 2
    unexpected = verify_s + rtt + drafting + pass_s / 2
    return (
        expected
        + p.by_exit.value * max(0.0, by_exit - expected)
        + p.unexpected.value * max(0.0, unexpected - expected)
    )
