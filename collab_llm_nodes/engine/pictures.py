"""Pictures in a prompt: their features take the place of the embeddings of placeholder tokens.

ids       the  red  [image] [image] [image] [image]  ball    [image]: one id, the placeholder
embedded   x    x      f0      f1      f2      f3      x     f: rows of the picture's features
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt


def encode_pictures(loaded: LoadedModel, prompt: EncodedPrompt, like: Tensor) -> Tensor:
    """Return the features [placeholders of the prompt, width] of a prompt's pictures.

    Args:
        like: a tensor of the place and the type of the result.
    """
    pixels, grid = prompt.pixel_values, prompt.image_grid_thw
    assert pixels is not None
    assert grid is not None
    features = loaded.model.get_image_features(
        pixels.to(like.device), grid.to(like.device), return_dict=True
    ).pooler_output
    return torch.cat(list(features)).to(like.dtype)


def features_within(
    prompt: EncodedPrompt, placeholder: int | None, start: int, count: int
) -> slice:
    """Return which features belong to the ``count`` tokens from index ``start`` of a prompt.

    Tokens behind the prompt were generated. A placeholder among them is a token like any other.
    """
    if prompt.image_grid_thw is None or placeholder is None:
        return slice(0, 0)
    before = prompt.ids[:start].count(placeholder)
    return slice(before, before + prompt.ids[start : start + count].count(placeholder))


def show(features: Tensor, ids: Sequence[int], placeholder: int, embedded: Tensor) -> None:
    """Put features [k, width] into the rows of the first k placeholders among ``ids``.

    Args:
        embedded: [len(ids), width]; it is written to.
    """
    shown = 0
    for is_shown, run in groupby(enumerate(ids), lambda place: place[1] == placeholder):
        places = [row for row, _ in run][: len(features) - shown if is_shown else 0]
        if places:  # by slices: a list of rows would be copied to the device first
            embedded[places[0] : places[-1] + 1] = features[shown : shown + len(places)]
            shown += len(places)
