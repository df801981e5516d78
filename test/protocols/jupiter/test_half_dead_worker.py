"""Workers that answer, but compute nothing or say what cannot be: found, named and left out."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from jupiter_bed import alone, assert_exact, control, prompt, workers

from collab_llm_lab.bench.link.proxy import LinkProxy
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import (
    BY_CODE,
    Busy,
    Cancelled,
    CollabError,
    InvalidInput,
    ModelError,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.protocols.jupiter import codec, pipeline
from collab_llm_nodes.protocols.jupiter.chain import WorkerLost
from collab_llm_nodes.protocols.jupiter.generation import answer
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig
from collab_llm_nodes.protocols.jupiter.link import LinkConfig
from collab_llm_nodes.protocols.jupiter.messages import (
    Connected,
    Linked,
    Loaded,
    Pass,
    Pong,
    Result,
    Span,
    Step,
    Want,
)
from collab_llm_nodes.protocols.jupiter.monitors import ProgressMonitor
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline, PipelineConfig
from collab_llm_nodes.protocols.jupiter.worker import StageWorker
from collab_llm_nodes.protocols.jupiter.worker_settings import WorkerLimits
from collab_llm_nodes.transport.server import ServerHandle

TOKENS = 12
WATCHFUL = LinkConfig(silence_s=1.5, connect_s=20.0)
"""A worker that answers may compute for twice as long, so a stall of a second harms nobody."""

Handle = ServerHandle[StageWorker]
Sabotage = Callable[[Handle, threading.Event], None]


def around(handle: Handle, name: str, replaced: Callable[..., Any]) -> None:
    """Have calls of a worker's method go to ``replaced``, with the method as first argument."""
    service: Any = handle.service
    setattr(service, name, partial(replaced, getattr(service, name)))


def frozen(handle: Handle, over: threading.Event) -> None:
    """Have the thread that computes stand still."""
    handle.service._compute.submit(over.wait)


def silent(handle: Handle, over: threading.Event) -> None:
    """Have results sent to nobody, neither to the next worker nor to the coordinator."""
    service: Any = handle.service
    post = service.bridge.post
    service.bridge.post = lambda client, message, more=False: (
        None if isinstance(message, Result) else post(client, message, more)
    )
    around(
        handle, "_computed", lambda computed, chain, size, passed_on: computed(chain, size, None)
    )


def frozen_within_a_pass(handle: Handle, over: threading.Event) -> None:
    """Have the next pass never end."""

    def stuck(compute: Callable[..., Any], *args: Any) -> Any:
        over.wait()
        return compute(*args)

    around(handle, "_compute_pass", stuck)


def crashing(handle: Handle, over: threading.Event) -> None:
    """Have each pass fail as a broken driver would."""

    def crash(*args: Any) -> Any:
        raise RuntimeError("device-side assert")

    around(handle, "_compute_pass", crash)


@contextmanager
def pipeline_of(addresses: list[str], **changed: Any) -> Iterator[Pipeline]:
    with Pipeline(PipelineConfig(tuple(addresses), WATCHFUL, **changed)) as made:
        yield made


@contextmanager
def running(
    count: int, **changed: Any
) -> Iterator[tuple[list[Handle], list[str], Pipeline, threading.Event]]:
    """Run workers and a pipeline; yields also an event that ends what is frozen."""
    over = threading.Event()
    with workers(count) as (handles, addresses), pipeline_of(addresses, **changed) as made:
        try:
            yield handles, addresses, made, over
        finally:
            over.set()


def once(then: Callable[[], object]) -> Callable[[Any], None]:
    """Return a listener that calls ``then`` at its third token."""
    done = threading.Event()

    def on_tokens(lanes: Any) -> None:
        if len(lanes[0].tokens) >= 3 and not done.is_set():
            done.set()
            then()

    return on_tokens


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("sabotage", [frozen, frozen_within_a_pass, silent, crashing])
def test_a_worker_that_answers_and_computes_nothing_is_replaced(
    sabotage: Sabotage, which: int
) -> None:
    with running(3) as (handles, addresses, made, over):
        assert_exact(made, prompt(30), TOKENS, once(lambda: sabotage(handles[which], over)))
        assert [loss.device for loss in made.losses] == [addresses[which]]
        assert made.missing == [addresses[which]]
        assert addresses[which] in made.losses[0].why


@pytest.mark.parametrize("sabotage", [frozen, frozen_within_a_pass, silent])
def test_it_is_found_in_the_first_prompt_as_well(sabotage: Sabotage) -> None:
    ids = prompt(200)
    config = DecodeConfig(4, lengths=lambda n: (n - 50, 50) if n > 50 else (n,))
    with running(2) as (handles, addresses, made, over):
        sabotage(handles[1], over)
        assert answer(made, ids, config, control()).tokens == alone(ids, 4)
        assert made.missing == [addresses[1]]


def test_it_is_found_amid_a_handover() -> None:
    """One worker dies, and one of those that shall take its layers has frozen meanwhile."""
    with running(3) as (handles, addresses, made, over):

        def strike() -> None:
            frozen(handles[2], over)
            threading.Thread(target=handles[0].stop).start()

        assert_exact(made, prompt(30), TOKENS, once(strike))
        assert made.missing == [addresses[0], addresses[2]]


def test_it_is_left_out_for_a_while_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_UPKEEP_S", 3600.0)
    with running(2) as (handles, _, made, over):
        frozen(handles[1], over)
        chain = made.chain(control().due)
        made.renew()
        assert made.current is chain, "it answers, and is not tried again at once"
        over.set()
        monkeypatch.setattr(pipeline.time, "monotonic", lambda now=time.monotonic: now() + 120.0)
        made.renew()
        assert made.missing == []


def test_workers_that_all_compute_nothing_are_reported_soon() -> None:
    with running(1, alone_s=0.5) as (handles, addresses, made, over):
        frozen(handles[0], over)
        with pytest.raises(Unavailable, match=addresses[0]):
            made.chain(control().due)


class SlowToConnect(LinkProxy):
    """Delays each connection, and nothing that is sent on it."""

    async def _dial(self, accepted: socket.socket) -> None:
        await asyncio.sleep(2.2)
        await super()._dial(accepted)


def test_a_worker_may_take_connect_s_to_connect() -> None:
    ids = prompt(9)
    with workers(2) as (_, addresses), SlowToConnect(addresses[1]) as slow:
        shown = (addresses[0], slow.address)
        link = replace(WATCHFUL, silence_s=1.0)
        with Pipeline(PipelineConfig(shown, link)) as made:
            assert_exact(made, ids, 4)
            assert not made.losses


def test_a_worker_may_end_a_long_pass_before_it_takes_other_layers() -> None:
    """The other one dies while it computes: nobody waits for that pass any more."""
    ids = prompt(30)
    with workers(2) as (handles, addresses), pipeline_of(addresses) as made:
        service: Any = handles[1].service
        compute = service._compute_pass

        def strike() -> None:
            def long(*args: Any) -> Any:
                service._compute_pass = compute
                threading.Thread(target=handles[0].stop).start()
                time.sleep(7.0)
                return compute(*args)

            service._compute_pass = long

        assert_exact(made, ids, TOKENS, once(strike))
        assert [loss.device for loss in made.losses] == [addresses[0]]


def first_of(result: Result, **changed: Any) -> Result:
    """Return ``result`` with another first outcome."""
    first, *others = result.outcomes
    return replace(result, outcomes=(replace(first, **changed), *others))


LIES: dict[str, Callable[[Result], Any]] = {
    "no outcome": lambda r: replace(r, outcomes=()),
    "two outcomes": lambda r: replace(r, outcomes=r.outcomes * 2),
    "a token outside the vocabulary": lambda r: first_of(r, next=1 << 30),
    "no token": lambda r: first_of(r, next=-1, path=()),
    "a path outside the draft": lambda r: first_of(r, path=(77,)),
    "a path backwards": lambda r: first_of(r, path=(2, 1)),
    "guesses outside the vocabulary": lambda r: first_of(r, guesses=(1 << 30,) * 5),
    "thousands of guesses": lambda r: first_of(r, guesses=(1,) * 5000),
    "logits that nobody wants": lambda r: first_of(r, logits=b"1234"),
    "an earlier pass": lambda r: replace(r, number=max(0, r.number - 1)),
    "a later pass": lambda r: replace(r, number=r.number + 5),
    "no times": lambda r: replace(r, spans=()),
    "times of many": lambda r: replace(r, spans=r.spans * 9),
    "infinite times": lambda r: replace(r, spans=(Span(0.0, float("inf")),) * len(r.spans)),
    "garbage": lambda r: b"\xff\xff\xff",
    "nothing": lambda r: b"",
    "half of it": lambda r: codec.encode_report(r)[:-3],
    "Loaded": lambda r: Loaded(1 << 60),
    "Connected": lambda r: Connected(),
    "Linked": lambda r: Linked(),
    "counts that cannot be": lambda r: Pong(1 << 40, 1, 0),
    "counts that fall": lambda r: Pong(),
    "an unknown error": lambda r: type("New", (CollabError,), {"code": "NEW"})("oops"),
    **{
        f"a failure {code}": lambda r, kind=kind: kind("oops")  # type: ignore[misc]
        for code, kind in BY_CODE.items()
        if code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED")  # not its fault: it may come back
    },
    "a size that nobody sent": lambda r: InvalidInput("oops", field="steps.rows"),
    "bytes that do not wait": lambda r: Busy("oops", field="states"),
    "more than a message": lambda r: first_of(r, logits=bytes(70 << 20)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_worker_that_lies_is_named_and_the_others_go_on(
    lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lying(encode: Callable[[Any], bytes], message: Any) -> bytes:
        found = LIES[lie](message) if isinstance(message, Result) else message
        return found if isinstance(found, bytes) else encode(found)

    with running(2) as (handles, addresses, made, _):
        begin = partial(around, handles[1], "encode", lying)
        assert_exact(made, prompt(30), TOKENS, once(begin))
        assert [loss.device for loss in made.losses] == [addresses[1]]
    assert "Traceback" not in caplog.text


def test_states_that_cannot_be_read_are_their_senders_fault() -> None:
    def damage(computed: Callable[..., None], chain: Any, size: int, passed_on: Pass) -> None:
        computed(chain, size, replace(passed_on, states=b"\xff" * len(passed_on.states)))

    with running(3) as (handles, addresses, made, _):
        begin = partial(around, handles[0], "_computed", damage)
        assert_exact(made, prompt(30), TOKENS, once(begin))
        assert [loss.device for loss in made.losses] == [addresses[0]]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"num_layers": 0}, None),
        ({"width": 1 << 31}, None),
        ({"eos": frozenset({1 << 30})}, None),
        ({"vocabulary": "v" * 5000}, None),
        ({"context": 7}, ModelError),
        ({"width": 31}, ModelError),
    ],
)
def test_a_worker_that_describes_what_cannot_be(
    changed: dict[str, Any], error: type[CollabError] | None
) -> None:
    with workers(2) as (handles, addresses), pipeline_of(addresses) as made:
        service: Any = handles[1].service
        service.info = replace(service.info, **changed)
        if error is not None:
            with pytest.raises(error, match=addresses[1]):
                made.chain(control().due)
            return
        ids = prompt(9)
        assert_exact(made, ids, 4)
        assert made.missing == [addresses[1]]


@pytest.mark.parametrize(
    ("job", "failing"),
    [
        ("_compute_pass", Cancelled),
        ("_compute_pass", InvalidInput),
        ("_compute_pass", ModelError),
        ("_stage_for", Cancelled),
        ("_stage_for", InvalidInput),
    ],
)
def test_a_worker_that_fails_each_job_is_left_out(job: str, failing: type[CollabError]) -> None:
    """Worker that lies from its first message on, so that no request ever sees it work."""

    def fail(*args: Any) -> Any:
        raise failing("oops")

    with running(2) as (handles, addresses, made, _):
        around(handles[1], job, fail)
        assert_exact(made, prompt(9), 4)
        assert [loss.device for loss in made.losses] == [addresses[1]]
        assert made.missing == [addresses[1]]


def test_a_worker_whose_states_are_not_finite_is_left_out() -> None:
    def damaged(compute: Callable[..., Any], *args: Any) -> Any:
        states, outcomes = compute(*args)
        return states * float("nan"), outcomes

    with running(2) as (handles, addresses, made, _):
        begin = partial(around, handles[0], "_compute_pass", damaged)
        assert_exact(made, prompt(30), TOKENS, once(begin))
        assert [loss.device for loss in made.losses] == [addresses[0]]


def test_a_call_that_is_refused_after_loading_is_the_workers_fault() -> None:
    with workers(1) as (_, addresses), pipeline_of(addresses) as made:
        chain = made.chain(control().due)
        chain._on_lost(0, Unauthenticated("no longer"))
        assert isinstance(chain.failed, WorkerLost)
        assert chain.failed.at_fault


def test_more_logits_than_a_message_holds_are_refused_and_nobody_is_lost() -> None:
    step = Step(0, 0, tuple(prompt(64)), want=Want.LOGITS, rows=64)
    limits = WorkerLimits(max_message_bytes=4096)
    with workers(1, limits=limits) as (_, addresses), pipeline_of(addresses) as made:
        with pytest.raises(InvalidInput) as refused:
            made.chain(control().due).run([step], control().due)
        assert refused.value.field == "steps.rows"
        assert refused.value.remedy


@pytest.mark.parametrize("token", [-1, 1 << 30])
def test_a_token_outside_the_vocabulary_is_no_workers_fault(token: int) -> None:
    with workers(1) as (_, addresses), pipeline_of(addresses) as made:
        with pytest.raises(InvalidInput, match="outside the vocabulary"):
            answer(made, [1, token], DecodeConfig(4), control())
        assert_exact(made, prompt(9), 4)
        assert not made.losses


def test_a_top_k_of_any_size_is_no_workers_fault() -> None:
    sampling = SamplingConfig(1.0, top_k=1 << 40, law="coupled")
    with workers(1) as (_, addresses), pipeline_of(addresses) as made:
        found = answer(made, prompt(9), DecodeConfig(4, sampling=sampling), control())
        assert found.tokens == alone(prompt(9), 4, sampling)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_are_the_last_workers_fault(value: float) -> None:
    """A row of them: single tokens may be impossible."""
    step = Step(0, 0, (1, 2), want=Want.LOGITS, rows=2)
    with workers(1) as (handles, addresses), pipeline_of(addresses) as made:
        chain = made.chain(control().due)
        service: Any = handles[0].service
        logits = np.zeros((2, service.info.vocab_size), "<f4")
        logits[0, 1:] = float("-inf")
        encode = service.encode
        service.encode = lambda m: encode(
            first_of(m, logits=logits.tobytes()) if isinstance(m, Result) else m
        )
        chain.run([step], control().due)
        logits[1] = value
        with pytest.raises(WorkerLost, match="logits that are not finite") as lost:
            chain.run([replace(step, start=2)], control().due)
        assert lost.value.device == addresses[0]


# The machine alone.


def progress(count: int = 2) -> ProgressMonitor:
    return ProgressMonitor([0.0] * count, tick_s=0.1, grace_s=1.0, row_s=0.0)


def ticks(made: ProgressMonitor) -> tuple[int, int]:
    """Return after how many ticks which worker is found."""
    for number in range(1, 10_000):
        if (found := made.tick()) is not None:
            return number, found[0]
    raise AssertionError("nobody is found")


def loaded(made: ProgressMonitor, count: int = 2) -> ProgressMonitor:
    for i in range(count):
        made.on_pong(i, Pong(1, 1, 1))
    return made


def ended(made: ProgressMonitor, rows: int, seconds: float) -> None:
    """Have a pass end that takes each worker so many seconds."""
    made.on_sent(rows)
    made.on_result([Span(0.0, seconds)] * 2, 2 * seconds)


def test_nobody_is_waited_for_without_work() -> None:
    made = loaded(progress())
    assert all(made.tick() is None for _ in range(1000))


def test_a_worker_that_has_not_connected_is_left_to_its_link() -> None:
    made = progress()
    made.on_pong(0, Pong(1, 1, 1))
    assert all(made.tick() is None for _ in range(1000))
    made.on_message(1)
    assert ticks(made) == (11, 1), "it can be reached, and says nothing of its Load"


@pytest.mark.parametrize(
    ("counts", "culprit"),
    [
        ([(1, 1, 1), (1, 1, 1)], 0),  # it has not even taken the pass
        ([(2, 1, 1), (1, 1, 1)], 0),
        ([(2, 2, 1), (1, 1, 1)], 0),
        ([(2, 2, 2), (1, 1, 1)], 0),  # computed, but not sent on
        ([(2, 2, 2), (2, 1, 1)], 1),
        ([(2, 2, 2), (2, 2, 1)], 1),
        ([(2, 2, 2), (2, 2, 2)], 1),  # computed, and no result
    ],
)
def test_the_worker_that_does_not_go_on_is_found(
    counts: list[tuple[int, int, int]], culprit: int
) -> None:
    made = loaded(progress())
    made.on_sent(1)
    for i, own in enumerate(counts):
        made.on_pong(i, Pong(*own))
    after, found = ticks(made)
    assert (after, found) == (11, culprit)


@pytest.mark.parametrize(
    ("busy_s", "after"),
    [
        ([0.0], 51),
        ([3.0, 4.0, 0.0], 51 + 270),  # it may be busy for 30 s, and was before it was asked
        ([1e6], 51),  # it will never end that job
        ([0.1] * 1000, 51 + 299),  # it cannot be that busy for so long
    ],
)
def test_a_job_of_another_chain_is_waited_for_but_not_for_ever(
    busy_s: list[float], after: int
) -> None:
    made = progress(1)
    for number in range(1, 1000):
        made.on_pong(0, Pong(1, 0, 0, busy_s[min(number, len(busy_s)) - 1]))
        if made.tick() is not None:
            break
    assert number == after


def test_others_that_go_on_excuse_nobody() -> None:
    made = loaded(progress())
    for number in range(40):
        made.on_sent(1)
        made.on_pong(0, Pong(number + 2, number + 2, number + 2))
        made.on_pong(1, Pong(number + 2, 2, 1))
        if (found := made.tick()) is not None:
            break
    assert found is not None
    assert found[0] == 1


def test_a_pass_may_take_a_few_times_as_long_as_others_of_its_size() -> None:
    made = loaded(progress())
    ended(made, 1, 0.5)
    for i in range(2):
        made.on_pong(i, Pong(2, 2, 2))
    made.on_sent(1)
    made.on_pong(0, Pong(3, 3, 2))
    after, found = ticks(made)
    assert found == 0
    assert 30 <= after <= 31, "six times half a second"


def test_a_longer_pass_may_take_longer_before_one_has_been_seen() -> None:
    made = loaded(progress())
    ended(made, 32, 0.2)
    for i in range(2):
        made.on_pong(i, Pong(2, 2, 2))
    made.on_sent(512)
    made.on_pong(0, Pong(3, 3, 2))
    after, _ = ticks(made)
    assert after * 0.1 >= 16 * 6 * 0.2


def test_what_a_worker_says_of_its_times_buys_it_nothing() -> None:
    made = loaded(progress())
    made.on_sent(1)
    made.on_result([Span(0.0, 1e9)] * 2, 0.1)
    for i in range(2):
        made.on_pong(i, Pong(2, 2, 2))
    made.on_sent(1)
    assert ticks(made) == (11, 0)


@pytest.mark.parametrize("said", [0.0, 1e-3, 0.5])
def test_a_worker_is_judged_by_the_time_that_was_seen_here(said: float) -> None:
    """The last worker says that the first one takes no time; it takes half a second."""
    made = loaded(progress())
    for number in (2, 3):
        made.on_sent(1)
        made.on_pong(0, Pong(number, number, number - 1))
        for _ in range(5):
            assert made.tick() is None
        made.on_pong(0, Pong(number, number, number))
        made.on_pong(1, Pong(number, number, number))
        made.on_result([Span(0.0, said), Span(0.0, 0.01)], 0.6)
    made.on_sent(1)
    made.on_pong(0, Pong(4, 4, 3))
    after, found = ticks(made)
    assert found == 0
    assert 30 <= after <= 37, "six times half a second"


def test_a_pass_too_short_to_be_seen_says_nothing_against_a_longer_one() -> None:
    made = loaded(progress())
    made.on_sent(1)
    made.on_result([Span(0.0, 0.0)] * 2, 0.08)
    for i in range(2):
        made.on_pong(i, Pong(2, 2, 2))
    made.on_sent(63)
    made.on_pong(0, Pong(3, 3, 2))
    after, _ = ticks(made)
    assert after * 0.1 >= 32 * 6 * 0.08


def test_a_lie_about_times_leaves_out_no_honest_worker() -> None:
    """The first worker takes half a second for each pass; the last one says that it takes none."""
    ids = prompt(9)
    link = replace(WATCHFUL, silence_s=0.7)  # finds a worker after 1.4 s
    with workers(2) as (handles, addresses):
        honest: Any = handles[0].service
        liar: Any = handles[1].service
        compute, encode = honest._compute_pass, liar.encode
        wait_s = [0.5]

        def slow(*args: Any) -> Any:
            time.sleep(wait_s[0])
            return compute(*args)

        honest._compute_pass = slow
        liar.encode = lambda m: encode(
            replace(m, spans=(Span(0.0, 0.0),) * 2) if isinstance(m, Result) else m
        )
        with Pipeline(PipelineConfig(tuple(addresses), link)) as made:
            listener = once(lambda: wait_s.__setitem__(0, 1.8))
            assert_exact(made, ids, 5, listener)
            assert not made.losses


@pytest.mark.parametrize(
    "counts",
    [(9, 1, 1), (1, 2, 1), (1, 1, 2), (0, 0, 0), (1, 1, 1, -1.0), (1, 1, 1, float("nan"))],
)
def test_counts_that_cannot_be_are_refused(counts: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError):
        loaded(progress()).on_pong(0, Pong(*counts))
