"""The node of collective speculation: one answer with feedback, several in one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus
from collective_models import PROMPTS, alone, config, target
from rclpy.action import ActionClient
from rclpy.parameter import Parameter
from std_msgs.msg import Header

from collab_llm.action import Generate
from collab_llm.msg import Status
from collab_llm.srv import CollectiveGenerate
from collab_llm_nodes.models.detokenising import REPLACEMENT
from collab_llm_nodes.nodes.collective_server import CollectiveServer
from collab_llm_nodes.protocols.collective.machine import Job
from collab_llm_nodes.protocols.collective.messages import Claim, Verdict
from collab_llm_nodes.protocols.collective.models import Target
from collab_llm_nodes.protocols.collective.runner import News, Runner

pytestmark = pytest.mark.ros


class Served:
    """The server, started, and clients of it."""

    def __init__(self, graph: Any) -> None:
        made = config()
        parameters = {
            "target.path": made.target.path,
            "drafts.paths": list(made.drafts.paths),
            "pipeline": "off",
            "max_tokens": made.max_tokens,
            "max_waiting": 12,
        }
        overrides = [Parameter(name, value=value) for name, value in parameters.items()]
        self.graph = graph
        self.server = CollectiveServer(context=graph.context, parameter_overrides=overrides)
        graph.add(self.server)
        self.server.start()
        user = graph.node("user")
        self.action = ActionClient(user, Generate, "collective/generate")
        self.service = user.create_client(CollectiveGenerate, "collective_generate")
        graph.wait_for(self.action.server_is_ready)
        graph.wait_for(self.service.service_is_ready)

    def ask(self, *prompts: str, **fields: Any) -> CollectiveGenerate.Response:
        request = CollectiveGenerate.Request(
            prompts=list(prompts), **{"deadline_s": 60.0, **fields}
        )
        return self.graph.ask(self.service.call_async, request, timeout=60.0)


@pytest.fixture
def served(ros_graph: Any) -> Iterator[Served]:
    made = Served(ros_graph)
    yield made
    ros_graph.do(made.server.stop)


def test_several_prompts_in_one_call(served: Served) -> None:
    header = Header(frame_id="here")
    answer = served.ask(*PROMPTS, header=header)
    assert answer.header == header
    assert (answer.status.code, answer.status.message) == (Status.OK, "")
    assert [status.code for status in answer.statuses] == [Status.OK] * len(PROMPTS)
    said = [str(target().decode(alone(prompt))) for prompt in PROMPTS]
    assert answer.texts == [text.replace("\0", REPLACEMENT) for text in said]
    assert list(answer.token_counts) == [len(alone(prompt)) for prompt in PROMPTS]
    assert answer.metrics.tokens == sum(answer.token_counts)
    figures = dict(zip(answer.metrics.names, answer.metrics.values, strict=True))
    assert figures["tau"] == answer.metrics.tokens / answer.metrics.rounds > 1
    assert figures["acceptance"] == figures["accepted"] / figures["drafted"] > 0


def test_a_prompt_that_is_refused_does_not_disturb_the_others(served: Served) -> None:
    answer = served.ask(PROMPTS[0], "", "ball " * 2000, PROMPTS[1])
    codes = [status.code for status in answer.statuses]
    assert codes == [Status.OK, Status.INVALID_INPUT, Status.INVALID_INPUT, Status.OK]
    assert answer.status == answer.statuses[1]
    assert list(answer.texts[1:3]) == ["", ""]
    assert answer.texts[3] == target().decode(alone(PROMPTS[1]))


def test_a_deadline_marks_those_that_are_not_complete(served: Served) -> None:
    answer = served.ask(*PROMPTS[:3], deadline_s=1e-6)
    assert {status.code for status in answer.statuses} == {Status.DEADLINE_EXCEEDED}
    assert len(answer.texts) == 3


def test_more_prompts_than_may_wait_are_busy(served: Served) -> None:
    answer = served.ask(*(f"ball {i}" for i in range(500)))
    codes = [status.code for status in answer.statuses]
    assert set(codes) == {Status.OK, Status.BUSY}
    assert codes.count(Status.OK) >= 12, "places become free while the others are still read"
    assert answer.status.code == Status.BUSY


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompts": []}, "prompts"),
        ({"temperature": -1.0}, "temperature"),
        ({"option_names": ["pipeline"], "option_values": ["off"]}, "pipeline"),
    ],
)
def test_bad_input_is_named(served: Served, fields: dict[str, Any], field: str) -> None:
    request = CollectiveGenerate.Request(**{"prompts": ["ball"], **fields})
    answer = served.graph.ask(served.service.call_async, request)
    assert answer.status.code == Status.INVALID_INPUT
    assert answer.status.message.startswith(f"{field}: ")


def hold_until_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the target's second verdict on an answer back until its caller has given it up."""
    verify, submit = Target.verify, Runner.submit
    given_up = threading.Event()

    def verify_late(self: Target, claims: Sequence[Claim]) -> list[Verdict]:
        verdicts = verify(self, claims)
        if any(claim.answer for claim in claims):
            given_up.wait(60.0)
        return verdicts

    def submit_noted(self: Runner, job: Job, listener: News) -> Callable[[], None]:
        give_up = submit(self, job, listener)

        def give_up_noted() -> None:
            give_up()
            given_up.set()

        return give_up_noted

    monkeypatch.setattr(Target, "verify", verify_late)
    monkeypatch.setattr(Runner, "submit", submit_noted)


def test_one_answer_with_feedback_an_option_and_cancel(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(told: list[Generate.Feedback], **fields: Any) -> Any:
        goal = Generate.Goal(deadline_s=60.0, **fields)
        return served.graph.ask(
            served.action.send_goal_async, goal, lambda message: told.append(message.feedback)
        )

    limit: dict[str, Any] = {"option_names": ["max_tokens"], "option_values": ["9"]}
    first: list[Generate.Feedback] = []
    result = served.graph.ask(send(first, prompt=PROMPTS[0], **limit).get_result_async).result
    assert tuple(result.tokens) == alone(PROMPTS[0], count=9)
    served.graph.wait_for(lambda: first)
    assert {each.stage for each in first} == {"speculate"}
    hold_until_given_up(monkeypatch)
    second: list[Generate.Feedback] = []
    handle = send(second, prompt=PROMPTS[1], max_tokens=900)
    served.graph.wait_for(lambda: second)
    served.graph.ask(handle.cancel_goal_async)
    ended = served.graph.ask(handle.get_result_async)
    assert ended.status == GoalStatus.STATUS_CANCELED
    assert ended.result.status.code == Status.CANCELLED
