"""The node of Minion and MinionS: both actions and services, files, cancel, deadline, restart.

The models are two servers of this process, so what leaves the node is seen byte by byte.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus
from chat_server import ChatServer
from minions_world import final, found, more
from rclpy.action import ActionClient
from rclpy.parameter import Parameter
from served_minions import HONEST, KEPT, PAGES, pages
from std_msgs.msg import Header

from collab_llm.action import Generate
from collab_llm.msg import GeneratedText, Status
from collab_llm.srv import Minion, Minions
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.nodes.minions_server import MinionsServer
from collab_llm_nodes.protocols.minions.metrics import by_round
from collab_llm_nodes.protocols.minions.settings import PRESETS, MinionsConfig
from collab_llm_nodes.ros.convert import figures_from
from collab_llm_nodes.ros.qos import RESULT

pytestmark = pytest.mark.ros

LONG_S = 100.0
QUESTION: dict[str, Any] = {
    "prompt": "How heavy is it?",
    "document_names": ["log.txt"],
    "document_contents": [pages()],
    "deadline_s": LONG_S,
}


def weigh(prompt: str) -> str:
    """Find the weight on one page; put the texts of others into fields that are not sent."""
    chunk = prompt.split("## Text\n", 1)[1].split("\n\n## ", 1)[0]
    if chunk.startswith(f"Page {KEPT}."):
        return found("7 kg", citation=f"Weight {KEPT} kg.")
    return found(None, explanation=chunk, citation=chunk)


class Site:
    """The node, started, its two models, and clients of it."""

    def __init__(self, graph: Any, folder: Path, *, host_minion: bool = True) -> None:
        self.graph = graph
        self.remote = ChatServer(lambda prompt: self.remote_says(prompt))
        self.local = ChatServer(lambda prompt: self.local_says(prompt))
        self.remote_says: Callable[[str], str] = honest
        self.local_says: Callable[[str], str] = weigh
        self.remote.__enter__()
        self.local.__enter__()
        parameters: dict[str, Any] = {
            "library.folders": [str(folder)],
            "limits.run_s": 30.0,
            "limits.wall_s": 60.0,
            "parallel": 2,
            **({"host_minion": True} if host_minion else {}),
            "planner": "program",
        }
        for role, server in (("remote", self.remote), ("local", self.local)):
            parameters[f"{role}_model.at"] = "server"
            parameters[f"{role}_model.server.url"] = server.url
            parameters[f"{role}_model.server.model"] = role
        overrides = [Parameter(name, value=value) for name, value in parameters.items()]
        self.server = MinionsServer(context=graph.context, parameter_overrides=overrides)
        graph.add(self.server)
        graph.do(self.server.start)
        user = graph.node("user")
        kinds = {"minions": Minions} | ({"minion": Minion} if host_minion else {})
        self.services = {
            name: user.create_client(kind, f"{name}_generate") for name, kind in kinds.items()
        }
        self.actions = {
            name: ActionClient(user, Generate, f"{name}/generate") for name in self.services
        }
        self.texts = graph.collect(user, GeneratedText, "generated_text", RESULT)
        self.ready()

    @property
    def _seen(self) -> list[bool]:
        """For each service and action whether the user sees one."""
        services = [client.service_is_ready() for client in self.services.values()]
        return services + [action.server_is_ready() for action in self.actions.values()]

    def ready(self) -> None:
        self.graph.wait_for(lambda: all(self._seen))

    def restart(self) -> None:
        """Stop the node and start it, once nobody would take the old services for the new ones."""
        self.graph.do(self.server.stop)
        self.graph.wait_for(lambda: not any(self._seen))
        self.graph.do(self.server.start)
        self.ready()

    def ask(self, protocol: str = "minions", **fields: Any) -> Any:
        kind = Minions if protocol == "minions" else Minion
        call = self.services[protocol].call_async
        return self.graph.ask(call, kind.Request(**{**QUESTION, **fields}), timeout=LONG_S)

    def send(self, feedback: list[Generate.Feedback]) -> Any:
        return self.graph.ask(
            self.actions["minions"].send_goal_async,
            Generate.Goal(**QUESTION),
            lambda message: feedback.append(message.feedback),
        )

    def result(self, handle: Any) -> Any:
        return self.graph.ask(handle.get_result_async, timeout=LONG_S)

    def close(self) -> None:
        self.graph.do(self.server.stop)
        self.remote.__exit__()
        self.local.__exit__()


def honest(prompt: str) -> str:
    """Plan by a program, and decide when the outputs are there."""
    return final("7 kg") if "Outputs of the jobs" in prompt else HONEST


@pytest.fixture
def site(ros_graph: Any, tmp_path: Path) -> Iterator[Site]:
    made = Site(ros_graph, tmp_path)
    yield made
    made.close()


def test_a_question_by_service_and_no_canary_crosses(site: Site) -> None:
    header = Header(frame_id="here")
    answer = site.ask(header=header)
    assert (answer.status.code, answer.status.message) == (Status.OK, "")
    assert (answer.text, answer.verified, answer.header) == ("7 kg", True, header)
    told = figures_from(answer.metrics)
    assert by_round(told)[1]["abstained"] == PAGES - 1
    assert told["sent_bytes"] == answer.metrics.bytes_up
    assert 0 < answer.metrics.bytes_up < len(site.remote.wire.encode())
    assert "canary-" not in site.remote.wire
    assert f"Weight {KEPT} kg." in site.remote.wire
    assert all(f"canary-{page}" in site.local.wire for page in range(PAGES))


def test_the_chat_sends_what_the_local_model_says_and_no_more(site: Site) -> None:
    site.remote_says = lambda prompt: (
        final("7 kg") if "It weighs 7 kg." in prompt else '{"message": "How heavy?"}'
    )
    site.local_says = lambda prompt: "It weighs 7 kg."
    answer = site.ask("minion")
    assert (answer.status.code, answer.text) == (Status.OK, "7 kg")
    assert "canary-" not in site.remote.wire
    assert figures_from(answer.metrics)["sent_message"] == len("It weighs 7 kg.")


def test_an_action_reports_stages_and_jobs(site: Site) -> None:
    told: list[Generate.Feedback] = []
    ended = site.result(site.send(told))
    assert ended.status == GoalStatus.STATUS_SUCCEEDED
    assert ended.result.text == "7 kg"
    site.graph.wait_for(lambda: told and told[-1].stage == "synthesize")
    assert [each.stage for each in told][0] == "documents"
    assert figures_from(told[-1].metrics)["kept.1"] == 1
    site.graph.wait_for(lambda: any(text.final for text in site.texts))
    assert site.texts[-1].prompt == "How heavy is it?"


def test_a_file_of_an_allowed_folder(site: Site, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(pages(3) + f"\fPage {KEPT}. Weight 7 kg.")
    answer = site.ask(document_contents=[""])
    assert (answer.status.code, answer.text) == (Status.OK, "7 kg")
    outside = site.ask(document_names=["/etc/passwd"], document_contents=[""])
    assert outside.status.code == Status.INVALID_INPUT
    assert "outside the folders" in outside.status.message
    assert "root" not in site.remote.wire


def test_a_preset_gives_the_defaults_of_the_parameters(ros_graph: Any) -> None:
    given = {"preset": "embedded", "rounds": 4}
    node = MinionsServer(
        context=ros_graph.context,
        parameter_overrides=[Parameter(name, value=value) for name, value in given.items()],
    )
    ros_graph.add(node)
    own = {each.name: getattr(node.config, each.name) for each in fields(MinionsConfig)}
    assert MinionsConfig(**own) == replace(PRESETS["embedded"], rounds=4)
    (refused,) = ros_graph.do(node.set_parameters, [Parameter("preset", value="qasper")])
    assert not refused.successful


def test_minion_is_hosted_only_if_the_operator_allows_it(ros_graph: Any, tmp_path: Path) -> None:
    """Check that by default nobody can ask the protocol that sends all the local model says."""
    site = Site(ros_graph, tmp_path, host_minion=False)
    try:
        server = site.server
        offered = server.get_service_names_and_types_by_node(server.get_name(), "/")
        names = {name for name, _ in offered}
        assert "/minions_generate" in names
        assert not any(name.startswith(("/minion/", "/minion_generate")) for name in names)
        assert site.ask().text == "7 kg"
        assert len(ros_graph.do(server.details, 0.0)) == 2
        site.restart()
        assert site.ask().text == "7 kg"
    finally:
        site.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("way", "remote_only"),
        ("check_citations", False),
        ("abstain_filter", False),
        ("choice_bits", 1 << 20),
        ("remote_share", 1e6),
        ("privacy.max_bytes", 1 << 40),
        ("style", "longhealth"),
    ],
)
def test_a_parameter_call_cannot_undo_what_the_operator_has_forbidden(
    ros_graph: Any, name: str, value: object
) -> None:
    node = MinionsServer(context=ros_graph.context)
    ros_graph.add(node)
    (refused,) = ros_graph.do(node.set_parameters, [Parameter(name, value=value)])
    assert not refused.successful
    assert "read-only" in refused.reason


def test_an_unknown_preset_is_named(ros_graph: Any) -> None:
    wrong = [Parameter("preset", value="finance")]
    with pytest.raises(ConfigError, match="one of '', 'financebench'"):
        MinionsServer(context=ros_graph.context, parameter_overrides=wrong)


def test_a_deadline_in_round_2_leaves_the_best_answer(site: Site) -> None:
    late = threading.Event()

    def remote(prompt: str) -> str:
        if "round 2" in prompt:
            late.wait(LONG_S)
        if "Outputs of the jobs" in prompt:
            return more(answer="about 7 kg", missing_info="the unit")
        return HONEST

    site.remote_says = remote
    answer = site.ask(deadline_s=8.0)
    late.set()
    assert answer.status.code == Status.DEADLINE_EXCEEDED
    assert (answer.text, answer.verified) == ("about 7 kg", False)
    assert answer.metrics.rounds == 2


@pytest.mark.parametrize("role", ["remote", "local"])
def test_cancel_ends_what_a_model_is_asked(site: Site, role: str) -> None:
    on, asked = threading.Event(), threading.Event()

    def waits(prompt: str) -> str:
        asked.set()
        on.wait(LONG_S)
        return "late"

    if role == "remote":
        site.remote_says = waits
    else:
        site.local_says = waits
    handle = site.send([])
    assert asked.wait(60)
    site.graph.ask(handle.cancel_goal_async)
    ended = site.result(handle)
    on.set()
    assert ended.status == GoalStatus.STATUS_CANCELED
    assert ended.result.status.code == Status.CANCELLED


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": "  "}, "prompt"),
        ({"document_names": [], "document_contents": []}, "document_names"),
        ({"document_contents": ["a\tb" + "\x01" * 3, "b"]}, "document_contents"),
        ({"option_names": ["way"], "option_values": ["remote_only"]}, "way"),
        ({"option_names": ["way"], "option_values": ["rag"]}, "way"),
        ({"option_names": ["rounds"], "option_values": ["999"]}, "rounds"),
        ({"option_names": ["rounds"], "option_values": ["6"]}, "rounds"),
        ({"option_names": ["check_citations"], "option_values": ["false"]}, "check_citations"),
        ({"option_names": ["library.folders"], "option_values": ["/"]}, "library.folders"),
        ({"document_contents": ["  \n"]}, "document_contents[0]"),
        ({"document_names": ["\n"]}, "document_names[0]"),
        ({"document_names": ["a", "no.md"], "document_contents": ["x", ""]}, "document_names[1]"),
        ({"document_names": ["/etc/passwd"], "document_contents": [""]}, "document_names[0]"),
        ({"option_names": ["store"], "option_values": ["nowhere"]}, "store"),
        ({"option_names": [""], "option_values": ["1"]}, "option_names[0]"),
    ],
)
def test_bad_input_is_named(site: Site, fields: dict[str, Any], field: str) -> None:
    answer = site.ask(**fields)
    assert answer.status.code == Status.INVALID_INPUT
    assert answer.status.message.startswith(f"{field}: ")
    assert not site.remote.bodies


def test_an_option_of_the_other_protocol_is_refused(site: Site) -> None:
    answer = site.ask("minion", option_names=["tasks"], option_values=["2"])
    assert answer.status.code == Status.INVALID_INPUT
    assert "minions" in answer.status.message


def test_a_remote_that_answers_prose_cannot_plan(site: Site) -> None:
    site.remote_says = lambda prompt: "I would rather tell a story."
    answer = site.ask(option_names=["planner"], option_values=["plan"])
    assert answer.status.code == Status.MODEL_ERROR
    assert "cannot plan this question" in answer.status.message


def test_the_diagnostics_distinguish_both_protocols(site: Site) -> None:
    site.ask("minion", prompt="")
    site.ask()
    decoding, model, chat = site.graph.do(site.server.details, 0.0)
    assert [decoding.name, model.name, chat.name] == ["decoding", "model", "minion decoding"]
    assert decoding.values["kept"] == "1.000"
    assert (model.values["remote"], model.values["local"]) == ("remote", "local")


def test_it_serves_again_after_a_restart(site: Site) -> None:
    site.restart()
    assert site.ask().text == "7 kg"


def test_an_inactive_node_refuses_requests(site: Site) -> None:
    site.graph.do(site.server.trigger_deactivate)
    assert site.ask("minion").status.code == Status.INACTIVE
    site.graph.do(site.server.trigger_activate)
    assert site.ask().status.code == Status.OK
