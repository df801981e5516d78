"""The worker's citations, and answers against them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix

from collab_llm_nodes.knowledge.words import words
from collab_llm_nodes.protocols.minions.jobs import JobManifest, JobOutput

_ALIKE = 0.75
"""Share of a line that a miscopied citation must have in common with it."""
MIN_CITED = 12
"""Shortest citation that is not a whole line [characters]."""
_MAX_CITED = 32
"""Longest citation [lines]."""
_NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_COUNTS = "zero one two three four five six seven eight nine ten eleven twelve"
_MONTHS = "january february march april may june july august september october november december"
_NAMED = {
    name: str(number)
    for names, first in ((_COUNTS, 0), (_MONTHS, 1))
    for number, name in enumerate(names.split(" "), first)
}
"""Numbers that a text writes in English words, months included."""


def supported_output(output: JobOutput, manifest: JobManifest) -> JobOutput | None:
    """Return ``output`` with its citation as the text has it; None if the text does not bear it."""
    cited = cited_lines(output.citation, manifest.chunk)
    if cited is None or not _numbers(output.answer or "") <= _numbers(f"{cited}\n{manifest.task}"):
        return None
    return _once(replace(output, citation=cited), manifest.chunk)


def cited_lines(citation: str | None, chunk: str) -> str | None:
    """Return ``citation`` as ``chunk`` has it, its lines joined by "; "; None if one is not there.

    A part of a line needs ``MIN_CITED`` characters, since a letter occurs in any text. A small
    model miscopies rare names within a line; such a line is replaced by the one that it resembles.
    """
    lines = _lines(chunk)
    text = " ".join(lines)
    whole = " ".join((citation or "").split())
    if whole in lines or (len(whole) >= MIN_CITED and whole in text):
        return whole
    cited = (citation or "").split("; ")
    if len(cited) > _MAX_CITED:
        return None
    found = []
    for line in cited:
        given = " ".join(line.split())
        true = given in lines or (len(given) >= MIN_CITED and given in text)
        match = given if true else _resembled(given, lines)
        if not match:
            return None
        found.append(match)
    return "; ".join(found)


def _lines(chunk: str) -> list[str]:
    return [" ".join(line.split()) for line in chunk.splitlines()]


def _resembled(given: str, lines: Sequence[str]) -> str:
    """Return the only line that begins and ends as ``given`` does; empty if it is not unique."""
    shares = [(_shared(given, line), line) for line in dict.fromkeys(lines)]
    alike = [line for share, line in shares if share >= _ALIKE]
    return alike[0] if len(alike) == 1 else ""


def _shared(a: str, b: str) -> float:
    """Return the length of the common prefix and suffix as a share of the longer text."""
    short, long = sorted((len(a), len(b)))
    if short < _ALIKE * long or not short:
        return 0.0
    begin, end = commonprefix([a, b]), commonprefix([a[::-1], b[::-1]])
    return min(len(begin) + len(end), short) / long


def _once(output: JobOutput, chunk: str) -> JobOutput:
    """Return ``output`` without repetitions of a line that the text does not repeat.

    The answers that belong to them go as well, if there is one for each line.
    """
    lines = (output.citation or "").split("; ")
    answers = (output.answer or "").split("; ")
    there = Counter(_lines(chunk))
    seen: Counter[str] = Counter()
    first = []
    for line in lines:
        seen[line] += 1
        first.append(seen[line] <= max(there[line], 1))
    if all(first):
        return output
    if len(answers) == len(lines):
        answers = [answer for answer, keep in zip(answers, first, strict=True) if keep]
    kept = [line for line, keep in zip(lines, first, strict=True) if keep]
    return replace(output, citation="; ".join(kept), answer="; ".join(answers))


def _numbers(text: str) -> set[str]:
    """Return the numbers in ``text`` in one spelling each; those in words, too."""
    named = {_NAMED[word] for word in words(text) if word in _NAMED}
    return {_spelt(number) for number in _NUMBER.findall(text)} | named


def _spelt(number: str) -> str:
    """Return ``number`` without separators of thousands and zeros that mean nothing."""
    number = number.replace(",", "" if _THOUSANDS.fullmatch(number) else ".")
    whole, point, rest = number.partition(".")
    if not (whole + rest).isdigit():
        return number  # a time, a version, a date
    rest = rest.rstrip("0")
    return (whole.lstrip("0") or "0") + (point + rest if rest else "")
