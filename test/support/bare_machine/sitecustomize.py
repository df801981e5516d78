"""Hides packages that are installed: run Python with this folder on PYTHONPATH.

HIDDEN_MODULES names them, with commas. To the program they are not there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

HIDDEN = frozenset(os.environ["HIDDEN_MODULES"].split(","))


class Visible(PathFinder):
    """Finds modules as Python does, but for the hidden ones."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[:] = [Visible if finder is PathFinder else finder for finder in sys.meta_path]
