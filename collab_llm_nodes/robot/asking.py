"""Keep the sentences of an instruction that may ask for something now.

    Anna went to the sofa. Find the red ball.        Find the red ball.
    Once I call you, go to the red box.              (nothing)
    Walk to the table... forget it, find the cone.   find the cone.

Left out are statements about what somebody does or did, questions that no motion answers, requests
for later, and all that comes before a word that takes it back. A sentence in words that are not
listed here is kept: ``asked_thing.py`` judges it.
"""

from __future__ import annotations

import re

_SENTENCE = re.compile(r"[^.!?;\n]+[.!?;\n]*")
_BEGIN = r"^\W*(?:(?:and|but|so|hey|hello|robot|now|well)\b\W*)*"
_MOVING = "going|walking|driving|running|heading|coming|moving|looking|searching"
_OTHERS = "the|an?|my|his|her|our|their|he|she|they|we|somebody|someone|anybody|anyone"
_REQUESTS = (
    "find|go|get|walk|run|drive|move|come|head|look|search|reach|visit|approach|want|need|like|you"
    "|your|please|goal|target|task|missing|lost|where"
)
_ASKS_NOTHING = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # questions
        rf"{_BEGIN}(?:who|whom|whose|which)\b",
        rf"{_BEGIN}why\b(?! (?:not|do not|don|dont)\b)",
        rf"{_BEGIN}how\b(?! about\b)",
        rf"{_BEGIN}what\b(?! (?:about|if|i|we)\b)",
        rf"{_BEGIN}(?:do|did) you\b(?! (?:mind|think you|want to)\b)",
        rf"{_BEGIN}(?:is|are|was|were|does|has|had) (?!there\b|it\b|you\b)",
        r"\btell me (?:about|a|the)\b",
        # statements
        rf"{_BEGIN}(?:{_OTHERS}|this|that|in)\b(?!.*\b(?:{_REQUESTS})\b)"
        r".*(?<!\bthat )(?<!\bwhich )"
        r"\b(?:is|are|was|were|has|had|says?|said|shouts?|looks|seems|should)\b",
        r"\b(?:walked|drove|came|bought|ran|moved) ",
        r"(?<!\bif you )\bwent\b",
        r"\bgot to (?:the|a|an|that)\b",
        r"\b(?:already|have|has|had|just|never) (?:found|seen|reached|visited)\b",
        r"\btold (?!you\b)",
        rf"(?<!\byou)(?:'s| is| was| were) (?:{_MOVING})\b",
        r"\bi (?:wish|dreamt|dreamed|remember|used to)\b|\bi(?:'m| am) going\b",
        rf"{_BEGIN}i (?:think|love|hate)\b(?!.*\b(?:{_REQUESTS})\b)",
        rf"\b(?:thanks|thank you) for (?:{_MOVING}|finding|visiting)\b",
        # requests for later
        r"(?<!\bat )\b(?:once|when|the moment|every time|each time|next time) "
        r"(?!you\b|possible\b|ready\b|done\b|convenient\b|free\b|again\b|more\b|and\b)",
        r"\bas soon as (?!you\b|possible\b)",
        rf"(?<!\bsee )(?<!\bcheck )\bif (?:{_OTHERS})\b",
        r"\b(?:until|till) (?:i|we|he|she|they|somebody|someone)\b",
        r"\bafter (?:breakfast|lunch|dinner|supper|tea|work|school)\b",
    )
)
_CORRECTION = re.compile(r"\b(?:no,? wait|i meant?|scratch that)\b", re.IGNORECASE)
_REASON = re.compile(r"\bbecause\b[^,.!?;\n]*", re.IGNORECASE)
_QUOTED = re.compile(
    r"\b(?:say|says|said|shouts?|shouted|reads?|yells?|yelled|asked)\b[:,]? "
    r"[\"\N{LEFT DOUBLE QUOTATION MARK}][^\"\N{RIGHT DOUBLE QUOTATION MARK}]*",
    re.IGNORECASE,
)
_TAKES_BACK = re.compile(
    r"(?:\b(?:cancel|disregard|scrap|(?<!not )(?<!n't )forget) "
    r"(?:it|that|this|all|everything|my|what|the \w+(?: \w+)? thing)\b"
    r"|\b(?:changed? my mind|change of plans?|on second thoughts?|no action|withdrawn|cancell?ed"
    r"|called off)\b|\bnever ?mind(?=\s*(?:[,.!?;\n]|$)))[^,.;!?\n]*",
    re.IGNORECASE,
)


def asking(instruction: str) -> str:
    """Return ``instruction`` without what asks for nothing now, in linear time."""
    instruction = _QUOTED.sub("", _REASON.sub("", instruction))
    taken_back = (*_TAKES_BACK.finditer(instruction), *_CORRECTION.finditer(instruction))
    begin = max((match.end() for match in taken_back), default=0)
    sentences = _SENTENCE.findall(instruction[begin:])
    return "".join(s for s in sentences if not any(p.search(s) for p in _ASKS_NOTHING)).strip()
