"""Acceptance of the embedded draft: how much of it needs sight, and drafts that err more often."""

from __future__ import annotations

import numpy as np

from collab_llm_lab.bench.emulation import blur
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.training.nav.models import answers, read
from collab_llm_lab.training.nav.tau import BlindDraft, compare_sight, tau
from collab_llm_nodes.assets import shipped_model
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.sim.jpeg import from_jpeg

_MOST_NOISE, _BISECTIONS = 4.0, 7


class Acceptance:
    """Tokens per verification of the embedded pair, on greedy answers to questions of the robot.

    Args:
        count: number of the answers.
        gamma: tokens drafted per round.
    """

    def __init__(self, count: int, seed: int, gamma: int) -> None:
        prompts = scene_prompts(count, seed)
        target, self._tokenizer = read(shipped_model("nav-target"))
        self._images = np.stack([from_jpeg(prompt.images[0]) for prompt in prompts])
        texts = [prompt.text for prompt in prompts]
        said = answers(target, self._tokenizer, self._images, texts)
        self._asked = list(zip(texts, said, strict=True))
        self._gamma = gamma

    def sight(self) -> dict[str, float]:
        """Return ``tau, tau_grey, tau_blind`` of ``compare_sight``."""
        draft = load(ModelConfig("nav-draft")).model
        blind = BlindDraft.of_expert(self._tokenizer)
        return compare_sight(draft, self._tokenizer, self._images, self._asked, blind, self._gamma)

    def tau(self, noise: float) -> float:
        """Return tau of the draft with noise on its head; see ``blur``."""
        loaded = load(ModelConfig("nav-draft"))
        blur(loaded, noise)
        return tau(loaded.model, self._tokenizer, self._images, self._asked, self._gamma)

    def blur_to(self, wanted: float) -> float:
        """Return the noise that lowers tau to ``wanted``; 0 if it is not higher."""
        low, high = 0.0, _MOST_NOISE
        if self.tau(low) <= wanted:
            return low
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.tau(middle) > wanted else (low, middle)
        return high
