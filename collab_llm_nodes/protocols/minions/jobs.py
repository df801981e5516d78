"""Jobs: one task over one piece of text each, and the worker's answers (paper 000, section 5.1)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

MAX_SAMPLES = 16
"""Samples of one task over one chunk: more hardly change a majority."""


class Fault(str, Enum):
    """Reason why a decomposition gave no jobs.

    The remote learns only these codes and the fixed sentences of ``message``: the text of an
    exception could contain the document. Each code is a symbol of the code in ``choice.py``.
    """

    SYNTAX = "SYNTAX"
    RAISED = "RAISED"
    TIME = "TIME"
    MEMORY = "MEMORY"
    CALLS = "CALLS"
    CRASHED = "CRASHED"
    NOT_JOBS = "NOT_JOBS"
    NO_JOBS = "NO_JOBS"
    NOT_WRITTEN = "NOT_WRITTEN"
    NOT_A_PIECE = "NOT_A_PIECE"
    CHOICE = "CHOICE"
    TOO_LONG = "TOO_LONG"
    NOT_A_PLAN = "NOT_A_PLAN"

    @property
    def message(self) -> str:
        """Sentence that the remote reads."""
        return _MESSAGES[self]


_MESSAGES = {
    Fault.SYNTAX: "The program could not be read, or defines no function prepare_jobs.",
    Fault.RAISED: "The program raised an exception.",
    Fault.TIME: "The program ran too long.",
    Fault.MEMORY: "The program needed too much memory.",
    Fault.CALLS: "The program called the chunking functions too often, or for too long.",
    Fault.CRASHED: "The program ended its interpreter.",
    Fault.NOT_JOBS: "prepare_jobs returned something other than a list of JobManifest with text.",
    Fault.NO_JOBS: "There were no jobs in it.",
    Fault.NOT_WRITTEN: "A task or its advice was not built from constants of the program alone: it"
    " depends on the text of documents or outputs.",
    Fault.NOT_A_PIECE: "The chunk of a job was not a document, a chunk of last_jobs or a piece that"
    " a chunking function, with a size written out in the program, had cut from one of them.",
    Fault.CHOICE: "The program chose its tasks from too many strings.",
    Fault.TOO_LONG: "The program or its jobs were too long.",
    Fault.NOT_A_PLAN: "The plan was not a JSON object of the required form.",
}


@dataclass(frozen=True)
class RequestedJob:
    """A job as a program or a plan requests it.

    Attributes:
        times: how often it is listed, which requests as many samples.
    """

    chunk: str
    task: str
    advice: str = ""
    times: int = 1


@dataclass(frozen=True)
class JobList:
    """The jobs of one decomposition.

    Attributes:
        left_out: number of jobs left out because they exceeded a limit.
    """

    jobs: tuple[RequestedJob, ...]
    left_out: int = 0

    @property
    def counts(self) -> Counter[tuple[str, str, str]]:
        """Requests for each chunk, task and advice, in the order of the jobs."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for job in self.jobs:
            counts[job.chunk, job.task, job.advice] += job.times
        return counts


class Cut(NamedTuple):
    """A call of a chunking function: its name, and the size of the pieces."""

    chunker: str
    size: int


@dataclass(frozen=True)
class ProgramJobs(JobList):
    """The jobs that a program requests.

    A program reads the documents and may encode their text in its jobs (``choice.py``).

    Attributes:
        texts, sizes, chunkers: distinct strings, numbers and names of chunking functions in the
            program's source; the strings in its order.
        cuts: distinct calls of chunking functions.
    """

    texts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    chunkers: tuple[str, ...] = ()
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class JobManifest:
    """One task over one piece of text, as the worker gets it.

    Attributes:
        chunk_id, task_id: numbers given by the host; a program's own are ignored.
        sample: index of the sample of one task over one chunk, from 0.
    """

    chunk: str
    task: str
    advice: str
    chunk_id: int
    task_id: int
    sample: int = 0

    @property
    def job_id(self) -> str:
        """Name of the job, unique within its round."""
        return f"c{self.chunk_id}_t{self.task_id}_s{self.sample}"

    @property
    def place(self) -> tuple[int, int, int]:
        """Sort key of outputs as the remote reads them: by task, then in the order of the text."""
        return self.task_id, self.chunk_id, self.sample


@dataclass(frozen=True)
class JobOutput:
    """Fields of a worker's answer; ``answer`` is None if the worker abstained."""

    explanation: str = ""
    citation: str | None = None
    answer: str | None = None

    @property
    def length(self) -> int:
        """Characters that the worker wrote."""
        return len(self.explanation) + len(self.citation or "") + len(self.answer or "")


class Dropped(str, Enum):
    """Reason why an output is not sent to the remote."""

    KEPT = ""
    ABSTAINED = "abstained"
    TRUNCATED = "truncated"
    UNREADABLE = "unreadable"
    UNSUPPORTED = "unsupported"  # its citation does not occur in the text
    FAILED = "failed"


UNUSABLE = frozenset((Dropped.TRUNCATED, Dropped.UNREADABLE, Dropped.UNSUPPORTED, Dropped.FAILED))
"""Reasons that lie in the worker, and not in the text."""


@dataclass(frozen=True)
class Job:
    """A job and its result."""

    manifest: JobManifest
    output: JobOutput
    dropped: Dropped = Dropped.KEPT

    @property
    def kept(self) -> bool:
        """True if the output goes to the remote."""
        return self.dropped is Dropped.KEPT

    @property
    def without_chunk(self) -> Job:
        """The job without its piece of text."""
        return replace(self, manifest=replace(self.manifest, chunk=""))


class Numbering:
    """Numbers of chunks and tasks, the same in all rounds of an answer.

    Both count up in the order of first use, which no program can choose.
    """

    def __init__(self) -> None:
        self._chunks: dict[str, int] = {}
        self._tasks: dict[str, int] = {}

    def number(
        self,
        requested: JobList,
        *,
        tasks: int,
        samples: int,
        max_jobs: int,
        max_characters: int,
    ) -> tuple[tuple[JobManifest, ...], int]:
        """Return the jobs to run, grouped by chunk, and how many were left out.

        Args:
            tasks: limit of different tasks; 0: as many as requested.
            samples: samples of each task over each chunk; 0: as many as requested.
            max_jobs: limit of jobs.
            max_characters: limit of their chunks' text, each chunk counted once per job.
        """
        allowed = list(dict.fromkeys(job.task for job in requested.jobs))[: tasks or None]
        answers: Counter[tuple[int, int]] = Counter()
        jobs: list[JobManifest] = []
        left_out = requested.left_out
        for (chunk, task, advice), count in requested.counts.items():
            repeats = min(samples or count, MAX_SAMPLES)
            if task not in allowed:
                left_out += repeats
                continue
            kept = min(repeats, max_jobs - len(jobs), max_characters // max(len(chunk), 1))
            left_out += repeats - kept
            if kept <= 0:
                continue
            max_characters -= kept * len(chunk)
            chunk_id = self._chunks.setdefault(chunk, len(self._chunks) + 1)
            task_id = self._tasks.setdefault(task, len(self._tasks) + 1)
            first = answers[chunk_id, task_id]  # one task may come with several pieces of advice
            answers[chunk_id, task_id] += kept
            jobs += [
                JobManifest(chunk, task, advice, chunk_id, task_id, sample)
                for sample in range(first, first + kept)
            ]
        # Jobs over one chunk stand together, so that the worker reads it once.
        return tuple(sorted(jobs, key=lambda job: job.chunk_id)), left_out
