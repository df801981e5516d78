"""Early-exit adapters of the frozen target (paper 003, section 3): towards the last layer's law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.nav import data
from collab_llm_lab.training.nav.batches import Batch, Batches
from collab_llm_lab.training.nav.forward import GRID, FastForward, Grid
from collab_llm_lab.training.nav.models import prefix_ids, read
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import decoder_parts


@dataclass(frozen=True)
class AdapterConfig:
    """Training of the adapters beside the checkpoint in ``model``."""

    model: str
    run: str
    """Folder of the state and the curve."""
    shards: tuple[str, ...] = ()
    """Picture shards; own trajectories of the target among them where there are any."""
    initial: str = ""
    """Folder of adapters to begin with, whose exits are kept; none: identities."""
    reworded: float = 0.0
    """Share of the questions in other trained words, as in ``TrainConfig``."""
    recipe: Recipe = Recipe(24, 2e-3, steps=1_500, warmup=0, decay=0.0, beta2=0.999)
    seed: int = 1


class ExitLearner(ModelLearner):
    """Adapters of all layers but the last; only these corrections are trained.

    The loss of an exit is the cross-entropy to the final exit's distribution; its agreement is the
    share of answer tokens with the final argmax.
    """

    def __init__(self, config: AdapterConfig, grid: Grid = GRID) -> None:
        model, self.tokenizer = read(config.model)
        prefix = prefix_ids(self.tokenizer, grid)
        self.fast = FastForward(model.requires_grad_(False), prefix, grid)
        text: Any = model.config.text_config
        torch.manual_seed(config.seed)
        self.adapters = (
            ExitAdapters.load(config.initial, decoder_parts(model))
            if config.initial
            else ExitAdapters(text.hidden_size, range(1, text.num_hidden_layers))
        )
        super().__init__(self.adapters, config.recipe, torch.device("cpu"))

    def losses(self, *batch: Tensor) -> dict[str, Tensor]:
        question = Batch(*batch)
        with torch.no_grad():
            hidden = exit_hidden(self.fast, question)
            final = self.fast.logits(hidden[-1])
        real = question.labels >= 0
        law, best = final.softmax(-1)[real], final.argmax(-1)[real]
        result, loss = {}, torch.zeros(())
        for layer in self.adapters.layers:
            logits = self.fast.logits(self.adapters(layer, hidden[layer - 1]))[real]
            loss = loss + F.cross_entropy(logits, law)
            result[f"exit_{layer}"] = (logits.argmax(-1) == best).float().mean()
        agreement = torch.stack(list(result.values())).mean()
        return {"loss": loss, "agreement": agreement, **result}


def exit_hidden(fast: FastForward, batch: Batch) -> list[Tensor]:
    """Return the hidden states [N, A, D] at the answer positions, of each layer."""
    questions = batch.texts.shape[0] // batch.pictures.shape[0]
    hidden = [h.flatten(0, 1) for h in fast(batch.pictures, batch.texts, questions).layers]
    at = batch.at[..., None].expand(-1, -1, hidden[0].shape[-1])
    return [torch.gather(h, 1, at) for h in hidden]


def train_adapters(
    config: AdapterConfig,
    report: loop.Progress = loop.ignore_progress,
    stop: loop.Stop = lambda: False,
) -> bool:
    """Train and save the adapters beside the model, from where an earlier call stopped.

    Returns:
        True when finished.
    """
    learner = ExitLearner(config)
    pictures = data.Pictures([Path(shard) for shard in config.shards])
    batches = Batches(learner.tokenizer, config.seed, config.reworded)

    def make_batch(step: int) -> Batch:
        return batches.make([(pictures, config.recipe.batch)], step, 2)

    return train_exits(learner, config, make_batch, report, stop)


def train_exits(
    learner: ExitLearner,
    config: AdapterConfig,
    make_batch: Callable[[int], Batch],
    report: loop.Progress = loop.ignore_progress,
    stop: loop.Stop = lambda: False,
) -> bool:
    """Train and save the adapters with the batch of each step; return True when finished."""
    run = Path(config.run)
    loop.restore(learner, run, learner.device)

    def advance() -> dict[str, float]:
        return learner.learn(*make_batch(learner.step))

    finished = loop.train(learner, run, advance, report=report, stop=stop)
    if finished:
        learner.adapters.save(config.model)
    return finished
