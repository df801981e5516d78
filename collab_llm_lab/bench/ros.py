"""``collab-llm bench ros``: the cost of the ROS graph, and whether anything in it grows.

The nodes of the robot's graph run in a process each. The same questions go to them and to
``RemoteRunner`` (the same loop and draft model in this process, no ROS) by turns; both speak to the
same verifier process. A round of one is compared with the same round of the same question's answer
in the other: their drafts and verdicts are equal, so the difference is the cost of the graph.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console

from collab_llm_lab.bench.rendering import Draw, draw_panels, label_axes, show_rows
from collab_llm_lab.bench.safety.usage import rss_mb
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, DeadlineExceeded, Unavailable
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.processes import START_DEADLINE_S, Process, free_port, run_process
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process, wait_for_verifier
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.ros.domain import isolate_ros

if TYPE_CHECKING:
    from collab_llm_lab.bench.ros_client import Asked, BenchClient

NODES = (
    "camera_ingest",
    "draft_vlm",
    "cloud_verifier_bridge",
    "predraft_cache",
    "navigation_action_parser",
    "generate_router",
)
GAMMA = 4
MAX_TOKENS = 64
SHORT_ANSWER = 12  # tokens: many answers, because what leaks often leaks once per answer
WARM_UP = 3
SAMPLES = 40
POINTS = {"as_is": 0.0, "emulated": 0.04}
"""Seconds that a verification takes at least."""

WANTED_MS = 3.0
"""Time that the graph may add to a round [ms]."""
MAX_SLOPE = 2048.0
"""Bytes per round that a process may grow by after warm-up: 10,000 rounds are 20 MB."""
MAX_SLOWDOWN = 1.2
"""Time per round in the last fifth of the rounds over that in the first fifth after warm-up."""


@dataclass(frozen=True)
class Mode:
    """The work that is done while the verifier works."""

    predrafts: int
    ahead: AheadConfig


_ALONE = AheadConfig(predictions=0, push_window=0)
MODES = {
    "no_predrafts": Mode(0, _ALONE),
    "cache": Mode(6, _ALONE),
    "push_ahead": Mode(6, AheadConfig()),
}
"""``cache`` is paper 003: early exits, and the node ``predraft_cache`` continues them."""


def run_ros(
    *,
    answers: int,
    rounds: int,
    standing_s: float,
    seed: int,
    plot: Path | None,
    console: Console,
    points: Mapping[str, float] = POINTS,
) -> dict[str, Any]:
    """Measure ``answers`` answers per mode and verifier, then watch ``rounds`` rounds.

    Args:
        standing_s: how long the graph stands while its processor time is measured [s].
        points: seconds that a verification takes at least, by name; ``as_is`` must be among them.

    Returns:
        ``points.<as_is|emulated>.<mode>`` with ``added_ms_per_round`` (median, p90; rounds after
        the first), ``added_ms_first_round``, ``added_ms_per_answer``, ``round_ms`` of both,
        ``rounds``, ``age_ms`` (p50, p90) and its parts ``age_parts_ms``; of these, at the top,
        ``added_ms_per_round``: as_is, push-ahead off (mode ``cache``); ``with_push_ahead``; and
        ``age_ms``: as_is with push-ahead, as shipped. ``router``: the same short answers asked of
        draft_vlm (``direct_ms``) and through generate_router (``routed_ms``) by turns, and the
        median of the differences (``added_ms``). ``growth``, unless ``rounds`` is 0. ``standing``:
        see :func:`measure_standing`.

    Raises:
        CollabError: a process ended, an answer failed, or the graph's tokens are not the runner's.
    """
    from collab_llm_lab.bench.standing import measure_standing  # without ROS this ends here

    isolate_ros()
    with console.status(f"a graph stands for {standing_s:g} s ..."):
        standing = measure_standing(standing_s)
    torch.set_num_threads(1)  # as in the child processes
    prompts = scene_prompts(min(answers, 50), seed)
    draft = Engine(load(ModelConfig(path="nav-draft")))
    load_before = os.getloadavg()[0]
    found, growth, router = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for point, compute_s in points.items():
        with (
            _bed(compute_s, prompts[0]) as bed,
            console.status(f"verifier {point}: pairs of answers ..."),
        ):
            found[point] = _pairs(bed, draft, list(_repeat(prompts, answers)))
            if not compute_s:
                router = _router(bed, list(_repeat(prompts, answers)))
            if rounds and not compute_s:
                growth = _growth(bed, draft, prompts, rounds, console)
    as_is = found["as_is"]
    results = {
        "added_ms_per_round": as_is["cache"]["added_ms_per_round"],
        "with_push_ahead": as_is["push_ahead"],
        "age_ms": as_is["push_ahead"]["age_ms"],
        "router": router,
        "points": found,
        "growth": growth,
        "standing": standing,
        "answers": answers,
        "gamma": GAMMA,
        "emulation": f"emulated: a verification takes at least {1e3 * POINTS['emulated']:g} ms",
        "cores": len(os.sched_getaffinity(0)),
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
    }
    _print(results, console)
    _plot(results, plot)
    return results


@dataclass(frozen=True)
class Bed:
    """Everything that runs."""

    verifier: VerifierClient
    client: BenchClient
    processes: Mapping[str, Process]

    def check(self) -> None:
        for process in self.processes.values():
            process.check()


@contextlib.contextmanager
def _bed(compute_s: float, prompt: Prompt) -> Iterator[Bed]:
    from collab_llm_lab.bench.ros_client import BenchClient  # rclpy: only where it is there

    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{free_port()}"
        cloud = stack.enter_context(verifier_process(address, compute_s=compute_s))
        processes = {name: stack.enter_context(_node(name, address)) for name in NODES}
        processes["verifier"] = cloud
        link = stack.enter_context(VerifierClient(ClientLinkConfig(address=address)))
        client = stack.enter_context(BenchClient())
        bed = Bed(link, client, processes)
        wait_for_verifier(link, cloud)
        client.wait_for_graph(START_DEADLINE_S, bed.check)
        due = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                client.ask(prompt, SHORT_ANSWER)
                break
            # The nodes have yet to discover one another; what was published before is lost.
            except (DeadlineExceeded, Unavailable):
                if time.monotonic() > due:
                    raise
        yield bed


def _node(name: str, address: str) -> contextlib.AbstractContextManager[Process]:
    command = [sys.executable, "-m", f"collab_llm_nodes.nodes.{name}", "--ros-args"]
    command += ["--params-file", str(config_file("embedded.yaml"))]
    for parameter in (
        f"cloud_verifier_bridge:verifier.address:={address}",
        "camera_ingest:source:=compressed",
        "camera_ingest:max_rate:=0.0",
        "camera_ingest:field_of_view:=0.0",  # these pictures were brought to it before
    ):
        command += ["-p", parameter]
    return run_process(name, command)


def _set_mode(client: BenchClient, mode: Mode) -> None:
    client.set_parameters("predraft_cache", {"cache.max_predrafts": mode.predrafts})
    client.set_parameters(
        "draft_vlm",
        {
            "predraft.max_predrafts": mode.predrafts,
            "ahead.push_window": mode.ahead.push_window,
            "ahead.predictions": mode.ahead.predictions,
        },
    )


# Pairs.


@dataclass
class _Pairs:
    """The times of one mode [s]."""

    added: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    graph: list[float] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def add(self, round_s: Sequence[float], answer_s: float, asked: Asked) -> None:
        """Add an answer without ROS, and the same through the graph."""
        added = [b - a for a, b in zip(round_s, asked.round_s, strict=True)]
        self.first.append(added[0])
        self.added += added[1:]
        self.plain += round_s[1:]
        self.graph += asked.round_s[1:]
        self.answer.append(asked.answer_s - answer_s)
        self.asked.append(asked)

    def row(self) -> dict[str, Any]:
        parts = {
            "camera_ingest": [a.observed for a in self.asked],
            "first_round": [a.first_text - a.observed for a in self.asked],
            "later_rounds": [a.final_text - a.first_text for a in self.asked],
            "action_parser": [a.action - a.final_text for a in self.asked],
        }
        return {
            "added_ms_per_round": _spread(self.added),
            "added_ms_first_round": _spread(self.first),
            "added_ms_per_answer": _spread(self.answer),
            "round_ms": {
                "without_ros": 1e3 * statistics.median(self.plain),
                "graph": 1e3 * statistics.median(self.graph),
            },
            "rounds": len(self.added),
            "age_ms": {
                f"p{q}": _ms(np.percentile([a.action for a in self.asked], q)) for q in (50, 90)
            },
            "age_parts_ms": {name: 1e3 * statistics.median(p) for name, p in parts.items()},
        }


def _pairs(bed: Bed, draft: Engine, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Ask each question in each mode, without ROS and through the graph, in alternating order."""
    runners = {
        name: RemoteRunner(
            draft, bed.verifier, gamma=GAMMA, predraft=PreDraftConfig(m.predrafts), ahead=m.ahead
        )
        for name, m in MODES.items()
    }
    found = {name: _Pairs() for name in MODES}
    for number, prompt in enumerate([*[prompts[0]] * WARM_UP, *prompts]):
        for name, mode in MODES.items():
            _set_mode(bed.client, mode)
            asked = bed.client.ask(prompt, MAX_TOKENS) if number % 2 else None
            tokens, round_s, answer_s = _without_ros(runners[name], prompt)
            asked = asked or bed.client.ask(prompt, MAX_TOKENS)
            bed.check()
            if asked.tokens != tokens:
                raise CollabError("the graph's answer differs from the runner's")
            if number >= WARM_UP:
                found[name].add(round_s, answer_s, asked)
    return {name: pairs.row() for name, pairs in found.items()}


def _router(bed: Bed, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Ask each question directly and through the router, in alternating order."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number, prompt in enumerate([*[prompts[0]] * WARM_UP, *prompts]):
        answers = set()
        for routed in (False, True) if number % 2 else (True, False):
            tokens, seconds = bed.client.time_answer(prompt, SHORT_ANSWER, routed=routed)
            answers.add(tokens)
            if number >= WARM_UP:
                taken[routed].append(seconds)
        bed.check()
        if len(answers) > 1 or () in answers:
            raise CollabError("the router's answer differs from the server's, or there is none")
    added = [b - a for a, b in zip(taken[False], taken[True], strict=True)]
    return {
        "direct_ms": _ms(statistics.median(taken[False])),
        "routed_ms": _ms(statistics.median(taken[True])),
        "added_ms": _ms(statistics.median(added)),
        "added_ms_spread": _spread(added),
        "answers": len(added),
    }


def _without_ros(
    runner: RemoteRunner, prompt: Prompt, max_tokens: int = MAX_TOKENS
) -> tuple[tuple[int, ...], list[float], float]:
    """Return tokens, the time of each round, and of the whole answer [s]."""
    times = [time.monotonic()]
    answer = runner.generate(
        prompt, max_tokens=max_tokens, on_tokens=lambda tokens: times.append(time.monotonic())
    )
    whole = time.monotonic() - times[0]
    return answer.tokens, [b - a for a, b in itertools.pairwise(times)], whole


def _repeat(prompts: Sequence[Prompt], count: int) -> Iterator[Prompt]:
    return itertools.islice(itertools.cycle(prompts), count)


# Growth.


@dataclass(frozen=True)
class Sample:
    """The state of the graph after so many rounds.

    Attributes:
        rss: of each process [byte]; tasks: of each node's executor.
        round_s: median round since the last sample [s].
        reference_s: median round without ROS at the same time, to measure the machine's load.
    """

    rounds: int
    rss: dict[str, int]
    tasks: dict[str, int]
    round_s: float
    reference_s: float


def _growth(
    bed: Bed, draft: Engine, prompts: Sequence[Prompt], rounds: int, console: Console
) -> dict[str, Any]:
    """Ask for short answers as shipped, one after the other, for ``rounds`` rounds."""
    mode = MODES["push_ahead"]
    _set_mode(bed.client, mode)
    runner = RemoteRunner(draft, bed.verifier, gamma=GAMMA, ahead=mode.ahead)
    started, answers, done = time.monotonic(), 0, 0
    samples: list[Sample] = []
    with console.status("") as status:
        while done < rounds:
            times: list[float] = []
            while len(times) < min(rounds - done, math.ceil(rounds / SAMPLES)):
                asked = bed.client.ask(prompts[answers % len(prompts)], SHORT_ANSWER)
                times += asked.round_s[1:]
                answers += 1
            done += len(times)
            bed.check()
            samples.append(_sample(bed, done, times, _reference(runner, prompts)))
            status.update(f"growth: {done} of {rounds} rounds ...")
    return {**growth_of(samples), "answers": answers, "seconds": time.monotonic() - started}


def _reference(runner: RemoteRunner, prompts: Sequence[Prompt]) -> list[float]:
    times: list[float] = []
    for prompt in _repeat(prompts, 6):
        times += _without_ros(runner, prompt, SHORT_ANSWER)[1][1:]
    return times


def _sample(bed: Bed, rounds: int, times: Sequence[float], reference: Sequence[float]) -> Sample:
    rss = {name: int(2**20 * rss_mb(process.pid)) for name, process in bed.processes.items()}
    tasks = {name: int(bed.client.health(name).get("executor_tasks", 0)) for name in NODES}
    return Sample(rounds, rss, tasks, statistics.median(times), statistics.median(reference))


def growth_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Slopes and slowdown after the first fifth of the rounds, which warms up.

    Returns:
        ``processes.<name>`` with ``slope`` [byte/round] (least squares), ``rss_mb`` and, of
        nodes, ``executor_tasks`` (both at each of ``rounds``); ``slope``: the steepest;
        ``slowdown``: the last fifth's time per round over that of the first after warm-up, each
        relative to rounds without ROS at the same time; ``round_ms`` and ``reference_ms``;
        ``bounded``: slope and slowdown are within ``MAX_SLOPE`` and ``MAX_SLOWDOWN``.
    """
    fifth = max(1, len(samples) // 5)
    later = samples[fifth:]
    processes: dict[str, Any] = {}
    for name in samples[0].rss:
        sizes = [s.rss[name] for s in later]
        slope = float(np.polyfit([s.rounds for s in later], sizes, 1)[0])
        processes[name] = {"slope": slope, "rss_mb": [s.rss[name] / 2**20 for s in samples]}
        if name in samples[0].tasks:
            processes[name]["executor_tasks"] = [s.tasks[name] for s in samples]
    slope = max(row["slope"] for row in processes.values())
    first, last = later[:fifth], later[-fifth:]
    slowdown = _relative(last) / _relative(first)
    return {
        "processes": processes,
        "rounds": [s.rounds for s in samples],
        "slope": slope,
        "slowdown": slowdown,
        "round_ms": [1e3 * s.round_s for s in samples],
        "reference_ms": [1e3 * s.reference_s for s in samples],
        "criterion": f"slope <= {MAX_SLOPE:g} byte/round, slowdown <= {MAX_SLOWDOWN:g}",
        "bounded": slope <= MAX_SLOPE and slowdown <= MAX_SLOWDOWN,
    }


def _relative(samples: Sequence[Sample]) -> float:
    return statistics.median(s.round_s / s.reference_s for s in samples)


# Report.


def _ms(seconds: Any) -> float:
    return 1e3 * float(seconds)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    p10, median, p90 = (_ms(np.percentile(seconds, q)) for q in (10, 50, 90))
    return {"p10": p10, "median": median, "p90": p90}


def _print(results: Mapping[str, Any], console: Console) -> None:
    columns = {
        "rounds": "{rounds}",
        "without": "{round_ms[without_ros]:.2f}",
        "graph": "{round_ms[graph]:.2f}",
        "added": "{added_ms_per_round[median]:.2f}",
        "p90": "{added_ms_per_round[p90]:.2f}",
        "first round": "{added_ms_first_round[median]:.2f}",
        "answer": "{added_ms_per_answer[median]:.2f}",
        "action's age": "{age_ms[p50]:.2f}",
        "its p90": "{age_ms[p90]:.2f}",
    }
    rows = {
        (point, mode): row
        for point, modes in results["points"].items()
        for mode, row in modes.items()
    }
    title = "time that the graph of many processes adds to the same rounds without ROS [ms]"
    show_rows(console, title, ["verifier", "mode"], rows, columns)
    router, standing, growth = (results[key] for key in ("router", "standing", "growth"))
    parts = {n: f"{p['cpu_percent']:.1f} %" for n, p in standing["processes"].items()}
    console.print(
        f"{results['emulation']}; load average {results['load_average']}\n"
        f"generate_router adds {router['added_ms']:.2f} ms to an answer of"
        f" {router['direct_ms']:.1f} ms ({router['answers']} of each, by turns)\n"
        f"a standing graph takes {standing['percent']:.1f} % of a core (wanted:"
        f" <= {standing['wanted_percent']:g}), camera at {standing['camera_hz']:.1f} Hz: {parts}"
    )
    if not growth:
        return
    processes = {
        name: {
            "warm_mb": row["rss_mb"][len(row["rss_mb"]) // 5],
            "end_mb": row["rss_mb"][-1],
            "tasks": row.get("executor_tasks", ["-"])[-1],
            **row,
        }
        for name, row in growth["processes"].items()
    }
    columns = {
        "MB at start": "{rss_mb[0]:.1f}",
        "warm": "{warm_mb:.1f}",
        "end": "{end_mb:.1f}",
        "byte/round": "{slope:.0f}",
        "tasks at end": "{tasks}",
    }
    title = f"{growth['rounds'][-1]} rounds, {growth['answers']} answers"
    show_rows(console, title, ["process"], processes, columns)
    verdict = "bounded" if growth["bounded"] else "NOT bounded"
    console.print(
        f"{verdict} ({growth['criterion']}): slope {growth['slope']:.0f},"
        f" slowdown {growth['slowdown']:.2f}"
    )


def _plot(results: Mapping[str, Any], file: Path | None) -> None:
    def added(axis: Any) -> None:
        rows = {
            f"{point}\n{mode}": row["added_ms_per_round"]
            for point, modes in results["points"].items()
            for mode, row in modes.items()
        }
        medians = [row["median"] for row in rows.values()]
        spread = [
            [row["median"] - row["p10"] for row in rows.values()],
            [row["p90"] - row["median"] for row in rows.values()],
        ]
        axis.bar(range(len(rows)), medians, 0.6)
        axis.errorbar(range(len(rows)), medians, spread, fmt="none", color="black")
        axis.set_xticks(range(len(rows)), list(rows), fontsize=7)
        axis.axhline(WANTED_MS, linestyle="--", color="grey")
        label_axes(axis, y="median, 10 % to 90 % [ms]")

    def memory(axis: Any) -> None:
        for name, row in results["growth"]["processes"].items():
            axis.plot(results["growth"]["rounds"], row["rss_mb"], label=name)
        axis.set_ylim(bottom=0)
        label_axes(axis, "rounds", "resident memory [MB]")

    panels: dict[str, Draw] = {"added per round": added}
    if results["growth"]:
        panels["growth"] = memory
    draw_panels(panels, file, columns=2, size=(5.5, 4))
