"""A toy protocol, a folder and a line, is served by the generation host with all guarantees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus
from rclpy.action import ActionClient
from rclpy.parameter import Parameter
from sensor_msgs.msg import CompressedImage

from collab_llm.action import Generate
from collab_llm.msg import GeneratedText, Status
from collab_llm.srv import EdgeCloudGenerate
from collab_llm_nodes.metrics import GenerationMetrics
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.base import Answer, Progress, Request
from collab_llm_nodes.ros import generation_host
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.protocol_server import ProtocolServer
from collab_llm_nodes.ros.qos import RESULT

pytestmark = pytest.mark.ros
SLOW: dict[str, Any] = {"option_names": ["pause_s"], "option_values": ["30"]}


class Served:
    """The server and a client of it."""

    def __init__(self, graph: Any, **parameters: Any) -> None:
        self.graph = graph
        overrides = [Parameter(name, value=value) for name, value in parameters.items()]
        self.server: ProtocolServer[Any] = ProtocolServer(
            "echo", context=graph.context, parameter_overrides=overrides
        )
        graph.add(self.server)
        self.server.start()
        self.user = graph.node("user")
        self.texts = graph.collect(self.user, GeneratedText, "generated_text", RESULT)
        self.action = ActionClient(self.user, Generate, "echo/generate")
        graph.wait_for(self.action.server_is_ready)
        graph.wait_for(lambda: self.user.count_publishers("generated_text"))
        self.told: list[Generate.Feedback] = []

    def send(self, prompt: str = "", **fields: Any) -> Any:
        goal = Generate.Goal(prompt=prompt, deadline_s=20.0)
        for name, value in fields.items():
            setattr(goal, name, value)
        send = self.action.send_goal_async
        return self.graph.ask(send, goal, lambda message: self.told.append(message.feedback))

    def ask(self, prompt: str = "", **fields: Any) -> Generate.Result:
        handle = self.send(prompt, **fields)
        assert handle.accepted
        return self.graph.ask(handle.get_result_async).result

    def cancel(self, handle: Any) -> Any:
        self.graph.ask(handle.cancel_goal_async)
        return self.graph.ask(handle.get_result_async)


@pytest.fixture
def served(ros_graph: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setitem(registry.PROTOCOLS, "echo", "echo_protocol")
    server = Served(ros_graph)
    yield server
    ros_graph.do(server.server.stop)


def test_an_answer_with_feedback_and_text(served: Served) -> None:
    result = served.ask("to be or not")
    assert (result.status.code, result.text, result.verified) == (Status.OK, "to be or not", True)
    assert result.metrics.rounds == 4
    served.graph.wait_for(lambda: served.texts and served.texts[-1].final)
    assert "".join(text.delta for text in served.texts) == result.text
    assert {text.session_id for text in served.texts} == {result.session_id}
    served.graph.wait_for(lambda: len(served.told) == 4)
    assert [told.delta for told in served.told] == ["to", " be", " or", " not"]
    assert [told.share_done for told in served.told] == [0.25, 0.5, 0.75, 1.0]
    assert {told.stage for told in served.told} == {"echo"}


def test_chat_turns_and_documents_reach_the_protocol(served: Served) -> None:
    result = served.ask(
        turn_roles=["user", "assistant", "user"],
        turn_contents=["hello", "hello", "and now"],
        document_names=["a"],
        document_contents=["text of a"],
    )
    assert result.text == "and now [a: text of a]"


def test_the_blocking_twin_gives_the_same_answer(served: Served) -> None:
    twin = served.user.create_client(EdgeCloudGenerate, "echo_generate")
    served.graph.wait_for(twin.service_is_ready)
    answered = served.graph.ask(twin.call_async, EdgeCloudGenerate.Request(prompt="hey"))
    assert (answered.status.code, answered.text) == (Status.OK, "hey")
    refused = served.graph.ask(twin.call_async, EdgeCloudGenerate.Request())
    assert refused.status == served.ask("").status


def test_options_are_for_one_answer_only(served: Served) -> None:
    options: dict[str, Any] = {"option_names": ["shout"], "option_values": ["true"]}
    assert served.ask("hey", **options).text == "HEY"
    assert served.ask("hey").text == "hey"


def test_a_protocol_is_told_which_options_are_given(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option given with the value that is configured is given all the same."""
    requests: list[Request] = []

    def run(request: Request, *_: Any) -> Answer:
        requests.append(request)
        return Answer()

    monkeypatch.setattr(served.server.host.running, "run", run)
    served.ask("hey", option_names=["shout"], option_values=["false"])
    served.ask("hey")
    assert [request.options for request in requests] == [{"shout"}, set()]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt": ""}, "prompt: is empty"),
        ({"protocol": "ekho"}, "protocol: unknown protocol 'ekho' (did you mean echo?"),
        ({"option_names": ["pause"], "option_values": ["1"]}, "pause: is no option of this"),
        ({"option_names": ["voices"], "option_values": ["2"]}, "voices: is no option of this"),
        ({"option_names": ["pause_s"], "option_values": ["1000"]}, "pause_s: 1000.0 is out of"),
        ({"option_names": ["pause_s"], "option_values": []}, "option_values: 1 names and 0"),
        ({"images": [CompressedImage(format="jpeg", data=b"x")]}, "images: echo takes no images"),
        ({"turn_roles": ["user"], "turn_contents": ["a"]}, "prompt: given beside chat turns"),
        (
            {"prompt": "", "turn_roles": ["user"] * 2, "turn_contents": ["a", ""]},
            "turn_contents[1]: is empty",
        ),
        ({"document_names": ["a"]}, "document_contents: 0, expected 1"),
        ({"raw": True, "images": [CompressedImage(format="jpeg", data=b"x")]}, "raw: the model"),
        (
            {"prompt": "", "raw": True, "turn_roles": ["user"], "turn_contents": ["a"]},
            "raw: the model",
        ),
        (
            {"option_names": ["a\nWARN"], "option_values": [""]},
            "a\\nWARN: is no option of this protocol",
        ),
        ({"law": "x" * 10**6}, f"law: '{'x' * 64}...' is unknown"),
        ({"deadline_s": -1.0}, "deadline_s: must be in"),
    ],
)
def test_bad_input_is_told_by_name(
    served: Served, fields: dict[str, Any], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    status = served.ask(**{"prompt": "hey", **fields}).status
    assert status.code == Status.INVALID_INPUT
    assert status.message.startswith(told)
    logged: list[str] = []

    def said() -> bool:
        logged.append(capfd.readouterr().err)
        return f"echo/generate: INVALID_INPUT: {told}" in "".join(logged)

    served.graph.wait_for(said)
    assert served.ask("hey").text == "hey"


def test_documents_are_refused_before_they_are_counted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(served.server.entry, takes=frozenset({"images"}))
    monkeypatch.setattr(served.server.host, "_entry", entry)
    for field in ("document_names", "document_contents"):
        told = served.ask("hey", **{field: ["a"]}).status.message
        assert told.startswith(f"{field}: echo takes no documents")
    image = CompressedImage(format="x\n" * 10**6, data=b"x")
    told = served.ask("hey", images=[image]).status.message
    assert told.startswith("images[0]: format 'x\\nx\\n")
    assert told.endswith("...' (send JPEG, format 'jpeg')")
    assert len(told) < 300


def test_two_faults_within_a_second_are_both_logged(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        served.ask("")
        served.ask("hey", deadline_s=-1.0)
    logged = capfd.readouterr().err
    assert "echo/generate: INVALID_INPUT: prompt: is empty" in logged
    assert "echo/generate: INVALID_INPUT: deadline_s: must be in" in logged


def test_a_goal_that_is_over_keeps_no_contents(served: Served) -> None:
    """rclpy keeps it for seconds, with all that it holds."""
    goals: list[Any] = []

    def note(goal: Any) -> None:
        goals.append(goal)
        goal.execute()

    served.graph.do(served.server.host._action.register_handle_accepted_callback, note)
    picture = CompressedImage(format="jpeg", data=b"x")
    assert served.ask("hey", document_names=["a"], document_contents=["b"]).text == "hey [a: b]"
    assert served.ask("hey", images=[picture]).status.code == Status.INVALID_INPUT
    assert [(g.request.images, g.request.document_contents) for g in goals] == [([], []), ([], [])]


def test_roles_must_end_with_the_user(served: Served) -> None:
    result = served.ask(turn_roles=["user", "assistant"], turn_contents=["a", "b"])
    assert result.status.message.startswith("turn_roles[1]: 'assistant'")


def test_cancel_ends_an_answer_between_two_words(served: Served) -> None:
    handle = served.send("one two", **SLOW)
    served.graph.wait_for(lambda: served.server.host._jobs[0].begun)
    ended = served.cancel(handle)
    assert (ended.status, ended.result.status.code) == (
        GoalStatus.STATUS_CANCELED,
        Status.CANCELLED,
    )
    assert not ended.result.verified


def test_a_deadline_ends_an_answer(served: Served) -> None:
    result = served.ask("one two", deadline_s=0.2, **SLOW)
    assert result.status.code == Status.DEADLINE_EXCEEDED
    assert result.status.message.startswith("deadline_s: ")
    served.graph.wait_for(lambda: served.texts and served.texts[-1].final)
    assert served.texts[-1].status.code == Status.DEADLINE_EXCEEDED


def test_what_waits_has_its_own_deadline_and_more_is_refused(served: Served) -> None:
    first = served.send("one two", **SLOW)
    # Long enough for two more goals to be sent on a machine that stalls for a second.
    hasty = served.send("three", deadline_s=3.0)
    others = [served.send("four") for _ in range(2)]
    assert served.ask("too many").status.code == Status.BUSY
    late = served.graph.ask(hasty.get_result_async).result
    assert late.status.code == Status.DEADLINE_EXCEEDED
    assert "in progress" in late.status.message
    assert served.cancel(others[0]).result.status.code == Status.CANCELLED
    assert len(served.server.host._questions.waiting) == 1, (
        "those given up wait no longer, nor their pictures"
    )
    assert served.cancel(first).result.status.code == Status.CANCELLED
    assert served.graph.ask(others[1].get_result_async).result.text == "four"


def test_motion_waits_for_no_question_and_has_places_of_its_own(served: Served) -> None:
    questions = [served.send("one two", **SLOW) for _ in range(4)]
    assert served.ask("too many").status.code == Status.BUSY
    moved = [served.send("go", for_motion=True) for _ in range(3)]
    ended = [served.graph.ask(goal.get_result_async).result for goal in moved]
    assert [(result.status.code, result.text) for result in ended] == [(Status.OK, "go")] * 3
    held = [served.send("go on", for_motion=True, **SLOW) for _ in range(4)]
    assert served.ask("go", for_motion=True).status.code == Status.BUSY
    for goal in (*questions, *held):
        assert served.cancel(goal).result.status.code == Status.CANCELLED


def test_a_protocol_is_told_what_is_for_motion(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    def run(request: Request, *_: Any) -> Answer:
        told.append(request.for_motion)
        return Answer()

    monkeypatch.setattr(served.server.host.running, "run", run)
    for for_motion in (True, False):
        served.ask("hey", for_motion=for_motion)
    assert told == [True, False]


def test_a_refused_caller_that_asks_again_at_once_does_not_occupy_the_node(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told BUSY later, or when the node ends."""
    monkeypatch.setattr(generation_host, "_BUSY_S", 3600.0)
    held = [served.send("one two", **SLOW) for _ in range(4)]
    refused = served.send("too many")
    told = served.graph.do(refused.get_result_async)
    assert served.ask("go", for_motion=True).text == "go"
    assert not told.done()
    served.graph.do(served.server.host.cancel_all)
    assert served.graph.result(told).result.status.code == Status.BUSY
    for goal in held:
        assert served.graph.ask(goal.get_result_async).result.status.code == Status.INACTIVE


def test_an_unforeseen_error_reaches_the_caller_beside_what_was_said(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    result = served.ask("a crash")
    assert result.status.code == Status.INTERNAL
    assert result.status.message == "RuntimeError: as asked"
    assert (result.text, result.verified) == ("a crash", False)
    assert served.ask("again").status.code == Status.OK
    assert 'raise RuntimeError("as asked")' in capfd.readouterr().err, "with its traceback"


def fail(*_: Any) -> Any:
    raise RuntimeError("as asked")


@pytest.mark.parametrize("part", ["check", "turns", "fill"])
def test_an_unforeseen_error_beside_the_answer_reaches_the_caller(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], part: str
) -> None:
    """rclpy would end such a goal with the status OK and never answer such a service."""
    host = served.server.host
    if part == "check":
        monkeypatch.setattr(host, "_entry", replace(served.server.entry, check=fail))
    else:
        monkeypatch.setattr(host, f"_{part}", fail)
    status = served.ask("hey").status
    assert (status.code, status.message) == (Status.INTERNAL, "RuntimeError: as asked")
    twin = served.user.create_client(EdgeCloudGenerate, "echo_generate")
    served.graph.wait_for(twin.service_is_ready)
    answered = served.graph.ask(twin.call_async, EdgeCloudGenerate.Request(prompt="hey"))
    assert answered.status == status
    assert 'raise RuntimeError("as asked")' in capfd.readouterr().err


@pytest.mark.parametrize("value", ["9" * 309, "9" * 5000, "1e999"])
def test_a_number_beyond_all_ranges_is_bad_input(served: Served, value: str) -> None:
    status = served.ask("hey", option_names=["pause_s"], option_values=[value]).status
    assert status.code == Status.INVALID_INPUT
    assert len(status.message) < 300


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (None, "NoneType, expected Answer"),
        (Progress(), "Progress, expected Answer"),
        (Answer(tokens=(2**31,)), "signed int"),
        (Answer(tokens=("x",)), "str"),  # type: ignore[arg-type]
        (Answer(sources=(6,)), "source 6, expected 0 to 5"),
        (Answer(sources=(-1,)), "unsigned byte"),
        (Answer(metrics=GenerationMetrics(rounds=-1)), "unsigned int"),
        (Answer(error=ValueError("x")), "expected CollabError"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_answer_is_a_fault_of_the_protocol(
    served: Served, monkeypatch: pytest.MonkeyPatch, wrong: Any, told: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(served.server.host.running, "run", lambda *_: wrong)
        status = served.ask("hey").status
    assert status.code == Status.INTERNAL
    assert status.message.startswith("the protocol echo returned no usable answer: ")
    assert told in status.message
    assert served.ask("hey").text == "hey"


def test_what_is_no_progress_is_a_fault_of_the_protocol(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: Request, emit: Any, control: Any) -> Answer:
        emit(Progress("said"))
        emit(Progress("said more", tokens=(-(2**40),)))
        return Answer("said more still")

    monkeypatch.setattr(served.server.host.running, "run", run)
    result = served.ask("hey")
    assert (result.status.code, result.text, result.verified) == (Status.INTERNAL, "said", False)


def test_numbers_of_other_types_are_converted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rclpy's C code would end the process."""
    numbers: Any = (np.int64(7), np.int32(8))
    metrics = GenerationMetrics(rounds=np.int64(3), total_s=np.float32(0.5))  # type: ignore[arg-type]
    answer = Answer(
        "a b",
        numbers,
        sources=tuple(np.array([0, 1])),
        ends=numbers,
        verified=1,  # type: ignore[arg-type]
        share_done=1,
        metrics=metrics,
    )
    monkeypatch.setattr(served.server.host.running, "run", lambda *_: answer)
    result = served.ask("hey")
    assert (result.status.code, result.verified, result.metrics.rounds) == (Status.OK, True, 3)
    assert (list(result.tokens), list(result.sources)) == ([7, 8], [0, 1])


def test_a_server_that_is_deactivated_says_so(served: Served) -> None:
    first, second = served.send("one two", **SLOW), served.send("three")
    served.graph.wait_for(lambda: served.server.host._jobs[0].begun)
    served.graph.do(served.server.trigger_deactivate)
    for handle in (first, second):
        ended = served.graph.ask(handle.get_result_async)
        status = ended.result.status
        assert (ended.status, status.code) == (GoalStatus.STATUS_ABORTED, Status.INACTIVE)
        assert status.message == "echo_server was deactivated (activate it)"


def test_the_text_is_what_a_message_can_carry(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Answer("a\0b\ud800")
    monkeypatch.setattr(served.server.host.running, "run", lambda *_: answer)
    assert served.ask("x").text == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


def test_several_answers_at_a_time(ros_graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PROTOCOLS, "echo", "echo_protocol")
    served = Served(ros_graph, voices=2)
    slow = served.send("one", **SLOW)
    assert served.ask("two").text == "two"  # does not wait for the first
    assert served.cancel(slow).result.status.code == Status.CANCELLED
    ros_graph.do(served.server.stop)


def test_a_protocol_that_refuses_all_requests_is_told(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> Any:
        return next(each for each in served.server.host.details(0.0) if each.name == "model")

    assert (model().level, model().message) == (Level.OK, "loaded")
    monkeypatch.setattr(served.server.host.running, "health", lambda: {"failure": "no memory"})
    assert (model().level, model().message) == (Level.ERROR, "no memory")


def test_a_second_life(served: Served) -> None:
    served.graph.do(served.server.stop)
    served.graph.wait_for(lambda: not served.action.server_is_ready())
    served.graph.do(served.server.start)
    served.graph.wait_for(served.action.server_is_ready)
    assert served.ask("hey").text == "hey"
