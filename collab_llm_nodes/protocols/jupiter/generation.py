"""Answers over a pipeline: a loop that feeds lanes, and starts them anew when a worker is lost."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import CollabError, InvalidInput
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.jupiter.chain import CHECK_S, Chain, WorkerLost
from collab_llm_nodes.protocols.jupiter.drafters import Drafter, MedusaChain
from collab_llm_nodes.protocols.jupiter.lane import (
    Guide,
    LaneAnswer,
    Lengths,
    Stop,
    Trunk,
    never,
    whole,
)
from collab_llm_nodes.protocols.jupiter.messages import Result, Step
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline

MOST_LOSSES = 16
"""Times that an answer goes on elsewhere."""


@dataclass(frozen=True)
class Asked:
    """Settings of the decoding of answers.

    Attributes:
        lengths: divides a prompt into the sub-sequences of the pipeline.
        groups: point requests are decoded in so many passes at a time, each with its share of the
            lanes; 0: as many as there are stages, 1: all lanes in one pass.
        stop: tells of an answer's tokens that no more are wanted; it ends with the last of them.
    """

    max_tokens: int
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drafter: Drafter = field(default_factory=MedusaChain)
    lengths: Lengths = whole
    groups: int = 0
    stop: Stop = never


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
    with pipeline.lanes(1, control.due, control.check) as (lane,):
        made = _lane(pipeline, lane, prompt, asked, control)
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
    count = _lanes_for(pipeline, len(requests))
    with pipeline.lanes(count, control.due, control.check) as (lane, *others):
        trunk = Trunk(lane, prompt)
        return _points(pipeline, trunk, others, requests, asked, control, on_tokens)


def outlined(
    pipeline: Pipeline,
    prompt: Sequence[int],
    outline: Asked,
    requests: Callable[[Sequence[int]], Sequence[Sequence[int]]],
    asked: Asked,
    control: Control,
    *,
    guide: Guide | None = None,
    most: int = 8,
    budget: int | None = None,
    on_outline: OnTokens = lambda lanes: None,
    on_tokens: OnTokens = lambda lanes: None,
) -> tuple[LaneAnswer, list[LaneAnswer]]:
    """Return an outline, and an answer to each of its points (paper 004, figure 9).

    The points' lanes go on from the outline's, whose keys and values are held once. There are no
    answers if the model's context has no room for one of the points.

    Args:
        outline: how it is decoded.
        requests: makes of the outline's tokens what is read behind it, for each point.
        asked: how points are decoded.
        guide: what stands before ``prompt``, where stages keep that.
        most: points that are expected; more of them come in turns.
        budget: tokens of all points together, shared out evenly; None: ``asked`` limits each.

    Raises:
        CollabError: as :func:`answer`.
    """
    count = _lanes_for(pipeline, most)
    with pipeline.lanes(count, control.due, control.check) as (lane, *others):
        first = _lane(pipeline, lane, prompt, outline, control, guide)
        _decode(pipeline, guide, [[first]], outline, control, on_outline)
        wanted = requests(first.tokens)
        context = pipeline.chain(control.due, control.check).info.context
        if any(len(first.known) + len(request) >= context for request in wanted):
            wanted = []
        if budget is not None and wanted:
            share = max(1, budget // len(wanted))
            asked = replace(asked, max_tokens=min(asked.max_tokens, share))
        trunk = Trunk.behind(first)
        return first, _points(pipeline, trunk, others, wanted, asked, control, on_tokens)


def _lanes_for(pipeline: Pipeline, points: int) -> int:
    """Return the lanes that a prompt and its points are given."""
    if pipeline.config.lanes < 2:
        raise InvalidInput("one lane is not enough", field="lanes", remedy="raise lanes")
    return min(1 + points, pipeline.config.lanes)


def _points(
    pipeline: Pipeline,
    trunk: Trunk,
    lanes: Sequence[int],
    requests: Sequence[Sequence[int]],
    asked: Asked,
    control: Control,
    on_tokens: OnTokens,
) -> list[LaneAnswer]:
    found: list[LaneAnswer] = []
    while len(found) < len(requests):
        wave = requests[len(found) : len(found) + len(lanes)]
        made = [
            _lane(pipeline, lane, request, asked, control, trunk)
            for lane, request in zip(lanes, wave, strict=False)
        ]
        chain = pipeline.chain(control.due, control.check)
        if found:  # the lanes held others before
            chain.submit([Step(lane.lane, close=True) for lane in made], lambda result: None)
        count = min(len(made), asked.groups or len(chain.parts))
        groups = [made[i::count] for i in range(count)]
        found += made
        every = tuple(found)
        _decode(pipeline, trunk, groups, asked, control, lambda lanes, e=every: on_tokens(e))  # type: ignore[misc]
    return found


def _lane(
    pipeline: Pipeline,
    lane: int,
    prompt: Sequence[int],
    asked: Asked,
    control: Control,
    trunk: Trunk | None = None,
) -> LaneAnswer:
    info = pipeline.chain(control.due, control.check).info
    return LaneAnswer(
        lane,
        prompt,
        max_tokens=asked.max_tokens,
        eos=info.eos,
        context=info.context,
        sampling=asked.sampling,
        drafter=asked.drafter,
        trunk=trunk,
        stop=asked.stop,
    )


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
        chain = pipeline.chain(control.due, control.check)
        try:
            _decode_on(chain, trunk, groups, asked, control, on_tokens)
        except WorkerLost:
            losses += 1
            if losses > MOST_LOSSES:
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
    """Keep one pass of each group under way; each group's next pass follows its verdicts.

    When all lanes of a group have ended, another one is divided: no stage is to be idle while two
    lanes share a pass.
    """
    inbox: queue.SimpleQueue[tuple[list[LaneAnswer], Result | CollabError]] = queue.SimpleQueue()
    every = [lane for group in groups for lane in group]
    under_way = 0

    def submit(lanes: list[LaneAnswer], steps: Sequence[Step]) -> None:
        nonlocal under_way
        under_way += 1
        chain.submit(steps, lambda result: inbox.put((lanes, result)))

    def go_on(lanes: list[LaneAnswer]) -> None:
        if len(lanes) == 1:
            *parts, last = lanes[0].steps(asked.lengths)
            for part in parts:
                submit([], [part])
            submit(lanes, [last])
        elif lanes:
            submit(lanes, [lane.steps()[0] for lane in lanes])

    if trunk is not None:
        trunk.feed(chain, lambda step: submit([], [step]), asked.lengths)
    for group in groups:
        go_on([lane for lane in group if not lane.finished])
    while under_way:
        lanes, result = _next(inbox, control)
        under_way -= 1
        if isinstance(result, CollabError):
            raise result
        if not lanes:
            continue
        for lane, outcome in zip(lanes, result.outcomes, strict=True):
            lane.on_outcome(outcome)
        on_tokens(every)
        left = [lane for lane in lanes if not lane.finished]
        count = max(1, min(len(left), len(groups) - under_way))
        for i in range(count):
            go_on(left[i::count])


def _next(
    inbox: queue.SimpleQueue[tuple[list[LaneAnswer], Result | CollabError]], control: Control
) -> tuple[list[LaneAnswer], Result | CollabError]:
    while True:
        control.check()
        left = control.due - time.monotonic()
        try:
            return inbox.get(timeout=max(0.0, min(CHECK_S, left)))
        except queue.Empty:
            continue
