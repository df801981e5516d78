"""Robots with scripted drafts against a verifier; a process of its own.

Reads a job as JSON from standard input and writes the robots' figures to standard output.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collab_llm_lab.bench.wire import Connection, connect
from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open

GAMMA = 4
SUPPORT = 64
"""Tokens of each draft distribution of the sampled run."""
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Script:
    """A question, and the answer that a robot drafts."""

    text: str
    answer: tuple[int, ...]


@dataclass
class Seen:
    """Times of the rounds after each answer's first one, in ms, and counts over all."""

    rounds_ms: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: int = 0
    other_answers: int = 0


async def drive(job: dict[str, Any]) -> dict[str, float]:
    """Have all robots ask question after question for some seconds; the first one warms up."""
    scripts = [Script(s["text"], tuple(s["answer"])) for s in job["scripts"]]
    sampling, count = SamplingConfig(**job["sampling"]), int(job["robots"])
    # An address each: a verifier limits each.
    connections = [
        await connect(job["address"], source=f"127.0.{1 + n // 250}.{1 + n % 250}")
        for n in range(count)
    ]
    seen, warm_up = Seen(), Seen()
    begun = 0.0

    async def ask(number: int, into: Seen, until: float) -> None:
        while True:
            script = scripts[number % len(scripts)]
            await _answer(connections[number], script, sampling, job["vocabulary"], into)
            if time.perf_counter() >= until:
                return

    await asyncio.gather(*(ask(n, warm_up, 0.0) for n in range(count)))
    begun = time.perf_counter()
    await asyncio.gather(*(ask(n, seen, begun + job["seconds"]) for n in range(count)))
    took_s = time.perf_counter() - begun
    for connection in connections:
        connection.close()
    round_ms, compute_ms, queue_ms = (
        statistics.median(t) for t in (seen.rounds_ms, seen.compute_ms, seen.queue_ms)
    )
    beside = [
        whole - compute - queue
        for whole, compute, queue in zip(
            seen.rounds_ms, seen.compute_ms, seen.queue_ms, strict=True
        )
    ]
    return {
        "rounds": len(seen.rounds_ms),
        "answers": seen.answers,
        "other_answers": seen.other_answers,
        "tokens_per_s": seen.tokens / took_s,
        "round_ms": round_ms,
        "round_p99_ms": statistics.quantiles(seen.rounds_ms, n=100, method="inclusive")[98],
        "compute_ms": compute_ms,
        "queue_ms": queue_ms,
        "beside_ms": statistics.median(beside),
    }


async def _answer(
    connection: Connection, script: Script, sampling: SamplingConfig, vocabulary: str, seen: Seen
) -> None:
    """Have one answer decoded in a new session."""
    tokens, answer = len(script.answer), list[int]()
    call = connection.call(codec.SESSION, DEADLINE_S)
    await call.write(codec.encode_client(Open(script.text, (), sampling, tokens, vocabulary)))
    finished, number = False, 0
    while not finished:
        start = len(answer)
        drafted = script.answer[start : min(start + GAMMA, tokens - 1)]
        probs = _laws(drafted) if sampling.sends_probabilities else None
        message = codec.encode_client(Draft(number, start, drafted, probs))
        sent = time.perf_counter()
        await call.write(message)
        verdict = await _verdict(call)
        if number:
            seen.rounds_ms.append(1e3 * (time.perf_counter() - sent))
            seen.compute_ms.append(1e3 * verdict.compute_s)
            seen.queue_ms.append(1e3 * verdict.queue_s)
        answer += verdict.tokens
        finished, number = verdict.finished, number + 1
    call.done_writing()
    seen.tokens += len(answer)
    seen.answers += 1
    seen.other_answers += tuple(answer) != script.answer


async def _verdict(call: Any) -> Any:
    """Return the next verdict; other messages before it are passed over."""
    while True:
        message = pb.ServerMessage.FromString(await call.read())
        kind = message.WhichOneof("message")
        if kind == "verdict":
            return message.verdict
        if kind == "failure":
            raise CollabError(message.failure.message, remedy=message.failure.remedy)


def _laws(drafted: Sequence[int]) -> tuple[SparseDistribution, ...]:
    """Return for each drafted token a uniform law over it and its neighbours."""
    found = []
    for token in drafted:
        first = max(0, token - SUPPORT + 1)
        ids = np.arange(first, first + SUPPORT, dtype=np.int32)
        found.append(SparseDistribution(ids, np.full(SUPPORT, 1 / SUPPORT, dtype=np.float32)))
    return tuple(found)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(drive(json.load(sys.stdin)))))
