"""Folders that appear whole: checkpoints and training data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to; at the end it takes the place of ``folder``.

    A reader never sees half of it.
    """
    building = folder.with_name(folder.name + ".part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    yield building
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(building, folder)
