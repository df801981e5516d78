"""A run of a training: its folder, and its stages one after the other.

A folder is held by one training at a time, and never shared by two different ones.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from collab_llm_lab.training import loop
from collab_llm_nodes.errors import ConfigError

BEGUN, LOCK, DONE = "begun.json", "lock", "done"
MakeStage = Callable[[loop.Progress, loop.Stop], bool]
"""Makes one stage; returns False if it was stopped before its end."""


def make_stages(
    out: Path,
    stages: Mapping[str, MakeStage],
    *,
    options: Mapping[str, object],
    settings: Mapping[str, object] | None = None,
    hours: float = 0.0,
    shown: tuple[str, ...] = (),
    stop: loop.Stop = lambda: False,
) -> bool:
    """Make the stages that are not done yet, in order; return True when all of them are.

    Args:
        options, settings: see ``hold_folder``.
        hours: stop, to be resumed, after this long; 0: when all stages are done.
        shown: figures that the progress display shows.

    Raises:
        ConfigError: see ``hold_folder``.
    """
    transformers_logging.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core makes data
    end = time.monotonic() + 3600 * hours if hours else float("inf")

    def stopped() -> bool:
        return stop() or time.monotonic() > end

    with hold_folder(out, options, settings), loop.show_progress(shown) as show:
        for name, make in stages.items():
            if is_done(out, name):
                continue
            if not make(show(name), stopped):
                print(f"stopped in stage {name}; the same command goes on from here")
                return False
            (out / name).mkdir(parents=True, exist_ok=True)
            (out / name / DONE).touch()
    return True


def check_stages(wanted: Sequence[str], known: Sequence[str], field: str = "--stages") -> None:
    """Refuse stages that a training does not have.

    Raises:
        ConfigError: a stage is unknown, or none is wanted.
    """
    unknown = [stage for stage in wanted if stage not in known]
    if unknown or not wanted:
        raise ConfigError(
            ", ".join(unknown) or "none",
            field=field,
            remedy=f"choose from {' '.join(known)}",
        )


def is_done(out: Path, stage: str) -> bool:
    """Return True if a stage of the run in ``out`` has come to its end."""
    return (out / stage / DONE).exists()


@contextmanager
def hold_folder(
    out: Path, options: Mapping[str, object], settings: Mapping[str, object] | None = None
) -> Iterator[None]:
    """Make the folder ``out`` and hold it; refuse a training that is not the one begun there.

    ``begun.json`` holds the values of the first call. A folder without it, from an older version,
    takes those of the next call.

    Args:
        options: command-line options that must stay the same, by name without dashes.
        settings: other values that must stay the same: those of a plan, which versions may change.

    Raises:
        ConfigError: ``out`` cannot be written, another process holds it, or it was begun with
            other values.
    """
    with locked(out):
        # As they are read back: tuples are lists there.
        now = json.loads(json.dumps({"options": options, "settings": settings or {}}))
        file = out / BEGUN
        if file.exists():
            _check(file, _read(file), now)
        else:
            building = file.with_suffix(".part")
            building.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
            os.replace(building, file)
        try:
            yield
        finally:
            if {path.name for path in out.iterdir()} == {BEGUN, LOCK}:
                file.unlink()  # a call that made nothing, as with a mistyped option, began nothing


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the folder ``out`` and hold it against other processes.

    Raises:
        ConfigError: it cannot be written, or another process holds it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK).open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {out}: {error.strerror}",
            field="--out",
            remedy="name a folder that can be made and written",
        ) from error
    with lock:  # closing it, as the end of the process does, lets go of the folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process writes to {out}",
                field="--out",
                remedy="wait until it has ended, or name another folder",
            ) from None
        yield


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        was = json.loads(file.read_text(encoding="utf-8"))
        return {"options": dict(was["options"]), "settings": dict(was["settings"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot read {file}",
            field="--out",
            remedy="delete it, and give the options that the run was begun with",
        ) from error


def _check(file: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now["options"].items():
        begun = was["options"].get(name, value)
        if begun != value:
            raise ConfigError(
                f"{file.parent} was begun with {begun!r}, not {value!r}",
                field=f"--{name}",
                remedy=f"give {begun!r} to go on, or name another --out",
            )
    settings = was["settings"]
    changed = [name for name, value in now["settings"].items() if settings.get(name) != value]
    if changed:
        raise ConfigError(
            f"{file.parent} was begun with other settings: {', '.join(changed)}",
            field="--plan",
            remedy="name another --out, or go on with the version that began it",
        )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to; at the end it takes the place of ``folder``.

    A reader never sees half of it.
    """
    building = folder.with_name(folder.name + ".part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    yield building
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(building, folder)
