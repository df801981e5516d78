"""The worker's replies as outputs: which are kept, and what of them.

An output is kept if it has the form asked for, gives an answer, and cites words that are there. Its
numbers must stand in the citation or in the task, so that a slip of the worker is not sent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix

from collab_llm_nodes.chat.base import Finish, Reply
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.knowledge.chunking import sentences
from collab_llm_nodes.models.guide import MAX_GUIDE_BYTES, Guide
from collab_llm_nodes.protocols.minions.abstention import says_nothing
from collab_llm_nodes.protocols.minions.jobs import Dropped, Job, JobManifest, JobOutput
from collab_llm_nodes.protocols.minions.prompts import NOT_FOUND, Form, Style
from collab_llm_nodes.protocols.minions.reading import worker_output

_MAX_FIELD = 2000
"""Length to which each field of an output is cut: a page of text is no extract [characters]."""
_ALIKE = 0.75
"""Share of a line that a miscopied citation must have in common with it."""
_MIN_CITED = 12
"""Shortest citation that is not a whole line [characters]."""
_MAX_CITED = 32
"""Longest citation [lines]."""
_AROUND = " \t\n\"'`*\u201c\u201d\u2018\u2019"
"""Marks around a sentence that are the model's, not the text's."""
_STAMP = re.compile(r"^[\W\d_]+")
_NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_WORD = re.compile(r"[a-z]+")
_COUNTS = "zero one two three four five six seven eight nine ten eleven twelve"
_MONTHS = "january february march april may june july august september october november december"
_NAMED = {
    name: str(number)
    for names, first in ((_COUNTS, 0), (_MONTHS, 1))
    for number, name in enumerate(names.split(" "), first)
}
"""Numbers that a text writes in English words, months included."""


def reply_form(style: Style, chunk: str) -> Guide | None:
    """Return the limit on a reply about ``chunk``; None if it has none."""
    if style.form is not Form.SENTENCE:
        return style.reply
    choices = dict.fromkeys(map(spoken, sentences(chunk)))
    texts = "\n".join([*(each for each in choices if len(each) >= _MIN_CITED), NOT_FOUND])
    return Guide("choice", texts) if len(texts.encode()) <= MAX_GUIDE_BYTES else None


def spoken(sentence: str) -> str:
    """Return ``sentence`` without a time, a date or a bullet before it.

    A model that writes token by token would have to choose a line of a log by its time.
    """
    return _STAMP.sub("", sentence) or sentence


def judged(
    manifest: JobManifest,
    reply: Reply | CollabError,
    style: Style,
    *,
    check_citations: bool,
    abstain_filter: bool,
) -> Job:
    """Return the job with its output, and why that is not sent if it is not."""
    if isinstance(reply, CollabError) or reply.finish is Finish.REFUSAL:
        return Job(manifest, JobOutput(), Dropped.FAILED)
    if reply.finish is not Finish.STOP:
        return Job(manifest, JobOutput(), Dropped.TRUNCATED)
    output = _output(reply.text, style, manifest.chunk)
    if output is None:
        return Job(manifest, JobOutput(), Dropped.UNREADABLE)
    if output.answer is None and abstain_filter:
        return Job(manifest, output, Dropped.ABSTAINED)
    if check_citations:
        supported = _supported(output, manifest)
        if supported is None:
            return Job(manifest, output, Dropped.UNSUPPORTED)
        output = supported
    if style.form is not Form.FIELDS:
        output = replace(output, citation=None)  # its answer contains the quotes
    return Job(manifest, output)


def _output(text: str, style: Style, chunk: str) -> JobOutput | None:
    if style.form is not Form.SENTENCE:
        quotes = style.form is Form.QUOTES
        return worker_output(text, quotes=quotes, max_characters=_MAX_FIELD)
    said = text.strip(_AROUND)
    if not said:
        return None
    if says_nothing(said):
        return JobOutput()
    whole = [each for each in sentences(chunk) if said in (each, spoken(each))]
    sentence = "; ".join(dict.fromkeys(whole or [said]))[:_MAX_FIELD]
    return JobOutput("", sentence, sentence)


def _supported(output: JobOutput, manifest: JobManifest) -> JobOutput | None:
    """Return ``output`` with its citation as the text has it; None if the text does not bear it."""
    cited = cited_lines(output.citation, manifest.chunk)
    if cited is None or not _numbers(output.answer or "") <= _numbers(f"{cited}\n{manifest.task}"):
        return None
    return _once(replace(output, citation=cited), manifest.chunk)


def cited_lines(citation: str | None, chunk: str) -> str | None:
    """Return ``citation`` as ``chunk`` has it, its lines joined by "; "; None if one is not there.

    A part of a line needs ``_MIN_CITED`` characters, since a letter occurs in any text. A small
    model miscopies rare names within a line; such a line is replaced by the one that it resembles.
    """
    lines = _lines(chunk)
    text = " ".join(lines)
    whole = " ".join((citation or "").split())
    if whole in lines or (len(whole) >= _MIN_CITED and whole in text):
        return whole
    cited = (citation or "").split("; ")
    if len(cited) > _MAX_CITED:
        return None
    found = []
    for line in cited:
        words = " ".join(line.split())
        true = words in lines or (len(words) >= _MIN_CITED and words in text)
        match = words if true else _resembled(words, lines)
        if not match:
            return None
        found.append(match)
    return "; ".join(found)


def _lines(chunk: str) -> list[str]:
    return [" ".join(line.split()) for line in chunk.splitlines()]


def _resembled(words: str, lines: Sequence[str]) -> str:
    """Return the only line that begins and ends as ``words`` do; empty if it is not unique."""
    shares = [(_shared(words, line), line) for line in dict.fromkeys(lines)]
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
    words = _WORD.findall(text.lower())
    named = {_NAMED[word] for word in words if word in _NAMED}
    return {_spelt(number) for number in _NUMBER.findall(text)} | named


def _spelt(number: str) -> str:
    """Return ``number`` without separators of thousands and zeros that mean nothing."""
    number = number.replace(",", "" if _THOUSANDS.fullmatch(number) else ".")
    whole, point, rest = number.partition(".")
    if not (whole + rest).isdigit():
        return number  # a time, a version, a date
    rest = rest.rstrip("0")
    return (whole.lstrip("0") or "0") + (point + rest if rest else "")
