"""Split an instruction into the things it asks for, excludes, and only refers to.

    find the ball, not the blue one             asks for "the ball", excludes "the blue one"
    stay away from the cone and find the box    asks for "the box", excludes "the cone"
    find the ball next to the red cone          asks for "the ball"
    go next to the red cone                     asks for "the red cone"

An exclusion, or a reference, goes on to the end of the sentence, to a word such as "but", or to the
next verb that asks for something; "and", "or" and a comma before a further thing prolong it.
"""

from __future__ import annotations

import re
from collections.abc import Set

from collab_llm_nodes.robot.naming import Named
from collab_llm_nodes.robot.words import singular

_WORD_OR_MARK = re.compile(r"\w+(?:['-]\w+)*|[^\w\s]")
# fmt: off
_DOING = (
    "following", "going", "driving", "moving", "walking", "running", "heading", "looking",
    "searching", "chasing", "approaching",
)
"""Motions towards a thing: "stop going to it" excludes it, "would you mind going to it" asks."""
_NEUTRAL = (
    "none other than", "nothing but", "no one but", "not only", "in mind", "no problem",
    "no matter", "you mind to", *(f"you mind {doing}" for doing in ("finding", *_DOING)),
    "i leave", "do not mind", "do not hesitate", "do not forget", "do not miss", "do not ignore",
    "do not skip", "do not avoid", "do not leave", "do not worry", "do not you", "why do not",
    "why not", "can not you", "could not you", "will not you", "would not you", "without delay",
    "without fail", "without hesitation", "without stopping", "watch for", "leave for", "leave to",
    "on earth", "in the world", "one of", "any of", "some of", "each of", "all of",
    "if there is no", "if there are no",
    "if there is not", "if no", "if you see no", "if you do not", "if you can not", "can not find",
    "can not see", "do not see", "do not know", "do not lose", "do you not", "is not there a",
    "never stop", "do not stop looking", "do not stop searching", "do not stop before",
    *(f"{what} of" for what in ("pair", "couple", "bunch", "group", "row", "kind", "sort")),
)
"""Phrases that exclude nothing, though their words do in others."""
_NOT = (
    "not", "no", "never", "nor", "neither", "none", "nothing", "nobody", "forbid", "refuse to",
    "under no circumstances", "do not you dare", "forbidden to", "forbidden for you to",
    *(f"{be}not {may} to" for be in ("", "is ", "are ") for may in ("allowed", "permitted")),
    "nein", "nie", "nej", "nope", "nicht", "kein", "keine", "keinen", "keinem", "niemals", "pas",
    "jamais", "non", "ne", "nunca", "niet", "geen", "ikke", "inte",
)
"""Also in other languages, whose names of things may be English ones."""
_WITHOUT = (
    "avoid", "avoiding", "ignore", "ignoring", "skip", "skipping", "shun", "shunning", "dodge",
    "dodging", "evade", "evading", "bypass", "bypassing", "circumvent", "disregard", "disregarding",
    "omit", "omitting", "exclude", "excluding", "neglect", "overlook", "forget", "forget about",
    "forgetting", "beware", "beware of", "watch out for", "watch out", "mind", "careful of",
    "careful with", "careful about", "wary of", "afraid of", "leave", "leaving", "except",
    "except for", "excepting", "apart from", "aside from", "other than", "different from",
    "different than", "rather than", "sooner than", "instead of", "in place of", "in lieu of",
    "as opposed to", "opposed to", "unlike", "without", "away from", "clear of", "clear from",
    "far from", "distance from", "distance to", "back from", "out of", "off of", "keep off",
    "stay off", "get off", "hands off", "barring", "minus", "save for", "flee",
    "flee from", "fleeing", "escape", "escape from", "hide from", "run from", "retreat from",
    "withdraw from", "refrain from", "abstain from", "hate", "dislike", "fear", "reject", "refuse",
    "abandon", "lose", "never mind", *(f"stop {doing}" for doing in _DOING),
    "discard", "dismiss", "let alone", "wide berth to",
)
_AFTER_IT = (
    "off limits", "off-limits", "out of bounds", "forbidden", "prohibited", "taboo", "unwanted",
    "dangerous", "as an obstacle", "in your way", "is not it", "is not what", "is not the goal",
    "be avoided", "is not there", *(f"{may} not be {done}" for may in (
        "should", "must", "may", "can",
    ) for done in ("approached", "touched", "visited", "entered", "followed")),
    "is not the target", "is not wanted", "is not allowed", "a wide berth", "excluded",
    "is wrong",
)
"""Phrases that exclude the thing before them: "the cone is off limits"."""
_AROUND = (
    "no way", "no thanks", "no thank you", "not now", "not yet", "not today",
    "when i", "once i", "after i", "as soon as i", "if i", "unless", "tomorrow", "yesterday",
    *(f"how {much}" for much in ("far", "long", "big", "tall", "high", "heavy", "old", "often")),
    "did you",
)
"""Phrases of no request, or of one for later: they exclude all things before and after them."""
_BESIDE = (
    *(f"{at} the {side} of" for at in ("to", "on", "at") for side in (
        "left", "right", "front", "back", "top", "bottom", "side", "end", "left side",
        "right side",
    )),
    "in front of", "next to", "close to", "near to", "adjacent to", "opposite to", "belonging to",
    "left of", "right of", "ahead of", "in the middle of", "behind", "between", "beside", "besides",
    "by", "near", "of", "opposite", "against", "alongside", "among", "amongst", "amid", "under",
    "underneath", "beneath", "below", "above", "over", "on", "atop", "upon", "with", "at", "before",
    "after", "touching", "facing", "holding", "carrying", "wearing", "containing", "surrounding",
    "surrounded by", "nearest", "nearest to", "closest to", "in", "inside", "within", "that the",
    "that a", "which the", "which a", "who", "whose", "whom",
)
"""Phrases before the place of a thing; after a verb alone, before the thing: "go near the cone"."""
_PAST = (
    "from", "past", "pass", "pass by", "passing", "via", "around", "round the", "round a", "beyond",
    "across", "along", "through",
)
"""Words before a landmark on the path to a thing."""
REQUEST_VERBS = frozenset({
    "find", "go", "walk", "look", "move", "approach", "navigate", "reach", "head", "drive", "get",
    "run", "travel", "proceed", "come", "make", "search", "seek", "locate", "spot", "detect",
    "identify", "discover", "track", "step", "roll", "steer", "aim", "target", "visit", "take",
    "bring", "lead", "guide", "show", "wander", "march", "stroll", "return", "advance", "crawl",
    "park", "arrive", "fetch", "try", "stand", "stop", "halt", "wait", "stay", "sit", "rest",
    "follow", "catch", "swing", "pull", "pop", "nip", "drop", "dash", "trot", "hop",
    "inspect", "check", "examine", "push", "touch", "meet", "turn", "hurry", "please",
    "position", "place", "station", "circle", "choose", "pick", "want", "need",
})
"""Verbs that ask for something."""
_DETERMINERS = frozenset({
    "the", "a", "an", "any", "this", "that", "these", "those", "my", "your", "our", "his", "her",
    "its", "their", "some", "every", "each", "all", "both", "another", "one", "from", "of",
})
_ANYTHING = frozenset({
    "thing", "one", "object", "item", "something", "anything", "everything", "whatever", "someone",
    "somebody", "person", "anyone", "what", "who",
})
_UNITS = frozenset({"m", "cm", "meter", "metre", "meters", "metres", "foot", "feet", "step"})
_HOW = frozenset({"left", "right", "straight", "forward", "forwards", "keep", "as"})
"""Words beside a verb that name nothing: "go right next to the ball"."""
_GOES_ON = ("to", "until")
"""Words after which a place may still be where to go: "drive until you are near the ball"."""
_CLAUSE_ENDS = frozenset({"but", "then", "until", "instead", "so"})
_BE_THERE = re.compile(
    r"\b(?:you (?:(?:to|ought to|should|must|have to|need to) )?(?:be|standing)|went and stood) "
    r"(?=(?:right )?(?:at|by|near|beside|next|close|with|in front)\b)"
)
"""A place as something to do: "you should be near the ball"."""
_TWO_VERBS = re.compile(rf"\b(?:{'|'.join(REQUEST_VERBS)}) and (?=(?:{'|'.join(REQUEST_VERBS)})\b)")
"""The first verb of "go and find", which asks for nothing of its own."""
_EVERY = re.compile(r"\b((?:any|every|all|each)\w*(?:\s+(?!and\b)\w+){0,3}?)\s+but\b")
_POSSESSIVE = re.compile(
    r"\b(?:the|an?|my|your|this)\s+(?:[\w-]+\s+){0,3}?"
    r"(?!(?:that|it|what|who|which|there|here|where|he|she)'s)[\w-]+'s\s+(?=\w)"
)
"""The owner of a thing: "the robot's ball"."""
# fmt: on
_ROLES = {
    **dict.fromkeys(_WITHOUT, "without"),
    **dict.fromkeys(_NOT, "not"),
    **dict.fromkeys(_AFTER_IT, "after"),
    **dict.fromkeys(_AROUND, "around"),
    **dict.fromkeys(_BESIDE, "beside"),
    **dict.fromkeys(_PAST, "past"),
    **dict.fromkeys(_NEUTRAL, "neutral"),
}
_LONGEST = max(len(phrase.split()) for phrase in _ROLES)
_EXCLUDES = {"not", "without"}


def parts_of(instruction: str, known: Set[str]) -> tuple[str, str]:
    """Return the words that name the things asked for, and those excluded.

    Args:
        known: things and qualities, which may stand without an article.
    """
    words = _words(instruction)
    kept: dict[str, list[str]] = {"asked": [], "excluded": [], "referred": []}
    role, verb, named, ever_named, begin = "", False, False, False, 0
    position = 0
    while position < len(words):
        word = words[position]
        phrase, kind = _phrase_at(words, position)
        if kind in _EXCLUDES:
            role, named = kind, False
        elif kind == "around":
            kept["excluded"] += kept["asked"]
            kept["asked"], role, named = [], "not", False
        elif kind == "after":
            kept["excluded"] += kept["asked"][begin:]
            del kept["asked"][begin:]
        elif kind == "past":
            if _is_thing(words, position + phrase, known) and role not in _EXCLUDES:
                role = "referred"
        elif kind == "beside":
            if role not in _EXCLUDES and (named or not verb):
                role = "referred"
        elif kind == "neutral":
            pass
        elif _ends(role, named, words[position:], known):
            role, verb, named, begin = "", verb and word in _GOES_ON, False, len(kept["asked"])
        elif word in REQUEST_VERBS and words[position - 1 : position] not in (
            ["the"],
            ["a"],
            ["your"],
        ):
            prolonged = role == "not" and words[position - 1] in ("or", "nor")
            if role not in _EXCLUDES or (named and not prolonged):
                role, verb, named = "", True, False
        elif _names(word) or (word in _ANYTHING and not _is_measure(words[position:])):
            named = True
            ever_named = ever_named or not role
        where = "excluded" if role in _EXCLUDES else role or "asked"
        if kind in ("", "past", "beside"):
            said = words[position : position + phrase]
            kept[where] += ["," if where == "excluded" and w in ("or", "and") else w for w in said]
        elif kind != "neutral":
            kept[where].append(",")
        position += phrase
    asked = kept["asked"] if ever_named else [*kept["asked"], ",", *kept["referred"]]
    return " ".join(asked), " ".join(kept["excluded"])


def _words(instruction: str) -> list[str]:
    """Return words and marks in lower case, contractions in full."""
    text = instruction.casefold().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    text = re.sub(r"\b(?:can't|cant|cannot)\b", "can not", text)
    text = re.sub(r"\b(?:won't|wont)\b", "will not", text)
    text = re.sub(r"\bthats\b", "that is", text)
    text = re.sub(r"\b(do|does|did|is|are|was|were|should|must|could|would)n'?t\b", r"\1 not", text)
    text = re.sub(r"\bnon-(\w+)\s+(\w+)", r"\2 that is not \1 ,", text)
    text = _EVERY.sub(r"\1 except", _TWO_VERBS.sub("", _BE_THERE.sub("go ", text)))
    return _WORD_OR_MARK.findall(_POSSESSIVE.sub("the ", text))


def _phrase_at(words: list[str], position: int) -> tuple[int, str]:
    """Return length and role of the longest known phrase at ``position``."""
    for length in range(_LONGEST, 0, -1):
        phrase = " ".join(words[position : position + length])
        if kind := _ROLES.get(phrase, ""):
            return phrase.count(" ") + 1, kind
    return 1, ""


def _ends(role: str, named: bool, words: list[str], known: Set[str]) -> bool:
    """Return True if an exclusion, a reference or a sentence ends at the first of ``words``."""
    word = words[0]
    if word in _CLAUSE_ENDS:
        return True
    if word == "to":
        return role == "referred" or (role == "without" and named)
    if word == "," and words[1:2] in (["and"], ["or"]):
        words = words[1:]
    if word in ("and", ",") and role and (role, word) != ("not", ","):
        further = _is_thing(words, 1, known)
        return not (further or (role == "referred" and _phrase_at(words, 1)[1] == "beside"))
    return word == "and" or not word[0].isalnum()


def _is_thing(words: list[str], position: int, known: Set[str]) -> bool:
    """Return True if the name of a thing begins at ``position``."""
    return any(w in _DETERMINERS or singular(w) in known for w in words[position : position + 1])


def _names(word: str) -> bool:
    """Return True for a word that may name a thing."""
    nameless = word in _DETERMINERS | _UNITS | _HOW or word.endswith(("ly", "self"))
    return not (nameless or word[0].isdigit()) and bool(Named(word).things)


def _is_measure(words: list[str]) -> bool:
    return words[0] == "one" and singular(words[1]) in _UNITS if len(words) > 1 else False
