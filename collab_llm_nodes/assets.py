"""Places of shipped models and configurations: source tree, colcon's or pip's installation."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

from collab_llm_nodes.errors import ConfigError, ModelError

_SOURCE = Path(__file__).resolve().parent.parent


def shipped_model(name: str) -> Path:
    """Return the folder of a model that ships with the package, such as ``nav-target``.

    Raises:
        ModelError: there is none of this name.
    """
    folder = _find(Path("models") / name)
    if folder is None:
        all_models = _find(Path("models"))
        shipped = sorted(p.name for p in all_models.iterdir() if p.is_dir()) if all_models else []
        raise ModelError(
            f"no shipped model is called {name!r}",
            field="path",
            remedy=f"give {', '.join((*shipped, 'the folder of a checkpoint'))}, or a hub id",
        )
    return folder


def config_file(name: str) -> Path:
    """Return the path of a shipped configuration file.

    Raises:
        ConfigError: there is none of this name.
    """
    file = _find(Path("config") / name)
    if file is None:
        raise ConfigError(
            f"no file, and no shipped configuration, is called {name!r}",
            field="config",
            remedy="give a file, or a name in the config folder",
        )
    return file


def _find(relative: Path) -> Path | None:
    prefixes = [*os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep), sys.prefix]
    places = [_SOURCE, *(Path(p) / "share" / "collab_llm" for p in prefixes if p)]
    return next((p / relative for p in places if (p / relative).exists()), None)


def version() -> str:
    """Return the version of this package."""
    try:
        return metadata.version("collab_llm_nodes")
    except metadata.PackageNotFoundError:
        return "unknown"
