"""Plans as text, and timelines of the pipeline (Gantt charts) as rows and as pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from collab_llm_nodes.protocols.jupiter.estimate import Estimate, Span, timeline
from collab_llm_nodes.protocols.jupiter.messages import PassTimes
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.planner import JupiterPlan
from collab_llm_nodes.protocols.jupiter.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[tuple[str, Sequence[Span]]]
"""A timeline: stages and links by name, each with its spans."""


def describe(plan: JupiterPlan) -> str:
    """Return the plan as lines of text."""
    predicted, config = plan.predicted, plan.config
    lines = [
        f"{i}. {part.device}: layers {part.first} to {part.last - 1}"
        f" ({part.last - part.first}), {memory / 1e6:.0f} MB"
        for i, (part, memory) in enumerate(zip(plan.placements, plan.memory_bytes, strict=True), 1)
    ]
    parts = plan.lengths(plan.typical_prompt)
    lines.append(
        f"prompt of {plan.typical_prompt} tokens in {len(parts)} part{'s' * (len(parts) > 1)}"
        f" of {min(parts)} to {max(parts)} (b = {plan.least}):"
        f" {predicted.prefill_s:.3f} s to the first token; paper's plan"
        f" {predicted.paper_plan_s:.3f} s, Eq. 4 says {predicted.paper_latency_s:.3f} s;"
        f" {predicted.prefill_loss:+.1%} against a partition for prefill only"
    )
    if config.answer_tokens:
        lines.append(
            f"answer of {config.answer_tokens} tokens in {config.lanes} lanes,"
            f" {config.accepted:g} tokens a pass: {predicted.decode_s:.3f} s;"
            f" {predicted.decode_loss:+.1%} against a partition for decoding only"
        )
    return "\n".join(lines)


def plan_rows(plan: JupiterPlan, profile: Profile, prompt_tokens: int) -> Rows:
    """Return the predicted spans of each stage and link for a prompt.

    Raises:
        InvalidInput: the prompt is empty or too long.
        ConfigError: a device of the plan is not in the profile.
    """
    sent = profile.sending(plan.config.states)
    return planned_rows(sent, plan.placements, plan.lengths(prompt_tokens))


def planned_rows(profile: Profile, placements: Sequence[Placement], lengths: Sequence[int]) -> Rows:
    """Return the predicted spans of each stage and link for a prompt in parts of ``lengths``.

    Raises:
        ConfigError: a device is not in the profile.
    """
    stages, links = timeline(Estimate(profile, placements).flow_shop(np.array(lengths)))
    rows: list[tuple[str, Sequence[Span]]] = []
    for m, part in enumerate(placements):
        rows.append((f"{part.device} {part.first}-{part.last - 1}", stages[m]))
        if m < len(links):
            rows.append(("link", links[m]))
    return rows


def measured_rows(names: Sequence[str], passes: Sequence[PassTimes]) -> Rows:
    """Return the spans of each stage in measured passes, from the start of the first one.

    Each worker reports times of its own clock. A stage begins a pass after the previous stage has
    ended it, so clocks are shifted until the shortest delay between the two is zero. Links, whose
    times are not measured, appear shorter by that delay.

    Args:
        names: of the stages.
    """
    complete = [(number, spans) for number, spans in passes if len(spans) == len(names)]
    if not complete:
        return []
    begin = np.array([[span.begin for span in spans] for _, spans in complete])
    end = np.array([[span.end for span in spans] for _, spans in complete])
    ahead = np.concatenate([[0.0], (begin[:, 1:] - end[:, :-1]).min(0).cumsum()])
    start = begin[0, 0]
    begin, end = begin - ahead - start, end - ahead - start
    numbers = [number for number, _ in complete]
    return [
        (name, [*zip(numbers, begin[:, m].tolist(), end[:, m].tolist(), strict=True)])
        for m, name in enumerate(names)
    ]


def draw_rows(axis: Axes, rows: Rows) -> None:
    """Draw the spans of each row as bars, with one colour per sub-sequence."""
    for row, (_, spans) in enumerate(rows):
        for number, begin, end in spans:
            bar = (begin * 1e3, (end - begin) * 1e3)
            axis.broken_barh(
                [bar], (row - 0.4, 0.8), color=f"C{number % 10}", edgecolor="white", linewidth=0.5
            )
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms")


def draw_plan(plan: JupiterPlan, profile: Profile, measured: Rows = ()) -> bytes:
    """Return the timeline of the typical prompt's prefill as a PNG.

    Args:
        measured: spans of the last passes, drawn below the plan; may be empty.
    """
    from matplotlib.figure import Figure  # heavy; without pyplot, whose state threads share

    prompt = plan.typical_prompt
    planned = (
        f"Prefill of {prompt} tokens in {len(plan.lengths(prompt))} parts, as planned:"
        f" {plan.prefill_s[prompt - 1]:.3f} s"
    )
    drawn = [(planned, plan_rows(plan, profile, prompt))]
    if measured:
        drawn.append(("The last passes, as measured", measured))
    heights = [1.2 + 0.4 * len(rows) for _, rows in drawn]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(drawn), height_ratios=heights, squeeze=False)[:, 0]
    for axis, (title, rows) in zip(axes, drawn, strict=True):
        draw_rows(axis, rows)
        axis.set_title(title, fontsize=10)
    written = io.BytesIO()
    figure.savefig(written, dpi=110, format="png")
    return written.getvalue()
