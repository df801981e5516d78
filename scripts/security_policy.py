"""Write config/sros2_policy.xml: which topics, services and actions each process may use.

Starts the robot's nodes in this process and asks the graph what they have made. Run this after a
node got another topic (``make policy``); a test compares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from collab_llm.action import Navigate
from collab_llm_nodes.agents.graph import AgentGraph
from collab_llm_nodes.agents.settings import AgentConfig
from collab_llm_nodes.nodes.graph import NODES
from collab_llm_nodes.nodes.instruct import InstructionClient

ROOT = Path(__file__).resolve().parents[1]
POLICY = ROOT / "config" / "sros2_policy.xml"
HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<!-- SROS 2: what each process of go2.launch.py may publish, hear, offer and ask for. How to use it:
     docs/safety.md. Written by `make policy` from the nodes in collab_llm_nodes/. -->
"""

ENCLAVES = {
    "graph": NODES,
    "motion": ("motion_guard:MotionGuard", "go2_driver:Go2Driver"),
    "motion_watchdog": ("motion_watchdog:MotionWatchdog",),
    "dashboard": ("dashboard:Dashboard",),
    "markers": ("markers:Markers",),
}
"""Processes of go2.launch.py and their nodes."""
AGENTS = "agents"
"""The process of ``collab-llm mcp``."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "camera_ingest": {"source": "videohub", "field_of_view": 90.0},
    "cloud_verifier_bridge": {"verifier.address": "127.0.0.1:9"},
    "draft_vlm": {"model.path": str(ROOT / "models" / "nav-draft")},
    "dashboard": {"port": 0},
}

FURTHER = {
    "generate_router": {("actions", "call"): {"*/generate"}},  # for each protocol asked for
    "go2_driver": {("topics", "subscribe"): {"/lf/sportmodestate"}},  # by its parameter state_topic
    "instruct": {  # while it announces an instruction and waits for the protocol that will answer
        ("topics", "publish"): {"pending_instruction"},
        ("services", "reply"): {"confirm_instruction"},
        ("actions", "call"): {"*/generate"},
    },
}
"""Names that a node uses only for some requests or parameters."""

_PEERS = "emergency_stop/*"
"""The guards' and drivers' topics, whose names hold the number of their process (ros/peers.py)."""
_ACTION = "/_action/"
_SPACE = "/robot"
"""Namespace of the nodes while they are asked, which shows the names that do not depend on it."""
_VERBS = {
    "topics": ("publish", "subscribe"),
    "services": ("reply", "request"),
    "actions": ("execute", "call"),
}


def endpoints(node: Any) -> dict[tuple[str, str], set[str]]:
    """Return the names that ``node`` uses, by section of a policy and verb.

    Those in the node's namespace are relative to it.

    The topics and services of an action are told by the action's name.
    """
    name, space = node.get_name(), node.get_namespace()
    asked = {
        ("topics", "publish"): node.get_publisher_names_and_types_by_node,
        ("topics", "subscribe"): node.get_subscriber_names_and_types_by_node,
        ("services", "reply"): node.get_service_names_and_types_by_node,
        ("services", "request"): node.get_client_names_and_types_by_node,
    }
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for use, names in FURTHER.get(name, {}).items():
        found[use] |= names
    for (section, verb), ask in asked.items():
        for topic, _ in ask(name, space):
            action, is_action, _ = topic.partition(_ACTION)
            if not is_action:
                found[section, verb].add(_named(topic))
            elif section == "services":
                found["actions", "execute" if verb == "reply" else "call"].add(_named(action))
    return found


def policy(nodes: dict[str, list[Any]]) -> str:
    """Return the policy for the nodes of each enclave."""
    root = ElementTree.Element("policy", version="0.2.0")
    enclaves = ElementTree.SubElement(root, "enclaves")
    for enclave, members in nodes.items():
        element = ElementTree.SubElement(enclaves, "enclave", path=f"/collab_llm/{enclave}")
        profiles = ElementTree.SubElement(element, "profiles")
        for node in members:
            name = node.get_name()
            profile = ElementTree.SubElement(profiles, "profile", ns="/", node=name)
            found = endpoints(node)
            for section, verbs in _VERBS.items():
                for verb in verbs:
                    names = sorted(found[section, verb])
                    if not names:
                        continue
                    group = ElementTree.SubElement(profile, section, {verb: "ALLOW"})
                    for each in names:
                        ElementTree.SubElement(group, section[:-1]).text = each
    ElementTree.indent(root, "  ")
    return HEAD + ElementTree.tostring(root, encoding="unicode") + "\n"


@contextmanager
def made(**node_arguments: Any) -> Iterator[dict[str, list[Any]]]:
    """Yield the nodes of each enclave, configured and active. Needs a context of rclpy."""
    with ExitStack() as ending:
        nodes = {
            enclave: [_started(member, ending, node_arguments) for member in members]
            for enclave, members in ENCLAVES.items()
        }
        robot = ending.enter_context(AgentGraph(AgentConfig(), _SPACE))
        asking = InstructionClient(
            Navigate.Goal(), confirm=True, namespace=_SPACE, **node_arguments
        )
        ending.callback(asking.node.destroy_node)
        yield {**nodes, AGENTS: [robot.node, asking.node]}


def _started(member: str, ending: ExitStack, node_arguments: dict[str, Any]) -> Any:
    """Return the node ``module:class``, configured and active until ``ending``."""
    from rclpy.parameter import Parameter

    module, kind = member.split(":")
    overrides = [Parameter(n, value=v) for n, v in PARAMETERS.get(module, {}).items()]
    cls = getattr(import_module(f"collab_llm_nodes.nodes.{module}"), kind)
    node = cls(parameter_overrides=overrides, namespace=_SPACE, **node_arguments)
    ending.callback(node.destroy_node)
    node.start()
    ending.callback(node.stop)
    return node


def _named(name: str) -> str:
    """Return ``name`` as a policy has it; the profile has the namespace."""
    relative = name.removeprefix(f"{_SPACE}/")
    return _PEERS if relative.startswith("emergency_stop/_") else relative


def main() -> None:
    """Write the policy."""
    import rclpy

    rclpy.init()
    with made() as nodes:
        POLICY.write_text(policy(nodes), encoding="utf-8")
    rclpy.shutdown()


if __name__ == "__main__":
    main()
