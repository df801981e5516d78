"""Minion and MinionS as served protocols: requests in, answers with both ledgers out."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial

from collab_llm_nodes.chat.base import ChatRequest, Finish, Reply
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import CollabError, InvalidInput, NotFound
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Answer, Control, Progress, Request, Resources
from collab_llm_nodes.protocols.minions.abstention import UNKNOWN, says_nothing
from collab_llm_nodes.protocols.minions.baselines import local_only, rag, remote_only
from collab_llm_nodes.protocols.minions.choice import padding_s
from collab_llm_nodes.protocols.minions.dialogue import no_passage_found, reply_cut_off
from collab_llm_nodes.protocols.minions.driving import Handlers, drive
from collab_llm_nodes.protocols.minions.equipment import Equipment
from collab_llm_nodes.protocols.minions.jobs import (
    UNUSABLE,
    Dropped,
    Fault,
    Job,
    ProgramJobs,
)
from collab_llm_nodes.protocols.minions.messages import (
    UNSURE,
    Action,
    Aggregate,
    AskLocal,
    AskRemote,
    Executed,
    LocalPrompt,
    Machine,
    Mark,
    Outcome,
    Retrieve,
    RunProgram,
)
from collab_llm_nodes.protocols.minions.metrics import MARKED, MinionsMetrics
from collab_llm_nodes.protocols.minions.minion import minion
from collab_llm_nodes.protocols.minions.minions import minions
from collab_llm_nodes.protocols.minions.served import (
    LOCAL_ONLY,
    PROTOCOL,
    RAG,
    REMOTE_ONLY,
    ServedConfig,
    ServedMinion,
    ServedMinions,
)
from collab_llm_nodes.protocols.minions.settings import AUTO, DirectConfig
from collab_llm_nodes.protocols.minions.sources import Sources, field_of, sources_of
from collab_llm_nodes.protocols.options import names

MINION, MINIONS = "minion", "minions"
_REPORT_S = 0.25
"""Interval of progress reports while the local model works."""
_PROMPT_FIELDS = ("text", "turns")
"""Fields of a model's errors that mean its prompt."""
_TEXT = re.compile(r"documents(?:\[(\d+)\])?")
_DONE = {
    "decompose": 0.05,
    "program": 0.15,
    "execute": 0.2,
    "answer": 0.5,
    "repair": 0.85,
    "synthesize": 0.9,
}
"""Share of a round that is done at the start of a stage."""
_COUNTED = {"repair": "repaired"}
"""Figure that counts the prompts of a stage, if not as jobs."""
_EXECUTION = 0.7
"""Share of a round that its jobs take."""


def check(protocol: str, request: Request) -> None:
    """Check a request without the models.

    Raises:
        InvalidInput: ``field`` is the request's.
    """
    config: ServedConfig = request.config
    if not request.prompt.strip():
        raise InvalidInput("is empty", field="prompt", remedy="ask something")
    if request.raw:
        raise InvalidInput("questions are put into prompts", field="raw", remedy="set it to false")
    usual = SamplingConfig(seed=request.sampling.seed)
    for name in ("temperature", "top_k", "top_p", "law"):
        if getattr(request.sampling, name) != getattr(usual, name):
            raise InvalidInput(
                "each role has its own sampling",
                field=name,
                remedy="leave it out; remote.temperature and local.temperature are options",
            )
    if request.max_tokens:
        raise InvalidInput(
            "each role has its own",
            field="max_tokens",
            remedy="set the options remote.max_tokens and local.max_tokens",
        )
    if not request.documents and not config.store:
        raise InvalidInput(
            "there are none", field="document_names", remedy="give one, or the option store"
        )
    if protocol == MINION:
        for option in sorted(request.options - set(names(ServedMinion()))):
            raise InvalidInput("is no option of minion", field=option, remedy="ask minions")


def start(
    protocol: str, config: ServedMinion | ServedMinions, resources: Resources
) -> MinionsRunning:
    """Load the models of the protocol ``minion`` or ``minions``.

    Raises:
        ConfigError: a model, folder, price or file that does not exist.
        ModelError: a model cannot be loaded.
    """
    return MinionsRunning(protocol, Equipment(config, resources))


class MinionsRunning:
    """Minion or MinionS with its models loaded.

    Args:
        protocol: "minion" or "minions".
        owner: close the equipment as well.
    """

    def __init__(self, protocol: str, equipment: Equipment, *, owner: bool = True) -> None:
        self.protocol = protocol
        self.equipment = equipment
        self._owner = owner
        self._workers = ThreadPoolExecutor(
            equipment.parallel, thread_name_prefix=f"{protocol}-jobs"
        )

    @property
    def parallel(self) -> int:
        """Concurrent calls of ``run``."""
        return self.equipment.parallel

    def run(self, request: Request, emit: Callable[[Progress], None], control: Control) -> Answer:
        """Answer one question about documents; a failed answer has its ledgers, too."""
        control.check()
        self.equipment.warn(request.config)
        return _Run(self.protocol, self.equipment, self._workers, request, emit, control).answer()

    def health(self) -> Mapping[str, object]:
        """Return the models' figures."""
        return self.equipment.health()

    def close(self) -> None:
        """Free the workers, and as the owner the equipment."""
        self._workers.shutdown()
        if self._owner:
            self.equipment.close()


class _Run:
    """One running answer.

    Attributes:
        counts: figures of the rounds' jobs, ``name.ROUND``.
        jobs: jobs of the last round, without their chunks.
        share: share of the whole that is done, 0 to 1.
        program_begun: start time of the last program, until the next action.
    """

    def __init__(
        self,
        protocol: str,
        equipment: Equipment,
        workers: ThreadPoolExecutor,
        request: Request,
        emit: Callable[[Progress], None],
        control: Control,
    ) -> None:
        self.protocol, self.equipment, self.workers = protocol, equipment, workers
        self.request, self.config = request, request.config
        self.emit, self.control = emit, control
        self.begun = request.asked_at or time.monotonic()
        self.accounts = equipment.accounts(request.id, self.config)
        self.counts: Counter[str] = Counter()
        self.jobs: tuple[Job, ...] = ()
        self.marks: frozenset[Mark] = frozenset()
        self.stage, self.round, self.share = "documents", 1, 0.0
        self.sources = Sources((), None)
        self.program_begun: float | None = None

    def answer(self) -> Answer:
        """Read the documents and drive the protocol's machine."""
        handlers = Handlers(
            self._ask_remote,
            self._ask_local,
            self._run_program,
            self._retrieve,
            self._executed,
            self._begin,
            self._aggregate,
        )
        try:
            self._report()
            self.sources = sources_of(self.request, self.equipment.library, self.control.check)
            outcome = drive(self._machine(), handlers)
        except CollabError as error:
            outcome = Outcome("", error=error)
        return self._answered(outcome)

    def _machine(self) -> Machine:
        config, question, texts = self.config, self.request.prompt, self._texts()
        direct = DirectConfig(config.remote, config.local, config.retrieval.chunks)
        if config.way == RAG:
            return rag(question, texts, direct)
        if config.way == REMOTE_ONLY:
            return remote_only(question, texts, direct)
        if config.way == LOCAL_ONLY:
            return local_only(question, texts, direct)
        if self.protocol == MINION:
            return minion(question, texts, config)
        if config.worker_form == AUTO:
            config = dataclasses.replace(config, worker_form=self.equipment.worker_form)
        return minions(question, texts, config, self.control.check)

    def _texts(self) -> tuple[str, ...]:
        """Return the documents, or the best passages of very long ones."""
        config = self.config
        in_minions = config.way == PROTOCOL and self.protocol == MINIONS
        if config.way == RAG or (in_minions and config.retrieve):
            # The machine retrieves passages itself; it needs a text for each document.
            stored = (config.store,) if self.sources.store is not None else ()
            return (*(document.name for document in self.sources.documents), *stored)
        if self.sources.characters <= config.large.characters:
            return self.sources.texts()
        self.marks |= {Mark.PARTIAL}
        by_words = dataclasses.replace(config.retrieval, method="bm25")
        passages = self._passages(by_words, config.large.passages)
        if not passages:
            raise no_passage_found()
        return passages

    # Handlers of the machine's actions.

    def _begin(self, action: Action) -> None:
        """Report the stage; raise if the answer was cancelled."""
        self.control.check()
        if self.program_begun is not None:
            # Only here, since the time to process its jobs depends on its choice as well.
            self._wait(padding_s(time.monotonic() - self.program_begun))
            self.program_begun = None
        match action:
            case AskRemote(stage=stage, round=round):
                self._move(stage, round)
            case AskLocal(stage=stage, round=round, prompts=prompts):
                self._move(stage, round)
                self.counts[f"{_COUNTED.get(stage, 'jobs')}.{round}"] += len(prompts)
            case RunProgram(round=round) | Aggregate(round=round):
                self._move("program", round)
            case Retrieve():
                self._move("retrieve", self.round)
            case Executed():
                return
        self._report()

    def _move(self, stage: str, round: int) -> None:
        self.accounts.record_energy(self.round)
        self.stage, self.round = stage, round
        self._advance(_DONE.get(stage, 0.0))

    def _advance(self, done: float) -> None:
        """Set the share of the round that is done; the whole share never decreases."""
        rounds = self.config.rounds if self.config.way == PROTOCOL else 1
        self.share = max(self.share, min((self.round - 1 + min(done, 1.0)) / rounds, 0.99))

    def _ask_remote(self, ask: AskRemote) -> Reply:
        disclosures = self.accounts.record_request(ask)
        request = ChatRequest(
            tuple(Turn(message.role, message.text) for message in ask.messages),
            SamplingConfig(ask.temperature, seed=self.request.sampling.seed),
            ask.max_tokens,
            guide=ask.guide,
        )
        result: Reply | CollabError
        try:
            (result,) = self.equipment.remote.ask([request], self.control)
        except CollabError as error:
            result = error
        self.accounts.record_reply(ask.round, disclosures, result)
        if isinstance(result, CollabError):
            if result.field in _PROMPT_FIELDS and self.config.way == PROTOCOL:
                result.field = "question"  # its prompt contains no document
                result.remedy = "shorten it, or use a remote that reads longer prompts"
            raise result
        if result.finish is Finish.DEADLINE:
            raise reply_cut_off()
        return result

    def _ask_local(self, prompts: Sequence[LocalPrompt]) -> Sequence[Reply | CollabError]:
        """Ask in a worker thread, and report the finished jobs meanwhile."""
        requests = [self._local_request(prompt) for prompt in prompts]
        done: list[int] = []
        asked = self.workers.submit(
            self.equipment.local.ask, requests, self.control, lambda index, _: done.append(index)
        )
        reported = 0
        while not wait_for([asked], _REPORT_S).done:
            if len(done) > reported:
                reported = len(done)
                self._note_done(reported, len(requests))
                self._report()
        results = asked.result()
        self._note_done(len(results), len(results))
        self.accounts.record_jobs(self.round, results)
        return results

    def _note_done(self, done: int, jobs: int) -> None:
        if self.stage in _COUNTED:
            return
        self.counts[f"done.{self.round}"] = done
        self._advance(_DONE[self.stage] + _EXECUTION * done / max(jobs, 1))

    def _local_request(self, prompt: LocalPrompt) -> ChatRequest:
        seed = (self.request.sampling.seed << 20) + prompt.seed
        sampling = SamplingConfig(prompt.temperature, seed=seed)
        return ChatRequest(prompt.turns, sampling, prompt.max_tokens, prompt.quotable, prompt.guide)

    def _run_program(self, action: RunProgram) -> ProgramJobs | Fault:
        self.program_begun = time.monotonic()
        with self.equipment.sandbox(self.control) as sandbox:
            return sandbox.run(
                action.program,
                action.documents,
                action.last_jobs,
                chunkers=action.chunkers,
                chunk_size=action.chunk_size,
                due=self.control.due,
                check=self.control.check,
            )

    def _aggregate(self, action: Aggregate) -> str | Fault:
        self.program_begun = time.monotonic()
        with self.equipment.sandbox(self.control) as sandbox:
            due, check = self.control.due, self.control.check
            return sandbox.aggregate(action.program, action.jobs, due=due, check=check)

    def _wait(self, seconds: float) -> None:
        """Wait, at most until the deadline or a cancellation."""
        cancelled = threading.Event()
        unregister = self.control.on_cancel(cancelled.set)
        cancelled.wait(max(0.0, min(seconds, self.control.due - time.monotonic())))
        unregister()
        self.control.check()

    def _retrieve(self, question: str, k: int) -> tuple[str, ...]:
        return self._passages(self.config.retrieval, k)

    def _passages(self, config: RetrievalConfig, count: int) -> tuple[str, ...]:
        self.stage = "retrieve"
        self._report()
        return self.sources.passages(
            self.request.prompt,
            dataclasses.replace(config, chunks=count),
            self.equipment.encoder,
            self.control.check,
        )

    def _executed(self, executed: Executed) -> None:
        self.jobs = tuple(job.without_chunk for job in executed.jobs)  # the documents can be freed
        reasons = Counter(job.dropped.value or "kept" for job in executed.jobs)
        for reason in ("kept", *filter(None, (each.value for each in Dropped))):
            self.counts[f"{reason}.{executed.round}"] = reasons[reason]
        self.counts[f"cut.{executed.round}"] = executed.left_out
        self._report()

    # Reports.

    def _report(self) -> None:
        self.emit(Progress(stage=self.stage, share_done=self.share, metrics=self._metrics()))

    def _answered(self, outcome: Outcome) -> Answer:
        self.accounts.record_energy(self.round)
        self.marks |= outcome.marks
        answer, error = outcome.answer, outcome.error
        if error is not None:
            error.field = self._field(error.field)
        elif says_nothing(answer):
            answer, error = UNKNOWN, self._not_found()
            self.marks -= UNSURE  # there is no answer to have reservations about
        elif remark := self._unusable():
            self.equipment.warn_of(remark)
        sure = error is None and not self.marks & UNSURE
        return Answer(
            answer,
            verified=sure and self.config.way != LOCAL_ONLY,
            stage=self.stage,
            share_done=1.0 if outcome.error is None else self.share,
            metrics=self._metrics(),
            error=error,
        )

    def _not_found(self) -> NotFound:
        """Return the error for an answer that says that there is none."""
        return NotFound(
            "the models found no answer in the documents",
            field="prompt",
            remedy=self._unusable() or "ask in the documents' words, or allow more rounds",
        )

    def _unusable(self) -> str:
        """Return how many outputs could not be used, and the remedy; empty if they were few."""
        if Mark.UNUSABLE not in self.marks:
            return ""
        totals = self._metrics().figures()
        names = sorted(each.value for each in UNUSABLE)
        reasons = [f"{totals[name]:.0f} {name}" for name in names if totals.get(name)]
        return (
            f"of {totals['jobs']:.0f} outputs of the local model {', '.join(reasons)}:"
            f" {'raise local.max_tokens, ' * bool(totals.get(Dropped.TRUNCATED.value))}"
            "set worker_form to sentence and examples above 0, or use a larger local model"
        )

    def _field(self, name: str) -> str:
        """Return the request's name for a field of a machine's or a model's error."""
        if name == "question":
            return "prompt"
        text = _TEXT.fullmatch("documents" if name in _PROMPT_FIELDS else name)
        if text is None:
            return name
        return field_of(self.request, int(text[1]) if text[1] else None)

    def _metrics(self) -> MinionsMetrics:
        totals: Counter[str] = Counter()
        for name, count in self.counts.items():
            totals[name.partition(".")[0]] += count
        own = {name: float(count) for name, count in (totals | self.counts).items()}
        own |= {MARKED + mark.value: 1.0 for mark in self.marks}
        accounts = self.accounts
        return MinionsMetrics(
            rounds=self.round,
            total_s=time.monotonic() - self.begun,
            bytes_up=accounts.bytes_up,
            bytes_down=accounts.bytes_down,
            own=own | accounts.figures(),
            jobs=self.jobs,
        )


check_minion, check_minions = partial(check, MINION), partial(check, MINIONS)
start_minion, start_minions = partial(start, MINION), partial(start, MINIONS)
