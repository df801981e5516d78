"""Parameters of a node: declared and read as a frozen dataclass made with ``config.setting``."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import rclpy
import yaml
from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.node import Node

from collab_llm_nodes import programs
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError, did_you_mean
from collab_llm_nodes.protocols import registry

C = TypeVar("C")
_PRESET = "preset"


def declare(node: Node, config_type: type[C]) -> C:
    """Declare one parameter per field of ``config_type`` and return the configured instance.

    A nested dataclass becomes dotted names (``mission.executor.linear_speed``). Descriptors carry
    the field's documentation, range and read-only flag. Where the class has ``of_preset``, the
    parameter ``preset`` names the defaults of all others.

    Raises:
        ConfigError: a value is out of its range, of the wrong type, or breaks ``__post_init__``.
    """
    defaults = flatten(config_type(), "")
    of_preset = getattr(config_type, "of_preset", None)
    if of_preset is not None:
        _declare(node, *next(each for each in defaults if each[0] == _PRESET))
        chosen = flatten(of_preset(node.get_parameter(_PRESET).value), "")
        defaults = [each for each in chosen if each[0] != _PRESET]
    for each in defaults:
        _declare(node, *each)
    return read(node, config_type, {})


def _declare(node: Node, name: str, facts: dataclasses.Field[Any], default: Any) -> None:
    try:
        node.declare_parameter(name, default, _descriptor(facts, default))
    except (
        rclpy.exceptions.InvalidParameterValueException,
        rclpy.exceptions.InvalidParameterTypeException,
    ) as error:
        raise ConfigError(str(error), field=name, remedy=facts.metadata.get("doc", "")) from None


def flatten(defaults: Any, prefix: str) -> list[tuple[str, dataclasses.Field[Any], Any]]:
    """Return name, field and default of each parameter of a configuration, nested ones dotted."""
    flat = []
    for each in dataclasses.fields(defaults):
        if each.metadata.get("secret"):
            continue  # any node in the graph can read parameters
        default = getattr(defaults, each.name)
        if dataclasses.is_dataclass(default):
            flat += flatten(default, f"{prefix}{each.name}.")
        else:
            value = list(default) if isinstance(default, tuple) else default
            flat.append((prefix + each.name, each, value))
    return flat


def _descriptor(of: dataclasses.Field[Any], default: Any) -> ParameterDescriptor:
    facts = of.metadata
    descriptor = ParameterDescriptor(
        description=facts.get("doc", ""),
        read_only=facts.get("read_only", False),
        # An empty or absent default has no type for rclpy; from_mapping checks the value instead.
        dynamic_typing=default is None or default == [],
    )
    if facts.get("choices"):
        descriptor.additional_constraints = f"one of {', '.join(map(str, facts['choices']))}"
    low, high = facts.get("low"), facts.get("high")
    if low is None and high is None:
        return descriptor
    if isinstance(default, float):
        limits = (
            -sys.float_info.max if low is None else low,
            sys.float_info.max if high is None else high,
        )
        descriptor.floating_point_range = [
            FloatingPointRange(from_value=float(limits[0]), to_value=float(limits[1]))
        ]
    elif isinstance(default, int):
        limits = (-(2**62) if low is None else low, 2**62 if high is None else high)
        descriptor.integer_range = [
            IntegerRange(from_value=int(limits[0]), to_value=int(limits[1]), step=1)
        ]
    return descriptor


def read(node: Node, config_type: type[C], changes: dict[str, Any]) -> C:
    """Return the configuration that the parameters of ``node`` hold, with ``changes`` applied.

    Raises:
        ConfigError: a value is out of its range, of the wrong type, or breaks ``__post_init__``.
    """
    tree: dict[str, Any] = {}
    for name, _, default in flatten(config_type(), ""):
        value = changes[name] if name in changes else node.get_parameter(name).value
        if value is None and default == []:
            value = default  # rclpy reads an empty list in a parameter file as nothing
        *parents, leaf = name.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = list(value) if isinstance(value, (tuple, list)) else value
    return from_mapping(config_type, tree)


def refuse_unknown(node: Node) -> None:
    """Refuse an undeclared parameter of a file or ``-p``, such as a misspelt limit.

    rclpy would ignore it.

    Raises:
        ConfigError: naming the first one.
    """
    given = getattr(node, "_parameter_overrides", {})  # the name is rclpy's own
    known = node.get_parameters_by_prefix("")
    for name in given:
        if not node.has_parameter(name) and not name.startswith("qos_overrides."):
            raise ConfigError(
                f"{node.get_name()} has no such parameter",
                field=name,
                remedy=did_you_mean(name, known, "see docs/parameters.md"),
            )


def of_qos(names: Iterable[str]) -> bool:
    """Return True for the parameters that QoS overriding adds to a topic.

    rclpy declares and reads them.
    """
    return all(name.startswith("qos_overrides.") for name in names)


def warn_of_misspelt_nodes(nodes: list[Node], arguments: list[str]) -> None:
    """Warn of names in parameter files that nearly match a node of this package.

    rclpy ignores all names but the node's own. A file may serve other processes and packages, so
    any other unknown name is in order.
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
        with contextlib.suppress(yaml.YAMLError):  # rcl's own parser has read it
            content = yaml.safe_load(Path(file).read_bytes())
        for name in sorted({*_node_names(content)} - known):
            if remedy := did_you_mean(name, known):
                warning = f"{file}: no node reads the parameters of {name}; {remedy}"
                nodes[0].get_logger().warning(warning)


def _node_names(content: Any) -> Iterator[str]:
    """Yield the names in (a part of) a parameter file, without namespaces and wildcards."""
    for key, value in content.items() if isinstance(content, dict) else ():
        name = str(key).rpartition("/")[2]
        if isinstance(value, dict) and "ros__parameters" in value and "*" not in name:
            yield name
        if key != "ros__parameters":
            yield from _node_names(value)
