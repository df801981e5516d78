"""``collab-llm bench edge-cloud --server URL``: a stock server beside our verifier, in one run.

Nothing is emulated: both servers have the same checkpoint, on this machine or elsewhere. ``modes``
are whole answers of one robot with its draft model. ``robots`` are many robots whose drafts were
recorded, so that no draft model competes for the cores; each sends its next draft as soon as the
verdict on the last one is there.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from collab_llm_lab.bench.edge_cloud import MODES, Point, Row, write_settings
from collab_llm_lab.bench.lossless.server import (
    DEADLINE_S,
    MAX_TOKENS,
    METHODS,
    own_answers,
    server_prompts,
)
from collab_llm_lab.bench.rendering import show_rows
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ModelError, quoted
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Open,
    Opened,
    ServerMessage,
    Verdict,
    open_message,
)
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process, wait_for_verifier
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.sessions import SessionClient
from collab_llm_nodes.protocols.edge_cloud.stock.client import StockClient
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient

GAMMA = 4
WRONG_EVERY = 4
"""Every so many rounds a recorded draft has a wrong token: tau is then about 4."""
_ALONE = Point(0.0, 0.0, 0.0)  # nothing is emulated
_SERVED = ("ar", "sd", "push_ahead", "planner")


def run_server(
    config: TargetLinkConfig,
    *,
    draft: str,
    answers: int,
    robots: Sequence[int],
    seconds: float,
    seed: int,
    console: Console,
) -> dict[str, Any]:
    """Measure the stock server of ``config``, by each of its methods, and our verifier.

    Returns:
        ``server.ours.<n>`` and ``server.<kind>.<n>.<method>`` for n robots with ``rounds_per_s,
        tokens_per_s, round_p50_ms, bytes_up_per_round, bytes_down_per_round, answers,
        output_mismatches``; ``server.ours.modes.<mode>`` and
        ``server.<kind>.modes.<method>.<mode>`` as of ``bench edge-cloud``; ``output_mismatches``
        of all.
    """
    set_threads(ModelConfig(path=draft))
    engine = Engine(load(ModelConfig(path=draft)))
    prompts = server_prompts(engine, max(answers, 8), seed)
    right = own_tokens(config, engine, prompts, own_answers(config, prompts))
    scripts = [Script.of(p, answer, engine) for p, answer in zip(prompts, right, strict=True)]
    measured = []
    for name, method, opened in _clients(config):
        with opened as client:
            modes = _modes(client, engine, prompts[:answers], right)
            rows = Measured(name, method, modes)
            measured.append(rows)
            for count in robots:
                row = rows.robots[str(count)] = measure_robots(client, scripts, count, seconds)
                console.print(f"{rows.title}: {count} robots: {row['rounds_per_s']:.1f}/s")
    _print(measured, console)
    return {
        "answers": answers,
        "gamma": GAMMA,
        "server": by_server(measured),
        "output_mismatches": sum(rows.output_mismatches for rows in measured),
    }


@dataclass(frozen=True)
class Measured:
    """The measurements of one server by one method.

    Attributes:
        name: ``ours``, or the kind of a stock server.
        method: of a server that has several, else empty.
        modes: whole answers of one robot, by mode of decoding.
        robots: many robots' rounds, by their number.
    """

    name: str
    method: str
    modes: dict[str, dict[str, Any]]
    robots: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name and method."""
        return f"{self.name} {self.method}".strip()

    @property
    def output_mismatches(self) -> int:
        """Answers that were wrong."""
        rows = (*self.modes.values(), *self.robots.values())
        return sum(row["output_mismatches"] for row in rows)


def by_server(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the rows by server, then number of robots or ``modes``, then method if any."""
    servers: dict[str, Any] = {}
    for rows in measured:
        server = servers.setdefault(rows.name, {})
        for key, row in {"modes": rows.modes, **rows.robots}.items():
            if rows.method:
                server.setdefault(key, {})[rows.method] = row
            else:
                server[key] = row
    return servers


def own_tokens(
    config: TargetLinkConfig,
    draft: Engine,
    prompts: Sequence[Prompt],
    answers: Sequence[tuple[int, ...] | str],
) -> list[tuple[int, ...]]:
    """Return the tokens of ``answers``; a server that gave text alone is asked for them again.

    Raises:
        ModelError: the tokens that it then decodes alone are of another text.
    """
    if not any(isinstance(answer, str) for answer in answers):
        return [answer for answer in answers if not isinstance(answer, str)]
    found = []
    with StockClient(config) as client:
        alone = RemoteRunner(draft, client, gamma=0)
        for prompt, answer in zip(prompts, answers, strict=True):
            made = alone.generate(prompt, max_tokens=MAX_TOKENS, deadline_s=DEADLINE_S)
            if answer not in (made.text, made.tokens):
                raise ModelError(
                    f"the server's chat gives {quoted(answer)}, its stream {quoted(made.text)}",
                    field="--server",
                    remedy="compare them with check lossless --server; is its template another?",
                )
            found.append(made.tokens)
    return found


def _clients(
    config: TargetLinkConfig,
) -> Iterator[tuple[str, str, contextlib.AbstractContextManager[SessionClient[Any]]]]:
    """Yield name, method and client of each server."""
    for method in METHODS[config.kind]:
        named = "" if method == "auto" else method
        yield config.kind, named, StockClient(replace(config, method=method))
    yield "ours", "", _ours(config.tokenizer)


@contextlib.contextmanager
def _ours(model: str) -> Iterator[SessionClient[Any]]:
    """Run our verifier with ``model``, and without limits for this machine's robots."""
    address = f"127.0.0.1:{free_port()}"
    settings = yaml.safe_load(config_file("verifier_embedded.yaml").read_text(encoding="utf-8"))
    settings["model"] |= {"path": model}
    settings["shares"] = {"connection": 1.0, "address": 1.0, "sessions_per_s": 1e6}
    settings["shares"]["bytes_per_s"] = 1e9
    with (
        tempfile.TemporaryDirectory(prefix="collab_llm_") as folder,
        verifier_process(
            address, config=write_settings(Path(folder) / "verifier.yaml", settings)
        ) as process,
        VerifierClient(ClientLinkConfig(address=address)) as client,
    ):
        wait_for_verifier(client, process)
        yield client


def _modes(
    client: SessionClient[Any],
    draft: Engine,
    prompts: Sequence[Prompt],
    right: Sequence[tuple[int, ...]],
) -> dict[str, dict[str, Any]]:
    rows = {name: Row(MODES[name], _ALONE, [draft], client) for name in _SERVED}
    for row in rows.values():
        row.warm_up(prompts[0])
    for prompt, answer in zip(prompts, right, strict=False):
        for row in rows.values():
            row.measure(prompt, answer)
    return {name: row.result() for name, row in rows.items()}


@dataclass(frozen=True)
class Script:
    """An answer that a robot replays: its messages, and the verdicts it must get."""

    opened: Open
    drafts: tuple[Draft, ...]
    verdicts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, prompt: Prompt, answer: tuple[int, ...], draft: Engine) -> Script:
        """Return a script whose drafts are the target's own tokens, some of them spoiled."""
        opened = open_message(prompt, SamplingConfig(), MAX_TOKENS, draft.vocabulary)
        drafts, verdicts, start = list[Draft](), list[tuple[int, ...]](), 0
        while start < len(answer):
            tokens = answer[start : start + GAMMA][: MAX_TOKENS - start - 1]
            accepted = len(tokens)
            if len(drafts) % WRONG_EVERY == WRONG_EVERY - 1 and tokens:
                accepted = len(tokens) // 2
                wrong = (tokens[accepted] + 1) % draft.vocab_size
                tokens = (*tokens[:accepted], wrong, *tokens[accepted + 1 :])
            drafts.append(Draft(len(drafts), start, tokens))
            verdict = answer[start : start + accepted + 1]
            verdicts.append(verdict)
            start += len(verdict)
        return cls(opened, tuple(drafts), tuple(verdicts))


@dataclass
class Tally:
    """Counts of all robots; guarded by ``lock``."""

    rounds: int = 0
    tokens: int = 0
    answers: int = 0
    mismatches: int = 0
    round_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def measure_robots(
    client: SessionClient[Any], scripts: Sequence[Script], count: int, seconds: float
) -> dict[str, Any]:
    """Have ``count`` robots replay scripts for ``seconds``, answer after answer.

    Raises what a robot raises.
    """
    tally = Tally()
    up, down, begun = client.bytes_up, client.bytes_down, time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        robots = [
            pool.submit(_drive, client, scripts, number, begun + seconds, tally)
            for number in range(count)
        ]
    for robot in robots:
        robot.result()
    took_s, rounds = time.monotonic() - begun, max(1, tally.rounds)
    return {
        "rounds_per_s": tally.rounds / took_s,
        "tokens_per_s": tally.tokens / took_s,
        "round_p50_ms": 1e3 * statistics.median(tally.round_s or [0.0]),
        "bytes_up_per_round": (client.bytes_up - up) / rounds,
        "bytes_down_per_round": (client.bytes_down - down) / rounds,
        "answers": tally.answers,
        "output_mismatches": tally.mismatches,
    }


def _drive(
    client: SessionClient[Any], scripts: Sequence[Script], number: int, end: float, tally: Tally
) -> None:
    while time.monotonic() < end:
        Replay(client, scripts[number % len(scripts)], tally).run()
        number += 7  # all robots ask everything, each at its own time


class Replay:
    """One answer by its script; the next draft leaves in the thread that brings the verdict."""

    def __init__(self, client: SessionClient[Any], script: Script, tally: Tally) -> None:
        self._script, self._tally = script, tally
        self._round, self._sent_at = 0, 0.0
        self._over = threading.Event()
        self._session = client.open(script.opened, self._receive)

    def run(self) -> None:
        """Replay the answer to its end."""
        self._send()
        if not self._over.wait(DEADLINE_S):
            self._count_mismatch()
        self._session.close()

    def _send(self) -> None:
        self._sent_at = time.monotonic()
        self._session.send(self._script.drafts[self._round])

    def _receive(self, message: ServerMessage) -> None:
        if isinstance(message, Opened | EarlyExit):
            return
        right = isinstance(message, Verdict) and message.tokens == self._verdict
        if not isinstance(message, Verdict) or not right:
            self._count_mismatch()
            self._over.set()
            return
        self._count(message)
        self._round += 1
        if message.finished or self._round == len(self._script.drafts):
            self._over.set()
        else:
            self._send()

    @property
    def _verdict(self) -> tuple[int, ...]:
        return self._script.verdicts[self._round]

    def _count(self, verdict: Verdict) -> None:
        tally = self._tally
        with tally.lock:
            tally.rounds += 1
            tally.tokens += len(verdict.tokens)
            tally.answers += verdict.finished
            if verdict.round:  # the first one also waits for the prompt
                tally.round_s.append(time.monotonic() - self._sent_at)

    def _count_mismatch(self) -> None:
        with self._tally.lock:
            self._tally.mismatches += 1


def _print(measured: Sequence[Measured], console: Console) -> None:
    modes = {(rows.title, mode): row for rows in measured for mode, row in rows.modes.items()}
    columns = {"ms per token": "{ms_per_token:.1f}", "tau": "{tau:.2f}", "bytes": "{bytes}"}
    show_rows(console, "one robot", ["server", "mode"], modes, columns)
    robots = {(rows.title, count): row for rows in measured for count, row in rows.robots.items()}
    columns = {
        "rounds/s": "{rounds_per_s:.1f}",
        "tokens/s": "{tokens_per_s:.0f}",
        "round (p50) ms": "{round_p50_ms:.0f}",
        "bytes up": "{bytes_up_per_round:.0f}",
        "down": "{bytes_down_per_round:.0f}",
        "wrong": "{output_mismatches}",
    }
    show_rows(console, "many robots, recorded drafts", ["server", "robots"], robots, columns)
