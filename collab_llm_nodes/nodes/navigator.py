"""Follows one instruction at a time: the action ``navigate``.

``robot/mission.py`` decides; this node feeds it from topics, asks the model about frames
(``edge_cloud/generate``), and publishes velocities on ``cmd_vel_nav`` and progress as feedback.
``motion_guard`` decides which velocities reach the robot, and reports it on ``motion_state``.

A ``navigation_action`` belongs to an answer by its frame (capture stamps of asked frames only grow,
so late answers match nothing), by its session, and by a text that our own generation has sent as
feedback or result: other nodes may ask about the same frame, or publish texts in our session. An
action that arrives before its text is kept until then.

If the prompt has a place for it (``{memory}``), the robot's memory is asked about a new
instruction. The mission does not wait: later questions to the model have the memory's answer.

An instruction that only asks to stop ends the one under way; no model is asked.

A goal that cannot be served is accepted, and ends at once with a status, since a refusal in ROS
carries no reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Time as TimeMsg
from geometry_msgs.msg import PoseStamped, Twist, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.action import ActionClient, ActionServer, CancelResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.task import Future
from std_msgs.msg import String

from collab_llm.action import Generate, Navigate
from collab_llm.msg import GenerationMetrics, MotionState, NavigationAction, Observation
from collab_llm.msg import Status as StatusMsg
from collab_llm_nodes.config import MAX_TOKENS, check_ranges, fixed, setting
from collab_llm_nodes.errors import Busy, CollabError, ConfigError, Inactive, InvalidInput
from collab_llm_nodes.models.thoughts import answer_of
from collab_llm_nodes.robot.executor import ZERO, Pose2D, Velocity
from collab_llm_nodes.robot.grammar import Kind, ParsedAction
from collab_llm_nodes.robot.mission import (
    DEADLINE_LIMITS_S,
    Mission,
    MissionConfig,
    Permission,
    Phase,
    check_instruction,
)
from collab_llm_nodes.robot.naming import thing_of
from collab_llm_nodes.robot.prompt import DEFAULT_TEMPLATE, MEMORY, user_text
from collab_llm_nodes.robot.stamps import Stamps
from collab_llm_nodes.robot.steps import DelegatedSteps, ShownSteps, Steps
from collab_llm_nodes.robot.stop_words import STOP_WORDS, asks_to_stop, check_stop_words
from collab_llm_nodes.ros.clock import STEADY, wall
from collab_llm_nodes.ros.convert import code_of, of_a_request, status_named, status_of
from collab_llm_nodes.ros.goals import SentGoal, action_client, action_server
from collab_llm_nodes.ros.health import Faults, Level, Status, TopicLimits
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.motion_inputs import (
    action_from,
    permission_from,
    pose_from,
    seconds_of,
    velocity_message,
)
from collab_llm_nodes.ros.program import command_for, run
from collab_llm_nodes.ros.qos import CAMERA, COMMAND, RESULT, STATE
from collab_llm_nodes.ros.step_outputs import OUTPUTS, make_output

_SUCCEEDED = GoalStatus.STATUS_SUCCEEDED
_LOGGED = 120
"""Characters of an instruction that the log repeats."""
_LOG_S = 0.1
"""Period of log lines about goals, which may arrive at any rate."""
_OF_ANOTHER_TIME_S = 1.0
"""In a dry run a picture stamped further from now, as one from a bag, is stamped anew."""
_PATIENCE_S = 5.0
"""Time after the activation from which the log names missing inputs."""


@dataclass(frozen=True)
class AnswerConfig:
    """Questions to the model, and the server that answers them."""

    action: str = fixed("edge_cloud/generate", "Action of the protocol's server that answers.")
    protocol: str = fixed("edge_cloud", "Collaboration protocol.")
    prompt: str = fixed(
        DEFAULT_TEMPLATE,
        "Prompt, with {instruction} and {history}. It must make a model that was not trained for"
        " navigation end with 'The next action is ...'. With {memory}, the robot's memory is asked"
        " as well. With {search}, it says how far the robot has looked round, for a model that was"
        " trained with it.",
    )
    memory: str = fixed("dragon/generate", "Action of the robot's memory.")
    memory_question: str = fixed(
        "Where was {thing} last seen?",
        "Question to the memory, once for each instruction; {thing} is what the instruction names,"
        " {instruction} the whole of it.",
    )
    temperature: float = setting(0.0, "0 = greedy.", low=0.0, high=10.0)
    top_k: int = setting(0, "0 = off.", low=0)
    top_p: float = setting(1.0, "0 or 1 = off.", low=0.0, high=1.0)
    seed: int = setting(0, "Key of all random streams; the n-th answer uses seed + n.", low=0)
    law: str = setting("rejection", "Output law.", choices=("rejection", "coupled"))
    max_tokens: int = setting(
        0,
        "Length limit of an answer [tokens]; 0 = the server's.",
        low=0,
        high=MAX_TOKENS,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if "{instruction}" not in self.prompt:
            raise ConfigError("lacks {instruction}", field="prompt", remedy="add its placeholder")


@dataclass(frozen=True)
class NavigatorHealth:
    """Limits of the topics that a mission needs."""

    observation: TopicLimits = TopicLimits(min_rate=1.0, max_age=1.0, silent_after=2.0)
    odom: TopicLimits = TopicLimits(min_rate=5.0, max_age=0.5, silent_after=1.0)


@dataclass(frozen=True)
class NavigatorConfig:
    """Parameters of the node."""

    health: NavigatorHealth = NavigatorHealth()
    mission: MissionConfig = field(default_factory=MissionConfig)
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    rate: float = fixed(20.0, "Commands per second, robot's clock.", low=1.0, high=200.0)
    output: str = fixed(
        "velocity",
        "Executor of the steps: velocity = the navigator, by cmd_vel_nav; nav2 = its actions"
        " drive_on_heading and spin; increments = the Go2's obstacle avoidance; none = a dry run,"
        " which shows the steps and needs neither odometry nor motion_guard.",
        choices=("velocity", *OUTPUTS, "none"),
    )
    require_guard: bool = fixed(
        True,
        "No motion unless motion_guard allows it. False: where another node takes cmd_vel_nav.",
    )
    stamped: bool = fixed(False, "cmd_vel_nav is a TwistStamped (newer navigation stacks).")
    base_frame: str = fixed("base_link", "Frame of stamped commands.")
    stop_words: tuple[str, ...] = fixed(
        STOP_WORDS, "Instructions that cancel the one under way, without asking a model."
    )
    odometry_max_age: float = fixed(
        1.0, "Older odometry is ignored [s]; 0 = stamps are not checked.", low=0.0, high=60.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        check_stop_words(self.stop_words)


@dataclass
class _Run:
    """One goal under way."""

    goal: ServerGoalHandle
    mission: Mission
    over: Future
    number: int = 0  # of the generation asked for last
    generation: SentGoal | None = None
    stamp: TimeMsg = field(default_factory=TimeMsg)  # capture time of the frame asked about
    texts: set[tuple[str, str]] = field(default_factory=set)  # session and texts of the answer
    acting: tuple[TimeMsg, str] | None = None  # frame and session of the last executed action
    early: list[tuple[NavigationAction, ParsedAction]] = field(default_factory=list)  # text to come
    metrics: GenerationMetrics = field(default_factory=GenerationMetrics)
    recall: SentGoal | None = None  # the question to the memory, while it is open
    memory: str = ""  # its answer
    phase: Phase = Phase.OBSERVE  # as logged last


def _stopping(callback: Callable[..., None]) -> Callable[..., None]:
    """Guard a callback; an unexpected error stops the robot first, and ends the goal."""

    @guarded
    @wraps(callback)
    def call(self: Navigator, *args: Any) -> None:
        try:
            callback(self, *args)
        except CollabError:
            raise  # an unusable message; the mission notices the silence
        except Exception as error:
            if self._run is not None:
                self._run.mission.end("INTERNAL", f"{type(error).__name__}: {error}")
                self._follow_up(self._run)
            raise

    return call


class Navigator(ManagedNode[NavigatorConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("navigator", NavigatorConfig, **node_arguments)
        self._dry = self.config.output == "none"
        self._run: _Run | None = None
        self._pose = PoseStamped()
        self._permission: tuple[Permission, float] | None = None  # and when it was heard
        self._odometry: tuple[Pose2D, float, float, float] | None = None  # when heard, measured
        self._stamps = Stamps()  # of odometry
        self._odometry_trouble = ""  # with its last message
        self._sent_at = -math.inf
        self._sent = ZERO
        self._failed = Faults()  # missions, by the code of their end
        self._followed = 0
        self._sees = False  # a camera frame has come since the activation
        self._missing: list[str] = []  # inputs that a goal needs, as logged last
        self._generate: ActionClient | None = None
        self._memory: ActionClient | None = None
        self._navigate: ActionServer | None = None

    def configure(self) -> None:
        self._output = make_output(self.config.output, self)  # first: it may fail
        kind = TwistStamped if self.config.stamped else Twist
        self._commands = self.create_publisher(kind, "cmd_vel_nav", COMMAND)
        self._subscribed = [
            self.create_subscription(Observation, "observation", self._on_observation, CAMERA),
            self.create_subscription(Odometry, "odom", self._on_odometry, CAMERA),
            self.create_subscription(
                NavigationAction, "navigation_action", self._on_action, RESULT
            ),
            self.create_subscription(MotionState, "motion_state", self._on_motion_state, STATE),
        ]
        self._clocks = [
            self.create_timer(1.0 / self.config.rate, self._tick),
            self.create_timer(0.1, self._tick, clock=STEADY),  # the robot's clock may stand still
        ]
        self._getting_ready = self.create_timer(0.2, self._log_readiness, clock=STEADY)
        if self._navigate is None:
            self._instructions = self.create_publisher(String, "instruction", STATE)
            self._generate = action_client(self, Generate, self.config.answer.action)
            if MEMORY in self.config.answer.prompt:
                self._memory = action_client(self, Generate, self.config.answer.memory)
            self._navigate = action_server(
                self, Navigate, "navigate", self._execute, self._on_cancel
            )

    def activate(self) -> None:
        self._sent_at = -math.inf
        self._sees, self._missing, self._active_since = False, [], wall()
        self._getting_ready.reset()

    def deactivate(self) -> None:
        if self._run is not None:
            self._run.mission.end("INACTIVE", "the navigator was deactivated")
            self._follow_up(self._run)
        self._send(ZERO, 0.0)

    def cleanup(self) -> None:
        """Free all but the actions and ``instruction``.

        They carry the result of a goal that was ended just now, and the cancellation of a
        generation that is accepted only now.
        """
        for timer in (*self._clocks, self._getting_ready):
            self.destroy_timer(timer)
        for subscription in self._subscribed:
            self.destroy_subscription(subscription)
        self.destroy_publisher(self._commands)
        if self._output is not None:
            self._output.close()

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, values = super().diagnose()
        if self._run is not None:
            mission = self._run.mission
            message = mission.phase.value
            values |= {"phase": mission.phase.value, "steps": mission.steps}
        return level, message, values

    def expected(self) -> dict[str, TopicLimits]:
        """Pictures and odometry."""
        return {"observation": self.config.health.observation, "odom": self.config.health.odom}

    def details(self, now: float) -> list[Status]:
        """Return how the missions ended."""
        failed = self._failed.recent(now, self.common.diagnostics.recent)
        level = Level.WARN if failed else Level.OK
        message = f"the last one failed: {failed}" if failed else f"{self._followed} followed"
        return [Status("missions", level, message, {"OK": self._followed, **self._failed.counts})]

    @guarded
    def _log_readiness(self) -> None:
        """Log once that a goal can be served, or the missing inputs if that takes long."""
        permission = self._permission[0] if self._permission else None
        why = ", ".join(permission.reasons) if permission else "motion_state"
        allowed = permission is not None and permission.allowed
        there = {
            f"the action {self.config.answer.action}": self._answers,
            f"{why} (motion_guard)": allowed or self._dry or not self.config.require_guard,
            "observation (camera_ingest)": self._sees,
            "odom (the robot's driver)": self._odometry or self._dry,
        }
        missing = [name for name, ready in there.items() if not ready]
        if not missing:
            self._getting_ready.cancel()
            navigate = self.resolve_topic_name("navigate")
            instruct = command_for(self, 'ros2 run collab_llm instruct "..."')
            dry = "ready for a dry run" if self._dry else "ready"
            self.get_logger().info(f"{dry}: send a goal ({instruct}, or the action {navigate})")
        elif missing != self._missing and wall() - self._active_since > _PATIENCE_S:
            self._missing = missing
            fault = f"; {self._odometry_trouble}" if self._odometry_trouble else ""
            self.get_logger().info(f"not ready, waiting for {', '.join(missing)}{fault}")

    @property
    def _answers(self) -> bool:
        """Return True while the model's server is there."""
        return self._generate is not None and self._generate.server_is_ready()

    # The action.

    async def _execute(self, goal: ServerGoalHandle) -> Navigate.Result:
        if asks_to_stop(goal.request.instruction, self.config.stop_words):
            return self._stop(goal)
        result, since = Navigate.Result(pose=self._pose), time.monotonic()
        try:
            mission = self._mission_of(goal.request)
        except CollabError as error:
            self.warn_of("navigate: goal refused", error)
            result.status = status_of(error)
            goal.abort()
            return result
        instruction = repr(goal.request.instruction[:_LOGGED])  # a log obeys no control character
        self._log(f"goal {_name(goal)}: accepted: {instruction}")
        run_ = self._run = _Run(goal, mission, Future())
        for timer in self._clocks:
            timer.reset()
        self._instructions.publish(String(data=goal.request.instruction))
        self._initialise(mission)
        self._ask_memory(run_)
        self._follow_up(run_)
        if goal.is_cancel_requested:  # before this coroutine had its first turn
            self._cancel(run_)
        try:
            await run_.over
        finally:
            self._run = None
            if run_.recall is not None:
                run_.recall.cancel()
            self._instructions.publish(String())
        result.steps = mission.steps
        result.distance_travelled, result.angle_turned = mission.distance, mission.angle
        result.pose = self._pose
        ending = mission.ending
        assert ending is not None, "the future is set by an ending"
        result.text = ending.text
        self._conclude(goal, result, ending.code, ending.message, since)
        return result

    def _stop(self, goal: ServerGoalHandle) -> Navigate.Result:
        """End the instruction under way because of ``goal``, in any state of the node."""
        instruction = repr(goal.request.instruction[:_LOGGED])
        self._log(f"goal {_name(goal)}: asks to stop: {instruction}")
        if self._run is not None:
            self._cancel(self._run, f"the instruction {instruction} was given")
        goal.succeed()
        return Navigate.Result(pose=self._pose)

    def _mission_of(self, request: Navigate.Goal) -> Mission:
        """Return the mission that a goal asks for; raises CollabError if it cannot be served."""
        if not self.active:
            raise Inactive("the navigator is not active", remedy="activate it (lifecycle)")
        if self._run is not None:
            raise Busy("another instruction is being followed", remedy="cancel it or wait")
        config = self.config.mission
        check_instruction(request.instruction)
        least, most = DEADLINE_LIMITS_S
        if request.deadline_s != 0.0 and not least <= request.deadline_s <= most:
            raise InvalidInput(
                f"{request.deadline_s:g} s",
                field="deadline_s",
                remedy=f"{least:g} to {most:g}, or 0 for the default",
            )
        with of_a_request():
            config = replace(
                config,
                max_steps=request.max_steps or config.max_steps,
                deadline=request.deadline_s or config.deadline,
            )
        steps: Steps | None = None
        if self._dry:
            steps = ShownSteps()
        elif self._output is not None:
            steps = DelegatedSteps(config.executor, self._output)
        return Mission(
            config,
            self.seconds(),
            wall(),
            instruction=request.instruction,
            steps=steps,
            guarded=self.config.require_guard and not self._dry,
        )

    def _initialise(self, mission: Mission) -> None:
        """Pass the last odometry and permission to a new mission."""
        mission.odometry_trouble = self._odometry_trouble
        if self._dry:
            mission.on_odometry(Pose2D(), self.seconds(), wall())
        elif self._odometry is not None:
            mission.on_odometry(*self._odometry)
        if self._permission is not None:
            permission, heard = self._permission
            if wall() - heard <= mission.config.guard_timeout:
                mission.on_motion_state(permission, self.seconds(), wall())

    def _conclude(
        self,
        goal: ServerGoalHandle,
        result: Navigate.Result,
        code: str,
        message: str,
        since: float,
    ) -> None:
        words = message or ("" if code == "OK" else code)
        if self._dry:
            words = f"in a dry run, nothing moved{words and f': {words}'}"
        result.status = status_named(code, words)
        seconds = time.monotonic() - since
        line = f"goal {_name(goal)}: {code} after {result.steps} steps, {seconds:.1f} s"
        cause = repr(message[:_LOGGED])  # some of it may be the verifier's words
        if code in ("OK", "ANSWERED"):
            self._followed += 1
            self._log(line)
            goal.succeed()
        elif goal.is_cancel_requested:
            self._log(line)
            goal.canceled()
        elif code == "CANCELLED":  # by an instruction to stop, not by a cancellation of this goal
            self._log(f"{line}: {cause}")
            goal.abort()
        else:
            self._failed.add(code, f"{code}: {message}", time.monotonic())
            self.get_logger().warning(f"{line}: {cause}", throttle_duration_sec=_LOG_S)
            goal.abort()

    def _log(self, line: str) -> None:
        self.get_logger().info(line, throttle_duration_sec=_LOG_S)

    def _on_cancel(self, goal: ServerGoalHandle) -> CancelResponse:
        run_ = self._run
        if run_ is not None and run_.goal is goal:
            self._cancel(run_)
        return CancelResponse.ACCEPT

    def _cancel(self, run_: _Run, why: str = "the caller gave the instruction up") -> None:
        run_.mission.end("CANCELLED", why)
        self._follow_up(run_)

    # Events.

    @_stopping
    def _on_observation(self, msg: Observation) -> None:
        self._sees = True
        run_ = self._run
        if run_ is None:
            return
        captured, now = seconds_of(msg.header.stamp, "observation.header.stamp"), self.seconds()
        if self._dry and abs(now - captured) > _OF_ANOTHER_TIME_S:
            self.get_logger().warning(
                f"dry run: pictures are stamped {now - captured:.1f} s ago and count as new",
                throttle_duration_sec=10.0,
            )
            captured, msg.header.stamp = now, self.get_clock().now().to_msg()
            msg.image.header = msg.header
        if run_.mission.on_observation(captured, wall()):
            run_.stamp = msg.header.stamp
            self._ask(run_, msg)

    @_stopping
    def _on_odometry(self, msg: Odometry) -> None:
        now = self.seconds()
        try:
            pose, measured = pose_from(msg), self._measured(msg, now)
        except InvalidInput as error:
            self._set_odometry_trouble(str(error))
            raise
        self._set_odometry_trouble("")
        self._pose = PoseStamped(header=msg.header, pose=msg.pose.pose)
        self._odometry = pose, now, wall(), measured
        if self._run is not None and not self._dry:
            self._run.mission.on_odometry(*self._odometry)
            self._follow_up(self._run, 0.9 / self.config.rate)

    def _measured(self, msg: Odometry, now: float) -> float:
        """Return when ``msg`` was measured [s]. Raises InvalidInput: its stamp cannot be used."""
        limit = self.config.odometry_max_age
        if not limit:
            return now
        measured = seconds_of(msg.header.stamp, "odom.header.stamp")
        trouble = self._stamps.trouble(measured, now, limit)
        if trouble:
            raise InvalidInput(trouble, field="odom", remedy="or set odometry_max_age")
        return measured

    def _set_odometry_trouble(self, trouble: str) -> None:
        self._odometry_trouble = trouble
        if self._run is not None:
            self._run.mission.odometry_trouble = trouble

    @_stopping
    def _on_motion_state(self, msg: MotionState) -> None:
        try:
            self._take_permission(permission_from(msg))
        except InvalidInput as error:  # its prohibitions count, its permissions do not
            self._take_permission(
                Permission(False, msg.emergency_stop, ("INVALID_STATE",), str(error), 0.0)
            )
            raise

    def _take_permission(self, permission: Permission) -> None:
        if self._dry:  # prohibitions do not matter, but an emergency stop ends the goal
            permission = replace(permission, allowed=True, speed_limit=math.inf)
        self._permission = permission, wall()
        if self._run is not None:
            self._run.mission.on_motion_state(permission, self.seconds(), wall())
            self._follow_up(self._run)

    @_stopping
    def _on_action(self, msg: NavigationAction) -> None:
        run_ = self._run
        if run_ is None:
            return
        if _source(msg) != run_.acting and msg.header.stamp != run_.stamp:
            return
        action = action_from(msg)
        if _source(msg) == run_.acting:  # it can only take back the step
            self._act(run_, msg, action)
        else:
            run_.early.append((msg, action))
            self._execute_known(run_)

    def _add_text(self, run_: _Run, session: str, text: str) -> None:
        """Take a text of our own generation: only actions read from these count."""
        run_.texts.add((session, text))
        self._execute_known(run_)

    def _execute_known(self, run_: _Run) -> None:
        """Execute the actions that were read from texts of our own generation."""
        early, run_.early = run_.early, []
        for msg, action in early:
            if (msg.session_id, msg.text) in run_.texts:
                self._act(run_, msg, action)
            else:
                run_.early.append((msg, action))

    def _act(self, run_: _Run, msg: NavigationAction, action: ParsedAction) -> None:
        mission = run_.mission
        if _source(msg) == run_.acting:  # a second reading, of the whole answer
            mission.on_retraction(action, self.seconds(), wall())
        elif mission.on_action(action, self.seconds(), wall(), verified=msg.verified):
            assert mission.action is not None, "a step begins"
            run_.acting = _source(msg)
            step = f"step {mission.steps}: {mission.action.phrase}"
            if self._dry:
                self._log(f"dry run, nothing moves: {step}")
            else:
                self.get_logger().debug(f"goal {_name(run_.goal)}: {step}")
            if action.kind is Kind.FORWARD:  # as executed: perhaps less than was read
                msg.distance = mission.action.value
            else:
                msg.angle = mission.action.value
            feedback = Navigate.Feedback(step=mission.steps, action=msg, text=msg.text)
            feedback.metrics, feedback.pose = run_.metrics, self._pose
            run_.goal.publish_feedback(feedback)
        self._follow_up(run_)

    @_stopping
    def _tick(self) -> None:
        """Check deadlines; repeat the command when odometry is slower than the rate."""
        if self._run is None:  # nothing has a deadline until the next goal
            for timer in self._clocks:
                timer.cancel()
            return
        if self._dry:  # the robot stands still
            self._run.mission.on_odometry(Pose2D(), self.seconds(), wall())
        self._run.mission.tick(self.seconds(), wall())
        if self._run.generation is not None and not self._answers:
            self._fail(
                self._run, "UNAVAILABLE", f"the server of {self.config.answer.action} is gone"
            )
        self._follow_up(self._run, 1.5 / self.config.rate)

    def _follow_up(self, run_: _Run, spacing: float = 0.0) -> None:
        """Publish the mission's velocity after an event; end a generation that it dropped."""
        mission = run_.mission
        if mission.phase is not run_.phase:
            run_.phase = mission.phase
            self.get_logger().debug(f"goal {_name(run_.goal)}: {mission.phase.value}")
        ends = mission.phase is Phase.ENDED and not run_.over.done()
        if self._output is None or ends:  # else our zeros would disturb the output's velocities
            self._send(mission.velocity, 0.0 if ends else spacing)
        if run_.generation is not None and not mission.answering:
            run_.generation.cancel()
            run_.generation = None
        if ends:
            run_.over.set_result(None)

    def _send(self, velocity: Velocity, spacing: float) -> None:
        """Publish ``velocity``: a stop or a start at once, others at most every ``spacing`` s."""
        now = self.seconds()
        changes = (velocity == ZERO) != (self._sent == ZERO)
        if not changes and 0.0 <= now - self._sent_at < spacing:
            return
        self._sent_at, self._sent = now, velocity
        stamp = self.get_clock().now().to_msg()
        frame, stamped = self.config.base_frame, self.config.stamped
        self._commands.publish(velocity_message(velocity, stamp, frame, stamped=stamped))

    # The memory.

    def _ask_memory(self, run_: _Run) -> None:
        """Ask the memory about the instruction, if the prompt has a place for its answer."""
        if self._memory is None:
            return
        if not self._memory.server_is_ready():
            self.get_logger().warning(
                f"the action {self.config.answer.memory} is not there: no memory is asked",
                throttle_duration_sec=10.0,
            )
            return
        question, asked = self.config.answer.memory_question, run_.goal.request.instruction
        question = question.replace("{thing}", thing_of(asked)).replace("{instruction}", asked)
        goal = Generate.Goal(
            prompt=question,
            deadline_s=self.config.mission.deadline,
        )
        run_.recall = SentGoal(self, self._memory, goal, partial(self._on_recalled, run_))

    def _on_recalled(self, run_: _Run, result: Generate.Result | None) -> None:
        recall, run_.recall = run_.recall, None
        if result is not None and result.status.code == StatusMsg.OK:
            run_.memory = answer_of(result.text)
        elif run_ is self._run and recall is not None:
            cause = result.status.message if result is not None else f"its server {recall.loss}"
            self.get_logger().warning(
                f"the memory has no answer: {cause}", throttle_duration_sec=_LOG_S
            )

    # Generations.

    def _ask(self, run_: _Run, observation: Observation) -> None:
        run_.number += 1
        run_.texts, run_.early = set(), []
        run_.metrics = GenerationMetrics()
        if not self._answers:
            server = self.config.answer.action
            self._fail(run_, "UNAVAILABLE", f"the action {server} is not there: start its server")
            return
        answer, limit = self.config.answer, self.config.mission.answer_timeout
        mission, asked = run_.mission, run_.goal.request.instruction
        history, search = mission.prompt_history, mission.prompt_search.text
        goal = Generate.Goal(
            header=observation.header,
            protocol=answer.protocol,
            prompt=user_text(asked, history, answer.prompt, run_.memory, search),
            images=[observation.image],
            temperature=answer.temperature,
            top_k=answer.top_k,
            top_p=answer.top_p,
            seed=answer.seed + run_.number,  # else sampling would repeat itself at each step
            law=answer.law,
            max_tokens=answer.max_tokens,
            deadline_s=limit,
            for_motion=True,
        )
        assert self._generate is not None, "its server is there"
        callbacks = (partial(f, run_, run_.number) for f in (self._on_answer, self._on_feedback))
        run_.generation = SentGoal(self, self._generate, goal, *callbacks)

    @_stopping
    def _on_feedback(self, run_: _Run, number: int, msg: Any) -> None:
        if number == run_.number:
            run_.metrics = msg.feedback.metrics
            self._add_text(run_, msg.feedback.session_id, msg.feedback.text)

    @_stopping
    def _on_answer(self, run_: _Run, number: int, result: Generate.Result | None) -> None:
        """Take the end of a generation; None: its server refused it, or was restarted."""
        generation = run_.generation
        if number != run_.number or generation is None:
            return
        run_.generation = None
        if result is None:
            server = f"the server of {self.config.answer.action}"
            self._fail(run_, "UNAVAILABLE", f"{server} {generation.loss}: see its log")
        elif result.status.code == StatusMsg.OK and generation.status == _SUCCEEDED:
            run_.metrics = result.metrics
            self._add_text(run_, result.session_id, result.text)
            run_.mission.on_answer_ended(wall())
            self._follow_up(run_)
        else:
            self._fail(run_, code_of(result.status), result.status.message)

    def _fail(self, run_: _Run, code: str, message: str) -> None:
        run_.mission.on_answer_ended(wall())
        if run_.mission.awaits_action:
            run_.mission.on_failure(code, message, self.seconds(), wall())
            if run_.mission.ending is None:  # else its result has it
                self.get_logger().warning(
                    f"answer failed, another try: {code}: {message}", throttle_duration_sec=1.0
                )
        self._follow_up(run_)


def _name(goal: ServerGoalHandle) -> str:
    """Return the name of a goal in the log."""
    return bytes(goal.goal_id.uuid[:4]).hex()


def _source(msg: NavigationAction) -> tuple[TimeMsg, str]:
    """Return the frame and the session of the answer from which an action was read."""
    return msg.header.stamp, msg.session_id


def main() -> int:
    """Run the node."""
    return run(Navigator)


if __name__ == "__main__":
    raise SystemExit(main())
