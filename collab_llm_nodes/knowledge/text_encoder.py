"""An encoder model of the transformers library, such as all-MiniLM-L6-v2, E5 or Contriever."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ModelError, translate_errors
from collab_llm_nodes.knowledge.words import normal_form
from collab_llm_nodes.models.fingerprint import fingerprint
from collab_llm_nodes.models.loading import LOCAL
from collab_llm_nodes.models.vocabulary import vocabulary_hash

_BATCH_TOKENS = 8192  # padding included


@dataclass(frozen=True)
class TextEncoderConfig:
    """The encoder to load."""

    path: str = setting("", "Folder of the encoder's checkpoint.", read_only=True)
    device: str = setting("cpu", "cpu, cuda or cuda:N.", read_only=True)
    max_tokens: int = setting(
        256,
        "The rest of a longer text is not read [tokens]."
        " Set it to what the encoder was trained for.",
        low=8,
        high=8192,
        read_only=True,
    )
    pooling: str = setting(
        "auto",
        "mean: of a text's hidden states (MiniLM, E5); cls: the first one (BGE, GTE); auto: as the"
        " checkpoint's `1_Pooling/config.json` says, else mean.",
        choices=("auto", "mean", "cls"),
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class TextEncoder:
    """Mean of a text's last hidden states, or the first of them, scaled to length 1.

    Texts are read in their normal form (``words.normal_form``).

    Raises:
        ModelError: the folder holds no encoder that can be loaded.
    """

    def __init__(self, config: TextEncoderConfig) -> None:
        self._config = config
        with translate_errors(
            ModelError,
            f"cannot load the encoder {config.path!r}",
            field="encoder.path",
            remedy="give the folder of an encoder with safetensors weights and a tokenizer",
        ):
            folder = Path(config.path).expanduser()
            if not config.path or not folder.is_dir():
                raise FileNotFoundError("no such folder")
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
            model = AutoModel.from_pretrained(
                folder, use_safetensors=True, dtype=torch.float32, **LOCAL
            )
            self._model = model.to(config.device).eval()
            self._pooling = _pooling(folder, config.pooling)
        self.width = int(model.config.hidden_size)
        longest = getattr(model.config, "max_position_embeddings", config.max_tokens)
        self._max_tokens = min(config.max_tokens, longest)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of weights, configuration, tokenizer and the rule that makes vectors of them."""
        facts = (
            f"{self._pooling} pooling 2 {self._max_tokens} {fingerprint(self._model)}"
            f" {vocabulary_hash(self._tokenizer)}"
        )
        return hashlib.sha256(facts.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [texts, width]."""
        vectors = np.zeros((len(texts), self.width), np.float32)
        read = [
            self._tokenizer.encode(text, truncation=True, max_length=self._max_tokens)
            for text in map(normal_form, texts)
        ]
        order = sorted(range(len(texts)), key=lambda i: len(read[i]))  # little padding
        while order:
            count = max(1, _BATCH_TOKENS // max(1, len(read[order[-1]])))
            batch, order = order[-count:], order[:-count]
            vectors[batch] = self._forward([read[i] for i in batch]).cpu().numpy()
        return vectors

    @torch.inference_mode()
    def _forward(self, ids: list[list[int]]) -> Tensor:
        device = self._model.device
        longest = max(map(len, ids))
        tokens = torch.zeros(len(ids), longest, dtype=torch.int64)
        mask = torch.zeros(len(ids), longest, dtype=torch.int64)
        for row, found in enumerate(ids):
            tokens[row, : len(found)] = torch.tensor(found)
            mask[row, : len(found)] = 1
        tokens, mask = tokens.to(device), mask.to(device)
        hidden = self._model(input_ids=tokens, attention_mask=mask).last_hidden_state
        if self._pooling == "cls":
            return torch.nn.functional.normalize(hidden[:, 0], dim=-1)
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(mean, dim=-1)


def _pooling(folder: Path, wanted: str) -> str:
    """Return the pooling that is wanted, or with `auto` the one that a checkpoint was trained with.

    Raises:
        ValueError: the checkpoint names one that is not known here.
    """
    file = folder / "1_Pooling" / "config.json"
    if wanted != "auto" or not file.is_file():
        return "mean" if wanted == "auto" else wanted
    modes = {name for name, on in json.loads(file.read_text("utf-8")).items() if on is True}
    for mode, name in (("cls", "pooling_mode_cls_token"), ("mean", "pooling_mode_mean_tokens")):
        if name in modes:
            return mode
    raise ValueError(f"its pooling is neither mean nor cls: {', '.join(sorted(modes))}")
