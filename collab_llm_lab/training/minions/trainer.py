"""``collab-llm train minions``: the text worker learns its tasks, the text target to plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.loop import Progress, Stop
from collab_llm_lab.training.minions.chats import Group, planner_group, worker_group
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
from collab_llm_lab.training.run import MakeStage, check_stages, make_stages
from collab_llm_lab.training.text.forward import TextForward
from collab_llm_lab.training.text.learners import attention_loss
from collab_llm_lab.training.text.models import export, read
from collab_llm_lab.training.text.plans import GUIDANCE
from collab_llm_lab.training.text.rendering import ANSWERED, Document
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
STAGES = ("worker", "planner")


@dataclass(frozen=True)
class MinionsPlan:
    """Both stages and their rows."""

    worker: Recipe
    planner: Recipe
    length: int = 1024
    """Tokens of a row."""
    lines: tuple[int, int] = (4, 50)
    """Lines of a passage, short ones more often: the mean is the geometric one."""
    growing: int = 200
    """Steps after which passages of all lengths occur; to find a line is learnt in short ones."""
    tasks: int = 12
    """Tasks on each passage."""
    replayed: int = 1
    """Rows of each of the worker's batches that are of the text family's own training."""
    planner_length: int = 512
    """Tokens of a row of the planner."""
    rank: int = 12
    """Rank of the planner's changes."""
    held_out: int = 64
    """Held-out groups of a point of the learning curve."""


CPU = MinionsPlan(
    worker=Recipe(
        4,
        1e-3,
        steps=6_000,
        warmup=20,
        muon=0.012,
        compile=True,
        bfloat16=True,
        measure_every=100,
        guidance=GUIDANCE,
    ),
    planner=Recipe(4, 4e-3, steps=600, warmup=20, bfloat16=True, measure_every=100, decay=0.0),
)
"""Some 110 minutes of one core; a run gives the same models again."""

TINY = MinionsPlan(
    worker=Recipe(2, 1e-3, steps=2, warmup=1, measure_every=2, guidance=GUIDANCE),
    planner=Recipe(2, 1e-3, steps=2, warmup=1, measure_every=2),
    length=512,
    planner_length=256,
    lines=(2, 6),
    tasks=3,
    replayed=1,
    rank=2,
    held_out=2,
)
"""Seconds: nothing is learnt. For tests."""

PLANS = {"cpu": CPU, "tiny": TINY}


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
        check_stages(self.stages, STAGES)


def train_minions(config: TrainMinions, stop: Stop = lambda: False) -> bool:
    """Train into ``config.out/models``, from where an earlier call stopped.

    The worker becomes a model of its own, which keeps its abilities. The planner is a small file
    beside the target, whose own answers stay as they are.

    Args:
        stop: asked before every step; True ends the call, to be resumed.

    Returns:
        True when every wanted stage is done.

    Raises:
        ConfigError: the folder of the family lacks a model; or the run's folder belongs to another
            plan, seed or family, is in use, or cannot be written.
        ModelError: the state that an earlier call saved is damaged.
    """
    makers: dict[str, MakeStage] = {
        "worker": partial(_train_worker, config),
        "planner": partial(_train_planner, config),
    }
    return make_stages(
        config.out,
        {stage: makers[stage] for stage in config.stages},
        options={"plan": config.plan, "seed": config.seed, "models": str(config.models.resolve())},
        hours=config.hours,
        shown=_SHOWN,
        stop=stop,
    )


def _train_worker(config: TrainMinions, report: Progress, stop: Stop) -> bool:
    plan = PLANS[config.plan]
    model, tokenizer = _read(config, WORKER)
    learner = ForestLearner(
        model, model, plan.worker, plan.length, range(1, len(model.model.layers))
    )
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
    if not _train(config.out / "worker", plan, learner, source, held_out, report, stop):
        return False
    export(model, tokenizer, config.out / "models" / WORKER)
    return True


def _train_planner(config: TrainMinions, report: Progress, stop: Stop) -> bool:
    plan = PLANS[config.plan]
    model, tokenizer = _read(config, TARGET)
    model.requires_grad_(False)
    torch.manual_seed(config.seed)
    role = LowRank(model, plan.rank, head_fingerprint(decoder_parts(model)))
    role.attach()
    learner = ForestLearner(model, role, plan.planner, plan.planner_length)
    source, held_out = (
        Source(
            tokenizer,
            lambda n, seed=seed, new=new: planner_group(  # type: ignore[misc]
                random.Random(f"{seed} {n}"), plan.tasks, held_out=new
            ),
            plan.planner_length,
        )
        for seed, new in ((f"planner {config.seed}", False), ("plan", True))
    )
    if not _train(config.out / "planner", plan, learner, source, held_out, report, stop):
        return False
    folder = config.out / "models" / TARGET
    folder.mkdir(parents=True, exist_ok=True)
    role.save(folder, ROLE)
    return True


def _train(
    run: Path,
    plan: MinionsPlan,
    learner: ForestLearner,
    source: Source,
    held_out: Source,
    report: Progress,
    stop: Stop,
) -> bool:
    loop.restore(learner, run, learner.device)
    examples, _ = held_out.batch(0, plan.held_out)
    return loop.train(
        learner,
        run,
        lambda: learner.learn(*source.batch(learner.step, learner.recipe.batch)),
        measure=lambda: learner.right(examples),
        report=report,
        stop=stop,
    )


class ForestLearner(ModelLearner):
    """A language model that learns the replies in rows of ``rows.Source``.

    Args:
        trained: the module that is trained: the model, or its low-rank changes.
        guided: layers whose first head learns to attend to the token copied next. Otherwise a
            model this small takes many times as long to find a line by its beginning.
    """

    def __init__(
        self,
        model: Any,
        trained: nn.Module,
        recipe: Recipe,
        length: int,
        guided: Sequence[int] = (),
    ) -> None:
        self.forward = TextForward(model, length)
        self._guided = tuple(guided)
        super().__init__(trained, recipe, model.device)

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
        looked = attention_loss(attention, source)
        return {"loss": loss + self.recipe.guidance * looked, "nats": loss, "looks": looked}

    def _run(
        self, rows: Tensor, guided: Sequence[int] = (), wanted: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        ids = rows[:, IDS]
        if wanted is None:
            wanted = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden, attention = self.forward.guided(
            ids, guided, wanted, rows[:, POSITION], visible(rows)
        )
        hidden = hidden.gather(1, wanted[..., None].expand(-1, -1, hidden.shape[-1]))
        return self.forward.logits(hidden), attention

    @torch.no_grad()
    def right(self, rows: Tensor, at_once: int = 4) -> dict[str, float]:
        """Return the shares of replies whose every token is the model's first choice.

        ``absent`` is the share of short replies, most of which say that the text has no answer.
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

    The first token of a second branch follows another branch, which does not predict it. It belongs
    to the task, not to the reply, so it need not be learnt.
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
