"""Models whose passes take the time of larger ones: EMULATION, and labelled so.

The embedded target is so small that a pass over four tokens takes about twice the time of one
token: it is bound by arithmetic. A large model on an accelerator reads its weights for most of a
pass, so that some dozens of tokens cost what one does. That is the case that speculation is made
for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from collab_llm_lab.bench.collective.material import Family
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed


@dataclass(frozen=True)
class Pace:
    """The law of a pass's time: max(``least_s``, tokens * ``token_s``).

    It is that of paper 000's appendix C.
    """

    least_s: float
    token_s: float

    def seconds(self, tokens: int) -> float:
        """Return the time of a pass over ``tokens`` tokens."""
        return max(self.least_s, tokens * self.token_s)


TARGET_PACE = Pace(0.030, 0.030 / 160)
"""About Llama-2-70B in half precision on four A100: 35 GB of weights each, and bound by arithmetic
from some 160 tokens on."""
DRAFT_PACE = Pace(0.003, 0.003 / 1000)
"""About a model of 160 M parameters there: bound by its launches."""


class PacedEngine:
    """An engine whose passes take the time of ``pace``, or their own if that is longer."""

    def __init__(self, engine: Engine, pace: Pace) -> None:
        self._engine, self._pace = engine, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, feeds: Sequence[Feed]) -> list[Tensor | Exception]:
        """Return what the engine returns, when the time is over."""
        over = time.monotonic() + self._pace.seconds(sum(len(feed.ids) for feed in feeds))
        results = self._engine.run(feeds)
        time.sleep(max(0.0, over - time.monotonic()))
        return results


def paced(family: Family, target: Pace = TARGET_PACE, draft: Pace = DRAFT_PACE) -> Family:
    """Return ``family`` with the engines of larger models."""
    return replace(
        family,
        target=cast(Engine, PacedEngine(family.target, target)),
        drafts=tuple(cast(Engine, PacedEngine(each, draft)) for each in family.drafts),
    )
