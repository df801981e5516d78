"""Workers that only search: what a model must beat to be worth its place.

They read the prompts of the style ``embedded`` and reply in its form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

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
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.knowledge.bm25 import bm25
from collab_llm_nodes.knowledge.chunking import sentences
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.embedded.windows import NOTHING

Search = Callable[[str, str], "dict[str, str | None]"]
"""Takes a piece of text and a task; returns citation and answer."""

_SHORTEST = 12
"""Shorter sentences are headings and numbers of lists [characters]."""


class StringSearch:
    """``chat.base.ChatModel`` that replies to jobs with what ``search`` finds, without a model."""

    name = "string-search"

    def __init__(self, search: Search) -> None:
        self._search = search

    def ask(
        self,
        requests: Sequence[ChatRequest],
        control: Control,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``chat.base.ChatModel``."""
        return ask_in_turn(requests, control, on_result, self._reply)

    def close(self) -> None:
        """Do nothing: there is no model."""

    def _reply(self, request: ChatRequest) -> Reply:
        values = prompts.read_back(prompts.WORKER_BRIEF, request.turns[-1].content, "chunk")
        if values is None:  # no job, but the whole text of local only
            return Reply(NOTHING, Finish.STOP, Usage())
        found = self._search(values["chunk"], values["task"])
        return Reply(json.dumps(found), Finish.STOP, Usage())


def best_sentence(chunk: str, task: str) -> dict[str, str | None]:
    """Return the sentence of ``chunk`` with the highest BM25 score for ``task``."""
    texts = [text for text in sentences(chunk) if len(text) >= _SHORTEST]
    scores = bm25(task, texts)
    best = max(range(len(texts)), key=scores.__getitem__, default=None)
    found = texts[best] if best is not None and scores[best] > 0 else None
    return {"citation": found, "answer": found}


def line_that_begins(chunk: str, task: str) -> dict[str, str | None]:
    """Return the value on the lines of a robot's log that begin with ``task``."""
    lines = [line for line in chunk.splitlines() if line.startswith(task)]
    if not lines:
        return {"answer": None}
    spent = task.startswith("Expense")
    found = [
        _value(line[len(task) :], last=spent, counted=spent and "," not in task) for line in lines
    ]
    return {"citation": "; ".join(lines), "answer": "; ".join(found)}


def _value(rest: str, *, last: bool, counted: bool) -> str:
    """Return the value in the rest of a log's line, without its unit."""
    parts = rest.strip(" :.").split(", ")
    value = parts[-1 if last else 0].removesuffix(" percent").removesuffix(" degrees")
    return value.split(": ")[-1] if counted else value
