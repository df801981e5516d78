"""The common part of the benchmarks."""

from __future__ import annotations

import copy
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from collab_llm_lab.bench.harness import (
    WARM_UP,
    beside,
    in_turn,
    medians,
    on_this_machine,
    run_parts,
    save_plot,
    stolen_s,
    subplots,
)
from collab_llm_lab.bench.rendering import (
    draw_bars,
    draw_panels,
    judged,
    label_axes,
    missed,
    show_goals,
    show_table,
)


class Machine:
    """A clock, and calls that take their time on a machine that becomes slower."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slowness, self.calls = 0.0, 1.0, list[str]()
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def work(self, name: str, seconds: float) -> None:
        self.calls.append(name)
        self.now += seconds * self.slowness
        self.slowness *= 1.25


def test_variants_take_turns_and_the_first_turns_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    variants = {"a": lambda: machine.work("a", 1.0), "b": lambda: machine.work("b", 2.0)}
    times = in_turn(variants, repeats=3)
    assert machine.calls == ["a", "b"] * (3 + WARM_UP)
    # What slows the machine meets both alike: one step of it lies between them in every turn.
    ratios = [b / a for a, b in zip(times["a"], times["b"], strict=True)]
    assert ratios == pytest.approx([2.5] * 3)
    assert times["a"][0] == pytest.approx(1.25 ** (2 * WARM_UP))


def test_medians_are_those_of_the_measured_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    found = medians({"a": lambda: machine.work("a", 1.0)}, repeats=3)
    assert found == {"a": pytest.approx(1.25 ** (WARM_UP + 1))}


def test_stolen_time_is_read_where_linux_tells_it(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    assert stolen_s(stat) == 0.0
    stat.write_text("cpu  1 2 3 4 5 6 7 250 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    assert stolen_s(stat) == 250 / os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu  1 2 3\n")
    assert stolen_s(stat) == 0.0


def test_results_say_on_which_machine_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"stolen": iter([3.0, 4.0]), "time": iter([10.0, 14.0])}
    harness = "collab_llm_lab.bench.harness"
    monkeypatch.setattr(f"{harness}.stolen_s", lambda: next(clocks["stolen"]))
    monkeypatch.setattr(f"{harness}.time.monotonic", lambda: next(clocks["time"]))
    found = on_this_machine(lambda figure: {"figure": figure}, figure=7)
    monkeypatch.undo()
    assert found["figure"] == 7
    machine = found["machine"]
    assert (machine["seconds"], machine["stolen"]) == (4.0, 0.25)
    assert machine["cores"] == os.cpu_count()
    assert set(machine["versions"]) >= {"python", "torch", "numpy"}


def test_a_plot_is_written_and_its_folder_made(tmp_path: Path) -> None:
    figure, (left, _) = subplots(1, 2, figsize=(4, 2))
    left.plot([1, 2, 3])
    file = tmp_path / "new" / "plot.png"
    save_plot(figure, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_part_that_fails_does_not_end_the_others() -> None:
    kept: list[dict[str, Any]] = []

    def fails() -> dict[str, Any]:
        raise ValueError("no room")

    console = Console(file=io.StringIO())
    results: dict[str, Any] = {"model": "tiny"}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "one": lambda: {"ladder": {"mixed": {"1": 0.5}}},
        "two": fails,
        "three": lambda: {"ladder": {"mixed": {"8": 0.7}}, "pool": {}},
    }
    run_parts(parts.items(), results, console, lambda found: kept.append(copy.deepcopy(found)))
    seconds = results.pop("seconds")
    assert set(seconds) == set(parts)
    assert results == {
        "model": "tiny",
        "ladder": {"mixed": {"1": 0.5, "8": 0.7}},
        "pool": {},
        "failed": {"two": "ValueError: no room"},
    }
    assert [len(found["seconds"]) for found in kept] == [1, 2, 3]
    assert kept[1]["ladder"] == {"mixed": {"1": 0.5}}


def test_results_joined_to_those_of_a_file_are_in_the_order_of_their_numbers() -> None:
    rows = {"none": 0, "1": 1, "8": 8, "16": 16}
    earlier = {"sweeps": {"drafts": rows}, "seconds": {"sweeps": 1.0}, "failed": {}}
    from_file = json.loads(json.dumps(earlier, sort_keys=True))
    found = {"contexts": {"8192": 1, "16384": 2}, "seconds": {"contexts": 1.0}, "failed": {}}
    both = beside(from_file, found, lambda _: True)
    assert [*both["sweeps"]["drafts"]] == ["1", "8", "16", "none"]
    assert [*both["contexts"]] == ["8192", "16384"]
    assert both["sweeps"]["drafts"] == rows


def test_a_figure_above_its_limit_or_without_a_value_is_missed() -> None:
    limits = {"ratio": 2.0, "wrong": 0, "share": 0.5, "absent": 1.0}
    assert missed({"ratio": 2.0, "wrong": 1, "share": None, "more": 9.0}, limits) == [
        "wrong",
        "share",
        "absent",
    ]


def test_a_table_shows_its_rows_and_without_any_nothing() -> None:
    told = io.StringIO()
    console = Console(file=told, width=80)
    show_table(console, "rates", ("name", "rate"), [])
    assert told.getvalue() == ""
    show_table(console, "rates", ("name", "rate"), [("a", 0.5), ("b", judged(2.0, 1.0, "two"))])
    show_goals(console, [("fast", 1.0, 0.12345, True), ("right", 0, None, False)])
    words = told.getvalue().split()
    for word in ("rates", "0.5", "two", "0.123", "yes", "none", "NO"):
        assert word in words


def test_panels_are_drawn_row_by_row_with_bars_for_each_group(tmp_path: Path) -> None:
    drawn: list[list[float]] = []

    def bars(axis: Any) -> None:
        draw_bars(axis, {"a": {"x": 1.0, "y": None}, "b": {"x": 2.0, "y": 3.0}})
        label_axes(axis, "group", "height")
        drawn.append([bar.get_height() for bar in axis.patches])

    file = tmp_path / "plot.png"
    draw_panels({"one": bars, "two": bars, "three": bars}, file, columns=2, size=(2, 2))
    assert drawn == 3 * [[1.0, 2.0, 0.0, 3.0]]
    assert file.stat().st_size > 0
    draw_panels({"one": bars}, None, columns=1, size=(2, 2))
    assert len(drawn) == 3, "without a file nothing is drawn"
