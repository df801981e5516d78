"""Limits on what agents may do with the robot."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, setting


@dataclass(frozen=True)
class AgentConfig:
    """Settings of ``collab-llm mcp``; agents cannot change them."""

    approval: bool = setting(True, "A person confirms each instruction before the robot moves.")
    approval_s: float = setting(
        120.0, "Longest wait for models, link and that person [s].", low=1.0, high=600.0
    )
    motion_s: float = setting(120.0, "Longest motion by one instruction [s].", low=1.0, high=3600.0)
    answer_s: float = setting(60.0, "Longest wait for an answer [s].", low=1.0, high=600.0)
    wait_s: float = setting(
        30.0, "Longest wait for other clients to finish [s].", low=0.1, high=600.0
    )
    questions: int = setting(2, "Questions answered at a time.", low=1, high=16)
    calls_per_s: float = setting(
        5.0, "Calls of one client a second; stop always passes.", low=0.1, high=100.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)
