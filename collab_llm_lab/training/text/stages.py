"""``collab-llm train text``: every stage of the family, each resumable."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from collab_llm_lab.training import loop, run_folder
from collab_llm_lab.training.text.answering import engine_of
from collab_llm_lab.training.text.architecture import Size, build
from collab_llm_lab.training.text.distillation import Teacher
from collab_llm_lab.training.text.export import export, read
from collab_llm_lab.training.text.held_out import HeldOut
from collab_llm_lab.training.text.learners import GuessLearner, LanguageLearner, RowLearner
from collab_llm_lab.training.text.plans import PLANS, STAGES, TextPlan
from collab_llm_lab.training.text.samples import vocabulary_text
from collab_llm_lab.training.text.shards import Corpus, Makers, Rows, is_skill_shard
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import head_fingerprint
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
        unknown = [stage for stage in self.stages if stage not in STAGES]
        if unknown or not self.stages:
            raise ConfigError(
                f"{', '.join(unknown) or 'none'}",
                field="--stages",
                remedy=f"choose from {' '.join(STAGES)}",
            )


def pick_device(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is a GPU where there is one.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"{name!r} is unknown", field="--device", remedy="auto, cpu or cuda")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError("there is no GPU", field="--device", remedy="cpu, or auto")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


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
    if name == "tiny" and device.type == "cuda":  # what the real plan does there, in little
        plan = replace(
            plan,
            target=replace(plan.target, compile=True, bfloat16=True),
            draft=replace(plan.draft, compile=True, bfloat16=True),
            guesses=replace(plan.guesses, compile=True, bfloat16=True),
        )
    return plan


def train_text(config: TrainText, stop: Callable[[], bool] = lambda: False) -> bool:
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
    transformers_logging.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core makes data
    family = _Family(config, stop)
    options = {"plan": config.plan.name, "seed": config.seed}
    with run_folder.held(config.out, options, config.plan.lasting()):
        return family.run()


class _Family:
    """The stages of one call, and what they share."""

    def __init__(self, config: TrainText, stop: Callable[[], bool]) -> None:
        self.plan, self.seed = config.plan, config.seed
        self.out, self.stages = config.out, config.stages
        self.device = pick_device(config.device)
        self.processes = self.plan.processes or max(1, (os.cpu_count() or 1) - 2)
        self._stop = stop
        self._until = time.monotonic() + 3600 * config.hours if config.hours else float("inf")
        self._held_out: HeldOut | None = None
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        self.corpus = Corpus(
            str(self.out / "data"), self.plan.shards, self.plan.rows, self.seed, self.plan.length
        )

    def run(self) -> bool:
        makers: dict[str, Callable[[loop.Progress], bool]] = {
            "tokenizer": self._tokenizer,
            "target": self._target,
            "base": self._base,
            "worker": self._worker,
            "guesses": self._guesses,
        }
        with loop.shown(_SHOWN) as show:
            for stage in STAGES:
                if stage not in self.stages or self._done(stage):
                    continue
                tell = show(stage)
                make = makers.get(stage)
                finished = make(tell) if make else self._draft(stage, tell)
                if not finished:
                    print(f"stopped in stage {stage}; the same command goes on from here")
                    return False
                (self.out / stage).mkdir(parents=True, exist_ok=True)
                (self.out / stage / "done").touch()
        print(f"finished: {self._models()}; copy its folders to models/ to ship them")
        return True

    def _done(self, stage: str) -> bool:
        return (self.out / stage / "done").exists()

    def _late(self) -> bool:
        return self._stop() or time.monotonic() > self._until

    def _need(self, *stages: str) -> None:
        for stage in stages:
            if not self._done(stage):
                raise ConfigError(
                    f"stage {stage} is not done", field="--stages", remedy=f"run {stage} before"
                )

    # ------------------------------------------------------------ stages

    def _tokenizer(self, tell: loop.Progress) -> bool:
        tell("training", 0, 1, {})
        texts = islice(vocabulary_text(random.Random("vocabulary")), self.plan.vocabulary_texts)
        tokenizer = train_text_tokenizer(texts, self.plan.vocabulary)
        tokenizer.save_pretrained(self._folder("tokenizer"))
        tell("trained", 1, 1, {"entries": float(len(tokenizer))})
        return True

    def _target(self, tell: loop.Progress) -> bool:
        self._need("tokenizer")
        tokenizer = self.read_tokenizer()
        model = self._fresh(self.plan.target_size, tokenizer, 0)
        with Makers(self._folder("tokenizer"), self.corpus, self.processes) as makers:
            made = makers.wait(
                self.plan.first_shards, lambda n, of: tell("making data", n, of, {}), self._late
            )
            if not made:
                return False
            return self._train_language("target", model, tell, makers=makers)

    def _base(self, tell: loop.Progress) -> bool:
        self._need("tokenizer", "target")
        size, tokenizer = self.plan.draft_size, self.read_tokenizer()
        return self._train_language("base", self._fresh(size, tokenizer, 1), tell)

    def _worker(self, tell: loop.Progress) -> bool:
        self._need("tokenizer", "target")
        model = self._fresh(self.plan.worker_size, self.read_tokenizer(), 2)
        return self._train_language("worker", model, tell, only=is_skill_shard)

    def _draft(self, stage: str, tell: loop.Progress) -> bool:
        """Distil one draft: the base goes on with the target's answers of one sub-domain."""
        self._need("target", "base")
        sub_domain = stage.removeprefix("ssm-")
        folder = self.out / "answers" / sub_domain
        with Teacher(
            engine_of(self._models() / "text-target", self.device),
            self._folder("tokenizer"),
            self.plan.answers,
            self.plan.length,
            self.seed,
            self.processes,
        ) as teacher:
            answered = teacher.write(
                folder, sub_domain, lambda n, of, f: tell("answers", n, of, f), self._late
            )
        if not answered:
            return False
        model = read(self.out / "base" / "model", self.device)
        target = self._read("text-target")
        files = sorted(folder.glob("unit-*.npy"))
        return self._train_language(stage, model, tell, files=files, teacher=target)

    def _guesses(self, tell: loop.Progress) -> bool:
        self._need("target")
        target, stage = self._read("text-target"), self.plan.guesses
        learner = GuessLearner(target, self.plan.exit_layers, stage, stage.pace, self.plan.length)
        if not self._train("guesses", learner, self._rows("guesses"), tell):
            return False
        folder = self._models() / "text-target"
        learner.exits.half().save(folder)
        learner.heads.fingerprint = head_fingerprint(decoder_parts(target))
        learner.heads.save(folder)
        return True

    # ------------------------------------------------------------ training

    def _train_language(
        self,
        name: str,
        model: Any,
        tell: loop.Progress,
        *,
        makers: Makers | None = None,
        only: Callable[[int], bool] = lambda shard: True,
        files: Sequence[Path] = (),
        teacher: Any | None = None,
    ) -> bool:
        stage = self.plan.stage(name)
        learner = LanguageLearner(model, stage, stage.pace, self.plan.length, teacher)
        short: list[Rows] = []
        for length, _ in stage.growing:
            corpus = self._short(length)
            with Makers(self._folder("tokenizer"), corpus, self.processes) as short_makers:
                if not short_makers.wait(
                    corpus.shards, lambda n, of: tell("making data", n, of, {}), self._late
                ):
                    return False
            short.append(self._rows(name, corpus=corpus))
        rows = self._rows(name, files, only)
        held_out = self._curve_documents()

        def measure() -> dict[str, float]:
            return held_out.figures(model)

        if not self._train(name, learner, rows, tell, short=short, makers=makers, measure=measure):
            return False
        folder = self._models() / {"target": "text-target", "worker": "text-worker"}.get(name, name)
        if name == "base":
            folder = self.out / "base" / "model"
        export(model, self.read_tokenizer(), folder)
        return True

    def _train(
        self,
        name: str,
        learner: RowLearner,
        rows: Rows,
        tell: loop.Progress,
        *,
        short: Sequence[Rows] = (),
        makers: Makers | None = None,
        measure: Callable[[], Mapping[str, float]] = dict,
    ) -> bool:
        """Train on ``rows``; on ``short`` ones before, as long as the plan's ``growing`` says."""
        stage, run = self.plan.stage(name), self.out / name
        loop.restore(learner, run, self.device)
        began, first = time.monotonic(), learner.step + 1
        until = list(accumulate(steps for _, steps in stage.growing))

        def advance() -> dict[str, float]:
            nonlocal began
            if learner.step == first:  # the first step compiled
                began = time.monotonic()
            if makers is not None and learner.step % _LOOK_EVERY == 0:
                makers.check()
                rows.add(self.corpus.file(k) for k in self.corpus.ready())
            now = next((r for r, end in zip(short, until, strict=True) if learner.step < end), rows)
            size = stage.batch * rows.length // now.length
            losses = learner.learn(*now.batch(learner.step, size))
            done = (learner.step - first) * stage.batch * rows.length
            return {**losses, "tokens_per_s": done / max(1e-9, time.monotonic() - began)}

        return loop.train(
            learner,
            run,
            stage.pace,
            advance,
            measure=lambda: {**measure(), "rows": float(len(rows))},
            tell=tell,
            stop=self._late,
        )

    def _rows(
        self,
        name: str,
        files: Sequence[Path] = (),
        only: Callable[[int], bool] = lambda shard: True,
        corpus: Corpus | None = None,
    ) -> Rows:
        corpus = corpus or self.corpus
        rows = Rows(corpus.length, self.seed * len(STAGES) + STAGES.index(name), self.device)
        rows.add(files or [corpus.file(shard) for shard in corpus.ready() if only(shard)])
        return rows

    def _short(self, length: int) -> Corpus:
        """Return the corpus of rows of ``length`` tokens; its shards are as large as the others."""
        plan = self.plan
        folder, rows = self.out / f"data-{length}", plan.rows * plan.length // length
        return Corpus(str(folder), plan.short_shards, rows, self.seed, length, short=True)

    # ------------------------------------------------------------ models and folders

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            self._folder("tokenizer"), trust_remote_code=False
        )
        return tokenizer

    def _fresh(self, size: Size, tokenizer: PreTrainedTokenizerBase, offset: int) -> Any:
        model: Any = build(size, tokenizer, self.seed + offset)
        return model.to(self.device)

    def _read(self, name: str) -> Any:
        return read(self._models() / name, self.device)

    def _models(self) -> Path:
        return self.out / "models"

    def _folder(self, name: str) -> Path:
        return self.out / name

    def _curve_documents(self) -> HeldOut:
        if self._held_out is None:
            self._held_out = HeldOut(
                self.read_tokenizer(), self.plan.held_out, self.plan.length, self.device
            )
        return self._held_out
