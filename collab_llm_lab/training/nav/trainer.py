"""``collab-llm train nav``: the pair from seeds, stage by stage; resumable.

Each stage has a folder with ``state.pt``, ``curve.json`` and, at its end, ``model``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen2VLForConditionalGeneration

from collab_llm_lab.training import loop
from collab_llm_lab.training.curves import Axes, read_curve, write_curves
from collab_llm_lab.training.learner import ModelLearner
from collab_llm_lab.training.nav.adapters import ExitLearner
from collab_llm_lab.training.nav.batches import Batches, Shards
from collab_llm_lab.training.nav.dagger import Rounds
from collab_llm_lab.training.nav.figures import (
    answering_figures,
    seeing_figures,
    sight_figures,
)
from collab_llm_lab.training.nav.learner import PictureLearner
from collab_llm_lab.training.nav.making import Making
from collab_llm_lab.training.nav.models import SIZES, build, export, read, tokenizer_in
from collab_llm_lab.training.nav.packing import has_weights, restore, weights_of
from collab_llm_lab.training.nav.plans import Plan, Stage
from collab_llm_lab.training.nav.questions import seeing_questions
from collab_llm_lab.training.nav.rendering import rendering
from collab_llm_lab.training.run import MakeStage, make_stages

EXITS = "exits"
"""The last stage."""
_SHOWN = ("shape", "answer_loss", "direction", "unseen", "action", "exact", "agreement")


@dataclass(frozen=True)
class Trainer:
    """Trains the stages of a plan.

    Attributes:
        out: folder of the run: a folder for each stage, the tokenizer, and ``models`` at the end.
        data: folder of the rendered shards.
        seed: of fresh weights and of the batches.
    """

    plan: Plan
    out: Path
    data: Path
    device: torch.device = torch.device("cpu")
    seed: int = 0

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_in(self.out)

    def model(self, name: str) -> Qwen2VLForConditionalGeneration:
        """Return the present model of a stage.

        Raises:
            ConfigError: the stage has not saved anything yet.
        """
        model = build(SIZES[self.plan.stages[name].role], self.tokenizer, 0)
        weights = weights_of(self.out / name)
        own = {k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")}
        model.load_state_dict(own)
        return model

    def export(self, name: str, folder: Path) -> None:
        """Write the present model of a stage in float16, as ``from_pretrained`` reads it.

        Raises:
            ConfigError: the stage has not saved anything yet.
        """
        export(self.model(name), self.tokenizer, folder, torch.float16)

    def train(
        self,
        name: str,
        report: loop.Progress = loop.ignore_progress,
        stop: loop.Stop = lambda: False,
    ) -> bool:
        """Train one stage, from where an earlier call stopped; return True when finished."""
        stage, tokenizer = self.plan.stages[name], self.tokenizer
        model = build(SIZES[stage.role], tokenizer, self.seed)
        teacher = self.model(stage.teacher) if stage.teacher else None
        learner = PictureLearner(model, tokenizer, stage.recipe, self.device, teacher)
        if stage.initial and not has_weights(self.out / name):
            learner.trained.load_state_dict(weights_of(self.out / stage.initial))
        if stage.ask is None:
            measure = partial(sight_figures, learner.words, self.data)
        else:
            figures = seeing_figures if stage.ask is seeing_questions else answering_figures
            measure = partial(figures, model, tokenizer, self.data)
        if not self._run(name, stage, learner, teacher or model, report, stop, measure):
            return False
        export(model, tokenizer, self.out / name / "model", torch.float32)
        return True

    def train_exits(
        self, report: loop.Progress = loop.ignore_progress, stop: loop.Stop = lambda: False
    ) -> bool:
        """Write the finished pair to ``models`` in float16, with early exits of the target.

        Returns:
            True when finished.
        """
        for role in ("target", "draft"):
            self.export(role, self.out / "models" / f"nav-{role}")
        folder = self.out / "models" / "nav-target"
        model, tokenizer = read(folder)  # as it is shipped: rounded to float16
        learner = ExitLearner(model, tokenizer, self.plan.exits.recipe, self.device)
        if not self._run(EXITS, self.plan.exits, learner, model, report, stop):
            return False
        learner.adapters.save(folder)
        return True

    def _run(
        self,
        name: str,
        stage: Stage,
        learner: ModelLearner,
        driver: Qwen2VLForConditionalGeneration,
        report: loop.Progress,
        stop: loop.Stop,
        measure: Callable[[], dict[str, float]] = dict,
    ) -> bool:
        """Move ``learner`` by the batches of a stage, from where an earlier call stopped.

        Args:
            driver: drives in the rounds of DAgger.
        """
        run, tokenizer = self.out / name, self.tokenizer
        restore(learner, run)
        begun = learner.step
        make_batches = partial(Batches, tokenizer, self.seed, stage.ask, stage.lengths)

        def shards(step: int) -> Shards:
            used, own = range(stage.used(step)), rounds.shards(step)
            kept = 1.0 - stage.dagger.share if own else 1.0
            found: list[tuple[list[Path], int]] = [
                ([source.folder(self.data, number) for number in used], round(kept * count))
                for source, count in stage.pictures.items()
            ]
            if own:
                found.append((own, stage.recipe.batch - sum(count for _, count in found)))
            return found

        def advance() -> dict[str, float]:
            if stage.recipe.compile and learner.step == begun:
                report("compiling", 0, 1, {})
            return learner.learn(*making.make(learner.step))

        def stopped() -> bool:
            if renderer.wait(stage.used(learner.step + making.ahead), stop, report):
                return True
            while not stop():
                if (awaited := rounds.awaited(learner.step)) is None:
                    return False
                report("driving", learner.step, learner.step, {})
                awaited.join(1.0)
            return True

        making = Making(make_batches, shards, self.plan.makers)
        rounds = Rounds(
            run,
            stage.dagger,
            lambda folder: export(driver, tokenizer, folder, torch.float32),
            making.ahead,
        )
        counts = dict.fromkeys(stage.pictures, stage.shards)
        with rendering(self.data, counts, self.plan.renderers) as renderer:
            try:
                return loop.train(
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
                making.end()


def train_nav(
    trainer: Trainer,
    hours: float = 0.0,
    only: str = "",
    stop: loop.Stop = lambda: False,
) -> bool:
    """Train the stages that are not done, in order; return True when all of them are.

    Args:
        hours: stop, to be resumed, after this long; 0: when the plan is done.
        only: name of a stage: only this one.
        stop: asked before every step; True ends the call, to be resumed.

    Raises:
        ConfigError: the folder belongs to another seed or device, is in use, or cannot be written;
            or the stage before ``only`` has not begun.
        ModelError: the state that an earlier call saved is damaged.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # models this small are hardly faster on more
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    stages: dict[str, MakeStage] = {
        name: partial(trainer.train, name) for name in trainer.plan.stages
    }
    stages[EXITS] = trainer.train_exits
    finished = make_stages(
        trainer.out,
        {only: stages[only]} if only else stages,
        options={"seed": trainer.seed, "device": trainer.device.type},
        hours=hours,
        shown=_SHOWN,
        stop=stop,
    )
    if finished and not only:
        print(f"finished: {trainer.out / 'models'}; copy its folders to models/ to ship them")
    return finished


_AXES = Axes(
    panels={
        "direction": "direction of things in view",
        "unseen": "things not in view",
        "action": "actions",
        "held_out": "actions, in words never trained on",
    },
    x="pictures",
    x_unit=1e3,
    x_label="pictures seen [thousand]",
    y_label="held-out answers right",
    y_limits=(0, 1.02),
)


def write_nav_curves(trainer: Trainer) -> dict[str, Any]:
    """Write ``curves/nav_training.json`` and ``.png`` in the folder of the run; return the JSON.

    Per stage it holds the parameters, the batch and the curve: shares of held-out questions
    answered right, over steps, seconds and pictures seen.
    """
    results: dict[str, Any] = {}
    for name, stage in trainer.plan.stages.items():
        size, batch = SIZES[stage.role], stage.recipe.batch
        curve = read_curve(trainer.out / name)
        results[name] = {
            "parameters": build(size, trainer.tokenizer, 0).num_parameters(),
            "batch": batch,
            "learning_rate": stage.recipe.learning_rate,
            "dagger_steps": stage.dagger.steps,
            "curve": [point | {"pictures": point["step"] * batch} for point in curve],
        }
    curves = {
        f"{name}, {result['parameters'] / 1e6:.2f} M parameters": result["curve"]
        for name, result in results.items()
    }
    write_curves(trainer.out / "curves" / "nav_training.json", results, curves, _AXES)
    return results
