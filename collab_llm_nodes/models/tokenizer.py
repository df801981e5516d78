"""The embedded models' own small byte-level BPEs, with Qwen2's special tokens and chat form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCABULARY = 512
TEXT_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens of a model that reads text only."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_ROLES = 1_000
"""Times the names of the roles count beside the texts: each is one token."""

TEXT_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


JOINER = "\N{WORD JOINER}"
"""Stands in the text family's ids where a line or a quotation begins with a word or a number, and
is followed by a space that is not in the text; decoding removes both."""
OPENING = '\n"([|'
"""Characters after which a joiner may stand; it may stand at the beginning of a text too."""


def train_tokenizer(texts: list[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Train a navigation pair's BPE over ``texts``: any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    return _train(tokenizer, texts, SPECIAL, vocabulary, CHAT_TEMPLATE)


def train_text_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train the text family's BPE over ``texts``; every digit is a token of its own.

    A word or a number has the same tokens wherever it stands: at the beginning of a line and in
    quotes too it follows a space, after a ``JOINER``. Small models find and copy a name only if
    its tokens are the same in question, text and answer.

    Args:
        vocabulary: most entries, special tokens and the 256 bytes included.
    """
    tokenizer = Tokenizer(models.BPE())
    word = r"[\p{L}\p{N}]"
    begun = [normalizers.Prepend(JOINER), normalizers.Replace(Regex(rf"^{JOINER}(?!{word})"), "")]
    joined = [
        normalizers.Replace(Regex(rf"{re.escape(mark)}(?={word})"), mark + JOINER)
        for mark in OPENING
    ]
    spaced = normalizers.Replace(JOINER, f"{JOINER} ")
    tokenizer.normalizer = normalizers.Sequence([*begun, *joined, spaced])
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, _byte_level()])
    unjoined = decoders.Replace(Regex(f"{JOINER} ?"), "")
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), unjoined])
    return _train(tokenizer, texts, TEXT_SPECIAL, vocabulary, TEXT_CHAT_TEMPLATE)


def _byte_level() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _train(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    special: Sequence[str],
    vocabulary: int,
    chat_template: str,
) -> PreTrainedTokenizerFast:
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = ["user\n", "assistant\n"] * _ROLES
    tokenizer.train_from_iterator([*texts, *roles], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special[1:]),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Return the number of one token that the tokenizer has."""
    number = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(number, int), f"{token} is one token"
    return number


def vision_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the special tokens that a Qwen-VL configuration names, by its names for them."""
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    return {
        f"{name.removesuffix('_pad')}_token_id": token_id(tokenizer, f"<|{name}|>")
        for name in names
    }
