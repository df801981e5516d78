"""The exchange of two sides: acceptance by law, bytes per token, and what truncation costs.

Both sides answer questions from documents of their own, token by token. Each token is drawn from
the whole mixture, which nothing truncates; what would be exchanged is looked at beside it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collab_llm_lab.bench.dragon.answers import SINGLE, AnswersPlan, make_puzzle, side_of
from collab_llm_nodes.decoding.aggregation import (
    AggregationConfig,
    AggregationLaw,
    Party,
    shares,
)
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon.messages import Draft

Sides = tuple[NDArray[np.float64], NDArray[np.float64]]
_DECODE_S, _HELD_S = 0.05, 0.01
"""Delays that the measured drafts tell: they have an effect on nothing but their length."""


@dataclass(frozen=True)
class ExchangePlan:
    """Sizes of the measurement.

    Attributes:
        questions, tokens: that are answered, and of each answer.
        gammas: of the law ``coin``.
        top_p: mass that each side keeps.
    """

    questions: int = 12
    tokens: int = 20
    gammas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    top_p: float = 0.8
    seed: int = 0


def measure_exchange(engine: Engine, plan: ExchangePlan) -> dict[str, dict[str, float]]:
    """Return means over the tokens of all answers.

    Returns:
        ``acceptance_device``, ``acceptance_cloud``: by law (``shared``, ``coin_<gamma>``), the
        expected share of drafts that are accepted (Eq. 5, corrected).
        ``wire``: bytes of a draft (``draft``), of the same as plain JSON (``json``) and as a vector
        of fp16 numbers (``vector``), and the ratios of these to a draft.
        ``truncation``: ``total_variation`` between the exchanged mixture and the whole one, and
        ``impossible``, the share of tokens of the whole one's answers that the other cannot give.
    """
    laws = {"shared": AggregationConfig(top_p=plan.top_p)}
    for gamma in plan.gammas:
        laws[f"coin_{gamma:g}"] = AggregationConfig(law="coin", gamma=gamma, top_p=plan.top_p)
    accepted: dict[str, list[tuple[float, float]]] = {name: [] for name in laws}
    sizes: list[tuple[int, int, int]] = []
    costs: list[tuple[float, bool]] = []
    for number in range(plan.questions):
        for position, (rows, logs, token) in enumerate(_answer(engine, plan, number)):
            for name, config in laws.items():
                law = AggregationLaw(config, engine.vocab_size, seed=plan.seed)
                device, cloud = (law.propose(rows[s], logs[s], position, s) for s in Party)
                accepted[name].append(law.judge((device, cloud), position).expected)
            law = AggregationLaw(laws["shared"], engine.vocab_size, seed=plan.seed)
            device, cloud = (law.propose(rows[s], logs[s], position, s) for s in Party)
            kept = law.mixture((device, cloud))
            costs.append((0.5 * float(np.abs(kept - _mixed(rows, logs)).sum()), not kept[token]))
            sent = codec.encode_cloud(Draft(position, 0, cloud, _DECODE_S, position, _HELD_S))
            plain = json.dumps({"token": cloud.token, "p": rows[Party.CLOUD].tolist()})
            sizes.append((len(sent), len(plain), 2 * engine.vocab_size))
    draft, plain_json, vector = (statistics.fmean(column) for column in zip(*sizes, strict=True))
    variation, impossible = (statistics.fmean(column) for column in zip(*costs, strict=True))
    of_side = {
        f"acceptance_{party.name.lower()}": {
            name: statistics.fmean(pair[party] for pair in pairs)
            for name, pairs in accepted.items()
        }
        for party in Party
    }
    return {
        **of_side,
        "wire": {
            "draft": draft,
            "json": plain_json,
            "vector": vector,
            "json_ratio": plain_json / draft,
            "vector_ratio": vector / draft,
        },
        "truncation": {"total_variation": variation, "impossible": impossible},
    }


def _answer(
    engine: Engine, plan: ExchangePlan, number: int
) -> list[tuple[Sides, Sequence[float], int]]:
    """Return distributions and log weights of device and cloud, and the token, by position."""
    chance = np.random.default_rng((plan.seed, number))
    asked = AnswersPlan(seed=plan.seed)
    puzzle = make_puzzle(SINGLE, number, asked)
    sides = [side_of(engine, texts, asked) for texts in (puzzle.device, puzzle.cloud)]
    decoders = [side.decoder(puzzle.question, plan.tokens) for side in sides]
    found: list[tuple[Sides, Sequence[float], int]] = []
    try:
        while len(found) < plan.tokens and not (found and found[-1][2] in engine.eos):
            (device, device_log), (cloud, cloud_log) = (decoder.next() for decoder in decoders)
            rows, logs = (
                (device.astype(np.float64), cloud.astype(np.float64)),
                (device_log, cloud_log),
            )
            token = int(chance.choice(engine.vocab_size, p=_mixed(rows, logs)))
            found.append((rows, logs, token))
            for decoder in decoders:
                decoder.push(token)
    finally:
        for decoder in decoders:
            decoder.close()
        for side in sides:
            side.close()
    return found


def _mixed(rows: Sides, logs: Sequence[float]) -> NDArray[np.float64]:
    """Return Eq. 4's mixture [V] of distributions that nothing truncates."""
    eta = shares(logs[0], logs[1])
    mixed = eta[0] * rows[0] + eta[1] * rows[1]
    found: NDArray[np.float64] = mixed / mixed.sum()
    return found
