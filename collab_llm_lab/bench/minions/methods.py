"""The protocols and baselines, with many questions at once, costs and the text on the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from collab_llm_lab.bench.minions.material import Case, Passages, passages_of
from collab_llm_lab.training.minions.questions import Asked, is_right
from collab_llm_nodes.chat.base import ChatModel, ChatRequest, Finish, Reply, Usage
from collab_llm_nodes.chat.ledger import Call, CostLedger, Price
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.knowledge.encoders import Encoder, WordHashes
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.minions.baselines import local_only, rag, remote_only
from collab_llm_nodes.protocols.minions.jobs import Dropped
from collab_llm_nodes.protocols.minions.messages import (
    AskLocal,
    AskRemote,
    Executed,
    LocalPrompt,
    Machine,
    Outcome,
    Retrieve,
)
from collab_llm_nodes.protocols.minions.minion import minion
from collab_llm_nodes.protocols.minions.minions import minions
from collab_llm_nodes.protocols.minions.settings import (
    CHAT_PRESETS,
    EMBEDDED,
    PRESETS,
    DirectConfig,
)

MINIONS, MINION = PRESETS[EMBEDDED], CHAT_PRESETS[EMBEDDED]
DIRECT = DirectConfig(local=MINIONS.local, retrieve=16)

Ask = Callable[[str, Sequence[str]], Machine]


@dataclass(frozen=True)
class Method:
    """Protocol or baseline with its settings.

    Attributes:
        machine: takes question and documents.
        retrieval: method of retrieval.
    """

    machine: Ask
    retrieval: str = "bm25"


METHODS: Mapping[str, Method] = {
    "remote_only": Method(partial(remote_only, config=DIRECT)),
    "local_only": Method(partial(local_only, config=DIRECT)),
    "rag_bm25": Method(partial(rag, config=DIRECT)),
    "rag_dense": Method(partial(rag, config=DIRECT), "dense"),
    "minion": Method(partial(minion, config=MINION)),
    "minions": Method(partial(minions, config=MINIONS)),
}


@dataclass
class Answered:
    """A question with its answer and costs.

    Attributes:
        answer: None after an error.
        rounds: rounds that were started; 0 after an error.
        wall_s: time of all questions about the log, divided by their number [s].
        wire: texts that the remote read.
        dropped: number of jobs by the reason why their output was not sent.
    """

    asked: Asked
    answer: str | None = None
    rounds: int = 0
    cost: CostLedger = field(default_factory=CostLedger)
    wire: list[str] = field(default_factory=list)
    dropped: dict[Dropped, int] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def right(self) -> bool:
        """True if the answer is correct."""
        return self.answer is not None and is_right(self.asked, self.answer)


@dataclass(frozen=True)
class Models:
    """The models of a run.

    Attributes:
        local: does jobs and reads long texts by windows.
        price: price of the remote.
        encoder: encoder of passages; counts words by default, since none ships.
    """

    remote: ChatModel
    local: ChatModel
    price: Price
    encoder: Encoder = field(default_factory=WordHashes)


def answer_all(method: Method, cases: Sequence[Case], models: Models) -> list[Answered]:
    """Answer all questions of ``cases``, those of one log concurrently.

    Jobs of concurrent questions share the KV of each chunk, and the passes.
    """
    answered = []
    for case in cases:
        with passages_of(case.text, models.encoder) as passages:
            begun = time.monotonic()
            runs = [_Run(method, case, asked, passages, models) for asked in case.asked]
            _run_all(runs, models.local)
            for run in runs:
                run.answered.wall_s = (time.monotonic() - begun) / len(runs)
                answered.append(run.answered)
    return answered


class _Run:
    """One running question, which pauses when the local model is asked."""

    def __init__(
        self, method: Method, case: Case, asked: Asked, passages: Passages, models: Models
    ) -> None:
        self.answered = Answered(asked)
        self._models = models
        self._find = partial(passages.find, method.retrieval)
        self._machine = method.machine(asked.text, [case.text])
        self.pending: AskLocal | None = None
        self._advance(partial(next, self._machine))

    def resume(self, replies: Sequence[Reply | CollabError]) -> None:
        """Continue with replies of the local model to the next question to it."""
        assert self.pending is not None
        for reply in replies:
            call = Call.of(self.pending.round, self._models.local.name, reply, remote=False)
            self.answered.cost.record(call)
        self._advance(partial(self._machine.send, tuple(replies)))

    def _advance(self, step: Callable[[], Any]) -> None:
        self.pending = None
        try:
            while True:
                action = step()
                match action:
                    case AskLocal():
                        self.pending = action
                        return
                    case AskRemote():
                        step = self._ask_remote(action)
                    case Retrieve(question=question, k=k):
                        step = partial(self._machine.send, tuple(self._find(question, k)))
                    case Executed(jobs=jobs):
                        for job in jobs:
                            count = self.answered.dropped.get(job.dropped, 0)
                            self.answered.dropped[job.dropped] = count + 1
                        step = partial(self._machine.send, None)
                    case _:
                        raise AssertionError(f"unexpected action {action}")
        except StopIteration as end:
            outcome: Outcome = end.value
            self.answered.answer, self.answered.rounds = outcome.answer, outcome.rounds
        except CollabError:
            pass  # ``answer`` stays None

    def _ask_remote(self, action: AskRemote) -> Callable[[], Any]:
        remote = self._models.remote
        turns = tuple(Turn(message.role, message.text) for message in action.messages)
        self.answered.wire += [turn.content for turn in turns]
        request = ChatRequest(turns, max_tokens=action.max_tokens)
        (reply,) = remote.ask([request], Control())
        self.answered.cost.record(Call.of(action.round, remote.name, reply, remote=True))
        if isinstance(reply, CollabError):
            return partial(self._machine.throw, reply)
        return partial(self._machine.send, reply)


def _run_all(runs: Sequence[_Run], local: ChatModel) -> None:
    """Advance all runs together until they end."""
    while waiting := [run for run in runs if run.pending is not None]:
        asked = [(run, run.pending.prompts) for run in waiting if run.pending is not None]
        replies = local.ask([_request(p) for _, prompts in asked for p in prompts], Control())
        start = 0
        for run, prompts in asked:
            run.resume(replies[start : start + len(prompts)])
            start += len(prompts)


def _request(prompt: LocalPrompt) -> ChatRequest:
    sampling = SamplingConfig(temperature=prompt.temperature, seed=prompt.seed)
    return ChatRequest(prompt.turns, sampling, prompt.max_tokens, prompt.quotable)


def usage_of(answered: Answered, *, remote: bool) -> Usage:
    """Return the tokens of an answer on one side."""
    return answered.cost.usage(remote=remote)


def truncated(answered: Answered) -> bool:
    """Return True if a reply of either model was cut off at its length limit."""
    return any(call.outcome == Finish.LENGTH.value for call in answered.cost.calls)
