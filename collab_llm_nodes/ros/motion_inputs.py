"""Messages on which motion depends: checked where they enter, velocities built in one place.

Every number that moves the robot, or decides for how long it may move, passes one of these
functions. They raise InvalidInput with field and remedy. ``guarded`` counts and logs it, and the
message moves nothing.
"""

from __future__ import annotations

import math

from builtin_interfaces.msg import Time as TimeMsg
from geometry_msgs.msg import Quaternion, Twist, TwistStamped
from nav_msgs.msg import Odometry
from sensor_msgs.msg import LaserScan, Range

from collab_llm.msg import MotionState, NavigationAction
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.robot.executor import Pose2D, Velocity
from collab_llm_nodes.robot.grammar import Code, Kind, ParsedAction, check_step
from collab_llm_nodes.robot.mission import Permission

_NORM = (0.9, 1.1)
"""Length of a quaternion that is a rotation, as sensors round it."""


def velocity_message(
    velocity: Velocity, stamp: TimeMsg, frame: str, *, stamped: bool
) -> Twist | TwistStamped:
    """Return ``velocity`` as a Twist, or as a TwistStamped in ``frame``."""
    twist = Twist()
    twist.linear.x, twist.angular.z = velocity.linear, velocity.angular
    if not stamped:
        return twist
    message = TwistStamped(twist=twist)
    message.header.stamp, message.header.frame_id = stamp, frame
    return message


def twist_of(message: Twist | TwistStamped) -> Twist:
    """Return the velocity in a message of either type."""
    return message.twist if isinstance(message, TwistStamped) else message


def quaternion_of(yaw: float) -> Quaternion:
    """Return the rotation by ``yaw`` [rad] about the vertical axis."""
    return Quaternion(z=math.sin(yaw / 2), w=math.cos(yaw / 2))


def yaw_of(w: float, x: float, y: float, z: float) -> float:
    """Return the heading [rad] of a quaternion."""
    return math.atan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))


def seconds_of(stamp: TimeMsg, field: str = "header.stamp") -> float:
    """Return ``stamp`` [s]. Raises InvalidInput: it is negative, which no clock shows."""
    if stamp.sec < 0:
        raise InvalidInput(
            f"{stamp.sec} s", field=field, remedy="a time since the epoch: check who publishes it"
        )
    return float(stamp.sec) + stamp.nanosec * 1e-9


def pose_from(msg: Odometry) -> Pose2D:
    """Return the planar pose. Raises InvalidInput: a number is not finite, or no rotation."""
    p, q = msg.pose.pose.position, msg.pose.pose.orientation
    _check_finite("odom.pose.pose.position", "check the odometry source", p.x, p.y)
    norm = math.hypot(q.x, q.y, q.z, q.w)
    if not _NORM[0] <= norm <= _NORM[1]:
        raise InvalidInput(
            f"a quaternion of length {norm:g}",
            field="odom.pose.pose.orientation",
            remedy="of length 1: check the odometry source",
        )
    return Pose2D(p.x, p.y, yaw_of(q.w, q.x, q.y, q.z))


def action_from(msg: NavigationAction) -> ParsedAction:
    """Return the action. Raises InvalidInput: not one that ``navigation_action_parser`` makes."""
    for name, kinds in (("kind", Kind), ("code", Code)):
        if getattr(msg, name) not in {each.value for each in kinds}:
            raise InvalidInput(
                f"{getattr(msg, name)} is unknown",
                field=f"navigation_action.{name}",
                remedy="a constant of NavigationAction",
            )
    kind, code = Kind(msg.kind), Code(msg.code)
    if (kind is Kind.NONE) == (code is Code.OK):
        raise InvalidInput(
            f"kind {kind.name} with code {code.name}",
            field="navigation_action.code",
            remedy="a kind other than NONE goes with OK, and only with it",
        )
    value = {Kind.FORWARD: msg.distance, Kind.TURN: msg.angle}.get(kind, 0.0)
    span = (msg.span_begin, msg.span_end)
    action = ParsedAction(kind, value, code, span, msg.text, msg.reason, msg.words)
    check_step(action)
    return action


def permission_from(msg: MotionState) -> Permission:
    """Return the permission. Raises InvalidInput: it allows motion at a speed that is none."""
    limit = msg.speed_limit if msg.allowed else 0.0
    if not limit >= 0.0:
        raise InvalidInput(
            f"{limit:g} m/s",
            field="motion_state.speed_limit",
            remedy="0 or more: check who publishes it beside motion_guard",
        )
    return Permission(msg.allowed, msg.emergency_stop, tuple(msg.reasons), msg.text, limit)


def check_scan(msg: LaserScan) -> None:
    """Raise InvalidInput for a scan whose beams have no direction or whose range has no limits."""
    remedy = "check the scanner's driver"
    _check_finite("scan.angle_min, angle_increment", remedy, msg.angle_min, msg.angle_increment)
    _check_limits("scan.range_min, range_max", msg.range_min, msg.range_max)


def check_range(msg: Range) -> None:
    """Raise InvalidInput for a range finder without limits."""
    _check_limits("range.min_range, max_range", msg.min_range, msg.max_range)


def _check_limits(field: str, low: float, high: float) -> None:
    if math.isnan(low) or math.isnan(high):
        raise InvalidInput(
            f"{low:g} to {high:g} m", field=field, remedy="check the sensor's driver"
        )


def _check_finite(field: str, remedy: str, *values: float) -> None:
    if not all(map(math.isfinite, values)):
        listed = ", ".join(f"{value:g}" for value in values)
        raise InvalidInput(f"not finite: {listed}", field=field, remedy=remedy)
