"""The protocols of this package, one line each. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Collection

from collab_llm_nodes.errors import InvalidInput, did_you_mean
from collab_llm_nodes.protocols.base import Entry

PROTOCOLS: dict[str, str] = {  # name: module that holds its ENTRY; the first is the default
    "edge_cloud": "collab_llm_nodes.protocols.edge_cloud.entry",
    "collective": "collab_llm_nodes.protocols.collective.entry",
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


def unknown(name: str, known: Collection[str]) -> InvalidInput:
    """Return the error for a protocol ``name`` that is none of ``known``."""
    return InvalidInput(
        f"unknown protocol {name[:64]!r}",
        field="protocol",
        remedy=did_you_mean(name, known, f"one of {', '.join(known)}"),
    )
