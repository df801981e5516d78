"""Text of an answer that grows token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no whole character, yet or ever."""


class Detokeniser:
    """The text of the tokens so far, and where the text of each of them ends.

    Args:
        decode: the model's own, from token ids to text.
        begun: text before the first token, such as the thought that a chat template has begun.

    Attributes:
        text: of the tokens of the last :meth:`update`.
        ends: [tokens] index in ``text`` after the last character of each token. A character of
            several tokens belongs to the last of them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], begun: str = "") -> None:
        self._decode = (lambda tokens: begun + decode(tokens)) if begun else decode
        self.text = ""
        self.ends: tuple[int, ...] = ()

    def update(self, tokens: Sequence[int], *, final: bool = False) -> None:
        """Take in the whole answer so far; only tokens that are new are decoded one by one.

        Half a character at the end is left out until its other bytes come, or until ``final``.
        """
        text = self._decode(tokens)
        if not final:
            text = text.rstrip(REPLACEMENT)
        ends = list(self.ends[:-1])  # the last one's was that of the whole text
        for n in range(len(ends) + 1, len(tokens)):
            begun = self._decode(tokens[:n])
            before = ends[-1] if ends else 0
            ends.append(before if begun.endswith(REPLACEMENT) else min(len(begun), len(text)))
        self.text = text
        self.ends = (*ends, len(text)) if tokens else ()
