"""The law of guided answers by enumeration, of the machines that are used."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from enumeration import Scripted, enumerate_program, total_variation
from fake_models import EOS, VOCAB, FakeEngine, as_engine, encode
from guided_models import allowed_by, spelling_engine, spelt

from collab_llm_nodes.decoding import rejection
from collab_llm_nodes.decoding.sampling import Distribution, SamplingConfig, distribution
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClient, EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.messages import open_message
from collab_llm_nodes.protocols.edge_cloud.server import VerifierSession
from collab_llm_nodes.protocols.edge_cloud.target import TargetSession

LENGTH = 6
GUIDE = Guide("regex", "(ab|bac?|cde)(f|ab)?")
LANGUAGE = frozenset(
    "".join(parts) for parts in itertools.product(("ab", "ba", "bac", "cde"), ("", "f", "ab"))
)
PROMPT = encode(Prompt("spell"))
TARGET, DRAFT = spelling_engine(3), spelling_engine(3, noise=1.0)
LAWS = {
    "plain": SamplingConfig(1.0),
    "top-k": SamplingConfig(1.3, top_k=2),
    "top-p": SamplingConfig(1.5, top_p=0.9),
}


def next_law(answer: tuple[int, ...], sampling: SamplingConfig) -> Distribution:
    """Return the target's law over the tokens of ``LANGUAGE``, limited before it is sampled."""
    logits = TARGET.logits((*PROMPT.ids, *answer)).numpy()
    limited = np.full(VOCAB, -np.inf, dtype=np.float32)
    allowed = allowed_by(LANGUAGE, spelt(answer))
    limited[allowed] = logits[allowed]
    return distribution(limited, sampling)


def guided_law(sampling: SamplingConfig) -> dict[tuple[int, ...], float]:
    """Return the probability of each answer of the guided target."""
    law: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        answer, weight = waiting.pop()
        if len(answer) == LENGTH or EOS in answer:
            law[answer] = weight
            continue
        p = next_law(answer, sampling)
        pairs = zip(p.ids.tolist(), p.probs.tolist(), strict=True)
        waiting += [((*answer, token), weight * share) for token, share in pairs]
    return law


def decode(gamma: int, sampling: SamplingConfig) -> tuple[int, ...]:
    """Return one answer of draft and target."""
    drafter = Drafter(as_engine(DRAFT), PROMPT, sampling, guide=DRAFT.loaded.guides.open(GUIDE))
    opened = open_message(Prompt("spell"), sampling, LENGTH, "", guide=GUIDE)
    target = TargetSession(as_engine(TARGET), PROMPT, opened)
    target.prefill()
    client = EdgeClient(EdgeClientConfig(gamma, LENGTH), filled=True)
    while not client.finished:
        draft = drafter.draft(client.next_draft())
        assert draft is not None
        client.on_sent(draft)
        target.offer(draft)
        while (verdict := target.verify_next(lambda exit_: None)) is not None:
            client.on_verdict(verdict)
    return tuple(client.generated)


def output_law(
    gamma: int, sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, ...], float]:
    def program(draws: Scripted) -> object:
        monkeypatch.setattr(rejection, "KeyedDraws", lambda seed: draws)
        return decode(gamma, sampling)

    output: dict[tuple[int, ...], float] = {}
    for weight, answer in enumerate_program(program):
        assert isinstance(answer, tuple)
        output[answer] = output.get(answer, 0.0) + weight
    return output


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("gamma", [0, 1, 2])
def test_answers_have_the_law_of_the_guided_target(
    gamma: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = LAWS[name]
    expected = guided_law(sampling)
    output = output_law(gamma, sampling, monkeypatch)
    assert total_variation(output, expected) < 1e-12
    assert {spelt(answer) for answer in output} <= LANGUAGE
    assert len(output) > 1


def _unlimited(self: VerifierSession, logits: torch.Tensor) -> torch.Tensor:
    return logits


def _limited_too_late(self: VerifierSession, logits: torch.Tensor) -> torch.Tensor:
    """Limit what top-k has left."""
    rows = _limited(self, logits)
    keep = logits.topk(2, dim=-1).values[:, -1:]
    late = rows.masked_fill(logits < keep, -torch.inf)
    return torch.where(late.amax(-1, keepdim=True) > -torch.inf, late, rows)


_limited = VerifierSession.limited


@pytest.mark.parametrize("mutant", [_unlimited, _limited_too_late])
def test_the_enumeration_sees_a_guide_that_is_left_out_or_comes_too_late(
    mutant: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingConfig(1.0, top_k=2)
    expected = guided_law(sampling)
    monkeypatch.setattr(VerifierSession, "limited", mutant)
    assert total_variation(output_law(0, sampling, monkeypatch), expected) > 0.01


@pytest.mark.parametrize("gamma", [0, 1, 3])
@pytest.mark.parametrize("law", ["greedy", "coupled"])
def test_greedy_and_coupled_answers_are_the_guided_targets_own(gamma: int, law: str) -> None:
    for seed in range(8):
        sampling = SamplingConfig(1.0, law="coupled", seed=seed)
        if law == "greedy":
            sampling = SamplingConfig()
        own: list[int] = []
        while len(own) < LENGTH and EOS not in own:
            own.append(rejection.own_token(next_law(tuple(own), sampling), sampling, len(own)))
        assert decode(gamma, sampling) == tuple(own)


def test_the_fakes_disagree_often_enough() -> None:
    """Else the enumeration would see accepted drafts only."""
    assert isinstance(TARGET, FakeEngine)
    same = [
        int(TARGET.logits((i, j, 1)).argmax() == DRAFT.logits((i, j, 1)).argmax())
        for i, j in itertools.product(range(10), repeat=2)
    ]
    assert 10 < sum(same) < 90
