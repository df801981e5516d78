"""Where the shipped models and configurations lie: in the source tree, or installed by colcon."""

from __future__ import annotations

import os
from pathlib import Path

from collab_llm_nodes.errors import ConfigError

_SOURCE = Path(__file__).resolve().parent.parent


def model_folder(name: str) -> Path:
    """Folder of a shipped model, ``nav-target`` or ``nav-draft``."""
    return _find(Path("models") / name)


def config_file(name: str) -> Path:
    """A shipped configuration file."""
    return _find(Path("config") / name)


def _find(relative: Path) -> Path:
    prefixes = os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep)
    places = [_SOURCE, *(Path(p) / "share" / "collab_llm" for p in prefixes if p)]
    for place in places:
        if (place / relative).exists():
            return place / relative
    looked = ", ".join(str(p) for p in places)
    raise ConfigError(f"{relative} is not in {looked}", field="path", remedy="run `make build`")
