"""The emergency stop on disk: pressed, it outlives the process, as the button of a machine does.

A disk can take seconds. So it has a thread of its own; whoever presses never waits for it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from collab_llm_nodes.errors import ConfigError

UNREADABLE = "somebody, perhaps: what is noted of it cannot be read"
_RETRY_S = 1.0
_CLOSE_S = 1.0


class Latch:
    """The emergency stop of one guard: a file, there until the reset, that names who pressed it.

    Args:
        folder: where the files of all guards of this machine are; "" keeps nothing.
        name: the guard's, with its namespace.
        on_error: told, in the latch's thread, why nothing can be kept.

    Attributes:
        error: why the disk does not say what it should; it is tried again, and again. Or "".

    Raises:
        ConfigError: ``folder`` is no absolute path.
    """

    def __init__(
        self, folder: str, name: str, on_error: Callable[[str], None] = lambda error: None
    ) -> None:
        file = name.strip("/").replace("/", ".") + ".emergency_stop"
        self._file = _absolute(folder) / file if folder else None
        self._on_error = on_error
        self.error = ""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="latch", daemon=True)
        if self._file is not None:
            self._thread.start()

    def read(self) -> str:
        """Return who pressed before; "" if nobody did. An unreadable file counts as pressed."""
        if self._file is None:
            return ""
        try:
            return self._file.read_text(encoding="utf-8").strip() or UNREADABLE
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            return f"{UNREADABLE} ({error})"

    def set(self, who: str) -> None:
        """``who`` pressed."""
        if self._file is not None:
            self._jobs.put(partial(self._note, who))

    def clear(self) -> None:
        """It was reset."""
        if self._file is not None:
            self._jobs.put(self._forget)

    def close(self) -> None:
        """Let the disk have what it has not, for a second at most."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    # In the latch's thread.

    def _work(self) -> None:
        job, ends = self._prepare, False
        while True:
            try:
                job()
                self.error = ""
            except (OSError, ValueError) as error:
                if str(error) != self.error:
                    self._on_error(str(error))
                self.error = str(error)
            if ends:
                return
            with contextlib.suppress(queue.Empty):  # then the same once more
                wanted = self._jobs.get(timeout=_RETRY_S if self.error else None)
                if wanted is not None:
                    job = wanted
                elif self.error:
                    ends = True  # after a last try
                else:
                    return

    def _prepare(self) -> None:
        folder = self._folder()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"cannot write in {folder}")

    def _note(self, who: str) -> None:
        assert self._file is not None
        folder = self._folder()
        with self._file.open("w", encoding="utf-8") as file:
            file.write(who)
            file.flush()
            os.fsync(file.fileno())  # the battery may be next
        _keep_entries(folder)

    def _forget(self) -> None:
        assert self._file is not None
        self._prepare()  # a folder that is not there is no success
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()
            _keep_entries(self._file.parent)

    def _folder(self) -> Path:
        assert self._file is not None
        folder = self._file.parent
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _keep_entries(folder: Path) -> None:
    """fsync the folder, so that the change survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _absolute(folder: str) -> Path:
    try:
        path = Path(folder).expanduser()
    except RuntimeError as error:  # ~ of nobody
        raise ConfigError(
            f"{folder!r}: {error}", field="latch_folder", remedy="give a full path"
        ) from error
    if not path.is_absolute():
        raise ConfigError(
            f"{folder!r} depends on where the node is started",
            field="latch_folder",
            remedy="give a full path, or one from ~",
        )
    return path
