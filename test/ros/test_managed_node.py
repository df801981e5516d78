"""The managed base of the nodes: its transitions from every state, and how a process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from rcl_interfaces.srv import SetParameters
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.node import Node
from rclpy.parameter import Parameter

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.nodes.cloud_verifier_bridge import CloudVerifierBridge
from collab_llm_nodes.nodes.motion import DRIVERS
from collab_llm_nodes.nodes.motion_guard import MotionGuard
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser, ParserConfig
from collab_llm_nodes.ros.domain import on_fast_dds
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.parameters import warn_of_misspelt_nodes

pytestmark = pytest.mark.ros

# One node fails in a callback that nothing guards; another must be stopped all the same.
FAILING = """
from collab_llm_nodes.nodes.navigation_action_parser import ParserConfig
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.program import run

class Node(ManagedNode):
    def activate(self):
        if self.get_name() == "bad":
            self.create_timer(0.01, lambda: 1 // 0)
    def deactivate(self):
        print(self.get_name(), "deactivated", flush=True)
    def cleanup(self):
        print(self.get_name(), "cleaned up", flush=True)

raise SystemExit(run(lambda: Node("bad", ParserConfig), lambda: Node("good", ParserConfig)))
"""

# Two nodes: each may set what is process-wide before either of them starts.
ENTERING = """
import os, signal
from collab_llm_nodes.nodes.navigation_action_parser import ParserConfig
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.program import run

class Node(ManagedNode):
    def enter_process(self):
        print(self.get_name(), "enters", flush=True)
    def configure(self):
        print(self.get_name(), "starts", flush=True)
        if self.get_name() == "second":
            os.kill(os.getpid(), signal.SIGTERM)

raise SystemExit(run(lambda: Node("first", ParserConfig), lambda: Node("second", ParserConfig)))
"""

# Says whether its process shares memory with others, and ends.
PROBE = """
import sys
from rclpy.node import Node
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.ros.program import run

class Probe(Node):
    shares_memory = sys.argv.pop() == "True"
    def __init__(self):
        super().__init__("probe")
        print("/dev/shm/fast" in open("/proc/self/maps").read(), flush=True)
        raise CollabError("enough")

run(Probe)
"""


def test_a_failing_callback_stops_the_nodes_and_is_an_error(ros_context: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "FATAL" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    for node in ("bad", "good"):
        assert f"{node} deactivated" in done.stdout
        assert f"{node} cleaned up" in done.stdout


@pytest.mark.parametrize(
    ("wanted", "profile", "shares"),
    [
        (True, "", True),
        (False, "", False),
        (True, "fastdds_udp.xml", False),
        (True, "fastdds_loopback.xml", False),
    ],
)
def test_nodes_that_must_not_wait_for_the_dead_share_no_memory(
    ros_context: Any, monkeypatch: pytest.MonkeyPatch, wanted: bool, profile: str, shares: bool
) -> None:
    if not on_fast_dds() or (not profile and os.environ.get("ROS_DISTRO") == "humble"):
        pytest.skip("of Fast DDS, which is too old in Humble")
    for name in ("FASTDDS_BUILTIN_TRANSPORTS", "ROS_LOCALHOST_ONLY"):
        monkeypatch.delenv(name, raising=False)
    # Not LOCALHOST, which always shares; one participant hears nobody else.
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "OFF")
    if profile:
        monkeypatch.setenv("FASTRTPS_DEFAULT_PROFILES_FILE", str(config_file(profile)))
    command = [sys.executable, "-c", PROBE, str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [str(shares)], done.stderr


def test_what_moves_the_robot_shares_no_memory() -> None:
    assert not MotionGuard.shares_memory
    for driver in filter(None, DRIVERS.values()):
        module, name = driver.split(".")
        node = getattr(import_module(f"collab_llm_nodes.nodes.{module}"), name)
        assert not node.shares_memory


def test_a_node_tells_its_states_and_at_debug_level_what_it_does(ros_context: Any) -> None:
    command = [sys.executable, "-m", "collab_llm_nodes.nodes.cloud_verifier_bridge", "--ros-args"]
    command += ["-p", "verifier.address:=127.0.0.1:1"]
    command += ["--log-level", "cloud_verifier_bridge:=debug"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = [next(line for line in process.stderr if "link to 127.0.0.1:1" in line)]
        process.terminate()
        told = [*told, *process.stderr]
        assert process.wait(60) == 0
    assert "[DEBUG]" in told[0]
    assert [line.split()[-1] for line in told if "[INFO]" in line] == ["inactive", "unconfigured"]
    assert not [line for line in told if "[rcl" in line]


class Counting(ManagedNode[ParserConfig]):
    """Counts what is freed, which exists only after ``configure``."""

    def configure(self) -> None:
        self.freed = 0

    def cleanup(self) -> None:
        self.freed += 1


@pytest.mark.parametrize("state", ["unconfigured", "inactive", "active"])
def test_shutdown_frees_what_was_taken_and_no_more(ros_context: Any, state: str) -> None:
    node = Counting("counting", ParserConfig, context=ros_context)
    if state != "unconfigured":
        node.trigger_configure()
    if state == "active":
        node.trigger_activate()
    assert node.trigger_shutdown() == TransitionCallbackReturn.SUCCESS
    assert not node.active
    assert getattr(node, "freed", 0) == (state != "unconfigured")
    node.destroy_node()


def test_the_link_is_fixed_when_the_node_starts(ros_context: Any) -> None:
    """The connection is made once: a later address would be shown but not used."""
    node = CloudVerifierBridge(context=ros_context)
    names = [n for n in node._parameters if n.startswith("verifier.")]
    assert {"verifier.address", "verifier.link.verdict_deadline_s"} <= set(names)
    for name in names:
        (result,) = node.set_parameters([node.get_parameter(name)])
        assert not result.successful, name
    node.destroy_node()


def test_a_real_node_shuts_down_unconfigured(ros_context: Any) -> None:
    node = NavigationActionParser(context=ros_context)
    assert node.trigger_shutdown() == TransitionCallbackReturn.SUCCESS
    node.destroy_node()


def test_a_node_s_log_obeys_no_stranger(
    ros_context: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    node = NavigationActionParser(context=ros_context)
    words = "no room\x1b[2J\u202e\n[WARN] [motion_guard]: emergency stop released by operator"
    for _ in range(2):
        node.get_logger().warning(f"one: {words}", throttle_duration_sec=60.0)
        node.get_logger().warning(f"two: {words}", throttle_duration_sec=60.0)
    told = capfd.readouterr().err
    assert not {*"\x1b\u202e"} & {*told.replace("\x1b[33m", "").replace("\x1b[0m", "")}
    lines = told.splitlines()
    assert [line for line in lines if line.startswith("[WARN] [motion_guard]")] == []
    assert len([line for line in lines if "one: " in line]) == 1, "each place has its own pause"
    assert len([line for line in lines if "two: " in line]) == 1
    node.destroy_node()


def test_a_misspelt_parameter_is_an_error_and_not_ignored(
    ros_context: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [Parameter("grammar.max_distanze", value=0.1)]
    node = NavigationActionParser(context=ros_context, parameter_overrides=given)
    assert node.trigger_configure() == TransitionCallbackReturn.FAILURE
    assert "did you mean grammar.max_distance?" in capfd.readouterr().err
    node.destroy_node()


def test_a_misspelt_node_in_a_parameter_file_is_told(
    ros_context: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file may serve other processes too, by any namespace; foreign names are told as well."""
    file = tmp_path / "robot.yaml"
    file.write_text(
        """
        /**: {ros__parameters: {use_sim_time: false}}
        /**/motion_guard: {ros__parameters: {period: 0.1}}
        robot: {navigator: {ros__parameters: {rate: 10.0}}}
        renamed: {ros__parameters: {max_age: 1.0}}
        /robot/navigater: {ros__parameters: {rate: 10.0}}
        """
    )
    node = NavigationActionParser(
        context=ros_context, cli_args=["--ros-args", "-r", "__node:=renamed"]
    )
    warn_of_misspelt_nodes([node], ["x", "--ros-args", "--params-file", str(file)])
    told = capfd.readouterr().err
    assert told.count("WARN") == 1
    assert f"{file}: no node reads the parameters of navigater; did you mean navigator?" in told
    node.destroy_node()


@pytest.mark.parametrize("content", [None, "a: [b", "navigator: 3", "\x00"])
def test_a_parameter_file_that_cannot_be_read_is_one_clear_line(
    ros_context: Any, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "robot.yaml"
    if content is not None:
        file.write_text(content)
    start = "from collab_llm_nodes.nodes.motion import MotionGuard, run; raise SystemExit(run("
    start += f"MotionGuard, args=['--ros-args', '--params-file', {str(file)!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "INVALID_CONFIG: --ros-args: Couldn't parse params file" in done.stderr
    assert str(file) in done.stderr


def test_one_name_for_all_nodes_of_a_process_is_refused(ros_context: Any) -> None:
    command = [sys.executable, "-m", "collab_llm_nodes.nodes.motion", "--driver", "sim"]
    command += ["--ros-args", "-r", "__node:=x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    assert "INVALID_CONFIG: -r __node:=: " in done.stderr
    assert "-r NODE:__node:=NAME" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dynamic_parameter_applies_where_rclpy_does_not_tell_afterwards(
    ros_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROS 2 Humble has no add_post_set_parameters_callback."""
    monkeypatch.delattr(Node, "add_post_set_parameters_callback")
    node = NavigationActionParser(context=ros_graph.context)
    ros_graph.add(node)
    client = ros_graph.node("user").create_client(
        SetParameters, "navigation_action_parser/set_parameters"
    )
    ros_graph.wait_for(client.service_is_ready)
    value = Parameter("health.max_age", value=7.5).to_parameter_msg()
    answer = ros_graph.ask(client.call_async, SetParameters.Request(parameters=[value]))
    assert answer.results[0].successful
    ros_graph.wait_for(lambda: node.config.health.max_age == 7.5)


@pytest.mark.parametrize(
    ("program", "about"),
    [
        ("graph", "edge-cloud speculation (paper 003)"),
        ("draft_vlm", "edge-cloud speculation (paper 003)"),
        ("protocol_server", "the protocol: one of collective"),
    ],
)
def test_help_does_not_wait_for_torch(program: str, about: str) -> None:
    script = (
        "import sys\n"
        "from collab_llm_nodes.ros.program import run\n"
        "from collab_llm_nodes import programs\n"
        "programs.end_program = lambda status: sys.exit(status or int('torch' in sys.modules))\n"
        f"sys.argv = [{program!r}, '--help']\n"
        f"programs.{program}()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert about in done.stdout


def test_what_is_process_wide_is_set_before_any_node_starts(ros_context: Any) -> None:
    command = [sys.executable, "-c", ENTERING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = ["first enters", "second enters", "first starts", "second starts"]
    assert done.stdout.splitlines() == told
