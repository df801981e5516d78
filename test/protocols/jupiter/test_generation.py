"""Answers over stages are the single device's, whatever divides, drafts or carries them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from jupiter_bed import ARCHITECTURE, LAYERS, alone, control, pipeline, prompt
from tiny_models import tiny_model

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.jupiter.chain import Layers
from collab_llm_nodes.protocols.jupiter.drafters import DRAFTERS, drafter_named
from collab_llm_nodes.protocols.jupiter.generation import Asked, answer, points
from collab_llm_nodes.protocols.jupiter.lane import whole
from collab_llm_nodes.protocols.jupiter.messages import Result, Step, Want
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline, equal_parts

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
        asked = Asked(TOKENS, drafter=drafter_named(drafter), lengths=in_thirds)
        found = answer(made, ids, asked, control())
    assert found.tokens == alone(ids, TOKENS)
    if drafter == "none":
        assert found.passes == len(found.tokens)
    else:
        assert 0 < sum(found.accepted) == len(found.tokens) - found.passes
        assert found.drafted > sum(found.accepted)
