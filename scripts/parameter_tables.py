"""Write docs/parameters.md: every parameter of every node and server, from the code's dataclasses.

The dataclasses are the one place where parameters are described; run this after editing one
(``make docs``). A test compares.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.dragon.settings import DragonCloudConfig
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

CLOUD = """## The file of DRAGON's cloud side

What `collab-llm dragon-cloud --config FILE` reads, YAML. There is also `token`, but a `token_file`
is better. [dragon.md](dragon.md) tells how to run it.
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
not have; a node's name that is misspelt in a parameter file is logged.

Parameters that several nodes or prefixes have in common stand in a group once. The list below a
node's table names its groups and their prefixes: `remote_model.*` with a group that has `at` means
`remote_model.at`.

<!-- Written by `make docs` from the dataclasses in collab_llm_nodes/. -->
"""


def nodes() -> list[tuple[str, type]]:
    """Return name and configuration of every node of the package, sorted by name."""
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


Row = tuple[str, str, str, str]
"""Name, default, range and meaning of a parameter."""
COLUMNS = ["| parameter | default | range | meaning |", "|---|---|---|---|"]
_LEAST = 4
"""Rows from which equal groups of parameters are printed once."""


@dataclass(frozen=True)
class Group:
    """Parameters that one dataclass declares, with those of its nested dataclasses by name."""

    kind: str
    about: str
    rows: tuple[Row, ...]
    nested: tuple[tuple[str, Group], ...]

    @property
    def size(self) -> int:
        """Rows of this group and of all within it."""
        return len(self.rows) + sum(group.size for _, group in self.nested)

    def walk(self, prefix: str) -> Iterator[tuple[str, Group]]:
        """Yield this group and all within it, each with the prefix of its parameters."""
        yield prefix, self
        for name, group in self.nested:
            yield from group.walk(f"{prefix}{name}.")


def table(config: type) -> list[str]:
    """Return a table with a line per parameter of ``config``."""
    return [*COLUMNS, *(_line(_row(*each)) for each in flatten(config(), ""))]


def page() -> str:
    """Return the whole page; equal groups of several nodes or prefixes stand in it once."""
    configs = nodes()
    declared = {name: _declared(config()) for name, config in configs}
    places: dict[Group, list[tuple[str, str]]] = {}
    parents: dict[Group, set[Group]] = {}
    for name, groups in declared.items():
        for group in groups:
            for prefix, within in group.walk(""):
                places.setdefault(within, []).append((name, prefix))
                for _, child in within.nested:
                    parents.setdefault(child, set()).add(within)

    def alone(group: Group) -> bool:
        """Return True if the group has a section of its own."""
        if group.size < _LEAST or len(places[group]) < 2:
            return False
        counts = {len(places[parent]) for parent in parents.get(group, ())}
        return counts != {len(places[group])} or not any(map(alone, parents[group]))

    shared = sorted(filter(alone, places), key=lambda group: (group.kind, places[group]))
    titles: dict[Group, str] = {}
    for group in shared:
        title = f"Group {group.kind}"
        taken = sum(other.split(",")[0] == title for other in titles.values())
        titles[group] = f"{title}, {taken + 1}" if taken else title

    out = [HEAD, "## Every node", "", *table(CommonConfig), ""]
    for name, groups in declared.items():
        out += [f"## {name}", "", *_section(groups, titles), ""]
    for group in shared:
        users: dict[str, list[str]] = {}
        for name, prefix in places[group]:
            users.setdefault(name, []).append(prefix)
        lines = (
            f"`{name}`" + (f" ({', '.join(f'`{p}*`' for p in prefixes)})" if any(prefixes) else "")
            for name, prefixes in users.items()
        )
        out += [f"## {titles[group]}", "", f"{group.about} In {', '.join(lines)}.", ""]
        out += [*_section([group], {g: t for g, t in titles.items() if g is not group}), ""]
    out += [VERIFIER, *table(VerifierConfig), ""]
    out += [WORKER, *table(WorkerConfig), ""]
    out += [CLOUD, *table(DragonCloudConfig), ""]
    return "\n".join(out)


def _section(groups: Sequence[Group], titles: Mapping[Group, str]) -> list[str]:
    """Return a table of the parameters of ``groups``, with links to groups that have a title."""
    lines: list[str] = []
    links: list[str] = []

    def add(prefix: str, group: Group) -> None:
        if group in titles:
            title = titles[group]
            anchor = title.lower().replace(",", "").replace(" ", "-")
            link = f"[{title}](#{anchor})"
            links.append(f"- `{prefix}*`: {link}" if prefix else f"- {link}")
            return
        lines.extend(_line((prefix + row[0], *row[1:])) for row in group.rows)
        for name, within in group.nested:
            add(f"{prefix}{name}.", within)

    for group in groups:
        add("", group)
    body = [*COLUMNS, *lines] if lines else []
    return [*body, *([""] if body and links else []), *links]


def _declared(config: Any) -> list[Group]:
    """Return the parameters of a node's configuration, grouped by the class that declares them."""
    found: dict[type, list[dataclasses.Field[Any]]] = {}
    for field in dataclasses.fields(config):
        kind = next(
            k for k in type(config).__mro__ if field.name in vars(k).get("__annotations__", {})
        )
        found.setdefault(kind, []).append(field)
    return [_group(kind, config, fields) for kind, fields in found.items()]


def _group(kind: type, config: Any, fields: Sequence[dataclasses.Field[Any]]) -> Group:
    rows: list[Row] = []
    nested: list[tuple[str, Group]] = []
    for field in fields:
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            nested.append((field.name, _group(type(value), value, dataclasses.fields(value))))
        elif not field.metadata.get("secret"):
            rows.append(_row(field.name, field, value))
    about = (inspect.getdoc(kind) or "").partition("\n")[0]
    return Group(kind.__name__.removesuffix("Config"), about, tuple(rows), tuple(nested))


def _row(name: str, field: dataclasses.Field[Any], default: Any) -> Row:
    facts = field.metadata
    fixed = " *Fixed.*" if facts.get("read_only") else ""
    if (direction := facts.get("per_request")) is not None:
        fixed += f" *Option{direction.label and ': '}{direction.label}.*"
    meaning = " ".join(facts.get("doc", "").split()).replace("|", "\\|")
    default = list(default) if isinstance(default, tuple) else default
    return name, _default(default), _range(facts), f"{meaning}{fixed}"


def _line(row: Row) -> str:
    return f"| `{row[0]}` | {' | '.join(row[1:])} |"


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
