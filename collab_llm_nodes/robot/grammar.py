"""Parser of a model's text into one safe motion step: an anchored grammar, no search for words.

    answer   = [ reason ] [ connective ] marker [ "to" ] [ ":" ] [ quote ] action [ punctuation ]
             | action [ punctuation ]
             | "{" [ '"reason": "' reason '"' ] '"action": "' action '"' "}"     (``json: true``)
    action   = one of the configured phrases: "move forward {distance}", "turn left {angle}",
               "stop", "give up", "reply"
    marker   = one of the configured ones, at the start of a clause: "the next action is"
    distance = [ "by" ] number ( "cm" | "m" | "centimeters" | "metres" ... )
    angle    = [ "by" ] number ( "degree" | "degrees" | "deg" | "°" | "rad" | "radian" ... )

in upper or lower case. The defaults are NaVILA's phrases. Others are literal words with a place for
the number, not regular expressions, so that none can take for ever or match everything. A reason
may only be made of plain observations (``observations.py``), so that nothing in it can speak
against the action. Under ``reason: lenient`` it may hold anything but words known to speak against
the action: another motion, a negated one, a condition, a second action.

"give up" and "reply" end the task without a motion, so any text but a second order may stand beside
them: it is the reply. A reply without a text is none.

A text outside the grammar is no motion, with a code that says why.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from collab_llm_nodes.config import check_ranges, fixed
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.models.thoughts import blank_thoughts
from collab_llm_nodes.robot.observations import Observations


class Kind(IntEnum):
    """Kinds of action; the numbers of ``msg/NavigationAction``."""

    NONE = 0
    STOP = 1
    FORWARD = 2
    TURN = 3
    GIVE_UP = 4
    REPLY = 5

    @property
    def moves(self) -> bool:
        """Return True for a step that the robot drives or turns."""
        return self in (Kind.FORWARD, Kind.TURN)


class Code(IntEnum):
    """Reasons for motion or none; the numbers of ``msg/NavigationAction``."""

    OK = 0
    UNREADABLE = 1
    AMBIGUOUS = 2
    NEGATED = 3
    CONTRADICTORY = 4
    OUT_OF_RANGE = 5
    UNVERIFIED = 6
    STALE = 7
    EMPTY = 8
    FAILED = 9


REASONS = {
    Code.OK: "to be executed",
    Code.UNREADABLE: "the text holds no action of the grammar",
    Code.AMBIGUOUS: "more than one action, a reason that is more than observations, or words after"
    " the action",
    Code.NEGATED: "the action is negated",
    Code.CONTRADICTORY: "the text asks for things that exclude each other",
    Code.OUT_OF_RANGE: "distance or angle is zero or beyond the limit",
    Code.UNVERIFIED: "the target has not verified the text and the policy forbids acting on it",
    Code.STALE: "the camera frame is older than the age limit",
    Code.EMPTY: "no text, or a reply without words",
    Code.FAILED: "the generation ended with an error",
}


LONGEST_M = 10.0
"""No configuration allows a longer step forward."""
WIDEST_DEGREE = 180.0
"""No configuration allows a wider turn."""


@dataclass(frozen=True)
class GrammarConfig:
    """Phrases of actions, and the limits of one step. Longer steps are refused, not clamped.

    A phrase is literal words; ``{distance}`` stands for a number with "cm" or "m", ``{angle}`` for
    one with "degree" or "rad". Spaces may be any white space, letters of either case.
    """

    max_distance: float = fixed(0.75, "Longest step forward [m].", low=0.01, high=LONGEST_M)
    max_angle: float = fixed(45.0, "Widest turn [degree].", low=1.0, high=WIDEST_DEGREE)
    max_characters: int = fixed(
        2000, "Length of the longest text that is read [characters].", low=32, high=100_000
    )
    markers: tuple[str, ...] = fixed(
        ("the next action is", "next action is"),
        "Words between reason and action; 'action:' needs its colon.",
    )
    forward: tuple[str, ...] = fixed(
        ("move forward {distance}", "moving forward {distance}"), "Phrases for a step forward."
    )
    left: tuple[str, ...] = fixed(
        ("turn left {angle}", "turning left {angle}"), "Phrases for a turn to the left."
    )
    right: tuple[str, ...] = fixed(
        ("turn right {angle}", "turning right {angle}"), "Phrases for a turn to the right."
    )
    stop: tuple[str, ...] = fixed(("stop",), "Phrases for the end of the task: arrived.")
    give_up: tuple[str, ...] = fixed(("give up",), "Phrases for its end: not found.")
    reply: tuple[str, ...] = fixed(
        ("reply",), "Phrases for its end: answered, by the text before the marker."
    )
    reason: str = fixed(
        "plain",
        "Text allowed beside the action: plain = observations only; lenient = free text without"
        " words known to speak against the action, which will miss some.",
        choices=("plain", "lenient"),
    )
    things: tuple[str, ...] = fixed(
        (), "Further names and qualities of things that plain observations may mention."
    )
    json: bool = fixed(
        False, "Read {'reason': ..., 'action': phrase} too, alone or in a ```json block."
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        for name, slot in _SLOTS.items():
            _check_phrases(name, getattr(self, name), slot)
        _check_things(self.things)
        seen: dict[str, str] = {}
        for name in _SLOTS:
            for phrase in getattr(self, name):
                words = " ".join(phrase.lower().split())
                if words in seen:
                    raise ConfigError(
                        f"{phrase!r} is also in {seen[words]}", field=name, remedy="keep one"
                    )
                seen[words] = name


_SLOTS = {
    "markers": "",
    "forward": "{distance}",
    "left": "{angle}",
    "right": "{angle}",
    "stop": "",
    "give_up": "",
    "reply": "",
}
"""The fields that hold phrases, each with its placeholder of the number."""
_MOST_PHRASES = 32
_MOST_THINGS = 1000
_MOST_WORDS = 12
_WORD = re.compile(r"[a-z]+(?:['-][a-z]+)*", re.IGNORECASE | re.ASCII)


def _check_phrases(field: str, phrases: Sequence[str], slot: str) -> None:
    """Raise ConfigError for phrases that are not literal words with ``slot`` once."""
    if not 0 < len(phrases) <= _MOST_PHRASES:
        raise ConfigError(f"{len(phrases)} phrases", field=field, remedy=f"1 to {_MOST_PHRASES}")
    form = f"words and {slot} once" if slot else "words"
    for phrase in phrases:
        words = phrase.split()
        if field == "markers" and words:
            words[-1] = words[-1].removesuffix(":")
        literal = [w for w in words if w != slot]
        readable = literal and all(_WORD.fullmatch(w) for w in literal)
        if not readable or len(words) > _MOST_WORDS or (slot and words.count(slot) != 1):
            raise ConfigError(
                f"{phrase!r} is no phrase",
                field=field,
                remedy=f"{form}, at most {_MOST_WORDS}, no other signs",
            )
        if _NEGATION.search(phrase) or _CONDITION.search(phrase):
            raise ConfigError(
                f"{phrase!r} negates or depends", field=field, remedy="say what to do"
            )


def _check_things(things: Sequence[str]) -> None:
    """Raise ConfigError for a name that is none, or that would let a reason speak of motions."""
    if len(things) > _MOST_THINGS:
        raise ConfigError(f"{len(things)} names", field="things", remedy=f"at most {_MOST_THINGS}")
    for thing in things:
        words = thing.split()
        if not words or not all(_WORD.fullmatch(w) and "-" not in w for w in words):
            raise ConfigError(f"{thing!r} is no name", field="things", remedy="words of letters")
        if any(pattern.search(thing) for pattern in (_NEGATION, _CONDITION, _MOTION)):
            raise ConfigError(
                f"{thing!r} negates, depends or moves", field="things", remedy="name things only"
            )


@dataclass(frozen=True)
class ParsedAction:
    """The action that a text asks for.

    Attributes:
        kind: NONE unless ``code`` is OK.
        value: m for FORWARD (> 0), rad for TURN (+ = left, counter-clockwise), else 0.
        code: OK, or why there is no motion.
        span: of the action in ``text``, or of the part that made it unacceptable; end exclusive.
        text: the whole text.
        reason: ``code`` in words, for people; empty where ``REASONS`` has them.
        words: what the text says beside the action, without thoughts; empty unless ``code`` is OK.
    """

    kind: Kind
    value: float
    code: Code
    span: tuple[int, int]
    text: str
    reason: str = ""
    words: str = ""

    @property
    def phrase(self) -> str:
        """Return the action as a phrase of the default grammar, as in the prompt's history."""
        if self.kind is Kind.FORWARD:
            return f"move forward {self.value * 100:g} cm"
        if self.kind is Kind.TURN:
            side = "left" if self.value > 0 else "right"
            return f"turn {side} {round(abs(math.degrees(self.value)), 6):g} degree"
        return {Kind.STOP: "stop", Kind.GIVE_UP: "give up", Kind.REPLY: "reply"}.get(self.kind, "")


def actions_pattern(config: GrammarConfig | None = None) -> str:
    """Return a regular expression of answers that :func:`parse` reads as an action.

    They have the first marker, no reason, and whole centimetres or degrees within the limits; such
    as "The next action is turn left 45 degree." Without a reason there is no reply.
    """
    config = config or GrammarConfig()
    numbers = {
        "{distance}": f"{_up_to(math.floor(config.max_distance * 100 + 1e-9))} cm",
        "{angle}": f"{_up_to(math.floor(config.max_angle + 1e-9))} degree",
    }
    phrases = [
        " ".join(numbers.get(word, word) for word in phrase.split())
        for name in _ACTIONS
        if name != "reply"
        for phrase in getattr(config, name)
    ]
    marker = " ".join(config.markers[0].split())
    return rf"{marker[0].upper()}{marker[1:]} (?:{'|'.join(phrases)})\."


def _up_to(most: int) -> str:
    """Return a regular expression of the whole numbers from 1 to ``most``."""
    digits = str(most)
    shorter = [f"[1-9][0-9]{{{n}}}" for n in range(len(digits) - 1)]
    return f"(?:{'|'.join([*shorter, *_as_long_as(digits, 1)])})"


def _as_long_as(digits: str, lowest: int) -> list[str]:
    """Return patterns of the numbers with as many digits, up to that number.

    Args:
        lowest: first digit that is allowed.
    """
    first, rest = int(digits[0]), digits[1:]
    if not rest:
        return [f"[{lowest}-{first}]"] if lowest <= first else []
    below = [f"[{lowest}-{first - 1}][0-9]{{{len(rest)}}}"] if lowest < first else []
    return below + [digits[0] + pattern for pattern in _as_long_as(rest, 0)]


def check_step(
    action: ParsedAction, max_distance: float = LONGEST_M, max_angle: float = WIDEST_DEGREE
) -> None:
    """Check the size of a step, which any node may have published.

    Raises:
        InvalidInput: not a number, zero, beyond the limits [m, degree], or a step backward.
    """
    name, unit, value, limit = "distance", "m", action.value, max_distance
    if action.kind is Kind.TURN:
        name, unit, value, limit = "angle", "degree", abs(math.degrees(action.value)), max_angle
    if action.kind.moves and not 0.0 < value <= limit + 1e-6:
        raise InvalidInput(
            f"{value:g} {unit}",
            field=f"navigation_action.{name}",
            remedy=f"more than 0, at most {limit:g} {unit}",
        )


_FLAGS = re.IGNORECASE | re.ASCII  # ASCII: no look-alike letters or digits
_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_UNITS = {
    "{distance}": {
        r"cm|centimet(?:er|re)s?": 0.01,
        r"m|met(?:er|re)s?": 1.0,
    },
    "{angle}": {
        r"degrees?|deg|\N{DEGREE SIGN}": math.pi / 180.0,
        r"radians?|rad": 1.0,
    },
}
"""Size of each unit in m or rad."""
_TAIL = re.compile(r"[\s.!\"'*]*\Z", _FLAGS)
_SENTENCE_END = re.compile(r"[.!?;\n]")
_CLAUSE_END = re.compile(r"[.!?;:,\n]")
_CLAUSE_SIGNS = ".!?;:,"  # not inside a marker, as a line's end may be
_COMPLETING = re.compile(r"[.!]")
_CLOSED = re.compile(r"[\"'*]*[.!]")
_NEGATION = re.compile(
    r"\b(?:not|never|no|without|avoid|cannot)\b|n(?:'|\N{RIGHT SINGLE QUOTATION MARK})t\b", _FLAGS
)
_CONDITION = re.compile(r"\b(?:if|unless|until|once|when|before|after)\b", _FLAGS)
_MOTION_VERBS = (
    "move|moving|turn|turning|rotate|rotating|go|going|walk|walking|drive|driving"
    "|stop|stopping|halt|halting"
)
_TURN, _GO = "turn|turning|rotate|rotating|go|going", "move|moving|go|going|walk|walking"
_MENTIONS = {
    "stop": r"stop(?:ping)?(?!\s+sign)|halt(?:ing)?",
    "left": rf"(?:{_TURN})\s+left",
    "right": rf"(?:{_TURN})\s+right",
    "forward": rf"(?:{_GO})\s+forward",
    "back": rf"(?:{_GO})\s+(?:backwards?|back)",
    "give_up": r"giv(?:e|ing)\s+up",
    "reply": r"reply(?:ing)?",
}
"""Words that speak of an action, whether or not they are configured as phrases."""
_MOTION = re.compile(rf"\b(?:{_MOTION_VERBS}|forwards?|backwards?|back)\b", _FLAGS)
_FENCE = "```"


class _Grammar:
    """The regular expressions of one configuration.

    Attributes:
        action: one phrase with its number; the matched group's name is its kind.
        marker: at the start of a clause: "it is wrong that the next action is ..." is no order.
        marker_words: the same words anywhere.
        mention: words that speak of an action; the group's name is its kind.
        verb: words that may be negated.
        observations: checks a reason; None under ``reason: lenient``.
    """

    def __init__(self, config: GrammarConfig) -> None:
        kinds = {name: getattr(config, name) for name in _ACTIONS}
        longest = sorted(
            ((phrase, name) for name, phrases in kinds.items() for phrase in phrases),
            key=lambda pair: -len(pair[0].split()),
        )
        self.action = re.compile(
            "|".join(f"(?P<{n}{i}>{_pattern(p)})" for i, (p, n) in enumerate(longest)), _FLAGS
        )
        markers = sorted(config.markers, key=len, reverse=True)
        words = "|".join(_literal(m) for m in markers)
        self.marker = re.compile(
            r"(?:\A|(?P<end>[.!?;:,\n]))[^\S\n]*(?:(?:so|thus|hence|then|therefore),?\s+)?"
            rf"(?P<words>{words})(?:\s+to\b)?\s*:?\s*[\"'*]*",
            _FLAGS,
        )
        self.marker_words = re.compile(rf"\b(?:{words}|next\s+action\b)", _FLAGS)
        mentions = {
            name: "|".join([known, *map(_mention, _not_yet(known, kinds.get(name, ())))])
            for name, known in _MENTIONS.items()
        }
        self.mention = re.compile(
            rf"\b(?:{'|'.join(f'(?P<{name}>{m})' for name, m in mentions.items())})(?!\w)", _FLAGS
        )
        verbs = {_literal(_words(phrase)[0]) for phrase, _ in longest}
        self.verb = re.compile(rf"\b(?:{'|'.join([_MOTION_VERBS, *sorted(verbs)])})\b", _FLAGS)
        self.observations = Observations(config.things) if config.reason == "plain" else None


_compiled = lru_cache(maxsize=64)(_Grammar)


def _words(phrase: str) -> list[str]:
    """Return the literal words of a phrase."""
    return [word for word in phrase.split() if word not in _UNITS]


def _literal(phrase: str) -> str:
    words = r"\s+".join(re.escape(word) for word in phrase.split())
    return words if words.endswith(":") else words + r"\b"


def _pattern(phrase: str) -> str:
    """Return the pattern of a phrase with its number."""
    return r"\s+".join(
        _quantity(word) + r"(?!\w)" if word in _UNITS else _literal(word) for word in phrase.split()
    )


def _mention(phrase: str) -> str:
    """Return the pattern of a phrase with or without its number."""
    return "".join(
        rf"(?:{_quantity(word)}\s*)?" if word in _UNITS else _literal(word) + r"\s*"
        for word in phrase.split()
    )


def _quantity(slot: str) -> str:
    return rf"(?:by\s+)?{_NUMBER}\s*(?:{'|'.join(_UNITS[slot])})(?!\w)"


def _not_yet(known: str, phrases: Sequence[str]) -> list[str]:
    """Return the phrases whose words ``known`` does not match."""
    return [p for p in phrases if not re.fullmatch(known, " ".join(_words(p)), _FLAGS)]


def parse(text: str, config: GrammarConfig | None = None) -> ParsedAction:
    """Read ``text``, which must hold exactly one action, at its end. Never raises.

    The thoughts of a reasoning model are not read.
    """
    config = config or GrammarConfig()
    if len(text) > config.max_characters:  # first: all else takes time
        return _refuse(text, Code.UNREADABLE)
    return replace(_parse_answer(blank_thoughts(text), config), text=text)


def _parse_answer(text: str, config: GrammarConfig) -> ParsedAction:
    """Read a text without thoughts."""
    grammar = _compiled(config)
    if not text.strip():
        return _refuse(text, Code.EMPTY)
    if config.json and text.lstrip().startswith(("{", _FENCE)):
        return _parse_json(text, config)
    marker = grammar.marker.search(text)
    begin = marker.end() if marker else len(text) - len(text.lstrip())
    action = grammar.action.match(text, begin)
    if action is None or not _TAIL.match(text, action.end()):
        return _explain(grammar, text, marker.start("words") if marker else 0)
    reason = (0, marker.start("words")) if marker else (0, 0)
    words = text[: max(0, marker.end("end"))] if marker else ""
    return _objection(grammar, text, reason, action) or _accept(text, words, action, config)


class StreamingParser:
    """Parser of a text that still grows.

    An action is complete when the sentence of the marker form has ended ("the next action is
    stop."): no further token can change that sentence. The bare form may be the beginning of
    another sentence, so it waits for :meth:`finish`. If the text goes on with words that make the
    action unacceptable, ``finish`` returns that, and the caller takes the action back.

    Every character is searched a bounded number of times: only a piece with "." or "!" can complete
    an action, and the search goes on where the last one ended.
    """

    def __init__(self, config: GrammarConfig | None = None) -> None:
        self.text = ""
        self._config = config or GrammarConfig()
        self._searched = 0  # no marker begins before this
        self._settled = False  # no further text can complete an action

    def push(self, delta: str) -> ParsedAction | None:
        """Append ``delta``; return the action once, as soon as it is complete."""
        self.text += delta
        if self._settled or not _COMPLETING.search(delta):
            return None
        if len(self.text) > self._config.max_characters:
            return None
        grammar = _compiled(self._config)
        marker = grammar.marker.search(self.text, self._searched)
        if marker is None:
            last = max(self.text.rfind(sign, self._searched) for sign in _CLAUSE_SIGNS)
            self._searched = max(self._searched, last)
            return None
        action = grammar.action.match(self.text, marker.end())
        if action is None or not _CLOSED.match(self.text, action.end()):
            # The number may hold one point. A second one ends a sentence that is no action.
            self._settled = len(_COMPLETING.findall(self.text, marker.end())) > 1
            return None
        self._settled = True
        parsed = parse(self.text, self._config)
        return parsed if parsed.code is Code.OK else None

    def finish(self) -> ParsedAction:
        """Return the reading of the whole text, which counts."""
        return parse(self.text, self._config)


def _parse_json(text: str, config: GrammarConfig) -> ParsedAction:
    """Read an object with the string "action" and perhaps "reason", and nothing else."""
    grammar = _compiled(config)
    try:
        content = json.loads(_unfenced(text), object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return _refuse(text, Code.UNREADABLE)
    if not isinstance(content, dict) or not {"action"} <= content.keys() <= {"action", "reason"}:
        return _refuse(text, Code.UNREADABLE)
    spans = []
    for key in ("reason", "action"):
        said = content.get(key, "")
        if not isinstance(said, str) or said not in text:  # the latter: spelt with escapes
            return _refuse(text, Code.UNREADABLE)
        spans.append((text.rfind(said), text.rfind(said) + len(said)))
    reason, (begin, end) = spans
    action = grammar.action.fullmatch(text, begin, end)
    if action is None:
        return _explain(grammar, text, begin, end)
    words = content.get("reason", "")
    return _objection(grammar, text, reason, action) or _accept(text, words, action, config)


def _unfenced(text: str) -> str:
    """Return the content of a Markdown block; any other text as it is."""
    block = text.strip()
    if not (block.startswith(_FENCE) and block.endswith(_FENCE) and len(block) >= 2 * len(_FENCE)):
        return text
    content = block.removeprefix(_FENCE).removesuffix(_FENCE)
    return content[4:] if content[:4].lower() == "json" else content


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return ``pairs`` as a mapping.

    Raises:
        ValueError: a key stands twice, and either value might be meant.
    """
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _accept(text: str, words: str, action: re.Match[str], config: GrammarConfig) -> ParsedAction:
    """Return ``action``, or its refusal: a step beyond the limits, or a reply without words."""
    kind, value = _read(action)
    words = words.strip(" \t\n,;:")
    limit = config.max_distance if kind is Kind.FORWARD else math.radians(config.max_angle)
    if kind.moves and not 0.0 < abs(value) <= limit + 1e-9:
        return _refuse(text, Code.OUT_OF_RANGE, action.span())
    if kind is Kind.REPLY and not any(map(str.isalnum, words)):
        return _refuse(text, Code.EMPTY, action.span())
    return ParsedAction(kind, value, Code.OK, action.span(), text, words=words)


def _read(action: re.Match[str]) -> tuple[Kind, float]:
    name = _name(action)
    if name in _ENDS:
        return _ENDS[name], 0.0
    slot = "{distance}" if name == "forward" else "{angle}"
    for unit, size in _UNITS[slot].items():
        quantity = re.search(rf"({_NUMBER})\s*(?:{unit})(?!\w)", action.group(), _FLAGS)
        if quantity:
            value = float(quantity[1]) * size
            return (Kind.FORWARD, value) if name == "forward" else (Kind.TURN, _SIGN[name] * value)
    raise AssertionError("the action was matched with one of the units")


_SIGN = {"left": 1.0, "right": -1.0}
_ENDS = {"stop": Kind.STOP, "give_up": Kind.GIVE_UP, "reply": Kind.REPLY}
"""Actions that end the task."""
_SPOKEN = {"give_up", "reply"}
"""Actions beside which anything may be said: nothing moves, and nobody takes them for a success."""
_ACTIONS = ("forward", *_SIGN, *_ENDS)


def _refuse(
    text: str, code: Code, span: tuple[int, int] = (0, 0), reason: str = ""
) -> ParsedAction:
    return ParsedAction(Kind.NONE, 0.0, code, span, text, reason)


def _name(match: re.Match[str]) -> str:
    """Return the kind of a match: one of ``_ACTIONS``, or "back"."""
    return str(match.lastgroup).rstrip("0123456789")


def _objection(
    grammar: _Grammar, text: str, reason: tuple[int, int], action: re.Match[str]
) -> ParsedAction | None:
    """Return the refusal if the reason, or a second order, speaks against ``action``; else None."""
    first, last = reason
    orders = [m for m in grammar.marker_words.finditer(text) if m.start() != last]
    if _name(action) in _SPOKEN:
        return _refuse(text, Code.AMBIGUOUS, orders[0].span()) if orders else None
    numbered = [m for m in grammar.action.finditer(text, first, last) if _name(m) not in _ENDS]
    for repeated in orders + numbered:
        return _refuse(text, Code.AMBIGUOUS, repeated.span())
    sentence = max([first, *(m.end() for m in _SENTENCE_END.finditer(text, first, last))])
    condition = _CONDITION.search(text, sentence, last)
    if condition:
        return _refuse(text, Code.AMBIGUOUS, condition.span())
    begin = first
    for end in [*(m.end() for m in _CLAUSE_END.finditer(text, first, last)), last]:
        verb = grammar.verb.search(text, begin, end)
        if verb and _NEGATION.search(text, begin, end):
            return _refuse(text, Code.CONTRADICTORY, verb.span())
        for mention in grammar.mention.finditer(text, begin, end):
            if _name(mention) != _name(action):
                return _refuse(text, Code.CONTRADICTORY, mention.span())
        begin = end
    if grammar.observations is not None:
        surplus = grammar.observations.objection(text, first, last, _name(action))
        if surplus:
            said = text[slice(*surplus)][:60]
            return _refuse(text, Code.AMBIGUOUS, surplus, f"{said!r} is no plain observation")
    return None


def _explain(grammar: _Grammar, text: str, begin: int, end: int | None = None) -> ParsedAction:
    """Return the most specific refusal of ``text[begin:end]``, which is not of the grammar."""
    end = len(text) if end is None else end
    mentions = list(grammar.mention.finditer(text, begin, end))
    negation = _NEGATION.search(text, begin, end)
    if negation and grammar.verb.search(text, begin, end):
        return _refuse(text, Code.NEGATED, negation.span())
    names = {_name(m) for m in mentions}
    if not names - {"back"}:
        return _refuse(text, Code.UNREADABLE)
    span = (mentions[0].start(), mentions[-1].end())
    if {"left", "right"} <= names or (_ENDS.keys() & names and len(names) > 1):
        return _refuse(text, Code.CONTRADICTORY, span)
    if re.match(r"\s*[-\N{MINUS SIGN}]\s*[0-9]", text[mentions[0].end() : end]):
        return _refuse(text, Code.CONTRADICTORY, span)
    if len(mentions) > 1 or grammar.action.search(text, begin, end):
        return _refuse(text, Code.AMBIGUOUS, span)
    return _refuse(text, Code.UNREADABLE, span)
