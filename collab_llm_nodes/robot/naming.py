"""The things that an English instruction or question names.

    Where did I last see the red balls in the kitchen?      red ball, kitchen

A name is what follows an article or a preposition, without the words that belong to the question
and to no thing. A question without such names ("where is umbrella") names what is left of it.
"""

from __future__ import annotations

import re
from itertools import pairwise

from collab_llm_nodes.robot.words import POSSESSIVE, plain_words, singular

_WORD_OR_MARK = re.compile(r"\w+(?:[-:.'\N{RIGHT SINGLE QUOTATION MARK}]\w+)*|[^\w\s]")
_APOSTROPHE = re.compile(r"['\N{RIGHT SINGLE QUOTATION MARK}]")
# fmt: off
_INTRODUCES_A_NAME = frozenset({
    "a", "an", "the", "this", "that", "these", "those", "my", "your", "our", "his", "her",
    "its", "their", "any", "some", "every", "each", "all", "both", "no", "another", "which",
    "many", "above", "across", "against", "along", "among", "at", "behind", "below", "beneath",
    "beside", "between", "beyond", "by", "during", "for", "in", "inside", "near", "of", "on",
    "onto", "through", "under", "underneath", "with", "within", "without",
})
_JOINS = frozenset({"and", "or", "then"})
_STANDS_FOR_A_NAME = frozenset({
    "i", "you", "he", "she", "it", "we", "they", "me", "him", "us", "them",
})
_SMALL_WORDS = frozenset({
    *_STANDS_FOR_A_NAME, "one", "ones", "who", "whom", "whose", "what", "when", "where", "why",
    "how", "if", "is", "am", "are", "was", "were", "be", "been", "being", "do", "does", "did",
    "done", "has", "have", "had", "having", "can", "could", "may", "might", "must", "shall",
    "should", "will", "would", "let", "not", "to", "from", "into", "about", "around", "towards",
    "over", "up", "down", "out", "off", "next", "there", "here", "so", "as", "than", "also", "too",
    "only", "please", "thank", "thanks", "ok", "okay", "yes", "hello", "hi", "hey", "kindly",
    "dear", "good", "don", "didn", "isn", "wasn", "haven", "hasn", "ahead", "far", "close",
    "somebody", "someone", "everybody", "anyone", "something", "anything", "everything", "nothing",
    "somewhere", "anywhere", "everywhere", "elsewhere", "nowhere", "but", "because", "cause",
    "though", "although", "asap", "sir", "mate", "dude", "bro", "pls", "plz", "thx", "soon",
    "possible",
})
_TIMES = frozenset({
    "now", "again", "already", "ago", "ever", "never", "still", "yet", "today", "yesterday",
    "tonight", "recently", "lately", "just", "last", "latest", "first", "before", "after",
    "since", "until", "while", "once", "immediately", "quick", "quickly", "currently", "always",
    "often", "usually", "sometimes", "carefully", "slowly", "quietly", "gently", "away", "whenever",
    "ready",
})
_VERBS = frozenset({
    "see", "sees", "saw", "seen", "seeing", "spot", "spotted", "notice", "noticed", "observe",
    "observed", "sight", "sighted", "find", "finds", "found", "finding", "look", "looks", "looked",
    "looking", "search", "searching", "seek", "locate", "located", "detect", "detected", "identify",
    "discover", "pinpoint", "scout", "hunt", "track", "meet", "met", "pass", "passed", "visit",
    "appear", "appears", "appeared", "happen", "happened", "happens", "comes", "come", "came",
    "lie", "lies", "lying", "stands", "standing", "stood", "sits", "sitting", "hang", "hangs",
    "hanging", "kept", "stays", "stayed", "remain", "remains", "put", "placed", "lost", "leave",
    "tell", "say", "said", "show", "shown", "give", "given", "state", "know", "known", "knows",
    "remember", "remembers", "recall", "noted", "wonder", "think", "need", "want", "like", "love",
    "feel", "try", "make", "reach", "approach", "get", "gets", "got", "getting", "fetch", "take",
    "bring", "lead", "guide", "go", "goes", "went", "going", "gone", "walk", "walked", "drive",
    "drove", "move", "moved", "run", "travel", "proceed", "navigate", "head", "step", "roll",
    "steer", "aim", "wander", "march", "stroll", "return", "advance", "crawl", "park", "arrive",
    "hurry", "journey", "sprint", "trot", "dash", "hike", "race", "hop", "zoom", "stop", "turn",
    "ask", "asked", "called",
})
"""Verbs of seeing, being, moving and telling."""
_NEVER_IN_A_NAME = _SMALL_WORDS | _TIMES | _VERBS
_ASKED_FOR = frozenset({
    "place", "location", "position", "whereabout", "point", "spot", "distance", "direction",
    "name", "colour", "color", "number", "price", "cost", "date", "time", "sighting",
})
"""Facts of a thing, which are not the end of its name: "the ball's place"."""
_NO_THING_ALONE = _ASKED_FOR | frozenset({
    "room", "side", "way", "thing", "object", "sight", "view", "memory", "record",
    "instruction", "task", "goal", "job", "lot", "robot", "machine", "buddy", "end",
    "beginning", "morning", "afternoon", "evening", "night", "hour", "minute", "second",
    "moment", "day", "week",
})
"""Words that name no thing alone, and may be a part of a name: "the dining room"."""
# fmt: on

_AT_ONCE = re.compile(
    r"\b(?:right|straight) (?=(?:now|away|here|there|this (?:second|minute|moment|instant))\b)",
    re.IGNORECASE,
)
"""A word that belongs to the adverb behind it; elsewhere it names a thing: "the right box"."""

Name = tuple[str, ...]


class Named:
    """The things that a question names.

    Attributes:
        things: alternatives, each with names that belong together, their words in lower case.
            Empty: the question names none.
    """

    def __init__(self, question: str) -> None:
        # Lower case comes last: that of some letters has a mark, which would part the word.
        words = [word.casefold() for word in _WORD_OR_MARK.findall(_AT_ONCE.sub("", question))]
        self.things = _things(words, anywhere=False) or _things(words, anywhere=True)


def thing_of(instruction: str) -> str:
    """Return what an instruction names, such as "the red ball"; all of it without a name.

    It has plain words, as answers and memories of them do: "the red mug" for "the crimson cup".
    """
    things = Named(plain_words(instruction)).things
    names = [" ".join(name) for thing in things for name in thing]
    return ", ".join(f"the {name}" for name in names) or instruction


def _things(words: list[str], *, anywhere: bool) -> tuple[tuple[Name, ...], ...]:
    """Return the things that words name.

    "and" joins words of one name ("the black and white cat"), unless another thing begins behind it
    ("the ball and the box", "the ball and go").

    Args:
        words: lower case, with the marks between them.
        anywhere: a name may begin at each word, not only behind those that introduce one.
    """
    things: list[list[Name]] = [[]]
    name: list[str] = []
    awaited = anywhere
    for word, following in pairwise([*words, ".", "."]):
        joins = word in _JOINS
        awaited = awaited or bool(POSSESSIVE.search(word) and not _ends_a_name(word))
        if awaited and not _ends_a_name(following if joins else word) and (name or not joins):
            name.append(word)
            continue
        if name:
            things[-1] += _whole(name)
            name, awaited = [], anywhere
        if joins:
            things.append([])
        elif word in _INTRODUCES_A_NAME:
            awaited = True
        elif _is_mark(word) or word in _STANDS_FOR_A_NAME:
            awaited = anywhere
    return tuple(tuple(thing) for thing in things if thing)


def _whole(name: list[str]) -> list[Name]:
    """Return the name without what is asked for at its end; none if it names no thing."""
    while name and singular(name[-1]) in _ASKED_FOR:
        name.pop()
    return [] if _NO_THING_ALONE.issuperset(map(singular, name)) else [tuple(name)]


def _ends_a_name(word: str) -> bool:
    begin = _APOSTROPHE.split(word)[0]
    return _is_mark(word) or begin in _INTRODUCES_A_NAME or begin in _NEVER_IN_A_NAME


def _is_mark(word: str) -> bool:
    return not (word[0].isalnum() or word[0] == "_")
