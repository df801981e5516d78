"""The nodes that turn a picture and a prompt into an action, composed; nothing here moves a robot.

Started by ``collab-llm replay --nodes``.
"""

from __future__ import annotations

from collab_llm_nodes.nodes.camera_ingest import CameraIngest
from collab_llm_nodes.nodes.cloud_verifier_bridge import CloudVerifierBridge
from collab_llm_nodes.nodes.draft_vlm import DraftVlm
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
from collab_llm_nodes.nodes.predraft_cache import PreDraftCacheNode
from collab_llm_nodes.ros.node import run


def main() -> int:
    """Run them."""
    return run(
        CameraIngest, CloudVerifierBridge, DraftVlm, PreDraftCacheNode, NavigationActionParser
    )


if __name__ == "__main__":
    raise SystemExit(main())
