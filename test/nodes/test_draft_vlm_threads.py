"""The threads of the draft model are its process's: set at its entry, not when the model loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_folder

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from rclpy.parameter import Parameter

from collab_llm_nodes.nodes.draft_vlm import DraftVlm

pytestmark = pytest.mark.ros


def test_a_node_in_a_process_of_others_leaves_its_threads_alone(ros_graph: Any) -> None:
    before = torch.get_num_threads()
    wanted = before + 2
    values = {"model.path": str(tiny_folder("llama")), "model.threads": wanted}
    node = DraftVlm(
        context=ros_graph.context,
        parameter_overrides=[Parameter(name, value=value) for name, value in values.items()],
    )
    ros_graph.add(node)
    try:
        node.start()
        assert torch.get_num_threads() == before
        node.enter_process()  # as ``run`` does, at the start of a process of its own
        assert torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)
        ros_graph.do(node.stop)
