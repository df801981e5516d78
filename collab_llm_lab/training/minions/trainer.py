"""``collab-llm train minions``: the text worker learns its tasks, the text target to plan."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from collab_llm_lab.training import loop, run_folder
from collab_llm_lab.training.minions.chats import Group, planner_group, worker_group
from collab_llm_lab.training.minions.plans import PLANS, STAGES, MinionsPlan
from collab_llm_lab.training.minions.rows import (
    BRANCH,
    CLASS,
    IDS,
    NUMBERS_OF_A_STEP,
    POSITION,
    SOURCE,
    TEXT,
    Source,
    visible,
)
from collab_llm_lab.training.text.export import export, read
from collab_llm_lab.training.text.forward import TextForward
from collab_llm_lab.training.text.learners import RowLearner, looks
from collab_llm_lab.training.text.packing import Document
from collab_llm_lab.training.text.plans import Stage
from collab_llm_lab.training.text.rendering import ANSWERED
from collab_llm_lab.training.text.samples import DEFAULT_MIX
from collab_llm_lab.training.text.shards import SKILL_MIX, documents
from collab_llm_nodes.errors import ConfigError, did_you_mean
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.loading import LOCAL
from collab_llm_nodes.models.low_rank import LowRank
from collab_llm_nodes.protocols.minions.embedded.remote import ROLE

WORKER, TARGET = "text-worker", "text-target"
_SHOWN = ("nats", "looks", "found", "absent")
_LEARNT_OF_ROW = 448
"""Places of a row that are learnt at most: logits of all would be a third of the work."""
_REPLAYED_AT_MOST = 64
"""Documents to fill the replayed rows of a batch with."""
_SHORT_REPLY = 10
"""Tokens; the reply of a job without an answer has fewer, one with an answer more."""


@dataclass(frozen=True)
class TrainMinions:
    """One call of the training."""

    out: Path
    """Runs and results; one plan per folder."""
    models: Path
    """Folder of the text family that is adapted."""
    plan: str = "cpu"
    seed: int = 0
    hours: float = 0.0
    """Stop, to be resumed, after this long; 0: when the plan is done."""
    stages: tuple[str, ...] = STAGES

    def __post_init__(self) -> None:
        if self.plan not in PLANS:
            raise ConfigError(
                f"{self.plan!r} is unknown",
                field="--plan",
                remedy=did_you_mean(self.plan, PLANS, " or ".join(PLANS)),
            )
        if not self.stages or set(self.stages) - set(STAGES):
            raise ConfigError(
                f"{' '.join(self.stages) or 'none'}",
                field="--stages",
                remedy=f"choose from {' '.join(STAGES)}",
            )


def train_minions(config: TrainMinions, stop: Callable[[], bool] = lambda: False) -> bool:
    """Train into ``config.out/models``, from where an earlier call stopped.

    The worker is a model of its own, with what it could before. The planner is a small file beside
    the target, whose own answers stay as they are.

    Args:
        stop: asked before every step; True ends the call, to be resumed.

    Returns:
        True when every wanted stage is done.

    Raises:
        ConfigError: the folder of the family lacks a model; or the run's folder belongs to another
            plan, seed or family, is in use, or cannot be written.
        ModelError: the state that an earlier call saved is damaged.
    """
    transformers_logging.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    stop_at = time.monotonic() + 3600 * config.hours if config.hours else float("inf")

    def late() -> bool:
        return stop() or time.monotonic() > stop_at

    makers = {"worker": _train_worker, "planner": _train_planner}
    options = {"plan": config.plan, "seed": config.seed, "models": str(config.models.resolve())}
    with run_folder.held(config.out, options), loop.shown(_SHOWN) as show:
        for stage in config.stages:
            done = config.out / stage / "done"
            if done.exists():
                continue
            if not makers[stage](config, show(stage), late):
                print(f"stopped in stage {stage}; the same command goes on from here")
                return False
            done.touch()
    return True


def _train_worker(config: TrainMinions, tell: loop.Progress, stop: Callable[[], bool]) -> bool:
    plan = PLANS[config.plan]
    model, tokenizer = _read(config, WORKER)
    layers = len(model.model.layers)
    learner = ForestLearner(model, model, plan.worker, plan.length, range(1, layers))
    source = Source(
        tokenizer,
        lambda number: _passages(
            plan, f"worker {config.seed} {number}", step=number >> NUMBERS_OF_A_STEP
        ),
        plan.length,
        replay=lambda step: _known(tokenizer, f"replay {config.seed} {step}"),
        replayed=plan.replayed,
    )
    held_out = Source(
        tokenizer, lambda n: _passages(plan, f"measure {n}", held_out=True), plan.length
    )
    if not _train(config, "worker", learner, source, held_out, tell, stop):
        return False
    export(model, tokenizer, _folder(config, WORKER))
    return True


def _train_planner(config: TrainMinions, tell: loop.Progress, stop: Callable[[], bool]) -> bool:
    plan = PLANS[config.plan]
    model, tokenizer = _read(config, TARGET)
    model.requires_grad_(False)
    torch.manual_seed(config.seed)
    role = LowRank(model, plan.rank, head_fingerprint(decoder_parts(model)))
    role.attach()
    learner = ForestLearner(model, role, plan.planner, plan.planner_length)
    source = Source(
        tokenizer,
        lambda n: planner_group(random.Random(f"planner {config.seed} {n}"), plan.tasks),
        plan.planner_length,
    )
    held_out = Source(
        tokenizer,
        lambda n: planner_group(random.Random(f"plan {n}"), plan.tasks, held_out=True),
        plan.planner_length,
    )
    if not _train(config, "planner", learner, source, held_out, tell, stop):
        return False
    role.save(_folder(config, TARGET), ROLE)
    return True


def _train(
    config: TrainMinions,
    name: str,
    learner: ForestLearner,
    source: Source,
    held_out: Source,
    tell: loop.Progress,
    stop: Callable[[], bool],
) -> bool:
    plan = PLANS[config.plan]
    stage: Stage = getattr(plan, name)
    run = config.out / name
    loop.restore(learner, run, learner.device)
    examples, _ = held_out.batch(0, plan.held_out)

    def advance() -> dict[str, float]:
        return learner.learn(*source.batch(learner.step, stage.batch))

    return loop.train(
        learner,
        run,
        stage.pace,
        advance,
        measure=lambda: learner.right(examples),
        tell=tell,
        stop=stop,
    )


class ForestLearner(RowLearner):
    """A language model that learns the replies in rows of ``rows.Source``.

    Args:
        trained: what is moved: the model, or its low-rank changes.
        guided: layers whose first head learns to look at what is copied next. Without that a model
            this small takes many times as long to find a line by its beginning.
    """

    def __init__(
        self,
        model: Any,
        trained: nn.Module,
        stage: Stage,
        length: int,
        guided: Sequence[int] = (),
    ) -> None:
        self.forward = TextForward(model, length)
        self._guided = tuple(guided)
        super().__init__(trained, stage, stage.pace, model.device)

    def losses(self, ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Return the losses of rows int64 [B, 6, T]: of the next tokens, and of where to look."""
        learnt = F.pad(weights[:, 1:] * _follows(ids), (0, 1))  # a place says the next token
        labels = F.pad(ids[:, IDS, 1:], (0, 1))
        source = ids[:, SOURCE]
        wanted = (
            ((learnt > 0) | (source >= 0))
            .float()
            .topk(min(_LEARNT_OF_ROW, ids.shape[-1]), dim=1)
            .indices
        )
        logits, attention = self._run(ids, self._guided, wanted)
        learnt, labels, source = (each.gather(1, wanted) for each in (learnt, labels, source))
        said = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), reduction="none"
        ).view_as(learnt)
        loss = (said * learnt).sum() / learnt.sum().clamp(min=1.0)
        if not attention:
            return {"loss": loss, "nats": loss}
        looked = looks(attention, source)
        return {"loss": loss + self._stage.guidance * looked, "nats": loss, "looks": looked}

    def _run(
        self, rows: Tensor, guided: Sequence[int] = (), wanted: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        hidden, attention = self.forward.packed(
            rows[:, IDS], rows[:, POSITION], visible(rows), guided, wanted
        )
        return self.forward.logits(hidden), attention

    @torch.no_grad()
    def right(self, rows: Tensor, at_once: int = 4) -> dict[str, float]:
        """Return the shares of replies whose every token is the model's first choice.

        ``absent`` is that of short replies, most of which say that the text has no answer.
        """
        good = {"found": 0, "absent": 0}
        total = dict(good)
        for part in rows.split(at_once):
            best = self._run(part)[0][:, :-1].argmax(-1)
            for row, predicted in zip(part, best, strict=True):
                said = row[CLASS, 1:] >= ANSWERED
                wrong = said & (predicted != row[IDS, 1:])
                reply = (row[TEXT] * row.shape[-1] + row[BRANCH])[1:]  # names a text's branch
                failed = set(reply[wrong].tolist())
                for name, length in Counter(reply[said].tolist()).items():
                    group = "absent" if length <= _SHORT_REPLY else "found"
                    total[group] += 1
                    good[group] += name not in failed
        return {name: good[name] / max(1, total[name]) for name in good}


def _follows(rows: Tensor) -> Tensor:
    """Return 1.0 where a token's predecessor in the row is the one before it in its chat.

    The first token of a second branch stands behind another branch, which says nothing about it;
    it belongs to the task, not to the reply, so nothing is lost.
    """
    same = rows[:, BRANCH, 1:] == rows[:, BRANCH, :-1]
    return (same & (rows[:, TEXT, 1:] == rows[:, TEXT, :-1])).float()


def _passages(
    plan: MinionsPlan, seed: str, *, step: int | None = None, held_out: bool = False
) -> Group:
    """Return tasks on a passage; those of an early ``step`` are short."""
    rng = random.Random(seed)
    low, high = map(float, plan.lines)
    if step is not None and step < plan.growing:
        high = low + (high - low) * step / plan.growing
    lines = round(low * (high / low) ** rng.random())
    return worker_group(rng, lines, plan.tasks, held_out=held_out)


def _known(tokenizer: PreTrainedTokenizerBase, seed: str) -> Iterator[Document]:
    """Yield documents as the text family is trained on them, half of them reading skills."""
    rng = random.Random(seed)
    mix = SKILL_MIX if rng.random() < 0.5 else DEFAULT_MIX
    return islice(documents(tokenizer, rng, mix), _REPLAYED_AT_MOST)


def _read(config: TrainMinions, name: str) -> tuple[Any, PreTrainedTokenizerBase]:
    folder = config.models / name
    if not folder.is_dir():
        raise ConfigError(
            f"{config.models} lacks {name}",
            field="--models",
            remedy="name the folder of a trained text family",
        )
    model = read(folder, torch.device("cpu"))
    return model, AutoTokenizer.from_pretrained(folder, **LOCAL)


def _folder(config: TrainMinions, name: str) -> Path:
    folder = config.out / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
