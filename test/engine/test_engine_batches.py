"""Several sessions in one pass, token trees, and the two backends against each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import alone, near, opened
from tiny_models import GROWING, tiny_folder, tiny_model
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from collab_llm_nodes.engine import onednn
from collab_llm_nodes.engine.cache import StaticCache
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.kernels import Head, Linear
from collab_llm_nodes.engine.onednn import kernel_rows
from collab_llm_nodes.engine.session import Feed, OnExit
from collab_llm_nodes.engine.static import StaticBackend
from collab_llm_nodes.errors import Cancelled, CollabError, InvalidInput, ProtocolError
from collab_llm_nodes.models.architectures import ARCHITECTURES, decoder_parts
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt


def fed(engine: Engine, answer: list[int], seed: int = 0) -> torch.Tensor:
    """Return the logits after the last of ``answer``, computed alone."""
    return alone(engine, opened(engine, seed)[1], answer)


def into(heard: list[torch.Tensor]) -> OnExit:
    """Return a callback that collects exit logits."""

    def on_exit(layer: int, logits: torch.Tensor) -> None:
        heard.append(logits)

    return on_exit


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_backends_agree(architecture: str) -> None:
    loaded = tiny_model(architecture)
    found = []
    for eager in (False, True):
        session, prompt = opened(Engine(loaded, eager=eager))
        found.append(session.feed([*prompt.ids, 7, 8, 9]))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_precision_stays_as_close_as_transformers_does(architecture: str, dtype: str) -> None:
    """Both backends round; neither may be further from float32 than the other by much."""
    loaded = load(TargetConfig(str(tiny_folder(architecture)), dtype=dtype, exit_layers=(2,)))
    exact = Engine(tiny_model(architecture))
    errors = []
    for eager in (False, True):
        engine = Engine(loaded, eager=eager)
        sessions = [opened(engine, i) for i in range(2)]
        for session, prompt in sessions:
            session.feed(prompt.ids, last=0)
        heard: list[torch.Tensor] = []
        feeds = [Feed(s, [7, 8], into(heard)) for s, _ in sessions]
        results = engine.run(feeds)
        assert [x.dtype for x in heard] == [loaded.model.dtype] * 2
        news = [[7, 8]]
        if engine.grows_trees:
            results += [s.grow([9, 9], [s.length - 1, s.length - 2])[:1] for s, _ in sessions]
            news.append([7, 8, 9])
        expected = [fed(exact, new, i) for new in news for i in (0, 1)]
        errors.append(
            max(
                float((found[-1].float() - own).abs().max())
                for found, own in zip(results, expected, strict=True)
                if isinstance(found, torch.Tensor)
            )
        )
    assert errors[0] < 1.5 * errors[1] + 0.01


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_pass_over_many_sessions_equals_single_ones(architecture: str, eager: bool) -> None:
    """Prefill and decoding mixed, all lengths different, exits heard by some."""
    loaded = tiny_model(architecture, exit_layers=(1, 3))
    engine = Engine(loaded, eager=eager)
    news = [[5], [9, 300, 12], [4, 4, 4], [7] * 5, [], [8]]
    alone: list[torch.Tensor | Exception] = []
    together: list[torch.Tensor | Exception] = []
    exits_alone: list[list[torch.Tensor]] = [[] for _ in news]
    exits_together: list[list[torch.Tensor]] = [[] for _ in news]
    for where, exits in ((alone, exits_alone), (together, exits_together)):
        feeds = []
        for i, new in enumerate(news):
            session, prompt = opened(engine, i)
            ids = new
            if i == 3:
                ids = [*prompt.ids, *new]  # a prefill among the others
            else:
                session.feed([*prompt.ids, *range(40, 40 + 3 * i)], last=0)
            listen = into(exits[i]) if i % 2 else None
            feeds.append(Feed(session, ids, listen, min(2, len(ids))))
        before = [feed.session.length for feed in feeds]
        if where is together:
            where += engine.run(feeds)
        else:
            where += [f.session.feed(f.ids, f.on_exit, f.last) for f in feeds]
        assert [f.session.length for f in feeds] == [
            n + len(f.ids) for n, f in zip(before, feeds, strict=True)
        ]
        where += [f.session.feed([11]) for f in feeds]  # the caches hold what they should
    for a, b in zip(alone, together, strict=True):
        near(a, b)
    assert [len(e) for e in exits_together] == [0, 2, 0, 2, 0, 2]
    for x, y in zip(exits_alone, exits_together, strict=True):
        for a, b in zip(x, y, strict=True):
            near(a, b)


def test_there_are_few_numbers_of_rows_and_little_is_computed_for_nobody() -> None:
    assert [kernel_rows(n) for n in (1, 5, 16, 17, 45, 64, 65, 130, 1000)] == [
        *(1, 5, 16),
        *(20, 48, 64, 72, 144, 1024),
    ]
    for rows in range(1, 4097):
        assert rows <= kernel_rows(rows) <= max(rows + 3, 1.125 * rows)
    assert len({kernel_rows(rows) for rows in range(17, 4097)}) <= 60


def test_rows_are_filled_up_once_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "mkl_is_faster", lambda: False)
    monkeypatch.setattr(onednn, "WORK", 0)
    engine = Engine(tiny_model("llama", exit_layers=(1,)))
    assert isinstance(engine._backend, StaticBackend)
    rows: list[tuple[int, int]] = []
    for layer in engine._backend._layers:
        for name in ("before_attention", "after_attention"):
            monkeypatch.setattr(layer, name, _noting(getattr(layer, name), rows))
    texts = [list(range(5, 5 + length)) for length in (14, 25, 6)]
    heard: list[torch.Tensor] = []
    feeds = [
        Feed(engine.open(EncodedPrompt(tuple(text))), text, into(heard), last)
        for text, last in zip(texts, (2, 25, 0), strict=True)
    ]
    found = engine.run(feeds)
    fed, wanted = kernel_rows(45), kernel_rows(27)
    assert rows == [(fed, fed)] * (2 * engine.num_layers - 1) + [(wanted, wanted)]
    assert sorted(len(logits) for logits in heard) == [2, 25]
    for feed, logits in zip(feeds, found, strict=True):
        again = engine.open(EncodedPrompt(tuple(feed.ids))).feed(feed.ids)
        near(logits, again[len(again) - feed.keep :])


def _noting(method: Callable[..., torch.Tensor], rows: list[tuple[int, int]]) -> Any:
    """Note the rows that a layer's method takes and gives."""

    def noting(*args: torch.Tensor) -> torch.Tensor:
        output = method(*args)
        rows.append((len(args[-1]), len(output)))
        return output

    return noting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_map_is_torchs_whatever_the_number_of_rows(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    weight, b = torch.randn(136, 520, dtype=dtype), torch.randn(520, dtype=dtype)
    for lasting in (True, False):
        linear = Linear(weight, b if bias else None, lasting=lasting)
        for rows in (1, 2, 5, 16, 17, 23, 45, 130):
            x, residual = torch.randn(rows, 136, dtype=dtype), torch.randn(rows, 520, dtype=dtype)
            expected = functional.linear(x, weight.t(), b if bias else None)
            for found, wanted in (
                (linear(x), expected),
                (linear.add_to(residual, x), residual + expected),
            ):
                coarse = 1e-4 if dtype is torch.float32 else 2e-2
                torch.testing.assert_close(found, wanted, atol=10 * coarse, rtol=coarse)


@pytest.mark.parametrize("most", [0, 4 << 20])
def test_small_maps_are_held_in_the_layout_of_their_kernels(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "mkl_is_faster", lambda: False)
    monkeypatch.setattr(onednn, "KEPT_LAYOUT", most)
    weight = torch.randn(512, 1024)
    linear = Linear(weight, None)
    assert linear._onednn is not None
    assert linear._onednn._weight.is_mkldnn == (onednn._KEEPS_LAYOUTS and weight.nbytes <= most)
    for rows in (1, 2, 5, 16, 64, 65, 300):
        x = torch.randn(rows, 512)
        torch.testing.assert_close(linear(x), x @ weight, atol=1e-3, rtol=1e-4)


def test_the_map_to_the_first_logits_is_made_once() -> None:
    head = Head(decoder_parts(load(ModelConfig(str(tiny_folder("llama")))).model), 100)
    states = torch.randn(5, 32)
    torch.testing.assert_close(head(states, 60), head(states)[:, :60], atol=5e-5, rtol=1e-4)
    assert head._first(60) is head._first(60)
    assert head._first(100) is not head._first(60)


class Products(TorchDispatchMode):
    """Notes the products that are computed: (rows, columns) by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, set[tuple[int, int]]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"):
            self.sizes[func.name()].add(tuple(result.shape))
        return result


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.exhaustive),  # slow on CPUs
    ],
)
def test_passes_of_many_lengths_need_few_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN keeps half a megabyte for every size of a product that it has met."""
    monkeypatch.setattr(onednn, "mkl_is_faster", lambda: False)
    linear = Linear(torch.zeros(200, 2008, dtype=dtype), None)
    with Products() as seen:
        for rows in range(17, 273):
            linear(torch.zeros(rows, 200, dtype=dtype))
            linear.add_to(torch.zeros(rows, 2008, dtype=dtype), torch.zeros(rows, 200, dtype=dtype))
    (sizes,) = seen.sizes.values()
    assert len(sizes) <= 32


def test_selections_from_the_head_need_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has another size, so that kernels for it would never be used again."""
    monkeypatch.setattr(onednn, "WORK", 0)  # else tiny ones are left to MKL anyway
    monkeypatch.setattr(onednn, "mkl_is_faster", lambda: False)
    for dtype in ("float32", "bfloat16"):
        loaded = load(ModelConfig(str(tiny_folder("llama")), dtype=dtype))
        head = Head(decoder_parts(loaded.model), 100)
        states = torch.randn(5, 32, dtype=getattr(torch, dtype))
        ids = torch.tensor([7, 3, 90])
        found = []
        with Products() as seen:
            found.append(head.some(ids)(states))
        assert set(seen.sizes) == {"aten::mm"}
        assert found[0].dtype == states.dtype
        torch.testing.assert_close(found[0], head(states)[:, ids], atol=2e-2, rtol=2e-2)
        with Products() as seen:
            head(states)
        assert ("mkldnn::_linear_pointwise" in seen.sizes) == (dtype == "float32")


@pytest.mark.parametrize(
    ("cpuinfo", "vendors"), [("vendor_id\t: GenuineIntel", {True}), ("AuthenticAMD", {False})]
)
def test_the_vendor_decides_who_multiplies(
    cpuinfo: str, vendors: set[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    monkeypatch.setattr(onednn, "CPUINFO", file)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert {onednn.mkl_is_faster.__wrapped__()} == vendors
    monkeypatch.setattr(onednn, "mkl_is_faster", lambda: vendors == {True})
    with Products() as seen:
        Linear(torch.zeros(1000, 2000), None)(torch.zeros(5, 1000))
    assert ("mkldnn::_linear_pointwise" in seen.sizes) != (vendors == {True})


def test_without_cpuinfo_onednn_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "CPUINFO", Path("/nowhere"))
    assert not onednn.mkl_is_faster.__wrapped__()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_of_one_length_share_a_pass(architecture: str) -> None:
    engine = Engine(tiny_model(architecture))
    pairs = [opened(engine, seed) for seed in (0, 2)]
    assert len({len(prompt.ids) for _, prompt in pairs}) == 1
    results = engine.run([Feed(session, prompt.ids, last=1) for session, prompt in pairs])
    for (session, _), seed, found in zip(pairs, (0, 2), results, strict=True):
        assert isinstance(found, torch.Tensor)
        near(found[0], fed(engine, [], seed))
        near(session.feed([7] * 20)[-1], fed(engine, [7] * 20, seed))


@pytest.mark.parametrize("eager", [False, True])
def test_one_failing_feed_disturbs_no_other(eager: bool) -> None:
    loaded = tiny_model("qwen2_vl", exit_layers=(1, 2))
    engine = Engine(loaded, eager=eager)
    sessions = [opened(engine, i) for i in range(4)]
    for session, prompt in sessions:
        session.feed(prompt.ids, last=0)
    lengths = [session.length for session, _ in sessions]

    def gone(layer: int, logits: torch.Tensor) -> None:
        raise Cancelled("its client went away")

    (a, _), (b, _), (c, _), (d, _) = sessions
    d.close()
    results = engine.run(
        [
            Feed(a, [7, 8], gone),
            Feed(b, [7, 8]),
            Feed(c, [engine.vocab_size]),
            Feed(d, [1]),
            Feed(b, [1]),
        ]
    )
    assert [type(r) for r in results[::2]] == [Cancelled, InvalidInput, ProtocolError]
    assert isinstance(results[3], ProtocolError)
    assert isinstance(results[1], torch.Tensor)
    near(results[1][-1], fed(engine, [7, 8], 1))
    assert [a.length, b.length, c.length] == [lengths[0], lengths[1] + 2, lengths[2]]
    near(a.feed([9])[0], fed(engine, [9], 0))


@pytest.mark.parametrize("eager", [False, True])
def test_a_pass_ends_when_nobody_is_left(eager: bool) -> None:
    engine = Engine(tiny_model("llama", exit_layers=(1, 2)), eager=eager)
    heard = []

    def gone(layer: int, logits: torch.Tensor) -> None:
        heard.append(layer)
        raise Cancelled("its client went away")

    feeds = [Feed(s, p.ids, gone) for s, p in (opened(engine, i) for i in range(3))]
    assert all(isinstance(r, Cancelled) for r in engine.run(feeds))
    assert heard == [1, 1, 1]
    assert engine.run([]) == []


# ---------------------------------------------------------------- trees


@pytest.mark.parametrize(("architecture", "eager"), GROWING)
def test_nodes_are_what_their_paths_alone_would_be(architecture: str, eager: bool) -> None:
    engine = Engine(tiny_model(architecture), eager=eager)
    session, prompt = opened(engine, 1)
    session.feed([*prompt.ids, 20, 21, 22], last=0)
    n = len(prompt.ids)
    logits = session.grow([30, 31, 32, 33], [n, n + 2, n + 4, n - 1])  # 32 follows 31
    paths = [[20, 30], [20, 21, 22, 31], [20, 21, 22, 31, 32], [33]]
    for row, path in zip(logits, paths, strict=True):
        near(row, fed(engine, path, 1))
    assert (session.length, session.columns) == (n + 3, n + 7)
    more = session.grow([34, 35], [n + 5, n + 5])
    near(more[0], fed(engine, [*paths[2], 34], 1))
    near(more[1], fed(engine, [*paths[2], 35], 1))

    kept = session.retain(n + 4)  # 31: its child 32 and grandchildren stay
    assert kept == {
        **{c: c for c in range(n + 3)},
        n + 4: n + 3,
        n + 5: n + 4,
        n + 7: n + 5,
        n + 8: n + 6,
    }
    assert (session.length, session.columns) == (n + 4, n + 7)
    near(session.grow([36], [kept[n + 7]])[0], fed(engine, [*paths[2], 34, 36], 1))
    kept = session.retain(n + 6)  # 35
    assert session.length == session.columns == n + 6
    near(session.feed([37])[0], fed(engine, [*paths[2], 35, 37], 1))
    kept = session.retain(n)  # backwards: the rest of the trunk stays as nodes
    assert (session.length, session.columns) == (n + 1, n + 7)
    near(session.grow([38], [n + 2])[0], fed(engine, [20, 21, 22, 38], 1))
    session.length = n
    assert session.columns == n
    near(session.feed([39])[0], fed(engine, [39], 1))


@pytest.mark.parametrize("eager", [False, True])
@settings(max_examples=20)
@given(data=st.data())
def test_any_growth_of_a_tree_equals_fresh_sessions(eager: bool, data: st.DataObject) -> None:
    """Model-based: a plain dictionary of paths says what each column stands for."""
    engine = Engine(tiny_model("qwen2_vl"), eager=eager)
    session, prompt = opened(engine)
    session.feed(prompt.ids, last=0)
    root = len(prompt.ids) - 1
    paths: dict[int, list[int]] = {root: []}  # tokens after the prompt, by column
    tokens = st.integers(0, engine.vocab_size - 1)
    for _ in range(data.draw(st.integers(1, 4), label="steps")):
        action = data.draw(st.sampled_from(["grow", "grow", "retain", "feed", "roll back"]))
        trunk = max((p for c, p in paths.items() if c < session.length), key=len)
        if action == "grow":
            first, ids, parents = session.columns, [], []
            for i in range(data.draw(st.integers(1, 4), label="nodes")):
                parents.append(data.draw(st.sampled_from(sorted(paths)), label="parent"))
                ids.append(data.draw(tokens, label="token"))
                paths[first + i] = [*paths[parents[-1]], ids[-1]]
            logits = session.grow(ids, parents)
            for i, row in enumerate(logits):
                near(row, fed(engine, paths[first + i]))
        elif action == "retain":
            column = data.draw(st.sampled_from(sorted(paths)), label="column")
            kept, path = session.retain(column), paths[column]
            assert session.length == len(prompt.ids) + len(path)
            paths = {kept[c]: p for c, p in paths.items() if c in kept}
            assert all(p == path[: len(p)] or p[: len(path)] == path for p in paths.values())
            assert sorted(kept.values()) == list(range(session.columns))
        elif action == "feed":
            ids = data.draw(st.lists(tokens, min_size=1, max_size=3), label="ids")
            near(session.feed(ids)[-1], fed(engine, [*trunk, *ids]))
            line = [*trunk, *ids]
            paths = {root + i: line[:i] for i in range(len(line) + 1)}
        else:
            n = data.draw(st.integers(0, len(trunk)), label="kept tokens")
            session.length = len(prompt.ids) + n
            paths = {root + i: trunk[:i] for i in range(n + 1)}
        assert session.columns == root + len(paths)


@pytest.mark.parametrize("eager", [False, True])
def test_a_feed_drops_nodes(eager: bool) -> None:
    engine = Engine(tiny_model("llama"), eager=eager)
    session, prompt = opened(engine)
    session.feed(prompt.ids, last=0)
    session.grow([30, 31], [session.length - 1] * 2)
    near(session.feed([32])[0], fed(engine, [32]))
    assert session.columns == session.length == len(prompt.ids) + 1


def test_bad_trees_are_refused_and_change_nothing() -> None:
    engine = Engine(tiny_model("qwen2_vl"))
    session, prompt = opened(engine)
    session.feed(prompt.ids, last=0)
    n = session.length
    refused: list[tuple[list[int], list[int]]] = [
        ([1], [n]),
        ([1], [-1]),
        ([1, 2], [n - 1]),
        ([1, 2], [n + 1, n - 1]),
        ([engine.vocab_size], [n - 1]),
        ([1] * engine.context, list(range(n - 1, n - 1 + engine.context))),  # one path, too long
    ]
    for ids, parents in refused:
        with pytest.raises(InvalidInput):
            session.grow(ids, parents)
    for column in (-1, n):
        with pytest.raises(ProtocolError, match="no column"):
            session.retain(column)
    wide = engine.context  # columns may be more than a path can have
    assert len(session.grow([1] * wide, [n - 1] * wide)) == wide
    session.length = n
    session.grow([30], [3])
    with pytest.raises(ProtocolError, match="prompt"):
        session.retain(n)
    session.length = n
    assert session.columns == n
    assert session.grow([], []).shape == (0, engine.vocab_size)
    session.close()
    with pytest.raises(CollabError, match="closed"):
        session.grow([1], [0])


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2_vl", "llama"])
def test_trees_stand_behind_the_whole_prompt(architecture: str, eager: bool) -> None:
    engine = Engine(tiny_model(architecture), eager=eager)
    session, prompt = opened(engine)
    for held in (0, 4, len(prompt.ids) - 1):
        session.feed(prompt.ids[session.length : held], last=0)
        with pytest.raises(ProtocolError, match="prompt's"):
            session.grow([9], [0])
        assert session.columns == session.length == held
    session.feed(prompt.ids[session.length :], last=0)
    near(session.grow([9], [session.length - 1])[0], fed(engine, [9]))
    session.length -= 1
    with pytest.raises(ProtocolError, match="feed prompt.ids first"):
        session.grow([9], [0])


def test_caches_grow_with_need_and_are_freed() -> None:
    engine = Engine(tiny_model("llama"))
    session, prompt = opened(engine)
    assert session._cache.own.numel() == 0
    session.feed(prompt.ids, last=0)
    first = session._cache.own.shape[2]
    assert len(prompt.ids) <= first <= 128
    session.feed([7] * 200, last=0)
    assert session._cache.own.shape[2] == 128 * -(-session.length // 128)
    near(session.feed([8])[0], fed(engine, [7] * 200 + [8]))


def test_caches_of_many_sessions_stay_small() -> None:
    """64 sessions of the embedded target, each at its full context."""
    engine = Engine(load(ModelConfig(path="nav-target")))
    cache = engine._backend.new_cache()
    assert isinstance(cache, StaticCache)
    cache.reserve(engine.context)
    assert 64 * cache.own.nbytes < 256 * 2**20


# ---------------------------------------------------------------- exits


def test_candidates_beyond_the_shortlist(monkeypatch: pytest.MonkeyPatch) -> None:
    """First exit: shortlist, prompt and fed tokens; later: fed ones and the first exit's best."""
    loaded = tiny_model("qwen2_vl", exit_layers=(1, 2, 3))
    full, sparse = Engine(loaded), Engine(loaded, candidates=3)
    assert sparse._exits is not None
    monkeypatch.setattr(sparse._exits, "shortlist", 40)
    seen: list[list[torch.Tensor]] = [[], [], []]
    new = [[300, 301], [310, 311, 312]]
    verdicts = []
    for engine, heard in ((full, seen[0]), (sparse, seen[1])):
        sessions = [opened(engine, i) for i in range(2)]
        for session, prompt in sessions:
            session.feed(prompt.ids, last=0)
        verdicts += engine.run(
            [
                Feed(session, ids, into(heard))
                for (session, _), ids in zip(sessions, new, strict=True)
            ]
        )
    for exact, found in zip(verdicts[:2], verdicts[2:], strict=True):
        assert isinstance(exact, torch.Tensor)
        assert isinstance(found, torch.Tensor)
        assert exact.equal(found), "an exit is a preview"
    for number, (exact, found) in enumerate(zip(seen[0], seen[1], strict=True)):
        own = new[number % 2]
        scored = torch.isfinite(found)
        assert scored[:, own].all()
        near(found[scored], exact[scored])
        allowed = {*range(40), *own, *opened(sparse, number % 2)[1].ids}
        assert len(allowed) < sparse.vocab_size / 2
        if number >= 2:
            first = seen[1][number % 2]
            allowed = {*first.topk(3).indices.flatten().tolist(), *own}
        assert {int(i) for i in scored[0].nonzero()} == allowed
    # A session's exits do not depend on who shares its pass.
    session, prompt = opened(sparse, 1)
    session.feed(prompt.ids, last=0)
    session.feed(new[1], into(seen[2]))
    for single, together in zip(seen[2], seen[1][1::2], strict=True):
        assert torch.isfinite(single).equal(torch.isfinite(together))


def test_what_all_sessions_show_at_an_exit_can_be_taken_together() -> None:
    engine = Engine(tiny_model("llama", exit_layers=(1, 2)))
    order: list[str] = []

    def feeds() -> list[Feed]:
        order.clear()
        found = []
        for name in "ab":
            session, prompt = opened(engine)
            found.append(
                Feed(session, prompt.ids, lambda layer, x, n=name: order.append(f"{n} {layer}"), 1)  # type: ignore[misc]
            )
        return found

    def all_shown(layer: int, took: Callable[[], float]) -> None:
        assert took() > 0
        order.append(f"all {layer}")

    engine.run(feeds(), after_exit=all_shown)
    assert order == ["a 1", "b 1", "all 1", "a 2", "b 2", "all 2"]
    engine.run(feeds(), after_exit=all_shown, exits_until=1.5)
    assert order == ["a 1", "b 1", "all 1"]

    def fail(layer: int, took: Callable[[], float]) -> None:
        raise ValueError("nobody wants it")

    both = feeds()
    with pytest.raises(ValueError, match="nobody wants it"):
        engine.run(both, after_exit=fail)
    assert [feed.session.length for feed in both] == [0, 0]
