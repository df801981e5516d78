"""Memory that a model needs, estimated from its configuration and the headers of its files.

    needed = weights + largest pass + keys and values of one session

Sizes are of transformers' configurations; ``dtype`` is that of weights and activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.architectures import (
    attention_layers,
    context_length,
    deepstack_levels,
    is_recurrent,
)
from collab_llm_nodes.models.checkpoint import stored_tensors

_ROWS, _LOGITS = 512, 64
"""Tokens of a large pass, and those whose logits are wanted."""
_SESSION = 4096
"""Tokens of a session with a full HD picture: 2,691 of them, and a long text."""
FULL_HD = 1920 * 1080
"""Pixels of a large picture."""
_CHANNELS = 3
_PATCH, _WIDTH = 14, 1280  # of encoders whose configuration has other names for them


@dataclass(frozen=True)
class Footprint:
    """Memory that a model needs beside its weights [bytes].

    Attributes:
        largest_pass: activations of a pass of many tokens, and of a full HD picture meanwhile.
        column: keys and values of one token.
        session_tokens: tokens of a session that must find room.
    """

    largest_pass: int
    column: int
    session_tokens: int

    @property
    def session(self) -> int:
        """Keys and values of one session."""
        return self.session_tokens * self.column


def footprint(config: Any, dtype: torch.dtype) -> Footprint:
    """Return the memory that a model needs beside its weights.

    Args:
        config: transformers' configuration of the whole model.
    """
    text = config.get_text_config()
    columns = min(_SESSION, context_length(text))
    largest_pass = pass_bytes(
        config, dtype, rows=_ROWS, logits=_LOGITS, columns=columns, pixels=FULL_HD
    )
    return Footprint(largest_pass, column_bytes(text, dtype), columns)


def check_fits(
    weights: float, config: Any, dtype: torch.dtype, device: torch.device, free: float
) -> None:
    """Refuse a model that does not fit into ``free`` bytes with its largest pass and a session.

    Args:
        weights: their bytes, as ``weight_bytes``.
        config: transformers' configuration of the whole model.

    Raises:
        ModelError: it does not; the message has the three figures.
    """
    beside = footprint(config, dtype)
    if weights + beside.largest_pass + beside.session > free:
        raise ModelError(
            f"too little memory on {device}: {format_bytes(weights)} for weights,"
            f" {format_bytes(beside.largest_pass)} for a pass of {_ROWS} tokens and"
            f" {format_bytes(beside.session)} for the keys and values of"
            f" {beside.session_tokens} tokens are needed,"
            f" {format_bytes(free)} are free",
            field="quantization",
            remedy="set quantization to int8 or int4, dtype to bfloat16, or take a smaller model",
        )


def column_bytes(text: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values.

    2 * key heads * head width * bytes of a number, of each layer: 57,344 for Qwen2-VL-7B in
    bfloat16. Where some layers have recurrent states in place of them, the embedded token is held
    as well.

    Args:
        text: configuration of the text decoder (``config.get_text_config()``).
    """
    numbers = is_recurrent(text) * text.hidden_size
    for layer in _layers(text)[: attention_layers(text)]:
        heads, key_heads = _heads(layer)
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        numbers += 2 * key_heads * width
    return numbers * dtype.itemsize


def pass_bytes(
    config: Any, dtype: torch.dtype, *, rows: int, logits: int, columns: int, pixels: int = 0
) -> int:
    """Return the bytes of a pass's activations, at the layer or the picture that needs most.

        rows * (9 * hidden + 3 * intermediate)
      + rows * query heads / key heads * columns   mask
      + 2 * logits * vocabulary                    and twice more in float32
      + rows * hidden * levels                     features added after the first layers
      + patches * (9 * hidden + 3 * intermediate)  the picture encoder, beside the pass
      + patches * numbers of a patch               and once more in float32

    A layer's row: embedding, x before and after, norm, queries, keys and values (3 of the hidden
    width at most), attended twice; gate, up and product.

    Args:
        config: configuration of the whole model.
        rows: new tokens of all sessions.
        logits: rows whose logits are wanted.
        columns: tokens that a session attends to.
        pixels: of the pictures that are encoded at the same time; a text model has none.
    """
    text = config.get_text_config()
    layer = _layers(text)[-1]
    between = getattr(layer, "intermediate_size", None) or getattr(layer, "ffn_dim", None)
    if isinstance(between, Sequence):  # Gemma 3n has one for each layer
        between = max(between)
    heads, key_heads = _heads(layer)
    numbers = rows * _scratch(text.hidden_size, between) + rows * heads // key_heads * columns
    numbers += 2 * logits * text.vocab_size
    single = 2 * logits * text.vocab_size
    numbers += rows * text.hidden_size * deepstack_levels(config)
    size = numbers * dtype.itemsize + single * torch.float32.itemsize
    vision = getattr(config, "vision_config", None)
    return size if vision is None else size + picture_bytes(vision, dtype, pixels)


def picture_bytes(vision: Any, dtype: torch.dtype, pixels: int = FULL_HD) -> int:
    """Return the bytes of the activations that encode a picture of so many pixels.

    Args:
        vision: configuration of the vision encoder.
    """
    side = _patch_side(vision)
    patches = pixels // side**2
    width: int = getattr(vision, "embed_dim", 0) or getattr(vision, "hidden_size", _WIDTH)
    between = getattr(vision, "intermediate_size", None)
    between = between or int(width * getattr(vision, "mlp_ratio", 4))
    patch = _CHANNELS * getattr(vision, "temporal_patch_size", 1) * side**2
    numbers = _scratch(width, between) + patch
    return patches * (numbers * dtype.itemsize + patch * torch.float32.itemsize)


def _layers(text: Any) -> list[Any]:
    """Return the configuration of each layer; in Gemma 4 they differ."""
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * text.num_hidden_layers


def _patch_side(vision: Any) -> int:
    """Return the pixels along a patch, which some configurations give by side."""
    size = getattr(vision, "patch_size", _PATCH)
    return int(size if isinstance(size, int) else size[0])


def _heads(text: Any) -> tuple[int, int]:
    """Return the numbers of query heads and of key-value heads."""
    heads = getattr(text, "num_attention_heads", None) or 1
    return heads, getattr(text, "num_key_value_heads", None) or heads


def _scratch(hidden: int, between: int | None) -> int:
    """Return the numbers of a row that a layer holds at a time."""
    return 9 * hidden + 3 * (between or 4 * hidden)


def count_weights(folder: Path) -> int:
    """Count the weights of the model in ``folder``; only headers of its files are read.

    Raises:
        ModelError: there is none, or one cannot be read.
    """
    return sum(math.prod(tensor.shape) for tensor in stored_tensors(folder).values())


def weight_bytes(folder: Path, bytes_of: Callable[[str, int], float]) -> float:
    """Return the bytes of the weights of the model in ``folder``.

    Args:
        bytes_of: bytes of each number of a tensor, of its name and its dimensions.

    Raises:
        ModelError: as ``count_weights``.
    """
    return sum(
        math.prod(tensor.shape) * bytes_of(name, len(tensor.shape))
        for name, tensor in stored_tensors(folder).items()
    )


def format_bytes(size: float) -> str:
    """Return a size as text: 2.5 GiB, 12 MiB, 0.3 MiB."""
    if size >= 1 << 30:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.{0 if size >= 10 << 20 else 1}f} MiB"
