"""Remote models that plan by queries: they read the protocols' prompts and reply in their forms.

The plan follows from the query by rule. ``Planner`` gets the query from a small trained model, and
the benchmark's oracle from the grammar of questions. Both see only the text that crosses the wire.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from collab_llm_nodes.chat.base import (
    ChatModel,
    ChatRequest,
    Control,
    Finish,
    OnResult,
    Reply,
    Usage,
    ask_in_turn,
    ignore_result,
)
from collab_llm_nodes.chat.in_process import InProcessChat, InProcessConfig
from collab_llm_nodes.chat.structured import last_object
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, ModelError
from collab_llm_nodes.models.loading import ModelConfig, load, model_folder
from collab_llm_nodes.models.low_rank import LowRank
from collab_llm_nodes.models.trained import SUBFOLDER, holds_trained
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.chunkers import offered
from collab_llm_nodes.protocols.minions.dialogue import reply_cut_off
from collab_llm_nodes.protocols.minions.embedded.queries import Query, format_number, read_query
from collab_llm_nodes.protocols.minions.embedded.windows import NOTHING, WindowedChat, token_count
from collab_llm_nodes.protocols.minions.messages import CannotPlan
from collab_llm_nodes.protocols.minions.plan import RULES, number
from collab_llm_nodes.protocols.minions.reading import as_text

ROLE = "planner"
"""Name of the files trained with the text target that make it a planner."""
PLANNER_PROMPT = "Plan: {question}"
UNKNOWN = "unknown"
"""Forced answer of a remote without findings."""

_SMALLEST = 200
"""Smallest pieces of a later round [characters]."""
_REMEMBERED = 512
"""Questions whose queries are remembered."""
_REPLY_TOKENS = 64
_FRAME = 5
"""Tokens of a chat template around each turn."""


class PlannedRemote(ABC):
    """``chat.base.ChatModel`` that plans by queries.

    Args:
        name: of the model, as in a price table.
        count: returns the number of tokens of a chat, or of a reply.
        reduce: have the robot compute, if the prompt allows it.
    """

    def __init__(
        self, name: str, count: Callable[[Sequence[Turn]], int], *, reduce: bool = False
    ) -> None:
        self._name, self._count, self._reduce = name, count, reduce

    @property
    def name(self) -> str:
        return self._name

    def ask(
        self,
        requests: Sequence[ChatRequest],
        control: Control,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; a question that is not understood gives CannotPlan."""

        def reply(request: ChatRequest) -> Reply:
            text = self._reply(request.turns, control)
            decode = self._count((Turn("assistant", text),))
            return Reply(text, Finish.STOP, Usage(self._count(request.turns), 0, decode))

        return ask_in_turn(requests, control, on_result, reply, CannotPlan)

    @abstractmethod
    def close(self) -> None:
        """Free the models."""

    @abstractmethod
    def understand(self, question: str, control: Control) -> Query:
        """Return ``question`` as a query.

        Raises:
            CannotPlan: this remote does not understand it.
        """

    @abstractmethod
    def read(self, text: str, question: str, control: Control) -> str:
        """Return the answer to ``question`` in ``text``; UNKNOWN without one."""

    def findings(self, query: Query, task: int, answer: str, citation: str) -> list[str]:
        """Return the answers to a task in one output of the worker.

        If there is a cited line for each answer, it must contain the keys of the query.
        """
        answers = [part.strip() for part in answer.split(";") if part.strip()]
        cited = [line.lower() for line in citation.split("; ")]
        if len(cited) != len(answers):
            return answers
        names = [name.lower() for name in query.of[task]]
        return [
            part
            for part, line in zip(answers, cited, strict=True)
            if not line or all(name in line for name in names)
        ]

    # ------------------------------------------------------------ the prompts of the protocols

    def _reply(self, turns: Sequence[Turn], control: Control) -> str:
        last = turns[-1].content
        if values := prompts.read_back(prompts.DECOMPOSE, last, "question"):
            return self._plan(values["question"], int(values["round"]), last, control)
        if values := prompts.read_back(prompts.SYNTHESIZE, last, "outputs"):
            return self._synthesis(values, control)
        if values := prompts.read_back(prompts.DIRECT, last, "context"):
            return self.read(values["context"], values["question"], control)
        if values := prompts.read_back(prompts.CHAT_BEGIN, turns[0].content, "question"):
            return self._chat(values["question"], turns, control)
        raise CannotPlan("its prompt is none of the protocols'")

    def _plan(self, question: str, round: int, prompt: str, control: Control) -> str:
        query = self.understand(question, control)
        chunker, size = offered(prompt)
        # A second look is a closer one: the small model reads short pieces better.
        closer = max(_SMALLEST, size >> (round - 1)) if round > 1 else 0
        reduce = self._reduce and prompts.PLAN_REDUCE in prompt
        return json.dumps(query.plan(chunker, size=closer, reduce=reduce))

    def _synthesis(self, values: Mapping[str, str], control: Control) -> str:
        query = self.understand(values["question"], control)
        lines = values["outputs"].splitlines()
        reduced = prompts.read_back(prompts.REDUCED, lines[0]) if lines else None
        if reduced is not None and reduced["rule"] in RULES:
            value = number(reduced["value"])
            answer = None if value is None else format_number(value)
        else:
            answer = query.answer(self._found(query, lines))
        if answer is None and prompts.MORE in values["decisions"]:
            missing = "a statement on each of the tasks"
            return json.dumps({"decision": prompts.MORE, "missing_info": missing})
        return _final(answer)

    def _found(self, query: Query, lines: Sequence[str]) -> list[list[str]]:
        """Return the answers to each task in the outputs of jobs, chunk by chunk."""
        found: list[list[str]] = [[] for _ in query.of]
        tasks = {task: place for place, task in enumerate(query.tasks)}
        place: int | None = None
        known: set[tuple[int, str, str]] = set()
        for line in lines:
            heading = prompts.read_back(prompts.TASK_HEADING, line)
            if heading is not None:
                place = tasks.get(heading["task"])
                continue
            output = last_object(line, ("answer",))
            if place is None or output is None:
                continue
            answer = as_text(output.content.get("answer")) or ""
            citation = as_text(output.content.get("citation")) or ""
            chunk = str(output.content.get("job", "")).split("_")[0]
            for finding in self.findings(query, place, answer, citation):
                if (place, chunk, finding) not in known:  # another sample of the same job
                    known.add((place, chunk, finding))
                    found[place].append(finding)
        return found

    def _chat(self, question: str, turns: Sequence[Turn], control: Control) -> str:
        """Reply in Minion: ask one task after the other, then answer."""
        query = self.understand(question, control)
        replies: list[str] = []
        forced = False
        for turn in turns[1:]:
            for template in (prompts.CHAT_CONTINUE, prompts.CHAT_LAST):
                if values := prompts.read_back(template, turn.content, "reply"):
                    replies.append(values["reply"])
                    forced = template == prompts.CHAT_LAST
        if len(replies) < len(query.of) and not forced:
            message = {"message": query.tasks[len(replies)]}
            if replies:
                message = {"decision": prompts.MORE, **message}
            return json.dumps(message)
        found: list[list[str]] = [[] for _ in query.of]
        for place, reply in enumerate(replies[: len(query.of)]):
            for line in reply.splitlines():
                answer, _, citation = line.partition(" (")
                if answer.lower() != NOTHING.lower():
                    found[place] += self.findings(query, place, answer, citation.removesuffix(")"))
        return _final(query.answer(found))


def _final(answer: str | None) -> str:
    return json.dumps({"decision": prompts.FINAL, "answer": answer or UNKNOWN})


class Planner(PlannedRemote):
    """The embedded remote, in which the text target with a low-rank change writes queries.

    Args:
        model: writes queries; closed with this.
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
        self._lock = threading.Lock()  # of _understood

    def close(self) -> None:
        self._model.close()
        self._reader.close()

    def understand(self, question: str, control: Control) -> Query:
        with self._lock:
            found = self._understood.get(question)
        if found is None:
            found = self._planned(question, control)
            with self._lock:
                while len(self._understood) >= _REMEMBERED:
                    self._understood.pop(next(iter(self._understood)))
                self._understood[question] = found
        if isinstance(found, CannotPlan):
            raise found
        return found

    def _planned(self, question: str, control: Control) -> Query | CannotPlan:
        turns = (Turn("user", PLANNER_PROMPT.format(question=question)),)
        reply = _complete_reply(self._model, ChatRequest(turns, max_tokens=_REPLY_TOKENS), control)
        query = read_query(reply.text)
        if query is None:
            return CannotPlan("it is unlike the questions that the planner was trained on")
        # Keys must be copied from the question; others are invented.
        words = question.lower()
        if any(key.lower() not in words for keys in query.of for key in keys):
            return CannotPlan("the planner does not recognise the names in it")
        return query

    def read(self, text: str, question: str, control: Control) -> str:
        prompt = prompts.DIRECT.format(context=text, question=question)
        request = ChatRequest((Turn("user", prompt),), max_tokens=_REPLY_TOKENS)
        return _complete_reply(self._reader, request, control).text.strip() or UNKNOWN


def _complete_reply(model: ChatModel, request: ChatRequest, control: Control) -> Reply:
    """Return the model's reply.

    Raises:
        DeadlineExceeded: the reply is incomplete, and may mean something else.
        CollabError: of the request.
    """
    (reply,) = model.ask([request], control)
    if isinstance(reply, CollabError):
        raise reply
    if reply.finish is Finish.DEADLINE:
        raise reply_cut_off()
    return reply


def open_planner(
    config: ModelConfig,
    name: str = ROLE,
    limits: InProcessConfig | None = None,
    *,
    reduce: bool = True,
) -> Planner:
    """Return the embedded remote, with the text target as planner and unchanged as reader.

    Args:
        name: of the model, as in a price table.
        limits: limits of the reader.

    Raises:
        ModelError: the model or its role is missing, or they do not match.
    """
    folder = model_folder(config)
    if not holds_trained(folder, ROLE, "role"):
        raise ModelError(
            f"{folder} holds no {SUBFOLDER}/{ROLE}.safetensors: this model was not trained to plan",
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
