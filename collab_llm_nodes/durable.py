"""Files that appear, or are replaced, as a whole or not at all; names that survive a power cut."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

BUILDING = ".building-"
"""Start of the names of folders in which files are written. A killed process leaves its own."""


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write to; what is there after the block takes the place of ``file``.

    A link stays, and the file that it names is replaced. A device or pipe is written to directly.

    Raises:
        OSError: it cannot be written.
    """
    file = file.resolve()
    if file.exists() and not file.is_file():
        yield file
        return
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=BUILDING) as place:
        part = Path(place) / file.name
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())  # a whole name never stands for half a file
        part.replace(file)


def sync_folder(folder: Path) -> None:
    """fsync the folder, so that new and removed names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
