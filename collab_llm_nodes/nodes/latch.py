"""The emergency stop on disk: pressed, it outlives the process, as the button of a machine does."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

UNREADABLE = "somebody; what is noted of it cannot be read"


class Latch:
    """Who has pressed the emergency stop of one guard, in a file that is there until the reset.

    Args:
        folder: where the files of all guards of this machine are; "" keeps nothing.
        name: the guard's, with its namespace.
    """

    def __init__(self, folder: str, name: str) -> None:
        file = name.strip("/").replace("/", ".") + ".emergency_stop"
        self._file = Path(folder).expanduser() / file if folder else None

    def read(self) -> str:
        """Who pressed before; "" if nobody did. What cannot be read counts as pressed."""
        if self._file is None:
            return ""
        try:
            return self._file.read_text(encoding="utf-8").strip() or UNREADABLE
        except FileNotFoundError:
            return ""
        except (OSError, ValueError):
            return UNREADABLE

    def set(self, who: str) -> None:
        """Note that ``who`` pressed; raises OSError if that cannot be kept."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("w", encoding="utf-8") as file:
            file.write(who)
            file.flush()
            os.fsync(file.fileno())  # the battery may be next

    def clear(self) -> None:
        """It was reset; raises OSError if the note cannot be taken away."""
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                self._file.unlink()
