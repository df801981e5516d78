"""Models that see by transformers' own code: steps, rollbacks, forks and trees equal generate."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sessions import near
from tiny_models import scene, tiny_folder, tiny_model

from collab_llm_lab import reference
from collab_llm_lab.bench.lossless.check import transformers_generate
from collab_llm_lab.random_seeing_models import FAMILIES
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine import self_check
from collab_llm_nodes.engine.eager import EagerBackend
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed
from collab_llm_nodes.engine.stage import Stage
from collab_llm_nodes.errors import InvalidInput, ModelError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, encode

GREEDY = SamplingConfig()
TOKENS = 12
TREES = [name for name in FAMILIES if not name.startswith("gemma")]


@cache
def engine_of(name: str) -> Engine:
    return Engine(tiny_model(name, exit_layers=(2, 3)))


def asked(engine: Engine, images: int = 2) -> EncodedPrompt:
    shown = tuple(scene(seed, 90 + 30 * seed, 90) for seed in range(images))
    return encode(Prompt("go to the red ball", shown), engine.loaded)


@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_equal_generate_across_rollbacks(name: str, images: int) -> None:
    """Prompts come in pieces that cut pictures; drafts fall; a session goes back into a picture."""
    engine = engine_of(name)
    prompt = asked(engine, images)
    assert (prompt.shown > 0) == (images > 0)
    right, _ = transformers_generate(engine.loaded, prompt, GREEDY, TOKENS, frozenset())
    assert len(set(right)) > 3, "a constant answer proves nothing"
    session, ids, exits = engine.open(prompt), prompt.ids, dict[int, torch.Tensor]()
    for start in range(0, len(ids) - 1, 7):
        session.feed(ids[start : min(start + 7, len(ids) - 1)], last=0)
    answer = [int(session.feed(ids[-1:], exits.__setitem__)[-1].argmax())]
    assert exits.keys() == {2, 3}
    assert all(logits.isfinite().all() for logits in exits.values())
    while len(answer) < TOKENS:
        wrong = [(token + 1) % engine.vocab_size for token in answer[-3:]]
        session.feed([answer[-1], *wrong])  # a draft that falls
        session.length = len(ids) + len(answer) - 1
        if len(answer) % 5 == 0:  # into a picture, and back again
            session.length = len(ids) // 2
            session.feed([*ids[session.length :], *answer[:-1]], last=0)
        answer.append(int(session.feed(answer[-1:])[-1].argmax()))
    assert answer == right


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_after_a_placeholder_in_the_answer_are_the_models_own(name: str) -> None:
    """Generated, it is a token like any other."""
    engine = engine_of(name)
    prompt = asked(engine)
    answer = [9, engine.loaded.model.config.image_token_id, 11]
    session = engine.open(prompt)
    session.feed(prompt.ids, last=0)
    near(session.feed(answer)[-1], reference.next_logits(engine.loaded, prompt, answer))


@pytest.mark.parametrize("name", FAMILIES)
def test_forks_of_a_prompt_with_pictures_go_their_own_ways(name: str) -> None:
    engine = engine_of(name)
    prompt = asked(engine)
    session = engine.open(prompt)
    session.feed(prompt.ids, last=0)
    forks = [session.fork(), session.fork()]
    results = engine.run([Feed(fork, [20 + i, 30], last=1) for i, fork in enumerate(forks)])
    session.close()
    for i, found in enumerate(results):
        assert isinstance(found, torch.Tensor), found
        near(found[0], reference.next_logits(engine.loaded, prompt, [20 + i, 30]))


@pytest.mark.parametrize("name", TREES)
def test_nodes_of_a_tree_attend_to_their_own_path(name: str) -> None:
    engine = engine_of(name)
    prompt = asked(engine)
    session = engine.open(prompt)
    session.feed(prompt.ids, last=0)
    end = session.length - 1
    found = session.grow([20, 30, 21, 31], [end, end, end + 1, end + 2])
    for row, path in enumerate(([20], [30], [20, 21], [30, 31])):
        near(found[row], reference.next_logits(engine.loaded, prompt, path))
    session.retain(end + 4)
    near(session.feed([9])[-1], reference.next_logits(engine.loaded, prompt, [30, 31, 9]))


def test_models_with_windows_grow_no_trees() -> None:
    engine = engine_of("gemma3")
    session = engine.open(asked(engine))
    session.feed(session.prompt.ids, last=0)
    with pytest.raises(ModelError, match="sliding windows"):
        session.grow([3, 4], [session.length - 1] * 2)


def test_logits_within_pictures_are_refused_and_nothing_is_changed() -> None:
    engine = engine_of("internvl")
    prompt = asked(engine)
    session = engine.open(prompt)
    with pytest.raises(InvalidInput, match="end of the prompt's pictures") as caught:
        session.feed(prompt.ids)
    assert (caught.value.field, session.length) == ("last", 0)
    assert session.feed(prompt.ids, last=len(prompt.ids) - prompt.shown).shape[0]


def test_what_is_lacking_is_refused_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ModelConfig(str(tiny_folder("gemma3")))
    with caplog.at_level(logging.WARNING):
        engine = Engine(load(config))
    assert "one session at a time" in caplog.text
    assert "no token trees" in caplog.text
    assert engine.eager
    session = engine.open(asked(engine))
    session.feed(session.prompt.ids, last=0)
    with pytest.raises(ModelError, match="not saved"):
        session.save(tmp_path / "session")
    with pytest.raises(ModelError, match="known architectures are divided"):
        Stage(config, 0, 2)


def test_a_processor_that_places_too_few_features_is_a_typed_error() -> None:
    """The one feed fails, and the next session is not disturbed."""
    engine = engine_of("internvl")
    prompt = asked(engine)
    assert prompt.processed is not None
    fewer = {**prompt.processed, "pixel_values": prompt.processed["pixel_values"][:-1]}
    bad = engine.open(EncodedPrompt(prompt.ids, processed=fewer, shown=prompt.shown))
    good = engine.open(prompt)
    failed, found = engine.run([Feed(s, prompt.ids, last=1) for s in (bad, good)])
    assert isinstance(failed, ModelError)
    assert failed.field == "images"
    assert (bad.length, bad.own_bytes) == (0, 0)
    assert isinstance(found, torch.Tensor)
    near(found[0], reference.next_logits(engine.loaded, prompt, []))


@pytest.mark.parametrize("fault", ["positions", "mask"])
def test_a_model_whose_steps_differ_from_its_generate_is_refused(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for families of which nobody knows: the check at the start finds them."""
    read = EagerBackend.read_pictures

    def misread(self: EagerBackend, prompt: EncodedPrompt, cache: Any) -> int:
        if fault == "positions":
            return read(self, prompt, cache) + 3
        causal = {k: v for k, v in (prompt.processed or {}).items() if k != "token_type_ids"}
        return read(self, EncodedPrompt(prompt.ids, processed=causal, shown=prompt.shown), cache)

    loaded = load(ModelConfig(str(tiny_folder("gemma3"))))
    Engine(loaded)
    monkeypatch.setattr(EagerBackend, "read_pictures", misread)
    with pytest.raises(ModelError, match="answers otherwise in steps") as caught:
        Engine(loaded)
    assert caught.value.field == "path"


def test_a_model_that_cannot_answer_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("of next year")

    monkeypatch.setattr(self_check, "_generated", broken)
    with pytest.raises(ModelError, match="does not answer.*of next year"):
        self_check.check_steps(SimpleNamespace(loaded=tiny_model("llava"), vocab_size=1))  # type: ignore[arg-type]
