"""Sentence templates: alternatives, optional parts and fields, filled in from a seed.

``"(Please|Kindly) close the {room}[ now]."`` is a template. ``(a|b)`` chooses one part, ``[a]``
takes the part or leaves it out, ``{room}`` is a field. Round brackets without ``|`` and a ``|``
outside brackets are literal. Templates are compiled when a module is imported; filling one in
takes some microseconds.

A speaker's ``Voice`` makes the choices. Most of them follow from a few facts in the prompt
(weekday, room, mood), so a model that has learnt the sub-domain can predict them; the rest are
free.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_TOKEN = re.compile(r"[^()\[\]|{}]+|[()\[\]|]|\{\w+\}")
_MARKS = re.compile(r"\{\w+\}('s)?|[()\[\]|]")
_WORD = re.compile(r"[^\W_]+(?:[-'.:][^\W_]+)*")


def words(text: str) -> list[str]:
    """Return the words, numbers and codes of `text` in lower case, without possessive endings."""
    return [w.removesuffix("'s") for w in _WORD.findall(text.lower().replace("\u2019", "'"))]


def says(text: str, part: str) -> bool:
    """Return True if `text` contains the words of `part` in sequence."""
    return f" {' '.join(words(part))} " in f" {' '.join(words(text))} "


class Voice:
    """The choices of one speaker.

    Args:
        rng: source of the free choices.
        keys: small numbers of the facts that decide the other choices; each choice looks at one.
        freedom: share of the choices that are free. 1 makes all of them free.
    """

    __slots__ = ("_free", "_keys", "rng")

    def __init__(self, rng: random.Random, keys: Sequence[int] = (), freedom: float = 0.1) -> None:
        self.rng = rng
        self._keys = tuple(2 * key + 1 for key in keys)
        self._free = freedom if keys else 1.0

    def choose(self, site: int, count: int) -> int:
        """Return which of `count` alternatives to take at the place numbered `site`."""
        if self._free and self.rng.random() < self._free:
            return int(self.rng.random() * count)
        key = self._keys[site % len(self._keys)]
        return ((site * key) >> 6) % count


class Phrase:
    """A compiled template."""

    __slots__ = ("parts", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        tokens = _TOKEN.findall(text)
        if "".join(tokens) != text:
            raise ValueError(f"not a template: {text!r}")
        parts: Parts = []
        end = -1
        while end < len(tokens) - 1:
            more, end = _sequence(tokens, end + 1)
            if end < len(tokens) and tokens[end] != "|":
                raise ValueError(f"a bracket too many in {text!r}")
            parts += more if end == len(tokens) else [*more, "|"]
        self.parts = parts

    def say(self, voice: Voice, fields: Mapping[str, str]) -> str:
        """Return the sentence with its choices made and its fields filled in."""
        out: list[str] = []
        _fill(self.parts, voice, fields, out)
        return "".join(out)


class Field(NamedTuple):
    """A place that a value is filled in."""

    name: str


class Choice(NamedTuple):
    """Alternatives, one of which is taken; ``site`` is the number by which a voice decides."""

    site: int
    alternatives: list[Parts]


Parts = list[str | Field | Choice]
"""Literal texts, fields and choices, in order."""


def _sequence(tokens: list[str], i: int) -> tuple[Parts, int]:
    """Read parts from `tokens[i:]` up to the end of the alternative; return them and its place."""
    parts: Parts = []
    while i < len(tokens) and tokens[i] not in ("|", ")", "]"):
        token = tokens[i]
        if token in ("(", "["):
            start, close = i, ")" if token == "(" else "]"
            alternatives: list[Parts] = [] if token == "(" else [[]]
            while True:
                option, i = _sequence(tokens, i + 1)
                alternatives.append(option)
                if i >= len(tokens) or tokens[i] not in ("|", close):
                    raise ValueError(f"a bracket too few in {''.join(tokens)!r}")
                if tokens[i] == close:
                    break
            if len(alternatives) == 1:
                parts += ["(", *alternatives[0], ")"]
            else:
                site = zlib.crc32("".join(tokens[: i + 1]).encode()) + start
                parts.append(Choice(site, alternatives))
        elif token[0] == "{":
            parts.append(Field(token[1:-1]))
        else:
            parts.append(token)
        i += 1
    return parts, i


def _fill(parts: Parts, voice: Voice, fields: Mapping[str, str], out: list[str]) -> None:
    for part in parts:
        if isinstance(part, str):
            out.append(part)
        elif isinstance(part, Choice):
            alternatives = part.alternatives
            _fill(alternatives[voice.choose(part.site, len(alternatives))], voice, fields, out)
        else:
            out.append(fields[part.name])


def literal_words(*templates: str) -> set[str]:
    """Return every word that the templates can say without their fields."""
    found: set[str] = set()
    for text in templates:
        found.update(words(_MARKS.sub(" ", text)))
    return found


def compiled(*texts: str) -> tuple[Phrase, ...]:
    """Compile templates that mean the same; a voice chooses one of them."""
    return tuple(Phrase(text) for text in texts)


class Grammar:
    """Compiles templates, and remembers every word that they can say without their fields."""

    def __init__(self) -> None:
        self.words: set[str] = set()

    def __call__(self, *texts: str) -> tuple[Phrase, ...]:
        """Compile templates, as ``compiled`` does, and remember their words."""
        self.words |= literal_words(*texts)
        return compiled(*texts)

    def add_words(self, *texts: str) -> None:
        """Remember the words of `texts`: values that fields of answers take from the grammar."""
        for text in texts:
            self.words.update(words(text))


def say(phrases: Sequence[Phrase], voice: Voice, fields: Mapping[str, str]) -> str:
    """Return one of `phrases`, filled in, with a capital first letter."""
    index = 0
    if len(phrases) > 1:
        index = voice.choose(zlib.crc32(phrases[0].text.encode()), len(phrases))
    text = phrases[index].say(voice, fields)
    return text[:1].upper() + text[1:]


def pick(phrases: Sequence[Phrase], voice: Voice, fields: Mapping[str, str], held_out: bool) -> str:
    """Return a wording of a question, filled in; the last in a list is held out of training."""
    if held_out:
        phrase = phrases[-1]
    else:
        phrase = phrases[int(voice.rng.random() * (len(phrases) - 1))]
    text = phrase.say(voice, fields)
    # A quoted text keeps its small letter: an answer repeats it as it is.
    return text if phrase.text.startswith("{text}") else text[:1].upper() + text[1:]
