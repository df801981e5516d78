"""Answers over a pipeline: the loop that feeds lanes, and restarts them when a worker is lost."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from collab_llm_nodes.errors import CollabError, InvalidInput
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.jupiter.chain import CHECK_S, Chain, WorkerLost
from collab_llm_nodes.protocols.jupiter.lane import (
    CachedPrefix,
    DecodeConfig,
    LaneAnswer,
    SharedPrefix,
)
from collab_llm_nodes.protocols.jupiter.messages import Result, Step
from collab_llm_nodes.protocols.jupiter.pictures import ShownPrompt
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline

MOST_LOSSES = 16
"""Worker losses that one answer survives."""


OnTokens = Callable[[Sequence[LaneAnswer]], None]
_Fed = tuple[LaneAnswer | SharedPrefix, Step]
"""A step, and the lane that it feeds."""


def answer(
    pipeline: Pipeline,
    prompt: Sequence[int],
    config: DecodeConfig,
    control: Control,
    on_tokens: OnTokens = lambda lanes: None,
    shown: ShownPrompt | None = None,
) -> LaneAnswer:
    """Return one answer.

    Args:
        prompt: token ids.
        shown: the prompt, if it shows pictures.
        on_tokens: called after each verdict.

    Raises:
        InvalidInput: the prompt does not fit.
        CollabError: the remaining workers cannot hold the model, or the deadline has passed.
    """
    with pipeline.lanes(1, control.due, control.check) as (lane,):
        made = _lane(pipeline, lane, prompt, config, control, shown=shown)
        _decode(pipeline, None, [[made]], config, control, on_tokens)
    return made


def answer_in_points(
    pipeline: Pipeline,
    prompt: Sequence[int],
    outline: DecodeConfig,
    requests: Callable[[Sequence[int]], Sequence[Sequence[int]]],
    config: DecodeConfig,
    control: Control,
    *,
    directive: CachedPrefix | None = None,
    shown: ShownPrompt | None = None,
    most: int = 8,
    budget: int | None = None,
    on_outline: OnTokens = lambda lanes: None,
    on_tokens: OnTokens = lambda lanes: None,
) -> tuple[LaneAnswer, list[LaneAnswer]]:
    """Return an outline, and an answer to each of its points (paper 004, figure 9).

    The points' lanes fork from the outline's, whose keys and values are held once (section V-B).
    With more points than lanes, the rest wait for the first ones to end. If the context has no room
    for one of the points, none is answered.

    Args:
        outline: how the outline is decoded.
        requests: returns, for the outline's tokens, the ids that follow it for each point.
        config: how points are decoded.
        directive: precedes ``prompt``, if the stages keep it.
        shown: directive and prompt together, if they show pictures.
        most: expected number of points.
        budget: tokens of all points together, divided evenly; None: ``config`` limits each.

    Raises:
        CollabError: as :func:`answer`.
    """
    if pipeline.config.lanes < 2:
        raise InvalidInput("one lane is not enough", field="lanes", remedy="raise lanes")
    count = min(1 + most, pipeline.config.lanes)
    with pipeline.lanes(count, control.due, control.check) as (lane, *others):
        first = _lane(pipeline, lane, prompt, outline, control, directive, shown)
        _decode(pipeline, directive, [[first]], outline, control, on_outline)
        wanted = requests(first.tokens)
        context = pipeline.chain(control.due, control.check).info.context
        if any(len(first.known) + len(request) >= context for request in wanted):
            wanted = []
        if budget is not None and wanted:
            share = max(1, budget // len(wanted))
            config = replace(config, max_tokens=min(config.max_tokens, share))
        prefix = SharedPrefix.from_answer(first)
        return first, _expand(pipeline, prefix, others, wanted, config, control, on_tokens)


def _expand(
    pipeline: Pipeline,
    prefix: SharedPrefix,
    lanes: Sequence[int],
    requests: Sequence[Sequence[int]],
    config: DecodeConfig,
    control: Control,
    on_tokens: OnTokens,
) -> list[LaneAnswer]:
    """Return an answer to each request, in as many waves as ``lanes`` require."""
    found: list[LaneAnswer] = []
    while len(found) < len(requests):
        wave = requests[len(found) : len(found) + len(lanes)]
        made = [
            _lane(pipeline, lane, request, config, control, prefix)
            for lane, request in zip(lanes, wave, strict=False)
        ]
        chain = pipeline.chain(control.due, control.check)
        if found:  # close the lanes of the previous wave
            chain.submit([Step(lane.lane, close=True) for lane in made], lambda result: None)
        count = min(len(made), config.groups or len(chain.parts))
        groups = [made[i::count] for i in range(count)]
        found += made
        every = tuple(found)
        _decode(pipeline, prefix, groups, config, control, lambda lanes, e=every: on_tokens(e))  # type: ignore[misc]
    return found


def _lane(
    pipeline: Pipeline,
    lane: int,
    prompt: Sequence[int],
    config: DecodeConfig,
    control: Control,
    prefix: SharedPrefix | None = None,
    shown: ShownPrompt | None = None,
) -> LaneAnswer:
    info = pipeline.chain(control.due, control.check).info
    return LaneAnswer(
        lane, prompt, config, eos=info.eos, context=info.context, prefix=prefix, shown=shown
    )


def _decode(
    pipeline: Pipeline,
    prefix: SharedPrefix | None,
    groups: Sequence[Sequence[LaneAnswer]],
    config: DecodeConfig,
    control: Control,
    on_tokens: OnTokens,
) -> None:
    """Decode all lanes to their ends; after a lost worker, feed them again to the next chain."""
    losses = 0
    while any(not lane.finished for group in groups for lane in group):
        chain = pipeline.chain(control.due, control.check)
        try:
            _decode_on(chain, prefix, groups, config, control, on_tokens)
        except WorkerLost:
            losses += 1
            if losses > MOST_LOSSES:
                raise
            if prefix is not None:
                prefix.restart()
            for group in groups:
                for lane in group:
                    lane.restart()


def _decode_on(
    chain: Chain,
    prefix: SharedPrefix | None,
    groups: Sequence[Sequence[LaneAnswer]],
    config: DecodeConfig,
    control: Control,
    on_tokens: OnTokens,
) -> None:
    """Keep one pass of each group in flight; each group's next pass follows its verdicts.

    When all lanes of a group have ended, another group is divided, so that no stage is idle while
    two lanes share a pass.
    """
    inbox: queue.SimpleQueue[tuple[list[LaneAnswer], Result | CollabError]] = queue.SimpleQueue()
    every = [lane for group in groups for lane in group]
    in_flight = 0

    def submit(lanes: list[LaneAnswer], fed: Sequence[_Fed]) -> None:
        nonlocal in_flight
        in_flight += 1
        steps = [step for _, step in fed]
        chain.submit(steps, lambda result: inbox.put((lanes, result)), _features(fed))

    def proceed(lanes: list[LaneAnswer]) -> None:
        if len(lanes) == 1:
            *parts, last = [(lanes[0], step) for step in lanes[0].steps(config.lengths)]
            for part in parts:
                submit([], [part])
            submit(lanes, [last])
        elif lanes:
            submit(lanes, [(lane, lane.steps()[0]) for lane in lanes])

    if prefix is not None:
        prefix.feed(chain, lambda step: submit([], [(prefix, step)]), config.lengths)
    for group in groups:
        proceed([lane for lane in group if not lane.finished])
    while in_flight:
        lanes, result = _next(inbox, control)
        in_flight -= 1
        if isinstance(result, CollabError):
            raise result
        if not lanes:
            continue
        for lane, outcome in zip(lanes, result.outcomes, strict=True):
            lane.on_outcome(outcome)
        on_tokens(every)
        left = [lane for lane in lanes if not lane.finished]
        count = max(1, min(len(left), len(groups) - in_flight))
        for i in range(count):
            proceed(left[i::count])


def _features(fed: Sequence[_Fed]) -> Tensor | None:
    """Return the features of all pictures in a pass; None: there are none."""
    found = [lane.shown.features_of(step) for lane, step in fed if lane.shown is not None]
    return torch.cat(found) if found else None


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
