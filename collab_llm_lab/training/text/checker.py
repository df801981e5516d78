"""The grammar's judgement of an answer: right for its question, or one reason why it is not."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from collab_llm_lab.phrases import says, words
from collab_llm_lab.training.text import facts, skills
from collab_llm_lab.training.text.samples import Sample

_NUMBERED = re.compile(r"(\d{1,2})\. (.+)")
_ENDINGS = (".", "!", "?")
_MAX_CHARACTERS = 20_000


@cache
def lexicon(sub_domain: str) -> frozenset[str]:
    """Return every word that the grammar can say in answers of a sub-domain, without its fields."""
    grammars = (skills.DOMAINS[sub_domain].GRAMMAR, facts.GRAMMAR, skills.GRAMMAR)
    return frozenset(word for grammar in grammars for word in grammar.words)


def check(sample: Sample, answer: str) -> str:
    """Return "" if `answer` is right for the last question of `sample`, else one short reason.

    Extracted and copied answers must be exact but for case, spaces and a full stop. Longer answers
    may have any wording of the grammar. They must repeat the names and numbers of the right answer,
    use no word or number that neither the grammar nor the question has, keep their form and come
    to an end.
    """
    text = answer.strip()
    if not text:
        return "the answer is empty"
    if len(text) > _MAX_CHARACTERS:
        return "the answer is too long"
    return _CHECKS[sample.skill](sample, text)


def _normal(text: str) -> str:
    return " ".join(text.lower().split()).strip(" .\"'")


def _exact(right: str, text: str) -> str:
    return "" if _normal(text) == _normal(right) else f"not {right[:40]!r}"


def _check_extract(sample: Sample, text: str) -> str:
    right = sample.facts["answer"]
    if sample.facts["form"] == "short":
        return _exact(right, text)
    reply = _object(text)
    if reply is None or set(reply) != {"explanation", "citation", "answer"}:
        return "not a JSON object with explanation, citation and answer"
    if not isinstance(reply["explanation"], str) or not reply["explanation"].strip():
        return "no explanation"
    if right == "None":
        found = reply["answer"] is not None or reply["citation"] is not None
        return "the text has no answer" if found else ""
    if not isinstance(reply["answer"], str) or _exact(right, reply["answer"]):
        return f"the answer is not {right[:40]!r}"
    citation = reply["citation"]
    passage = next(turn.content for turn in sample.turns if turn.role == "user")
    if not isinstance(citation, str) or not citation or citation not in passage:
        return "the citation is not in the text"
    return "" if _normal(right) in _normal(citation) else "the citation does not hold the answer"


def _object(text: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _check_copy(sample: Sample, text: str) -> str:
    right = sample.facts["answer"]
    return "" if " ".join(text.split()) == " ".join(right.split()) else "not the same text"


def _check_prose(sample: Sample, text: str) -> str:
    """Check the properties that all free answers share."""
    return (
        _missing(sample, text)
        or unknown_word(sample, text)
        or _repeated(text)
        or ("" if text.endswith(_ENDINGS) else "the answer does not come to an end")
    )


def _mentions(sample: Sample) -> tuple[str, ...]:
    found: tuple[str, ...] = sample.facts.get("mentions", ())
    return found


def _missing(sample: Sample, text: str) -> str:
    for mention in _mentions(sample):
        if not says(text, mention):
            return f"does not mention {mention[:40]!r}"
    return ""


def unknown_word(sample: Sample, text: str) -> str:
    """Return an error about the first word that neither grammar nor question has, else ""."""
    known = set(lexicon(sample.sub_domain))
    for turn in sample.turns[:-1]:
        known.update(words(turn.content))
    for mention in _mentions(sample):
        known.update(words(mention))
    for word in words(_NUMBERED_LINE.sub("", text)):
        if word not in known:
            return f"{word[:40]!r} is in neither the question nor the grammar"
    return ""


_NUMBERED_LINE = re.compile(r"^\d{1,2}\. ", re.MULTILINE)
_SENTENCE = re.compile(r"[.!?\n]\s*")


def _repeated(text: str) -> str:
    sentences = Counter(part.strip().lower() for part in _SENTENCE.split(text) if len(part) > 8)
    if sentences and max(sentences.values()) > 2:
        return "a sentence comes more than twice"
    return ""


def _check_plain(sample: Sample, text: str) -> str:
    if not 0.6 <= len(text.split()) / sample.facts["words"] <= 1.6:
        return "the answer is too short or too long"
    return _FORMS[sample.sub_domain](sample, text) or _check_prose(sample, text)


def _conversation(sample: Sample, text: str) -> str:
    user = _mentions(sample)[0].lower()
    return "" if user in words(text)[-40:] else "the talk does not come to its end"


def _instructions(sample: Sample, text: str) -> str:
    lines = text.splitlines()
    numbers = [i for i, line in enumerate(lines) if _NUMBERED.fullmatch(line)]
    if len(numbers) < 3:
        return "fewer than three numbered steps"
    if [lines[i].split(".")[0] for i in numbers] != [str(i + 1) for i in range(len(numbers))]:
        return "the steps are not numbered in order"
    if numbers[0] != 1 or numbers[-1] != len(lines) - 3:
        return "not tools, steps, warning and result"
    return ""


def _reports(sample: Sample, text: str) -> str:
    rows = [line for line in text.splitlines() if " | " in line][1:]
    right = [mention for mention in _mentions(sample) if " | " in mention]
    if rows != right:
        return "the table is not right"
    last = text.splitlines()[-1]
    if not last.startswith(("Signed", "Prepared", "Respectfully")):
        return "the report is not signed"
    return ""


def _check_outline(sample: Sample, text: str) -> str:
    titles, least = sample.facts["titles"], sample.facts["least"]
    lines = text.splitlines()
    rest = iter(titles)
    for i, line in enumerate(lines, 1):
        match = _NUMBERED.fullmatch(line.strip())
        if match is None or match[1] != str(i):
            return f"point {i} is not numbered so"
        if not any(match[2] in wordings for wordings in rest):
            return f"point {i} does not belong here"
    return "" if least <= len(lines) else "points are missing"


def _check_point(sample: Sample, text: str) -> str:
    for word in words(text):
        if word not in sample.facts["vocabulary"]:
            return f"{word[:40]!r} does not belong to this point"
    return _check_prose(sample, text)


def _check_document(sample: Sample, text: str) -> str:
    if sample.facts["generic"]:
        return _check_plain(sample, text)
    return _check_prose(sample, text)


_FORMS: Mapping[str, Callable[[Sample, str], str]] = {
    "conversation": _conversation,
    "instructions": _instructions,
    "reports": _reports,
}
_CHECKS: Mapping[str, Callable[[Sample, str], str]] = {
    "plain": _check_plain,
    "extract": _check_extract,
    "recall": _check_extract,
    "document": _check_document,
    "outline": _check_outline,
    "point": _check_point,
    "copy": _check_copy,
}
