"""Wordings: what is trained, what is held out, and that no text is both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from collab_llm_lab.home.requests import SIDES, About, Kind
from collab_llm_lab.home.wording import (
    HELD_OUT,
    HELD_OUT_NOUNS,
    HELD_OUT_SLIPS,
    LEARNT,
    NAMES,
    NOUNS,
    PLAIN,
    SLIPS,
    SYNONYMS,
    TRAINED,
    Wordings,
    plain,
)
from collab_llm_nodes.robot.prompt import user_text
from collab_llm_nodes.robot.stop_words import asks_to_stop
from collab_llm_nodes.robot.words import misspellings
from collab_llm_nodes.sim.rooms import COLOURS, NAMED_FURNITURE, SHAPES

NAMED = [
    *(About(f"{colour} {shape}") for colour in COLOURS for shape in SHAPES),
    *(About(name) for name in (*SHAPES, *NAMED_FURNITURE)),
    *(About("ball", side, landmark) for side in SIDES for landmark in ("sofa", "green box")),
]
NAMED_WORDS = {w for text in (*NAMES, *sum(SYNONYMS.values(), ())) for w in text.split()}
UNNAMED = (Kind.STOP, Kind.WHAT_DO_YOU_SEE)


def abouts(kind: Kind, wordings: Wordings) -> list[About]:
    if kind in UNNAMED:
        return [About()]
    if kind is Kind.UNKNOWN:
        return [About(noun) for noun in wordings.nouns]
    if kind is Kind.HOW_MANY:
        return [About(name) for name in ("", *SHAPES, *COLOURS)]
    return NAMED


def drawn(wordings: Wordings, kind: Kind, times: int, seed: int = 0) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    subjects = abouts(kind, wordings)
    for i in range(times):
        yield wordings.draw(rng, kind, subjects[i % len(subjects)])


def read(text: str) -> str:
    """Return the words of a text as the model reads it."""
    return " ".join(words(user_text(text, []).partition(". history")[0]))


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


@pytest.fixture(scope="module")
def trained() -> set[str]:
    return {read(text) for kind in Kind for text in drawn(TRAINED, kind, 4000)}


def test_plain_wordings() -> None:
    assert plain(Kind.GO, About("red ball")) == "find the red ball"
    assert plain(Kind.GO, About("ball", "left of", "white lamp")) == (
        "find the ball left of the white lamp"
    )
    assert plain(Kind.STOP) == "stop"
    assert plain(Kind.DO_NOT, About("sofa")) == "do not go to the sofa"
    assert plain(Kind.UNKNOWN, About("chair")) == "find the chair"
    assert plain(Kind.IS_THERE, About("orange box")) == "is there an orange box"
    assert plain(Kind.HOW_MANY, About("box")) == "how many boxes do you see"
    assert plain(Kind.HOW_MANY, About("red")) == "how many red things do you see"
    assert plain(Kind.HOW_MANY) == "how many things do you see"
    assert plain(Kind.WHAT_COLOUR, About("mug")) == "what colour is the mug"
    assert plain(Kind.WHAT_DO_YOU_SEE) == "what do you see"


@pytest.mark.parametrize("name", ["trained", *HELD_OUT])
def test_equal_generators_give_equal_texts(name: str) -> None:
    wordings = HELD_OUT.get(name, TRAINED)
    for kind in Kind:
        texts = list(drawn(wordings, kind, 50, seed=3))
        assert texts == list(drawn(wordings, kind, 50, seed=3))
        assert len(set(texts)) > 20 or kind in UNNAMED


@pytest.mark.parametrize("name", HELD_OUT)
def test_no_held_out_text_is_trained(name: str, trained: set[str]) -> None:
    for kind in Kind:
        held_out = {read(text) for text in drawn(HELD_OUT[name], kind, 500)}
        assert held_out.isdisjoint(trained)


def test_words_of_no_language_are_no_words_of_requests(trained: set[str]) -> None:
    """A model that reads them learns nothing about a held-out word, nor about a slip."""
    known = {word for text in trained for word in text.split()}
    held_out = {
        word for w in HELD_OUT.values() for k in Kind for t in drawn(w, k, 500) for word in words(t)
    }
    rng = np.random.default_rng(5)
    nouns = {LEARNT.noun(rng) for _ in range(1000)} - {*NOUNS}
    texts = [text for kind in Kind for text in drawn(replace(LEARNT, slips=0.0), kind, 1000)]
    new = {word for text in texts for word in words(text)} - known - {*NOUNS}
    assert len(nouns) > 200
    assert len(new) > 1000
    assert (nouns | new).isdisjoint(held_out)
    assert not any(asks_to_stop(word) for word in nouns | new)


def test_training_keeps_what_a_request_is_about() -> None:
    for text in drawn(replace(LEARNT, slips=0.0, made_up=1.0), Kind.GO, 500):
        assert set(words(text)) & NAMED_WORDS, text
    assert all(asks_to_stop(text) for text in drawn(LEARNT, Kind.STOP, 300))
    prohibited = [*drawn(replace(LEARNT, made_up=1.0), Kind.DO_NOT, 300)]
    frames = [words(re.sub(r"\{\w+\}", "", frame)) for frame in TRAINED.frames[Kind.DO_NOT]]
    assert all(any({*frame} <= {*words(text)} for frame in frames) for text in prohibited)


def test_held_out_verbs_and_frames_have_a_word_of_their_own(trained: set[str]) -> None:
    known = {word for text in trained for word in text.split()}
    fields = re.compile(r"\{\w+\}")
    for frames in HELD_OUT["frame"].frames.values():
        for frame in frames:
            assert set(words(fields.sub("", frame))) - known, frame
    for verb in HELD_OUT["verb"].verbs:
        assert set(words(verb)) - known, verb
    assert known.isdisjoint(HELD_OUT_NOUNS)
    assert known.isdisjoint(slip for slips in HELD_OUT_SLIPS.values() for slip in slips)


def test_frame_of_a_held_out_combination_cannot_be_another_trained_one() -> None:
    """Texts that differ in marks and articles only are held out together."""
    seen: dict[str, set[str]] = {}
    for frames in TRAINED.frames.values():
        for frame in frames:
            key = re.sub(r"[,.:!]", "", frame.replace("{a}", "{thing}"))
            for verb in TRAINED.verbs if "{verb}" in frame else ("",):
                said = frame.format(
                    verb=verb, thing="THING", a="THING", things="THINGS", stop="STOP"
                )
                seen.setdefault(" ".join(re.findall(r"[\w']+", said)), set()).add(key)
    assert not {said: keys for said, keys in seen.items() if len(keys) > 1}


def test_amounts() -> None:
    assert len(TRAINED.verbs) >= 40
    assert len(TRAINED.frames[Kind.GO]) >= 40
    assert len(HELD_OUT["verb"].verbs) >= 10
    assert len(HELD_OUT["frame"].frames[Kind.GO]) >= 10
    assert len([noun for noun in NOUNS if " " not in noun]) >= 120
    assert len([noun for noun in HELD_OUT_NOUNS if " " not in noun]) >= 40
    assert "person" in NOUNS
    assert set(NOUNS).isdisjoint(HELD_OUT_NOUNS)
    for slips in (SLIPS, HELD_OUT_SLIPS):
        assert set(NAMES) <= set(slips)
        assert all(slips.values())


def test_every_synonym_and_misspelling_means_one_word() -> None:
    assert set(SYNONYMS) <= set(NAMES)
    synonyms = [synonym for each in SYNONYMS.values() for synonym in each]
    slips = [slip for part in (SLIPS, HELD_OUT_SLIPS) for each in part.values() for slip in each]
    assert len(set(synonyms)) == len(synonyms)
    assert len(set(slips)) == len(slips)
    known = {*NAMES, *(word for synonym in synonyms for word in words(synonym))}
    nouns = {word for noun in (*NOUNS, *HELD_OUT_NOUNS) for word in noun.split()} - {*SHAPES}
    assert known.isdisjoint(slips)
    assert nouns.isdisjoint(slips)
    assert nouns.isdisjoint(known)


def test_misspellings_keep_the_first_letter() -> None:
    assert set(misspellings("mug")) == {"muug", "mgu", "mugg"}
    assert {"bll", "bal", "blal", "baall", "balll"} == set(misspellings("ball"))


@pytest.mark.parametrize("name", ["plain", "trained", *HELD_OUT])
def test_texts_are_typed_as_people_type(name: str) -> None:
    wordings = {"plain": PLAIN, "trained": TRAINED, **HELD_OUT}[name]
    for kind in Kind:
        for text in drawn(wordings, kind, 300):
            assert re.fullmatch(r"[A-Z]?[a-z ,.:'!?-]+", text), text
            assert text == " ".join(text.split()), text
            assert len(text) < 120, text


@pytest.mark.parametrize("name", ["trained", *HELD_OUT])
def test_only_words_for_stop_ask_to_stop(name: str) -> None:
    """A prohibition may: the product stops on "do not go" before a model reads it."""
    wordings = HELD_OUT.get(name, TRAINED)
    for kind in Kind:
        if kind is not Kind.DO_NOT:
            for text in drawn(wordings, kind, 150):
                assert asks_to_stop(text) == (kind is Kind.STOP), text


def test_each_text_says_its_subject() -> None:
    """Each name is said in its own word, a synonym or a misspelling of one of them."""
    rng = np.random.default_rng(5)
    for about in NAMED:
        for wordings in (TRAINED, *HELD_OUT.values()):
            said = wordings.draw(rng, Kind.GO, about).lower()
            for word in (*about.name.split(), *about.landmark.split()):
                assert any(form in said for form in forms(word)), (about, said)


def forms(name: str) -> Iterable[str]:
    for text in (name, *SYNONYMS.get(name, ())):
        yield text
        for word in text.split():
            for slip in (*SLIPS.get(word, ()), *HELD_OUT_SLIPS.get(word, ())):
                yield text.replace(word, slip)
