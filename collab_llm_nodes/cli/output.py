"""Output of the commands: the console, files of results, typed errors as one line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from collab_llm_nodes.durable import replacing
from collab_llm_nodes.ending import ended_at_once
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput, printable


class _Console(Console):
    """A console that prints text of models, documents and servers verbatim.

    Control characters, markup (``[/bold]``) and emoji codes (``:bug:``) have no effect.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, lines=True), style, control)


console = _Console()


def read_json(file: Path | None) -> dict[str, Any]:
    """Return the results in ``file``; empty without such a file.

    Raises:
        InvalidInput: it holds something else.
    """
    if file is None or not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass
    raise InvalidInput(
        f"{file} holds no results", field="--json", remedy="name another file, or remove it"
    )


def write_json(file: Path | None, results: dict[str, Any], *, report: bool = True) -> None:
    """Write ``results`` to ``file``, if it is not None; exit with 2 if that fails.

    Args:
        report: print that it is written.
    """
    if file is None:
        return
    text = json.dumps(results, indent=2, sort_keys=True) + "\n"
    try:
        if file.exists():  # perhaps a device
            file.write_text(text, encoding="utf-8")
        else:  # atomically: a script may wait for it to appear
            with replacing(file) as part:
                part.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(
            InvalidInput(str(error), field="--json", remedy="make room, or name another file"),
            2,
        )
    if report:
        console.print(f"wrote {file}")


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Keep libraries quiet during a server's imports, and let a signal end the process at once."""
    from collab_llm_nodes.transport.logs import QUIET, set_up_logging

    set_up_logging("text")  # until the settings say otherwise
    # Before they are imported: their lines on standard error would have another form.
    os.environ.setdefault("GRPC_VERBOSITY", QUIET)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with ended_at_once():
        yield


def port_writer(file: Path | None, address: str, model: str) -> Callable[[int], None]:
    """Return a callback for a server's port, which writes it to ``file`` if that is not None."""
    host = address.rpartition(":")[0]
    return lambda port: write_json(file, {"host": host, "port": port, "model": model})


def fail(error: CollabError, status: int = 1) -> NoReturn:
    """Print a typed error, or log it in a server's process, and end with ``status``."""
    from collab_llm_nodes.transport.logs import is_set_up

    if is_set_up():
        logging.getLogger(__name__).error("%s: %s", error.code, error)
        sys.exit(status)
    _Console(stderr=True).print(Text.assemble((error.code, "bold red"), f": {error}"))
    sys.exit(status)


_OF_ROS = re.compile(r"rclpy|rosidl_\w+|ament_\w+|collab_llm|\w+_(?:msgs|interfaces|srvs)")
"""Packages that come with ROS 2, or are generated from this package's interfaces."""


@contextlib.contextmanager
def requiring_ros() -> Iterator[None]:
    """Turn a failed import of ROS 2 into a typed error.

    Raises:
        ConfigError: ROS 2, or the package's built interfaces, cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        if not _OF_ROS.fullmatch((error.name or "").partition(".")[0]):
            raise
        raise ConfigError(
            f"this needs ROS 2 and the package's built interfaces: {error}",
            remedy="source them, or use .venv/bin/collab-llm after `make build`",
        ) from error
