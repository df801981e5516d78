"""motion_guard as a real node: what it passes on, what stops it, and how its process ends."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from geometry_msgs.msg import Twist, TwistStamped
from motion_graph import graph
from nav_msgs.msg import Odometry
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from rclpy.time import Time
from sensor_msgs.msg import Joy, LaserScan, Range
from signals import freeze
from std_msgs.msg import Bool
from std_srvs.srv import Trigger

from collab_llm.msg import LinkState, MotionState, Observation
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.nodes.motion_guard import MotionGuard, MotionGuardConfig
from collab_llm_nodes.robot.host_lock import HostLock
from collab_llm_nodes.robot.latch import UNREADABLE, Latch
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.parameters import flatten
from collab_llm_nodes.ros.qos import CAMERA, COMMAND, RESULT, STATE
from collab_llm_nodes.ros.strangers import MOTION_TOPICS

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # a fixture

LATE = 30.0  # s: for a busy machine
GENEROUS = {
    "freshness.command": 0.5,
    "freshness.odometry": 0.5,
    "freshness.camera": 0.5,
    "limits.linear_speed": 0.8,
    "limits.angular_speed": 1.5,
}


class World:
    """A robot and a driver of it: sensors and velocities at 50 Hz, each of which can fall silent.

    Attributes:
        sent: what reached the robot, the newest last.
        states: what the guard said of itself.
        silent: names of what says nothing now.
    """

    def __init__(self, graph: Any, stamped: bool = False) -> None:
        self.graph, self.silent = graph, set[str]()
        self.command: Any = TwistStamped() if stamped else Twist()
        self.link = LinkState(state=LinkState.UP)
        self.node = graph.node("world")
        publish, kind = self.node.create_publisher, type(self.command)
        self.publishers = {
            "command": publish(kind, "cmd_vel_nav", COMMAND),
            "odometry": publish(Odometry, "odom", COMMAND),
            "camera": publish(Observation, "observation", RESULT),
            "link": publish(LinkState, "link_state", STATE),
        }
        self.stops = publish(Bool, "emergency_stop", 10)
        self.joy = publish(Joy, "joy", 10)
        self.sent: list[Any] = graph.collect(self.node, kind, "cmd_vel", 1000)
        every = QoSProfile(depth=1000, durability=STATE.durability)
        self.states: list[MotionState] = graph.collect(
            self.node, MotionState, "motion_state", every
        )
        self.press = self.node.create_client(Trigger, "emergency_stop")
        self.reset = self.node.create_client(Trigger, "reset_emergency_stop")
        self.node.create_timer(0.02, self._say)

    def _say(self) -> None:
        now = self.node.get_clock().now().to_msg()
        messages = {
            "odometry": Odometry(),
            "camera": Observation(),
            "link": self.link,
            "command": self.command,
        }
        for name, message in messages.items():
            if hasattr(message, "header"):
                message.header.stamp = now
            if name not in self.silent:
                self.publishers[name].publish(message)

    def drive(self, linear: float, angular: float = 0.0) -> None:
        """Command this from now on."""
        twist = self.command.twist if hasattr(self.command, "twist") else self.command
        twist.linear.x, twist.angular.z = linear, angular

    def got(self, linear: float, angular: float = 0.0) -> bool:
        """Return True if the robot's last velocity is this one."""
        if not self.sent:
            return False
        twist = getattr(self.sent[-1], "twist", self.sent[-1])
        return (twist.linear.x, twist.angular.z) == pytest.approx((linear, angular))

    def moves(self, linear: float = 0.4) -> None:
        """Command motion and see it reach the robot."""
        self.drive(linear)
        self.wait(lambda: self.got(linear))

    def stands(self) -> bool:
        return self.got(0.0)

    def state(self, *reasons: str) -> bool:
        """Return True if the last state has exactly these reasons."""
        return bool(self.states) and list(self.states[-1].reasons) == list(reasons)

    def wait(self, condition: Callable[[], Any]) -> None:
        self.graph.wait_for(condition, timeout=LATE)

    def call(self, client: Any) -> Trigger.Response:
        self.wait(client.service_is_ready)
        return self.graph.ask(client.call_async, Trigger.Request(), timeout=LATE)


def start(graph: Any, **parameters: Any) -> tuple[MotionGuard, World]:
    """A guard in the graph's thread, with a world around it; ``__`` is a dot."""
    node = guard(graph, **parameters)
    return node, World(graph, stamped=bool(parameters.get("stamped")))


def guard(graph: Any, namespace: str = "", **parameters: Any) -> MotionGuard:
    """A guard in the graph's thread."""
    values = {**GENEROUS, **{k.replace("__", "."): v for k, v in parameters.items()}}
    overrides = [Parameter(name, value=value) for name, value in values.items()]
    node = MotionGuard(context=graph.context, namespace=namespace, parameter_overrides=overrides)
    graph.add(node)
    graph.started.append(node)
    node.post(node.start)
    graph.wait_for(lambda: node.active, timeout=LATE)
    return node


@pytest.mark.parametrize("stamped", [False, True])
def test_velocities_reach_the_robot_once_all_is_there(graph: Any, stamped: bool) -> None:
    _, world = start(graph, stamped=stamped)
    world.silent = {"camera", "link", "command"}
    world.wait(lambda: world.state("STALE_CAMERA", "LINK_DOWN"))
    assert not world.states[-1].allowed
    assert not world.sent  # a guard that has nothing to stop is silent
    world.silent = {"link"}
    world.drive(0.4, 0.1)
    world.wait(lambda: world.state("LINK_DOWN"))
    world.wait(lambda: world.stands() and len(world.sent) > 3)  # each is refused
    world.silent = set()
    world.wait(lambda: world.got(0.4, 0.1))
    world.wait(lambda: world.state() and world.states[-1].allowed)
    world.wait(lambda: world.states[-1].linear == pytest.approx(0.4))
    assert world.states[-1].speed_limit == pytest.approx(0.8)
    if stamped:
        assert world.sent[-1].header.frame_id == "base_link"
        assert world.sent[-1].header.stamp.sec > 0


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("command", "NO_COMMAND"),
        ("odometry", "STALE_ODOMETRY"),
        ("camera", "STALE_CAMERA"),
        ("link", "LINK_DOWN"),
    ],
)
def test_whoever_falls_silent_stops_the_robot(graph: Any, source: str, reason: str) -> None:
    _, world = start(graph)
    world.moves()
    world.silent = {source}
    world.wait(world.stands)
    world.wait(lambda: any(reason in s.reasons for s in world.states))
    world.silent = set()
    world.wait(lambda: world.got(0.4))  # whoever commands still wants to go on


def test_a_link_that_is_down_stops_the_robot(graph: Any) -> None:
    _, world = start(graph)
    world.moves()
    world.link.state = LinkState.CONNECTING
    world.wait(lambda: world.stands() and world.state("LINK_DOWN"))


def test_without_a_link_the_robot_is_slow_where_policy_says_so(graph: Any) -> None:
    _, world = start(graph, unverified_share=0.25, link_policy="draft_only")
    world.link.state = LinkState.CONNECTING
    world.drive(0.4)
    world.wait(lambda: world.got(0.2))  # a quarter of 0.8 m/s
    world.wait(lambda: world.states[-1].speed_limit == pytest.approx(0.2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("link_policy", "ignore"),
        ("needs_camera", False),
        ("needs_odometry", False),
        ("freshness.max_age", 0.0),
        ("freshness.command", 0.5),
        ("limits.linear_speed", 2.0),
        ("obstacle.stop_distance", 0.05),
        ("joy_button", -1),
    ],
)
def test_no_check_can_be_switched_off_while_it_runs(graph: Any, name: str, value: Any) -> None:
    node, world = start(graph, freshness__command=0.3)
    world.moves()
    before = node.config
    answer = graph.do(node.set_parameters, [Parameter(name, value=value)])[0]
    assert not answer.successful
    assert "read-only" in answer.reason
    assert node.config == before
    assert node._guard.config == before


def test_every_parameter_of_the_guard_is_fixed_at_the_start() -> None:
    assert all(field.metadata["read_only"] for _, field, _ in flatten(MotionGuardConfig(), ""))


def test_a_velocity_that_is_no_number_stops_the_robot(graph: Any) -> None:
    _, world = start(graph)
    world.moves()
    world.command.linear.y = math.nan  # even where it would not be used
    world.wait(lambda: world.stands() and world.state("INVALID_COMMAND"))
    world.command.linear.y = 0.0
    world.wait(lambda: world.got(0.4))


def test_the_emergency_stop_is_latched_and_only_a_reset_clears_it(graph: Any) -> None:
    _, world = start(graph)
    world.moves()
    assert world.call(world.press).success
    world.wait(world.stands)
    world.wait(lambda: world.state("EMERGENCY_STOP") and world.states[-1].emergency_stop)
    world.stops.publish(Bool(data=False))  # does nothing
    refused = world.call(world.reset)
    assert not refused.success
    assert "still commanded" in refused.message
    world.drive(0.0)
    world.wait(lambda: world.call(world.reset).success)
    world.wait(lambda: world.state())
    assert world.stands()
    world.moves()


@pytest.mark.parametrize("way", ["topic", "joystick"])
def test_a_button_that_is_held_cannot_be_reset(graph: Any, way: str) -> None:
    _, world = start(graph, joy_button=2)
    world.moves()
    world.joy.publish(Joy(buttons=[1, 1]))  # has no third button
    world.joy.publish(Joy(buttons=[1, 1, 0, 1]))

    def hold() -> bool:
        if way == "topic":
            world.stops.publish(Bool(data=True))
        else:
            world.joy.publish(Joy(buttons=[0, 0, 1]))
        return world.stands() and world.state("EMERGENCY_STOP")

    world.wait(hold)
    world.drive(0.0)
    hold()
    assert not world.call(world.reset).success
    world.wait(lambda: world.call(world.reset).success)  # a second after it was let go
    world.moves()


@pytest.mark.parametrize("way", ["topic", "joystick"])
def test_a_button_pressed_for_a_moment_is_not_missed(graph: Any, way: str) -> None:
    """It is let go before the guard looks: the newest message is not the one that counts."""
    node, world = start(graph, joy_button=0)
    world.moves()

    def press() -> None:  # in the graph's thread, so nobody looks in between
        for pressed in (True, False):
            if way == "topic":
                world.stops.publish(Bool(data=pressed))
            else:
                world.joy.publish(Joy(buttons=[pressed]))

    node.post(press)
    world.wait(lambda: world.stands() and world.state("EMERGENCY_STOP"))


def test_the_emergency_stop_works_before_the_guard_is_active(graph: Any) -> None:
    node, world = start(graph)
    node.post(node.trigger_deactivate)
    world.wait(lambda: not node.active)
    assert world.call(world.press).success
    world.wait(lambda: world.states and world.states[-1].emergency_stop)
    node.post(node.trigger_activate)
    world.drive(0.4)
    world.wait(lambda: world.state("EMERGENCY_STOP"))
    assert world.stands() or not world.sent


def test_a_stop_is_kept_for_each_guard_and_what_cannot_be_read_counts(tmp_path: Path) -> None:
    one, other = Latch(str(tmp_path), "/a/motion_guard"), Latch(str(tmp_path), "/motion_guard")
    one.set("the joystick")
    one.close()
    assert Latch(str(tmp_path), "/a/motion_guard").read() == "the joystick"
    assert other.read() == ""
    one = Latch(str(tmp_path), "/a/motion_guard")
    one.clear()
    one.clear()  # nothing to clear is no error
    one.close()
    assert one.read() == ""
    for content in (b"", b"\xff\xfe"):
        (tmp_path / "a.motion_guard.emergency_stop").write_bytes(content)
        assert one.read().startswith(UNREADABLE)
    (tmp_path / "motion_guard.emergency_stop").mkdir()
    assert other.read().startswith(UNREADABLE)
    assert Latch("", "/motion_guard").read() == ""
    for folder in ("here", "~nobody_at_all/x"):
        with pytest.raises(ConfigError, match="latch_folder"):
            Latch(folder, "/motion_guard")


def test_what_cannot_be_kept_is_told_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    latch = Latch(str(tmp_path / "file"), "/motion_guard", told.put)
    assert "file" in told.get(timeout=LATE)
    latch.clear()  # nothing to take away, but nothing could be kept either
    latch.set("the joystick")
    (tmp_path / "file").unlink()
    latch.close()  # tries once more at least
    assert Latch(str(tmp_path / "file"), "/motion_guard").read() == "the joystick"
    assert not latch.error


def test_no_stop_waits_for_the_disk(
    graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """World and guard share a thread here, as driver and guard do on the robot."""
    disk = threading.Event()
    monkeypatch.setattr("os.fsync", lambda descriptor: disk.wait(LATE))
    _, world = start(graph, latch_folder=str(tmp_path))
    world.moves()
    assert world.call(world.press).success
    world.wait(lambda: world.stands() and world.state("EMERGENCY_STOP"))
    world.drive(0.0)
    world.wait(lambda: world.call(world.reset).success)
    world.wait(lambda: list(tmp_path.iterdir()))  # written, not safe yet
    disk.set()
    world.wait(lambda: not list(tmp_path.iterdir()))


def test_a_kept_stop_is_told_before_the_guard_is_active(graph: Any, tmp_path: Path) -> None:
    latch = Latch(str(tmp_path), "/motion_guard")
    latch.set("the joystick")
    latch.close()
    world = World(graph)
    values = {"latch_folder": str(tmp_path), "autostart": False}
    overrides = [Parameter(name, value=value) for name, value in values.items()]
    graph.add(MotionGuard(context=graph.context, parameter_overrides=overrides))
    world.wait(lambda: world.states and world.states[-1].emergency_stop)


def test_a_stop_that_cannot_be_kept_stops_all_the_same(graph: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    node, world = start(graph, latch_folder=str(tmp_path / "file"))
    world.wait(lambda: world.state("EMERGENCY_STOP"))  # nobody knows whether it was pressed
    world.wait(lambda: world.call(world.reset).success)
    world.moves()
    world.wait(lambda: "latch_folder" in world.call(world.press).message)
    world.wait(lambda: world.stands() and world.state("EMERGENCY_STOP"))
    assert "latch_error" in node.diagnose()[2]
    world.drive(0.0)
    world.wait(lambda: "latch_folder" in world.call(world.reset).message)
    assert "latch_error" in node.diagnose()[2]


def test_an_obstacle_ahead_leaves_the_turn(graph: Any) -> None:
    _, world = start(graph, obstacle__scan="required", obstacle__range="optional")
    world.wait(lambda: world.state("STALE_SCAN"))
    scans = world.node.create_publisher(LaserScan, "scan", CAMERA)
    finder = world.node.create_publisher(Range, "range", CAMERA)
    distance = [5.0, 5.0]

    def look() -> None:
        now = world.node.get_clock().now().to_msg()
        scan = LaserScan(angle_min=-0.5, angle_increment=0.5, range_min=0.1, range_max=9.0)
        scan.ranges, scan.header.stamp = [math.inf, distance[0], math.nan], now
        scans.publish(scan)
        beam = Range(range=distance[1], min_range=0.1, max_range=4.0)
        beam.header.stamp = now
        finder.publish(beam)

    world.node.create_timer(0.02, look)
    world.drive(0.4, 0.3)
    world.wait(lambda: world.got(0.4, 0.3))
    for place in (0, 1):
        distance[place] = 0.5  # from the centre, or the front: 0.15 m or 0.5 m of way
        if place:
            distance[place] = 0.2
        world.wait(lambda: world.got(0.0, 0.3) and world.state("OBSTACLE"))
        assert world.states[-1].allowed
        distance[place] = 5.0
        world.wait(lambda: world.got(0.4, 0.3))


@pytest.mark.parametrize(("ranges", "greatest"), [([math.nan] * 2, 9.0), ([2.0, 2.0], 0.0)])
def test_a_scanner_that_measures_nothing_is_no_free_way(
    graph: Any, ranges: list[float], greatest: float
) -> None:
    """It is covered, or its driver left range_max empty."""
    _, world = start(graph, obstacle__scan="required")
    scans = world.node.create_publisher(LaserScan, "scan", CAMERA)
    scan = LaserScan(angle_min=-0.5, angle_increment=0.5, range_min=0.1, range_max=9.0)
    scan.ranges = [math.inf, math.nan]

    def look() -> None:
        scan.header.stamp = world.node.get_clock().now().to_msg()
        scans.publish(scan)

    world.node.create_timer(0.02, look)
    world.moves()
    scan.ranges, scan.range_max = ranges, greatest
    world.wait(lambda: world.stands() and world.state("STALE_SCAN"))


def test_deactivation_stops_first(graph: Any) -> None:
    node, world = start(graph)
    world.moves()
    node.post(node.trigger_deactivate)
    world.wait(world.stands)
    world.wait(lambda: not node.active)
    count = len(world.sent)
    world.wait(lambda: world.states and not world.states[-1].allowed)
    node.post(node.trigger_activate)
    world.wait(lambda: world.got(0.4) and len(world.sent) > count)


def test_an_error_in_the_guard_stops_the_robot(graph: Any, monkeypatch: Any) -> None:
    node, world = start(graph)
    world.moves()

    def fails(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(node._guard, "on_camera", fails)
    world.wait(world.stands)
    world.wait(lambda: node.callback_errors > 2)
    assert "STALE_CAMERA" in world.states[-1].reasons
    monkeypatch.undo()
    world.wait(lambda: world.got(0.4))


@contextlib.contextmanager
def process(**parameters: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A guard in a process of its own; the robot is somebody else's."""
    command = [sys.executable, "-m", "collab_llm_nodes.nodes.motion", "--driver", "none"]
    command += ["--ros-args", "-p", "freshness.max_age:=0.0", "-p", "limits.linear_speed:=0.8"]
    for name, value in parameters.items():
        command += ["-p", f"{name}:={value}"]
    with subprocess.Popen(command) as guard:
        try:
            yield guard
        finally:
            guard.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_robot_before_the_process_ends(graph: Any, number: int) -> None:
    world = World(graph)
    with process() as guard:
        world.drive(0.4)
        world.wait(lambda: world.got(0.4) or guard.poll() is not None)
        guard.send_signal(number)
        assert guard.wait(timeout=LATE) == 0
        world.wait(world.stands)


def test_a_pressed_stop_outlives_a_guard_that_was_killed(graph: Any, tmp_path: Path) -> None:
    world, folder = World(graph), tmp_path / "made when needed"
    with process(latch_folder=folder) as guard:
        world.moves()
        assert world.call(world.press).success
        world.wait(world.stands)
        world.wait(lambda: any(f.read_text() for f in folder.glob("*")))  # no stop waits for it
        guard.kill()
        guard.wait()
    killed = world.node.get_clock().now().nanoseconds
    with process(latch_folder=folder):
        world.wait(lambda: Time.from_msg(world.states[-1].header.stamp).nanoseconds > killed)
        world.wait(lambda: world.state("EMERGENCY_STOP"))
        assert "set by the service emergency_stop" in world.states[-1].text
        assert world.stands()
        world.drive(0.0)
        world.wait(lambda: world.call(world.reset).success)
        world.wait(lambda: not list(folder.glob("*")))
        world.moves()


# The robot's nodes were started twice.


def twice(node: MotionGuard) -> bool:
    """Return True if the guard reports that another one is there."""
    level, message, _ = node.diagnose()
    return level == Level.ERROR and "started twice" in message


def test_two_guards_refuse_motion_until_one_is_gone(graph: Any) -> None:
    one, world = start(graph)
    world.moves()
    other = guard(graph)
    world.wait(lambda: twice(one) and twice(other))
    assert f"motion_guard of process {os.getpid()}" in one.diagnose()[1]
    before = len(world.sent)
    world.wait(lambda: len(world.sent) > before + 20)  # what was sent earlier has arrived
    begin = len(world.sent)
    world.wait(lambda: len(world.sent) > begin + 40)  # each command is answered with zero
    assert not any(twist.linear.x for twist in world.sent[begin:])
    world.wait(lambda: "STARTED_TWICE" in world.states[-1].reasons)
    assert not world.states[-1].allowed
    graph.do(other.stop)
    world.wait(lambda: world.got(0.4))
    assert not twice(one)


def test_a_stop_reaches_the_other_guard_and_one_that_comes_later(graph: Any) -> None:
    one, world = start(graph, joy_button=2)
    other = guard(graph)  # has no joystick

    def pressed(node: MotionGuard) -> bool:
        return "EMERGENCY_STOP" in node.diagnose()[2]["reasons"]

    world.wait(lambda: world.joy.get_subscription_count() == 2)
    world.joy.publish(Joy(buttons=[0, 0, 1]))
    world.wait(lambda: pressed(other))
    assert "another guard" in other.diagnose()[1]
    graph.do(other.stop)
    later = guard(graph)
    world.wait(lambda: pressed(later))
    world.wait(lambda: world.call(world.press).success)
    graph.do(one.stop)
    world.wait(lambda: world.call(world.reset).success and not pressed(later))
    world.moves()


def test_a_stop_is_no_success_while_a_guard_does_not_confirm_it(graph: Any) -> None:
    one, world = start(graph)
    with process() as other:
        world.wait(lambda: f"process {other.pid}" in one.diagnose()[1])
        freeze(other.pid)
        answer = world.call(world.press)
        assert not answer.success
        assert f"not confirmed by all: motion_guard of process {other.pid}." in answer.message
        world.wait(lambda: "STOP_UNCONFIRMED" in world.states[-1].reasons)
        other.send_signal(signal.SIGCONT)
        world.wait(lambda: world.call(world.press).success)  # it does now
    world.wait(lambda: not twice(one))  # no wait for the graph to forget who was killed
    assert world.call(world.press).success


def test_no_motion_topic_of_the_guard_is_forgotten(graph: Any) -> None:
    """All that it hears or says, but sensors, velocities to be judged, and ways to stop it."""
    node, _ = start(graph, stamped=False)
    own = node.get_publisher_names_and_types_by_node("motion_guard", "/")
    heard = node.get_subscriber_names_and_types_by_node("motion_guard", "/")
    mine = {
        name.lstrip("/")
        for name, kinds in (*own, *heard)
        if not any(
            kind.startswith(("rcl_interfaces/", "diagnostic_", "lifecycle_")) for kind in kinds
        )
    }
    mine = {name for name in mine if not name.startswith("emergency_stop")}
    assert mine - MOTION_TOPICS.keys() == {"scan", "range", "joy", "cmd_vel_nav"}


@pytest.mark.parametrize("topic", MOTION_TOPICS)
def test_a_foreign_publisher_is_named_and_nothing_moves_until_it_is_gone(
    graph: Any, topic: str, capfd: pytest.CaptureFixture[str]
) -> None:
    kinds = {
        "cmd_vel": Twist,
        "motion_state": MotionState,
        "observation": Observation,
        "link_state": LinkState,
        "odom": Odometry,
    }
    node, world = start(graph)
    kind = kinds.get(topic, Bool)
    if topic not in kinds:  # the others have a publisher
        graph.node(MOTION_TOPICS[topic][0]).create_publisher(kind, topic, RESULT)
    world.moves()
    stranger = graph.node("intruder", namespace="/lab")
    publisher = stranger.create_publisher(kind, f"/{topic}", RESULT)
    world.wait(lambda: world.state("FOREIGN_PUBLISHER"))
    assert f"{topic} by /lab/intruder" in world.states[-1].text  # as the dashboard shows it
    assert not world.states[-1].allowed
    world.wait(world.stands)
    level, message, values = node.diagnose()
    assert level == Level.ERROR
    assert "/lab/intruder" in message
    assert "/lab/intruder" in values[f"publishers.{topic}"]
    graph.do(stranger.destroy_publisher, publisher)
    world.wait(lambda: world.got(0.4))  # whoever commands goes on commanding
    told = capfd.readouterr().err
    assert "does not move" in told
    assert f"{topic} by /lab/intruder" in told


def test_a_guard_that_cannot_read_the_graph_refuses_motion_and_goes_on(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(topic: str) -> Any:
        raise RuntimeError("the middleware has no memory")

    node, world = start(graph)
    world.moves()
    monkeypatch.setattr(node, "get_publishers_info_by_topic", fail)
    world.wait(lambda: world.state("FOREIGN_PUBLISHER"))
    world.wait(world.stands)
    assert "the middleware has no memory" in world.states[-1].text
    assert (endpoints := node._endpoints) is not None
    endpoints._looked_at = -math.inf
    graph.do(node.report_health)  # looks, and does not raise
    assert endpoints._looked_at > 0.0
    monkeypatch.undo()
    world.wait(lambda: world.got(0.4))


def test_who_takes_an_owners_place_or_has_its_name_is_no_stranger(graph: Any) -> None:
    """A camera node of one's own; a bridge that was killed is in the graph for 20 s more."""
    node, world = start(graph)
    twin = graph.node("cloud_verifier_bridge", namespace="/old")
    other = graph.node("cloud_verifier_bridge")
    world.silent = {"link"}
    graph.do(world.node.destroy_publisher, world.publishers["link"])
    for each in (twin, other):
        each.create_publisher(LinkState, "/link_state", STATE)
    world.wait(lambda: node.diagnose()[2].get("publishers.observation") == "/world")
    world.wait(lambda: len(node.diagnose()[2]["publishers.link_state"].split()) == 2)
    seen = len(world.states)
    world.wait(lambda: len(world.states) > seen + 8)  # 2 s: four looks
    assert not any("FOREIGN_PUBLISHER" in state.reasons for state in world.states)


def test_guards_of_other_robots_are_none_of_our_business(graph: Any) -> None:
    one, world = start(graph, joy_button=2)
    other = guard(graph, "robot2")
    world.moves()
    world.wait(lambda: world.node.count_publishers("/robot2/motion_state"))
    begin = len(world.sent)
    world.wait(lambda: len(world.sent) > begin + 60)
    assert all(twist.linear.x for twist in world.sent[begin:])
    assert not any("STARTED_TWICE" in state.reasons for state in world.states)
    world.joy.publish(Joy(buttons=[0, 0, 1]))
    world.wait(lambda: world.state("EMERGENCY_STOP"))
    assert world.call(world.press).success
    assert not other.diagnose()[2]["reasons"].startswith("EMERGENCY_STOP")
    assert not twice(one)


def test_a_guard_on_this_machine_that_the_graph_does_not_show_forbids_motion(graph: Any) -> None:
    lock = HostLock(f"motion_guard.{graph.domain_id}")
    assert lock.take() == ""
    try:
        _, world = start(graph)
        world.drive(0.4)
        world.wait(lambda: world.state("STARTED_TWICE"))
        assert f"process {os.getpid()} has locked" in world.states[-1].text
        assert world.stands() or not world.sent
        answer = world.call(world.press)
        assert not answer.success
        assert f"process {os.getpid()} has locked" in answer.message
        world.drive(0.0)
    finally:
        lock.release()
    world.wait(lambda: world.call(world.press).success)
    world.wait(lambda: world.call(world.reset).success)
    world.moves()


def test_drivers_have_names() -> None:
    command = [sys.executable, "-m", "collab_llm_nodes.nodes.motion", "--driver", "tank"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "{go2,sim,none}" in done.stderr
