"""What the nodes say about themselves: diagnostics, QoS, introspection, logs, markers, layouts."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from folders import ROOT

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rcl_interfaces.srv import SetParameters
from rclpy.action import ActionClient
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage
from service_msgs.msg import ServiceEventInfo
from std_msgs.msg import Header, String
from std_srvs.srv import Trigger
from visualization_msgs.msg import Marker, MarkerArray

from collab_llm.action import Navigate
from collab_llm.msg import GeneratedText, MotionState, NavigationAction, Observation, Status
from collab_llm.srv import EdgeCloudGenerate
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.nodes.camera_ingest import CameraIngest
from collab_llm_nodes.nodes.cloud_verifier_bridge import CloudVerifierBridge
from collab_llm_nodes.nodes.draft_vlm import DraftVlm
from collab_llm_nodes.nodes.markers import Markers, MarkersConfig, Picture
from collab_llm_nodes.nodes.motion_guard import MotionGuard
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser, ParserConfig
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.nodes.predraft_cache import PreDraftCacheNode
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.grammar import Kind
from collab_llm_nodes.ros.health import (
    ActionLimits,
    Actions,
    AnswerLimits,
    Answers,
    DiagnosticsConfig,
    Level,
    LinkHealth,
    LinkLimits,
    Memory,
    TopicLimits,
    Traffic,
    read_memory,
)
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.qos import CAMERA, COMMAND, RESULT, STATE

# The records, without ROS.


def traffic(ages: float | None = None, period: float = 0.1, until: float = 6.0) -> Traffic:
    """A topic with a message every ``period`` from 0 to ``until``, reported once a second."""
    topic = Traffic("odom", 0.0)
    for i in range(1, round(until / period) + 1):
        topic.on_message(i * period, ages)
        if abs(i * period - round(i * period)) < 1e-9:
            topic.status(TopicLimits(), i * period)
    return topic


@pytest.mark.parametrize(
    ("limits", "topic", "now", "level", "words"),
    [
        (TopicLimits(), traffic(0.01), 6.0, Level.OK, "10.0 messages per second"),
        (TopicLimits(min_rate=9.0), traffic(), 6.0, Level.OK, "10.0"),
        (TopicLimits(min_rate=11.0), traffic(), 6.0, Level.WARN, "11 expected"),
        (TopicLimits(min_rate=11.0), traffic(until=0.5), 0.5, Level.OK, ""),  # it has only begun
        (TopicLimits(max_age=0.3), traffic(0.2), 6.0, Level.OK, ""),
        (TopicLimits(max_age=0.1), traffic(0.2), 6.0, Level.WARN, "0.20 s old"),
        (TopicLimits(silent_after=1.0), traffic(), 6.9, Level.OK, ""),
        (TopicLimits(silent_after=1.0), traffic(), 7.1, Level.ERROR, "no message for 1.1 s"),
        (TopicLimits(), traffic(), 60.0, Level.OK, ""),
        (TopicLimits(silent_after=1.0), Traffic("odom", 0.0), 3.0, Level.STALE, "no message yet"),
    ],
)
def test_a_topic_is_judged_by_its_limits(
    limits: TopicLimits, topic: Traffic, now: float, level: Level, words: str
) -> None:
    status = topic.status(limits, now)
    assert status.level == level, status
    assert words in status.message


def test_rates_and_ages_are_those_of_the_last_seconds() -> None:
    topic = traffic(5.0, until=6.0)  # old messages, then fresh and rarer ones
    for i in range(1, 21):
        topic.on_message(6.0 + 0.5 * i, 0.01)
        topic.status(TopicLimits(), 6.0 + 0.5 * i)
    values = topic.status(TopicLimits(), 16.0).values
    assert float(values["rate_hz"]) == pytest.approx(2.0, rel=0.2)
    assert float(values["oldest_s"]) == pytest.approx(0.01)
    assert values["messages"] == 80
    assert len(topic._marks) < 20, "the memory of a topic is bounded"


def metrics(tokens: int = 30, rounds: int = 10, **others: Any) -> EdgeCloudMetrics:
    return EdgeCloudMetrics(
        rounds=rounds, tokens=tokens, drafted=40, accepted=20, total_s=0.5, **others
    )


def test_answers_tell_acceptance_and_speed() -> None:
    answers = Answers()
    assert answers.status("decoding", AnswerLimits(), 0.0, 10.0).message == "no answer yet"
    answers.on_answer(metrics(cache_lookups=8, cache_hits=6, time_to_first_token_s=0.1))
    status = answers.status("decoding", AnswerLimits(), 0.0, 10.0)
    assert (status.level, status.message) == (Level.OK, "tau 3.00")
    told = {k: float(status.values[k]) for k in ("tau", "acceptance", "hit_rate", "answer_s")}
    assert told == {"tau": 3.0, "acceptance": 0.5, "hit_rate": 0.75, "answer_s": 0.5}
    assert float(status.values["tokens_per_s"]) == 60.0


def test_answers_are_judged_by_their_limits() -> None:
    answers = Answers()

    def level(now: float = 0.0, **limits: Any) -> Level:
        return answers.status("decoding", AnswerLimits(**limits), now, 10.0).level

    answers.on_answer(metrics())
    assert level(min_tau=2.9) == Level.OK
    assert level(min_tau=3.1) == Level.WARN
    assert level(max_total=0.6) == Level.OK
    assert level(max_total=0.4) == Level.WARN
    answers.on_answer(metrics(unverified=3))
    assert level() == Level.WARN, "the draft model stood alone"
    answers.on_answer(metrics())
    answers.faults.add("UNAVAILABLE", "verifier gone", now=100.0)
    assert level(now=101.0) == Level.WARN
    assert level(now=111.0) == Level.OK, "long past"
    answers.faults.add("UNAVAILABLE", "verifier gone", now=102.0)
    assert level(now=200.0, failures=2) == Level.ERROR, "until one succeeds"
    assert answers.status("d", AnswerLimits(), 0.0, 10.0).values["failed.UNAVAILABLE"] == 2
    answers.on_answer(metrics())
    assert level(now=200.0, failures=2) == Level.OK


def test_tau_is_not_judged_where_nothing_is_drafted() -> None:
    answers = Answers()
    answers.on_answer(EdgeCloudMetrics(rounds=10, tokens=10, total_s=1.0))
    assert answers.status("decoding", AnswerLimits(), 0.0, 10.0).level == Level.OK


def test_a_link_is_judged_by_its_limits() -> None:
    link, limits = LinkHealth(0.0), LinkLimits(max_rtt=0.2, down_after=2.0)

    def level(state: str, now: float, rtt_s: float = 0.05) -> Level:
        return link.status(state, rtt_s, "", limits, now, 10.0).level

    assert level("CONNECTING", 1.0) == Level.WARN
    assert level("CONNECTING", 2.5) == Level.ERROR
    assert level("UP", 3.0) == Level.OK
    assert level("UP", 3.5, rtt_s=0.3) == Level.WARN
    assert level("DOWN", 4.0) == Level.WARN
    assert "DOWN for 1.5 s: why" in link.status("DOWN", 0, "why", limits, 5.0, 10.0).message
    assert level("DOWN", 5.5) == Level.ERROR
    link.faults.add("DEADLINE_EXCEEDED", "no verdict", now=6.0)
    assert level("UP", 7.0) == Level.WARN
    assert level("UP", 17.0) == Level.OK
    assert link.status("UP", 0, "", limits, 17.0, 10.0).values["errors.DEADLINE_EXCEEDED"] == 1
    link.on_state("UP", 99.0)  # while nobody wanted reports
    assert level("DOWN", 100.0) == Level.WARN


def test_actions_are_judged_by_their_limits() -> None:
    actions = Actions()
    actions.on_action("OK", "", 0.4, 0.0)
    assert actions.status(ActionLimits()).level == Level.OK
    assert actions.status(ActionLimits(max_age=0.3)).level == Level.WARN
    for _ in range(2):
        actions.on_action("UNREADABLE", "no action", 0.4, 0.0)
    assert actions.status(ActionLimits(refusals=3)).level == Level.OK
    assert actions.status(ActionLimits(refusals=2)).level == Level.WARN
    actions.on_action("OK", "", 0.4, 0.0)
    status = actions.status(ActionLimits(refusals=2))
    assert status.level == Level.OK
    assert status.values["UNREADABLE"] == 2


@pytest.mark.parametrize(
    ("available", "level"), [(50, Level.OK), (8, Level.WARN), (2, Level.ERROR)]
)
def test_memory_that_runs_out_is_told(available: int, level: Level) -> None:
    config = DiagnosticsConfig(memory_warn=0.1, memory_error=0.03)
    assert Memory(1, available, 100).judge(config)[0] == level


def test_memory_is_read_where_linux_tells_it(tmp_path: Path) -> None:
    memory = read_memory()
    assert memory is not None
    assert 10 << 20 < memory.resident < memory.total
    assert 0 < memory.available <= memory.total
    assert read_memory(tmp_path) is None


# Nodes.

pytestmark = pytest.mark.ros


class Reports:
    """The newest report of each name on ``/diagnostics``."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.user = graph.node("user")
        self._arrays = graph.collect(self.user, DiagnosticArray, "/diagnostics", RESULT)

    def __getitem__(self, name: str) -> DiagnosticStatus | None:
        own = [s for a in list(self._arrays) for s in a.status if s.name == name]
        return own[-1] if own else None

    def wait(self, name: str, level: bytes, words: str = "") -> dict[str, str]:
        """The values of the first report with this level and these words."""

        def look() -> Any:
            status = self[name]
            return status if status and status.level == level and words in status.message else None

        status = self.graph.wait_for(look)
        return {v.key: v.value for v in status.values}


@pytest.fixture
def reports(ros_graph: Any) -> Reports:
    return Reports(ros_graph)


def start(graph: Any, kind: Callable[..., Any], **parameters: Any) -> Any:
    """A started node with fast diagnostics."""
    values = {"diagnostics.period": 0.1, **parameters}
    overrides = [Parameter(name.replace("__", "."), value=v) for name, v in values.items()]
    node = kind(context=graph.context, parameter_overrides=overrides)
    graph.add(node)
    node.start()
    return node


def set_parameter(graph: Any, user: Any, node: str, name: str, value: Any) -> Any:
    client = user.create_client(SetParameters, f"{node}/set_parameters")
    graph.wait_for(client.service_is_ready)
    request = SetParameters.Request(parameters=[Parameter(name, value=value).to_parameter_msg()])
    return graph.ask(client.call_async, request).results[0]


def odometry(node: Any, x: float = 0.0, yaw: float = 0.0) -> Odometry:
    msg = Odometry()
    msg.header.stamp, msg.header.frame_id = node.get_clock().now().to_msg(), "odom"
    msg.pose.pose.position.x = x
    msg.pose.pose.orientation.z = math.sin(yaw / 2)
    msg.pose.pose.orientation.w = math.cos(yaw / 2)
    return msg


def test_a_node_tells_of_its_topics_and_of_silence(ros_graph: Any, reports: Reports) -> None:
    start(ros_graph, Navigator, **{"health.odom.silent_after": 0.5, "health.odom.min_rate": 0.0})
    user = reports.user
    reports.wait("navigator: odom", Level.STALE, "no message yet")
    publisher = user.create_publisher(Odometry, "odom", CAMERA)
    timer = user.create_timer(0.02, lambda: publisher.publish(odometry(user)))
    values = reports.wait("navigator: odom", Level.OK)
    assert {"messages", "rate_hz", "age_s", "oldest_s"} <= set(values)
    timer.cancel()
    reports.wait("navigator: odom", Level.ERROR, "no message for")
    values = reports.wait("navigator: node", Level.OK, "active")
    assert {"callback_errors", "process_cpu_percent", "process_memory_mib"} <= set(values)
    assert "received navigation_action" in reports.wait("navigator: topics", Level.OK)


@pytest.mark.parametrize(
    ("kind", "parts", "parameters"),
    [
        (CameraIngest, {"observation"}, {}),
        (CloudVerifierBridge, {"link"}, {"verifier.address": "127.0.0.1:9"}),
        (DraftVlm, {"decoding", "model"}, {"model.path": str(ROOT / "models" / "nav-draft")}),
        (Markers, set(), {}),
        (MotionGuard, set(), {}),
        (NavigationActionParser, {"actions"}, {}),
        (Navigator, {"missions", "observation", "odom"}, {}),
        (PreDraftCacheNode, set(), {}),
    ],
)
def test_every_node_reports_its_parts(
    ros_graph: Any, reports: Reports, kind: Any, parts: set[str], parameters: dict[str, Any]
) -> None:
    name = start(ros_graph, kind, **parameters).get_name()
    for part in {"node", "topics", *parts}:
        ros_graph.wait_for(lambda: reports[f"{name}: {part}"])  # noqa: B023
    whole = reports[f"{name}: node"]
    assert whole is not None
    assert not whole.message.startswith("diagnostics:"), whole.message


def test_motion_that_nobody_carries_out_is_told(ros_graph: Any, reports: Reports) -> None:
    """Under whatever name; a recorder does not carry it out."""
    free = {"needs_odometry": False, "needs_camera": False, "link_policy": "ignore"}
    remapped = partial(MotionGuard, cli_args=["--ros-args", "-r", "cmd_vel:=wheels"])
    start(ros_graph, remapped, **free)
    ros_graph.node("recorder").create_subscription(Twist, "wheels", lambda _: None, 1)
    ros_graph.wait_for(lambda: reports.user.count_subscribers("wheels") == 1)
    reports._arrays.clear()
    reports.wait("motion_guard: node", Level.WARN, "nobody takes cmd_vel")
    reports.user.create_subscription(Twist, "wheels", lambda _: None, 1)
    reports.wait("motion_guard: node", Level.OK, "active")


def test_failed_answers_are_told_with_their_code(ros_graph: Any, reports: Reports) -> None:
    folder = str(ROOT / "models" / "nav-draft")
    start(ros_graph, DraftVlm, open_deadline_s=0.05, **{"model.path": folder, "health.failures": 2})
    client = reports.user.create_client(EdgeCloudGenerate, "edge_cloud_generate")
    ros_graph.wait_for(client.service_is_ready)
    request = EdgeCloudGenerate.Request(prompt="find the red ball", deadline_s=20.0)
    for level in (Level.WARN, Level.ERROR):  # there is no bridge
        answer = ros_graph.ask(client.call_async, request)
        assert answer.status.code == Status.UNAVAILABLE, answer.status.message
        values = reports.wait("draft_vlm: decoding", level, "open_session is not there")
    assert values["failed.UNAVAILABLE"] == "2"


def test_texts_without_an_action_are_told(ros_graph: Any, reports: Reports) -> None:
    start(ros_graph, NavigationActionParser, **{"health.refusals": 2})
    texts = reports.user.create_publisher(GeneratedText, "generated_text", RESULT)
    ros_graph.wait_for(texts.get_subscription_count)
    for session in ("a", "b"):
        text = GeneratedText(session_id=session, text="hello", final=True, for_motion=True)
        text.verified = True
        text.header.stamp = reports.user.get_clock().now().to_msg()
        texts.publish(text)
    values = reports.wait("navigation_action_parser: actions", Level.WARN, "2 texts without")
    assert values["UNREADABLE"] == "2"


def test_missions_that_fail_are_told(ros_graph: Any, reports: Reports) -> None:
    impatient = {"mission.observation_timeout": 0.1, "require_guard": False}
    start(ros_graph, Navigator, **{"diagnostics.recent": 2.0, **impatient})
    client = ActionClient(reports.user, Navigate, "navigate")
    ros_graph.wait_for(client.server_is_ready)
    goal = ros_graph.ask(client.send_goal_async, Navigate.Goal(instruction="go"))
    ros_graph.ask(goal.get_result_async)
    values = reports.wait("navigator: missions", Level.WARN, "NO_OBSERVATION")
    assert values["NO_OBSERVATION"] == "1"
    reports.wait("navigator: missions", Level.OK, "0 followed")


def test_reports_say_whose_they_are(ros_graph: Any, reports: Reports) -> None:
    start(ros_graph, NavigationActionParser, **{"diagnostics.hardware_id": "go2-17"})
    reports.wait("navigation_action_parser: actions", Level.OK)
    status = reports["navigation_action_parser: node"]
    assert status is not None
    assert status.hardware_id == "go2-17"


def test_an_inactive_node_says_only_that(ros_graph: Any, reports: Reports) -> None:
    start(ros_graph, NavigationActionParser, autostart=False)
    reports.wait("navigation_action_parser: node", Level.OK, "inactive")
    assert reports["navigation_action_parser: topics"] is None


class Failing(ManagedNode[ParserConfig]):
    """Fails in a callback, or when asked how it is."""

    diagnosis_fails = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__("failing", ParserConfig, **arguments)

    @guarded
    def fail(self) -> None:
        raise ValueError("something")

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        if self.diagnosis_fails:
            raise RuntimeError("cannot say")
        return super().diagnose()


def test_a_failed_callback_is_a_warning_until_it_is_past(ros_graph: Any, reports: Reports) -> None:
    node = start(ros_graph, Failing, **{"diagnostics.recent": 1.0})
    node.post(node.fail)
    values = reports.wait("failing: node", Level.WARN, "fail: ValueError: something")
    assert values["callback_errors"] == "1"
    reports.wait("failing: node", Level.OK)


def test_diagnostics_that_fail_are_an_error_and_end_nothing(
    ros_graph: Any, reports: Reports
) -> None:
    node = start(ros_graph, Failing)
    node.diagnosis_fails = True
    reports.wait("failing: node", Level.ERROR, "RuntimeError: cannot say")
    node.diagnosis_fails = False
    reports.wait("failing: node", Level.OK)


def test_the_period_and_the_thresholds_are_dynamic(ros_graph: Any, reports: Reports) -> None:
    start(ros_graph, NavigationActionParser, **{"diagnostics.period": 60.0})
    name = "navigation_action_parser"
    for parameter, value in (("diagnostics.memory_warn", 1.0), ("diagnostics.period", 0.1)):
        answer = set_parameter(ros_graph, reports.user, name, parameter, value)
        assert answer.successful, answer.reason
    reports.wait(f"{name}: node", Level.WARN, "of the machine's memory is free")
    refused = set_parameter(ros_graph, reports.user, name, "diagnostics.period", 0.0)
    assert not refused.successful


def test_thresholds_out_of_range_are_refused(ros_context: Any) -> None:
    for name in ("diagnostics.recent", "health.odom.min_rate", "health.observation.silent_after"):
        with pytest.raises(ConfigError, match=re.escape(name)):
            Navigator(context=ros_context, parameter_overrides=[Parameter(name, value=-1.0)])


# Quality of service.


def test_qos_is_overridden_by_parameter(ros_graph: Any) -> None:
    prefix = "qos_overrides./image/compressed.subscription"
    camera = start(
        ros_graph,
        CameraIngest,
        source="compressed",
        **{f"{prefix}.reliability": "reliable", f"{prefix}.depth": 3},
    )
    qos = camera._heard.qos_profile
    assert (qos.reliability, qos.depth) == (ReliabilityPolicy.RELIABLE, 3)
    assert (CAMERA.reliability, CAMERA.depth) == (ReliabilityPolicy.BEST_EFFORT, 1), "of the others"


def test_every_topic_can_be_overridden_but_nothing_queues_commands(ros_context: Any) -> None:
    navigator = Navigator(context=ros_context)
    navigator.trigger_configure()
    own: list[Any] = [*navigator.publishers, *navigator.subscriptions]
    overridable = {name.split(".")[1] for name in navigator._parameters if "qos_over" in name}
    ignored = ("/parameter_events", "/rosout", "/clock", "/diagnostics", "transition_event")
    for topic in {t.topic_name for t in own if not t.topic_name.endswith(ignored)}:
        assert topic in overridable, topic
    for publisher in navigator.publishers:
        if publisher.topic_name.startswith("/cmd_vel"):
            assert publisher.qos_profile.depth == COMMAND.depth
            prefix = f"qos_overrides.{publisher.topic_name}.publisher"
            assert navigator.has_parameter(f"{prefix}.reliability")
            assert not navigator.has_parameter(f"{prefix}.depth")
            assert not navigator.has_parameter(f"{prefix}.history")
    navigator.destroy_node()


def test_a_topic_heard_in_two_ways_keeps_both(ros_context: Any) -> None:
    node = Failing(context=ros_context)
    both = [node.create_subscription(String, "twice", print, qos) for qos in (COMMAND, CAMERA)]
    profiles = [subscription.qos_profile for subscription in both]
    assert [p.reliability for p in profiles] == [COMMAND.reliability, CAMERA.reliability]
    assert node.has_parameter("qos_overrides./twice.subscription_2.reliability")
    node.destroy_node()


@pytest.mark.parametrize(("name", "value"), [("reliability", "sometimes"), ("depth", "many")])
def test_a_wrong_override_is_refused_and_named(
    ros_context: Any, capfd: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    parameter = f"qos_overrides./generated_text.subscription.{name}"
    node = NavigationActionParser(
        context=ros_context, parameter_overrides=[Parameter(parameter, value=value)]
    )
    with pytest.raises(ConfigError):
        node.start()
    said = capfd.readouterr().err
    assert "qos_overrides./generated_text" in said
    assert "reliable or best_effort" in said
    node.destroy_node()


def test_incompatible_qos_is_said_and_reported_while_it_lasts(
    ros_graph: Any, reports: Reports, capfd: pytest.CaptureFixture[str]
) -> None:
    start(
        ros_graph,
        CameraIngest,
        source="compressed",
        **{"qos_overrides./image/compressed.subscription.reliability": "reliable"},
    )
    best_effort = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    publisher = reports.user.create_publisher(CompressedImage, "image/compressed", best_effort)
    reports.wait("camera_ingest: topics", Level.WARN, "image/compressed: a publisher offers")
    said = capfd.readouterr().err
    assert said.count("incompatible QoS (RELIABILITY)") == 1, said
    reports.user.destroy_publisher(publisher)
    reports.wait("camera_ingest: topics", Level.OK)


def test_incompatible_subscribers_are_reported_as_well(ros_graph: Any, reports: Reports) -> None:
    """Of a publisher whose reliability somebody has lowered."""
    override = {"qos_overrides./observation.publisher.reliability": "best_effort"}
    start(ros_graph, CameraIngest, source="compressed", **override)
    reports.user.create_subscription(Observation, "observation", print, RESULT)
    reports.wait("camera_ingest: topics", Level.WARN, "observation: a subscriber asks for")


# Service introspection.


class Serving(ManagedNode[ParserConfig]):
    """Offers one service."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__("serving", ParserConfig, **arguments)

    def configure(self) -> None:
        self._service = self.create_service(Trigger, "ping", self._ping, qos_profile=RESULT)

    def _ping(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.message = "pong"
        return response


def test_calls_of_services_are_published_as_the_parameter_says(ros_graph: Any) -> None:
    start(ros_graph, Serving, introspection="metadata")
    user = ros_graph.node("user")
    event_type = Trigger.Event
    events = ros_graph.collect(user, event_type, "ping/_service_event", RESULT)
    client = user.create_client(Trigger, "ping", qos_profile=RESULT)
    ros_graph.wait_for(client.service_is_ready)

    def call_until(condition: Callable[[], Any]) -> None:
        def call() -> Any:  # the first events may come before the listener is known
            ros_graph.ask(client.call_async, Trigger.Request())
            return condition()

        ros_graph.wait_for(call)

    call_until(lambda: events)
    assert not any(e.response for e in events), "metadata only"
    assert set_parameter(ros_graph, user, "serving", "introspection", "contents").successful
    call_until(lambda: any(e.response and e.response[0].message == "pong" for e in events))
    kinds = {e.info.event_type for e in events}
    assert {ServiceEventInfo.REQUEST_RECEIVED, ServiceEventInfo.RESPONSE_SENT} <= kinds
    assert set_parameter(ros_graph, user, "serving", "introspection", "off").successful
    ros_graph.wait_for(lambda: not user.count_publishers("ping/_service_event"))
    assert not set_parameter(ros_graph, user, "serving", "introspection", "some").successful


# Logs.

# Said once: in a transition, which is somebody's wish; on a change; as the last word. All the rest
# can repeat at the rate of a topic or of requests. Debug lines are for those who ask for them.
ONCE = {"configure", "activate", "_transition", "_on_incompatible", "_spin", "_tell_ready"}
ONCE |= {"spelling.py warn_of_misspelt_nodes"}
ONCE |= {"go2_driver.py _make_transforms", "recorder.py _end", "recorder.py _look"}


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted((ROOT / "collab_llm_nodes").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and re.search(
                    r"get_logger\(\)\.(?!get_child|debug)\w+$", ast.unparse(call.func)
                ):
                    yield f"{path.name} {function.name}", call


def test_logs_that_can_repeat_are_throttled() -> None:
    calls = list(log_calls())
    assert len(calls) > 8
    for where, call in calls:
        if not ONCE & {where, where.split()[1]}:
            named = {keyword.arg for keyword in call.keywords}
            assert named & {"throttle_duration_sec", "once"}, where


# Markers.


def drawn(picture: Picture) -> dict[str, Marker]:
    return {m.ns: m for m in picture.markers(Header(frame_id="odom")).markers}


def test_markers_show_path_direction_and_step() -> None:
    picture, config = Picture(), MarkersConfig()
    assert not picture.markers(Header()).markers, "nothing is known"
    for x in (0.0, 0.01, 0.1, 0.2):
        picture.on_pose(Pose2D(x, 0.0, math.pi / 2), config)
    markers = drawn(picture)
    assert [p.x for p in markers["path"].points] == [0.0, 0.1, 0.2], "not every message is a point"
    assert markers["path"].header.frame_id == "odom"
    assert markers["step"].action == markers["target_direction"].action == Marker.DELETE

    picture.on_action(Kind.TURN, -math.pi / 2)
    picture.on_pose(Pose2D(0.2, 0.0, math.pi / 4), config)  # half way
    markers = drawn(picture)
    assert markers["target_direction"].type == Marker.ARROW
    assert markers["target_direction"].pose.orientation.z == pytest.approx(0.0), "to the east"
    arc = markers["step"].points
    assert (arc[0].y, arc[-1].x) == (pytest.approx(0.5), pytest.approx(0.7))

    picture.on_action(Kind.FORWARD, 0.5)
    goal = drawn(picture)["step"].pose.position
    half = 0.5 * math.sqrt(0.5)
    assert (goal.x, goal.y) == (pytest.approx(0.2 + half), pytest.approx(half))

    picture.on_action(Kind.STOP, 0.0)
    assert drawn(picture)["step"].action == Marker.DELETE


def test_the_path_is_bounded_and_begins_anew_elsewhere() -> None:
    picture, config = Picture(), MarkersConfig(path_points=10, path_spacing=0.1)
    for i in range(50):
        picture.on_pose(Pose2D(0.2 * i, 0.0, 0.0), config)
    assert len(picture.path) == 10
    picture.on_action(Kind.FORWARD, 1.0)
    picture.on_pose(Pose2D(0.0, 0.0, 0.0), config)
    assert list(picture.path) == [(0.0, 0.0)]
    assert picture.step is None


def test_markers_tell_why_the_robot_stands() -> None:
    picture = Picture()
    picture.on_pose(Pose2D(), MarkersConfig())
    assert drawn(picture)["text"].action == Marker.DELETE
    picture.instruction = "find the red ball"
    assert drawn(picture)["text"].text == "find the red ball"
    picture.halted = "emergency stop"
    assert drawn(picture)["text"].text == "emergency stop"


def test_the_marker_node_draws_what_the_graph_says(ros_graph: Any) -> None:
    start(ros_graph, Markers, rate=50.0)
    user = ros_graph.node("user")
    poses = user.create_publisher(Odometry, "odom", CAMERA)
    user.create_timer(0.02, lambda: poses.publish(odometry(user, x=1.5)))
    actions = user.create_publisher(NavigationAction, "navigation_action", RESULT)
    states = user.create_publisher(MotionState, "motion_state", STATE)
    instructions = user.create_publisher(String, "instruction", STATE)
    arrays = ros_graph.collect(user, MarkerArray, "markers", STATE)

    def shows(name: str, fits: Callable[[Marker], bool]) -> None:
        def look() -> bool:
            return any(m.ns == name and fits(m) for a in arrays[-1:] for m in a.markers)

        ros_graph.wait_for(look)

    shows("path", lambda m: len(m.points) == 1 and m.points[0].x == 1.5)
    ros_graph.wait_for(actions.get_subscription_count)
    actions.publish(NavigationAction(kind=NavigationAction.FORWARD, distance=0.5))
    shows("step", lambda m: m.action == Marker.ADD and m.pose.position.x == 2.0)
    instructions.publish(String(data="to the door"))
    shows("text", lambda m: m.text == "to the door")
    states.publish(MotionState(allowed=False, text="the link is down"))
    shows("text", lambda m: m.text == "the link is down")
    states.publish(MotionState(allowed=True))
    instructions.publish(String())
    shows("text", lambda m: m.action == Marker.DELETE)
    shows("step", lambda m: m.action == Marker.DELETE)


# The Foxglove layout names topics, fields and services that exist.

LAYOUT = json.loads((ROOT / "config" / "foxglove.json").read_text(encoding="utf-8"))


def topic_types() -> dict[str, str]:
    """Topics and their types, as docs/interfaces.md lists them."""
    page = (ROOT / "docs" / "interfaces.md").read_text(encoding="utf-8")
    table = page.split("## Topics")[1].split("\n\n")[1]
    types = {}
    for row in table.splitlines()[2:]:
        names, kinds = (re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[1:3])
        for i, name in enumerate(names):
            kind = kinds[min(i, len(kinds) - 1)]
            types["/" + name.lstrip("/")] = kind if "/" in kind else f"collab_llm/{kind}"
    return types


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from strings(key)
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)
    elif isinstance(value, str):
        yield value


def test_the_layout_names_topics_and_fields_that_exist() -> None:
    types, services = topic_types(), {"/emergency_stop", "/reset_emergency_stop"}
    paths = {s for s in strings(LAYOUT["configById"]) if s.startswith("/")} - services
    assert len(paths) > 15
    for path in paths:
        topic, *fields = re.sub(r"\[[^]]*\]|\{[^}]*\}", "", path).split(".")
        assert topic in types, path
        package, kind = types[topic].split("/")
        message = getattr(import_module(f"{package}.msg"), kind)
        for name in fields:
            known = message.get_fields_and_field_types()
            assert name in known, path
            nested = known[name].removeprefix("sequence<").removesuffix(">")
            if "/" in nested:
                package, kind = nested.split("/")
                message = getattr(import_module(f"{package}.msg"), kind)


def test_the_layout_numbers_the_figures_of_the_protocol() -> None:
    names = list(EdgeCloudMetrics().figures())
    plotted = [
        (int(number), path["label"])
        for panel in LAYOUT["configById"].values()
        for path in panel.get("paths", [])
        for number in re.findall(r"^/generated_text\.metrics\.values\[(\d+)\]$", path["value"])
    ]
    of_label = {"tau": "tau", "drafting": "draft_s", "verifying": "verify_s", "waiting": "wait_s"}
    assert {label: names[number] for number, label in plotted} == of_label


def test_the_layout_plots_values_that_the_nodes_report(ros_context: Any) -> None:
    known = {
        "draft_vlm: decoding": _answered().status("", AnswerLimits(), 0.0, 1.0).values,
        "navigation_action_parser: actions": _acted().status(ActionLimits()).values,
        "navigator: observation": traffic(0.1).status(TopicLimits(), 6.0).values,
        "navigator: odom": traffic(0.1).status(TopicLimits(), 6.0).values,
    }
    pairs = re.findall(
        r'name==\\?"([^"\\]+)\\?"\}\.values\[:\]\{key==\\?"([^"\\]+)', json.dumps(LAYOUT)
    )
    assert len(pairs) > 3
    for status, key in pairs:
        assert key in known[status], (status, key)
    navigator = Navigator(context=ros_context)
    assert set(navigator.expected()) == {"observation", "odom"}
    navigator.destroy_node()


def _answered() -> Answers:
    answers = Answers()
    answers.on_answer(metrics())
    return answers


def _acted() -> Actions:
    actions = Actions()
    actions.on_action("OK", "", 0.1, 0.0)
    return actions


def test_the_layout_shows_every_panel_once() -> None:
    shown: list[str] = []

    def walk(part: Any) -> None:
        if isinstance(part, str):
            shown.append(part)
        else:
            walk(part["first"])
            walk(part["second"])

    walk(LAYOUT["layout"])
    assert sorted(shown) == sorted(LAYOUT["configById"])


def test_the_layout_can_stop_the_robot() -> None:
    buttons = {
        SimpleNamespace(**panel).serviceName
        for name, panel in LAYOUT["configById"].items()
        if name.startswith("CallService!")
    }
    assert buttons == {"/emergency_stop", "/reset_emergency_stop"}
