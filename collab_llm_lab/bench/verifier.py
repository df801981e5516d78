"""``collab-llm bench verifier``: one verifier, many robots.

The verifier is a process of its own with the embedded target. The robots are coroutines in this
process, each with a connection of its own (``wire.py``); they replay drafts that the embedded pair
really proposed, recorded beforehand, so that no draft model competes for the cores.

Six loads. ``clients``: verification alone, by robots that take as long for each draft as the
embedded draft model took when it was recorded; every robot opens some sessions, then the clock runs
while it decodes in one after another, all robots equally many rounds, so that all of them are busy
all the time; and so on, wave after wave. ``saturated``: the same without any time between a verdict
and the next draft, which is the verifier's capacity, but nothing that robots do. ``answers``: whole
answers, each a new session whose picture and prompt must be read first, which batching hardly makes
cheaper, and no time between them either. ``emulated_robots``: whole answers at the pace of larger
draft models and of links that take time. ``robots_draft`` and ``verifier_drafts`` show what draft
models on the robots save the server: as ``saturated``, with the verifier on a single core, which in
the latter drafts as well (co-located speculation).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from google.protobuf.message import Message
from rich.console import Console

from collab_llm_lab.bench.rendering import Draw, draw_panels, label_axes, show_rows
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.bench.wire import Call, Connection, connect
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.processes import Process, free_port
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClient, EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process, wait_for_verifier
from collab_llm_nodes.protocols.edge_cloud.target import TargetSession
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient

T = TypeVar("T")

GAMMA = 4
MAX_TOKENS = 64
PROMPTS = 32
SESSIONS = 4
"""Opened by each robot before the clock of a wave runs."""
T_P_S, T_C_S = 0.012, 0.02
"""Emulated robot: drafting one token, the link in one direction [s]."""
WARM_UP_S = 1.0
ANSWER_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Recording:
    """One answer of the pair: the robot's messages and the verdicts it must get.

    Attributes:
        opened: encoded Open.
        drafts: [rounds] encoded drafts and the number of tokens in each.
        drafting_s: [rounds] what each draft took [s].
        verdicts: [rounds] tokens of each verdict.
    """

    opened: bytes
    drafts: tuple[tuple[bytes, int], ...]
    drafting_s: tuple[float, ...]
    verdicts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Load:
    """The behaviour of the robots.

    Attributes:
        waves: all together open sessions, then decode, which alone counts. Else each robot has
            answer after answer at its own time.
        draft_token_s, link_s: what a robot and its link take (emulated) [s]; ``draft_token_s``
            None: what the drafts took when they were recorded.
        co_located: the verifier drafts, and streams.
        one_core: the verifier has a single core, as drafting and verification share one device.
    """

    waves: bool = False
    draft_token_s: float | None = 0.0
    link_s: float = 0.0
    co_located: bool = False
    one_core: bool = False


LOADS = {
    "clients": Load(waves=True, draft_token_s=None),
    "saturated": Load(waves=True),
    "answers": Load(),
    "emulated_robots": Load(draft_token_s=T_P_S, link_s=T_C_S),
    "robots_draft": Load(waves=True, one_core=True),
    "verifier_drafts": Load(waves=True, one_core=True, co_located=True),
}


@dataclass
class Tally:
    """The times and counts that the robots of one load saw.

    Attributes:
        server_s: processor time of the verifier in ``seconds``, of waves.
    """

    seconds: float = 0.0
    server_s: float = 0.0
    tokens: int = 0
    answers: int = 0
    mismatches: int = 0
    rounds_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)


def run_verifier(
    *,
    clients: Sequence[int],
    seconds: float,
    seed: int,
    plot: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Load the verifier with each number of robots for ``seconds``.

    Returns:
        ``clients.<n>``, ``saturated.<n>``, ``answers.<n>`` and ``emulated_robots.<n>`` (see the
        module) with ``tokens_per_s``, ``server_ms_per_token`` (the verifier's processor time, of
        waves), ``p50_ms``, ``p99_ms`` (from a draft's sending to its verdict, rounds after the
        first), ``first_p50_ms``, ``first_p99_ms`` (the first round: opening, picture and prompt
        included), ``queue_ms``, ``compute_ms`` (medians, as the verifier reports), ``drafting_ms``
        (of the verifier), ``answers`` (decoded to the end), ``rounds``, ``speedup`` over one robot;
        ``capacity.<n>`` (see ``_capacity``); and ``output_mismatches``: verdicts that differ from
        those of a session alone.
    """
    set_threads(ModelConfig(path="nav-draft"), ModelConfig(path="nav-target"))
    with console.status("recording what the pair proposes ..."):
        recordings = record(scene_prompts(PROMPTS, seed))
    tokens = sum(len(v) for r in recordings for v in r.verdicts)
    rounds = sum(len(r.verdicts) for r in recordings)
    results: dict[str, Any] = {
        "gamma": GAMMA,
        "tau": tokens / rounds,
        "rounds_per_answer": rounds / len(recordings),
        "seconds": seconds,
        "drafting_ms": 1e3 * statistics.median(t for r in recordings for t in r.drafting_s[1:]),
        "emulated": {"T_p_ms": 1e3 * T_P_S, "T_c_ms": 1e3 * T_C_S},
        "output_mismatches": 0,
    }
    for name, kind in LOADS.items():
        results[name] = {}
        for count in clients:
            with console.status(f"{name}: {count} ..."):
                tally = _measure(recordings, count, seconds, kind)
            results["output_mismatches"] += tally.mismatches
            results[name][str(count)] = _row(tally)
        one = results[name].get("1")
        for row in results[name].values():
            row["speedup"] = row["tokens_per_s"] / one["tokens_per_s"] if one else None
    results["capacity"] = _capacity(results["robots_draft"], results["verifier_drafts"])
    _print(results, console)
    _plot(results, plot)
    return results


def _capacity(
    robots: Mapping[str, Mapping[str, float]], verifier: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return how many times as many robots a server has time for if they draft themselves.

    By the number of robots that the verifier drafts for: ``token_ms``, the time between two tokens
    of a robot; ``robots``, how many robots that draft wait as long (interpolated); ``measured``,
    the ratio of the two; ``server_time``, the server's processor time per token over that with as
    many robots that draft; and ``predicted``, 1 + gamma t_d / t_v (arXiv 2606.25091) with the times
    of a single robot.
    """
    one = verifier[min(verifier, key=int)]
    predicted = 1.0 + one["drafting_ms"] / one["compute_ms"]
    counts, waits = _token_times(robots)
    found = {}
    for count, row in verifier.items():
        token_ms = 1e3 * int(count) / row["tokens_per_s"]
        fitting = float(np.interp(token_ms, waits, counts))
        if token_ms > waits[-1]:  # all are busy: robots and waits grow alike
            fitting *= token_ms / waits[-1]
        found[count] = {
            "token_ms": token_ms,
            "robots": fitting,
            "measured": fitting / int(count),
            "server_time": row["server_ms_per_token"] / robots[count]["server_ms_per_token"],
            "predicted": predicted,
        }
    return found


def _token_times(rows: Mapping[str, Mapping[str, float]]) -> tuple[list[int], list[float]]:
    """Return the numbers of robots, and the time between two tokens of one of them [ms]."""
    counts = sorted(int(count) for count in rows)
    waits = [1e3 * n / rows[str(n)]["tokens_per_s"] for n in counts]
    return counts, np.maximum.accumulate(waits).tolist()


def record(prompts: Sequence[Prompt]) -> list[Recording]:
    """Decode each prompt with the embedded pair, one session at a time, and keep the messages."""
    draft, target = (Engine(load(ModelConfig(path=f"nav-{name}"))) for name in ("draft", "target"))
    return [_record(draft, target, prompt) for prompt in prompts]


def _record(draft: Engine, target: Engine, prompt: Prompt) -> Recording:
    sampling = SamplingConfig()
    opened = Open(prompt.text, prompt.images, sampling, MAX_TOKENS, draft.vocabulary)
    session = TargetSession(target, encode(prompt, target.loaded), opened)
    session.prefill()
    drafter = Drafter(draft, encode(prompt, draft.loaded), sampling)
    client = EdgeClient(EdgeClientConfig(GAMMA, MAX_TOKENS))
    drafts, drafting_s, verdicts = [], [], []
    while not client.finished:
        started = time.perf_counter()
        proposed = drafter.draft(client.next_draft())
        drafting_s.append(time.perf_counter() - started)
        assert proposed is not None
        client.on_sent(proposed)
        verdict = session.verify(proposed, lambda exit_: None)
        assert verdict is not None
        client.on_verdict(verdict)
        drafts.append((codec.encode_client(proposed), len(proposed.tokens)))
        verdicts.append(verdict.tokens)
    session.close()
    drafter.close()
    return Recording(codec.encode_client(opened), tuple(drafts), tuple(drafting_s), tuple(verdicts))


def _measure(recordings: Sequence[Recording], count: int, seconds: float, load: Load) -> Tally:
    """Run ``count`` robots against a fresh verifier."""
    address = f"127.0.0.1:{free_port()}"
    with _verifier(address, load) as process:
        with VerifierClient(ClientLinkConfig(address=address)) as client:
            wait_for_verifier(client, process)
        driving = drive_robots(
            address, recordings, count, seconds, load, server_s=partial(_cpu_s, process.pid)
        )
        tally = run_with_select(driving)
        process.check()
    return tally


def _cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken so far [s]; Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _verifier(address: str, load: Load) -> Iterator[Process]:
    """Run a verifier, on a single core and with a draft model if ``load`` says so."""
    settings = yaml.safe_load(config_file("verifier_embedded.yaml").read_text(encoding="utf-8"))
    if load.co_located:
        settings["draft"] = {"path": "nav-draft", "dtype": "float32", "device": "cpu"}
    cores = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="collab_llm_"))
        config = Path(folder) / "verifier.yaml"
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        try:
            if load.one_core:
                os.sched_setaffinity(0, {min(cores)})  # the process inherits it
            process = stack.enter_context(verifier_process(address, config=config))
        finally:
            os.sched_setaffinity(0, cores)
        yield process


def run_with_select(job: Coroutine[Any, Any, T]) -> T:
    """Run as ``asyncio.run``, but with select: epoll rounds waits up to milliseconds."""
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    running = loop.create_task(job)
    try:
        return loop.run_until_complete(running)
    finally:  # interrupted: the robots hang up, or the verifier would wait for them
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(running)
        loop.close()


async def drive_robots(
    address: str,
    recordings: Sequence[Recording],
    count: int,
    seconds: float,
    load: Load,
    *,
    warm_up_s: float = WARM_UP_S,
    server_s: Callable[[], float] = lambda: 0.0,
) -> Tally:
    """Run ``count`` robots for ``seconds`` after the warm-up.

    Args:
        server_s: returns the verifier's processor time so far [s].
    """
    connections: list[Connection] = []
    warm_up, tally = Tally(), Tally()
    try:
        for number in range(count):
            connections.append(await connect(address, source=_own_address(number)))
        for seen, duration in ((warm_up, warm_up_s), (tally, seconds)):
            if load.waves:
                await _waves(connections, recordings, load, seen, duration, server_s)
            else:
                await _stream(connections, recordings, load, seen, duration)
    finally:
        for connection in connections:
            connection.close()
    return tally


def _own_address(number: int) -> str:
    """Return the loopback address of robot ``number``: what an address may do is limited."""
    return f"127.0.{1 + number // 250}.{1 + number % 250}"


async def _waves(
    robots: Sequence[Connection],
    recordings: Sequence[Recording],
    load: Load,
    tally: Tally,
    seconds: float,
    server_s: Callable[[], float],
) -> None:
    """Open sessions, then decode in them, again and again; only decoding is timed."""

    async def decode(answers: Sequence[Answer], rounds: int) -> None:
        for answer in answers:
            rounds -= await answer.decode(tally, rounds)
            answer.close()

    answer = Streamed if load.co_located else Answer
    wave = 0
    while tally.seconds < seconds:
        everybodys = [
            [
                answer(robot, recordings[(wave + i + 7 * n) % len(recordings)], load)
                for n in range(SESSIONS)
            ]
            for i, robot in enumerate(robots)
        ]
        await asyncio.gather(*(answer.open(tally) for own in everybodys for answer in own))
        # The verifier may wait for sessions that were opened last: not what is to be measured.
        untimed = Tally()
        if not load.co_located:  # that would start streams
            await asyncio.gather(*(own[0].decode(untimed, 1) for own in everybodys))
        tally.mismatches += untimed.mismatches
        rounds = min(sum(answer.left for answer in own) for own in everybodys)
        begun, served = time.perf_counter(), server_s()
        await asyncio.gather(*(decode(own, rounds) for own in everybodys))
        tally.seconds += time.perf_counter() - begun
        tally.server_s += server_s() - served
        wave += 1


async def _stream(
    robots: Sequence[Connection],
    recordings: Sequence[Recording],
    load: Load,
    tally: Tally,
    seconds: float,
) -> None:
    """Have every robot decode answer after answer."""
    begun = time.perf_counter()

    async def work(robot: Connection, number: int) -> None:
        while time.perf_counter() < begun + seconds:
            answer = Answer(robot, recordings[number % len(recordings)], load)
            await answer.open(tally)
            await answer.decode(tally, answer.left)
            answer.close()
            number += 7  # coprime to the number of recordings: everybody asks everything

    await asyncio.gather(*(work(robot, number) for number, robot in enumerate(robots)))
    tally.seconds = time.perf_counter() - begun


class Replay(ABC):
    """A recorded answer, replayed round by round.

    Args:
        rounds: of the answer, the first of them included.
    """

    _call: Call

    def __init__(self, connection: Connection, rounds: int) -> None:
        self._connection = connection
        self._rounds, self._done = rounds, 0

    async def open(self, tally: Tally) -> None:
        """Begin the answer, and wait for the first round."""
        await self.begin()
        tally.first_s.append(await self._next(tally))

    @abstractmethod
    async def begin(self) -> None:
        """Set ``_call`` to a stream that is ready for the first round."""

    async def stream(self, method: str, opened: bytes) -> Call:
        """Return a stream of this answer's own that begins with the message ``opened``."""
        call = self._connection.call(method, ANSWER_DEADLINE_S)
        await call.write(opened)
        return call

    @property
    def left(self) -> int:
        """Rounds to come."""
        return self._rounds - self._done

    async def decode(self, tally: Tally, rounds: int) -> int:
        """Decode ``rounds`` more rounds, or all that are left; return how many."""
        rounds = min(rounds, self.left)
        for _ in range(rounds):
            tally.rounds_s.append(await self._next(tally))
        tally.answers += not self.left
        return rounds

    def close(self) -> None:
        """End the stream."""
        self._call.done_writing()

    @abstractmethod
    async def round(self, number: int, tally: Tally) -> float:
        """Send the message of round ``number``, check the reply, and return its wait [s]."""

    async def reply(self, messages: type[Message], kind: str) -> Any:
        """Return the next message of ``kind``; others before it are passed over.

        Raises:
            CollabError: The server reports that the session has failed.
        """
        while True:
            message: Any = messages.FromString(await self._call.read())
            found = message.WhichOneof("message")
            if found == kind:
                return getattr(message, kind)
            if found == "failure":
                raise CollabError(message.failure.message, remedy=message.failure.remedy)

    async def _next(self, tally: Tally) -> float:
        number, self._done = self._done, self._done + 1
        return await self.round(number, tally)


class Answer(Replay):
    """A robot's answer; a round is a draft and its verdict."""

    def __init__(self, robot: Connection, recording: Recording, load: Load) -> None:
        super().__init__(robot, len(recording.drafts))
        self._recording, self._load = recording, load

    async def begin(self) -> None:
        """Open the session."""
        self._call = await self.stream(codec.SESSION, self._recording.opened)

    async def round(self, number: int, tally: Tally) -> float:
        """Have one draft verified; return the wait for its verdict [s]."""
        draft, size = self._recording.drafts[number]
        per_token_s = self._load.draft_token_s
        drafting_s = (
            self._recording.drafting_s[number] if per_token_s is None else size * per_token_s
        )
        if drafting_s:
            await asyncio.sleep(drafting_s)
        sent = time.perf_counter()
        if self._load.link_s:
            await asyncio.sleep(self._load.link_s)
        await self._call.write(draft)
        return await self._verdict(number, tally, sent)

    async def _verdict(self, number: int, tally: Tally, sent: float) -> float:
        verdict = await self.reply(pb.ServerMessage, "verdict")
        if self._load.link_s:
            await asyncio.sleep(self._load.link_s)
        took_s = time.perf_counter() - sent
        tally.mismatches += tuple(verdict.tokens) != self._recording.verdicts[number]
        tally.queue_s.append(verdict.queue_s)
        tally.compute_s.append(verdict.compute_s)
        tally.draft_s.append(verdict.draft_s)
        if number or not self._load.waves:  # waves are not timed while sessions open
            tally.tokens += len(verdict.tokens)
        return took_s


class Streamed(Answer):
    """A robot's answer that the verifier drafts and streams; a round is a verdict."""

    async def begin(self) -> None:
        """Open the session."""
        message = pb.ClientMessage.FromString(self._recording.opened)
        message.open.co_located = GAMMA
        self._most_tokens = message.open.max_tokens
        self._call = await self.stream(codec.SESSION, message.SerializeToString())

    async def round(self, number: int, tally: Tally) -> float:
        """Receive the next verdict; the stream begins with the second, when the clock may run."""
        sent = time.perf_counter()
        if number < 2:
            start = sum(map(len, self._recording.verdicts[:number]))
            rounds = self._most_tokens - start - 1 if number else 0
            draft = Draft(number, start, (), autoregressive_rounds=rounds)
            await self._call.write(codec.encode_client(draft))
        return await self._verdict(number, tally, sent)


def _row(tally: Tally) -> dict[str, Any]:
    rounds, first = _percentiles(tally.rounds_s), _percentiles(tally.first_s)
    return {
        "tokens_per_s": tally.tokens / tally.seconds,
        "server_ms_per_token": 1e3 * tally.server_s / tally.tokens,
        "p50_ms": rounds[49],
        "p99_ms": rounds[98],
        "first_p50_ms": first[49],
        "first_p99_ms": first[98],
        "queue_ms": 1e3 * statistics.median(tally.queue_s),
        "compute_ms": 1e3 * statistics.median(tally.compute_s),
        "drafting_ms": 1e3 * statistics.median(tally.draft_s),
        "answers": tally.answers,
        "rounds": len(tally.rounds_s),
    }


def _percentiles(times_s: Sequence[float]) -> list[float]:
    """Return the 1st to the 99th percentile in milliseconds."""
    return [1e3 * t for t in statistics.quantiles(times_s, n=100, method="inclusive")]


def _print(results: dict[str, Any], console: Console) -> None:
    titles = {
        "clients": f"verification, drafts take {results['drafting_ms']:.1f} ms",
        "saturated": "verification, no think time",
        "answers": "whole answers, no think time",
        "robots_draft": "verification on one core, no think time",
        "verifier_drafts": "drafting and verification on one core (co-located)",
        "emulated_robots": f"whole answers, robots and links emulated (T_p {1e3 * T_P_S:g} ms per"
        f" token, T_c {1e3 * T_C_S:g} ms)",
    }
    columns = {
        "tok/s": "{tokens_per_s:.0f}",
        "x one": "{over_one}",
        "p50": "{p50_ms:.1f}",
        "p99": "{p99_ms:.1f}",
        "p99/p50": "{p99_over_p50:.1f}",
        "1st p50": "{first_p50_ms:.1f}",
        "1st p99": "{first_p99_ms:.1f}",
        "queue": "{queue_ms:.1f}",
        "pass": "{compute_ms:.1f}",
    }
    for name, title in titles.items():
        rows = {
            count: {
                **row,
                "over_one": f"{row['speedup']:.2f}" if row["speedup"] else "-",
                "p99_over_p50": row["p99_ms"] / row["p50_ms"],
            }
            for count, row in results[name].items()
        }
        show_rows(console, f"{title} [ms]", ["robots"], rows, columns)
    for count, found in results["capacity"].items():
        console.print(
            f"{count} robots, drafted for, get a token every {found['token_ms']:.2f} ms, and so do"
            f" {found['robots']:.1f} that draft: {found['measured']:.2f} times as many (predicted"
            f" {found['predicted']:.2f}); the server takes {found['server_time']:.2f} times as long"
        )
    console.print(f"{results['output_mismatches']} verdicts differ from the recorded ones")


def _plot(results: dict[str, Any], file: Path | None) -> None:
    labels = {
        "clients": "verification",
        "saturated": "no think time",
        "answers": "whole answers",
        "emulated_robots": "robots and links emulated",
        "robots_draft": "one core, robots draft",
        "verifier_drafts": "one core, co-located",
    }

    def draw(axis: Any, what: str, **styles: str) -> None:
        for colour, (name, label) in enumerate(labels.items()):
            counts = [int(count) for count in results[name]]
            for key, style in styles.items():
                values = [row[key] for row in results[name].values()]
                axis.plot(counts, values, style, color=f"C{colour}", label=label)
                label = "_"  # one entry in the legend for each load
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        label_axes(axis, "robots", what)

    panels: dict[str, Draw] = {
        "throughput": lambda axis: draw(axis, "tokens per second, all robots", tokens_per_s="o-"),
        "draft to verdict": lambda axis: draw(
            axis, "median and 99 % (dashed) [ms]", p50_ms="o-", p99_ms="x--"
        ),
        "what robots' drafts save a server": partial(_draw_capacity, results),
    }
    draw_panels(panels, file, columns=3, size=(4.5, 3.5))


def _draw_capacity(results: Mapping[str, Any], axis: Any) -> None:
    """Draw the time per token over the number of robots, on one core."""
    for name, label in (("verifier_drafts", "the verifier drafts"), ("robots_draft", "they draft")):
        axis.plot(*_token_times(results[name]), "o-", label=label)
    counts, waits = _token_times(results["verifier_drafts"])
    predicted = next(iter(results["capacity"].values()))["predicted"]
    more = [predicted * count for count in counts]
    axis.plot(more, waits, "--", label=f"predicted: {predicted:.2f} times as many")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    label_axes(axis, "robots", "ms between two tokens of a robot")
