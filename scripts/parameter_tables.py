"""Write docs/parameters.md: every parameter of every node, from the configurations in the code.

The dataclasses are the one place where parameters are described; run this after editing one
(``make docs``). A test compares.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from pathlib import Path
from typing import Any

from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig
from collab_llm_nodes.protocols.jupiter.worker_settings import WorkerConfig
from collab_llm_nodes.ros.managed_node import CommonConfig, ManagedNode
from collab_llm_nodes.ros.parameters import flatten
from collab_llm_nodes.ros.protocol_server import server_config

VERIFIER = """## The verifier's file

What `collab-llm verifier --config FILE` reads, YAML: `exits.queue` is the key `queue` of the
mapping `exits`. There is also `token`, but a `token_file` is better. [cloud.md](cloud.md) tells how
to run it.
"""

WORKER = """## The stage worker's file

What `collab-llm jupiter-worker --config FILE` reads, YAML. There is also `token`, and `next.token`,
but token files are better. [jupiter.md](jupiter.md) tells how to run workers.
"""

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parameters.md"
HEAD = """# Parameters

Every parameter of every node: its default, what it may be, what it means. Ranges are enforced, at
the start and when a parameter is set. *Fixed*: read when the node starts; the others can be set at
any time. *Option*: a request can set it for itself alone (`option_names` of `Generate`). Where that
would let more leave the robot than its operator has set, a request may only narrow it, as it says,
and it is fixed.
`ros2 param describe NODE NAME` says the same. A node does not start with a parameter that it does
not have; a node's name that is misspelt in a parameter file is told in the log.

<!-- Written by `make docs` from the dataclasses in collab_llm_nodes/. -->
"""


def nodes() -> list[tuple[str, type]]:
    """Name and configuration of every node of the package, in the order of their names."""
    found = []
    for file in sorted((ROOT / "collab_llm_nodes" / "nodes").glob("*.py")):
        module = importlib.import_module(f"collab_llm_nodes.nodes.{file.stem}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__ and issubclass(kind, ManagedNode):
                for base in getattr(kind, "__orig_bases__", ()):
                    if issubclass(typing.get_origin(base) or object, ManagedNode):
                        found.append((file.stem, typing.get_args(base)[0]))
    for protocol in registry.PROTOCOLS:
        entry = registry.find(protocol)
        if not any(issubclass(config, entry.config) for _, config in found):
            found.append((f"{protocol}_server", server_config(entry)))
    return sorted(found, key=lambda each: each[0])


def table(config: type) -> list[str]:
    """One line per parameter."""
    out = ["| parameter | default | range | meaning |", "|---|---|---|---|"]
    for name, field, default in flatten(config(), ""):
        facts = field.metadata
        fixed = " *Fixed.*" if facts.get("read_only") else ""
        if (direction := facts.get("per_request")) is not None:
            fixed += f" *Option{direction.label and ': '}{direction.label}.*"
        meaning = " ".join(facts.get("doc", "").split()).replace("|", "\\|")
        cells = (f"`{name}`", _default(default), _range(facts), f"{meaning}{fixed}")
        out.append(f"| {' | '.join(cells)} |")
    return out


def page() -> str:
    """The whole page."""
    out = [HEAD, "## Every node", "", *table(CommonConfig), ""]
    for name, config in nodes():
        out += [f"## {name}", "", *table(config), ""]
    out += [VERIFIER, *table(VerifierConfig), ""]
    out += [WORKER, *table(WorkerConfig), ""]
    return "\n".join(out)


def _default(value: Any) -> str:
    if isinstance(value, str) and (len(value) > 40 or "\n" in value):
        return "see the code"
    if isinstance(value, list) and len(value) > 4:
        return "see the code"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return '`""`' if value == "" else f"`{value}`"


def _range(facts: Any) -> str:
    if facts.get("choices"):
        return ", ".join(f"`{c}`" for c in facts["choices"])
    low, high = facts.get("low"), facts.get("high")
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    words = [
        f"at least {low:g}" if low is not None else "",
        f"at most {high:g}" if high is not None else "",
    ]
    return " ".join(filter(None, words))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
