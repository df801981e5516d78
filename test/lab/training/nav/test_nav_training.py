"""Training in the home: pictures and requests from seeds, batches, stages that resume, driving."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.home.answers import ACTIONS, answer
from collab_llm_lab.home.expert import Expert
from collab_llm_lab.home.requests import About, Kind, Request
from collab_llm_lab.home.wording import plain
from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.nav import plan, sources
from collab_llm_lab.training.nav.batches import WORDS, Batches, Lengths, dense_words
from collab_llm_lab.training.nav.driving import Episode, begin, drive, take_picture
from collab_llm_lab.training.nav.learner import PictureLearner, Supervision
from collab_llm_lab.training.nav.models import SIZES, build, read, tokenizer_in
from collab_llm_lab.training.nav.packing import WEIGHTS, pack, restore
from collab_llm_lab.training.nav.pictures import GRID, NAMES, Pictures, write_shard
from collab_llm_lab.training.nav.plan import STAGES, Dagger, Stage, export_stage, train_stage
from collab_llm_lab.training.nav.questions import Answering, draw_name, found, seeing_questions
from collab_llm_lab.training.nav.sources import POSES, WAYS, Source, room_poses, room_way
from collab_llm_lab.training.run import is_done
from collab_llm_nodes.errors import ConfigError, ModelError
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.rooms import HELD_OUT_PAIRS, make_room
from collab_llm_nodes.sim.view import look

MICRO = Stage(Recipe(4, 2e-3, steps=100, warmup=2, beta2=0.98), "micro", {POSES: 4})


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[Source, Path]:
    """A small shard of each source."""
    folder = tmp_path_factory.mktemp("data")
    renderer = Renderer()
    for name, make in (("poses", room_poses), ("ways", room_way)):
        made = [make(renderer, seed) for seed in (1, 2)]
        write_shard(
            folder / name,
            [picture for pictures, _ in made for picture in pictures],
            [at_hand for _, asks in made for at_hand in asks],
        )
    renderer.close()
    return {POSES: folder / "poses", WAYS: folder / "ways"}


@pytest.fixture(scope="module")
def pictures(shards: dict[Source, Path]) -> Pictures:
    return Pictures(list(shards.values()))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return tokenizer_in(tmp_path_factory.mktemp("run"))


def test_pictures_and_requests_follow_from_the_seed(shards: dict[Source, Path]) -> None:
    renderer = Renderer()
    for source, make in ((POSES, room_poses), (WAYS, room_way)):
        made, asks = make(renderer, 1)
        stored = Pictures([shards[source]])
        assert asks == stored.asks[: len(asks)]
        for index, picture in enumerate(made):
            np.testing.assert_array_equal(picture.shows, stored.shows[index])
            assert look(make_room(1), sources.Pose(*picture.pose)) == stored.view(index) or (
                np.allclose(picture.bearing, stored.bearing[index])
            )
        again, _ = make(renderer, 1)
        assert [p.jpeg for p in again] == [p.jpeg for p in made]
        assert stored.image(0).shape == (112, 224, 3)
    renderer.close()


def test_dense_words_are_those_of_what_a_token_shows(pictures: Pictures) -> None:
    lit = 0
    for index in range(len(pictures)):
        dense, mirror = (dense_words(pictures, index, flip) for flip in (False, True))
        for token in range(GRID.tokens):
            shown = [i for i in range(20) if pictures.shows[index, token] >> i & 1]
            names = {word for i in shown for word in NAMES[pictures.name[index, i]].split()}
            said = {word for word, true in zip(WORDS, dense[token], strict=True) if true}
            assert names == said & {word for name in NAMES for word in name.split()}
            lit += bool(names)
        left, right = WORDS.index("left"), WORDS.index("right")
        swapped = list(range(len(WORDS)))
        swapped[left], swapped[right] = right, left
        grid = dense.reshape(GRID.rows, GRID.columns, -1)[:, ::-1, swapped]
        np.testing.assert_array_equal(mirror, grid.reshape(mirror.shape))
    assert lit > len(pictures)


def test_short_questions_are_about_what_is_certain(pictures: Pictures) -> None:
    held_out = {" ".join(pair) for pair in HELD_OUT_PAIRS}
    rng = np.random.default_rng(0)
    seen = unseen = 0
    for index in range(len(pictures)):
        view = pictures.view(index)
        for _ in range(10):
            name, where = draw_name(view, rng)
            assert name not in held_out | {"person"}
            named = [s for s in (*view.things, *view.furniture) if s.name == name]
            assert not any(sight.borderline for sight in named)
            assert (where[0] < 5) == any(sight.in_view for sight in named)
            mirror = found(pictures.view(index, flip=True), name)
            assert mirror == (where if where[0] == 5 else (4 - where[0], where[1]))
            seen += where[0] < 5
            unseen += where[0] == 5
    assert seen > 50
    assert unseen > 50


def test_a_mirrored_request_has_the_mirrored_decision(pictures: Pictures) -> None:
    turned = 0
    for ask in (ask for at_hand in pictures.asks for ask in at_hand):
        mirror = ask.mirror()
        assert mirror.mirror() == ask
        assert mirror.decision.action in ACTIONS
        changed = mirror.decision.action != ask.decision.action
        turned += changed
        if changed:
            assert {word for word in ("left", "right") if word in ask.decision.action}
    assert turned > 10


def test_questions_fit_into_their_rows(
    pictures: Pictures, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Too long ones are drawn again, so the limits must leave nearly all of them."""
    for ask, lengths in (
        (seeing_questions, STAGES["seeing"].lengths),
        (Answering(2, reworded=0.5), STAGES["target"].lengths),
    ):
        drawn = 0

        def counted(*arguments: object, ask=ask) -> list[tuple[str, str]]:  # type: ignore[no-untyped-def]
            nonlocal drawn
            drawn += 1
            return ask(*arguments)  # type: ignore[no-any-return]

        batches = Batches(tokenizer, 0, counted, lengths)
        made = [batches.make([(pictures, 16)], step) for step in range(10)]
        assert drawn <= 1.02 * 160
        assert {batch.texts.shape[1] for batch in made} == {lengths.text}
        again = Batches(tokenizer, 0, ask, lengths).make([(pictures, 16)], 3)
        assert all(torch.equal(a, b) for a, b in zip(made[3], again, strict=True))
    for word in WORDS:
        assert len(tokenizer(f" {word}").input_ids) == 1
    with pytest.raises(ConfigError, match="lengths"):
        Batches(tokenizer, 0, seeing_questions, Lengths(4, 2)).make([(pictures, 1)], 0)


def test_training_learns(pictures: Pictures, tokenizer: PreTrainedTokenizerBase) -> None:
    learner = PictureLearner(
        build(SIZES["micro"], tokenizer, 0),
        tokenizer,
        MICRO.recipe,
        GRID,
        Supervision(WORDS, 4.0, 0.5),
    )
    for ask, lengths in (
        (seeing_questions, Lengths(18, 8)),
        (Answering(2, reworded=0.3), STAGES["target"].lengths),
    ):
        batch = Batches(tokenizer, 0, ask, lengths).make([(pictures, 4)], 0)
        first = learner.learn(*batch)
        for _ in range(25):
            last = learner.learn(*batch)
        assert last["loss"] < 0.75 * first["loss"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_stopped_stage_goes_on_as_if_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through ``train_stage`` itself: shards, a DAgger round in a second process, export."""
    monkeypatch.setattr(sources, "ROOMS_PER_SHARD", 1)
    monkeypatch.setattr(plan, "seeing_figures", lambda *_: {"direction": 0.5})
    monkeypatch.setattr(plan, "answering_figures", lambda *_: {"action": 0.5})
    torch.set_num_threads(1)
    renderer = Renderer()
    for number in range(2):  # the second process would render whole shards
        for source in (POSES, WAYS):
            source.make_shard(tmp_path / "data", number, renderer)
    renderer.close()
    short = replace(MICRO.recipe, steps=5, measure_every=5)
    stages = {
        "seeing": replace(MICRO, recipe=short, shards=2, first_shards=1, steps_per_shard=2),
        "target": replace(
            MICRO,
            recipe=short,
            pictures={POSES: 2, WAYS: 2},
            shards=1,
            initial="seeing",
            ask=Answering(2, reworded=0.5),
            lengths=STAGES["target"].lengths,
            dagger=Dagger((1,), lag=2, rooms=1),
        ),
    }
    for name in stages:
        ends = []
        for run, stops in (("straight", [9]), ("stopped", [2, 9])):
            for most in stops:
                steps = [0]
                finished = train_stage(
                    name,
                    tmp_path / run,
                    tmp_path / "data",
                    lambda activity, done, *_, steps=steps: steps.append(done),  # type: ignore[misc]
                    lambda most=most, steps=steps: steps[-1] >= most,  # type: ignore[misc]
                    stages,
                )
                assert finished == (most == 9)
                assert not multiprocessing.active_children()
            ends.append(torch.load(tmp_path / run / name / "state.pt", weights_only=True)["model"])
        for key, value in ends[0].items():
            torch.testing.assert_close(ends[1][key], value, atol=0, rtol=0)
    assert (tmp_path / "straight" / "target" / "dagger-0" / "asks.json").exists()


def test_the_present_model_of_a_stage_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STAGES, "seeing", MICRO)
    with pytest.raises(ConfigError, match="--stage"):
        export_stage("seeing", tmp_path, tmp_path / "model")
    tokenizer = tokenizer_in(tmp_path)
    model = build(SIZES["micro"], tokenizer, 3)
    learner = PictureLearner(model, tokenizer, MICRO.recipe, GRID, Supervision(WORDS, 4.0, 0.5))
    plan.loop.save(learner, tmp_path / "seeing")
    export_stage("seeing", tmp_path, tmp_path / "model")
    exported, own = read(tmp_path / "model")
    assert own.get_vocab() == tokenizer.get_vocab()
    torch.testing.assert_close(exported.lm_head.weight, model.lm_head.weight.half().float())


def test_another_machine_goes_on_from_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STAGES, "seeing", MICRO)
    with pytest.raises(ConfigError, match="--out"):
        pack(tmp_path / "run", tmp_path / "packed", STAGES)
    tokenizer = tokenizer_in(tmp_path / "run")

    def learner(seed: int) -> PictureLearner:
        model = build(SIZES["micro"], tokenizer, seed)
        return PictureLearner(model, tokenizer, MICRO.recipe, GRID, Supervision(WORDS, 4.0, 0.5))

    before, after = learner(3), learner(4)
    before.step, before.curve = 17, [{"step": 10, "seconds": 2.5}]
    plan.loop.save(before, tmp_path / "run" / "seeing")
    (tmp_path / "run" / "seeing" / "done").touch()
    pack(tmp_path / "run", tmp_path / "packed", STAGES)
    restore(after, tmp_path / "packed" / "seeing")
    assert (after.step, after.curve, after.seconds) == (17, before.curve, 2.5)
    assert is_done(tmp_path / "packed", "seeing")
    for key, value in before.trained.state_dict().items():
        torch.testing.assert_close(after.trained.state_dict()[key], value.half().float())
    assert tokenizer_in(tmp_path / "packed").get_vocab() == tokenizer.get_vocab()
    export_stage("seeing", tmp_path / "packed", tmp_path / "model")
    exported = read(tmp_path / "model")[0].lm_head.weight
    torch.testing.assert_close(exported, before.model.lm_head.weight.half().float())
    weights = tmp_path / "packed" / "seeing" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="packed folder"):
        restore(after, tmp_path / "packed" / "seeing")


def test_episodes_driven_with_the_experts_answers_succeed() -> None:
    said: list[str] = []
    experts: dict[int, Expert] = {}

    def visit(episode: Episode, renderer: Renderer) -> bytes:
        room, pose = episode.room, episode.base.pose
        expert = experts.setdefault(room.seed, Expert(room, episode.request))
        decision = expert.decide(look(room, pose), pose, episode.history, episode.memory)
        said.append(answer(decision))
        return take_picture(episode, renderer)

    def oracle(images: np.ndarray, prompts: Sequence[str]) -> list[str]:
        assert images.shape == (len(prompts), 112, 224, 3)
        texts, said[:] = list(said), []
        return texts

    def going(seed: int) -> Episode:
        room = make_room(seed)
        about = About(room.things[0].name)
        return begin(room, Request(Kind.GO, plain(Kind.GO, about), about))

    done = drive(oracle, [going(seed) for seed in range(6)], visit, together=3)
    assert [episode.outcome for episode in done] == ["reached"] * 6
    assert all(". search: " in prompt for episode in done for prompt, _ in episode.asked)


def test_episodes_end_for_the_right_reasons() -> None:
    def outcome(*answers: str) -> str:
        room = make_room(11)
        about = About(room.things[0].name)
        episode = begin(room, Request(Kind.GO, "find it", about))
        for text in answers:
            episode.advance(text)
        return episode.outcome

    ahead = "the ball is straight ahead and near. the next action is {}."
    assert outcome("blah") == "invalid"
    assert outcome(ahead.format("stop")) == "wrong place"
    assert outcome("the ball is not here. the next action is give up.") == "given up"
    assert outcome("yes. the next action is reply.") == "replied"
    assert outcome(*[ahead.format("turn left 45 degree")] * 99) == ""
    assert outcome(*[ahead.format("turn left 45 degree")] * 100) == "step limit"
