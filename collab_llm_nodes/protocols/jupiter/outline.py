"""Outlines: which questions suit them, how points are read, asked for and joined (paper 004, V-B).

The answer is written in three stages. The model lists numbered points, each point is expanded in a
lane of its own, and the texts are joined. Points do not see each other, so the answer differs from
the one written in sequence; ``route`` declines questions where that would do harm: those with
"chained logical dependencies", and those for short answers. An account of given records is such a
chain, too. Its rows, sums and findings follow from one another, and all must agree. So is an order
to act: what is found there is told after going there. A short question has to ask for breadth
(causes, ways, a comparison, "explain"); the answer in sequence is never wrong.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from collab_llm_nodes.models.thoughts import answer_of
from collab_llm_nodes.models.turns import Turn

OUTLINE_DIRECTIVE = "Give an outline only: 3 to 8 numbered points of a few words each."
# It names the point: a small model does not find a title by its number.
POINT_DIRECTIVE = "Write point {number} ({title}) in one or two sentences."
LEAST_POINTS, MOST_POINTS = 3, 8

CODE, MATHEMATICS, CHAINED, SHORT = "code", "mathematics", "chained reasoning", "short answer"
RECORDS, ORDER = "an account of records", "an order to act"
"""Reasons to decline an outline."""


@dataclass(frozen=True)
class Route:
    """The way to answer a question: by outline, or in sequence for a ``reason``."""

    reason: str = ""

    @property
    def outline(self) -> bool:
        """True if an outline suits the question."""
        return not self.reason


def route(question: str, max_tokens: int | None = None) -> Route:
    """Return the way to answer ``question``, by rules on its wording.

    Args:
        max_tokens: limit of the answer, if any: one below ``LEAST_TOKENS`` needs no outline.
    """
    if max_tokens is not None and max_tokens < LEAST_TOKENS:
        return Route(SHORT)
    for reason, pattern in _DECLINED:
        if pattern.search(question):
            return Route(reason)
    if len(_NUMBER.findall(question)) >= 2 and _AMOUNT.search(_last_paragraph(question)):
        return Route(MATHEMATICS)
    if _ACCOUNT.search(question) and _count_records(question) >= LEAST_RECORDS:
        return Route(RECORDS)
    paragraph = _last_paragraph(question)
    sentences = _sentences(paragraph)
    if _LOOKS_AND_TELLS.match(paragraph):
        return Route(ORDER)
    acts = sum(_ACTS.search(sentence) is not None for sentence in sentences)
    if acts and (2 * acts >= len(sentences) or len(sentences) < _SENTENCES_OF_A_TALK):
        return Route(ORDER)
    return Route(SHORT if _is_short(sentences) else "")


LEAST_TOKENS = 48
"""Tokens of the shortest answer worth an outline: three points of a sentence each."""
LEAST_RECORDS = 2
"""Fewest records that an account of them adds up or compares."""

_FLAGS = re.IGNORECASE | re.DOTALL
_MAKE = r"\b(?:write|implement|fix|debug|refactor|optimi[sz]e|develop|create|define|review|test)\b"
_UNITS = (
    r"(?:(?:kilo|centi|milli)?met(?:er|re)s?|km|cm|mm|miles?|feet|inch(?:es)?|yards?|kg"
    r"|(?:kilo)?grams?|pounds?|lbs?|ounces?|lit(?:er|re)s?|gallons?|celsius|fahrenheit|kelvin|euros?|dollars?|binary"
    r"|hex(?:adecimal)?|decimal|roman numerals)"
)
_CODE_THING = (
    r"\b(?:functions?|programs?|scripts?|code|class(?:es)?|algorithms?|methods?|quer(?:y|ies)|regex|"
    r"regular expressions?|unit tests?|api|app|web ?site|web ?page|loop|decorator|makefile)\b"
)
_DECLINED = tuple(
    (reason, re.compile(pattern, _FLAGS))
    for reason, pattern in (
        (
            CODE,
            r"```|\b(?:python|javascript|typescript|java|golang|sql|html|css|bash|numpy|ros 2"
            rf"|regex|in rust)\b|\bC(?:\+\+|#)|{_MAKE}[^.?!\n]{{0,60}}{_CODE_THING}",
        ),
        (
            MATHEMATICS,
            r"\d\s*[+*^=×÷]\s*\(?[\dx]|\d\s+[-/]\s+\d|\b[xy]\s*=|\b(?:calculate|compute|equations?"
            r"|integrals?|derivatives?|probabilit(?:y|ies)|prime numbers?|factorial|square root"
            r"|perimeter|divisible|remainder|polynomial|theorem|prove that|percent of|average of"
            r"|median of|sum of|product of|area of (?:a|the) (?:circle|triangle|rectangle|square)"
            r")\b",
        ),
        (
            CHAINED,
            r"\b(?:think|reason|work it out|show your (?:work|reasoning))\b[^.?!]{0,30}\bstep"
            r"|\bdeduce\b|\blogic(?:al)? (?:puzzle|problem)|\b(?:this|the) (?:riddle|teaser)\b"
            r"|\bif (?:all|every|some|no) \w+ (?:are|is|can|have)\b"
            r"|\b\w+(?:er|less) than\b.*\b\w+(?:er|less) than\b|\bmust be true\b|\bwho is lying\b",
        ),
        (
            SHORT,
            r"\bin (?:one|a single|a few|two) (?:words?|sentences?|phrases?)\b|\byes or no\b"
            r"|\btrue or false\b|\bbriefly\b|\bone[- ]word\b|\b(?:in|as|return|give) json\b"
            r"|\banswer (?:only|with words)\b|\btranslate\b"
            r"|\b(?:repeat|say|copy|reproduce|duplicate|transcribe|echo|parrot|issue an exact"
            r"|return the data|type this|write down the following)\b"
            r"[^.?!]{0,40}(?::|\bword\b|\bverbatim\b|\bunchanged\b|\bexactly\b|\bbelow\b)"
            r"|\bverbatim copy\b|\bwithout any change\b|\bnothing (?:added|left out)\b"
            r"|\b(?:repeated|copied|reproduced) (?:unchanged|exactly|verbatim|word)\b"
            r"|\b(?:repeat|copy) (?:that|this|it|the text)(?:, please)?[.!]"
            r"|\bsay (?:it|them) back\b"
            rf"|\bconvert(?:ed)?\b[^.?!]{{0,60}}(?:\d|\b(?:to|into) {_UNITS}\b)"
            r"|\bhow (?:do|would|can|should|to) (?:(?:you|I|we|one) )?(?:say|spell|pronounce)\b",
        ),
    )
)
_NUMBER = re.compile(r"\b\d+(?:[.,]\d+)?\b")
_AMOUNT = re.compile(r"\bhow (?:many|much|long|far|fast|old)\b[^?]*\?", _FLAGS)
_FACT = re.compile(
    r"(?:\w+, )?(?:question: |task: |state for the record: )?"
    r"(?:(?:could you )?(?:tell me|say|state) )?(?:(?:at|for|in) [^,:?]{1,60}[,:] )?"
    r"(?:(?:with|in|under|by|to|from|for) )?"
    r"(?:who|whose|whom|when|where|which"
    r"|on what|at what|what number|what(?:'s| is| was| are| were| time| day| colour| color| year)"
    r"|what (?:room|thing|name|code|serial|temperature)"
    r"|what (?:did|does) [^?]{1,60} (?:cost|spend|pay|weigh)"
    r"|the (?:day|place|number|colour|color|name|code|time|price|charge|amount)|count"
    r"|how (?:old|tall|far|long|big|much|many|often|fast|warm|high)|is|are|was|were|does|do|did"
    r"|has|have|name the|give me (?:the|\w+'s))\b",
    re.IGNORECASE,
)
_EXPLAINS = re.compile(
    r"\b(?:explain|describe|discuss|compare|list|outline|why|steps|ways|tips|advantages|benefits"
    r"|differences?|reasons|causes|effects|impacts?|consequences|pros|ideas|plan|guide|would|if"
    r"|strategies|challenges|factors|features|principles|importance|role|implications|main|key|best|how"
    r" (?:do|to|can|could|does|should|did|has|have))\b",
    re.IGNORECASE,
)
_ACCOUNT = re.compile(
    r"\b(?:reports?|summar(?:y|ies|i[sz]e)|minutes|statements?|invoices?|bills?|inventor(?:y|ies)"
    r"|balances?|accounts?|budgets?|tables?|tabulate|totals?|evaluat(?:e|ion)|analy(?:s[ei]s?|ze)"
    r"|interpret)\b",
    re.IGNORECASE,
)
_BROAD = re.compile(
    r"\b(?:explain|describe|discuss|debate|contrast|evaluate|assess|analy[sz]e|brainstorm|elaborate"
    r"|suggest|recommend|advise|advice|tips|ways|steps|stages|ideas|pros|cons|advantages"
    r"|disadvantages|benefits|drawbacks|strengths|weaknesses|limitations|risks|trade-?offs"
    r"|differences?|similarit(?:y|ies)|differs?|compare|comparison|reasons|causes|effects|impacts?"
    r"|consequences|outcomes|implications|strategies|challenges|problems|factors|features|aspects"
    r"|principles|methods|techniques|approaches|arguments|importance|significance|influenced?"
    r"|role of|cycle of|history of|overview|introduction|guide|essay|article|report|proposal"
    r"|speech|presentation|imagine|suppose|why|what if|tell me (?:more |all |everything )?about"
    r"|what (?:should|would|could|might|makes|happens|to (?:consider|expect|bring|pack|look))"
    r"|(?:meal|trip|travel|lesson|project|business|study|training|action) plan"
    r"|plan (?:a|an|my|our|for) (?!path|route)|programme|curriculum|itinerary|agenda|checklist"
    r"|how (?:do|does|did|can|could|should|would|might|to|has|have) \w+"
    r"|how (?:is|are|was|were) [^?]{1,60} (?:made|built|done|\w{2,}ed)|(?:right|best) way to|recipe"
    r"|what (?:do|must|can) (?:I|we|you) (?:need|do)|(?:instructions|directions) (?:for|on|to))\b",
    re.IGNORECASE,
)
"""Wording that asks for more than one thing to be said."""
_ADDRESS = (
    r"^\W*(?:(?:please|kindly|just|robot|now|then|next|first|ok(?:ay)?|hey),?\s+"
    r"|(?:can|could|will|would) you\s+|(?:I want|I need|I(?:'d| would) like) you to\s+"
    r"|(?:go|come|try) (?:and|to)\s+)*"
)
_ACTS = re.compile(
    _ADDRESS + r"(?:go (?!over|through|into|on\b)"
    r"|(?:drive|move|walk|run|roll|head|navigate|return|come|travel) (?!me through|up with|on\b)"
    r"|turn (?:left|right|around|back|to|toward|on|off)|follow (?:me|him|her|them|the|that)"
    r"|look (?:around|left|right|up|down|behind|under|out)|(?:take|lead|guide) me (?:to|there|home)"
    r"|take a (?:picture|photo|look)|pick up|approach the"
    r"|(?:stop|wait|halt|rotate|patrol|fetch|bring|grab|dock)\b)"
    r"|\bwhat (?:(?:do|did|can) )?you (?:see|saw|hear|heard|notice|spot)\b",
    re.IGNORECASE,
)
_LOOKS_AND_TELLS = re.compile(
    _ADDRESS
    + r"(?:look|see|check|inspect|examine|observe|watch|listen|scan|search|find|locate|spot|count"
    r"|measure|detect|survey|explore|investigate|monitor|photograph|film|smell|touch|feel|read"
    r"|climb|approach|enter|leave|cross|circle|visit|ascend|descend|step|crawl|jump|pass|reach|proceed"
    r"|open|close|push|pull|press|lift|knock|take the|get (?:to|into|out|closer|near)"
    r"|(?:go|drive|move|walk|run|roll|head|navigate|return|come|travel|turn|follow)"
    r"(?! (?:over|through|on|me through|up with)\b))\s"
    # What is looked at is a thing, no topic.
    r"(?!(?:(?:at|for|into|out)\s)?(?:\w+\s){0,2}"
    r"(?:causes|reasons|effects|impacts?|consequences|roles?|history|origins?|importance|significance"
    r"|(?:dis)?advantages|benefits|drawbacks|pros|ways|steps|methods|strategies|tips|ideas?|concepts?"
    r"|principles|theor(?:y|ies)|arguments|challenges|factors|differences?|similarities|relationship"
    r"|topics?|themes?)\b)"
    r".{0,200}?(?:[,;.!]|\b(?:and|then|to))\s+"
    r"(?:(?:and|then|also|please|can you|could you),?\s+){0,3}"
    r"(?:tell|explain|describe|discuss|compare|list|name|say|give|report|show|suggest|recommend"
    r"|advise|summari[sz]e|outline|write|let me know|come back|answer)\b",
    _FLAGS,
)
"""Orders to look or go somewhere and to describe or explain something there."""
_LIST_NUMBER = re.compile(r"\s*\d{1,2}[.)]\s")
_SENTENCE = re.compile(r"[^.?!\n]+[.?!]*")
_WORDS_OF_A_FACT = 16
_SENTENCES_OF_A_TALK = 3


def _last_paragraph(text: str) -> str:
    paragraphs = [part for part in re.split(r"\n\s*\n", text.strip()) if part.strip()]
    return paragraphs[-1] if paragraphs else ""


def _count_records(text: str) -> int:
    """Return how many lines, or parts between semicolons, have figures other than a list's."""
    parts = re.split(r"[\n;]", text)
    return sum(_NUMBER.search(_LIST_NUMBER.sub("", part, count=1)) is not None for part in parts)


def _sentences(paragraph: str) -> list[str]:
    """Return the sentences of more than one word."""
    return [s.strip() for s in _SENTENCE.findall(paragraph) if len(s.split()) > 1]


def _is_short(sentences: Sequence[str]) -> bool:
    """Tell whether a few words, or one passage, answer a question."""
    if len(sentences) < _SENTENCES_OF_A_TALK and not any(map(_BROAD.search, sentences)):
        return True
    facts = sum(
        len(s.split()) <= _WORDS_OF_A_FACT
        and _FACT.match(s) is not None
        and _EXPLAINS.search(s) is None
        for s in sentences
    )
    return 2 * facts >= max(len(sentences), 1)


@dataclass(frozen=True)
class Point:
    """A point of an outline, numbered from 1."""

    number: int
    title: str

    @property
    def request(self) -> str:
        """The user's turn that asks for its text."""
        return POINT_DIRECTIVE.format(number=self.number, title=self.title)


def outline_question(question: str) -> str:
    """Return the user's turn that asks for the outline of an answer."""
    return f"{question}\n\n{OUTLINE_DIRECTIVE}"


def guided_turns(directive: str, turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return ``turns`` with ``directive`` before all else, in front of a system turn's own text."""
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
        points: complete ones.
        ended: no further point will count, so decoding can stop.
    """

    points: tuple[Point, ...]
    ended: bool

    @property
    def usable(self) -> bool:
        """True if there are enough points to expand; else answer in sequence."""
        return len(self.points) >= LEAST_POINTS


def read_outline(text: str, *, complete: bool = False) -> Outline:
    """Return the outline in what the model has written so far.

    Points are lines ``1. a few words``, counted by figures or letters, bullets, rows of a table, or
    headings. Left out are thoughts, a short introduction with headings, and the parts of a point:
    indented lines, bullets under a number, and a short text, if the first points have one. Any
    other line after the first point ends the outline, as do a wrong number, a title for the second
    time, and the last point allowed.

    Args:
        complete: the model has ended; a last line without a line feed counts.
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
    """Return ``lines`` from the first of several like headings on, as a numbered list of these.

    What stands below them is indented. A line in bold counts as the lowest heading.
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
    """Return the outline in complete ``lines``, of which ``rest`` is the one under way."""
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
    # The line under way may be cut off as soon as it cannot become a point, or a part of one.
    if points:
        over = _indent(rest) <= indent + 1 and not _MAY_BECOME_ITEM.fullmatch(rest)
        if _may_be_text(points, has_texts):
            over = part + len(rest) > _PART_CHARACTERS
    else:
        over = head + len(rest) > _HEAD_CHARACTERS
    full = len(points) == MOST_POINTS
    return Outline(tuple(points), ended=complete or over or full)


def _may_be_text(points: Sequence[Point], has_texts: bool) -> bool:
    """Return True if a line without a number may be a part of the last point.

    After enough points without such lines it is where the answer goes on.
    """
    return has_texts or len(points) < LEAST_POINTS


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _kind(item: re.Match[str]) -> str:
    """Return what an item of a list begins with."""
    return "number" if item["number"] or item["sign"] else "letter" if item["letter"] else "bullet"


def _is_number(item: re.Match[str], number: int) -> bool:
    """Tell whether an item may be the one of that number; bullets have none."""
    if item["sign"]:
        return unicodedata.digit(item["sign"][0]) == number
    if item["number"]:
        return int(item["number"]) == number
    names = (chr(ord("A") + number - 1), *_ROMAN[number - 1 : number])
    return not item["letter"] or item["letter"].upper() in names


def _plain(title: str) -> str:
    """Return a title without Markdown's emphasis, and without a colon at its end."""
    return re.sub(r"\*\*|__|^[*_]|[*_]$", "", title).strip().rstrip(": ") or title


def read_point(text: str) -> tuple[str, bool]:
    """Return the text of a point in what its lane has written, and whether the lane can stop.

    A point is one paragraph. A number before it, as some models repeat it, is left out, and so are
    thoughts.
    """
    begun = answer_of(text).lstrip()
    head, line_feed, _ = begun.partition("\n")
    match = _LINE.fullmatch(head)
    said = match[2] if match else head.rstrip()
    if line_feed and re.fullmatch(r"\s*\d{1,2}[.)]?\s*", head):  # a number on a line of its own
        return read_point(begun[len(head) + 1 :])
    return said, bool(line_feed)


def join_points(texts: Sequence[str], *, numbered: bool = True) -> str:
    """Return the answer: the points' texts in their order, each on a line.

    Args:
        numbered: with their numbers, for instructions and lists; else as sentences that follow one
            another.
    """
    present = [text.strip() for text in texts if text.strip()]
    if not numbered:
        return " ".join(present)
    return "\n".join(f"{i}. {text}" for i, text in enumerate(present, 1))
