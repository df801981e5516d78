"""Sizes and tokenizer of the home's pair."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from collab_llm_lab.home.corpus import corpus
from collab_llm_lab.training.nav.models import Size
from collab_llm_nodes.models.tokenizer import train_tokenizer

VOCABULARY = 1024
SIZES = {
    "target": Size(160, 5, 432, 5, 1, 128, 5, 4),
    "draft": Size(80, 2, 208, 2, 1, 56, 2, 2, 2),
    "micro": Size(32, 2, 48, 1, 1, 16, 1, 1, 2),
}
"""``micro`` is for tests."""


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of target and draft: frequent words of the world are one token."""
    return train_tokenizer(corpus(), VOCABULARY)
