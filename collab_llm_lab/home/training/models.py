"""Sizes and tokenizer of the home's pair."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from collab_llm_lab.home.corpus import corpus
from collab_llm_lab.training.nav.models import Size
from collab_llm_lab.training.run import replacing
from collab_llm_nodes.models.tokenizer import train_tokenizer

VOCABULARY = 1024
MAX_TOKENS = 72
"""Tokens of an answer at most."""
SIZES = {
    "target": Size(160, 5, 432, 5, 1, 128, 5, 4),
    "draft": Size(96, 2, 256, 3, 1, 64, 3, 2, 2),
    "micro": Size(32, 2, 48, 1, 1, 16, 1, 1, 2),
}
"""``micro`` is for tests."""


def tokenizer_in(out: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the training in ``out``, made by its first call.

    Kept there because the words of requests may change: weights belong to one tokenizer.
    """
    folder = out / "tokenizer"
    if not folder.exists():
        made = train_tokenizer(corpus(), VOCABULARY)
        with replacing(folder) as building:
            made.save_pretrained(building)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
