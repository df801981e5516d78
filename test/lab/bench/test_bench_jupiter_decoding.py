"""The modes of decoding that the Jupiter benchmark compares, with workers in this process."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from jupiter_bed import folder, in_this_process, prompt
from text_family import write_family

from collab_llm_lab.bench.jupiter import decoding
from collab_llm_lab.bench.jupiter.decoding import (
    OracleDrafter,
    balanced_head,
    head_layers,
    run_decode,
)
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.jupiter.outline import OutlinePrompts

POINTS = [[random.Random(n).randrange(300) for _ in range(5)] for n in range(3)]


def quiet(words: str) -> None:
    """Tell nobody."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "local_workers", in_this_process)
    monkeypatch.setattr(decoding, "ANSWER_TOKENS", 20)
    monkeypatch.setattr(decoding, "OUTLINE_TOKENS", 8)
    monkeypatch.setattr(decoding, "POINT_TOKENS", 6)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_family(tmp_path_factory.mktemp("decoded")) / "text-target")


def test_the_ways_of_decoding_give_their_figures(
    text_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutlinePrompts, "requests", lambda self, outline: POINTS)
    found = run_decode(text_model, 2, quiet, stages=3, slowdown=1.5, least=1)
    assert found["real"]["mismatches"] == 0
    assert found["slowdown"] == 1.5
    assert len(found["layers"]) <= 3
    decode = found["decode"]
    for mode in ("naive", "sd", "op", "both", "sd_supposed", "both_supposed"):
        assert decode[mode]["tokens_per_s"] > 0
        assert decode["speedup"][mode] == pytest.approx(
            decode[mode]["tokens_per_s"] / decode["naive"]["tokens_per_s"]
        )
    assert decode["naive"]["acceptance"] is None
    assert 0 <= decode["sd"]["acceptance"] <= 1
    assert decode["sd_supposed"]["acceptance"] > 0.3
    assert decode["sd_supposed"]["passes"] < decode["naive"]["passes"]
    assert decode["both"]["answer_tokens"] <= 3 * 6
    assert decode["naive"]["passes"] == decode["naive"]["answer_tokens"] * 2


def test_without_points_the_question_is_answered_in_sequence(
    text_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutlinePrompts, "requests", lambda self, outline: [])
    found = run_decode(text_model, 1, quiet, stages=1, slowdown=1.0, least=1)
    decode = found["decode"]
    assert found["real"]["mismatches"] == 0
    assert decode["op"]["answer_tokens"] == decode["naive"]["answer_tokens"]
    assert decode["op"]["passes"] > decode["naive"]["passes"]


def test_only_long_answers_count(text_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutlinePrompts, "requests", lambda self, outline: POINTS)
    with pytest.raises(InvalidInput, match="none of 8 answers has 99 tokens"):
        run_decode(text_model, 1, quiet, stages=1, slowdown=1.0, least=99)


def test_a_drafter_that_was_told_is_right_as_often_as_supposed() -> None:
    text = tuple(prompt(600))
    drafter = OracleDrafter((tuple(prompt(600, 1)), text), share=0.8)
    right = drafted = 0
    for held in range(100, 500):
        draft = drafter.propose(text[:held], (), 5).tokens
        right += sum(a == b for a, b in zip(draft, text[held:], strict=False))
        drafted += len(draft)
    assert drafted == 5 * 400
    assert right / drafted == pytest.approx(0.8, abs=0.04)
    assert drafter.propose(text[:598], (), 5).tokens[2:] == ()
    assert drafter.propose(text, (), 5).tokens == ()
    assert drafter.propose((1, 2, 3), (), 5).tokens == ()
    assert len(drafter.propose(text[:100], (), 2).tokens) == 2


def test_the_last_worker_s_head_counts_as_layers() -> None:
    info: Any = SimpleNamespace(num_layers=12)
    plain = balanced_head(0.0)(["a", "b", "c", "d"], info)
    assert [part.last - part.first for part in plain] == [3, 3, 3, 3]
    headed = balanced_head(2.0)(["a", "b", "c", "d"], info)
    assert [part.last - part.first for part in headed] == [4, 3, 3, 2]
    heavy = balanced_head(50.0)(["a", "b", "c"], info)
    assert [part.last - part.first for part in heavy][-1] == 1
    assert heavy[-1].last == 12


def test_the_head_s_time_is_told_in_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([9.0, 9.0, 9.0] + [2.0, 4.0, 12.0] * 5)
    monkeypatch.setattr(decoding, "durations", lambda result: [next(taken) for _ in range(3)])
    with in_this_process(3, str(folder())) as running:  # 4 layers: 1, 1, 2
        assert head_layers(running, prompt(20)) == pytest.approx(2.0)
    with in_this_process(1, str(folder())) as running:
        monkeypatch.setattr(decoding, "durations", lambda result: [1.0])
        assert head_layers(running, prompt(20)) == 0.0
