"""MinionS: the remote splits the work, the worker does it, the remote puts it together.

Paper 000, section 5. One round is

    decompose ─▶ execute ─▶ synthesize ─▶ answer, or another round
    (remote)     (local)     (remote)

Nothing goes to the remote but the question, the worker's kept outputs, this package's fixed
sentences, the remote's own words, and what the choice of jobs tells (``choice.py``).
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
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.choice import RUN_BITS, Bounds, canonical
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.dialogue import asked, check, retrieved
from collab_llm_nodes.protocols.minions.jobs import (
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
    filled,
    replied,
)
from collab_llm_nodes.protocols.minions.plan import Plan, jobs_of, read_plan
from collab_llm_nodes.protocols.minions.reading import (
    Decision,
    decision,
    find_program,
    worker_output,
)
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
    still_wanted: Callable[[], None] = lambda: None,
) -> Machine:
    """Answer ``question`` about ``documents``.

    Args:
        still_wanted: called while the documents are cut for a program; what it raises ends the
            answer, as an action's error does.

    Raises:
        InvalidInput: there is no question, or no text.
        CannotPlan: while it runs: the remote gives nothing that could be carried out.
        CollabError: while it runs: what was thrown in before there was any answer.
    """
    check(question, documents)
    return _MinionS(question, tuple(documents), config, still_wanted).run()


class _MinionS:
    """One answer under way.

    Attributes:
        best: answer of the remote so far that it was not sure of.
        found: answer that most workers have given, in the last round with any.
        room: length of the workers' words that may still be sent.
        choice_left: bits that programs may still tell by their choice.
        choice_unsent: those told by the next message.
        missing, scratchpad: memory between rounds, in the remote's words.
        history: all that was said, with ``carry: history``.
    """

    def __init__(
        self,
        question: str,
        documents: tuple[str, ...],
        config: MinionsConfig,
        still_wanted: Callable[[], None],
    ) -> None:
        self.config, self.documents = config, documents
        self.still_wanted = still_wanted
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
                self.documents = yield from retrieved(self.text, config.retrieve)
            length = sum(map(len, self.documents))
            self.room = max(_ALWAYS_SENT, int(config.remote_share * length))
            for number in range(1, config.rounds + 1):
                self.round = number
                wanted = yield from self._decompose()
                cut = yield from self._execute(wanted)
                decided: Decision = yield from self._synthesize(cut)
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
        """Return the jobs of the remote's program; of its plan, where no program works."""
        planners = (PLAN,) if self.config.planner == PLAN else (PROGRAM, PLAN)
        fault = Fault.NO_JOBS
        for planner in planners:
            talk = [self._decompose_prompt(planner)]
            for _ in range(self.config.attempts):
                if planner == PROGRAM and self.choice_left < RUN_BITS:
                    break
                reply: Reply = yield self._ask("decompose", talk)
                talk.append(replied(reply.text))
                wanted = yield from self._carried_out(planner, reply.text)
                if isinstance(wanted, JobList):
                    self._remember(talk)
                    return wanted
                fault = wanted
                talk.append(filled(prompts.FAILED, told=fault.told))
        raise CannotPlan(f"none of its decompositions works ({fault.value})")

    def _carried_out(self, planner: str, text: str) -> Generator[Action, Any, JobList | Fault]:
        config = self.config
        self.plan = None
        if planner == PROGRAM:
            wanted: ProgramJobs | Fault = yield RunProgram(
                self.round,
                find_program(text),
                self.documents,
                self.jobs,
                self._chunkers(),
                config.chunk_size,
            )
            return self._chosen(wanted)
        plan = read_plan(text, self._chunkers(), config.limits, reduce=config.reduce)
        if isinstance(plan, Fault):
            return plan
        self.plan = plan
        return jobs_of(
            plan,
            self.documents,
            self.jobs,
            chunk_size=config.chunk_size,
            limits=config.limits,
        )

    def _chosen(self, wanted: ProgramJobs | Fault) -> JobList | Fault:
        """Return the jobs to do for a program's; what their choice tells is charged."""
        bits = RUN_BITS
        chosen: JobList | Fault = wanted
        if isinstance(wanted, ProgramJobs):
            config = self.config
            bounds = Bounds(
                self.documents,
                list(dict.fromkeys(job.manifest.chunk for job in self.jobs)),
                config.chunk_size,
                1 if config.samples else config.max_samples,
                config.limits,
            )
            chosen, bits = canonical(wanted, bounds, self.choice_left, self.still_wanted)
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
        return filled(
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
        """Return what the remote may remember of the rounds before."""
        if self.round == 1:
            return ""
        if self.config.carry == HISTORY:
            return prompts.CARRIED_HISTORY
        notes: Message | str = ""
        if self.config.carry == SCRATCHPAD and self.scratchpad:
            written = Part(Kind.REMOTE, "\n".join(self.scratchpad))
            notes = filled(prompts.CARRIED_SCRATCHPAD, scratchpad=written)
        missing = Part(Kind.REMOTE, self.missing or prompts.NOTHING_MISSING)
        return filled(prompts.CARRIED, missing=missing, notes=notes)

    def _chunkers(self) -> tuple[str, ...]:
        return (self.config.chunker,) if self.config.chunker else tuple(CHUNKERS)

    # ------------------------------------------------------------------ execute

    def _execute(self, wanted: JobList) -> Generator[Action, Any, int]:
        """Have the worker do the jobs; return how many were left out."""
        config = self.config
        manifests, cut = self.numbering.number(
            wanted,
            tasks=config.tasks,
            samples=config.samples,
            max_samples=config.max_samples,
            max_jobs=config.limits.jobs,
            max_characters=config.limits.output_mb << 20,
        )
        local = tuple(self._worker_prompt(manifest) for manifest in manifests)
        replies: Sequence[Reply | CollabError] = yield AskLocal("execute", self.round, local)
        failed = [reply for reply in replies if isinstance(reply, CollabError)]
        if failed and len(failed) == len(replies):
            raise failed[0]  # nothing found is not the same as nothing asked
        self.jobs = tuple(self._job(*both) for both in zip(manifests, replies, strict=True))
        answers = Counter(job.output.answer for job in self.jobs if job.kept and job.output.answer)
        if answers:
            self.found = answers.most_common(1)[0][0]
        if cut:
            self.marks.add(Mark.PARTIAL)
        yield Executed(self.round, self.jobs, cut)
        return cut

    def _worker_prompt(self, manifest: JobManifest) -> LocalPrompt:
        text = self.style.worker.format(
            chunk=manifest.chunk, task=manifest.task, advice=manifest.advice, question=self.text
        )
        local = self.config.local
        seed = (self.round - 1) * self.config.max_samples + manifest.sample
        quotable = manifest.chunk if self.config.check_citations else ""
        return LocalPrompt(
            (Turn("user", text),), local.temperature, local.max_tokens, seed, quotable
        )

    def _job(self, manifest: JobManifest, reply: Reply | CollabError) -> Job:
        if isinstance(reply, CollabError) or reply.finish is Finish.REFUSAL:
            return Job(manifest, JobOutput(), Dropped.FAILED)
        if reply.finish is not Finish.STOP:
            return Job(manifest, JobOutput(), Dropped.TRUNCATED)
        output = worker_output(
            reply.text, quotes=self.style.quotes, max_characters=self.config.field_characters
        )
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
            output = replace(output, citation=None)  # its answer is made of the quotes
        return Job(manifest, output)

    # ------------------------------------------------------------------ synthesize

    def _synthesize(self, cut: int) -> Generator[Action, Any, Decision]:
        """Ask the remote for its decision about the outputs."""
        last = self.round == self.config.rounds
        forced = last and self.config.force_final or not self.style.more
        talk = [self._synthesize_prompt(cut, forced)]

        def read(text: str) -> Decision | None:
            found = decision(text)
            return found if found is not None and (found.final or not forced) else None

        repairs = self.config.remote.repairs
        decided = yield from asked(lambda: self._ask("synthesize", talk), talk, read, repairs)
        self._remember(talk)
        if decided is None:
            self.marks.add(Mark.UNREADABLE)
            words = _own_words(talk[-1]) or self.best or self.found
            return Decision(forced, words if forced else "")
        if forced and self.style.more:
            self.marks.add(Mark.FORCED)
        return decided

    def _synthesize_prompt(self, cut: int, forced: bool) -> Message:
        outputs, left_out = self._outputs()
        notes = prompts.JOBS_LEFT_OUT if cut else ""
        if left_out:
            self.marks.add(Mark.PARTIAL)
            notes += prompts.OUTPUTS_LEFT_OUT
        final = "provide_final_answer"
        more = "" if forced else prompts.MISSING_FIELD
        if not forced and self.config.carry == SCRATCHPAD:
            more += prompts.SCRATCHPAD_FIELD
        return filled(
            prompts.SYNTHESIZE,
            question=self.question,
            outputs=outputs,
            notes=notes,
            guidelines=prompts.LAST_ROUND if forced and self.style.more else self.style.guidelines,
            decisions=final if forced else f"{final} or {self.style.more}",
            answer=self.style.answer,
            more=more,
        )

    def _outputs(self) -> tuple[Part, bool]:
        """Return the kept outputs as the remote reads them, and if some had to be left out."""
        kept = [job for job in self.jobs if job.kept]
        if self.plan is not None and self.plan.reduction is not None:
            value = self.plan.reduction.of(kept)
            if value is not None:
                rule = self.plan.reduction.rule
                return Part(Kind.EXTRACT, prompts.REDUCED.format(rule=rule, value=value)), False
        room = self.config.remote_characters
        left_out = False
        lines: list[str] = []
        told: set[int] = set()
        for job in sorted(kept, key=lambda job: job.manifest.task_id):
            line = _line(job)
            if job.manifest.task_id not in told:
                line = f"{_heading(job.manifest)}\n{line}"
            if len(line) >= room or job.output.length > self.room:
                left_out = True
                continue
            room -= len(line) + 1
            self.room -= job.output.length
            told.add(job.manifest.task_id)
            lines.append(line)
        if not lines:
            return Part(Kind.INSTRUCTIONS, prompts.NO_OUTPUTS), left_out
        return Part(Kind.EXTRACT, "\n".join(lines)), left_out

    # ------------------------------------------------------------------ the remote, the end

    def _ask(self, stage: str, talk: Sequence[Message]) -> AskRemote:
        """The one place where something is sent to the remote."""
        remote = self.config.remote
        messages = (*self.history, *talk)
        bits, self.choice_unsent = self.choice_unsent, 0
        return AskRemote(stage, self.round, messages, remote.temperature, remote.max_tokens, bits)

    def _remember(self, talk: Sequence[Message]) -> None:
        if self.config.carry == HISTORY:
            self.history += talk

    def _outcome(
        self, answer: str, explanation: str = "", error: CollabError | None = None
    ) -> Outcome:
        return Outcome(answer, frozenset(self.marks), self.round, explanation, self.jobs, error)


def cited_lines(citation: str | None, chunk: str) -> str | None:
    """Return ``citation`` as ``chunk`` has it, several lines with "; " between; None if one fails.

    A part of a line counts from ``_LEAST_CITED`` characters on, since a letter stands in any text.
    A small model miscopies a rare name in the middle of a line: the line that is meant stands for
    such a one.
    """
    lines = [" ".join(line.split()) for line in chunk.splitlines()]
    text = " ".join(lines)
    cited = (citation or "").split("; ")
    if len(cited) > _MOST_CITED:
        return None
    found = []
    for line in cited:
        words = " ".join(line.split())
        true = words in lines or (len(words) >= _LEAST_CITED and words in text)
        meant = words if true else _meant(words, lines)
        if not meant:
            return None
        found.append(meant)
    return "; ".join(found)


def _meant(words: str, lines: Sequence[str]) -> str:
    """Return the one line that begins and ends as ``words`` do; empty if there is none."""
    shares = [(_shared(words, line), line) for line in dict.fromkeys(lines)]
    alike = [line for share, line in shares if share >= _ALIKE]
    return alike[0] if len(alike) == 1 else ""


def _shared(a: str, b: str) -> float:
    """Return which share of the longer text the common begin and end of both are."""
    short, long = sorted((len(a), len(b)))
    if short < _ALIKE * long or not short:
        return 0.0
    begin, end = commonprefix([a, b]), commonprefix([a[::-1], b[::-1]])
    return min(len(begin) + len(end), short) / long


_ALWAYS_SENT = 1000
"""Characters that workers may say about the shortest document."""
_ALIKE = 0.75
_LEAST_CITED = 12
"""Fewest characters of a citation that is no whole line."""
_MOST_CITED = 32
"""Most lines of a citation."""


def _own_words(message: Message) -> str:
    return "".join(part.text for part in message.parts if part.kind is Kind.REMOTE).strip()


def _heading(manifest: JobManifest) -> str:
    """Return a line about a task, whose text the remote wrote itself."""
    return f"Task t{manifest.task_id}: {manifest.task}"


def _line(job: Job) -> str:
    fields = {"explanation": job.output.explanation, "citation": job.output.citation}
    given = {name: value for name, value in fields.items() if value}
    output = {"job": job.manifest.job_id, **given, "answer": job.output.answer}
    return json.dumps(output, ensure_ascii=False)
