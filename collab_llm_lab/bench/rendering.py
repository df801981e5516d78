"""Tables, goals and plots of all benchmarks: one renderer, which gets rows, goals and panels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from collab_llm_lab.bench.harness import save_plot, subplots

Draw = Callable[[Any], None]
"""Draw one panel of a plot on the axes given."""


def show_table(
    console: Console,
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    texts: int = 1,
    caption: str | None = None,
) -> None:
    """Print a table; without rows, nothing.

    Args:
        texts: Columns of text at the left; those after them are figures, and stand at the right.
    """
    table = Table(title=title, caption=caption)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < texts else "right")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    if table.row_count:
        console.print(table)


def show_rows(
    console: Console,
    title: str,
    keys: Sequence[str],
    rows: Mapping[Any, Mapping[str, Any]],
    columns: Mapping[str, str],
) -> None:
    """Print results as a table.

    Args:
        keys: Headings of the parts of each row's key, such as point and mode.
        rows: Results by key; a tuple, if the key has several parts.
        columns: Heading and format of each column, such as ``"{age_ms[p50]:.1f}"``.
    """
    forms = list(columns.values())
    cells = (
        (*(key if isinstance(key, tuple) else (key,)), *(form.format(**row) for form in forms))
        for key, row in rows.items()
    )
    show_table(console, title, (*keys, *columns), cells, texts=len(keys))


def show_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines of text as they are."""
    for line in lines:
        console.print(line, highlight=False, markup=False)


def show_goals(console: Console, rows: Iterable[tuple[str, Any, Any, bool]]) -> None:
    """Print the goals: name, wanted, measured, and whether it is reached."""
    cells = (
        (name, _figure(wanted), _figure(measured), "yes" if reached else "NO")
        for name, wanted, measured, reached in rows
    )
    show_table(console, "goals", ("goal", "wanted", "measured", "reached"), cells)


def _figure(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def missed(figures: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    """Return the names of the figures above their limit, or without a value."""
    return [
        name
        for name, limit in limits.items()
        if (value := figures.get(name)) is None or not value <= limit
    ]


def judged(value: float, limit: float, text: str) -> Text:
    """Return ``text`` in green if ``value`` is within ``limit``, in red otherwise."""
    return Text(text, "green" if value <= limit else "red")


def draw_panels(
    panels: Mapping[str, Draw], file: Path | None, *, columns: int, size: tuple[float, float]
) -> None:
    """Draw each panel under its title, row by row, and write them to ``file``, if there is one.

    Args:
        size: Width and height of a panel [inches].
    """
    if file is None or not panels:
        return
    rows = -(-len(panels) // columns)
    figure, grid = subplots(
        rows, columns, figsize=(columns * size[0], rows * size[1]), squeeze=False
    )
    for axis, (title, draw) in zip(grid.flat, panels.items(), strict=False):
        axis.set_title(title, fontsize=10)
        draw(axis)
        if axis.get_legend_handles_labels()[1] and not axis.get_legend():
            axis.legend(fontsize=7)
    for axis in grid.flat[len(panels) :]:
        axis.set_axis_off()
    save_plot(figure, file)


def panels_of(
    results: Mapping[str, Any], panels: Mapping[str, Callable[[Any, Mapping[str, Any]], None]]
) -> dict[str, Draw]:
    """Return ``panels``, which draw axes from results, bound to ``results``."""

    def bound(draw: Callable[[Any, Mapping[str, Any]], None]) -> Draw:
        return lambda axis: draw(axis, results)

    return {title: bound(draw) for title, draw in panels.items()}


def label_axes(axis: Any, x: str = "", y: str = "") -> None:
    """Name the axes of a panel."""
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)


def draw_bars(axis: Any, groups: Mapping[str, Mapping[str, float | None]]) -> None:
    """Draw a group of bars for each entry, a colour for each name in it; None is drawn as x."""
    names = list(next(iter(groups.values())))
    width = 1 / (len(names) + 1)
    for number, name in enumerate(names):
        places = [group + number * width for group in range(len(groups))]
        heights = [row[name] for row in groups.values()]
        axis.bar(places, [h or 0.0 for h in heights], width, label=name.replace("_", " "))
        for place, height in zip(places, heights, strict=True):
            if height is None:
                axis.text(place, 0.0, "x", color=f"C{number}", ha="center")
    middle = (len(names) - 1) * width / 2
    axis.set_xticks([group + middle for group in range(len(groups))], list(groups), fontsize=8)
