"""A draft and its target in one process: how well the one guesses what the other says."""

from __future__ import annotations

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner

GAMMA = 4
"""Tokens of a draft, as in the shipped configurations."""


def plain_runner(draft: Engine, target: Engine, gamma: int = GAMMA) -> InProcessRunner:
    """Return a runner of plain speculative decoding; ``gamma`` 0: the target decodes alone."""
    return InProcessRunner(
        draft,
        target,
        gamma=gamma,
        predraft=PreDraftConfig(max_predrafts=0),
        ahead=AheadConfig(predictions=0),
    )
