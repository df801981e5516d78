"""Answers over a pipeline: a loop that feeds lanes, and starts them anew when a worker is lost."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import CollabError, InvalidInput
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.jupiter.chain import Chain, WorkerLost
from collab_llm_nodes.protocols.jupiter.drafters import Drafter, MedusaChain
from collab_llm_nodes.protocols.jupiter.lane import LaneAnswer, Lengths, Trunk, whole
from collab_llm_nodes.protocols.jupiter.messages import Result, Step
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline

_CHECK_S = 0.1  # between two looks at the caller's wish to go on


@dataclass(frozen=True)
class Asked:
    """How answers are decoded.

    Attributes:
        lengths: divides a prompt into the sub-sequences of the pipeline.
        groups: point requests are decoded in so many passes at a time, each with its share of the
            lanes; 0: as many as there are stages, 1: all lanes in one pass.
    """

    max_tokens: int
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drafter: Drafter = field(default_factory=MedusaChain)
    lengths: Lengths = whole
    groups: int = 0


OnTokens = Callable[[Sequence[LaneAnswer]], None]


def answer(
    pipeline: Pipeline,
    prompt: Sequence[int],
    asked: Asked,
    control: Control,
    on_tokens: OnTokens = lambda lanes: None,
) -> LaneAnswer:
    """Return one answer.

    Args:
        prompt: token ids.
        on_tokens: called after each verdict.

    Raises:
        InvalidInput: the prompt does not fit.
        CollabError: the workers that are left cannot hold the model, or the time is over.
    """
    context, eos = _facts(pipeline, control)
    with pipeline.lanes(1, control.due) as (lane,):
        made = LaneAnswer(
            lane,
            prompt,
            max_tokens=asked.max_tokens,
            eos=eos,
            context=context,
            sampling=asked.sampling,
            drafter=asked.drafter,
        )
        _decode(pipeline, None, [[made]], asked, control, on_tokens)
    return made


def points(
    pipeline: Pipeline,
    prompt: Sequence[int],
    requests: Sequence[Sequence[int]],
    asked: Asked,
    control: Control,
    on_tokens: OnTokens = lambda lanes: None,
) -> list[LaneAnswer]:
    """Return an answer to each of ``requests``, which are read behind one ``prompt``.

    The prompt's keys and values are held once (paper 004, section V-B). With more requests than
    lanes, the rest wait for the first ones to end.

    Raises:
        InvalidInput: a request does not fit.
        CollabError: as :func:`answer`.
    """
    if not requests:
        return []
    context, eos = _facts(pipeline, control)
    most = pipeline.config.lanes - 1
    if most < 1:
        raise InvalidInput("one lane is not enough", field="lanes", remedy="raise lanes")
    found: list[LaneAnswer] = []
    for begin in range(0, len(requests), most):
        wave = requests[begin : begin + most]
        with pipeline.lanes(1 + len(wave), control.due) as (lane, *others):
            trunk = Trunk(lane, prompt)
            made = [
                LaneAnswer(
                    other,
                    request,
                    max_tokens=asked.max_tokens,
                    eos=eos,
                    context=context,
                    sampling=asked.sampling,
                    drafter=asked.drafter,
                    trunk=trunk,
                )
                for other, request in zip(others, wave, strict=True)
            ]
            stages = len(pipeline.chain(control.due).parts)
            count = min(len(made), asked.groups or stages)
            groups = [made[i::count] for i in range(count)]
            before = list(found)
            _decode(
                pipeline,
                trunk,
                groups,
                asked,
                control,
                lambda lanes, before=before: on_tokens([*before, *lanes]),  # type: ignore[misc]
            )
            found += made
    return found


def _facts(pipeline: Pipeline, control: Control) -> tuple[int, frozenset[int]]:
    info = pipeline.chain(control.due).info
    return info.context, info.eos


def _decode(
    pipeline: Pipeline,
    trunk: Trunk | None,
    groups: Sequence[Sequence[LaneAnswer]],
    asked: Asked,
    control: Control,
    on_tokens: OnTokens,
) -> None:
    """Decode all lanes to their ends; a chain that is lost is replaced, and its lanes fed again."""
    losses = 0
    while any(not lane.finished for group in groups for lane in group):
        chain = pipeline.chain(control.due)
        try:
            _decode_on(chain, trunk, groups, asked, control, on_tokens)
        except WorkerLost:
            losses += 1
            if losses > len(pipeline.config.workers):
                raise
            if trunk is not None:
                trunk.restart()
            for group in groups:
                for lane in group:
                    lane.restart()


def _decode_on(
    chain: Chain,
    trunk: Trunk | None,
    groups: Sequence[Sequence[LaneAnswer]],
    asked: Asked,
    control: Control,
    on_tokens: OnTokens,
) -> None:
    """Keep one pass of each group under way; each group's next pass follows its verdicts."""
    inbox: queue.SimpleQueue[tuple[int, list[LaneAnswer], Result | CollabError]] = (
        queue.SimpleQueue()
    )
    every = [lane for group in groups for lane in group]
    under_way = 0

    def submit(number: int, lanes: list[LaneAnswer], steps: Sequence[Step]) -> None:
        nonlocal under_way
        under_way += 1
        chain.submit(steps, lambda result: inbox.put((number, lanes, result)))

    def go_on(number: int) -> None:
        lanes = [lane for lane in groups[number] if not lane.finished]
        if len(lanes) == 1:
            *parts, last = lanes[0].steps(asked.lengths)
            for part in parts:
                submit(number, [], [part])
            submit(number, lanes, [last])
        elif lanes:
            submit(number, lanes, [lane.steps()[0] for lane in lanes])

    if trunk is not None:
        for step in trunk.steps(asked.lengths):
            submit(-1, [], [step])
    for number in range(len(groups)):
        go_on(number)
    while under_way:
        number, lanes, result = _next(inbox, control)
        under_way -= 1
        if isinstance(result, CollabError):
            raise result
        if not lanes:
            continue
        for lane, outcome in zip(lanes, result.outcomes, strict=True):
            lane.on_outcome(outcome)
        on_tokens(every)
        go_on(number)


def _next(
    inbox: queue.SimpleQueue[tuple[int, list[LaneAnswer], Result | CollabError]], control: Control
) -> tuple[int, list[LaneAnswer], Result | CollabError]:
    while True:
        control.check()
        left = control.due - time.monotonic()
        try:
            return inbox.get(timeout=max(0.0, min(_CHECK_S, left)))
        except queue.Empty:
            continue
