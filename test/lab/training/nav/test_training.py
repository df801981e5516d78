"""Training: data from seeds, a forward pass equal to transformers', resuming that loses nothing."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2VLForConditionalGeneration,
)

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.nav import data, evaluate, trainer
from collab_llm_lab.training.nav.adapters import AdapterConfig, train_adapters
from collab_llm_lab.training.nav.batches import (
    ANSWER_LENGTH,
    TEXT_LENGTH,
    Batches,
    ask,
    mirrored,
)
from collab_llm_lab.training.nav.evaluate import (
    advance,
    eval_nav,
    held_out_figures,
    start,
    wording_figures,
)
from collab_llm_lab.training.nav.forward import LONGEST_TEXT, FastForward
from collab_llm_lab.training.nav.models import MICRO, answers, build, export, patches, prefix_ids
from collab_llm_lab.training.nav.trainer import Learner, TrainConfig, train_nav
from collab_llm_lab.training.nav.wording import (
    HELD_OUT,
    HELD_OUT_FRAMES,
    HELD_OUT_VERBS,
    TRAINED,
    VERBS,
    WORDS,
    Wording,
    action_said,
    corpus,
    direction_said,
)
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.tokenizer import SPECIAL, token_id, train_tokenizer
from collab_llm_nodes.robot.prompt import user_text
from collab_llm_nodes.sim import expert
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.renderer import KINDS, Renderer, footprint
from collab_llm_nodes.sim.rooms import make_room

MICRO_RUN = TrainConfig(Recipe(3, 2e-3, steps=100, warmup=2, beta2=0.98), role="micro")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "shard"
    renderer = Renderer()
    data.write_shard(folder, [s for k in (1, 2) for s in data.room_snapshots(renderer, k)])
    renderer.close()
    return folder


@pytest.fixture(scope="module")
def pictures(shard: Path) -> data.Pictures:
    return data.Pictures([shard])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(corpus())


def shaken(tokenizer: PreTrainedTokenizerBase) -> Qwen2VLForConditionalGeneration:
    """A micro model whose every parameter matters."""
    model = build(MICRO, tokenizer, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def test_shards_follow_from_their_seed(shard: Path, tmp_path: Path) -> None:
    renderer = Renderer()
    data.write_shard(tmp_path / "again", list(data.room_snapshots(renderer, 1)))
    renderer.close()
    for file in sorted((tmp_path / "again").iterdir()):
        again = np.load(file)
        np.testing.assert_array_equal(again, np.load(shard / file.name)[: len(again)])


def test_footprints_lie_on_their_things() -> None:
    """The projected outlines match the rendered colours: labels and pictures agree."""
    renderer = Renderer()
    hits = total = 0
    for seed in range(30):
        room = make_room(seed)
        renderer.enter(room)
        towards = np.arctan2(room.goal.y - room.start.y, room.goal.x - room.start.x)
        pose = Pose(room.start.x, room.start.y, float(towards))
        picture = renderer.picture(pose).astype(int)
        cells = np.argwhere(footprint(room, pose, cell=1) == room.target)
        hue = picture[cells[:, 0], cells[:, 1]]
        good: Any
        channel = {"red": 0, "green": 1, "blue": 2}.get(room.goal.colour)
        if channel is None:
            good = (hue[:, 0] > 1.5 * hue[:, 2]) & (hue[:, 1] > 1.5 * hue[:, 2])
        else:
            others = [c for c in range(3) if c != channel]
            good = (hue[:, channel, None] > 1.5 * hue[:, others]).all(axis=1)
        hits += int(good.sum())
        total += len(cells)
    renderer.close()
    assert hits / total > 0.85


def test_questions_match_what_is_there(pictures: data.Pictures) -> None:
    rng = np.random.default_rng(0)
    for index in range(len(pictures)):
        kinds = [int(k) for k in pictures.kind[index] if k >= 0]
        for question in ask(pictures, index, 4, rng):
            present = [i for i, k in enumerate(kinds) if " ".join(KINDS[k]) == question.name]
            if question.sight is not None:
                bearing = pictures.bearing[index, present[0]]
                assert question.sight.bearing == pytest.approx(float(bearing))
                assert not question.sight.borderline
            elif present:
                assert pictures.visible[index, present[0]] <= 0.3


def test_a_mirrored_question_has_the_mirrored_answer(pictures: data.Pictures) -> None:
    for index in range(len(pictures)):
        plain = ask(pictures, index, 2, np.random.default_rng(5))
        mirror = ask(pictures, index, 2, np.random.default_rng(5), flip=True)
        for a, b in zip(plain, mirror, strict=True):
            assert tuple(mirrored(action) for action in a.history) == b.history
            hidden = a.sight is None or not a.sight.in_view
            if hidden and "turn" not in a.prompt:
                continue  # with no turn to go on with, a search starts to the left in both
            said, action = direction_said(a.answer), action_said(a.answer)
            assert said is not None
            assert action is not None
            assert direction_said(b.answer) == mirrored(said)
            assert action_said(b.answer) == mirrored(action)


def test_every_text_fits_and_words_are_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    batches = Batches(tokenizer, 0)
    longest = max(
        len(batches.encoder.question_ids(user_text("look for the yellow bottle", [a, b])))
        for a in expert.ACTIONS
        for b in expert.ACTIONS
    )
    said = [t for t in corpus() if "the next action is" in t]
    answer = max(len(tokenizer(t).input_ids) for t in said) + 1
    assert answer <= ANSWER_LENGTH
    assert longest + answer - 1 <= TEXT_LENGTH
    asked = max(
        len(batches.encoder.question_ids(user_text(text, ["turn right 45 degree"] * 2)))
        for text in {wording.text("yellow bottle") for wording in TRAINED.every()}
    )
    assert asked + answer - 1 <= LONGEST_TEXT
    for word in WORDS:
        assert len(tokenizer(f" {word}").input_ids) == 1
    for token in SPECIAL:
        assert tokenizer(token).input_ids == [token_id(tokenizer, token)]
    strange = "Où est la balle? 球"
    assert tokenizer.decode(tokenizer(strange).input_ids) == strange


def words(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in re.findall(r"[a-z']+", text)}


def test_held_out_words_are_never_trained_on() -> None:
    trained = {user_text(wording.text("red ball"), []) for wording in TRAINED.every()}
    known = words(trained)
    for part in (*HELD_OUT_VERBS, *HELD_OUT_FRAMES):
        assert words([part.format(verb="", thing="")]) - known, part
    for part, wordings in HELD_OUT.items():
        asked = {user_text(wording.text("red ball"), []) for wording in wordings.every()}
        spoken = {text for text in asked if "hurry" in text or "kindly" in text}
        assert spoken, part
        # a held-out verb in a frame that has no verb would be no test of the verb
        assert not asked & trained, part


def test_a_robot_is_asked_in_many_ways() -> None:
    rng = np.random.default_rng(3)
    drawn = [TRAINED.draw(rng).text("green box") for _ in range(3_000)]
    again = np.random.default_rng(3)
    assert drawn == [TRAINED.draw(again).text("green box") for _ in range(3_000)]
    assert drawn != [TRAINED.draw(rng).text("green box") for _ in range(3_000)]
    assert any(text[0].isupper() for text in drawn)
    assert {text[-1] for text in drawn} >= {".", "!", "?"}
    every = {user_text(wording.text("green box"), []) for wording in TRAINED.every()}
    assert {user_text(text, []) for text in drawn} <= every
    for wording in (
        "Reach the green box.",
        "navigate to the green box",
        "navigate to a green box",
        "find green box!",
        "please reach the green box",
        "Could you please go to that green box?",
        "could you find the green box?",
        "go to the green box, thank you",
        "the green box, please",
    ):
        assert user_text(wording, []) in every, wording


def test_the_answer_has_the_form_of_the_plain_verb() -> None:
    assert [Wording(verb).form for verb in VERBS] == list(range(len(VERBS)))
    assert Wording("go to", "could you {verb} {thing}").form == VERBS.index("go to")
    assert Wording("reach").form == Wording("go to", "{thing}, please").form == 0


def test_questions_are_reworded_in_the_share_asked_for(pictures: data.Pictures) -> None:
    plain = {f"{verb} the" for verb in VERBS}
    for share in (0.0, 0.5, 1.0):
        rng = np.random.default_rng(2)
        asked = [q for i in range(len(pictures)) for q in ask(pictures, i, 8, rng, reworded=share)]
        other = sum(q.prompt.partition(" " + q.name)[0] not in plain for q in asked)
        assert other / len(asked) == pytest.approx(share, abs=0.06)


def test_chat_template_and_prefix_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    question = "find the red ball. history: none."
    content: Any = [{"type": "image"}, {"type": "text", "text": question}]
    messages: Any = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    pads = "<|image_pad|>" * data.TOKENS
    ids = tokenizer(str(text).replace("<|image_pad|>", pads)).input_ids
    assert ids == [*prefix_ids(tokenizer), *Batches(tokenizer, 0).encoder.question_ids(question)]


def test_fast_forward_equals_transformers(
    pictures: data.Pictures, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = shaken(tokenizer)
    prefix = prefix_ids(tokenizer)
    fast = FastForward(model, prefix)
    images = pictures.images(np.array([0, 5]))
    texts = torch.randint(10, 400, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = fast.logits(fast(torch.from_numpy(images), texts, 2).layers[-1])
        ids = torch.cat([torch.tensor(prefix).expand(4, -1), texts], dim=1)
        theirs = model(
            input_ids=ids,
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            pixel_values=patches(images[[0, 0, 1, 1]]),
            image_grid_thw=torch.tensor([[1, 6, 12]]).repeat(4, 1),
        ).logits[:, len(prefix) :]
    torch.testing.assert_close(ours.flatten(0, 1), theirs, atol=1e-5, rtol=1e-5)


def test_exported_checkpoint_is_read_by_transformers(
    pictures: data.Pictures, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = shaken(tokenizer)
    export(model, tokenizer, tmp_path / "model", torch.float32)
    read = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / "model")
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    images = pictures.images(np.array([0, 3, 7]))
    prompts = [user_text("find the red ball", expert.ACTIONS[k : k + k]) for k in range(3)]
    together = answers(model, tokenizer, images, prompts)
    assert answers(read, again, images, prompts) == together
    # left padding and batching change nothing
    assert [answers(read, again, images[k : k + 1], [prompts[k]])[0] for k in range(3)] == together
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model", use_fast=False)
    made = processor(images=[Image.fromarray(i) for i in images], return_tensors="pt")
    torch.testing.assert_close(made["pixel_values"], patches(images))
    assert made["image_grid_thw"].tolist() == [[1, 6, 12]] * 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through ``train_nav`` itself: data, DAgger round in a second process, curve, export."""
    monkeypatch.setattr(data, "ROOMS_PER_SHARD", 2)
    torch.set_num_threads(1)
    ends = {}
    for name, stops in (("straight", [9]), ("stopped", [2, 9])):
        config = replace(
            MICRO_RUN,
            run=str(tmp_path / name),
            data=str(tmp_path / "data"),
            shards=1,
            recipe=replace(MICRO_RUN.recipe, steps=5, measure_every=5),
            dagger_steps=(1,),
            dagger_lag=2,
            dagger_rooms=2,
            held_out_rooms=1,
            reworded=0.5,
        )
        for most in stops:
            steps = [0]
            finished = train_nav(
                config,
                lambda activity, done, total, figures, steps=steps: steps.append(done),  # type: ignore[misc]
                stop=lambda most=most, steps=steps: steps[-1] >= most,  # type: ignore[misc]
            )
            assert finished == (most == 9)
            assert not multiprocessing.active_children()  # it would write what the next one does
        ends[name] = torch.load(tmp_path / name / "state.pt", weights_only=True)
        assert (tmp_path / name / "dagger-0" / "image.npy").exists()
        assert (tmp_path / name / "model" / "config.json").exists()
    assert [end["step"] for end in ends.values()] == [5, 5]
    for key, value in ends["straight"]["model"].items():
        torch.testing.assert_close(ends["stopped"]["model"][key], value, atol=0, rtol=0)
    assert set(ends["stopped"]["curve"][0]) >= {
        "in_view_direction",
        "not_in_view",
        "held_out_wording",
        "name_loss",
    }


def test_training_learns_and_dense_words_reach_the_vision_tower(pictures: data.Pictures) -> None:
    learner = Learner(MICRO_RUN)
    batch = learner.batches.make([(pictures, 3)], 0, 2)
    first = learner.learn(*batch)
    for _ in range(25):
        last = learner.learn(*batch)
    assert all(last[key] < 0.7 * first[key] for key in first)
    # the dense loss alone moves the tower and the tied rows of the words
    learner.model.zero_grad()
    fast = learner.fast
    learner.head(fast.see(batch.pictures), learner.model.lm_head.weight, batch.dense).backward()
    assert learner.model.model.visual.patch_embed.proj.weight.grad is not None
    rows = learner.model.lm_head.weight.grad
    assert rows is not None
    assert set(rows.abs().sum(1).nonzero().flatten().tolist()) == set(learner.head.ids.tolist())


def test_a_stop_ends_a_run_before_its_next_shard(tmp_path: Path) -> None:
    assert data.make_shards(tmp_path / "data", 2, stop=lambda: True) == []
    config = replace(MICRO_RUN, run=str(tmp_path / "run"), data=str(tmp_path / "data"))
    assert not train_nav(config, stop=lambda: True)


def test_a_run_folder_belongs_to_its_seed_and_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target").mkdir()
    trainer.train_all(tmp_path, stop=lambda: True)
    assert "stopped in stage target; the same command goes on" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--seed: .*begun with 0, not 5"):
        trainer.train_all(tmp_path, seed=5)
    with pytest.raises(ConfigError, match="--pair: .*begun with 'no pair'"):
        trainer.train_all(tmp_path, pair=tmp_path)


def test_adapters_approach_the_last_layer_and_resume(
    shard: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = shaken(tokenizer)
    export(model, tokenizer, tmp_path / "model", torch.float32)
    config = AdapterConfig(
        str(tmp_path / "model"),
        str(tmp_path / "run"),
        (str(shard),),
        recipe=Recipe(3, 1e-2, steps=60, warmup=0),
    )
    steps: list[int] = []
    assert not train_adapters(
        config,
        lambda activity, done, total, figures: steps.append(done),
        stop=lambda: len(steps) == 20,
    )
    assert train_adapters(config, lambda activity, done, *_: steps.append(done))
    assert sorted(set(steps)) == list(range(1, 61))  # from where it was stopped
    read = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / "model")
    adapters = ExitAdapters.load(tmp_path / "model", decoder_parts(read))
    assert adapters.layers == (1,)
    untrained = ExitAdapters(MICRO.hidden, (1,))
    fast = FastForward(read, prefix_ids(tokenizer))
    batch = Batches(tokenizer, 9).make([(data.Pictures([shard]), 3)], 0, 2)
    with torch.no_grad():
        layers = fast(batch.pictures, batch.texts, 2).layers
        wanted = fast.logits(layers[-1]).log_softmax(-1)
        distance = [
            torch.nn.functional.kl_div(
                fast.logits(a(1, layers[0])).log_softmax(-1),
                wanted,
                reduction="batchmean",
                log_target=True,
            )
            for a in (untrained, adapters)
        ]
    assert distance[1] < 0.8 * distance[0]


def test_a_stage_begins_with_a_checkpoint_and_learns_from_a_teacher(
    pictures: data.Pictures, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model, folder = shaken(tokenizer), str(tmp_path / "model")
    export(model, tokenizer, Path(folder), torch.float32)
    config = replace(
        MICRO_RUN, initial=folder, reworded=0.7, dense_weight=0.0, name_weight=0.0, seed=4
    )
    moved = {}
    for teacher in ("", folder):
        learner = Learner(replace(config, teacher=teacher))
        assert torch.equal(learner.model.lm_head.weight, model.lm_head.weight)
        batch = learner.batches.make([(pictures, 3)], 0, 2)
        learner.losses(*batch)["loss"].backward()
        moved[teacher] = sum(
            float(p.grad.norm()) for p in learner.model.parameters() if p.grad is not None
        )
    assert moved[folder] < 1e-3 * moved[""]  # its own teacher has nothing to teach
    other = train_tokenizer(["quite another corpus of words"] * 3)
    export(build(MICRO, other, 0), other, tmp_path / "other", torch.float32)
    with pytest.raises(ConfigError, match="tokenizer"):
        Learner(replace(MICRO_RUN, initial=str(tmp_path / "other")))


def test_the_wording_stage_follows_the_plain_one(tmp_path: Path) -> None:
    stages = ["target", "target-wording", "draft", "draft-wording"]
    assert list(trainer.plans_of(tmp_path, 0, None)) == stages
    later = trainer.plans_of(tmp_path, 0, Path("models"))
    assert list(later) == ["target-wording", "draft-wording"]
    (target, _), (draft, _) = later.values()
    assert (target.initial, target.teacher) == ("models/nav-target", "")
    assert draft.teacher == str(tmp_path / "models" / "nav-target")


def test_another_seed_asks_other_perception_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], bytes]] = []

    def answer(_model: Any, _tokenizer: Any, images: np.ndarray, prompts: list[str]) -> list[str]:
        asked.append((prompts, images.tobytes()))
        return [""] * len(prompts)

    monkeypatch.setattr(evaluate, "answers", answer)
    nothing: Any = None
    for seed in (0, 0, 1):
        held_out_figures(nothing, nothing, tmp_path, rooms=1, seed=seed)
    first, same, other = asked
    assert first == same
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_wording_figures_tell_which_words_are_understood() -> None:
    """A navigator that stops at once wherever it reads a held-out verb, and is an expert else."""
    rooms: dict[str, Any] = {}

    def remember(seed: int, wordings: Any = None) -> Any:
        episode = start(seed, wordings)
        rooms[user_text(episode.instruction, [])] = episode
        return episode

    def answer(_images: np.ndarray, prompts: Sequence[str]) -> list[str]:
        said = []
        for prompt in prompts:
            episode = rooms[prompt.partition(". history")[0] + ". history: none."]
            sight = expert.look(episode.room, episode.base.pose)[episode.room.target]
            lost = any(verb in prompt for verb in HELD_OUT_VERBS)
            action = "stop" if lost else expert.decide(sight, episode.history)
            said.append(f"x. the next action is {action}.")
        return said

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "start", remember)
        found = wording_figures(answer, 3, 4, loop.ignore_progress)
    assert found["trained"] == found["held_out_frame"] == 1.0
    assert found["held_out_verb"] == found["held_out_both"] == 0.0
    assert found["held_out"] == pytest.approx(1 / 3)
    assert found["rooms"] == 16


def test_configurations_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="role"):
        replace(MICRO_RUN, role="teacher")
    with pytest.raises(ConfigError, match="fresh"):
        eval_nav(1, 1_000_000)


def test_episodes_end_for_the_right_reasons() -> None:
    episode = start(11)
    advance(episode, "blah")
    assert episode.outcome == "invalid"
    episode = start(11)
    advance(episode, "no reason. the next action is stop.")
    assert episode.outcome == "wrong place"
    episode = start(11)
    for _ in range(expert.MAX_STEPS):
        assert not episode.outcome
        advance(episode, "the next action is turn left 45 degree.")
    assert episode.outcome == "step limit"
    episode = start(11)
    while not episode.outcome:
        sight = expert.look(episode.room, episode.base.pose)[episode.room.target]
        advance(episode, f"x. the next action is {expert.decide(sight, episode.history)}.")
    assert episode.outcome == "reached"
