"""Answers that are sentences of the documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dragon_bed import QUESTION, TEXTS, config_of, engine_of, side_with

from collab_llm_nodes.knowledge.quoting import EvidenceConfig, Quotable
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.protocols.dragon.generation import DocumentsDecoder, ModelSide
from collab_llm_nodes.protocols.dragon.quotes import QuoteCap, Quotes, restricted

END = 99
QUOTES = Quotes([[(1, 2, 3), (1, 4)], [(1, 2)], [(), (7,)]], {END, 98})


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ((), [[1], [1], [7]]),
        ((1,), [[2, 4], [2], []]),
        ((1, 2), [[3], [98, END], []]),
        ((1, 2, 3), [[98, END], [], []]),
        ((5,), [[], [], []]),
        ((1, 2, 3, END), [[], [], []]),
    ],
)
def test_only_words_of_the_sentences_follow(
    answer: tuple[int, ...], tokens: list[list[int]]
) -> None:
    assert QUOTES.next_tokens(answer) == tokens


def test_probabilities_are_shared_among_the_words_that_may_follow() -> None:
    rows = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]))
    kept = restricted(rows, [[1, 2], []]).exp()
    np.testing.assert_allclose(kept[0], [0.0, 0.4, 0.6, 0.0], atol=1e-6)
    np.testing.assert_allclose(kept[1], [0.4, 0.3, 0.2, 0.1], atol=1e-6)


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [((), []), ((1,), []), ((1, 2), [3, 9]), ((5, 1, 2), [3, 9]), ((2, 3), [4]), ((3, 4), [])],
)
def test_a_cap_forbids_the_next_token_of_a_run(answer: tuple[int, ...], tokens: list[int]) -> None:
    assert QuoteCap([(1, 2, 3, 4), (7, 1, 2, 9)], 2).forbidden(answer) == tokens


@pytest.mark.parametrize("most", [1, 3])
def test_a_free_answer_repeats_no_more_of_a_document_than_is_allowed(most: int) -> None:
    text = "oil oil oil oil oil oil oil oil. The pump needs oil every week."
    engine = engine_of()
    config = replace(config_of(documents=1), quoted_tokens=most)
    side = side_with({"pump": text}, engine, config)
    free, capped = (side.decoder("oil?", 40, c) for c in (replace(config, quoted_tokens=0), config))
    document = side.layout.document(text)
    start = len(side.layout.document("oil")) - 1
    run = document[start : start + most + 1]
    for decoder in (free, capped):
        for token in run[:-1]:
            decoder.push(token)
    assert free.next()[0][run[-1]] > 0
    probabilities = capped.next()[0]
    assert probabilities[run[-1]] == 0
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-5)
    free.close()
    capped.close()


def quoting_side(least: float = 0.5) -> ModelSide:
    config = replace(config_of(), answers="quote", evidence=EvidenceConfig(least=least))
    texts = TEXTS | {"two": "Tom repaired the lamp. The red ball is Ann's."}
    return side_with(texts, engine_of(), config)


def written(decoder: DocumentsDecoder, side: ModelSide) -> list[int]:
    """The greedy answer, without its end."""
    answer: list[int] = []
    while True:
        token = int(decoder.next()[0].argmax())
        if token in side.info.eos:
            return answer
        answer.append(token)
        decoder.push(token)


def test_the_answer_is_a_sentence_of_a_document_that_was_found() -> None:
    side = quoting_side()
    decoder = side.decoder(QUESTION, 40)
    said = side.decode(written(decoder, side)).strip()
    decoder.close()
    assert isinstance(decoder.found, Quotable)
    assert said in decoder.found.sentences


def test_a_rollback_gives_the_words_before_back() -> None:
    side = quoting_side()
    decoder = side.decoder(QUESTION, 40)
    first = decoder.next()
    written(decoder, side)
    decoder.rollback(0)
    again = decoder.next()
    decoder.close()
    np.testing.assert_allclose(again[0], first[0], atol=1e-6)
    assert again[1] == pytest.approx(first[1], abs=1e-5)


def test_documents_that_go_on_otherwise_lose_their_weight() -> None:
    side = quoting_side(least=0.0)
    decoder = side.decoder(QUESTION, 40)
    _, whole = decoder.next()
    answer = written(decoder, side)
    _, rest = decoder.next()
    assert rest < whole
    decoder.push(answer[0])  # behind the end of the sentence: no document goes on so
    p, nothing = decoder.next()
    decoder.close()
    assert nothing == float("-inf")
    assert abs(float(p.sum()) - 1) < 1e-5
    ends = [token for token in range(len(p)) if p[token] > 0]
    assert set(ends) <= side.info.eos, "alone it would end the answer, not invent the rest"


def written_about(side: ModelSide, question: str) -> tuple[str, float]:
    """The greedy answer of one side alone, and its weight before the first token."""
    decoder = side.decoder(question, 40)
    _, weight = decoder.next()
    said = side.decode(written(decoder, side)).strip()
    decoder.close()
    return said, weight


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Where is the pump?", TEXTS["pump"]),
        ("WHERE ARE THE PUMPS", TEXTS["pump"]),
        ("Whose is the ball?", "The red ball"),
        ("To what is the pump oiled every week?", TEXTS["pump"]),
        ("Where is the green umbrella?", ""),
        ("umbrella?", ""),
        ("Who repaired the lamp?", "lamp"),
    ],
)
def test_only_a_sentence_with_evidence_is_an_answer(question: str, answer: str) -> None:
    said, weight = written_about(quoting_side(), question)
    assert answer in said
    assert bool(said) == (weight > -np.inf) == bool(answer)


def test_the_other_sentences_of_a_document_are_no_answer() -> None:
    config = replace(config_of(), answers="quote")
    side = side_with({"two": "The blue box is near. The red ball is far."}, engine_of(), config)
    assert written_about(side, "Where is the red ball?")[0] == "The red ball is far."
    assert written_about(side, "Where is the blue box?")[0] == "The blue box is near."


def test_a_document_with_evidence_is_found_behind_others() -> None:
    """Documents with more of the question's common words do not take its place."""
    texts = {f"{n}": f"Who has what, and who has the {n} that he has had?" for n in range(20)}
    texts["lamp"] = "Tom has a lamp in his new green bag today."
    config = replace(config_of(documents=2), answers="quote")
    side = side_with(texts, engine_of(), config)
    question = "Who is it that has the lamp?"
    free = side.retrieve(question, replace(config, answers="free"))
    assert "lamp" not in {hit.name for hit in free.hits}
    assert [hit.name for hit in side.retrieve(question).hits] == ["lamp"]


@pytest.mark.parametrize("store", [None, Store(None)])
def test_a_side_without_documents_does_not_make_up_an_answer(store: Store | None) -> None:
    side = ModelSide(engine_of(), store, replace(config_of(), answers="quote"))
    said, weight = written_about(side, "Where is the red ball?")
    assert (said, weight) == ("", float("-inf"))


def test_both_sides_must_quote_or_neither() -> None:
    free, side = config_of(), quoting_side()
    assert side.scorer(free) != side.info.scorer
