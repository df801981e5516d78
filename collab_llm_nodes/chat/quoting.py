"""Constrained decoding of quotes in JSON replies: they follow the quoted lines token by token.

A small model miscopies rare names: it writes "Gemma F leave" for "Gemma Fuller" and continues from
there. So once a quote has begun as some lines of the text do, only their next tokens are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

FIELD = "citation"
"""Field of a reply that holds quotes, separated by semicolons."""
_OPEN = (f'"{FIELD}": "', f'"{FIELD}":"')


class Quoting:
    """Token constraint for the quotes of one reply.

    Args:
        text: its lines may be quoted.
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
        self._begin = 0  # index of the quote's first token in the reply

    def next_tokens(self, reply: Sequence[int]) -> set[int]:
        """Return the tokens that may follow ``reply``, which grows by one token with each call.

        An empty set allows any token: outside quotes, at the begin and end of one, and where no
        line of the text begins as the quote does.
        """
        quote = _open_quote(self._decode(reply))
        if quote is None:
            return set()
        if not quote.strip() or quote.rstrip().endswith(";"):
            self._begin = len(reply)
            return set()
        run = list(reply[self._begin :])
        alike = [line for line in self._lines if list(line[: len(run)]) == run]
        # In a reply, the last token of a line may be merged with the closing mark.
        if any(len(line) <= len(run) + 1 for line in alike):
            return set()
        return {line[len(run)] for line in alike}

    @cached_property
    def _lines(self) -> list[Sequence[int]]:
        """Token ids of the lines, computed for the first quote."""
        lines = [line.strip() for line in self._text.splitlines() if line.strip()]
        # Some vocabularies begin a line with a token without text, which occurs in no quote.
        return [ids if self._decode(ids[:1]) else ids[1:] for ids in self._encode(lines)]


def _open_quote(text: str) -> str | None:
    """Return the unfinished quote at the end of ``text``; None if there is none."""
    for mark in _OPEN:
        _, opened, quote = text.rpartition(mark)
        if opened and '"' not in quote:
            return quote
    return None
