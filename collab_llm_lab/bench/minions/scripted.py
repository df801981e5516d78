"""The remote of a file of questions when no large model is at hand: rules instead of understanding.

It knows what stands in the file about a question, its tasks and the places that answer it, but not
the answer. Of the documents it sees only what crosses the wire.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from collab_llm_lab.bench.minions.question_files import DIFFERENCE, SUM, Question, digits, stands_in
from collab_llm_nodes.chat.base import (
    ChatRequest,
    Control,
    Finish,
    OnResult,
    Reply,
    Usage,
    ask_in_turn,
    ignore_result,
)
from collab_llm_nodes.chat.structured import last_object
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.knowledge.bm25 import bm25
from collab_llm_nodes.knowledge.chunking import sentences
from collab_llm_nodes.knowledge.words import words
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.chunkers import offered
from collab_llm_nodes.protocols.minions.embedded.queries import format_number
from collab_llm_nodes.protocols.minions.embedded.remote import UNKNOWN
from collab_llm_nodes.protocols.minions.messages import CannotPlan
from collab_llm_nodes.protocols.minions.plan import number
from collab_llm_nodes.protocols.minions.reading import as_text

_LEAST_SHARE = 0.6
"""Share of a task's words that an output must have to be believed, if no place is known. Chosen on
the questions for development."""
_SMALL_WORDS = frozenset(
    words(
        "a an and are as at be by can do does for from has have how if in is it its many may must"
        " of on or that the their them they this to was were what when where which who whom will"
        " with you your"
    )
)
_STEM = 5
"""Letters by which two words count as the same: "vote", "votes" and "voters" do."""


class Finding(NamedTuple):
    """An answer of the worker, and the words that it cites."""

    answer: str
    citation: str


class ScriptedRemote:
    """``chat.base.ChatModel`` that plans by the file, and believes what cites the right place.

    If the file names no place, as for what is never written, it believes the output most like the
    task, if that has most of its words. A task without an answer is given again, over smaller
    pieces; what was found before counts as long as the remote can read it, in its notes or in the
    conversation.

    Args:
        questions: those that may be asked, by their text.
    """

    name = "oracle"

    def __init__(self, questions: Iterable[Question]) -> None:
        self._known = {question.question.strip(): question for question in questions}

    def ask(
        self,
        requests: Sequence[ChatRequest],
        control: Control,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; a question that is not in the file gives CannotPlan."""
        return ask_in_turn(requests, control, on_result, self._answer, CannotPlan)

    def close(self) -> None:
        """Do nothing: there is no model."""

    def _answer(self, request: ChatRequest) -> Reply:
        return Reply(self._reply(request.turns), Finish.STOP, Usage())

    def _reply(self, turns: Sequence[Turn]) -> str:
        last = turns[-1].content
        lines = [line for turn in turns for line in turn.content.splitlines()]
        if values := prompts.read_back(prompts.DECOMPOSE, last, "question"):
            question, number = self._question(values["question"]), int(values["round"])
            return _plan(question, number, last, _answers(question, lines))
        if values := prompts.read_back(prompts.SYNTHESIZE, last, "outputs"):
            question = self._question(values["question"])
            return _synthesis(question, _answers(question, lines), values["decisions"])
        if values := prompts.read_back(prompts.DIRECT, last, "context"):
            return _read(self._question(values["question"]), values["context"])
        raise CannotPlan("the scripted remote knows MinionS, RAG and remote only")

    def _question(self, text: str) -> Question:
        found = self._known.get(text.strip())
        if found is None:
            raise CannotPlan("the scripted remote knows only the questions of its file")
        return found


def tasks_of(question: Question) -> tuple[str, ...]:
    """Return the tasks for the worker."""
    return question.tasks or (question.question,)


def _plan(question: Question, number: int, prompt: str, known: Sequence[Finding | None]) -> str:
    """Return the plan of a round; later rounds cut the text smaller, if they may choose a size."""
    chunker, size = offered(prompt)
    tasks = [
        {"task": task, "advice": ""}
        for task, finding in zip(tasks_of(question), known, strict=True)
        if finding is None
    ]
    plan = {"tasks": tasks, "over": "documents", "chunker": chunker}
    return json.dumps({**plan, "size": size >> (number - 1)})


def _synthesis(question: Question, found: Sequence[Finding | None], decisions: str) -> str:
    if None in found and prompts.MORE in decisions:
        return json.dumps(
            {
                "decision": prompts.MORE,
                "missing_info": "a statement on each task",
                "scratchpad": _notes(question, found),
            }
        )
    return json.dumps({"decision": prompts.FINAL, "answer": _combined(question, found)})


def _notes(question: Question, found: Sequence[Finding | None]) -> str:
    """Return what was found in the form in which outputs are read."""
    lines = ["Found so far:"]
    for place, (task, finding) in enumerate(zip(tasks_of(question), found, strict=True), 1):
        if finding is not None:
            lines += [
                prompts.TASK_HEADING.format(number=place, task=task),
                json.dumps({"citation": finding.citation, "answer": finding.answer}),
            ]
    return "\n".join(lines)


def _read(question: Question, context: str) -> str:
    """Return the answer to a question about a whole text: its best sentence."""
    texts = [Finding(text, text) for text in sentences(context)]
    return _combined(question, [_believed(*task, texts) for task in _placed(question)])


def _placed(question: Question) -> list[tuple[str, tuple[str, ...]]]:
    """Return each task with the places that answer it."""
    tasks, cited = tasks_of(question), question.cited
    if len(cited) != len(tasks):
        return [(task, cited) for task in tasks]
    return [(task, (place,)) for task, place in zip(tasks, cited, strict=True)]


def _answers(question: Question, lines: Iterable[str]) -> list[Finding | None]:
    """Return the believed output for each task; None without one."""
    outputs: dict[str, list[Finding]] = {task: [] for task in tasks_of(question)}
    task = ""
    for line in lines:
        heading = prompts.read_back(prompts.TASK_HEADING, line)
        if heading is not None:
            task = heading["task"]
            continue
        output = last_object(line, ("answer",))
        answer = output and as_text(output.content.get("answer"))
        if output and answer and task in outputs:
            citation = as_text(output.content.get("citation"))
            outputs[task].append(Finding(answer, citation or answer))
    return [_believed(task, places, outputs[task]) for task, places in _placed(question)]


def _believed(task: str, places: Sequence[str], outputs: Sequence[Finding]) -> Finding | None:
    """Return the output that cites one of ``places``, or is most like the task without any."""
    least = 0.0 if places else _LEAST_SHARE
    if places:
        outputs = [
            each for each in outputs if any(stands_in(each.citation, place) for place in places)
        ]
    scores = bm25(_content(task), [_content(each.citation) for each in outputs])
    best = max(range(len(outputs)), key=scores.__getitem__, default=None)
    if best is None or _share(task, outputs[best].citation) < least:
        return None
    return outputs[best]


def _share(task: str, text: str) -> float:
    asked, there = set(_content(task).split()), set(_content(text).split())
    return len(asked & there) / max(1, len(asked))


def _content(text: str) -> str:
    """Return the beginnings of the words that carry meaning."""
    return " ".join(word[:_STEM] for word in words(text) if word not in _SMALL_WORDS)


def _combined(question: Question, found: Sequence[Finding | None]) -> str:
    answers = [finding.answer for finding in found if finding is not None]
    if len(answers) < len(found):
        return UNKNOWN
    if question.combine not in (SUM, DIFFERENCE):
        return "; ".join(answers)
    numbers = [number(digits(answer)) for answer in answers]
    if None in numbers:
        return UNKNOWN
    values = [value for value in numbers if value is not None]
    result = sum(values) if question.combine == SUM else abs(values[0] - sum(values[1:]))
    return format_number(result)
