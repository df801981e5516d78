"""``python -m collab_llm_lab.home.training.plan``: train the home's pair from seeds; resumable.

The target first learns to see: where named things are, and how far the way is free. Then it learns
to answer all requests, from the expert's states and from its own (DAgger). The draft learns to see
too, and then the law of the target's answers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from transformers import Qwen2VLForConditionalGeneration

from collab_llm_lab.home.training.answering import Answering
from collab_llm_lab.home.training.batches import WORDS, Ask, Batches, Lengths
from collab_llm_lab.home.training.dagger import FIRST_SEED, roll_out_round
from collab_llm_lab.home.training.evaluate import answering_figures, seeing_figures
from collab_llm_lab.home.training.models import SIZES, tokenizer_in
from collab_llm_lab.home.training.packing import pack, restore, weights_of
from collab_llm_lab.home.training.pictures import GRID, Pictures
from collab_llm_lab.home.training.rendering import rendering
from collab_llm_lab.home.training.seeing import seeing_questions
from collab_llm_lab.home.training.sources import POSES, WAYS, Source
from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.nav.adapters import AdapterConfig, ExitLearner, train_exits
from collab_llm_lab.training.nav.dagger import Rounds
from collab_llm_lab.training.nav.learner import PictureLearner, Supervision
from collab_llm_lab.training.nav.models import build, export
from collab_llm_lab.training.run import MakeStage, make_stages
from collab_llm_lab.training.stopping import StopRequest


@dataclass(frozen=True)
class Dagger:
    """Rounds of the model's own driving; see ``nav.dagger.Rounds``."""

    steps: tuple[int, ...] = ()
    lag: int = 500
    rooms: int = 300
    share: float = 0.5
    """Share of own pictures in a batch once there are any."""


@dataclass(frozen=True)
class Stage:
    """One stage of one model; with equal values it gives equal models on one machine."""

    recipe: Recipe
    role: str
    """A key of ``models.SIZES``."""
    pictures: Mapping[Source, int]
    """Pictures of each source in a batch."""
    shards: int = 40
    """Number of shards of each source, in the end."""
    first_shards: int = 2
    """Shards that are rendered before the first step ..."""
    steps_per_shard: int = 60
    """... and the steps after which one more is used; a second process renders them meanwhile."""
    initial: str = ""
    """Stage whose model this one begins with; none: fresh weights."""
    teacher: str = ""
    """Stage whose model's law of each answer token is learnt; none: the expert's answers."""
    ask: Ask = seeing_questions
    lengths: Lengths = Lengths(text=18, answer=8)
    dense_weight: float = 4.0
    name_weight: float = 0.5
    dagger: Dagger = field(default_factory=Dagger)
    seed: int = 0

    def used(self, step: int) -> int:
        """Return the number of shards of each source that ``step`` draws from."""
        return min(self.shards, self.first_shards + step // self.steps_per_shard)


_SEEING = Recipe(
    32,
    1.5e-3,
    steps=12_000,
    warmup=300,
    beta2=0.98,
    compile=True,
    bfloat16=True,
    measure_every=500,
)
_ANSWERING = Lengths(text=84, answer=50)
_TARGET = replace(_SEEING, learning_rate=1e-3, steps=6_000, measure_every=1_000)

STAGES = {
    "seeing": Stage(_SEEING, "target", {POSES: 32}),
    "target": Stage(
        _TARGET,
        "target",
        {POSES: 12, WAYS: 20},
        shards=24,
        initial="seeing",
        ask=Answering(2, reworded=0.5),
        lengths=_ANSWERING,
        dagger=Dagger((1_500, 2_500, 3_500, 4_500)),
    ),
    "draft-seeing": Stage(replace(_SEEING, steps=5_000), "draft", {POSES: 32}, shards=24),
    "draft": Stage(
        replace(_TARGET, steps=3_000),
        "draft",
        {POSES: 12, WAYS: 20},
        shards=24,
        initial="draft-seeing",
        teacher="target",
        ask=Answering(2, reworded=0.5),
        lengths=_ANSWERING,
    ),
}
_EXIT_SHARDS = 5
"""Shards of each source that the early exits are trained on."""
_SHOWN = ("answer_loss", "dense_loss", "name_loss", "direction", "unseen", "action", "exact")


def train_stage(
    name: str,
    out: Path,
    data: Path,
    report: loop.Progress = loop.ignore_progress,
    stop: loop.Stop = lambda: False,
    stages: Mapping[str, Stage] = STAGES,
) -> bool:
    """Train one stage in ``out/name``, from where an earlier call stopped; True when finished.

    The folder holds ``state.pt``, ``curve.json`` and, at the end, ``model/``.
    """
    stage, run = stages[name], out / name
    tokenizer = tokenizer_in(out)
    learner = PictureLearner(
        build(SIZES[stage.role], tokenizer, stage.seed),
        tokenizer,
        stage.recipe,
        GRID,
        Supervision(WORDS, stage.dense_weight, stage.name_weight),
        model_of(stage.teacher, out, stages) if stage.teacher else None,
    )
    if stage.initial:
        learner.trained.load_state_dict(weights_of(out / stage.initial))
    restore(learner, run)
    batches = Batches(tokenizer, stage.seed, stage.ask, stage.lengths)
    rounds = Rounds(
        run,
        stage.dagger.steps,
        stage.dagger.lag,
        stage.dagger.rooms,
        learner.save_model,
        roll_out_round,
        Pictures,
        FIRST_SEED,
    )
    loaded: dict[int, dict[Source, Pictures]] = {}

    def sources() -> list[tuple[Pictures, int]]:
        used = stage.used(learner.step)
        if used not in loaded:
            loaded.clear()
            loaded[used] = {
                source: Pictures([source.folder(data, number) for number in range(used)])
                for source in stage.pictures
            }
        own = rounds.pictures(learner.step)
        kept = 1.0 if own is None else 1.0 - stage.dagger.share
        found = [
            (loaded[used][source], round(kept * count)) for source, count in stage.pictures.items()
        ]
        if own is not None:
            found.append((own, stage.recipe.batch - sum(count for _, count in found)))
        return found

    def advance() -> dict[str, float]:
        return learner.learn(*batches.make(sources(), learner.step))

    def measure() -> dict[str, float]:
        figures = seeing_figures if stage.ask is seeing_questions else answering_figures
        return figures(learner.model, tokenizer, data)

    with rendering(data, dict.fromkeys(stage.pictures, stage.shards)) as renderer:

        def stopped() -> bool:
            if renderer.wait(stage.used(learner.step), stop):
                return True
            while not stop():
                if (awaited := rounds.awaited(learner.step)) is None:
                    return False
                awaited.join(1.0)
            return True

        try:
            finished = loop.train(
                learner,
                run,
                advance,
                measure=measure,
                save_at=stage.dagger.steps,
                report=report,
                stop=stopped,
            )
        finally:
            rounds.stop()
    if finished:
        learner.save_model(run / "model")
    return finished


def train_adapters(
    out: Path,
    data: Path,
    report: loop.Progress = loop.ignore_progress,
    stop: loop.Stop = lambda: False,
) -> bool:
    """Write the finished pair to ``out/models`` in float16, with early exits of the target."""
    models, tokenizer, stage = out / "models", tokenizer_in(out), STAGES["target"]
    for name in ("target", "draft"):
        if not (models / f"home-{name}").exists():
            export_stage(name, out, models / f"home-{name}")
    config = AdapterConfig(str(models / "home-target"), str(out / "exits"))
    pictures = {
        source: Pictures([source.folder(data, number) for number in range(_EXIT_SHARDS)])
        for source in stage.pictures
    }
    batches = Batches(tokenizer, config.seed, stage.ask, stage.lengths)
    counts = [(pictures[source], count) for source, count in stage.pictures.items()]
    return train_exits(
        ExitLearner(config, GRID), config, lambda step: batches.make(counts, step), report, stop
    )


def model_of(
    name: str, out: Path, stages: Mapping[str, Stage] = STAGES
) -> Qwen2VLForConditionalGeneration:
    """Return the present model of a stage.

    Raises:
        ConfigError: the stage has not saved anything yet.
    """
    model = build(SIZES[stages[name].role], tokenizer_in(out), 0)
    saved = weights_of(out / name)
    own = {key.removeprefix("model."): v for key, v in saved.items() if key.startswith("model.")}
    model.load_state_dict(own)
    return model


def export_stage(name: str, out: Path, folder: Path) -> None:
    """Write the present model of a stage in float16, as ``from_pretrained`` reads it.

    Raises:
        ConfigError: the stage has not saved anything yet.
    """
    export(model_of(name, out), tokenizer_in(out), folder, torch.float16, GRID)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the stages that are not done, or export the present state of one."""
    parser = argparse.ArgumentParser(description="Train the home's pair; resumable.")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs")
    parser.add_argument("--data", type=Path, help="folder of pictures; OUT/data if not given")
    parser.add_argument("--hours", type=float, default=0.0, help="stop after this long; 0: never")
    parser.add_argument("--stage", choices=[*STAGES, "exits"], help="only this one")
    parser.add_argument("--export", type=Path, help="folder for the present model of --stage")
    parser.add_argument(
        "--pack", type=Path, help="folder for all weights; a copy of it is an --out"
    )
    options = parser.parse_args(arguments)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # models this small are hardly faster on more
    if options.export:
        export_stage(options.stage or next(iter(STAGES)), options.out, options.export)
        return
    if options.pack:
        pack(options.out, options.pack, STAGES)
        return
    data = options.data or options.out / "data"
    stages: dict[str, MakeStage] = {
        name: partial(train_stage, name, options.out, data) for name in STAGES
    }
    stages["exits"] = partial(train_adapters, options.out, data)
    if options.stage:
        stages = {options.stage: stages[options.stage]}
    with StopRequest() as stop:
        make_stages(options.out, stages, options={}, hours=options.hours, shown=_SHOWN, stop=stop)
    stop.end()


if __name__ == "__main__":
    main()
