"""The figures of the hostile benchmarks: what robots notice of attacks.

Each attack meets a server of its own: a process with the embedded model, TLS, a token, metrics and
a log of JSON; with ``--front`` HAProxy stands before it, has the TLS, and is configured as shipped.
The robots (``robots.py``) work undisturbed, then beside the attacker (``attacker.py``), then alone
again. Last, a server under attack gets SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from collab_llm_lab.bench.hostile.attacker import Briefing, base64, tls_context
from collab_llm_lab.bench.hostile.robots import Endpoint, Observed, Pace, Robots, percentiles
from collab_llm_lab.bench.hostile.server import Server
from collab_llm_lab.bench.hostile.table import FRONT_ONLY, GOALS
from collab_llm_lab.bench.rendering import judged, missed, show_table
from collab_llm_lab.bench.safety.usage import family_mb
from collab_llm_lab.bench.verifier import WARM_UP_S, run_with_select
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.processes import Process, free_port, run_process
from collab_llm_nodes.transport.background import within

METRICS_S = 5.0
"""Time after which the metrics count as not answered [s]."""
ATTACKER_END_S = 60.0
"""An attacker that goes on so long beyond its time hangs."""
_MOST_SHOWN, _SHOWN = 3, 200
"""Lines of a log that are shown, and characters of each."""
SIGTERM_S = 90.0
"""Time between SIGTERM and SIGKILL [s]."""
SIGTERM_AFTER_S = 3.0
"""Length of the attack before it [s]."""
_SETTLED_MB = 3.0
"""Growth of a server's memory that counts as none."""


@dataclass(frozen=True)
class RunningServer:
    """A server that runs, and how clients reach it.

    Attributes:
        server: its kind.
        process: its own.
        address, metrics_address: host:port.
        ca: file with the authority of its certificate; empty: no TLS.
        token: the right one.
    """

    server: Server
    process: Process
    address: str
    metrics_address: str
    ca: str = ""
    token: str = ""

    def briefing(self, attack: str, seconds: float, answer: object) -> Briefing:
        """Return the attacker's orders; ``answer`` is one that robots replay."""
        server, honest = self.server, self.server.recorded(answer)
        endpoint = (self.address, self.metrics_address, self.ca, self.token)
        opened, light = base64(honest.opened), base64(honest.light)
        messages = tuple(map(base64, honest.messages))
        return Briefing(
            server.name, attack, seconds, *endpoint, server.method, opened, light, messages
        )


def run_hostile(
    *,
    server: Server,
    attacks: Sequence[str],
    seconds: float,
    seed: int,
    front: bool,
    console: Console,
) -> dict[str, Any]:
    """Try each of ``attacks``, robots working undisturbed and beside it ``seconds`` each.

    Args:
        front: Through HAProxy. Without it, an attack before authentication has figures but no
            goal.

    Returns:
        ``hostile.<attack>`` as :func:`withstand` returns it, ``hostile.sigterm_s`` (from SIGTERM
        under an attack to the server's end), ``hostile.drain_s`` (what is configured), ``goals``
        and ``ok``.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder:
        with console.status("recording the robots' answers ..."):
            settings, answers = server.prepare(Path(folder), seed)
        for attack in attacks:
            with console.status(f"{attack} ..."), running(server, settings, front) as site:
                found[attack] = run_with_select(withstand(site, attack, answers, seconds))
                site.process.check()
        with console.status("SIGTERM ..."), running(server, settings, front) as site:
            briefing = site.briefing(server.last_attack, SIGTERM_AFTER_S, answers[0])
            run_with_select(_attack_alone(briefing))
            sigterm_s = site.process.stop(SIGTERM_S)
    results: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "seconds": seconds,
        "seed": seed,
        "front": front,
        "goals": {**GOALS, "sigterm_s": server.drain_s + 1.0},
        "ok": all(found[name]["ok"] for name in attacks if front or name not in FRONT_ONLY)
        and sigterm_s <= server.drain_s + 1.0,
        "hostile": {**found, "sigterm_s": sigterm_s, "drain_s": server.drain_s},
    }
    show(results, list(attacks), console)
    return results


@contextlib.contextmanager
def running(server: Server, settings: Mapping[str, Any], front: bool) -> Iterator[RunningServer]:
    """Run ``server`` as it should face strangers."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collab_llm_")))
        address, metrics, backend = (f"127.0.0.1:{free_port()}" for _ in range(3))
        cert, key = _certificate(folder)
        token = secrets.token_hex(16)
        own = {**settings, "token": token, "metrics_address": metrics, "log_format": "json"}
        if front:
            command = _haproxy(folder, address, backend, token)
            stack.enter_context(run_process("haproxy", command))
            own |= {"address": backend, "client_header": "x-client"}
        else:
            own |= {"address": address, "tls_cert": cert, "tls_key": key}
        config = folder / "server.yaml"
        config.write_text(yaml.safe_dump(own), encoding="utf-8")
        process = stack.enter_context(server.start(config))
        server.wait(process, address, cert, token)
        yield RunningServer(server, process, address, metrics, cert, token)


def _haproxy(folder: Path, address: str, backend: str, token: str) -> list[str]:
    """Return the command for HAProxy in front of the server ``backend``."""
    found = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        raise CollabError("no haproxy", remedy="install HAProxy, or leave --front out")
    both, tokens = folder / "cert_and_key.pem", folder / "tokens"
    both.write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    tokens.write_text(f"Bearer {token}\n")
    settings = {
        "VERIFIER_LISTEN": address,
        "VERIFIER_CERT": both,
        "VERIFIER_TOKENS": tokens,
        "VERIFIER_ADDRESS": backend,
    }
    variables = [f"{name}={value}" for name, value in settings.items()]
    return ["env", *variables, found, "-db", "-f", str(config_file("haproxy_verifier.cfg"))]


def _certificate(folder: Path) -> tuple[str, str]:
    """Make a certificate for this machine, its own authority, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise CollabError("no openssl to make a certificate", remedy="install openssl")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return cert, key


async def withstand(
    site: RunningServer, attack: str, answers: Sequence[Any], seconds: float
) -> dict[str, Any]:
    """Let robots work undisturbed, beside the attacker, and alone again.

    Returns:
        ``normal_p50_ms``, ``normal_p99_ms`` (a robot's message to its reply, beside the attack),
        ``opening_p50_ms``, ``opening_p99_ms`` (the wish for an answer to its first reply);
        ``normal_p99_ratio``, ``opening_p99_ratio`` over ``undisturbed``; ``undisturbed`` and
        ``after`` with the same four times; ``wrong``, ``failed`` (of all phases), ``failures``
        (their words); ``rss_growth_mb`` (from before to after); ``thread_growth``, ``metrics_s``
        (what ``GET /metrics`` took) during the attack; ``raw_log_lines``, ``tracebacks``, ``raw``
        since it began; ``sent`` by the attacker; ``ok``: all goals are met.
    """
    endpoint = Endpoint(site.address, tls_context(site.ca), site.token)
    pid, server = site.process.pid, site.server
    robots = Robots(endpoint, answers, server.converse, server.robots)
    loop = asyncio.get_running_loop()
    try:
        await _settle(robots, pid, seconds)
        undisturbed = await robots.work(seconds)
        memory_mb, threads, logged = family_mb(pid), _threads(pid), site.process.log.stat().st_size
        async with _attacker(site.briefing(attack, seconds + 1.0, answers[0])) as sent:
            metrics = loop.run_in_executor(None, _ask_metrics, site.metrics_address, seconds / 2)
            attacked = await robots.work(seconds)
            thread_growth = _threads(pid) - threads
        after = await robots.work(seconds / 2)
    finally:
        robots.close()
    pace, all_seen = undisturbed.pace, (undisturbed, attacked, after)
    alone, beside = _waits(undisturbed, pace), _waits(attacked, pace)
    row: dict[str, Any] = {
        **beside,
        "normal_p99_ratio": beside["normal_p99_ms"] / alone["normal_p99_ms"],
        "opening_p99_ratio": beside["opening_p99_ms"] / alone["opening_p99_ms"],
        "undisturbed": alone,
        "after": _waits(after, pace),
        "wrong": sum(seen.wrong for seen in all_seen),
        "failed": sum(len(seen.failures) for seen in all_seen),
        "failures": sorted({words for seen in all_seen for words in seen.failures}),
        "rss_growth_mb": family_mb(pid) - memory_mb,
        "thread_growth": thread_growth,
        "metrics_s": await metrics,
        **read_log(site.process.log, logged),
        "sent": sent,
    }
    row["ok"] = not missed(row, GOALS)
    return row


async def _settle(robots: Robots, pid: int, seconds: float) -> None:
    """Let robots work until the server has the memory that they need, or for long.

    In the first half minute of any load oneDNN makes its kernels, and the allocator's heaps grow.
    """
    due, before = time.monotonic() + 6 * seconds, 0.0
    while (memory_mb := family_mb(pid)) > before + _SETTLED_MB and time.monotonic() < due:
        before = memory_mb
        await robots.work(max(2 * WARM_UP_S, seconds / 2))


async def _attack_alone(briefing: Briefing) -> None:
    async with _attacker(briefing):
        pass


@contextlib.asynccontextmanager
async def _attacker(briefing: Briefing) -> AsyncIterator[dict[str, int]]:
    """Attack from now on; leaving waits for the attacker's end. Yields what it will have sent."""
    with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder:
        file = Path(folder) / "briefing.json"
        briefing.write(file)
        command = (sys.executable, "-m", "collab_llm_lab.bench.hostile.attacker", str(file))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        sent: dict[str, int] = {}
        try:
            await process.stdout.readline()
            yield sent
            output, _ = await within(process.communicate(), briefing.seconds + ATTACKER_END_S)
            if process.returncode:
                raise CollabError(f"the attacker ended with {process.returncode}")
            sent.update(json.loads(output))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _waits(seen: Observed, pace: Pace) -> dict[str, float]:
    rounds = percentiles(seen.rounds_s, pace.round_s)
    openings = percentiles(seen.openings_s, pace.answer_s)
    return {
        "normal_p50_ms": rounds[0],
        "normal_p99_ms": rounds[1],
        "rounds": len(seen.rounds_s),
        "opening_p50_ms": openings[0],
        "opening_p99_ms": openings[1],
        "openings": len(seen.openings_s),
    }


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def _ask_metrics(address: str, after_s: float) -> float:
    """Return what the metrics take to come, asked for ``after_s`` from now; METRICS_S at most."""
    time.sleep(after_s)
    begun = time.perf_counter()
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=METRICS_S) as answer:
            answer.read()
    except OSError:
        return METRICS_S
    return time.perf_counter() - begun


def read_log(file: Path, start: int) -> dict[str, Any]:
    """Count lines that are no JSON object, and tracebacks, from the byte ``start`` on.

    ``raw`` has the first of these lines, to help find the cause.
    """
    lines = file.read_bytes()[start:].decode("utf-8", errors="replace").splitlines()
    raw = [line for line in lines if not _is_object(line)]
    return {
        "raw_log_lines": len(raw),
        "tracebacks": sum("Traceback (most recent call last)" in line for line in lines),
        "raw": [line[:_SHOWN] for line in raw[:_MOST_SHOWN]],
    }


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def show(results: dict[str, Any], attacks: Sequence[str], console: Console) -> None:
    """Print a table of 80 columns: the main figures, and every goal missed with its figure."""
    heads = {
        "normal_p99_ratio": "reply",
        "opening_p99_ratio": "opening",
        "failed": "failed",
        "rss_growth_mb": "MB",
    }

    def line(attack: str) -> Iterator[Text | str]:
        row = results["hostile"][attack]
        yield attack
        for name in heads:
            yield judged(row[name], GOALS[name], _number(row[name]))
        has_goal = results["front"] or attack not in FRONT_ONLY
        names = (f"{name} {_number(row[name])}" for name in missed(row, GOALS))
        yield "\n".join(names) if has_goal else "no goal"

    show_table(
        console,
        "Robots beside an attack; below each head: its goal, at most",
        ("attack", *(f"{head}\n{GOALS[name]:g}" for name, head in heads.items()), "missed"),
        (list(line(attack)) for attack in attacks),
        caption="reply, opening: p99 of the waits, undisturbed = 1\n"
        "missed: any of the goals, named as in the JSON\n"
        "no goal: only a proxy can hold it off (--front)",
    )
    sigterm_s, limit_s = results["hostile"]["sigterm_s"], results["goals"]["sigterm_s"]
    sigterm = judged(sigterm_s, limit_s, _number(sigterm_s))
    console.print(Text.assemble("SIGTERM to the end: ", sigterm, f" s (at most {limit_s:g})"))


def _number(value: float) -> str:
    """Return ``value`` with three digits, and no exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
