"""The panel of a model over several workers: stages and timelines. Pure.

Numbers and names come from another node: they are bounded here, and escaped where they are drawn.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ROWS = 32
"""Machines of a timeline that are drawn, and stages that are listed."""
SPANS = 1000
"""Spans of a timeline that are drawn: the last ones."""
NAME = 60
"""Characters of a name."""

_COLOURS = (
    *("#1864ab", "#f08c00", "#2b8a3e", "#c92a2a", "#5f3dc4"),
    *("#862e9c", "#0b7285", "#e67700", "#868e96", "#5c940d"),
)
_LONGEST = 1e9  # s; no timeline is longer
_WIDTH, _HEIGHT = 800, 18  # of the bars, of a row

Span = tuple[int, int, float, float]
"""Row, number of the piece of work, begin and end [s]."""


@dataclass(frozen=True)
class Timeline:
    """Work of several machines; see ``msg/Timeline``."""

    rows: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Layers ``first`` to ``last``, and the bytes of their weights, on one device."""

    device: str
    first: int
    last: int
    bytes: int


@dataclass(frozen=True)
class Stages:
    """The workers of one model; see ``msg/JupiterStages``."""

    model: str = ""
    stages: tuple[Stage, ...] = ()
    missing: tuple[str, ...] = ()
    losses: int = 0
    lanes: int = 0
    lanes_in_use: int = 0
    planned: Timeline = field(default_factory=Timeline)
    measured: Timeline = field(default_factory=Timeline)


def names(given: Iterable[str]) -> tuple[str, ...]:
    """Return the first names, each shortened to ``NAME`` characters."""
    return tuple(name[:NAME] for name in [*given][:ROWS])


def timeline(rows: Sequence[str], spans: Iterable[Span]) -> Timeline:
    """Return the drawable part of a timeline: the last spans with known rows and valid times."""
    shown = names(rows)
    sound = [
        span for span in spans if span[0] < len(shown) and 0.0 <= span[2] <= span[3] < _LONGEST
    ]
    return Timeline(shown, tuple(sound[-SPANS:]))


def timeline_svg(shown: Timeline) -> str:
    """Return a bar for each span, in a row below each machine's name; empty without spans."""
    if not shown.spans:
        return ""
    begin = min(span[2] for span in shown.spans)
    length = max(max(span[3] for span in shown.spans) - begin, 1e-9)
    bars: list[list[str]] = [[] for _ in shown.rows]
    for row, number, start, end in shown.spans:
        x = _WIDTH * (start - begin) / length
        width = max(1.0, _WIDTH * (end - start) / length)
        bars[row].append(
            f'<rect x="{x:.1f}" y="{_HEIGHT * row + 3}" width="{width:.1f}" height="{_HEIGHT - 6}"'
            f' fill="{_COLOURS[number % len(_COLOURS)]}"/>'
        )
    rows = [
        f'<p class="name">{html.escape(name)}</p>'
        f'<svg viewBox="0 {_HEIGHT * row} {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">'
        f"{''.join(bars[row])}</svg>"
        for row, name in enumerate(shown.rows)
    ]
    return f'<div class="timeline">{"".join(rows)}<p>0 to {1e3 * length:.1f} ms</p></div>'


def stages_html(shown: Stages) -> str:
    """Return a table of the stages."""
    rows = ["<tr><th>device</th><th>layers</th><th>weights</th></tr>"]
    rows += [
        f"<tr><td>{html.escape(stage.device)}</td><td>{stage.first} to {stage.last}</td>"
        f"<td>{stage.bytes / 1e6:.1f} MB</td></tr>"
        for stage in shown.stages
    ]
    return f'<table class="stages">{"".join(rows)}</table>'


def stages_text(shown: Stages) -> str:
    """Return the state of the workers on one line."""
    text = f"{shown.model}: {shown.lanes_in_use} of {shown.lanes} lanes in use"
    if shown.losses:
        text += f", {shown.losses} workers lost so far"
    if shown.missing:
        text += f"; missing: {', '.join(shown.missing)}"
    return text if shown.stages else f"{text}; no chain of workers stands"
