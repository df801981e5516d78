"""The machines of edge-cloud decoding: pre-draft cache, edge client, verifier session."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from session_links import DRAFT, GREEDY, OPEN, VERDICT

from collab_llm_nodes.decoding.sampling import SamplingConfig, of_device, previews_of
from collab_llm_nodes.errors import ConfigError, InvalidInput, ProtocolError, VocabularyMismatch
from collab_llm_nodes.protocols.edge_cloud.ahead import MAX_AHEAD
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClient, EdgeClientConfig, Source
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, EarlyExit, Verdict
from collab_llm_nodes.protocols.edge_cloud.predraft import OutcomeQueue, PreDraftConfig, ReadyDrafts
from collab_llm_nodes.protocols.edge_cloud.server import (
    EarlyExitQueue,
    ExitConfig,
    VerifierSession,
)


def exit_(tokens: tuple[int, ...], confidence: float, round_: int = 0, layer: int = 1) -> EarlyExit:
    return EarlyExit(round_, layer, tokens, len(tokens) - 1, False, confidence)


def test_the_queue_gives_the_most_confident_outcome_first_within_its_budget() -> None:
    waiting = OutcomeQueue(PreDraftConfig(max_predrafts=2))
    for tokens, confidence in [((1,), 0.2), ((2,), 0.9), ((3,), 0.5), ((2,), 0.99)]:
        waiting.push(tokens, confidence)
    assert waiting.best == 0.99
    assert [waiting.pop(), waiting.pop(), waiting.pop()] == [(2,), (3,), None]
    assert waiting.best == 0.0


def test_the_fifo_queue_keeps_the_order_of_arrival() -> None:
    waiting = OutcomeQueue(PreDraftConfig(queue="fifo"))
    waiting.push((1,), 0.2)
    waiting.push((2,), 0.9)
    assert [waiting.pop(), waiting.pop()] == [(1,), (2,)]


def test_a_ready_draft_is_found_by_the_answer_it_continues() -> None:
    ready = ReadyDrafts()
    made = Draft(1, 3, (7,), cached=True)
    ready.store((5, 6, 9), made)
    assert ready.lookup((5, 6, 9)) is made
    assert ready.lookup((5, 6)) is None
    ready.advance((5, 6, 9))
    assert ready.lookup((5, 6, 9)) is made
    ready.advance((5, 6, 9, 1))
    assert ready.lookup((5, 6, 9)) is None


def test_a_verdict_gives_the_draft_that_is_ready_for_it_once() -> None:
    """Verdicts may be several rounds ahead of the loop, repeated, or answered by a pushed draft."""
    ready = ReadyDrafts()
    second, pushed = Draft(1, 2, (7,)), Draft(2, 4, (8,), after=(7, 3))
    for answer, draft in [((5, 6), second), ((5, 6, 7, 3), pushed), ((5, 9), Draft(1, 2, (1,)))]:
        ready.store(answer, draft)
    assert ready.on_verdict(Verdict(0, (5, 6), 1, False)) is second
    assert ready.on_verdict(Verdict(0, (5, 6), 1, False)) is None, "a repetition"
    assert ready.on_verdict(Verdict(1, (7, 3), 1, False)) is None, "the verifier has it"
    ready.store((5, 6, 7, 3, 4), Draft(3, 5, (2,)))
    assert ready.on_verdict(Verdict(2, (4,), 0, True)) is None, "the answer is complete"
    over = ReadyDrafts()
    over.store((5,), Draft(1, 1, (7,)))
    over.close()
    assert over.on_verdict(Verdict(0, (5,), 0, False)) is None, "the loop has ended"


def test_what_a_verdict_has_not_made_void_stays_and_is_worth_more() -> None:
    waiting = OutcomeQueue(PreDraftConfig(max_predrafts=2))
    for answer, probability in [((1,), 0.5), ((1, 2), 0.4), ((4,), 0.3), ((4, 5), 0.2)]:
        waiting.push(answer, probability)
    assert [waiting.pop(), waiting.pop()] == [(1,), (1, 2)]
    waiting.advance((4,), 0.3)
    assert waiting.best == pytest.approx(0.2 / 0.3), "the budget is the round's"
    assert [waiting.pop(), waiting.pop()] == [(4, 5), None]
    waiting.push((1, 9), 0.9)
    assert waiting.pop() is None, "void"


def test_an_exit_that_is_surer_raises_what_was_predicted() -> None:
    waiting = OutcomeQueue(PreDraftConfig())
    for answer, probability in [((1,), 0.02), ((2,), 0.1), ((1,), 0.95), ((1,), 0.5)]:
        waiting.push(answer, probability)
    assert waiting.best == 0.95
    assert [waiting.pop(), waiting.pop(), waiting.pop()] == [(1,), (2,), None]
    waiting.push((1,), 0.99)
    assert waiting.pop() is None, "it was popped"


TOKENS = st.lists(st.integers(1, 2), max_size=4).map(tuple)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["advance", "push", "pop"]), TOKENS),
        max_size=40,
    )
)
def test_the_queue_never_gives_what_cannot_come(
    steps: list[tuple[str, tuple[int, ...]]],
) -> None:
    waiting = OutcomeQueue(PreDraftConfig(queue="random"))
    answer: tuple[int, ...] = ()
    for step, tokens in steps:
        if step == "advance":
            answer += tokens
            waiting.advance(answer)
        elif step == "push":
            waiting.push(tokens, 0.5)
        else:
            popped = waiting.pop()
            assert popped is None or (popped[: len(answer)] == answer and popped != answer)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["verdict", "advance", "store"]), TOKENS),
        max_size=40,
    )
)
def test_no_ready_draft_is_given_for_another_answer(
    steps: list[tuple[str, tuple[int, ...]]],
) -> None:
    """The loop may handle a verdict long after it was received, and fill the table meanwhile."""
    ready = ReadyDrafts()
    answers: list[tuple[int, ...]] = [()]  # after each verdict that was received
    handled, stored = 0, set[tuple[int, ...]]()
    for step, tokens in steps:
        if step == "verdict":
            answers.append(answers[-1] + tokens)
            found = ready.on_verdict(Verdict(len(answers) - 2, tokens, 0, False))
            assert found is None or found.tokens == answers[-1]
        elif step == "advance":
            handled = min(handled + 1, len(answers) - 1)
            now = answers[handled]
            ready.advance(now)
            void = [answer for answer in stored if answer[: len(now)] != now]
            assert not any(ready.lookup(answer) for answer in void)
        else:
            answer = answers[handled] + tokens
            stored.add(answer)
            ready.store(answer, Draft(handled + 1, len(answer), answer))
            kept = ready.lookup(answer)
            assert kept is not None
            assert kept.tokens == answer


def test_each_row_is_as_sure_as_its_softmax_says() -> None:
    nan, inf = math.nan, math.inf
    first = torch.tensor([[0.0, 2.0, 2.0], [1.0, -inf, 0.0]])
    second = torch.tensor([[0.0, nan, 1.0], [0.0, inf, 1.0], [-inf, -inf, -inf]])
    third = torch.tensor([[-inf, 3.0, -inf]])
    parts = first, second, third
    laws = [SamplingConfig()] * len(parts)
    for reduced in (previews_of(parts, laws), [(None, sure) for _, sure in of_device(parts, laws)]):
        for part, (_, sure) in zip(parts, reduced, strict=True):
            np.testing.assert_allclose(sure, part.softmax(dim=-1).amax(dim=-1), rtol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=20))
def test_the_verifier_sends_distinct_outcomes_in_order_of_confidence(
    exits: list[tuple[int, float]],
) -> None:
    queue = EarlyExitQueue(ExitConfig())
    for token, confidence in exits:
        queue.push(exit_((token,), confidence))
    sent = list(iter(queue.pop, None))
    first = dict(reversed(exits))
    assert {e.tokens[0]: e.confidence for e in sent} == first
    assert [e.confidence for e in sent] == sorted((e.confidence for e in sent), reverse=True)
    queue.push(exit_((1,), 0.5))
    queue.reset()
    assert queue.pop() is None


def test_exits_may_be_sent_in_the_order_they_came() -> None:
    queue = EarlyExitQueue(ExitConfig(queue="fifo"))
    for token, confidence in ((1, 0.2), (2, 0.9), (3, 0.5)):
        queue.push(exit_((token,), confidence))
    assert [e.tokens for e in iter(queue.pop, None)] == [(1,), (2,), (3,)]


@pytest.mark.parametrize(("rule", "expected"), [("joint", 0.4), ("max", 0.8)])
def test_the_confidence_of_an_outcome(rule: str, expected: float) -> None:
    session = VerifierSession(OPEN, eos=frozenset({0}), vocab_size=24, exits=ExitConfig(rule))
    assert session.offer(Draft(0, 0, (5,)))
    session.begin()
    logits = torch.full((2, 24), -math.inf)
    logits[0, 5], logits[0, 6] = math.log(0.8), math.log(0.2)
    logits[1, 7], logits[1, 8], logits[1, 9] = (math.log(p) for p in (0.5, 0.3, 0.2))
    assert session.preview(1, logits).confidence == pytest.approx(expected)


def test_a_token_that_only_the_target_knows_ends_the_session_with_an_error() -> None:
    """The client could neither read nor show it; but an answer may end with any end token."""
    for end in (False, True):
        eos = frozenset({0, 23}) if end else frozenset({0})
        session = VerifierSession(OPEN, eos=eos, vocab_size=20)
        with pytest.raises(InvalidInput, match="outside the vocabulary of 20"):
            session.offer(Draft(0, 0, (20,)))
        session.offer(Draft(0, 0, (5,)))
        session.begin()
        logits = torch.zeros(2, 24)
        logits[0, 5] = logits[1, 23] = 9.0
        if end:
            assert session.preview(1, logits).finished
            assert session.conclude(logits, 0.0).tokens == (5, 23)
            assert session.finished
            continue
        for judge in (partial(session.preview, 1), partial(session.conclude, compute_s=0.0)):
            with pytest.raises(VocabularyMismatch, match="token 23") as caught:
                judge(logits=logits)
            assert caught.value.remedy


def test_the_edge_client_takes_one_draft_per_round_and_one_verdict() -> None:
    client = EdgeClient(EdgeClientConfig(gamma=4, max_tokens=8))
    assert client.on_sent(DRAFT)
    assert not client.on_sent(DRAFT)
    assert client.on_verdict(VERDICT) == (5, 6, 9)
    assert client.on_verdict(VERDICT) == ()
    assert client.sources == [Source.ACCEPTED, Source.ACCEPTED, Source.RECOVERED]
    assert not client.on_sent(DRAFT)
    assert client.next_draft().prefix == (5, 6, 9)
    assert client.next_draft().gamma == 4
    assert client.on_sent(Draft(1, 3, (1, 2, 3, 4)))
    assert client.on_verdict(Verdict(1, (1, 2, 3, 4, 5), 4, False)) == (1, 2, 3, 4, 5)
    assert client.sources[-1] is Source.BONUS
    assert client.finished  # max_tokens


def test_the_edge_client_pushes_drafts_and_knows_which_one_is_due() -> None:
    client = EdgeClient(EdgeClientConfig(gamma=4, max_tokens=24))
    client.on_sent(DRAFT)
    hit, miss = client.predraft((5, 6, 9)), client.predraft((5, 1))
    assert hit is not None
    assert miss is not None
    deeper = client.predraft((1, 2), of=hit)
    assert deeper is not None
    assert (deeper.round, deeper.prefix) == (2, (5, 6, 9, 1, 2))
    sent = [
        client.push(job, Draft(job.round, len(job.prefix), (3,)), 3) for job in (hit, miss, deeper)
    ]
    assert [d and d.after for d in sent] == [(5, 6, 9), (5, 1), (5, 6, 9, 1, 2)]
    assert client.push(hit, DRAFT, 3) is None, "the window is full"
    client.on_verdict(VERDICT)
    assert client.in_flight == sent[0]
    assert client.push(miss, Draft(1, 2, (3,)), 3) is None, "void"
    client.on_verdict(Verdict(1, (1,), 0, False))
    assert client.in_flight is None, "deeper expected (1, 2)"
    assert client.metrics.pushed == 3


def test_without_drafts_the_edge_client_lets_the_verifier_stream() -> None:
    client = EdgeClient(EdgeClientConfig(gamma=0, max_tokens=3))
    job = client.next_draft()
    assert (job.gamma, job.autoregressive_rounds) == (0, 2)
    client.on_sent(Draft(0, 0, (), autoregressive_rounds=2))
    for round_ in range(3):
        assert client.in_flight is not None
        assert client.predraft((1,)) is None
        client.on_verdict(Verdict(round_, (7,), 0, False))
    assert client.finished


def test_the_edge_client_never_drafts_past_the_limit() -> None:
    client = EdgeClient(EdgeClientConfig(gamma=4, max_tokens=5))
    client.on_sent(DRAFT)
    job = client.predraft((5, 6, 9))
    assert job is not None
    assert job.gamma == 1
    assert client.predraft((5, 6, 7, 8, 9)) is None
    assert client.predraft(()) is None


def test_beyond_the_draft_models_room_the_verifier_decodes_alone() -> None:
    client = EdgeClient(EdgeClientConfig(gamma=4, max_tokens=12), draft_room=5)
    assert client.next_draft().gamma == 4
    client.on_sent(DRAFT)
    (near, far) = client.predraft((5, 6, 9)), client.predraft((5, 6, 7, 8, 9))
    assert near is not None
    assert far is not None
    assert (near.gamma, near.autoregressive_rounds) == (2, 0)
    assert (far.gamma, far.autoregressive_rounds) == (0, 6)


@pytest.mark.parametrize(
    "verdict",
    [Verdict(0, (1,) * 6, 5, False), Verdict(0, (1,) * 4, 2, False), Verdict(0, (1,), 2, False)],
)
def test_the_edge_client_refuses_a_verdict_that_does_not_fit_its_draft(verdict: Verdict) -> None:
    client = EdgeClient(EdgeClientConfig())
    client.on_sent(DRAFT)
    with pytest.raises(ProtocolError, match="accepted"):
        client.on_verdict(verdict)


def verifier(sampling: SamplingConfig = GREEDY, **changes: object) -> VerifierSession:
    opened = replace(OPEN, sampling=sampling, **changes)  # type: ignore[arg-type]
    return VerifierSession(opened, eos=frozenset({0}), vocab_size=24)


@pytest.mark.parametrize(
    ("draft", "error", "field_name"),
    [
        (Draft(1, 0, (1,)), ProtocolError, "round"),
        (Draft(0, 3, (1,)), ProtocolError, "start"),
        (Draft(0, 0, (24,)), InvalidInput, "tokens"),
        (Draft(0, 0, (-1,)), InvalidInput, "tokens"),
        (Draft(0, 0, (1,) * 24), InvalidInput, "tokens"),
    ],
)
def test_the_verifier_refuses_what_does_not_fit_its_state(
    draft: Draft, error: type[Exception], field_name: str
) -> None:
    with pytest.raises(error) as caught:
        verifier().offer(draft)
    assert caught.value.field == field_name  # type: ignore[attr-defined]


def test_the_verifier_needs_probabilities_under_the_rejection_law() -> None:
    with pytest.raises(InvalidInput, match="distribution"):
        verifier(SamplingConfig(1.0)).offer(Draft(0, 0, (1,)))


def test_the_verifier_ignores_a_repeated_or_past_draft() -> None:
    session = verifier(round=2)
    assert not session.offer(Draft(1, 0, (1,)))
    assert session.offer(Draft(2, 0, (1,)))
    assert not session.offer(Draft(2, 0, (2,)))
    assert session.begin() == (1,)
    assert session.begin() is None
    assert not session.offer(Draft(2, 0, (2,)))


def logits_for(*tokens: int) -> torch.Tensor:
    """Logits [n, 24] whose greedy choices are ``tokens``."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 24).float()


def test_a_draft_pushed_ahead_is_begun_when_the_answer_grows_as_it_expects() -> None:
    session = verifier()
    assert session.offer(Draft(0, 0, (1, 2)))
    assert session.begin() == (1, 2)
    assert session.offer(Draft(1, 3, (4, 5), after=(1, 2, 3)))
    assert session.offer(Draft(1, 2, (6, 7), after=(1, 9)))
    assert session.offer(Draft(2, 6, (8,), after=(1, 2, 3, 4, 5, 7)))
    assert session.begin() is None, "a round is under verification"
    session.conclude(logits_for(1, 2, 3), 0.0)
    assert session.begin() == (4, 5)
    session.conclude(logits_for(4, 5, 6), 0.0)
    assert session.begin() is None, "the answer grew otherwise: 6 instead of 7"
    assert session.generated == [1, 2, 3, 4, 5, 6]
    assert session.offer(Draft(2, 6, (8,), after=(6,))), "late, but what is expected holds"
    assert session.begin() == (8,)


def test_a_void_draft_is_ignored_and_does_not_block_its_round() -> None:
    session = verifier(replay=(1, 2), round=3)
    assert not session.offer(Draft(3, 2, (5,), after=(9,)))
    assert not session.offer(Draft(4, 2, (5,), after=(2,))), "the answer grows with every round"
    assert not session.offer(Draft(3, 4, (5,), after=(2, 3)))
    assert session.offer(Draft(3, 2, (6,)))
    assert session.begin() == (6,)


def test_alone_the_verifier_decodes_as_many_tokens_as_asked() -> None:
    session = verifier()
    assert session.offer(Draft(0, 0, (), autoregressive_rounds=2))
    for token in (3, 4, 5):
        assert session.begin() == ()
        session.conclude(logits_for(token), 0.0)
    assert session.begin() is None
    assert session.generated == [3, 4, 5]
    assert session.round == 3


def test_drafts_ahead_are_bounded() -> None:
    session = verifier()
    for token in range(MAX_AHEAD):
        assert session.offer(Draft(1, 2, (token % 24,), after=(1, token % 24)))
    with pytest.raises(ProtocolError, match="ahead"):
        session.offer(Draft(1, 2, (1,), after=(1, 2)))


@pytest.mark.parametrize(
    ("draft", "field_name"),
    [
        (Draft(1, 1, (1,), after=(1, 2)), "after"),
        (Draft(1, 1, (1,), after=(24,)), "after"),
        (Draft(0, 0, (), autoregressive_rounds=25), "tokens"),
    ],
)
def test_drafts_ahead_and_autoregressive_rounds_are_checked(draft: Draft, field_name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        verifier().offer(draft)
    assert caught.value.field == field_name


def test_the_verifier_refuses_a_replay_that_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="24"):
        verifier(replay=(24,))
    with pytest.raises(InvalidInput, match="replay"):
        verifier(replay=(1,) * 24)


@pytest.mark.parametrize(
    "build",
    [
        lambda: LinkConfig(verdict_deadline_s=0),
        lambda: LinkConfig(backoff_max_s=0.01),
        lambda: EdgeClientConfig(gamma=65),
        lambda: EdgeClientConfig(max_tokens=0),
        lambda: PreDraftConfig(queue="lifo"),
        lambda: ExitConfig(confidence="mean"),
    ],
)
def test_settings_out_of_range_are_errors(build: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        build()
