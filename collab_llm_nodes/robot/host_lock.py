"""Exclusive use of a robot among the processes of one machine.

The kernel releases the lock when its process ends, even one that is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path


class HostLock:
    """An exclusive lock on a file that names the process holding it.

    Args:
        name: kind of node, ROS domain and namespace.
        folder: of the file; by default one that all users of this machine share.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self._file = (folder or _shared_folder()) / f"collab_llm.{name}.lock"
        self._descriptor: int | None = None

    def take(self) -> str:
        """Take the lock if it is free; return "", or why it is not ours."""
        if self._descriptor is not None:
            return ""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self._file, flags, 0o600)
        except OSError as error:  # another user's, or a link
            return f"{self._file} cannot be locked, {error.strerror}: see whose it is, remove it"
        try:
            why = self._lock(descriptor)
        except OSError as error:
            why = f"{self._file} cannot be locked, {error.strerror}"
        if why:
            os.close(descriptor)
        else:
            self._descriptor = descriptor
        return why

    def _lock(self, descriptor: int) -> str:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace")
            return f"process {holder if holder.isdigit() else '?'} has locked {self._file}"
        found = os.fstat(descriptor)
        if found.st_nlink != 1 or not stat.S_ISREG(found.st_mode):
            # A link to another file; or its last holder has just removed it, and we try again.
            return f"{self._file} is no file of its own: remove it"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return ""

    def release(self) -> None:
        """Release the lock; safe to call twice."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()  # another user could not open it
            os.close(self._descriptor)
            self._descriptor = None


def _shared_folder() -> Path:
    """Return a folder that is the same for all users: a service and a terminal have two."""
    folder = Path("/run/lock")
    try:
        mode = folder.stat().st_mode
    except OSError:
        mode = 0
    everybodys = mode & stat.S_ISVTX and mode & stat.S_IWOTH
    return folder if everybodys else Path(tempfile.gettempdir())
