"""Measurements of the benchmark, one function each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.minions.answering import Answer, ModelCache, ModelSpec
from collab_llm_lab.bench.minions.figures import row
from collab_llm_lab.bench.minions.material import Case, make_case, make_cases
from collab_llm_lab.bench.minions.methods import (
    DIRECT,
    METHODS,
    MINION,
    MINIONS,
    Answered,
    Method,
    Models,
    answer_all,
)
from collab_llm_lab.bench.minions.shown import EXAMPLES
from collab_llm_lab.training.minions.chats import job_chat
from collab_llm_lab.training.minions.logs import VALUE_OF, Entry, LogWriter
from collab_llm_lab.training.minions.questions import (
    HELD_OUT_SHAPES,
    SHAPES,
    Asked,
    draw,
)
from collab_llm_nodes.chat.base import (
    ChatModel,
    ChatRequest,
    Control,
    OnResult,
    Reply,
    ignore_result,
)
from collab_llm_nodes.chat.ledger import PriceTable
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.protocols.base import Control as NoDeadline
from collab_llm_nodes.protocols.minions.baselines import local_only, rag
from collab_llm_nodes.protocols.minions.embedded.queries import Query
from collab_llm_nodes.protocols.minions.embedded.remote import Planner
from collab_llm_nodes.protocols.minions.minion import minion
from collab_llm_nodes.protocols.minions.minions import minions
from collab_llm_nodes.protocols.minions.reading import worker_output
from collab_llm_nodes.protocols.minions.settings import HISTORY, RETRIES, SCRATCHPAD

CHUNK_SIZES = (400, 800, 1600, 2400)
SAMPLES = (1, 2, 4)
TASKS = (1, 2)
ROUNDS = (1, 2, 3)
CARRIED = (RETRIES, SCRATCHPAD, HISTORY)
RETRIEVED = (2, 4, 8, 16, 32, 64)
SEPARATE_CHUNKS = (1, 16, 32, 64, 128)
CHUNKS_AT_ONCE = (1, 2, 3)
SUB_TASKS = (1, 2, 3, 4)
PRETRAINED_CHARACTERS = 400
"""Pieces for a pretrained worker [characters]."""
PRETRAINED_REPLY = 64
"""Length limit of its replies; longer ones repeat themselves [tokens]."""
PRETRAINED_WINDOW = 160
"""Windows in which it reads a long text, as long as a piece [tokens]."""
_CHUNK_TOKENS = 512
_WARM = 0.4


@dataclass(frozen=True)
class Bench:
    """Models and tools of a run.

    Attributes:
        spec: the models that answer.
        cache: models in this process.
        answer: answers tasks, here or in several processes.
        count: returns the number of tokens of a text, by the text family's tokenizer.
        report: prints a line.
    """

    spec: ModelSpec
    cache: ModelCache
    answer: Answer
    prices: PriceTable
    count: Callable[[str], int]
    seed: int
    report: Callable[[str], None]

    @property
    def models(self) -> Models:
        """The models that answer, in this process."""
        return self.cache.models(self.spec)

    def with_models(self, **changed: Any) -> Bench:
        """Return this run with other models."""
        return replace(self, spec=replace(self.spec, **changed))

    def rows(
        self, methods: Mapping[str, Method], cases: Sequence[Case]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, list[Answered]]]:
        """Return figures and answers of each method, and report the figures."""
        found = self.answer(
            [(self.spec, method, case) for method in methods.values() for case in cases]
        )
        rows, answers = {}, {}
        for name in methods:
            answers[name] = [each for _ in cases for each in next(found)]
            rows[name] = self.row(name, answers[name], cases)
        return rows, answers

    def row(self, name: str, answered: Sequence[Answered], cases: Sequence[Case]) -> dict[str, Any]:
        """Return the figures of a method, and report them."""
        length = round(sum(case.tokens for case in cases) / len(cases))
        figures = row(answered, length, self.prices)
        self.report(
            f"{name}: {figures['accuracy']:.3f} of {figures['questions']} right,"
            f" {figures['remote_prefill_tokens']:.0f} tokens read by the remote"
        )
        return figures


def sweeps(bench: Bench, cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Vary one setting at a time (paper 000, figures 5 to 8 and appendix E.3)."""

    def minions_with(**changed: Any) -> Method:
        return Method(partial(minions, config=replace(MINIONS, **changed)))

    def rag_with(k: int, retrieval: str) -> Method:
        return Method(partial(rag, config=replace(DIRECT, retrieve=k)), retrieval)

    warm = replace(MINIONS.local, temperature=_WARM)
    methods: dict[str, dict[Any, Method]] = {
        "chunk_characters": {size: minions_with(chunk_size=size) for size in CHUNK_SIZES},
        "samples": {n: minions_with(samples=n, local=warm, rounds=1) for n in SAMPLES},
        "tasks": {n: minions_with(tasks=n, rounds=1) for n in TASKS},
        "minions_rounds": {n: minions_with(rounds=n) for n in ROUNDS},
        "minion_rounds": {
            n: Method(partial(minion, config=replace(MINION, rounds=n))) for n in ROUNDS
        },
        "carry": {memory: minions_with(carry=memory, rounds=ROUNDS[-1]) for memory in CARRIED},
        "retrieved": {
            k: Method(partial(rag, config=replace(DIRECT, retrieve=k))) for k in RETRIEVED
        },
        "retrieved_dense": {
            k: Method(partial(rag, config=replace(DIRECT, retrieve=k)), "dense") for k in RETRIEVED
        },
        "minions_retrieved": {k: minions_with(retrieve=k) for k in RETRIEVED[2:]},
    }
    points = {
        f"{name} {value}": method for name, own in methods.items() for value, method in own.items()
    }
    rows, _ = bench.rows(points, cases)
    return {
        name: {str(value): rows[f"{name} {value}"] for value in own}
        for name, own in methods.items()
    }


def contexts(
    bench: Bench, lengths: Sequence[int], questions: int, per_log: int
) -> dict[str, dict[str, Any]]:
    """Return the rows of the protocols on logs of several lengths (figure 4 of paper 000)."""
    found = {}
    for tokens in lengths:
        cases = make_cases(f"contexts {bench.seed}", tokens, questions, per_log, bench.count)
        bench.report(f"logs of {tokens} tokens")
        found[str(tokens)], _ = bench.rows(chosen("remote_only", "minion", "minions"), cases)
    return found


def workers(
    bench: Bench, folders: Sequence[Path], cases: Sequence[Case]
) -> dict[str, dict[str, Any]]:
    """Return the row of MinionS with each model as its worker (table 2 of paper 000)."""
    found = {}
    for folder in folders:
        rows, _ = bench.with_models(worker=folder).rows({folder.name: METHODS["minions"]}, cases)
        size = (folder / "model.safetensors").stat().st_size
        found[folder.name] = {"weights_bytes": size, **rows[folder.name]}
    return found


def pretrained(bench: Bench, folder: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """Return rows with a pretrained model as worker, after few-shot examples, in one round.

    ``trained_worker`` has the rows of the shipped worker on the same questions.
    """
    own = bench.with_models(worker=folder, shown=bench.seed, window=PRETRAINED_WINDOW)
    local = replace(MINIONS.local, max_tokens=PRETRAINED_REPLY)
    config = replace(MINIONS, local=local, chunk_size=PRETRAINED_CHARACTERS, rounds=1)
    methods = {
        **chosen("remote_only", "rag_bm25"),
        "minions": Method(partial(minions, config=config)),
        "minion": Method(partial(minion, config=replace(MINION, local=local))),
        "local_only": Method(partial(local_only, config=replace(DIRECT, local=local))),
    }
    trained, _ = bench.rows(chosen("local_only", "minion", "minions"), cases)
    rows, _ = own.rows(methods, cases)
    return {
        "model": folder.name,
        "examples": EXAMPLES,
        "chunk_characters": PRETRAINED_CHARACTERS,
        "window_tokens": PRETRAINED_WINDOW,
        "reply_tokens": PRETRAINED_REPLY,
        "protocols": rows,
        "trained_worker": trained,
    }


def pretrained_retrieval(bench: Bench, encoder: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the row of RAG with the passages of a pretrained encoder."""
    rows, _ = bench.with_models(encoder=encoder).rows(chosen("rag_dense"), cases)
    return {"encoder": encoder.name, "protocols": rows}


def chosen(*names: str) -> dict[str, Method]:
    """Return these methods."""
    return {name: METHODS[name] for name in names}


def chunks_and_tasks(bench: Bench, worker: ChatModel, requests: int) -> dict[str, Any]:
    """Return the worker's accuracy by chunks and by sub-tasks in one request (tables 4 and 5).

    With ``separate`` chunks, the answer must be found in its chunk, and nothing that would be sent
    in the others. With ``separate_sub_tasks``, all answers must be correct.
    """
    rng = random.Random(f"requests {bench.seed}")
    found: dict[str, dict[str, float]] = {
        "chunks_in_one_request": {
            str(n): _chunks_together(bench, worker, rng, n, requests) for n in CHUNKS_AT_ONCE
        },
        "separate": {
            str(n): _chunks_apart(bench, worker, rng, n, requests) for n in SEPARATE_CHUNKS
        },
        "sub_tasks": {},
        "separate_sub_tasks": {},
    }
    for n in SUB_TASKS:
        together, apart = _sub_tasks(bench, worker, rng, n, requests)
        found["sub_tasks"][str(n)], found["separate_sub_tasks"][str(n)] = together, apart
    bench.report(f"chunks and tasks in one request: {json.dumps(found)}")
    return found


def _chunks_together(
    bench: Bench, worker: ChatModel, rng: random.Random, n: int, requests: int
) -> float:
    jobs, expected = [], []
    for _ in range(requests):
        chunks, query, entry = _chunks(rng, n, bench.count)
        jobs.append(("\n".join(chunks), query.tasks[0]))
        expected.append(entry.fields[VALUE_OF[query.fact]])
    return _agreement(_outputs(worker, jobs), expected)


def _chunks_apart(
    bench: Bench, worker: ChatModel, rng: random.Random, n: int, requests: int
) -> float:
    tries, right = max(4, requests // n), 0
    for _ in range(tries):
        chunks, query, entry = _chunks(rng, n, bench.count)
        outputs = _outputs(worker, [(chunk, query.tasks[0]) for chunk in chunks])
        said = {output for output in outputs if output}
        right += said == {entry.fields[VALUE_OF[query.fact]]}
    return right / tries


def _sub_tasks(
    bench: Bench, worker: ChatModel, rng: random.Random, n: int, requests: int
) -> tuple[float, float]:
    """Return the accuracy of ``n`` tasks in one request, and in one request each."""
    together, apart = [], []
    expected: list[list[str]] = []
    for _ in range(requests):
        writer = LogWriter(rng, held_out=True)
        asked = [draw(writer, "lookup") for _ in range(n)]
        groups = [each.planted[0] for each in asked]
        text = writer.log(groups, _CHUNK_TOKENS // 2, bench.count).text
        tasks = [each.query.tasks[0] for each in asked]
        together.append((text, "; ".join(tasks)))
        apart += [(text, task) for task in tasks]
        expected.append([each.answer for each in asked])
    joined = _outputs(worker, together)
    each_alone = iter(_outputs(worker, apart))
    alone = [[next(each_alone) for _ in answers] for answers in expected]
    return _agreement(joined, ["; ".join(each) for each in expected]), _agreement(alone, expected)


def _agreement(said: Sequence[object], expected: Sequence[object]) -> float:
    """Return the share of equal answers."""
    return sum(a == b for a, b in zip(said, expected, strict=True)) / len(expected)


def _chunks(
    rng: random.Random, n: int, count: Callable[[str], int]
) -> tuple[list[str], Query, Entry]:
    """Return chunks, one of which contains the line that a query asks for."""
    writer = LogWriter(rng, held_out=True)
    asked = draw(writer, "lookup")
    ((entry,), misses) = asked.planted
    place = rng.randrange(n)
    chunks = [
        writer.log([[entry], misses] if i == place else [], _CHUNK_TOKENS, count).text
        for i in range(n)
    ]
    return chunks, asked.query, entry


def _outputs(worker: ChatModel, jobs: Sequence[tuple[str, str]]) -> list[str | None]:
    """Return the worker's answers that MinionS would send, by chunk and task."""
    requests = [
        ChatRequest(job_chat(chunk, task), max_tokens=MINIONS.local.max_tokens)
        for chunk, task in jobs
    ]
    found: list[str | None] = []
    for reply, (chunk, _) in zip(worker.ask(requests, NoDeadline()), jobs, strict=True):
        output = None
        if not isinstance(reply, CollabError):
            output = worker_output(reply.text, quotes=False, max_characters=2000)
        cited = output is not None and (output.citation or "") in chunk
        found.append(output.answer if output is not None and cited else None)
    return found


def planning(bench: Bench, planner: Planner, questions: int) -> dict[str, Any]:
    """Return the shares of valid and of correct plans, by the kind of generalisation."""
    kinds: dict[str, dict[str, Any]] = {
        "trained": {"held_out": False, "wording": False},
        "entities": {"held_out": True, "wording": False},
        "wordings": {"held_out": True, "wording": True},
        "kinds": {"held_out": True, "wording": False, "shapes": HELD_OUT_SHAPES},
    }
    shapes = {(group, shape) for group, own in SHAPES.items() for shape in own}
    found = {}
    for name, facts in kinds.items():
        rng = random.Random(f"planning {bench.seed} {name}")
        expected = facts.get("shapes")
        choice = sorted(
            (g, s) for g, s in shapes if (s in HELD_OUT_SHAPES) == (expected is not None)
        )
        by_group = {group: [s for g, s in choice if g == group] for group, _ in choice}
        valid = right = 0
        for i in range(questions):
            writer = LogWriter(rng, held_out=facts["held_out"])
            group = sorted(by_group)[i % len(by_group)]
            asked = draw(
                writer,
                group,
                shape=rng.choice(by_group[group]),
                held_out_wording=facts["wording"],
            )
            query = _planned(planner, asked)
            valid += query is not None
            right += query == asked.query
        found[name] = {"valid": valid / questions, "right": right / questions}
    bench.report(f"plans: {json.dumps(found)}")
    return found


def _planned(planner: Planner, asked: Asked) -> Query | None:
    try:
        return planner.understand(asked.text, NoDeadline())
    except CollabError:
        return None


class CanaryWorker:
    """A worker with a canary in each output without an answer.

    Attributes:
        planted: the canaries.
    """

    def __init__(self, worker: ChatModel) -> None:
        self._worker = worker
        self.planted: list[str] = []

    @property
    def name(self) -> str:
        return self._worker.name

    def ask(
        self,
        requests: Sequence[ChatRequest],
        control: Control,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``chat.base.ChatModel``."""
        results = [self._with_canary(reply) for reply in self._worker.ask(requests, control)]
        for index, result in enumerate(results):
            on_result(index, result)
        return results

    def close(self) -> None:
        """Leave the worker open, which belongs to the caller."""

    def _with_canary(self, reply: Reply | CollabError) -> Reply | CollabError:
        if isinstance(reply, CollabError):
            return reply
        output = worker_output(reply.text, quotes=False, max_characters=2000)
        if output is not None and output.answer is not None:
            return reply
        canary = f"canary-output-{len(self.planted)}-"
        self.planted.append(canary)
        fields = {"explanation": canary, "citation": canary, "answer": None}
        return replace(reply, text=json.dumps(fields))


def privacy(bench: Bench, tokens: int, questions: int) -> dict[str, Any]:
    """Return how many canaries cross the wire of MinionS.

    There is one in each paragraph of a log without an answer, and in each output without one.
    """
    case = make_case(f"privacy {bench.seed}", tokens, questions, bench.count)
    answering = {entry.text for asked in case.asked for group in asked.planted for entry in group}
    paragraphs, planted = [], []
    for number, paragraph in enumerate(case.text.split("\n\n")):
        if not answering & set(paragraph.splitlines()):
            planted.append(f"canary-text-{number}-")
            paragraph = f"{paragraph}\nNote {planted[-1]}."
        paragraphs.append(paragraph)
    case = replace(case, text="\n\n".join(paragraphs))
    worker = CanaryWorker(bench.models.local)
    answered = answer_all(METHODS["minions"], [case], replace(bench.models, local=worker))
    wire = "\n".join(text for each in answered for text in each.wire)
    canaries = planted + worker.planted
    seen = sum(canary in wire for canary in canaries)
    bench.report(f"{seen} of {len(canaries)} canaries were seen on the wire")
    return {"canaries_seen": seen, "canaries_planted": len(canaries), "wire_bytes": len(wire)}
