"""Vocabularies of models, which must agree before two models exchange token ids.

A draft's may be the beginning of its target's, if only added tokens follow: so tokenizers grow from
one version of a model to the next (Qwen2-VL's 151657 tokens are the first of Qwen2.5-VL's).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from transformers import GenerationConfig, PreTrainedTokenizerBase

from collab_llm_nodes.errors import ConfigError, ModelError, VocabularyMismatch

NamedHash = tuple[str, str]
"""A model's name, for people, and its :func:`vocabulary_hash`."""


def vocabulary_size(tokenizer: PreTrainedTokenizerBase, rows: int | None = None) -> int:
    """Return the number of ids in use: the highest token id + 1, at most ``rows``.

    Logits may be wider: Qwen2-VL pads 151657 tokens to 151936 (2B) or 152064 (7B) rows. They may be
    narrower, too: the tokenizers of Llama 2 and Gemma 3 1B add a token that the model has no row
    for. Exchanged ids stay below it.

    Args:
        rows: of the model's LM head; None: of no model.
    """
    size = max(tokenizer.get_vocab().values()) + 1
    return size if rows is None else min(size, rows)


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase, rows: int | None = None) -> str:
    """Return a SHA-256 over the tokens and their ids, by which two models compare them.

    Whether a token is marked special does not count: checkpoints of one family differ in it.

    Args:
        rows: as of ``vocabulary_size``; tokens beyond them do not count.
    """
    *_, own = shared_sizes(tokenizer, rows)
    return own


def shared_sizes(tokenizer: PreTrainedTokenizerBase, rows: int | None = None) -> dict[str, int]:
    """Return the vocabularies that a draft for this tokenizer's model may have.

    These are its own, which comes last, and those that lack some of the added tokens at its end.

    Args:
        rows: as of ``vocabulary_size``; tokens beyond them do not count.

    Returns:
        Their hashes, each with the number of ids that draft and target share.
    """
    size = vocabulary_size(tokenizer, rows)
    tokens = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i < size)
    added = tokenizer.added_tokens_decoder
    end = 1 + max((i for i, _ in tokens if i not in added), default=-1)
    known = json.dumps([token for token in tokens if token[0] < end])
    digest = hashlib.sha256(known[:-1].encode())  # of a list that goes on
    found: dict[str, int] = {}

    def closed() -> str:
        whole = digest.copy()
        whole.update(b"]")
        return whole.hexdigest()

    for i, token in tokens:
        if i >= end:
            found[closed()] = i
            digest.update(f", {json.dumps([i, token])}".encode())
    found[closed()] = size
    return found


def check_rows(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Refuse a tokenizer that reads plain text as tokens which the model has no rows for.

    Added tokens beyond the rows, and padding that no text becomes, are harmless: ``encode`` refuses
    the prompts that spell them.

    Raises:
        ModelError: there is such a token; the tokenizer belongs to another model.
    """
    added = tokenizer.added_tokens_decoder
    for token, index in tokenizer.get_vocab().items():
        if index < rows or index in added:
            continue
        text = tokenizer.convert_tokens_to_string([token])
        if index in tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise ModelError(
                f"{vocabulary_size(tokenizer)} tokens but only {rows} logits, and text becomes"
                f" token {index} ({token!r})",
                field="path",
                remedy="the tokenizer beside the weights belongs to another model",
            )


def control_tokens(tokenizer: PreTrainedTokenizerBase, rows: int | None = None) -> tuple[str, ...]:
    """Return the tokens that the text of a request may not contain.

    They end turns, begin them, or stand for images: special tokens, and those that the chat
    template writes. Gemma's vocabulary adds line feeds and HTML tags, too; these are mere text.

    Args:
        rows: as of ``vocabulary_size``; no text may spell an added token beyond them.
    """
    size = vocabulary_size(tokenizer, rows)
    templates = tokenizer.chat_template or ""
    written = templates if isinstance(templates, str) else "".join(templates.values())
    special = {*tokenizer.all_special_ids}
    return tuple(
        token.content
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special
        or index in special
        or index >= size
        or (token.content in written and token.content.strip())
    )


def end_tokens(
    generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase, size: int
) -> frozenset[int]:
    """Return the tokens that end an answer: a model's, and its tokenizer's.

    Args:
        size: the model's ``vocabulary_size``; no answer has ids beyond it.
    """
    configured = generation.eos_token_id
    found = set(configured) if isinstance(configured, list) else {configured}
    found.add(tokenizer.eos_token_id)
    return frozenset(t for t in found if t is not None and t < size)


def check_same(draft_hash: str, target_hash: str, *, draft: str, target: str) -> None:
    """Compare two ``vocabulary_hash`` values; ``draft`` and ``target`` are names for people.

    Raises:
        VocabularyMismatch: they differ.
    """
    if draft_hash != target_hash:
        raise _mismatch(draft_hash, target_hash, draft, target)


def shared_size(draft_hash: str, sizes: Mapping[str, int], *, draft: str, target: str) -> int:
    """Return the number of ids that a draft and a target share.

    Args:
        sizes: the target's ``shared_sizes``.
        draft, target: names for people.

    Raises:
        VocabularyMismatch: the draft's vocabulary is neither the target's nor its beginning.
    """
    if draft_hash not in sizes:
        *_, own = sizes
        raise _mismatch(draft_hash, own, draft, target)
    return sizes[draft_hash]


def _mismatch(draft_hash: str, target_hash: str, draft: str, target: str) -> VocabularyMismatch:
    return VocabularyMismatch(
        f"draft {draft} ({draft_hash[:12] or 'none'}) and target {target} ({target_hash[:12]})"
        " have different vocabularies",
        field="vocabulary",
        remedy="use two models of one family that share a tokenizer (docs/models.md), and one"
        " version of this package on both sides",
    )


def check_one_vocabulary(first: NamedHash, others: Iterable[NamedHash], field: str) -> None:
    """Refuse models that cannot take roles of one protocol together.

    Args:
        others: compared with ``first``, one after another.
        field: setting that names ``others``; ``{}`` in it becomes the index of one of them.

    Raises:
        ConfigError: two vocabularies differ; it names both models.
    """
    name, own = first
    for i, (other, found) in enumerate(others):
        if found != own:
            raise ConfigError(
                f"{other} ({found[:12]}) and {name} ({own[:12]}) have different tokenizers",
                field=field.format(i),
                remedy="use models of one family that share a tokenizer",
            )
