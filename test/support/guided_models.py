"""A fake model that spells: its tokens are an end token and letters."""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_lowercase

from fake_models import EOS, VOCAB, FakeEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from collab_llm_nodes.models.guided_text import Guides

LETTERS = ascii_lowercase[: VOCAB - 1]


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token for each letter, after the end token."""
    vocabulary = {"<end>": EOS, **{letter: i for i, letter in enumerate(LETTERS, 1)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def spelling_engine(seed: int = 0, *, noise: float = 0.0) -> FakeEngine:
    """Return a fake whose answers can be guided."""
    engine = FakeEngine(seed, noise=noise, exits=())
    engine.loaded.guides = Guides(letter_tokenizer(), VOCAB, {EOS}, {EOS})
    return engine


def spelt(tokens: Iterable[int]) -> str:
    """Return the letters of an answer."""
    return "".join(LETTERS[token - 1] for token in tokens if token != EOS)


def allowed_by(language: frozenset[str], text: str) -> list[int]:
    """Return the tokens that may follow ``text``, by looking through all texts there are."""
    next_ones = {each[len(text)] for each in language if each.startswith(text) and each != text}
    ends = [EOS] if text in language else []
    return ends + sorted(LETTERS.index(letter) + 1 for letter in next_ones)
