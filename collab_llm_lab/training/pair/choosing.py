"""Choice of the early exits that pay, by the planner's formula, at one operating point.

An exit that says all tokens of a round as the target does foresees the round's verdict: drafting
for it begins before the verification ends. Each exit also makes the verification longer. So a few
exits, at the right layers, are the fastest.

Which rounds the draft model would have foreseen by itself is not known here: its misses count as
independent of the exits' hits, which favours exits somewhat.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.engine.device import synchronize
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.loading import DTYPES, LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.planner import Mode, Profile, round_seconds
from collab_llm_nodes.protocols.means import Mean

_DRAFTS_PER_PASS = 8
"""Passes of a usual draft model in one of its target: paper 003's robot (72 of 620 ms)."""
_MOST = 4
"""Exits that are chosen, at most."""
_CONTEXT, _REPEATS = 256, 9
"""Tokens before the passes that are timed, and their number."""


@dataclass(frozen=True)
class Operation:
    """The operating point by which exits pay."""

    rtt_ms: float = setting(60.0, "Round trip of the link [ms].", low=0.0, high=60_000.0)
    pass_ms: float = setting(
        0.0, "A verification without exits [ms]; 0: measured on this machine.", low=0.0
    )
    draft_ms: float = setting(
        0.0, "A token of the draft model [ms]; 0: an eighth of a verification.", low=0.0
    )
    gamma: int = setting(4, "Draft tokens of a round.", low=1, high=16)
    tau: float = setting(3.0, "Tokens of a round.", low=1.0, high=17.0)
    missed: float = setting(
        0.55, "Share of verdicts that the draft model does not foresee.", low=0.0, high=1.0
    )
    candidates: int = setting(
        0, "exit_candidates of the verifier; 0: exits score the whole vocabulary.", low=0
    )
    exit_ms: float = setting(
        0.0, "What an exit adds to a verification [ms]; 0: measured, like ``pass_ms``.", low=0.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def measured(self, target: LoadedModel, adapters: ExitAdapters) -> Operation:
        """Return the same with what was left to be measured on this machine."""
        pass_ms, exit_ms = self.pass_ms, self.exit_ms
        if not (pass_ms and exit_ms):
            here_ms, one_ms = _times(target, adapters, self.gamma, self.candidates)
            pass_ms = pass_ms or here_ms
            exit_ms = exit_ms or one_ms * pass_ms / here_ms  # another machine, but like this one
        draft_ms = self.draft_ms or pass_ms / _DRAFTS_PER_PASS
        return replace(self, pass_ms=pass_ms, exit_ms=exit_ms, draft_ms=draft_ms)


@dataclass(frozen=True)
class Choice:
    """The exits that pay.

    Attributes:
        foreseen: share of the rounds whose verdict one of them foresees.
        round_ms, without_ms: time of a round with them, and without any.
    """

    layers: tuple[int, ...]
    foreseen: float
    round_ms: float
    without_ms: float

    def report(self, operation: Operation) -> dict[str, Any]:
        """Return the choice for people, with the operating point it was made for."""
        return {
            "chosen": list(self.layers),
            "foreseen": self.foreseen,
            "round_ms": self.round_ms,
            "round_ms_without_exits": self.without_ms,
            "operation": asdict(operation),
        }


def choose(
    right: NDArray[np.bool_], layers: Sequence[int], count: int, operation: Operation
) -> Choice:
    """Return the exits that pay: of all choices of a few, the one with the shortest rounds.

    Args:
        right: [exits, rounds], whether the exit foresees the round's verdict.
        layers: of the exits, ascending.
        count: layers of the model.
    """
    share = dict(zip(layers, right, strict=True))

    def round_ms(chosen: tuple[int, ...]) -> float:
        return _round_ms([share[layer] for layer in chosen], chosen, count, operation)

    sizes = range(min(_MOST, len(layers)) + 1)
    chosen = min((some for size in sizes for some in combinations(layers, size)), key=round_ms)
    hits = [share[layer] for layer in chosen]
    foreseen = float(np.any(hits, axis=0).mean()) if hits else 0.0
    return Choice(chosen, foreseen, round_ms(chosen), round_ms(()))


def _round_ms(
    hits: Sequence[NDArray[np.bool_]], layers: Sequence[int], count: int, operation: Operation
) -> float:
    """Return the planner's prediction of a round with exits at ``layers``, by push-ahead."""
    op = operation
    by_exit, exit_ms = 0.0, 0.0
    if hits and hits[0].size:
        done = [op.pass_ms * layer / count + op.exit_ms * n for n, layer in enumerate(layers, 1)]
        any_hit = np.any(hits, axis=0)
        by_exit = float(any_hit.mean())
        first = np.argmax(hits, axis=0)[any_hit]
        exit_ms = float(np.take(done, first).mean()) if by_exit else 0.0
    draft = Mean(op.draft_ms / 1e3)
    profile = Profile(
        t_p=draft,
        step=draft,
        t_q=Mean((op.pass_ms + op.exit_ms * len(layers)) / 1e3),
        drafted=Mean(op.gamma),
        rtt=Mean(op.rtt_ms / 1e3),
        by_exit=Mean(op.missed * by_exit),
        unexpected=Mean(op.missed * (1 - by_exit)),
        exit_s=Mean(exit_ms / 1e3),
    )
    return 1e3 * round_seconds(profile, Mode(op.gamma, ahead=True), AheadConfig().push_depth)


def _times(
    target: LoadedModel, adapters: ExitAdapters, gamma: int, candidates: int
) -> tuple[float, float]:
    """Return the median times of a verification and of one of its exits on this machine [ms]."""
    dtype = DTYPES[target.config.dtype]
    own = copy.deepcopy(adapters).to(target.device, dtype).eval().requires_grad_(False)
    engine = Engine(replace(target, adapters=own), candidates=candidates)
    with closing(engine), closing(engine.open(EncodedPrompt(()))) as session:
        session.feed([0] * _CONTEXT, last=0)

        def once(*, exits: bool) -> float:
            session.length = _CONTEXT
            synchronize(engine.device)
            begun = time.perf_counter()
            session.feed([0] * (gamma + 1), (lambda layer, logits: None) if exits else None)
            synchronize(engine.device)
            return 1e3 * (time.perf_counter() - begun)

        once(exits=True)
        once(exits=False)
        both = [(once(exits=False), once(exits=True)) for _ in range(_REPEATS)]
    without, with_exits = (statistics.median(times) for times in zip(*both, strict=True))
    return without, max(0.0, with_exits - without) / len(own.layers)
