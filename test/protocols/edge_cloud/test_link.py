"""The link of one session alone: deadlines, back-off, replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_links import DRAFT, OPEN, PATIENT, VERDICT

from collab_llm_nodes.protocols.edge_cloud.link import (
    Action,
    Connect,
    Deliver,
    Disconnect,
    LinkConfig,
    Send,
    SessionLink,
)
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Close,
    Draft,
    EarlyExit,
    Opened,
    Verdict,
)
from collab_llm_nodes.transport.settings import BACKOFF_S
from collab_llm_nodes.transport.wire import Failure


def opened_link(config: LinkConfig = PATIENT) -> SessionLink:
    link = SessionLink(OPEN, config)
    assert link.start(0.0) == [Connect(config.connect_deadline_s)]
    assert link.on_connected(0.0) == [Send(OPEN)]
    return link


def failure_in(actions: list[Action]) -> Failure:
    found = [a.message for a in actions if isinstance(a, Deliver)]
    assert len(found) == 1
    assert isinstance(found[0], Failure)
    assert actions[-1] == Disconnect()
    return found[0]


def test_a_lost_stream_is_reopened_with_the_confirmed_tokens_and_the_outstanding_draft() -> None:
    link = opened_link()
    assert link.on_draft(DRAFT, 0.1) == [Send(DRAFT)]
    assert link.on_message(VERDICT, 0.2) == [Deliver(VERDICT)]
    second = Draft(1, 3, (1, 2))
    assert link.on_draft(second, 0.3) == [Send(second)]
    assert link.on_disconnected("reset", 0.4) == []
    assert link.next_tick == pytest.approx(0.45)
    assert link.on_tick(0.44) == []
    assert link.on_tick(0.5) == [Connect(PATIENT.connect_deadline_s)]
    assert link.on_connected(0.6) == [
        Send(replace(OPEN, replay=(5, 6, 9), round=1)),
        Send(second),
    ]


def test_a_draft_made_while_connecting_goes_out_behind_open() -> None:
    link = SessionLink(OPEN, PATIENT)
    link.start(0.0)
    assert link.on_draft(DRAFT, 0.1) == []
    assert link.on_connected(0.2) == [Send(OPEN), Send(DRAFT)]


def test_a_stream_lost_between_rounds_is_made_again_by_the_next_draft_only() -> None:
    link = opened_link()
    link.on_message(Opened("s", 7), 0.1)
    assert link.on_disconnected("idle too long", 50.0) == []
    assert link.next_tick is None
    assert link.on_draft(DRAFT, 99.0) == [Connect(PATIENT.connect_deadline_s)]
    assert link.on_connected(99.1) == [Send(OPEN), Send(DRAFT)]


def test_back_off_doubles_up_to_its_limit_and_starts_over_after_an_answer() -> None:
    config = LinkConfig(verdict_deadline_s=600, backoff_max_s=0.15)
    link = SessionLink(OPEN, config)
    link.start(0.0)
    now, pauses = 0.0, []
    for _ in range(4):
        link.on_disconnected("refused", now)
        assert link.next_tick is not None
        pauses.append(link.next_tick - now)
        now = link.next_tick
        assert link.on_tick(now) == [Connect(config.connect_deadline_s)]
    assert pauses == pytest.approx([0.05, 0.1, 0.15, 0.15])
    link.on_connected(now)
    link.on_draft(DRAFT, now)
    link.on_message(Opened("s", 7), now)
    link.on_disconnected("reset", now)
    assert link.next_tick == pytest.approx(now + 0.05)
    assert link.reconnects == 4


def test_a_refusal_and_the_end_of_its_stream_count_as_one_loss() -> None:
    link = opened_link()
    link.on_draft(DRAFT, 0.0)
    link.on_message(Failure("UNAVAILABLE", "no room"), 1.0)
    link.on_disconnected("the verifier ended the stream", 1.01)
    assert link.next_tick == pytest.approx(1.05)
    assert link.on_tick(1.1) == [Connect(PATIENT.connect_deadline_s)]


@pytest.mark.parametrize("connected", [False, True])
def test_a_refusal_that_no_retry_cures_ends_the_session(connected: bool) -> None:
    link = SessionLink(OPEN, PATIENT)
    link.start(0.0)
    if connected:
        link.on_connected(0.0)
    refusal = Failure("UNAUTHENTICATED", "wrong token", "token", "give the right one")
    assert failure_in(link.on_message(refusal, 0.1)) == refusal
    assert link.done
    assert link.next_tick is None
    assert link.on_draft(DRAFT, 0.2) == link.on_tick(9e9) == link.close() == []


def test_silence_on_an_open_stream_is_deadline_exceeded() -> None:
    link = opened_link(LinkConfig(verdict_deadline_s=5))
    link.on_draft(DRAFT, 1.0)
    assert link.next_tick == 6.0
    assert link.on_tick(5.99) == []
    failure = failure_in(link.on_tick(6.0))
    assert failure.code == "DEADLINE_EXCEEDED"
    assert failure.remedy


def test_no_stream_before_the_deadline_is_unavailable_and_says_why() -> None:
    link = SessionLink(OPEN, LinkConfig(verdict_deadline_s=1))
    link.start(0.0)
    link.on_disconnected("connection refused", 0.1)
    link.on_tick(0.5)
    link.on_disconnected("connection refused", 0.6)
    failure = failure_in(link.on_tick(1.0))
    assert failure.code == "UNAVAILABLE"
    assert "connection refused" in failure.message


def test_stale_and_repeated_messages_are_dropped() -> None:
    link = opened_link()
    assert link.on_message(VERDICT, 0.1) == []  # nothing was asked
    link.on_draft(DRAFT, 0.2)
    assert link.on_draft(DRAFT, 0.2) == []
    assert link.on_draft(Draft(7, 0, (1,)), 0.2) == []
    assert link.on_message(replace(VERDICT, round=3), 0.3) == []
    link.on_message(VERDICT, 0.4)
    assert link.on_message(VERDICT, 0.5) == []
    assert link.on_message(EarlyExit(0, 1, (5,), 0, False, 0.5), 0.6) == []


def test_a_draft_pushed_ahead_becomes_the_outstanding_one_and_survives_a_lost_stream() -> None:
    link = opened_link()
    link.on_draft(DRAFT, 0.2)
    hit = Draft(1, 3, (1, 2), after=(5, 6, 9))
    miss = Draft(1, 3, (3, 4), after=(5, 6, 7))
    deeper = Draft(2, 6, (4,), after=(1, 2, 3))
    for draft in (hit, miss, deeper):
        assert link.on_draft(draft, 0.3) == [Send(draft)]
    assert link.on_message(VERDICT, 0.4) == [Deliver(VERDICT)]
    assert link.next_tick == 0.4 + PATIENT.verdict_deadline_s, "its verdict is awaited now"
    link.on_disconnected("reset", 0.5)
    link.on_tick(0.6)
    reopened = Send(replace(OPEN, replay=(5, 6, 9), round=1))
    assert link.on_connected(0.6) == [reopened, Send(hit), Send(deeper)]
    assert link.on_draft(Draft(1, 3, (8,)), 0.7) == [], "the round has its draft"


def test_a_push_that_comes_after_its_verdict_is_the_rounds_draft() -> None:
    link = opened_link()
    link.on_draft(DRAFT, 0.2)
    link.on_message(VERDICT, 0.3)
    late = Draft(1, 3, (1, 2), after=(5, 6, 9))
    assert link.on_draft(replace(late, after=(5, 6, 8)), 0.4) == []
    assert link.on_draft(late, 0.4) == [Send(late)]
    assert link.next_tick == 0.4 + PATIENT.verdict_deadline_s


def test_autoregressive_rounds_have_a_deadline_each_and_are_repeated_after_a_loss() -> None:
    link = opened_link()
    link.on_draft(Draft(0, 0, (), autoregressive_rounds=2), 0.0)
    link.on_message(Verdict(0, (4,), 0, False), 1.0)
    assert link.next_tick == 1.0 + PATIENT.verdict_deadline_s
    link.on_disconnected("reset", 1.5)
    link.on_tick(1.6)
    assert link.on_connected(1.6)[1:] == [Send(Draft(1, 1, (), autoregressive_rounds=1))]


def test_an_evicted_session_is_opened_again_at_once_but_not_in_a_loop() -> None:
    link = opened_link()
    link.on_draft(DRAFT, 0.2)
    evicted = Failure("REPLAY", "let go")
    assert link.on_message(evicted, 0.3) == [Connect(PATIENT.connect_deadline_s)]
    assert link.on_connected(0.3) == [Send(OPEN), Send(DRAFT)]
    assert link.on_message(evicted, 0.4) == []
    assert link.next_tick == 0.4 + BACKOFF_S
    idle = opened_link()
    idle.on_message(Opened("s", 7), 0.1)
    assert idle.on_message(evicted, 0.3) == []
    assert idle.on_draft(DRAFT, 9.0) == [Connect(PATIENT.connect_deadline_s)]


def test_the_last_verdict_ends_the_session() -> None:
    link = opened_link()
    link.on_draft(DRAFT, 0.2)
    last = replace(VERDICT, finished=True)
    assert link.on_message(last, 0.3) == [Deliver(last), Disconnect()]
    assert link.done


def test_close_tells_the_verifier_if_there_is_a_stream() -> None:
    assert opened_link().close() == [Send(Close()), Disconnect()]
    assert SessionLink(OPEN, PATIENT).close() == [Disconnect()]


OPERATIONS = st.sampled_from(
    ["connected", "disconnected", "draft", "opened", "exit", "verdict", "busy", "fatal", "tick"]
)


@settings(max_examples=200)
@given(st.lists(st.tuples(OPERATIONS, st.floats(0, 2)), max_size=40))
def test_whatever_happens_the_link_neither_hangs_nor_sends_without_a_stream(
    steps: list[tuple[str, float]],
) -> None:
    config = LinkConfig(verdict_deadline_s=5.0)
    link = SessionLink(OPEN, config)
    now, start, round_ = 0.0, 0, 0
    stream = False
    waiting_since: float | None = 0.0
    actions = link.start(now)
    assert actions == [Connect(config.connect_deadline_s)]
    for operation, pause in steps:
        done = link.done
        if link.next_tick is not None:
            now = min(now + pause, link.next_tick)  # the driver's promise
        else:
            now += pause
        if operation == "connected":
            actions = link.on_connected(now)
            stream = stream or bool(actions)
        elif operation == "disconnected":
            actions = link.on_disconnected("lost", now)
            stream = False
        elif operation == "draft":
            actions = link.on_draft(Draft(round_, start, (1, 2)), now)
            if not done and waiting_since is None:
                waiting_since = now
        elif operation == "opened":
            actions = link.on_message(Opened("s", 7), now)
        elif operation == "exit":
            actions = link.on_message(EarlyExit(round_, 1, (1,), 1, False, 0.5), now)
        elif operation == "verdict":
            actions = link.on_message(Verdict(round_, (1, 2, 3), 2, False), now)
        elif operation == "busy":
            actions = link.on_message(Failure("UNAVAILABLE", "no room"), now)
            stream = False
        elif operation == "fatal":
            actions = link.on_message(Failure("INTERNAL", "broken"), now)
        else:
            actions = link.on_tick(now)
        if done:
            assert actions == []
        for action in actions:
            if isinstance(action, Connect):
                stream = False
            if isinstance(action, Send):
                assert stream, f"{action} without a stream"
            if isinstance(action, Deliver) and isinstance(action.message, Verdict):
                round_, start, waiting_since = round_ + 1, start + 3, None
        if not link.done and link._outstanding is not None:
            assert link.next_tick is not None, "waiting without a deadline"
            assert link.next_tick <= now + config.verdict_deadline_s
    for _ in range(1000):  # silence
        if link.next_tick is None:
            break
        now = link.next_tick
        link.on_tick(now)
        link.on_disconnected("lost", now)
    assert link.done or link._outstanding is None
