"""Training of the text family: rows from seeds, an equal forward pass, resuming, all stages."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from signals import ignores
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import Recipe, pick_device
from collab_llm_lab.training.text import trainer
from collab_llm_lab.training.text.distillation import Teacher, questions
from collab_llm_lab.training.text.forward import TextForward
from collab_llm_lab.training.text.learners import GuessLearner, LanguageLearner, attention_loss
from collab_llm_lab.training.text.models import (
    TINY,
    answers,
    build,
    engine_of,
    export,
)
from collab_llm_lab.training.text.plans import MODELS, STAGES, TINY_PLAN
from collab_llm_lab.training.text.rendering import (
    ANSWERED,
    ASKED,
    NOWHERE,
    SHORT,
    Document,
    Renderer,
    pack,
    prompt_text,
)
from collab_llm_lab.training.text.samples import SUB_DOMAINS, Sample, draw_sample, make_sample
from collab_llm_lab.training.text.shards import Corpus, Makers, Rows, make_shard
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput, ModelError
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import MedusaHeads
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig, load
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.tokenizer import TEXT_SPECIAL, token_id, train_text_tokenizer
from collab_llm_nodes.models.turns import Turn

CPU = torch.device("cpu")
LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    rng = random.Random(0)
    texts = [turn.content for _ in range(60) for turn in draw_sample(rng).turns]
    return train_text_tokenizer(texts, 512)


def shaken(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Any:
    """Return a tiny model whose every parameter matters."""
    model = build(TINY, tokenizer, seed)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def some_ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(5))


def batch_of(ids: torch.Tensor, sources: torch.Tensor | None = None) -> torch.Tensor:
    """Return rows as ``Rows.batch`` does; nothing is copied unless ``sources`` say so."""
    return torch.stack([ids, torch.full_like(ids, NOWHERE) if sources is None else sources], dim=1)


# ---------------------------------------------------------------- texts and rows


def test_digits_are_single_tokens_and_any_text_returns(tokenizer: PreTrainedTokenizerBase) -> None:
    assert [token_id(tokenizer, token) for token in TEXT_SPECIAL] == [0, 1, 2]
    text = "In 2026 it cost $1,234.50. Où est la balle? 球"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert all(len(piece) == 1 for piece in pieces if any(c.isdigit() for c in piece))


@pytest.mark.parametrize("sub_domain", ["conversation", "instructions", "reports"])
def test_training_ids_are_those_of_the_chat_template(
    tokenizer: PreTrainedTokenizerBase, sub_domain: str
) -> None:
    rng = random.Random(1)
    samples = [make_sample(rng, sub_domain, skill) for skill in ("plain", "extract")]
    for sample, (ids, kinds, _) in zip(samples, Renderer(tokenizer).chats(samples), strict=True):
        chat: Any = [{"role": t.role, "content": t.content} for t in sample.turns]
        prompt = tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, tokenize=False
        )
        assert prompt == prompt_text(sample.turns[:-1])
        asked = tokenizer(str(prompt)).input_ids
        answer = tokenizer(sample.turns[-1].content + "<|im_end|>").input_ids
        newline = tokenizer("\n").input_ids
        assert ids.tolist() == [*asked, *answer, *newline, 0]
        kind = SHORT if len(answer) <= 24 else ANSWERED
        assert set(kinds[len(asked) : -2]) == {kind}
        assert (kinds[len(asked) - 1], kinds[-1]) == (ASKED, ASKED)


def test_control_tokens_in_a_text_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = (Turn("user", "say <|im_end|>"), Turn("assistant", "no"))
    sample = Sample("reports", "plain", turns, {})
    for render in (Renderer(tokenizer).chats, Renderer(tokenizer).raw):
        with pytest.raises(InvalidInput, match="control token"):
            render([sample])


def test_rows_hold_whole_documents_and_begin_with_one() -> None:
    rng = np.random.default_rng(0)
    made: list[Document] = []
    for number in range(1, 200):
        ids = np.full(int(rng.integers(1, 80)), number, np.uint16)
        made.append((ids, np.full(len(ids), 2, np.uint8), np.arange(len(ids), dtype=np.int16) - 1))
    ids, kinds, sources = pack(iter(made), LENGTH, 60, padding=0)
    lengths = {int(tokens[0]): len(tokens) for tokens, *_ in made}
    assert np.array_equal(kinds > 0, ids > 0)
    row, place = np.nonzero(sources >= 0)
    assert (sources[row, place] == place - 1).all()  # places in the row, not in the document
    assert (sources < 0).sum() == (ids == 0).sum() + len(np.unique(ids[ids > 0]))
    assert (ids[:, 0] > 0).all()
    found, counts = np.unique(ids[ids > 0], return_counts=True)
    assert all(lengths[n] == count for n, count in zip(found.tolist(), counts, strict=True))
    for n in found.tolist():
        assert len(np.unique(np.argwhere(ids == n)[:, 0])) == 1
    assert (ids == 0).mean() < 0.1
    oldest = next(n for n, length in lengths.items() if length <= LENGTH)
    assert oldest in found  # it does not wait for ever


@pytest.mark.exhaustive
def test_a_shard_follows_from_seed_and_number(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    contents = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        corpus = Corpus(str(tmp_path / name), 2, rows=2, seed=seed)
        if name == "b":  # by processes, as in training
            with Makers(tmp_path / "tokenizer", corpus, 2) as makers:
                assert makers.wait(2, lambda made, of: None, lambda: False)
        else:
            (tmp_path / name).mkdir()
            for shard in (0, 1):
                make_shard(tokenizer, corpus, shard)
        contents.append([np.load(corpus.file(shard)) for shard in corpus.ready()])
    (a, a1), (b, b1), (c, _) = contents
    assert np.array_equal(a, b)
    assert np.array_equal(a1, b1)
    assert not np.array_equal(a, a1)
    assert not np.array_equal(a, c)


def test_an_error_in_a_data_process_ends_the_run(tmp_path: Path) -> None:
    corpus = Corpus(str(tmp_path / "data"), 1, rows=1)
    with (
        Makers(tmp_path / "no-tokenizer", corpus, 1) as makers,
        pytest.raises(CollabError, match="training data"),
    ):
        makers.wait(1, lambda made, of: None, lambda: False)
    with Makers(tmp_path, corpus, 0) as nothing, pytest.raises(CollabError, match="no process"):
        nothing.wait(1, lambda made, of: None, lambda: False)


def test_processes_that_make_data_ignore_ctrl_c(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    with Makers(tmp_path, Corpus(str(tmp_path / "data"), 1, rows=1), 1) as makers:
        (process,) = makers._processes
        assert process.pid is not None
        assert ignores(process.pid, signal.SIGINT)
    engine: Any = None  # no answer is asked for
    with Teacher(engine, tmp_path, TINY_PLAN.answers, LENGTH, 0, 1) as teacher:
        assert ignores(teacher._submit(os.getpid).result(), signal.SIGINT)


def test_a_stop_hides_that_the_signal_ended_the_processes(tmp_path: Path) -> None:
    corpus = Corpus(str(tmp_path / "data"), 1, rows=1)
    with Makers(tmp_path / "no-tokenizer", corpus, 1) as makers:
        (process,) = makers._processes
        process.terminate()
        process.join()
        assert not makers.wait(1, lambda made, of: None, lambda: True)


def test_batches_follow_from_seed_and_step(tmp_path: Path) -> None:
    for number in range(3):
        rows = np.full((3, 4, LENGTH), number, np.int16)
        np.save(tmp_path / f"{number}.npy", rows)
    files = sorted(tmp_path.glob("*.npy"))
    one, other = Rows(LENGTH, 7, CPU), Rows(LENGTH, 7, CPU)
    one.add(files)
    for file in files:  # as they are made
        other.add([file])
    assert len(one) == len(other) == 12
    for step in range(4):
        for a, b in zip(one.batch(step, 5), other.batch(step, 5), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ConfigError, match="another plan"):
        Rows(LENGTH * 2, 0, CPU).add(files)


@pytest.mark.parametrize("kept", [0, 40, 200])
def test_damaged_rows_are_reported_with_their_remedy(kept: int, tmp_path: Path) -> None:
    file = tmp_path / "shard-00000.npy"
    np.save(file, np.zeros((3, 4, LENGTH), np.int16))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(InvalidInput, match="shard-00000.npy") as error:
        Rows(LENGTH, 0, CPU).add([file])
    assert "delete it" in error.value.remedy


# ---------------------------------------------------------------- the forward pass


def test_forward_pass_equals_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    model = shaken(tokenizer)
    ids = some_ids(3, 40, len(tokenizer))
    with torch.no_grad():
        theirs = model(ids, output_hidden_states=True)
        forward = TextForward(model, LENGTH)
        layers = forward(ids)
    torch.testing.assert_close(forward.logits(layers[-1]), theirs.logits, atol=2e-5, rtol=1e-4)
    for ours, layer in zip(layers[:-1], theirs.hidden_states[1:], strict=False):
        torch.testing.assert_close(ours, layer, atol=2e-5, rtol=1e-4)


def test_batched_answers_equal_transformers_one_by_one(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    export(shaken(tokenizer), tokenizer, tmp_path / "model")
    engine = engine_of(tmp_path / "model", CPU)
    model = load(ModelConfig(str(tmp_path / "model"))).model
    prompts = [some_ids(1, n, len(tokenizer))[0].tolist() for n in (3, 17, 9)]
    for prompt, answer in zip(prompts, answers(engine, prompts, 24), strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(ids, max_new_tokens=24, do_sample=False)
        assert answer == made[0, len(prompt) :].tolist()


def test_sampled_answers_follow_from_the_seed(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    export(shaken(tokenizer), tokenizer, tmp_path / "model")
    engine = engine_of(tmp_path / "model", CPU)
    laws = [SamplingConfig(temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (answers(engine, [[5, 6, 7]] * 4, 12, law) for law in laws)
    assert first == again != other
    assert first[0] != first[1] == other[0]  # each prompt has the seed after the last one's


# ---------------------------------------------------------------- learning


def recipe(**changed: Any) -> Recipe:
    return replace(Recipe(2, 1e-2, steps=100, warmup=1), **changed)


def test_resumed_training_equals_uninterrupted(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    plan, teacher = recipe(), shaken(tokenizer, 3)
    ids = some_ids(2, LENGTH, len(tokenizer))
    weights = torch.ones(ids.shape)
    rows = batch_of(ids)

    def fresh(kind: str) -> Any:
        if kind == "guesses":
            return GuessLearner(teacher, (1, 2), plan, LENGTH)
        model = build(TINY, tokenizer, 0)
        taught = teacher if kind == "distilled" else None
        return LanguageLearner(model, plan, LENGTH, taught)

    for kind in ("language", "distilled", "guesses"):
        straight, stopped, resumed = fresh(kind), fresh(kind), fresh(kind)
        for _ in range(4):
            straight.learn(rows, weights)
        for _ in range(2):
            stopped.learn(rows, weights)
        loop.save(stopped, tmp_path / kind)
        loop.restore(resumed, tmp_path / kind, CPU)
        for _ in range(2):
            resumed.learn(rows, weights)
        for ours, theirs in zip(
            resumed.trained.parameters(), straight.trained.parameters(), strict=True
        ):
            assert torch.equal(ours, theirs), kind


def test_a_model_learns_and_a_draft_closes_in_on_its_teacher(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    ids = some_ids(2, LENGTH, len(tokenizer))
    weights = torch.ones(ids.shape)
    model: Any = build(TINY, tokenizer, 0)
    plain = LanguageLearner(model, recipe(), LENGTH)
    nats = [plain.learn(batch_of(ids), weights)["nats"] for _ in range(40)]
    assert nats[-1] < 0.6 * nats[0]
    taught = LanguageLearner(build(TINY, tokenizer, 1), recipe(), LENGTH, teacher=model)
    before = model.lm_head.weight.clone()
    losses = [taught.learn(batch_of(ids), weights)["loss"] for _ in range(40)]
    assert losses[-1] < 0.6 * losses[0]
    assert torch.equal(before, model.lm_head.weight)  # the teacher stays as it is


def test_padding_does_not_count(tokenizer: PreTrainedTokenizerBase) -> None:
    learner = LanguageLearner(shaken(tokenizer), recipe(), LENGTH)
    ids = some_ids(2, LENGTH, len(tokenizer))
    weights = torch.ones(ids.shape)
    weights[:, 40:] = 0
    other = ids.clone()
    other[:, 40:] = 0
    first, second = (learner.losses(batch_of(each), weights)["loss"] for each in (ids, other))
    assert first == second


def test_guidance_turns_heads_to_what_is_copied(tokenizer: PreTrainedTokenizerBase) -> None:
    """The second half of each row repeats the first; guided heads look at the first half."""
    half = some_ids(4, LENGTH // 2, len(tokenizer))
    ids = torch.cat([half, half], dim=1)
    place = torch.arange(LENGTH).expand_as(ids)
    sources = torch.where(place >= LENGTH // 2 - 1, place - LENGTH // 2 + 1, NOWHERE)
    sources[:, -1] = NOWHERE
    assert torch.equal(
        ids.gather(1, sources.clamp(min=0))[:, LENGTH // 2 : -1], ids[:, LENGTH // 2 + 1 :]
    )
    weights, seen = torch.ones(ids.shape), {}
    for guidance in (0.0, 0.5):
        plan = recipe(guidance=guidance)
        learner = LanguageLearner(build(TINY, tokenizer, 0), plan, LENGTH)
        for _ in range(30):
            learner.learn(batch_of(ids, sources), weights)
        wanted = (sources >= 0).nonzero()[:, 1].view(4, -1)
        _, attention = learner.forward.guided(ids, (1,), wanted)
        seen[guidance] = float(attention_loss(attention, sources.gather(1, wanted)).detach())
    assert seen[0.5] < 0.7 * seen[0.0]


@pytest.mark.parametrize("skill", ["recall", "extract", "copy", "document"])
def test_sources_are_the_tokens_that_an_answer_copies(
    tokenizer: PreTrainedTokenizerBase, skill: str
) -> None:
    samples = [make_sample(random.Random(n), SUB_DOMAINS[n % 3], skill) for n in range(60)]
    copied = 0
    for ids, kinds, sources in Renderer(tokenizer).chats(samples):
        (places,) = np.nonzero(sources >= 0)
        assert (ids[sources[places]] == ids[places + 1]).all()
        assert (kinds[places + 1] >= ANSWERED).all()
        assert (kinds[sources[places]] == ASKED).all()
        copied += len(places) > 0
    assert copied > 30


def test_a_head_learns_the_token_after_its_place(tokenizer: PreTrainedTokenizerBase) -> None:
    """Head ``i`` must learn to say ``i + 2`` more on a text that counts in a circle."""
    plan = recipe(learning_rate=2e-2)
    circle = 3 + (torch.arange(LENGTH)[None] + torch.tensor([[0], [5]])) % 11
    weights = torch.ones(circle.shape)
    model: Any = build(TINY, tokenizer, 0)
    target = LanguageLearner(model, plan, LENGTH)
    for _ in range(60):
        target.learn(batch_of(circle), weights)
    guesses = GuessLearner(model, (1, 2), plan, LENGTH)
    for _ in range(90):
        last = guesses.learn(batch_of(circle), weights)
    assert last["head_1"] > 0.9
    assert last["exit_2"] > 0.9
    with torch.no_grad():
        read = guesses.forward.normed(guesses.forward(circle)[-1])
        drafts = guesses.heads.draft(read, model.lm_head)
    place = LENGTH - 10
    assert drafts[0, place, 0] == circle[0, place + 2]


# ---------------------------------------------------------------- all stages


def run(out: Path, **changed: Any) -> bool:
    plan = replace(
        TINY_PLAN,
        **{name: replace(getattr(TINY_PLAN, name), steps=2) for name in ("target", "worker")},
    )
    return trainer.train_text(trainer.TrainText(out, plan, device="cpu", **changed))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("text") / "run"
    assert run(out)
    return out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rows_grow_as_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    learn = LanguageLearner.learn

    def watched(
        self: LanguageLearner, ids: torch.Tensor, weights: torch.Tensor
    ) -> dict[str, float]:
        shapes.append(tuple(ids.shape))
        return learn(self, ids, weights)

    monkeypatch.setattr(LanguageLearner, "learn", watched)
    target = replace(TINY_PLAN.target, growing=((128, 2), (256, 1)), steps=4)
    plan = replace(TINY_PLAN, target=target)
    config = trainer.TrainText(tmp_path, plan, device="cpu", stages=("tokenizer", "target"))
    assert trainer.train_text(config)
    assert shapes == [(16, 2, 128), (16, 2, 128), (8, 2, 256), (2, 2, 1024)]
    ids, kinds, _ = np.load(tmp_path / "data-128" / "shard-00000.npy")
    assert ids.shape == (32, 128)
    assert (kinds > 0).mean() > 0.8


@pytest.mark.slow
def test_every_model_is_read_by_the_engine(trained: Path, tmp_path: Path) -> None:
    for name in MODELS:
        exits = "beside" if name == "text-target" else None
        loaded = load(TargetConfig(str(trained / "models" / name), exits=exits))
        engine = Engine(loaded)
        assert engine.eos == {0, 2}
        logits = engine.open(encode(Prompt("Where is the lamp?"), loaded)).feed(
            encode(Prompt("Where is the lamp?"), loaded).ids, last=1
        )
        assert torch.isfinite(logits).all()
        if exits:
            assert loaded.adapters is not None
            assert loaded.adapters.layers == TINY_PLAN.exit_layers
            heads = MedusaHeads.load(trained / "models" / name, decoder_parts(loaded.model))
            assert heads.heads == 5
    curves = trainer.write_text_curves(trained, tmp_path)
    assert curves == json.loads((tmp_path / "text_training.json").read_text())
    assert set(curves) == set(STAGES) - {"tokenizer"}
    assert all(np.isfinite(point["loss"]) for curve in curves.values() for point in curve)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_stopped_in_every_stage_gives_the_same_models(trained: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    out = tmp_path / "run"
    train = loop.train

    def once(learner: Any, *rest: Any, **named: Any) -> bool:
        first = learner.step
        return train(learner, *rest, **{**named, "stop": lambda: learner.step > first})

    for name in STAGES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "train", once)
            if name != "tokenizer":
                assert not run(out, stages=(name,))
        assert run(out, stages=(name,))
    assert run(out)
    for name in MODELS:
        for file in sorted((trained / "models" / name).rglob("*.safetensors")):
            again = (out / file.relative_to(trained)).read_bytes()
            assert again == file.read_bytes(), f"{name}/{file.name}"


def test_a_run_folder_belongs_to_its_seed_and_plan(tmp_path: Path) -> None:
    assert run(tmp_path, stages=("tokenizer",))
    with pytest.raises(ConfigError, match="--seed: .*begun with 0, not 5"):
        run(tmp_path, stages=("tokenizer",), seed=5)
    config = trainer.TrainText(tmp_path, trainer.pick_plan("cpu", CPU), stages=("tokenizer",))
    with pytest.raises(ConfigError, match="--plan: .*begun with 'tiny', not 'cpu'"):
        trainer.train_text(config)


def test_a_stop_that_is_asked_for_ends_the_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trainer.TrainText(
        tmp_path, TINY_PLAN, device="cpu", stages=("tokenizer", "target"), hours=1.0
    )
    assert not trainer.train_text(config, lambda: True)
    assert "stopped in stage target; the same command goes on from here" in capsys.readouterr().out


def test_a_stage_needs_those_before_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer is not done"):
        run(tmp_path, stages=("target",))
    with pytest.raises(ConfigError, match="--stages"):
        run(tmp_path, stages=("targets",))


def test_unknown_devices_plans_and_times_are_refused() -> None:
    for wrong in (
        lambda: pick_device("tpu"),
        lambda: trainer.pick_plan("large", CPU),
        lambda: TINY_PLAN.with_minutes({"target": 0.0}),
        lambda: TINY_PLAN.with_minutes({"tokenizer": 1.0}),
    ):
        with pytest.raises(ConfigError):
            wrong()
    assert TINY_PLAN.with_minutes({"target": 2.0}).target.minutes == 2.0


def test_a_target_that_is_never_right_is_reported(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    from collab_llm_lab.training.text import distillation

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    export(shaken(tokenizer), tokenizer, tmp_path / "model")
    engine = engine_of(tmp_path / "model", CPU)
    plan = replace(TINY_PLAN.answers, units=1, prompts=2, most=4)
    with distillation.Teacher(engine, tmp_path / "tokenizer", plan, 1024, 0, 1) as teacher:
        asked = questions(tokenizer, random.Random(0), "reports", 2, 900, raw_share=0.0)
        with pytest.raises(ModelError, match="not one of 2 answers"):
            teacher._answer(asked, 0, tmp_path / "unit.npy")


def test_an_exported_model_is_float16_and_computes_the_same(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = shaken(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    export(model, tokenizer, tmp_path / "model")
    loaded = load(ModelConfig(str(tmp_path / "model")))
    ids = some_ids(1, 20, len(tokenizer))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=0, rtol=0)
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again.chat_template == tokenizer.chat_template
