"""From a model's text to one safe motion step: an anchored grammar, not a search for words.

    answer  = [ reason ] "the next action is" action [ punctuation ]  |  action [ punctuation ]
    action  = "move forward" number ("cm" | "m")
            | "turn" ("left" | "right") number ("degree" | "deg")
            | "stop"

These are NaVILA's phrasings, in any case and with the usual variants of the units. Published
parsers look for words anywhere in the text and fall back to a default motion, so that "do not
move, stop" or an empty answer drives the robot forward. Here whatever the grammar does not contain
is no motion, with a code that says why.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import IntEnum

from collab_llm_nodes.config import check_ranges, setting


class Kind(IntEnum):
    """What to do; the numbers of ``msg/NavigationAction``."""

    NONE = 0
    STOP = 1
    FORWARD = 2
    TURN = 3


class Code(IntEnum):
    """Why there is, or is no, motion; the numbers of ``msg/NavigationAction``."""

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
    Code.AMBIGUOUS: "more than one action, a condition, or words after the action",
    Code.NEGATED: "the action is negated",
    Code.CONTRADICTORY: "the text asks for things that exclude each other",
    Code.OUT_OF_RANGE: "distance or angle is zero or beyond the limit",
    Code.UNVERIFIED: "the target has not verified the text and the policy forbids acting on it",
    Code.STALE: "the camera frame is older than the age limit",
    Code.EMPTY: "no text",
    Code.FAILED: "the generation ended with an error",
}


@dataclass(frozen=True)
class GrammarConfig:
    """Limits of one step. Longer or wider ones are refused, not clamped."""

    max_distance: float = setting(0.75, "Longest step forward [m].", low=0.01, high=10.0)
    max_angle: float = setting(45.0, "Widest turn [degree].", low=1.0, high=180.0)
    max_characters: int = setting(
        2000, "Longer texts are not read [characters].", low=32, high=100_000
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ParsedAction:
    """What a text asks for.

    Attributes:
        kind: NONE unless ``code`` is OK.
        value: m for FORWARD (> 0), rad for TURN (+ = left, counter-clockwise), else 0.
        code: OK, or why there is no motion.
        span: where in ``text`` the action stands, or what made it unacceptable; end exclusive.
        text: the text that was read.
        reason: ``code`` in words, for people; empty where ``REASONS`` says it all.
    """

    kind: Kind
    value: float
    code: Code
    span: tuple[int, int]
    text: str
    reason: str = ""

    @property
    def phrase(self) -> str:
        """The action in the grammar's own words, as the prompt's history holds it."""
        if self.kind is Kind.FORWARD:
            return f"move forward {self.value * 100:g} cm"
        if self.kind is Kind.TURN:
            side = "left" if self.value > 0 else "right"
            return f"turn {side} {round(abs(math.degrees(self.value)), 6):g} degree"
        return "stop" if self.kind is Kind.STOP else ""


_FLAGS = re.IGNORECASE | re.ASCII  # ASCII: no look-alike letters or digits
_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_ACTION = re.compile(
    r"(?P<stop>stop)\b"
    rf"|(?:move|moving)\s+forward\s+(?:by\s+)?(?P<distance>{_NUMBER})\s*"
    r"(?:(?P<cm>cm|centimet(?:er|re)s?)|m|met(?:er|re)s?)\b"
    rf"|(?:turn|turning)\s+(?P<side>left|right)\s+(?:by\s+)?(?P<angle>{_NUMBER})\s*"
    r"(?:(?:degrees?|deg)\b|\N{DEGREE SIGN})",
    _FLAGS,
)
# Starts a sentence or clause: "it is wrong that the next action is ..." is not an instruction.
_MARKER = re.compile(
    r"(?:\A|[.!?;:,\n])\s*(?:(?:so|thus|hence|then|therefore),?\s+)?"
    r"(?P<words>(?:the\s+)?next\s+action\s+is)(?:\s+to\b)?\s*:?\s*[\"'*]*",
    _FLAGS,
)
_MARKER_WORDS = re.compile(r"\bnext\s+action\b", _FLAGS)
_TAIL = re.compile(r"[\s.!\"'*]*\Z", _FLAGS)
_SENTENCE_END = re.compile(r"[.!?;\n]")
_CLAUSE_END = re.compile(r"[.!?;:,\n]")
_NEGATION = re.compile(
    r"\b(?:not|never|no|without|avoid|cannot)\b|n(?:'|\N{RIGHT SINGLE QUOTATION MARK})t\b", _FLAGS
)
_CONDITION = re.compile(r"\b(?:if|unless|until|once|when|before|after)\b", _FLAGS)
_MOTION_VERB = re.compile(r"\b(?:move|moving|turn|turning|go|stop|stopping)\b", _FLAGS)
_MENTION = re.compile(
    r"\b(?:(?P<stop>stop(?:ping)?)(?!\s+sign)|(?:turn|turning)\s+(?P<side>left|right)"
    r"|(?:move|moving|go)\s+(?P<way>forward|backwards?|back))\b",
    _FLAGS,
)


def parse(text: str, config: GrammarConfig | None = None) -> ParsedAction:
    """Read ``text``, which must hold exactly one action, at its end. Never raises."""
    config = config or GrammarConfig()
    if not text.strip():
        return _refuse(text, Code.EMPTY)
    if len(text) > config.max_characters:
        return _refuse(text, Code.UNREADABLE)
    marker = _MARKER.search(text)
    begin = marker.end() if marker else len(text) - len(text.lstrip())
    action = _ACTION.match(text, begin)
    if action is None or not _TAIL.match(text, action.end()):
        return _explain(text, marker.start("words") if marker else 0)
    if marker:
        objection = _objection(text, marker.start("words"), action)
        if objection:
            return objection
    kind, value = _read(action)
    limit = config.max_distance if kind is Kind.FORWARD else math.radians(config.max_angle)
    if kind is not Kind.STOP and not 0.0 < abs(value) <= limit + 1e-9:
        return _refuse(text, Code.OUT_OF_RANGE, action.span())
    return ParsedAction(kind, value, Code.OK, action.span(), text)


class StreamingParser:
    """The same reading while the text still grows.

    An action is complete when the sentence of the marker form has ended ("the next action is
    stop."): no further token can change what that sentence says. The bare form could be the
    first words of something else, so it waits for :meth:`finish`. Should the text nevertheless
    go on with words that make it unacceptable, ``finish`` says so and the caller takes the
    action back.
    """

    def __init__(self, config: GrammarConfig | None = None) -> None:
        self.text = ""
        self._config = config or GrammarConfig()
        self._reported = False

    def push(self, delta: str) -> ParsedAction | None:
        """Append ``delta``; the action, once, as soon as it is complete."""
        self.text += delta
        if self._reported:
            return None
        marker = _MARKER.search(self.text)
        action = _ACTION.match(self.text, marker.end()) if marker else None
        if action is None or not re.match(r"[\"'*]*[.!]", self.text[action.end() :]):
            return None
        parsed = parse(self.text, self._config)
        if parsed.code is not Code.OK:
            return None
        self._reported = True
        return parsed

    def finish(self) -> ParsedAction:
        """The reading of the whole text, which counts."""
        return parse(self.text, self._config)


def _read(action: re.Match[str]) -> tuple[Kind, float]:
    if action["stop"]:
        return Kind.STOP, 0.0
    if action["distance"]:
        return Kind.FORWARD, float(action["distance"]) * (0.01 if action["cm"] else 1.0)
    sign = 1.0 if action["side"].lower() == "left" else -1.0
    return Kind.TURN, sign * math.radians(float(action["angle"]))


def _refuse(text: str, code: Code, span: tuple[int, int] = (0, 0)) -> ParsedAction:
    return ParsedAction(Kind.NONE, 0.0, code, span, text)


def _name(mention: re.Match[str]) -> str:
    """ "stop", "left", "right", "forward" ...: two mentions agree if these are equal."""
    return (mention["stop"] and "stop") or (mention["side"] or mention["way"]).lower()


def _objection(text: str, marker: int, action: re.Match[str]) -> ParsedAction | None:
    """What in the reason, ``text[:marker]``, or the action's sentence speaks against ``action``."""
    second = list(_MARKER_WORDS.finditer(text))[1:]
    numbered = [m for m in _ACTION.finditer(text, 0, marker) if not m["stop"]]
    for repeated in second + numbered:
        return _refuse(text, Code.AMBIGUOUS, repeated.span())
    sentence = max([0, *(m.end() for m in _SENTENCE_END.finditer(text, 0, marker))])
    condition = _CONDITION.search(text, sentence, marker)
    if condition:
        return _refuse(text, Code.AMBIGUOUS, condition.span())
    chosen = "stop" if action["stop"] else (action["side"] or "forward").lower()
    begin = 0
    for end in [*(m.end() for m in _CLAUSE_END.finditer(text, 0, marker)), marker]:
        verb = _MOTION_VERB.search(text, begin, end)
        if verb and _NEGATION.search(text, begin, end):
            return _refuse(text, Code.CONTRADICTORY, verb.span())
        for mention in _MENTION.finditer(text, begin, end):
            if _name(mention) != chosen:
                return _refuse(text, Code.CONTRADICTORY, mention.span())
        begin = end
    return None


def _explain(text: str, begin: int) -> ParsedAction:
    """Why ``text`` from ``begin`` on is not of the grammar: the most telling code."""
    mentions = list(_MENTION.finditer(text, begin))
    negation = _NEGATION.search(text, begin)
    if negation and _MOTION_VERB.search(text, begin):
        return _refuse(text, Code.NEGATED, negation.span())
    names = {_name(m) for m in mentions}
    if not mentions or not names & {"stop", "left", "right", "forward"}:
        return _refuse(text, Code.UNREADABLE)
    span = (mentions[0].start(), mentions[-1].end())
    if {"left", "right"} <= names or ("stop" in names and len(names) > 1):
        return _refuse(text, Code.CONTRADICTORY, span)
    if re.match(r"\s*[-\N{MINUS SIGN}]\s*[0-9]", text[mentions[0].end() :]):
        return _refuse(text, Code.CONTRADICTORY, span)
    if len(mentions) > 1 or _ACTION.search(text, begin):
        return _refuse(text, Code.AMBIGUOUS, span)
    return _refuse(text, Code.UNREADABLE, span)
