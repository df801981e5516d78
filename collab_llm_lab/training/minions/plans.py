"""Lengths of the adaptation: for two cores, and to check a machine."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_lab.training.text.plans import GUIDANCE, Stage

STAGES = ("worker", "planner")


@dataclass(frozen=True)
class MinionsPlan:
    """Both stages and their rows."""

    worker: Stage
    planner: Stage
    length: int = 1024
    """Tokens of a row."""
    lines: tuple[int, int] = (4, 50)
    """Lines of a passage, short ones more often: the mean is the geometric one."""
    growing: int = 200
    """Steps after which passages of all lengths occur; to find a line is learnt in short ones."""
    tasks: int = 12
    """Tasks on each passage."""
    replayed: int = 1
    """Rows of each of the worker's batches that are of the text family's own training."""
    planner_length: int = 512
    """Tokens of a row of the planner."""
    rank: int = 12
    """Rank of the planner's changes."""
    held_out: int = 64
    """Held-out groups of a point of the learning curve."""


CPU = MinionsPlan(
    worker=Stage(
        4,
        1e-3,
        steps=6_000,
        warmup=20,
        muon=0.012,
        compile=True,
        bfloat16=True,
        measure_every=100,
        guidance=GUIDANCE,
    ),
    planner=Stage(4, 4e-3, steps=600, warmup=20, bfloat16=True, measure_every=100, decay=0.0),
)
"""Some 110 minutes of one core; a run gives the same models again."""

TINY = MinionsPlan(
    worker=Stage(2, 1e-3, steps=2, warmup=1, measure_every=2, guidance=GUIDANCE),
    planner=Stage(2, 1e-3, steps=2, warmup=1, measure_every=2),
    length=512,
    planner_length=256,
    lines=(2, 6),
    tasks=3,
    replayed=1,
    rank=2,
    held_out=2,
)
"""Seconds: nothing is learnt. For tests."""

PLANS = {"cpu": CPU, "tiny": TINY}
