"""Pictures in a prompt: their features take the place of the embeddings of placeholder tokens.

ids       the  red  [image] [image] [image] [image]  ball    [image]: one id, the placeholder
embedded   x    x      f0      f1      f2      f3      x     f: rows of the picture's features

With DeepStack (Qwen3-VL), a row of features is longer: after the part that takes the place of the
embedding, it holds one of the same width for each of the first layers, to be added after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from collab_llm_nodes.engine.backend import Rows
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt


def encode_pictures(loaded: LoadedModel, prompt: EncodedPrompt, like: Tensor) -> Tensor:
    """Return the features [placeholders of the prompt, width of a row] of a prompt's pictures.

    On CUDA the encoder runs on a stream of its own, beside the passes, and the calling thread waits
    for it: a pass that waited instead would hold up the verdicts of all its sessions.

    Args:
        like: a tensor of the place and the type of the result.
    """
    if like.device.type != "cuda":
        return _encode(loaded, prompt, like)
    stream = _encoder_stream(like.device)
    stream.wait_stream(torch.cuda.current_stream(like.device))  # weights may still be uploading
    with torch.cuda.stream(stream):
        features = _encode(loaded, prompt, like)
        done = torch.cuda.Event(blocking=True)  # sleeps; else it would spin on a core
        done.record(stream)
    done.synchronize()
    return features


@cache
def _encoder_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=0)  # the lowest; passes have ``high_priority``


def _encode(loaded: LoadedModel, prompt: EncodedPrompt, like: Tensor) -> Tensor:
    pixels, grid = prompt.pixel_values, prompt.image_grid_thw
    assert pixels is not None
    assert grid is not None
    features: list[Tensor] = []
    # One by one: so much memory at a time is counted beside the passes.
    for own, patches in zip(grid.split(1), pixels.split(grid.prod(-1).tolist()), strict=True):
        indices = _indices(loaded.model.model.visual, own, like.device)
        found = loaded.model.get_image_features(
            patches.to(like.device), own, return_dict=True, **indices
        )
        levels = getattr(found, "deepstack_features", None) or ()
        # In transformers 5.17 the levels are not divided by picture; vstack takes both.
        parts = [torch.vstack(tuple(each)) for each in (found.pooler_output, *levels)]
        features.append(torch.cat(parts, dim=1))
    return torch.cat(features).to(like.dtype)


def _indices(encoder: Any, grid: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the encoder's indices, computed from the pictures' sizes, each where it is read.

    Sizes and lengths stay on the host: each of the encoder's layers reads them there, and would
    wait for the device three times.

    Args:
        grid: patches of each picture along time, height and width [pictures, 3], on the host.
    """
    merge = encoder.spatial_merge_size
    found = {"image_position_ids": get_vision_position_ids(grid, merge).to(device)}
    if hasattr(encoder, "window_size"):  # Qwen2.5-VL
        index, lengths = get_vision_window_index(
            grid, merge, encoder.window_size, encoder.patch_size
        )
        found["image_window_index"] = index.to(device)
        found["image_cu_window_seqlens"] = lengths
    if hasattr(encoder, "num_grid_per_side"):  # Qwen3-VL
        taps, weights = get_vision_interpolation_indices_and_weights(
            grid,
            encoder.num_grid_per_side,
            encoder.interpolation_mode,
            encoder.interpolation_align_corners,
            merge,
        )
        found["image_interp_indices"] = taps.to(device)
        found["image_interp_weights"] = weights.to(device)
    return found


def features_within(
    prompt: EncodedPrompt, placeholder: int | None, start: int, count: int
) -> slice:
    """Return which features belong to the ``count`` tokens from index ``start`` of a prompt.

    Tokens after the prompt were generated. A placeholder among them is a token like any other.
    """
    if prompt.image_grid_thw is None or placeholder is None:
        return slice(0, 0)
    before = prompt.ids[:start].count(placeholder)
    return slice(before, before + prompt.ids[start : start + count].count(placeholder))


def widened(embedded: Tensor, levels: int) -> Tensor:
    """Return embeddings [rows, width] with room for DeepStack [rows, (1 + levels) * width]."""
    return functional.pad(embedded, (0, levels * embedded.shape[1])) if levels else embedded


def divided(wide: Tensor, width: int) -> Rows:
    """Divide rows of :func:`widened` into embeddings and what is added after the first layers."""
    embedded, *added = wide.split(width, dim=1)
    return Rows(embedded, added)


def insert_features(
    features: Tensor, ids: Sequence[int], placeholder: int, embedded: Tensor
) -> None:
    """Put features [k, width] into the rows of the first k placeholders among ``ids``.

    Args:
        embedded: [len(ids), width]; it is written to.
    """
    if features.is_cuda:  # made on another stream, whose next picture must not overwrite them
        features.record_stream(torch.cuda.current_stream(features.device))
    shown = 0
    for is_shown, run in groupby(enumerate(ids), lambda place: place[1] == placeholder):
        places = [row for row, _ in run][: len(features) - shown if is_shown else 0]
        if places:  # by slices: a list of rows would be copied to the device first
            embedded[places[0] : places[-1] + 1] = features[shown : shown + len(places)]
            shown += len(places)
