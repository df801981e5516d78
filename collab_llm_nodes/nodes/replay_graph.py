"""The nodes that turn a picture and a prompt into an action, composed; nothing here moves a robot.

Started by ``collab-llm replay --nodes``.
"""

from __future__ import annotations

from collab_llm_nodes.nodes.graph import NODES
from collab_llm_nodes.ros.program import run


def main() -> int:
    """Run the graph without its navigator."""
    nodes = [node for node in NODES if node != "navigator:Navigator"]
    return run(*(f"collab_llm_nodes.nodes.{node}" for node in nodes))


if __name__ == "__main__":
    raise SystemExit(main())
