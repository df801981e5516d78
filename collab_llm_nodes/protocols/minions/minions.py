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
from itertools import groupby
from typing import Any

from collab_llm_nodes.chat.base import Reply
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
from collab_llm_nodes.protocols.minions.examples import example_turns
from collab_llm_nodes.protocols.minions.jobs import (
    MAX_SAMPLES,
    UNUSABLE,
    Dropped,
    Fault,
    Job,
    JobList,
    JobManifest,
    Numbering,
    ProgramJobs,
)
from collab_llm_nodes.protocols.minions.messages import (
    Action,
    Aggregate,
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
from collab_llm_nodes.protocols.minions.outputs import best_first, judged, reply_form
from collab_llm_nodes.protocols.minions.plan import Plan, jobs_of, plan_form, read_plan
from collab_llm_nodes.protocols.minions.reading import (
    Decision,
    decision,
    find_program,
)
from collab_llm_nodes.protocols.minions.sandbox.limits import MAX_TEXT
from collab_llm_nodes.protocols.minions.sandbox.retrieval import ABOUT as RETRIEVE_ABOUT
from collab_llm_nodes.protocols.minions.settings import (
    HISTORY,
    PLAN,
    PROGRAM,
    SCRATCHPAD,
    SENTENCE,
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
        advice: the remote's hints to itself.
        program: the program that chose the jobs; empty for a plan.
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
        style = prompts.STYLES[config.style]
        self.style = style.of_sentences() if config.worker_form == SENTENCE else style
        self.examples = example_turns(self.style, config.examples)
        self.text = question
        self.question = Part(Kind.QUESTION, question)
        self.numbering = Numbering()
        self.marks: set[Mark] = set()
        self.round = 0
        self.jobs: tuple[Job, ...] = ()
        self.plan: Plan | None = None
        self.best = ""
        self.found = ""
        self.advice = self.program = ""
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
                if config.advice and number == 1:
                    yield from self._advise()
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

    def _advise(self) -> Generator[Action, Any, None]:
        """Ask the remote for hints, which it reads with each decomposition."""
        asked = fill(prompts.ADVICE, document=self.style.document, question=self.question)
        reply: Reply = yield self._ask("advice", [asked])
        self.advice = reply.text.strip()

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
        self.plan, self.program = None, ""
        if planner == PROGRAM:
            self.program = find_program(text)
            jobs: ProgramJobs | Fault = yield RunProgram(
                self.round,
                self.program,
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
            form = prompts.PROGRAM_FORM.format(
                chunkers=f"{sources}\n\n{RETRIEVE_ABOUT}",
                example=chunkers[0],
                aggregate=prompts.AGGREGATE_FORM if config.aggregate else "",
            )
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
            rules=self._rules(),
            tasks=(prompts.FIXED_TASKS if config.tasks else prompts.ANY_TASKS).format(
                tasks=config.tasks
            ),
            samples=(prompts.FIXED_SAMPLES if config.samples else prompts.ANY_SAMPLES).format(
                samples=config.samples
            ),
            carried=self._carried(),
            form=form,
        )

    def _rules(self) -> Message | str:
        if not self.advice:
            return self.style.rules
        hints = Part(Kind.REMOTE, self.advice)
        return fill(prompts.ADVISED, advice=hints, rules=self.style.rules)

    def _carried(self) -> Message | str:
        """Return the remote's memory of earlier rounds."""
        if self.round == 1:
            return ""
        if self.config.carry == HISTORY:
            return prompts.CARRIED_HISTORY
        missing = Part(Kind.REMOTE, self.missing or prompts.NOTHING_MISSING)
        return fill(prompts.CARRIED, missing=missing, notes=self._notes())

    def _notes(self) -> Message | str:
        """Return the remote's notes of earlier rounds; empty if it writes none."""
        if self.config.carry != SCRATCHPAD or not self.scratchpad:
            return ""
        written = Part(Kind.REMOTE, "\n".join(self.scratchpad))
        return fill(prompts.CARRIED_SCRATCHPAD, scratchpad=written)

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
        self._take([self._job(*both) for both in zip(manifests, replies, strict=True)])
        yield from self._repair(local, replies)
        if 2 * sum(job.dropped in UNUSABLE for job in self.jobs) > len(self.jobs):
            self.marks.add(Mark.UNUSABLE)
        if left_out:
            self.marks.add(Mark.PARTIAL)
        yield Executed(self.round, self.jobs, left_out)
        return left_out

    def _take(self, jobs: Sequence[Job]) -> None:
        """Take ``jobs`` as those of this round."""
        self.jobs = tuple(jobs)
        answers = Counter(job.output.answer for job in self.jobs if job.kept and job.output.answer)
        if answers:
            self.found = answers.most_common(1)[0][0]

    def _repair(
        self, prompted: Sequence[LocalPrompt], replies: Sequence[Reply | CollabError]
    ) -> Generator[Action, Any, None]:
        """Ask once more for each reply that could not be read."""
        places = [i for i, job in enumerate(self.jobs) if job.dropped is Dropped.UNREADABLE]
        if not places or self.style.reply is None:
            return
        again = [_asked_again(prompted[place], replies[place]) for place in places]
        repaired = yield AskLocal("repair", self.round, tuple(again))
        jobs = [*self.jobs]
        for place, reply in zip(places, repaired, strict=True):
            if not isinstance(reply, CollabError):
                jobs[place] = self._job(jobs[place].manifest, reply)
        self._take(jobs)

    def _worker_prompt(self, manifest: JobManifest) -> LocalPrompt:
        text = self.style.worker.format(
            chunk=manifest.chunk, task=manifest.task, advice=manifest.advice, question=self.text
        )
        local = self.config.local
        seed = (self.round - 1) * MAX_SAMPLES + manifest.sample
        quotable = manifest.chunk if self.config.check_citations else ""
        turns = (*self.examples, Turn("user", text))
        guide = reply_form(self.style, manifest.chunk)
        return LocalPrompt(turns, local.temperature, local.max_tokens, seed, quotable, guide)

    def _job(self, manifest: JobManifest, reply: Reply | CollabError) -> Job:
        return judged(
            manifest,
            reply,
            self.style,
            check_citations=self.config.check_citations,
            abstain_filter=self.config.abstain_filter,
        )

    # ------------------------------------------------------------------ synthesize

    def _synthesize(self, left_out: int) -> Generator[Action, Any, Decision]:
        """Return the remote's decision about the outputs."""
        last = self.round == self.config.rounds
        forced = last and self.config.force_final or not self.style.more
        aggregated = yield from self._aggregate()
        chat = [self._synthesize_prompt(left_out, forced, aggregated)]

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

    def _aggregate(self) -> Generator[Action, Any, str]:
        """Return the program's text about the kept outputs; empty without one that may be sent."""
        kept = tuple(job.without_chunk for job in self.jobs if job.kept)
        if not (self.config.aggregate and self.program and kept):
            return ""
        text: str | Fault = yield Aggregate(self.round, self.program, kept)
        if isinstance(text, Fault) or len(text) > min(self.config.remote_characters, self.room):
            return ""
        self.room -= len(text)
        return text

    def _synthesize_prompt(self, jobs_left_out: int, forced: bool, aggregated: str) -> Message:
        outputs, left_out = (
            (Part(Kind.EXTRACT, aggregated), False) if aggregated else self._outputs()
        )
        limits = prompts.JOBS_LEFT_OUT if jobs_left_out else ""
        if left_out:
            self.marks.add(Mark.PARTIAL)
            limits += prompts.OUTPUTS_LEFT_OUT
        more = "" if forced else prompts.MISSING_FIELD
        if not forced and self.config.carry == SCRATCHPAD:
            more += prompts.SCRATCHPAD_FIELD
        return fill(
            prompts.SYNTHESIZE,
            question=self.question,
            outputs=outputs,
            notes=fill("{limits}{notes}", limits=limits, notes=self._notes()),
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
        sent = self._within_limits(kept)
        if not sent:
            return Part(Kind.INSTRUCTIONS, prompts.NO_OUTPUTS), bool(kept)
        lines: list[str] = []
        for heading, jobs in groupby(sent, _heading):
            lines += [heading, *map(_line, jobs)]
        return Part(Kind.EXTRACT, "\n".join(lines)), len(sent) < len(kept)

    def _within_limits(self, kept: Sequence[Job]) -> list[Job]:
        """Return the best jobs of ``kept`` whose outputs may be sent, by task and chunk."""
        room = self.config.remote_characters
        room -= sum(len(heading) + 1 for heading in {*map(_heading, kept)})
        # Half of what may still be sent is left to later rounds, which ask for what is missing.
        later = 0 if self.round == self.config.rounds else self.room // 2
        chosen: list[Job] = []
        for job in best_first(kept):
            size = len(_line(job)) + 1
            if size <= room and job.output.length <= self.room - later:
                room -= size
                self.room -= job.output.length
                chosen.append(job)
        return sorted(chosen, key=lambda job: job.manifest.place)

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


_ALWAYS_SENT = 1000
"""Outputs that may be sent about the shortest document [characters]."""


def _asked_again(prompt: LocalPrompt, reply: Reply | CollabError) -> LocalPrompt:
    """Return ``prompt`` with its unreadable reply and the request for a better one."""
    assert isinstance(reply, Reply)
    said = Turn("assistant", reply.text or "(no reply)")
    turns = (*prompt.turns, said, Turn("user", prompts.WORKER_NOT_READABLE))
    return replace(prompt, turns=turns)


def _own_words(message: Message) -> str:
    return "".join(part.text for part in message.parts if part.kind is Kind.REMOTE).strip()


def _heading(job: Job) -> str:
    return prompts.TASK_HEADING.format(number=job.manifest.task_id, task=job.manifest.task)


def _line(job: Job) -> str:
    fields = {"explanation": job.output.explanation, "citation": job.output.citation}
    given = {name: value for name, value in fields.items() if value}
    output = {"job": job.manifest.job_id, **given, "answer": job.output.answer}
    return json.dumps(output, ensure_ascii=False)
