"""Learners on rows of text: language models, and the guessers of a frozen target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.text.forward import TextForward
from collab_llm_lab.training.text.shards import IDS, SOURCES
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.heads import MedusaHeads

_COPIED_OF_ROW = 192
"""Most copied tokens of a row that guide attention."""


def attention_loss(attention: Sequence[Tensor], sources: Tensor) -> Tensor:
    """Return the loss of heads that should attend to the token copied next, in nats.

    Args:
        attention: of each layer, the logarithm of its head's attention, [B, N, T].
        sources: int64 [B, N], the place to attend to; below 0: unknown.
    """
    known = (sources >= 0).float()
    total = torch.zeros((), device=sources.device)
    for law in attention:
        missed = -law.gather(2, sources.clamp(min=0)[..., None])[..., 0]
        total = total + (missed * known).sum() / known.sum().clamp(min=1.0)
    return total / max(1, len(attention))


class LanguageLearner(ModelLearner):
    """A language model; with a teacher it learns that model's law of the answered tokens.

    With ``recipe.guidance``, the first head of each layer but the lowest learns to attend to the
    token copied next. Otherwise a model this small takes many times as long to find things in a
    text.
    """

    def __init__(self, model: Any, recipe: Recipe, length: int, teacher: Any | None = None) -> None:
        self.forward = TextForward(model, length)
        self.teacher: TextForward | None = None
        if teacher is not None:
            teacher.requires_grad_(False)
            self.teacher = TextForward(teacher, length)
        self._guided = range(1, len(model.model.layers)) if recipe.guidance else ()
        super().__init__(model, recipe, model.device)

    def losses(self, rows: Tensor, weights: Tensor) -> dict[str, Tensor]:
        ids, sources = rows[:, IDS, :-1], rows[:, SOURCES, :-1]
        wanted = (sources >= 0).float().topk(min(_COPIED_OF_ROW, ids.shape[1]), dim=1).indices
        hidden, attention = self.forward.guided(ids, self._guided, wanted)
        logits = self.forward.logits(hidden).float().flatten(0, 1)
        labels, weights = rows[:, IDS, 1:].flatten(), weights[:, 1:].flatten()
        said = F.cross_entropy(logits, labels, reduction="none")
        result = {"nats": (said * weights).sum() / weights.sum().clamp(min=1.0)}
        if self.teacher is None:
            result["looks"] = attention_loss(attention, sources.gather(1, wanted))
            return {"loss": result["nats"] + self.recipe.guidance * result["looks"], **result}
        # Cross-entropy to the teacher's law: the divergence and a constant.
        with torch.no_grad():
            law = self.teacher.logits(self.teacher(ids)[-1]).float().softmax(-1)
        distance = -(law.flatten(0, 1) * logits.log_softmax(-1)).sum(-1)
        answered = (weights >= 1).float()
        loss = (distance * answered).sum() / answered.sum().clamp(min=1.0)
        return {"loss": loss, **result}


class GuessLearner(ModelLearner):
    """Early exits and Medusa heads of one frozen target, trained side by side.

    An exit learns the last layer's law of the next token (paper 003). Head ``i`` learns the law
    that the target has ``i + 1`` tokens later, given the text in between: the law by which the
    head's guess is judged.
    """

    def __init__(self, target: Any, layers: Sequence[int], recipe: Recipe, length: int) -> None:
        target.requires_grad_(False)
        self.forward = TextForward(target, length)
        hidden = int(target.config.hidden_size)
        self.exits = ExitAdapters(hidden, layers)
        self.heads = MedusaHeads(hidden)
        both = nn.ModuleDict({"exits": self.exits, "heads": self.heads}).to(target.device)
        super().__init__(both, recipe, target.device)

    def losses(self, rows: Tensor, weights: Tensor) -> dict[str, Tensor]:
        ids = rows[:, IDS]
        with torch.no_grad():
            layers = self.forward(ids)
            final = self.forward.logits(layers[-1]).float()
            law = final.softmax(-1)
            best = final.argmax(-1)
        # Position t says token t + 1: its weight is that token's.
        weights = F.pad(weights[:, 1:], (0, 1))
        result: dict[str, Tensor] = {}
        loss = torch.zeros((), device=ids.device)
        for layer in self.exits.layers:
            logits = self.forward.logits(self.exits(layer, layers[layer - 1])).float()
            loss = loss + _distance(law, logits, weights)
            result[f"exit_{layer}"] = _agreement(best, logits, weights)
        read = self.forward.normed(layers[-1])
        guesses = self.heads(read)
        for head in range(self.heads.heads):
            later = head + 1
            logits = F.linear(guesses[:, :-later, head], self.forward.model.lm_head.weight).float()
            loss = loss + _distance(law[:, later:], logits, weights[:, later:])
            result[f"head_{later}"] = _agreement(best[:, later:], logits, weights[:, later:])
        return {"loss": loss, **result}


def _distance(law: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted cross-entropy of ``logits`` to ``law``, both [B, T, V]."""
    each = -(law * logits.log_softmax(-1)).sum(-1)
    return (each * weights).sum() / weights.sum().clamp(min=1.0)


def _agreement(best: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    """Return the share of answered positions at which the best tokens are equal."""
    answered = (weights >= 1).float()
    same = (logits.argmax(-1) == best).float()
    return (same * answered).sum() / answered.sum().clamp(min=1.0)
