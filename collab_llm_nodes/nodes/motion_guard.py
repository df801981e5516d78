"""The only node that publishes ``cmd_vel``: passes velocities on while motion is safe, else zero.

``robot/guard.py`` decides; this node feeds it from topics. Commands are published on
``cmd_vel_nav``; each velocity is passed on at once, within the limits, or refused. The guard also
checks every ``period``, while the robot moves, that its reasons to move still hold.

The emergency stop works in every lifecycle state: service ``emergency_stop``, topic
``emergency_stop`` (true), a joystick button. It is passed on to all guards and drivers of the robot
(``ros/peers.py``). Only the service ``reset_emergency_stop`` clears it; without ``latch_folder`` so
does the end of this process.
Run this node in another process than the models (``nodes/motion.py``), whose faults must not keep
it from stopping the robot.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from builtin_interfaces.msg import Time as TimeMsg
from geometry_msgs.msg import Twist, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.callback_groups import ReentrantCallbackGroup
from sensor_msgs.msg import Joy, LaserScan, Range
from std_msgs.msg import Bool, Header
from std_srvs.srv import Trigger

from collab_llm.msg import LinkState, MotionState, Observation
from collab_llm_nodes.config import check_ranges, fixed
from collab_llm_nodes.errors import CollabError, InvalidInput
from collab_llm_nodes.robot.executor import ZERO, Velocity
from collab_llm_nodes.robot.guard import UNWATCHED, Guard, GuardConfig, GuardState, Source
from collab_llm_nodes.robot.latch import Latch
from collab_llm_nodes.robot.obstacles import gap_in_scan, gap_of_range
from collab_llm_nodes.robot.stamps import Stamps
from collab_llm_nodes.ros.clock import STEADY, set_period, wall
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.motion_inputs import (
    check_range,
    check_scan,
    pose_from,
    seconds_of,
    twist_of,
    velocity_message,
)
from collab_llm_nodes.ros.peers import GUARD, Peers
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import BUTTON, CAMERA, COMMAND, REQUESTS, RESULT, STATE
from collab_llm_nodes.ros.strangers import MOTION_TOPICS, Strangers

_REST = (0.02, 0.05)
"""Odometry's velocities of a robot at rest are below these [m/s, rad/s]."""

_PATIENCE_S = 3.0
"""Time for sensors and the robot's obstacle avoidance to appear before the log complains."""

_STATE_PERIOD_S = 0.25
"""``motion_state`` at least this often."""


@dataclass(frozen=True)
class MotionGuardConfig(GuardConfig):
    """Parameters of the node."""

    period: float = fixed(
        0.02,
        "Period of checks while the robot moves, and of repeated stops [s].",
        low=0.005,
        high=0.05,
    )
    stamped: bool = fixed(
        False, "cmd_vel and cmd_vel_nav are TwistStamped (newer navigation stacks)."
    )
    base_frame: str = fixed("base_link", "Frame of stamped commands.")
    joy_button: int = fixed(
        -1, "Button of `joy` that is an emergency stop, counted from 0; -1 = none.", low=-1, high=63
    )
    latch_folder: str = fixed(
        "",
        "Folder that keeps a pressed emergency stop across restarts; empty: none.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self)


def _stopping(callback: Callable[..., None]) -> Callable[..., None]:
    """Guard a callback like ``guarded``; an unexpected error stops the robot first."""

    @guarded
    @functools.wraps(callback)
    def call(self: MotionGuard, *args: Any) -> None:
        try:
            callback(self, *args)
        except CollabError:
            raise  # an unusable message is no sign of life: the guard notices the silence
        except Exception:  # `guarded` reports it
            self._publish(self._guard.on_halt(wall()))
            raise

    return call


class MotionGuard(ManagedNode[MotionGuardConfig]):
    """See the module docstring."""

    shares_memory = False  # a stop must not wait for locks of a killed process

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("motion_guard", MotionGuardConfig, **node_arguments)
        self._guard = Guard(self.config)
        self._stamps = {source: Stamps() for source in Source}
        self._published: GuardState | None = None
        self._published_at = -math.inf
        self._unwatched_at = math.inf  # when to warn that nothing watches for obstacles
        # In every lifecycle state: a stop must not be missed.
        self._states = self.create_publisher(MotionState, "motion_state", STATE)
        for qos in (RESULT, BUTTON):  # reliable publishers and others; twice does no harm
            self.create_subscription(Bool, "emergency_stop", self._on_emergency_topic, qos)
        self.create_subscription(Joy, "joy", self._on_joy, BUTTON)
        for name, callback in (
            ("emergency_stop", self._on_emergency_service),
            ("reset_emergency_stop", self._on_reset),
        ):
            # A group of its own: the answer to a stop is awaited while the node goes on.
            group = ReentrantCallbackGroup()
            self.create_service(Trigger, name, callback, qos_profile=REQUESTS, callback_group=group)
        self._latch = Latch(
            self.config.latch_folder, self.get_fully_qualified_name(), self._on_latch_error
        )
        if pressed := self._latch.read():
            self._guard.on_emergency(pressed, wall())
            self.get_logger().warning(
                f"the emergency stop is still set, by {pressed}: reset it", once=True
            )
            self._publish_state()
        self._strangers = Strangers(self, MOTION_TOPICS, self._on_graph)
        self._peers = Peers(self, GUARD, self._on_stop_of_peer, self._on_graph)
        self._peers.publish(bool(pressed))

    def stop(self) -> None:
        super().stop()
        self._strangers.close()
        self._peers.close()
        self._latch.close()

    def destroy_node(self) -> None:
        self._peers.close()
        super().destroy_node()

    def configure(self) -> None:
        kind = TwistStamped if self.config.stamped else Twist
        self._commands = self.create_publisher(kind, "cmd_vel", COMMAND)
        self._subscribed = [
            self.create_subscription(kind, "cmd_vel_nav", self._on_command, COMMAND),
            self.create_subscription(Odometry, "odom", self._on_odometry, CAMERA),
            self.create_subscription(Observation, "observation", self._on_observation, CAMERA),
            # Volatile: the last state of a bridge that hangs is no sign of life.
            self.create_subscription(LinkState, "link_state", self._on_link, COMMAND),
            self.create_subscription(Bool, "obstacle_avoidance", self._on_avoidance, STATE),
        ]
        if self.config.obstacle.scan != "off":
            self._subscribed.append(
                self.create_subscription(LaserScan, "scan", self._on_scan, CAMERA)
            )
        if self.config.obstacle.range != "off":
            self._subscribed.append(
                self.create_subscription(Range, "range", self._on_range, CAMERA)
            )
        self._clock_timer = self.create_timer(_STATE_PERIOD_S, self._on_period, clock=STEADY)

    def activate(self) -> None:
        self._guard.on_halt(wall())
        self._unwatched_at = wall() + _PATIENCE_S
        self._peers.look()

    def deactivate(self) -> None:
        self._publish(self._guard.on_halt(wall()))
        self._publish_state()

    def cleanup(self) -> None:
        self.destroy_timer(self._clock_timer)
        for subscription in self._subscribed:
            self.destroy_subscription(subscription)
        self.destroy_publisher(self._commands)

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        now = wall()
        state = self._guard.state(now)
        values: dict[str, Any] = {
            "allowed": state.allowed,
            "obstacle_stop": " ".join(self._guard.watchers(now)) or "none",
            "reasons": " ".join(state.reasons),
            **{f"silent_s.{s.value}": f"{self._guard.silence(s, now):.2f}" for s in Source},
            **{f"stops.{code}": count for code, count in self._guard.stops.items()},
            **{f"publishers.{topic}": who for topic, who in self._strangers.publishers.items()},
        }
        if state.emergency_stop or self._peers.trouble or self._strangers.trouble:
            level, message = Level.ERROR, state.text
        elif self.active and not state.allowed:
            level, message = Level.WARN, state.text
        elif self.active and not self._drivers():
            level, message = Level.WARN, "no node takes cmd_vel: start the robot's driver"
        elif self.active and state.text:
            level, message = Level.WARN, state.text
        if self._latch.error:
            values["latch_error"] = self._latch.error
            level = max(level, Level.WARN)
            message += f"; a pressed stop is not kept as it should be: {self._latch.error}"
        return level, message, values

    def _drivers(self) -> int:
        """Return the number of nodes that take ``cmd_vel``, the recorder excepted."""
        takers = self.get_subscriptions_info_by_topic(self._commands.topic_name)
        return sum(taker.node_name != "recorder" for taker in takers)

    # Events.

    @_stopping
    def _on_command(self, msg: Twist | TwistStamped) -> None:
        twist = twist_of(msg)
        stamped = isinstance(msg, TwistStamped) and msg.header.stamp != TimeMsg()
        try:  # most stamps are empty
            age = self._age(Source.COMMAND, msg.header) if stamped else 0.0
        except InvalidInput:
            self._publish(self._guard.on_command(math.nan, 0.0, self.seconds(), wall()))
            raise
        unused = (twist.linear.y, twist.linear.z, twist.angular.x, twist.angular.y)
        forward = twist.linear.x if all(map(math.isfinite, unused)) else math.nan
        before = self._guard.velocity
        now = self.seconds()
        self._publish(self._guard.on_command(forward, twist.angular.z, now, wall(), age))
        self._report(before)

    @_stopping
    def _on_odometry(self, msg: Odometry) -> None:
        pose_from(msg)  # unusable odometry is none
        v = msg.twist.twist
        stands = math.hypot(v.linear.x, v.linear.y) < _REST[0] and abs(v.angular.z) < _REST[1]
        self._guard.on_odometry(self._age(Source.ODOMETRY, msg.header), stands, wall())
        self._follow_up()

    @_stopping
    def _on_observation(self, msg: Observation) -> None:
        self._guard.on_camera(self._age(Source.CAMERA, msg.header), wall())
        self._follow_up()

    @_stopping
    def _on_link(self, msg: LinkState) -> None:
        age = self._age(Source.LINK, msg.header)
        self._guard.on_link(msg.state == LinkState.UP, age, wall())
        self._follow_up()

    @_stopping
    def _on_scan(self, msg: LaserScan) -> None:
        check_scan(msg)
        if all(map(math.isnan, msg.ranges)) or not msg.range_max > 0.0:
            return  # REP 117: no measurement; or a driver without valid ranges
        limits = (msg.range_min, msg.range_max)
        gap = gap_in_scan(
            msg.ranges, msg.angle_min, msg.angle_increment, limits, self.config.obstacle
        )
        self._guard.on_gap(Source.SCAN, gap, self._age(Source.SCAN, msg.header), wall())
        self._follow_up()

    @_stopping
    def _on_range(self, msg: Range) -> None:
        check_range(msg)
        if math.isnan(msg.range) or not msg.max_range > 0.0:
            return  # likewise
        gap = gap_of_range(msg.range, (msg.min_range, msg.max_range), self.config.obstacle)
        self._guard.on_gap(Source.RANGE, gap, self._age(Source.RANGE, msg.header), wall())
        self._follow_up()

    @_stopping
    def _on_avoidance(self, msg: Bool) -> None:
        self._guard.on_avoidance(msg.data)
        self._follow_up()

    @_stopping
    def _on_period(self) -> None:
        self._follow_up()
        self._warn_unwatched()
        if not self._guard.watches(wall()):
            set_period(self._clock_timer, _STATE_PERIOD_S)

    # The emergency stop: in any lifecycle state, hence not guarded.

    def _on_emergency_topic(self, msg: Bool) -> None:
        if msg.data:
            self._emergency("the topic emergency_stop", held=True)

    def _on_joy(self, msg: Joy) -> None:
        button = self.config.joy_button
        if 0 <= button < len(msg.buttons) and msg.buttons[button]:
            self._emergency("the joystick", held=True)

    async def _on_emergency_service(
        self, request: Trigger.Request, response: Trigger.Response
    ) -> Trigger.Response:
        self._emergency("the service emergency_stop")
        missing = await self._peers.confirmation()
        response.success = not missing
        response.message = "stopped until reset_emergency_stop is called"
        if missing:
            response.message = f"not confirmed by all: {missing}. This guard has stopped"
        response.message += self._not_kept()
        return response

    def _on_stop_of_peer(self) -> None:
        self._emergency("another guard of this robot", passed_on=True)

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.message = self._guard.on_reset(wall())
        response.success = not response.message
        if response.success:
            response.message = self._not_kept()
            self._latch.clear()
            self._peers.publish(False)
        self._publish_state()
        return response

    def _emergency(self, source: str, *, held: bool = False, passed_on: bool = False) -> None:
        set_before = self._guard.state(wall()).emergency_stop
        self._guard.on_emergency(source, wall(), held=held)
        before = self._guard.velocity
        if self.active:
            self._tick()
        if not set_before:  # a held button repeats
            self._latch.set(source)
        self._peers.publish(True, again=not passed_on)
        if self.active:
            self._report(before)
        else:
            self._publish_state()

    def _on_graph(self) -> None:
        self._guard.on_peers(self._peers.trouble, self._peers.unconfirmed, wall())
        self._guard.on_strangers(self._strangers.trouble)
        if self.active:
            self._follow_up()
        else:
            self._publish_state()

    def _not_kept(self) -> str:
        """Return the last fault of the latch, since services do not wait for the disk."""
        error = self._latch.error
        return f" (a restart may not know: latch_folder: {error})" if error else ""

    def _on_latch_error(self, error: str) -> None:
        self.get_logger().error(
            f"an emergency stop cannot be kept: latch_folder: {error}", throttle_duration_sec=1.0
        )

    # Consequences.

    def _follow_up(self) -> None:
        before = self._guard.velocity
        self._tick()
        self._report(before)

    def _tick(self) -> None:
        velocity = self._guard.tick(wall())
        if velocity is not None:
            self._publish(velocity)

    def _report(self, before: Velocity) -> None:
        """Publish a changed state; log a motion that was cut short."""
        now = wall()
        state = self._guard.state(now)
        last = self._published
        changed = last is None or (
            (state.allowed, state.reasons, state.speed_limit)
            != (last.allowed, last.reasons, last.speed_limit)
        )
        if changed or now - self._published_at >= _STATE_PERIOD_S:
            self._publish_state()
        if before != ZERO and state.velocity == ZERO and state.reasons:
            self.get_logger().warning(f"stopped: {state.text}", throttle_duration_sec=0.5)

    def _warn_unwatched(self) -> None:
        """Log once that nothing watches for obstacles, each time that this begins."""
        now = wall()
        if self._guard.watchers(now):
            self._unwatched_at = now + _PATIENCE_S
        elif now >= self._unwatched_at:
            self._unwatched_at = math.inf
            self.get_logger().warning(UNWATCHED, throttle_duration_sec=10.0)

    def _publish_state(self) -> None:
        now = wall()
        state = self._guard.state(now)
        msg = MotionState(
            allowed=self.active and state.allowed,
            emergency_stop=state.emergency_stop,
            reasons=list(state.reasons) if self.active else [*state.reasons, "INACTIVE"],
            text=state.text if self.active else "motion_guard is not active",
            speed_limit=state.speed_limit,
            linear=state.velocity.linear,
            angular=state.velocity.angular,
        )
        msg.header.stamp = self.get_clock().now().to_msg()
        self._states.publish(msg)
        self._published, self._published_at = state, now

    def _publish(self, velocity: Velocity) -> None:
        if velocity != ZERO:
            set_period(self._clock_timer, self.config.period)
        stamp = self.get_clock().now().to_msg()
        frame, stamped = self.config.base_frame, self.config.stamped
        self._commands.publish(velocity_message(velocity, stamp, frame, stamped=stamped))

    def _age(self, source: Source, header: Header) -> float:
        """Return the age of a message of ``source`` [s]; pass a fault of its stamp to the guard."""
        now, limit = self.seconds(), self._guard.config.freshness.max_age
        stamp = seconds_of(header.stamp, f"{source.value}.header.stamp")
        trouble = self._stamps[source].trouble(stamp, now, limit) if limit else ""
        self._guard.troubles[source] = trouble
        return now - stamp


def main() -> int:
    """Run the node."""
    return run(MotionGuard)


if __name__ == "__main__":
    raise SystemExit(main())
