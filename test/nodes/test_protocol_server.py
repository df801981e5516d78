"""A protocol that is a folder and a line has a program, a node, its parameters and its manual."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

import parameter_tables
from rclpy.action import ActionClient
from tiny_models import tiny_folder

from collab_llm.action import Generate
from collab_llm.srv import CollectiveGenerate
from collab_llm_nodes.nodes import generate_router  # noqa: F401  its default is today's registry
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.ros.parameters import warn_of_misspelt_nodes

pytestmark = pytest.mark.ros

# The program, in a process where the registry has one more line.
START = """
import sys
from collab_llm_nodes import programs
from collab_llm_nodes.protocols import registry

sys.path.append({support!r})
registry.PROTOCOLS["echo"] = "echo_protocol"
raise SystemExit(programs.protocol_server())
"""
SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture
def start(ros_graph: Any) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def program(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", START.format(support=SUPPORT), *arguments]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield program
    for each in started:
        each.kill()
        each.communicate(timeout=60.0)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PROTOCOLS, "echo", "echo_protocol")


def test_the_program_serves_the_protocol_that_it_is_given(ros_graph: Any, start: Any) -> None:
    server = start("echo", "--ros-args", "-p", "shout:=true")
    action = ActionClient(ros_graph.node("user"), Generate, "echo/generate")
    ros_graph.wait_for(action.server_is_ready, timeout=60.0)
    handle = ros_graph.ask(action.send_goal_async, Generate.Goal(prompt="hey"))
    assert ros_graph.ask(handle.get_result_async).result.text == "HEY"
    server.send_signal(signal.SIGINT)
    assert server.wait(60.0) == 0


def test_a_protocol_with_more_than_the_action_has_its_own_node(ros_graph: Any, start: Any) -> None:
    target = str(tiny_folder("llama"))
    server = start("collective", "--ros-args", "-p", f"target.path:={target}")
    service = ros_graph.node("user").create_client(CollectiveGenerate, "collective_generate")
    ros_graph.wait_for(service.service_is_ready, timeout=60.0)
    request = CollectiveGenerate.Request(prompts=["ball", "box"], max_tokens=3, deadline_s=60.0)
    answer = ros_graph.ask(service.call_async, request, timeout=60.0)
    assert list(answer.token_counts) == [3, 3]
    server.send_signal(signal.SIGINT)
    assert server.wait(60.0) == 0


def test_the_help_names_the_protocols_that_it_serves(
    start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start("--help").wait(100.0) == 0
    told = " ".join(capfd.readouterr().out.split())
    served = [name for name in (*registry.PROTOCOLS, "echo") if name != "edge_cloud"]
    assert f"one of {', '.join(dict.fromkeys(served))}" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ekho"], "INVALID_INPUT: protocol: unknown protocol 'ekho' (did you mean echo?"),
        (["edge_cloud"], "edge_cloud needs a carrier to its verifier"),
        (["echo", "--ros-args", "-p", "shuot:=true"], "did you mean shout?"),
    ],
)
def test_what_cannot_be_served_is_told(start: Any, arguments: list[str], told: str) -> None:
    program = start(*arguments)
    assert told in program.communicate(timeout=100.0)[1]
    assert program.returncode == 1


@pytest.mark.usefixtures("line")
def test_its_parameters_are_in_the_manual() -> None:
    configurations = dict(parameter_tables.nodes())
    names = [row.split("`")[1] for row in parameter_tables.table(configurations["echo_server"])[2:]]
    assert {"pause_s", "shout", "voices", "max_waiting", "deadline_s"} <= set(names)
    assert "edge_cloud_server" not in configurations, "draft_vlm has these parameters"


@pytest.mark.usefixtures("line")
def test_its_node_may_be_misspelt(
    ros_context: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "robot.yaml"
    file.write_text("{echo_server: {ros__parameters: {}}, ekho_server: {ros__parameters: {}}}")
    node = NavigationActionParser(context=ros_context)
    warn_of_misspelt_nodes([node], ["x", "--ros-args", "--params-file", str(file)])
    told = capfd.readouterr().err
    assert told.count("WARN") == 1
    assert "no node reads the parameters of ekho_server; did you mean echo_server?" in told
    node.destroy_node()
