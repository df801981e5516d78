"""MinionS: the remote decomposes the question, the worker does the jobs, the remote synthesizes.

Paper 000, section 5. One round is

    decompose ─▶ execute ─▶ synthesize ─▶ answer, or another round
    (remote)     (local)     (remote)

The remote gets only the question, the worker's kept outputs, this package's fixed sentences, its
own words, and the information in the choice of jobs (``choice.py``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import Any

from collab_llm_nodes.chat.base import Finish, Reply
from collab_llm_nodes.errors import Cancelled, CollabError
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.choice import RUN_BITS, Bounds, canonical
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.dialogue import (
    ask_until_readable,
    check_input,
    retrieve_passages,
)
from collab_llm_nodes.protocols.minions.jobs import (
    MAX_SAMPLES,
    Dropped,
    Fault,
    Job,
    JobList,
    JobManifest,
    JobOutput,
    Numbering,
    ProgramJobs,
)
from collab_llm_nodes.protocols.minions.messages import (
    Action,
    AskLocal,
    AskRemote,
    CannotPlan,
    Executed,
    Kind,
    LocalPrompt,
    Machine,
    Mark,
    Message,
    Outcome,
    Part,
    RunProgram,
    fill,
    reply_turn,
)
from collab_llm_nodes.protocols.minions.plan import Plan, jobs_of, plan_form, read_plan
from collab_llm_nodes.protocols.minions.reading import (
    Decision,
    decision,
    find_program,
    worker_output,
)
from collab_llm_nodes.protocols.minions.sandbox.limits import MAX_TEXT
from collab_llm_nodes.protocols.minions.settings import (
    HISTORY,
    PLAN,
    PROGRAM,
    SCRATCHPAD,
    MinionsConfig,
)


def minions(
    question: str,
    documents: Sequence[str],
    config: MinionsConfig,
    check: Callable[[], None] = lambda: None,
) -> Machine:
    """Answer ``question`` about ``documents``.

    Args:
        check: called while the documents are cut for a program; if it raises, the answer ends.

    Raises:
        InvalidInput: there is no question or no text.
        CannotPlan: while it runs: no decomposition of the remote works.
        CollabError: while it runs: thrown in before there was any answer.
    """
    check_input(question, documents)
    return _MinionS(question, tuple(documents), config, check).run()


class _MinionS:
    """One running answer.

    Attributes:
        best: the remote's last answer without a final decision.
        found: the most frequent answer of the workers in the last round with any.
        room: characters of outputs that may still be sent.
        choice_left: bits that programs may still disclose by their choice.
        choice_unsent: bits that the next message discloses.
        missing, scratchpad: memory between rounds, in the remote's words.
        history: the whole conversation, with ``carry: history``.
    """

    def __init__(
        self,
        question: str,
        documents: tuple[str, ...],
        config: MinionsConfig,
        check: Callable[[], None],
    ) -> None:
        self.config, self.documents = config, documents
        self.check = check
        self.style = prompts.STYLES[config.style]
        self.text = question
        self.question = Part(Kind.QUESTION, question)
        self.numbering = Numbering()
        self.marks: set[Mark] = set()
        self.round = 0
        self.jobs: tuple[Job, ...] = ()
        self.plan: Plan | None = None
        self.best = ""
        self.found = ""
        self.missing = ""
        self.scratchpad: list[str] = []
        self.history: list[Message] = []
        self.room = 0
        self.choice_left, self.choice_unsent = config.choice_bits, 0

    def run(self) -> Machine:
        config = self.config
        try:
            if config.retrieve:
                self.documents = yield from retrieve_passages(self.text, config.retrieve)
            length = sum(map(len, self.documents))
            self.room = max(_ALWAYS_SENT, int(config.remote_share * length))
            for number in range(1, config.rounds + 1):
                self.round = number
                jobs = yield from self._decompose()
                left_out = yield from self._execute(jobs)
                decided: Decision = yield from self._synthesize(left_out)
                if decided.final:
                    return self._outcome(decided.answer, decided.explanation)
                self.best = decided.answer or self.best
                self.missing = decided.missing or decided.explanation
                if decided.scratchpad:
                    self.scratchpad.append(f"{self.round}. {decided.scratchpad}")
        except CollabError as error:
            answer = self.best or self.found
            if not answer or isinstance(error, Cancelled):
                raise
            return self._outcome(answer, error=error)
        self.marks.add(Mark.UNDECIDED)
        return self._outcome(self.best, self.missing)

    # ------------------------------------------------------------------ decompose

    def _decompose(self) -> Generator[Action, Any, JobList]:
        """Return the jobs of the remote's program, or of its plan if no program works."""
        planners = (PLAN,) if self.config.planner == PLAN else (PROGRAM, PLAN)
        fault = Fault.NO_JOBS
        for planner in planners:
            chat = [self._decompose_prompt(planner)]
            form = (
                plan_form(self._chunkers(), reduce=self.config.reduce) if planner == PLAN else None
            )
            for _ in range(self.config.attempts):
                if planner == PROGRAM and self.choice_left < RUN_BITS:
                    break
                reply: Reply = yield self._ask("decompose", chat, form)
                chat.append(reply_turn(reply.text))
                jobs = yield from self._jobs_of_reply(planner, reply.text)
                if isinstance(jobs, JobList):
                    self._remember(chat)
                    return jobs
                fault = jobs
                chat.append(fill(prompts.FAILED, fault=fault.message))
        raise CannotPlan(f"none of its decompositions works ({fault.value})")

    def _jobs_of_reply(self, planner: str, text: str) -> Generator[Action, Any, JobList | Fault]:
        config = self.config
        self.plan = None
        if planner == PROGRAM:
            jobs: ProgramJobs | Fault = yield RunProgram(
                self.round,
                find_program(text),
                self.documents,
                self.jobs,
                self._chunkers(),
                config.chunk_size,
            )
            return self._charged(jobs)
        plan = read_plan(text, self._chunkers(), reduce=config.reduce)
        if isinstance(plan, Fault):
            return plan
        self.plan = plan
        return jobs_of(
            plan,
            self.documents,
            self.jobs,
            chunk_size=config.chunk_size,
            max_jobs=config.limits.jobs,
        )

    def _charged(self, jobs: ProgramJobs | Fault) -> JobList | Fault:
        """Return the jobs to do for a program's, and charge the bits of its choice."""
        bits = RUN_BITS
        chosen: JobList | Fault = jobs
        if isinstance(jobs, ProgramJobs):
            config = self.config
            bounds = Bounds(
                self.documents,
                list(dict.fromkeys(job.manifest.chunk for job in self.jobs)),
                config.chunk_size,
                1 if config.samples else MAX_SAMPLES,
                config.limits.jobs,
            )
            chosen, bits = canonical(jobs, bounds, self.choice_left, self.check)
        self.choice_left -= bits
        self.choice_unsent += bits
        return chosen

    def _decompose_prompt(self, planner: str) -> Message:
        config = self.config
        chunkers = self._chunkers()
        sources = "\n\n".join(CHUNKERS[name].source(config.chunk_size) for name in chunkers)
        if planner == PROGRAM:
            form = prompts.PROGRAM_FORM.format(chunkers=sources, example=chunkers[0])
        else:
            form = prompts.PLAN_FORM.format(
                chunkers=sources, reduce=prompts.PLAN_REDUCE if config.reduce else ""
            )
            form += prompts.PLAN_REDUCE_ABOUT if config.reduce else ""
        return fill(
            prompts.DECOMPOSE,
            round=str(self.round),
            document=self.style.document,
            question=self.question,
            rules=self.style.rules,
            tasks=(prompts.FIXED_TASKS if config.tasks else prompts.ANY_TASKS).format(
                tasks=config.tasks
            ),
            samples=(prompts.FIXED_SAMPLES if config.samples else prompts.ANY_SAMPLES).format(
                samples=config.samples
            ),
            carried=self._carried(),
            form=form,
        )

    def _carried(self) -> Message | str:
        """Return the remote's memory of earlier rounds."""
        if self.round == 1:
            return ""
        if self.config.carry == HISTORY:
            return prompts.CARRIED_HISTORY
        notes: Message | str = ""
        if self.config.carry == SCRATCHPAD and self.scratchpad:
            written = Part(Kind.REMOTE, "\n".join(self.scratchpad))
            notes = fill(prompts.CARRIED_SCRATCHPAD, scratchpad=written)
        missing = Part(Kind.REMOTE, self.missing or prompts.NOTHING_MISSING)
        return fill(prompts.CARRIED, missing=missing, notes=notes)

    def _chunkers(self) -> tuple[str, ...]:
        return (self.config.chunker,) if self.config.chunker else tuple(CHUNKERS)

    # ------------------------------------------------------------------ execute

    def _execute(self, jobs: JobList) -> Generator[Action, Any, int]:
        """Have the worker do the jobs; return how many were left out."""
        config = self.config
        manifests, left_out = self.numbering.number(
            jobs,
            tasks=config.tasks,
            samples=config.samples,
            max_jobs=config.limits.jobs,
            max_characters=MAX_TEXT,
        )
        local = tuple(self._worker_prompt(manifest) for manifest in manifests)
        replies: Sequence[Reply | CollabError] = yield AskLocal("execute", self.round, local)
        failed = [reply for reply in replies if isinstance(reply, CollabError)]
        if failed and len(failed) == len(replies):
            raise failed[0]  # a failure, and not an empty result
        self.jobs = tuple(self._job(*both) for both in zip(manifests, replies, strict=True))
        answers = Counter(job.output.answer for job in self.jobs if job.kept and job.output.answer)
        if answers:
            self.found = answers.most_common(1)[0][0]
        if left_out:
            self.marks.add(Mark.PARTIAL)
        yield Executed(self.round, self.jobs, left_out)
        return left_out

    def _worker_prompt(self, manifest: JobManifest) -> LocalPrompt:
        text = self.style.worker.format(
            chunk=manifest.chunk, task=manifest.task, advice=manifest.advice, question=self.text
        )
        local = self.config.local
        seed = (self.round - 1) * MAX_SAMPLES + manifest.sample
        quotable = manifest.chunk if self.config.check_citations else ""
        turns, reply = (Turn("user", text),), self.style.reply
        return LocalPrompt(turns, local.temperature, local.max_tokens, seed, quotable, reply)

    def _job(self, manifest: JobManifest, reply: Reply | CollabError) -> Job:
        if isinstance(reply, CollabError) or reply.finish is Finish.REFUSAL:
            return Job(manifest, JobOutput(), Dropped.FAILED)
        if reply.finish is not Finish.STOP:
            return Job(manifest, JobOutput(), Dropped.TRUNCATED)
        output = worker_output(reply.text, quotes=self.style.quotes, max_characters=_MAX_FIELD)
        if output is None:
            return Job(manifest, JobOutput(), Dropped.UNREADABLE)
        if output.answer is None and self.config.abstain_filter:
            return Job(manifest, output, Dropped.ABSTAINED)
        if self.config.check_citations:
            cited = cited_lines(output.citation, manifest.chunk)
            if cited is None:
                return Job(manifest, output, Dropped.UNSUPPORTED)
            output = replace(output, citation=cited)
        if self.style.quotes:
            output = replace(output, citation=None)  # its answer contains the quotes
        return Job(manifest, output)

    # ------------------------------------------------------------------ synthesize

    def _synthesize(self, left_out: int) -> Generator[Action, Any, Decision]:
        """Return the remote's decision about the outputs."""
        last = self.round == self.config.rounds
        forced = last and self.config.force_final or not self.style.more
        chat = [self._synthesize_prompt(left_out, forced)]

        def read(text: str) -> Decision | None:
            found = decision(text)
            return found if found is not None and (found.final or not forced) else None

        decided = yield from ask_until_readable(lambda: self._ask("synthesize", chat), chat, read)
        self._remember(chat)
        if decided is None:
            self.marks.add(Mark.UNREADABLE)
            words = _own_words(chat[-1]) or self.best or self.found
            return Decision(forced, words if forced else "")
        if forced and self.style.more:
            self.marks.add(Mark.FORCED)
        return decided

    def _synthesize_prompt(self, jobs_left_out: int, forced: bool) -> Message:
        outputs, left_out = self._outputs()
        notes = prompts.JOBS_LEFT_OUT if jobs_left_out else ""
        if left_out:
            self.marks.add(Mark.PARTIAL)
            notes += prompts.OUTPUTS_LEFT_OUT
        more = "" if forced else prompts.MISSING_FIELD
        if not forced and self.config.carry == SCRATCHPAD:
            more += prompts.SCRATCHPAD_FIELD
        return fill(
            prompts.SYNTHESIZE,
            question=self.question,
            outputs=outputs,
            notes=notes,
            guidelines=prompts.LAST_ROUND if forced and self.style.more else self.style.guidelines,
            decisions=prompts.FINAL if forced else f"{prompts.FINAL} or {self.style.more}",
            answer=self.style.answer,
            more=more,
        )

    def _outputs(self) -> tuple[Part, bool]:
        """Return the kept outputs as the remote reads them, and whether some were left out."""
        kept = [job for job in self.jobs if job.kept]
        if self.plan is not None and self.plan.reduction is not None:
            value = self.plan.reduction.of(kept)
            if value is not None:
                rule = self.plan.reduction.rule
                return Part(Kind.EXTRACT, prompts.REDUCED.format(rule=rule, value=value)), False
        room = self.config.remote_characters
        left_out = False
        lines: list[str] = []
        headed: set[int] = set()
        for job in sorted(kept, key=lambda job: job.manifest.task_id):
            line = _line(job)
            if job.manifest.task_id not in headed:
                heading = prompts.TASK_HEADING.format(
                    number=job.manifest.task_id, task=job.manifest.task
                )
                line = f"{heading}\n{line}"
            if len(line) >= room or job.output.length > self.room:
                left_out = True
                continue
            room -= len(line) + 1
            self.room -= job.output.length
            headed.add(job.manifest.task_id)
            lines.append(line)
        if not lines:
            return Part(Kind.INSTRUCTIONS, prompts.NO_OUTPUTS), left_out
        return Part(Kind.EXTRACT, "\n".join(lines)), left_out

    # ------------------------------------------------------------------ the remote, the end

    def _ask(self, stage: str, chat: Sequence[Message], guide: Guide | None = None) -> AskRemote:
        """Return the action that sends ``chat``; the only place that creates one."""
        remote = self.config.remote
        messages = (*self.history, *chat)
        bits, self.choice_unsent = self.choice_unsent, 0
        return AskRemote(
            stage, self.round, messages, remote.temperature, remote.max_tokens, bits, guide
        )

    def _remember(self, chat: Sequence[Message]) -> None:
        if self.config.carry == HISTORY:
            self.history += chat

    def _outcome(
        self, answer: str, explanation: str = "", error: CollabError | None = None
    ) -> Outcome:
        return Outcome(answer, frozenset(self.marks), self.round, explanation, self.jobs, error)


def cited_lines(citation: str | None, chunk: str) -> str | None:
    """Return ``citation`` as ``chunk`` has it, its lines joined by "; "; None if one is not there.

    A part of a line needs ``_MIN_CITED`` characters, since a letter occurs in any text. A small
    model miscopies rare names within a line; such a line is replaced by the one that it resembles.
    """
    lines = [" ".join(line.split()) for line in chunk.splitlines()]
    text = " ".join(lines)
    cited = (citation or "").split("; ")
    if len(cited) > _MAX_CITED:
        return None
    found = []
    for line in cited:
        words = " ".join(line.split())
        true = words in lines or (len(words) >= _MIN_CITED and words in text)
        match = words if true else _resembled(words, lines)
        if not match:
            return None
        found.append(match)
    return "; ".join(found)


def _resembled(words: str, lines: Sequence[str]) -> str:
    """Return the only line that begins and ends as ``words`` do; empty if it is not unique."""
    shares = [(_shared(words, line), line) for line in dict.fromkeys(lines)]
    alike = [line for share, line in shares if share >= _ALIKE]
    return alike[0] if len(alike) == 1 else ""


def _shared(a: str, b: str) -> float:
    """Return the length of the common prefix and suffix as a share of the longer text."""
    short, long = sorted((len(a), len(b)))
    if short < _ALIKE * long or not short:
        return 0.0
    begin, end = commonprefix([a, b]), commonprefix([a[::-1], b[::-1]])
    return min(len(begin) + len(end), short) / long


_ALWAYS_SENT = 1000
"""Outputs that may be sent about the shortest document [characters]."""
_MAX_FIELD = 2000
"""Length to which each field of an output is cut: a page of text is no extract [characters]."""
_ALIKE = 0.75
"""Share of a line that a miscopied citation must have in common with it."""
_MIN_CITED = 12
"""Shortest citation that is not a whole line [characters]."""
_MAX_CITED = 32
"""Longest citation [lines]."""


def _own_words(message: Message) -> str:
    return "".join(part.text for part in message.parts if part.kind is Kind.REMOTE).strip()


def _line(job: Job) -> str:
    fields = {"explanation": job.output.explanation, "citation": job.output.citation}
    given = {name: value for name, value in fields.items() if value}
    output = {"job": job.manifest.job_id, **given, "answer": job.output.answer}
    return json.dumps(output, ensure_ascii=False)
