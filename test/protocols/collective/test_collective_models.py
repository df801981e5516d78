"""The target's verdicts on several claims of one pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from collective_models import target

from collab_llm_nodes.decoding.rejection import Outcome
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.protocols.collective.messages import Claim
from collab_llm_nodes.protocols.collective.models import Target

GREEDY, COUPLED = SamplingConfig(), SamplingConfig(temperature=0.8, seed=3, law="coupled")

NAMES = tuple(enumerate("abc", start=8))


class Overflowing(Engine):
    """An engine whose logits of one feed are not finite."""

    bad = 0

    def run(self, *arguments: Any, **options: Any) -> Any:
        rows: list[Any] = [*super().run(*arguments, **options)]
        rows[self.bad] = torch.full_like(rows[self.bad], math.nan)
        return rows


def claims(sampling: SamplingConfig) -> list[Claim]:
    return [Claim(name, (5, 6, 7, first), (), sampling, (1, 2), None) for first, name in NAMES]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_logits_that_are_not_finite_end_their_own_answer_only(
    sampling: SamplingConfig, bad: int
) -> None:
    engine = Overflowing(target().loaded)
    engine.bad = bad
    judge, other = Target(engine), Target(target())
    found, expected = judge.verify(claims(sampling)), other.verify(claims(sampling))
    error = found.pop(bad)
    assert isinstance(error, ModelError)
    assert "not finite" in str(error)
    expected.pop(bad)
    assert found == expected
    assert all(isinstance(verdict, Outcome) for verdict in found)
    judge.sessions.close()
    other.sessions.close()


def test_no_claim_that_is_read_leaves_the_errors() -> None:
    judge = Target(target())
    long = Claim("long", (5,) * 2000, (), GREEDY, (), None)
    (verdict,) = judge.verify([long])
    assert isinstance(verdict, Exception)
    assert judge.verify([]) == []
    judge.sessions.close()
