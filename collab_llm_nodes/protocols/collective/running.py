"""Collective speculation as a protocol: many calls of ``run``, batched by one machine."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError, DeadlineExceeded, InvalidInput, within
from collab_llm_nodes.models.detokenising import Detokeniser
from collab_llm_nodes.models.loading import load
from collab_llm_nodes.models.prompt import check_prompt, encode
from collab_llm_nodes.models.vocabulary import NamedHash, check_one_vocabulary
from collab_llm_nodes.protocols.base import Answer, Control, Progress, Request, Resources
from collab_llm_nodes.protocols.collective.machine import AnswerUpdate, Ended, Job, Machine
from collab_llm_nodes.protocols.collective.metrics import CollectiveMetrics
from collab_llm_nodes.protocols.collective.models import Drafts, Target
from collab_llm_nodes.protocols.collective.runner import Runner
from collab_llm_nodes.protocols.collective.settings import IN_SEQUENCE, PROCESSES, CollectiveConfig
from collab_llm_nodes.protocols.collective.workers import (
    DraftProcess,
    DraftWorker,
    Failed,
    Inline,
    InThread,
    LocalDraft,
    Proposed,
    divide_models,
)
from collab_llm_nodes.protocols.prompts import name_prompt, prompt_of

_GRACE_S = 10.0
"""Time for a pass under way to end when the deadline passes."""


def check(request: Request) -> None:
    """Refuse what can be refused without the models.

    Raises:
        InvalidInput: ``field`` names the request's.
    """
    config: CollectiveConfig = request.config
    check_prompt(prompt_of(request), config.prompt, field="prompt")
    request.length(config.max_tokens)


def start(config: CollectiveConfig, resources: Resources) -> Collective:
    """Load the target and the draft models.

    Raises:
        ConfigError: no target, or a draft model with another vocabulary.
        ModelError: a model cannot be loaded.
    """
    if not config.target.path:
        raise ConfigError(
            "no target", field="target.path", remedy="name its folder, hub id or shipped name"
        )
    with within("target"):
        target = Engine(load(config.target))
        target.warm_up()
    if config.pipeline == PROCESSES:
        return Collective(target, (), config, resources)
    with within("drafts"):
        drafts = [Engine(load(model)) for model in config.drafts.models()]
        for draft in drafts:
            draft.warm_up()
    return Collective(target, drafts, config, resources)


class Collective:
    """Collective speculation with its models loaded.

    Args:
        drafts: engines of the draft models; empty where they are loaded by processes of their own.

    Raises:
        ConfigError: a draft model has another vocabulary than the target.
        ModelError: a process cannot load its model.
    """

    def __init__(
        self,
        target: Engine,
        drafts: Sequence[Engine],
        config: CollectiveConfig,
        resources: Resources,
    ) -> None:
        self._target = target
        self._config = config
        self._log = resources.log
        self._drafts = drafts
        schedule = config.schedule
        self.parallel = schedule.max_active + schedule.max_waiting
        pipelined = config.pipeline != IN_SEQUENCE
        in_processes = config.pipeline == PROCESSES
        self.machine = Machine(
            len(config.drafts.paths) if in_processes else len(drafts),
            target.eos,
            schedule=schedule,
            weights=config.weights,
            length=config.length,
            pipelined=pipelined,
        )
        self._verifier = Target(target)
        self._runner = Runner(
            self.machine,
            self._verifier,
            self._processes if in_processes else self._local,
            pipelined=pipelined,
            log=resources.log,
        )

    def run(self, request: Request, emit: Callable[[Progress], None], control: Control) -> Answer:
        """Return one answer, whose law is the target's alone.

        An answer that fails after its first token is returned with the error.

        Raises:
            InvalidInput: the prompt cannot be encoded, or fills the context.
            Busy: too many answers are under way.
            Cancelled, DeadlineExceeded: before the first token.
            ModelError: the target failed before the first token.
        """
        news: queue.SimpleQueue[AnswerUpdate | Ended] = queue.SimpleQueue()
        job = self._job(request, control.due)
        control.check()
        give_up = self._runner.submit(job, news.put)
        forget = control.on_cancel(give_up)
        try:
            return self._follow(news, request, emit, control)
        except BaseException:  # such as one of ``emit``: the caller no longer waits
            give_up()
            raise
        finally:
            forget()

    def health(self) -> Mapping[str, object]:
        """Return the figures of the machine."""
        machine, caches = self.machine, self._verifier.sessions
        return {
            "target": self._config.target.path,
            "drafts": len(self._config.drafts.paths) or len(self._drafts),
            "drafts_in_service": len(machine.serving(time.monotonic())),
            "incidents": machine.incidents,
            "speculation_length": machine.s,
            "weights": " ".join(f"{weight:.2f}" for weight in machine.weights),
            "active": machine.active,
            "waiting": machine.waiting,
            "pooled": machine.pooled,
            "pool_peak": machine.pool_peak,
            "target_kv_mib": f"{caches.held_bytes / 2**20:.2f}",
            "target_kv_peak_mib": f"{caches.peak_bytes / 2**20:.2f}",
            "drafts_kv_mib": f"{self._runner.drafts_held_bytes / 2**20:.2f}",
            "failure": self._runner.failure,
        }

    def close(self) -> None:
        """Free the models."""
        self._runner.close()

    def _job(self, request: Request, due: float) -> Job:
        """Return the request as the machine takes it.

        Raises:
            InvalidInput: a prompt that cannot be encoded, or that fills the context.
        """
        config: CollectiveConfig = request.config
        try:
            prompt = encode(prompt_of(request), self._target.loaded, config.prompt)
        except InvalidInput as error:
            name_prompt(error)
            raise
        room = self._target.context - len(prompt.ids)
        wanted = min(request.length(config.max_tokens), room)
        return Job(request.id, prompt.ids, request.sampling, wanted, due)

    def _follow(
        self,
        news: queue.SimpleQueue[AnswerUpdate | Ended],
        request: Request,
        emit: Callable[[Progress], None],
        control: Control,
    ) -> Answer:
        """Emit the updates of an answer until it ends."""
        begun = "" if request.raw else self._target.loaded.begun_thought
        text = Detokeniser(self._target.decode, begun)
        limit = request.length(request.config.max_tokens)
        started = request.asked_at or time.monotonic()
        last = AnswerUpdate(request.id, (), (), CollectiveMetrics())
        while True:
            received = _next(news, control.due)
            grown = [each for each in received if isinstance(each, AnswerUpdate)]
            if grown:
                last = grown[-1]
                text.update(last.tokens)
            end = received[-1]
            if isinstance(end, AnswerUpdate):
                emit(_progress(last, text, limit, started))
                continue
            text.update(last.tokens, final=True)
            progress = _progress(last, text, limit, started)
            if end.error is not None and not last.tokens:
                raise end.error
            return Answer(**{**vars(progress), "verified": end.error is None}, error=end.error)

    def _local(self, proposed: Proposed, failed: Failed) -> list[DraftWorker]:
        self._check_vocabularies((e.loaded.config.path, e.vocabulary) for e in self._drafts)
        sequence = self._config.pipeline == IN_SEQUENCE
        workers = 1 if sequence else self._config.drafts.workers
        shares = [  # all of them before the first thread: an error leaves none running
            Drafts([self._drafts[i] for i in models], self._target.eos, models)
            for models in divide_models(len(self._drafts), workers)
        ]
        return [
            LocalDraft(
                share,
                Inline() if sequence else InThread(f"draft-{share.indices[0]}"),
                proposed,
                failed,
            )
            for share in shares
        ]

    def _processes(self, proposed: Proposed, failed: Failed) -> list[DraftWorker]:
        workers: list[DraftProcess] = []
        try:
            drafts = self._config.drafts
            configs = drafts.models()
            for models in divide_models(len(configs), drafts.workers):
                own = {i: configs[i] for i in models}
                workers.append(
                    DraftProcess(
                        own, self._target.eos, proposed, failed, drafts.load_s, log=self._log
                    )
                )
            hashes = [own for worker in workers for own in worker.vocabularies()]  # all load
            self._check_vocabularies(zip(drafts.paths, hashes, strict=True))
        except BaseException:
            for worker in workers:
                worker.close()
            raise
        return [*workers]

    def _check_vocabularies(self, drafts: Iterable[NamedHash]) -> None:
        target = (self._target.loaded.config.path, self._target.vocabulary)
        check_one_vocabulary(target, drafts, "drafts.paths[{}]")


def _next(news: queue.SimpleQueue[AnswerUpdate | Ended], due: float) -> list[AnswerUpdate | Ended]:
    """Wait for news, and return all that has arrived.

    Raises:
        DeadlineExceeded: nothing has arrived ``_GRACE_S`` after the deadline ``due``.
    """
    left = due + _GRACE_S - time.monotonic()
    try:
        received = [news.get(timeout=min(max(left, 0.0), threading.TIMEOUT_MAX))]
    except queue.Empty:
        raise DeadlineExceeded(
            "the models did not answer within the deadline",
            field="deadline_s",
            remedy="see the log: a pass of a model hangs",
        ) from None
    with contextlib.suppress(queue.Empty):
        while True:
            received.append(news.get_nowait())
    return received


def _progress(update: AnswerUpdate, text: Detokeniser, limit: int, started: float) -> Progress:
    metrics = replace(update.metrics, total_s=time.monotonic() - started)
    return Progress(
        text.text,
        update.tokens,
        tuple(int(source) for source in update.sources),
        text.ends,
        stage="speculate",
        share_done=min(len(update.tokens) / limit, 1.0),
        metrics=metrics,
    )
