"""The node of the dashboard: camera, answers, motion, instructions, emergency stop on a web page.

The page and its server are in ``collab_llm_nodes/dashboard``; this node connects them to the graph.
Three threads:

- The node's own receives all messages and updates a ``View``. The other threads read the newest
  snapshot, picture and state of motion, each replaced as a whole.
- The threads of the pages and of the HTTP API call the methods of ``Robot``, which ``post`` to the
  node's thread. Only the emergency stop is published in the thread that got the request.

No subscription slows a publisher down. Snapshots and pictures are made only while a page is open.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Odometry
from rclpy.parameter import Parameter
from rclpy.task import Future as RosFuture
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger

from collab_llm.action import Generate, Navigate
from collab_llm.msg import (
    Draft,
    DragonRetrieval,
    GeneratedText,
    GenerationMetrics,
    JupiterStages,
    LinkState,
    MotionState,
    NavigationAction,
    Observation,
)
from collab_llm.msg import Status as StatusMsg
from collab_llm.msg import Timeline as TimelineMsg
from collab_llm_nodes.config import check_ranges, fixed, setting
from collab_llm_nodes.dashboard.stages import (
    NAME,
    ROWS,
    Stage,
    Stages,
    Timeline,
    names,
    timeline,
)
from collab_llm_nodes.dashboard.view import (
    Action,
    Answer,
    Figures,
    Found,
    Goal,
    Link,
    Motion,
    Reading,
    Recall,
    Snapshot,
    View,
    reads,
    recalls,
    usable,
)
from collab_llm_nodes.errors import CollabError, ConfigError, printable
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.stop_words import STOP_WORDS, asks_to_stop, check_stop_words
from collab_llm_nodes.ros.clock import STEADY, wall
from collab_llm_nodes.ros.convert import code_of, figures_from
from collab_llm_nodes.ros.goals import ALL_GOALS, SentGoal, action_client, cancel_client
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.motion_inputs import yaw_of
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import CAMERA, COMMAND, REQUESTS, RESULT, STATE
from collab_llm_nodes.transport.credentials import read_token

if TYPE_CHECKING:
    from collab_llm_nodes.dashboard.server import DashboardServer

TOKEN_VARIABLE = "COLLAB_LLM_DASHBOARD_TOKEN"
_MEMORY, _DOCUMENTS = "dragon", "minions"
"""Protocols that answer questions: about the robot's own documents, and about any."""
_WATCHED_S = 2.0
"""A viewer counts as present for this long after the last request [s]."""
_LINK_STATES = {LinkState.DOWN: "DOWN", LinkState.CONNECTING: "CONNECTING", LinkState.UP: "UP"}
_KINDS = {
    NavigationAction.NONE: "none",
    NavigationAction.STOP: "stop",
    NavigationAction.FORWARD: "forward",
    NavigationAction.TURN: "turn",
    NavigationAction.GIVE_UP: "give up",
    NavigationAction.REPLY: "reply",
}


@dataclass(frozen=True)
class DashboardConfig:
    """Parameters of the node; the token is none, since everybody can read parameters."""

    host: str = fixed(
        "127.0.0.1",
        "Address to listen on; any but this machine's own needs a token (environment"
        f" {TOKEN_VARIABLE}, or token_file).",
    )
    port: int = fixed(8080, "TCP port; 0 = a free one, which is logged.", low=0, high=65535)
    token_file: str = fixed("", "File with the token that pages must present.")
    max_viewers: int = fixed(8, "Pages open at a time.", low=1, high=100)
    rate: float = fixed(5.0, "Updates of a page per second.", low=0.5, high=20.0)
    camera_fov: float = setting(
        90.0,
        "Horizontal field of view of the pictures shown [deg], to draw directions into them.",
        low=10.0,
        high=170.0,
    )
    stop_words: tuple[str, ...] = fixed(
        STOP_WORDS, "Instructions that cancel the current one, from any source."
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        check_stop_words(self.stop_words)


class Dashboard(ManagedNode[DashboardConfig]):
    """See the module docstring. The methods of ``Robot`` may be called from any thread."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("dashboard", DashboardConfig, **node_arguments)
        self._server: DashboardServer | None = None
        self._view = View(math.radians(self.config.camera_fov))
        self._pending = ""  # the instruction that waits to be confirmed, as it was announced last
        self._shown = self._view.snapshot(wall())
        self._frame: tuple[int, bytes] = (0, b"")
        self._motion: tuple[Motion | None, float] = (None, -math.inf)
        self._asked_at = -math.inf
        self._goals = 0  # sent; the newest one's number
        self._sent: SentGoal | None = None
        self._asked: dict[str, SentGoal] = {}  # questions under way, by protocol

    @property
    def port(self) -> int:
        """Port of the page."""
        return self._server.port if self._server is not None else 0

    # Lifecycle.

    def configure(self) -> None:
        """Subscribe, then open the web server. Raises CollabError if that cannot be."""
        try:
            from collab_llm_nodes.dashboard.server import DashboardServer
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the Python package {error.name} is not installed",
                field="dashboard",
                remedy="pip install -r requirements/dashboard.txt",
            ) from None
        config = self.config
        token = read_token("" if config.token_file else os.environ.get(TOKEN_VARIABLE, ""), "")
        token = token or read_token("", config.token_file)
        self._connect()
        try:
            self._server = DashboardServer(
                self,
                config.host,
                config.port,
                token,
                max_viewers=config.max_viewers,
                rate=config.rate,
            )
        except CollabError:
            self._disconnect()
            raise
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.get_logger().info(f"dashboard at http://{host}:{self.port}/")

    def cleanup(self) -> None:
        if self._server is not None:  # first: it uses what follows
            self._server.close()
            self._server = None
        self._disconnect()

    def _connect(self) -> None:
        self._view = View(math.radians(self.config.camera_fov))
        self._stops = self.create_publisher(Bool, "emergency_stop", COMMAND)
        self._resets = self.create_client(Trigger, "reset_emergency_stop", qos_profile=REQUESTS)
        self._confirms = self.create_client(Trigger, "confirm_instruction", qos_profile=REQUESTS)
        self._navigate = action_client(self, Navigate, "navigate")
        self._answering = {
            protocol: action_client(self, Generate, f"{protocol}/generate")
            for protocol in (_MEMORY, _DOCUMENTS)
        }
        self._cancels = cancel_client(self, "navigate")
        self._heard = [
            self.create_subscription(kind, topic, callback, qos)
            for kind, topic, callback, qos in (
                (Observation, "observation", self._on_observation, CAMERA),
                (Odometry, "odom", self._on_odometry, CAMERA),
                (Draft, "draft", self._on_draft, RESULT),
                (GeneratedText, "generated_text", self._on_text, RESULT),
                (DragonRetrieval, "dragon/retrieval", self._on_found, RESULT),
                (JupiterStages, "jupiter_stages", self._on_stages, STATE),
                (NavigationAction, "navigation_action", self._on_action, RESULT),
                (LinkState, "link_state", self._on_link, STATE),
                (MotionState, "motion_state", self._on_motion, STATE),
                (String, "instruction", self._on_instruction, STATE),
                (String, "pending_instruction", self._on_pending, STATE),
                (DiagnosticArray, "/diagnostics", self._on_diagnostics, RESULT),
            )
        ]
        self._ticks = self.create_timer(1.0 / self.config.rate, self._tick, clock=STEADY)

    def _disconnect(self) -> None:
        self.destroy_timer(self._ticks)
        for subscription in self._heard:
            self.destroy_subscription(subscription)
        for sent in (self._sent, *self._asked.values()):
            if sent is not None:
                sent.forget()
        self._asked.clear()
        for action in (self._navigate, *self._answering.values()):
            action.destroy()
        for client in (self._resets, self._cancels, self._confirms):
            self.destroy_client(client)
        self.destroy_publisher(self._stops)

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, values = super().diagnose()
        viewers = self._server.viewers if self._server is not None else 0
        return level, message, {**values, "viewers": viewers, "port": self.port}

    def _apply(self, parameters: list[Parameter]) -> None:
        super()._apply(parameters)
        self._view.camera_fov = math.radians(self.config.camera_fov)

    # Messages of the graph.

    @guarded
    def _on_observation(self, msg: Observation) -> None:
        self._view.on_frame(wall())
        if self._watched():
            self._frame = (self._frame[0] + 1, msg.image.data.tobytes())

    @guarded
    def _on_odometry(self, msg: Odometry) -> None:
        p, q = msg.pose.pose.position, msg.pose.pose.orientation
        self._view.on_pose(Pose2D(p.x, p.y, yaw_of(q.w, q.x, q.y, q.z)), wall())

    @guarded
    def _on_draft(self, msg: Draft) -> None:
        solo = msg.solo > 0
        self._view.on_draft(msg.session_id, len(msg.tokens), solo=solo, ahead=msg.ahead)

    @guarded
    def _on_text(self, msg: GeneratedText) -> None:
        failed = msg.status.code != StatusMsg.OK
        error = f"{code_of(msg.status)}: {msg.status.message}" if failed else ""
        figures = {name: n for name, n in figures_from(msg.metrics).items() if usable(n)}
        if recalls(figures) or self._view.looked_up(msg.session_id):
            rest = (tuple(msg.ends), tuple(msg.sources), msg.stage, msg.final, error)
            self._view.on_recall(Recall(msg.session_id, msg.prompt, msg.text, *rest))
            return
        if reads(figures):
            reading = Reading(
                msg.session_id, msg.prompt, msg.text, msg.stage, msg.final, error, figures
            )
            self._view.on_reading(reading)
            return
        self._view.on_answer(
            Answer(
                session=msg.session_id,
                prompt=msg.prompt,
                text=msg.text,
                ends=tuple(msg.ends),
                sources=tuple(msg.sources),
                final=msg.final,
                error=error,
                figures=_figures(msg.metrics, figures),
            )
        )

    @guarded
    def _on_found(self, msg: DragonRetrieval) -> None:
        pieces = zip(msg.names, msg.texts, msg.weights, strict=False)
        self._view.on_found(msg.session_id, msg.prompt, [Found(*piece) for piece in pieces])

    @guarded
    def _on_stages(self, msg: JupiterStages) -> None:
        held = zip(msg.devices, msg.first_layers, msg.last_layers, msg.tensor_bytes, strict=False)
        shown = Stages(
            model=msg.model[:200],
            stages=tuple(Stage(each[0][:NAME], *each[1:]) for each in [*held][:ROWS]),
            missing=names(msg.missing),
            losses=msg.losses,
            lanes=msg.lanes,
            lanes_in_use=msg.lanes_in_use,
            planned=_timeline(msg.planned),
            measured=_timeline(msg.measured),
        )
        self._view.on_stages(shown)

    @guarded
    def _on_action(self, msg: NavigationAction) -> None:
        self._view.on_action(
            Action(
                session=msg.session_id,
                kind=_KINDS.get(msg.kind, "none"),
                value=msg.distance if msg.kind == NavigationAction.FORWARD else msg.angle,
                reason=msg.reason if msg.code != NavigationAction.OK else "",
                span=(msg.span_begin, msg.span_end),
            )
        )

    @guarded
    def _on_link(self, msg: LinkState) -> None:
        link = Link(
            state=_LINK_STATES.get(msg.state, "UNKNOWN"),
            verifier=msg.verifier,
            model=msg.model,
            rtt_s=msg.rtt_s,
            reconnects=msg.reconnects,
            sessions=msg.sessions,
            error=f"{msg.error_code}: {msg.error_msg}" if msg.error_code else "",
        )
        self._view.on_link(link, wall())

    @guarded
    def _on_motion(self, msg: MotionState) -> None:
        motion = Motion(
            allowed=msg.allowed,
            emergency_stop=msg.emergency_stop,
            reasons=tuple(msg.reasons[:16]),
            text=msg.text[:1000],
            speed_limit=msg.speed_limit,
            linear=msg.linear,
            angular=msg.angular,
        )
        self._motion = (motion, wall())

    @guarded
    def _on_instruction(self, msg: String) -> None:
        goal, followed = self._view.goal, msg.data[:1000]
        ours = goal.state == "sent" and followed == goal.instruction
        self._view.goal = replace(goal, followed=followed, state="running" if ours else goal.state)

    @guarded
    def _on_pending(self, msg: String) -> None:
        self._pending = msg.data[:1000]

    @guarded
    def _on_diagnostics(self, msg: DiagnosticArray) -> None:
        for status in msg.status:
            level = int.from_bytes(status.level, "little")
            self._view.on_health(status.name, level, status.message, wall())

    @guarded
    def _tick(self) -> None:
        goal = self._view.goal
        if goal.busy and not self._navigate.server_is_ready():
            lost = "the navigator is gone" if goal.state != "idle" else ""
            state = "ended" if lost else "idle"
            self._view.goal = replace(goal, state=state, error=lost, followed="")
        self._view.pending = self._pending if self._confirms.service_is_ready() else ""
        self._view.remembers = self._answering[_MEMORY].server_is_ready()
        self._view.reads = self._answering[_DOCUMENTS].server_is_ready()
        if not self.count_publishers("jupiter_stages"):
            self._view.on_stages(None)
        self._view.sample(wall())
        if self._watched():
            self._shown = self._view.snapshot(wall())

    # Commands of people, in the node's thread.

    def _instruct(self, instruction: str) -> None:
        if self.is_stop(instruction):
            self._give_up()
            return
        if not self.active or self._view.goal.busy:
            return  # the page offers it to nobody then
        if not self._navigate.server_is_ready():
            self._view.goal = Goal("ended", instruction, error="the navigator is not there")
            return
        self._goals += 1
        self._view.goal = Goal("sent", instruction)
        self._sent = SentGoal(
            self,
            self._navigate,
            Navigate.Goal(instruction=instruction),
            partial(self._on_end, self._goals),
            partial(self._on_feedback, self._goals),
        )

    def _on_feedback(self, number: int, message: Any) -> None:
        goal = self._view.goal
        if number == self._goals and goal.state in ("sent", "running"):
            self._view.goal = replace(goal, state="running", step=message.feedback.step)

    def _on_end(self, number: int, result: Navigate.Result | None) -> None:
        if number != self._goals or self._sent is None:
            return
        if result is None:
            error = f"the navigator {self._sent.loss}; see its log"
        elif result.status.code == StatusMsg.OK:
            error = ""
        elif result.status.code == StatusMsg.ANSWERED:
            error = f'it replied: "{printable(result.text)}"'
        else:
            error = result.status.message or f"ended with status {code_of(result.status)}"
        self._view.goal = replace(self._view.goal, state="ended", error=error)

    def _confirm(self) -> None:
        if not self._view.goal.busy:
            self._view.goal = Goal()
        if self._confirms.service_is_ready():
            answered = self._confirms.call_async(Trigger.Request())
            answered.add_done_callback(partial(self._on_confirmed, self._pending))
        else:
            self._refuse_confirmation(self._pending, "it does not wait for that any more")

    def _on_confirmed(self, instruction: str, answered: RosFuture) -> None:
        response = answered.result()
        if not response.success:
            self._refuse_confirmation(instruction, response.message)

    def _refuse_confirmation(self, instruction: str, why: str) -> None:
        if not self._view.goal.busy:
            self._view.goal = Goal("ended", instruction, error=f"not confirmed: {why[:1000]}")

    def _ask(self, question: str) -> None:
        begin = partial(self._view.on_recall, Recall(question=question))
        goal = Generate.Goal(protocol=_MEMORY, prompt=question)
        self._send_question(goal, begin, self._view.on_recall_error)

    def _ask_documents(self, question: str, documents: tuple[tuple[str, str], ...]) -> None:
        names = tuple(name for name, _ in documents)
        begin = partial(self._view.on_documents_asked, question, names)
        goal = Generate.Goal(protocol=_DOCUMENTS, prompt=question, document_names=names)
        goal.document_contents = [content for _, content in documents]
        self._send_question(goal, begin, self._view.on_reading_error)

    def _send_question(
        self, goal: Generate.Goal, begin: Callable[[], None], fail: Callable[[str, str], None]
    ) -> None:
        """Send a question to a protocol; the answer comes on ``generated_text``."""
        protocol = goal.protocol
        if not self.active or protocol in self._asked:
            return  # one question at a time
        begin()
        if self._answering[protocol].server_is_ready():
            end = partial(self._on_answered, protocol, partial(fail, goal.prompt))
            self._asked[protocol] = SentGoal(self, self._answering[protocol], goal, end)
        else:
            fail(goal.prompt, f"{protocol}_server is not there")

    def _on_answered(
        self, protocol: str, fail: Callable[[str], None], result: Generate.Result | None
    ) -> None:
        """Show why there is no answer."""
        sent = self._asked.pop(protocol, None)
        if sent is None:
            return
        if result is None:
            fail(f"{protocol}_server {sent.loss}")
        elif result.status.code != StatusMsg.OK:
            fail(f"{code_of(result.status)}: {result.status.message}")

    def _give_up(self) -> None:
        if self._cancels.service_is_ready():
            asked = self._cancels.call_async(ALL_GOALS)
            asked.add_done_callback(partial(self._on_cancelled, self._goals))
            if self._sent is not None and self._view.goal.state in ("sent", "running"):
                self._sent.cancel()  # it may be on its way yet
                self._view.goal = replace(self._view.goal, state="cancelling")

    def _on_cancelled(self, number: int, answered: RosFuture) -> None:
        """If the navigator knows no goal, mark ours as ended."""
        if number != self._goals or answered.result().goals_canceling:
            return
        goal = replace(self._view.goal, followed="")
        if goal.state == "cancelling":
            goal = replace(goal, state="ended", error="the navigator does not have the goal")
        self._view.goal = goal

    def _ask_reset(self, answer: Future[tuple[bool, str]]) -> None:
        def on_response(done: RosFuture) -> None:
            response = done.result()
            answer.set_result((response.success, response.message))

        if not answer.set_running_or_notify_cancel():
            return  # given up while this thread was busy: nobody expects it any more
        if self._resets.service_is_ready():
            self._resets.call_async(Trigger.Request()).add_done_callback(on_response)
        else:
            answer.set_result((False, "motion_guard is not there"))

    def _watched(self) -> bool:
        return wall() - self._asked_at < _WATCHED_S

    # Robot: from any thread.

    def shown(self) -> Snapshot:
        """See ``Robot``; here and below."""
        self._asked_at = wall()
        return self._shown

    def frame(self) -> tuple[int, bytes]:
        self._asked_at = wall()
        return self._frame

    def motion(self) -> tuple[Motion | None, float]:
        motion, at = self._motion
        return motion, wall() - at

    def emergency_stop(self) -> int:
        self._stops.publish(Bool(data=True))
        return int(self._stops.get_subscription_count())

    def reset(self) -> Future[tuple[bool, str]]:
        answer: Future[tuple[bool, str]] = Future()
        self.post(self._ask_reset, answer)
        return answer

    def instruct(self, instruction: str) -> None:
        self.post(self._instruct, instruction)

    def confirm(self) -> None:
        self.post(self._confirm)

    def ask(self, question: str) -> None:
        self.post(self._ask, question)

    def ask_documents(self, question: str, documents: tuple[tuple[str, str], ...]) -> None:
        self.post(self._ask_documents, question, documents)

    def is_stop(self, instruction: str) -> bool:
        return asks_to_stop(instruction, self.config.stop_words)

    def cancel(self) -> None:
        self.post(self._give_up)


def _timeline(msg: TimelineMsg) -> Timeline:
    return timeline(msg.rows, zip(msg.row, msg.number, msg.begin, msg.end, strict=False))


def _figures(msg: GenerationMetrics, own: Mapping[str, float]) -> Figures:
    return Figures(
        rounds=msg.rounds,
        tokens=msg.tokens,
        tau=own.get("tau", 0.0),
        cache_hits=int(own.get("cache_hits", 0)),
        cache_lookups=int(own.get("cache_lookups", 0)),
        first_token_s=msg.time_to_first_token_s,
        total_s=msg.total_s,
        draft_s=own.get("draft_s", 0.0),
        verify_s=own.get("verify_s", 0.0),
        wait_s=own.get("wait_s", 0.0),
    )


def main() -> int:
    """Run the node."""
    return run(Dashboard)


if __name__ == "__main__":
    raise SystemExit(main())
