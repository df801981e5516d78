"""What sees, thinks and decides, in one process. What moves the robot is in ``nodes/motion.py``."""

from __future__ import annotations

from collab_llm_nodes.nodes.camera_ingest import CameraIngest
from collab_llm_nodes.nodes.cloud_verifier_bridge import CloudVerifierBridge
from collab_llm_nodes.nodes.draft_vlm import DraftVlm
from collab_llm_nodes.nodes.generate_router import GenerateRouter
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.nodes.predraft_cache import PreDraftCacheNode
from collab_llm_nodes.ros.node import run


def main() -> int:
    """Run the graph."""
    return run(
        CameraIngest,
        CloudVerifierBridge,
        DraftVlm,
        PreDraftCacheNode,
        GenerateRouter,
        NavigationActionParser,
        Navigator,
    )


if __name__ == "__main__":
    raise SystemExit(main())
