"""One training loop for all models: schedule, checkpoint, resume, progress, curve."""

from __future__ import annotations

import json
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from collab_llm_lab.training.learner import ModelLearner
from collab_llm_nodes.errors import ModelError

Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called with (activity, done, total, latest figures)."""
Stop = Callable[[], bool]
"""Asked before each step; True ends the call, to be resumed."""


def ignore_progress(activity: str, done: int, total: int, figures: dict[str, float]) -> None:
    """Report progress to nobody."""


def report_counts(report: Progress, activity: str) -> Callable[[int, int], None]:
    """Return a report of one activity, called with (done, total)."""
    return lambda done, total: report(activity, done, total, {})


STATE, CURVE = "state.pt", "curve.json"
_SAVE_EVERY_S, _SAVE_EVERY_SAVES = 60.0, 10
"""A killed run loses this much, or ten times what saving takes, which may be long: a whole draft
with a large vocabulary has a state of gigabytes."""
_NO_STATE = (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, KeyError, TypeError)
"""Errors that torch raises for a damaged file, and a learner for the state of another one."""


def save(learner: ModelLearner, run: Path) -> None:
    """Write the whole state atomically: a kill at any time leaves the old or the new one."""
    run.mkdir(parents=True, exist_ok=True)
    state = {
        **learner.state(),
        "step": learner.step,
        "seconds": learner.seconds,
        "curve": learner.curve,
    }
    torch.save(state, run / f"{STATE}.part")
    os.replace(run / f"{STATE}.part", run / STATE)
    (run / f"{CURVE}.part").write_text(json.dumps(learner.curve, indent=1), encoding="utf-8")
    os.replace(run / f"{CURVE}.part", run / CURVE)


def restore(learner: ModelLearner, run: Path, device: torch.device) -> None:
    """Go on from ``save``; do nothing in a fresh folder.

    Raises:
        ModelError: the file cannot be read, or holds another learner's state.
    """
    file = run / STATE
    if not file.exists():
        return
    try:
        state = torch.load(file, weights_only=True, map_location=device)
        learner.load_state(state)
        learner.step, learner.seconds = state["step"], state["seconds"]
        learner.curve = state["curve"]
    except torch.cuda.OutOfMemoryError:  # the file is sound
        raise
    except (OSError, *_NO_STATE) as error:
        raise ModelError(
            f"{file} holds no state of this training",
            field="--out",
            remedy="delete it: the stage begins again",
        ) from error


def train(
    learner: ModelLearner,
    run: Path,
    advance: Callable[[], dict[str, float]],
    *,
    measure: Callable[[], dict[str, float]] = dict,
    save_at: tuple[int, ...] = (),
    report: Progress = ignore_progress,
    stop: Stop = lambda: False,
) -> bool:
    """Train to the end of the recipe; save on the way and at the end. Return True at the end.

    Args:
        run: folder of ``state.pt`` and ``curve.json``; ``restore`` reads them.
        advance: makes one optimiser step (and counts it); returns its losses.
        measure: figures for a point of the curve, beside the smoothed losses.
        save_at: steps after which the state is saved in any case.

    Raises:
        ModelError: a loss is not finite; nothing is saved.
    """
    recipe = learner.recipe
    figures: dict[str, float] = {}
    started = time.monotonic()
    due = started + _SAVE_EVERY_S
    before, first = learner.seconds, learner.step

    def over() -> bool:
        return recipe.done(learner.step, learner.seconds) >= 1

    while not over() and not stop():
        for key, value in advance().items():
            if not math.isfinite(value):
                raise ModelError(
                    f"{key} is {value} at step {learner.step}",
                    field="learning_rate",
                    remedy="the last saved state is sound: go on from it with a smaller rate",
                )
            figures[key] = value + 0.98 * (figures.get(key, value) - value)
        now = time.monotonic()
        if learner.step == first + 1:
            started = now  # a call's first step compiles: it is no measure of the others
        learner.seconds = before + now - started
        share = recipe.done(learner.step, learner.seconds)
        total = max(learner.step, round(learner.step / share)) if share else learner.step
        report("training", learner.step, total, figures)
        if learner.step % recipe.measure_every == 0 or over():
            facts = {"step": learner.step, "seconds": learner.seconds}
            learner.curve.append({**facts, **figures, **measure()})
            report("training", learner.step, total, learner.curve[-1])
        if now > due or learner.step in save_at:
            begun = time.monotonic()
            save(learner, run)
            saved = time.monotonic()
            due = saved + max(_SAVE_EVERY_S, _SAVE_EVERY_SAVES * (saved - begun))
    save(learner, run)
    return over()


@contextmanager
def show_progress(
    keys: tuple[str, ...], every: float = 10.0
) -> Iterator[Callable[[str], Progress]]:
    """Yield a maker of progress reports: bars on a terminal, else a line about every ``every`` s.

    Args:
        keys: figures that are shown, if a report has them.
    """
    console = Console()
    if not console.is_terminal:
        yield lambda name: _lines(name, keys, every)
        return
    columns = (*Bar.get_default_columns()[:-1], TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, TextColumn("{task.fields[figures]}"), console=console) as bar:
        yield lambda name: _bar(bar, bar.add_task(name, total=None, figures=""), name, keys)


def _text(figures: dict[str, float], keys: tuple[str, ...]) -> str:
    return " ".join(f"{key} {figures[key]:,.3f}" for key in keys if key in figures)


def _bar(bar: Bar, task: TaskID, name: str, keys: tuple[str, ...]) -> Progress:
    def report(activity: str, done: int, total: int, figures: dict[str, float]) -> None:
        text = _text(figures, keys)
        bar.update(
            task, description=f"{name}: {activity}", completed=done, total=total, figures=text
        )

    return report


def _lines(name: str, keys: tuple[str, ...], every: float) -> Progress:
    last = -every
    begun: dict[str, tuple[float, int]] = {}
    """Of each activity: when it was first reported, and with how much done."""

    def report(activity: str, done: int, total: int, figures: dict[str, float]) -> None:
        nonlocal last
        now = time.monotonic()
        if activity in begun and now - last < every:
            return
        last = now
        if done < begun.setdefault(activity, (now, done))[1]:
            begun[activity] = now, done  # it began again
        since, first = begun[activity]
        clock, text = time.strftime("%H:%M:%S"), _text(figures, keys)
        left = _time_left(now - since, done - first, total - done)
        print(f"{clock} {name}: {activity} {done}/{total}{left} {text}", flush=True)

    return report


def _time_left(seconds: float, done: float, left: float) -> str:
    """Return the time that the rest of an activity takes, in words; empty if it is not known."""
    if done <= 0 or left <= 0:
        return ""
    minutes = seconds / done * left / 60
    return f", {minutes:.0f} min left" if minutes >= 1 else ", less than 1 min left"
