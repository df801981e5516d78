"""Remote models that plan by queries: they read the protocols' prompts, and reply in their forms.

A plan needs to know what is asked for; the rest follows from the query by rule. ``Planner`` has a
small trained model tell the query. The benchmark's oracle tells it from the grammar of questions.
Both see nothing but what crosses the wire.
"""

from __future__ import annotations

import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from collab_llm_nodes.chat.base import (
    ChatModel,
    ChatRequest,
    Control,
    Finish,
    Reply,
    Told,
    Usage,
    tell_nobody,
)
from collab_llm_nodes.chat.in_process import InProcessChat, InProcessConfig
from collab_llm_nodes.chat.structured import last_object, text_of
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, ModelError
from collab_llm_nodes.models.loading import ModelConfig, load, model_folder
from collab_llm_nodes.models.low_rank import LowRank
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.dialogue import too_late
from collab_llm_nodes.protocols.minions.embedded.queries import Query, read_query
from collab_llm_nodes.protocols.minions.embedded.windows import WindowedChat, token_count
from collab_llm_nodes.protocols.minions.messages import CannotPlan
from collab_llm_nodes.protocols.minions.reduction import number

ROLE = "planner"
"""Name of the files beside the text target that make it a planner."""
PLANNER_PROMPT = "Plan: {question}"
UNKNOWN = "unknown"
"""The answer of a remote that must answer and knows nothing."""

_ROUND = re.compile(r"\A# Decomposition, round (\d+)\n")
_CHUNKER = re.compile(r"^def (\w+)\(doc: str, \w+: int = (\d+)\)", re.M)
_HEADING = re.compile(r"\ATask t\d+: (.*)\Z")
_REDUCED = re.compile(r"\A(?:sum|count|ratio|diff|max) of the answers: ")
_SMALLEST = 200
_REMEMBERED = 512
_REPLY_TOKENS = 64
_FRAME = 5
"""Tokens of a chat template around each turn."""


class PlannedRemote(ABC):
    """A ``chat.base.ChatModel`` that plans by queries.

    Args:
        name: the model's, in a price table.
        count: returns the number of tokens of a chat, or of a reply.
        reduce: let the robot compute, where prompts allow it.
    """

    def __init__(
        self, name: str, count: Callable[[Sequence[Turn]], int], *, reduce: bool = False
    ) -> None:
        self._name, self._count, self._reduce = name, count, reduce

    @property
    def name(self) -> str:
        return self._name

    def ask(
        self, requests: Sequence[ChatRequest], control: Control, told: Told = tell_nobody
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; CannotPlan for a question that this remote does not understand."""
        results: list[Reply | CollabError] = []
        for place, request in enumerate(requests):
            control.check()
            try:
                text = self._reply(request.turns, control)
            except CannotPlan as error:
                results.append(error)
            else:
                said = self._count((Turn("assistant", text),))
                results.append(Reply(text, Finish.STOP, Usage(self._count(request.turns), 0, said)))
            told(place, results[-1])
        return results

    @abstractmethod
    def close(self) -> None:
        """Free what the model holds."""

    @abstractmethod
    def understand(self, question: str, control: Control) -> Query:
        """Return ``question`` in short form.

        Raises:
            CannotPlan: it is beyond this remote.
        """

    @abstractmethod
    def read(self, text: str, question: str, control: Control) -> str:
        """Return the answer to ``question`` that ``text`` gives; UNKNOWN if there is none."""

    def findings(self, query: Query, task: int, answer: str, citation: str) -> list[str]:
        """Return the answers to a task in one output of the worker.

        With a line cited for each answer, those count whose line names what was asked about.
        """
        said = [part.strip() for part in answer.split(";") if part.strip()]
        cited = [line.lower() for line in citation.split("; ")]
        if len(cited) != len(said):
            return said
        names = [name.lower() for name in query.of[task]]
        return [
            part
            for part, line in zip(said, cited, strict=True)
            if not line or all(name in line for name in names)
        ]

    # ------------------------------------------------------------ the prompts of the protocols

    def _reply(self, turns: Sequence[Turn], control: Control) -> str:
        last = turns[-1].content
        begun = _ROUND.match(last)
        if begun:
            return self._plan(last, int(begun[1]), control)
        if "\n## Outputs of the jobs\n" in last:
            return self._synthesis(last, control)
        if "### Text\n" in last:
            question = _between(last, "\n\n### Question\n", "\n\nReply with", from_end=True)
            return self.read(_between(last, "### Text\n", "\n\n### Question\n"), question, control)
        return self._chat(turns, control)

    def _plan(self, prompt: str, round: int, control: Control) -> str:
        query = self.understand(_between(prompt, ":\n", "\n\nYou cannot read"), control)
        chunker, size = _CHUNKER.findall(prompt)[0]
        # A second look is a closer one: the small model reads short pieces better.
        closer = max(_SMALLEST, int(size) >> (round - 1)) if round > 1 else 0
        reduce = self._reduce and '"reduce"' in prompt
        return json.dumps(query.plan(chunker, size=closer, reduce=reduce))

    def _synthesis(self, prompt: str, control: Control) -> str:
        query = self.understand(
            _between(prompt, "## Question\n", "\n\n## Outputs of the jobs\n"), control
        )
        outputs = _between(prompt, "are not meant for you.\n", "\n## What to do\n")
        if _REDUCED.match(outputs):
            value = number(outputs.split(": ", 1)[1])
            answer = None if value is None else f"{value:.4f}".rstrip("0").rstrip(".")
        else:
            answer = query.answer(self._found(query, outputs.splitlines()))
        if answer is None and "request_additional_info" in prompt:
            missing = {"missing_info": "a statement on each of the tasks"}
            return json.dumps({"decision": "request_additional_info", **missing})
        return _final(answer)

    def _found(self, query: Query, lines: Sequence[str]) -> list[list[str]]:
        """Return the answers to each task in the outputs of jobs, chunk by chunk."""
        found: list[list[str]] = [[] for _ in query.of]
        tasks = {task: place for place, task in enumerate(query.tasks)}
        place: int | None = None
        known: set[tuple[int, str, str]] = set()
        for line in lines:
            heading = _HEADING.match(line)
            if heading:
                place = tasks.get(heading[1])
                continue
            output = last_object(line, ("answer",))
            if place is None or output is None:
                continue
            answer = text_of(output.content, "answer") or ""
            citation = text_of(output.content, "citation") or ""
            chunk = str(output.content.get("job", "")).split("_")[0]
            for said in self.findings(query, place, answer, citation):
                if (place, chunk, said) not in known:  # another sample of the same job
                    known.add((place, chunk, said))
                    found[place].append(said)
        return found

    def _chat(self, turns: Sequence[Turn], control: Control) -> str:
        """Reply in Minion: ask one task after the other, then answer."""
        question = _between(turns[0].content, "### Question\n", "\n\nYou cannot read")
        query = self.understand(question, control)
        heard = [
            _between(turn.content, "### Answer\n", "\n\n### What to do\n")
            for turn in turns[1:]
            if turn.role == "user"
        ]
        if len(heard) < len(query.of) and "This was its last answer." not in turns[-1].content:
            message = {"message": query.tasks[len(heard)]}
            if heard:
                message = {"decision": "request_additional_info", **message}
            return json.dumps(message)
        found: list[list[str]] = [[] for _ in query.of]
        for place, reply in enumerate(heard[: len(query.of)]):
            for line in reply.splitlines():
                answer, _, citation = line.partition(" (")
                if answer.lower() != "none":
                    found[place] += self.findings(query, place, answer, citation.removesuffix(")"))
        return _final(query.answer(found))


def _final(answer: str | None) -> str:
    return json.dumps({"decision": "provide_final_answer", "answer": answer or UNKNOWN})


def _between(text: str, before: str, after: str, *, from_end: bool = False) -> str:
    """Return the part of ``text`` between two marks, empty without them."""
    start = text.rfind(before) if from_end else text.find(before)
    if start < 0:
        return ""
    start += len(before)
    end = text.find(after, start)
    return text[start:end] if end >= 0 else text[start:]


class Planner(PlannedRemote):
    """The embedded remote: the text target in a role of its own tells the query.

    Args:
        model: tells queries; closed with this.
        reader: answers questions from a text; closed with this.
    """

    def __init__(
        self,
        name: str,
        model: ChatModel,
        reader: ChatModel,
        count: Callable[[Sequence[Turn]], int],
        *,
        reduce: bool = True,
    ) -> None:
        super().__init__(name, count, reduce=reduce)
        self._model, self._reader = model, reader
        self._understood: dict[str, Query | CannotPlan] = {}
        self._lock = threading.Lock()  # of _understood: answers are given side by side

    def close(self) -> None:
        self._model.close()
        self._reader.close()

    def understand(self, question: str, control: Control) -> Query:
        with self._lock:
            found = self._understood.get(question)
        if found is None:
            found = self._told(question, control)
            with self._lock:
                while len(self._understood) >= _REMEMBERED:
                    self._understood.pop(next(iter(self._understood)))
                self._understood[question] = found
        if isinstance(found, CannotPlan):
            raise found
        return found

    def _told(self, question: str, control: Control) -> Query | CannotPlan:
        turns = (Turn("user", PLANNER_PROMPT.format(question=question)),)
        reply = _in_full(self._model, ChatRequest(turns, max_tokens=_REPLY_TOKENS), control)
        query = read_query(reply.text)
        if query is None:
            return CannotPlan("it is unlike the questions that the planner has learnt")
        # Keys are copied from the question; others were made up.
        words = question.lower()
        if any(key.lower() not in words for keys in query.of for key in keys):
            return CannotPlan("the planner does not recognise the names in it")
        return query

    def read(self, text: str, question: str, control: Control) -> str:
        prompt = prompts.DIRECT.format(context=text, question=question)
        request = ChatRequest((Turn("user", prompt),), max_tokens=_REPLY_TOKENS)
        return _in_full(self._reader, request, control).text.strip() or UNKNOWN


def _in_full(model: ChatModel, request: ChatRequest, control: Control) -> Reply:
    """Return the model's reply.

    Raises:
        DeadlineExceeded: it had to break off; half a reply says something else than the whole.
        CollabError: what has ended the request.
    """
    (reply,) = model.ask([request], control)
    if isinstance(reply, CollabError):
        raise reply
    if reply.finish is Finish.DEADLINE:
        raise too_late()
    return reply


def open_planner(
    config: ModelConfig,
    name: str = ROLE,
    limits: InProcessConfig | None = None,
    *,
    reduce: bool = True,
) -> Planner:
    """Return the embedded remote: the text target as planner, and as it is as reader.

    Args:
        name: of the model, in a price table.
        limits: of the reader.

    Raises:
        ModelError: the model or its role is absent, or they do not belong together.
    """
    folder = model_folder(config)
    if not (folder / f"{ROLE}.json").is_file():
        raise ModelError(
            f"{folder} holds no {ROLE}.json: this model has not learnt to plan",
            field="role",
            remedy="train it (collab-llm train minions), or name a remote of your own",
        )
    planner, reader = load(config), load(config)
    LowRank.load(folder, ROLE, planner.model).merge()
    length = token_count(reader.tokenizer)

    def count(turns: Sequence[Turn]) -> int:
        frame = _FRAME * len(turns) + (_FRAME if turns[-1].role == "user" else 0)
        return sum(length(turn.content) for turn in turns) + frame

    return Planner(
        name,
        InProcessChat(Engine(planner), name=ROLE),
        WindowedChat(InProcessChat(Engine(reader), limits, "reader"), length),
        count,
        reduce=reduce,
    )
