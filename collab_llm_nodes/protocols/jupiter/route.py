"""The decision which questions suit an answer along an outline (paper 004, section V-B).

Points do not see each other, so the answer differs from the one written in sequence. Declined are
questions where that would do harm: those with "chained logical dependencies", and those for short
answers. An account of records is such a chain, since its rows, sums and findings must agree. So is
an order to act, since findings follow the action. A short question has to ask for breadth (causes,
ways, a comparison, "explain"). The answer in sequence is always right, so doubt declines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

CODE, MATHEMATICS, CHAINED, SHORT = "code", "mathematics", "chained reasoning", "short answer"
RECORDS, ORDER = "an account of records", "an order to act"
"""Reasons to decline an outline."""


@dataclass(frozen=True)
class Route:
    """Decision for a question: an outline, or an answer in sequence for a ``reason``."""

    reason: str = ""

    @property
    def outline(self) -> bool:
        """True if an outline suits the question."""
        return not self.reason


def route(question: str, max_tokens: int | None = None) -> Route:
    """Return the decision for ``question``, by rules on its wording.

    Args:
        max_tokens: limit of the answer; below ``LEAST_TOKENS`` there is no outline.
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
"""Fewest records for an account to add up or compare."""

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
"""Wording that asks for breadth."""
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
    # The object is a thing, not a topic.
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
    """Count the lines, or parts between semicolons, with figures besides list numbers."""
    parts = re.split(r"[\n;]", text)
    return sum(_NUMBER.search(_LIST_NUMBER.sub("", part, count=1)) is not None for part in parts)


def _sentences(paragraph: str) -> list[str]:
    """Return the sentences of more than one word."""
    return [s.strip() for s in _SENTENCE.findall(paragraph) if len(s.split()) > 1]


def _is_short(sentences: Sequence[str]) -> bool:
    """Return True if a few words, or one passage, answer the question."""
    if len(sentences) < _SENTENCES_OF_A_TALK and not any(map(_BROAD.search, sentences)):
        return True
    facts = sum(
        len(s.split()) <= _WORDS_OF_A_FACT
        and _FACT.match(s) is not None
        and _EXPLAINS.search(s) is None
        for s in sentences
    )
    return 2 * facts >= max(len(sentences), 1)
