"""``train exits``: adapters behind some layers of a frozen target, towards its last layer's law.

Paper 003, section 3, on the target's own answers: least squares first, then the divergence of the
laws. Which of the trained exits pay is then chosen by the planner's formula (``choosing``); the
others are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.pair.choosing import Operation, choose
from collab_llm_lab.training.pair.data import Data, Sample
from collab_llm_lab.training.pair.frozen import (
    FrozenConfig,
    FrozenHead,
    FrozenTraining,
    train_on_states,
)
from collab_llm_lab.training.pair.held_out import HeldOut
from collab_llm_nodes.models.adapters import NAME, ExitAdapters, check_exit_layers
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.trained import trained_files

_RIDGE = 1e-3
"""Weight of small corrections in the least squares, relative to the mean square of a state."""


@dataclass(frozen=True)
class ExitsConfig(FrozenConfig):
    """Training of early exits.

    Attributes:
        layers: candidates, counted in layers done; empty: seven, spread over the model.
        operation: by which exits pay.
    """

    layers: tuple[int, ...] = ()
    operation: Operation = field(default_factory=Operation)


class ExitLearner(ModelLearner):
    """Adapters of some layers, each a linear map; the target stays as it is.

    The loss is the sum over exits of the divergence KL(last layer || exit), in nats per token.
    """

    def __init__(self, target: LoadedModel, adapters: ExitAdapters, recipe: Recipe) -> None:
        self.adapters = adapters.to(target.device)
        self._head = FrozenHead(target, normed=False)
        super().__init__(self.adapters, recipe, target.device)

    def losses(self, states: Tensor) -> dict[str, Tensor]:
        """Compare all exits; ``states`` is [exits + 1, n, hidden], the last layer's at the end."""
        loss, same = self._head.compare(self._corrected(states), states[-1])
        each = {f"exit_{n}": share for n, share in zip(self.adapters.layers, same, strict=True)}
        return {"loss": loss, "agreement": same.mean(), **each}

    @torch.no_grad()
    def begin(self, maps: Tensor) -> None:
        """Take ``maps`` [exits, in, out] as the exits' corrections."""
        for layer, found in zip(self.adapters.layers, maps, strict=True):
            correction = self.adapters.corrections[str(layer)]
            assert isinstance(correction, nn.Linear)
            correction.weight.copy_(found.T)

    @torch.no_grad()
    def judge(self, states: Tensor) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Return whether each exit's best token is the target's, and its confidence, [exits, n]."""
        best, _ = self._head.best(states[-1])
        found = [self._head.best(own) for own in self._corrected(states)]
        same = torch.stack([ids == best for ids, _ in found])[..., 0]
        sure = torch.stack([confidence for _, confidence in found])[..., 0]
        return same.cpu().numpy(), sure.cpu().numpy()

    def _corrected(self, states: Tensor) -> Tensor:
        """Return what the exits put in place of the last layer's output, [exits, n, hidden]."""
        exits = zip(self.adapters.layers, states[:-1].float(), strict=True)
        return torch.stack([self.adapters(layer, hidden) for layer, hidden in exits])


class LeastSquares:
    """Linear corrections that bring states nearest to the last layer's, in closed form.

    The head reads normed states, so an error counts relative to the size of the last state. A
    gradient alone would take thousands of steps to come here.
    """

    def __init__(self) -> None:
        self._gram: Tensor | float = 0.0
        self._cross: Tensor | float = 0.0

    def add(self, states: Tensor) -> None:
        """Take in [exits + 1, n, hidden], the last layer's at the end."""
        states = states.float() * states[-1].float().pow(2).mean(-1, keepdim=True).rsqrt()
        own, missing = states[:-1], states[-1] - states[:-1]
        self._gram = self._gram + own.mT @ own
        self._cross = self._cross + own.mT @ missing

    def solve(self) -> Tensor:
        """Return the maps, [exits, in, out]."""
        assert isinstance(self._gram, Tensor)
        diagonal = self._gram.diagonal(dim1=1, dim2=2)
        diagonal += _RIDGE * diagonal.mean(1, keepdim=True)
        return torch.linalg.solve(self._gram, self._cross)


def train_exits(config: ExitsConfig, stop: loop.Stop = lambda: False) -> dict[str, Any] | None:
    """Train exits and write those that pay to ``config.out``; see ``train_on_states``.

    Raises:
        ModelError: a layer is none of the target's intermediate ones.
    """
    return train_on_states(config, partial(_Training, config), stop)


class _Training(FrozenTraining):
    stage = "exits"
    shown = ("loss", "agreement")

    def __init__(self, config: ExitsConfig, target: LoadedModel, data: Data) -> None:
        parts = decoder_parts(target.model)
        self._layers = tuple(sorted(config.layers or candidate_layers(len(parts.layers))))
        self._count = len(parts.layers)
        check_exit_layers(self._layers, self._count)
        super().__init__(config, target, data, (*self._layers, self._count))
        self._target, self._operation = target, config.operation
        self.options = {"layers": self._layers}
        fingerprint = head_fingerprint(parts)
        adapters = ExitAdapters(parts.hidden_size, self._layers, fingerprint=fingerprint)
        self.learner: ExitLearner = ExitLearner(target, adapters, self._recipe())

    def lesson(self, samples: Sequence[Sample]) -> tuple[Tensor]:
        return (torch.cat([self._states.of(sample) for sample in samples], dim=1),)

    def measure(self, report: loop.Progress) -> dict[str, float]:
        return {f"held_out_{n}": share for n, share in self._agreements(self._judge(report))}

    def begin(self, report: loop.Progress, stop: loop.Stop) -> bool:
        """Begin with the least squares of all answers."""
        if self.learner.curve:
            return True
        before = self.measure(report)
        squares = LeastSquares()
        for number, sample in enumerate(self._samples, 1):
            if stop():
                return False
            squares.add(self._states.of(sample))
            report("fitting", number, len(self._samples), {})
        self.learner.begin(squares.solve())
        fitted = self.measure(report)
        self.learner.curve += [{"step": 0, "seconds": 0.0, **each} for each in (before, fitted)]
        self.save()
        return True

    def write(self) -> dict[str, Any]:
        """Judge the trained exits and write those that pay."""
        with loop.show_progress(()) as show:
            found = self._judge(show("held-out answers"))
        operation = self._operation.measured(self._target, self.learner.adapters)
        rounds = found.rounds(round(operation.tau))
        choice = choose(rounds, self._layers, self._count, operation)
        self._write_adapters(choice.layers)
        return {
            "exits": self._figures(found, rounds),
            "answers": {"learnt": len(self._samples), "held_out": len(self._held_out)},
            "tokens_held_out": int(sum(same.shape[1] for same in found.same)),
            **choice.report(operation),
        }

    def _judge(self, report: loop.Progress) -> HeldOut:
        found = HeldOut([], [])
        for number, sample in enumerate(self._held_out, 1):
            same, sure = self.learner.judge(self._states.of(sample))
            found.same.append(same)
            found.sure.append(sure)
            report("judging", number, len(self._held_out), {})
        return found

    def _agreements(self, found: HeldOut) -> list[tuple[int, float]]:
        return list(zip(self._layers, found.agreement().tolist(), strict=True))

    def _figures(self, found: HeldOut, rounds: NDArray[np.bool_]) -> dict[str, dict[str, float]]:
        """Return the figures of each exit, by its layer."""
        before, fitted = self.learner.curve[:2]
        error = found.calibration_error()
        foreseen = rounds.mean(axis=1) if rounds.size else np.zeros(len(self._layers))
        return {
            str(layer): {
                "agreement_before": before[f"held_out_{layer}"],
                "agreement_fitted": fitted[f"held_out_{layer}"],
                "agreement": agreement,
                "calibration_error": float(error[i]),
                "rounds_foreseen": float(foreseen[i]),
            }
            for i, (layer, agreement) in enumerate(self._agreements(found))
        }

    def _write_adapters(self, layers: Sequence[int]) -> None:
        """Write the exits at ``layers``, in place of those of an earlier call."""
        for file in trained_files(self._config.out, NAME):
            file.unlink(missing_ok=True)
        if layers:
            self.learner.adapters.restrict(layers).save(self._config.out)


def candidate_layers(count: int) -> tuple[int, ...]:
    """Return the usual candidates of a model with ``count`` layers, from two ninths of it on."""
    spread = {round(count * part / 9) for part in range(2, 9)}
    return tuple(sorted(spread & set(range(1, count))))
