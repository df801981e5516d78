"""Quotes in JSON replies that follow the quoted lines token by token.

A small model miscopies rare names: it writes "Gemma F leave" for "Gemma Fuller", and goes on from
there. So, once a quote has begun as lines of the text do, only their next tokens may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

FIELD = "citation"
"""The field of a reply that holds quotes, several of them with semicolons between."""
_OPEN = (f'"{FIELD}": "', f'"{FIELD}":"')


class Quoting:
    """The quotes of one reply.

    Args:
        text: with the lines that may be quoted.
        encode: returns the token ids of each of several texts.
        decode: returns the text of token ids.
    """

    def __init__(
        self,
        text: str,
        encode: Callable[[list[str]], Sequence[Sequence[int]]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._text, self._encode, self._decode = text, encode, decode
        self._begin = 0  # place in the reply of the quote's first token

    def next_tokens(self, reply: Sequence[int]) -> set[int]:
        """Return the tokens that may follow ``reply``, which is one longer with each call.

        Empty where any may: outside quotes, at the begin and end of one, and where the text has no
        line that begins so.
        """
        quote = _open_quote(self._decode(reply))
        if quote is None:
            return set()
        if not quote.strip() or quote.rstrip().endswith(";"):
            self._begin = len(reply)
            return set()
        run = list(reply[self._begin :])
        alike = [line for line in self._lines if list(line[: len(run)]) == run]
        # The last token of a line may be another one in a reply: with the closing mark, say.
        if any(len(line) <= len(run) + 1 for line in alike):
            return set()
        return {line[len(run)] for line in alike}

    @cached_property
    def _lines(self) -> list[Sequence[int]]:
        """Token ids of the lines; most replies quote none, and never need them."""
        lines = [line.strip() for line in self._text.splitlines() if line.strip()]
        # A mark without text, of the kind that begins a line in some vocabularies, is in no quote.
        return [ids if self._decode(ids[:1]) else ids[1:] for ids in self._encode(lines)]


def _open_quote(text: str) -> str | None:
    """Return the part of a quote that ``text`` ends in; None if it ends outside of any."""
    for mark in _OPEN:
        _, opened, quote = text.rpartition(mark)
        if opened and '"' not in quote:
            return quote
    return None
