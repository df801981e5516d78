"""Samples as token ids with a weight each, chats or raw text, and rows of them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.training.text.passages import Quote, Quoted
from collab_llm_lab.training.text.samples import Sample
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.tokenizer import JOINER, OPENING, TEXT_SPECIAL
from collab_llm_nodes.models.turns import Turn

WEIGHTS = np.array([0.0, 0.2, 1.0, 5.0], np.float32)
"""Weight of a token in the loss, by its class: padding, asked, answered, answered in few words."""
PAD, ASKED, ANSWERED, SHORT = range(4)
SHORT_ANSWER = 24
"""Answers of up to this many tokens count more: else a passage drowns the one word it is for."""

NOWHERE = -1
Document = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids uint16 [n], classes uint8 [n] and sources int16 [n]: the place in the document of the token
that the next one is copied from, NOWHERE where that is not known."""


def prompt_text(turns: Sequence[Turn]) -> str:
    """Return a chat as the template writes it, ready for the assistant's answer."""
    return "".join(_turn_text(turn) for turn in turns) + "<|im_start|>assistant\n"


def _turn_text(turn: Turn) -> str:
    return f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n"


def raw_text(sample: Sample) -> str:
    """Return a sample as plain text without roles, as benchmarks continue it."""
    return "\n".join(turn.content for turn in sample.turns)


Encoded = tuple[str, Sequence[int], Sequence[int]]
"""A text, the ids of its tokens and the places in it at which they begin."""


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
            # The tokenizer counts a joiner, and the word after it, from the mark before them.
            after_mark = (joined or number == self._joiner) and text[start] in OPENING
            places.append(start + after_mark)
            joined = number in self._joining
        return places

    def chats(self, samples: Sequence[Sample]) -> list[Document]:
        """Return each chat, ``<|endoftext|>`` at the end.

        Prompt and answers are encoded apart, so that the ids are those that a prompt has when the
        model is used.
        """
        pieces: list[str] = []  # of each sample: a prompt, its answer, ..., and the end
        ends = []
        for sample in samples:
            asked = ""
            for turn in sample.turns:
                _refuse_control_tokens(turn.content)
                if turn.role == "assistant":
                    pieces += [asked + "<|im_start|>assistant\n", turn.content + "<|im_end|>"]
                    asked = "\n"
                else:
                    asked += _turn_text(turn)
            pieces.append(asked + "<|endoftext|>")
            ends.append(len(pieces))
        encoded = [
            (piece, *found)
            for piece, found in zip(pieces, self.encode_with_places(pieces), strict=True)
        ]
        return [
            self._chat(encoded[first:end], sample.quoted)
            for sample, first, end in zip(samples, [0, *ends], ends, strict=False)
        ]

    def _chat(self, pieces: Sequence[Encoded], quoted: Quoted) -> Document:
        """Return the chat of ``pieces``, a prompt and its answer in turn."""
        ids: list[int] = []
        kinds: list[int] = []
        sources: list[int] = []
        quotes = iter(quoted)
        for number, piece in enumerate(pieces):
            own = piece[1]
            sources += [NOWHERE] * len(own)
            if number % 2:
                kinds += [SHORT if len(own) <= SHORT_ANSWER else ANSWERED] * len(own)
                for quote in next(quotes, ()):
                    for token, source in self._copied(quote, pieces[0], piece):
                        sources[len(ids) + token - 1] = source  # a place says the next token
            else:
                kinds += [ASKED] * len(own)
            ids += own
        return np.array(ids, np.uint16), np.array(kinds, np.uint8), np.array(sources, np.int16)

    def _copied(self, quote: Quote, prompt: Encoded, answer: Encoded) -> Iterator[tuple[int, int]]:
        """Yield the tokens of ``answer`` that are copied, each with the token of ``prompt``.

        Nothing is yielded if the quoted words stand nowhere, or at several places of their line.
        """
        (text, ids, _), (reply, said, places) = prompt, answer
        line, here = text.find(quote.line), reply.rfind(quote.words)
        within = [match.start() for match in _whole_words(quote.words).finditer(quote.line)]
        if line < 0 or here < 0 or len(within) != 1:
            return
        source, token = self._token_at(prompt, line + within[0]), self._token_at(answer, here)
        while token < len(said) and places[token] < here + len(quote.words):
            if ids[source] != said[token]:
                return
            yield token, source
            source, token = source + 1, token + 1

    def _token_at(self, encoded: Encoded, place: int) -> int:
        """Return the first token of the word at ``place``, which may begin at the space before."""
        text, ids, starts = encoded
        token = bisect_left(starts, place - (text[place - 1 : place] == " "))
        while ids[token] in self._joining:
            token += 1
        return token

    def raw(self, samples: Sequence[Sample]) -> list[Document]:
        """Return the samples as raw text, all of it to be learnt."""
        for sample in samples:
            for turn in sample.turns:
                _refuse_control_tokens(turn.content)
        encoded = self.encode([raw_text(sample) + "<|endoftext|>" for sample in samples])
        return [
            (
                np.array(ids, np.uint16),
                np.full(len(ids), ANSWERED, np.uint8),
                np.full(len(ids), NOWHERE, np.int16),
            )
            for ids in encoded
        ]


def _whole_words(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(words)}(?!\w)")


def _refuse_control_tokens(text: str) -> None:
    if "<|" in text and any(token in text for token in TEXT_SPECIAL):
        raise InvalidInput(
            "contains a control token", field="turns", remedy="leave the tokens <|...|> out"
        )


def pack(
    documents: Iterable[Document], length: int, rows: int, padding: int, waiting: int = 256
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids, classes and sources [rows, length], from as many documents as are needed.

    Each row begins with a document and holds whole ones only. It takes the longest waiting document
    that still fits, until none does; the rest of it is ``padding`` of class 0. Documents longer
    than a row are left out. Sources are places in a row.

    Args:
        waiting: documents to choose from; more leave less padding.
    """
    source = iter(documents)
    ids = np.full((rows, length), padding, np.uint16)
    kinds = np.zeros((rows, length), np.uint8)
    sources = np.full((rows, length), NOWHERE, np.int16)
    pool: list[Document] = []
    for row in range(rows):
        used = 0
        while True:
            while len(pool) < waiting and (document := next(source, None)) is not None:
                if 0 < len(document[0]) <= length:
                    pool.append(document)
            # First the oldest document, so that none waits for ever; then the longest that fits.
            best = 0 if not used and pool else _longest(pool, length - used)
            if best < 0:
                break
            tokens, classes, places = pool.pop(best)
            here = slice(used, used + len(tokens))
            ids[row, here] = tokens
            kinds[row, here] = classes
            sources[row, here] = np.where(places >= 0, places + used, NOWHERE)
            used += len(tokens)
    return ids, kinds, sources


def _longest(pool: list[Document], room: int) -> int:
    """Return the index of the longest document of at most ``room`` tokens, -1 if there is none."""
    best, longest = -1, 0
    for index, (tokens, *_) in enumerate(pool):
        if longest < len(tokens) <= room:
            best, longest = index, len(tokens)
    return best
