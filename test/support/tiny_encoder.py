"""Encoders and cross-encoders with random weights: deterministic, a few kilobytes."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel
from transformers.models.bert import BertTokenizer


def write_tiny_encoder(folder: Path, seed: int = 0, scores: int = 0) -> Path:
    """Write a BERT of two layers, whose tokens are letters, to ``folder``.

    Args:
        scores: outputs of a cross-encoder; 0: an encoder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [
        c for letter in string.ascii_lowercase + string.digits for c in (letter, f"##{letter}")
    ]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    if scores:
        config.num_labels = scores
    model = BertForSequenceClassification(config) if scores else BertModel(config)
    model.eval().save_pretrained(folder, safe_serialization=True)
    return folder
