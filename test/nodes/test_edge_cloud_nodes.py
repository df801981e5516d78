"""The draft model, the pre-draft cache and the bridge as ROS nodes, against a real verifier."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tiny_models import scene, tiny_folder, tiny_model

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus
from edge_cloud_graph import ARCHITECTURE, MAX_TOKENS, Edge, edge, expected, target, verifier
from sensor_msgs.msg import CompressedImage

from collab_llm.action import Generate
from collab_llm.msg import LinkState, Status
from collab_llm.srv import EdgeCloudGenerate, OpenSession, PreDraft
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.loading import TargetConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.nodes.cloud_verifier_bridge import MAX_SESSIONS, CloudVerifierBridge
from collab_llm_nodes.protocols.edge_cloud import running
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.robot.grammar import Code, parse
from collab_llm_nodes.ros import goals
from collab_llm_nodes.ros.convert import figures_from
from collab_llm_nodes.ros.qos import REQUESTS
from collab_llm_nodes.transport.server import ServerHandle

__all__ = ["edge", "expected", "target", "verifier"]  # fixtures


def chat(first: str, answer: str, last: str) -> dict[str, Any]:
    """Fields of a goal that asks by turns."""
    roles = ["user", "assistant", "user"]
    return {"prompt": "", "turn_roles": roles, "turn_contents": [first, answer, last]}


@pytest.mark.ros
def test_an_answer_through_the_whole_graph(edge: Edge, expected: tuple[int, ...]) -> None:
    result = edge.generate()
    assert result.status.code == Status.OK, result.status.message
    assert tuple(result.tokens) == expected
    assert len(result.sources) == len(result.tokens)
    assert result.verified
    final = edge.graph.wait_for(lambda: [t for t in edge.texts if t.final])[0]
    assert final.text == result.text
    assert "".join(t.delta for t in edge.texts) == result.text
    for text in edge.texts:
        assert len(text.ends) == len(text.tokens)
        assert list(text.ends) == sorted(text.ends)
        assert text.ends[-1] == len(text.text)
    metrics = result.metrics
    assert metrics.rounds == len(edge.verdicts) > 1
    assert metrics.tokens == len(result.tokens)
    assert metrics.bytes_up > len(scene(1))
    assert metrics.bytes_down > 0
    for message in (*edge.drafts, *edge.exits, *edge.verdicts, *edge.texts):
        assert message.header.stamp.sec == 77  # the camera frame's age stays measurable
        assert message.session_id == result.session_id


@pytest.mark.ros
def test_sampling_and_the_service_twin(edge: Edge, target: Engine) -> None:
    request = EdgeCloudGenerate.Request(
        prompt="go to the red ball",
        images=[CompressedImage(format="jpeg", data=scene(1))],
        temperature=1.0,
        seed=5,
        max_tokens=MAX_TOKENS,
        deadline_s=20.0,
    )
    response = edge.graph.ask(edge.service.call_async, request)
    assert response.status.code == Status.OK, response.status.message
    runner = InProcessRunner(Engine(tiny_model(ARCHITECTURE, seed=0)), target, gamma=3)
    prompt = Prompt("go to the red ball", (scene(1),))
    alone = runner.generate(prompt, SamplingConfig(temperature=1.0, seed=5), MAX_TOKENS)
    assert tuple(response.tokens) == alone.tokens


@pytest.mark.ros
@pytest.mark.parametrize("window", [0, 16], ids=["on_its_verdict", "ahead"])
def test_what_the_cache_asks_for_is_drafted_and_sent_once(ros_graph: Any, window: int) -> None:
    """The last exit is always right, as the last layer does nothing.

    Slow verdicts leave time to draft for it.
    """
    loaded = load(TargetConfig(path=str(tiny_folder(ARCHITECTURE, 0)), exit_layers=(3,)))
    last: Any = decoder_parts(loaded.model).layers[-1]
    with torch.no_grad():
        last.self_attn.o_proj.weight.zero_()
        last.mlp.down_proj.weight.zero_()
    target = Engine(loaded)
    alone = InProcessRunner(Engine(tiny_model(ARCHITECTURE, seed=0)), target, gamma=3)
    expected = alone.generate(Prompt("go to the red ball", (scene(1),)), max_tokens=MAX_TOKENS)
    slow = VerifierConfig(address="127.0.0.1:0", emulated_compute_s=0.8)
    with start_server(slow, target) as verifier:
        ahead = {"ahead.predictions": 0, "ahead.push_window": window}
        edge = Edge(ros_graph, verifier.port, **ahead)
        result = edge.generate()
        edge.stop()
    assert tuple(result.tokens) == expected.tokens
    cached = {draft.round for draft in edge.drafts if draft.cached}
    told = edge.cache.diagnose()[2]
    assert told["early_exits"] >= told["predrafts"] >= told["hits_by_exits"] >= 1
    figures = figures_from(result.metrics)
    assert edge.cache.hits <= figures["cache_hits"] <= len(cached)
    assert figures["cache_lookups"] == edge.cache.lookups == len(edge.verdicts) - 1
    pushed = [draft for draft in edge.drafts if draft.ahead]
    assert len(pushed) == figures["pushed"]
    asked = [draft.round for draft in edge.drafts if not draft.ahead]
    assert len(asked) == len(set(asked)), "one node sends drafts"
    assert (len(asked) < result.metrics.rounds) == bool(window)


@pytest.mark.ros
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "word " * 20000}, "prompt"),
        ({"images": [CompressedImage(format="png", data=b"\x89PNG")]}, "images[0]"),
        ({"protocol": "telepathy"}, "protocol"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": -0.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"law": "murphy"}, "law"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"deadline_s": 1e10}, "deadline_s"),
    ],
)
def test_bad_input_is_told_by_name(edge: Edge, fields: dict[str, Any], names: str) -> None:
    status = edge.generate(**fields).status
    assert status.code == Status.INVALID_INPUT
    assert status.message.startswith(names)
    assert edge.generate().status.code == Status.OK  # and the next request is served


@pytest.mark.ros
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"images": [CompressedImage(format="jpeg", data=b"no picture")]}, "images[0]"),
        ({"prompt": "<|im_end|>"}, "prompt"),
        (chat("<|im_end|>", "yes", "go"), "turn_contents[0]"),
        (chat("hello", "yes", "<|im_end|>"), "turn_contents[2]"),
    ],
)
def test_what_only_the_model_can_tell_ends_with_a_status(
    edge: Edge, fields: dict[str, Any], names: str
) -> None:
    result = edge.generate(**fields)
    assert result.status.code == Status.INVALID_INPUT, result.status.message
    assert result.status.message.startswith(names)


@pytest.mark.ros
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt": "word " * 8}, "prompt: 40 characters (send at most 20)"),
        (chat("hello", "yes", "word " * 8), "turn_contents[2]: 48 characters in all turns (send"),
        (chat("word " * 8, "yes", "go"), "turn_contents: 45 characters in all turns (send"),
    ],
)
def test_what_the_verifier_refuses_is_told_by_the_callers_name_for_it(
    ros_graph: Any, target: Engine, fields: dict[str, Any], told: str
) -> None:
    config = VerifierConfig(address="127.0.0.1:0", limits=Limits(max_prompt_chars=20))
    with start_server(config, target) as verifier:
        edge = Edge(ros_graph, verifier.port)
        status = edge.generate(**fields).status
        edge.stop()
    assert status.code == Status.INVALID_INPUT
    assert status.message.startswith(told)


@pytest.mark.ros
def test_feedback_tells_the_text_so_far_and_what_it_is_for(edge: Edge) -> None:
    """Feedback can be lost; who reads the text so far misses nothing that came before."""
    told: list[Generate.Feedback] = []
    for for_motion in (False, True):
        told.clear()
        edge.texts.clear()
        handle = edge.graph.ask(
            edge.action.send_goal_async,
            edge.goal(for_motion=for_motion),
            lambda message: told.append(message.feedback),
        )
        text = edge.graph.ask(handle.get_result_async).result.text
        edge.graph.wait_for(lambda: edge.texts and edge.texts[-1].final)
        assert {message.for_motion for message in edge.texts} == {for_motion}
        edge.graph.wait_for(lambda: told)
        for feedback in told:
            assert text.startswith(feedback.text)
            assert feedback.text.endswith(feedback.delta)


@pytest.mark.ros
def test_an_unknown_session_is_named(edge: Edge) -> None:
    predraft = edge.user.create_client(PreDraft, "predraft")
    edge.graph.wait_for(predraft.service_is_ready)
    response = edge.graph.ask(predraft.call_async, PreDraft.Request(session_id="nobody's"))
    assert response.status.code == Status.INVALID_INPUT
    assert "session_id" in response.status.message


@pytest.mark.ros
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"round": 10_000, "outcome": [5]}, "round"),
        ({"outcome": []}, "outcome"),
        ({"outcome": [2**31 - 1]}, "outcome[0]"),
        ({"outcome": [5], "deadline_s": -1.0}, "deadline_s"),
        ({"outcome": [5], "deadline_s": float("nan")}, "deadline_s"),
    ],
)
def test_a_predraft_that_can_never_be_made_is_refused_during_the_answer(
    ros_graph: Any, target: Engine, fields: dict[str, Any], names: str
) -> None:
    slow = VerifierConfig(address="127.0.0.1:0", emulated_compute_s=3.0)
    with start_server(slow, target) as verifier:
        edge = Edge(ros_graph, verifier.port)
        predraft = edge.user.create_client(PreDraft, "predraft")
        ros_graph.wait_for(predraft.service_is_ready)
        handle = ros_graph.ask(edge.action.send_goal_async, edge.goal())
        draft = ros_graph.wait_for(lambda: edge.drafts)[0]
        request = PreDraft.Request(session_id=draft.session_id, **fields)
        status = ros_graph.ask(predraft.call_async, request).status
        assert not edge.verdicts, "refused after the round"
        ros_graph.ask(handle.cancel_goal_async)
        edge.stop()
    assert status.code == Status.INVALID_INPUT, status.message
    assert status.message.startswith(f"{names}: ")


@pytest.mark.ros
def test_a_session_without_a_vocabulary_is_refused(edge: Edge) -> None:
    opener = edge.user.create_client(OpenSession, "open_session")
    edge.graph.wait_for(opener.service_is_ready)
    request = OpenSession.Request(session_id="s", text="go", max_tokens=8)
    opened = edge.graph.ask(opener.call_async, request)
    assert opened.status.code == Status.INVALID_INPUT
    assert opened.status.message.startswith("vocabulary: ")


@pytest.mark.ros
@pytest.mark.parametrize(
    "field", [{"max_tokens": 65537}, {"deadline_s": float("nan")}, {"deadline_s": -1.0}]
)
def test_a_session_that_cannot_end_well_is_not_opened(edge: Edge, field: dict[str, Any]) -> None:
    opener = edge.user.create_client(OpenSession, "open_session")
    edge.graph.wait_for(opener.service_is_ready)
    request = OpenSession.Request(session_id="s", text="go", vocabulary="v", **field)
    opened = edge.graph.ask(opener.call_async, request)
    assert opened.status.code == Status.INVALID_INPUT
    assert opened.status.message.startswith(f"{next(iter(field))}: ")


@pytest.mark.ros
def test_a_session_with_an_unknown_guide_is_not_opened(edge: Edge) -> None:
    opener = edge.user.create_client(OpenSession, "open_session")
    edge.graph.wait_for(opener.service_is_ready)
    request = OpenSession.Request(
        session_id="s", text="go", vocabulary="v", guide_kind="lark", guide_source="start: /a/"
    )
    opened = edge.graph.ask(opener.call_async, request)
    assert opened.status.code == Status.INVALID_INPUT
    assert opened.status.message.startswith("answer.guide: ")


@pytest.mark.ros
def test_an_answer_for_motion_is_an_order(edge: Edge) -> None:
    result = edge.generate(for_motion=True, max_tokens=64)
    assert result.status.code == Status.OK, result.status.message
    assert parse(result.text).code is Code.OK, result.text
    choice = {"answer.guide": "choice", "answer.guide_source": "left\nright"}
    result = edge.generate(option_names=[*choice], option_values=[*choice.values()])
    assert result.status.code == Status.OK, result.status.message
    assert result.text in ("left", "right")


@pytest.mark.ros
def test_sessions_for_motion_have_places_of_their_own(edge: Edge) -> None:
    opener = edge.user.create_client(OpenSession, "open_session", qos_profile=REQUESTS)
    edge.graph.wait_for(opener.service_is_ready)
    vocabulary = edge.graph.wait_for(lambda: edge.links and edge.links[-1].vocabulary)
    most = MAX_SESSIONS

    def codes(for_motion: bool) -> list[int]:
        requests = [
            OpenSession.Request(
                session_id=f"{for_motion} {number}",
                text="who?",
                max_tokens=4,
                vocabulary=vocabulary,
                for_motion=for_motion,
            )
            for number in range(most + 1)
        ]
        futures = [edge.graph.do(opener.call_async, request) for request in requests]
        return [edge.graph.result(future).status.code for future in futures]

    assert codes(False) == codes(True) == [Status.OK] * most + [Status.BUSY]


@pytest.mark.ros
def test_an_absent_verifier_ends_within_the_deadline(
    ros_graph: Any, verifier: ServerHandle
) -> None:
    port = verifier.port
    verifier.stop()
    edge = Edge(ros_graph, port)
    result = edge.generate(deadline_s=2.0)
    edge.stop()
    assert result.status.code in (Status.DEADLINE_EXCEEDED, Status.UNAVAILABLE)
    assert not result.verified
    assert edge.links
    assert edge.links[-1].state != LinkState.UP


@pytest.mark.ros
def test_without_the_bridge_the_answer_is_unavailable(
    ros_graph: Any, verifier: ServerHandle
) -> None:
    edge = Edge(ros_graph, verifier.port)
    edge.graph.do(edge.bridge.trigger_deactivate)
    result = edge.generate(deadline_s=2.0)
    edge.stop()
    assert result.status.code == Status.INACTIVE


@pytest.mark.ros
def test_a_deactivated_bridge_ends_its_sessions(ros_graph: Any, target: Engine) -> None:
    slow = VerifierConfig(address="127.0.0.1:0", emulated_compute_s=0.3)
    with start_server(slow, target) as verifier:
        edge = Edge(ros_graph, verifier.port)
        handle = ros_graph.ask(edge.action.send_goal_async, edge.goal())
        ros_graph.wait_for(lambda: edge.verdicts)
        edge.graph.do(edge.bridge.trigger_deactivate)
        result = ros_graph.ask(handle.get_result_async, timeout=5.0).result
        edge.stop()
    assert result.status.code == Status.INACTIVE
    assert not result.verified


@pytest.mark.ros
def test_an_abandoned_session_is_ended_at_its_deadline(
    ros_graph: Any, target: Engine, verifier: ServerHandle
) -> None:
    """Its opener died: nobody will ever close it."""
    edge = Edge(ros_graph, verifier.port)
    opener = edge.user.create_client(OpenSession, "open_session")
    request = OpenSession.Request(
        session_id="abandoned",
        text="go",
        max_tokens=8,
        deadline_s=0.5,
        vocabulary=target.vocabulary,
    )
    opened = ros_graph.ask(opener.call_async, request)
    assert opened.status.code == Status.OK, opened.status.message
    verdict = ros_graph.wait_for(lambda: edge.verdicts)[0]
    assert verdict.session_id == "abandoned"
    assert verdict.status.code == Status.DEADLINE_EXCEEDED
    ros_graph.wait_for(lambda: verifier.sessions == 0)
    edge.stop()


@pytest.mark.ros
def test_a_caller_gets_its_result_when_the_node_shuts_down(ros_graph: Any, target: Engine) -> None:
    slow = VerifierConfig(address="127.0.0.1:0", emulated_compute_s=0.3)
    with start_server(slow, target) as verifier:
        edge = Edge(ros_graph, verifier.port)
        request = EdgeCloudGenerate.Request(
            prompt="go to the red ball",
            images=[CompressedImage(format="jpeg", data=scene(1))],
            max_tokens=MAX_TOKENS,
        )
        by_action = ros_graph.ask(edge.action.send_goal_async, edge.goal())
        awaited = ros_graph.do(by_action.get_result_async)
        by_service = edge.service.call_async(request)
        ros_graph.wait_for(lambda: edge.verdicts)
        edge.graph.do(edge.vlm.stop)
        result = ros_graph.result(awaited).result
        response = ros_graph.result(by_service)
        edge.stop()
    assert result.status.code == Status.INACTIVE
    assert response.status.code == Status.INACTIVE


@pytest.mark.ros
def test_a_waiting_request_keeps_its_own_deadline_and_cancel(
    ros_graph: Any, target: Engine
) -> None:
    slow = VerifierConfig(address="127.0.0.1:0", emulated_compute_s=0.8)
    with start_server(slow, target) as verifier:
        edge = Edge(ros_graph, verifier.port)
        first = ros_graph.ask(edge.action.send_goal_async, edge.goal())
        ended = ros_graph.do(first.get_result_async)
        hasty = ros_graph.ask(edge.action.send_goal_async, edge.goal(deadline_s=0.2))
        given_up = ros_graph.ask(edge.action.send_goal_async, edge.goal())
        told = ros_graph.do(given_up.get_result_async)
        ros_graph.ask(given_up.cancel_goal_async)
        late = ros_graph.ask(hasty.get_result_async).result
        cancelled = ros_graph.result(told).result
        assert not ended.done()  # neither waited for the first answer
        assert ros_graph.result(ended).result.status.code == Status.OK
        edge.stop()
    assert late.status.code == Status.DEADLINE_EXCEEDED
    assert "in progress" in late.status.message
    assert cancelled.status.code == Status.CANCELLED


@pytest.mark.ros
def test_another_vocabulary_is_refused(ros_graph: Any, verifier: ServerHandle) -> None:
    edge = Edge(ros_graph, verifier.port)
    edge.vlm.host.running._engine.vocabulary = "another"
    result = edge.generate()
    edge.stop()
    assert result.status.code == Status.VOCABULARY_MISMATCH
    assert result.status.message


@pytest.mark.ros
def test_cancel_ends_the_answer(edge: Edge, verifier: ServerHandle) -> None:
    handle = edge.graph.ask(edge.action.send_goal_async, edge.goal(max_tokens=400))
    edge.graph.wait_for(lambda: edge.verdicts)
    edge.graph.ask(handle.cancel_goal_async)
    result = edge.graph.ask(handle.get_result_async).result
    assert result.status.code in (Status.CANCELLED, Status.OK)
    edge.graph.wait_for(lambda: verifier.sessions == 0)  # the slot at the verifier is free again
    assert edge.generate().status.code == Status.OK


@pytest.mark.ros
def test_a_second_life(edge: Edge, expected: tuple[int, ...]) -> None:
    """Deactivated, cleaned up and configured again, every node serves as before."""
    for _ in range(2):
        edge.stop()
        for node in (edge.bridge, edge.vlm, edge.cache):
            edge.graph.do(node.start)
        edge.graph.wait_for(lambda: edge.user.count_subscribers("draft") >= 3)
        edge.graph.wait_for(edge.action.server_is_ready)
        result = edge.generate()
        assert result.status.code == Status.OK, result.status.message
        assert tuple(result.tokens) == expected


@pytest.mark.ros
def test_no_secret_is_a_parameter(ros_graph: Any) -> None:
    """Everybody in the graph can read parameters: a token comes from a file."""
    bridge = CloudVerifierBridge(context=ros_graph.context)
    ros_graph.add(bridge)
    assert bridge.has_parameter("verifier.token_file")
    assert not bridge.has_parameter("verifier.token")


@pytest.mark.ros
def test_the_graph_recovers_with_its_verifier(
    ros_graph: Any, target: Engine, expected: tuple[int, ...]
) -> None:
    """Restarted during an answer: the same answer. Gone: a status in time. Back: answers again."""
    slow = VerifierConfig(address="127.0.0.1:0", emulated_compute_s=0.2)
    verifier = start_server(slow, target)
    edge = Edge(ros_graph, verifier.port)
    handle = ros_graph.ask(edge.action.send_goal_async, edge.goal())
    ros_graph.wait_for(lambda: edge.verdicts)
    verifier.stop()
    again = VerifierConfig(address=f"127.0.0.1:{verifier.port}")
    verifier = start_server(again, target)
    result = ros_graph.ask(handle.get_result_async).result
    assert result.status.code == Status.OK, result.status.message
    assert tuple(result.tokens) == expected
    verifier.stop()
    assert edge.generate(deadline_s=2.0).status.code in (
        Status.UNAVAILABLE,
        Status.DEADLINE_EXCEEDED,
    )
    with start_server(again, target):
        assert tuple(edge.generate().tokens) == expected
        edge.stop()


@pytest.mark.ros
def test_results_are_not_kept_for_long(
    ros_graph: Any, verifier: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its goal, and that its picture."""
    monkeypatch.setattr(goals, "RESULT_S", 1)
    edge = Edge(ros_graph, verifier.port)
    handle = ros_graph.ask(edge.action.send_goal_async, edge.goal())
    kept = ros_graph.ask(handle.get_result_async)
    assert kept.status == GoalStatus.STATUS_SUCCEEDED
    due = time.monotonic() + 10.0
    while kept.status != GoalStatus.STATUS_UNKNOWN:
        assert time.monotonic() < due
        kept = ros_graph.ask(handle.get_result_async)
    edge.stop()


@pytest.mark.ros
def test_no_draft_waits_for_the_publication_of_text(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is published when the next draft is under way, or none is to come."""
    reported: list[bool] = []
    report = running._Generation._report

    def note(generation: running._Generation) -> None:
        client = generation._client
        reported.append(client.in_flight is not None or client.finished)
        report(generation)

    monkeypatch.setattr(running._Generation, "_report", note)
    assert edge.generate().status.code == Status.OK
    assert len(reported) > 2
    assert all(reported)


@pytest.mark.ros
def test_every_goal_of_a_burst_is_answered(edge: Edge) -> None:
    """More than a service's default queue holds; all but a few end as BUSY."""
    send, goal = edge.action.send_goal_async, edge.goal(deadline_s=5.0)
    sent = [edge.graph.do(send, goal) for _ in range(40)]
    edge.graph.wait_for(lambda: all(future.done() for future in sent), timeout=20.0)


@pytest.mark.ros
def test_every_request_of_a_burst_is_answered(edge: Edge) -> None:
    client = edge.user.create_client(EdgeCloudGenerate, "edge_cloud_generate", qos_profile=REQUESTS)
    edge.graph.wait_for(client.service_is_ready)
    request = EdgeCloudGenerate.Request(prompt="go", max_tokens=4, deadline_s=5.0)
    asked = [client.call_async(request) for _ in range(60)]
    edge.graph.wait_for(lambda: all(future.done() for future in asked), timeout=20.0)
    statuses = {future.result().status.code for future in asked}
    assert Status.BUSY in statuses
