"""The engine against a separately written loop and transformers' own generate; rollback; exits."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GROWING, VISION, tiny_model, tiny_prompt

from collab_llm_lab import reference
from collab_llm_lab.bench.lossless.check import transformers_generate
from collab_llm_nodes.decoding.rejection import propose, verify_chain
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution, distributions
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.engine.static import StaticBackend
from collab_llm_nodes.errors import Cancelled, InvalidInput, ProtocolError
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import ARCHITECTURES, decoder_parts
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt, encode

GREEDY = SamplingConfig()
COUPLED = SamplingConfig(temperature=1.0, law="coupled", seed=11)
TOKENS = 24


def open_session(
    loaded: LoadedModel, engine: Engine, seed: int = 0
) -> tuple[Session, EncodedPrompt]:
    prompt = encode(tiny_prompt(loaded.model.config.model_type, seed), loaded)
    return engine.open(prompt), prompt


def speculate(
    draft: Engine,
    target: Engine,
    prompts: tuple[EncodedPrompt, EncodedPrompt],
    sampling: SamplingConfig,
    gamma: int,
    max_tokens: int = TOKENS,
    eos: frozenset[int] = frozenset(),
) -> tuple[list[int], int]:
    """The plainest speculative loop on two sessions; returns the answer and its rounds."""
    draft_session, target_session = draft.open(prompts[0]), target.open(prompts[1])
    draft_session.feed(prompts[0].ids[:-1], last=0)
    target_session.feed(prompts[1].ids[:-1], last=0)
    answer: list[int] = []
    rounds = 0
    while len(answer) < max_tokens and not (answer and answer[-1] in eos):
        rounds += 1
        confirmed = [*prompts[0].ids, *answer]
        draft_session.length = min(draft_session.length, len(confirmed) - 1)
        pending = confirmed[draft_session.length :]
        tokens: list[int] = []
        sent = []
        for i in range(min(gamma, max_tokens - len(answer) - 1)):
            logits = draft_session.feed(pending, last=1)[-1]
            token, q = propose(distribution(logits, sampling), sampling, len(answer) + i, 64)
            tokens.append(token)
            sent.append(q)
            pending = [token]
            if token in eos:
                break
        last = [*prompts[1].ids, *answer][-1]
        p = distributions(target_session.feed([last, *tokens]), sampling)
        probs = [q for q in sent if q is not None] if sampling.sends_probabilities else None
        outcome = verify_chain(p, tokens, probs, sampling, len(answer), eos)
        answer += tokens[: outcome.accepted]
        answer += [outcome.next_token] if outcome.next_token >= 0 else []
        target_session.length = len(prompts[1].ids) + len(answer) - 1
    return answer, rounds


def hf_greedy(loaded: LoadedModel, prompt: EncodedPrompt, max_tokens: int) -> list[int]:
    return transformers_generate(loaded, prompt, GREEDY, max_tokens, frozenset())[0]


def cached(session: Session) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer [heads, columns, head_dim]."""
    data = torch.cat(session.keys_values(), dim=2)
    heads = data.shape[1] // 2
    return [(layer[:heads], layer[heads:]) for layer in data]


def draft_for(architecture: str, kind: str) -> LoadedModel:
    if kind == "same":
        return tiny_model(architecture)
    if kind == "unrelated":
        return tiny_model(architecture, seed=7, layers=2)
    return tiny_model(architecture, head_noise=0.4)


@pytest.mark.parametrize("kind", ["same", "unrelated", "noisy"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_reference_and_transformers(architecture: str, kind: str) -> None:
    target, draft = tiny_model(architecture), draft_for(architecture, kind)
    prompt = tiny_prompt(architecture, seed=3)
    prompts = encode(prompt, draft), encode(prompt, target)
    answer, rounds = speculate(Engine(draft), Engine(target), prompts, GREEDY, gamma=4)
    assert answer == reference.generate(target, prompts[1], GREEDY, TOKENS, frozenset())
    assert answer == hf_greedy(target, prompts[1], TOKENS)
    assert len(set(answer)) > 3, "a constant answer proves nothing"
    if kind == "same":
        assert rounds == 5  # 24 tokens, 5 a round
    elif kind == "noisy":
        assert 5 < rounds < TOKENS, "some drafts stand, some fall"
    else:
        assert rounds > 15


@pytest.mark.parametrize("kind", ["same", "unrelated", "noisy"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_coupled_sampling_equals_reference(architecture: str, kind: str) -> None:
    target, draft = tiny_model(architecture), draft_for(architecture, kind)
    prompt = tiny_prompt(architecture, seed=4)
    prompts = encode(prompt, draft), encode(prompt, target)
    answer, rounds = speculate(Engine(draft), Engine(target), prompts, COUPLED, gamma=3)
    assert answer == reference.generate(target, prompts[1], COUPLED, TOKENS, frozenset())
    assert answer == transformers_generate(target, prompts[1], COUPLED, TOKENS, frozenset())[0]
    assert rounds == 6 if kind == "same" else rounds > 6


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
def test_ends_inside_a_draft(gamma: int) -> None:
    """An end token in the middle of an accepted run, and a length limit inside a draft."""
    loaded = tiny_model("qwen2")
    engine = Engine(loaded)
    prompt = encode(tiny_prompt("qwen2"), loaded)
    full = reference.generate(loaded, prompt, GREEDY, TOKENS, frozenset())
    for end in (full[1], full[5], full[10]):
        eos = frozenset({end})
        expected = full[: full.index(end) + 1]
        assert speculate(engine, engine, (prompt, prompt), GREEDY, gamma, eos=eos)[0] == expected
        assert reference.generate(loaded, prompt, GREEDY, TOKENS, eos) == expected
    for limit in (1, 2, 7):
        answer, _ = speculate(engine, engine, (prompt, prompt), GREEDY, gamma, max_tokens=limit)
        assert answer == full[:limit]


def test_padded_vocabularies_meet_in_the_common_part() -> None:
    """Qwen2-VL 2B and 7B pad one tokenizer to different logits sizes."""
    wide, narrow = tiny_model("qwen2_vl", padding=37), tiny_model("qwen2_vl", seed=1, padding=5)
    engines = Engine(narrow), Engine(wide)
    assert engines[0].vocab_size == engines[1].vocab_size == len(wide.tokenizer)
    prompt = tiny_prompt("qwen2_vl")
    prompts = encode(prompt, narrow), encode(prompt, wide)
    answer, _ = speculate(*engines, prompts, GREEDY, gamma=2)
    assert answer == hf_greedy(wide, prompts[1], TOKENS)


# ---------------------------------------------------------------- rollback


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llama", "opt"])
@settings(max_examples=15)
@given(data=st.data())
def test_any_schedule_of_feeds_and_rollbacks_equals_a_fresh_prefill(
    architecture: str, data: st.DataObject
) -> None:
    loaded = tiny_model(architecture)
    engine = Engine(loaded)
    session, prompt = open_session(loaded, engine)
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 5), label="feeds")):
        session.length = data.draw(st.integers(0, len(held)), label="length")
        held = held[: session.length]
        left = list(prompt.ids[len(held) :])
        fed = left[: data.draw(st.integers(1, len(left)), label="prompt part")] if left else []
        if len(fed) == len(left):
            fed += data.draw(
                st.lists(st.integers(0, engine.vocab_size - 1), min_size=1, max_size=6)
            )
        logits = session.feed(fed)
        held += fed
        assert session.length == len(held)
    fresh, _ = open_session(loaded, engine)
    expected = fresh.feed(held)
    # Rows filled up (kernel_rows) are another kernel's, which rounds otherwise.
    torch.testing.assert_close(logits, expected[-len(logits) :], atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(cached(session), cached(fresh), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_feed_equals_full_recomputation(architecture: str) -> None:
    loaded = tiny_model(architecture)
    session, prompt = open_session(loaded, Engine(loaded), seed=5)
    answer = [9, 300, 12, 5]  # 5 is the image placeholder: generated, it is a token like any other
    logits = session.feed([*prompt.ids, *answer], last=5)
    for i in range(5):
        expected = reference.next_logits(loaded, prompt, answer[:i])
        # Rows filled up (kernel_rows) are another kernel's, which rounds otherwise.
        torch.testing.assert_close(logits[i], expected, atol=5e-5, rtol=1e-4)


def test_sliding_window_survives_rollback() -> None:
    loaded = tiny_model("qwen2", seed=20)
    config = loaded.model.config
    config.sliding_window = 8
    config.layer_types = ["full_attention", "sliding_attention"] * 2
    layers: Any = decoder_parts(loaded.model).layers
    for layer, kind in zip(layers, config.layer_types, strict=True):
        layer.attention_type = kind
        layer.self_attn.sliding_window = 8 if kind == "sliding_attention" else None
    loaded.model.model.has_sliding_layers = True
    engine = Engine(loaded)
    session, prompt = open_session(loaded, engine)
    session.feed([*prompt.ids, *range(40, 60)], last=0)
    session.length -= 15
    after = session.feed([7, 8, 9])
    answer = [*range(40, 45), 7, 8, 9]
    torch.testing.assert_close(
        after[-1], reference.next_logits(loaded, prompt, answer), atol=1e-5, rtol=1e-4
    )


# ---------------------------------------------------------------- sessions


@pytest.mark.parametrize("architecture", VISION)
def test_sessions_share_nothing(architecture: str) -> None:
    """Different images, so different M-RoPE offsets, interleaved on one model."""
    loaded = tiny_model(architecture)
    engine = Engine(loaded)
    prompts = [encode(tiny_prompt(architecture, seed=i, images=i + 1), loaded) for i in range(3)]
    assert len({p.position_delta for p in prompts}) == 3
    expected = [reference.generate(loaded, p, GREEDY, 6, frozenset()) for p in prompts]
    sessions = [engine.open(p) for p in prompts]
    answers: list[list[int]] = [[], [], []]
    for step in range(6):
        for session, prompt, answer in zip(sessions, prompts, answers, strict=True):
            logits = session.feed(answer[-1:] if step else prompt.ids, last=1)
            answer.append(int(logits[-1].argmax()))
    assert answers == expected


def test_threads_share_an_engine_without_crosstalk() -> None:
    loaded = tiny_model("qwen2_vl", exit_layers=(1, 2, 3))
    engine = Engine(loaded)
    prompts = [encode(tiny_prompt("qwen2_vl", seed=i), loaded) for i in range(4)]

    def run(prompt: EncodedPrompt) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        session = engine.open(prompt)
        session.feed(prompt.ids, lambda layer, x: seen.append(x), last=2)
        for token in range(20, 26):
            seen.append(session.feed([token], lambda layer, x: seen.append(x)))
        return seen

    expected = [run(p) for p in prompts]
    results: dict[int, list[torch.Tensor]] = {}
    threads = [
        threading.Thread(target=lambda i=i, p=p: results.update({i: run(p)}))  # type: ignore[misc]
        for i, p in enumerate(prompts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for i, alone in enumerate(expected):
        assert len(results[i]) == len(alone)
        for a, b in zip(results[i], alone, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_threads_that_need_fewer_positions_leave_the_longer_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Engine(tiny_model("llama"))._backend
    assert isinstance(backend, StaticBackend)
    plain, entered, release = backend._rotations.angles, threading.Event(), threading.Event()

    def angles(positions: torch.Tensor, kind: str) -> torch.Tensor:
        if len(positions) == 1024:  # the short table is held up in the making
            entered.set()
            assert release.wait(60)
        return plain(positions, kind)

    monkeypatch.setattr(backend._rotations, "angles", angles)
    lengths: dict[int, int] = {}

    def look_up(columns: int) -> None:
        lengths[columns] = len(backend._rotations.table(columns, ""))

    short, long = (threading.Thread(target=look_up, args=(n,)) for n in (10, 2000))
    short.start()
    assert entered.wait(60)
    long.start()
    long.join(0.2)  # it either waits for the other or has overtaken it
    release.set()
    short.join(60)
    long.join(60)
    assert lengths[2000] >= 2000
    assert len(backend._rotations.table(10, "")) >= 2000, "a shorter table took its place"


def test_a_closed_session_frees_its_cache() -> None:
    loaded = tiny_model("llama")
    session, prompt = open_session(loaded, Engine(loaded))
    session.feed(prompt.ids)
    keys = weakref.ref(session._cache.own)
    assert keys() is not None
    session.close()
    gc.collect()
    assert keys() is None
    with pytest.raises(ProtocolError, match="closed"):
        session.feed([1])
    session.close()


def test_wrong_feeds_are_refused_and_change_nothing() -> None:
    loaded = tiny_model("opt")
    engine = Engine(loaded)
    session, prompt = open_session(loaded, engine)
    with pytest.raises(InvalidInput, match="prompt"):
        session.feed([prompt.ids[0] + 1])
    session.feed(prompt.ids, last=0)
    for ids in ([engine.vocab_size], [-1], [1] * engine.context):
        with pytest.raises(InvalidInput):
            session.feed(ids)
    for length in (-1, session.length + 1):
        with pytest.raises(ProtocolError, match="roll back"):
            session.length = length
    assert session.length == len(prompt.ids)
    assert session.feed([]).shape == (0, engine.vocab_size)
    assert session.feed([5], last=0).shape == (0, engine.vocab_size)


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(("architecture", "eager"), [p for p in GROWING if p[0] not in VISION])
def test_a_pass_stays_on_the_models_device_and_waits_for_nothing(
    architecture: str, eager: bool
) -> None:
    """The meta device computes nothing: tensors of two devices, and reading a result, fail there.

    So it stands for a GPU, on which each such read would make the host wait during a pass.
    """
    own = tiny_model.__wrapped__(architecture, exit_layers=(1, 2))  # others' users may hold locks
    assert own.adapters is not None
    model, adapters = (copy.deepcopy(part).to("meta") for part in (own.model, own.adapters))
    loaded = replace(own, model=model, adapters=adapters)
    engine = Engine(loaded, eager=eager)
    seen: list[torch.Tensor] = []
    sessions = []
    for _ in range(2):
        session, prompt = open_session(own, engine)
        seen.append(session.feed(prompt.ids, lambda layer, x: seen.append(x), last=1))
        sessions.append(session)
    feeds = [Feed(session, [5, 6, 7], lambda layer, x: seen.append(x)) for session in sessions]
    results = engine.run(feeds)
    seen += [result for result in results if isinstance(result, torch.Tensor)]
    seen.append(sessions[0].grow([5, 6], [sessions[0].length - 1] * 2))
    sessions[0].retain(sessions[0].length)
    assert [x.device.type for x in seen] == ["meta"] * (2 * (2 + 1) + 2 * (2 + 1) + 1)


# ---------------------------------------------------------------- early exits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exits_fire_in_order_with_the_logits_of_their_layer(architecture: str) -> None:
    loaded = tiny_model(architecture, exit_layers=(1, 3))
    engine = Engine(loaded)
    parts = decoder_parts(loaded.model)
    session, prompt = open_session(loaded, engine)
    session.feed(prompt.ids, last=0)
    seen: dict[int, torch.Tensor] = {}
    logits = session.feed([5, 6, 7], on_exit=lambda layer, x: seen.update({layer: x}), last=2)
    assert list(seen) == [1, 3]
    assert all(x.shape == logits.shape for x in seen.values())
    peer = Engine(tiny_model(architecture), eager=True).open(prompt)
    peer.feed(prompt.ids, last=0)
    kept: list[torch.Tensor] = []
    handle = (
        decoder_parts(tiny_model(architecture).model)
        .layers[2]
        .register_forward_hook(lambda m, a, out: kept.append(out))
    )
    peer.feed([5, 6, 7])
    handle.remove()
    expected = parts.logits(kept[0][0, -2:])[:, : engine.vocab_size]
    torch.testing.assert_close(seen[3], expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(seen[3], logits, atol=1e-2)
    engine.close()
    seen.clear()
    session.feed([8], on_exit=lambda layer, x: seen.update({layer: x}))
    assert not seen


def test_an_exit_comes_before_later_layers_run() -> None:
    loaded = tiny_model("qwen2_vl", exit_layers=(2,))
    order: list[str] = []
    layers = decoder_parts(loaded.model).layers
    handles = [
        layers[i].register_forward_hook(lambda *_, i=i: order.append(f"layer {i + 1}"))
        for i in range(4)
    ]
    engine = Engine(loaded, eager=True)
    session, prompt = open_session(loaded, engine)
    session.feed(prompt.ids, on_exit=lambda layer, x: order.append(f"exit {layer}"), last=1)
    for handle in handles:
        handle.remove()
    engine.close()
    assert order == ["layer 1", "layer 2", "exit 2", "layer 3", "layer 4"]


def test_an_exception_in_an_exit_leaves_the_session_as_it_was() -> None:
    """A cancelled verification must not leave half of the layers ahead of the others."""
    loaded = tiny_model("qwen2_vl", exit_layers=(2,))
    engine = Engine(loaded)
    session, prompt = open_session(loaded, engine)

    def cancel(layer: int, logits: torch.Tensor) -> None:
        raise Cancelled("the caller went away")

    for ids in (prompt.ids, [5, 6, 7]):
        before = session.length
        with pytest.raises(Cancelled):
            session.feed(ids, on_exit=cancel)
        assert session.length == before
        session.feed(ids, last=0)
    expected = reference.next_logits(loaded, prompt, [5, 6, 7, 8])
    torch.testing.assert_close(session.feed([8])[-1], expected, atol=1e-5, rtol=1e-4)


def test_adapters_correct_their_exit() -> None:
    base = tiny_model("qwen2_vl")
    parts = decoder_parts(base.model)
    adapters = ExitAdapters(parts.hidden_size, (1, 2), width=4)
    torch.manual_seed(0)
    torch.nn.init.normal_(adapters.corrections["2"][2].weight)  # type: ignore[index, arg-type]
    loaded = LoadedModel(base.model, base.tokenizer, base.image_processor, adapters, base.config)
    plain = tiny_model("qwen2_vl", exit_layers=(1, 2))
    found = []
    for model in (loaded, plain):
        engine = Engine(model)
        session, prompt = open_session(model, engine)
        seen: dict[int, torch.Tensor] = {}
        session.feed(prompt.ids, on_exit=lambda layer, x, s=seen: s.update({layer: x}), last=1)  # type: ignore[misc]
        engine.close()
        found.append(seen)
    torch.testing.assert_close(found[0][1], found[1][1])  # untrained: identity
    assert not torch.allclose(found[0][2], found[1][2], atol=1e-2)


@pytest.mark.parametrize("architecture", ["qwen2_vl", "llama"])
def test_candidate_exits_score_the_draft_and_the_best(architecture: str) -> None:
    loaded = tiny_model(architecture, exit_layers=(1, 2, 3))
    found = []
    for candidates in (0, 5):
        engine = Engine(loaded, candidates=candidates)
        session, prompt = open_session(loaded, engine)
        session.feed(prompt.ids[:-1], last=0)
        seen: list[torch.Tensor] = []
        ids = [prompt.ids[-1], 20, 21, 22]
        session.feed(ids, on_exit=lambda layer, x, s=seen: s.append(x))  # type: ignore[misc]
        engine.close()
        found.append(seen)
    full, sparse = found
    torch.testing.assert_close(full[0], sparse[0])
    for layer in (1, 2):
        scored = torch.isfinite(sparse[layer])
        assert scored[:, [20, 21, 22]].all()
        assert scored.sum(dim=1).max() <= 4 * 5 + 4
        torch.testing.assert_close(sparse[layer][scored], full[layer][scored], atol=1e-5, rtol=1e-5)
    best = full[0].topk(5).indices
    assert torch.isfinite(sparse[1].gather(1, best)).all()


def test_more_candidates_than_tokens_are_all_tokens() -> None:
    loaded = tiny_model("llama", exit_layers=(1, 2))
    found = []
    for candidates in (0, 1_000_000):
        engine = Engine(loaded, candidates=candidates)
        session, prompt = open_session(loaded, engine)
        seen: list[torch.Tensor] = []
        session.feed(prompt.ids, on_exit=lambda layer, x, s=seen: s.append(x), last=1)  # type: ignore[misc]
        engine.close()
        found.append(seen)
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
