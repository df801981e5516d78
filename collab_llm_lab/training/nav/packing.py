"""Weights of a training in a small folder, from which another machine goes on.

The folder has the layout of a run: the tokenizer, and of each stage its curve and its weights (of
the model and of the head that trains it) in float16. Moments of the optimiser are not kept: they
are five times as large, and known again after some fifty steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import ModelLearner
from collab_llm_lab.training.run import DONE, is_done
from collab_llm_nodes.errors import ConfigError, ModelError

WEIGHTS = "weights.safetensors"


def pack(out: Path, folder: Path, stages: Iterable[str]) -> None:
    """Write the weights of all stages of the run ``out`` that have begun, or came packed.

    Raises:
        ConfigError: no stage has saved anything yet.
    """
    begun = [name for name in stages if has_weights(out / name)]
    if not begun:
        raise ConfigError(f"{out} holds no training", field="--out", remedy="train a stage first")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(out / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    for name in begun:
        if not (out / name / loop.STATE).exists():
            shutil.copytree(out / name, folder / name, dirs_exist_ok=True)
            continue
        state = torch.load(out / name / loop.STATE, weights_only=True, map_location="cpu")
        (folder / name).mkdir(exist_ok=True)
        # Tied weights are one tensor under two names, which safetensors refuses.
        weights = {key: value.half().clone() for key, value in state["model"].items()}
        done = {key: str(state[key]) for key in ("step", "seconds")}
        save_file(weights, folder / name / WEIGHTS, metadata=done)
        (folder / name / loop.CURVE).write_text(json.dumps(state["curve"], indent=1))
        if is_done(out, name):
            (folder / name / DONE).touch()


def has_weights(run: Path) -> bool:
    """Return True if a stage has saved anything, or has packed weights."""
    return (run / loop.STATE).exists() or (run / WEIGHTS).exists()


def weights_of(run: Path) -> dict[str, Tensor]:
    """Return the present weights of a stage: of its model and of the head that trains it.

    Raises:
        ConfigError: the stage has not saved anything yet.
        ModelError: its packed weights are damaged.
    """
    if (run / loop.STATE).exists():
        state = torch.load(run / loop.STATE, weights_only=True, map_location="cpu")
        weights: dict[str, Tensor] = state["model"]
        return weights
    return _packed(run)[0]


def restore(learner: ModelLearner, run: Path) -> None:
    """Go on from the state of a run or, where it has none, from packed weights, if there are any.

    Raises:
        ModelError: the file cannot be read, or holds another learner's weights.
    """
    if (run / loop.STATE).exists() or not (run / WEIGHTS).exists():
        loop.restore(learner, run, learner.device)
        return
    weights, step, seconds = _packed(run)
    try:
        learner.trained.load_state_dict(weights)
        learner.curve = json.loads((run / loop.CURVE).read_text(encoding="utf-8"))
    except (RuntimeError, OSError, ValueError) as error:
        raise _damaged(run) from error
    learner.step, learner.seconds = step, seconds


def _packed(run: Path) -> tuple[dict[str, Tensor], int, float]:
    """Return the packed weights of a stage in float32, and its steps and seconds up to them."""
    file = run / WEIGHTS
    if not file.exists():
        raise ConfigError(
            f"{run} holds no weights", field="--stage", remedy=f"train the stage {run.name} first"
        )
    try:
        with safe_open(file, framework="pt") as stored:
            weights = {key: stored.get_tensor(key).float() for key in stored.keys()}  # noqa: SIM118
            done = stored.metadata()
            return weights, int(done["step"]), float(done["seconds"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(run) from error


def _damaged(run: Path) -> ModelError:
    return ModelError(
        f"{run} holds no packed weights of this training",
        field="--out",
        remedy="copy the packed folder again",
    )
