"""Memory that is short: whom it ends, what a session takes, and when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from collab_llm_lab.random_models import write_random_model
from collab_llm_nodes.engine import cache, onednn
from collab_llm_nodes.engine.backend import AfterLayer, Rows
from collab_llm_nodes.engine.cache import BLOCK, StaticCache
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.engine.static import Plan, StaticBackend
from collab_llm_nodes.errors import Cancelled, Unavailable
from collab_llm_nodes.models.loading import TargetConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt

NO_PROMPT = EncodedPrompt(())


def lack() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny_model("llama", exit_layers=(2,)))


def fed(engine: Engine, count: int) -> list[Session]:
    sessions = [engine.open(NO_PROMPT) for _ in range(count)]
    for number, session in enumerate(sessions):
        session.feed([3, 4, 5 + number], last=0)
    return sessions


def alone(engine: Engine, number: int, new: list[int]) -> torch.Tensor:
    return engine.open(NO_PROMPT).feed([3, 4, 5 + number, *new], last=1)


@pytest.mark.parametrize("poor", [0, 2, 4])
def test_a_cache_that_cannot_grow_ends_its_own_session_only(
    engine: Engine, poor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = fed(engine, 5)
    failing, reserve = sessions[poor]._cache, StaticCache.reserve

    def reserves(self: StaticCache, columns: int) -> None:
        if self is failing:
            raise lack()
        reserve(self, columns)

    with monkeypatch.context() as patch:
        patch.setattr(StaticCache, "reserve", reserves)
        results = engine.run([Feed(session, [8, 9], last=1) for session in sessions])
    for number, (session, result) in enumerate(zip(sessions, results, strict=True)):
        if number == poor:
            assert isinstance(result, Unavailable)
            assert result.field == "session"
            assert result.remedy
            assert "2.00 GiB" in str(result)
            assert session.length == 3
            result = session.feed([8, 9], last=1)  # later, when there is memory again
        assert isinstance(result, torch.Tensor)
        torch.testing.assert_close(result, alone(engine, number, [8, 9]), atol=5e-5, rtol=1e-4)


def test_a_pass_too_large_for_the_memory_is_divided(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = fed(engine, 5)
    hidden, passes = StaticBackend.hidden, list[int]()
    held: list[weakref.ref[torch.Tensor]] = []  # what failed passes have computed

    def short(
        self: StaticBackend, plan: Plan, rows: Rows, after: AfterLayer | None
    ) -> torch.Tensor:
        assert all(ref() is None for ref in held), "a failed pass still holds its memory"
        if len(plan.chunks) > 2:
            held.append(weakref.ref(rows.embedded))
            raise lack()
        passes.append(len(plan.chunks))
        return hidden(self, plan, rows, after)

    shown: list[int] = []

    def on_exit(number: int) -> Callable[[int, torch.Tensor], None]:
        return lambda layer, logits: shown.append(number)

    monkeypatch.setattr(StaticBackend, "hidden", short)
    feeds = [Feed(s, [8, 9], on_exit(i), last=1) for i, s in enumerate(sessions)]
    results = engine.run(feeds)
    assert passes == [2, 1, 2]
    assert sorted(shown) == [0, 1, 2, 3, 4]
    for number, result in enumerate(results):
        assert isinstance(result, torch.Tensor)
        torch.testing.assert_close(result, alone(engine, number, [8, 9]), atol=5e-5, rtol=1e-4)


def test_nodes_of_a_tree_survive_a_pass_without_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = fed(engine, 2)
    session.grow([6], [2])

    def fails(self: StaticBackend, plan: Plan, x: torch.Tensor, after: object) -> torch.Tensor:
        raise lack()

    with monkeypatch.context() as patch:
        patch.setattr(StaticBackend, "hidden", fails)
        for result in engine.run([Feed(session, [7], parents=[3]), Feed(other, [7])]):
            assert isinstance(result, Unavailable)
    assert (session.columns, other.columns) == (4, 3)
    found = session.grow([7], [3])
    torch.testing.assert_close(found, alone(engine, 0, [6, 7]), atol=5e-5, rtol=1e-4)


def test_other_errors_of_the_device_end_the_pass(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: StaticBackend, plan: Plan, x: torch.Tensor, after: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(StaticBackend, "hidden", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.run([Feed(engine.open(NO_PROMPT), [8]) for _ in range(2)])


def test_a_session_whose_length_is_known_gets_its_memory_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    resized = cache._resized

    def noted(columns: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
        made.append(capacity)
        return resized(columns, used, capacity)

    monkeypatch.setattr(cache, "_resized", noted)
    length = 3 * BLOCK - 5
    session = engine.open(NO_PROMPT, length)
    assert session.own_bytes == 0, "nothing is computed or held before the first feed"
    for _ in range(0, length - 40, 35):
        session.feed([7] * 35, last=0)
    assert made == [3 * BLOCK]
    session.length = 20  # a rollback gives nothing back that is wanted again
    session.feed([7] * 35, last=0)
    assert made == [3 * BLOCK]
    assert session.own_bytes == engine.cache_bytes(length)
    session.close()
    assert session.own_bytes == 0
    made.clear()
    grown = engine.open(NO_PROMPT)
    for _ in range(0, length - 40, 35):
        grown.feed([7] * 35, last=0)
    assert made == [BLOCK, 2 * BLOCK, 3 * BLOCK]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen2_vl", "opt"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_warm_engine_holds_nothing(architecture: str, eager: bool) -> None:
    engine = Engine(tiny_model(architecture, exit_layers=(1,)), eager=eager)
    engine.warm_up()
    assert 0 < engine.cache_room(rows=64, logits=8, pixels=0) < float("inf")
    session = engine.open(NO_PROMPT)
    again = engine.open(NO_PROMPT)
    assert session.feed([5, 6]).equal(again.feed([5, 6]))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_a_warm_engine_has_the_kernels_for_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onednn, "mkl_is_faster", lambda: False)
    monkeypatch.setattr(onednn, "WORK", 0)
    # Of sizes that no other test has met: all engines of a process share the kernels.
    folder = write_random_model(tmp_path / "model", "llama", hidden_size=48)
    engine = Engine(load(TargetConfig(path=str(folder))))

    def made(work: Callable[[], object]) -> int:
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
            work()
        return sum("create:cache_miss" in line for line in capfd.readouterr().out.splitlines())

    def feed(rows: int) -> None:
        engine.open(NO_PROMPT).feed([7] * rows)

    assert made(partial(feed, onednn.FEW + 1))
    assert made(engine.warm_up)
    for rows in range(1, onednn.FEW + 1):
        assert not made(partial(feed, rows)), rows


def test_a_client_that_leaves_keeps_nothing_of_the_pass_alive(engine: Engine) -> None:
    """A pass for which there is no memory is tried again at once, without garbage in the way."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def gone(layer: int, logits: torch.Tensor) -> None:
        seen.append(weakref.ref(logits))
        raise Cancelled("the client is gone")

    gc.disable()
    try:
        first, second = (engine.open(NO_PROMPT) for _ in range(2))
        results = engine.run([Feed(first, [3, 4], gone), Feed(second, [3, 4])])
        assert isinstance(results[0], Cancelled)
        assert seen
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()
