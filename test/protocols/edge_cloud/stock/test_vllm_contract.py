"""What vLLM 0.32.0 really answered to what we ask, recorded (``support/stock_recording.py``)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from stock_recording import TOP, WAYS, Played, Player, play

RECORDED = Path(__file__).with_name("vllm_0_32.json")
SERVED = RECORDED.with_name("vllm_0_32_model")
"""Tokenizer and settings of the model that was served then."""


@pytest.fixture(scope="module")
def recorded() -> Any:
    return json.loads(RECORDED.read_text())


@pytest.fixture(params=WAYS, ids=lambda way: way[0])
def played(recorded: Any, request: pytest.FixtureRequest) -> Played:
    name, shown, generates = request.param
    picture = b"any" if shown else None
    http = Player(recorded[name])
    return asyncio.run(
        play(http, "nav-target", picture, generates=generates, tokenizer=str(SERVED))
    )


def test_every_method_finds_the_tokens_that_the_server_decodes_alone(played: Played) -> None:
    right = played.alone[2:5]
    for rows in played.greedy.values():
        assert len(rows) == len(played.draft) + 1
        assert tuple(next(iter(row)) for row in rows[:3]) == right
    assert played.greedy["probes"] == played.greedy["one_request"]


def test_every_method_finds_the_same_log_probabilities(played: Played) -> None:
    for one, other in zip(played.top["probes"], played.top["one_request"], strict=True):
        assert len(one) == len(other) == TOP
        assert other == pytest.approx(one, abs=1e-3)


def test_the_likeliest_token_is_the_greedy_one(played: Played) -> None:
    for greedy, top in zip(played.greedy["probes"], played.top["probes"], strict=True):
        assert max(top, key=top.__getitem__) == next(iter(greedy))


def test_the_server_counts_the_features_of_a_picture(played: Played, recorded: Any) -> None:
    assert played.facts.context == 1024
    assert len(played.facts.revision) == 8
    shown = any("content_parts" in (e["body"] or {}) for e in recorded["picture"])
    assert shown
    assert played.length > 10


def test_what_ends_vllm_for_all_its_clients_is_never_sent(recorded: Any) -> None:
    assert "skip_reading_prefix_cache" not in json.dumps(recorded)


def test_without_the_scale_out_api_pictures_go_through_the_chat(recorded: Any) -> None:
    paths = {exchange["path"] for exchange in recorded["chat"]}
    assert "/v1/chat/completions" in paths
