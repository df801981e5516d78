"""Processors of transformers, for models that encode pictures by rules of their own.

A processor scales and divides pictures, and writes as many placeholders into the prompt as its
model makes features of them. Qwen-VL models need none: ``prompt.py`` does it for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,
    processor_class_from_name,
)

from collab_llm_nodes.errors import InvalidInput, ModelError, translate_errors


def load_processor(folder: Path, model_type: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load the processor in ``folder``: its pictures and its text, without video and sound.

    Raises:
        ModelError: there is none, transformers has none for this architecture, or a package that it
            needs is missing.
    """
    with translate_errors(
        ModelError,
        f"cannot load the processor in {folder}",
        field="path",
        remedy="copy processor_config.json and preprocessor_config.json beside the weights, and"
        " install the packages that the message names",
    ):
        found: Any = processor_class_from_name(str(PROCESSOR_MAPPING_NAMES.get(model_type)))
        if found is None:
            raise ValueError(f"transformers has no processor for {model_type!r}")
        # Video processors need torchvision, which is left out on purpose (docs/dependencies.md).
        made: Any = type(found.__name__, (found,), {"check_argument_for_proper_class": _accept})
        parts: Mapping[str, Any] = {
            # The PIL variant needs no torchvision, so pixels are the same on every machine.
            "image_processor": AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            ),
            "tokenizer": tokenizer,
        }
        settings, _ = made.get_processor_dict(folder, local_files_only=True)
        settings["chat_template"] = tokenizer.chat_template
        return made.from_args_and_dict(
            [parts.get(name) for name in made.get_attributes()], settings
        )


def _accept(processor: Any, name: str, argument: Any) -> type:
    return type(argument)


def written_tokens(processor: Any) -> tuple[str, ...]:
    """Return the tokens by which ``processor`` places pictures, video and sound in a text."""
    found = {value for name, value in vars(processor).items() if name.endswith("_token")}
    return tuple(sorted(token for token in found if isinstance(token, str) and token.strip()))


def process(
    text: str, images: Sequence[Image.Image], processor: Any, dtype: torch.dtype
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the ids of ``text``, which names ``images`` in order, and the model's other inputs.

    Args:
        dtype: of the model, and so of the pixels.

    Raises:
        InvalidInput: the processor refuses the pictures.
    """
    with translate_errors(
        InvalidInput,
        "the model's own processor does not take the pictures",
        field="images",
        remedy="send pictures of usual sizes, such as a camera's",
    ):
        found = processor(
            text=[text], images=list(images), add_special_tokens=False, return_tensors="pt"
        )
        inputs = dict(found.to(dtype))  # of what is no integer
        ids: list[int] = inputs.pop("input_ids")[0].tolist()
    return tuple(ids), inputs
