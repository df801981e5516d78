"""From an instruction and camera images to what a model reads."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import InvalidInput, ModelError
from collab_llm_nodes.models.loading import LoadedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        text: the user turn; the chat template is applied by :func:`encode`.
        images: JPEG (or PNG) bytes, shown before the text.
    """

    text: str
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class PromptLimits:
    """What a prompt may hold; a verifier serves strangers."""

    max_characters: int = setting(8192, "Longest text.", low=1)
    max_images: int = setting(8, "Most images.", low=0)
    max_pixels: int = setting(25_000_000, "Largest image, width times height.", low=1)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as one model reads it. Holds all that is per session, so the model stays shared.

    Attributes:
        ids: n token ids, one image placeholder id per image feature.
        pixel_values: [patches, channels * 2 * patch * patch], None without images.
        image_grid_thw: int64 [images, 3] patches in time, height and width.
        position_ids: int64 [3, n] M-RoPE positions; None for text-only models.
        position_delta: position of a later token minus its index.
    """

    ids: tuple[int, ...]
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    position_ids: Tensor | None = None
    position_delta: int = 0


def encode(
    prompt: Prompt, loaded: LoadedModel, limits: PromptLimits | None = None
) -> EncodedPrompt:
    """Apply the chat template and the image processor of ``loaded``.

    Raises:
        InvalidInput: empty, oversized or forbidden text; too many, corrupt or oversized images;
            images for a text-only model. ``field`` is ``text`` or ``images[i]``.
        ModelError: the chat template does not place the images.
    """
    limits = limits or PromptLimits()
    _check_text(prompt.text, loaded, limits)
    if len(prompt.images) > (limits.max_images if loaded.image_processor else 0):
        raise InvalidInput(
            f"{len(prompt.images)} images",
            field="images",
            remedy=f"send at most {limits.max_images}"
            if loaded.image_processor
            else "this model reads text only",
        )
    images = [_decode(data, i, limits) for i, data in enumerate(prompt.images)]
    pixels, grid = _pixels(images, loaded) if images else (None, None)
    ids = _ids(prompt, grid, loaded)
    limit = loaded.model.config.get_text_config().max_position_embeddings
    if len(ids) >= limit:
        raise InvalidInput(
            f"{len(ids)} tokens, the model reads {limit}", field="text", remedy="shorten it"
        )
    if loaded.image_processor is None:
        return EncodedPrompt(ids)
    positions, delta = _positions(ids, grid, loaded)
    return EncodedPrompt(ids, pixels, grid, positions, delta)


def check_length(text: str, limits: PromptLimits, field: str = "text") -> None:
    """Refuse what no model need be asked about. Raises InvalidInput: empty, or too long."""
    if not text.strip():
        raise InvalidInput("is empty", field=field, remedy="say what the robot shall do")
    if len(text) > limits.max_characters:
        raise InvalidInput(
            f"{len(text)} characters",
            field=field,
            remedy=f"send at most {limits.max_characters}",
        )


def _check_text(text: str, loaded: LoadedModel, limits: PromptLimits) -> None:
    check_length(text, limits)
    # Spelled out, these would end the user's turn or pose as image features.
    for token in loaded.tokenizer.get_added_vocab():
        if token in text:
            raise InvalidInput(
                f"contains the control token {token!r}", field="text", remedy="remove it"
            )


def _decode(data: bytes, index: int, limits: PromptLimits) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
        if image.width * image.height > limits.max_pixels:  # known before pixels are decoded
            raise InvalidInput(
                f"{image.width}x{image.height} pixels",
                field=f"images[{index}]",
                remedy=f"send at most {limits.max_pixels} pixels",
            )
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        # PIL's own words for an unknown format name a Python object.
        why = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise InvalidInput(
            f"is not a readable JPEG or PNG{why}",
            field=f"images[{index}]",
            remedy="send the complete compressed image",
        ) from error
    except Image.DecompressionBombError as error:
        raise InvalidInput(str(error), field=f"images[{index}]", remedy="shrink it") from error


def _pixels(images: list[Image.Image], loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    processor = loaded.image_processor
    assert processor is not None
    fetch = _qwen_fetch_image()
    try:
        if fetch is not None:
            size = {
                "min_pixels": processor.size["shortest_edge"],
                "max_pixels": processor.size["longest_edge"],
            }
            images = [fetch({"image": x, **size}, processor.patch_size) for x in images]
        encoded = processor(images=images, return_tensors="pt", do_resize=fetch is None)
    except ValueError as error:  # an aspect ratio above 200
        raise InvalidInput(str(error), field="images", remedy="crop the image") from error
    return encoded["pixel_values"], encoded["image_grid_thw"]


@cache
def _qwen_fetch_image() -> Callable[[dict[str, Any], int], Image.Image] | None:
    """qwen-vl-utils' resizing where its torchvision loads; the PIL processor's is the same."""
    try:
        from qwen_vl_utils import fetch_image
    except (ImportError, RuntimeError, OSError) as error:
        # No warning: torchvision is kept out on purpose (docs/dependencies.md).
        log.debug("images go through the PIL processor, qwen-vl-utils is not used: %s", error)
        return None
    found: Callable[[dict[str, Any], int], Image.Image] = fetch_image
    return found


def _ids(prompt: Prompt, grid: Tensor | None, loaded: LoadedModel) -> tuple[int, ...]:
    tokenizer = loaded.tokenizer
    content: Any = prompt.text
    if loaded.image_processor is not None:
        content = [{"type": "image"} for _ in prompt.images]
        content.append({"type": "text", "text": prompt.text})
    chat = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    # Special tokens are the template's business, so the tokenizer adds none.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if loaded.image_processor is None:
        return tuple(ids)
    placeholder = loaded.model.config.image_token_id
    if ids.count(placeholder) != len(prompt.images):
        raise ModelError(
            f"the chat template places {ids.count(placeholder)} of {len(prompt.images)} images",
            field="path",
            remedy="use the chat template that came with the model",
        )
    if grid is None:
        return tuple(ids)
    features = iter((grid.prod(dim=1) // loaded.image_processor.merge_size**2).tolist())
    return tuple(x for i in ids for x in [i] * (next(features) if i == placeholder else 1))


def _positions(
    ids: tuple[int, ...], grid: Tensor | None, loaded: LoadedModel
) -> tuple[Tensor, int]:
    """M-RoPE positions [3, n]. The model would keep the delta on itself, shared by all sessions."""
    if grid is None:
        return torch.arange(len(ids)).expand(3, -1), 0
    tokens = torch.tensor([ids])
    is_image = (tokens == loaded.model.config.image_token_id).int()
    positions, delta = loaded.model.model.get_rope_index(tokens, is_image, image_grid_thw=grid)
    return positions[:, 0], int(delta)
