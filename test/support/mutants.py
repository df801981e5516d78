"""Modules with one line changed: a law's checks must notice."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def mutated(
    module: ModuleType, old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """Return ``module`` with ``new`` in place of ``old``, which must occur once."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, "the mutation no longer fits the source"
    file = folder / "mutant.py"
    file.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", file)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutant", mutant)
    spec.loader.exec_module(mutant)
    return mutant
