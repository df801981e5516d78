"""Models whose passes take the time of larger ones: EMULATION, and labelled so.

The embedded target is so small that a pass over four tokens takes about twice the time of one
token: it is bound by arithmetic. A large model on an accelerator reads its weights for most of a
pass, so that some dozens of tokens cost what one does. That is the case that speculation is made
for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from collab_llm_lab.bench.collective.material import Family
from collab_llm_lab.bench.emulation import PacedEngine
from collab_llm_nodes.engine.engine import Engine


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


def paced(family: Family, target: Pace = TARGET_PACE, draft: Pace = DRAFT_PACE) -> Family:
    """Return ``family`` with the engines of larger models."""
    return replace(
        family,
        target=_paced(family.target, target),
        drafts=tuple(_paced(each, draft) for each in family.drafts),
    )


def _paced(engine: Engine, pace: Pace) -> PacedEngine:
    return PacedEngine(engine, lambda feeds: pace.seconds(sum(len(feed.ids) for feed in feeds)))
