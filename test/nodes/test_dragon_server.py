"""The node of DRAGON: answers of two sides over gRPC, by action and service; what may go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

import yaml
from action_msgs.msg import GoalStatus
from dragon_bed import QUESTION, TEXTS
from dragon_served import LONG_S, PRIVATE, TOKENS, Served, cloud_with
from dragon_sides import Tables, TableSide
from std_msgs.msg import Header
from tiny_models import tiny_folder

from collab_llm.action import Generate
from collab_llm.msg import GeneratedText, Status
from collab_llm_nodes.decoding.aggregation import Party
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.dragon.client import CloudConfig, DragonClient
from collab_llm_nodes.protocols.dragon.process import cloud_process, wait_for_cloud
from collab_llm_nodes.protocols.dragon.service import CloudServiceConfig, DragonService
from collab_llm_nodes.ros.convert import figures_from
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.transport.server import ServerHandle

pytestmark = pytest.mark.ros

TOGETHER = {
    GeneratedText.ACCEPTED,
    GeneratedText.RECOVERED,
    GeneratedText.DEVICE,
    GeneratedText.CLOUD,
}
SEED = 3
"""With it the answer is not over after three tokens."""
Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def cloud() -> Iterator[int]:
    """Port of a cloud with public documents."""
    made = cloud_with()
    yield made.port
    made.stop()


@pytest.fixture
def held() -> Iterator[int]:
    """Port of a cloud that falls silent in the midst of each answer."""
    made = cloud_with(passes=3)
    yield made.port
    made.stop()


@pytest.fixture
def serve(ros_graph: Any, tmp_path: Path, cloud: int) -> Iterator[Serve]:
    """Start nodes with a store of their own; they are stopped in the end."""
    made: list[Served] = []

    def start(port: int = cloud, **parameters: Any) -> Served:
        made.append(Served(ros_graph, tmp_path / "private", port, **parameters))
        return made[-1]

    yield start
    for served in made:
        ros_graph.do(served.server.stop)


def test_an_answer_of_both_sides_by_service_and_by_action(serve: Serve) -> None:
    served = serve()
    assert served.add(*PRIVATE).status == Status()
    header = Header(frame_id="here")
    answer = served.ask(header=header, seed=3)
    assert (answer.status.code, answer.status.message) == (Status.OK, "")
    assert (answer.header, answer.verified) == (header, True)
    assert 0 < len(answer.tokens) <= TOKENS
    assert set(answer.sources) <= TOGETHER
    told = figures_from(answer.metrics)
    assert (told["device_documents"], told["cloud_documents"]) == (2, 2)
    assert answer.metrics.bytes_up > 0
    served.graph.wait_for(lambda: served.found)
    found = served.found[0]
    assert (found.session_id, found.prompt, found.header) == (answer.session_id, QUESTION, header)
    assert set(found.names) == set(PRIVATE)
    assert set(found.texts) == {TEXTS[name] for name in PRIVATE}
    assert sum(found.weights) == pytest.approx(1.0)

    feedback: list[Generate.Feedback] = []
    ended = served.result(served.send(feedback, seed=3, protocol="dragon"))
    assert ended.status == GoalStatus.STATUS_SUCCEEDED
    assert list(ended.result.tokens) == list(answer.tokens)
    assert ended.result.text == answer.text
    served.graph.wait_for(lambda: served.texts and served.texts[-1].final)
    assert served.texts[-1].stage == "aggregate"
    assert "".join(text.delta for text in served.texts[-len(feedback) - 1 :])[-8:] in answer.text


def test_a_cloud_in_a_process_of_its_own(serve: Serve, tmp_path: Path) -> None:
    with Store(tmp_path / "public") as store:
        document = Document("lamp", TEXTS["lamp"])
        store.add(document, chunks(document, ChunkPlan()))
    port = free_port()
    config = tmp_path / "cloud.yaml"
    settings = {
        "address": f"127.0.0.1:{port}",
        "model": {"path": str(tiny_folder("llama"))},
        "side": {
            "store": str(tmp_path / "public"),
            "retrieval": {"method": "dense", "chunks": 2, "temperature": 0.3},
        },
    }
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with (
        cloud_process(config) as process,
        DragonClient(CloudConfig(address=f"127.0.0.1:{port}")) as client,
    ):
        wait_for_cloud(client, process)
        served = serve(port)
        served.add("ball")
        answer = served.ask()
        assert (answer.status.code, answer.verified) == (Status.OK, True)
        told = figures_from(answer.metrics)
        assert (told["device_documents"], told["cloud_documents"]) == (1, 1)


def test_cancel_ends_an_answer(serve: Serve, held: int) -> None:
    served = serve(held, schedule__aggregate_on="cloud")
    feedback: list[Generate.Feedback] = []
    handle = served.send(feedback, seed=SEED)
    served.graph.wait_for(lambda: feedback, LONG_S)
    served.graph.ask(handle.cancel_goal_async)
    ended = served.result(handle)
    assert ended.status == GoalStatus.STATUS_CANCELED
    assert ended.result.status.code == Status.CANCELLED
    assert ended.result.text.startswith(feedback[0].text)
    assert 0 < len(ended.result.tokens) < TOKENS


def test_without_any_document_the_answer_says_so(serve: Serve) -> None:
    bare = cloud_with(())
    try:
        served = serve(bare.port)
        answer = served.ask()
        assert (answer.status.code, answer.verified) == (Status.OK, True)
        told = figures_from(answer.metrics)
        assert (told["device_documents"], told["cloud_documents"]) == (0, 0)
        served.graph.wait_for(lambda: served.found)
        assert served.found[0].names == []
    finally:
        bare.stop()


def test_a_cloud_with_another_tokenizer_is_refused(serve: Serve) -> None:
    tables = TableSide(Party.CLOUD, Tables())
    config = CloudServiceConfig(address="127.0.0.1:0")
    other = ServerHandle(DragonService(config, tables, "tables", "1.0"))
    try:
        served = serve(other.port)
        answer = served.ask()
        assert answer.status.code == Status.VOCABULARY_MISMATCH
        assert (answer.text, answer.verified) == ("", False)
    finally:
        other.stop()


def test_a_cloud_with_other_weights_is_refused(serve: Serve, cloud: int) -> None:
    served = serve(cloud, model__path=str(tiny_folder("llama", seed=5)))
    answer = served.ask()
    assert answer.status.code == Status.INVALID_CONFIG
    assert "model" in answer.status.message


def test_a_cloud_that_vanishes_leaves_the_device_alone(serve: Serve, held: int) -> None:
    """The cloud aggregates and falls silent, so the device has to wait, and then to go on."""
    patience = {"patience__patience_s": 2.0, "patience__silence_s": 30.0}
    served = serve(held, schedule__aggregate_on="cloud", **patience)
    served.add(*PRIVATE)
    answer = served.ask(seed=SEED)
    assert (answer.status.code, answer.verified) == (Status.OK, False)
    assert set(answer.sources[:1]) <= TOGETHER
    assert answer.sources[-1] == GeneratedText.UNVERIFIED
    served.graph.wait_for(lambda: served.texts and served.texts[-1].final)
    assert served.texts[-1].stage == "alone"


def test_what_no_document_names_is_not_found(serve: Serve) -> None:
    served = serve(free_port(), side__answers="quote", use_cloud=False)
    served.add(*PRIVATE)
    answer = served.ask(prompt="Where did I last see the green umbrella?")
    assert (answer.status.code, answer.text) == (Status.NOT_FOUND, "")
    assert "no sentence on the robot answers this" in answer.status.message
    assert figures_from(answer.metrics)["device_documents"] == 0
    served.graph.wait_for(lambda: served.texts and served.texts[-1].final)
    assert served.texts[-1].status == answer.status
    levels = {part.level for part in served.graph.do(served.server.details, 0.0)}
    assert levels == {Level.OK}, "a memory without an entry is no fault"
    ball = served.ask(prompt="Where is the ball?", max_tokens=60)
    assert (ball.status.code, ball.text.strip()) == (Status.OK, TEXTS["ball"])


def test_without_a_cloud_the_device_answers_alone(serve: Serve) -> None:
    served = serve(free_port(), patience__patience_s=0.5)
    served.add(*PRIVATE)
    answer = served.ask()
    assert (answer.status.code, answer.verified) == (Status.OK, False)
    assert set(answer.sources) == {GeneratedText.UNVERIFIED}
    told = figures_from(answer.metrics)
    assert (told["device_documents"], told["cloud_documents"]) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": "  "}, "prompt"),
        ({"prompt": 9000 * "x"}, "prompt"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"option_names": ["side.store"], "option_values": ["/"]}, "side.store"),
        ({"option_names": ["cloud.address"], "option_values": ["a:1"]}, "cloud.address"),
        ({"option_names": ["ahead.max_ahead"], "option_values": ["x"]}, "ahead.max_ahead"),
    ],
)
def test_bad_input_is_named(serve: Serve, fields: dict[str, Any], field: str) -> None:
    answer = serve().ask(**fields)
    assert answer.status.code == Status.INVALID_INPUT
    assert answer.status.message.startswith(f"{field}: ")


def test_it_serves_its_documents_again_after_a_restart(serve: Serve) -> None:
    served = serve()
    served.add(*PRIVATE)
    served.graph.do(served.server.trigger_deactivate)
    assert served.ask().status.code == Status.INACTIVE
    served.restart()
    assert served.listed() == sorted(PRIVATE)
    assert figures_from(served.ask().metrics)["device_documents"] == 2


def test_the_diagnostics_tell_of_link_and_documents(serve: Serve) -> None:
    served = serve()
    served.add("ball")
    served.ask()
    parts = {part.name: part for part in served.graph.do(served.server.details, 0.0)}
    assert parts["documents"].level == Level.OK
    assert parts["documents"].values["documents"] == 1
    assert parts["model"].values["document_kv_refused"] == 0
    assert str(parts["model"].values["cloud"]).startswith("UP")
    assert "memory" not in parts
