"""The engine on a (fake) GPU: its answers are those of the CPU, and each pass keeps to a budget.

``test/support/fake_device.py`` says what the fake device is and what its ledger counts.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_stories import STORIES, compare, exits, logits_of, opened, results_of, words
from fake_device import CUDA, FakeDevice, Ledger
from tiny_models import VISION, tiny_folder, tiny_prompt
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from collab_llm_lab.random_models import random_tokenizer
from collab_llm_nodes.engine import paged_kernels
from collab_llm_nodes.engine.cuda import CudaBackend
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.graphs import Recorder
from collab_llm_nodes.engine.paged_kernels import Kernels
from collab_llm_nodes.engine.paging import PagePool
from collab_llm_nodes.engine.session import Feed
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, TargetConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt, encode

# ---------------------------------------------------------------- the budget of a pass

UPLOADS = 1
DOWNLOADS = 1
BETWEEN_LAYERS = 0
"""Copies and waits after the first layer has begun and before the last one has ended."""
EXIT_WAITS = 1
"""Of each exit layer that fires, with a download at most; no upload comes with it."""
LAUNCHES = 21
"""Of each decoder layer, whatever the number of sessions. A composite operator counts once."""
PAGED_LAUNCHES = 10
"""The same over pages: two norms, four products, rotation, attention and its sums, and the gate."""
ROUNDS = 64
ATTENTIONS = 4
"""Different calls of attention in as many verifications of one length.

cuDNN plans anew for every shape and stride of its inputs, which takes some 30 ms.
"""
ALIGNED_BYTES = 16
ALIGNED_ELEMENTS = 8
"""Of masks. The memory-efficient kernel refuses a first element that lies on no multiple of 16
bytes. Strides that are no multiples of 8 elements make torch copy the mask in every layer
(``preprocess_mask`` in ATen/native/transformers)."""
HALF_ERROR = 1.5
"""Error of bfloat16 against float32, in units of the error that transformers has."""

EXIT_LAYERS = (1, 3)
_DEVICE = FakeDevice()


@pytest.fixture(autouse=True)
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpreter, where Triton is installed, would take minutes here."""
    monkeypatch.setitem(sys.modules, "collab_llm_nodes.engine.triton_kernels", None)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """The fake device; models that are on it stay for other tests."""
    _DEVICE.failures = 0
    with _DEVICE:
        yield _DEVICE
    _DEVICE.fail_when = lambda entry: False


@cache
def loaded_on(place: str, architecture: str, dtype: str, layers: int = 4) -> LoadedModel:
    exits = tuple(layer for layer in EXIT_LAYERS if layer < layers)
    folder = str(tiny_folder(architecture, layers=layers))
    return load(TargetConfig(path=folder, dtype=dtype, device=place, exit_layers=exits))


# ---------------------------------------------------------------- answers


TOLERANCES = {"float32": (5e-5, 1e-4), "bfloat16": (0.5, 0.0)}
"""Absolute and relative."""


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize(
    ("architecture", "backend", "dtype"),
    [
        ("qwen2", "paged", "float32"),
        ("qwen2", "paged", "bfloat16"),
        ("qwen2", "static", "float32"),
        ("qwen2", "static", "bfloat16"),
        ("qwen2", "eager", "float32"),
        ("qwen2_vl", "paged", "float32"),
        ("qwen2_vl", "paged", "bfloat16"),
        ("qwen2_vl", "static", "float32"),
        ("qwen2_vl", "eager", "bfloat16"),
        ("qwen2_5_vl", "paged", "float32"),
        ("qwen3_vl", "paged", "float32"),
        ("qwen3_vl", "static", "float32"),
    ],
)
def test_answers_are_those_of_the_cpu(
    architecture: str,
    backend: str,
    dtype: str,
    story: Callable[[Engine, Path], list[Tensor]],
    tmp_path: Path,
) -> None:
    """To the last bit where the kernels are the same: in the forward pass of transformers."""
    eager = backend == "eager"
    expected = story(Engine(loaded_on("cpu", architecture, dtype), eager=eager), tmp_path)
    with _DEVICE as device:
        engine = engine_on(architecture, dtype, backend)
        assert engine.device == CUDA
        found = story(engine, tmp_path)
        assert all(device.holds(x) for x in found)
        engine.close()
        same_kernels = eager and story is not exits
        compare(found, expected, *((0.0, 0.0) if same_kernels else TOLERANCES[dtype]))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen2_vl"])
def test_candidates_of_exits_are_those_of_the_cpu(architecture: str, tmp_path: Path) -> None:
    expected = exits(Engine(loaded_on("cpu", architecture, "float32"), candidates=16), tmp_path)
    with _DEVICE:
        engine = Engine(loaded_on("cuda", architecture, "float32"), candidates=16)
        assert isinstance(engine._backend, CudaBackend)
        compare(exits(engine, tmp_path), expected, *TOLERANCES["float32"])


# ---------------------------------------------------------------- what a pass costs


def one(engine: Engine) -> list[Feed]:
    return [Feed(opened(engine), words(5))]


def several(engine: Engine) -> list[Feed]:
    return [Feed(opened(engine, i, 20 * i), words(1 + i % 5)) for i in range(8)]


def tree(engine: Engine) -> list[Feed]:
    session = opened(engine)
    trunk = session.length
    return [Feed(session, words(4), parents=[trunk - 1, trunk - 1, trunk, trunk + 1])]


def several_trees(engine: Engine) -> list[Feed]:
    return [*tree(engine), *tree(engine), *one(engine)]


def forked(engine: Engine) -> list[Feed]:
    session = opened(engine, tokens=200)
    return [Feed(member, words(5)) for member in (session, session.fork(), session.fork())]


def growing(engine: Engine) -> list[Feed]:
    """The cache grows in this pass."""
    return [Feed(opened(engine, tokens=126), words(5))]


def prompts(engine: Engine) -> list[Feed]:
    """Two prompts; pictures in them have been encoded before."""
    model_type = engine.loaded.model.config.model_type
    feeds = []
    for seed in range(2):
        prompt = encode(tiny_prompt(model_type, seed), engine.loaded)
        session = engine.open(prompt)
        session.encode_images()
        feeds.append(Feed(session, prompt.ids, last=1))
    return feeds


PASSES = (one, several, tree, several_trees, forked, growing, prompts)


@pytest.mark.parametrize("feeds_of", PASSES)
@pytest.mark.parametrize("backend", ["paged", "static"])
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("qwen2", "float32"), ("qwen2", "bfloat16"), ("qwen2_vl", "bfloat16")],
)
def test_a_pass_copies_once_each_way_and_never_waits_between_layers(
    device: FakeDevice,
    architecture: str,
    dtype: str,
    backend: str,
    feeds_of: Callable[[Engine], list[Feed]],
) -> None:
    engine = engine_on(architecture, dtype, backend)
    ledger = watched(device, engine, feeds_of(engine))
    uploads, downloads = ledger.of("upload"), ledger.of("download")
    assert len(uploads) <= UPLOADS, ledger.show(uploads)
    assert len(downloads) <= DOWNLOADS, ledger.show(downloads)
    assert len(ledger.waits) <= UPLOADS + DOWNLOADS, ledger.show(ledger.waits)
    between = [e for e in ledger.between_layers if e.waits or e.kind in ("upload", "download")]
    assert len(between) <= BETWEEN_LAYERS, ledger.show(between)


@pytest.mark.parametrize("feeds_of", [one, several, tree])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["paged", "static"])
def test_launches_of_a_layer(
    device: FakeDevice, dtype: str, backend: str, feeds_of: Callable[[Engine], list[Feed]]
) -> None:
    engine = engine_on("qwen2", dtype, backend)
    ledger = watched(device, engine, feeds_of(engine))
    launches = [entry for entry in ledger.between_layers if entry.kind == "launch"]
    limit = PAGED_LAUNCHES if backend == "paged" else LAUNCHES
    assert len(launches) <= limit * engine.num_layers, ledger.show(launches)


def test_work_between_layers_does_not_grow_with_the_sessions(device: FakeDevice) -> None:
    engine = engine_on("qwen2", "bfloat16", "paged")
    few, many, trees = (
        Counter(e.kind for e in watched(device, engine, feeds_of(engine)).between_layers)
        for feeds_of in (one, several, several_trees)
    )
    assert few == many == trees
    assert few["launch"]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("candidates", [0, 16])
@pytest.mark.parametrize("backend", ["paged", "static"])
def test_an_exit_waits_once_for_its_layer(
    device: FakeDevice, backend: str, candidates: int, count: int
) -> None:
    """It waits for its own result, and not for the layers that were queued after it."""
    engine = engine_on("qwen2", "bfloat16", backend, candidates)
    fired: list[int] = []
    feeds = [
        Feed(opened(engine, seed), words(5), lambda layer, logits: fired.append(layer))
        for seed in range(count)
    ]
    ledger = watched(device, engine, feeds)
    fired = fired[: len(fired) // 2]  # of the first of two passes
    assert fired == sorted(count * EXIT_LAYERS)
    uploads, downloads = ledger.of("upload"), ledger.of("download")
    assert len(uploads) <= UPLOADS, ledger.show(uploads)
    assert len(downloads) <= DOWNLOADS + EXIT_WAITS * len(EXIT_LAYERS), ledger.show(downloads)
    waits = [entry for entry in ledger.waits if entry.kind != "upload"]
    assert len(waits) <= DOWNLOADS + EXIT_WAITS * len(EXIT_LAYERS), ledger.show(waits)
    device_wide = [entry for entry in waits if entry.name == "synchronize"]
    assert not device_wide, ledger.show(device_wide)


def test_a_captured_pass_is_launched_whole_before_its_exits_are_judged(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a GPU, launches stand for the replay of a graph."""
    monkeypatch.setattr(Recorder, "record", lambda self, run: run)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    engine = engine_on("qwen2", "float32", "paged")
    engine.warm_up()
    expected = exits(Engine(loaded_on("cpu", "qwen2", "float32")), tmp_path)
    compare(exits(engine, tmp_path), expected, *TOLERANCES["float32"])
    judged: list[tuple[int, int]] = []

    def judge(layer: int, logits: Tensor) -> None:
        judged.append((len(device.ledger.layer_reads), len(device.ledger.entries)))

    ledger = watched(device, engine, [Feed(opened(engine), words(5), judge)])
    (first, _), (last, end) = judged[-2:]
    assert first == last == len(ledger.layer_reads) > 0
    later = [entry for entry in ledger.entries[end:] if entry.kind == "launch"]
    assert not later, f"the head waits for the exits:\n{ledger.show(later)}"
    assert len(ledger.of("upload")) <= UPLOADS, ledger.show(ledger.of("upload"))


def test_kernels_are_launched_on_the_device_of_the_model(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton does not look where its tensors lie."""
    chosen: list[torch.device] = []

    @contextmanager
    def choose(device: torch.device) -> Iterator[None]:
        chosen.append(device)
        yield
        chosen.pop()

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(chosen[-1])
        return paged_kernels.attend(*args, **kwargs)

    seen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", choose)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(Recorder, "record", lambda self, run: run() or run)
    engine = engine_on("qwen2", "float32", "paged")
    assert isinstance(engine._backend, CudaBackend)
    engine._backend._kernels = replace(paged_kernels.REFERENCE, attend=attend)
    engine.warm_up()
    opened(engine).feed(words(5))
    assert set(seen) == {CUDA}


def test_a_capture_that_fails_leaves_the_thread_its_stream(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own context raises before it has gone back to it."""
    streams = ["usual"]

    class Capture:
        def __init__(self, graph: object, *, stream: Any, **options: object) -> None:
            assert stream.priority == torch.cuda.current_stream().priority == -1

        def __enter__(self) -> None:
            streams.append("capturing")

        def __exit__(self, *exception: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def stream(chosen: object) -> Iterator[None]:
        before = list(streams)
        try:
            yield
        finally:
            streams[:] = before

    for name, replacement in (
        ("graph", Capture),
        ("stream", stream),
        ("CUDAGraph", object),
        ("graph_pool_handle", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch.cuda.current_stream(), "priority", -1)  # as a verifier's
    with pytest.raises(RuntimeError, match="previous error"):
        Recorder(CUDA).record(lambda: None)
    assert streams == ["usual"]


def test_pages_are_as_many_as_another_process_leaves_room_for(device: FakeDevice) -> None:
    """Between the look at the free memory and the allocation it has taken some."""
    pool = PagePool(2, 4, 16, torch.empty(0, device="cuda"))
    room = 40 * pool.page_bytes
    device.fail_when = lambda entry: entry.nbytes > room
    made = pool.grow_up_to(100)
    assert made == pool.pages == pool.free == 25, "a half, and a half of that"
    device.fail_when = lambda entry: True
    assert pool.grow_up_to(100) == made


def test_a_gpu_without_graphs_and_triton_is_as_right(
    device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(loaded_on("cuda", "qwen2", "float32"))
    engine.warm_up()
    assert "no Triton kernels" in caplog.text
    assert "no CUDA graphs" in caplog.text
    right = Engine(loaded_on("cuda", "qwen2", "float32"), paged=False)
    found, expected = (opened(each).feed(words(5)) for each in (engine, right))
    compare([found], [expected.cpu()], *TOLERANCES["float32"])


def test_pages_of_a_server_are_made_at_once(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on("qwen2", "float32", "paged")
    backend = engine._backend
    assert isinstance(backend, CudaBackend)
    before = device.allocated
    monkeypatch.setattr(device, "total", before + (192 << 20))
    room = engine.cache_room(rows=64, logits=16, pixels=0)
    pool = backend._pool
    assert pool.pages == pool.limit
    assert room == pool.pages * pool.page_bytes <= 0.9 * (192 << 20)
    assert device.allocated - before >= 0.9 * room > 0
    with device.watch() as ledger:
        opened(engine, tokens=300).feed(words(5))
    assert not [e for e in ledger.of("allocation") if e.where.startswith("engine/paging")]


@pytest.mark.parametrize("architecture", VISION)
def test_waits_of_a_picture_do_not_grow_with_the_vision_layers(
    device: FakeDevice, architecture: str
) -> None:
    config = ModelConfig(path=str(tiny_folder(architecture)), dtype="bfloat16", device="cuda")
    waits = []
    for times in (1, 3):
        loaded = load(config)
        blocks = loaded.model.model.visual.blocks
        blocks.extend(list(blocks) * (times - 1))
        session = Engine(loaded).open(encode(tiny_prompt(architecture), loaded))
        with device.watch() as ledger:
            session.encode_images()
        waits.append(ledger.waits)
    few, many = waits
    assert len(many) == len(few), ledger.show(many)


def watched(device: FakeDevice, engine: Engine, feeds: list[Feed]) -> Ledger:
    """Return the ledger of one pass; an equal one before it has made tables and the like."""
    results_of(engine, feeds)
    take_back(feeds)
    with device.watch(engine.loaded.model) as ledger:
        results_of(engine, feeds)
    return ledger


def engine_on(architecture: str, dtype: str, backend: str, candidates: int = 0) -> Engine:
    """Return an engine on the fake device; each of the kernels for GPUs counts as what it is."""
    loaded = loaded_on("cuda", architecture, dtype)
    eager, paged = backend == "eager", backend == "paged"
    engine = Engine(loaded, candidates=candidates, eager=eager, paged=paged)
    if paged:
        assert isinstance(engine._backend, CudaBackend)
        engine._backend._kernels = Kernels(
            launched(paged_kernels.attend, "attend", "join"),
            launched(paged_kernels.rotate_and_write, "rotate"),
            launched(paged_kernels.add_norm, "norm"),
            launched(paged_kernels.gate, "gate"),
        )
    return engine


def launched(operation: Callable[..., Tensor], *kernels: str) -> Callable[..., Tensor]:
    """Return an operation of plain torch that counts as launches of so many kernels."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        with _DEVICE.watch():
            result = operation(*args, **kwargs)
        for kernel in kernels:
            _DEVICE.note("launch", kernel)
        return result

    return run


def take_back(feeds: Sequence[Feed]) -> None:
    """Roll the sessions back to where they were before a pass."""
    for feed in feeds:
        feed.session.length -= 0 if feed.parents is not None else len(feed.ids)


# ---------------------------------------------------------------- calls of attention


@pytest.mark.parametrize("kind", ["chain", "tree", "sessions"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_are_aligned_at_every_length(device: FakeDevice, dtype: str, kind: str) -> None:
    engine = Engine(loaded_on("cuda", "qwen2", dtype, layers=2), paged=False)
    session, other = opened(engine), opened(engine, 1, 40)
    with device.watch() as ledger:
        for _ in range(64):
            trunk = session.length
            for new in (30, 9, 5, 1):
                feeds = [Feed(session, words(new), last=0)]
                if kind == "tree":
                    parents = [trunk - 1 + i // 2 for i in range(new)]
                    feeds = [Feed(session, words(new), last=0, parents=parents)]
                if kind == "sessions":
                    feeds.append(Feed(other, words(3), last=0))
                results_of(engine, feeds)
                session.length, other.length = trunk, 40
            session.feed(words(1), last=0)
    assert ledger.attentions
    askew = {
        (call.where, call.mask, call.mask_strides, call.mask_offset)
        for call in ledger.attentions
        if call.mask is not None
        and (
            call.mask_offset % ALIGNED_BYTES
            or call.mask_address % ALIGNED_BYTES
            or call.mask_strides[-1] != 1
            or any(stride % ALIGNED_ELEMENTS for stride in call.mask_strides[:-1])
        )
    }
    assert not askew, f"{len(askew)} masks: {sorted(askew)[:5]}"


@pytest.mark.parametrize("count", [1, 4])
def test_verifications_need_few_plans_of_attention(device: FakeDevice, count: int) -> None:
    """Each round feeds five tokens to each session and takes some of them back."""
    engine = Engine(loaded_on("cuda", "qwen2", "bfloat16", layers=2), paged=False)
    sessions = [opened(engine, seed) for seed in range(count)]
    with device.watch() as ledger:
        for turn in range(ROUNDS):
            results_of(engine, [Feed(session, words(5, turn)) for session in sessions])
            for seed, session in enumerate(sessions):
                session.length -= (turn + seed) % 5
    calls = {(c.query, c.key, c.strides, c.mask, c.mask_strides) for c in ledger.attentions}
    assert 0 < len(calls) <= ATTENTIONS, f"{len(calls)} different calls: {sorted(calls)[:5]}"


# ---------------------------------------------------------------- half precision


def wide_heads(folder: Path) -> Path:
    """Save a model with 4 layers of 8 query heads and 2 key-value heads, 64 wide."""
    tokenizer = random_tokenizer()
    generator = torch.get_rng_state()
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=512,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            vocab_size=len(tokenizer),
            initializer_range=0.08,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(folder)
    torch.set_rng_state(generator)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("heads", ["narrow", "wide"])
def test_bfloat16_errs_little_more_than_transformers(
    device: FakeDevice, heads: str, tmp_path: Path
) -> None:
    """Teacher-forced over 250 tokens: a prompt, then verifications of five tokens."""
    folder = wide_heads(tmp_path) if heads == "wide" else tiny_folder("qwen2")
    config = ModelConfig(path=str(folder), dtype="bfloat16")
    ids = words(250)
    with torch.inference_mode():
        own = load(config).model
        theirs = own(torch.tensor([ids])).logits[0].float()
        exact = own.float()(torch.tensor([ids])).logits[0]
    engine = Engine(load(ModelConfig(path=str(folder), dtype="bfloat16", device="cuda")))
    session = engine.open(EncodedPrompt(tuple(ids[:20])))
    pieces = [ids[:20], *(ids[begin : begin + 5] for begin in range(20, len(ids), 5))]
    ours = torch.cat([session.feed(piece).cpu() for piece in pieces]).float()
    exact, theirs = exact[:, : engine.vocab_size], theirs[:, : engine.vocab_size]
    error, allowed = (ours - exact).abs().mean(), HALF_ERROR * (theirs - exact).abs().mean()
    assert 0 < error <= allowed


# ---------------------------------------------------------------- failed allocations


def fresh(feeds: Sequence[Feed]) -> list[Tensor]:
    """Return the logits of the feeds, each in a pass of its own, and take the tokens back."""
    found = []
    for feed in feeds:
        found.append(feed.session.feed(feed.ids).cpu())
        feed.session.length -= len(feed.ids)
    return found


def test_a_cache_that_cannot_grow_ends_its_own_feed_only(device: FakeDevice) -> None:
    engine = Engine(loaded_on("cuda", "qwen2", "float32"), paged=False)
    sessions = [opened(engine, seed, length) for seed, length in enumerate((30, 126, 60))]
    expected = fresh([Feed(session.fork(), words(5)) for session in sessions])
    device.fail_when = lambda entry: entry.where.startswith("engine/cache.py")
    results = engine.run([Feed(session, words(5)) for session in sessions])
    assert device.failures
    device.fail_when = lambda entry: False
    assert isinstance(results[1], CollabError)
    assert [session.length for session in sessions] == [35, 126, 65]
    again = sessions[1].feed(words(5))
    found = logits_of([results[0], again, results[2]])
    compare(found, expected, *TOLERANCES["float32"])


def test_a_pass_that_is_too_large_is_run_in_halves(device: FakeDevice) -> None:
    engine = Engine(loaded_on("cuda", "qwen2", "float32"), paged=False)
    feeds = [Feed(opened(engine, seed, 40), words(5)) for seed in range(8)]
    expected = fresh(feeds)
    limit = largest(watched(device, engine, feeds))
    take_back(feeds)
    device.fail_when = lambda entry: entry.nbytes >= limit
    results = engine.run(feeds)
    assert device.failures
    compare(logits_of(results), expected, *TOLERANCES["float32"])
    assert {feed.session.length for feed in feeds} == {45}


def test_a_feed_that_is_too_large_alone_ends_alone(device: FakeDevice) -> None:
    """Its exception holds no memory, and its session goes on."""
    engine = Engine(loaded_on("cuda", "qwen2", "float32"), paged=False)
    small = [Feed(opened(engine, seed, 40), words(2)) for seed in range(3)]
    large = Feed(opened(engine, 3, 40), words(64))
    expected = fresh([*small, large])
    limit = largest(watched(device, engine, [large]))
    take_back([large])
    held = device.allocated
    device.fail_when = lambda entry: entry.nbytes >= limit
    (alone,) = engine.run([large])
    assert device.failures
    assert isinstance(alone, CollabError)
    gc.collect()
    assert device.allocated <= held
    results = engine.run([small[0], large, *small[1:]])
    device.fail_when = lambda entry: False
    assert isinstance(results[1], CollabError)
    assert large.session.length == 40
    found = logits_of([results[0], *results[2:], large.session.feed(large.ids)])
    compare(found, expected, *TOLERANCES["float32"])


def largest(ledger: Ledger) -> int:
    """Return the bytes of the largest allocation."""
    return max(entry.nbytes for entry in ledger.of("allocation"))
