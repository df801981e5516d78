"""Diagnostics of running nodes: their parts, quality of service, introspection, logs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from folders import ROOT

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rcl_interfaces.srv import SetParameters
from rclpy.action import ActionClient
from rclpy.context import Context
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from reports import odometry, start
from sensor_msgs.msg import CompressedImage
from service_msgs.msg import ServiceEventInfo
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger

from collab_llm.action import Navigate
from collab_llm.msg import GeneratedText, Observation, Status
from collab_llm.srv import EdgeCloudGenerate
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.nodes.camera_ingest import CameraIngest
from collab_llm_nodes.nodes.cloud_verifier_bridge import CloudVerifierBridge
from collab_llm_nodes.nodes.draft_vlm import DraftVlm
from collab_llm_nodes.nodes.markers import Markers
from collab_llm_nodes.nodes.motion_guard import MotionGuard
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser, ParserConfig
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.nodes.predraft_cache import PreDraftCacheNode
from collab_llm_nodes.robot import mission
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.qos import CAMERA, COMMAND, RESULT, STATE

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


def set_parameter(graph: Any, user: Any, node: str, name: str, value: Any) -> Any:
    client = user.create_client(SetParameters, f"{node}/set_parameters")
    graph.wait_for(client.service_is_ready)
    request = SetParameters.Request(parameters=[Parameter(name, value=value).to_parameter_msg()])
    return graph.ask(client.call_async, request).results[0]


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
    reports.wait("motion_guard: node", Level.WARN, "no node takes cmd_vel")
    reports.user.create_subscription(Twist, "wheels", lambda _: None, 1)
    values = reports.wait("motion_guard: node", Level.WARN, "nothing stops the robot before")
    assert values["obstacle_stop"] == "none"
    reports.user.create_publisher(Bool, "obstacle_avoidance", STATE).publish(Bool(data=True))
    values = reports.wait("motion_guard: node", Level.OK, "active")
    assert values["obstacle_stop"] == "robot"


def test_failed_answers_are_told_with_their_code(ros_graph: Any, reports: Reports) -> None:
    folder = str(ROOT / "models" / "nav-draft")
    start(ros_graph, DraftVlm, **{"model.path": folder, "health.failures": 2})
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


def test_missions_that_fail_are_reported(
    ros_graph: Any, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mission, "OBSERVATION_S", 0.1)
    start(ros_graph, Navigator, **{"diagnostics.recent": 2.0, "require_guard": False})
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
    (qos,) = (s.qos_profile for s in camera.subscriptions if s.topic_name == "/image/compressed")
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
    assert said.count("incompatible QoS (") == 1, said
    reports.user.destroy_publisher(publisher)
    reports.wait("camera_ingest: topics", Level.OK)


def test_incompatible_subscribers_are_reported_as_well(ros_graph: Any, reports: Reports) -> None:
    """Somebody has lowered the reliability of the publisher."""
    override = {"qos_overrides./observation.publisher.reliability": "best_effort"}
    start(ros_graph, CameraIngest, source="compressed", **override)
    reports.user.create_subscription(Observation, "observation", print, RESULT)
    reports.wait("camera_ingest: topics", Level.WARN, "observation: a subscriber asks for")


def test_those_who_understand_one_another_are_not_reported(
    ros_graph: Any, reports: Reports, capfd: pytest.CaptureFixture[str]
) -> None:
    camera = start(ros_graph, CameraIngest, source="compressed")
    reports.user.create_subscription(Observation, "observation", print, RESULT)
    reports.user.create_publisher(CompressedImage, "image/compressed", CAMERA)
    endpoints = camera._endpoints
    ros_graph.wait_for(lambda: camera.count_subscribers("observation") == 1)
    ros_graph.wait_for(lambda: camera.count_publishers("image/compressed") == 1)
    ros_graph.do(endpoints.look, endpoints._looked_at + 60.0)
    assert not endpoints._mismatches
    assert "nothing passes" not in capfd.readouterr().err


def test_a_peer_that_one_of_two_subscriptions_hears_is_not_reported(
    ros_graph: Any, reports: Reports, capfd: pytest.CaptureFixture[str]
) -> None:
    """An emergency stop is heard reliably and not; a best-effort one comes by the second."""
    guard = start(ros_graph, MotionGuard)
    best_effort = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    publisher = reports.user.create_publisher(Bool, "emergency_stop", best_effort)
    ros_graph.wait_for(lambda: guard.count_publishers("emergency_stop") == 1)
    endpoints = guard._endpoints
    ros_graph.do(endpoints.look, endpoints._looked_at + 60.0)
    assert not endpoints._mismatches
    assert "nothing passes" not in capfd.readouterr().err
    publisher.publish(Bool(data=True))
    ros_graph.wait_for(lambda: "EMERGENCY_STOP" in guard.diagnose()[2]["reasons"])


def test_another_type_at_the_other_end_is_named(ros_graph: Any, reports: Reports) -> None:
    start(ros_graph, CameraIngest, source="compressed")
    process = Context()  # within one, the middleware refuses a second type
    process.init(domain_id=ros_graph.domain_id)
    stranger = Node("stranger", context=process)
    stranger.create_subscription(String, "observation", print, RESULT)
    told = "observation: a subscriber asks for another type (std_msgs/msg/String, not collab_llm/"
    reports.wait("camera_ingest: topics", Level.WARN, told)
    stranger.destroy_node()
    process.try_shutdown()


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
ONCE = {"configure", "activate", "_transition", "_spin", "_log_readiness"}
ONCE |= {"parameters.py warn_of_misspelt_nodes"}
ONCE |= {"managed_node.py warn_of"}  # once a second by its words (Repeats)
ONCE |= {"endpoints.py look"}  # while it lasts
ONCE |= {"raw_topics.py look"}  # for each topic
ONCE |= {"dragon_server.py _with_own_store"}
ONCE |= {"camera_ingest.py _on_skipped"}  # for each file
ONCE |= {"raw_topics.py look"}  # for each topic
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
