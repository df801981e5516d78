"""Times of a pair on this machine, and the mode of decoding that pays over a given link.

Single passes are timed, and the pair answers a few questions in this process, which shows how often
drafts and predictions are right. The planner's own formulas then predict each mode.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.decoding.draft_length import Acceptance
from collab_llm_nodes.decoding.sampling import SamplingConfig, distributions_of
from collab_llm_nodes.engine.device import synchronize
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.inspection import picture
from collab_llm_nodes.errors import DeadlineExceeded, within
from collab_llm_nodes.models.loading import LoadedModel, TargetConfig, load, with_exits
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, encode
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.codec import encode_client, encode_server
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Verdict
from collab_llm_nodes.protocols.edge_cloud.pair import PairReport
from collab_llm_nodes.protocols.edge_cloud.planner import (
    Mode,
    PlannerConfig,
    Profile,
    round_seconds,
)
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.means import Mean

QUESTIONS = (
    "What is in front of you? Answer in one sentence.",
    "Describe where the floor is free and where it is not.",
    "List three things that a robot has to check before it moves.",
    "Write a short report about this place for somebody who has never seen it.",
)
_ANSWER = 32
"""Tokens of an answer, at most."""
_FRAMES = 120
"""Bytes around a message: those of gRPC, HTTP/2, TLS, TCP and IP."""
_PREFILLS, _PASSES = 3, 9
"""Repetitions of what is timed."""


@dataclass(frozen=True)
class Link:
    """A link between a robot and its verifier."""

    rtt_ms: float = setting(60.0, "Round trip of a small message [ms].", low=0.0, high=60_000.0)
    up_mbit: float = setting(20.0, "Speed from the robot [10^6 bit/s].", low=1e-3, high=1e6)
    down_mbit: float = setting(50.0, "Speed to the robot [10^6 bit/s].", low=1e-3, high=1e6)

    def __post_init__(self) -> None:
        check_ranges(self)

    def trip_s(self, up: int, down: int = 0) -> float:
        """Return the time of a message of ``up`` bytes and its answer of ``down`` [s]."""
        return self.rtt_ms / 1e3 + 8e-6 * (up / self.up_mbit + down / self.down_mbit)


@dataclass(frozen=True)
class MeasureConfig:
    """Settings of a measurement.

    Attributes:
        questions: asked of both models.
    """

    gamma: int = setting(4, "Draft tokens of the measured rounds.", low=1, high=16)
    questions: tuple[str, ...] = QUESTIONS
    budget_s: float = setting(
        180.0, "Time after which no further question is asked [s].", low=1.0, high=86_400.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Prefill:
    """Reading of a question with a picture of 640 x 480, if the models see."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """A pair's times on this machine.

    Attributes:
        profile: as the planner of a robot would have measured it, without a link.
        gamma: of the rounds.
        target, draft: prefills.
        upload: bytes of the question and its picture.
        top: the highest token id, the longest on the wire.
    """

    profile: Profile
    gamma: int
    target: Prefill
    draft: Prefill
    upload: int
    top: int

    def opening_s(self, link: Link) -> float:
        """Return the time until the target has read the question, sent over ``link``."""
        return link.trip_s(_FRAMES + self.upload) + self.target.seconds

    def figures(self) -> dict[str, float]:
        """Return the times [ms] and the shares that were measured."""
        p = self.profile
        return {
            "t_p_ms": 1e3 * p.t_p.value,
            "step_ms": 1e3 * p.step.value,
            "t_q1_ms": 1e3 * p.t_q1.value,
            "t_q_ms": 1e3 * p.t_q.value,
            "gamma": self.gamma,
            "tau": p.tau(self.gamma),
            "unexpected": p.unexpected.value,
            "by_exit": p.by_exit.value,
            "target_prefill_ms": 1e3 * self.target.seconds,
            "target_prompt_tokens": self.target.tokens,
            "draft_prefill_ms": 1e3 * self.draft.seconds,
            "draft_prompt_tokens": self.draft.tokens,
        }


@dataclass(frozen=True)
class Prediction:
    """A mode of decoding at its best draft length.

    Attributes:
        mode: by the planner's name.
        exits: early exits suggest outcomes.
        tau: tokens per pass of the target.
        token_ms: time per token.
        speedup: over the cloud alone.
    """

    mode: str
    exits: bool
    tau: float
    token_ms: float
    speedup: float

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.mode} with exits" if self.exits else self.mode


def load_pair(report: PairReport) -> tuple[Engine, Engine]:
    """Load the models of a report, with the target's early exits.

    Raises:
        ModelError: one of them cannot be loaded; ``field`` begins with ``target`` or ``draft``.
    """
    target = report.target.config
    if report.target.exits and not (isinstance(target, TargetConfig) and target.exits):
        target = with_exits(target, "beside")
    with within("target"):
        loaded = load(target)
    with within("draft"):
        return Engine(loaded), Engine(load(report.draft.config))


def time_pair(target: Engine, draft: Engine, config: MeasureConfig) -> Measurement:
    """Time a pair, and let it answer questions greedily.

    Raises:
        CollabError: a question cannot be read, or the first one is not answered within the budget.
    """
    for engine in (target, draft):
        engine.warm_up()
    questions = [_prompt(text, target.loaded) for text in config.questions]
    profile, gamma = _speculate(target, draft, questions, config), config.gamma
    question = questions[0]
    ours, theirs = (encode(question, engine.loaded) for engine in (target, draft))
    profile.t_p = Mean(_pass_s(draft, theirs, 1))
    profile.t_q1, profile.t_q = (Mean(_pass_s(target, ours, n), 1) for n in (1, gamma + 1))
    profile.drafted, profile.speculating = Mean(gamma), False
    return Measurement(
        profile,
        gamma,
        _prefill(target, ours),
        _prefill(draft, theirs),
        sum(map(len, (question.text.encode(), *question.images))),
        target.vocab_size - 1,
    )


def assume(
    measurement: Measurement, *, acceptance: float | None = None, draft_ms: float | None = None
) -> Measurement:
    """Replace measured figures by those of other texts, or of another machine.

    Args:
        acceptance: chance of a draft token.
        draft_ms: a pass of the draft model over one token [ms].
    """
    profile = measurement.profile
    if acceptance is not None:
        profile = replace(profile, acceptance=Acceptance.assumed(acceptance))
    if draft_ms is not None:
        slower = draft_ms / 1e3 / profile.t_p.value
        t_p, step = (
            replace(mean, value=slower * mean.value) for mean in (profile.t_p, profile.step)
        )
        profile = replace(profile, t_p=t_p, step=step)
    return replace(measurement, profile=profile)


def predict(measurement: Measurement, link: Link) -> list[Prediction]:
    """Return each mode at its best draft length; the cloud alone comes first.

    Early exits have a row of their own if one of them suggested an outcome.
    """
    with_exits = measurement.profile
    by_exit = with_exits.by_exit.value
    missed = Mean(with_exits.unexpected.value + by_exit)
    without = replace(with_exits, by_exit=Mean(), unexpected=missed)
    lengths = range(1, PlannerConfig().max_gamma + 1)
    alone_s = _token_s(without, Mode(0), measurement, link)

    def best(profile: Profile, modes: Sequence[Mode], exits: bool = False) -> Prediction:
        times = {mode: _token_s(profile, mode, measurement, link) for mode in modes}
        mode = min(times, key=lambda mode: times[mode])
        seconds = times[mode]
        return Prediction(
            mode.name, exits, profile.tau(mode.gamma), 1e3 * seconds, alone_s / seconds
        )

    ahead = [Mode(gamma, ahead=True) for gamma in lengths]
    found = [
        best(without, [Mode(0)]),
        best(without, [Mode(gamma) for gamma in lengths]),
        best(without, ahead),
    ]
    return [*found, best(with_exits, ahead, exits=True)] if by_exit else found


def fastest(predictions: Sequence[Prediction]) -> Prediction:
    """Return the fastest mode, or the cloud alone if it saves too little, as the planner would."""
    alone, best = predictions[0], min(predictions, key=lambda each: each.token_ms)
    worth = best.token_ms <= (1.0 - PlannerConfig().min_gain) * alone.token_ms
    return best if worth else alone


def _token_s(profile: Profile, mode: Mode, measurement: Measurement, link: Link) -> float:
    """Return the predicted time per token over ``link`` [s]."""
    tokens = (measurement.top,) * mode.gamma
    up = _FRAMES + len(encode_client(Draft(1, 1, tokens)))
    down = _FRAMES + len(
        encode_server(Verdict(1, (*tokens, measurement.top), mode.gamma, False, 1.0, 1.0))
    )
    here = replace(profile, rtt=Mean(link.trip_s(up, down)))
    return round_seconds(here, mode, AheadConfig().push_depth) / here.tau(mode.gamma)


def _speculate(
    target: Engine, draft: Engine, questions: Sequence[Prompt], config: MeasureConfig
) -> Profile:
    """Answer the questions, which shows how often drafts and predictions are right."""
    profile, exit_layers = Profile(), Mean()
    runner = InProcessRunner(draft, target, gamma=config.gamma, profile=profile)
    due = time.monotonic() + config.budget_s
    for question in questions:
        try:
            answer = runner.generate(question, None, _ANSWER, due - time.monotonic())
        except DeadlineExceeded:
            if not profile.t_q.count:
                raise
            break
        if answer.metrics.exit_agreements:
            exit_layers.add(answer.metrics.mean_exit_layer)
    # In one process an exit comes no earlier than its verdict.
    profile.exit_s = Mean(exit_layers.value / target.num_layers * profile.t_q.value)
    return profile


def _pass_s(engine: Engine, prompt: EncodedPrompt, tokens: int) -> float:
    """Return the median time of a pass over ``tokens``, with exits and the choice of tokens [s]."""
    with closing(engine.open(prompt)) as session:
        session.feed(prompt.ids, last=0)

        def once() -> float:
            session.length = len(prompt.ids)
            begun = time.perf_counter()
            logits = session.feed([0] * tokens, lambda layer, logits: None)
            distributions_of([logits], [SamplingConfig()])  # waits for the device
            return time.perf_counter() - begun

        once()
        return statistics.median(once() for _ in range(_PASSES))


def _prompt(text: str, loaded: LoadedModel) -> Prompt:
    """Return a question in the form that the model reads: about a picture, if it sees."""
    images = (picture(),) if loaded.sees else ()
    return Prompt(text, images, raw=not loaded.tokenizer.chat_template)


def _prefill(engine: Engine, prompt: EncodedPrompt) -> Prefill:
    """Time the reading of ``prompt``: the fastest of a few."""

    def once() -> float:
        with closing(engine.open(prompt)) as session:
            begun = time.perf_counter()
            session.encode_images()
            session.feed(prompt.ids, last=1)
            synchronize(engine.device)
            return time.perf_counter() - begun

    return Prefill(len(prompt.ids), min(once() for _ in range(_PREFILLS)))
