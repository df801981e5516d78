"""``collab-llm train nav``: target and draft with dense supervision, then early exits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from collab_llm_lab.training import loop
from collab_llm_lab.training.curves import Axes, read_curve, write_curves
from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.nav import data
from collab_llm_lab.training.nav.adapters import AdapterConfig, train_adapters
from collab_llm_lab.training.nav.batches import Batches
from collab_llm_lab.training.nav.dagger import Rounds, roll_out_round
from collab_llm_lab.training.nav.evaluate import held_out_figures
from collab_llm_lab.training.nav.forward import GRID
from collab_llm_lab.training.nav.learner import PictureLearner, Supervision, read_with
from collab_llm_lab.training.nav.models import SIZES, build, export, read
from collab_llm_lab.training.nav.wording import HELD_OUT, WORDS, corpus
from collab_llm_lab.training.run import MakeStage, make_stages
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.tokenizer import train_tokenizer


@dataclass(frozen=True)
class TrainConfig:
    """One training run; with equal values it gives equal models on one machine."""

    recipe: Recipe
    role: str = "target"
    """A key of ``models.SIZES``: target | draft | micro."""
    initial: str = ""
    """Folder of the checkpoint to begin with; none: fresh weights."""
    teacher: str = ""
    """Folder of the checkpoint whose law of each answer token is learnt; none: the expert's."""
    run: str = "runs/nav-target"
    data: str = "data/nav"
    shards: int = 30
    questions: int = 2
    """Per picture."""
    dense_weight: float = 4.0
    name_weight: float = 0.3
    reworded: float = 0.0
    """Share of the questions asked in one of ``wording.TRAINED``, not in the plain wording."""
    freeze_vision: bool = False
    seed: int = 0
    dagger_steps: tuple[int, ...] = ()
    """Steps whose model is rolled out in fresh rooms; its visited states join the data ..."""
    dagger_lag: int = 2_000
    """... this many steps later (rolled out in a second process meanwhile)."""
    dagger_rooms: int = 400
    dagger_share: float = 0.5
    """Share of own-trajectory pictures in a batch once there are any."""
    held_out_rooms: int = 40

    def __post_init__(self) -> None:
        if self.role not in SIZES:
            raise ConfigError(f"unknown {self.role!r}", field="role", remedy=" | ".join(SIZES))
        if self.recipe.batch < 1 or self.questions < 1 or self.shards < 1:
            raise ConfigError("must be positive", field="recipe.batch, questions, shards")


class Learner(PictureLearner):
    """The model of a ``TrainConfig``, and the data of its steps."""

    def __init__(self, config: TrainConfig) -> None:
        tokenizer = train_tokenizer(corpus())
        model = (
            read_with(tokenizer, config.initial)
            if config.initial
            else build(SIZES[config.role], tokenizer, config.seed)
        )
        if config.freeze_vision:
            model.model.visual.requires_grad_(False)
        super().__init__(
            model,
            tokenizer,
            config.recipe,
            GRID,
            Supervision(WORDS, config.dense_weight, config.name_weight),
            read_with(tokenizer, config.teacher) if config.teacher else None,
        )
        self.batches = Batches(tokenizer, config.seed, config.reworded)


def train_nav(
    config: TrainConfig,
    report: loop.Progress = loop.ignore_progress,
    stop: loop.Stop = lambda: False,
) -> bool:
    """Render the data, train one model, resume where an earlier call stopped; True when finished.

    The run folder holds ``state.pt`` (everything), ``curve.json`` and, at the end, ``model/``
    (float32 checkpoint in transformers' format). ``stop`` is asked before every shard and step.
    """
    folders = data.make_shards(
        Path(config.data), config.shards, loop.report_counts(report, "rendering"), stop
    )
    if len(folders) < config.shards:
        return False
    run = Path(config.run)
    learner = Learner(config)
    loop.restore(learner, run, learner.device)
    pictures = data.Pictures(folders)
    rounds = Rounds(
        run,
        config.dagger_steps,
        config.dagger_lag,
        config.dagger_rooms,
        learner.save_model,
        roll_out_round,
        data.Pictures,
        2 * data.TRAIN_SEEDS,
    )

    def advance() -> dict[str, float]:
        own = rounds.pictures(learner.step)
        from_own = int(config.recipe.batch * config.dagger_share) if own is not None else 0
        sources = [(pictures, config.recipe.batch - from_own)]
        if own is not None:
            sources.append((own, from_own))
        return learner.learn(*learner.batches.make(sources, learner.step, config.questions))

    def measure() -> dict[str, float]:
        return _held_out(config, learner)

    def stopped() -> bool:
        while not stop():
            if (awaited := rounds.awaited(learner.step)) is None:
                return False
            awaited.join(1.0)
        return True

    if config.initial and not learner.curve:
        learner.curve.append({"step": 0, "seconds": learner.seconds, **measure()})
    try:
        finished = loop.train(
            learner,
            run,
            advance,
            measure=measure,
            save_at=config.dagger_steps,
            report=report,
            stop=stopped,
        )
    finally:
        rounds.stop()
    if finished:
        learner.save_model(run / "model")
    return finished


def _held_out(config: TrainConfig, learner: Learner) -> dict[str, float]:
    """Return figures on held-out questions.

    ``held_out_wording`` is ``action`` of questions in words never trained on.
    """
    measure = partial(
        held_out_figures,
        learner.model,
        learner.tokenizer,
        Path(config.data),
        config.held_out_rooms,
    )
    found = measure()
    if config.reworded:
        found["held_out_wording"] = measure(wordings=HELD_OUT["both"])["action"]
    return found


_PLAIN = Recipe(
    32,
    1.5e-3,
    steps=17_000,
    warmup=300,
    beta2=0.98,
    compile=True,
    bfloat16=True,
    measure_every=1_000,
)
TARGET_PLAN = TrainConfig(_PLAIN, dagger_steps=(4_000, 7_000, 10_000, 13_000))
DRAFT_PLAN = TrainConfig(replace(_PLAIN, learning_rate=2e-3, steps=2_600), role="draft")
"""The draft sees far less than the target: it only has to guess well."""
_WORDING = Recipe(32, 6e-4, steps=180, warmup=20, beta2=0.98, measure_every=60)
"""Not compiled: its texts differ in length."""
TARGET_WORDING = TrainConfig(
    _WORDING,
    shards=10,
    dense_weight=0.0,
    name_weight=0.0,
    reworded=0.7,
    freeze_vision=True,
    dagger_steps=(0,),
    dagger_lag=0,
    dagger_rooms=150,
    held_out_rooms=20,
)
"""The wording stage: the language model alone, with instructions in many words."""
DRAFT_WORDING = replace(
    TARGET_WORDING,
    recipe=replace(_WORDING, learning_rate=1e-3, steps=120),
    role="draft",
    dagger_steps=(),
)
"""The wording stage of the draft, which learns the law of the target's answers."""


def train_all(
    out: Path,
    hours: float = 0.0,
    seed: int = 0,
    pair: Path | None = None,
    stop: loop.Stop = lambda: False,
) -> bool:
    """Train target, draft and early-exit adapters into ``out/models``; resumes from ``out``.

    Each model learns to see and answer in the plain wording, then, in a second stage, to
    understand other words.

    Args:
        out: runs, rendered data and results; one plan per folder.
        hours: stop, to be resumed, after this long; 0 = when the plan is done.
        seed: of initialisation and batches.
        pair: folder of a trained pair; only the wording stage and the adapters are run.
        stop: asked before every step; True ends the call, to be resumed.

    Returns:
        True when every stage is done.

    Raises:
        ConfigError: ``out`` belongs to another seed or pair, is in use, or cannot be written.
        ModelError: the state that an earlier call saved is damaged.
    """
    torch.set_num_threads(1)  # models this small are slower on more
    plans = plans_of(out, seed, pair)
    stages: dict[str, MakeStage] = {
        name: partial(_train_stage, config, result) for name, (config, result) in plans.items()
    }
    stages["exits"] = partial(_train_exits, out, pair)
    options = {"seed": seed, "pair": str(pair.resolve()) if pair else "no pair"}
    shown = ("answer_loss", "in_view_direction", "not_in_view", "agreement")
    if not make_stages(out, stages, options=options, hours=hours, shown=shown, stop=stop):
        return False
    _write_curves({name: config for name, (config, _) in plans.items()}, out / "curves")
    print(f"finished: {out / 'models'}; copy its folders to models/ to ship them")
    return True


def plans_of(out: Path, seed: int, pair: Path | None) -> dict[str, tuple[TrainConfig, Path]]:
    """Return the plan and the resulting checkpoint of every stage, in order."""
    found = {}
    for plain, wording in ((TARGET_PLAN, TARGET_WORDING), (DRAFT_PLAN, DRAFT_WORDING)):
        model = f"nav-{plain.role}"
        first = (pair or out / "plain") / model
        if pair is None:
            found[plain.role] = plain, first
        teacher = str(out / "models" / "nav-target") if plain.role == "draft" else ""
        wording = replace(wording, initial=str(first), teacher=teacher)
        found[f"{plain.role}-wording"] = wording, out / "models" / model
    return {
        name: (replace(plan, run=str(out / name), data=str(out / "data"), seed=seed), result)
        for name, (plan, result) in found.items()
    }


def _train_stage(config: TrainConfig, result: Path, report: loop.Progress, stop: loop.Stop) -> bool:
    if not train_nav(config, report, stop):
        return False
    export(*read(Path(config.run) / "model"), result, torch.float16)
    return True


def _train_exits(out: Path, pair: Path | None, report: loop.Progress, stop: loop.Stop) -> bool:
    own = sorted(out.glob("target*/dagger-*"))
    config = AdapterConfig(
        model=str(out / "models" / "nav-target"),
        run=str(out / "exits"),
        shards=tuple(str(shard) for shard in (*data.make_shards(out / "data", 5), *own)),
        reworded=TARGET_WORDING.reworded,
    )
    if pair is not None:
        recipe = replace(config.recipe, steps=80, learning_rate=4e-4)
        config = replace(config, initial=str(pair / "nav-target"), recipe=recipe)
    return train_adapters(config, report, stop)


_AXES = Axes(
    panels={
        "in_view_direction": "direction of things in view",
        "not_in_view": "things not in view",
        "held_out_wording": "wording stage: unseen words",
    },
    x="pictures",
    x_unit=1e3,
    x_label="pictures seen [thousand]",
    y_label="held-out answers right",
    y_limits=(0, 1.02),
)


def _write_curves(plans: dict[str, TrainConfig], folder: Path) -> None:
    """Write ``nav_training.json`` and ``.png``.

    Per stage the JSON holds the parameters, the plan's main figures and the curve: shares of
    held-out questions answered right in free running, over steps, seconds and pictures seen.
    """
    tokenizer = train_tokenizer(corpus())
    results: dict[str, Any] = {}
    curves = {}
    for stage, plan in plans.items():
        recipe = plan.recipe
        parameters = sum(p.numel() for p in build(SIZES[plan.role], tokenizer, 0).parameters())
        curve = [
            point | {"pictures": point["step"] * recipe.batch}
            for point in read_curve(Path(plan.run))
        ]
        results[stage] = {
            "parameters": parameters,
            "steps": recipe.steps,
            "batch": recipe.batch,
            "questions": plan.questions,
            "learning_rate": recipe.learning_rate,
            "dagger_steps": plan.dagger_steps,
            "curve": curve,
        }
        panels = ["held_out_wording"] if plan.reworded else ["in_view_direction", "not_in_view"]
        curves[f"{stage}, {parameters / 1e6:.2f} M parameters"] = [
            {key: point[key] for key in ("pictures", *panels)}
            for point in curve
            if panels[0] in point
        ]
    write_curves(folder / "nav_training.json", results, curves, _AXES)
