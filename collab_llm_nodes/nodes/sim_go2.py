"""The simulated Go2: a room of a home, a base and a camera with the topics of a real robot.

Publishes ``/clock``, ``odom``, ``image``, ``image/compressed`` and ``camera_info``; obeys
``cmd_vel`` until it is silent for ``watchdog``. ``ground_truth/...`` is for evaluations. Setting
the parameter ``seed`` or ``thing`` enters another room; the service ``reset`` restarts the same
one.

The camera sways anew with each departure; in some rooms its picture is one motion old
(docs/home.md).

Time is the simulator's own and never goes back. It runs ``real_time_factor`` times as fast as the
machine's. With ``lockstep`` it advances by one step per command while the robot moves, so that the
motion is the same on a fast and a slow machine.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time as TimeMsg
from geometry_msgs.msg import Point, PoseStamped, Twist, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock as ClockMsg
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_srvs.srv import Trigger

from collab_llm.msg import Room as RoomMsg
from collab_llm.msg import RoomThing
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError, InvalidInput, quoted
from collab_llm_nodes.ros.clock import STEADY, set_period, wall
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.motion_inputs import quaternion_of, twist_of
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import COMMAND, REQUESTS, STATE
from collab_llm_nodes.ros.strangers import MOTION_TOPICS, Strangers
from collab_llm_nodes.sim.jpeg import to_jpeg
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.renderer import HEIGHT_PX, WIDTH, Renderer
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import NAMES, Room, Style, make_room

LOCKSTEP_S = 1.0
"""Without a command for this long the simulator steps even in lockstep, machine's time [s]: else a
navigator that has ended would stop time for all."""
_CAMERA_FRAME = "camera_optical"


@dataclass(frozen=True)
class SimConfig:
    """Parameters of the node."""

    seed: int = setting(
        0, "The room; setting it enters that room, once the simulator is active.", low=0
    )
    thing: str = setting(
        "", "A thing to be in each room, such as 'red mug'; empty: drawn like the rest."
    )
    rate: float = setting(
        20.0,
        "Steps and odometry per simulated second.",
        low=5.0,
        high=500.0,
        read_only=True,
    )
    camera_rate: float = setting(10.0, "Frames per simulated second.", low=0.1, high=100.0)
    real_time_factor: float = setting(1.0, "Simulated seconds per second.", low=0.01, high=1000.0)
    lockstep: bool = setting(False, "While moving, one step per received command.")
    watchdog: float = setting(
        0.5, "Older commands are dropped, simulated time [s].", low=0.05, high=10.0
    )
    stamped: bool = setting(False, "cmd_vel is a TwistStamped.", read_only=True)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.thing and self.thing not in NAMES:
            raise ConfigError(
                f"{quoted(self.thing)} cannot be placed in a room",
                field="thing",
                remedy=f"give a colour and a shape such as {NAMES[0]}",
            )

    def room(self) -> Room:
        """Return the room that ``seed`` and ``thing`` name."""
        return make_room(self.seed, Style(first=self.thing))


class SimGo2(ManagedNode[SimConfig]):
    """See the module docstring."""

    shares_memory = False  # a robot is another machine

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("sim_go2", SimConfig, **node_arguments)
        self._steps = 0  # of 1 / rate each: the simulated time
        self._looked = (wall(), 0.0)  # by the diagnostics: machine's and simulated time
        self._renderer: Renderer | None = None
        self._command = (0.0, 0.0)
        self._commanded_at = -math.inf  # simulated
        self._stepped_at = -math.inf  # machine's clock
        self._frame_due = 0.0
        self._departed = Pose(0.0, 0.0, 0.0)  # where the robot stood before its last motion
        self._departures = 0  # since it entered the room
        self._seen: tuple[Pose, int] | None = None  # what the cached frame shows
        self._rgb = np.zeros((0, 0, 3), np.uint8)
        self._jpeg = b""
        owners = {"cmd_vel": MOTION_TOPICS["cmd_vel"]}
        self._strangers = Strangers(self, owners, self._on_strangers)

    def stop(self) -> None:
        super().stop()
        self._strangers.close()

    # Lifecycle.

    def configure(self) -> None:
        self._clock_publisher = self.create_publisher(ClockMsg, "/clock", COMMAND)
        self._odometry = self.create_publisher(Odometry, "odom", COMMAND)
        self._images = self.create_publisher(Image, "image", COMMAND)
        self._compressed = self.create_publisher(CompressedImage, "image/compressed", COMMAND)
        self._info = self.create_publisher(CameraInfo, "camera_info", COMMAND)
        self._truth = self.create_publisher(PoseStamped, "ground_truth/pose", COMMAND)
        self._goal = self.create_publisher(PoseStamped, "ground_truth/target", STATE)
        self._room_info = self.create_publisher(RoomMsg, "ground_truth/room", STATE)
        kind = TwistStamped if self.config.stamped else Twist
        self._subscription = self.create_subscription(kind, "cmd_vel", self._on_command, COMMAND)
        self._service = self.create_service(Trigger, "reset", self._on_reset, qos_profile=REQUESTS)
        self._pacer = self.create_timer(self._pace(), self._on_pacer, clock=STEADY)
        self._enter()

    def activate(self) -> None:
        """Apply the settings made while inactive."""
        set_period(self._pacer, self._pace())
        if self._entered != (self.config.seed, self.config.thing):
            self._enter()

    def cleanup(self) -> None:
        self.destroy_timer(self._pacer)
        self.destroy_subscription(self._subscription)
        self.destroy_service(self._service)
        for publisher in (
            self._clock_publisher,
            self._odometry,
            self._images,
            self._compressed,
            self._info,
            self._truth,
            self._goal,
            self._room_info,
        ):
            self.destroy_publisher(publisher)
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        now, before = (wall(), self.time), self._looked
        self._looked = now
        pace = (now[1] - before[1]) / max(now[0] - before[0], 1e-3)
        values = {
            "seed": self.config.seed,
            "simulated_s": f"{self.time:.2f}",
            "real_time_factor": f"{pace:.2f}",
        }
        return level, message, values

    @property
    def time(self) -> float:
        """Return the simulated time [s]."""
        return self._steps / self.config.rate

    def _apply(self, parameters: list[Parameter]) -> None:
        super()._apply(parameters)
        if self.active and any(p.name in ("seed", "thing") for p in parameters):
            self._enter()
        if self.active and any(p.name == "real_time_factor" for p in parameters):
            set_period(self._pacer, self._pace())

    def _pace(self) -> float:
        """Return the machine's seconds per step."""
        return 1.0 / (self.config.rate * self.config.real_time_factor)

    # The room.

    def _enter(self) -> None:
        """Put the robot at the start of the room that the parameters name, at rest."""
        room = self._room = self.config.room()
        self._entered = self.config.seed, self.config.thing
        self._base = Base(room, seed=0)
        self._command = (0.0, 0.0)
        self._departed, self._departures = room.start, 0
        self._seen = None
        self._frame_due = self.time
        if self._renderer is not None:
            self._renderer.enter(room)
        target = PoseStamped()
        target.header.frame_id, target.header.stamp = "room", self._stamp()
        target.pose.position.x, target.pose.position.y = room.goal.x, room.goal.y
        self._goal.publish(target)
        info = RoomMsg(header=target.header, seed=room.seed)
        info.target = 0  # the goal is the first thing
        info.width, info.depth = room.width, room.depth
        for part in room.parts:
            *colour, shape = part.name.split()
            thing = RoomThing(name=part.name, shape=shape, colour=" ".join(colour))
            thing.position, thing.radius = Point(x=part.x, y=part.y), part.radius
            info.things.append(thing)
        self._room_info.publish(info)
        self._publish_camera(self._stamp())  # another camera than in the last room

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success = self.active
        if self.active:
            self._enter()
        else:
            response.message = "inactive"
        return response

    # Time.

    @guarded
    def _on_command(self, msg: Twist | TwistStamped) -> None:
        twist = twist_of(msg)
        command = (twist.linear.x, twist.angular.z)
        if not all(map(math.isfinite, command)):
            raise InvalidInput("not finite", field="cmd_vel", remedy="check who publishes it")
        if self._strangers.trouble:  # as go2_driver
            return
        self._command, self._commanded_at = command, self.time
        if self.config.lockstep and self._moving():
            self._step()

    def _on_strangers(self) -> None:
        self._command = (0.0, 0.0)

    @guarded
    def _on_pacer(self) -> None:
        waits = self.config.lockstep and any(self._command)  # a stop needs no further command
        if not waits or wall() - self._stepped_at >= LOCKSTEP_S:
            self._step()

    def _moving(self) -> bool:
        return any((*self._command, self._base.speed, self._base.turn))

    def _step(self) -> None:
        """Advance the world by one step, and publish the sensors' messages."""
        if self.time - self._commanded_at > self.config.watchdog:
            self._command = (0.0, 0.0)
        if not (self._base.speed or self._base.turn) and any(self._command):
            self._departed, self._departures = self._base.pose, self._departures + 1
        self._base.step(*self._command, 1.0 / self.config.rate)
        self._steps += 1
        self._stepped_at = wall()
        stamp = self._stamp()
        self._clock_publisher.publish(ClockMsg(clock=stamp))
        self._publish_poses(stamp)
        if self.time >= self._frame_due - 1e-9:
            self._frame_due = max(self._frame_due + 1.0 / self.config.camera_rate, self.time)
            self._publish_frame(stamp)

    def _stamp(self) -> TimeMsg:
        nanoseconds = round(self.time * 1e9)
        return TimeMsg(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)

    # Sensors.

    def _publish_poses(self, stamp: TimeMsg) -> None:
        base, odometry = self._base, Odometry()
        odometry.header.stamp, odometry.header.frame_id = stamp, "odom"
        odometry.child_frame_id = "base_link"
        odometry.pose.pose.position.x = base.odometry.x
        odometry.pose.pose.position.y = base.odometry.y
        odometry.pose.pose.orientation = quaternion_of(base.odometry.yaw)
        odometry.twist.twist.linear.x, odometry.twist.twist.angular.z = base.speed, base.turn
        if self._truth.get_subscription_count():
            truth = PoseStamped()
            truth.header.stamp, truth.header.frame_id = stamp, "room"
            truth.pose.position.x, truth.pose.position.y = base.pose.x, base.pose.y
            truth.pose.orientation = quaternion_of(base.pose.yaw)
            self._truth.publish(truth)  # before odometry, at which evaluations compare
        self._odometry.publish(odometry)

    def _publish_frame(self, stamp: TimeMsg) -> None:
        """Publish a frame if it is wanted; render only after a change, which is expensive."""
        raw = self._images.get_subscription_count() > 0
        if not raw and self._compressed.get_subscription_count() == 0:
            return
        # A late picture shows the place before the last motion.
        viewpoint = self._departed if self._room.camera.late else self._base.pose
        if (viewpoint, self._departures) != self._seen:
            self._seen = viewpoint, self._departures
            self._render(*self._seen)
        self._publish_camera(stamp)
        compressed = CompressedImage(format="jpeg", data=array("B", self._jpeg))
        compressed.header.stamp, compressed.header.frame_id = stamp, _CAMERA_FRAME
        self._compressed.publish(compressed)
        if raw:
            height, width, _ = self._rgb.shape
            image = Image(height=height, width=width, encoding="rgb8", step=3 * width)
            image.header = compressed.header
            image.data = array("B", self._rgb.tobytes())
            self._images.publish(image)

    def _publish_camera(self, stamp: TimeMsg) -> None:
        """Publish the calibration: a pinhole camera without distortion."""
        focal = WIDTH / 2 / math.tan(self._room.camera.half_fov)
        x, y = WIDTH / 2, HEIGHT_PX / 2
        info = CameraInfo(width=WIDTH, height=HEIGHT_PX, distortion_model="plumb_bob")
        info.header.stamp, info.header.frame_id = stamp, _CAMERA_FRAME
        info.d = [0.0] * 5
        info.k = [focal, 0.0, x, 0.0, focal, y, 0.0, 0.0, 1.0]
        info.r = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
        info.p = [focal, 0.0, x, 0.0, 0.0, focal, y, 0.0, 0.0, 0.0, 1.0, 0.0]
        self._info.publish(info)

    def _render(self, viewpoint: Pose, picture: int) -> None:
        if self._renderer is None:  # in this thread, whose graphics context it becomes
            self._renderer = Renderer()
            self._renderer.enter(self._room)
        self._rgb = self._renderer.picture(viewpoint, picture)
        self._jpeg = to_jpeg(self._rgb, self._room.camera.jpeg_quality)


def main() -> int:
    """Run the node."""
    return run(SimGo2)


if __name__ == "__main__":
    raise SystemExit(main())
