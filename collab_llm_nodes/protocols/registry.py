"""The protocols of this package, one line each. Each is imported when it is first used."""

from __future__ import annotations

import importlib
from collections.abc import Collection

from collab_llm_nodes.errors import ConfigError, InvalidInput, did_you_mean, quoted
from collab_llm_nodes.protocols import options
from collab_llm_nodes.protocols.base import Entry

PROTOCOLS: dict[str, str] = {  # name: module that holds its ENTRY; the first is the default
    "edge_cloud": "collab_llm_nodes.protocols.edge_cloud.entry",
    "collective": "collab_llm_nodes.protocols.collective.entry",
    "minion": "collab_llm_nodes.protocols.minions.minion_entry",
    "minions": "collab_llm_nodes.protocols.minions.entry",
    "dragon": "collab_llm_nodes.protocols.dragon.entry",
    "jupiter": "collab_llm_nodes.protocols.jupiter.entry",
}


def find(name: str) -> Entry:
    """Return the entry of the protocol ``name``.

    Raises:
        InvalidInput: there is none; the remedy names the nearest.
        ConfigError: its line or its entry is wrong.
    """
    if name not in PROTOCOLS:
        raise unknown(name, PROTOCOLS)
    line = f'"{name}": "{PROTOCOLS[name]}" of protocols/registry.py'
    try:
        entry = getattr(importlib.import_module(PROTOCOLS[name]), "ENTRY", None)
    except ImportError as error:
        raise ConfigError(f"{error}", field=line, remedy="name a module that exists") from error
    if not isinstance(entry, Entry):
        raise ConfigError("the module has no ENTRY", field=line, remedy="end it in an Entry")
    if entry.name != name:
        raise ConfigError(f"its ENTRY is {entry.name!r}", field=line, remedy="use one name")
    options.names(entry.config())  # raises for an option that no request could set
    return entry


def unknown(name: str, known: Collection[str]) -> InvalidInput:
    """Return the error for a protocol ``name`` that is none of ``known``."""
    return InvalidInput(
        f"unknown protocol {quoted(name)}",
        field="protocol",
        remedy=did_you_mean(name, known, f"one of {', '.join(known)}"),
    )
