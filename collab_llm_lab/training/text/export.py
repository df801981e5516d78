"""Text models as folders that transformers and the engine read."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase


def export(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a float16 checkpoint with tokenizer, chat template and generation configuration.

    It is written beside and renamed, so that a reader never sees half of it.
    """
    building = folder.with_name(folder.name + ".part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    copied = copy.deepcopy(model).to("cpu", torch.float16)
    copied.config.dtype = torch.float32  # to compute in; float16 is for the file
    copied.save_pretrained(building)
    tokenizer.save_pretrained(building)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(building, folder)


def read(folder: Path, device: torch.device) -> Any:
    """Return the model in ``folder``, float32, on ``device``."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()
