"""The text family's tokenizer: words have the same tokens everywhere, and texts come back."""

from __future__ import annotations

import random
from functools import cache
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from collab_llm_lab.training.text.samples import vocabulary_text
from collab_llm_nodes.models.detokenising import Detokeniser
from collab_llm_nodes.models.tokenizer import JOINER, train_text_tokenizer


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return train_text_tokenizer(islice(vocabulary_text(random.Random(0)), 200), 1024)


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer()(text)["input_ids"]
    return ids


TEXTS = st.text(max_size=60).filter(lambda text: JOINER not in text and "<|" not in text)


@given(TEXTS)
def test_every_text_comes_back(text: str) -> None:
    assert tokenizer().decode(encode(text)) == text


@given(TEXTS)
def test_text_that_is_shown_stays(text: str) -> None:
    """A joiner at the end shows nothing, so no character is taken back when a word follows."""
    ids = encode(text)
    shown = Detokeniser(lambda tokens: str(tokenizer().decode(list(tokens))))
    before = ""
    for n in range(1, len(ids) + 1):
        shown.update(ids[:n])
        assert shown.text.startswith(before)
        before = shown.text
    shown.update(ids, final=True)
    assert shown.text == text


@pytest.mark.parametrize("word", ["kitchen", "Kiko", "Zürich", "15:40", "4C-12"])
@pytest.mark.parametrize("before", ["", "\n", '"', "(", "[", "|", "- ", "it: "])
def test_a_word_has_the_same_tokens_everywhere(word: str, before: str) -> None:
    inside = encode(f"in {word}")[len(encode("in")) :]  # from the space on
    ids = encode(f"{before}{word}")
    assert ids[-len(inside) :] == inside


def test_each_digit_and_each_role_is_one_token() -> None:
    assert len(encode("2026")) == 6  # joiner, space
    for role in ("user", "assistant"):
        assert len(encode(f"{role}\n")) == 3  # joiner, name, end of line
