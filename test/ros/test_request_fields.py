"""The status of a refused request names the field of the request that is wrong, for each field."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from rclpy.action import ActionClient
from sensor_msgs.msg import CompressedImage

from collab_llm import srv
from collab_llm.action import Generate
from collab_llm.msg import Status
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.nodes.collective_server import CollectiveServer
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.base import Answer, Control, Entry, Progress, Request, Resources
from collab_llm_nodes.ros.protocol_server import ProtocolServer

pytestmark = pytest.mark.ros

_CHAT = {"prompt": "", "turn_roles": ["user"], "turn_contents": ["hello"]}
_DOCUMENT = {"document_names": ["a"], "document_contents": ["text"]}
BAD: Mapping[str, list[dict[str, Any]]] = {
    "protocol": [{"protocol": "telepathy"}],
    "prompt": [{"prompt": ""}, {"prompt": " \n"}, {**_CHAT, "prompt": "and this"}],
    "turn_roles": [
        {**_CHAT, "turn_roles": ["king"]},
        {**_CHAT, "turn_roles": ["assistant"]},
        {**_CHAT, "turn_roles": ["user"] * 2, "turn_contents": ["a", "b"]},
    ],
    "turn_contents": [{**_CHAT, "turn_contents": []}, {**_CHAT, "turn_contents": [" "]}],
    "raw": [{**_CHAT, "raw": True}],
    "images": [{"images": [CompressedImage(format="png")]}],
    "document_names": [{**_DOCUMENT, "document_names": []}],
    "document_contents": [{**_DOCUMENT, "document_contents": []}],
    "temperature": [{"temperature": -1.0}, {"temperature": float("nan")}],
    "top_k": [{"top_k": 3}],
    "top_p": [{"top_p": 2.0}, {"top_p": -0.5}],
    "law": [{"law": "of the jungle"}, {"law": "coupled"}],
    "max_tokens": [{"max_tokens": 9}],
    "deadline_s": [{"deadline_s": -1.0}, {"deadline_s": float("inf")}],
    "option_names": [{"option_names": [name], "option_values": ["1"]} for name in ("", "  ", "\t")],
    "option_values": [{"option_names": ["way"], "option_values": []}],
    "prompts": [{"prompts": []}, {"prompts": ["hello", ""]}, {"prompts": ["hello", " "]}],
}
NEVER_WRONG = {"header", "seed", "for_motion"}
ALSO = {  # the other half of a pair may be what is too much
    "document_names": {"document_contents"},
    "document_contents": {"document_names"},
    "turn_contents": {"turn_roles"},
    "raw": {"prompt"},
}


class Told:
    """A running protocol whose models refuse with the field that ``refuses`` names."""

    parallel = 2

    def __init__(self) -> None:
        self.refuses = ""

    def run(self, request: Request, emit: Callable[[Progress], None], control: Control) -> Answer:
        """Refuse, or say "yes"."""
        if self.refuses:
            raise InvalidInput("is wrong", field=self.refuses)
        return Answer("yes")

    def health(self) -> Mapping[str, object]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Free nothing."""


class Site:
    """A server of one protocol without its models, and clients of its action and service."""

    def __init__(self, graph: Any, entry: Entry, told: Told) -> None:
        self.graph, self.told = graph, told
        if entry.name == "collective":
            self.server: Any = CollectiveServer(context=graph.context)
        else:
            self.server = ProtocolServer(entry.name, context=graph.context)
        graph.add(self.server)
        self.server.start()
        user = graph.node("user")
        self.action = ActionClient(user, Generate, f"{entry.name}/generate")
        graph.wait_for(self.action.server_is_ready)
        kind = entry.service or ("CollectiveGenerate" if entry.name == "collective" else "")
        self.kind = getattr(srv, kind) if kind else None
        if self.kind:
            self.service = user.create_client(self.kind, f"{entry.name}_generate")
            graph.wait_for(self.service.service_is_ready)

    def by_action(self, fields: Mapping[str, Any]) -> Status:
        goal = self.graph.ask(self.action.send_goal_async, filled(Generate.Goal(), fields))
        status: Status = self.graph.ask(goal.get_result_async).result.status
        return status

    def by_service(self, fields: Mapping[str, Any]) -> Status:
        assert self.kind is not None
        request = filled(self.kind.Request(), fields)
        status: Status = self.graph.ask(self.service.call_async, request).status
        return status


def filled(message: Any, fields: Mapping[str, Any]) -> Any:
    """Return a request that is right, but for ``fields``."""
    right = {"prompt": "hello", "prompts": ["hello"], "deadline_s": 20.0, **fields}
    for name, value in right.items():
        if hasattr(message, name):
            setattr(message, name, value)
    return message


def field_of(status: Status) -> str:
    """Return the field that the message begins with, without index."""
    named = re.match(r"([A-Za-z_][\w.]*)(\[\d+\])?: ", status.message)
    return named[1] if named else ""


@pytest.fixture(params=sorted(registry.PROTOCOLS))
def site(
    request: pytest.FixtureRequest, ros_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    told = Told()

    def start(config: Any, resources: Resources) -> Told:
        return told

    entry = replace(registry.find(request.param), start=start)
    monkeypatch.setattr(registry, "find", lambda name: entry)
    served = Site(ros_graph, entry, told)
    yield served
    ros_graph.do(served.server.stop)


def _refused(kind: Any, ask: Callable[[Mapping[str, Any]], Status], given: Any) -> int:
    """Check each row that ``kind`` has the fields of; return the number of those refused."""
    own = set(kind.get_fields_and_field_types())
    assert own <= BAD.keys() | NEVER_WRONG, "add rows for the new field"
    refused = 0
    for name in sorted(own & BAD.keys()):
        for fields in BAD[name]:
            if not own >= fields.keys():
                continue
            status = ask({**given, **fields})
            if status.code == Status.OK:
                continue  # this protocol may take it
            assert status.code == Status.INVALID_INPUT, status.message
            assert field_of(status) in {name, *ALSO.get(name, ())}, (fields, status.message)
            refused += 1
    return refused


def test_each_field_is_named(site: Site) -> None:
    protocol = site.server.entry.name
    given = _DOCUMENT if "documents" in site.server.entry.takes else {}
    assert _refused(Generate.Goal, site.by_action, given) > 10, protocol
    if site.kind is not None:
        assert _refused(site.kind.Request, site.by_service, given) > 4, protocol


def test_one_of_several_prompts_is_named_by_its_place(site: Site) -> None:
    if "prompts" not in (site.kind and site.kind.Request.get_fields_and_field_types() or ()):
        return
    for bad in ("", " \n"):
        status = site.by_service({"prompts": ["hello", bad, "hello"]})
        assert status.message.startswith("prompts[1]: ")


def test_what_the_models_call_it_is_the_callers_field(site: Site) -> None:
    given = _DOCUMENT if "documents" in site.server.entry.takes else {}
    assert site.by_action(given).code == Status.OK
    for name in ("prompt", "text", "question", "turns", "turns[0].content"):
        site.told.refuses = name
        statuses = [(Generate.Goal, site.by_action(given))]
        if site.kind is not None:
            statuses.append((site.kind.Request, site.by_service(given)))
        for kind, status in statuses:
            assert field_of(status) in kind.get_fields_and_field_types(), (name, status.message)


def test_an_option_is_named_by_its_name(site: Site) -> None:
    for name in ("nonsense", "library.folders", "a.b"):
        fields = {**_DOCUMENT, "option_names": [name], "option_values": ["1"]}
        if "documents" not in site.server.entry.takes:
            fields = {k: v for k, v in fields.items() if k not in _DOCUMENT}
        assert field_of(site.by_action(fields)) == name
