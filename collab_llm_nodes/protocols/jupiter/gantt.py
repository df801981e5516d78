"""A plan for people: as text, and the pipeline's timeline (Gantt) as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from collab_llm_nodes.protocols.jupiter.estimate import Estimate
from collab_llm_nodes.protocols.jupiter.makespan import Span, timeline
from collab_llm_nodes.protocols.jupiter.messages import PassTimes
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.planner import JupiterPlan
from collab_llm_nodes.protocols.jupiter.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lanes = Sequence[tuple[str, Sequence[Span]]]
"""Names of machines with their spans."""


def describe(plan: JupiterPlan) -> str:
    """Return the plan as lines of text."""
    told, config = plan.predicted, plan.config
    prompt = min(config.prompt_tokens, plan.context)
    lines = [
        f"{i}. {part.device}: layers {part.first} to {part.last - 1}"
        f" ({part.last - part.first}), {memory / 1e6:.0f} MB"
        for i, (part, memory) in enumerate(zip(plan.placements, plan.memory_bytes, strict=True), 1)
    ]
    parts = plan.lengths(prompt)
    lines.append(
        f"prompt of {prompt} tokens in {len(parts)} part{'s' * (len(parts) > 1)} of {min(parts)}"
        f" to {max(parts)} (b = {plan.least}): {told.prefill_s:.3f} s to the first token;"
        f" paper's plan {told.paper_plan_s:.3f} s, Eq. 4 says {told.paper_latency_s:.3f} s;"
        f" {told.prefill_loss:+.1%} against a partition for prefill only"
    )
    if config.answer_tokens:
        lines.append(
            f"answer of {config.answer_tokens} tokens in {config.lanes} lanes,"
            f" {config.accepted:g} tokens a pass: {told.decode_s:.3f} s;"
            f" {told.decode_loss:+.1%} against a partition for decoding only"
        )
    return "\n".join(lines)


def spans_of(plan: JupiterPlan, profile: Profile, prompt_tokens: int) -> Lanes:
    """Return the predicted spans of each stage and link for a prompt.

    Raises:
        InvalidInput: the prompt is empty or too long.
        ConfigError: a device of the plan is not in the profile.
    """
    sent = profile.sending(plan.config.states)
    return planned_lanes(sent, plan.placements, plan.lengths(prompt_tokens))


def planned_lanes(
    profile: Profile, placements: Sequence[Placement], lengths: Sequence[int]
) -> Lanes:
    """Return the predicted spans of each stage and link for a prompt in parts of ``lengths``.

    Raises:
        ConfigError: a device is not in the profile.
    """
    stages, links = timeline(Estimate(profile, placements).work(np.array(lengths)))
    lanes: list[tuple[str, Sequence[Span]]] = []
    for m, part in enumerate(placements):
        lanes.append((f"{part.device} {part.first}-{part.last - 1}", stages[m]))
        if m < len(links):
            lanes.append(("link", links[m]))
    return lanes


def measured_lanes(names: Sequence[str], passes: Sequence[PassTimes]) -> Lanes:
    """Return the spans of each stage in passes that have been run, from the first one's beginning.

    Each worker has told its times by its own clock. A stage begins with a pass after the stage
    before it has ended with it, so clocks are shifted until the shortest delay between the two is
    nothing: links, whose times nobody measures, appear shorter than they are by that delay.

    Args:
        names: of the stages.
    """
    whole = [(number, spans) for number, spans in passes if len(spans) == len(names)]
    if not whole:
        return []
    begin = np.array([[span.begin for span in spans] for _, spans in whole])
    end = np.array([[span.end for span in spans] for _, spans in whole])
    ahead = np.concatenate([[0.0], (begin[:, 1:] - end[:, :-1]).min(0).cumsum()])
    start = begin[0, 0]
    begin, end = begin - ahead - start, end - ahead - start
    numbers = [number for number, _ in whole]
    return [
        (name, [*zip(numbers, begin[:, m].tolist(), end[:, m].tolist(), strict=True)])
        for m, name in enumerate(names)
    ]


def draw_lanes(axis: Axes, lanes: Lanes) -> None:
    """Draw the spans of each machine as bars, a colour for each sub-sequence."""
    for row, (_, spans) in enumerate(lanes):
        for number, begin, end in spans:
            bar = (begin * 1e3, (end - begin) * 1e3)
            axis.broken_barh(
                [bar], (row - 0.4, 0.8), color=f"C{number % 10}", edgecolor="white", linewidth=0.5
            )
    axis.set_yticks(range(len(lanes)), [name for name, _ in lanes], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms")


def draw_plan(plan: JupiterPlan, profile: Profile, prompt_tokens: int, file: Path) -> None:
    """Write the timeline of a prompt's prefill to a PNG file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(plan_picture(plan, profile, prompt_tokens))


def plan_picture(
    plan: JupiterPlan, profile: Profile, prompt_tokens: int, measured: Lanes = ()
) -> bytes:
    """Return the timeline of a prompt's prefill as a PNG.

    Args:
        measured: spans of passes that have been run, to be drawn below it; may be none.
    """
    from matplotlib.figure import Figure  # heavy; without pyplot, whose state threads share

    parts = len(plan.lengths(prompt_tokens))
    planned = (
        f"Prefill of {prompt_tokens} tokens in {parts} parts, as planned:"
        f" {plan.prefill_s[prompt_tokens - 1]:.3f} s"
    )
    drawn = [(planned, spans_of(plan, profile, prompt_tokens))]
    if measured:
        drawn.append(("The last passes, as measured", measured))
    heights = [1.2 + 0.4 * len(lanes) for _, lanes in drawn]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(drawn), height_ratios=heights, squeeze=False)[:, 0]
    for axis, (title, lanes) in zip(axes, drawn, strict=True):
        draw_lanes(axis, lanes)
        axis.set_title(title, fontsize=10)
    written = io.BytesIO()
    figure.savefig(written, dpi=110, format="png")
    return written.getvalue()
