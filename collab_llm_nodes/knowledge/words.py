"""The words of a text, as both sides of a search take them."""

from __future__ import annotations

import re
import unicodedata

_WORD = re.compile(r"\w+")


def normal_form(text: str) -> str:
    """Return ``text`` in Unicode's form NFKC, so that equal words have equal characters.

    An umlaut may be one character or two (macOS), and "fi" one or two (many PDFs). Soft hyphens,
    which web pages and PDFs hide within words, are left out.
    """
    return unicodedata.normalize("NFKC", text.replace("\N{SOFT HYPHEN}", ""))


def words(text: str) -> list[str]:
    """Return the words of ``text`` in their order, in lower case and normal form."""
    return _WORD.findall(normal_form(text).lower())
