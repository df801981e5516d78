"""The common parts of all benchmarks: variants in turn, stolen time, machine facts, plots."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_nodes.config import merged
from collab_llm_nodes.errors import ConfigError, did_you_mean

WARM_UP = 2
"""Turns that are not measured: caches fill, kernels are chosen."""

Log = Callable[[str], None]
"""Print a line about the progress of a run."""
Keep = Callable[[dict[str, Any]], None]
"""Keep the results so far, so that a part that fails does not lose those before it."""

_LIBRARIES = ("torch", "transformers", "numpy", "grpcio")


def forget(found: dict[str, Any]) -> None:
    """Keep nothing: the default ``Keep``."""


def check_parts(asked: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a part that a benchmark does not have.

    Raises:
        ConfigError: it is not among ``known``.
    """
    for name in asked:
        if name not in known:
            raise ConfigError(
                f"no part {name!r}",
                field="--part",
                remedy=did_you_mean(name, known, f"parts: {', '.join(known)}"),
            )


def run_parts(
    parts: Iterable[tuple[str, Callable[[], Mapping[str, Any]]]],
    results: dict[str, Any],
    console: Console,
    keep: Keep = forget,
) -> None:
    """Run the parts of a benchmark, and merge what each returns into ``results``.

    A part that fails does not end the others. ``results`` gets the ``seconds`` that each part has
    taken, and of those that ``failed`` the error, by name.

    Args:
        keep: is given the results after each part.
    """
    seconds, failed = results.setdefault("seconds", {}), results.setdefault("failed", {})
    for name, run in parts:
        begun = time.monotonic()
        try:
            results |= merged(results, run())
        except Exception as error:  # noqa: BLE001 - hours of other parts must not be lost with it
            console.print_exception()
            failed[name] = f"{type(error).__name__}: {error}"
            console.print(f"FAILED   {name}: {failed[name]}", highlight=False, markup=False)
        seconds[name] = time.monotonic() - begun
        keep(results)


def beside(
    earlier: Mapping[str, Any],
    found: Mapping[str, Any],
    judge: Callable[[Mapping[str, Any]], bool],
    *,
    facts: Sequence[str] = ("machine",),
    shared: Sequence[str] = (),
) -> dict[str, Any]:
    """Return ``earlier`` results with the parts of ``found`` in place of its own.

    The facts of the run, such as its machine, stay those of the earlier one. ``later.<part>`` has
    those of a part that was measured since. Keys that are whole numbers, as batches, are in order:
    results from a file have them in the order of text, 16 before 8.

    Args:
        earlier, found: what ``run_parts`` has filled.
        judge: Return True if all is well with the results, for ``ok``.
        facts: names of results that describe the run.
        shared: names of results, mappings themselves, that several parts fill.
    """
    parts = found["seconds"].keys() - found["failed"].keys()
    kept = {name: earlier[name] for name in facts if name in earlier}
    both = {**earlier, **found, **kept}
    for name in ("seconds", "failed", "goals", "later", *shared):
        both[name] = {**earlier.get(name, {}), **found.get(name, {})}
    both["later"] |= dict.fromkeys(parts, {name: found[name] for name in facts if name in found})
    for part in parts:
        both["failed"].pop(part, None)
    both["ok"] = judge(both)
    return {name: _by_number(value) for name, value in both.items()}


def _by_number(found: Any) -> Any:
    """Return ``found`` with keys that are numbers first, in order, at all depths."""
    if not isinstance(found, Mapping):
        return found
    numbers = sorted((key for key in found if key.isdigit()), key=int)
    return {key: _by_number(found[key]) for key in dict.fromkeys((*numbers, *found))}


def in_turn(
    variants: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Return the seconds of each call of each variant.

    The variants take turns, so that other work on the machine affects all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + warm_up):
        for name, call in variants.items():
            started = time.perf_counter()
            call()
            if turn >= warm_up:
                times[name].append(time.perf_counter() - started)
    return times


def medians(variants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each variant; see :func:`in_turn`."""
    return {name: statistics.median(t) for name, t in in_turn(variants, repeats).items()}


def stolen_s(stat: Path = Path("/proc/stat")) -> float:
    """Return the processor time that other virtual machines took while this one had work [s].

    0.0 where Linux does not report it.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        total = stat.read_text(encoding="ascii").split("\n", 1)[0].split()
        return int(total[8]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def on_this_machine(run: Callable[..., dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Return the results of ``run(**options)`` with ``machine``: facts that its figures depend on.

    ``machine`` holds ``cores``, ``architecture``, ``versions`` of Python and libraries, the
    ``seconds`` that the run took, and ``stolen``, the processors that other virtual machines took
    on average meanwhile.
    """
    begun, stolen = time.monotonic(), stolen_s()
    results = run(**options)
    seconds = time.monotonic() - begun
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    machine = {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "versions": versions,
        "seconds": seconds,
        "stolen": (stolen_s() - stolen) / max(seconds, 1e-9),
    }
    return {**results, "machine": machine}


def subplots(rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a figure and its axes, as ``matplotlib.pyplot.subplots``, which needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, **options)  # type: ignore[no-any-return, unused-ignore]


def save_plot(figure: Any, file: Path) -> None:
    """Write ``figure`` to ``file`` and close it."""
    from matplotlib import pyplot

    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
