"""Imports of the fork server: none starts a thread, opens a socket or loads a model."""

import torch

import collab_llm_nodes.nodes.cloud_verifier_bridge
import collab_llm_nodes.nodes.draft_vlm
import collab_llm_nodes.nodes.generate_router
import collab_llm_nodes.nodes.motion_guard
import collab_llm_nodes.nodes.navigation_action_parser
import collab_llm_nodes.nodes.navigator
import collab_llm_nodes.nodes.predraft_cache
import collab_llm_nodes.protocols.edge_cloud.service  # noqa: F401

torch.set_num_threads(1)
