"""The emergency stop on disk: a pressed stop outlives the process.

A disk can take seconds, so a thread of its own writes, and no caller waits for it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from collab_llm_nodes.durable import sync_folder
from collab_llm_nodes.errors import ConfigError

UNREADABLE = "an unknown source: the file that names it cannot be read"
_RETRY_S = 1.0
_CLOSE_S = 1.0


class Latch:
    """The emergency stop of one guard: a file that exists until the reset, and names its source.

    Args:
        folder: of the files of all guards of this machine; "" keeps nothing.
        name: the guard's, with its namespace.
        on_error: called in the latch's thread with the reason why nothing can be kept.

    Attributes:
        error: why the file is not up to date, while writing is retried; or "".

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
        """Return the source of a pressed stop, or "". An unreadable file counts as pressed."""
        if self._file is None:
            return ""
        try:
            return self._file.read_text(encoding="utf-8").strip() or UNREADABLE
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            return f"{UNREADABLE} ({error})"

    def set(self, source: str) -> None:
        """Persist that ``source`` pressed the stop."""
        if self._file is not None:
            self._jobs.put(partial(self._write, source))

    def clear(self) -> None:
        """Persist the reset."""
        if self._file is not None:
            self._jobs.put(self._remove)

    def close(self) -> None:
        """Finish writing, within a second."""
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
            with contextlib.suppress(queue.Empty):  # then retry the same job
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

    def _write(self, source: str) -> None:
        assert self._file is not None
        folder = self._folder()
        with self._file.open("w", encoding="utf-8") as file:
            file.write(source)
            file.flush()
            os.fsync(file.fileno())  # a power cut may follow
        sync_folder(folder)

    def _remove(self) -> None:
        assert self._file is not None
        self._prepare()  # a missing folder is no success
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()
            sync_folder(self._file.parent)

    def _folder(self) -> Path:
        assert self._file is not None
        folder = self._file.parent
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _absolute(folder: str) -> Path:
    try:
        path = Path(folder).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
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
