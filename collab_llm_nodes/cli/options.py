"""Options that several commands have, and their checks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.errors import ConfigError


def writable(file: Path | None) -> Path | None:
    """Make the folder of ``file``; refuse before the work starts rather than lose its results.

    Raises:
        typer.BadParameter: ``file`` is a folder, or cannot be written.
    """
    if file is None:
        return None
    try:
        if file.is_dir():
            raise typer.BadParameter(f"{file} is a folder; name a file")
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            writes = os.access(file, os.W_OK)
        else:
            # A file is made for a moment: for root every folder passes os.access, /proc as well.
            # One of another name: a script may wait for ``file`` to appear.
            with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f"{file.name}."):
                writes = True
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write {file}: {error.strerror}; name a file elsewhere"
        ) from error
    if not writes:
        raise typer.BadParameter(f"no permission to write {file}; name a file elsewhere")
    return file


def require(module: str, package: str) -> None:
    """Check that an optional package is installed.

    Raises:
        ConfigError: it is not.
    """
    if find_spec(module) is None:
        raise ConfigError(
            f"the Python package {package} is not installed",
            field=module,
            remedy=f"pip install -r requirements/{module}.txt",
        )


def refuse_given(context: typer.Context, names: Collection[str], remedy: str) -> None:
    """Refuse options without an effect here.

    Args:
        names: of the parameters, as the command's function has them.

    Raises:
        ConfigError: one is given, be it with its default.
    """
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                "has no effect here", field=option.opts[0], remedy=f"leave it out, or {remedy}"
            )


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write the results here as JSON.", callback=writable),
]


def ending_in(*suffixes: str) -> Callable[[Path | None], Path | None]:
    """Return ``writable`` for files with one of these suffixes."""

    def check(file: Path | None) -> Path | None:
        if file is not None and file.suffix not in suffixes:
            raise typer.BadParameter(f"{file} should end in {' or '.join(suffixes)}")
        return writable(file)

    return check


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="YAML with its settings: a file, or the name of a shipped one."),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model: directory or hub id.")]
AddressOption = Annotated[str | None, typer.Option("--address", help="host:port to listen on.")]
ListeningOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write address, port and model here.", callback=writable),
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", help="Write the plot here.", callback=ending_in(".png", ".svg", ".pdf")),
]
ComputeOption = Annotated[
    float,
    typer.Option(
        help="Seconds a pass takes at least: an emulated larger model.", min=0.0, max=60.0
    ),
]
SeedOption = Annotated[  # below 2**32: derived seeds add to it
    int, typer.Option("--seed", help="Key of everything random.", min=0, max=2**32 - 1)
]
