"""Lenient reader of JSON objects in the replies of chat models.

Models write prose before the object, fence it, forget a bracket, use the wrong quotation marks, or
are cut off at their length limit. :func:`last_object` reads all of that in one pass: its time is
linear in the text, and depth and size are bounded. (Packages that repair JSON need quadratic time:
json-repair 0.64 takes 5 s for 16 kB of ``{"a" {"a" ...``.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from collab_llm_nodes.models.thoughts import answer_of

MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 32
"""Deepest nesting of brackets."""

_START = re.compile(r"""\{(?=\s*["'\u201c\u2018\w])""")
_SKIPPED = re.compile(r"(?:\s+|//[^\n]*|\#[^\n]*)*")
_CLOSING = {'"': '"', "'": "'", "\u201c": "\u201d", "\u2018": "\u2019"}
_UP_TO = {mark: re.compile(rf"[^\\{mark}]*") for mark in _CLOSING.values()}
_BARE_KEY = re.compile(r"\w{1,64}")
_NEXT_KEY = r"""\s*(?:["'\u201c\u2018}]|\w{1,64}\s*:|//|\#|$)"""
# Commas and marks within a text end it only if the object can continue after them.
_KEY_ON_NEXT_LINE = r"""[ \t]*\n\s*["'\u201c]\w{1,64}["'\u201d]\s*:"""
_ENDS_IN_OBJECT = re.compile(rf"\s*(?:\}}|,{_NEXT_KEY}|//|\#|$)|{_KEY_ON_NEXT_LINE}")
_ENDS_IN_LIST = re.compile(r"\s*(?:[],]|//|\#|$)")
_BARE_IN_OBJECT = re.compile(rf"(?:[^,}}\n]|,(?!{_NEXT_KEY}))*")
_BARE_IN_LIST = re.compile(r"[^],}\n]*")
_COMMENT = re.compile(r"\s(?:\#|//)")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.)|$)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_NUMBER = re.compile(r"[-+]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:[eE][-+]?\d{1,4})?")
_WORDS: Mapping[str, Any] = {
    "null": None,
    "none": None,
    "true": True,
    "false": False,
}


@dataclass(frozen=True)
class Found:
    """An object that was found.

    Attributes:
        content: its keys and values; values are those of ``json``.
        mended: the text was not valid JSON.
    """

    content: Mapping[str, Any]
    mended: bool


def last_object(text: str, keys: Collection[str] = ()) -> Found | None:
    """Return the last outermost JSON object in ``text``, reasoning excluded.

    Args:
        keys: only an object with at least one of these counts; empty: any object with a key.

    Returns:
        None if there is none, or ``text`` has more than ``MAX_CHARACTERS``.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = answer_of(text)
    reader = _Reader(text)
    found: tuple[int, int, dict[str, Any]] | None = None
    while start := _START.search(text, reader.place):
        reader.place = start.start()
        try:
            content = reader.read_object(depth=1)
        except _Broken:
            continue
        if content and (not keys or content.keys() & set(keys)):
            found = start.start(), reader.place, content
    if found is None:
        return None
    first, last, content = found
    try:
        return Found(json.loads(text[first:last]), mended=False)
    except ValueError:
        return Found(content, mended=True)


class _Broken(Exception):
    """The text cannot be read as JSON, even leniently."""


class _Reader:
    """Reader of values from left to right; ``place`` never decreases, so its time is linear.

    Attributes:
        place: index in the text of the next character.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.place = 0

    def read_object(self, depth: int) -> dict[str, Any]:
        """Read the object whose bracket is next; the text's end closes it as well.

        Raises:
            _Broken: it is no object, or too deep.
        """
        self._enter(depth)
        content: dict[str, Any] = {}
        while self._goes_on("}"):
            key = self._read_key()
            if self._next() != ":":
                if self._next() == "":  # cut off after the key
                    return content
                raise _Broken
            self.place += 1
            content[key] = self._read_value(depth, _ENDS_IN_OBJECT, _BARE_IN_OBJECT)
        return content

    def _read_list(self, depth: int) -> list[Any]:
        self._enter(depth)
        content = []
        while self._goes_on("]"):
            before = self.place
            content.append(self._read_value(depth, _ENDS_IN_LIST, _BARE_IN_LIST))
            if self.place == before:
                raise _Broken
        return content

    def _enter(self, depth: int) -> None:
        self.place += 1
        if depth > MAX_DEPTH:
            raise _Broken

    def _goes_on(self, bracket: str) -> bool:
        """Skip a comma; return False after the closing ``bracket`` and at the text's end."""
        if self._next() == ",":
            self.place += 1
        if self._next() == bracket:
            self.place += 1
            return False
        return self._next() != ""

    def _next(self) -> str:
        """Return the next significant character, or "" at the text's end."""
        skipped = _SKIPPED.match(self._text, self.place)
        assert skipped is not None
        self.place = skipped.end()
        return self._text[self.place : self.place + 1]

    def _read_key(self) -> str:
        mark = self._next()
        if mark in _CLOSING:
            self.place += 1
            return self._read_text(_CLOSING[mark], None)
        bare = _BARE_KEY.match(self._text, self.place)
        if bare is None:
            raise _Broken
        self.place = bare.end()
        return bare.group()

    def _read_value(self, depth: int, ends: re.Pattern[str], bare: re.Pattern[str]) -> Any:
        mark = self._next()
        if mark == "{":
            return self.read_object(depth + 1)
        if mark == "[":
            return self._read_list(depth + 1)
        if mark in _CLOSING:
            self.place += 1
            return self._read_text(_CLOSING[mark], ends)
        run = bare.match(self._text, self.place)
        assert run is not None
        self.place = run.end()
        return _meaning(_COMMENT.split(run.group(), maxsplit=1)[0].strip())

    def _read_text(self, closing: str, ends: re.Pattern[str] | None) -> str:
        """Read from an opening mark to the closing one.

        Args:
            ends: must match after the closing mark, which otherwise belongs to the text.
        """
        parts: list[str] = []
        while self.place < len(self._text):
            run = _UP_TO[closing].match(self._text, self.place)
            assert run is not None
            parts.append(run.group())
            self.place = run.end()
            escape = _ESCAPE.match(self._text, self.place)
            if escape is not None:
                self.place = escape.end()
                parts.append(_unescaped(escape))
            elif self.place < len(self._text):
                self.place += 1
                if ends is None or ends.match(self._text, self.place):
                    break
                parts.append(closing)
        return "".join(parts)


def _unescaped(escape: re.Match[str]) -> str:
    code, character = escape.groups()
    if code is not None:
        return chr(int(code, 16))
    return _ESCAPED.get(character or "", character or "")


def _meaning(word: str) -> Any:
    """Return the value of a bare ``word``: a constant, a number, or itself."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _NUMBER.fullmatch(word):
        return int(word) if word.lstrip("-+").isdigit() else float(word)
    return word
