"""Part what an instruction may ask for now from what it only tells.

    Anna went to the sofa, find the red ball.        find the red ball.
    Once I call you, go to the red box.              (nothing)
    Walk to the table... forget it, find the cone.   find the cone.

Statements about what somebody does or did, questions that no motion answers, requests for later,
and all that stands before a word that takes it back ask for nothing. Words that are not listed here
are taken for a request: ``asked_thing.py`` judges it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from collab_llm_nodes.robot.naming import Named
from collab_llm_nodes.robot.parts import REQUEST_VERBS

_VERBS = "|".join(sorted(REQUEST_VERBS))
_BEGIN = r"^\W*(?:(?:and|but|so|hey|hello|robot|now|well)\b\W*)*"
_MOVING = "going|walking|driving|running|heading|coming|moving|looking|searching"
_OTHERS = "the|an?|my|his|her|our|their|he|she|they|we|somebody|someone|anybody|anyone"
_SEVERAL = "two|three|four|five|six|ten|fifteen|twenty|thirty|half an|some|a few"
_GOALS = "you|your|like|goal|destination|mission|order|request|plan|task|missing|lost|where"


def _any_of(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)


_FOR_LATER = _any_of(
    r"(?<!\bat )\b(?:once|when|whenever|the moment|every time|each time|next time) "
    r"(?!(?:you|possible|ready|done|convenient|free|again|more|and|has|of)\b"
    r"|(?:i|he|she|we|they) (?:was|were|had)\b)",
    r"\bas soon as (?!you\b|possible\b)",
    rf"(?<!\bsee )(?<!\bcheck )\bif (?!the (?:way|path) is)(?:{_OTHERS})\b",
    rf"{_BEGIN}(?:please )?(?:wait|stay|stand|rest|hold on)\b.*\b(?:until|till|before)\b",
    rf"{_BEGIN}(?:until|till)\b",
    r"\bafter (?:breakfast|lunch|dinner|supper|tea|work|school)\b",
    rf"{_BEGIN}should (?:{_OTHERS})\b|\bon my (?:signal|command|mark)\b|\bwith my permission\b",
    r"\bat (?:\d{1,2}(?::\d\d| ?[ap]m| o'clock)|noon|midnight)\b|\b(?:tonight|next week)\b"
    r"|\bon (?:mon|tues|wednes|thurs|fri|satur|sun)days?\b",
    rf"\b(?:in|wait) (?:\d{{1,4}}|{_SEVERAL}) (?:seconds|minutes|hours|days)\b",
    # of somebody's words, the end may look like a request
    r"\b(?:says|said|shouts?|shouted|told) (?!you\b)",
)
_TELLS = _any_of(
    # questions
    rf"{_BEGIN}(?:who|whom|whose|which)\b",
    rf"{_BEGIN}why\b(?! (?:not|do not|don|dont)\b)",
    rf"{_BEGIN}how\b(?! about\b)",
    rf"{_BEGIN}what\b(?! (?:about|if|i|we)\b)",
    rf"{_BEGIN}(?:do|did) you\b(?! (?:mind|think you|want to)\b)",
    rf"{_BEGIN}(?:is|are|was|were|does|has|had) (?!there\b|it\b|you\b)",
    rf"{_BEGIN}(?:should|shall|must) i\b|{_BEGIN}is it (?:safe|dangerous)\b",
    rf"\btell me (?:about|a|the)\b|{_BEGIN}tell (?!me\b)",
    # statements
    rf"{_BEGIN}(?:{_OTHERS}|this|that|in)\b(?!.*\b(?:{_VERBS}|{_GOALS})\b)"
    r".*(?<!\bthat )(?<!\bwhich )\b(?:is|are|was|were|has|had|looks|seems|should)\b",
    r"(?<!\bwas )(?<!\bthat )(?<!\bwhich )\b(?:walked|drove|came|bought|ran|moved) ",
    r"(?<!\bif you )\bwent\b",
    r"\bgot to (?:the|a|an|that)\b",
    r"(?<!\bwhen you )(?<!\bonce you )(?<!\bif you )"
    r"\b(?:already|have|has|had|never) (?:found|seen|reached|visited)\b",
    rf"(?<!\byou)(?:'s| is| was| were) (?:{_MOVING})\b",
    r"\bi (?:wish|dreamt|dreamed|remember|used to)\b|\bi(?:'m| am) going\b",
    rf"{_BEGIN}i (?:think|love|hate)\b(?!.*\b(?:{_VERBS}|{_GOALS})\b)",
    rf"\b(?:thanks|thank you) for (?:{_MOVING}|finding|visiting)\b",
)
_SENTENCE = re.compile(r"[^.!?;\n]+[.!?;\n]*")
_NEXT_CLAUSE = re.compile(
    rf"[,:](?= (?:(?:please|so|now|then|and|just|quickly|robot) ){{0,3}}(?:{_VERBS})\b)",
    re.IGNORECASE,
)
_REASON = re.compile(r"\bbecause\b[^,.!?;:\n]*", re.IGNORECASE)
_QUOTED = re.compile(
    r"\b(?:say|says|said|shouts?|shouted|reads?|yells?|yelled|asked)\b[:,]? "
    r"[\"\N{LEFT DOUBLE QUOTATION MARK}][^\"\N{RIGHT DOUBLE QUOTATION MARK}]*",
    re.IGNORECASE,
)
_CORRECTION = re.compile(
    r"\b(?:no,? wait|i meant?\b(?! (?:it|that|this|now|soon|business)\b)|scratch that|correction"
    r"|on second thoughts?|just kidding|i take (?:it|that) back|ignore (?:it|that|me))\b"
    r"|[.,!?;\n] ?(?:(?:actually|wait|please|no),? ){0,3}(?:cancel|disregard|nope|no|don'?t)\W*$",
    re.IGNORECASE,
)
_TAKES_BACK = re.compile(
    r"(?:\b(?:cancel|disregard|scrap|(?<!not )(?<!n't )(?<!dont )(?<!never )forget) (?:about )?"
    r"(?:it|that|this|all|everything(?! else)|my|what|the \w+(?: \w+)? thing"
    r"|(?:the|your|our) (?:trip|walk|drive|order|request|task|mission|instruction|command))\b"
    r"|\b(?:changed? my mind|change of plans?|no action|withdrawn|cancell?ed|called off)\b"
    r"|\bnever ?mind(?=\s*(?:[,.!?;\n]|$)))(?:(?! and )[^,.:;!?\n])*",
    re.IGNORECASE,
)
_LAST_LATIN = "\u024f"
_IT = re.compile(r"\b(?:it|there|one|them)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Asking:
    """The parts of an instruction: what it asks for, and what it only tells."""

    asked: str
    told: tuple[str, ...]
    """Sentences; what they exclude stays excluded."""


def asking(instruction: str) -> Asking:
    """Return the parts of ``instruction``, in linear time."""
    if any(letter.isalpha() and letter > _LAST_LATIN for letter in instruction):
        return Asking("", (instruction,))  # in such words an English name may be a forbidden one
    text = re.sub(r"[^\S\n]+", " ", instruction.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    told = [match[0] for pattern in (_REASON, _QUOTED) for match in pattern.finditer(text)]
    text = _QUOTED.sub("", _REASON.sub("", text))
    back = (*_TAKES_BACK.finditer(text), *_CORRECTION.finditer(text))
    begin = max((match.end() for match in back), default=0)
    earlier = _SENTENCE.findall(text[: min((match.start() for match in back), default=0)])
    told += earlier[:-1]  # the last one is taken back
    asked: list[str] = []
    stated: list[str] = []
    for sentence in _SENTENCE.findall(text[begin:]):
        if any(pattern.search(sentence) for pattern in _FOR_LATER):
            told.append(sentence)
            continue
        for clause in _NEXT_CLAUSE.sub("\n", sentence).split("\n"):
            tells = any(pattern.search(clause) for pattern in _TELLS)
            (stated if tells else asked).append(clause)
    request = ", ".join(asked)
    if _IT.search(request) and not Named(request).things:  # "the cat moved the red ball. find it"
        request = ", ".join((*stated, *asked))
    return Asking(request, (*told, *stated))
