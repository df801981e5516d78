"""Logs and questions: what is planted answers, nothing else does, and the scorer is strict."""

from __future__ import annotations

import random

import pytest
from templates import sentences

from collab_llm_lab.bench.minions.oracle import Oracle
from collab_llm_lab.training.minions.logs import (
    ENTRY_OF,
    FORMS,
    VALUE_OF,
    Log,
    LogWriter,
    single,
    stating,
)
from collab_llm_lab.training.minions.questions import (
    CLASSES,
    HELD_OUT_SHAPES,
    SHAPES,
    WORDINGS,
    Asked,
    draw,
    gold,
    is_right,
    wording,
)
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.minions.embedded.queries import FACTS, Query


def words(text: str) -> int:
    return len(text.split())


def made(seed: int, *, held_out: bool = True, per_class: int = 3) -> tuple[Log, list[Asked]]:
    writer = LogWriter(random.Random(seed), held_out=held_out)
    asked = [draw(writer, group) for group in CLASSES for _ in range(per_class)]
    return writer.log([g for each in asked for g in each.planted], 3000, words), asked


@pytest.mark.parametrize("seed", range(4))
def test_only_what_is_planted_answers(seed: int) -> None:
    log, asked = made(seed, held_out=seed % 2 == 0)
    for each in asked:
        planted = each.planted[0]
        found = [entry for own in stating(log.entries, each.query) for entry in own]
        assert sorted(entry.text for entry in found) == sorted(entry.text for entry in planted)
        assert is_right(each, gold(each.query, log.entries))


def test_a_log_follows_from_its_seed_and_has_the_length_asked_for() -> None:
    (first, _), (again, _), (other, _) = made(1), made(1), made(2)
    assert first.text == again.text != other.text
    assert 3000 <= words(first.text) < 3100
    assert first.text.count("# ") > 5


def test_the_events_of_a_series_are_far_apart() -> None:
    log, asked = made(3)
    place = {
        entry.text: number for number, paragraph in enumerate(log.paragraphs) for entry in paragraph
    }
    for each in asked:
        if FACTS[each.query.fact].series:
            places = sorted(place[entry.text] for entry in each.planted[0])
            gaps = [b - a for a, b in zip(places, places[1:], strict=False)]
            assert min(gaps) >= 0.3 * len(log.paragraphs) / len(places)


@pytest.mark.parametrize("fact", FACTS)
def test_each_task_is_the_beginning_of_its_lines(fact: str) -> None:
    form = FORMS[ENTRY_OF[fact]]
    assert form.startswith(FACTS[fact].task)
    assert f"{{{VALUE_OF[fact]}}}" in form[len(FACTS[fact].task) :]


def test_the_oracle_understands_every_wording() -> None:
    oracle = Oracle("oracle", lambda turns: 0)
    for number in range(200):
        rng = random.Random(number)
        asked = draw(
            LogWriter(rng, held_out=number % 2 == 0),
            CLASSES[number % len(CLASSES)],
            held_out_wording=number % 3 == 0,
        )
        assert oracle.understand(asked.text, Control()) == asked.query


def test_no_wording_of_a_lookup_is_taken_for_another_question() -> None:
    oracle = Oracle("oracle", lambda turns: 0)
    for kind, fact in SHAPES["lookup"]:
        fields = single(fact).draw(World(random.Random(fact)))
        query = Query(kind, fact, (tuple(fields[name] for name in FACTS[fact].keys),))
        for phrase in WORDINGS[kind, fact]:
            for text in sentences(phrase.text, fields):
                assert oracle.understand(text, Control()) == query, text


def test_training_never_shows_what_is_held_out() -> None:
    writer = LogWriter(random.Random(0))
    for (kind, fact), phrases in WORDINGS.items():
        fields = dict.fromkeys(FACTS[fact].keys, "x") | {"time": "10:00"}
        keys = tuple(fields[name] for name in FACTS[fact].keys)
        query = Query(kind, fact, (keys, keys))
        said = {wording(writer.rng, query).lower() for _ in range(400)}
        assert wording(writer.rng, query, held_out=True).lower() not in said
        fields |= {f"second_{name}": key for name, key in fields.items()}
        for phrase in phrases[:-1]:
            assert said & {text.lower() for text in sentences(phrase.text, fields)}
    assert {shape for own in SHAPES.values() for shape in own} == set(WORDINGS)
    assert set(WORDINGS) > HELD_OUT_SHAPES


@pytest.mark.parametrize(
    ("group", "right", "wrong"),
    [
        ("sum", "It is {0} in all.", "{0} or 17"),
        ("count", "{0}", "{0}.6"),
        ("ratio", "about {0}", "-{0}"),
        ("lookup", "the {0}.", "{0} or {0} x"),
        ("comparison", "{0}", "neither the {0}"),
        ("recall", "{0}", "{0}; moon"),
    ],
)
def test_the_scorer(group: str, right: str, wrong: str) -> None:
    asked = draw(LogWriter(random.Random(8)), group)
    assert is_right(asked, right.format(asked.answer))
    assert not is_right(asked, wrong.format(asked.answer))
    assert not is_right(asked, "unknown")
    assert not is_right(asked, "")


def test_the_order_of_recalled_events_does_not_matter() -> None:
    asked = draw(LogWriter(random.Random(5)), "recall")
    parts = asked.answer.split("; ")
    assert is_right(asked, ", ".join(reversed(parts)))
    assert not is_right(asked, parts[0]) or len(set(parts)) == 1
