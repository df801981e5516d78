"""``collab-llm bench jupiter``, the real runs: worker processes on this machine's cores.

Prefill: one core, two threads, a plain pipeline of two workers, and the same with sub-sequences.
Worker death: killed, stopped, cut off in mid-answer. Decoding has a module of its own.
"""

from __future__ import annotations

import os
import queue
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from collab_llm_lab.bench.harness import Log, in_turn
from collab_llm_lab.bench.jupiter.local_workers import LocalWorker, local_workers
from collab_llm_lab.bench.jupiter.material import Ids, random_ids
from collab_llm_lab.bench.link.proxy import LinkProxy
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.jupiter.drafters import NoDrafter
from collab_llm_nodes.protocols.jupiter.generation import answer
from collab_llm_nodes.protocols.jupiter.lane import (
    DecodeConfig,
    LaneAnswer,
    Lengths,
    divide,
    undivided,
)
from collab_llm_nodes.protocols.jupiter.link import LinkConfig
from collab_llm_nodes.protocols.jupiter.messages import STATES, Result, Span, Step, Want
from collab_llm_nodes.protocols.jupiter.pipeline import (
    Pipeline,
    PipelineConfig,
    Plan,
    equal_parts,
)

PARTS_TRIED = (2, 4, 8, 16)
"""Numbers of equal sub-sequences that are tried where no plan is given; the fastest counts."""
DEADLINE_S = 600.0
PATIENT = LinkConfig(silence_s=30.0, connect_s=10.0)
"""Link of runs whose times are measured: a machine that stalls must lose no worker."""
WATCHFUL = LinkConfig()


def control() -> Control:
    """Return a deadline for what takes seconds."""
    return Control(time.monotonic() + DEADLINE_S)


def in_parts(count: int) -> Lengths:
    """Return a division into ``count`` parts as equal as can be."""

    def lengths(tokens: int) -> Sequence[int]:
        ends = [tokens * i // count for i in range(count + 1)]
        return [b - a for a, b in zip(ends, ends[1:], strict=False) if b > a]

    return lengths


@contextmanager
def pipeline(
    workers: Sequence[LocalWorker], plan: Plan = equal_parts, **settings: Any
) -> Iterator[Pipeline]:
    """Run a pipeline over ``workers``."""
    addresses = tuple(worker.address for worker in workers)
    config = PipelineConfig(**{"workers": addresses, "link": PATIENT, **settings})
    with Pipeline(config, plan) as made:
        yield made


def write_patient(folder: Path) -> Path:
    """Write settings of workers that are as patient with one another as :data:`PATIENT`."""
    config = folder / "patient.yaml"
    link = {"silence_s": PATIENT.silence_s, "connect_s": PATIENT.connect_s}
    config.write_text(yaml.safe_dump({"next": link}), encoding="utf-8")
    return config


def passed(made: Pipeline, steps: Sequence[Step]) -> Result:
    """Return the result of one pass that nothing else accompanies."""
    due = control().due
    return made.chain(due).run(steps, due)


# Prefill.


def run_prefill(
    model: str,
    tokens: Sequence[int],
    repeats: int,
    log: Log,
    lengths: Lengths | None = None,
    *,
    stages: int = 2,
    slowdown: float = 1.0,
) -> dict[str, Any]:
    """Time the prefill of random prompts.

    Args:
        lengths: sub-sequences of the pipeline; None: the best of ``PARTS_TRIED`` equal ones.
        stages: workers of the pipeline.
        slowdown: EMULATION: a pass takes so many times as long. Above 1 workers share all cores,
            and ``two_threads_s`` is left out; else each has a core.

    Returns:
        ``prefill_<tokens>`` with ``single_s`` (one worker on one core), ``two_threads_s`` (one
        worker, two cores), ``pipeline_s`` (a worker for each stage, in one piece), ``jupiter_s``
        (in sub-sequences), ``ceiling_s`` (what the sub-sequences' times, each measured alone, allow
        without links), ``crowded_s`` (the same with the times that they take while other stages
        compute: what is lost against the ceiling is lost to shared memory and caches),
        ``handover_s`` (waits of the last stage for states that were computed), ``parts``,
        ``speedup`` over one core and ``of_ceiling``; ``max_abs_diff`` of the logits, and
        ``max_abs_diff_of`` with states sent as float16 and int8; ``memory``, ``stages`` and
        ``slowdown``.
    """
    found: dict[str, Any] = {"stages": stages, "slowdown": slowdown}
    with ExitStack() as stack:
        start = stack.enter_context
        folder = Path(start(tempfile.TemporaryDirectory(prefix="collab_llm_")))
        cores = () if slowdown > 1 else sorted(os.sched_getaffinity(0))
        config = write_patient(folder)

        def over(count: int, until: ExitStack = stack, **settings: Any) -> Pipeline:
            workers = local_workers(
                count, model, config=config, cores=cores, emulated_slowdown=slowdown
            )
            running = until.enter_context(workers)
            return until.enter_context(pipeline(running, **settings))

        single, several = over(1), over(stages)
        others: dict[str, Pipeline] = {}
        if slowdown == 1:
            two = folder / "two_threads.yaml"
            two.write_text(yaml.safe_dump({"model": {"threads": 2}}), encoding="utf-8")
            others["two_threads"] = start(pipeline(start(local_workers(1, model, config=two))))
        found["memory"] = {
            str(count): {"largest_worker_tensor_mb": max(made.chain(control().due).bytes) / 1e6}
            for count, made in ((1, single), (stages, several))
        }
        ids = random_ids(model, min(tokens))
        found["max_abs_diff"] = largest_difference(single, several, ids)
        found["max_abs_diff_of"] = {}
        for form in STATES[1:]:
            with ExitStack() as until:
                other = over(stages, until, states=form)
                found["max_abs_diff_of"][form] = largest_difference(single, other, ids)
        for count in tokens:
            log(f"prefill of {count} tokens ...")
            ids = random_ids(model, count, count)
            whole_ones = {"single": single, **others, "pipeline": several}
            found[f"prefill_{count}"] = _time_prefill(whole_ones, ids, repeats, lengths)
    return found


def _time_prefill(
    whole_ones: Mapping[str, Pipeline], ids: Ids, repeats: int, lengths: Lengths | None
) -> dict[str, Any]:
    """Time ``ids`` in one piece over each of ``whole_ones``, and in parts over the last of them."""
    several = whole_ones["pipeline"]

    def read(made: Pipeline, parts: Lengths) -> None:
        answer(made, ids, DecodeConfig(1, drafter=NoDrafter(), lengths=parts), control())

    tried = {"plan": lengths} if lengths else {f"{k} parts": in_parts(k) for k in PARTS_TRIED}
    variants: dict[str, Callable[[], object]] = {
        **{name: partial(read, made, undivided) for name, made in whole_ones.items()},
        **{name: partial(read, several, division) for name, division in tried.items()},
    }
    times = in_turn(variants, repeats, warm_up=1)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    best = min(tried, key=lambda name: medians[name])

    turns = range(max(1, repeats // 2))
    alone = [times_alone(several, ids, tried[best]) for _ in turns]
    together = [spans_together(several, ids, tried[best]) for _ in turns]
    ceiling = statistics.median(map(makespan, alone))
    return {
        **{f"{name}_s": medians[name] for name in whole_ones},
        "jupiter_s": medians[best],
        "tried_s": {name: medians[name] for name in tried},
        "ceiling_s": ceiling,
        "crowded_s": statistics.median(
            makespan([lengths_of(spans) for spans in run]) for run in together
        ),
        "handover_s": statistics.median(map(handover, together)),
        "parts": list(tried[best](len(ids))),
        "speedup": medians["single"] / medians[best],
        "of_ceiling": ceiling / medians[best],
        "repeats": repeats,
    }


def times_alone(made: Pipeline, ids: Ids, lengths: Lengths) -> list[list[float]]:
    """Return the times of sub-sequences on stages [k, stages], one pass after another [s]."""
    found = [durations(passed(made, [step])) for step in parts_of(ids, lengths)]
    passed(made, [Step(0, close=True)])
    return found


def spans_together(made: Pipeline, ids: Ids, lengths: Lengths) -> list[tuple[Span, ...]]:
    """Return the spans of sub-sequences on stages [k, stages] that follow one another."""
    due = control().due
    chain = made.chain(due)
    results: queue.SimpleQueue[Result | CollabError] = queue.SimpleQueue()
    steps = parts_of(ids, lengths)
    for step in steps:
        chain.submit([step], results.put)
    found = []
    for _ in steps:
        result = results.get(timeout=DEADLINE_S)
        if isinstance(result, CollabError):
            raise result
        found.append(result.spans)
    passed(made, [Step(0, close=True)])
    return found


def handover(run: Sequence[Sequence[Span]]) -> float:
    """Return how long the last stage waited for states that the stage before had computed [s].

    Workers of one machine share its monotonic clock, so that their spans can be compared.
    """
    free, waited = 0.0, 0.0
    for *before, last in run:
        if before:
            waited += last.begin - max(free, before[-1].end)
        free = last.end
    return waited


def parts_of(ids: Ids, lengths: Lengths) -> list[Step]:
    """Return the steps that feed ``ids`` in sub-sequences to lane 0."""
    return divide(Step(0, 0, tuple(ids)), lengths)


def durations(result: Result) -> list[float]:
    """Return the time of a pass in each stage [s]."""
    return lengths_of(result.spans)


def lengths_of(spans: Sequence[Span]) -> list[float]:
    """Return the time of each of ``spans`` [s]."""
    return [span.end - span.begin for span in spans]


def makespan(times: Sequence[Sequence[float]]) -> float:
    """Return the end of a flow shop without links: job i on stage j takes ``times[i][j]``."""
    ends = [0.0] * len(times[0])
    for job in times:
        done = 0.0
        for stage, taken in enumerate(job):
            done = ends[stage] = max(done, ends[stage]) + taken
    return ends[-1]


def largest_difference(one: Pipeline, other: Pipeline, ids: Ids) -> float:
    """Return the largest difference of the logits of a prompt: in one piece, and in four parts."""
    pieces = []
    for made, lengths in ((one, undivided), (other, in_parts(4))):
        rows, start = [], 0
        for size in lengths(len(ids)):
            own = tuple(ids[start : start + size])
            step = Step(0, start, own, want=Want.LOGITS, rows=size)
            rows.append(passed(made, [step]).outcomes[0].logits)
            start += size
        passed(made, [Step(0, close=True)])
        pieces.append(np.frombuffer(b"".join(rows), "<f4"))
    return float(np.abs(pieces[0] - pieces[1]).max())


# Death.


def run_death(model: str, repeats: int, log: Log, tokens: int = 40) -> dict[str, Any]:
    """Kill, stop and cut off workers in mid-answer, of four at the beginning, until one is left.

    Returns:
        ``worker_death.<kill|stop|cut>`` with ``detected_s`` (from the deed until the worker is
        known to be lost, the longest), ``restored_s`` (until the others hold all layers) and
        ``identical`` (every answer is the undisturbed one).
    """
    ids = random_ids(model, 64)
    rows: dict[str, list[dict[str, Any]]] = {"kill": [], "stop": [], "cut": []}
    for turn in range(repeats):
        with ExitStack() as stack:
            running = stack.enter_context(local_workers(1 + len(rows), model))
            first, killed, stopped, cut = running
            link = stack.enter_context(LinkProxy(cut.address))
            shown = [first.address, killed.address, stopped.address, link.address]
            made = stack.enter_context(Pipeline(PipelineConfig(tuple(shown), WATCHFUL)))
            right = answer(made, ids, DecodeConfig(tokens), control()).tokens
            stack.callback(os.kill, stopped.process.pid, signal.SIGCONT)
            deeds: dict[str, tuple[str, Callable[[], object]]] = {
                "kill": (killed.address, partial(os.kill, killed.process.pid, signal.SIGKILL)),
                "stop": (stopped.address, partial(os.kill, stopped.process.pid, signal.SIGSTOP)),
                "cut": (link.address, link.half_open),
            }
            for kind, (device, deed) in deeds.items():
                log(f"worker death: {kind}, {turn + 1} of {repeats} ...")
                rows[kind].append(one_death(made, device, deed, ids, right))
    return {
        "worker_death": {
            kind: {
                "detected_s": max(row["detected_s"] for row in found),
                "restored_s": max(row["restored_s"] for row in found),
                "identical": all(row["identical"] for row in found),
                "repeats": repeats,
            }
            for kind, found in rows.items()
        }
    }


def one_death(
    made: Pipeline, device: str, deed: Callable[[], object], ids: Ids, right: Sequence[int]
) -> dict[str, Any]:
    """Do something to the worker ``device`` in mid-answer; return how that went."""
    done_at: list[float] = []

    def on_tokens(lanes: Sequence[LaneAnswer]) -> None:
        if not done_at and len(lanes[0].tokens) >= len(right) // 4:
            done_at.append(time.monotonic())
            deed()

    said = answer(made, ids, DecodeConfig(len(right)), control(), on_tokens).tokens
    lost = next(loss for loss in reversed(made.losses) if loss.device == device)
    return {
        "detected_s": lost.found_at - done_at[0],
        "restored_s": lost.arranged_at - done_at[0],
        "identical": said == list(right),
    }
