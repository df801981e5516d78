"""Break things while a robot drives, and measure the time until it stops, for ``bench safety``.

Not a node of the robot. Stands between the simulator's sensors and the nodes (topics below
``sim/``), so that a camera or odometry can fall silent at a known moment; gives instructions; may
stand in for the model (``scripted``), so that the robot always has something to do; and reports
all events to a ``MotionWatch``.

Times are of the system clock [s]: those at which messages reached this process, whatever it was
doing then.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from geometry_msgs.msg import PoseStamped, Twist
from nav_msgs.msg import Odometry
from rcl_interfaces.srv import SetParameters
from rclpy.action import CancelResponse
from rclpy.parameter import Parameter
from sensor_msgs.msg import CompressedImage
from std_srvs.srv import Trigger

from collab_llm.action import Generate, Navigate
from collab_llm.msg import GeneratedText, LinkState, MotionState, NavigationAction
from collab_llm_lab.bench.safety.watch import MotionWatch, Permitted
from collab_llm_nodes.errors import Unavailable
from collab_llm_nodes.processes import START_DEADLINE_S
from collab_llm_nodes.robot.executor import ZERO, Pose2D, Velocity
from collab_llm_nodes.ros.client import GraphClient
from collab_llm_nodes.ros.convert import code_of, status_of
from collab_llm_nodes.ros.goals import SentGoal, action_client, action_server
from collab_llm_nodes.ros.qos import CAMERA, COMMAND, RESULT, STATE

ORDER_S = 0.15
"""Delay with which events reach the watch, in the order of their times."""
_ANSWER = "the next action is turn left 45 degree."


class SafetyClient(GraphClient):
    """See the module docstring.

    Args:
        watch: Receives every event.
        scripted: answer ``generate`` here: always a turn, so that the robot never meets a wall.

    Attributes:
        ages: from a picture's arrival to that of the action read from it, and to the first velocity
            after that action [s].
        state: The guard's last message.
        link: The bridge's last message.
    """

    def __init__(self, watch: MotionWatch, *, scripted: bool) -> None:
        super().__init__("safety_client")
        self.watch = watch
        self.ages: list[tuple[float, float]] = []
        self.state = MotionState()
        self.link = LinkState()
        self.silent: set[str] = set()
        self._velocity, self._since = ZERO, time.time()
        self._zero_at = time.time()
        self._seen: dict[tuple[int, int], float] = {}
        self._due: tuple[float, float] | None = None  # age of an action, and its picture's arrival
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._goal: SentGoal | None = None
        self._goals = 0  # the last one counts
        self._gone: set[bytes] = set()  # navigators of killed processes
        self.ended: Navigate.Result | None = None
        node = self.node
        self._images = node.create_publisher(CompressedImage, "image/compressed", CAMERA)
        self._odometry = node.create_publisher(Odometry, "odom", COMMAND)
        self._rogue = node.create_publisher(Twist, "cmd_vel_nav", COMMAND)
        subscriptions: tuple[tuple[type, str, Any, Any], ...] = (
            (CompressedImage, "sim/image/compressed", self._on_image, CAMERA),
            (Odometry, "sim/odom", self._on_odometry, COMMAND),
            (Twist, "cmd_vel", self._on_velocity, RESULT),
            (PoseStamped, "ground_truth/pose", self._on_pose, COMMAND),
            (NavigationAction, "navigation_action", self._on_action, RESULT),
            (MotionState, "motion_state", self._on_state, STATE),
            (LinkState, "link_state", self._on_link, STATE),
        )
        for kind, topic, callback, qos in subscriptions:
            node.create_subscription(kind, topic, callback, qos)
        self._navigate = action_client(node, Navigate, "navigate")
        self._press = node.create_client(Trigger, "emergency_stop")
        self._reset = node.create_client(Trigger, "reset_emergency_stop")
        self._parameters = node.create_client(SetParameters, "sim_go2/set_parameters")
        node.create_timer(0.05, self._deliver_events)
        if scripted:
            self._texts = node.create_publisher(GeneratedText, "generated_text", RESULT)
            self._generate = action_server(
                node,
                Generate,
                "edge_cloud/generate",
                self._answer,
                lambda goal: CancelResponse.ACCEPT,
            )

    # Instructions.

    def instruct(self, instruction: str, deadline_s: float) -> None:
        """Have ``instruction`` followed from now on; ``ended`` is None until it has an end.

        Raises:
            DeadlineExceeded: there is no navigator.
        """

        def there() -> bool:  # that of a killed process is still known for a while
            return bool(self._navigators() - self._gone) and self._navigate.server_is_ready()

        self.wait(there, deadline_s, "a navigator")
        with self.changed:
            self.ended = self._goal = None
            self._goals += 1
            self._event(time.time(), self.watch.on_instruction, True, time.time())
        self._executor.create_task(self._send, instruction, self._goals)

    def _send(self, instruction: str, number: int) -> None:
        goal = Navigate.Goal(instruction=instruction, max_steps=10_000, deadline_s=86_400.0)
        self._goal = SentGoal(self.node, self._navigate, goal, partial(self._on_end, number))

    @property
    def ending(self) -> str:
        """The name of the status with which the instruction ended; empty while it has not."""
        return "" if self.ended is None else code_of(self.ended.status)

    def cancel(self) -> None:
        """Give the instruction up, if there is one.

        Raises:
            DeadlineExceeded: it has no end.
        """
        if (goal := self._goal) is not None:
            self._executor.create_task(goal.cancel)
            self.wait(lambda: self.ended is not None, 10.0, "the end of what was cancelled")

    def forget_goal(self) -> None:
        """Forget the goal, whose server is gone."""
        with self.changed:
            self._goal = None
            self._goals += 1
            self._gone = self._navigators()
            self._event(time.time(), self.watch.on_instruction, False, time.time())

    def _navigators(self) -> set[bytes]:
        """Return the endpoints of the navigators in the graph."""
        found = self.node.get_publishers_info_by_topic("/navigate/_action/status")
        return {bytes(each.endpoint_gid) for each in found}

    def enter(self, seed: int) -> None:
        """Put the robot into another room."""
        value = Parameter("seed", value=seed).to_parameter_msg()
        request = SetParameters.Request(parameters=[value])
        self.wait(self._parameters.service_is_ready, START_DEADLINE_S, "sim_go2")
        self.result(lambda: self._parameters.call_async(request), 10.0, "sim_go2")

    # Motion.

    def wait_for_motion(self, least_s: float, deadline_s: float, alive: Callable[[], None]) -> bool:
        """Wait until the robot has moved for ``least_s``; False: the instruction ended before.

        ``alive`` raises if a process ended.
        """

        def moves() -> bool:
            alive()
            return self._velocity != ZERO and time.time() - self._since >= least_s

        self.wait(lambda: self.ended is not None or moves(), deadline_s, "motion")
        return self.ended is None

    def stopped_at(self, fault_at: float, settle_s: float) -> float:
        """Return when the robot was sent zero after ``fault_at``, for at least ``settle_s`` on end.

        Raises:
            DeadlineExceeded: it goes on.
        """

        def stands() -> bool:
            now = time.time()
            quiet = self._velocity == ZERO and now - self._zero_at >= settle_s
            return quiet and now - fault_at >= settle_s

        self.wait(stands, 10.0, "the robot to stop")
        return self._zero_at

    # Faults.

    def press(self) -> None:
        """Press the emergency stop, and wait for the answer."""
        self.result(lambda: self._press.call_async(Trigger.Request()), 10.0, "emergency_stop")

    def press_soon(self) -> None:
        """Press the emergency stop without waiting for the answer."""
        self._executor.create_task(lambda: self._press.call_async(Trigger.Request()))

    def send_nonsense(self) -> None:
        """Publish a velocity that is no number, beside the navigator's."""
        twist = Twist()
        twist.linear.x = math.nan
        self._rogue.publish(twist)

    def reset(self) -> bool:
        """Clear the emergency stop; return True if that was possible."""
        answer = self.result(lambda: self._reset.call_async(Trigger.Request()), 10.0, "the reset")
        return bool(answer.success)

    def broken(self, what: str) -> float:
        """Note that ``what`` is broken from now on, which is returned [s]."""
        now = time.time()
        self._event(now, self.watch.on_broken, what, now)
        return now

    def mended(self, what: str) -> None:
        """Note that it works again."""
        self._event(time.time(), self.watch.on_mended, what)

    # Callbacks, in the executor's thread.

    def _on_image(self, msg: CompressedImage, info: Any) -> None:
        if "camera" not in self.silent:
            self._images.publish(msg)
            self._seen[_key(msg)] = _received(info)
            while len(self._seen) > 300:
                self._seen.pop(next(iter(self._seen)))

    def _on_odometry(self, msg: Odometry) -> None:
        if "odometry" not in self.silent:
            self._odometry.publish(msg)

    def _on_velocity(self, msg: Twist, info: Any) -> None:
        at, velocity = _received(info), Velocity(msg.linear.x, msg.angular.z)
        with self.changed:
            if velocity != ZERO and self._velocity == ZERO:
                self._since = at
            if velocity == ZERO and self._velocity != ZERO:
                self._zero_at = at
            if velocity != ZERO and self._due is not None:
                age, picture = self._due
                self._due = None
                self.ages.append((age, at - picture))
            self._velocity = velocity
            self.changed.notify_all()
        self._event(at, self.watch.on_velocity, velocity, at)

    def _on_pose(self, msg: PoseStamped, info: Any) -> None:
        p, q, at = msg.pose.position, msg.pose.orientation, _received(info)
        pose = Pose2D(p.x, p.y, 2 * math.atan2(q.z, q.w))
        self._event(at, self.watch.on_pose, pose, at)

    def _on_action(self, msg: NavigationAction, info: Any) -> None:
        at = _received(info)
        moves = msg.kind in (NavigationAction.FORWARD, NavigationAction.TURN)
        action = None
        if msg.code == NavigationAction.OK and moves:
            turns = msg.kind == NavigationAction.TURN
            action = Permitted(turns, msg.angle if turns else msg.distance)
            picture = self._seen.get(_key(msg))
            if picture is not None:
                self._due = (at - picture, picture)
        self._event(at, self.watch.on_action, action, at)

    def _on_state(self, msg: MotionState) -> None:
        with self.changed:
            self.state = msg
            self.changed.notify_all()

    def _on_link(self, msg: LinkState) -> None:
        with self.changed:
            self.link = msg
            self.changed.notify_all()

    def _on_end(self, number: int, result: Navigate.Result | None) -> None:
        if result is None:
            unknown = "the navigator refused it, or does not know of it"
            result = Navigate.Result(status=status_of(Unavailable(unknown)))
        with self.changed:
            if number == self._goals:
                self.ended = result
                self._event(time.time(), self.watch.on_instruction, False, time.time())
                self.changed.notify_all()

    def _event(self, at: float, callback: Callable[..., None], *arguments: Any) -> None:
        with self.changed:
            call = (at, next(self._numbers), lambda: callback(*arguments))
            heapq.heappush(self._events, call)

    def _deliver_events(self) -> None:
        with self.changed:
            while self._events and self._events[0][0] < time.time() - ORDER_S:
                heapq.heappop(self._events)[2]()

    # The model's part.

    def _answer(self, goal: Any) -> Generate.Result:
        header, session = goal.request.header, f"scripted {next(self._numbers)}"
        text = GeneratedText(header=header, session_id=session, text=_ANSWER)
        text.verified = text.final = text.for_motion = True
        self._texts.publish(text)
        goal.succeed()
        return Generate.Result(header=header, session_id=session, text=_ANSWER)


def _received(info: Any) -> float:
    return float(info["received_timestamp"]) * 1e-9


def _key(msg: Any) -> tuple[int, int]:
    return msg.header.stamp.sec, msg.header.stamp.nanosec
