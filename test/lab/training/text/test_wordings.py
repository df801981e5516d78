"""Wordings of questions: many for training, and one that training never shows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from templates import sentences

from collab_llm_lab.phrases import Phrase
from collab_llm_lab.training.text import passages, skills
from collab_llm_lab.training.text.facts import KINDS, KINDS_BY_NAME, Kind
from collab_llm_lab.training.text.passages import Writer
from collab_llm_lab.training.text.samples import SUB_DOMAINS, make_sample
from collab_llm_lab.training.text.world import World

OTHERS = {
    **skills.REQUESTS,
    **passages.REQUESTS,
    **{f"copy in {name}": phrases for name, phrases in skills.COPY_REQUESTS.items()},
    **{f"documents in {name}": asked for name, asked in skills.DOCUMENT_QUESTIONS.items()},
}
FIELDS = {name: f"<{name}>" for name in ("text", "question", "name", "robot", "number", "title")}
FIELDS |= {name: f"<{name}>" for name in ("thing", "other", "room", "person", "event")}


def said(phrases: Sequence[Phrase], fields: dict[str, str]) -> set[str]:
    """Return all sentences of some templates in lower case."""
    return {text.lower() for phrase in phrases for text in sentences(phrase.text, fields)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_has_many_wordings_and_training_never_shows_the_last(kind: Kind) -> None:
    """The fields are those of the key alone: a question must not contain its answer."""
    fields = {name: f"<{name}>" for name in kind.key}
    *trained, held_out = kind.questions
    assert len(trained) >= 10
    assert len(said(trained, fields)) >= 18
    assert not said(trained, fields) & said([held_out], fields)


@pytest.mark.parametrize("name", OTHERS)
def test_training_never_shows_the_last_wording_of_a_request(name: str) -> None:
    *trained, held_out = OTHERS[name]
    assert len(said(trained, FIELDS)) >= 6
    assert not said(trained, FIELDS) & said([held_out], FIELDS)


def test_no_question_asks_for_facts_of_two_kinds() -> None:
    fields = {name: "x" for kind in KINDS for name in kind.key}
    asked = [text for kind in KINDS for text in said(kind.questions, fields)]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("sub_domain", SUB_DOMAINS)
def test_a_text_to_copy_stands_in_the_request_as_it_is(sub_domain: str) -> None:
    openings = set()
    for seed in range(300):
        request, answer = make_sample(random.Random(seed), sub_domain, "copy").turns[-2:]
        assert answer.content in request.content
        openings.add(request.content.startswith(answer.content))
    assert openings == {True, False}


def test_a_question_is_drawn_from_all_trained_wordings() -> None:
    kind = KINDS_BY_NAME["door code"]
    asked = set()
    for seed in range(1500):
        writer = Writer(World(random.Random(seed)), "reports")
        question = writer.ask(0, absent=False, kind=kind)
        asked.add(question.text.replace(question.about.removeprefix("the "), "<room>").lower())
    assert asked == said(kind.questions[:-1], {"room": "<room>"})
