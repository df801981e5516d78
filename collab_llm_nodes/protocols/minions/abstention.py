"""Answers that say that there is none, such as "N/A" or "The document does not mention it".

English only: other languages are read as answers. Time is linear in the length of the text.
"""

from __future__ import annotations

import re

UNKNOWN = "unknown"
"""The text of an answer without content."""

_LONGEST = 400
"""Longest text that can be an abstention [characters]."""
_REST = r"(?:[^.;!?]|\.(?=\w))*"
"""The rest of a sentence; a period within a number or a name ends none."""
_TEXT = (
    r"(?:(?:the|this|that|these|given|provided|above) ){0,3}"
    r"(?:text|document|passage|piece|excerpt|context|log|manual|report|record|file|section|output|"
    r"source)s?(?: (?:provided|given|above))?"
)
_SAY = (
    r"(?:say|state|mention|specify|give|provide|contain|include|indicate|tell|answer|address|"
    r"discuss|describe|settle|list|name|report|talk|refer|support)"
)
_NOT = r"(?:not|n['\u2019]t)"
_IN_TEXT = rf" (?:in|by|from|within|on|based on) (?:it|{_TEXT}){_REST}"
_FORMS = (
    r"none|null|nil|n[./]a|nothing(?: found)?|unknown|unanswerable|no answer(?: found)?|-+",
    r"(?:not |un)(?:found|mentioned|stated|specified|given|provided|available|applicable|known)",
    r"not(?: \w+ly)?(?: (?:found|mentioned|stated|specified|given|provided|available|present))?"
    rf"{_IN_TEXT}",
    rf"(?:it|{_TEXT}) (?:do(?:es)?|did) ?{_NOT} (?:\w+ly )?{_SAY}{_REST}",
    r"(?:there (?:is|was|are) )?(?:no|not any|insufficient|not enough) (?:\w+ )?"
    rf"(?:information|mention|answer|data|statement|reference|indication)\b{_REST}",
    rf"{_REST}\b(?:is|are|was|were) ?{_NOT} (?:\w+ly )?(?:mentioned|stated|specified)"
    rf"(?:{_IN_TEXT}| here| anywhere)?",
    rf"{_REST}\b(?:is|are|was|were) ?{_NOT} (?:\w+ly )?(?:found|given|provided|included|available)"
    rf"{_IN_TEXT}",
    rf"(?:i|we) (?:can(?:not| not|['\u2019]t)|could ?{_NOT}|(?:am|are|was|were) unable to"
    rf"|do(?: not|n['\u2019]t)) (?:find|answer|determine|tell|locate|see|know){_REST}",
    rf"(?:{_REST} )?can(?:not| not|['\u2019]t) be (?:determined|answered|found|inferred){_REST}",
)
_NOTHING = re.compile("|".join(f"(?:{form})" for form in _FORMS))
_ASIDE = re.compile(rf"(?:it|{_TEXT}) (?:only|just) {_REST}")
"""A sentence that may follow an abstention: "It only mentions the pump"."""
_BETWEEN = re.compile(r"(?<=[.!?;])\s+")


def says_nothing(text: str) -> bool:
    """Return True if ``text`` gives no answer: every sentence of it abstains."""
    if len(text) > _LONGEST:
        return False
    sentences = [_plain(each) for each in _BETWEEN.split(text.strip())]
    first, *others = sentences or [""]
    return _abstains(first) and all(_abstains(each) or _ASIDE.fullmatch(each) for each in others)


def _abstains(sentence: str) -> bool:
    return not sentence or _NOTHING.fullmatch(sentence) is not None


def _plain(sentence: str) -> str:
    """Return a sentence in lower case, without marks at its ends."""
    words = " ".join(sentence.lower().split())
    return words.strip(" \"'`*_()[]{}<>.,;:!?\u201c\u201d\u2018\u2019")
