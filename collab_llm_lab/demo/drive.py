"""``collab-llm demo``: verifier and graph as processes, rooms one after the other, a report."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from collab_llm_lab.demo.film import Frame, save
from collab_llm_lab.demo.memory import figures_of, memory_processes, show
from collab_llm_lab.demo.tasks import draw_tasks
from collab_llm_lab.home.answers import MAX_TOKENS
from collab_llm_lab.reference import generate
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.processes import START_DEADLINE_S, Process, free_port, run_process
from collab_llm_nodes.protocols.edge_cloud.client import Source
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process, wait_for_verifier
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.ros.domain import isolate_ros
from collab_llm_nodes.sim.jpeg import to_jpeg

if TYPE_CHECKING:
    from collab_llm_lab.demo.client import Drive

ROOM_DEADLINE_S = 300.0
RECALL_DEADLINE_S = 60.0
FILMED_ROOMS = 3
TARGET, DRAFT = ModelConfig(path="nav-target"), ModelConfig(path="nav-draft")


def run_demo(
    *,
    rooms: int,
    seed: int,
    film: Path,
    params: Path | None,
    compute_s: float,
    console: Console,
    record: Path | None = None,
    show_first: bool = True,
) -> dict[str, Any]:
    """Drive ``rooms`` rooms of seeds ``seed``, ``seed`` + 1, ...; print a table.

    Args:
        params: ROS parameters read after the shipped ones.
        compute_s: least duration of a verification. The shipped cloud model is so small that early
            exits would hardly precede its verdicts.
        record: folder for a bag of the drives (docs/replay.md).
        show_first: begin with the room of ``tasks.SHOWN``.

    Returns:
        The figures of the JSON file: ``rooms``, ``right``, ``tau``, ``cache_hit_rate``,
        ``mismatches`` (answers that differ from the target decoding alone), ``answers``,
        ``action_latency_ms_median``, ``seconds``, one entry per room, and ``memory``: the
        question that the robot was asked at the end, its answer, and the episodes it is based on.

    Raises:
        CollabError: a process did not start or ended early.
    """
    from collab_llm_lab.demo.client import DemoClient  # needs rclpy

    isolate_ros()
    set_threads(DRAFT, TARGET)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{free_port()}"
        cloud = stack.enter_context(verifier_process(address, compute_s=compute_s))
        graph = stack.enter_context(robot_process("graph", [], address, params))
        motion = stack.enter_context(robot_process("motion", ["--driver", "sim"], address, params))
        recorder = stack.enter_context(_recorder(record)) if record else None
        link = stack.enter_context(VerifierClient(ClientLinkConfig(address=address)))
        client = stack.enter_context(DemoClient())
        with console.status("starting the verifier and the ROS graph ..."):
            wait_for_verifier(link, cloud)
            memory = stack.enter_context(memory_processes(params))

            def check() -> None:
                for process in (graph, motion, *memory):
                    process.check()

            client.wait_for_graph(START_DEADLINE_S, check)
            client.wait_for_memory(START_DEADLINE_S, check)
            if recorder is not None:
                client.wait_for_recorder(START_DEADLINE_S, recorder.check)
        console.print(
            f"verifier and graph are up after {time.monotonic() - started:.1f} s "
            f"(ROS_DOMAIN_ID={os.environ['ROS_DOMAIN_ID']}, this machine only)"
        )
        if compute_s:
            console.print(
                f"emulation: each verification takes at least {1e3 * compute_s:g} ms, to stand "
                "for a larger cloud model (--emulated-compute-s 0 turns it off)"
            )
        table = _table()
        drives = []
        for number, task in enumerate(draw_tasks(rooms, seed, show=show_first), start=1):
            with console.status(f"room {number} of {rooms}: {task.instruction} ..."):
                drive = client.drive(task, ROOM_DEADLINE_S)
            drives.append(drive)
            _add_row(table, drive)
            for process in (cloud, graph, motion, *memory, *([recorder] if recorder else [])):
                process.check()
        console.print(table)
        sought = [drive.task.name for drive in drives if drive.task.name]
        question = f"Where was the {sought[-1]} last seen?"
        with console.status(f"asking the robot's memory: {question}"):
            recollection = client.recall(question, len(sought), RECALL_DEADLINE_S)
        show(recollection, console)
    draft = Engine(load(DRAFT))
    frames = [f for d in drives[:FILMED_ROOMS] for f in _frames(d, draft)]
    if frames:
        film.parent.mkdir(parents=True, exist_ok=True)
        save(frames, film)
        console.print(f"wrote {film}")
    with console.status("comparing every answer with the target decoding alone ..."):
        mismatches = _mismatches(drives)
    results = _results(drives, mismatches, time.monotonic() - started, compute_s)
    results["memory"] = figures_of(recollection)
    console.print(
        f"right in {results['right']} of {results['rooms']}, tau {results['tau']:.2f}, "
        f"cache hits {results['cache_hit_rate']:.0%}, "
        f"{results['mismatches']} of {results['answers']} answers differ from the target alone"
    )
    return results


def robot_process(
    name: str,
    arguments: Sequence[str],
    verifier: str,
    params: Path | None = None,
    overrides: Mapping[str, str] | None = None,
) -> contextlib.AbstractContextManager[Process]:
    """Run one of the robot's two processes with the simulator, as ``launch/sim.launch.py`` does.

    Args:
        name: ``graph`` or ``motion``.
        arguments: of that process.
        verifier: address.
        params: ROS parameters read after the shipped ones.
        overrides: ``node:name`` to value, on top of them.
    """
    command = [sys.executable, "-m", f"collab_llm_nodes.nodes.{name}", *arguments, "--ros-args"]
    shipped = [config_file(name) for name in ("embedded.yaml", "sim.yaml")]
    for file in (*shipped, *([params] if params else [])):
        command += ["--params-file", str(file)]
    command += ["-p", f"cloud_verifier_bridge:verifier.address:={verifier}"]
    for parameter, value in (overrides or {}).items():
        command += ["-p", f"{parameter}:={value}"]
    return run_process(name, command)


def _recorder(folder: Path) -> contextlib.AbstractContextManager[Process]:
    command = [sys.executable, "-m", "collab_llm_nodes.cli", "record", "--out", str(folder)]
    return run_process("recorder", [*command, "--sim-time"])


def _mismatches(drives: Sequence[Drive]) -> int:
    """Return how many answers differ from the target's own; there must be none.

    Of an answer that was cut off (a deadline, a cancellation), the part that exists is compared.
    """
    target = Engine(load(TARGET))
    sampling, count = SamplingConfig(), 0
    for drive in drives:
        for answer in drive.answers:
            prompt = encode(Prompt(answer.prompt, (answer.picture,)), target.loaded)
            limit = MAX_TOKENS if answer.complete else len(answer.tokens)
            alone = generate(target.loaded, prompt, sampling, limit, target.eos) if limit else []
            count += tuple(alone) != answer.tokens
    return count


def _results(
    drives: Sequence[Drive], mismatches: int, seconds: float, compute_s: float
) -> dict[str, Any]:
    total = EdgeCloudMetrics()
    answers = [a for d in drives for a in d.answers]
    for answer in answers:
        total.add(answer.metrics)
    latencies = [a.latency_s for a in answers]
    return {
        "rooms": len(drives),
        "right": sum(d.right for d in drives),
        "tau": total.tau,
        "cache_hit_rate": total.hit_rate,
        "mismatches": mismatches,
        "answers": len(answers),
        "action_latency_ms_median": 1e3 * statistics.median(latencies) if latencies else None,
        "answer_ms_median": (
            1e3 * statistics.median(a.metrics.total_s for a in answers) if answers else None
        ),
        "seconds": seconds,
        "emulated_compute_s": compute_s,
        "drives": [
            {
                "seed": d.task.room.seed,
                "instruction": d.task.instruction,
                "steps": d.steps,
                "right": d.right,
                "wanted": d.task.ending,
                "ending": d.ending,
                "text": d.text,
                "error": d.error,
                "distance_to_goal_m": d.distance_to_goal,
                "seconds": d.seconds,
            }
            for d in drives
        ],
    }


def _table() -> Table:
    table = Table(title="rooms driven through the whole graph")
    for column in ("room", "instruction", "steps", "result", "tau", "cache hits", "ms per action"):
        table.add_column(column, justify="left" if column in ("instruction", "result") else "right")
    return table


def _add_row(table: Table, drive: Drive) -> None:
    total = EdgeCloudMetrics()
    for answer in drive.answers:
        total.add(answer.metrics)
    latency = statistics.median(a.latency_s for a in drive.answers) if drive.answers else 0.0
    table.add_row(
        str(drive.task.room.seed),
        drive.task.instruction,
        str(drive.steps),
        _result(drive),
        f"{total.tau:.2f}",
        f"{total.cache_hits}/{total.cache_lookups}",
        f"{1e3 * latency:.0f}",
    )


def _result(drive: Drive) -> Text:
    """Return the cell of a drive's end: "reached 0.62 m", "missed ... 2.10 m", "said ..."."""
    task, distance = drive.task, drive.distance_to_goal
    if drive.right:
        ends = {"OK": "reached", "NOT_FOUND": "gave up, there is none", "ANSWERED": "said"}
        result = Text(ends[task.ending], "green")
    else:
        result = Text("missed", "red")
        result.append(f" {drive.error}", "default")
    if task.ending == "ANSWERED":
        return result.append(f" {drive.text}", "default")
    return result if distance is None else result.append(f" {distance:.2f} m", "default")


def _frames(drive: Drive, draft: Engine) -> Iterator[Frame]:
    """Yield a frame per answer, with a large picture rendered from the simulator's true pose."""
    from collab_llm_nodes.sim.renderer import Renderer  # needs EGL

    renderer = Renderer()
    renderer.enter(drive.task.room)
    for number, answer in enumerate(drive.answers):
        path = drive.path[: max(1, answer.travelled)]
        words = [
            (draft.decode([token]), Source(source))
            for token, source in zip(answer.tokens, answer.sources, strict=True)
        ]
        m = answer.metrics
        yield Frame(
            drive.task,
            to_jpeg(renderer.large_picture(path[-1])),
            path,
            words,
            f'"{drive.task.instruction}"',
            f"step {number + 1}   {m.tokens} tokens in {m.rounds} rounds of the cloud model",
        )
    renderer.close()
