"""Answers over stages are the single device's, whatever divides, drafts or carries them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from jupiter_bed import (
    ARCHITECTURE,
    LAYERS,
    PATIENT,
    WAIT_S,
    alone,
    assert_exact,
    control,
    expand,
    pipeline,
    prompt,
    workers,
)
from tiny_models import tiny_model

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.protocols.jupiter import worker
from collab_llm_nodes.protocols.jupiter.drafters import DRAFTERS
from collab_llm_nodes.protocols.jupiter.generation import _decode_on, answer, answer_in_points
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig, LaneAnswer, undivided
from collab_llm_nodes.protocols.jupiter.messages import Outcome, Result, Span, Step, Want
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline, PipelineConfig, equal_parts

TOKENS = 24


def in_thirds(tokens: int) -> list[int]:
    """Three parts, the first the longest."""
    parts = [tokens - 2 * (tokens // 3), tokens // 3, tokens // 3]
    return [part for part in parts if part]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("count", [1, 3])
def test_an_answer_is_the_single_device_s(count: int, drafter: str) -> None:
    ids = prompt(30) * 2  # there is something to look up
    with pipeline(count) as made:
        asked = DecodeConfig(TOKENS, drafter=DRAFTERS[drafter], lengths=in_thirds)
        found = answer(made, ids, asked, control())
    assert found.tokens == alone(ids, TOKENS)
    if drafter == "none":
        assert found.passes == len(found.tokens)
    else:
        assert 0 < sum(found.accepted) == len(found.tokens) - found.passes
        assert found.drafted > sum(found.accepted)


@pytest.mark.parametrize("drafter", ["medusa", "medusa_tree", "prompt_lookup"])
def test_a_sampled_answer_depends_on_no_draft(drafter: str) -> None:
    ids, sampling = prompt(30) * 2, SamplingConfig(temperature=0.7, top_p=0.9, seed=7)
    with pipeline(2) as made:
        found = answer(made, ids, DecodeConfig(TOKENS, sampling, DRAFTERS[drafter]), control())
    assert found.tokens == alone(ids, TOKENS, sampling)


@pytest.mark.parametrize("states", ["float32", "float16", "int8"])
def test_prefill_in_parts_equals_the_single_pass(states: str) -> None:
    """Compare the logits of a prompt in four uneven parts with the whole model's."""
    ids = prompt(90)
    with torch.inference_mode():
        loaded = tiny_model(ARCHITECTURE, layers=LAYERS)
        expected = loaded.model(torch.tensor([ids])).logits[0, :, : len(loaded.tokenizer)].numpy()
    parts, rows = (31, 7, 40, 12), []
    with pipeline(4, states=states) as made:
        chain, start = made.chain(control().due), 0
        for size in parts:
            step = Step(0, start, tuple(ids[start : start + size]), want=Want.LOGITS, rows=size)
            rows.append(run(made, [step]).outcomes[0].logits)
            start += size
        assert len(chain.parts) == 4
    found = np.frombuffer(b"".join(rows), "<f4").reshape(len(ids), -1)
    difference = float(np.abs(found - expected).max())
    assert difference < {"float32": 1e-4, "float16": 0.02, "int8": 0.5}[states]
    assert difference > {"float32": -1.0, "float16": 1e-5, "int8": 1e-3}[states], "was it used?"


def run(made: Pipeline, steps: list[Step]) -> Result:
    """Return the result of one pass."""
    due = control().due
    return made.chain(due).run(steps, due)


@pytest.mark.parametrize("want", [Want.NOTHING, Want.VERDICT])
def test_a_stages_time_lasts_until_its_device_is_done(
    want: Want, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the last stage, which reads nothing from the device if nothing is wanted."""
    done: list[float] = []

    def synchronize(device: torch.device) -> None:
        assert device == torch.device("cpu")
        done.append(time.monotonic())

    with pipeline(2) as made:
        made.chain(control().due)  # the workers have computed something before
        monkeypatch.setattr(worker, "synchronize", synchronize)
        rows = int(want is not Want.NOTHING)
        result = run(made, [Step(0, 0, (1, 2, 3), want=want, rows=rows)])
    assert len(done) == len(result.spans) == 2
    for span, waited in zip(result.spans, done, strict=True):
        assert span.begin <= waited <= span.end


def overlap(before: Span, after: Span) -> bool:
    """Return True if the two were worked on at the same time."""
    return before.begin < after.end and after.begin < before.end


def test_sub_sequences_are_in_the_stages_at_the_same_time() -> None:
    ids = prompt(80)
    with ExitStack() as stack:
        _, addresses = stack.enter_context(workers(2, emulated_slowdown=30.0))
        made = stack.enter_context(Pipeline(PipelineConfig(tuple(addresses), PATIENT)))
        chain, found = made.chain(control().due), SimpleQueue[Any]()
        for i in range(4):
            chain.submit([Step(0, 20 * i, tuple(ids[20 * i : 20 * i + 20]))], found.put)
        spans = [found.get(timeout=WAIT_S).spans for _ in range(4)]
    for one, other in zip(spans, spans[1:], strict=False):
        assert one[0].end <= other[0].begin, "a stage runs one pass at a time"
        assert one[1].end <= other[1].begin
        assert one[0].end <= one[1].begin, "and a pass is in one stage at a time"
    assert any(overlap(one[1], other[0]) for one, other in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("groups", [0, 1, 5])
def test_lanes_that_share_a_prompt_say_what_each_says_alone(groups: int) -> None:
    shared = prompt(40, 3)
    requests = [prompt(3 + i, 10 + i) for i in range(5)]
    with pipeline(2, lanes=4) as made:  # fewer lanes than requests: they come in two waves
        asked = DecodeConfig(TOKENS, groups=groups, lengths=in_thirds)
        heard: list[int] = []
        found, expected = expand(
            made,
            shared,
            requests,
            asked,
            lambda lanes: heard.append(sum(len(lane.tokens) for lane in lanes)),
        )
    assert found == expected
    assert heard == sorted(heard)
    assert heard[-1] == sum(map(len, found))


@pytest.mark.parametrize(
    ("groups", "last"),
    [([[0, 1], [2, 3]], [[0], [1], [0], [1]]), ([[0, 1, 2, 3]], [[0, 1], [0, 1]])],
)
def test_a_group_is_divided_when_another_has_ended(
    groups: list[list[int]], last: list[list[int]]
) -> None:
    """Lanes 2 and 3 end first. Then two stages are not to work in turn on one pass of two lanes."""
    lanes = [
        LaneAnswer(
            number, [1], DecodeConfig(6 if number < 2 else 1), eos=frozenset([0]), context=99
        )
        for number in range(4)
    ]
    passes: list[list[int]] = []

    class Answering:
        """Answers passes in the order in which they come."""

        def submit(self, steps: Sequence[Step], done: Any, features: None) -> None:
            passes.append([step.lane for step in steps])
            done(Result(len(passes), tuple(Outcome((), 5) for _ in steps), ()))

    chain: Any = Answering()
    parted = [[lanes[number] for number in group] for group in groups]
    _decode_on(chain, None, parted, DecodeConfig(6), control(), lambda found: None)
    assert [len(lane.tokens) for lane in lanes] == [6, 6, 1, 1]
    assert passes[: len(groups)] == groups
    assert passes[-len(last) :] == last


def test_lanes_end_and_are_used_again() -> None:
    with pipeline(2, lanes=2) as made:
        for seed in range(3):
            found, expected = expand(made, prompt(20, seed), [prompt(4, 9)], DecodeConfig(6))
            assert found == expected


def test_layers_may_be_divided_in_any_way() -> None:
    ids = prompt(33)

    def plan(devices: object, info: object) -> list[Placement]:
        assert isinstance(devices, list)
        return [Placement(devices[2], 0, 1), Placement(devices[0], 1, 4)]  # the second is left out

    with pipeline(3, plan) as made:
        assert_exact(made, ids, 10)
        first, last = made.chain(control().due).bytes
    with pipeline(1) as made:
        answer(made, ids, DecodeConfig(2), control())
        assert first < last < made.chain(control().due).bytes[0]


@pytest.mark.parametrize(
    "cuts",
    [
        [("first", 0, 4), ("stranger", 4, 4)],
        [("stranger", 0, 4)],
        [("first", 0, 2), ("first", 2, 4)],
        [("first", 0, 3)],
        [("first", 0, 2), ("second", 3, 4)],
        [("first", 0, 4), ("second", 4, 4)],
        [],
    ],
)
def test_a_plan_that_is_none_is_refused(cuts: list[tuple[str, int, int]]) -> None:
    def plan(devices: Sequence[str], info: object) -> list[Placement]:
        known = {"first": devices[0], "second": devices[1], "stranger": "127.0.0.1:9"}
        return [Placement(known[name], first, last) for name, first, last in cuts]

    with pipeline(2, plan) as made:
        with pytest.raises(ConfigError) as refused:
            made.chain(control().due)
        assert refused.value.field == "plan"


def test_more_devices_than_layers_leaves_some_out() -> None:
    with pipeline(LAYERS + 1) as made:
        assert_exact(made, prompt(9), 4)
        assert len(made.chain(control().due).parts) == LAYERS


def test_what_does_not_fit_is_refused() -> None:
    with pipeline(1, lanes=2) as made:
        context = made.chain(control().due).info.context
        with pytest.raises(InvalidInput, match="the model reads") as refused:
            answer(made, [5] * context, DecodeConfig(4), control())
        assert refused.value.field == "prompt"
        with pytest.raises(InvalidInput, match="no tokens"):
            answer(made, [], DecodeConfig(4), control())
        with pytest.raises(InvalidInput, match="sub-sequences"):
            answer(made, prompt(9), DecodeConfig(4, lengths=lambda n: [n - 1]), control())
        assert answer(
            made, prompt(9), DecodeConfig(4, lengths=undivided), control()
        ).tokens == alone(prompt(9), 4)


def test_an_answer_ends_with_the_context() -> None:
    with pipeline(2) as made:
        info = made.chain(control().due).info
        ids = prompt(info.context - 3)
        found = answer(made, ids, DecodeConfig(50), control())
        assert found.tokens == alone(ids, 3)
        assert found.finished


def test_equal_parts_cover_all_layers() -> None:
    for devices in range(1, 9):
        with_info = type("Info", (), {"num_layers": 6})()
        parts = equal_parts([f"d{i}" for i in range(devices)], with_info)
        assert [part.first for part in parts] == [0, *(part.last for part in parts[:-1])]
        assert parts[-1].last == 6
        sizes = [part.last - part.first for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_points_go_on_from_the_outline_that_was_decoded() -> None:
    ids = prompt(20) * 2

    def requests(outline: Sequence[int]) -> list[list[int]]:
        return [[*prompt(3, token), token] for token in outline[:5]]

    with pipeline(2, lanes=4) as made:
        asked = DecodeConfig(TOKENS)
        outline, found = answer_in_points(made, ids, DecodeConfig(8), requests, asked, control())
        assert outline.tokens == alone(ids, 8)
        expected = [[*ids, *outline.tokens, *r] for r in requests(outline.tokens)]
        assert [lane.tokens for lane in found] == [alone(text, TOKENS) for text in expected]
        assert len(found) == 5
        _, none = answer_in_points(made, ids, DecodeConfig(4), lambda outline: [], asked, control())
        assert none == []


@pytest.mark.parametrize("drafter", ["medusa", "medusa_tree"])
@pytest.mark.parametrize("cut", [7, 24])
def test_points_go_on_from_an_outline_that_was_drafted_and_cut(drafter: str, cut: int) -> None:
    """Nodes of a tree, and tokens beyond the cut, are not in the cache that points share."""
    ids, requests = prompt(30) * 2, [prompt(3, 50), prompt(4, 51), prompt(2, 52)]
    drafting = DRAFTERS[drafter]
    with pipeline(2, lanes=4) as made:
        first = DecodeConfig(TOKENS, drafter=drafting, stop=lambda tokens: len(tokens) == cut)
        asked = DecodeConfig(TOKENS, drafter=drafting)
        outline, found = answer_in_points(
            made, ids, first, lambda tokens: requests, asked, control(), budget=27
        )
    assert outline.tokens == alone(ids, cut)
    assert sum(outline.accepted)
    texts = [[*ids, *outline.tokens, *r] for r in requests]
    assert [lane.tokens for lane in found] == [alone(text, 9) for text in texts]
