"""bench dragon: private runs are found however they leave; the attack finds what is there."""

from __future__ import annotations

import json
import struct

import pytest
from dragon_bed import engine_of
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]

from collab_llm_lab.bench.dragon.privacy import AttackPlan, leaks, measure_attack
from collab_llm_nodes.engine.engine import Engine

SECRET = (301, 14, 255, 290, 77)
OTHER = tuple(range(400, 440))
DOCUMENTS = ((*OTHER, *SECRET), (5, 6, 7, 8))
QUESTION, ANSWER = (1, 2, 3, 4, 5, 6), (9, 10, *OTHER[:6], 11)


def decode(ids: object) -> str:
    return " ".join(f"w{token}" for token in ids)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "message",
    [
        decode(SECRET[1:]).encode(),
        b"\x0a\x10" + b"".join(map(_VarintBytes, SECRET[1:])) + b"\x12",
        struct.pack("<4i", *SECRET[1:]),
        struct.pack("<4q", *SECRET[1:]),
        struct.pack("<4H", *SECRET[1:]),
        json.dumps({"ids": SECRET[1:]}).encode(),
        json.dumps(SECRET[1:], separators=(",", ":")).encode(),
    ],
    ids=["text", "varints", "int32", "int64", "uint16", "json", "compact json"],
)
def test_a_private_run_is_found_in_every_form(message: bytes) -> None:
    found = leaks([b"hello", message], DOCUMENTS, QUESTION, ANSWER, decode)
    assert (found.outside_answer, found.in_bytes, found.in_drafts) == (1, 1, 0)
    assert found.runs == 42 + 1
    assert found.in_answer == 3
    assert found.bytes == 5 + 1 + len(message)
    middle = len(message) // 2
    apart = leaks([message[:middle], message[middle:]], DOCUMENTS, QUESTION, ANSWER, decode)
    assert apart.outside_answer == 0


def test_the_answer_and_the_question_are_no_leak() -> None:
    sent = [decode(ANSWER).encode(), decode(QUESTION).encode(), decode((5, 6, 7, 8)).encode()]
    question = (*QUESTION, 7, 8)
    found = leaks(sent, DOCUMENTS, question, ANSWER, decode)
    assert found.outside_answer == 0
    assert found.in_answer == 3


def test_drafts_leak_one_by_one() -> None:
    # Behind the answer's OTHER[4], OTHER[5], the device drafted on, and was rejected.
    drafts = [(2, OTHER[0]), (8, OTHER[6]), (9, OTHER[7]), (8, 11)]
    found = leaks([], DOCUMENTS, QUESTION, ANSWER, decode, drafts)
    assert (found.outside_answer, found.in_drafts, found.in_bytes) == (2, 2, 0)
    # All that is drafted right away leaks as well.
    alone = leaks([], DOCUMENTS, QUESTION, ANSWER, decode, list(enumerate(SECRET)))
    assert alone.in_drafts == 2


def test_the_attack_finds_documents_in_what_is_exchanged() -> None:
    engine: Engine = engine_of()
    plan = AttackPlan(houses=4, candidates=6, held=3, retrieved=1, tokens=4, top_p=(1.0,))
    found = measure_attack(engine, plan)
    assert found["chance"] == pytest.approx(1 / 6)
    # With one document the exchanged distribution is that of the document itself.
    assert found["distributions_1"] == 1.0
    assert found["weight_0"] >= 0.75  # documents with equal scores have equal weights
    assert found["weight_1"] <= 1.0
    assert set(found) == {
        *("chance", "question", "answer", "distributions_1"),
        *("weight_0", "weight_0.1", "weight_1"),
    }
