"""Strangers on a worker's port: refused by type, while its coordinator gets its exact answers."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from certificates import Certificates
from jupiter_bed import PATIENT, WAIT_S, alone, assert_exact, control, prompt, workers

from collab_llm_lab.bench.hostile.attacks import mutated
from collab_llm_nodes.assets import version
from collab_llm_nodes.errors import BY_CODE, CollabError, Unauthenticated, Unavailable
from collab_llm_nodes.protocols.jupiter import codec
from collab_llm_nodes.protocols.jupiter.generation import answer
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig
from collab_llm_nodes.protocols.jupiter.messages import (
    Connect,
    Link,
    Load,
    Loaded,
    Order,
    Pass,
    Ping,
    Report,
    Step,
    Taken,
    Want,
)
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline, PipelineConfig
from collab_llm_nodes.protocols.jupiter.states import pack
from collab_llm_nodes.protocols.jupiter.worker_settings import WorkerLimits
from collab_llm_nodes.transport.admission import Shares
from collab_llm_nodes.transport.background import background_loop
from collab_llm_nodes.transport.wire import Failure

TOKEN = "only-workers-with-this"
OPENLY = replace(PATIENT, token=TOKEN)


def say(address: str, messages: Iterable[Order | bytes], token: str = TOKEN) -> Iterator[Report]:
    """Open a stream, send ``messages``, and yield what comes until the worker ends it."""
    sent = (m if isinstance(m, bytes) else codec.encode_order(m) for m in messages)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(codec.WORK)
        for data in call(sent, timeout=WAIT_S, metadata=metadata):
            yield codec.decode_report(data)


def refusal(address: str, messages: Iterable[Order | bytes], token: str = TOKEN) -> Failure:
    """Return the failure that ends the stream."""
    refused = threading.Event()
    for report in say(address, held_open(messages, refused), token):
        if isinstance(report, Failure):
            refused.set()
    assert isinstance(report, Failure), report
    return report


def held_open(messages: Iterable[Order | bytes], until: threading.Event) -> Iterator[Order | bytes]:
    """Yield ``messages``, and keep the stream open until something has happened."""
    yield from messages
    until.wait(WAIT_S)


@contextmanager
def guarded(count: int = 1, **more: Any) -> Iterator[tuple[list[str], Pipeline]]:
    """Run workers that ask for a token, and a pipeline that has it."""
    with ExitStack() as stack:
        _, addresses = stack.enter_context(workers(count, token=TOKEN, next=PATIENT, **more))
        made = stack.enter_context(Pipeline(PipelineConfig(tuple(addresses), OPENLY)))
        yield addresses, made


def load_of(made: Pipeline, coordinator: str = "c" * 32, last: int = 4, first: int = 0) -> Load:
    info = made.chain(control().due).info
    return Load(coordinator, "f" * 32, version(), info.weights, first, last, 2)


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x"])
def test_a_stranger_without_the_token_is_refused_before_a_word_is_read(token: str) -> None:
    with guarded() as (addresses, made):
        with pytest.raises(grpc.RpcError) as refused:
            list(say(addresses[0], [Ping()], token))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stranger = PipelineConfig(tuple(addresses), replace(PATIENT, token=token))
        with Pipeline(stranger) as other, pytest.raises(Unauthenticated):
            other.chain(control().due)
        assert_exact(made, prompt(9), 4)


def test_unexpected_messages_are_refused_by_type_and_disturb_nobody() -> None:
    step = Step(0, 0, (1, 2), want=Want.VERDICT, rows=1)
    with guarded(2) as (addresses, made):
        first, second = addresses
        good = load_of(made)
        cases: list[tuple[str, list[Order | bytes], str]] = [
            (first, [b"\xff\xff garbage"], "PROTOCOL_ERROR"),
            (first, [b""], "PROTOCOL_ERROR"),
            (first, [Ping()], "PROTOCOL_ERROR"),
            (first, [Pass(0, (step,))], "PROTOCOL_ERROR"),
            (first, [Connect("127.0.0.1:1")], "PROTOCOL_ERROR"),
            (first, [Link("f" * 32)], "PROTOCOL_ERROR"),
            (second, [Link("guessed")], "PROTOCOL_ERROR"),
            (second, [Link("")], "PROTOCOL_ERROR"),
            (first, [good], "BUSY"),
            (first, [replace(good, version="0.0")], "INVALID_CONFIG"),
            (first, [replace(good, weights="other")], "MODEL_ERROR"),
            (first, [replace(good, lanes=10_000)], "INVALID_CONFIG"),
            (first, [replace(good, lanes=0)], "INVALID_CONFIG"),
            (first, [replace(good, coordinator="x" * 1000)], "INVALID_INPUT"),
        ]
        for address, messages, code in cases:
            failure = refusal(address, messages)
            assert failure.code == code, failure
            assert failure.remedy, failure
        assert_exact(made, prompt(9), 6)
        assert not made.losses


def test_passes_that_cannot_be_run_end_the_chain_with_a_typed_error() -> None:
    with workers(1) as (handles, addresses):
        info = handles[0].service.info
        numbers = itertools.count()

        def load(first: int = 0, last: int = 4) -> Load:
            chain = f"{next(numbers)}"
            return Load("me", chain, info.version, info.weights, first, last, 2)

        states = pack(torch.zeros(2, info.width), "float32")
        bad: list[tuple[Load, Pass]] = [
            (load(), Pass(0, (Step(0, 0, (info.vocab_size,)),))),
            (load(), Pass(0, (Step(0, 3, (1,)),))),
            (load(), Pass(0, (Step(0, 0, (1,), retain=7),))),
            (load(), Pass(0, (Step(0, 0, (1,), fork_of=1),))),
            (load(), Pass(0, tuple(Step(lane, 0, (1,)) for lane in range(3)))),
            (load(), Pass(0, (Step(0, 0, (1,) * (info.context + 1)),))),
            (load(), Pass(0, (Step(0, 0, (1, 2)),), states)),
            (load(), Pass(0, (Step(0, 0, (1, 2), features=2),), states)),  # it reads text only
            (load(), Pass(0, (Step(0, 0, (1, 2), features=1),), states)),
            (load(), Pass(0, (Step(0, 0, (1, 2), positions=(7,)),))),
            (load(), Pass(0, (Step(0, 0, (1, 2), positions=(0, 1) * 3),))),
            (load(0, 9), Pass(0, ())),
            (load(2, 2), Pass(0, ())),
        ]
        for loading, asked in bad:
            failure = refusal(addresses[0], [loading, asked], "")
            assert failure.code in BY_CODE
            assert failure.code != CollabError.code, failure
        with Pipeline(PipelineConfig(tuple(addresses), PATIENT)) as made:
            # The same coordinator's chain may be replaced, another's is waited for.
            made._coordinator = "me"
            assert_exact(made, prompt(9), 4)


def test_a_flood_of_streams_and_of_damaged_messages_changes_no_answer() -> None:
    """The sender has the token, and a coordinator is at work beside it."""
    ids = prompt(30)
    right = alone(ids, 12)
    # All are to be heard, and none to wait for its turn.
    with guarded(2, shares=Shares(sessions_per_s=1e4)) as (addresses, made):
        good = load_of(made)
        step = Step(0, 0, (1, 2), want=Want.VERDICT, rows=1)
        honest = [codec.encode_order(m) for m in (good, Link("x" * 32), Pass(0, (step,)), Ping())]
        ended = threading.Event()
        tried, untyped = [0], []

        def attack(seed: int) -> None:
            chance = random.Random(seed)
            while not ended.is_set():
                count = chance.randrange(1, 4)
                messages = [mutated(chance.choice(honest), chance) for _ in range(count)]
                try:
                    for report in say(chance.choice(addresses), messages):
                        if isinstance(report, Failure) and report.code == CollabError.code:
                            untyped.append(report)
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        untyped.append(error)
                tried[0] += 1

        threads = [threading.Thread(target=attack, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(6):
                assert answer(made, ids, DecodeConfig(12), control()).tokens == right
            while tried[0] < 200:
                assert answer(made, ids, DecodeConfig(4), control()).tokens == right[:4]
        finally:
            ended.set()
            for thread in threads:
                thread.join(WAIT_S)
        assert not untyped
        assert not made.losses


def test_more_bytes_than_may_wait_are_refused() -> None:
    with workers(1) as (handles, addresses):
        service = handles[0].service
        info = service.info
        service.max_unanswered_bytes = 10_000
        load = Load("me", "f", info.version, info.weights, 0, 4, 1)
        large = Pass(0, (), b"x" * 20_000)
        assert refusal(addresses[0], [load, large], "").code == "BUSY"


def test_only_members_of_a_chain_may_send_much() -> None:
    """A few megabytes of empty steps are parsed into forty times as many."""
    with guarded() as (addresses, made):
        load_of(made)
        failure = refusal(addresses[0], [b"\x22\x80\x80\x08" + b"\x12\x00" * (1 << 16)])
        assert failure.code == "PROTOCOL_ERROR"
        assert "131076 bytes to begin with" in failure.message
        assert_exact(made, prompt(9), 4)


def test_a_stranger_begins_no_more_streams_than_its_allowance() -> None:
    with guarded(shares=Shares(sessions_per_s=0.1)) as (addresses, made):
        load_of(made)  # from the same address, which has now begun ten seconds' worth of streams
        refused = refusal(addresses[0], [Link("f" * 32)])
        assert refused.code == "BUSY"
        assert "shares.sessions_per_s" in refused.remedy
        assert_exact(made, prompt(9), 4)


def test_hidden_states_do_not_count_and_what_strangers_begin_with_does() -> None:
    shares = Shares(bytes_per_s=1000.0)
    ids = prompt(100)  # more than ten seconds' worth of states
    with guarded(2, shares=shares) as (addresses, made):
        assert_exact(made, ids, 4)
        made.close()
        with Pipeline(made.config) as another:
            assert answer(another, ids, DecodeConfig(4), control()).tokens == alone(ids, 4)
        large = b"\x12\x00" * (1 << 16)
        assert refusal(addresses[0], [large]).code == "PROTOCOL_ERROR"
        refused = refusal(addresses[0], [large])
        assert refused.code == "BUSY"
        assert "shares.bytes_per_s" in refused.remedy


def test_tensors_that_are_none_end_the_chain_by_type() -> None:
    """In the second stage, by the worker before it."""
    with workers(1) as (handles, addresses):
        info = handles[0].service.info
        rows = 2
        good = torch.zeros(rows, info.width)
        wrong: list[tuple[str, bytes]] = [
            ("float32", b""),
            ("float32", pack(good, "float32")[:-1]),
            ("float32", pack(torch.zeros(rows + 1, info.width), "float32")),
            ("float32", b"\xff" * (4 * rows * info.width)),  # not a number
            ("float16", b"\x00\x7c" * (rows * info.width)),  # infinite
            ("float16", pack(good, "float32")),
            ("int8", b"\x00\x00\xc0\x7f" * rows + b"\x01" * (rows * info.width)),
        ]
        for number, (form, states) in enumerate(wrong):
            chain = f"{number}"
            load = Load("me", chain, info.version, info.weights, 2, 4, 2, form)
            step = Step(0, 0, (1, 2), want=Want.VERDICT, rows=1)
            failure = _second_stage(addresses[0], load, Pass(0, (step,), states))
            assert failure.code == "PROTOCOL_ERROR", (form, failure)
            assert failure.field == "states"


def test_logits_larger_than_a_message_are_not_computed() -> None:
    with workers(1, limits=WorkerLimits(max_message_bytes=4096)) as (handles, addresses):
        info = handles[0].service.info
        load = Load("me", "f", info.version, info.weights, 2, 4, 2)
        large = Step(0, 0, (1,) * 64, want=Want.LOGITS, rows=64)
        failure = _second_stage(addresses[0], load, Pass(0, (large,)))
        assert (failure.code, failure.field) == ("INVALID_INPUT", "steps.rows")


def test_a_worker_has_limits_for_lanes_and_waiting_passes() -> None:
    with workers(1, limits=WorkerLimits(max_lanes=2, max_waiting_bytes=4096)) as (handles, there):
        info = handles[0].service.info
        refused = refusal(there[0], [Load("me", "f", info.version, info.weights, 0, 4, 3)], "")
        assert (refused.code, refused.field) == ("INVALID_CONFIG", "lanes")
        load = Load("me", "g", info.version, info.weights, 2, 4, 2)
        many = Step(0, 0, (1,) * 64, want=Want.VERDICT, rows=1)
        states = pack(torch.zeros(64, info.width), "float32")
        failure = _second_stage(there[0], load, Pass(0, (many,), states))
        assert (failure.code, failure.field) == ("BUSY", "message")


def _second_stage(address: str, load: Load, order: Pass) -> Failure:
    """Send ``order`` as the previous worker; return the failure that it or the coordinator gets."""
    loaded, over = threading.Event(), threading.Event()
    failures: list[Failure] = []

    def coordinate() -> None:
        for report in say(address, held_open([load], over), ""):
            if isinstance(report, Loaded):
                loaded.set()
            if isinstance(report, Failure):
                failures.append(report)
                over.set()

    coordinator = threading.Thread(target=coordinate)
    coordinator.start()
    assert loaded.wait(WAIT_S)
    for report in say(address, held_open([Link(load.chain), order], over), ""):
        if isinstance(report, Failure):
            failures.append(report)
            over.set()
    over.set()
    coordinator.join(WAIT_S)
    return next(failure for failure in failures if failure.code != "UNAVAILABLE")


class _Deaf:
    """A coordinator that asks for signs of life and reads none of them."""

    def __init__(self, load: Load) -> None:
        self._next = codec.encode_order(load)
        self.asked = 0

    async def read(self) -> bytes | None:
        await asyncio.sleep(0)
        data, self._next = self._next, codec.encode_order(Ping())
        self.asked += 1
        if self.asked > 5000:  # as if it were silent at last
            await asyncio.Event().wait()
        return data

    async def write(self, data: bytes) -> None:
        await asyncio.Event().wait()


def test_reports_do_not_pile_up_for_a_coordinator_that_does_not_read() -> None:
    with workers(1, limits=WorkerLimits(idle_s=0.5)) as (handles, addresses):
        service = handles[0].service
        info = service.info
        deaf = _Deaf(Load("me", "f", info.version, info.weights, 0, 4, 1))
        talk = asyncio.run_coroutine_threadsafe(service.accept(deaf), background_loop())
        with suppress(CancelledError):  # as streams end whose clients neither read nor speak
            talk.result(WAIT_S)
        assert deaf.asked < 1000
        with Pipeline(PipelineConfig(tuple(addresses), PATIENT)) as made:
            assert_exact(made, prompt(9), 4)


def test_tls_between_all(certificates: Certificates) -> None:
    cert, key = certificates.issue("worker")
    secured = replace(OPENLY, tls=True, tls_ca=certificates.ca)
    tls = {"tls_cert": cert, "tls_key": key, "token": TOKEN, "next": secured}
    with workers(2, **tls) as (_, addresses):
        shown = tuple(address.replace("127.0.0.1", "localhost") for address in addresses)
        with Pipeline(PipelineConfig(shown, secured)) as made:
            assert_exact(made, prompt(9), 6)
        plain = PipelineConfig(shown, replace(OPENLY, connect_s=1.0))
        with Pipeline(plain) as made, pytest.raises(Unavailable, match="no worker answers"):
            made.chain(control().due - WAIT_S + 1.0)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path, "workers")


def test_signs_of_life_and_loads_are_answered_in_order() -> None:
    with workers(1) as (handles, addresses):
        info = handles[0].service.info
        load = Load("me", "f", info.version, info.weights, 0, 4, 1)
        step = Step(0, 0, (1, 2, 3), want=Want.VERDICT, rows=1)
        done = threading.Event()
        found = []
        for report in say(addresses[0], held_open([load, Ping(), Pass(0, (step,))], done), ""):
            found.append(report)
            if isinstance(report, Taken):
                done.set()
        kinds = [type(report).__name__ for report in found]
        assert sorted(kinds) == ["Loaded", "Pong", "Result", "Taken"]
        assert next(r for r in found if isinstance(r, Loaded)).bytes > 0
        assert kinds.index("Loaded") < kinds.index("Result")
