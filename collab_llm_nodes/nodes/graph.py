"""All nodes of the robot composed in one process, with or without the simulator."""

from __future__ import annotations

import sys

from collab_llm_nodes.nodes.camera_ingest import CameraIngest
from collab_llm_nodes.nodes.cloud_verifier_bridge import CloudVerifierBridge
from collab_llm_nodes.nodes.draft_vlm import DraftVlm
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.nodes.predraft_cache import PreDraftCacheNode
from collab_llm_nodes.nodes.ros import run

ROBOT = (
    CameraIngest,
    CloudVerifierBridge,
    DraftVlm,
    PreDraftCacheNode,
    NavigationActionParser,
    Navigator,
)


def main() -> int:
    """Run the graph; ``--sim`` adds the simulated robot."""
    arguments = sys.argv[1:]
    nodes: list[type] = list(ROBOT)
    if "--sim" in arguments:
        from collab_llm_nodes.nodes.sim_go2 import SimGo2  # MuJoCo is not wanted on a robot

        nodes.insert(0, SimGo2)
    return run(*nodes)


if __name__ == "__main__":
    raise SystemExit(main())
