"""Parameters of a protocol's server from a ROS 2 parameter file, without ROS 2."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.errors import ConfigError

_NODES_OWN = frozenset(
    {"deadline_s", "max_waiting", "health", "autostart", "introspection", "diagnostics"}
    | {"use_sim_time", "qos_overrides"}  # every ROS 2 node has them
)


def server_parameters(file: str, server: str, beside: Collection[str] = ()) -> dict[str, Any]:
    """Return the protocol's own parameters in ``file``, as a tree.

    Args:
        file: a path, or a name in the config folder.
        server: name of the node, such as ``minions_server``.
        beside: further parameters of the node that are not the protocol's.

    Raises:
        ConfigError: there is no such file, or it has no such parameters.
    """
    path = Path(file) if Path(file).is_file() else config_file(file)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        (parameters,) = (
            node["ros__parameters"] for name, node in content.items() if server in name
        )
        left = {name: value for name, value in parameters.items() if name not in _NODES_OWN}
    except (OSError, ValueError, yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
        example = f"config/{server.removesuffix('_server')}.yaml"
        raise ConfigError(
            f"{path} has no parameters of {server}", field="config", remedy=f"see {example}"
        ) from error
    return _nested({name: value for name, value in left.items() if name not in beside})


def _nested(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``parameters`` with ``a.b: 1`` written as ``a: {b: 1}``."""
    tree: dict[str, Any] = {}
    for name, value in parameters.items():
        *parents, leaf = str(name).split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = _nested(value) if isinstance(value, Mapping) else value
    return tree
