"""The steps, and the parent process: it starts the worker and writes the JSON after each finding.

A step that raises, dies or takes too long is recorded with the end of its log. The next one gets a
new worker, since a device may be of no use after an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.gpu.worker import Send, work

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
_SLACK = 2.0
"""Times its expected seconds that a step may take."""
_START_S = 60.0
"""A new worker may take so much longer: it imports torch from a cold disk, and starts CUDA."""
_LOG_LINES = 40


_PACKAGE = "collab_llm_lab.bench.gpu"


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        function: ``module:name``; called with a ``lab.Lab``.
        seconds: expected time on an H100. A step that takes twice as long is ended; one for which
            the budget does not suffice is skipped.
        shows: one line for the summary's readers.
    """

    name: str
    function: str
    seconds: float
    shows: str


def _step(name: str, module: str, seconds: float, shows: str) -> Step:
    return Step(name, f"{_PACKAGE}.{module}:{name}", seconds, shows)


# Correctness first, then costs, and last the static backend: the first that a budget leaves out.
STEPS = (
    _step("machine", "hardware", 25, "versions, bandwidth, products, cost of a launch"),
    _step("kernels", "operations", 50, "Triton's kernels: compiled, right, and how fast"),
    _step("exact", "exactness", 50, "2B float32: engine equals transformers"),
    _step("precision", "exactness", 60, "7B bfloat16: error against float32, argmax flips"),
    _step("passes", "speed", 70, "7B: decode, verify, prefill, picture, sessions, exits"),
    _step("graph", "graph", 40, "7B: a captured layer loop, the ceiling"),
    _step("generation", "speed", 40, "7B: tokens/s beside transformers' generate"),
    _step("serving", "serving", 60, "7B over gRPC: what a round costs beside the pass"),
    _step("drafting", "speed", 35, "2B bfloat16: draft step, 16 branches, predictions"),
    _step("memory", "upkeep", 20, "200 sessions opened and closed: memory given back"),
    _step("launches", "upkeep", 20, "kernels, copies and waits of one pass"),
    _step("stages", "exactness", 30, "2B widths float32: two stages equal the whole"),
    _step("attention", "hardware", 30, "kernels of attention at 16 lengths, cuDNN on and off"),
)


class Worker:
    """A worker process and the connection to it."""

    def __init__(self, make_lab: Callable[[Send], Any], folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.log = folder / "worker.log"
        self.log.write_bytes(b"")
        self._process = context.Process(target=work, args=(theirs, self.log, make_lab))
        self._process.start()
        theirs.close()  # so that its end is heard when the process ends

    def end(self, wait_s: float = 0.0) -> None:
        """End the process and its children; it has ``wait_s`` to end by itself."""
        self.connection.close()
        self._process.join(wait_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            assert self._process.pid
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    @property
    def status(self) -> int | None:
        """The exit status of a process that has ended, or minus the signal that ended it."""
        self._process.join(5.0)
        return self._process.exitcode

    def tail(self) -> list[str]:
        """Return the last lines of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]


def run_steps(
    steps: Sequence[Step],
    make_lab: Callable[[Send], Any],
    *,
    budget_s: float,
    results: dict[str, Any],
    keep: Callable[[dict[str, Any]], None],
    say: Callable[[str], None] = print,
) -> None:
    """Run the steps within the budget, and put the findings of each into ``results["steps"]``.

    Args:
        make_lab: as for ``worker.work``.
        keep: is given the results after each finding.
    """
    begun = time.monotonic()
    worker: Worker | None = None
    with tempfile.TemporaryDirectory(prefix="gpu_check_log_") as folder:
        try:
            for step in steps:
                left_s = budget_s - (time.monotonic() - begun)
                record = results["steps"][step.name] = {
                    "status": SKIPPED,
                    "seconds": 0.0,
                    "figures": {},
                    "verdicts": {},
                }
                if left_s < step.seconds:
                    record["error"] = f"{left_s:.0f} s left, expected to take {step.seconds:g} s"
                else:
                    limit_s = _SLACK * step.seconds
                    if worker is None:
                        worker, limit_s = Worker(make_lab, Path(folder)), limit_s + _START_S
                    if not _run(step, worker, min(left_s, limit_s), record, results, keep):
                        worker.end()
                        worker = None
                keep(results)
                say(_line(step, record))
                if record.pop("hopeless", False):  # no step could start
                    break
        finally:
            if worker is not None:
                worker.end(wait_s=10.0)


def _run(
    step: Step,
    worker: Worker,
    limit_s: float,
    record: dict[str, Any],
    results: dict[str, Any],
    keep: Callable[[dict[str, Any]], None],
) -> bool:
    """Run one step; False if the worker is of no use any more."""
    begun = time.monotonic()
    record["status"] = FAILED  # until it is done
    message: dict[str, Any] = {}
    spoilt = False
    try:
        worker.connection.send((step.function, limit_s))
        while "done" not in message and "raised" not in message:
            if not worker.connection.poll(max(0.0, begun + limit_s - time.monotonic())):
                message = {"raised": f"took longer than {limit_s:.0f} s"}
                break
            message = worker.connection.recv()
            if "figure" in message:
                record["figures"][message["figure"]] = message["value"]
            elif "verdict" in message:
                record["verdicts"][message["verdict"]] = message["facts"]
            elif "warning" in message:
                record.setdefault("warnings", []).append(message["warning"])
            spoilt = spoilt or "spoilt" in message
            record["seconds"] = time.monotonic() - begun
            keep(results)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        message = {"raised": f"the process ended with status {worker.status}"}
    record["seconds"] = time.monotonic() - begun
    if "raised" in message:
        record |= {"error": message["raised"], "log": worker.tail()}
        if message.get("hopeless"):
            record["hopeless"] = True
        return False
    verdicts = record["verdicts"].values()
    if all(verdict["ok"] for verdict in verdicts):
        record["status"] = OK
        return not spoilt
    record["log"] = worker.tail()
    return not any("exception" in verdict for verdict in verdicts)


def write(file: Path, results: dict[str, Any]) -> None:
    """Write results to a file; whenever this is interrupted, the file is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.part")
    beside.write_text(json.dumps(_plain(results), indent=1, default=str) + "\n", encoding="utf-8")
    beside.replace(file)


def _plain(found: Any) -> Any:
    """Return values for JSON: numbers of five digits; NaN and infinity as text."""
    if isinstance(found, dict):
        return {str(key): _plain(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(value) for value in found]
    if isinstance(found, float):
        return float(f"{found:.5g}") if math.isfinite(found) else str(found)
    return found


def _line(step: Step, record: dict[str, Any]) -> str:
    """Return the line printed after a step; with the end of its log if it failed."""
    wrong = [name for name, verdict in record["verdicts"].items() if not verdict["ok"]]
    facts = [record["error"]] if "error" in record else []
    facts += [f"wrong: {', '.join(wrong)}"] if wrong else []
    said = "; ".join(facts) or step.shows
    lines = [f"{record['status']:<8}{record['seconds']:6.1f} s  {step.name}: {said}"]
    lines += [f"WARNING {text}"[:240] for text in record.get("warnings", ())]
    return "\n    | ".join([*lines, *record.get("log", ())[-12:]])


def summary(results: dict[str, Any]) -> list[str]:
    """Return the table: each step's verdicts and key figures, and why it failed."""
    lines = [f"{'step':<12}{'status':<9}{'s':>6}  {'right':<8}key figures"]
    for name, record in results["steps"].items():
        verdicts = record["verdicts"].values()
        right = f"{sum(v['ok'] for v in verdicts)}/{len(verdicts)}" if verdicts else "-"
        lines.append(
            f"{name:<12}{record['status']:<9}{record['seconds']:>6.1f}  {right:<8}"
            f"{_key_figures(record['figures'])}"
        )
        if record["status"] == FAILED:
            wrong = [f"{n}: {v}" for n, v in record["verdicts"].items() if not v["ok"]]
            reasons = [*wrong, *record.get("error", "").splitlines()[:1]]
            lines += [f"    {reason}"[:240] for reason in reasons]
    return lines


def _key_figures(figures: dict[str, Any]) -> str:
    """Return the scalars of a step, and of its timings the time and the share of the limit."""
    shown = []
    for name, value in figures.items():
        if isinstance(value, (int, float)):
            shown.append(f"{name} {value:.4g}")
        elif isinstance(value, dict):
            parts = [
                f"{key.removesuffix('_ms')} {value[key]:.3g}"
                + (" ms" if key.endswith("ms") else "")
                for key in _KEYS
                if isinstance(value.get(key), (int, float))
            ]
            if parts:
                shown.append(f"{name}: {' '.join(parts)}")
    return "; ".join(shown)


_KEYS = (
    "ms",
    "step_ms",
    "host_ms",
    "encode_ms",
    "read_ms",
    "bandwidth_share",
    "tokens_per_s",
    "round_ms",
    "compute_ms",
    "beside_ms",
    "kernels",
    "busy_share",
    "first_ms",
    "second_ms",
)
"""Figures that the table shows."""
