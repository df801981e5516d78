"""Batched greedy answers through transformers' own ``generate``: rollouts and evaluation use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.training.nav.architecture import prefix_ids
from collab_llm_lab.training.nav.forward import GRID, MERGE, PATCH
from collab_llm_nodes.models.tokenizer import token_id

MAX_TOKENS = 40

_MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
_STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])


def patches(pictures: np.ndarray) -> Tensor:
    """``pixel_values`` [B * 72, 1176] of uint8 [B, 84, 168, 3], as the image processor's."""
    x = (torch.from_numpy(np.ascontiguousarray(pictures)).float() / 255.0 - _MEAN) / _STD
    gh, gw = GRID[0] // MERGE, GRID[1] // MERGE
    x = x.view(-1, gh, MERGE, PATCH, gw, MERGE, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    x = x.reshape(-1, 3, 1, PATCH * PATCH).expand(-1, 3, 2, PATCH * PATCH)
    return x.reshape(-1, 3 * 2 * PATCH * PATCH)


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    pictures: np.ndarray,
    prompts: Sequence[str],
) -> list[str]:
    """Greedy answers to one prompt (user text) per picture uint8 [B, 84, 168, 3]."""
    pad, end = (token_id(tokenizer, t) for t in ("<|endoftext|>", "<|im_end|>"))
    prefix = prefix_ids(tokenizer)
    rows = [
        prefix
        + tokenizer(f"{p}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).input_ids
        for p in prompts
    ]
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
    was_training = model.training
    model.eval()
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        mm_token_type_ids=(ids == model.config.image_token_id).int().to(model.device),
        pixel_values=patches(pictures).to(model.device),
        image_grid_thw=torch.tensor([[1, *GRID]]).repeat(len(rows), 1).to(model.device),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model.train(was_training)
    return [str(t) for t in tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)]
