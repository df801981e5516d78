"""The embedded models' own small byte-level BPEs, with Qwen2's special tokens and chat form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
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


TEXT_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train the navigation pair's BPE over ``texts``: any text can be encoded."""
    return _train(texts, SPECIAL, VOCABULARY, _byte_level(), CHAT_TEMPLATE)


def train_text_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train the text family's BPE over ``texts``; every digit is a token of its own.

    Args:
        vocabulary: most entries, special tokens and the 256 bytes included.
    """
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])
    return _train(texts, TEXT_SPECIAL, vocabulary, digits, TEXT_CHAT_TEMPLATE)


def _byte_level() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _train(
    texts: Iterable[str],
    special: Sequence[str],
    vocabulary: int,
    splitter: pre_tokenizers.PreTokenizer,
    chat_template: str,
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "user\n", "assistant\n"], trainer)
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
