"""The evidence that a sentence answers a question, and the sentences that are quoted by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import WordHashes
from collab_llm_nodes.knowledge.evidence import (
    Asked,
    Calibration,
    Features,
    is_whole,
    load_calibration,
    rarity,
    stem_of,
)
from collab_llm_nodes.knowledge.quoting import EvidenceConfig, check_evidence, quotable
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.knowledge.store import Store

MANUAL = """Wheels

Tighten the wheel nuts to a torque of 210 Nm. The tyres hold 6 bar.

Temperatures of transformer T7

On day 4 transformer T7 reached 71 degrees.

Set the port on which the listener of the gateway listens. Defaults to 1883.

The interval of the heartbeat is set here. It is 10 seconds. Nobody needs to change it.

The red ball was last seen in the hall. The blue box was last seen in the kitchen.
"""
WORDS = load_calibration("evidence_words.yaml")
RESCORED = RetrievalConfig(method="rescored", chunks=2, candidates=16, temperature=0.1)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(None) as made:
        document = Document("manual", MANUAL)
        made.add(document, chunks(document, ChunkPlan(by="sentence", characters=80)))
        yield made


def quoted(store: Store, question: str, least: float = 0.5) -> str:
    found = quotable(store, question, RESCORED, WORDS, least, WordHashes())
    assert len(found.hits) == len(found.sentences) == len(found.weights)
    assert [hit.score for hit in found.hits] == sorted((h.score for h in found.hits), reverse=True)
    assert all(least <= hit.score <= found.best for hit in found.hits)
    return found.sentences[0] if found.sentences else ""


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("To what torque is the wheel nut tightened?", "Tighten the wheel nuts"),
        ("What is the torque of the wheel nuts?", "Tighten the wheel nuts"),
        ("Where was the red ball last seen?", "The red ball"),
        ("Why does the listener of the gateway listen on a port?", "Set the port"),
        ("How hot was transformer T7 on day 4?", "On day 4"),
        ("How hot was transformer T9 on day 5?", ""),
        ("Where was the green umbrella last seen?", ""),
        ("Where was the blue ball last seen?", ""),
        ("What is the capital of Mongolia?", ""),
        ("?!", ""),
    ],
)
def test_a_sentence_is_quoted_only_with_evidence(store: Store, question: str, answer: str) -> None:
    said = quoted(store, question)
    assert said.startswith(answer)
    assert bool(said) == bool(answer)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (
            "On which port does the listener of the gateway listen?",
            "Set the port on which the listener of the gateway listens. Defaults to 1883.",
        ),
        (
            "How long is the interval of the heartbeat?",
            "The interval of the heartbeat is set here. It is 10 seconds.",
        ),
        (
            "How do I set the port of the listener of the gateway?",
            "Set the port on which the listener of the gateway listens.",
        ),
        ("At what pressure do the tyres hold?", "The tyres hold 6 bar."),
    ],
)
def test_a_question_for_a_value_is_answered_by_the_sentence_and_its_neighbour_with_the_value(
    question: str, answer: str
) -> None:
    with Store(None) as made:
        document = Document("manual", MANUAL)
        made.add(document, chunks(document, ChunkPlan(by="sentence", characters=240)))
        assert quoted(made, question, 0.3) == answer


@pytest.mark.parametrize(
    ("question", "sentence", "lacks"),
    [
        ("Which port does it use?", "Set the port to use.", True),
        ("Which port does it use?", "It is 1883.", False),
        ("What is the name of the file?", "It is mosquitto.db.", False),
        ("How often is it updated?", "The number of seconds between updates.", True),
        ("How often is it updated?", "It is updated every ten seconds.", False),
        ("How often is 10 updated?", "10 is updated.", True),
        ("How is it updated?", "It is updated by hand.", False),
        ("Why is it updated?", "It is old.", False),
    ],
)
def test_a_value_is_something_that_the_question_does_not_say(
    question: str, sentence: str, lacks: bool
) -> None:
    assert Asked(question).lacks_value(sentence) == lacks


def test_the_least_evidence_decides(store: Store) -> None:
    question = "How hot was transformer T7?"
    assert quoted(store, question, 0.0)
    assert not quoted(store, question, 1.0)


def test_a_store_without_documents_has_nothing_to_quote() -> None:
    with Store(None) as empty:
        found = quotable(empty, "Where is it?", RESCORED, WORDS, 0.0, WordHashes())
    assert (found.hits, found.best, found.log_mass) == ((), 0.0, float("-inf"))


@pytest.mark.parametrize("words", ["tighten tightened tightening tightens", "stop stopped stops"])
def test_regular_forms_of_a_word_have_one_stem(words: str) -> None:
    assert len({stem_of(word) for word in words.split()}) == 1


def test_rare_words_count_more_than_common_ones() -> None:
    assert rarity("the") == 0 < rarity("ball") < rarity("torqu") < rarity("210")


def test_features_of_a_sentence() -> None:
    asked = Asked("How hot was transformer T7 on day 5?")
    same = asked.features("On day 5 transformer T7 was hot.")
    other = asked.features("On day 4 transformer T7 was hot.")
    heading = asked.features("Transformer T7")
    late = asked.features("If you look at the list below, you find the transformer.")
    assert same.coverage == pytest.approx(1.0)
    assert (same.conflict, same.whole, heading.whole) == (0.0, 1.0, 0.0)
    assert (same.leading, late.leading) == (1.0, 0.0)
    assert other.conflict == pytest.approx(1 - other.coverage)
    assert same.pairs > other.pairs


@pytest.mark.parametrize(
    ("sentence", "whole"),
    [
        ("The pump stops at 6 bar.", True),
        ('He said "stop the pump now!"', True),
        ("Pressure of the pump", False),
        ("See p. 4.", False),
    ],
)
def test_headings_are_no_sentences(sentence: str, whole: bool) -> None:
    assert is_whole(sentence) == whole


def test_a_calibration_is_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("{intercept: -1.0, similarity: 2.0}")
    mine = load_calibration(str(file))
    assert mine == Calibration(intercept=-1.0, similarity=2.0)
    nothing = Features(0, 0, 0, 0, 0, 0)
    assert mine.probability(nothing) == pytest.approx(0.2689, abs=1e-4)
    check_evidence(EvidenceConfig(str(file)), mine, has_encoder=True)
    with pytest.raises(ConfigError, match="encoder"):
        check_evidence(EvidenceConfig(str(file)), mine, has_encoder=False)
    for text in ("{colour: 1.0}", "[", "- 1"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            load_calibration(str(file))
    with pytest.raises(ConfigError):
        load_calibration("no_such_file.yaml")
