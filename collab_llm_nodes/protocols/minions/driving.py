"""The loop that drives a machine with the caller's models, sandbox and retrieval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from collab_llm_nodes.chat.base import Reply
from collab_llm_nodes.errors import CollabError, ConfigError
from collab_llm_nodes.protocols.minions.jobs import Fault, ProgramJobs
from collab_llm_nodes.protocols.minions.messages import (
    Action,
    Aggregate,
    AskLocal,
    AskRemote,
    Executed,
    LocalPrompt,
    Machine,
    Outcome,
    Retrieve,
    RunProgram,
)

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class Handlers:
    """Callbacks that perform the actions of a machine.

    Attributes:
        remote: asks the remote model. All that leaves the robot passes here.
        local: asks the local model all prompts at once; returns replies or errors, in order.
        program: runs a program in the sandbox.
        retrieve: takes the question and the number of passages.
        on_executed: called with the jobs of each round.
        on_action: called before each action; if it raises, the action fails.
        aggregate: runs a program's aggregation in the sandbox.
    """

    remote: Callable[[AskRemote], Reply]
    local: Callable[[Sequence[LocalPrompt]], Sequence[Reply | CollabError]]
    program: Callable[[RunProgram], ProgramJobs | Fault] | None = None
    retrieve: Callable[[str, int], Sequence[str]] | None = None
    on_executed: Callable[[Executed], None] = lambda executed: None
    on_action: Callable[[Action], None] = lambda action: None
    aggregate: Callable[[Aggregate], str | Fault] | None = None


def drive(machine: Machine, handlers: Handlers) -> Outcome:
    """Perform the actions of ``machine`` until it ends.

    An error of an action is thrown into the machine, which may return its best answer so far.

    Raises:
        CollabError: of the machine, or of an action.
    """
    step: Callable[[], Action] = partial(next, machine)
    try:
        while True:
            try:
                action = step()
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            try:
                step = partial(machine.send, _perform(action, handlers))
            except CollabError as error:
                step = partial(machine.throw, error)
    finally:
        machine.close()


def _perform(action: Action, handlers: Handlers) -> Any:
    handlers.on_action(action)
    match action:
        case AskRemote():
            return handlers.remote(action)
        case AskLocal(prompts=prompts):
            return tuple(handlers.local(prompts))
        case RunProgram():
            return _sandboxed(handlers.program)(action)
        case Aggregate():
            return _sandboxed(handlers.aggregate)(action)
        case Retrieve(question=question, k=k):
            if handlers.retrieve is None:
                raise ConfigError(
                    "retrieval needs a retriever", field="retrieve", remedy="set it to 0"
                )
            return tuple(handlers.retrieve(question, k))
        case Executed():
            return handlers.on_executed(action)


def _sandboxed(handler: Callable[[A], R] | None) -> Callable[[A], R]:
    if handler is None:
        raise ConfigError("programs need a sandbox", field="planner", remedy="set it to plan")
    return handler
