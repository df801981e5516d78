"""Hostile clients: 100,000 and more generated messages, each refused by type or ignored by rule.

Bytes against the codec, messages against the session's state machine, whole conversations against
the service without sockets, and some thousand messages over real gRPC. Alongside, a well-behaved
session gets its exact answer and the process does not grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from fake_models import VOCAB, VOCABULARY, FakeEngine, as_engine, encode
from raw_client import RawClient

from collab_llm_lab.bench.hostile.attacks import mutated
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import BY_CODE, CollabError, ProtocolError, Replay
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb
from collab_llm_nodes.protocols.edge_cloud.ahead import MAX_AHEAD, MAX_AHEAD_ENTRIES
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Draft,
    EarlyExit,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.server import (
    ExitConfig,
    VerifierSession,
)
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier import Verifier
from collab_llm_nodes.serving.scheduler import BatchConfig
from collab_llm_nodes.transport import streams
from collab_llm_nodes.transport.wire import Failure
from collab_llm_nodes.transport.wire_pb2 import Sampling

BYTES, MACHINE, CONVERSATIONS, OVER_GRPC = 60_000, 30_000, 10_000, 3_000
assert BYTES + MACHINE + CONVERSATIONS + OVER_GRPC >= 100_000
MAX_GROWTH = 96 << 20  # bytes; torch and gRPC warm up in there as well
WAIT_S = 60.0
TYPED = {*BY_CODE, Replay.code} - {CollabError.code}  # INTERNAL would be a fault of ours
GREEDY = SamplingConfig()
HONEST = Open("go to the red box", (), GREEDY, 24, VOCABULARY)
SPECIAL = (0, 1, VOCAB - 1, VOCAB, 2**31 - 1, 2**31, 2**32 - 1)
FIGURES = (0.0, 1.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), 0.7)
HALVES = (0.5, 0.25, 1.0, 0.0, -1.0, 6e-8, 65504.0, float("nan"), float("inf"))


class Attacker:
    """Makes messages: from nearly right to noise."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def message(self, round_: int = 0, start: int = 0) -> bytes:
        """A draft for ``round_``, or something like it."""
        r = self.random
        kind = r.random()
        if kind < 0.04:
            return r.randbytes(r.randrange(200))
        if kind < 0.08:
            message = pb.ClientMessage(open=self.open())
        elif kind < 0.09:
            message = pb.ClientMessage(close=pb.Close())
        elif kind < 0.10:
            message = pb.ClientMessage()
        else:
            message = pb.ClientMessage(draft=self.draft(round_, start))
        data: bytes = message.SerializeToString()
        return mutated(data, r) if r.random() < 0.15 else data

    def open(self) -> pb.Open:
        """Mostly acceptable."""
        r = self.random
        law = r.choice(("rejection", "coupled"))
        sampling = Sampling(top_p=1.0, law=law, seed=r.getrandbits(64))
        if r.random() < 0.5:
            sampling.temperature = 0.8
        opened = pb.Open(
            text="go", sampling=sampling, max_tokens=r.randrange(1, 40), vocabulary=VOCABULARY
        )
        for _ in range(r.choice((0, 0, 0, 1, 2))):
            self._spoil_open(opened)
        return opened

    def _spoil_open(self, opened: pb.Open) -> None:
        r = self.random
        what = r.randrange(10)
        if what == 0:
            opened.text = r.choice(("", " ", "\x00", "x" * 9000, "\U0001f916" * 50))
        elif what == 1:
            opened.images.extend([r.randbytes(r.randrange(64))] * r.choice((1, 4, 5, 300)))
        elif what == 2:
            opened.max_tokens = r.choice((*SPECIAL, 10_000))
        elif what == 3:
            opened.vocabulary = "another"
        elif what == 4:
            opened.replay.extend(self.ids(r.choice((1, 5, 100, 5000))))
        elif what == 5:
            opened.round = r.choice(SPECIAL)
        elif what == 6:
            opened.sampling.temperature = r.choice(FIGURES)
        elif what == 7:
            opened.sampling.top_p = r.choice(FIGURES)
        elif what == 8:
            opened.sampling.top_k = r.choice(SPECIAL)
        else:
            opened.sampling.law = r.choice(("", "greedy", "x" * 1000))

    def draft(self, round_: int, start: int) -> pb.Draft:
        """Right, off by a little or by much, ahead in all shapes, alone for long."""
        r = self.random
        draft = pb.Draft(round=round_, start=start, cached=r.random() < 0.5)
        size = r.choice((0, 1, 2, 3, 4, 4, 4, 64, 65, 500) if r.random() < 0.1 else (0, 1, 2, 3, 4))
        draft.tokens.extend(self.ids(size) if r.random() < 0.2 else self.good_ids(size))
        if r.random() < 0.3:
            draft.round = r.choice((max(0, round_ - 1), round_ + 1, round_ + 2, *SPECIAL))
        if r.random() < 0.3:
            draft.start = r.choice((max(0, start - 1), start + 1, start + 3, *SPECIAL))
        if r.random() < 0.3:
            draft.after.extend(self.good_ids(r.choice((0, 1, 2, 5, 30))))
        if r.random() < 0.1:
            draft.autoregressive_rounds = r.choice((1, 3, 24, *SPECIAL))
        if r.random() < 0.5:
            self._add_probs(draft, size)
        return draft

    def _add_probs(self, draft: pb.Draft, size: int) -> None:
        r = self.random
        count = size if r.random() < 0.8 else r.choice((0, 1, 65, 70))
        for i in range(count):
            token = draft.tokens[i] if i < len(draft.tokens) and r.random() < 0.9 else 3
            ids = sorted({int(token), *self.good_ids(r.randrange(4))})
            gaps = [b - a for a, b in zip([0, *ids], ids, strict=False)]
            if r.random() < 0.05:
                gaps[r.randrange(len(gaps))] = r.choice((0, 2**31, 2**32 - 1))
            draft.probs.sizes.append(
                len(ids) if r.random() < 0.97 else r.choice((0, 5000, 2**32 - 1))
            )
            draft.probs.gaps.extend(gaps)
            halves = [r.choice(HALVES if r.random() < 0.1 else HALVES[:3]) for _ in ids]
            draft.probs.probs += struct.pack(f"<{len(ids)}e", *halves)
        if r.random() < 0.05:
            draft.probs.probs += b"\x01"

    def ids(self, count: int) -> list[int]:
        """Token ids, some of them none."""
        return [self.random.choice((3, 5, *SPECIAL)) for _ in range(count)]

    def good_ids(self, count: int) -> list[int]:
        return [self.random.randrange(1, VOCAB) for _ in range(count)]


def code_of(refusal: CollabError | Failure) -> str:
    """Its code, once it is certain that it tells what is wrong and what to do."""
    assert refusal.code in TYPED, refusal
    assert refusal.remedy, refusal
    return refusal.code


def resident_bytes() -> int:
    """Memory of this process."""
    gc.collect()
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    before = resident_bytes()
    yield
    assert resident_bytes() - before < MAX_GROWTH


@pytest.mark.usefixtures("bounded_memory")
def test_bytes_decode_or_are_refused_by_type() -> None:
    attacker, fates = Attacker(1), Counter[str]()
    for _ in range(BYTES):
        try:
            message = codec.decode_client(attacker.message())
            fates[type(message).__name__] += 1
            codec.encode_client(message)  # what was let in is sound
        except CollabError as error:
            fates[code_of(error)] += 1
    assert min(fates[k] for k in ("Open", "Draft", "Close", "PROTOCOL_ERROR", "INVALID_INPUT")) > 99


@pytest.mark.usefixtures("bounded_memory")
def test_the_session_refuses_by_type_and_a_refused_draft_changes_nothing() -> None:
    attacker, fates = Attacker(2), Counter[str]()
    r = attacker.random
    engine = FakeEngine(1)
    logits = torch.stack([engine.logits((i,)) for i in range(codec.MAX_DRAFT + 1)])
    session: VerifierSession | None = None
    for _ in range(MACHINE):
        try:
            if session is None or session.finished:
                opened = codec.decode_client(
                    pb.ClientMessage(open=attacker.open()).SerializeToString()
                )
                assert isinstance(opened, Open)
                session = VerifierSession(opened, eos=engine.eos, vocab_size=VOCAB)
                continue
            start = len(session.generated)
            draft = codec.decode_client(attacker.message(session.round, start))
            if not isinstance(draft, Draft):
                continue
            before = (session.round, tuple(session.generated), session.due, len(session._ahead))
            try:
                fates["taken" if session.offer(draft) else "ignored"] += 1
            except CollabError:
                assert before == (
                    session.round,
                    tuple(session.generated),
                    session.due,
                    len(session._ahead),
                )
                raise
            assert len(session._ahead) <= MAX_AHEAD
            while session.due and r.random() < 0.7:
                tokens = session.begin()
                assert tokens is not None
                rows = logits[r.randrange(8) :][: len(tokens) + 1]
                if len(rows) < len(tokens) + 1:
                    rows = logits[: len(tokens) + 1]
                session.preview(1, rows)
                verdict = session.conclude(rows, 0.0)
                assert len(session.generated) == start + len(verdict.tokens)
                start = len(session.generated)
                fates["verified"] += 1
        except CollabError as error:
            fates[code_of(error)] += 1
            if session is not None and r.random() < 0.3:
                session = None  # as the service does always
    assert min(fates[k] for k in ("taken", "ignored", "verified", "INVALID_INPUT")) > 99, fates


class Wire:
    """A hostile client's stream: some messages, then silence or its end."""

    def __init__(self, attacker: Attacker) -> None:
        r = attacker.random
        self._attacker = attacker
        self._left = r.choice((0, 1, 5, 20, 20, 20, 200))
        self._half_open = r.random() < 0.2
        self._opens = True
        self.sent: list[ServerMessage] = []
        self.reads = 0
        self._round = self._start = 0

    async def read(self) -> bytes | None:
        r = self._attacker.random
        await asyncio.sleep(0)
        if not self._left:
            if self._half_open:
                await asyncio.get_running_loop().create_future()
            return None
        self._left -= 1
        self.reads += self._refusal is None  # what comes later is not even decoded
        if self._opens and r.random() < 0.97:
            self._opens = False
            data: bytes = pb.ClientMessage(open=self._attacker.open()).SerializeToString()
            return data
        return self._attacker.message(self._round, self._start)

    async def write(self, data: bytes) -> None:
        message = codec.decode_server(data)
        self.sent.append(message)
        if isinstance(message, Verdict):
            self._round, self._start = message.round + 1, self._start + len(message.tokens)
        if self._attacker.random.random() < 0.01:
            raise ConnectionError("it hung up")

    def check(self) -> str:
        """Return how it ended; every refusal has a type."""
        for message in self.sent[:-1]:
            assert isinstance(message, Opened | EarlyExit | Verdict), message
        refusal = self._refusal
        return "ended" if refusal is None else code_of(refusal)

    @property
    def _refusal(self) -> Failure | None:
        last = self.sent[-1] if self.sent else None
        return last if isinstance(last, Failure) else None


class Honest:
    """A well-behaved client's stream: one draft after each verdict, its end after the last."""

    def __init__(self) -> None:
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._outbox.put_nowait(codec.encode_client(HONEST))
        self._outbox.put_nowait(codec.encode_client(Draft(0, 0, ())))
        self.tokens: tuple[int, ...] = ()

    async def read(self) -> bytes | None:
        return await self._outbox.get()

    async def write(self, data: bytes) -> None:
        message = codec.decode_server(data)
        assert not isinstance(message, Failure), message
        if isinstance(message, Verdict) and not message.finished:
            self.tokens += message.tokens
            guess = self.tokens[-1:] if len(self.tokens) < HONEST.max_tokens - 2 else ()
            draft = Draft(message.round + 1, len(self.tokens), guess)
            self._outbox.put_nowait(codec.encode_client(draft))
        elif isinstance(message, Verdict):
            self.tokens += message.tokens
            self._outbox.put_nowait(None)


HARSH = VerifierConfig(
    address="127.0.0.1:0",
    limits=Limits(max_sessions=24, max_streams=40, idle_s=2.0, max_tokens=256),
    batch=BatchConfig(evict_idle_s=0.5),
    exits=ExitConfig(min_lead_s=0.0),
)


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize(
    "most", [CONVERSATIONS // 4, pytest.param(CONVERSATIONS, marks=pytest.mark.exhaustive)]
)
def test_hostile_conversations_end_typed_and_an_honest_one_is_not_disturbed(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(streams, "_PARTING_S", 0.1)  # many of them would use it up
    engine = FakeEngine(1, exits=(2,))
    expected = engine.answer(encode(Prompt(HONEST.text)), GREEDY, HONEST.max_tokens)
    attacker, fates = Attacker(3), Counter[str]()
    reads = answers = 0

    async def hostile(verifier: Verifier) -> None:
        nonlocal reads
        while reads < most:
            wire = Wire(attacker)
            await verifier.accept(wire)
            reads += wire.reads
            fates[wire.check()] += 1

    async def honest(verifier: Verifier) -> None:
        nonlocal answers
        while reads < most:
            stream = Honest()
            await verifier.accept(stream)
            assert stream.tokens == expected
            answers += 1

    async def run() -> None:
        verifier = Verifier(HARSH, as_engine(engine), encode)
        verifier.start()
        await asyncio.gather(honest(verifier), *(hostile(verifier) for _ in range(16)))
        assert verifier.sessions == 0
        await verifier.stop()

    asyncio.run(asyncio.wait_for(run(), 2 * WAIT_S))
    assert answers > 10
    assert engine.alive == 0
    for fate in ("ended", "INVALID_INPUT", "PROTOCOL_ERROR", "UNAVAILABLE"):
        assert fates[fate] > 10, fates


@pytest.mark.usefixtures("bounded_memory")
def test_hostile_streams_over_grpc() -> None:
    engine = FakeEngine(1, exits=(2,))
    expected = engine.answer(encode(Prompt(HONEST.text)), GREEDY, HONEST.max_tokens)
    attacker, fates = Attacker(4), Counter[str]()
    stop = threading.Event()
    answers: list[tuple[int, ...]] = []

    def honest(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            while not stop.is_set():
                client = RawClient(channel)
                tokens: tuple[int, ...] = ()
                client.send(HONEST, Draft(0, 0, (), autoregressive_rounds=23))
                for reply in client.replies:
                    said = codec.decode_server(reply)
                    if isinstance(said, Verdict):
                        tokens += said.tokens
                        if said.finished:
                            client.half_close()
                answers.append(tokens)

    with start_server(HARSH, as_engine(engine), encode) as server:
        calm = threading.Thread(target=honest, args=(server.port,))
        calm.start()
        sent = 0
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            session = channel.stream_stream(codec.SESSION)
            while sent < OVER_GRPC:
                burst = [pb.ClientMessage(open=attacker.open()).SerializeToString()]
                burst += [
                    attacker.message(i, i) for i in range(attacker.random.choice((2, 20, 60)))
                ]
                sent += len(burst)
                hang = attacker.random.random() < 0.02
                call = session(open_end(burst) if hang else iter(burst), timeout=WAIT_S)
                try:
                    messages = [codec.decode_server(reply) for reply in call]
                    last = messages[-1] if messages else None
                    if isinstance(last, Failure):
                        fates[code_of(last)] += 1
                except grpc.RpcError as error:  # gRPC itself may refuse a flood of streams
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
        stop.set()
        calm.join(WAIT_S)
        assert not calm.is_alive()
    assert engine.alive == 0
    assert len(answers) > 10
    assert set(answers) == {expected}
    assert min(fates[k] for k in ("INVALID_INPUT", "PROTOCOL_ERROR")) > 5, fates


def open_end(messages: list[bytes]) -> Iterator[bytes]:
    """``messages``, and then the sending side stays open until the call is over."""
    yield from messages
    threading.Event().wait(2.0)


def test_what_one_client_can_make_the_verifier_keep_is_bounded() -> None:
    """The largest drafts, as many ahead as there may be."""
    entries = codec.MAX_SUPPORT
    big = pb.Distributions(
        sizes=[entries] * codec.MAX_DRAFT,
        gaps=([0] + [1] * (entries - 1)) * codec.MAX_DRAFT,
        probs=struct.pack("<e", 0.5) * (entries * codec.MAX_DRAFT),
    )
    sampling = Sampling(temperature=1.0, top_p=1.0, law="rejection")
    opened = read(pb.ClientMessage(open=pb.Open(text="go", sampling=sampling, max_tokens=20_000)))
    assert isinstance(opened, Open)
    session = VerifierSession(opened, eos=frozenset(), vocab_size=2 * entries)
    kept = 0
    draft = pb.Draft(after=[5], probs=big, tokens=[5] * codec.MAX_DRAFT)
    with contextlib.suppress(ProtocolError):
        for round_ in range(1, 1000):
            draft.round = draft.start = round_
            message = read(pb.ClientMessage(draft=draft))
            assert isinstance(message, Draft)
            session.offer(message)
            kept += sum(q.ids.nbytes + q.probs.nbytes for q in message.probs or ())
    assert 0 < kept <= 8 * MAX_AHEAD_ENTRIES


def read(message: pb.ClientMessage) -> ClientMessage:
    """Return ``message`` as the server decodes it."""
    return codec.decode_client(message.SerializeToString())
