"""Warnings of misspelt node names in parameter files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from rclpy.node import Node

from collab_llm_nodes import programs
from collab_llm_nodes.errors import did_you_mean
from collab_llm_nodes.protocols import registry


def warn_of_misspelt_nodes(nodes: list[Node], arguments: list[str]) -> None:
    """Warn of names in parameter files that are nearly the name of a node of ours.

    rclpy reads what is under its node's name and ignores the rest. A file may serve other processes
    and other packages, so any other foreign name is in order.
    """
    files = {file.stem for file in Path(programs.__file__).parent.glob("nodes/*.py")}
    several = {"graph", "motion", "protocol_server"}
    known = files & set(vars(programs)) - several  # a node has its file's name
    known |= {f"{protocol}_server" for protocol in registry.PROTOCOLS}
    known |= {node.get_name() for node in nodes}
    for option, file in pairwise(arguments):
        if option != "--params-file":
            continue
        content: Any = None
        with contextlib.suppress(yaml.YAMLError):  # rcl has read it, by a parser of its own
            content = yaml.safe_load(Path(file).read_bytes())
        for name in sorted({*_node_names(content)} - known):
            if remedy := did_you_mean(name, known):
                told = f"{file}: nobody reads the parameters of {name}; {remedy}"
                nodes[0].get_logger().warning(told)


def _node_names(content: Any) -> Iterator[str]:
    """Yield the names in (a part of) a parameter file, without namespaces and wildcards."""
    for key, value in content.items() if isinstance(content, dict) else ():
        name = str(key).rpartition("/")[2]
        if isinstance(value, dict) and "ros__parameters" in value and "*" not in name:
            yield name
        if key != "ros__parameters":
            yield from _node_names(value)
