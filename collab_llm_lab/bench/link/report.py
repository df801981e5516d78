"""``collab-llm bench link``: the effect of a bad link on answers, and the time they need to go on.

The embedded pair, with the verifier in a process of its own over an emulated link.
Every disturbed answer is compared with the undisturbed one, token by token.

Recovery is the time from the moment the link works again to the next verdict, less what that
verdict costs on a connection that stands (one round trip, prefill and verification; measured on
the same link). The bound: two round trips, which TCP and HTTP/2 take to connect, and the back-off
in force; with jitter the slowest round trips, the verdict's too. Lost packets come on top: a second
attempt to connect begins 0.25 s after the first (TCP would repeat a lost SYN after a second), and
TCP repeats other packets after 0.2 s or more.
"""

from __future__ import annotations

import contextlib
import math
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.link.lane import LinkProfile
from collab_llm_lab.bench.link.packets import PacketLink, unavailable_reason
from collab_llm_lab.bench.link.proxy import LinkProxy
from collab_llm_lab.bench.rendering import Draw, draw_panels, label_axes, show_rows
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    Open,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process, wait_for_verifier
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.transport.settings import BACKOFF_S
from collab_llm_nodes.transport.wire import Failure

DELAY_S = 0.02
MAX_TOKENS = 64
DEADLINE_S = 20.0
"""Deadline of one answer; an answer that is not over a second later hangs."""
_PASSES = 4
LAW = SamplingConfig()
"""Greedy, so that one wrong token is a wrong answer and not bad luck."""


@dataclass(frozen=True)
class Scenario:
    """A disturbance of the link during a run.

    Attributes:
        cuts: connections reset during an answer.
        outages_s: how long the link refuses new ones after a cut, in turn.
    """

    name: str
    profile: LinkProfile
    cuts: int = 0
    outages_s: tuple[float, ...] = (0.0, 0.0, 0.1, 0.4, 1.2)


@dataclass
class Counts:
    """The outcome of a run."""

    answers: int = 0
    tokens: int = 0
    wrong_tokens: int = 0
    failed: int = 0
    hangs: int = 0
    cuts: int = 0
    ms_per_token: float = 0.0
    errors: list[str] = field(default_factory=list)  # of the failed answers
    recoveries: list[dict[str, float]] = field(default_factory=list)

    def row(self, profile: LinkProfile) -> dict[str, Any]:
        """Return the figures for the JSON; times in milliseconds."""
        rtt_s, slow_s = 2 * profile.delay_s, 2 * (profile.delay_s + profile.jitter_s)
        row = {k: v for k, v in vars(self).items() if k != "recoveries"}
        if self.recoveries:
            excess = [1e3 * r["excess"] for r in self.recoveries]
            bounds = [1e3 * (3 * slow_s - rtt_s + r["backoff"]) for r in self.recoveries]
            of_mean = [1e3 * (2 * rtt_s + r["backoff"]) for r in self.recoveries]
            instant = [1e3 * r["excess"] for r in self.recoveries if not r["outage"]]
            row["recovery_ms"] = {
                "count": len(excess),
                "p50": statistics.median(excess),
                "max": max(excess),
                "p50_without_outage": statistics.median(instant) if instant else None,
                "p50_to_verdict": statistics.median(1e3 * r["to_verdict"] for r in self.recoveries),
                "bound_p50": statistics.median(bounds),
                "bound_max": max(bounds),
                "beyond_bound": sum(e > b for e, b in zip(excess, bounds, strict=True)),
                "beyond_bound_of_mean_rtt": sum(
                    e > b for e, b in zip(excess, of_mean, strict=True)
                ),
                "each": [
                    {**{k: round(1e3 * v) for k, v in r.items()}, "bound": round(b)}
                    for r, b in zip(self.recoveries, bounds, strict=True)
                ],
            }
        return row


@dataclass(frozen=True)
class Bed:
    """A verifier, a link, and an edge that uses it.

    Attributes:
        link: where connections are cut.
        packets: the link's packet level; None where this user may not emulate it, and then all
            is the proxy's, which cannot lose or reorder packets.
    """

    client: VerifierClient
    runner: RemoteRunner
    vocabulary: str
    link: LinkProxy
    packets: PacketLink | None = None

    def change(self, profile: LinkProfile) -> None:
        """Both directions of the link from now on."""
        if self.packets is not None:
            self.packets.change(profile)
        else:
            self.link.change(profile)


@contextlib.contextmanager
def embedded_bed(draft: Engine, compute_s: float = 0.0) -> Iterator[Bed]:
    """Start the verifier with the embedded target; the link is perfect at first.

    ``compute_s``: a pass takes at least so long, as that of a larger model.
    """
    with contextlib.ExitStack() as stack:
        packets = None if unavailable_reason() else stack.enter_context(PacketLink())
        if packets is None:
            address = f"127.0.0.1:{free_port()}"
            process = stack.enter_context(verifier_process(address, compute_s=compute_s))
            link = stack.enter_context(LinkProxy(address))
        else:
            address = f"{packets.FAR}:50551"  # a namespace of its own has all ports free
            with packets.at_far():
                process = stack.enter_context(verifier_process(address, compute_s=compute_s))
            link = stack.enter_context(LinkProxy(address, enter=packets.enter_near))
        client = stack.enter_context(VerifierClient(ClientLinkConfig(address=link.address)))
        wait_for_verifier(client, process)
        yield Bed(client, RemoteRunner(draft, client), draft.vocabulary, link, packets)


def run_link(
    *, answers: int, cuts: int, seed: int, plot: Path | None, console: Console
) -> dict[str, Any]:
    """Decode ``answers`` answers per scenario; draw the recoveries into ``plot``.

    Returns:
        ``runs.<scenario>`` with answers, tokens, wrong_tokens, failed, hangs, cuts, ms_per_token
        and ``recovery_ms``; scenarios that need packets are left out where there can be none.
        ``silence.<kind>`` with the cost of a connection that falls silent.
    """
    prompts = scene_prompts(answers, seed)
    model = ModelConfig(path="nav-draft")
    set_threads(model)
    draft = Engine(load(model))
    delayed = LinkProfile(DELAY_S, seed=seed)
    scenarios = (
        Scenario("delay_only", delayed),
        Scenario("cuts", delayed, cuts),
        Scenario("jitter_loss_cuts", LinkProfile(DELAY_S, 0.01, loss=0.01, seed=seed), cuts),
        Scenario("reordering", LinkProfile(DELAY_S, 0.01, reorder=0.1, seed=seed)),
        Scenario("throttled", LinkProfile(DELAY_S, rate_bps=256e3, seed=seed)),
    )
    results: dict[str, Any] = {
        "answers": answers,
        "rtt_ms": 2e3 * DELAY_S,
        "emulation": "a TCP proxy, no packets: " + reason
        if (reason := unavailable_reason())
        else "packets between two network namespaces",
        "runs": {},
    }
    with embedded_bed(draft) as bed:
        truth = [bed.runner.generate(p, LAW, MAX_TOKENS).tokens for p in prompts]
        for scenario in scenarios:
            if bed.packets is None and (scenario.profile.loss or scenario.profile.reorder):
                continue
            bed.change(scenario.profile)
            with console.status(f"{scenario.name} ..."):
                counts = disturb(bed, prompts, truth, scenario, seed)
            results["runs"][scenario.name] = counts.row(scenario.profile)
        bed.change(delayed)
        results["silence"] = {
            # Nobody can be reached; or only this connection is dead, and another one works.
            "dead_for_good": silence(bed, prompts[0], truth[0], bed.link.half_open),
            "forgotten": silence(bed, prompts[0], truth[0], bed.link.forget),
        }
    _print(results, console)
    _plot(results, plot)
    return results


def disturb(
    bed: Bed,
    prompts: Sequence[Prompt],
    truth: Sequence[tuple[int, ...]],
    scenario: Scenario,
    seed: int,
) -> Counts:
    """Decode every prompt on ``scenario``'s link, with its cuts spread over the answers.

    The first answers get more than their share: one that is short may end before its next cut. If
    some cuts are left even so, the prompts begin again, at most ``_PASSES`` times.
    """
    counts, rng = Counts(), random.Random(seed)
    standing = verdict_s(bed, prompts[0], truth[0])
    elapsed, share = 0.0, math.ceil(1.5 * scenario.cuts / len(prompts))
    for prompt, expected in [*zip(prompts, truth, strict=True)] * _PASSES:
        if counts.answers >= len(prompts) and counts.cuts >= scenario.cuts:
            break
        cuts = min(share, scenario.cuts - counts.cuts)
        saboteur = Saboteur(bed.link, scenario, cuts, len(expected), counts, standing, rng)
        with saboteur, ThreadPoolExecutor(1) as worker:
            started = time.monotonic()
            answer = worker.submit(
                bed.runner.generate, prompt, LAW, MAX_TOKENS, DEADLINE_S, saboteur.on_tokens
            )
            try:
                tokens = answer.result(DEADLINE_S + 1.0).tokens
            except CollabError as error:
                counts.failed += 1
                counts.errors.append(f"{error.code}: {error}")
                continue
            except FutureTimeout:
                counts.hangs += 1
                continue
            finally:
                counts.answers += 1
                elapsed += time.monotonic() - started
        counts.tokens += len(tokens)
        counts.wrong_tokens += differences(tokens, expected)
    counts.ms_per_token = 1e3 * elapsed / max(1, counts.tokens)
    return counts


def differences(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of places at which they differ, missing and surplus ones included."""
    same = sum(a == b for a, b in zip(tokens, expected, strict=False))
    return max(len(tokens), len(expected)) - same


class Saboteur:
    """Cut the link during an answer and measure how soon the answer goes on.

    Each cut follows some verdict by a random part of a round, in a thread of its own, so that it
    meets drafts and verdicts in transit.
    """

    def __init__(
        self,
        link: LinkProxy,
        scenario: Scenario,
        cuts: int,
        length: int,
        counts: Counts,
        standing_s: float,
        rng: random.Random,
    ) -> None:
        self._link, self._scenario, self._rng = link, scenario, rng
        self._counts, self._standing_s = counts, standing_s
        self._left, self._length, self._seen = cuts, length, 0
        self._due: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._healed: tuple[float, float] | None = None  # when, after how long an outage
        self._busy = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="saboteur", daemon=True)

    def __enter__(self) -> Saboteur:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._due.put(None)
        self._thread.join()

    def on_tokens(self, tokens: tuple[int, ...]) -> None:
        """Record a verdict, and schedule the next cut."""
        now = time.monotonic()
        with self._lock:
            self._seen += len(tokens)
            if self._healed is not None:
                (healed, outage), self._healed = self._healed, None
                raw = now - healed
                self._counts.recoveries.append(
                    {
                        "to_verdict": raw,
                        "excess": raw - self._standing_s,
                        "backoff": backoff_s(outage),
                        "outage": outage,
                    }
                )
            if self._left and not self._busy and self._seen < self._length:
                self._left -= 1
                self._busy = True
                self._due.put(now + self._rng.uniform(0.0, 2 * self._scenario.profile.delay_s))

    def _work(self) -> None:
        while (due := self._due.get()) is not None:
            time.sleep(max(0.0, due - time.monotonic()))
            if self._complete():
                return  # too late: the next answer gets this cut
            outages = self._scenario.outages_s
            outage = outages[self._counts.cuts % len(outages)]
            self._counts.cuts += 1
            if outage:
                self._link.refuse()
            self._link.cut()
            time.sleep(outage)
            self._link.heal()
            with self._lock:
                self._busy = False
                self._healed = None if self._complete() else (time.monotonic(), outage)

    def _complete(self) -> bool:
        return self._seen >= self._length


def backoff_s(outage_s: float) -> float:
    """The longest pause that can be in force when an outage ends [s].

    Connection and session keep the same pauses, side by side.
    """
    config = ClientLinkConfig().link
    pause, ended = BACKOFF_S, 0.0
    while ended + pause <= outage_s:
        ended += pause
        pause = min(2 * pause, config.backoff_max_s)
    return pause


def verdict_s(bed: Bed, prompt: Prompt, answer: Sequence[int], repeats: int = 9) -> float:
    """Median time from a replaying Open on a standing connection to the next verdict [s]."""
    times = []
    for _ in range(repeats):
        arrived: queue.SimpleQueue[ServerMessage] = queue.SimpleQueue()
        opened = Open(
            prompt.text, prompt.images, LAW, MAX_TOKENS, bed.vocabulary, tuple(answer[:4]), 1
        )
        started = time.monotonic()
        session = bed.client.open(opened, arrived.put)
        session.send(Draft(1, 4, tuple(answer[4:8])))
        while not isinstance(message := arrived.get(timeout=DEADLINE_S), Verdict):
            if isinstance(message, Failure):
                raise CollabError(f"no verdict on a standing connection: {message.message}")
        times.append(time.monotonic() - started)
        session.close()
    return statistics.median(times)


def silence(
    bed: Bed, prompt: Prompt, expected: Sequence[int], fall_silent: Callable[[], None]
) -> dict[str, Any]:
    """Let the link fall silent during an answer, without a reset.

    Returns:
        ``over_after_s`` from then to the end of the answer, which is ``error`` or has
        ``wrong_tokens``; ``next_answer_wrong_tokens`` when the link works again.
    """
    silent_since: list[float] = []

    def on_tokens(tokens: tuple[int, ...]) -> None:
        if not silent_since:
            fall_silent()
            silent_since.append(time.monotonic())

    result: dict[str, Any] = {"limit_s": bed.client.config.link.verdict_deadline_s}
    try:
        tokens = bed.runner.generate(prompt, LAW, MAX_TOKENS, DEADLINE_S, on_tokens).tokens
        result["wrong_tokens"] = differences(tokens, expected)
    except CollabError as error:
        result["error"] = error.code
    result["over_after_s"] = time.monotonic() - silent_since[0]
    bed.link.heal()
    tokens = bed.runner.generate(prompt, LAW, MAX_TOKENS, DEADLINE_S).tokens
    result["next_answer_wrong_tokens"] = differences(tokens, expected)
    return result


def _print(results: dict[str, Any], console: Console) -> None:
    columns = {
        "tokens": "{tokens}",
        "wrong": "{wrong_tokens}",
        "failed": "{failed}",
        "hangs": "{hangs}",
        "cuts": "{cuts}",
        "ms/token": "{ms_per_token:.1f}",
        "recovery": "{recovery}",
    }
    shape = "{p50:.0f}, max {max:.0f} of {bound_max:.0f}, {beyond_bound} beyond"
    rows = {
        name: {
            "recovery": shape.format(**row["recovery_ms"]) if "recovery_ms" in row else "",
            **row,
        }
        for name, row in results["runs"].items()
    }
    title = f"emulated link, {results['rtt_ms']:.0f} ms round trip ({results['emulation']})"
    show_rows(console, title, ["run"], rows, columns)
    for name, row in results["silence"].items():
        console.print(f"{name}: {row}")


def _plot(results: Mapping[str, Any], file: Path | None) -> None:
    """Draw each recovery against its bound, by the outage before it."""

    def recoveries(each: Sequence[Mapping[str, float]]) -> Draw:
        def draw(axis: Any) -> None:
            outages = sorted({r["outage"] for r in each})
            where = [outages.index(r["outage"]) for r in each]
            bounds = [r["bound"] for r in each]
            axis.plot(where, bounds, "_", markersize=30, color="0.5", label="bound")
            axis.plot(where, [r["excess"] for r in each], "o", alpha=0.5, label="recovery")
            axis.set_xticks(range(len(outages)), [str(outage) for outage in outages])
            axis.set_xlim(-0.5, len(outages) - 0.5)
            axis.set_ylim(bottom=0.0)
            label_axes(axis, "outage [ms]", "from healed link to next verdict, extra [ms]")

        return draw

    panels = {
        f"{name}: {row['wrong_tokens']} wrong tokens, {row['hangs']} hangs (emulated)": recoveries(
            row["recovery_ms"]["each"]
        )
        for name, row in results["runs"].items()
        if "recovery_ms" in row
    }
    draw_panels(panels, file, columns=2, size=(4.5, 3.5))
