"""Drives a Unitree Go2: ``cmd_vel`` to the robot's own requests, its state to ``odom`` and ``imu``.

``robot/go2/sport.py`` decides. Deactivation, a signal or an exception stops the robot first. So do
a silent ``cmd_vel`` and an emergency stop of ``motion_guard``. The driver does not move a robot
that has another driver or two guards (``ros/peers.py``), or while a foreign node publishes
velocities or requests (``ros/strangers.py``). Run it in another process than the models
(``nodes/motion.py``). If this process is killed, the robot holds its last velocity for one second;
``motion_watchdog`` stops it sooner.
"""

from __future__ import annotations

import functools
import importlib
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from builtin_interfaces.msg import Time as TimeMsg
from geometry_msgs.msg import Quaternion, TransformStamped, Twist, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.publisher import Publisher
from sensor_msgs.msg import Imu, Joy
from std_msgs.msg import Bool

from collab_llm.msg import MotionState
from collab_llm_nodes.config import check_ranges, fixed
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.robot.go2.sport import (
    Answer,
    Call,
    ClockAlignment,
    Command,
    Go2,
    Go2Config,
    Phase,
    SportState,
    Trouble,
)
from collab_llm_nodes.ros.clock import STEADY, set_period, wall
from collab_llm_nodes.ros.health import Level, TopicLimits
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.motion_inputs import twist_of, yaw_of
from collab_llm_nodes.ros.peers import DRIVER, Peers
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import BUTTON, CAMERA, COMMAND, RESULT, STATE
from collab_llm_nodes.ros.strangers import (
    GO2_TOPICS,
    MOTION_TOPICS,
    NAMELESS,
    Strangers,
)
from collab_llm_nodes.ros.unitree import (
    STATE_TOPIC,
    Services,
    request_topic,
    sport_state,
    vendor,
)

_TICK_S, _REST_TICK_S = 0.02, 0.1
"""Period of the driver's decisions without an event, and while the robot is at rest."""


@dataclass(frozen=True)
class Go2DriverConfig(Go2Config):
    """Parameters of the node."""

    state_topic: str = fixed(
        STATE_TOPIC,
        "The robot's state: /sportmodestate, several hundred a second, or /lf/sportmodestate.",
    )
    stamped: bool = fixed(False, "cmd_vel is a TwistStamped.")
    odometry_rate: float = fixed(
        50.0, "odom and imu at most this often [1/s].", low=5.0, high=500.0
    )
    stamps: str = fixed(
        "aligned",
        "Stamps of odom and imu: aligned = time of measurement by our clock; receive = time of"
        " reception; robot = time of measurement by the robot's clock.",
        choices=("aligned", "receive", "robot"),
    )
    velocity_frame: str = fixed(
        "body",
        "Frame of the velocity that the robot reports, which depends on its firmware; odom is"
        " turned into body.",
        choices=("body", "odom"),
    )
    odom_frame: str = fixed("odom", "Frame of the odometry's poses.")
    base_frame: str = fixed("base_link", "Frame of the body.")
    imu_frame: str = fixed("imu_link", "Frame of the inertial measurements.")
    publish_tf: bool = fixed(
        True, "Publish odom_frame to base_frame on /tf, where tf2_msgs is installed."
    )
    publish_joy: bool = fixed(
        True,
        "Publish the robot's remote control as joy, for the emergency stop button of motion_guard:"
        " axes lx ly rx ry, one button for each bit of keys.",
    )
    health: TopicLimits = TopicLimits(min_rate=10.0, max_age=0.3, silent_after=0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self)


def _stopping(callback: Callable[..., None]) -> Callable[..., None]:
    """Guard a callback in every lifecycle state; an exception stops the robot first.

    A stop goes on after deactivation.
    """

    @functools.wraps(callback)
    def call(self: Go2Driver, *args: Any) -> None:
        try:
            callback(self, *args)
        except Exception as error:  # noqa: BLE001 one bad message must not end the node
            self.note_fault(error, callback.__name__)
            self._send(self._go2.on_command(Command(), wall()))
            self.get_logger().error(
                f"{callback.__name__}: {type(error).__name__}: {error}", throttle_duration_sec=1.0
            )

    return call


class Go2Driver(ManagedNode[Go2DriverConfig]):
    """See the module docstring."""

    shares_memory = False  # as motion_guard

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("go2_driver", Go2DriverConfig, **node_arguments)
        self._go2 = Go2(self.config)
        self._alignment = ClockAlignment()
        self._published_at = -math.inf
        self._robot: SportState | None = None
        self._emergency = False
        self._reported = ""  # code of the last trouble
        self._avoids: bool | None = None  # as published last
        self._transforms: Publisher | None = None
        self._peers = Peers(
            self, DRIVER, self._on_stop_of_peer, self._on_graph, self._drivers_elsewhere
        )
        # The velocities, too: a foreign one has not passed the guard.
        guards = {topic: MOTION_TOPICS[topic] for topic in ("cmd_vel", "motion_state")}
        topics = {**guards, **GO2_TOPICS, self.config.state_topic: NAMELESS}
        self._strangers = Strangers(self, topics, self._on_graph)

    def stop(self) -> None:
        super().stop()
        self._strangers.close()
        self._peers.close()

    def destroy_node(self) -> None:
        self._peers.close()
        super().destroy_node()

    # Lifecycle.

    def configure(self) -> None:
        c = self.config
        state_type = vendor("unitree_go").SportModeState
        self._go2 = Go2(c)
        self._api = Services(self, self._go2.requests, c.functions, self._on_answer)
        self._odometry = self.create_publisher(Odometry, "odom", COMMAND)
        self._imu = self.create_publisher(Imu, "imu", COMMAND)
        self._avoidance = self.create_publisher(Bool, "obstacle_avoidance", STATE)
        self._published = [self._odometry, self._imu, self._avoidance]
        self._subscribed = [
            self.create_subscription(state_type, c.state_topic, self._on_state, CAMERA),
            self.create_subscription(
                TwistStamped if c.stamped else Twist, "cmd_vel", self._on_command, COMMAND
            ),
            self.create_subscription(MotionState, "motion_state", self._on_motion_state, STATE),
        ]
        if c.publish_joy:
            self._joy = self.create_publisher(Joy, "joy", RESULT)
            self._published.append(self._joy)
            self._subscribed.append(
                self.create_subscription(
                    vendor("unitree_go").WirelessController,
                    "/wirelesscontroller",
                    self._on_remote_control,
                    BUTTON,
                )
            )
        if c.publish_tf:
            self._transforms = self._make_transforms()
        self._clock_timer = self.create_timer(_TICK_S, self._on_tick, clock=STEADY)

    def _make_transforms(self) -> Publisher | None:
        try:
            messages = importlib.import_module("tf2_msgs.msg")
        except ImportError:
            self.get_logger().info("tf2_msgs is not installed, so /tf is not published")
            return None
        publisher = self.create_publisher(messages.TFMessage, "/tf", COMMAND)
        self._published.append(publisher)
        self._transform_type = messages.TFMessage
        return publisher

    def activate(self) -> None:
        self._alignment, self._robot, self._reported = ClockAlignment(), None, ""
        self._avoids = None
        self._peers.look()
        self._pass_graph_on()  # to the new state machine that `configure` has made
        self._send(self._go2.begin(wall()))

    def deactivate(self) -> None:
        self._send(self._go2.halt(wall()))

    def cleanup(self) -> None:
        self.destroy_timer(self._clock_timer)
        self._api.destroy()
        for subscription in self._subscribed:
            self.destroy_subscription(subscription)
        for publisher in self._published:
            self.destroy_publisher(publisher)
        self._transforms = None

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        trouble, robot = self._go2.trouble(wall()), self._robot or SportState()
        if self.active and trouble:
            waits = trouble.code in ("LOCKED", "NO_AVOIDANCE") and not self._go2.refusing
            level = Level.WARN if waits or trouble.code == "DRY_RUN" else Level.ERROR
            message = f"{trouble.code}: {trouble.text}"
        values = {
            "phase": self._go2.phase.value,
            "trouble": trouble.code,
            "state_machine": robot.machine,
            "mode": robot.mode,
            "stance": robot.stance.value,
            "speed": f"{robot.speed:.2f}",
            "turn": f"{robot.turn:.2f}",
        }
        return level, message, values

    def expected(self) -> dict[str, TopicLimits]:
        return {"odom": self.config.health}

    # Events.

    @_stopping
    def _on_command(self, msg: Twist | TwistStamped) -> None:
        if not self.active:
            return
        twist = twist_of(msg)
        command = Command(twist.linear.x, twist.linear.y, twist.angular.z)
        # Even from a foreign publisher.
        self._send(self._go2.on_command(Command() if self._emergency else command, wall()))

    @_stopping
    def _on_motion_state(self, msg: MotionState) -> None:
        """Stop once at an emergency stop, even a motion that is not by ``cmd_vel``.

        Such as an increment of the obstacle avoidance, or the remote control's.
        """
        self._set_emergency(msg.emergency_stop)

    def _on_stop_of_peer(self) -> None:
        """Stop without waiting for the guard's state."""
        self._set_emergency(True)

    def _set_emergency(self, pressed: bool) -> None:
        before, self._emergency = self._emergency, pressed
        if pressed and not before and self.active:
            self._send(self._go2.begin(wall()))
        self._peers.publish(pressed)

    def _on_graph(self) -> None:
        if self.active:
            self._pass_graph_on()

    def _pass_graph_on(self) -> None:
        self._send(self._go2.on_peers(self._peers.trouble, wall()))
        self._send(self._go2.on_strangers(self._strangers.trouble, wall()))

    def _drivers_elsewhere(self) -> list[str]:
        """Return drivers in other namespaces that send requests to the same robot."""
        name, space = self.get_name(), self.get_namespace()
        senders = self.get_publishers_info_by_topic(request_topic("sport"))
        return [
            f"{name} in the namespace {sender.node_namespace}"
            for sender in senders
            if sender.node_name == name and sender.node_namespace != space
        ]

    @_stopping
    def _on_state(self, msg: Any) -> None:
        now, c = wall(), self.config
        yaw = yaw_of(*map(float, msg.imu_state.quaternion))  # in the order w, x, y, z
        ahead, left = float(msg.velocity[0]), float(msg.velocity[1])
        if c.velocity_frame == "odom":
            ahead, left = _rotated(ahead, left, -yaw)
        values = (*msg.position, ahead, left, msg.yaw_speed, yaw)
        if not all(map(math.isfinite, values)):
            raise InvalidInput("not finite", field=c.state_topic, remedy="restart the robot")
        self._robot = state = sport_state(msg)
        self._send(self._go2.on_state(state, now))
        stamp = self._stamp(msg.stamp)
        if self.active and now - self._published_at >= 0.95 / c.odometry_rate:
            self._published_at = now
            self._publish(msg, ahead, left, stamp)

    @_stopping
    def _on_answer(self, answer: Answer, binary: bytes) -> None:
        if answer.code:
            self.get_logger().warning(f"the robot: {answer}", throttle_duration_sec=2.0)
        self._send(self._go2.on_answer(answer, wall()))

    @_stopping
    def _on_tick(self) -> None:
        now = wall()
        self._send(self._go2.tick(now))
        self._report(self._go2.trouble(now) if self._go2.refusing else Trouble())
        if self.active and self._avoids != self._go2.avoiding:
            self._avoids = self._go2.avoiding
            self._avoidance.publish(Bool(data=self._avoids))

    @_stopping
    def _on_remote_control(self, msg: Any) -> None:
        if self.active:
            joy = Joy(axes=array("f", (msg.lx, msg.ly, msg.rx, msg.ry)))
            joy.header.stamp = self.get_clock().now().to_msg()
            joy.buttons = array("i", (msg.keys >> bit & 1 for bit in range(16)))
            self._joy.publish(joy)

    # Consequences.

    def _send(self, calls: list[Call]) -> None:
        if calls:
            self._api.send(calls)
        rests = self._go2.phase is Phase.STANDING
        set_period(self._clock_timer, _REST_TICK_S if rests else _TICK_S)

    def _report(self, trouble: Trouble) -> None:
        """Report the beginning and end of a trouble that prevents a commanded motion."""
        if trouble.code == self._reported:
            return
        self._reported = trouble.code
        self.report_health()
        if trouble:
            self.get_logger().error(
                f"the robot is commanded but does not move: {trouble.code}: {trouble.text}",
                throttle_duration_sec=1.0,
            )

    def _stamp(self, robot: Any) -> TimeMsg:
        stamps = self.config.stamps
        if stamps == "receive":
            return self.get_clock().now().to_msg()
        measured = robot.sec + robot.nanosec * 1e-9
        if stamps == "aligned":
            measured = self.seconds() - self._alignment.delay(measured, wall())
        nanoseconds = max(0, round(measured * 1e9))
        return TimeMsg(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)

    def _publish(self, msg: Any, ahead: float, left: float, stamp: TimeMsg) -> None:
        """Publish odometry and IMU, in REP 103 units and axes and REP 105 frames."""
        c, inertial = self.config, msg.imu_state
        orientation = _quaternion(inertial.quaternion)
        odometry = Odometry(child_frame_id=c.base_frame)
        odometry.header.stamp, odometry.header.frame_id = stamp, c.odom_frame
        position = odometry.pose.pose.position
        position.x, position.y, position.z = map(float, msg.position)
        odometry.pose.pose.orientation = orientation
        twist = odometry.twist.twist
        twist.linear.x, twist.linear.y, twist.linear.z = ahead, left, float(msg.velocity[2])
        twist.angular.z = float(msg.yaw_speed)
        self._odometry.publish(odometry)
        imu = Imu(orientation=orientation)
        imu.header.stamp, imu.header.frame_id = stamp, c.imu_frame
        rate, acceleration = imu.angular_velocity, imu.linear_acceleration
        rate.x, rate.y, rate.z = map(float, inertial.gyroscope)
        acceleration.x, acceleration.y, acceleration.z = map(float, inertial.accelerometer)
        self._imu.publish(imu)
        if self._transforms is not None:
            transform = TransformStamped(header=odometry.header, child_frame_id=c.base_frame)
            place = transform.transform.translation
            place.x, place.y, place.z = position.x, position.y, position.z
            transform.transform.rotation = orientation
            self._transforms.publish(self._transform_type(transforms=[transform]))


def _quaternion(wxyz: Any) -> Quaternion:
    """Return the vendor's quaternion, whose order is w, x, y, z."""
    w, x, y, z = map(float, wxyz)
    return Quaternion(x=x, y=y, z=z, w=w)


def _rotated(x: float, y: float, angle: float) -> tuple[float, float]:
    cos, sin = math.cos(angle), math.sin(angle)
    return cos * x - sin * y, sin * x + cos * y


def main() -> int:
    """Run the node."""
    return run(Go2Driver)


if __name__ == "__main__":
    raise SystemExit(main())
