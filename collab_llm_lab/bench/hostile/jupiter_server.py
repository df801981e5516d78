"""A stage worker that holds a whole model, and its coordinator, which replays recorded passes.

A worker serves one coordinator at a time. The attackers know the token, but not the random names of
the coordinator and its chain.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from collab_llm_lab.bench.hostile.messages import Session
from collab_llm_lab.bench.hostile.server import Server
from collab_llm_lab.bench.verifier import Replay, Tally
from collab_llm_lab.bench.wire import Call, Connection
from collab_llm_nodes.assets import version
from collab_llm_nodes.engine.stage import Stage
from collab_llm_nodes.models.fingerprint import checkpoint_fingerprint
from collab_llm_nodes.models.loading import ModelConfig, model_folder
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.processes import Process, run_process
from collab_llm_nodes.protocols.jupiter import codec
from collab_llm_nodes.protocols.jupiter.link import LinkConfig, describe
from collab_llm_nodes.protocols.jupiter.messages import (
    Load,
    Loaded,
    Order,
    Outcome,
    Pass,
    Report,
    Result,
    Step,
    Want,
)
from collab_llm_nodes.protocols.jupiter.stage_lanes import StageLanes
from collab_llm_nodes.protocols.jupiter.worker_settings import WorkerConfig
from collab_llm_nodes.transport.background import background_loop, within
from collab_llm_nodes.transport.wire import Failure

MODEL = "text-target"
_ANSWERS, _PROMPT, _ROUNDS, _DRAFT = 4, 48, 16, 3
_CALL_S = 3600.0
_ASK_S = 5.0


@dataclass(frozen=True)
class Passes:
    """An answer in one lane: its passes, and what the model makes of them.

    Attributes:
        load: asks for all layers; its coordinator and chain are to be named.
        steps: [passes] the first feeds the prompt, each other the newest token and a draft.
        outcomes: [passes].
    """

    load: Load
    steps: tuple[Step, ...]
    outcomes: tuple[Outcome, ...]


def record(config: ModelConfig, seed: int) -> list[Passes]:
    """Return answers to random prompts, computed without a worker.

    The first token of each draft is the model's own, the others are random.
    """
    facts = read_facts(config)
    stage = Stage(config, 0, facts.num_layers)
    lanes = StageLanes(stage, 1, facts.eos)
    chance = random.Random(seed)

    def any_ids(count: int) -> list[int]:
        return [chance.randrange(stage.vocab_size - 8) for _ in range(count)]

    def judged(step: Step) -> Outcome:
        return lanes.run([step], None)[1][0]

    def one(held: list[int]) -> Passes:
        steps = [Step(0, 0, tuple(held), want=Want.VERDICT, rows=1)]
        outcomes = [judged(steps[0])]
        while len(steps) <= _ROUNDS and outcomes[-1].next >= 0:
            last = outcomes[-1]
            held += [*(steps[-1].ids[i] for i in last.path), last.next]
            place = len(held) - 1
            own = judged(Step(0, place, (held[-1],), want=Want.VERDICT, rows=1)).next
            ids = (held[-1], max(own, 0), *any_ids(_DRAFT - 1))
            steps.append(Step(0, place, ids, want=Want.VERDICT, rows=len(ids)))
            outcomes.append(judged(steps[-1]))
        return Passes(load, tuple(steps), tuple(outcomes))

    weights = f"{checkpoint_fingerprint(model_folder(config))} {config.dtype}"
    load = Load("", "", version(), weights, 0, facts.num_layers, 1)
    found = [one(any_ids(_PROMPT)) for _ in range(_ANSWERS)]
    lanes.close()
    return [answer for answer in found if len(answer.steps) > 1]  # others have no rounds


@dataclass
class _Held:
    """The coordinator's stream, which lasts for many answers."""

    call: Call
    passes: int = 0


class Coordinators:
    """Makes conversations; those of one connection share the stream that holds the layers."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[Connection, _Held] = WeakKeyDictionary()

    def __call__(self, connection: Connection, answer: Passes) -> PassReplay:
        return PassReplay(self, connection, answer)

    async def stream(self, connection: Connection, load: Load) -> _Held:
        """Return the stream that holds the layers, a new one if there is none."""
        held = self._held.get(connection)
        if held is None or held.call.ended:
            held = self._held[connection] = _Held(connection.call(codec.WORK, _CALL_S))
            named = replace(load, coordinator=secrets.token_hex(16), chain=secrets.token_hex(16))
            await held.call.write(codec.encode_order(named))
            await _hear(held.call, Loaded)
        return held


class PassReplay(Replay):
    """A coordinator's answer; a round is a pass and its outcome."""

    def __init__(self, coordinators: Coordinators, connection: Connection, answer: Passes) -> None:
        super().__init__(connection, len(answer.steps))
        self._coordinators, self._answer = coordinators, answer

    async def begin(self) -> None:
        """Hold the layers, unless the stream does already."""
        self._held = await self._coordinators.stream(self._connection, self._answer.load)
        self._call = self._held.call

    def close(self) -> None:
        """Leave the stream to the next answer."""

    async def round(self, number: int, tally: Tally) -> float:
        """Run a pass, and check its outcome."""
        begun = time.perf_counter()
        place, self._held.passes = self._held.passes, self._held.passes + 1
        await self._call.write(codec.encode_order(Pass(place, (self._answer.steps[number],))))
        found = await _hear(self._call, Result)
        tally.mismatches += found.outcomes != (self._answer.outcomes[number],)
        return time.perf_counter() - begun


async def _hear(call: Call, kind: type) -> Any:
    """Return the next report of ``kind``; others are passed over."""
    while True:
        report: Report = codec.decode_report(await call.read())
        if isinstance(report, Failure):
            raise report.error()
        if isinstance(report, kind):
            return report


def recorded(answer: Passes) -> Session:
    """Return the messages of an answer, in the name of another coordinator."""
    opened = codec.encode_order(replace(answer.load, coordinator="a" * 32, chain="b" * 32))
    orders: list[Order] = [Pass(i, (step,)) for i, step in enumerate(answer.steps)]
    return Session(opened, opened, [codec.encode_order(order) for order in orders])


def _prepare(folder: Path, seed: int) -> tuple[dict[str, Any], Sequence[Passes]]:
    settings = {"model": {"path": MODEL, "threads": 1}, "heads": ""}
    return settings, record(ModelConfig(MODEL, threads=1), seed)


def _start(config: Path) -> AbstractContextManager[Process]:
    command = [sys.executable, "-m", "collab_llm_nodes.cli", "jupiter-worker"]
    return run_process("jupiter-worker", [*command, "--config", str(config)])


def _wait(process: Process, address: str, ca: str, token: str) -> None:
    link = LinkConfig(tls=True, tls_ca=ca, token=token)

    def ask() -> None:
        asking = within(describe(link, address), _ASK_S)
        asyncio.run_coroutine_threadsafe(asking, background_loop()).result(2 * _ASK_S)

    process.wait_for(ask)


JUPITER = Server(
    name="jupiter",
    method=codec.WORK,
    prepare=_prepare,
    converse=Coordinators(),
    recorded=recorded,
    start=_start,
    wait=_wait,
    last_attack="foreign_loads",
    drain_s=WorkerConfig().drain_s,
    robots=1,
)
