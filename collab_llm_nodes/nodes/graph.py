"""The nodes that see, think and decide, in one process.

The nodes that move the robot are in another (``nodes/motion.py``).
"""

from __future__ import annotations

from collab_llm_nodes.ros.program import run

NODES = (  # names, since models take seconds to import
    "camera_ingest:CameraIngest",
    "cloud_verifier_bridge:CloudVerifierBridge",
    "draft_vlm:DraftVlm",
    "predraft_cache:PreDraftCacheNode",
    "generate_router:GenerateRouter",
    "navigation_action_parser:NavigationActionParser",
    "navigator:Navigator",
)


def main() -> int:
    """Run the graph."""
    return run(*(f"collab_llm_nodes.nodes.{node}" for node in NODES))


if __name__ == "__main__":
    raise SystemExit(main())
