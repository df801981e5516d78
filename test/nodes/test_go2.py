"""go2_driver as a real node, against a robot that behaves as a Go2 does; and the whole chain."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
pytest.importorskip(
    "unitree_go", reason="test interfaces not built: run the tests with `make test`"
)

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from fake_sport_server import BALANCE, DAMPING, LOCKED, FakeGo2
from geometry_msgs.msg import Twist, TwistStamped
from motion_graph import ANGULAR, LINEAR, Robot, graph, reached
from nav_msgs.msg import Odometry
from sensor_msgs.msg import Imu, Joy
from signals import freeze
from started_nodes import start
from std_srvs.srv import Trigger

from collab_llm.msg import MotionState, NavigationAction, Status
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.nodes.go2_driver import Go2Driver
from collab_llm_nodes.nodes.motion_guard import MotionGuard
from collab_llm_nodes.nodes.motion_watchdog import MotionWatchdog
from collab_llm_nodes.robot.go2.sport import Api, Requests
from collab_llm_nodes.ros.qos import COMMAND, STATE

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # a fixture

LATE = 30.0  # s: for a busy machine
PATIENT = {"watchdog": 0.5, "state_timeout": 0.5, "avoid": False}


class Stage:
    """A fake robot, its driver (``None``: in another process), and somebody who commands it."""

    def __init__(
        self,
        graph: Any,
        driver: dict[str, Any] | None = None,
        topic: str = "cmd_vel",
        **behaviour: Any,
    ) -> None:
        self.graph = graph
        self.user = graph.node("user")
        self.robot = FakeGo2(graph.node("go2"), **behaviour)
        self.server = self.robot.server
        kind = TwistStamped if driver and driver.get("stamped") else Twist
        self.command: Any = kind()
        self.commands = self.user.create_publisher(kind, topic, COMMAND)
        self.talks = True
        self.user.create_timer(0.05, self._command)
        self.odometry: list[Odometry] = graph.collect(self.user, Odometry, "odom", COMMAND)
        self.imu: list[Imu] = graph.collect(self.user, Imu, "imu")
        self.health: list[DiagnosticArray] = graph.collect(
            self.user, DiagnosticArray, "/diagnostics"
        )
        if driver is not None:
            self.driver = start(graph, Go2Driver, **{**PATIENT, **driver})
        self.wait(lambda: self.user.count_subscribers(topic))
        self.wait(lambda: self.odometry)

    @functools.cached_property
    def states(self) -> Any:
        """Publish what motion_guard would say; not where there is one."""
        return self.user.create_publisher(MotionState, "motion_state", STATE)

    def _command(self) -> None:
        if self.talks:
            self.commands.publish(self.command)

    def drive(self, x: float = 0.0, y: float = 0.0, yaw: float = 0.0) -> None:
        """Command this from now on."""
        twist = getattr(self.command, "twist", self.command)
        twist.linear.x, twist.linear.y, twist.angular.z = x, y, yaw

    def wait(self, condition: Callable[[], Any]) -> Any:
        return self.graph.wait_for(condition, LATE)

    def walks(self) -> None:
        """Command motion and see it."""
        self.drive(0.4)
        self.wait(lambda: self.server.velocity[0] > 0.35)

    def stands(self) -> bool:
        return all(abs(v) < 1e-3 for v in self.server.velocity)

    def says(self, level: bytes, words: str) -> Callable[[], bool]:
        """Return True if the driver's newest report has ``level`` and ``words``."""

        def look() -> bool:
            own = [s for a in self.health for s in a.status if s.name == "go2_driver: node"]
            return bool(own) and own[-1].level == level and words in own[-1].message

        return look

    def count(self, number: int, service: str = "sport") -> int:
        return len(self.robot.requests(service, number))


# Moving and stopping.


def test_it_drives_a_robot_and_stops_it(graph: Any) -> None:
    stage = Stage(graph, {})
    assert stage.count(1003) >= 1  # it begins with a stop
    stage.walks()
    ticks = stage.driver._clock_timer
    assert ticks.timer_period_ns == 20_000_000
    stage.drive(0.0, 0.0, 0.5)
    stage.wait(lambda: stage.server.velocity[2] > 0.45 and abs(stage.server.velocity[0]) < 0.01)
    stops = stage.count(1003)
    stage.drive()
    stage.wait(lambda: stage.count(1003) > stops)
    stage.wait(stage.stands)
    stage.wait(lambda: stage.driver._go2.phase.value == "standing")
    stage.wait(lambda: ticks.timer_period_ns == 100_000_000)  # at rest it wakes less often
    numbers = {(s, n) for s, n, _ in stage.server.log}
    assert numbers == {("sport", 1003), ("sport", 1008)}
    assert max(stage.server.ids.values()) == 1  # every number once
    move = stage.robot.requests("sport", 1008)[0]
    assert set(move) == {"x", "y", "z"}


def test_stamped_velocities(graph: Any) -> None:
    stage = Stage(graph, {"stamped": True})
    stage.walks()


def test_cmd_vel_that_falls_silent_stops_the_robot(graph: Any) -> None:
    stage = Stage(graph, {"watchdog": 0.3})
    stage.walks()
    stops = stage.count(1003)
    stage.talks = False
    stage.wait(lambda: stage.count(1003) > stops)
    stage.wait(stage.stands)


def test_a_robot_that_falls_silent_is_stopped_and_reported(graph: Any) -> None:
    stage = Stage(graph, {})
    stage.walks()
    stage.robot.powered = False
    stage.wait(stage.says(DiagnosticStatus.ERROR, "STALE_STATE"))
    assert stage.driver._go2.refusing
    stage.drive()
    stage.robot.powered = True
    stage.wait(stage.says(DiagnosticStatus.OK, "active"))
    stage.wait(stage.stands)


def test_deactivation_stops_until_the_robot_has_answered(graph: Any) -> None:
    stage = Stage(graph, {})
    stage.walks()
    stage.server.mute.add(("sport", 1003))
    stops = stage.count(1003)
    stage.driver.post(stage.driver.trigger_deactivate)
    stage.wait(lambda: stage.count(1003) >= stops + 3)  # repeated, though inactive
    stage.server.mute.clear()
    stage.wait(lambda: stage.driver._go2.phase.value == "standing")
    stage.wait(stage.stands)
    assert stage.command.linear.x == 0.4  # that goes on being commanded, and moves nothing
    moves = stage.count(1008)
    stage.driver.post(stage.driver.trigger_activate)
    stage.wait(lambda: stage.count(1008) > moves)


def test_an_exception_in_a_callback_stops_the_robot(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(graph, {})
    stage.walks()
    stops = stage.count(1003)

    def fails(*_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(stage.driver, "_publish", fails)
    stage.wait(lambda: stage.count(1003) > stops)
    stage.wait(lambda: stage.driver.callback_errors)
    stage.talks = False
    stage.wait(stage.stands)


@contextlib.contextmanager
def process(*words: str, **parameters: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A module of nodes with its arguments, in a process of its own."""
    module, *arguments = words
    settings = [w for name, value in parameters.items() for w in ("-p", f"{name}:={value}")]
    command = [sys.executable, "-m", f"collab_llm_nodes.nodes.{module}", *arguments]
    with subprocess.Popen([*command, "--ros-args", *settings]) as child:
        try:
            yield child
        finally:
            child.kill()


GUARD = {
    "needs_camera": False,
    "link_policy": "ignore",
    "freshness.odometry": 0.5,
    "limits.linear_speed": 0.8,
}


@pytest.mark.parametrize(
    ("words", "topic"),
    [(("go2_driver",), "cmd_vel"), (("motion", "--driver", "go2"), "cmd_vel_nav")],
    ids=["driver", "guard and driver"],
)
def test_a_signal_stops_the_robot_before_the_process_ends(
    graph: Any, words: tuple[str, ...], topic: str
) -> None:
    guard = {f"motion_guard:{name}": value for name, value in GUARD.items()}
    driver = {f"go2_driver:{name}": value for name, value in PATIENT.items()}
    with process(*words, **guard, **driver) as child:
        stage = Stage(graph, topic=topic)
        stage.walks()
        moves = stage.count(1008)
        stage.wait(lambda: stage.count(1008) > moves)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60.0) == 0
        last = [n for s, n, _ in stage.server.log if s == "sport"][-1]
        assert last == 1003
        stage.wait(stage.stands)


def test_the_guard_killed_during_a_motion_the_driver_stops(graph: Any) -> None:
    with process("motion_guard", **GUARD) as child:
        stage = Stage(graph, {}, topic="cmd_vel_nav")
        stage.walks()
        stops = stage.count(1003)
        child.kill()
        stage.wait(lambda: stage.count(1003) > stops)
        stage.wait(stage.stands)


# The watchdog, for a driver that is killed.


def silences(stage: Stage) -> bool:
    """Return True if the last request for motion is a stop."""
    return next(n for s, n, _ in reversed(stage.server.log) if s == "sport") == 1003


@pytest.mark.parametrize("killed", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("words", "topic"),
    [(("go2_driver",), "cmd_vel"), (("motion", "--driver", "go2"), "cmd_vel_nav")],
    ids=["driver", "guard and driver"],
)
def test_the_watchdog_stops_a_robot_whose_driver_was_killed_or_hangs(
    graph: Any, words: tuple[str, ...], topic: str, killed: signal.Signals
) -> None:
    guard = {f"motion_guard:{name}": value for name, value in GUARD.items()}
    driver = {f"go2_driver:{name}": value for name, value in PATIENT.items()}
    watchdog = start(graph, MotionWatchdog)
    with process(*words, **guard, **driver) as child:
        stage = Stage(graph, topic=topic)
        stage.walks()
        child.send_signal(killed)
        stage.wait(lambda: silences(stage) and watchdog._stops > 3)
        stage.wait(stage.stands)
        # It goes on for longer than the robot holds a Move, and then falls silent.
        stage.wait(lambda: not watchdog._watchdog.watches)


def test_the_watchdog_stops_the_obstacle_avoidance_too(graph: Any) -> None:
    watchdog = start(graph, MotionWatchdog)
    with process("go2_driver", watchdog=0.5) as child:
        stage = Stage(graph)
        stage.walks()
        assert not stage.count(1008)
        child.kill()
        stage.wait(lambda: watchdog._stops and silences(stage))
        stage.wait(stage.stands)


def test_the_watchdog_ends_with_a_stop_if_the_robot_moves(graph: Any) -> None:
    watchdog = start(graph, MotionWatchdog)
    stage = Stage(graph, {})
    stage.walks()
    stage.wait(lambda: watchdog._watchdog.watches)
    assert not watchdog._stops
    graph.do(watchdog.trigger_deactivate)
    assert watchdog._stops == 1
    stage.drive()
    stage.wait(stage.stands)


def test_the_watchdog_is_no_driver_and_can_send_nothing_but_stop_move(graph: Any) -> None:
    watchdog = start(graph, MotionWatchdog)
    stage = Stage(graph, {})
    stage.walks()
    stage.wait(lambda: watchdog._watchdog.watches)
    seen = len(stage.odometry)
    stage.wait(lambda: len(stage.odometry) > seen + 60)  # looks twice for other drivers meanwhile
    assert not stage.driver._peers.trouble
    sent = {
        topic
        for topic, kinds in watchdog.get_publisher_names_and_types_by_node("motion_watchdog", "/")
        if "unitree_api/msg/Request" in kinds
    }
    assert sent == {"/api/sport/request"}
    for api in set(Api) - {Api.STOP_MOVE}:
        with pytest.raises(ValueError, match=api.name):
            watchdog._api.send([Requests(1.0).make(api, {}, 0.0)])


# A dry run.


def test_a_dry_run_of_the_driver_asks_nothing_but_stop_move(graph: Any) -> None:
    stage = Stage(graph, {"dry_run": True, "avoid": True})
    stage.drive(0.4)
    stage.wait(lambda: stage.driver._go2.refusing)
    seen = len(stage.odometry)
    stage.wait(lambda: len(stage.odometry) > seen + 50)  # it goes on measuring
    assert {(s, n) for s, n, _ in stage.server.log} == {("sport", 1003)}
    topics = stage.driver.get_publisher_names_and_types_by_node("go2_driver", "/")
    assert "/api/obstacles_avoid/request" not in dict(topics)
    stage.wait(stage.says(DiagnosticStatus.WARN, "DRY_RUN"))


def test_a_dry_run_shows_the_steps_and_moves_nothing(graph: Any) -> None:
    script = ["the next action is move forward 25 cm", "turn left 30 degree", "stop"]
    robot = Robot(graph, script, output="none")  # what the launch argument dry_run sets
    robot.leave_to_others()
    guard = start(graph, MotionGuard, dry_run=True)
    stage = Stage(graph, {"dry_run": True})
    stage.drive(0.4)  # somebody else publishes cmd_vel
    sent: list[Twist] = graph.collect(stage.user, Twist, "cmd_vel_nav", COMMAND)
    result = robot.navigate()
    assert (result.status.code, result.steps) == (Status.OK, 3)
    assert "nothing moved" in result.status.message
    assert [f.action.kind for f in robot.feedback] == [
        NavigationAction.FORWARD,
        NavigationAction.TURN,
    ]
    assert not any(twist.linear.x or twist.angular.z for twist in sent)
    assert guard.diagnose()[2]["reasons"].startswith("DRY_RUN")
    assert {(s, n) for s, n, _ in stage.server.log} == {("sport", 1003)}
    assert stage.stands()


# The robot's nodes were started twice.


def test_two_drivers_do_not_move_the_robot_until_one_is_gone(graph: Any) -> None:
    stage = Stage(graph, {})
    stage.walks()
    other = start(graph, Go2Driver, **PATIENT)
    stage.wait(stage.says(DiagnosticStatus.ERROR, "STARTED_TWICE"))
    stage.wait(stage.stands)
    moves, seen = stage.count(1008), len(stage.odometry)
    stage.wait(lambda: len(stage.odometry) > seen + 20)  # cmd_vel goes on meanwhile
    assert stage.count(1008) == moves
    graph.do(other.stop)
    stage.wait(lambda: stage.server.velocity[0] > 0.35)


def test_the_state_may_be_that_of_the_slow_topic(graph: Any) -> None:
    driver = start(graph, Go2Driver, state_topic="/lf/sportmodestate", **PATIENT)
    heard = [driver.count_subscribers(name) for name in ("/lf/sportmodestate", "/sportmodestate")]
    graph.do(driver.stop)
    assert heard == [1, 0]


def test_a_driver_in_another_namespace_has_the_same_robot(graph: Any) -> None:
    stage = Stage(graph, {})
    stage.walks()
    other = Go2Driver(context=graph.context, namespace="other")
    graph.add(other)
    graph.do(other.start)
    stage.wait(stage.says(DiagnosticStatus.ERROR, "go2_driver in the namespace /other"))
    stage.wait(stage.stands)
    graph.do(other.stop)
    stage.wait(lambda: stage.server.velocity[0] > 0.35)


def test_two_guards_stop_the_driver_too(graph: Any) -> None:
    stage = Stage(graph, {})
    stage.walks()
    for _ in range(2):
        start(graph, MotionGuard)
    stage.wait(stage.says(DiagnosticStatus.ERROR, "STARTED_TWICE"))
    stage.wait(stage.stands)


def test_a_stop_is_no_success_while_the_driver_does_not_confirm_it(graph: Any) -> None:
    guard = start(graph, MotionGuard)
    with process("go2_driver") as child:
        stage = Stage(graph)
        stage.wait(lambda: guard.count_publishers("odom"))
        press = stage.user.create_client(Trigger, "emergency_stop")
        stage.wait(press.service_is_ready)
        freeze(child.pid)
        answer = graph.ask(press.call_async, Trigger.Request(), timeout=LATE)
        assert not answer.success
        assert f"go2_driver of process {child.pid}" in answer.message
        child.send_signal(signal.SIGCONT)

        def confirmed() -> bool:
            return bool(graph.ask(press.call_async, Trigger.Request(), timeout=LATE).success)

        stage.wait(confirmed)


@pytest.mark.parametrize(
    ("service", "name"),
    [("sport", "dance_app"), ("obstacles_avoid", "dance_app"), ("sport", "_ros2cli_4711")],
)
def test_another_program_that_moves_the_robot_is_named_and_the_driver_stops(
    graph: Any, service: str, name: str
) -> None:
    from unitree_api.msg import Request

    stage = Stage(graph, {})
    start(graph, MotionWatchdog)
    graph.node("_CREATED_BY_BARE_DDS_APP_").create_publisher(Request, f"/api/{service}/request", 10)
    stage.walks()
    stranger = graph.node(name)
    publisher = stranger.create_publisher(Request, f"/api/{service}/request", 10)
    stage.wait(stage.says(DiagnosticStatus.ERROR, f"/api/{service}/request by /{name}"))
    stage.wait(lambda: stage.driver._go2.refusing and stage.stands())
    graph.do(stranger.destroy_publisher, publisher)
    stage.wait(lambda: stage.server.velocity[0] > 0.35)


def test_velocities_of_a_stranger_beside_the_guard_move_nothing(graph: Any) -> None:
    guard = start(graph, MotionGuard)
    stage = Stage(graph, {})
    stage.drive(0.4)  # on cmd_vel, as motion_guard
    stage.wait(stage.says(DiagnosticStatus.ERROR, "cmd_vel by /user"))
    stage.wait(lambda: stage.driver._go2.refusing and stage.stands())
    moves, seen = stage.count(1008), len(stage.odometry)
    stage.wait(lambda: len(stage.odometry) > seen + 100)  # the stranger goes on
    assert (stage.count(1008), stage.stands()) == (moves, True)
    graph.do(guard.stop)
    graph.do(guard.destroy_node)
    stage.wait(lambda: stage.server.velocity[0] > 0.35)  # now it has the topic for itself


# A robot that does not obey.


def test_locked_joints_are_unlocked_and_it_walks(graph: Any) -> None:
    stage = Stage(graph, {}, machine=LOCKED)
    stage.wait(stage.says(DiagnosticStatus.WARN, "LOCKED"))
    stage.walks()
    assert stage.count(1002) >= 1
    stage.wait(stage.says(DiagnosticStatus.OK, "active"))


def test_a_robot_in_damping_is_reported_and_left_alone(graph: Any) -> None:
    stage = Stage(graph, {}, machine=DAMPING)
    stage.drive(0.4)
    stage.wait(stage.says(DiagnosticStatus.ERROR, "DAMPED"))
    stage.wait(lambda: stage.driver._go2.refusing)
    assert not stage.count(1008)
    assert not stage.count(1002)


def test_a_deaf_robot_is_reported_by_its_measured_velocity(graph: Any) -> None:
    stage = Stage(graph, {}, deaf_until=math.inf)
    stage.drive(0.4)
    stage.wait(stage.says(DiagnosticStatus.ERROR, "DEAF"))
    stage.wait(lambda: stage.count(1002))
    stage.server.deaf_until = -math.inf
    stage.wait(lambda: stage.server.velocity[0] > 0.3)
    stage.wait(stage.says(DiagnosticStatus.OK, "active"))


def test_what_the_robot_refuses_is_said_in_words(graph: Any) -> None:
    stage = Stage(graph, {}, codes={("sport", 1003): 3205})
    stage.wait(stage.says(DiagnosticStatus.ERROR, "another program has exclusive use"))


def test_without_the_vendors_packages_the_error_says_what_to_install(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("unitree_go.msg", "unitree_api.msg"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            node = Go2Driver(context=graph.context)
            with pytest.raises(ConfigError, match=f"{package[:-4]}.*unitree_ros2"):
                node.configure()
            node.destroy_node()


# The emergency stop.


def test_an_emergency_stop_ends_motion_that_did_not_come_from_us(graph: Any) -> None:
    stage = Stage(graph, {})
    stage.talks = False
    stage.wait(lambda: stage.driver._go2.phase.value == "standing")
    stops = stage.count(1003)
    stage.states.publish(MotionState(allowed=False, emergency_stop=True))
    stage.wait(lambda: stage.count(1003) > stops)
    stage.wait(lambda: stage.driver._go2.phase.value == "standing")
    stops = stage.count(1003)
    stage.states.publish(MotionState(allowed=False, emergency_stop=True))  # it lasts
    stage.states.publish(MotionState(allowed=True))
    stage.wait(lambda: not stage.driver._emergency)
    assert stage.count(1003) == stops  # the remote control may walk it meanwhile


def test_while_the_emergency_stop_lasts_nobodys_velocity_is_carried_out(graph: Any) -> None:
    stage = Stage(graph, {})
    stage.drive(0.3)
    stage.wait(lambda: stage.count(1008) > 3)
    stage.states.publish(MotionState(allowed=False, emergency_stop=True))
    stage.wait(lambda: stage.driver._go2.phase.value == "standing")
    moves, seen = stage.count(1008), len(stage.odometry)
    stage.wait(lambda: len(stage.odometry) > seen + 10)  # cmd_vel goes on meanwhile
    assert stage.count(1008) == moves
    stage.states.publish(MotionState(allowed=True))
    stage.wait(lambda: stage.count(1008) > moves)


def test_a_key_of_the_robots_remote_control_can_be_the_emergency_stop(graph: Any) -> None:
    from unitree_go.msg import WirelessController

    stage = Stage(graph, {})
    start(graph, MotionGuard, joy_button=9)
    seen: list[Joy] = graph.collect(stage.user, Joy, "joy")
    states: list[MotionState] = graph.collect(stage.user, MotionState, "motion_state", STATE)
    keys = WirelessController(lx=0.1, ly=0.2, rx=0.3, ry=0.4, keys=1 << 3)

    def press() -> Any:
        stage.robot.remote_control.publish(keys)
        return seen and seen[-1].buttons[3]

    stage.wait(press)
    assert list(seen[-1].axes) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert sum(seen[-1].buttons) == 1
    assert not any(s.emergency_stop for s in states)
    keys.keys = 1 << 9
    stage.wait(lambda: press() is not None and any(s.emergency_stop for s in states))


def test_joy_and_tf_can_be_left_out(graph: Any) -> None:
    stage = Stage(graph, {"publish_joy": False, "publish_tf": False})
    topics = dict(stage.driver.get_topic_names_and_types())
    own = stage.driver.get_publisher_names_and_types_by_node("go2_driver", "/")
    assert {"/joy", "/tf"}.isdisjoint(name for name, _ in own)
    assert "/odom" in topics


# What the robot measures.


def test_odometry_and_imu_are_in_roses_axes_and_frames(graph: Any) -> None:
    frames = {"odom_frame": "map_odom", "base_frame": "base", "imu_frame": "imu"}
    stage = Stage(graph, frames)
    tf = pytest.importorskip("tf2_msgs.msg")
    transforms = graph.collect(stage.user, tf.TFMessage, "/tf")
    stage.server.x, stage.server.y, stage.server.yaw = 1.0, 2.0, math.radians(90)
    stage.wait(lambda: stage.odometry[-1].pose.pose.position.x > 0.9)
    stage.wait(lambda: transforms and transforms[-1].transforms[0].transform.translation.x > 0.9)
    odometry, imu = stage.odometry[-1], stage.imu[-1]
    assert (odometry.header.frame_id, odometry.child_frame_id) == ("map_odom", "base")
    position, q = odometry.pose.pose.position, odometry.pose.pose.orientation
    assert (position.x, position.y, position.z) == pytest.approx((1.0, 2.0, 0.3), abs=1e-3)
    half = math.sqrt(0.5)
    assert (q.x, q.y, q.z, q.w) == pytest.approx((0.0, 0.0, half, half), abs=1e-3)
    assert imu.header.frame_id == "imu"
    assert imu.linear_acceleration.z == pytest.approx(9.81, abs=1e-3)
    transform = transforms[-1].transforms[0]
    assert (transform.header.frame_id, transform.child_frame_id) == ("map_odom", "base")
    assert transform.transform.rotation.z == pytest.approx(half, abs=1e-3)
    stage.drive(0.4)  # towards +y of the odometry's frame
    stage.wait(lambda: stage.odometry[-1].twist.twist.linear.x > 0.3)
    assert stage.odometry[-1].twist.twist.linear.y == pytest.approx(0.0, abs=1e-3)
    stage.drive(0.0, 0.0, 0.5)
    stage.wait(lambda: stage.odometry[-1].twist.twist.angular.z > 0.4)
    stage.wait(lambda: stage.imu[-1].angular_velocity.z > 0.4)


def test_velocities_of_firmware_that_reports_them_in_the_odometrys_frame(graph: Any) -> None:
    stage = Stage(graph, {"velocity_frame": "odom"})
    stage.server.yaw = math.radians(90)
    stage.drive(0.4)
    # The fake robot says (0.4, 0) of the body; read as the odometry's that is to its right.
    stage.wait(lambda: stage.odometry[-1].twist.twist.linear.y < -0.3)
    assert stage.odometry[-1].twist.twist.linear.x == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize(
    ("stamps", "offset"), [("receive", 0.0), ("aligned", 0.0), ("robot", -1000.0)]
)
def test_stamps(graph: Any, stamps: str, offset: float) -> None:
    """``robot`` is the robot's clock as it is, here 1000 s slow; the other two are ours."""
    stage = Stage(graph, {"stamps": stamps})
    stage.robot.clock_ahead = -1000.0

    def measured() -> float:
        stamp = stage.odometry[-1].header.stamp
        now = stage.user.get_clock().now().nanoseconds * 1e-9
        return stamp.sec + stamp.nanosec * 1e-9 - now

    stage.wait(lambda: offset - 1.0 < measured() < offset + 0.05)


def test_late_odometry_is_stamped_as_late(graph: Any) -> None:
    stage = Stage(graph, {})
    stage.robot.delay = 3.0
    count = len(stage.odometry)
    stage.wait(lambda: len(stage.odometry) > count + 3)
    stamp = stage.odometry[-1].header.stamp
    now = stage.user.get_clock().now().nanoseconds * 1e-9
    assert now - (stamp.sec + stamp.nanosec * 1e-9) > 2.9


def test_odometry_rate(graph: Any) -> None:
    stage = Stage(graph, {"odometry_rate": 5.0})
    stage.wait(lambda: len(stage.odometry) >= 5)
    stamps = [o.header.stamp.sec + o.header.stamp.nanosec * 1e-9 for o in stage.odometry[:5]]
    assert min(np.diff(stamps)) > 0.12


def test_a_state_that_is_no_number_is_no_odometry(graph: Any) -> None:
    stage = Stage(graph, {})
    stage.walks()
    stage.server.velocity[0] = math.nan
    stage.wait(lambda: stage.driver.callback_errors)
    assert not any(math.isnan(o.twist.twist.linear.x) for o in stage.odometry)
    stage.wait(lambda: stage.driver._go2.refusing)
    stage.server.velocity[0] = 0.0


# Obstacle avoidance.


def test_avoid_moves_by_the_robots_obstacle_avoidance(graph: Any) -> None:
    stage = Stage(graph, {"avoid": True})
    stage.walks()
    assert not stage.count(1008)
    assert stage.robot.requests("obstacles_avoid", 1003)[-1]["mode"] == 0
    stage.driver.post(stage.driver.trigger_deactivate)
    stage.wait(stage.stands)
    stage.wait(lambda: not stage.server.remote)


def test_the_guard_knows_whether_the_robot_avoids_obstacles(graph: Any) -> None:
    guard = start(graph, MotionGuard)
    stage = Stage(graph, {"avoid": True})

    def watched_by() -> Any:
        return guard.diagnose()[2]["obstacle_stop"]

    stage.wait(lambda: watched_by() == "robot")
    stage.server.switches_needed = 99  # somebody switches it off by the remote control
    stage.wait(lambda: watched_by() == "none")


# The whole chain: text, parser, navigator, guard, driver, robot.


class Chain:
    """The robot's nodes around a fake Go2; what the model says is scripted."""

    def __init__(self, graph: Any, script: list[Any], **navigator: Any) -> None:
        self.robot = Robot(graph, script, **navigator)
        self.robot.leave_to_others()
        guard = {f"freshness__{what}": 0.5 for what in ("command", "odometry", "camera")}
        guard |= {"limits__linear_speed": 0.8, "limits__angular_speed": 1.5}
        self.guard = start(graph, MotionGuard, link_policy="ignore", **guard)
        self.stage = Stage(graph, {}, topic="cmd_vel_nav")  # cmd_vel is the guard's alone
        self.stage.talks = False

    @property
    def server(self) -> Any:
        return self.stage.server


def test_a_text_moves_the_robot_by_25_cm(graph: Any) -> None:
    chain = Chain(graph, ["the next action is move forward 25 cm", "the next action is stop"])
    result = chain.robot.navigate()
    assert (result.status.code, result.steps) == (Status.OK, 2)
    chain.stage.wait(chain.stage.stands)
    assert reached(chain.server.travelled, 0.25, 0.06, LINEAR)
    assert reached(chain.server.x, 0.25, 0.06, LINEAR)
    assert chain.server.machine == BALANCE
    assert {n for s, n, _ in chain.server.log if s == "sport"} == {1003, 1008}


def test_a_text_turns_the_robot_and_an_unreadable_one_does_nothing(graph: Any) -> None:
    chain = Chain(graph, ["the next action is turn right 30 degree", "dance", "stop"])
    result = chain.robot.navigate()
    assert result.status.code == Status.OK
    chain.stage.wait(chain.stage.stands)
    assert reached(-chain.server.yaw, math.radians(30), 0.1, ANGULAR)
    assert chain.server.travelled < 0.05


def test_the_emergency_stop_reaches_the_robot_during_a_motion(graph: Any) -> None:
    script = ["the next action is move forward 75 cm"]
    chain = Chain(graph, script, mission__executor__linear_speed=0.2)
    handle = chain.robot.send()
    chain.stage.wait(lambda: chain.server.velocity[0] > 0.1)
    press = chain.stage.user.create_client(Trigger, "emergency_stop")
    chain.stage.wait(press.service_is_ready)
    press.call_async(Trigger.Request())
    result = graph.ask(handle.get_result_async, timeout=LATE).result
    assert result.status.code == Status.EMERGENCY_STOP
    chain.stage.wait(chain.stage.stands)
    assert chain.server.travelled < 0.7


def test_the_increments_of_the_robots_own_obstacle_avoidance(graph: Any) -> None:
    script = ["the next action is move forward 50 cm", "the next action is stop"]
    chain = Chain(graph, script, output="increments")
    result = chain.robot.navigate()
    assert (result.status.code, result.steps) == (Status.OK, 2)
    assert chain.server.x == pytest.approx(0.5, abs=0.1)
    assert not chain.stage.count(1008)
    chain.stage.wait(lambda: not chain.server.remote)  # the remote control has it back


def test_an_increment_that_meets_something_is_blocked(graph: Any) -> None:
    chain = Chain(
        graph,
        ["the next action is move forward 50 cm"],
        output="increments",
        mission__max_blocked=1,
        mission__executor__allowance_base=1.0,
    )
    chain.server.reach = 0.2
    result = chain.robot.navigate()
    assert result.status.code in (Status.BLOCKED, Status.TIMEOUT)
    assert chain.server.x < 0.35
