"""Pictures and charts of the page, as text: SVG, HTML, and options of Apache ECharts.

Text from models and other nodes is escaped here and sanitised again by the browser (``page.py``).
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from collab_llm_nodes.dashboard.view import Answer, Direction, Found, Health, Reading, Word
from collab_llm_nodes.robot.executor import Pose2D

STAGES = {
    "draft": ("drafting", "#74b816"),
    "verify": ("verifier computes", "#1864ab"),
    "link": ("link and queue", "#f08c00"),
    "other": ("the rest", "#adb5bd"),
}


def answer_html(words: Sequence[Word]) -> str:
    """Return the answer, each token in the colour of its source, and the matched part marked."""
    pieces = []
    for word in words:
        name = word.source.name.lower() if word.source is not None else "plain"
        matched = " matched" if word.matched else ""
        pieces.append(f'<span class="token {name}{matched}">{html.escape(word.text)}</span>')
    return "".join(pieces)


def direction_svg(direction: Direction | None) -> str:
    """An overlay for the camera picture: a line where the target is, an arrow if it is outside."""
    if direction is None:
        return ""
    x = 1000 * direction.x
    label = "ahead" if abs(direction.angle) < 0.01 else f"{abs(math.degrees(direction.angle)):.0f}°"
    if direction.inside:
        mark = f'<line x1="{x:.0f}" y1="60" x2="{x:.0f}" y2="500"/>'
        mark += f'<polygon points="{x - 24:.0f},60 {x + 24:.0f},60 {x:.0f},100"/>'
    else:
        out = -1 if direction.x < 0.5 else 1
        tip, back = x - out * 12, x - out * 70
        mark = f'<polygon points="{tip:.0f},250 {back:.0f},205 {back:.0f},295"/>'
    at = min(max(x, 70.0), 930.0)
    return (
        '<svg viewBox="0 0 1000 500" preserveAspectRatio="none" class="overlay">'
        f'{mark}<text x="{at:.0f}" y="45" text-anchor="middle">{label}</text></svg>'
    )


def path_svg(path: Sequence[tuple[float, float]], pose: Pose2D | None) -> str:
    """The path by odometry, where the odometry frame's x axis points up; with a grid."""
    points = [*path, *([(pose.x, pose.y)] if pose is not None else [])] or [(0.0, 0.0)]
    xs, ys = [-y for _, y in points], [-x for x, _ in points]  # of the picture: right, down
    middle = ((min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2)
    half = 0.6 * max(max(xs) - min(xs), max(ys) - min(ys), 2.5)
    left, top, side = middle[0] - half, middle[1] - half, 2 * half
    step = 1.0 if side < 15 else 10.0 ** math.ceil(math.log10(side / 15))
    grid = "".join(
        f'<line x1="{g:.2f}" y1="{top:.2f}" x2="{g:.2f}" y2="{top + side:.2f}"/>'
        for g in _multiples(left, side, step)
    ) + "".join(
        f'<line x1="{left:.2f}" y1="{g:.2f}" x2="{left + side:.2f}" y2="{g:.2f}"/>'
        for g in _multiples(top, side, step)
    )
    line = " ".join(f"{x:.2f},{y:.2f}" for x, y in zip(xs, ys, strict=True))
    robot = ""
    if pose is not None:
        size = side / 24
        turn = -math.degrees(pose.yaw)
        robot = (
            f'<g transform="translate({-pose.y:.3f} {-pose.x:.3f}) rotate({turn:.1f})">'
            f'<polygon class="robot" points="0,{-1.4 * size:.3f} {0.8 * size:.3f},{size:.3f} '
            f'{-0.8 * size:.3f},{size:.3f}"/></g>'
        )
    return (
        f'<svg viewBox="{left:.3f} {top:.3f} {side:.3f} {side:.3f}" class="path">'
        f'<g class="grid" stroke-width="{side / 400:.4f}">{grid}</g>'
        f'<polyline points="{line}" stroke-width="{side / 120:.4f}"/>{robot}'
        f'<text x="{left + side / 60:.3f}" y="{top + side * 0.985:.3f}" '
        f'font-size="{side / 22:.3f}">grid {step:g} m</text></svg>'
    )


def _multiples(begin: float, length: float, step: float) -> list[float]:
    first = math.ceil(begin / step)
    return [n * step for n in range(first, math.floor((begin + length) / step) + 1)]


def health_html(health: Sequence[Health]) -> str:
    """Return a table of the nodes; hovering over a node shows its parts."""
    rows = []
    for node in health:
        level = node.level.name.lower()
        parts = html.escape("\n".join(f"{part}: {message}" for part, _, message in node.parts))
        rows.append(
            f'<tr title="{parts}"><td class="level {level}">{level.upper()}</td>'
            f'<td><b class="name">{html.escape(node.name)}</b>{html.escape(node.message)}</td></tr>'
        )
    return f'<table class="health">{"".join(rows)}</table>'


COUNTS = ("jobs", "done", "kept", "abstained", "truncated", "unreadable", "failed", "cut")
TOKENS = ("prefill", "cached", "decode")


def rounds_html(reading: Reading | None) -> str:
    """A paragraph for each of a reading's rounds: its jobs, and the bytes and tokens of each.

    It is as wide as there is room, which a table of so many columns is not. Figures that are 0 are
    left out.
    """
    if reading is None:
        return ""
    names = {name: name for name in COUNTS}
    names |= {f"remote_{name}_tokens": f"remote {name}" for name in TOKENS}
    rows = []
    for number, figures in reading.rounds:
        sent = sum(n for name, n in figures.items() if name.startswith("sent_"))
        counts = [(shown, figures.get(name, 0.0)) for name, shown in names.items()]
        counts.append(("bytes sent", sent))
        pieces = [f"<span>{name} <strong>{n:.0f}</strong></span>" for name, n in counts if n]
        rows.append(f'<p class="round">round {number}: {" ".join(pieces)}</p>')
    return "".join(rows)


def found_html(found: Sequence[Found] | None) -> str:
    """A list of the pieces that an answer rests on, each with its share."""
    if found is None:
        return ""
    if not found:
        return "<p>No document of the robot's own was found.</p>"
    rows = [
        f'<tr><td>{piece.weight:.0%}</td><td><b class="name">{html.escape(piece.name)}</b>'
        f"{html.escape(piece.text)}</td></tr>"
        for piece in found
    ]
    return f'<table class="found">{"".join(rows)}</table>'


# Charts.


def _chart(
    x: Sequence[Any], axes: list[dict[str, Any]], series: Any, unit: str = ""
) -> dict[str, Any]:
    common = {"type": "value", "min": 0, "nameGap": 8}
    return {
        "animation": False,
        "grid": {"left": 46, "right": 40, "top": 46, "bottom": 24},
        "legend": {"top": 0, "itemHeight": 8, "textStyle": {"fontSize": 11}},
        "tooltip": {"trigger": "axis"},
        "xAxis": {"type": "category", "data": list(x), "name": unit, "nameGap": 4},
        "yAxis": [{**common, **axis} for axis in axes],
        "series": series,
    }


def _line(name: str, colour: str, data: Sequence[Any], **more: Any) -> dict[str, Any]:
    line = {"type": "line", "name": name, "data": list(data), "itemStyle": {"color": colour}}
    return {**line, **more}


def stages_chart(answers: Sequence[Answer]) -> dict[str, Any]:
    """Draw where the time of each answer went [ms]."""
    series = [
        {
            "type": "bar",
            "stack": "time",
            "name": name,
            "itemStyle": {"color": colour},
            "data": [round(1e3 * a.figures.stages[stage], 2) for a in answers],
        }
        for stage, (name, colour) in STAGES.items()
    ]
    return _chart(range(1, len(answers) + 1), [{"name": "ms"}], series)


def rates_chart(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens per verification, the share of rounds that a pre-draft served, and, as marks on the
    ground, how each answer was decoded."""
    rates = [a.figures.hit_rate for a in answers]
    hits = [None if rate is None else round(100 * rate) for rate in rates]
    series = [
        _line("tau", "#5f3dc4", [round(a.figures.tau, 3) for a in answers]),
        _line("cache hits", "#0ca678", hits, yAxisIndex=1),
    ]
    for mode in dict.fromkeys(a.mode for a in answers if a.mode):
        marks = [0 if a.mode == mode else None for a in answers]
        series.append({"type": "scatter", "name": mode, "symbol": "rect", "data": marks})
    axes: list[dict[str, Any]] = [{"name": "tokens/round"}, {"name": "%", "max": 100}]
    return _chart(range(1, len(answers) + 1), axes, series)


def rtt_chart(rtts: Sequence[float]) -> dict[str, Any]:
    """Round-trip time of the link [ms], one sample per second; gaps while it is down."""
    values = [None if math.isnan(r) else round(1e3 * r, 3) for r in rtts]
    series = [_line("round trip", "#f08c00", values, showSymbol=False)]
    return _chart(range(1 - len(rtts), 1), [{"name": "ms"}], series, unit="s")
