"""Check that an answer names the thing that the instruction asks for.

A model may take another thing for the one asked for: asked for "the red chair", it sees "the red
cone" and drives there. Its own words show it:

    asked for         the answer names      agree
    the red ball      the red ball          yes
    a big red ball    the red balls         yes: nothing contradicts
    the ball          the red ball          yes
    the red ball      the blue ball         no: another colour
    the teal ball     the blue ball         no: "teal" is unknown, so it may be another
    the red chair     the red cone          no
    asdf              the red cone          no
    the red ball      nothing               no

A thing agrees if the instruction has its name, or a synonym of it, and no quality contradicts.
Things that the instruction excludes ("the ball, not the blue one") agree with nothing, and those
that only describe a place ("the ball next to the red cone") are not asked for (``parts.py``). Of
several things one must agree. An answer is about the things of the last sentence that names any:
"I see a red ball near. The blue ball is on the left." is about the blue one. A thing that is said
not to be in view agrees with a search for it, but not with a motion to another thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from collab_llm_nodes.errors import quoted
from collab_llm_nodes.robot.asking import asking
from collab_llm_nodes.robot.grammar import Kind, ParsedAction
from collab_llm_nodes.robot.naming import Named
from collab_llm_nodes.robot.observations import FUNCTION_WORDS, QUALITIES, THINGS
from collab_llm_nodes.robot.parts import parts_of
from collab_llm_nodes.robot.words import plain_word, plain_words

_WORD_OR_MARK = re.compile(r"\w+(?:['\N{RIGHT SINGLE QUOTATION MARK}]\w+)?|[^\w\s]")
_LONGEST = 80  # characters of what was asked for, in a message
# fmt: off
_CLASSES = tuple(
    frozenset(map(plain_word, qualities.split()))
    for qualities in (
        "beige black blue brown golden gray green orange pink purple red silver turquoise white"
        " yellow",
        "big small",
        "metal plastic wooden",
        "round square",
    )
)
"""Qualities that exclude each other, unless both are said."""
_ANY_QUALITY = {"nearest", "closest", "other", "same", "nice", "particular", "visible", "target"}
"""Words before a name that do not describe the thing."""
_PRONOUNS = {"one", "ones", "thing", "things", "something", "anything", "everything"}
_ANYTHING = {"thing", "object", "item", "something", "anything"}
"""Names of every thing: "the red thing"."""
_NAMELESS = FUNCTION_WORDS | {
    "some", "way", "cm", "m", "meter", "meters", "metre", "metres", "feet",
}
# fmt: on
_NEGATIONS = {"no", "not", "cannot", "nothing", "can't", "isn't", "aren't", "don't"}
_SENTENCE_ENDS = {".", "!", ";"}
_CLAUSE_ENDS = {"but", "so", "then", "hence", "thus", "therefore"}

_QUALITIES = {*map(plain_word, QUALITIES.split())}
_KNOWN = {*map(plain_word, THINGS.split())}
_QUALITY = rf"(?:{'|'.join(QUALITIES.split())})\b"
_SAID_AFTER = re.compile(
    rf"\b(\w+)(?: (?:that|which) (?:is|are)| in) ({_QUALITY}(?:,? (?:and )?{_QUALITY})*|\w+\b)"
)
"""A quality behind the name, known or not: "the ball that is red", "the ball in teal"."""
_COLOURED = re.compile(rf"\b({_QUALITY})[ -](?:colou?r(?:ed)?|one)\b(?= \w)")
_LISTED = re.compile(rf"\b({_QUALITY}),\s*(?={_QUALITY})", re.IGNORECASE)
"""A comma between qualities of one thing: "the red, round ball"."""
_LISTING = re.compile(
    rf"\b((?:{'|'.join(THINGS.split())})s?) (?:and|or)\b(?! not\b)", re.IGNORECASE
)
"""A thing in a list of things without articles: "red ball and blue box"."""
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
        parts = asking(instruction)
        asked, excluded = _parts(parts.asked)
        self._asked, self._excluded = _things_in(asked), _things_in(excluded, excluded=True)
        for told in parts.told:
            self._excluded += _things_in(_parts(told)[1], excluded=True)
        if self._excluded and not self._asked and _ANYTHING.intersection(asked.split()):
            self._asked = [_Thing("", frozenset())]  # "anything but the red cone"
        self._said = quoted(instruction) if parts.asked else "nothing now"
        for (*others, name), *more in Named(asked).things:
            if not more and plain_word(name) in _KNOWN:
                self._said = f"the {' '.join((*others, name))}"

    def objection(self, action: ParsedAction) -> str:
        """Return how the answer of ``action`` contradicts the instruction, in words.

        Empty if a thing that it names agrees with a thing asked for, and more so than with an
        excluded one.
        """
        judged = _reason(action)
        if any(_match(self._asked, t) > _match(self._excluded, t) for t in judged):
            return ""
        named = ", ".join(dict.fromkeys(f"the {thing.said}" for thing in judged))[:_LONGEST]
        return f"asked for {self._said}, the answer names {named or 'no thing'}"


def things_in_view(reason: str, instruction: str) -> list[str]:
    """Return the names of the things that ``reason`` says are in view, such as "red ball".

    They are known ones, and those that the instruction names; none without an instruction.
    """
    asked = {*map(plain_word, _WORD_OR_MARK.findall(plain_words(instruction)))}
    things = [thing for seen, _ in _things_of(reason) for thing in seen]
    return [t.said for t in things if asked and (t.name in _KNOWN or t.name in asked)]


def _parts(text: str) -> tuple[str, str]:
    """Return the words of ``text``, in plain ones, that name things asked for and excluded."""
    plain = _LISTED.sub(r"\1 ", plain_words(text))
    plain = _SAID_AFTER.sub(_before_the_name, _COLOURED.sub(r"\1", plain))
    return parts_of(plain, _QUALITIES | _KNOWN)


def _before_the_name(match: re.Match[str]) -> str:
    """Return "red ball" for "ball that is red"; "ball in sight" as it is."""
    name, quality = match.groups()
    describes = quality not in FUNCTION_WORDS and Named(quality).things and Named(name).things
    return f"{quality} {name}" if describes else match.group()


def _things_in(text: str, *, excluded: bool = False) -> list[_Thing]:
    """Return the things that a part of an instruction names.

    A quality alone is a name only beside a word such as "one": "the red one", but "find Ruby".

    Args:
        excluded: return all that it may name: in doubt more is excluded.
    """
    anything = excluded or not _PRONOUNS.isdisjoint(text.split())
    things = list[_Thing]()
    apart, names = set[str](), list[list[str]]()
    for alternative in reversed(Named(_LISTING.sub(r"\1, ", text)).things):
        following = names
        names = [[plain_word(word) for word in name] for name in alternative]
        # "the ball that is red", "something red"
        apart = {w for name in names if _QUALITIES.issuperset(name) for w in name}
        names = [name for name in names if not _QUALITIES.issuperset(name)]
        if not names:  # "the red or the blue ball"
            names = [["anything"]] if anything else [name[-1:] for name in following]
        for name in names:
            readings = [*_readings(name, apart)]
            things += readings if excluded else readings[:1]
    found = {word for thing in things for word in (thing.name, *thing.words)}
    things += _without_article(text, found)
    return [thing for thing in things if thing.name not in _SIDES]


def _match(things: Iterable[_Thing], seen: _Thing) -> int:
    """Return the most words beside the name that one of ``things`` shares with ``seen``.

    -1: none of them agrees.
    """
    return max((len(t.words & seen.words) for t in things if _agree(t, seen)), default=-1)


def _readings(words: list[str], apart: Iterable[str]) -> Iterator[_Thing]:
    """Yield the things that a name may mean, the likeliest first.

    The thing stands at the end, or before qualities ("ball red"): a "ball pen" is no ball.
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
    for word in map(plain_word, _WORD_OR_MARK.findall(wanted.casefold())):
        if word in _KNOWN - found:
            yield _Thing(word, frozenset(qualities))
        describes = word in _QUALITIES or Named(word).things
        qualities = {*qualities, word} if describes else set()


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


def _reason(action: ParsedAction) -> list[_Thing]:
    """Return the things that an action is because of.

    They are those of the last sentence that names any, since an answer may begin with others that
    are in view. A turn may be a search, as a drive may where nothing is in view; a stop is because
    of a thing in view.
    """
    sentences = [(seen, missed) for seen, missed in _things_of(action.words) if seen or missed]
    in_view = [(seen, list[_Thing]()) for seen, _ in sentences if seen]
    if action.kind is Kind.STOP or (in_view and action.kind is not Kind.TURN):
        sentences = in_view
    return [thing for part in sentences[-1:] for things in part for thing in things]


def _things_of(reason: str) -> Iterator[tuple[list[_Thing], list[_Thing]]]:
    """Yield the things that each sentence says are in view, and those that are not."""
    seen, missed = list[_Thing](), list[_Thing]()
    clause, phrase, negated = list[_Thing](), list[str](), False
    for word in [*_WORD_OR_MARK.findall(plain_words(reason)), "."]:
        word = word.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        ends = not word[0].isalnum() or word in _CLAUSE_ENDS
        joins = word == "and"
        names = word not in _NAMELESS and not word[0].isdigit()
        if names and not ends and not joins:
            phrase.append(word)
            continue
        if joins and phrase and _QUALITIES.issuperset(map(plain_word, phrase)):
            continue  # "the red and white sign"
        clause += _named(phrase)
        phrase = []
        negated = negated or word in _NEGATIONS
        if ends or joins:
            (missed if negated else seen).extend(clause)
            clause, negated = [], False
        if word in _SENTENCE_ENDS:
            yield seen, missed
            seen, missed = [], []


def _named(phrase: list[str]) -> list[_Thing]:
    """Return the thing that words without a function word between them name, if they name one."""
    words = [plain_word(word) for word in phrase]
    names = [word for word in words if word not in _QUALITIES]
    if not names:
        return []
    name = names[-1]
    return [_Thing(name, frozenset(words) - {name}, " ".join(phrase))]
