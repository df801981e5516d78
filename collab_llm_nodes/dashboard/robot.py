"""The interface of the node to the web server."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from collab_llm_nodes.dashboard.view import Motion, Snapshot


class Robot(Protocol):
    """All methods may be called from any thread and return at once."""

    def shown(self) -> Snapshot:
        """Return the newest snapshot; snapshots are made while this is called."""

    def frame(self) -> tuple[int, bytes]:
        """The newest camera picture as JPEG, with its number; (0, b"") before the first."""

    def motion(self) -> tuple[Motion | None, float]:
        """Return the last state of motion_guard, and its age [s]."""

    def emergency_stop(self) -> int:
        """Publish the emergency stop in the calling thread; return the number of subscribers."""

    def reset(self) -> Future[tuple[bool, str]]:
        """Ask motion_guard to end the emergency stop; the result is success and its message."""

    def instruct(self, instruction: str) -> None:
        """Send an instruction."""

    def confirm(self) -> None:
        """Confirm the pending instruction."""

    def ask(self, question: str) -> None:
        """Ask a question about the robot's own documents."""

    def ask_documents(self, question: str, documents: tuple[tuple[str, str], ...]) -> None:
        """Ask a question about ``documents``: names, and texts or "" for files on the server."""

    def is_stop(self, instruction: str) -> bool:
        """Return True if an instruction only asks to stop; it cancels at any time."""

    def cancel(self) -> None:
        """Cancel the current instruction, also one from elsewhere."""
