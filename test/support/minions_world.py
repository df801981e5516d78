"""A remote, a worker and a driver for the machines of Minion and MinionS, in a few lines each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from collab_llm_nodes.chat.base import Finish, Reply
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.protocols.minions.driving import Handlers, drive
from collab_llm_nodes.protocols.minions.jobs import Fault, ProgramJobs, RequestedJob
from collab_llm_nodes.protocols.minions.messages import (
    AskRemote,
    Executed,
    LocalPrompt,
    Machine,
    Outcome,
    RunProgram,
)
from collab_llm_nodes.protocols.minions.sandbox.host import Sandbox
from collab_llm_nodes.protocols.minions.sandbox.limits import SandboxLimits
from collab_llm_nodes.protocols.minions.settings import MinionsConfig

paper = partial(MinionsConfig, planner="program", choice_bits=1 << 20, check_citations=False)
"""MinionS as in the paper: the remote writes programs, and outputs need no
citation."""
PATIENT = SandboxLimits(run_s=30, wall_s=60)
"""Limits for programs on a machine that stalls."""
PROGRAM = "```python\ndef prepare_jobs(context, last_jobs):\n    ...\n```"
MORE = '{"decision": "request_additional_info", "missing_info": "the year"}'

Answerer = Callable[[LocalPrompt], Reply | CollabError | str]


def final(answer: str = "42") -> str:
    """Return a reply in which the remote decides."""
    return json.dumps({"decision": "provide_final_answer", "explanation": "e", "answer": answer})


def more(**fields: str) -> str:
    """Return a reply in which the remote goes on."""
    return json.dumps({"decision": "request_additional_info", "answer": None, **fields})


def plan(*tasks: str, **fields: object) -> str:
    """Return a reply with a JSON plan."""
    return json.dumps({"tasks": list(tasks), "chunker": "chunk_by_page", **fields})


def found(answer: str | None, **fields: str | None) -> str:
    """Return a worker's answer."""
    return json.dumps({"explanation": None, "citation": None, "answer": answer, **fields})


def finder(pattern: str) -> Answerer:
    """Return a worker that answers with the first match of ``pattern`` in its chunk, if any."""

    def answer(prompt: LocalPrompt) -> str:
        match = re.search(pattern, chunk_of(prompt))
        return found(match.group() if match else None)

    return answer


def text_of(prompt: LocalPrompt) -> str:
    """Return all that the local model reads."""
    return "\n".join(turn.content for turn in prompt.turns)


def chunk_of(prompt: LocalPrompt) -> str:
    """Return the piece of text in a worker's prompt."""
    return text_of(prompt).split("## Text\n", 1)[1].split("\n\n## ", 1)[0]


def requested(*jobs: RequestedJob) -> ProgramJobs:
    """Return the jobs of a program in which their tasks and advice are written out."""
    return ProgramJobs(jobs, texts=tuple({text: 0 for j in jobs for text in (j.task, j.advice)}))


def run_in(sandbox: Sandbox) -> Callable[[RunProgram], ProgramJobs | Fault]:
    """Return a function that runs programs in ``sandbox``."""
    return lambda action: sandbox.run(
        action.program,
        action.documents,
        action.last_jobs,
        chunkers=action.chunkers,
        chunk_size=action.chunk_size,
    )


@dataclass
class World:
    """Drives a machine, and keeps what crosses.

    Args:
        remote: its replies, in order.
        worker: answers each prompt.
        jobs: result of each program, in order; the last one is repeated.

    Attributes:
        sent: what the remote was asked.
        prompts: what the local model was asked, one list for each time.
        programs: what was run.
        rounds: jobs of each round.
    """

    remote: Iterable[str | Reply | Exception]
    worker: Answerer = lambda prompt: found("42")
    jobs: Sequence[ProgramJobs | Fault] = (requested(RequestedJob("chunk", "task")),)
    passages: Sequence[str] = ()
    sent: list[AskRemote] = field(default_factory=list)
    prompts: list[Sequence[LocalPrompt]] = field(default_factory=list)
    programs: list[RunProgram] = field(default_factory=list)
    rounds: list[Executed] = field(default_factory=list)
    run_program: Callable[[RunProgram], ProgramJobs | Fault] | None = None

    def drive(self, machine: Machine) -> Outcome:
        """Return the machine's outcome."""
        replies = iter(self.remote)

        def remote(ask: AskRemote) -> Reply:
            self.sent.append(ask)
            reply = next(replies)
            if isinstance(reply, Exception):
                raise reply
            return Reply(reply, Finish.STOP) if isinstance(reply, str) else reply

        def local(prompts: Sequence[LocalPrompt]) -> Sequence[Reply | CollabError]:
            self.prompts.append(prompts)
            answers = map(self.worker, prompts)
            return [Reply(a, Finish.STOP) if isinstance(a, str) else a for a in answers]

        def run(action: RunProgram) -> ProgramJobs | Fault:
            self.programs.append(action)
            if self.run_program is not None:
                return self.run_program(action)
            return self.jobs[min(len(self.programs), len(self.jobs)) - 1]

        def retrieve(question: str, k: int) -> Sequence[str]:
            return self.passages[:k]

        return drive(machine, Handlers(remote, local, run, retrieve, self.rounds.append))

    @property
    def chunks(self) -> list[str]:
        """The texts that the jobs of ``jobs`` are about."""
        requested = [each.jobs for each in self.jobs if not isinstance(each, Fault)]
        return list(dict.fromkeys(job.chunk for jobs in requested for job in jobs))

    @property
    def wire(self) -> str:
        """All that has left the robot."""
        return "\n".join(message.text for ask in self.sent for message in ask.messages)
