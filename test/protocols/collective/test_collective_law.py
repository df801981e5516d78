"""The exact law of whole sampled answers: machine, draft models and target, over all branches.

All randomness of the laws comes from a script, so each branch of an answer is made by the code that
serves requests, and counted with its probability.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from enumeration import (
    EOS,
    Scripted,
    TableModel,
    autoregressive_law,
    dense,
    enumerate_program,
    total_variation,
)
from fake_models import FakeEngine, as_engine
from torch import Tensor

from collab_llm_nodes.decoding import rejection
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution
from collab_llm_nodes.protocols.collective.length import FIXED, LengthConfig
from collab_llm_nodes.protocols.collective.machine import AnswerUpdate, Ended, Machine
from collab_llm_nodes.protocols.collective.messages import Draw, Verify
from collab_llm_nodes.protocols.collective.models import DraftModel, Target
from collab_llm_nodes.protocols.collective.requests import Job
from collab_llm_nodes.protocols.collective.schedule import ScheduleConfig

VOCABULARY, MODELS = 3, 3
PROMPT = (1, 2)
END = frozenset({EOS})
PLAIN = SamplingConfig(temperature=1.0)
SHAPED = SamplingConfig(temperature=0.7, top_k=2)


class TableEngine(FakeEngine):
    """An engine whose logits are the logarithms of a table's probabilities."""

    def __init__(self, table: TableModel) -> None:
        super().__init__(exits=())
        self.table = table

    def logits(self, context: object, layer: int | None = None) -> Tensor:
        assert isinstance(context, list)
        return torch.from_numpy(self.table(tuple(context[len(PROMPT) :]))).log()


@dataclass
class Answering:
    """Makes one answer of ``max_tokens`` tokens at most with drafts of ``s`` tokens.

    Attributes:
        rounds: verifications of all answers so far.
        accepted: draft tokens that stood in them.
    """

    seed: int
    s: int
    max_tokens: int
    schedule: ScheduleConfig
    sampling: SamplingConfig
    rounds: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.target = TableModel(VOCABULARY, self.seed)
        self._engine = TableEngine(self.target)
        tables = [TableModel(VOCABULARY, self.seed + 100 * (i + 1)) for i in range(MODELS)]
        self._drafts = [TableEngine(table) for table in tables]

    def answer(self) -> tuple[int, ...]:
        models = [DraftModel(as_engine(e), END, i) for i, e in enumerate(self._drafts)]
        target = Target(as_engine(self._engine))
        length = LengthConfig(FIXED, initial=self.s)
        machine = Machine(MODELS, END, schedule=self.schedule, length=length)
        machine.submit(Job("a", PROMPT, self.sampling, self.max_tokens), 0.0)
        tokens: tuple[int, ...] = ()
        while actions := machine.poll(0.0):
            for action in actions:
                if isinstance(action, Draw):
                    drawn = models[action.model].draw(action.asks)
                    machine.on_proposals(action.model, action.batch, action.step, drawn, 0.0)
                elif isinstance(action, Verify):
                    machine.on_verdicts(action.batch, target.verify(action.claims), 0.0)
                elif isinstance(action, AnswerUpdate):
                    tokens = action.tokens
                    self.rounds += 1
                    self.accepted = max(self.accepted, action.metrics.accepted)
                elif isinstance(action, Ended):
                    assert action.error is None
        return tokens


def distance(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the total variation between the law of the answers and the target's own."""

    def program(draws: Scripted) -> tuple[int, ...]:
        monkeypatch.setattr(rejection, "KeyedDraws", lambda seed: draws)
        return answering.answer()

    law: dict[tuple[int, ...], float] = {}
    for weight, answer in enumerate_program(program):
        assert isinstance(answer, tuple)
        law[answer] = law.get(answer, 0.0) + weight
    assert sum(law.values()) == pytest.approx(1.0)

    def shaped(prefix: tuple[int, ...]) -> np.ndarray:
        with np.errstate(divide="ignore"):
            law = distribution(np.log(answering.target(prefix)), answering.sampling)
        return dense([law])[0]

    return total_variation(law, autoregressive_law(shaped, answering.max_tokens))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sampling", [PLAIN, SHAPED], ids=["plain", "shaped"])
@pytest.mark.parametrize("every_token", [False, True])
def test_sampled_answers_follow_the_targets_law(
    every_token: bool, sampling: SamplingConfig, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = ScheduleConfig(vote_every_token=every_token)
    answering = Answering(seed, 3, 5, schedule, sampling)
    assert distance(answering, monkeypatch) < 1e-12
    assert answering.rounds > 1
    assert answering.accepted >= 1, "drafts are judged, and some of them stand"


@pytest.mark.parametrize("law", ["rejection", "coupled"])
@pytest.mark.parametrize("seed", range(10))
def test_a_seed_gives_one_text_whatever_is_drafted(seed: int, law: str) -> None:
    """Compare drafts of several lengths, and none: measured times choose among them."""
    sampling = replace(PLAIN, seed=seed, law=law)
    texts = {Answering(5, s, 8, ScheduleConfig(), sampling).answer() for s in (0, 1, 3)}
    assert len(texts) == 1


@pytest.mark.parametrize("every_token", [False, True])
def test_the_printed_rule_changes_the_law(
    every_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper accepts with min(1, p/q), q being the voted model's, which the vote has changed."""
    schedule = ScheduleConfig(vote_every_token=every_token, paper_faithful=True)
    biases = [distance(Answering(i, 1, 2, schedule, PLAIN), monkeypatch) for i in range(3)]
    assert biases == pytest.approx([0.0595, 0.0779, 0.0168], abs=5e-4)  # as in test_vote.py
