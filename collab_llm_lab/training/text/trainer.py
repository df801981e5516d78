"""``collab-llm train text``: every stage of the family, each resumable."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from collab_llm_lab.training import loop
from collab_llm_lab.training.curves import Axes, Curve, read_curve, write_curves
from collab_llm_lab.training.learner import ModelLearner, pick_device
from collab_llm_lab.training.loop import Progress, Stop, report_counts
from collab_llm_lab.training.run import MakeStage, check_stages, is_done, make_stages
from collab_llm_lab.training.text.distillation import Teacher
from collab_llm_lab.training.text.held_out import HeldOut
from collab_llm_lab.training.text.learners import GuessLearner, LanguageLearner
from collab_llm_lab.training.text.models import Size, build, engine_of, export, read
from collab_llm_lab.training.text.plans import PLANS, STAGES, TextPlan
from collab_llm_lab.training.text.samples import SUB_DOMAINS, vocabulary_text
from collab_llm_lab.training.text.shards import Corpus, Makers, Rows, is_skill_shard
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.loading import LOCAL
from collab_llm_nodes.models.tokenizer import train_text_tokenizer

_SHOWN = (
    "loss",
    "nats",
    "looks",
    "tokens_per_s",
    "right",
    "extract",
    *(f"exit_{n}" for n in range(1, 6)),
)
_LOOK_EVERY = 50
"""Steps between two looks for new shards."""


@dataclass(frozen=True)
class TrainText:
    """One call of the training."""

    out: Path
    """Runs, data and results; one plan per folder."""
    plan: TextPlan
    seed: int = 0
    hours: float = 0.0
    """Stop, to be resumed, after this long; 0: when the plan is done."""
    device: str = "auto"
    stages: tuple[str, ...] = STAGES

    def __post_init__(self) -> None:
        check_stages(self.stages, STAGES)


def pick_plan(name: str, device: torch.device) -> TextPlan:
    """Return the plan called ``name``; ``auto`` is the device's, ``tiny`` compiles on a GPU.

    Raises:
        ConfigError: there is none of this name.
    """
    if name == "auto":
        return PLANS["gpu" if device.type == "cuda" else "cpu"]
    if name not in PLANS:
        raise ConfigError(
            f"{name!r} is unknown", field="--plan", remedy=f"auto, {', '.join(PLANS)}"
        )
    plan = PLANS[name]
    if name == "tiny" and device.type == "cuda":  # as the real plan does
        plan = replace(
            plan,
            target=replace(plan.target, compile=True, bfloat16=True),
            draft=replace(plan.draft, compile=True, bfloat16=True),
            guesses=replace(plan.guesses, compile=True, bfloat16=True),
        )
    return plan


def train_text(config: TrainText, stop: Stop = lambda: False) -> bool:
    """Train the family into ``config.out/models``, from where an earlier call stopped.

    Args:
        stop: asked before every step; True ends the call, to be resumed.

    Returns:
        True when every wanted stage is done.

    Raises:
        ConfigError: a stage is wanted whose predecessor is not done; or the folder belongs to
            another plan or seed, is in use, or cannot be written.
        InvalidInput, ModelError: a file of an earlier call is damaged.
    """
    family = _Family(config)
    makers: dict[str, MakeStage] = {
        "tokenizer": family.tokenizer,
        "target": family.target,
        "base": family.base,
        **{f"ssm-{name}": partial(family.draft, name) for name in SUB_DOMAINS},
        "worker": family.worker,
        "guesses": family.guesses,
    }
    finished = make_stages(
        config.out,
        {stage: makers[stage] for stage in STAGES if stage in config.stages},
        options={"plan": config.plan.name, "seed": config.seed},
        settings=config.plan.lasting(),
        hours=config.hours,
        shown=_SHOWN,
        stop=stop,
    )
    if finished:
        print(f"finished: {family.models}; copy its folders to models/ to ship them")
    return finished


_AXES = Axes(
    panels={f"nats_{sub_domain}": sub_domain for sub_domain in SUB_DOMAINS},
    x="seconds",
    x_unit=60.0,
    x_label="time [min]",
    y_label="held-out text [nats per token]",
)


def write_text_curves(out: Path, folder: Path) -> dict[str, Curve]:
    """Write ``text_training.json`` and ``.png`` of the runs in ``out``; return the curves."""
    found: dict[str, Curve] = {stage: read_curve(out / stage) for stage in STAGES}
    curves = {stage: curve for stage, curve in found.items() if curve}
    write_curves(folder / "text_training.json", curves, curves, _AXES)
    return curves


class _Family:
    """The stages of one call, with the models and data that they share."""

    def __init__(self, config: TrainText) -> None:
        self.plan, self.seed, self.out = config.plan, config.seed, config.out
        self.models = self.out / "models"
        self.device = pick_device(config.device)
        self.processes = self.plan.processes or max(1, (os.cpu_count() or 1) - 2)
        self._held_out: HeldOut | None = None
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        self.corpus = Corpus(
            str(self.out / "data"), self.plan.shards, self.plan.rows, self.seed, self.plan.length
        )

    def _need(self, *stages: str) -> None:
        for stage in stages:
            if not is_done(self.out, stage):
                raise ConfigError(
                    f"stage {stage} is not done", field="--stages", remedy=f"run {stage} before"
                )

    # ------------------------------------------------------------ stages

    def tokenizer(self, report: Progress, stop: Stop) -> bool:
        report("training", 0, 1, {})
        texts = islice(vocabulary_text(random.Random("vocabulary")), self.plan.vocabulary_texts)
        tokenizer = train_text_tokenizer(texts, self.plan.vocabulary)
        tokenizer.save_pretrained(self.out / "tokenizer")
        report("trained", 1, 1, {"entries": float(len(tokenizer))})
        return True

    def target(self, report: Progress, stop: Stop) -> bool:
        self._need("tokenizer")
        model = self._fresh(self.plan.target_size, 0)
        with self._makers(self.corpus) as makers:
            if not makers.wait(self.plan.first_shards, report_counts(report, "making data"), stop):
                return False
            folder = self.models / "text-target"
            return self._train_language("target", model, folder, report, stop, makers=makers)

    def base(self, report: Progress, stop: Stop) -> bool:
        self._need("tokenizer", "target")
        model = self._fresh(self.plan.draft_size, 1)
        return self._train_language("base", model, self.out / "base" / "model", report, stop)

    def worker(self, report: Progress, stop: Stop) -> bool:
        self._need("tokenizer", "target")
        model, folder = self._fresh(self.plan.worker_size, 2), self.models / "text-worker"
        return self._train_language("worker", model, folder, report, stop, only=is_skill_shard)

    def draft(self, sub_domain: str, report: Progress, stop: Stop) -> bool:
        """Distil one draft: the base goes on with the target's answers of one sub-domain."""
        self._need("target", "base")
        answers = self.out / "answers" / sub_domain
        with Teacher(
            engine_of(self.models / "text-target", self.device),
            self.out / "tokenizer",
            self.plan.answers,
            self.plan.length,
            self.seed,
            self.processes,
        ) as teacher:
            if not teacher.write(answers, sub_domain, partial(report, "answers"), stop):
                return False
        return self._train_language(
            f"ssm-{sub_domain}",
            read(self.out / "base" / "model", self.device),
            self.models / f"ssm-{sub_domain}",
            report,
            stop,
            files=sorted(answers.glob("unit-*.npy")),
            teacher=read(self.models / "text-target", self.device),
        )

    def guesses(self, report: Progress, stop: Stop) -> bool:
        self._need("target")
        folder = self.models / "text-target"
        target = read(folder, self.device)
        learner = GuessLearner(target, self.plan.exit_layers, self.plan.guesses, self.plan.length)
        if not self._train("guesses", learner, self._rows("guesses"), report, stop):
            return False
        learner.exits.half().save(folder)
        learner.heads.fingerprint = head_fingerprint(decoder_parts(target))
        learner.heads.save(folder)
        return True

    # ------------------------------------------------------------ training

    def _train_language(
        self,
        stage: str,
        model: Any,
        folder: Path,
        report: Progress,
        stop: Stop,
        *,
        makers: Makers | None = None,
        only: Callable[[int], bool] = lambda shard: True,
        files: Sequence[Path] = (),
        teacher: Any | None = None,
    ) -> bool:
        """Train a language model and write it to ``folder``.

        Args:
            makers: processes that still make shards, which are used as they appear.
            only: chooses the shards; ``files`` are rows to use in their place.
        """
        recipe = self.plan.recipe(stage)
        learner = LanguageLearner(model, recipe, self.plan.length, teacher)
        short: list[Rows] = []
        for length, _ in recipe.growing:
            corpus = self._short(length)
            with self._makers(corpus) as short_makers:
                if not short_makers.wait(corpus.shards, report_counts(report, "making data"), stop):
                    return False
            short.append(self._rows(stage, corpus=corpus))
        rows = self._rows(stage, files, only)
        if self._held_out is None:
            self._held_out = HeldOut(
                self.read_tokenizer(), self.plan.held_out, self.plan.length, self.device
            )
        measure = partial(self._held_out.figures, model)
        if not self._train(
            stage, learner, rows, report, stop, short=short, makers=makers, measure=measure
        ):
            return False
        export(model, self.read_tokenizer(), folder)
        return True

    def _train(
        self,
        stage: str,
        learner: ModelLearner,
        rows: Rows,
        report: Progress,
        stop: Stop,
        *,
        short: Sequence[Rows] = (),
        makers: Makers | None = None,
        measure: Callable[[], Mapping[str, float]] = dict,
    ) -> bool:
        """Train on ``rows``; on ``short`` ones before, as long as the recipe's ``growing`` says."""
        recipe, run = learner.recipe, self.out / stage
        loop.restore(learner, run, self.device)
        began, first = time.monotonic(), learner.step + 1
        until = list(accumulate(steps for _, steps in recipe.growing))

        def advance() -> dict[str, float]:
            nonlocal began
            if learner.step == first:  # the first step compiled
                began = time.monotonic()
            if makers is not None and learner.step % _LOOK_EVERY == 0:
                makers.check()
                rows.add(self.corpus.file(k) for k in self.corpus.ready())
            now = next((r for r, end in zip(short, until, strict=True) if learner.step < end), rows)
            size = recipe.batch * rows.length // now.length
            losses = learner.learn(*now.batch(learner.step, size))
            done = (learner.step - first) * recipe.batch * rows.length
            return {**losses, "tokens_per_s": done / max(1e-9, time.monotonic() - began)}

        return loop.train(
            learner,
            run,
            advance,
            measure=lambda: {**measure(), "rows": float(len(rows))},
            report=report,
            stop=stop,
        )

    def _makers(self, corpus: Corpus) -> Makers:
        return Makers(self.out / "tokenizer", corpus, self.processes)

    def _rows(
        self,
        stage: str,
        files: Sequence[Path] = (),
        only: Callable[[int], bool] = lambda shard: True,
        corpus: Corpus | None = None,
    ) -> Rows:
        corpus = corpus or self.corpus
        rows = Rows(corpus.length, self.seed * len(STAGES) + STAGES.index(stage), self.device)
        rows.add(files or [corpus.file(shard) for shard in corpus.ready() if only(shard)])
        return rows

    def _short(self, length: int) -> Corpus:
        """Return the corpus of rows of ``length`` tokens; its shards are as large as the others."""
        plan = self.plan
        folder, rows = self.out / f"data-{length}", plan.rows * plan.length // length
        return Corpus(str(folder), plan.short_shards, rows, self.seed, length, short=True)

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            self.out / "tokenizer", **LOCAL
        )
        return tokenizer

    def _fresh(self, size: Size, offset: int) -> Any:
        model: Any = build(size, self.read_tokenizer(), self.seed + offset)
        return model.to(self.device)
