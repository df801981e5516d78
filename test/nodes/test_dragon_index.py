"""The service of DRAGON's documents: changes, bad input, deadlines, a process that is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from dragon_bed import TEXTS
from dragon_served import LONG_S, PRIVATE, Served, parameters_of

from collab_llm.msg import Status
from collab_llm.srv import DragonIndex
from collab_llm_nodes.processes import free_port, run_process
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.ros.qos import REQUESTS

pytestmark = pytest.mark.ros

OPERATION = DragonIndex.Request


@pytest.fixture
def served(ros_graph: Any, tmp_path: Path) -> Iterator[Served]:
    """The node without a cloud."""
    made = Served(ros_graph, tmp_path / "private", free_port(), use_cloud=False)
    yield made
    ros_graph.do(made.server.stop)


def test_documents_come_and_go(served: Served) -> None:
    added = served.add("ball", "key")
    assert added.status == Status()
    assert added.statuses == [Status(), Status()]
    assert (added.documents, added.without_vector) == (2, 0)
    assert added.kv_files == added.chunks > 0
    assert added.kv_bytes > 0
    assert added.characters == len(TEXTS["ball"]) + len(TEXTS["key"])
    listed = served.index(OPERATION.LIST)
    assert list(listed.names) == ["ball", "key"]
    assert list(listed.sizes) == [len(TEXTS[name]) for name in ("ball", "key")]
    assert sum(listed.pieces) == listed.chunks
    gone = served.index(OPERATION.DELETE, document_names=["ball"])
    assert (gone.status, gone.documents) == (Status(), 1)
    assert gone.version > added.version
    assert served.listed() == ["key"]
    assert served.ask().status.code == Status.OK
    served.graph.wait_for(lambda: served.found)
    assert served.found[0].names == ["key"]


def test_a_name_that_is_taken_is_refused_unless_it_is_to_be_replaced(served: Served) -> None:
    twice = served.add("ball", "key", "ball")
    codes = [status.code for status in twice.statuses]
    assert codes == [Status.OK, Status.OK, Status.INVALID_INPUT]
    assert twice.status == twice.statuses[2]
    assert (
        served.add("ball", document_contents=["The ball is gone."], replace=True).status == Status()
    )
    assert served.index(OPERATION.STATS).characters == len("The ball is gone.") + len(TEXTS["key"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"operation": 9}, "operation"),
        ({"operation": OPERATION.ADD}, "document_names"),
        ({"operation": OPERATION.LIST, "document_names": ["ball"]}, "document_names"),
        ({"operation": OPERATION.ADD, "document_names": ["ball"]}, "document_contents"),
        (
            {"operation": OPERATION.DELETE, "document_names": ["a"], "document_contents": ["b"]},
            "document_contents",
        ),
        ({"operation": OPERATION.DELETE, "document_names": ["nobody"]}, "document_names[0]"),
        ({"operation": OPERATION.STATS, "deadline_s": -1.0}, "deadline_s"),
    ],
)
def test_a_request_that_says_nothing_useful(
    served: Served, fields: dict[str, Any], field: str
) -> None:
    served.add("ball")
    answer = served.index(**fields)
    assert answer.status.code == Status.INVALID_INPUT
    assert answer.documents == served.index(OPERATION.STATS).documents > 0
    assert answer.status.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("name", "content", "field", "says"),
    [
        ("empty", "", "document_contents[1]", "no text"),
        ("blank", " \n\t", "document_contents[1]", "no text"),
        ("latin1", "caf\N{REPLACEMENT CHARACTER}", "document_contents[1]", "UTF-8"),
        ("two\nlines", "a text", "document_names[1]", "no name"),
        ("n" * 600, "a text", "document_names[1]", "no name"),
        ("ball", "a text", "document_names[1]", "already"),
    ],
)
def test_a_document_of_no_use_does_not_disturb_the_others(
    served: Served, name: str, content: str, field: str, says: str
) -> None:
    texts = [TEXTS["ball"], content, TEXTS["key"]]
    answer = served.add("ball", name, "key", document_contents=texts)
    assert [status.code for status in answer.statuses] == [0, Status.INVALID_INPUT, 0]
    assert answer.status.message.startswith(f"{field}: ")
    assert says in answer.status.message
    assert served.listed() == sorted(PRIVATE)


def test_a_document_of_100_mb_is_refused(served: Served) -> None:
    answer = served.add("huge", document_contents=["word " * 20_000_000])
    assert answer.status.code == Status.INVALID_INPUT
    assert "split it" in answer.status.message
    assert served.listed() == []


def test_without_a_store_it_says_so(ros_graph: Any, tmp_path: Path) -> None:
    bare = Served(ros_graph, tmp_path, free_port(), use_cloud=False, side__store="")
    answer = bare.add("ball")
    assert answer.status.code == Status.INVALID_CONFIG
    assert answer.status.message.startswith("side.store: ")
    ros_graph.do(bare.server.stop)


def test_a_change_that_waits_longer_than_its_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, on = threading.Event(), threading.Event()
    real = Index.add

    def slow(self: Index, name: str, *arguments: Any, **options: Any) -> int:
        begun.set()
        on.wait(LONG_S)
        return real(self, name, *arguments, **options)

    monkeypatch.setattr(Index, "add", slow)
    one = OPERATION(operation=OPERATION.ADD, document_names=["a"], document_contents=["b"])
    first = served.graph.do(served.documents.call_async, one)
    assert begun.wait(LONG_S)
    late = served.index(OPERATION.STATS, deadline_s=0.05)
    assert late.status.code == Status.DEADLINE_EXCEEDED
    on.set()
    assert served.graph.result(first, LONG_S).status == Status()
    assert served.listed() == ["a"]


def test_a_deadline_in_the_midst_of_a_document(served: Served) -> None:
    text = "\n".join(f"Sentence {i} is about the ball." for i in range(30_000))
    answer = served.add("long", document_contents=[text], deadline_s=0.2)
    assert answer.status.code == Status.DEADLINE_EXCEEDED
    assert served.add("key").status == Status()
    assert served.index(OPERATION.STATS).without_vector == 0


def test_an_inactive_node_says_so(served: Served) -> None:
    served.graph.do(served.server.trigger_deactivate)
    assert served.add("ball").status.code == Status.INACTIVE


def test_what_was_added_survives_a_kill(ros_graph: Any, tmp_path: Path) -> None:
    """Each document that an answer has confirmed is there after SIGKILL; none is there in part."""
    parameters = parameters_of(tmp_path / "private", free_port()) | {"use_cloud": False}
    command = [sys.executable, "-m", "collab_llm_nodes.nodes.protocol_server", "dragon"]
    command.append("--ros-args")
    for name, value in parameters.items():
        told = str(value).lower() if isinstance(value, bool) else value
        command += ["-p", f"{name}:={told}"]
    user = ros_graph.node("killer")
    client = user.create_client(DragonIndex, "dragon_index", qos_profile=REQUESTS)
    confirmed: list[str] = []
    text = "The ball is on the table. " * 20
    with run_process("dragon_server", command) as process:

        def ready() -> bool:
            process.check()
            return bool(client.service_is_ready())

        ros_graph.wait_for(ready, LONG_S)
        for number in range(6):
            request = OPERATION(operation=OPERATION.ADD, document_names=[f"d{number}"])
            request.document_contents = [f"{number} {text}"]
            asked = ros_graph.do(client.call_async, request)
            if number < 5:
                assert ros_graph.result(asked, LONG_S).status == Status()
                confirmed.append(f"d{number}")
        os.kill(process.pid, signal.SIGKILL)
    served = Served(ros_graph, tmp_path / "private", free_port(), use_cloud=False)
    listed = served.index(OPERATION.LIST)
    assert set(confirmed) <= set(listed.names) <= {*confirmed, "d5"}
    assert set(listed.sizes) == {len(f"0 {text}")}
    assert listed.without_vector == 0
    ros_graph.do(served.server.stop)
