"""What models in training have in common: their recipe, their optimisers and their steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from collab_llm_lab.training.loop import Pace


@dataclass(frozen=True)
class Recipe:
    """How one model is trained."""

    batch: int
    """Rows, or pictures."""
    learning_rate: float
    steps: int = 0
    minutes: float = 0.0
    """Time limit of ``loop.Pace``; 0 is none."""
    warmup: int = 100
    decay: float = 0.05
    beta2: float = 0.95
    muon: float = 0.0
    """Learning rate of Muon for the matrices of the layers; 0: AdamW moves everything."""
    compile: bool = False
    bfloat16: bool = False
    guidance: float = 0.0
    """Weight of looking at what is copied, beside saying it."""
    measure_every: int = 500
    growing: tuple[tuple[int, int], ...] = ()
    """(length, steps) of the beginning: rows of ``length`` tokens for ``steps`` steps, in turn.

    Copying is learnt in short rows. On rows of 1,024 tokens the target copied 3 of 10 tokens of
    held-out passages after 1,500 steps; after 640 steps of which 600 were on rows of 128, 9 of 10.
    """

    @property
    def pace(self) -> Pace:
        """Length and schedule."""
        return Pace(
            steps=self.steps,
            seconds=60 * self.minutes,
            warmup=self.warmup,
            measure_every=self.measure_every,
        )


class ModelLearner(ABC):
    """A ``loop.Learner`` with optimisers and schedule; a subclass defines the losses.

    Args:
        trained: the module that the optimisers move; its state is what ``state`` saves.
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

    def learn(self, *batch: Tensor) -> dict[str, float]:
        """Make one optimiser step; return the losses."""
        pace = self.recipe.pace
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = pace.rate(peak, self.step, self.seconds)
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
        optimizers = [optimizer.state_dict() for optimizer, _ in self.optimizers]
        return {"model": self.trained.state_dict(), "optimizers": optimizers}

    def load_state(self, state: dict[str, Any]) -> None:
        self.trained.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def _optimizers(trained: nn.Module, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return the optimisers of ``trained`` and their peak learning rates.

    With ``recipe.muon``, Muon moves the matrices between the layers' states; AdamW moves the rest.
    """
    moved = [(name, p) for name, p in trained.named_parameters() if p.requires_grad]
    inner = [p for name, p in moved if recipe.muon and p.ndim == 2 and ".layers." in name]
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
