"""Questions about facts that lie in two stores, answered by every method.

single   the answer is a fact that one of the stores holds, by turns the device's and the cloud's
compare  it needs a fact of each store ("Which costs more?"): output aggregation joins tokens, not
         facts, so a context with both documents should win. Right if the right one of the two
         answers is the more probable one: guessing gives a half.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collab_llm_lab.bench.dragon.quality import (
    CLOUD,
    CRCG_CLOUD,
    CRCG_DEVICE,
    DEVICE,
    DRAGON,
    DRAGON_LIKELIHOOD,
    DRCG,
    METHODS,
    NONE,
)
from collab_llm_lab.phrases import Voice, pick, say, says
from collab_llm_lab.training.text.facts import KINDS
from collab_llm_lab.training.text.passages import Writer
from collab_llm_lab.training.text.samples import SUB_DOMAINS
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.protocols.dragon.generation import DocumentsDecoder, ModelSide
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.layout import Ids
from collab_llm_nodes.protocols.dragon.side_settings import (
    POSTERIOR,
    STATIC,
    RelevanceConfig,
    SideConfig,
)

Decoders = Sequence[DocumentsDecoder]

SINGLE, COMPARE = "single", "compare"
_PRICE = next(kind for kind in KINDS if kind.name == "price")


@dataclass(frozen=True)
class AnswersPlan:
    """Sizes of the measurement; ``documents`` are retrieved per side, of ``stored``."""

    questions: int = 24
    stored: int = 6
    documents: int = 2
    max_tokens: int = 24
    temperature: float = 0.1
    memory: float = 0.9
    held_out: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Puzzle:
    """A question over two stores.

    Attributes:
        device, cloud: documents; the first of each holds a fact, which the question needs or not.
        right: must be said.
        wrong: the other answer, where there are two to choose from.
    """

    device: tuple[str, ...]
    cloud: tuple[str, ...]
    question: str
    right: str
    wrong: str = ""


def make_puzzle(kind: str, number: int, plan: AnswersPlan) -> Puzzle:
    """Draw a puzzle of the kind ``SINGLE`` or ``COMPARE``."""
    rng = random.Random(f"{plan.seed} {kind} {number}")
    world = World(rng, plan.held_out)
    writer = Writer(world, world.any(SUB_DOMAINS))
    voice = Voice(rng)
    if kind == SINGLE:
        facts = [writer.first() for _ in range(2)]
        asked, fields = facts[number % 2]
        question, right = pick(asked.questions, voice, fields, plan.held_out), fields[asked.value]
        wrong = ""
    else:
        facts = [(_PRICE, _PRICE.draw(world)) for _ in range(2)]
        one, other = (fields for _, fields in facts)
        writer.reserve(_PRICE, one)
        question = f"Which costs more, the {one['thing']} or the {other['thing']}?"
        if float(one["price"]) < float(other["price"]):
            one, other = other, one
        right, wrong = one["thing"], other["thing"]
    sides = []
    for kind_of_fact, fields in facts:
        stated = [say(kind_of_fact.statements[writer.style], voice, fields)]
        for _ in range(2 * plan.stored - 1):
            filler = writer.other_kind()
            stated.append(say(filler.statements[writer.style], voice, filler.draw(world)))
        pairs = zip(stated[::2], stated[1::2], strict=True)
        sides.append(tuple(f"{_whole(first)} {_whole(second)}" for first, second in pairs))
    return Puzzle(sides[0], sides[1], question, right, wrong)


def measure_answers(engine: Engine, plan: AnswersPlan) -> dict[str, dict[str, float]]:
    """Return ``<kind>.<method>``, the share of the puzzles that were solved."""
    found = {}
    for kind in (SINGLE, COMPARE):
        puzzles = [make_puzzle(kind, number, plan) for number in range(plan.questions)]
        solved = [_solve(engine, puzzle, plan) for puzzle in puzzles]
        found[kind] = {m: sum(each[m] for each in solved) / len(solved) for m in METHODS}
    return found


def _solve(engine: Engine, puzzle: Puzzle, plan: AnswersPlan) -> dict[str, bool]:
    """Return for each method whether it solves the puzzle."""
    device, cloud = (side_of(engine, texts, plan) for texts in (puzzle.device, puzzle.cloud))
    sides, question = (device, cloud), puzzle.question
    try:
        texts = [[hit.chunk.text for hit in side.retrieve(question).hits] for side in sides]
        layout = device.layout
        fixed, following = (_config(plan, rule) for rule in (STATIC, POSTERIOR))

        def plain(ids: Ids) -> DocumentsDecoder:
            return device.continuation(ids)

        def together(texts: Sequence[str]) -> Decoders:
            return [plain((*layout.documents(texts), *layout.after(question)))]

        def mixed(config: SideConfig, *of: ModelSide) -> Decoders:
            return [side.decoder(question, plan.max_tokens, config) for side in of]

        ways: dict[str, Callable[[], Decoders]] = {
            NONE: lambda: [plain(layout.alone(question))],
            CRCG_DEVICE: lambda: together(texts[0]),
            CRCG_CLOUD: lambda: together(texts[1]),
            DRCG: lambda: together([*texts[0], *texts[1]]),
            DEVICE: lambda: mixed(fixed, device),
            CLOUD: lambda: mixed(fixed, cloud),
            DRAGON: lambda: mixed(fixed, *sides),
            DRAGON_LIKELIHOOD: lambda: mixed(following, *sides),
        }
        return {name: _solved(engine, puzzle, way, plan) for name, way in ways.items()}
    finally:
        for side in sides:
            side.close()


def _solved(engine: Engine, puzzle: Puzzle, way: Callable[[], Decoders], plan: AnswersPlan) -> bool:
    if not puzzle.wrong:
        answer = greedy(way(), plan.max_tokens, engine.eos)
        return says(engine.decode(answer), puzzle.right)
    encode = engine.loaded.tokenizer
    nats = [
        likelihood(way(), [*encode(text, add_special_tokens=False)["input_ids"], min(engine.eos)])
        for text in (puzzle.right, puzzle.wrong)
    ]
    return nats[0] > nats[1]


def greedy(decoders: Decoders, max_tokens: int, eos: frozenset[int]) -> list[int]:
    """Return the most likely token of Equation 4, again and again; the decoders are closed.

    It is the plain loop, which waits for both sides at each token (the paper's DRDG/TW).
    """
    tokens: list[int] = []
    try:
        while len(tokens) < max_tokens and not (tokens and tokens[-1] in eos):
            tokens.append(int(np.argmax(_mixture(decoders))))
            for decoder in decoders:
                decoder.push(tokens[-1])
    finally:
        for decoder in decoders:
            decoder.close()
    return tokens


def likelihood(decoders: Decoders, answer: Sequence[int]) -> float:
    """Return the log-probability of an answer by Equation 4; the decoders are closed."""
    found = 0.0
    try:
        for token in answer:
            found += float(np.log(max(_mixture(decoders)[token], 1e-30)))
            for decoder in decoders:
                decoder.push(token)
    finally:
        for decoder in decoders:
            decoder.close()
    return found


def _mixture(decoders: Decoders) -> NDArray[np.float64]:
    rows, logs = zip(*(decoder.next() for decoder in decoders), strict=True)
    if len(rows) == 1:
        return rows[0].astype(np.float64)
    shares = np.exp(np.array(logs) - np.logaddexp.reduce(logs))
    mixed: NDArray[np.float64] = shares @ np.stack(rows)
    return mixed


def _config(plan: AnswersPlan, update: str = STATIC) -> SideConfig:
    return SideConfig(
        retrieval=RetrievalConfig(
            method="rescored", chunks=plan.documents, temperature=plan.temperature
        ),
        relevance=RelevanceConfig(update=update, memory=plan.memory),
    )


def side_of(engine: Engine, texts: Sequence[str], plan: AnswersPlan) -> ModelSide:
    """Return a side with these documents."""
    store, config = Store(None), _config(plan)
    side = ModelSide(engine, store, config)
    index = Index(store, side.layout, side.encoder, config)
    for number, text in enumerate(texts):
        index.add(f"document {number}", text)
    return side


def _whole(text: str) -> str:
    return text if text[-1] in ".!?" else text + "."
