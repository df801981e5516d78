"""``collab-llm train heads``: Medusa heads of a frozen target, for Jupiter's workers.

Head ``i`` learns the law that the target has ``i + 1`` tokens later (paper 004): the law by which
its guess is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.pair.data import Data, Sample
from collab_llm_lab.training.pair.frozen import (
    FrozenConfig,
    FrozenHead,
    FrozenTraining,
    train_on_states,
)
from collab_llm_lab.training.text.evaluate import head_matches, medusa_rounds
from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import HEADS, MedusaHeads, head_fingerprint
from collab_llm_nodes.models.loading import LoadedModel

_BEST = 3
"""Guesses of a head that count in the report; ``medusa_tree`` drafts as many."""


@dataclass(frozen=True)
class HeadsConfig(FrozenConfig):
    """Training of Medusa heads."""

    heads: int = setting(HEADS, "Tokens guessed beyond the next one.", low=1, high=16)


class HeadsLearner(ModelLearner):
    """Medusa heads of a target that stays as it is. The loss is the sum of all heads', in nats."""

    def __init__(self, target: LoadedModel, count: int, recipe: Recipe) -> None:
        self.parts = decoder_parts(target.model)
        self.heads = MedusaHeads(self.parts.hidden_size, count, head_fingerprint(self.parts))
        self._head = FrozenHead(target, normed=True)
        super().__init__(self.heads.to(target.device), recipe, target.device)

    def losses(self, states: Tensor, left: Tensor) -> dict[str, Tensor]:
        """Compare each head with the target's later laws.

        Args:
            states: input of the LM head at the tokens of some answers, [n, hidden].
            left: int64 [n], tokens of the same answer after each of them.
        """
        guesses = self.heads(states.float()).unbind(-2)
        loss, shares = 0 * guesses[0].sum(), {}  # all answers may be of one token
        for later, guess in enumerate(guesses, 1):
            at = (left >= later).nonzero()[:, 0]
            if len(at):
                distance, same = self._head.compare(guess[at][None], states[at + later])
                loss, shares[f"head_{later}"] = loss + distance, same[0]
        return {"loss": loss, **shares}

    @torch.no_grad()
    def best(self, states: Tensor) -> Tensor:
        """Return the best guesses of each head, int64 [n, heads, 3]."""
        guesses = self.heads(states.float()).unbind(-2)
        return torch.stack([self._head.best(guess, _BEST)[0] for guess in guesses], dim=1)


def train_heads(config: HeadsConfig, stop: loop.Stop = lambda: False) -> dict[str, Any] | None:
    """Train heads and write them to ``config.out``; see ``train_on_states``.

    The report has, on held-out answers, tokens per round and each head's share of right tokens.

    Raises:
        InvalidInput: the answers are too short.
    """
    return train_on_states(config, partial(_Training, config), stop)


class _Training(FrozenTraining):
    stage = "heads"

    def __init__(self, config: HeadsConfig, target: LoadedModel, data: Data) -> None:
        _check_lengths(data)
        super().__init__(config, target, data, (len(decoder_parts(target.model).layers),))
        self.options = {"heads": config.heads}
        self.shown = ("loss", *(f"head_{n}" for n in range(1, config.heads + 1)))
        self.learner: HeadsLearner = HeadsLearner(target, config.heads, self._recipe())

    def lesson(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        states = [self._read(sample) for sample in samples]
        left = [torch.arange(len(each) - 1, -1, -1) for each in states]
        return torch.cat(states), torch.cat(left)

    def measure(self, report: loop.Progress) -> dict[str, float]:
        figures = self._figures(report)
        shares = {f"held_out_{n}": share[0] for n, share in figures["heads"].items()}
        return {**shares, "tokens_per_round": figures["tokens_per_round"]}

    def write(self) -> dict[str, Any]:
        """Write the heads."""
        self.learner.heads.save(self._config.out)
        with loop.show_progress(()) as show:
            figures = self._figures(show("held-out answers"))
        answers = {"learnt": len(self._samples), "held_out": len(self._held_out)}
        return {"answers": answers, **figures}

    @torch.no_grad()
    def _read(self, sample: Sample) -> Tensor:
        """Return the input of the LM head at the tokens of an answer, [n, hidden]."""
        states: Tensor = self.learner.parts.norm(self._states.of(sample)[-1])
        return states

    def _figures(self, report: loop.Progress) -> dict[str, Any]:
        """Return, on held-out answers, tokens per round and each head's share of right tokens.

        The share is that of the best guess, of the two best, of the three best.
        """
        count = self.learner.heads.heads
        right, places = torch.zeros(count, _BEST), torch.zeros(count, 1)
        tokens = rounds = 0
        for number, sample in enumerate(self._held_out, 1):
            answer = torch.tensor(sample.answer)
            guesses = self.learner.best(self._read(sample)).cpu()
            found = [head_matches(ids, answer) for ids in guesses.unbind(-1)]
            right += torch.tensor([[float(sum(each)) for each in rank] for rank in found]).T
            places += torch.tensor([[float(len(each))] for each in found[0]])
            rounds += medusa_rounds(found[0], len(answer))
            tokens += len(answer)
            report("judging", number, len(self._held_out), {})
        shares = (right.cumsum(1) / places.clamp(min=1)).tolist()
        return {
            "heads": {str(n): share for n, share in enumerate(shares, 1)},
            "tokens_per_round": tokens / rounds,
        }


def _check_lengths(data: Data) -> None:
    for samples in data.parts():
        if max(len(sample.answer) for sample in samples) < 2:
            raise InvalidInput(
                f"the answers in {data.folder} have one token each",
                field="--data",
                remedy="collect longer ones: heads guess the tokens after the first",
            )
