"""Check that an answer names the thing that the instruction asks for.

A model may take another thing for the one asked for: asked for "the red chair", it sees "the red
cone" and drives there. Its own words show it:

    asked for         the answer names      agree
    the red ball      the red ball          yes
    a big red ball    the red balls         yes: nothing contradicts
    the ball          the red ball          yes
    the red ball      the blue ball         no: another colour
    the scarlet ball  the blue ball         no: "scarlet" is unknown, so it may be another
    the red chair     the red cone          no
    asdf              the red cone          no
    the red ball      nothing               no

A thing agrees if the instruction has its name, or a synonym of it, and no quality contradicts.
Things that the instruction excludes ("the ball, not the blue one") agree with nothing, and those
that only describe a place ("the ball next to the red cone") are not asked for (``parts.py``). Of
several things one must agree. A thing that is said not to be in view agrees with a search for it,
but not with a motion to another thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from collab_llm_nodes.errors import quoted
from collab_llm_nodes.robot.grammar import Kind, ParsedAction
from collab_llm_nodes.robot.naming import Named, singular
from collab_llm_nodes.robot.observations import FUNCTION_WORDS, QUALITIES, THINGS
from collab_llm_nodes.robot.parts import parts_of

_WORD_OR_MARK = re.compile(r"\w+(?:['\N{RIGHT SINGLE QUOTATION MARK}]\w+)?|[^\w\s]")
_LONGEST = 80  # characters of what was asked for, in a message
# fmt: off
_SYNONYMS = {
    synonym: words.split()[0]
    for words in (
        "sofa couch", "television tv telly", "bike bicycle", "fridge refrigerator", "bin trash",
        "elevator lift", "cupboard cabinet closet wardrobe", "cup mug", "rug carpet mat",
        "shelf shelve bookshelf bookshelve bookcase", "car vehicle", "ball sphere",
        "box cube crate", "cone pylon", "bottle flask", "picture painting", "door doorway",
        "motorcycle motorbike", "suitcase luggage", "phone telephone", "sack bag",
        "gray grey", "purple violet", "big large huge", "small little tiny",
    )
    for synonym in words.split()[1:]
}
_CLASSES = (
    frozenset({
        "beige", "black", "blue", "brown", "golden", "gray", "green", "orange", "pink", "purple",
        "red", "silver", "turquoise", "white", "yellow",
    }),
    frozenset({"big", "small"}),
    frozenset({"metal", "plastic", "wooden"}),
    frozenset({"round", "square"}),
)
"""Qualities that exclude each other, unless both are said."""
_ANY_QUALITY = {"nearest", "closest", "other", "same", "nice", "particular"}
"""Words before a name that do not describe the thing."""
_ANYTHING = {"thing", "object", "item", "something", "anything"}
"""Names of every thing: "the red thing"."""
_NAMELESS = FUNCTION_WORDS | {
    "some", "way", "cm", "m", "meter", "meters", "metre", "metres", "feet",
}
# fmt: on
_NEGATIONS = {"no", "not", "cannot", "nothing", "can't", "isn't", "aren't", "don't"}
_CLAUSE_ENDS = {"but", "so", "then", "hence", "thus", "therefore"}


def _canonical(word: str) -> str:
    word = singular(word)
    return _SYNONYMS.get(word, word)


_QUALITIES = {*map(_canonical, QUALITIES.split())}
_KNOWN = {*map(_canonical, THINGS.split())}
_QUALITY = rf"(?:{'|'.join(QUALITIES.split())})\b"
_LISTED = re.compile(rf"\b({_QUALITY}),\s*(?={_QUALITY})", re.IGNORECASE)
"""A comma between qualities of one thing: "the red, round ball"."""
_SIDES = frozenset({"front", "back", "left", "right", "top", "bottom", "middle", "center"})
"""Parts of a thing by which a place is described: "the left of the ball"."""


@dataclass(frozen=True)
class _Thing:
    """A thing as it is named; ``words`` are those beside ``name``: qualities, mostly.

    Without a name it is any thing.
    """

    name: str
    words: frozenset[str]
    said: str = ""


class AskedThing:
    """The thing that an instruction names, to compare answers with."""

    def __init__(self, instruction: str) -> None:
        asked, excluded = parts_of(_LISTED.sub(r"\1 ", instruction), _QUALITIES | _KNOWN)
        self._asked, self._excluded = _things_in(asked), _things_in(excluded)
        if self._excluded and not self._asked and _ANYTHING.intersection(asked.split()):
            self._asked = [_Thing("", frozenset())]  # "anything but the red cone"
        self._said = quoted(instruction)
        for (*others, name), *more in Named(asked).things:
            if not more and _canonical(name) in _KNOWN:
                self._said = f"the {' '.join((*others, name))}"

    def objection(self, action: ParsedAction) -> str:
        """Return how the answer of ``action`` contradicts the instruction, in words.

        Empty if a thing that it names agrees with a thing asked for, and more so than with an
        excluded one.
        """
        seen, missed = _things_of(action.words)
        # A turn may be a search; a drive or a stop is because of a thing in view.
        judged = [*seen, *missed] if action.kind is Kind.TURN or not seen else seen
        if any(_match(self._asked, t) > _match(self._excluded, t) for t in judged):
            return ""
        named = ", ".join(dict.fromkeys(f"the {thing.said}" for thing in judged))[:_LONGEST]
        return f"asked for {self._said}, the answer names {named or 'no thing'}"


def _things_in(text: str) -> list[_Thing]:
    """Return the things that a part of an instruction names, in all readings."""
    things = list[_Thing]()
    for alternative in Named(text).things:
        names = [[_canonical(word) for word in name] for name in alternative]
        # "the ball that is red", "something red"
        apart = {w for name in names if _QUALITIES.issuperset(name) for w in name}
        names = [name for name in names if not _QUALITIES.issuperset(name)]
        for name in names or [["anything"]]:
            things += _readings(name, apart)
    found = {word for thing in things for word in (thing.name, *thing.words)}
    things += _without_article(text, found)
    return [thing for thing in things if thing.name not in _SIDES]


def _match(things: Iterable[_Thing], seen: _Thing) -> int:
    """Return the most words beside the name that one of ``things`` shares with ``seen``.

    -1: none of them agrees.
    """
    return max((len(t.words & seen.words) for t in things if _agree(t, seen)), default=-1)


def _readings(words: list[str], apart: Iterable[str]) -> Iterator[_Thing]:
    """Yield the things that a name may mean.

    The thing stands at the end, or before words of no meaning here. Known things at the end make it
    another one: "ball pen".
    """
    for end in range(len(words), 0, -1):
        name = words[end - 1]
        if name not in _QUALITIES:
            yield _Thing(name, frozenset({*words, *apart} - {name}))
        if name in _KNOWN:
            return


def _without_article(wanted: str, found: Set[str]) -> Iterator[_Thing]:
    """Yield the known things that stand in an instruction beside those ``found``, as names without
    an article do: "use your camera to find red ball"."""
    qualities = set[str]()
    for word in map(_canonical, _WORD_OR_MARK.findall(wanted.casefold())):
        if word in _KNOWN - found:
            yield _Thing(word, frozenset(qualities))
        qualities = {*qualities, word} if word in _QUALITIES else set()


def _agree(asked: _Thing, seen: _Thing) -> bool:
    """Return True if nothing says that the two are different things."""
    wanted = asked.words - _ANY_QUALITY
    if not asked.name:
        return True
    if asked.name in _ANYTHING:
        return bool(wanted & seen.words)
    if asked.name != seen.name or any(_differ(wanted & c, seen.words & c) for c in _CLASSES):
        return False
    return wanted <= _QUALITIES or not seen.words or bool(wanted & seen.words)


def _differ(wanted: frozenset[str], seen: frozenset[str]) -> bool:
    return bool(wanted and seen and not wanted & seen)


def _things_of(reason: str) -> tuple[list[_Thing], list[_Thing]]:
    """Return the things that a reason says are in view, and those that are not."""
    seen, missed = list[_Thing](), list[_Thing]()
    clause, phrase, negated = list[_Thing](), list[str](), False
    for word in [*_WORD_OR_MARK.findall(reason.casefold()), "."]:
        word = word.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        ends = not word[0].isalnum() or word in _CLAUSE_ENDS
        joins = word == "and"
        names = word not in _NAMELESS and not word[0].isdigit()
        if names and not ends and not joins:
            phrase.append(word)
            continue
        if joins and phrase and _QUALITIES.issuperset(map(_canonical, phrase)):
            continue  # "the red and white sign"
        clause += _named(phrase)
        phrase = []
        negated = negated or word in _NEGATIONS
        if ends or joins:
            (missed if negated else seen).extend(clause)
            clause, negated = [], False
    return seen, missed


def _named(phrase: list[str]) -> list[_Thing]:
    """Return the thing that words without a function word between them name, if they name one."""
    words = [_canonical(word) for word in phrase]
    names = [word for word in words if word not in _QUALITIES]
    if not names:
        return []
    name = names[-1]
    return [_Thing(name, frozenset(words) - {name}, " ".join(phrase))]
