"""Files of a module trained beside a frozen model: weights, and a description in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from collab_llm_nodes.errors import ModelError, translate_errors

M = TypeVar("M", bound=nn.Module)

SUBFOLDER = "collab_llm"
"""Folder within a checkpoint's, since stock servers load all safetensors beside ``config.json``."""


def write_trained(
    folder: str | Path,
    name: str,
    module: nn.Module,
    facts: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``<name>.safetensors`` and ``<name>.json`` to the subfolder of ``folder``.

    Args:
        dtype: of the weights in the file; None: their own.
    """
    tensors = {
        key: value.detach().to("cpu", dtype).contiguous()
        for key, value in module.state_dict().items()
    }
    weights, description = trained_files(folder, name)
    weights.parent.mkdir(exist_ok=True)
    save_file(tensors, weights)
    description.write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")


def trained_files(folder: str | Path, name: str) -> tuple[Path, Path]:
    """Return the places of the weights and the description of ``name``, there or not."""
    place = Path(folder) / SUBFOLDER
    return place / f"{name}.safetensors", place / f"{name}.json"


def holds_trained(folder: str | Path, name: str, field: str) -> bool:
    """Return True if ``folder`` holds the weights of ``name``.

    Args:
        field: of the error.

    Raises:
        ModelError: they lie beside ``config.json``, where earlier versions wrote them.
    """
    weights, _ = trained_files(folder, name)
    if not weights.is_file() and (Path(folder) / weights.name).is_file():
        raise ModelError(
            f"{Path(folder) / weights.name} is not where it is read",
            field=field,
            remedy=f"move {name}.safetensors and {name}.json there to {weights.parent}",
        )
    return weights.is_file()


def read_trained(
    folder: str | Path,
    name: str,
    make: Callable[[dict[str, Any]], M],
    width: int,
    *,
    kind: str,
    field: str,
    fingerprint: str = "",
) -> M:
    """Read the files of :func:`write_trained`.

    Args:
        make: builds the module, which has a ``hidden_size``, from its description.
        width: of the model it is wanted for.
        kind: name of the trained thing for people; its last word is the short one.
        field: of errors.
        fingerprint: that the module must have, as its attribute; empty: it has none.

    Raises:
        ModelError: files absent, elsewhere or unreadable, or made for another model.
    """
    short = kind.split()[-1]
    holds_trained(folder, name, field)
    weights, description = trained_files(folder, name)
    with translate_errors(
        ModelError,
        f"cannot read the {kind} in {folder}",
        field=field,
        remedy=f"the folder must hold {SUBFOLDER}/{weights.name} and {description.name};"
        f" or load without {field}",
    ):
        trained = make(json.loads(description.read_text(encoding="utf-8")))
        trained.load_state_dict(load_file(weights))
    if trained.hidden_size != width:
        raise ModelError(
            f"{short} of width {trained.hidden_size}, model of width {width}",
            field=field,
            remedy=f"use the {short} that were trained with this model",
        )
    if fingerprint:
        check_fingerprint(str(trained.fingerprint), fingerprint, short, field)
    return trained


def check_fingerprint(own: str, model: str, what: str, field: str) -> None:
    """Refuse what was trained with another model.

    Args:
        own: fingerprint of the model that it was trained with.
        model: of the model that it is wanted for.
        what: name of the trained thing for people.
        field: of errors.

    Raises:
        ModelError: they differ.
    """
    if own != model:
        raise ModelError(
            f"{what} of model {own[:12]}, model {model[:12]}",
            field=field,
            remedy=f"use the {what} that were trained with this model",
        )
