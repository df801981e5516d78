"""Records of how a node is, without ROS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")


from reports import metrics, traffic

from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
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

pytestmark = pytest.mark.ros


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
