"""Minion and MinionS served over scripted models, in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from minions_world import found

from collab_llm_nodes.chat.base import (
    ChatRequest,
    Control,
    Finish,
    OnResult,
    Reply,
    Usage,
    ignore_result,
)
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Answer, Progress, Request, Resources
from collab_llm_nodes.protocols.base import Control as RealControl
from collab_llm_nodes.protocols.minions.equipment import Equipment
from collab_llm_nodes.protocols.minions.running import MINIONS, MinionsRunning
from collab_llm_nodes.protocols.minions.served import ServedMinion, ServedMinions

Says = Callable[[ChatRequest, Control], "str | Reply | CollabError"]

HONEST = """```python
def prepare_jobs(context, last_jobs):
    return [JobManifest(c, 'Extract the weight.') for d in context for c in chunk_by_page(d)]
```"""
PAGES = 12
KEPT = 7


def pages(count: int = PAGES) -> str:
    """Return a document whose pages each hold a canary of their own, and a weight."""
    return "\f".join(f"Page {i}. The canary-{i} sings. Weight {i} kg." for i in range(count))


def weigh_page(chunk: str) -> str | Reply:
    """Return the weight on the page ``KEPT``, and outputs that must be discarded on the others."""
    page = int(chunk.split(".")[0].removeprefix("Page "))
    if page == KEPT:
        return found("7 kg", citation="Weight 7 kg.")
    discarded: list[str | Reply] = [
        found(None, explanation=f"Only this: {chunk}", citation=chunk),
        Reply(found(chunk), Finish.LENGTH, Usage(9, 0, 9)),
        f"I read: {chunk}",
        Reply(chunk, Finish.REFUSAL),
        found("None", explanation=chunk),
    ]
    return discarded[page % 5]


def text_of(request: ChatRequest) -> str:
    """Return all that the model reads."""
    return "\n".join(turn.content for turn in request.turns)


@dataclass
class ScriptedChat:
    """A chat model that answers with ``says``, one request after the other.

    Attributes:
        seen: its requests.
    """

    name: str
    says: Says
    seen: list[ChatRequest] = field(default_factory=list)
    closed: bool = False

    def ask(
        self,
        requests: Sequence[ChatRequest],
        control: Control,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        """See ``chat.base.ChatModel``."""
        control.check()
        results: list[Reply | CollabError] = []
        for place, request in enumerate(requests):
            self.seen.append(request)
            said = self.says(request, control)
            words = len(text_of(request).split())
            if isinstance(said, str):
                said = Reply(said, Finish.STOP, Usage(words, 0, len(said.split())))
            results.append(said)
            on_result(place, said)
        return results

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


def in_turn(*replies: str | Reply | CollabError) -> Says:
    """Return ``replies`` one after the other, and the last one from then on."""
    left = list(replies)

    def says(request: ChatRequest, control: Control) -> str | Reply | CollabError:
        return left.pop(0) if len(left) > 1 else left[0]

    return says


@dataclass
class Bed:
    """A protocol running over scripted models.

    Attributes:
        progress: the progress of all answers.
    """

    running: MinionsRunning
    remote: ScriptedChat
    local: ScriptedChat
    config: ServedMinion | ServedMinions
    progress: list[Progress] = field(default_factory=list)

    def ask(
        self, question: str = "How heavy is it?", control: RealControl | None = None, **fields: Any
    ) -> Answer:
        """Return the answer about ``pages()``, or the documents in ``fields``."""
        request = asked(self.config, question, **fields)
        due = control or RealControl(time.monotonic() + 60)
        return self.running.run(request, self.progress.append, due)

    @property
    def wire(self) -> str:
        """All that the remote read."""
        return "\n".join(text_of(request) for request in self.remote.seen)


def asked(config: Any, question: str = "How heavy is it?", **fields: Any) -> Request:
    """Return a request for an answer about ``pages()``, or the documents in ``fields``."""
    given: dict[str, Any] = {
        "documents": (Document("log.txt", pages()),),
        "sampling": SamplingConfig(),
        **fields,
    }
    return Request("r1", config, (Turn("user", question),), **given)


@contextmanager
def served(
    remote: Says,
    local: Says,
    config: ServedMinion | ServedMinions | None = None,
    protocol: str = MINIONS,
) -> Iterator[Bed]:
    """Run a protocol over two scripted models."""
    config = config or ServedMinions(planner="program", check_citations=False)
    far, near = ScriptedChat("far", remote), ScriptedChat("near", local)
    equipment = Equipment(config, Resources(), remote=far, local=near)
    running = MinionsRunning(protocol, equipment)
    try:
        yield Bed(running, far, near, config)
    finally:
        running.close()


def figures(answer: Progress) -> dict[str, float]:
    """Return the figures that only this protocol has."""
    found = dict(answer.metrics.figures())
    assert all(math.isfinite(value) for value in found.values())
    return found
