"""The backend of GPUs on a CPU: the answers of the other backends, whatever else is in a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_stories import STORIES, compare, forks, opened, results_of, together, trees, words
from tiny_models import WINDOWED, tiny_model
from torch import Tensor

from collab_llm_nodes.engine.cuda import BUCKETS, CudaBackend
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.graphs import Recorder
from collab_llm_nodes.engine.paged_kernels import REFERENCE, Activation
from collab_llm_nodes.engine.paging import PAGE
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.engine.static import StaticBackend
from collab_llm_nodes.errors import Unavailable
from collab_llm_nodes.models.architectures import ARCHITECTURES
from collab_llm_nodes.models.prompt import EncodedPrompt

FOLLOWED = tuple(name for name in ARCHITECTURES if name != "opt")
CLOSE = 5e-5, 1e-4  # absolute and relative, in float32


def paged(
    architecture: str, *, captured: bool = False, exit_layers: tuple[int, ...] = ()
) -> Engine:
    """Return an engine over pages; with ``captured``, small passes run as from graphs."""
    engine = Engine(tiny_model(architecture, exit_layers=exit_layers), paged=True)
    backend = engine._backend
    assert isinstance(backend, CudaBackend)
    if captured:
        backend.capture()
        assert len(backend._graphs) == len(BUCKETS)
        assert all(graph.reads(backend._pool) for graph in backend._graphs)
    return engine


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen2_vl", "qwen3_vl"])
def test_answers_are_those_of_the_static_backend(
    architecture: str,
    captured: bool,
    story: Callable[[Engine, Path], list[Tensor]],
    tmp_path: Path,
) -> None:
    loaded = tiny_model(architecture, exit_layers=(1, 3))
    expected = story(Engine(loaded), tmp_path)
    engine = paged(architecture, captured=captured, exit_layers=(1, 3))
    compare(story(engine, tmp_path), expected, *CLOSE)


@pytest.mark.parametrize("story", [trees, forks, together])
@pytest.mark.parametrize("architecture", FOLLOWED)
def test_every_architecture_is_followed(
    architecture: str, story: Callable[[Engine, Path], list[Tensor]], tmp_path: Path
) -> None:
    expected = story(Engine(tiny_model(architecture)), tmp_path)
    compare(story(paged(architecture, captured=True), tmp_path), expected, *CLOSE)


def test_another_form_of_layers_is_left_to_the_static_backend() -> None:
    assert isinstance(Engine(tiny_model("opt"), paged=True)._backend, StaticBackend)


@pytest.mark.parametrize("architecture", ["llama", *WINDOWED])
def test_a_rows_result_does_not_depend_on_the_others_of_its_bucket(architecture: str) -> None:
    """To the last bit: alone, or beside others in any order, and after any rollback."""
    engine = paged(architecture, captured=True)
    sessions = [opened(engine, seed, 30 + 70 * seed) for seed in range(5)]
    feeds = [Feed(session, words(3, seed)) for seed, session in enumerate(sessions)]

    def again(chosen: list[Feed[Session]]) -> list[Tensor]:
        found = results_of(engine, chosen)
        for feed in chosen:
            feed.session.length -= len(feed.ids)
        return found

    in_batch = again(feeds)
    backwards = again(feeds[::-1])[::-1]
    fill = [Feed(opened(engine, 9, 200), words(12))]
    beside_another = [again([feed, *fill])[0] for feed in feeds]
    for each in (backwards, beside_another):
        for own, expected in zip(each, in_batch, strict=True):
            assert torch.equal(own, expected)


@pytest.mark.parametrize("captured", [False, True])
def test_exits_fire_once_each(captured: bool) -> None:
    engine = paged("qwen2", captured=captured, exit_layers=(1, 3))
    fired: list[int] = []
    opened(engine).feed(words(4), lambda layer, logits: fired.append(layer))
    assert fired == [1, 3]


def test_a_pass_that_no_graph_has_room_for_is_launched() -> None:
    engine = paged("llama", captured=True)
    backend = engine._backend
    assert isinstance(backend, CudaBackend)
    replayed: list[int] = []

    def noting(rows: int, plain: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            replayed.append(rows)
            plain()

        return run

    for graph in backend._graphs:
        graph.segments[0] = noting(graph.layout.rows, graph.segments[0])
    session = engine.open(EncodedPrompt(()))
    for new, used in ((5, [8]), (60, [64]), (65, []), (9, [16])):
        replayed.clear()
        session.feed(words(new), last=1)
        assert replayed == used, new


def test_passes_are_captured_again_when_pages_have_moved() -> None:
    engine = paged("llama", captured=True)
    backend = engine._backend
    assert isinstance(backend, CudaBackend)
    session = opened(engine)
    before, graphs = session.feed(words(5)), backend._graphs
    backend._pool.grow(4 * backend._pool.pages)
    session.length -= 5
    compare([session.feed(words(5))], [before], *CLOSE)
    assert backend._graphs != graphs
    assert all(graph.reads(backend._pool) for graph in backend._graphs)


def test_passes_are_captured_again_when_the_last_pages_have_been_taken() -> None:
    """The pass that checks the graphs has a page of its own."""
    engine = paged("llama", captured=True)
    backend = engine._backend
    assert isinstance(backend, CudaBackend)
    pool = backend._pool
    pool.limit = 2 * pool.pages
    backend.new_cache().reserve(0, PAGE)
    hoard = backend.new_cache()
    hoard.reserve(0, PAGE * (pool.limit - 2))
    session = opened(engine)
    assert pool.free == 0
    session.feed(words(2))
    assert len(backend._graphs) == len(BUCKETS)
    assert backend._graphs[0].reads(pool)


def test_a_failed_check_of_the_graphs_leaves_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Recorder, "record", lambda self, run: lambda: None)
    engine = Engine(tiny_model("llama"), paged=True)
    engine.warm_up()
    assert isinstance(engine._backend, CudaBackend)
    assert engine._backend._graphs == []
    assert "a replayed pass gives other logits" in caplog.text


def test_the_last_layer_computes_wanted_rows_only() -> None:
    engine = paged("qwen2_vl")
    backend = engine._backend
    assert isinstance(backend, CudaBackend)
    rows: list[int] = []

    def gate(x: Tensor, activation: Activation) -> Tensor:
        rows.append(len(x))
        return REFERENCE.gate(x, activation)

    backend._kernels = replace(REFERENCE, gate=gate)
    session = engine.open(EncodedPrompt(()))
    session.feed(words(200), last=3)
    session.feed(words(100), last=0)
    before = engine.num_layers - 1
    assert rows == [*[200] * before, BUCKETS[0], *[104] * before, 0]


def test_out_of_pages_ends_the_session_that_asks() -> None:
    """In mid-answer: the others go on, and so does it when one of them has ended."""
    engine = paged("llama")
    sessions = [opened(engine, seed, PAGE - 2) for seed in range(3)]
    expected = [session.fork().feed(words(5)) for session in sessions]
    backend = engine._backend
    assert isinstance(backend, CudaBackend)
    backend._pool.limit = backend._pool.pages
    hoard = backend.new_cache()
    hoard.reserve(0, PAGE * (backend._pool.free - 2))
    results = engine.run([Feed(session, words(5)) for session in sessions])
    refused = [i for i, result in enumerate(results) if isinstance(result, Exception)]
    assert len(refused) == 1
    (late,) = refused
    assert isinstance(results[late], Unavailable)
    assert "pages" in str(results[late])
    assert sessions[late].length == PAGE - 2
    hoard.cut(0)
    found = [sessions[late].feed(words(5)) if i == late else r for i, r in enumerate(results)]
    compare([x for x in found if isinstance(x, Tensor)], expected, *CLOSE)


def test_admission_counts_pages() -> None:
    engine = paged("llama")
    backend = engine._backend
    assert isinstance(backend, CudaBackend)
    assert engine.cache_bytes(1) == engine.cache_bytes(PAGE) == backend._pool.page_bytes
    room = engine.cache_room(rows=16, logits=16, pixels=0)
    assert room == backend._pool.limit * backend._pool.page_bytes  # type: ignore[operator]


def test_sessions_of_several_threads_share_the_pool() -> None:
    """Each drives its own; the pool grows under all of them."""
    engine = paged("llama")
    found: dict[int, Tensor] = {}

    def run(seed: int) -> None:
        session = opened(engine, seed, 40)
        for _ in range(4):
            session.feed(words(60, seed))
        found[seed] = session.feed(words(5, seed))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    alone = Engine(tiny_model("llama"))
    for seed in range(4):
        session = opened(alone, seed, 40)
        for _ in range(4):
            session.feed(words(60, seed))
        compare([found[seed]], [session.feed(words(5, seed))], *CLOSE)
