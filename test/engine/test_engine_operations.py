"""Any sequence of operations on sessions equals fresh sessions that were fed the same tokens."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import alone, near, opened
from tiny_models import tiny_model
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from collab_llm_nodes.engine import attention, cache
from collab_llm_nodes.engine.backend import Chunk
from collab_llm_nodes.engine.cache import Part, StaticCache
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.engine.static import StaticBackend, _Layer
from collab_llm_nodes.errors import Cancelled, ProtocolError
from collab_llm_nodes.models.architectures import ARCHITECTURES, decoder_parts
from collab_llm_nodes.models.prompt import EncodedPrompt


@pytest.fixture(params=[1 << 20, 1 << 13, 0], ids=["gathered", "forks together", "in place"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny sessions share parts as long ones do, gathered or in place, in groups of a few."""
    monkeypatch.setattr(cache, "BLOCK", 4)
    monkeypatch.setattr(attention, "GATHERED", request.param)
    monkeypatch.setattr(attention, "TOGETHER", 1 << 16)


# ---------------------------------------------------------------- all operations, any order


@dataclass
class Model:
    """The content that a session must have: tokens after the prompt, and the path of each node."""

    session: Session
    trunk: list[int] = field(default_factory=list)
    nodes: dict[int, list[int]] = field(default_factory=dict)  # by column


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2_vl", "llama"])
def test_any_sequence_of_operations_equals_fresh_sessions(
    architecture: str, eager: bool, tmp_path: Path
) -> None:
    engine = Engine(tiny_model(architecture), eager=eager)
    tokens = st.integers(0, engine.vocab_size - 1)
    file = tmp_path / "session.safetensors"

    @settings(max_examples=12)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        session, prompt = opened(engine)
        session.feed(prompt.ids, last=0)
        n, held = len(prompt.ids), [Model(session)]
        actions = ["feed", "grow", "pass", "roll back", "retain", "fork", "restore", "close"]
        for _ in range(data.draw(st.integers(1, 8), label="steps")):
            action = data.draw(st.sampled_from(actions), label="action")
            model = data.draw(st.sampled_from(held), label="session")
            if action in ("feed", "grow", "pass"):
                chosen = held if action == "pass" else [model]
                kinds = {"feed": [False], "grow": [True]}.get(action, [False, True])
                feeds, expected = [], []
                for one in chosen:
                    ids = data.draw(st.lists(tokens, min_size=1, max_size=4), label="ids")
                    if not data.draw(st.sampled_from(kinds), label="as a tree"):
                        one.trunk, one.nodes = [*one.trunk, *ids], {}
                        feeds.append(Feed(one.session, ids))
                        expected.append(one.trunk)
                        continue
                    parents, first = [], one.session.columns
                    for i, token in enumerate(ids):
                        trunk = range(n - 1, one.session.length)
                        parent = data.draw(st.sampled_from([*trunk, *one.nodes]), label="parent")
                        parents.append(parent)
                        path = one.nodes.get(parent, one.trunk[: max(0, parent - n + 1)])
                        one.nodes[first + i] = [*path, token]
                    feeds.append(Feed(one.session, ids, parents=parents))
                    expected.append(one.nodes[first + len(ids) - 1])
                for result, path in zip(engine.run(feeds), expected, strict=True):
                    assert isinstance(result, torch.Tensor), result
                    near(result[-1], alone(engine, prompt, path))
            elif action == "roll back":
                kept = data.draw(st.integers(0, len(model.trunk)), label="kept")
                model.session.length = n + kept
                model.trunk, model.nodes = model.trunk[:kept], {}
            elif action == "retain" and model.nodes:
                column = data.draw(st.sampled_from(sorted(model.nodes)), label="column")
                moved = model.session.retain(column)
                model.trunk = model.nodes[column]
                model.nodes = {
                    moved[c]: path
                    for c, path in model.nodes.items()
                    if c in moved and moved[c] >= model.session.length
                }
            elif action == "fork":
                held.append(Model(model.session.fork(), list(model.trunk)))
            elif action == "restore":
                model.session.save(file)
                held.append(Model(engine.restore(file), list(model.trunk)))
            elif action == "close" and len(held) > 1:
                held.remove(model)
                model.session.close()
            for one in held:
                assert one.session.length == n + len(one.trunk)
        for one in held:  # the caches hold what they should
            near(one.session.feed([7])[0], alone(engine, prompt, [*one.trunk, 7]))

    check()


# ---------------------------------------------------------------- forks


def test_a_shared_prefix_is_held_once_until_its_last_session_is_closed() -> None:
    engine = Engine(tiny_model("llama"))
    session, prompt = opened(engine)
    long = [*prompt.ids, *([7] * 300)]
    session.feed(long, last=0)
    alone_bytes = session.own_bytes
    assert session.shared_bytes == 0
    forks = [session.fork() for _ in range(8)]
    assert isinstance(session._cache, StaticCache)
    column = session._cache.column_bytes
    assert {s.shared_bytes for s in (session, *forks)} == {alone_bytes}
    assert sum(s.own_bytes for s in (session, *forks)) == 0, "only what differs costs memory"
    for number, fork in enumerate(forks):
        near(fork.feed([number])[0], alone(engine, prompt, [*[7] * 300, number]))
        assert fork.own_bytes <= cache.BLOCK * column < alone_bytes
    grandchild = forks[3].fork()
    assert isinstance(forks[3]._cache, StaticCache)
    storage = weakref.ref(forks[3]._cache.shared[0].part.columns)
    for closed in (session, forks[0], *forks[4:], forks[3], forks[1], forks[2]):
        closed.close()
        assert closed.own_bytes == closed.shared_bytes == 0
        near(grandchild.feed([9])[0], alone(engine, prompt, [*[7] * 300, 3, 9]))
        grandchild.length -= 1
    assert storage() is not None
    grandchild.close()
    gc.collect()
    assert storage() is None


class Reads(TorchDispatchMode):
    """Counts the products with columns of one part, by their number of rows."""

    def __init__(self, part: torch.Tensor) -> None:
        super().__init__()
        self._place = part.untyped_storage().data_ptr()
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::bmm", "aten::baddbmm"):
            rows, columns = args[-2:]
            if columns.untyped_storage().data_ptr() == self._place:
                self.rows[rows.shape[1]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["llama", "qwen2_vl", "opt"])  # shared heads, and not
def test_forks_read_their_common_prefix_once(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_model(architecture))
    session, prompt = opened(engine)
    n = len(prompt.ids)
    session.feed([*prompt.ids, *([7] * 200)], last=0)
    forks = [session.fork() for _ in range(4)]
    assert isinstance(session._cache, StaticCache)
    monkeypatch.setattr(attention, "GATHERED", 20 * session._cache.column_bytes)
    for number, fork in enumerate(forks):
        fork.feed([8] * number)
    ends = [[7] * 200 + [8] * number for number in range(4)]
    feeds = [
        Feed(session, [10]),
        Feed(forks[0], [11, 12]),
        Feed(forks[1], [13], parents=[n + 99]),
        Feed(forks[2], [14, 15], parents=[n + 201, n + 49]),  # they hide parts of the prefix
        Feed(forks[3], [16] * 20),  # too many to attend with others
    ]
    paths = [[7] * 200 + [10], ends[0] + [11, 12], [7] * 100 + [13], [7] * 50 + [15]]
    share = session._cache.shared[0].part.columns
    with Reads(share) as seen:
        results = engine.run(feeds)
    query, keys = engine._backend._heads.query, engine._backend._heads.key  # type: ignore[attr-defined]
    together = 4 * 2 * query // keys  # chunks, slots of each
    assert seen.rows == {together: 2 * engine.num_layers}, "keys and values, once in each layer"
    for result, path in zip(results, [*paths, ends[3] + [16] * 20], strict=True):
        assert isinstance(result, torch.Tensor), result
        near(result[-1], alone(engine, prompt, path))
    assert isinstance(results[3], torch.Tensor)
    near(results[3][0], alone(engine, prompt, [*ends[2], 14]))
    forks[2].retain(forks[2].columns - 1)
    results = engine.run([Feed(fork, [17]) for fork in forks])
    for result, path in zip(
        results, [paths[1], ends[1], paths[3], ends[3] + [16] * 20], strict=True
    ):
        assert isinstance(result, torch.Tensor), result
        near(result[0], alone(engine, prompt, [*path, 17]))


@pytest.mark.parametrize("forks", [True, False])
def test_sessions_beyond_a_limit_attend_in_place(
    forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_model("llama"))
    session, prompt = opened(engine)
    session.feed([*prompt.ids, *([7] * 200)], last=0)
    assert isinstance(session._cache, StaticCache)
    column = session._cache.column_bytes
    own = 5 if forks else session.length + 5
    monkeypatch.setattr(attention, "GATHERED", own * column)
    sessions = [session.fork() for _ in range(6)]
    for number, fork in enumerate(sessions):
        fork.feed([8, 8, 8, number], last=0)
    seen: list[tuple[int, int]] = []

    class Seen(attention.GatheredAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            seen.append((len(args[0]), self.bytes))

    monkeypatch.setattr(attention, "GatheredAttention", Seen)
    for room, expected in ((6, 6), (5, 5), (2, 2), (1, 0)):
        seen.clear()
        monkeypatch.setattr(attention, "TOGETHER", room * own * column)
        results = engine.run([Feed(s, [9]) for s in sessions])
        assert seen == ([(expected, expected * own * column)] if expected else [])
        for number, (one, result) in enumerate(zip(sessions, results, strict=True)):
            assert isinstance(result, torch.Tensor), result
            near(result[0], alone(engine, prompt, [*[7] * 200, 8, 8, 8, number, 9]))
            one.length -= 1


def test_scores_of_forks_must_fit_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = attention.Heads(query=6, key=2, dim=16)
    prefix = Part(torch.empty(1, 4, 5000, 16))
    chunks = [
        Chunk(StaticCache([prefix.share(5000)], torch.empty(1, 4, 8, 16)), 5000, 8, 0, None, 0)
        for _ in range(9)
    ]
    scores = 4 * 6 * 8 * 5008  # bytes: queries by columns, float32
    monkeypatch.setattr(attention, "TOGETHER", 7 * scores)
    for room, fitting in ((7 * scores, 7), (2 * 8 * 4 * 16 * 4, 2)):
        assert attention._fitting(chunks, room, heads, forks=True) == fitting


def held_bytes(*sessions: Session) -> int:
    """Bytes of all memory that the caches keep alive, each counted once."""
    found = {}
    for session in sessions:
        if isinstance(session._cache, StaticCache):
            parts = [share.part.columns for share in session._cache.shared]
            for tensor in (session._cache.own, *parts):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_rolling_back_returns_memory() -> None:
    engine = Engine(tiny_model("llama"))
    session, prompt = opened(engine)
    session.feed([*prompt.ids, *([7] * 400)], last=0)
    assert isinstance(session._cache, StaticCache)
    block = cache.BLOCK * session._cache.column_bytes
    assert session.length > 3 * cache.BLOCK
    assert held_bytes(session) == 4 * block
    session.length = 130
    assert held_bytes(session) == 4 * block, "half of it: few tokens must not cost a copy"
    session.length = 100
    assert held_bytes(session) == session.own_bytes == block
    kept = [*prompt.ids, *([7] * 400)][:100]
    near(session.feed([9])[0], engine.open(EncodedPrompt(())).feed([*kept, 9], last=1)[0])


def test_what_no_fork_reads_is_returned() -> None:
    engine = Engine(tiny_model("llama"))
    session, prompt = opened(engine)
    long = [*prompt.ids, *([7] * 400)]
    session.feed(long, last=0)
    assert isinstance(session._cache, StaticCache)
    block = cache.BLOCK * session._cache.column_bytes
    forks = [session.fork() for _ in range(4)]
    assert held_bytes(session, *forks) == 4 * block
    for fork, length in zip(forks, (20, 200, 120, 20), strict=True):
        fork.length = length
    assert held_bytes(session, *forks) == 4 * block, "one session still reads all of it"
    session.close()
    assert held_bytes(*forks) == 4 * block, "200 columns are in two of four blocks"
    forks[1].close()
    assert held_bytes(forks[0], *forks[2:]) == block, "held once, by whoever is left"
    for fork, length in ((forks[0], 20), (forks[2], 120), (forks[3], 20)):
        near(fork.feed([9])[0], engine.open(EncodedPrompt(())).feed([*long[:length], 9], last=1)[0])
    forks[2].length = 30
    grandchild = forks[2].fork()
    for fork in (forks[0], forks[2], forks[3]):
        fork.close()
        fork.close()  # twice is no mistake
    near(grandchild.feed([9])[0], engine.open(EncodedPrompt(())).feed([*long[:30], 9], last=1)[0])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])  # of a GPU, of a CPU
def test_a_rollback_needs_no_memory(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_model("llama"))
    session, prompt = opened(engine)
    session.feed([*prompt.ids, *([7] * 400)], last=0)
    whole = session.own_bytes

    def full(*_: object) -> torch.Tensor:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_resized", full)
        session.length = len(prompt.ids)
    assert (session.length, session.own_bytes) == (len(prompt.ids), whole)
    near(session.feed([9])[0], alone(engine, prompt, [9]))
    session.length = len(prompt.ids)
    assert session.own_bytes < whole


def test_forks_of_several_threads_give_back_what_none_reads() -> None:
    engine = Engine(tiny_model("llama"))
    session, prompt = opened(engine)
    session.feed([*prompt.ids, *([7] * 400)], last=0)
    forks = [session.fork() for _ in range(4)]
    session.close()

    def work(number: int) -> Session:
        fork = forks[number]
        for length in range(400, 40, -30):
            fork.length = length - number
            twin = fork.fork()
            fork.close()
            fork = twin
        near(fork.feed([9])[0], expected[number])
        return fork

    tokens = [*prompt.ids, *([7] * 400)]
    expected = [
        engine.open(EncodedPrompt(())).feed([*tokens[: 70 - n], 9], last=1)[0] for n in range(4)
    ]
    with ThreadPoolExecutor(4) as threads:
        last = list(threads.map(work, range(4)))
    assert isinstance(last[0]._cache, StaticCache)
    assert held_bytes(*last) <= (2 + 4) * cache.BLOCK * last[0]._cache.column_bytes, (
        "two blocks of the prefix, and one for what each fork has been fed"
    )


def test_a_fork_of_a_closed_session_is_refused() -> None:
    session, _ = opened(Engine(tiny_model("llama")))
    twin = session.fork()  # of an empty one: it starts at the prompt, too
    assert twin.length == 0
    session.close()
    with pytest.raises(ProtocolError, match="closed"):
        session.fork()


# ---------------------------------------------------------------- one pass


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_states_are_what_the_head_reads(architecture: str, eager: bool) -> None:
    engine = Engine(tiny_model(architecture), eager=eager)
    head = decoder_parts(engine.loaded.model).head
    sessions = [opened(engine, i) for i in range(3)]
    heard: list[list[torch.Tensor]] = [[], [], []]
    feeds = [
        Feed(session, prompt.ids, last=number, on_states=heard[number].append)
        for number, (session, prompt) in enumerate(sessions)
    ]
    for number, logits in enumerate(engine.run(feeds)):
        (states,) = heard[number]
        assert states.shape == (number, head.in_features)
        near(logits, head(states)[:, : engine.vocab_size])


def test_what_a_head_raises_ends_its_feed_only() -> None:
    engine = Engine(tiny_model("llama"))
    (a, prompt), (b, _) = (opened(engine) for _ in range(2))

    def fail(states: torch.Tensor) -> None:
        raise Cancelled("nobody wants it")

    results = engine.run([Feed(a, prompt.ids, on_states=fail), Feed(b, prompt.ids)])
    assert isinstance(results[0], Cancelled)
    assert (a.length, b.length) == (0, len(prompt.ids))
    near(a.feed(prompt.ids)[-1], alone(engine, prompt, []))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_pass_ended_between_layers_leaves_sessions_as_they_were(after: int, eager: bool) -> None:
    engine = Engine(tiny_model("qwen2"), eager=eager)
    sessions = [opened(engine, i) for i in range(2)]
    for session, prompt in sessions:
        session.feed([*prompt.ids, 20, 21, 22], last=0)
        session.grow([30, 31], [session.length - 1] * 2)
    (a, pa), (b, pb) = sessions
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == after:
            raise Cancelled("the caller went away")

    with pytest.raises(Cancelled):
        engine.run(
            [
                Feed(a, [40, 41], parents=[a.length, a.length + 1]),
                Feed(b, [40, 41], parents=[b.length, b.length]),
            ],
            check=check,
        )
    assert len(calls) == after
    for session, prompt in sessions:
        assert (session.length, session.columns) == (len(prompt.ids) + 3, len(prompt.ids) + 5)
        path = [20, 21, 22, 30, 50]
        near(session.grow([50], [session.length])[0], alone(engine, prompt, path))
    calls.clear()
    with pytest.raises(Cancelled):
        engine.run([Feed(a, [40, 41]), Feed(b, [40])], check=check)
    for session, prompt in sessions:
        assert session.length == len(prompt.ids) + 3
        near(session.feed([50])[0], alone(engine, prompt, [20, 21, 22, 50]))


@pytest.mark.parametrize("fails", [0, 1])
def test_a_pass_that_cannot_begin_leaves_sessions_as_they_were(
    fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_model("llama"))
    sessions = [opened(engine, i) for i in range(2)]
    for session, prompt in sessions:
        session.feed(prompt.ids, last=0)
    begin, failing = Session._begin, sessions[fails][0]

    def begins(self: Session, feed: Feed) -> Chunk:
        chunk = begin(self, feed)  # what it has done so far is undone, too
        if self is failing:
            raise RuntimeError("the device is gone")
        return chunk

    feeds = [Feed(s, [40, 41], parents=[s.length - 1, s.length]) for s, _ in sessions]
    with monkeypatch.context() as patch:
        patch.setattr(Session, "_begin", begins)
        with pytest.raises(RuntimeError, match="is gone"):
            engine.run(feeds)
    for session, prompt in sessions:
        assert session.columns == len(prompt.ids)
        near(session.grow([50], [session.length - 1])[0], alone(engine, prompt, [50]))


def test_the_last_layer_is_not_asked_after() -> None:
    engine = Engine(tiny_model("llama"))
    session, prompt = opened(engine)
    calls: list[int] = []
    engine.run([Feed(session, prompt.ids)], check=lambda: calls.append(1))
    assert len(calls) == engine.num_layers - 1


@pytest.mark.parametrize("lasts", [(None, None), (1, 1), (2, 0), (0, 0)])
def test_the_last_layer_computes_what_is_wanted(
    lasts: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_model("llama"))
    rows: list[int] = []

    def noting(x: torch.Tensor, attended: torch.Tensor, *, layer: _Layer) -> torch.Tensor:
        rows.append(x.shape[0])
        assert attended.shape[0] == x.shape[0]
        return _Layer.after_attention(layer, x, attended)

    assert isinstance(engine._backend, StaticBackend)
    for layer in engine._backend._layers:
        monkeypatch.setattr(layer, "after_attention", partial(noting, layer=layer))
    sessions = [opened(engine, i) for i in range(2)]
    feeds = [Feed(s, p.ids, last=last) for (s, p), last in zip(sessions, lasts, strict=True)]
    engine.run(feeds)
    fed = sum(len(feed.ids) for feed in feeds)
    wanted = sum(len(feed.ids) if feed.last is None else feed.last for feed in feeds)
    assert rows == [fed] * (engine.num_layers - 1) + [wanted] * (wanted > 0)
    for session, prompt in sessions:
        near(session.feed([7])[0], alone(engine, prompt, [7]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_attend_as_one_tensor_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys, values = (torch.randn(2, 40, 16).to(dtype) for _ in range(2))
    query, mask = torch.randn(2, 6, 16).to(dtype), torch.randn(6, 40).to(dtype)
    found = attention._by_products(
        query, keys.split([17, 20, 3], dim=1), values.split([17, 20, 3], dim=1), mask
    )
    exact = functional.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), attn_mask=mask.double()
    )
    assert found.dtype == dtype
    coarse = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), exact, atol=coarse, rtol=coarse)


@pytest.mark.parametrize("eager", [False, True])
def test_a_pass_that_is_ended_leaves_all_sessions_as_they_were(eager: bool) -> None:
    engine = Engine(tiny_model("llama"), eager=eager)
    opened_ones = [opened(engine) for _ in range(3)]
    sessions = [session for session, _ in opened_ones]
    for session, prompt in opened_ones:
        session.feed(prompt.ids, last=0)
    length = sessions[0].length
    sessions[2].grow([5], [length - 1])
    before = [(s.length, s.columns) for s in sessions]
    feeds = [Feed(sessions[0], [4]), Feed(sessions[1], [4]), Feed(sessions[2], [4], parents=[1])]
    layers = 0

    def check() -> None:
        nonlocal layers
        layers += 1
        if layers == 8:  # the eager backend has finished two passes by then
            raise RuntimeError("ended")

    if eager:
        with pytest.raises(RuntimeError, match="ended"):
            engine.run(feeds, check=check)
        assert [(s.length, s.columns) for s in sessions] == before

    def interrupt(states: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run([*feeds[:1], replace(feeds[1], on_states=interrupt), feeds[2]])
    assert [(s.length, s.columns) for s in sessions] == before
    for session, (_, prompt) in zip(sessions[:2], opened_ones[:2], strict=True):
        near(session.feed([9])[0], alone(engine, prompt, [9]))


def test_sessions_of_another_engine_are_refused() -> None:
    engine, other = Engine(tiny_model("llama")), Engine(tiny_model("llama", seed=1))
    session, prompt = opened(other)
    (result,) = engine.run([Feed(session, prompt.ids)])
    assert isinstance(result, ProtocolError)
    assert session.length == 0
