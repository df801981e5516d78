"""Training of the pair: pictures and requests from seeds, batches, stages that resume."""

from __future__ import annotations

import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2VLForConditionalGeneration

from collab_llm_lab.home.answers import ACTIONS
from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.nav import figures, trainer
from collab_llm_lab.training.nav.adapters import ExitLearner, exit_hidden
from collab_llm_lab.training.nav.batches import WORDS, Batch, Batches, Lengths, Shards, dense_words
from collab_llm_lab.training.nav.dagger import Dagger, Rounds
from collab_llm_lab.training.nav.encoding import CUT, Encoder
from collab_llm_lab.training.nav.forward import GRID, FastForward
from collab_llm_lab.training.nav.learner import PictureLearner
from collab_llm_lab.training.nav.models import SIZES, build, prefix_ids, read
from collab_llm_lab.training.nav.packing import WEIGHTS, pack, restore
from collab_llm_lab.training.nav.pictures import NAMES, Pictures
from collab_llm_lab.training.nav.plans import CPU, PLANS, Plan, Stage
from collab_llm_lab.training.nav.questions import Answering, draw_name, found, seeing_questions
from collab_llm_lab.training.nav.sources import POSES, WAYS, Source
from collab_llm_lab.training.nav.trainer import Trainer, train_nav, write_nav_curves
from collab_llm_lab.training.run import is_done
from collab_llm_nodes.errors import ConfigError, ModelError
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.rooms import HELD_OUT_PAIRS, SHAPES, make_room
from collab_llm_nodes.sim.view import look

PACKED = Path(trainer.__file__).parent / "weights"
RECIPE = Recipe(2, 2e-3, steps=3, warmup=2, beta2=0.98)
SMALL_POSES, SMALL_WAYS = (replace(source, rooms=1) for source in (POSES, WAYS))
SEEING = Stage(RECIPE, "micro", {SMALL_POSES: 2}, shards=2, first_shards=1, steps_per_shard=2)
SIGHT = replace(SEEING, ask=None)
TARGET = replace(
    SEEING,
    pictures={SMALL_POSES: 1, SMALL_WAYS: 1},
    initial="seeing",
    ask=Answering(2, reworded=0.5),
    lengths=CPU.stages["target"].lengths,
)
MICRO = Plan(
    {
        "sight": SIGHT,
        "seeing": SEEING,
        "target": TARGET,
        "draft": replace(TARGET, teacher="target"),
    },
    replace(TARGET, recipe=replace(RECIPE, learning_rate=1e-2, steps=12, warmup=0)),
)
CPU_DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of each source, of one room each."""
    folder = tmp_path_factory.mktemp("data")
    renderer = Renderer()
    for source in (SMALL_POSES, SMALL_WAYS):
        for number in range(2):
            source.make_shard(folder, number, renderer)
    renderer.close()
    return folder


def folders(data: Path, *sources: Source) -> list[Path]:
    return [source.folder(data, number) for source in sources for number in range(2)]


@pytest.fixture(scope="module")
def pictures(data: Path) -> Pictures:
    return Pictures(folders(data, SMALL_POSES, SMALL_WAYS))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(PACKED / "tokenizer")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run with the tokenizer of the shipped pair; to train one takes seconds."""
    shutil.copytree(PACKED / "tokenizer", tmp_path / "run" / "tokenizer")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "sight_figures", lambda *_: {"shape": 0.5})
    monkeypatch.setattr(trainer, "seeing_figures", lambda *_: {"direction": 0.5})
    monkeypatch.setattr(trainer, "answering_figures", lambda *_: {"action": 0.5})


def batch_of(
    tokenizer: PreTrainedTokenizerBase, data: Path, stage: Stage, count: int = 2, step: int = 0
) -> Batch:
    shards: Shards = [(folders(data, *stage.pictures), count)]
    return Batches(tokenizer, 0, stage.ask, stage.lengths).make(shards, step)


def micro(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Qwen2VLForConditionalGeneration:
    return build(SIZES["micro"], tokenizer, seed)


@pytest.mark.parametrize("source", [SMALL_POSES, SMALL_WAYS], ids=["poses", "ways"])
def test_pictures_and_requests_follow_from_the_seed(source: Source, data: Path) -> None:
    renderer = Renderer()
    made, asks = source.make(renderer, source.first_seed + 1)
    renderer.close()
    stored = Pictures([source.folder(data, 1)])
    assert list(stored.asks) == asks
    shard = (source.folder(data, 1) / "jpeg.npy").read_bytes()
    assert shard.endswith(b"".join(picture.jpeg for picture in made))
    assert stored.image(0).shape == (112, 224, 3)
    for index, picture in enumerate(made):
        np.testing.assert_array_equal(picture.shows, stored.shows[index])
        view = look(make_room(picture.seed), Pose(*picture.pose))
        again = stored.view(index)
        for seen, kept in zip(view.things, again.things, strict=True):
            assert seen.name == kept.name
            assert seen.bearing == pytest.approx(kept.bearing, abs=1e-6)


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


def test_cut_words_are_the_same_text_in_other_tokens(
    pictures: Pictures, tokenizer: PreTrainedTokenizerBase
) -> None:
    rng, encoder = np.random.default_rng(7), Encoder(tokenizer)
    asked = [ask.texts(rng, 1.0)[0] for at_hand in pictures.asks[:200] for ask in at_hand]
    cut = [text for text in asked if CUT in text]
    assert 0.1 < len(cut) / len(asked) < 0.5
    for text in cut:
        whole = text.replace(CUT, "")
        ids = encoder.ids(text)
        assert tokenizer.decode([*ids]) == whole
        assert len(ids) >= len(encoder.ids(whole))
        assert CUT not in text.partition(". history:")[2]


def test_questions_fit_into_their_rows(data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Too long ones are drawn again, so the limits must leave nearly all of them."""
    for name in ("seeing", "target"):
        stage, drawn = CPU.stages[name], 0

        def counted(*arguments: Any, ask: Any = stage.ask) -> list[tuple[str, str]]:
            nonlocal drawn
            drawn += 1
            asked: list[tuple[str, str]] = ask(*arguments)
            return asked

        shards: Shards = [(folders(data, SMALL_POSES, SMALL_WAYS), 16)]
        batches = Batches(tokenizer, 0, counted, stage.lengths)
        made = [batches.make(shards, step) for step in range(10)]
        assert drawn <= 1.02 * 160
        assert {batch.texts.shape[1] for batch in made} == {stage.lengths.text}
        again = Batches(tokenizer, 0, stage.ask, stage.lengths).make(shards, 3)
        assert all(torch.equal(a, b) for a, b in zip(made[3], again, strict=True))
    for word in WORDS:
        assert len(tokenizer(f" {word}").input_ids) == 1
    with pytest.raises(ConfigError, match="lengths"):
        Batches(tokenizer, 0, seeing_questions, Lengths(4, 2)).make(shards, 0)


@pytest.mark.parametrize("stage", [SIGHT, SEEING, TARGET], ids=["sight", "seeing", "target"])
def test_training_learns(stage: Stage, data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    recipe = replace(RECIPE, steps=100)
    learner = PictureLearner(micro(tokenizer), tokenizer, recipe, CPU_DEVICE)
    batch = batch_of(tokenizer, data, stage)
    first = learner.learn(*batch)
    for _ in range(20):
        last = learner.learn(*batch)
    assert all(last[key] < 0.85 * first[key] for key in first)


def test_dense_words_reach_the_vision_tower(data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    learner = PictureLearner(micro(tokenizer), tokenizer, RECIPE, CPU_DEVICE)
    batch = batch_of(tokenizer, data, SEEING)
    vision = learner.fast.see(batch.pictures)
    sum(learner.head(vision, learner.model.lm_head.weight, batch.dense).values()).backward()
    assert learner.model.model.visual.patch_embed.proj.weight.grad is not None
    rows = learner.model.lm_head.weight.grad
    assert rows is not None
    assert set(rows.abs().sum(1).nonzero().flatten().tolist()) == set(learner.head.ids.tolist())


def test_a_token_of_one_shape_must_tell_it_from_the_others(
    data: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    learner = PictureLearner(micro(tokenizer), tokenizer, RECIPE, CPU_DEVICE)
    batch = batch_of(tokenizer, data, SIGHT)
    shapes = slice(WORDS.index(SHAPES[0]), WORDS.index(SHAPES[-1]) + 1)
    logits = learner.words(batch.pictures)[..., shapes].flatten(0, 1)
    true = batch.dense[..., shapes].flatten(0, 1)
    only = true.sum(-1) == 1
    assert only.any()
    expected = torch.nn.functional.cross_entropy(logits[only], true[only].argmax(-1))
    torch.testing.assert_close(learner.losses(*batch)["shape_loss"], expected)


def test_colours_and_shapes_of_held_out_pictures_are_counted(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Pictures(folders(data, SMALL_POSES))
    monkeypatch.setattr(figures, "held_out_pictures", lambda *_: shown)
    true = torch.stack(
        [torch.from_numpy(dense_words(shown, i, flip=False)) for i in range(len(shown))]
    )
    assert len(shown) <= 64
    assert figures.sight_figures(lambda _: true, data) == {"colour": 1.0, "shape": 1.0}
    wrong = figures.sight_figures(lambda _: true.roll(1, -1), data)
    assert max(wrong.values()) < 0.2


def test_its_own_teacher_has_nothing_to_teach(
    data: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    batch, moved = batch_of(tokenizer, data, TARGET), {}
    for taught in (False, True):
        model = micro(tokenizer)
        teacher = micro(tokenizer) if taught else None
        learner = PictureLearner(model, tokenizer, RECIPE, CPU_DEVICE, teacher)
        learner.losses(*batch)["answer_loss"].backward()
        moved[taught] = sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    assert moved[True] < 1e-3 * moved[False]


def test_a_step_is_made_on_the_device_alone(data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """On the device without memory, where operations with tensors of the CPU fail as on a GPU."""
    device = torch.device("meta")
    batch = [part.to(device) for part in batch_of(tokenizer, data, TARGET)]
    model, teacher = micro(tokenizer), micro(tokenizer, 1)
    learner = PictureLearner(model, tokenizer, RECIPE, device, teacher)
    learner.losses(*batch)["loss"].backward()
    assert {p.device.type for p in learner.trained.parameters()} == {"meta"}
    pictures, *_ = batch_of(tokenizer, data, TARGET)
    with pytest.raises(NotImplementedError, match="copy out of meta"):
        learner.words(pictures)  # all is done there but the way back
    with pytest.raises((RuntimeError, NotImplementedError)):
        learner.losses(*batch_of(tokenizer, data, TARGET))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_stage_goes_on_as_if_never_stopped(data: Path, out: Path) -> None:
    """With a round of DAgger in a second process, and the export."""
    target = replace(
        TARGET,
        recipe=replace(RECIPE, steps=5, measure_every=5),
        shards=1,
        dagger=Dagger((1,), lag=2, rooms=1),
    )
    plan = replace(MICRO, stages={"seeing": SEEING, "target": target})
    assert Trainer(plan, out, data).train("seeing")
    ends = []
    for run, stops in ((out, [9]), (shutil.copytree(out, out.with_name("stopped")), [2, 9])):
        for most in stops:
            steps = [0]
            finished = Trainer(plan, run, data).train(
                "target",
                lambda activity, done, *_, steps=steps: steps.append(done),  # type: ignore[misc]
                lambda most=most, steps=steps: steps[-1] >= most,  # type: ignore[misc]
            )
            assert finished == (most == 9)
            assert not multiprocessing.active_children()
        ends.append(torch.load(run / "target" / "state.pt", weights_only=True)["model"])
        assert (run / "target" / "dagger-0" / "asks.json").exists()
        assert (run / "target" / "model" / "config.json").exists()
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(300)  # four processes import torch
def test_other_processes_render_and_make_batches(data: Path, out: Path, tmp_path: Path) -> None:
    """The plan of a GPU, but for the GPU, gives what one process gives."""
    runs = (
        (out, data, MICRO),
        (tmp_path / "other", tmp_path / "data", replace(MICRO, renderers=2, makers=2)),
    )
    shutil.copytree(out / "tokenizer", tmp_path / "other" / "tokenizer")
    ends = []
    for run, own_data, plan in runs:
        assert Trainer(plan, run, own_data).train("seeing")
        ends.append(torch.load(run / "seeing" / "state.pt", weights_only=True)["model"])
        assert not multiprocessing.active_children()
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, atol=0, rtol=0)
    rendered = {folder.name for folder in (tmp_path / "data").iterdir()}
    assert rendered == {folder.name for folder in folders(data, SMALL_POSES)}


def test_both_plans_make_the_same_models() -> None:
    gpu = PLANS["cuda"]
    assert list(gpu.stages) == list(CPU.stages)
    for name, stage in CPU.stages.items():
        other = gpu.stages[name]
        assert (other.role, other.initial, other.teacher) == (
            stage.role,
            stage.initial,
            stage.teacher,
        )
        for one in (stage, other):
            assert sum(one.pictures.values()) == one.recipe.batch
            assert all(due <= one.recipe.steps or one.recipe.minutes for due in one.dagger.steps)


def test_the_whole_plan_makes_a_pair_with_exits(
    data: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Trainer(MICRO, out, data)
    with pytest.raises(ConfigError, match="--stage"):
        train_nav(training, only="target")
    assert not train_nav(training, stop=lambda: True)
    assert "stopped in stage sight; the same command goes on" in capsys.readouterr().out
    assert train_nav(training)
    pair = [read(out / "models" / f"nav-{role}")[0] for role in ("target", "draft")]
    adapters = ExitAdapters.load(out / "models" / "nav-target", decoder_parts(pair[0]))
    assert adapters.layers == (1,)
    assert list(write_nav_curves(training)) == list(MICRO.stages)
    assert (out / "curves" / "nav_training.json").exists()
    with pytest.raises(ConfigError, match="--seed: .*begun with 0, not 5"):
        train_nav(replace(training, seed=5))


def test_a_draft_learns_where_its_teacher_drives(
    data: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driven(Rounds):
        def awaited(self, step: int) -> None:
            self._save_model(out / "driver")

    monkeypatch.setattr(trainer, "Rounds", Driven)
    target = replace(TARGET, initial="", recipe=replace(RECIPE, steps=1))
    plan = replace(MICRO, stages={"target": target, "draft": replace(target, teacher="target")})
    assert Trainer(plan, out, data).train("target")
    assert Trainer(plan, out, data, seed=1).train("draft")
    driver, teacher = read(out / "driver")[0], read(out / "target" / "model")[0]
    for name, value in teacher.state_dict().items():
        torch.testing.assert_close(driver.state_dict()[name], value)


def test_adapters_approach_the_last_layer(data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = micro(tokenizer)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    recipe = replace(RECIPE, learning_rate=1e-2, steps=60, warmup=0)
    learner = ExitLearner(model, tokenizer, recipe, CPU_DEVICE)
    for step in range(60):
        learner.learn(*batch_of(tokenizer, data, TARGET, step=step))
    fast, batch = (
        FastForward(model, prefix_ids(tokenizer)),
        batch_of(tokenizer, data, TARGET, step=99),
    )
    with torch.no_grad():
        hidden = exit_hidden(fast, batch)
        wanted = fast.logits(hidden[-1]).log_softmax(-1)
        distance = [
            torch.nn.functional.kl_div(
                fast.logits(adapters(1, hidden[0])).log_softmax(-1),
                wanted,
                reduction="batchmean",
                log_target=True,
            )
            for adapters in (ExitAdapters(SIZES["micro"].hidden, (1,)), learner.adapters)
        ]
    assert distance[1] < 0.8 * distance[0]


def test_the_present_model_of_a_stage_is_exported(out: Path) -> None:
    training = Trainer(MICRO, out, out / "data")
    with pytest.raises(ConfigError, match="--stage"):
        training.export("seeing", out / "model")
    model = micro(training.tokenizer, 3)
    loop.save(PictureLearner(model, training.tokenizer, RECIPE, CPU_DEVICE), out / "seeing")
    training.export("seeing", out / "model")
    exported, own = read(out / "model")
    assert own.get_vocab() == training.tokenizer.get_vocab()
    torch.testing.assert_close(exported.lm_head.weight, model.lm_head.weight.half().float())


def test_another_machine_goes_on_from_packed_weights(out: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    with pytest.raises(ConfigError, match="--out"):
        pack(out, packed, MICRO.stages)
    training = Trainer(MICRO, out, out / "data")

    def learner(seed: int) -> PictureLearner:
        model = micro(training.tokenizer, seed)
        return PictureLearner(model, training.tokenizer, RECIPE, CPU_DEVICE)

    before, after = learner(3), learner(4)
    before.step, before.seconds, before.curve = 17, 2.75, [{"step": 10, "seconds": 2.5}]
    loop.save(before, out / "seeing")
    (out / "seeing" / "done").touch()
    pack(out, packed, MICRO.stages)
    restore(after, packed / "seeing")
    assert (after.step, after.curve, after.seconds) == (17, before.curve, 2.75)
    assert is_done(packed, "seeing")
    again = tmp_path / "packed again"
    pack(packed, again, MICRO.stages)
    assert is_done(again, "seeing")
    assert (again / "seeing" / WEIGHTS).read_bytes() == (packed / "seeing" / WEIGHTS).read_bytes()
    for key, value in before.trained.state_dict().items():
        torch.testing.assert_close(after.trained.state_dict()[key], value.half().float())
    goes_on = replace(training, out=packed)
    assert goes_on.tokenizer.get_vocab() == training.tokenizer.get_vocab()
    goes_on.export("seeing", tmp_path / "model")
    exported = read(tmp_path / "model")[0].lm_head.weight
    torch.testing.assert_close(exported, before.model.lm_head.weight.half().float())
    (again / "seeing" / "curve.json").unlink()
    with pytest.raises(ModelError, match="packed folder"):
        restore(after, again / "seeing")
    small = PictureLearner(
        build(SIZES["draft"], training.tokenizer, 0), training.tokenizer, RECIPE, CPU_DEVICE
    )
    with pytest.raises(ModelError, match="packed folder"):
        restore(small, packed / "seeing")
    weights = packed / "seeing" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="packed folder"):
        restore(after, packed / "seeing")


def test_the_shipped_weights_go_on(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        training = Trainer(CPU, PACKED, tmp_path)
        stage, tokenizer = CPU.stages[name], training.tokenizer
        recipe = replace(stage.recipe, compile=False)
        model = build(SIZES[stage.role], tokenizer, 0)
        learner = PictureLearner(model, tokenizer, recipe, CPU_DEVICE)
        restore(learner, PACKED / name)
        assert learner.step > 0
        torch.testing.assert_close(training.model(name).state_dict(), model.state_dict())


def test_the_shipped_target_is_trained_on_without_the_stages_before(tmp_path: Path) -> None:
    shutil.copytree(PACKED, tmp_path / "run")
    training = Trainer(CPU, tmp_path / "run", tmp_path / "data")
    before = training.model("target").state_dict()
    assert not training.train("target", stop=lambda: True)
    torch.testing.assert_close(training.model("target").state_dict(), before)
