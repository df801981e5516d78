"""Measures of what an answer tells the cloud about the device's documents.

:func:`leaks` searches all that left for runs of tokens that only a private document has.

:func:`measure_attack` plays a cloud that knows which documents there may be, and has the device's
model. It guesses which of them the device has and retrieved, from the bytes that leave the device
over real gRPC: from distributions and weights where the cloud aggregates, from the target tokens
where the device does.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from collab_llm_lab.bench.dragon.material import House, make_house
from collab_llm_lab.bench.dragon.served import Audit, served
from collab_llm_nodes.decoding.aggregation import AggregationConfig, SideDraft
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.knowledge.chunking import ChunkPlan
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig, Retrieved, softmax
from collab_llm_nodes.knowledge.store import Hit, Store
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon.device import DeviceAnswer, Question, Rules
from collab_llm_nodes.protocols.dragon.generation import DocumentsDecoder, ModelSide
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.link import PatienceConfig
from collab_llm_nodes.protocols.dragon.messages import Draft, Target
from collab_llm_nodes.protocols.dragon.relevance import Relevance
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig

Run = tuple[int, ...]
_ANSWER_S = 120.0


@dataclass(frozen=True)
class Leaks:
    """Private runs of tokens that left the device.

    Attributes:
        runs: of the private documents, all in all.
        outside_answer: those that left without being in the answer or the question.
        in_bytes, in_drafts: where ``outside_answer`` was found; some in both.
        in_answer: those that the answer says, as it may: they were aggregated into it.
        bytes: all that left.
    """

    runs: int
    outside_answer: int
    in_bytes: int
    in_drafts: int
    in_answer: int
    bytes: int


def leaks(
    captured: Iterable[bytes],
    documents: Iterable[Sequence[int]],
    question: Sequence[int],
    answer: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    drafts: Iterable[tuple[int, int]] = (),
    length: int = 4,
) -> Leaks:
    """Count private runs of ``length`` tokens that left the device.

    Bytes are searched for each run as text, as protobuf's varints and as integers of 2, 4 and 8
    bytes. Drafts leave one by one, so they are searched as continuations of the answer too.

    Args:
        captured: messages that the device sent, each as its bytes, uncompressed.
        documents: token ids of the private documents.
        question: ids of the question, which leaves in any case.
        drafts: position and token of each draft that the device sent, in order.
    """
    private = {run for document in documents for run in _runs(document, length)}
    said, asked = _runs(answer, length), _runs(question, length)
    secret = private - said - asked
    sent = b"\0".join(captured)
    in_bytes = {run for run in secret if any(form in sent for form in _forms(run, decode))}
    in_drafts = secret & _drafted(answer, drafts, length)
    return Leaks(
        len(private),
        len(in_bytes | in_drafts),
        len(in_bytes),
        len(in_drafts),
        len(private & said),
        len(sent),
    )


def _runs(ids: Sequence[int], length: int) -> set[Run]:
    return {tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)}


def _drafted(answer: Sequence[int], drafts: Iterable[tuple[int, int]], length: int) -> set[Run]:
    """Return the runs of the answer's beginnings with the drafts behind them."""
    found: set[Run] = set()
    ahead: list[int] = []
    begun = 0
    for position, token in drafts:
        if not ahead or position != begun + len(ahead):
            begun, ahead = position, []
        ahead.append(token)
        found |= _runs([*answer[max(0, begun - length) : begun], *ahead][-2 * length :], length)
    return found


def _forms(run: Run, decode: Callable[[Sequence[int]], str]) -> list[bytes]:
    """Return the ways in which a run may stand in a message."""
    forms = [
        decode(run).strip().encode(),
        b"".join(map(_varint, run)),
        struct.pack(f"<{len(run)}i", *run),
        struct.pack(f"<{len(run)}q", *run),
        ",".join(map(str, run)).encode(),
        ", ".join(map(str, run)).encode(),
    ]
    if max(run) < 1 << 16:
        forms.append(struct.pack(f"<{len(run)}H", *run))
    # A run of a few letters is in any text; as bytes, six of them meet by chance once in 10**14.
    return [form for form in forms if len(form) >= 6]


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


# --- Which document was retrieved? ---------------------------------------------------------------


@dataclass(frozen=True)
class AttackPlan:
    """Sizes of the attack.

    Attributes:
        houses: questions; each has a store of its own.
        candidates: documents among which the attacker chooses.
        held: of them by the device, which ones he does not know.
        retrieved: of those by the device.
        tokens: of each answer.
        top_p: truncations of what is exchanged.
        rounded: steps to which the exchanged log weight is rounded; 0: not at all.
    """

    houses: int = 12
    candidates: int = 12
    held: int = 6
    retrieved: int = 2
    tokens: int = 16
    top_p: tuple[float, ...] = (1.0, 0.8, 0.5)
    rounded: tuple[float, ...] = (0.0, 0.1, 1.0)
    temperature: float = 0.1
    held_out: bool = True
    seed: int = 0


def measure_attack(engine: Engine, plan: AttackPlan) -> dict[str, float]:
    """Return the shares of houses in which the attacker's first choice was retrieved.

    Returns:
        ``chance``: of a blind guess. ``question``: the document nearest to the question, which the
        cloud knows in any case. ``answer``: by the tokens of the answer, all that there is besides
        if the device aggregates. ``distributions_<top_p>``, ``weight_<step>``: by the exchanged
        distributions or by the first exchanged weight, if the cloud aggregates.
    """
    right: dict[str, list[bool]] = {}
    for number in range(plan.houses):
        for name, hit in _attacked(engine, plan, number).items():
            right.setdefault(name, []).append(hit)
    found = {name: sum(hits) / len(hits) for name, hits in right.items()}
    return {"chance": plan.retrieved / plan.candidates, **found}


def _attacked(engine: Engine, plan: AttackPlan, number: int) -> dict[str, bool]:
    """Return for each way to guess whether it names a document that was retrieved."""
    config = SideConfig(
        plan=ChunkPlan(characters=2000),
        retrieval=RetrievalConfig(
            method="dense", chunks=plan.retrieved, temperature=plan.temperature
        ),
    )
    rng = random.Random(f"attack {plan.seed} {number}")
    with Store(None) as held, Store(None) as known:
        device, attacker = (ModelSide(engine, store, config) for store in (held, known))
        house = _house(device, plan, number)
        texts = list(house.documents)
        _fill(attacker, known, config, texts)
        _fill(device, held, config, rng.sample(texts, plan.held))
        question = house.talk[0].question
        true = {hit.chunk.text for hit in device.retrieve(question).hits}
        pinned = _exchanged(engine, device, config, question, plan, "device", 1.0)
        sent = {
            top_p: _exchanged(engine, device, config, question, plan, "cloud", top_p)
            for top_p in plan.top_p
        }
        every = replace(config, retrieval=replace(config.retrieval, chunks=plan.candidates))
        hits = list(attacker.retrieve(question, every).hits)
        likely = hits[0].chunk.text
        rng.shuffle(hits)
        answer = pinned.answer  # the most likely one, which truncation does not change
        each = [_read(engine, attacker, config, question, hit, answer) for hit in hits]
    guesses = {"answer": _by_answer(answer, each)}
    for top_p, exchanged in sent.items():
        guesses[f"distributions_{top_p:g}"] = _by_distributions(exchanged.drafts, each)
    log_weight = sent[plan.top_p[0]].drafts[0].log_weight
    for step in plan.rounded:
        guesses[f"weight_{step:g}"] = _by_weight(log_weight, hits, plan, step)
    found = {name: hits[guess].chunk.text in true for name, guess in guesses.items()}
    return {"question": likely in true, **found}


def _fill(side: ModelSide, store: Store, config: SideConfig, texts: Sequence[str]) -> None:
    index = Index(store, side.layout, side.encoder, config)
    for place, text in enumerate(texts):
        index.add(f"document {place}", text)


def _house(side: ModelSide, plan: AttackPlan, number: int) -> House:
    seed = f"attack {plan.seed} {number}"
    return make_house(seed, plan.candidates, 4, side.layout.fits, plan.held_out)


Rows = list[NDArray[np.float32]]


@dataclass(frozen=True)
class _Exchanged:
    """The cloud's knowledge of one answer: its tokens, and the device's drafts that it was sent."""

    answer: list[int]
    drafts: list[SideDraft]


def _exchanged(
    engine: Engine,
    device: ModelSide,
    config: SideConfig,
    question: str,
    plan: AttackPlan,
    policy: str,
    top_p: float,
) -> _Exchanged:
    """Have the device answer ``question`` greedily, and read the bytes that leave it.

    The cloud has no documents, so that all the device's drafts are accepted.
    """
    rules = Rules(
        AggregationConfig(top_p=top_p),
        ScheduleConfig(aggregate_on=policy),
        patience=PatienceConfig(patience_s=_ANSWER_S, silence_s=_ANSWER_S),
    )
    asked = Question(question, plan.tokens, 0.0)
    cloud = ModelSide(Engine(engine.loaded), None, config)
    with served(cloud, "attacker") as way, ThreadPoolExecutor(1, "bench-device") as compute:
        audit = Audit(way)
        begun = time.monotonic()
        answer = DeviceAnswer(device, compute, way.client, rules, asked)
        told = answer.run(lambda so_far: None, Control(begun + _ANSWER_S), begun)
        messages = [codec.decode_device(data) for data in audit.end()[1]]
    if policy == "device":  # each target token is told
        return _Exchanged([m.token for m in messages if isinstance(m, Target)], [])
    drafts = {m.position: m.draft for m in messages if isinstance(m, Draft)}
    return _Exchanged(list(told.tokens), [drafts[place] for place in range(len(told.tokens))])


def _read(
    engine: Engine,
    side: ModelSide,
    config: SideConfig,
    question: str,
    hit: Hit,
    answer: Sequence[int],
) -> Rows:
    """Return the distributions of the answer's tokens behind one document."""
    alone = Retrieved((hit,), *softmax([hit.score], config.retrieval.temperature), "")
    relevance = Relevance(alone, question, config, side.encoder, engine.decode)
    decoder = DocumentsDecoder(engine, side.caches, relevance)
    decoder.open(side.layout.after(question), alone)
    rows = Rows()
    for token in answer:
        rows.append(decoder.next()[0])
        decoder.push(token)
    decoder.close()
    return rows


def _by_answer(answer: Sequence[int], each: Sequence[Rows]) -> int:
    """Return the document that makes the answer most likely."""
    logs = [
        sum(float(np.log(row[token] + 1e-30)) for row, token in zip(rows, answer, strict=True))
        for rows in each
    ]
    return int(np.argmax(logs))


def _by_distributions(drafts: Sequence[SideDraft], each: Sequence[Rows]) -> int:
    """Return the document whose distributions are nearest to those exchanged (cross-entropy)."""
    logs = [
        sum(
            float(draft.kept.law @ np.log(row[draft.kept.ids] + 1e-30))
            for draft, row in zip(drafts, own, strict=False)
        )
        for own in each
    ]
    return int(np.argmax(logs))


def _by_weight(log_weight: float, hits: Sequence[Hit], plan: AttackPlan, step: float) -> int:
    """Return the better document of the set whose scores give the weight that was sent."""
    sent = round(log_weight / step) * step if step else float(np.float32(log_weight))

    def missed(chosen: tuple[int, ...]) -> float:
        return abs(softmax([hits[i].score for i in chosen], plan.temperature)[1] - sent)

    nearest = min(combinations(range(len(hits)), plan.retrieved), key=missed)
    return max(nearest, key=lambda i: hits[i].score)
