"""Models with recurrent states: rollbacks restore a snapshot and read the tokens after it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from other_models import SIZES, write_other_model
from sessions import alone, near, opened
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForImageTextToText

from collab_llm_lab import reference
from collab_llm_lab.bench.lossless.check import transformers_generate
from collab_llm_lab.random_models import random_tokenizer
from collab_llm_nodes.decoding.rejection import own_token
from collab_llm_nodes.decoding.sampling import SamplingConfig, distributions
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed
from collab_llm_nodes.engine.stage import Stage
from collab_llm_nodes.errors import Cancelled, InvalidInput, ModelError
from collab_llm_nodes.models.architectures import RECURRENT
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, encode

MODEL = "qwen3_5_text"
PROMPT = EncodedPrompt(tuple(range(9, 49)))
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    **{f"linear_num_{part}_heads": count for part, count in (("key", 2), ("value", 4))},
    **{f"linear_{part}_head_dim": 8 for part in ("key", "value")},
}
CONVOLUTION = {"layer_types": ["conv", "full_attention"] * 2}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": DELTA,
    "lfm2": CONVOLUTION,
    "lfm2_moe": {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
    },
}


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(), SamplingConfig(temperature=1.0, law="coupled", seed=2)],
    ids=["greedy", "coupled"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_generate_across_rollbacks(
    family: str, sampling: SamplingConfig, tmp_path: Path
) -> None:
    """Each pass reads a draft that stands to a part, as a verifier does."""
    loaded = load(ModelConfig(str(write_other_model(tmp_path, family, **FAMILIES[family]))))
    right, _ = transformers_generate(loaded, PROMPT, sampling, 24, frozenset())
    assert right == reference.generate(loaded, PROMPT, sampling, 24, frozenset())
    assert len(set(right)) > 3, "a constant answer proves nothing"
    engine = Engine(loaded)
    session = engine.open(PROMPT)
    session.feed(PROMPT.ids[:-1], last=0)
    answer: list[int] = []
    while len(answer) < 24:
        stands = len(answer) % 4
        draft = [*right[len(answer) :][:stands], 3, 3]
        last = [*PROMPT.ids, *answer][-1]
        laws = distributions(session.feed([last, *draft]), sampling)
        at = len(answer)
        answer += [own_token(laws[i], sampling, at + i) for i in range(stands + 1)]
        session.length = len(PROMPT.ids) + len(answer) - 1
    assert answer[:24] == right


@pytest.mark.parametrize("family", REFUSED)
def test_a_pass_that_does_not_go_on_exactly_is_refused(family: str, tmp_path: Path) -> None:
    config = ModelConfig(str(write_other_model(tmp_path, family, **REFUSED[family])))
    with pytest.raises(ModelError, match=f"{family}.*recurrent states") as refused:
        load(config)
    assert refused.value.field == "path"


def test_every_family_is_tested() -> None:
    assert {*FAMILIES, "qwen3_5"} == {*RECURRENT}


@settings(max_examples=25)
@given(data=st.data())
def test_any_schedule_of_feeds_rollbacks_and_forks_equals_a_fresh_session(
    data: st.DataObject,
) -> None:
    """Rollbacks also go back into the prompt, and further than the snapshots that are kept."""
    engine = Engine(tiny_model(MODEL))
    session, prompt = opened(engine)
    tokens = st.integers(0, engine.vocab_size - 1)
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 16), label="steps")):
        session.length = data.draw(st.integers(0, len(held)), label="length")
        held = held[: session.length]
        if data.draw(st.booleans(), label="fork"):
            other = session.fork()
            session.feed([*prompt.ids[len(held) :], 7, 8])  # does not disturb its fork
            session = other
        new = list(prompt.ids[len(held) :])
        new += data.draw(st.lists(tokens, min_size=0 if new else 1, max_size=6), label="ids")
        logits = session.feed(new)
        held += new
        assert session.length == len(held)
        near(logits, engine.open(prompt).feed(held)[-len(new) :])


@pytest.mark.parametrize("fails", ["a layer", "a listener"])
def test_a_pass_that_fails_leaves_the_session_as_it_was(fails: str) -> None:
    engine = Engine(tiny_model(MODEL, exit_layers=(2,)))
    session, prompt = opened(engine)
    session.feed([*prompt.ids, 20, 21], last=0)
    session.length -= 1  # the next pass reads a token again

    def stop(*heard: object) -> None:
        raise Cancelled("nobody wants it")

    feeds = {
        "a layer": Feed(session, [30, 31], on_exit=stop),
        "a listener": Feed(session, [30, 31], on_states=stop),
    }
    assert isinstance(engine.run([feeds[fails]])[0], Cancelled)
    assert session.length == len(prompt.ids) + 1
    near(session.feed([40], last=1)[0], alone(engine, prompt, [20, 40]))


def test_exits_hear_the_new_tokens_only() -> None:
    engine = Engine(tiny_model(MODEL, exit_layers=(2,)))
    session, prompt = opened(engine)
    session.feed([*prompt.ids, 20, 21, 22], last=0)
    session.length -= 2
    heard: list[torch.Tensor] = []
    logits = session.feed([30, 31], lambda layer, x: heard.append(x))
    fresh, _ = opened(engine)
    fresh.feed([*prompt.ids, 20], last=0)
    near(logits, fresh.feed([30, 31], lambda layer, x: heard.append(x)))
    near(heard[0], heard[1])
    assert len(heard[0]) == 2


def test_a_session_holds_a_bounded_number_of_snapshots() -> None:
    engine = Engine(tiny_model(MODEL))
    session, prompt = opened(engine)
    session.feed(prompt.ids, last=0)
    first = session.own_bytes
    for _ in range(40):
        session.feed([7, 8, 9, 10, 11], last=0)
    assert session.own_bytes == first + 200 * engine._column_bytes
    assert engine.cache_bytes(session.length) >= session.own_bytes


def test_what_recurrent_states_cannot_do_is_refused(tmp_path: Path) -> None:
    loaded = tiny_model(MODEL)
    session, prompt = opened(Engine(loaded))
    session.feed(prompt.ids, last=0)
    with pytest.raises(ModelError, match="trees with recurrent states"):
        session.grow([3, 4], parents=[session.length - 1, session.length - 1])
    for wrong in (session.save, Engine(loaded).restore):
        with pytest.raises(ModelError, match="recurrent states are not saved"):
            wrong(tmp_path / "session")
    with pytest.raises(ModelError, match="known architectures are divided"):
        Stage(ModelConfig(loaded.config.path), 0, 2)
    near(session.feed([9])[0], alone(Engine(loaded), prompt, [9]))


def test_a_checkpoint_that_sees_is_loaded_for_its_text(tmp_path: Path) -> None:
    tokenizer = random_tokenizer()
    ids = {f"{name}_token_id": 5 + i for i, name in enumerate(("image", "video"))}
    marks = {f"vision_{end}_token_id": 7 + i for i, end in enumerate(("start", "end"))}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    text = {**SIZES, **DELTA, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, **ids, **marks)
    seeing = AutoModelForImageTextToText.from_config(config).eval()
    seeing.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load(ModelConfig(str(tmp_path)))
    with torch.inference_mode():
        expected = seeing(input_ids=torch.tensor([PROMPT.ids])).logits[0]
    near(Engine(loaded).open(PROMPT).feed(PROMPT.ids), expected[:, : len(tokenizer)])
    with pytest.raises(InvalidInput, match="reads text only"):
        encode(Prompt("go to the red ball", (b"",)), loaded)
