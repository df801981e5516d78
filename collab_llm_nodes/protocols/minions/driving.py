"""The loop that drives a machine: models, sandbox and retrieval are the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from collab_llm_nodes.chat.base import Reply
from collab_llm_nodes.errors import CollabError, ConfigError
from collab_llm_nodes.protocols.minions.jobs import Fault, ProgramJobs
from collab_llm_nodes.protocols.minions.messages import (
    Action,
    AskLocal,
    AskRemote,
    Executed,
    LocalPrompt,
    Machine,
    Outcome,
    Retrieve,
    RunProgram,
)


@dataclass(frozen=True)
class Means:
    """Means to carry out the actions of a machine.

    Attributes:
        remote: sends to the remote model. The only way out of the robot: count there what leaves.
        local: asks the local model, all prompts at once; returns for each, in order, its reply or
            the error that ended it.
        programs: runs a program in the sandbox.
        retrieve: takes the question and a number of passages.
        told: hears of the jobs of each round.
        begun: hears of each action before it is carried out; what it raises ends the action.
    """

    remote: Callable[[AskRemote], Reply]
    local: Callable[[Sequence[LocalPrompt]], Sequence[Reply | CollabError]]
    programs: Callable[[RunProgram], ProgramJobs | Fault] | None = None
    retrieve: Callable[[str, int], Sequence[str]] | None = None
    told: Callable[[Executed], None] = lambda executed: None
    begun: Callable[[Action], None] = lambda action: None


def drive(machine: Machine, means: Means) -> Outcome:
    """Carry out what ``machine`` asks for until it ends.

    An error of an action is given to the machine, which then returns the best answer there is.

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
                step = partial(machine.send, _carried_out(action, means))
            except CollabError as error:
                step = partial(machine.throw, error)
    finally:
        machine.close()


def _carried_out(action: Action, means: Means) -> Any:
    means.begun(action)
    match action:
        case AskRemote():
            return means.remote(action)
        case AskLocal(prompts=prompts):
            return tuple(means.local(prompts))
        case RunProgram():
            if means.programs is None:
                raise ConfigError(
                    "no sandbox is there for programs", field="planner", remedy="set it to plan"
                )
            return means.programs(action)
        case Retrieve(question=question, k=k):
            if means.retrieve is None:
                raise ConfigError(
                    "nothing is there to retrieve with", field="retrieve", remedy="set it to 0"
                )
            return tuple(means.retrieve(question, k))
        case Executed():
            return means.told(action)
