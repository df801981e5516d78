"""``collab-llm bench documents``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.output import console


def bench_documents(
    folder: Annotated[Path, typer.Argument(help="Folder for the text files.", file_okay=False)],
    root: Annotated[
        Path,
        typer.Option(help="/, or the folder into which Debian packages were unpacked."),
    ] = Path("/"),
) -> None:
    """Write the manuals of installed Debian packages as text files, for questions about them.

    Each chapter becomes FOLDER/PACKAGE_VERSION/CHAPTER.txt.
    """
    from collab_llm_lab.bench.documents import write_debian_documents

    written = write_debian_documents(root, folder)
    console.print(f"{len(written)} chapters in {folder}", highlight=False)
