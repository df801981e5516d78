"""Samples as token ids with a weight each: chats, and raw text for continuation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.tokenizer import JOINER, OPENING, TEXT_SPECIAL
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.training.text.samples import Sample

WEIGHTS = np.array([0.0, 0.2, 1.0, 5.0], np.float32)
"""Weight of a token in the loss, by its class: padding, asked, answered, answered in few words."""
PAD, ASKED, ANSWERED, SHORT = range(4)
SHORT_ANSWER = 24
"""Answers of up to this many tokens count more: else a passage drowns the one word it is for."""


def prompt_text(turns: Sequence[Turn]) -> str:
    """Return a chat as the template writes it, ready for the assistant's answer."""
    return "".join(_turn_text(turn) for turn in turns) + "<|im_start|>assistant\n"


def _turn_text(turn: Turn) -> str:
    return f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n"


def raw_text(sample: Sample) -> str:
    """Return a sample as plain text without roles, as benchmarks continue it."""
    return "\n".join(turn.content for turn in sample.turns)


class Renderer:
    """Token ids and classes of samples; one encoding call for many of them.

    Raises (in its methods):
        InvalidInput: a text that contains one of the tokenizer's control tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        self.end = int(self._backend.token_to_id("<|im_end|>"))
        self.text_end = int(self._backend.token_to_id("<|endoftext|>"))
        joiner = ByteLevel(add_prefix_space=False).pre_tokenize_str(JOINER)[0][0]
        vocabulary = self._backend.get_vocab()
        self._joiner = vocabulary.get(joiner)
        self._joining = {n for token, n in vocabulary.items() if token.endswith(joiner)}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; control tokens in it count as such."""
        return [found.ids for found in self._backend.encode_batch_fast(list(texts))]

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return the ids of each text, and the place in it at which each token begins.

        A word that follows a space begins at the space. A joiner begins where its word does.
        """
        found = self._backend.encode_batch(list(texts))
        return [
            (each.ids, self._places(text, each.ids, each.offsets))
            for text, each in zip(texts, found, strict=True)
        ]

    def _places(
        self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> list[int]:
        places, joined = [], False
        for number, (start, _) in zip(ids, offsets, strict=True):
            # The tokenizer counts a joiner, and the word behind it, from the mark before them.
            behind = (joined or number == self._joiner) and text[start] in OPENING
            places.append(start + behind)
            joined = number in self._joining
        return places

    def chats(self, samples: Sequence[Sample]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids (uint16) and classes (uint8) of each chat, ``<|endoftext|>`` at the end.

        Prompt and answers are encoded apart, so that the ids are those that a prompt has when the
        model is used.
        """
        pieces: list[str] = []
        answers: list[bool] = []
        ends = []
        for sample in samples:
            asked = ""
            for turn in sample.turns:
                _refuse_control_tokens(turn.content)
                if turn.role == "assistant":
                    pieces += [asked + "<|im_start|>assistant\n", turn.content + "<|im_end|>"]
                    answers += [False, True]
                    asked = "\n"
                else:
                    asked += _turn_text(turn)
            pieces.append(asked + "<|endoftext|>")
            answers.append(False)
            ends.append(len(pieces))
        encoded = self.encode(pieces)
        found, first = [], 0
        for end in ends:
            ids, kinds = [], []
            for piece, answer in zip(encoded[first:end], answers[first:end], strict=True):
                ids += piece
                said = SHORT if len(piece) <= SHORT_ANSWER else ANSWERED
                kinds += [said if answer else ASKED] * len(piece)
            found.append((np.array(ids, np.uint16), np.array(kinds, np.uint8)))
            first = end
        return found

    def raw(self, samples: Sequence[Sample]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and classes of the samples as raw text, all of it to be learnt."""
        for sample in samples:
            for turn in sample.turns:
                _refuse_control_tokens(turn.content)
        encoded = self.encode([raw_text(sample) + "<|endoftext|>" for sample in samples])
        return [
            (np.array(ids, np.uint16), np.full(len(ids), ANSWERED, np.uint8)) for ids in encoded
        ]


def _refuse_control_tokens(text: str) -> None:
    if "<|" in text and any(token in text for token in TEXT_SPECIAL):
        raise InvalidInput(
            "contains a control token", field="turns", remedy="leave the tokens <|...|> out"
        )
