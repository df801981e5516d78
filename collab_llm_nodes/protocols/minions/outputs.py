"""The worker's replies as outputs: which are kept, and what of them.

An output is kept if it has the form asked for, gives an answer, and cites words that are there. Its
numbers must stand in the citation or in the task, so that a slip of the worker is not sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from collab_llm_nodes.chat.base import Finish, Reply
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.knowledge.bm25 import bm25
from collab_llm_nodes.knowledge.chunking import sentences
from collab_llm_nodes.knowledge.words import words
from collab_llm_nodes.models.guide import MAX_GUIDE_BYTES, Guide
from collab_llm_nodes.protocols.minions.abstention import says_nothing
from collab_llm_nodes.protocols.minions.citations import MIN_CITED, supported_output
from collab_llm_nodes.protocols.minions.jobs import Dropped, Job, JobManifest, JobOutput
from collab_llm_nodes.protocols.minions.prompts import NOT_FOUND, Form, Style
from collab_llm_nodes.protocols.minions.reading import worker_output

_MAX_FIELD = 2000
"""Length to which each field of an output is cut: a page of text is no extract [characters]."""
_AROUND = " \t\n\"'`*\u201c\u201d\u2018\u2019"
"""Marks around a sentence that are the model's, not the text's."""
_STEM = 5
"""Letters that words with the same meaning have in common [characters]."""
_OF_TASKS = (
    "the and for are was were did does has have had how who whom what which where when why this"
    " that with from many much name find list give tell extract state text document sentence"
)
_ASKING = frozenset(words(_OF_TASKS))
"""Words of any task."""
_STAMP = re.compile(r"^[\W\d_]+")


def reply_form(style: Style, chunk: str) -> Guide | None:
    """Return the limit on a reply about ``chunk``; None if it has none."""
    if style.form is not Form.SENTENCE:
        return style.reply
    choices = dict.fromkeys(map(spoken, sentences(chunk)))
    texts = "\n".join([*(each for each in choices if len(each) >= MIN_CITED), NOT_FOUND])
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
    output = _output(reply.text, style, manifest)
    if output is None:
        return Job(manifest, JobOutput(), Dropped.UNREADABLE)
    if output.answer is None and abstain_filter:
        return Job(manifest, output, Dropped.ABSTAINED)
    if check_citations:
        supported = supported_output(output, manifest)
        if supported is None:
            return Job(manifest, output, Dropped.UNSUPPORTED)
        output = supported
    if style.form is not Form.FIELDS:
        output = replace(output, citation=None)  # its answer contains the quotes
    return Job(manifest, output)


def best_first(jobs: Sequence[Job]) -> list[Job]:
    """Return ``jobs`` with the best output of each task first, then the second best of each, ...

    The best one is the one most like its task, by BM25.
    """
    tasks: dict[int, list[Job]] = {}
    for job in jobs:
        tasks.setdefault(job.manifest.task_id, []).append(job)
    ranked: list[tuple[int, Job]] = []
    for own in tasks.values():
        scores = bm25(own[0].manifest.task, [_said(job) for job in own])
        order = sorted(range(len(own)), key=lambda i: -scores[i])
        ranked += enumerate(own[i] for i in order)
    return [job for _, job in sorted(ranked, key=lambda each: each[0])]


def _said(job: Job) -> str:
    return f"{job.output.citation or ''} {job.output.answer or ''}"


def _output(text: str, style: Style, manifest: JobManifest) -> JobOutput | None:
    if style.form is not Form.SENTENCE:
        quotes = style.form is Form.QUOTES
        return worker_output(text, quotes=quotes, max_characters=_MAX_FIELD)
    said = text.strip(_AROUND)
    if not said:
        return None
    if says_nothing(said):
        return JobOutput()
    whole = [each for each in sentences(manifest.chunk) if said in (each, spoken(each))]
    sentence = "; ".join(dict.fromkeys(whole or [said]))[:_MAX_FIELD]
    if not _are_related(sentence, manifest.task):
        return JobOutput()
    return JobOutput("", sentence, sentence)


def _are_related(sentence: str, task: str) -> bool:
    """Return True if a sentence shares a word with its task, endings aside.

    A small worker hardly ever abstains, and would send a sentence of each piece.
    """
    asked = _stems(task)
    return not asked or not asked.isdisjoint(_stems(sentence))


def _stems(text: str) -> set[str]:
    long = (word for word in words(text) if len(word) > 2 or word.isdigit())
    return {word.removesuffix("s")[:_STEM] for word in long if word not in _ASKING}
