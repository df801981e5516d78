"""The node ``navigation_action_parser``, in a graph."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")


from motion_graph import Reader, graph

from collab_llm.msg import NavigationAction, Status
from collab_llm_nodes.robot.grammar import Code, Kind

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # fixture


def test_parser_waits_for_the_whole_answer(graph: Any) -> None:
    reader = Reader(graph)
    order = "the next action is move forward 75 cm."
    reader.say("a", order)
    action = reader.read("a", order + " actually no, stop.")
    assert (action.kind, action.code) == (NavigationAction.NONE, NavigationAction.NEGATED)
    assert len(reader.actions) == 1  # nothing was said before the end
    reader.say("b", order)
    assert reader.read("b", order).distance == 0.75


def test_parser_reads_streams_and_takes_back(graph: Any) -> None:
    reader = Reader(graph, streaming=True)
    action = reader.read("a", "the ball is left. the next action is turn left 30 degree.")
    assert (action.kind, action.code) == (NavigationAction.TURN, NavigationAction.OK)
    assert action.angle == pytest.approx(math.radians(30))
    assert action.distance == 0.0
    assert action.text[action.span_begin : action.span_end] == "turn left 30 degree"
    assert action.verified
    # A motion is reported before the last token ...
    reader.say("b", "the next action is move forward 75")
    reader.say("b", "the next action is move forward 75 cm.")
    streamed = graph.wait_for(lambda: [a for a in reader.actions if a.session_id == "b"])
    assert streamed[0].distance == 0.75
    # ... once ...
    reader.say("b", "the next action is move forward 75 cm.", final=True)
    # ... and taken back if the text goes on; a stop is never early.
    reader.say("c", "the next action is move forward 75 cm.")
    assert reader.read("c", "the next action is move forward 75 cm. no").kind >= 0
    taken_back = graph.wait_for(
        lambda: [a for a in reader.actions if a.session_id == "c" and a.code]
    )
    assert taken_back[0].kind == NavigationAction.NONE
    reader.say("e", "yes. the next action is reply.")  # nor is a reply
    answer = reader.read("e", "yes. the next action is reply.")
    assert (answer.kind, answer.words) == (NavigationAction.REPLY, "yes.")
    reader.say("d", "the next action is stop.")
    assert reader.read("d", "the next action is stop.").kind == NavigationAction.STOP
    counts = [sum(a.session_id == s for a in reader.actions) for s in "abcde"]
    assert counts == [1, 1, 2, 1, 1]


def test_parser_does_not_act_on_old_unverified_failed_or_unreadable_text(graph: Any) -> None:
    reader = Reader(graph, max_age=5.0)
    order = "the next action is move forward 75 cm."
    for end in ("give up", "reply"):
        text = f"not here. the next action is {end}."
        for name, fields in (("old", {"age": 6.0}), ("draft", {"verified": False})):
            read = reader.read(f"{end} {name}", text, **fields)
            assert (read.kind, read.words) == (NavigationAction.NONE, ""), end
    bad = {
        "old": (reader.read("old", order, age=6.0), NavigationAction.STALE),
        "future": (reader.read("future", order, age=-60.0), NavigationAction.STALE),
        "draft": (reader.read("draft", order, verified=False), NavigationAction.UNVERIFIED),
        "failed": (
            reader.read(
                "failed", order, status=Status(code=Status.UNAVAILABLE, message="link down")
            ),
            NavigationAction.FAILED,
        ),
        "junk": (reader.read("junk", "I cannot see"), NavigationAction.UNREADABLE),
        "empty": (reader.read("empty", ""), NavigationAction.EMPTY),
        "far": (reader.read("far", order.replace("75", "1000")), NavigationAction.OUT_OF_RANGE),
    }
    for name, (action, code) in bad.items():
        assert (action.kind, action.code) == (NavigationAction.NONE, code), name
        assert (action.distance, action.angle) == (0.0, 0.0)
        assert action.reason
    assert "link down" in bad["failed"][0].reason
    assert "older than the age limit" in bad["old"][0].reason
    assert "s in the future (check the clocks)" in bad["future"][0].reason
    # Half a sentence that was never finished moves nothing, nor does unverified streaming.
    reader.say("half", order, verified=False)
    assert reader.read("next", order).kind == NavigationAction.FORWARD
    assert not [a for a in reader.actions if a.session_id == "half"]


def test_parser_reads_no_text_that_is_not_meant_for_motion(graph: Any) -> None:
    """Somebody asked a question; the answer is nobody's order, whatever it says."""
    reader = Reader(graph)
    order = "the next action is move forward 75 cm."
    reader.say("question", order, final=True, for_motion=False)
    assert reader.read("order", order).kind == NavigationAction.FORWARD
    assert [a.session_id for a in reader.actions] == ["order"]


def test_parser_policy_may_allow_unverified_text(graph: Any) -> None:
    reader = Reader(graph, unverified="slow", max_age=5.0)
    order = "the next action is move forward 75 cm."
    action = reader.read("a", order, verified=False)
    assert (action.kind, action.verified) == (NavigationAction.FORWARD, False)
    stale = reader.read("b", order, verified=False, age=6.0)
    assert (stale.kind, stale.code) == (NavigationAction.NONE, NavigationAction.STALE)


def test_the_grammar_and_the_message_use_the_same_numbers() -> None:
    assert {k.name: k.value for k in Kind} == {
        k.name: getattr(NavigationAction, k.name) for k in Kind
    }
    assert {c.name: c.value for c in Code} == {
        c.name: getattr(NavigationAction, c.name) for c in Code
    }
