"""Outlines: how points are requested, read and joined (paper 004, section V-B).

The answer is written in three stages. The model lists numbered points, each point is expanded in a
lane of its own, and the texts are joined.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.thoughts import answer_of
from collab_llm_nodes.models.turns import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OUTLINE_DIRECTIVE = "Give an outline only: 3 to 8 numbered points of a few words each."
# With the title, since a small model does not find it by the number.
POINT_DIRECTIVE = "Write point {number} ({title}) in one or two sentences."
LEAST_POINTS, MOST_POINTS = 3, 8


def _outline_pattern() -> str:
    """Return a regular expression of outlines: numbered lines, each a title of some words."""
    pattern = ""
    for number in range(MOST_POINTS, 0, -1):
        feed = "" if number == 1 else r"\n"
        line = rf"{feed}{number}\. [A-Za-z][^\n|]{{2,80}}{pattern}"
        pattern = f"(?:{line})?" if number > LEAST_POINTS else line
    return pattern


OUTLINE_FORM = Guide("regex", _outline_pattern())
"""Form of outlines."""


@dataclass(frozen=True)
class Point:
    """A point of an outline, numbered from 1."""

    number: int
    title: str

    @property
    def request(self) -> str:
        """User turn that asks for the text of the point."""
        return POINT_DIRECTIVE.format(number=self.number, title=self.title)


def outline_question(question: str) -> str:
    """Return the user turn that asks for the outline of an answer."""
    return f"{question}\n\n{OUTLINE_DIRECTIVE}"


def with_directive(directive: str, turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return ``turns`` with ``directive`` at the start of the system turn."""
    if turns and turns[0].role == "system":
        return (Turn("system", f"{directive}\n\n{turns[0].content}"), *turns[1:])
    return (Turn("system", directive), *turns)


_BULLETS = r"[-*+\u2022\u2023\u25aa\u25cf\u25e6\u2013\u2014]"
_DASHES = r"\-\u2013\u2014"
_EMPHASIS = r"(?:\*\*|__|[*_])?"
_SIGNS = (  # digits in circles, in brackets, with a full stop; and keycaps
    r"(?:[\u2460-\u2468\u2474-\u247c\u2488-\u2490\u24f5-\u24fd\u2776-\u277e\u2780-\u2788\u278a-\u2792]"
    r"|\d\ufe0f?\u20e3)"
)
_BEFORE = rf"(?:{_BULLETS}\s+)?(?:\#{{1,6}}\s*)?{_EMPHASIS}[(\[]?(?:(?:point|step)\s+)?"
_ITEM = re.compile(
    rf"(?P<indent>\s*)(?:{_BEFORE}(?:(?P<sign>{_SIGNS})[.):]?"
    rf"|(?P<number>\d{{1,2}}){_EMPHASIS}(?:[.)\]]{{1,2}}(?!\d)|:(?=[\s*_])|\s?[{_DASHES}]\s)"
    rf"|(?P<letter>[IVX]{{1,4}}|[A-H]){_EMPHASIS}[.)\]](?=[\s*_]))|{_BULLETS}\s)"
    r"\s*(?P<title>\S.*?)\s*",
    re.IGNORECASE,
)
_MAY_BECOME_ITEM = re.compile(
    rf"\s*(?:{_BEFORE}(?:(?:\d{{1,2}}|[IVX]{{1,4}}|[A-H])[*_]{{0,2}}\s?"
    rf"(?:[.)\]:{_DASHES}\ufe0f\u20e3].*)?|{_SIGNS}.*)?|{_BULLETS}(?:\s.*)?"
    r"|(?:p|po|poi|poin|point|s|st|ste|step)\s?|[-*_=]+|`{1,3}\w*|~{1,3}\w*|(?:\||\#|\*\*|__).*)",
    re.IGNORECASE,
)
_HEADING = re.compile(
    r" {0,3}(?:(?P<marks>\#{1,6})\s+|(?=(?:\*\*|__)[^*_]+(?:\*\*|__):?\s*\Z))(?P<title>\S.*)"
)
_TABLE_RULE = re.compile(r"\s*\|[-:|\s]+")
_RULE = re.compile(r"\s*(?:[-*_=]{3,}|`{3}\w*|~{3}\w*)\s*")
_ROMAN = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII")
_LINE = re.compile(r"\s*(\d{1,2})[.)]\s*(\S.*?)\s*")
_HEAD_CHARACTERS = 240
"""Longest text before the first point, such as "Sure! Here is an outline:" and a heading."""
_PART_CHARACTERS = 240
"""Longest text between a point and the next one."""


@dataclass(frozen=True)
class Outline:
    """The outline so far.

    Attributes:
        points: the complete ones.
        ended: no further points count, so decoding can stop.
    """

    points: tuple[Point, ...]
    ended: bool

    @property
    def usable(self) -> bool:
        """True if there are enough points to expand."""
        return len(self.points) >= LEAST_POINTS


def read_outline(text: str, *, complete: bool = False) -> Outline:
    """Return the outline in the text written so far.

    Points are lines ``1. a few words`` with figures, letters or bullets, rows of a table, or
    headings. Skipped are thoughts, a short introduction with headings, and parts of a point:
    indented lines, bullets under a number, and a short text if the first points have one. Any other
    line after the first point ends the outline, as do a wrong number, a repeated title, and the
    largest number of points.

    Args:
        complete: the model has ended, so a last line without a line feed counts.
    """
    lines = answer_of(text).expandtabs(4).split("\n")
    rest = lines.pop() if not complete else ""
    listed = _read_list(_rows_as_items(lines), rest, complete)
    if not listed.usable:
        headed = _read_list(_headings_as_items(lines), rest, complete)
        if len(headed.points) > 1:
            return headed
    return listed


def _rows_as_items(lines: Sequence[str]) -> list[str]:
    """Return ``lines`` with the rows of tables as items of a list, and without their heads."""
    found, in_body = [], False
    for line in lines:
        if not line.lstrip().startswith("|"):
            found.append(line)
            in_body = False
        elif _TABLE_RULE.fullmatch(line):
            in_body = True
        else:
            first, _, others = line.strip().strip("|").partition("|")
            number = re.fullmatch(r"[\s*_]*(\d{1,2})[.)\s*_]*", first)
            if number:
                found.append(f"{number[1]}. {others.partition('|')[0].strip()}")
            elif in_body:
                found.append(f"- {first.strip()}")
    return found


def _headings_as_items(lines: Sequence[str]) -> list[str]:
    """Return the headings of one level as a numbered list, with the text below them indented.

    A line in bold counts as the lowest heading.
    """
    headings = [_HEADING.fullmatch(line) for line in lines]
    levels = [len(found["marks"] or "#" * 7) if found else 9 for found in headings]
    level = min((level for level in set(levels) - {9} if levels.count(level) > 1), default=0)
    found: list[str] = []
    number = 0
    for line, heading, own in zip(lines, headings, levels, strict=True):
        if heading and own == level:
            number += 1
            found.append(f"{number}. {heading['title']}")
        elif number:
            found.append(line if own < level else f"    {line}")
    return found


def _read_list(lines: Sequence[str], rest: str, complete: bool) -> Outline:
    """Return the outline in complete ``lines`` and ``rest``, the line being written."""
    points: list[Point] = []
    kind, indent, head, part = "", 0, 0, 0
    has_texts = False
    for line in lines:
        if not line.strip() or _RULE.fullmatch(line):
            continue
        item = _ITEM.fullmatch(line)
        if not points:
            if item is None or not _is_number(item, 1):
                head += len(line)
                continue
            kind, indent = _kind(item), len(item["indent"])
        elif (
            _indent(line) > indent + 1
            or (item and _kind(item) == "bullet" != kind)
            or re.match(rf"\s*{len(points)}\.\d", line)
        ):
            continue  # a part of the point before
        elif item is None and not _HEADING.fullmatch(line) and _may_be_text(points, has_texts):
            part += len(line)
            has_texts = True
            if part <= _PART_CHARACTERS:
                continue
        titles = {point.title.casefold() for point in points}
        number = len(points) + 1
        if (
            item is None
            or _kind(item) != kind
            or not _is_number(item, number)
            or _plain(item["title"]).casefold() in titles
            or number > MOST_POINTS
        ):
            return Outline(tuple(points), ended=True)
        points.append(Point(number, _plain(item["title"])))
        part = 0
    # Decoding can stop as soon as the line cannot become a point, or a part of one.
    if points:
        over = _indent(rest) <= indent + 1 and not _MAY_BECOME_ITEM.fullmatch(rest)
        if _may_be_text(points, has_texts):
            over = part + len(rest) > _PART_CHARACTERS
    else:
        over = head + len(rest) > _HEAD_CHARACTERS
    full = len(points) == MOST_POINTS
    return Outline(tuple(points), ended=complete or over or full)


def _may_be_text(points: Sequence[Point], has_texts: bool) -> bool:
    """Return True if a line without a number may be part of the last point.

    After enough points without such lines, it is the continuation of the answer.
    """
    return has_texts or len(points) < LEAST_POINTS


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _kind(item: re.Match[str]) -> str:
    """Return the kind of marker of a list item."""
    return "number" if item["number"] or item["sign"] else "letter" if item["letter"] else "bullet"


def _is_number(item: re.Match[str], number: int) -> bool:
    """Return True if an item may have this number; bullets may have any."""
    if item["sign"]:
        return unicodedata.digit(item["sign"][0]) == number
    if item["number"]:
        return int(item["number"]) == number
    names = (chr(ord("A") + number - 1), *_ROMAN[number - 1 : number])
    return not item["letter"] or item["letter"].upper() in names


def _plain(title: str) -> str:
    """Return a title without Markdown emphasis and final colon."""
    return re.sub(r"\*\*|__|^[*_]|[*_]$", "", title).strip().rstrip(": ") or title


def read_point(text: str) -> tuple[str, bool]:
    """Return the text of a point in the text written so far, and whether decoding can stop.

    A point is one paragraph. Thoughts, and the number that some models repeat, are removed.
    """
    begun = answer_of(text).lstrip()
    head, line_feed, _ = begun.partition("\n")
    match = _LINE.fullmatch(head)
    said = match[2] if match else head.rstrip()
    if line_feed and re.fullmatch(r"\s*\d{1,2}[.)]?\s*", head):  # a number on a line of its own
        return read_point(begun[len(head) + 1 :])
    return said, bool(line_feed)


def join_points(texts: Sequence[str]) -> str:
    """Return the answer: the points' texts in their order, numbered, each on a line."""
    present = [text.strip() for text in texts if text.strip()]
    return "\n".join(f"{i}. {text}" for i, text in enumerate(present, 1))


_MARK = "the-answer-before"


class OutlinePrompts:
    """Reader of outlines as tokens, and the prompts that follow them in the model's chat template.

    Args:
        begun_thought: marker of a thought in which every answer begins; usually empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, begun_thought: str = "") -> None:
        self._tokenizer = tokenizer
        self._begun_thought = begun_thought

    def ended(self, tokens: Sequence[int]) -> bool:
        """Return True if no further points of the outline in ``tokens`` count."""
        return read_outline(self._text(tokens)).ended

    def point_ended(self, tokens: Sequence[int]) -> bool:
        """Return True if the point in ``tokens`` is complete."""
        return read_point(self._text(tokens))[1]

    def requests(self, outline: Sequence[int]) -> list[list[int]]:
        """Return, for each point, the ids that follow the outline; empty with too few points."""
        read = read_outline(self._text(outline), complete=True)
        if not read.usable:
            return []
        eos = self._tokenizer.eos_token_id
        ended = bool(outline) and outline[-1] == eos
        return [self._turn_after(point.request, ended) for point in read.points]

    def _text(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return f"{self._begun_thought}{text}"

    def _turn_after(self, content: str, ended: bool) -> list[int]:
        """Return the ids of a user turn after an answer, up to the start of the next answer.

        Args:
            ended: the answer includes its end token.
        """
        turns = [Turn("user", "x"), Turn("assistant", _MARK), Turn("user", content)]
        rest = chat_text(self._tokenizer, turns).partition(_MARK)[2]
        if ended:
            rest = rest.removeprefix(str(self._tokenizer.eos_token))
        return list(self._tokenizer(rest, add_special_tokens=False).input_ids)


def chat_text(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]) -> str:
    """Return a chat in the model's template, up to the start of its answer."""
    from collab_llm_nodes.models.prompt import render  # imports torch; the rest needs it not

    chat = [{"role": turn.role, "content": turn.content} for turn in turns]
    return render(tokenizer, chat)
