"""Training on a frozen target's hidden states, as ``train exits`` and ``train heads`` do."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.pair.config import PairConfig
from collab_llm_lab.training.pair.data import Data, Sample, Target, read_data
from collab_llm_lab.training.pair.reports import write_report
from collab_llm_lab.training.pair.states import HiddenStates
from collab_llm_lab.training.run import make_stages
from collab_llm_nodes.config import setting
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.loading import DTYPES, LoadedModel, load

_LOGITS = 1 << 25
"""Logits that are held at a time: 128 rows of Gemma's 262,144."""
_JUDGED = 256
"""Held-out answers that are judged, at most."""


@dataclass(frozen=True)
class FrozenConfig(PairConfig):
    """Training on a frozen target."""

    cache_gb: float = setting(
        8.0, "Disk for hidden states [GB]; others are computed again.", low=0.0, high=1e5
    )


class FrozenHead:
    """The LM head of a frozen target, applied to a bounded number of rows at a time.

    Args:
        normed: it is given states after the final norm; else before it.
    """

    def __init__(self, target: LoadedModel, *, normed: bool) -> None:
        parts = decoder_parts(target.model)
        self._logits: Callable[[Tensor], Tensor] = parts.head if normed else parts.logits
        self._vocabulary = target.vocab_size
        self._dtype = DTYPES[target.config.dtype]
        self._rows = max(1, _LOGITS // parts.head.out_features)

    def compare(self, guesses: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Compare the laws of guessed states with those of the right ones.

        Args:
            guesses: [guesses, n, hidden].
            right: [n, hidden].

        Returns:
            The sum over guesses of the mean divergence KL(right || guess) in nats, with its
            gradient; and each guess's share of equal best tokens, [guesses].
        """
        parts = [
            self._compare(own, part)
            for own, part in zip(
                guesses.detach().split(self._rows, dim=1), right.split(self._rows), strict=True
            )
        ]
        distance, same = torch.stack([sums for sums, _ in parts]).sum(0) / len(right)
        gradient = torch.cat([slope for _, slope in parts], dim=1) / len(right)
        # The value is the distance; the gradient, which was computed in parts, that of a product.
        product = (guesses * gradient).sum()
        return distance.sum() + product - product.detach(), same

    @torch.no_grad()
    def best(self, states: Tensor, count: int = 1) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens after ``states`` [n, hidden], and their probabilities."""
        found = [self._log_law(part).topk(count) for part in states.split(self._rows)]
        ids = torch.cat([law.indices for law in found])
        return ids, torch.cat([law.values for law in found]).exp()

    def _compare(self, guesses: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Compare a few rows; one guess's logits are held at a time.

        Returns:
            The sums of divergences and of equal best tokens, [2, guesses]; and the gradient of the
            former by ``guesses``.
        """
        with torch.no_grad():
            wanted = self._log_law(right)
            law, best = wanted.exp(), wanted.argmax(-1)
        sums, slopes = [], []
        for own in guesses:
            found = self._log_law(own.requires_grad_())
            distance = (law * (wanted - found)).sum()
            slopes += torch.autograd.grad(distance, own)
            same = (found.argmax(-1) == best).float().sum()
            sums.append(torch.stack([distance.detach(), same]))
        return torch.stack(sums, dim=1), torch.stack(slopes)

    def _log_law(self, states: Tensor) -> Tensor:
        logits = self._logits(states.to(self._dtype))[:, : self._vocabulary]
        return logits.float().log_softmax(-1)


class FrozenTraining(ABC):
    """One call of a training: the learner, the answers that it learns from, and the report.

    Attributes:
        stage: name of the training.
        learner: its module and optimisers.
        shown: figures that the progress display shows.
        options: values that must stay the same in all calls, beside those of all trainings.
    """

    stage: ClassVar[str]
    learner: Any  # a ModelLearner
    shown: tuple[str, ...]
    options: Mapping[str, object]

    def __init__(
        self, config: FrozenConfig, target: LoadedModel, data: Data, layers: Sequence[int]
    ) -> None:
        self._config = config
        self._samples, held_out = data.parts()
        self._held_out = held_out[:_JUDGED]
        folder, budget = config.out / "states", int(config.cache_gb * 1e9)
        self._states = HiddenStates(target, data, layers, folder, budget)
        self._epoch = math.ceil(len(self._samples) / config.batch)  # steps

    @abstractmethod
    def lesson(self, samples: Sequence[Sample]) -> tuple[Tensor, ...]:
        """Return the batch that the learner learns from ``samples``."""

    @abstractmethod
    def measure(self, report: loop.Progress) -> dict[str, float]:
        """Return figures of the held-out answers, for a point of the curve."""

    @abstractmethod
    def write(self) -> dict[str, Any]:
        """Write what was trained; return its report."""

    def begin(self, report: loop.Progress, stop: loop.Stop) -> bool:
        """Prepare the first step; return False if ``stop`` ended it."""
        return True

    def restore(self) -> None:
        """Take the state that an earlier call has saved."""
        loop.restore(self.learner, self._config.out / self.stage, self.learner.device)

    def save(self) -> None:
        """Save the state for a later call."""
        loop.save(self.learner, self._config.out / self.stage)

    def train(self, report: loop.Progress, stop: loop.Stop) -> bool:
        """Train to the end, or until ``stop``; return True at the end."""
        self.restore()
        if not self.learner.step and not self.begin(report, stop):
            return False
        run, measure = self._config.out / self.stage, partial(self.measure, report)
        return loop.train(
            self.learner, run, self._advance, measure=measure, report=report, stop=stop
        )

    def close(self) -> None:
        """Leave the target as it was found."""
        self._states.close()

    def _recipe(self) -> Recipe:
        config, steps = self._config, math.ceil(self._config.epochs * self._epoch)
        return Recipe(
            config.batch,
            config.learning_rate,
            steps=steps,
            warmup=min(20, steps // 10),
            decay=0.0,
            beta2=0.999,
            measure_every=self._epoch,
        )

    def _advance(self) -> dict[str, float]:
        """Learn from the next answers; each epoch has an order of its own."""
        epoch, place = divmod(self.learner.step, self._epoch)
        order = random.Random(f"{self._config.seed} {epoch}").sample(
            self._samples, len(self._samples)
        )
        first = place * self._config.batch
        return self.learner.learn(*self.lesson(order[first : first + self._config.batch]))


def train_on_states(
    config: FrozenConfig,
    make: Callable[[LoadedModel, Data], FrozenTraining],
    stop: loop.Stop = lambda: False,
) -> dict[str, Any] | None:
    """Train on a frozen target, from where an earlier call stopped.

    Args:
        make: returns the training for the target and its answers.

    Returns:
        The report, which ``report.json`` holds, too; None if the call was stopped.

    Raises:
        InvalidInput: the data is another target's, empty or damaged.
        ConfigError: the folder is in use, or belongs to another training.
        ModelError: the target cannot be loaded, or a loss is not finite.
    """
    data = read_data(config.data)
    data.parts()
    target = load(config.target)
    identity = Target.of(target)
    data.check_target(identity)
    with closing(make(target, data)) as training:
        finished = make_stages(
            config.out,
            {training.stage: training.train},
            options={
                "out": f"train {training.stage}",
                "target": identity.fingerprint,
                "dtype": config.target.dtype,
                "quantization": config.target.quantization,
                **config.lasting(data),
                **training.options,
            },
            hours=config.hours,
            shown=training.shown,
            stop=stop,
        )
        if not finished:
            return None
        training.restore()
        report = training.write()
        write_report(config.out, report)
        return report
