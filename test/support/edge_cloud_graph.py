"""The three nodes of edge-cloud decoding with a verifier, all on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rclpy.action import ActionClient
from rclpy.parameter import Parameter
from sensor_msgs.msg import CompressedImage
from tiny_models import scene, tiny_folder, tiny_model

from collab_llm.action import Generate
from collab_llm.msg import Draft, EarlyExit, GeneratedText, LinkState, Verdict
from collab_llm.srv import EdgeCloudGenerate
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import TargetConfig
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.nodes.cloud_verifier_bridge import CloudVerifierBridge
from collab_llm_nodes.nodes.draft_vlm import DraftVlm
from collab_llm_nodes.nodes.predraft_cache import PreDraftCacheNode
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.ros.qos import RESULT, STATE
from collab_llm_nodes.transport.server import ServerHandle

ARCHITECTURE = "qwen2_vl"
EXITS = (1, 2, 3)
MAX_TOKENS = 12


@pytest.fixture
def target() -> Engine:
    return Engine(tiny_model(ARCHITECTURE, seed=0, exit_layers=EXITS))


@pytest.fixture
def verifier(target: Engine) -> Iterator[ServerHandle]:
    config = VerifierConfig(
        model=TargetConfig(path=str(tiny_folder(ARCHITECTURE, 0)), exit_layers=EXITS),
        address="127.0.0.1:0",
        emulated_compute_s=0.02,  # exits of a pass of half a millisecond are never sent
    )
    with start_server(config, target) as handle:
        yield handle


class Edge:
    """The three nodes and a client of theirs.

    Args:
        port: of the verifier.
        bridge, draft_vlm: further parameters of these nodes.
    """

    def __init__(self, graph: Any, port: int, *, bridge: Any = None, **draft_vlm: Any) -> None:
        self.graph = graph
        self.bridge = self._start(
            CloudVerifierBridge,
            {
                "verifier.address": f"127.0.0.1:{port}",
                "verifier.link.verdict_deadline_s": 3.0,
                **(bridge or {}),
            },
        )
        folder = tiny_folder(ARCHITECTURE, 0)
        self.vlm = self._start(
            DraftVlm, {"model.path": str(folder), "client.gamma": 3, **draft_vlm}
        )
        self.cache = self._start(PreDraftCacheNode, {})
        self.user = graph.node("user")
        self.drafts = graph.collect(self.user, Draft, "draft", RESULT)
        self.exits = graph.collect(self.user, EarlyExit, "early_exit", RESULT)
        self.verdicts = graph.collect(self.user, Verdict, "verdict", RESULT)
        self.texts = graph.collect(self.user, GeneratedText, "generated_text", RESULT)
        self.links = graph.collect(self.user, LinkState, "link_state", STATE)
        self.action = ActionClient(self.user, Generate, "edge_cloud/generate")
        self.service = self.user.create_client(EdgeCloudGenerate, "edge_cloud_generate")
        graph.wait_for(self.action.server_is_ready)
        graph.wait_for(self.service.service_is_ready)
        graph.wait_for(lambda: self.user.count_subscribers("draft") >= 3)

    def _start(self, node_type: type, parameters: dict[str, Any]) -> Any:
        overrides = [Parameter(name, value=value) for name, value in parameters.items()]
        node = node_type(context=self.graph.context, parameter_overrides=overrides)
        self.graph.add(node)
        node.start()
        return node

    def stop(self) -> None:
        for node in (self.cache, self.vlm, self.bridge):
            self.graph.do(node.stop)  # what is destroyed must not be waited on meanwhile

    def goal(self, **fields: Any) -> Generate.Goal:
        goal = Generate.Goal(max_tokens=MAX_TOKENS, prompt="go to the red ball", deadline_s=20.0)
        goal.images = [CompressedImage(format="jpeg", data=scene(1))]
        goal.header.stamp.sec = 77
        for name, value in fields.items():
            setattr(goal, name, value)
        return goal

    def generate(self, **fields: Any) -> Generate.Result:
        handle = self.graph.ask(self.action.send_goal_async, self.goal(**fields))
        assert handle.accepted
        return self.graph.ask(handle.get_result_async).result


@pytest.fixture
def edge(ros_graph: Any, verifier: ServerHandle) -> Iterator[Edge]:
    graph = Edge(ros_graph, verifier.port)
    yield graph
    graph.stop()


@pytest.fixture
def expected(target: Engine) -> tuple[int, ...]:
    runner = InProcessRunner(Engine(tiny_model(ARCHITECTURE, seed=0)), target, gamma=3)
    prompt = Prompt("go to the red ball", (scene(1),))
    return runner.generate(prompt, SamplingConfig(), MAX_TOKENS).tokens
