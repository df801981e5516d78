"""``train exits``: adapters behind some layers of a frozen target, towards its last layer's law.

Paper 003, section 3, on the target's own answers: least squares first, then the divergence of the
laws. Which of the trained exits pay is then chosen by the planner's formula (``choosing``); the
others are left out.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.pair.choosing import Operation, choose
from collab_llm_lab.training.pair.data import Data, Target, read_data
from collab_llm_lab.training.pair.held_out import HeldOut
from collab_llm_lab.training.pair.states import HiddenStates
from collab_llm_lab.training.run import make_stages
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.models.adapters import NAME, ExitAdapters, check_exit_layers
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.loading import DTYPES, LoadedModel, ModelConfig, load

STAGE, REPORT = "exits", "report.json"
_LOGITS = 1 << 25
"""Logits that are held at a time: 128 rows of Gemma's 262,144."""
_JUDGED = 256
"""Held-out answers that are judged, at most."""
_RIDGE = 1e-3
"""Weight of small corrections in the least squares, relative to the mean square of a state."""


@dataclass(frozen=True)
class ExitsConfig:
    """Training of early exits.

    Attributes:
        out: of the adapters, the state and the cache.
        layers: candidates, counted in layers done; empty: seven, spread over the model.
        operation: by which exits pay.
    """

    target: ModelConfig
    data: Path
    out: Path
    layers: tuple[int, ...] = ()
    epochs: float = setting(3.0, "Times that each answer is learnt from.", low=0.01, high=1e4)
    batch: int = setting(8, "Answers of a step.", low=1, high=4096)
    learning_rate: float = setting(1e-3, "At its peak.", low=1e-7, high=1.0)
    cache_gb: float = setting(
        8.0, "Hidden states kept on disk [GB]; the others are computed again.", low=0.0, high=1e5
    )
    hours: float = setting(0.0, "Stop after this long; 0: at the end.", low=0.0)
    seed: int = 0
    operation: Operation = field(default_factory=Operation)

    def __post_init__(self) -> None:
        check_ranges(self)


class ExitLearner(ModelLearner):
    """Adapters of some layers, each a linear map; the target stays as it is.

    The loss is the sum over exits of the divergence KL(last layer || exit), in nats per token.
    """

    def __init__(self, target: LoadedModel, adapters: ExitAdapters, recipe: Recipe) -> None:
        self.adapters = adapters.to(target.device)
        self._parts = decoder_parts(target.model)
        self._vocabulary = target.vocab_size
        self._dtype = DTYPES[target.config.dtype]
        self._rows = max(1, _LOGITS // self._parts.head.out_features)
        super().__init__(self.adapters, recipe, target.device)

    def losses(self, states: Tensor) -> dict[str, Tensor]:
        """Compare all exits; ``states`` is [exits + 1, n, hidden], the last layer's at the end."""
        corrected = self._corrected(states)
        parts = [
            self._compare(own, last)
            for own, last in zip(
                corrected.detach().split(self._rows, dim=1),
                states[-1].split(self._rows),
                strict=True,
            )
        ]
        distance, agreement = torch.stack([sums for sums, _ in parts]).sum(0) / states.shape[1]
        gradient = torch.cat([slope for _, slope in parts], dim=1) / states.shape[1]
        # The value is the distance; the gradient, which was computed in parts, that of a product.
        product = (corrected * gradient).sum()
        loss = distance.sum() + product - product.detach()
        each = {
            f"exit_{n}": share for n, share in zip(self.adapters.layers, agreement, strict=True)
        }
        return {"loss": loss, "agreement": agreement.mean(), **each}

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
        same, sure = [], []
        for part in states.split(self._rows, dim=1):
            best = self._log_law(part[-1]).argmax(-1)
            laws = [self._log_law(own).exp().max(-1) for own in self._corrected(part)]
            same.append(torch.stack([law.indices == best for law in laws]))
            sure.append(torch.stack([law.values for law in laws]))
        return torch.cat(same, 1).cpu().numpy(), torch.cat(sure, 1).cpu().numpy()

    def _corrected(self, states: Tensor) -> Tensor:
        """Return what the exits put in place of the last layer's output, [exits, n, hidden]."""
        exits = zip(self.adapters.layers, states[:-1].float(), strict=True)
        return torch.stack([self.adapters(layer, hidden) for layer, hidden in exits])

    def _compare(self, corrected: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Compare some rows of all exits with the last layer; one exit's logits are held at a time.

        Returns:
            The sums of divergences and of agreeing best tokens, [2, exits]; and the gradient of the
            former by ``corrected``.
        """
        with torch.no_grad():
            wanted = self._log_law(last)
            law, best = wanted.exp(), wanted.argmax(-1)
        sums, slopes = [], []
        for own in corrected:
            found = self._log_law(own.requires_grad_())
            distance = (law * (wanted - found)).sum()
            slopes += torch.autograd.grad(distance, own)
            agreed = (found.argmax(-1) == best).float().sum()
            sums.append(torch.stack([distance.detach(), agreed]))
        return torch.stack(sums, dim=1), torch.stack(slopes)

    def _log_law(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities [n, V] that the model's head gives to [n, hidden]."""
        logits = self._parts.logits(hidden.to(self._dtype))[:, : self._vocabulary]
        return logits.float().log_softmax(-1)


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
    """Train exits and write those that pay to ``config.out``, from where an earlier call stopped.

    Returns:
        The report, which ``report.json`` holds, too; None if the call was stopped.

    Raises:
        InvalidInput: the data is another target's, empty or damaged.
        ConfigError: the folder is in use, or belongs to another training.
        ModelError: the target cannot be loaded, a layer is none of its intermediate ones, or a loss
            is not finite.
    """
    data = read_data(config.data)
    data.parts()
    target = load(config.target)
    identity = Target.of(target)
    data.check_target(identity)
    with closing(_Training(config, target, data)) as training:
        finished = make_stages(
            config.out,
            {STAGE: training.train},
            options={
                "target": identity.fingerprint,
                "dtype": config.target.dtype,
                "quantization": config.target.quantization,
                "layers": training.layers,
                "seed": config.seed,
            },
            hours=config.hours,
            shown=("loss", "agreement"),
            stop=stop,
        )
        return training.write() if finished else None


class _Training:
    """One call: the learner, the states that it learns from, and the report."""

    def __init__(self, config: ExitsConfig, target: LoadedModel, data: Data) -> None:
        self._config, self._target = config, target
        self._samples, held_out = data.parts()
        self._held_out = held_out[:_JUDGED]
        parts = decoder_parts(target.model)
        count = len(parts.layers)
        self.layers = tuple(sorted(config.layers or candidate_layers(count)))
        check_exit_layers(self.layers, count)
        adapters = ExitAdapters(parts.hidden_size, self.layers, fingerprint=head_fingerprint(parts))
        self._states = HiddenStates(
            target, data, (*self.layers, count), config.out / "states", int(config.cache_gb * 1e9)
        )
        self._epoch = math.ceil(len(self._samples) / config.batch)  # steps
        steps = math.ceil(config.epochs * self._epoch)
        recipe = Recipe(
            config.batch,
            config.learning_rate,
            steps=steps,
            warmup=min(20, steps // 10),
            decay=0.0,
            beta2=0.999,
            measure_every=self._epoch,
        )
        self._learner = ExitLearner(target, adapters, recipe)

    def close(self) -> None:
        """Leave the target as it was found."""
        self._states.close()

    def train(self, report: loop.Progress, stop: loop.Stop) -> bool:
        """Train to the end, or until ``stop``; return True at the end."""
        run, learner = self._config.out / STAGE, self._learner
        loop.restore(learner, run, learner.device)

        def measure() -> dict[str, float]:
            return {f"held_out_{n}": share for n, share in self._agreements(self._judge(report))}

        if not learner.curve:
            before = measure()
            if not self._begin(report, stop):
                return False
            learner.curve += [{"step": 0, "seconds": 0.0, **each} for each in (before, measure())]
            loop.save(learner, run)
        return loop.train(learner, run, self._advance, measure=measure, report=report, stop=stop)

    def write(self) -> dict[str, Any]:
        """Judge the trained exits, write those that pay, and return the report."""
        config, learner = self._config, self._learner
        loop.restore(learner, config.out / STAGE, learner.device)
        with loop.show_progress(()) as show:
            found = self._judge(show("held-out answers"))
        operation = config.operation.measured(self._target, learner.adapters)
        count = len(decoder_parts(self._target.model).layers)
        rounds = found.rounds(round(operation.tau))
        choice = choose(rounds, self.layers, count, operation)
        self._write_adapters(choice.layers)
        report = {
            "exits": self._figures(found, rounds),
            "answers": {"learnt": len(self._samples), "held_out": len(self._held_out)},
            "tokens_held_out": int(sum(same.shape[1] for same in found.same)),
            **choice.report(operation),
        }
        text = json.dumps(report, indent=1) + "\n"
        (config.out / REPORT).write_text(text, encoding="utf-8")
        return report

    def _begin(self, report: loop.Progress, stop: loop.Stop) -> bool:
        """Begin with the least squares of all answers; return False if ``stop`` ended it."""
        squares = LeastSquares()
        for number, sample in enumerate(self._samples, 1):
            if stop():
                return False
            squares.add(self._states.of(sample))
            report("fitting", number, len(self._samples), {})
        self._learner.begin(squares.solve())
        return True

    def _advance(self) -> dict[str, float]:
        """Learn from the next answers; each epoch has an order of its own."""
        epoch, place = divmod(self._learner.step, self._epoch)
        order = list(self._samples)
        random.Random(f"{self._config.seed} {epoch}").shuffle(order)
        first = place * self._config.batch
        chosen = order[first : first + self._config.batch]
        return self._learner.learn(torch.cat([self._states.of(each) for each in chosen], dim=1))

    def _judge(self, report: loop.Progress) -> HeldOut:
        found = HeldOut([], [])
        for number, sample in enumerate(self._held_out, 1):
            same, sure = self._learner.judge(self._states.of(sample))
            found.same.append(same)
            found.sure.append(sure)
            report("judging", number, len(self._held_out), {})
        return found

    def _agreements(self, found: HeldOut) -> list[tuple[int, float]]:
        return list(zip(self.layers, found.agreement().tolist(), strict=True))

    def _figures(self, found: HeldOut, rounds: NDArray[np.bool_]) -> dict[str, dict[str, float]]:
        """Return the figures of each exit, by its layer."""
        before, fitted = self._learner.curve[:2]
        error = found.calibration_error()
        foreseen = rounds.mean(axis=1) if rounds.size else np.zeros(len(self.layers))
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
        for file in self._config.out.glob(f"{NAME}.*"):
            file.unlink()
        if layers:
            self._learner.adapters.restrict(layers).save(self._config.out)


def candidate_layers(count: int) -> tuple[int, ...]:
    """Return the usual candidates of a model with ``count`` layers, from two ninths of it on."""
    spread = {round(count * part / 9) for part in range(2, 9)}
    return tuple(sorted(spread & set(range(1, count))))
