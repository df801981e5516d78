"""The node, as the web side sees it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from collab_llm_nodes.dashboard.view import Motion, Snapshot


class Robot(Protocol):
    """Everything here may be called from any thread, and returns at once."""

    def shown(self) -> Snapshot:
        """The newest snapshot; asking keeps snapshots coming."""

    def frame(self) -> tuple[int, bytes]:
        """The newest camera picture as JPEG, with its number; (0, b"") before the first."""

    def motion(self) -> tuple[Motion | None, float]:
        """Return what motion_guard said last, and how old that is [s]."""

    def emergency_stop(self) -> int:
        """Publish the emergency stop, from the calling thread; how many subscribers there are."""

    def reset(self) -> Future[tuple[bool, str]]:
        """Ask motion_guard to end the emergency stop; success, and its words."""

    def instruct(self, instruction: str) -> None:
        """Have an instruction followed."""

    def confirm(self) -> None:
        """Have the instruction followed that waits for it."""

    def ask(self, question: str) -> None:
        """Have a question about the robot's own documents answered."""

    def ask_documents(self, question: str, documents: tuple[tuple[str, str], ...]) -> None:
        """Have a question answered about ``documents``: names, and texts or "" for files that the
        server reads."""

    def is_stop(self, instruction: str) -> bool:
        """Return True if an instruction only asks to stop; it cancels, at any time."""

    def cancel(self) -> None:
        """Have the instruction under way ended, whoever gave it."""
