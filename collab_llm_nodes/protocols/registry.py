"""The protocols of this package, one line each. Nothing is imported before it is asked for."""

from __future__ import annotations

import difflib
import importlib

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.base import Entry

PROTOCOLS: dict[str, str] = {  # name: module that holds its ENTRY
    "collective": "collab_llm_nodes.protocols.collective.entry",
    "edge_cloud": "collab_llm_nodes.protocols.edge_cloud.entry",
}


def find(name: str) -> Entry:
    """Return the entry of the protocol ``name``.

    Raises:
        InvalidInput: there is none; the remedy names the nearest.
    """
    if name not in PROTOCOLS:
        raise unknown(name, PROTOCOLS)
    entry = importlib.import_module(PROTOCOLS[name]).ENTRY
    assert isinstance(entry, Entry)
    assert entry.name == name
    return entry


def unknown(name: str, known: dict[str, str] | list[str]) -> InvalidInput:
    """Return the error for a protocol ``name`` that is not among ``known``."""
    close = difflib.get_close_matches(name, known, 1)
    suggestion = f"did you mean {close[0]}? " if close else ""
    return InvalidInput(
        f"unknown protocol {name[:64]!r}",
        field="protocol",
        remedy=f"{suggestion}one of {', '.join(known)}",
    )
