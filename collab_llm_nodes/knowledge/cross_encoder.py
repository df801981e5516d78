"""A cross-encoder of the transformers library, such as ms-marco-MiniLM: question and text at once.

It reads each pair of question and text, so it judges better than two vectors, and takes a pass for
each text. It puts in order what a faster method has found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ModelError, translate_errors
from collab_llm_nodes.knowledge.words import normal_form
from collab_llm_nodes.models.fingerprint import fingerprint
from collab_llm_nodes.models.loading import LOCAL
from collab_llm_nodes.models.vocabulary import vocabulary_hash

_BATCH = 16


@dataclass(frozen=True)
class CrossEncoderConfig:
    """The cross-encoder to load."""

    path: str = setting("", "Folder of its checkpoint; empty: none.", read_only=True)
    device: str = setting("cpu", "cpu, cuda or cuda:N.", read_only=True)
    max_tokens: int = setting(
        512,
        "The rest of a longer pair is not read [tokens].",
        low=8,
        high=8192,
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class CrossEncoder:
    """Scores of texts for a question, 0 to 1: the logistic function of the model's one output.

    Raises:
        ModelError: the folder holds no cross-encoder that can be loaded.
    """

    def __init__(self, config: CrossEncoderConfig) -> None:
        self._config = config
        with translate_errors(
            ModelError,
            f"cannot load the cross-encoder {config.path!r}",
            field="reranker.path",
            remedy="give the folder of one with safetensors weights and a tokenizer",
        ):
            folder = Path(config.path).expanduser()
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, use_safetensors=True, dtype=torch.float32, **LOCAL
            )
            if model.config.num_labels != 1:
                raise ValueError(f"it has {model.config.num_labels} outputs, not one score")
            self._model = model.to(config.device).eval()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of weights, configuration and tokenizer."""
        facts = f"{self._config.max_tokens} {fingerprint(self._model)}"
        return hashlib.sha256(f"{facts} {vocabulary_hash(self._tokenizer)}".encode()).hexdigest()

    @torch.inference_mode()
    def score(self, question: str, texts: Sequence[str]) -> list[float]:
        """Return the score of each text."""
        found: list[float] = []
        for start in range(0, len(texts), _BATCH):
            batch = [normal_form(text) for text in texts[start : start + _BATCH]]
            read = self._tokenizer(
                [normal_form(question)] * len(batch),
                batch,
                truncation="only_second",
                max_length=self._config.max_tokens,
                padding=True,
                return_tensors="pt",
            ).to(self._model.device)
            found += torch.sigmoid(self._model(**read).logits[:, 0]).tolist()
        return found
