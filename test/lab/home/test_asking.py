"""Requests drawn for rooms: shares of the kinds, subjects there or not, certain answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from collab_llm_lab.home.asking import draw_for_view, draw_request
from collab_llm_lab.home.requests import QUESTIONS, Kind, Request, resolve
from collab_llm_lab.home.wording import HELD_OUT, HELD_OUT_NOUNS, NOUNS, TRAINED
from collab_llm_nodes.sim.rooms import (
    COLOURS,
    HELD_OUT_PAIRS,
    NAMED_FURNITURE,
    SHAPES,
    Room,
    Style,
    make_room,
)
from collab_llm_nodes.sim.view import Sight, View, look

ROOMS = [make_room(seed) for seed in range(40)]
HELD_OUT_NAMES = {f"{colour} {shape}" for colour, shape in HELD_OUT_PAIRS}


@pytest.fixture(scope="module")
def asked() -> list[tuple[Room, Request]]:
    rng = np.random.default_rng(1)
    return [(room, draw_request(room, rng, TRAINED)) for room in ROOMS for _ in range(50)]


def names(room: Room) -> list[str]:
    return [thing.name for thing in room.things] + [part.name for part in room.furniture]


def test_kinds_have_their_shares(asked: list[tuple[Room, Request]]) -> None:
    kinds = Counter(request.kind for _, request in asked)
    assert set(kinds) == set(Kind)
    assert 0.60 < kinds[Kind.GO] / len(asked) < 0.70
    goals = [(room, request.about) for room, request in asked if request.kind is Kind.GO]
    there = [any(map(about.matches, names(room))) for room, about in goals]
    assert 0.12 < 1 - np.mean(there) < 0.22
    assert 0.02 < np.mean([bool(about.side) for _, about in goals]) < 0.2


def test_what_is_asked_for_may_be_trained(asked: list[tuple[Room, Request]]) -> None:
    for _, request in asked:
        about = request.about
        assert about.name not in HELD_OUT_NAMES
        assert about.landmark not in HELD_OUT_NAMES
        if request.kind is Kind.UNKNOWN:
            assert about.name in NOUNS
        else:
            known = {"", *COLOURS, *SHAPES, *NAMED_FURNITURE}
            assert known.issuperset((*about.name.split(), *about.landmark.split()))


def test_shape_alone_means_one_thing_of_the_room(asked: list[tuple[Room, Request]]) -> None:
    for room, request in asked:
        about = request.about
        if request.kind is Kind.GO and about.name in SHAPES and not about.side:
            assert sum(about.matches(name) for name in names(room)) <= 1


def test_relation_is_resolved_at_the_start(asked: list[tuple[Room, Request]]) -> None:
    related = [(room, request) for room, request in asked if request.about.side]
    assert related
    for room, request in related:
        view = look(room, room.start)
        found = resolve(request, view)
        assert found is not None
        assert room.things[found].shape == request.about.name


def test_room_of_held_out_pairs_is_asked_for_them() -> None:
    rng = np.random.default_rng(2)
    style = Style(pairs="held_out")
    requests = [draw_request(make_room(seed, style), rng) for seed in range(10) for _ in range(30)]
    assert any(request.about.name in HELD_OUT_NAMES for request in requests)


def test_held_out_wordings_ask_for_held_out_nouns() -> None:
    rng = np.random.default_rng(3)
    requests = [draw_request(room, rng, HELD_OUT["verb"]) for room in ROOMS for _ in range(5)]
    unknown = {r.about.name for r in requests if r.kind is Kind.UNKNOWN}
    assert unknown
    assert unknown <= set(HELD_OUT_NOUNS)


def test_equal_generators_give_equal_requests() -> None:
    first, second = (
        [draw_request(room, np.random.default_rng(4), TRAINED) for room in ROOMS] for _ in range(2)
    )
    assert first == second


def views() -> Iterator[tuple[Room, View]]:
    for room in ROOMS:
        yield room, look(room, room.start)


def shown(sight: Sight) -> bool:
    return sight.in_view and not sight.borderline and sight.name != "person"


def test_true_answers_of_questions_are_beyond_doubt() -> None:
    rng = np.random.default_rng(5)
    found: list[bool] = []
    counts: list[int] = []
    named: list[bool] = []
    kinds: Counter[Kind] = Counter()
    for room, view in views():
        for _ in range(30):
            request = draw_for_view(room, view, rng)
            about = request.about
            kinds[request.kind] += 1
            sights = (*view.things, *view.furniture)
            asked_of = view.things if request.kind is Kind.HOW_MANY else sights
            meant = [s for s in asked_of if about.matches(s.name) and s.name != "person"]
            assert not any(sight.borderline for sight in meant)
            seen = [sight for sight in meant if sight.in_view]
            if request.kind is Kind.IS_THERE and any(map(shown, sights)):
                found.append(bool(seen))
            elif request.kind is Kind.HOW_MANY:
                counts.append(len(seen))
            elif request.kind is Kind.WHAT_COLOUR:
                assert about.side or len(seen) <= 1
                named.append(resolve(request, view) is not None)
                assert named[-1] == bool(about.side or seen)
    assert set(kinds) == set(QUESTIONS)
    assert 0.35 < np.mean(found) < 0.65
    assert len(set(counts)) >= 3
    assert 0.7 < np.mean(named) < 0.95
