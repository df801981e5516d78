"""``collab-llm bench jupiter`` (paper 004): planner, router, emulated clusters, real workers."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = ("planner", "router", "emulated", "prefill", "decode", "death", "quality")
"""Parts that ``collab-llm bench jupiter`` runs, in this order; the last four with real workers."""


@dataclass(frozen=True)
class Sizes:
    """The extent of a run.

    Attributes:
        cases: small clusters on which the planner is compared with brute force.
        large: layers, devices and tokens of the plan whose time is taken.
        brief: emulate the paper's 7B clusters at its slowest network only.
        tokens: lengths of the prompts that real workers read.
        questions: each is decoded once in each mode.
        samples: questions of each category whose answers are judged.
        repeats: turns of each prefill; half as many deaths of each kind.
    """

    cases: int = 40
    large: tuple[int, int, int] = (80, 8, 4096)
    brief: bool = False
    tokens: tuple[int, ...] = (512, 2048)
    questions: int = 4
    samples: int = 16
    repeats: int = 3


QUICK = Sizes(
    cases=4,
    large=(16, 4, 512),
    brief=True,
    tokens=(256,),
    questions=1,
    samples=2,
    repeats=1,
)
"""Sizes of ``--quick``: every part runs, but its figures mean little."""
