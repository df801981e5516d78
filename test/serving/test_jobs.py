"""The compute thread serves any job: plain generation shares its passes, beside verification."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_models import VOCABULARY, FakeEngine, as_engine, encode
from torch import Tensor

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.session import Feed, OnExit
from collab_llm_nodes.errors import CollabError, InvalidInput
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open, Opened, Verdict
from collab_llm_nodes.protocols.edge_cloud.target import TargetSession
from collab_llm_nodes.serving.compute import Compute, Judge
from collab_llm_nodes.serving.scheduler import BatchConfig

WAIT_S = 30.0
GREEDY = SamplingConfig()


class Generation:
    """Plain greedy generation: each work is a number of tokens, told when all of them are there."""

    def __init__(self, engine: FakeEngine, text: str, max_tokens: int) -> None:
        self._prompt = encode(Prompt(text)).ids
        self._session = as_engine(engine).open(encode(Prompt(text)))
        self._max_tokens = max_tokens
        self.most_tokens = len(self._prompt) + max_tokens
        self._tokens: list[int] = []
        self._wanted: list[int] = []  # tokens of each round that was asked for
        self._round: list[int] = []
        self._running = False

    @property
    def unread(self) -> int:
        return max(0, len(self._prompt) - 1 - self._session.length)

    @property
    def due(self) -> bool:
        return bool(self._wanted) and not self._running and not self.finished

    @property
    def finished(self) -> bool:
        return len(self._tokens) >= self._max_tokens

    def read_on(self, count: int) -> Feed:
        start = self._session.length
        return Feed(self._session, self._prompt[start : start + count], last=0)

    def opened(self, client_id: str) -> str:
        return f"{client_id} is read"

    def offer(self, work: int) -> bool:
        if work < 1:
            raise InvalidInput(f"{work} tokens", field="count", remedy="ask for one at least")
        self._wanted.append(work)
        return True

    def begin(self, on_exit: OnExit) -> Feed:
        self._running = True
        last = self._tokens[-1] if self._tokens else self._prompt[-1]
        return Feed(self._session, (last,))

    def conclude(self, logits: Tensor, compute_s: float, queue_s: float, finding: Any) -> list[int]:
        self._running = False
        token = int(logits[-1].argmax()) if finding is None else finding
        self._tokens.append(token)
        self._round.append(token)
        self._wanted[0] -= 1
        told = list(self._round) if not self._wanted[0] or self.finished else []
        if not self._wanted[0]:
            self._wanted.pop(0)
            self._round.clear()
        return told

    def close(self) -> None:
        self._session.close()


class Together(Judge):
    """Finds the token of every job of a pass, and writes down how many there were."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.counted: list[int] = []

    def find(self, results: Sequence[tuple[Generation, Tensor]]) -> list[int]:
        self.found.append(len(results))
        return [int(logits[-1].argmax()) for _, logits in results]

    def count(self, concluded: Sequence[list[int]]) -> None:
        self.counted.append(len(concluded))


class Caller:
    """A client in this thread."""

    owner = ""
    urgent = False

    def __init__(self, name: str) -> None:
        self.id = name
        self.gone = threading.Event()
        self._posted: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def post(self, message: Any, more: bool = False) -> None:
        self._posted.put(message)

    def next(self) -> Any:
        return self._posted.get(timeout=WAIT_S)

    def tokens(self, count: int) -> list[int]:
        """Return the next round's; turns in the midst of it tell of none."""
        while not (told := self.next()):
            assert told == []
        assert len(told) == count
        return list(told)


class Held(FakeEngine):
    """Waits at the start of each pass until it may begin; writes down the sizes of the feeds."""

    def __init__(self) -> None:
        super().__init__(1)
        self.begin = threading.Event()
        self.begin.set()
        self.entered = threading.Event()
        self.sizes: list[tuple[int, ...]] = []

    def run(self, feeds: Sequence[Feed], **exits: Any) -> list[Tensor | Exception]:
        self.entered.set()
        assert self.begin.wait(WAIT_S)
        self.sizes.append(tuple(len(feed.ids) for feed in feeds))
        return super().run(feeds, **exits)


def reference(engine: FakeEngine, text: str, count: int) -> list[int]:
    """Return what the model alone says; the fake's end token ends nothing here."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(engine.logits((*encode(Prompt(text)).ids, *tokens)).argmax()))
    return tokens


@pytest.mark.parametrize("judge", [None, Together()], ids=["each alone", "together"])
def test_plain_generation_shares_passes(judge: Together | None) -> None:
    engine = Held()
    compute = Compute(as_engine(engine), batch=BatchConfig(), max_sessions=4, judge=judge)
    texts = ("go", "turn", "stop")
    callers = [Caller(text) for text in texts]
    for caller in callers:
        compute.open(caller, Generation(engine, caller.id, 7))
        assert caller.next() == f"{caller.id} is read"
    engine.sizes.clear()
    engine.begin.clear()
    engine.entered.clear()
    compute.submit(callers[0], 3)
    assert engine.entered.wait(WAIT_S)  # the others come while the first one's pass runs
    for caller in callers[1:]:
        compute.submit(caller, 3)
    engine.begin.set()
    told = [caller.tokens(3) for caller in callers]
    for caller in callers:
        compute.submit(caller, 4)
    told = [first + caller.tokens(4) for first, caller in zip(told, callers, strict=True)]
    assert told == [reference(engine, text, 7) for text in texts]
    assert max(map(len, engine.sizes)) == 3, "nobody shared a pass"
    assert engine.alive == 0, "whoever is finished gives the cache back"
    assert compute.stop(WAIT_S)
    if judge is not None:
        assert sum(judge.found) == sum(judge.counted) == 3 * 7
        assert max(judge.found) == 3


def test_two_kinds_of_jobs_share_one_pass() -> None:
    """A judge that leaves everything to the jobs serves whatever they are."""
    engine = Held()
    compute = Compute(as_engine(engine), batch=BatchConfig(), max_sessions=4)
    writer, robot, filler = Caller("go"), Caller("turn"), Caller("stop")
    opened = Open("turn", (), GREEDY, 24, VOCABULARY)
    compute.open(writer, Generation(engine, "go", 1))
    compute.open(robot, TargetSession(as_engine(engine), encode(Prompt("turn")), opened))
    compute.open(filler, Generation(engine, "stop", 1))
    assert writer.next() == "go is read"
    assert isinstance(robot.next(), Opened)
    assert filler.next() == "stop is read"
    engine.begin.clear()
    engine.entered.clear()
    compute.submit(filler, 1)
    assert engine.entered.wait(WAIT_S)
    compute.submit(writer, 1)
    compute.submit(robot, Draft(0, 0, (5, 6)))
    engine.begin.set()
    assert writer.tokens(1) == reference(engine, "go", 1)
    verdict = robot.next()
    assert isinstance(verdict, Verdict)
    own = engine.answer(encode(Prompt("turn")), GREEDY, len(verdict.tokens))
    assert verdict.tokens == own
    assert engine.sizes[-1] == (1, 3), "they took part in one pass"
    assert compute.stop(WAIT_S)


def test_work_that_a_job_refuses_ends_that_job_only() -> None:
    engine = FakeEngine(1)
    compute = Compute(as_engine(engine), batch=BatchConfig(), max_sessions=2, name="toy")
    good, bad = Caller("good"), Caller("bad")
    for caller in (good, bad):
        compute.open(caller, Generation(engine, caller.id, 2))
        assert caller.next() == f"{caller.id} is read"
    compute.submit(bad, 0)
    refused = bad.next()
    assert isinstance(refused, CollabError)
    assert (refused.code, refused.field) == (InvalidInput.code, "count")
    compute.submit(good, 2)
    assert good.tokens(2) == reference(engine, "good", 2)
    assert compute.stop(WAIT_S)


class Measured(FakeEngine):
    """Its caches take ten bytes a token, and there are 200 bytes."""

    context = 20

    def cache_bytes(self, tokens: int) -> int:
        return 10 * tokens

    def cache_room(self, *, rows: int, logits: int, pixels: int, share: float = 1.0) -> float:
        return 200.0


def test_caches_are_lent_by_their_bytes() -> None:
    engine = Measured(1)
    patience = BatchConfig(evict_idle_s=60.0, slot_wait_s=60.0)
    compute = Compute(as_engine(engine), batch=patience, max_sessions=8, name="toy")
    tokens = len(encode(Prompt("first")).ids) + 2  # 9
    first, second, third, huge = (Caller(name) for name in ("first", "second", "third", "huge"))
    for caller in (first, second):
        compute.open(caller, Generation(engine, caller.id, 2))
        assert caller.next() == f"{caller.id} is read"
    compute.open(third, Generation(engine, "third", 2))
    compute.open(huge, Generation(engine, "huge", 100))
    refused = huge.next()
    assert isinstance(refused, InvalidInput)
    assert refused.field == "max_tokens"
    assert refused.remedy
    assert 2 * 10 * tokens <= 200 < 3 * 10 * tokens
    compute.submit(first, 2)
    assert first.tokens(2) == reference(engine, "first", 2)  # and third still waits
    compute.leave(first)
    assert third.next() == "third is read", "the first one has ended"
    assert compute.stop(WAIT_S)


def test_an_engine_that_cannot_begin_is_a_failure_of_the_server() -> None:
    class Cold(FakeEngine):
        def warm_up(self, on_exit: OnExit) -> None:
            raise RuntimeError("CUDA error: no kernel image is available")

    failed = threading.Event()
    engine = Cold(1)
    compute = Compute(
        as_engine(engine), batch=BatchConfig(), max_sessions=2, on_failure=failed.set, name="toy"
    )
    assert failed.wait(WAIT_S)
    caller = Caller("late")
    compute.open(caller, Generation(engine, "late", 2))
    assert caller.next().code == "UNAVAILABLE"
    assert compute.stop(WAIT_S)


def test_a_lost_device_is_a_failure_of_the_server() -> None:
    """In mid-answer: a supervisor starts the process again, and clients know that they may."""

    class Lost(FakeEngine):
        def run(self, feeds: Any, **options: Any) -> Any:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    failed = threading.Event()
    engine = Lost(1)
    compute = Compute(
        as_engine(engine), batch=BatchConfig(), max_sessions=2, on_failure=failed.set, name="toy"
    )
    caller = Caller("first")
    compute.open(caller, Generation(engine, "first", 2))
    assert failed.wait(WAIT_S)
    assert caller.next().code == "UNAVAILABLE"
    assert compute.stop(WAIT_S)


def test_a_server_without_room_for_a_session_does_not_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(Measured):
        def cache_room(self, *, rows: int, logits: int, pixels: int, share: float = 1.0) -> float:
            return 199.0

    failed = threading.Event()
    engine = as_engine(Full(1))
    compute = Compute(engine, batch=BatchConfig(), max_sessions=2, on_failure=failed.set)
    assert failed.wait(WAIT_S)
    assert "left for KV caches" in caplog.text
    assert "batch.max_batch" in caplog.text
    assert compute.stop(WAIT_S)
