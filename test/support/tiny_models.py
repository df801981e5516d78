"""Tiny random models and synthetic scenes for tests: deterministic, made once per test run."""

from __future__ import annotations

import io
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from collab_llm_lab.random_models import add_head_noise, write_random_model
from collab_llm_nodes.models.architectures import ARCHITECTURES
from collab_llm_nodes.models.loading import LoadedModel, TargetConfig, load
from collab_llm_nodes.models.prompt import Prompt

VISION = tuple(name for name, a in ARCHITECTURES.items() if a.vision)
WINDOWED = ("gemma3_text", "mistral")
GROWING = [(name, False) for name in ARCHITECTURES] + [
    (name, True) for name in ARCHITECTURES if name not in WINDOWED
]
"""(architecture, eager), where sessions take trees."""


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="collab_llm_tiny_")  # removed when Python ends


@cache
def tiny_folder(architecture: str, seed: int = 0, padding: int = 0, layers: int = 4) -> Path:
    """Folder of a random checkpoint (``collab_llm_lab.random_models``)."""
    folder = Path(_root().name) / f"{architecture}-{seed}-{padding}-{layers}"
    return write_random_model(folder, architecture, seed=seed, padding=padding, layers=layers)


@cache
def tiny_model(
    architecture: str,
    seed: int = 0,
    *,
    padding: int = 0,
    layers: int = 4,
    exit_layers: tuple[int, ...] = (),
    head_noise: float = 0.0,
) -> LoadedModel:
    """A loaded random model, shared by all tests that ask for the same: do not change it.

    ``head_noise`` makes it a draft that partly agrees with the same model without noise.
    """
    folder = tiny_folder(architecture, seed, padding, layers)
    loaded = load(TargetConfig(path=str(folder), exit_layers=exit_layers))
    if head_noise:
        add_head_noise(loaded.model, head_noise, seed=1)
    return loaded


@cache
def scene(seed: int, width: int = 120, height: int = 90) -> bytes:
    """JPEG of a few coloured shapes."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), (90, 90, 110))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = int(rng.integers(width)), int(rng.integers(height))
        box = (x, y, x + int(rng.integers(10, 60)), y + int(rng.integers(10, 60)))
        colour = tuple(int(c) for c in rng.integers(0, 256, 3))
        (draw.ellipse if rng.random() < 0.5 else draw.rectangle)(box, fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def tiny_prompt(architecture: str, seed: int = 0, images: int = 1) -> Prompt:
    """A short instruction, with scenes where the architecture sees."""
    shown = tuple(scene(seed + i) for i in range(images)) if architecture in VISION else ()
    return Prompt(f"go to the red ball {seed}", shown)
