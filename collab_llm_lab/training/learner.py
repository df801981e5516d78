"""A model in training: its recipe, its optimisers and its steps."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from collab_llm_nodes.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """Recipe for training one model: a number of steps, a time, or the shorter of both.

    With a time the schedule follows the clock, so that it ends exactly then on any machine; such a
    run cannot be repeated to the bit. Without one it depends on steps alone.
    """

    batch: int
    """Rows, or pictures."""
    learning_rate: float
    steps: int = 0
    """0: no limit but the time."""
    minutes: float = 0.0
    """0: no limit but the steps."""
    warmup: int = 100
    decay: float = 0.05
    beta2: float = 0.95
    muon: float = 0.0
    """Learning rate of Muon for the matrices of the layers; 0: AdamW moves everything."""
    compile: bool = False
    bfloat16: bool = False
    guidance: float = 0.0
    """Weight of the attention loss: heads learn to attend to the token that is copied next."""
    measure_every: int = 500
    """Steps between two points of the curve; the last step has one as well."""
    growing: tuple[tuple[int, int], ...] = ()
    """(length, steps) of the beginning: rows of ``length`` tokens for ``steps`` steps, in turn.

    Copying is learnt in short rows. On rows of 1,024 tokens the target copied 3 of 10 tokens of
    held-out passages after 1,500 steps; after 640 steps of which 600 were on rows of 128, 9 of 10.
    """

    def __post_init__(self) -> None:
        if self.steps < 0 or self.minutes < 0 or not (self.steps or self.minutes):
            raise ConfigError(
                f"{self.steps} steps and {self.minutes} min",
                field="steps, minutes",
                remedy="give a positive number of steps, a time, or both",
            )

    def done(self, step: int, seconds: float) -> float:
        """Return the share of the training that is over, 0 to 1."""
        of_steps = step / self.steps if self.steps else 0.0
        of_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(of_steps, of_time))

    def rate(self, peak: float, step: int, seconds: float) -> float:
        """Return the learning rate at ``step``: a linear warm-up, then a cosine down to 2 %."""
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        share = self.done(step, seconds)
        if self.steps and not self.minutes:
            share = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        cosine = 0.5 * (1 + float(torch.cos(torch.tensor(share * torch.pi))))
        return peak * (0.02 + 0.98 * cosine)


class ModelLearner(ABC):
    """A model with its optimisers; a subclass defines the losses.

    Args:
        trained: the module that the optimisers move, and whose state ``state`` saves.

    Attributes:
        step: optimiser steps done.
        seconds: time spent on them in all calls together, but for the first step of a call.
        curve: measured points.
    """

    def __init__(self, trained: nn.Module, recipe: Recipe, device: torch.device) -> None:
        self.step = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        self.trained = trained
        self.recipe = recipe
        self.device = device
        self.optimizers = _optimizers(trained, recipe)
        self._parameters = [p for p in trained.parameters() if p.requires_grad]
        self._losses: Callable[..., dict[str, Tensor]] = self.losses
        if recipe.compile:
            torch.compiler.reset()  # an earlier stage's code would count against the limit
            self._losses = torch.compile(self.losses, dynamic=False)

    @abstractmethod
    def losses(self, *batch: Any) -> dict[str, Tensor]:
        """Return the losses of a batch on the device; the one called ``loss`` is minimised."""

    def learn(self, *batch: Any) -> dict[str, float]:
        """Make one optimiser step; return the losses.

        Args:
            batch: tensors, or what else can be moved by ``to``.
        """
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.rate(peak, self.step, self.seconds)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bfloat16):
            losses = self._losses(*(part.to(self.device) for part in batch))
        losses["loss"].backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {key: float(value.detach()) for key, value in losses.items()}

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs beside the attributes above."""
        optimizers = [optimizer.state_dict() for optimizer, _ in self.optimizers]
        return {"model": self.trained.state_dict(), "optimizers": optimizers}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``."""
        self.trained.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


_INNER = re.compile(r"\.(layers|blocks)\.")
"""In the names of parameters within a layer of a decoder, or a block of a vision tower."""


def _optimizers(trained: nn.Module, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return the optimisers of ``trained`` and their peak learning rates.

    With ``recipe.muon``, Muon moves the matrices between the layers' states; AdamW moves the rest.
    """
    moved = [(name, p) for name, p in trained.named_parameters() if p.requires_grad]
    inner = [p for name, p in moved if recipe.muon and p.ndim == 2 and _INNER.search(name)]
    taken = {id(p) for p in inner}
    others = [p for _, p in moved if id(p) not in taken]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": recipe.decay},
            {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=(0.9, recipe.beta2),
        fused=True,
    )
    found: list[tuple[torch.optim.Optimizer, float]] = [(adam, recipe.learning_rate)]
    if inner:
        muon = torch.optim.Muon(inner, lr=recipe.muon, momentum=0.95, weight_decay=recipe.decay)
        found.append((muon, recipe.muon))
    return found


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
