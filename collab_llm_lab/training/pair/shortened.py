"""A draft cut from a target: its embedding, its first layers, its norm and LM head."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collab_llm_lab.training.run import replacing
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.checkpoint import quantisation_of, stored_tensors
from collab_llm_nodes.models.loading import (
    ModelConfig,
    architecture_in,
    load,
    model_folder,
    no_progress_bar,
)

_TYPES = {"F16": "float16", "BF16": "bfloat16"}


def write_shortened(target: str, layers: int, folder: Path) -> None:
    """Write a checkpoint of the first ``layers`` layers of ``target``, in the type it is stored in.

    The whole target is read into the host's memory.

    Raises:
        ConfigError: the target has not more layers than that, or is quantised.
        ModelError: it cannot be loaded.
    """
    source = model_folder(ModelConfig(target))
    own = architecture_in(source).get_text_config().num_hidden_layers
    if not 1 <= layers < own:
        raise ConfigError(
            f"{layers} of the target's {own} layers",
            field="--layers",
            remedy=f"1 to {own - 1}; a fifth of them is a good beginning",
        )
    model = load(ModelConfig(str(source), dtype=stored_type(source))).model
    text = model.config.get_text_config()
    del model.get_decoder().layers[layers:]
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    write_checkpoint(model, source, folder)


def stored_type(folder: Path) -> str:
    """Return the type of most weights of the checkpoint in ``folder``, as ``ModelConfig`` names it.

    Raises:
        ConfigError: the checkpoint is quantised.
        ModelError: it cannot be read.
    """
    if quantisation_of(architecture_in(folder)) is not None:
        raise ConfigError(
            f"the checkpoint in {folder} is quantised, and cannot be trained",
            field="--draft, --layers",
            remedy="take the one that is not quantised",
        )
    types = Counter(tensor.dtype for tensor in stored_tensors(folder).values())
    return _TYPES.get(types.most_common(1)[0][0], "float32")


def write_checkpoint(model: Any, source: Path, folder: Path) -> None:
    """Write ``model`` with the tokenizer, template and processor files of ``source``."""
    with replacing(folder) as building:
        with no_progress_bar():
            model.save_pretrained(building)
        for file in _other_files(source):
            if not (building / file.name).exists():
                shutil.copy(file, building)


def _other_files(source: Path) -> Iterator[Path]:
    for file in sorted(source.iterdir()):
        other = file.suffix in (".json", ".jinja", ".txt", ".model")
        if other and not file.name.endswith(".index.json"):
            yield file
