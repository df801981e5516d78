"""The compared methods of decoding: each answers a list of prompts.

All have the same number of requests in flight, ``IN_FLIGHT`` for each place of a batch, so half of
them wait for a place, which their latency includes. In ours, each answer that ends makes room.
Batched ``generate`` of transformers admits a batch at a time, and its assisted generation one
prompt at a time.
"""

from __future__ import annotations

import logging
import queue
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any, Protocol

import torch

from collab_llm_lab.bench.collective.material import Family, transformers_answers
from collab_llm_lab.bench.collective.watch import PARTS, WatchedMachine, WatchedTarget
from collab_llm_nodes.decoding.sampling import SamplingConfig, most_likely
from collab_llm_nodes.decoding.weights import WeightsConfig
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.errors import CollabError, DeadlineExceeded
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.collective.length import FIXED, LengthConfig
from collab_llm_nodes.protocols.collective.machine import AnswerUpdate, Ended
from collab_llm_nodes.protocols.collective.messages import Ask, Draw, Ids, Proposal
from collab_llm_nodes.protocols.collective.metrics import CollectiveMetrics
from collab_llm_nodes.protocols.collective.models import DraftModel, Drafts
from collab_llm_nodes.protocols.collective.requests import Job
from collab_llm_nodes.protocols.collective.runner import Runner
from collab_llm_nodes.protocols.collective.schedule import ScheduleConfig
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

S = 4
"""Speculation length of the paper's baseline."""
IN_FLIGHT = 2
"""Requests in flight for each place of a batch: a pipeline has one batch drafted, one verified."""
DRAFT_TIMEOUT_S = 60.0
"""A draft model may stall so long on a busy machine: without it, the variant would be another."""
DEADLINE_S = 600.0
"""Longest wait for the next answer that is complete."""
_GREEDY = SamplingConfig()
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A list of prompts, answered; of an endless method, what a turn has done.

    Attributes:
        prompts, answers: those that have ended, in the order in which they were asked.
        tokens: verified in this time.
        seconds: from the first prompt to the last answer; of an endless method, from the pass that
            waited for this run to the one that waits for the next.
        latencies: time of each answer, from the request to its end [s].
        drafted, accepted: draft tokens that were verified, and those that stand.
        verifications: passes of the target.
        llm_s: time of all verifications [s].
        overhead_s: CPU time of each of ``PARTS`` [s].
    """

    prompts: tuple[Ids, ...]
    answers: tuple[Ids, ...]
    tokens: int
    seconds: float
    latencies: tuple[float, ...]
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    llm_s: float = 0.0
    overhead_s: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / self.seconds

    @property
    def normalised_latency_ms(self) -> float:
        """Mean end-to-end time over output tokens [ms]."""
        shares = (s / len(own) for s, own in zip(self.latencies, self.answers, strict=True))
        return 1e3 * statistics.fmean(shares)

    @property
    def acceptance(self) -> float:
        """Share of the verified draft tokens that the target accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Method(Protocol):
    """A method of decoding, with its models loaded."""

    def run(self, prompts: Sequence[Ids]) -> Run:
        """Answer all prompts."""

    def close(self) -> None:
        """Free what is held."""


class Collective:
    """Collective speculation as the protocol runs it.

    Args:
        family: the models.
        drafts: which of the family's draft models take part; none: the target decodes alone.
        batch: requests verified in one pass.
        max_tokens: longest answer.
        length: the speculation length and its rule; by default it is fixed at ``S``.
        weights: the rule of the vote's weights.
        pipelined: the draft models run in processes, and draft during verifications.
        in_threads: each draft model has a thread of this process instead.
        draft_batch: requests drafted in one pass; 0: ``batch``.
        in_flight: requests at a time; 0: ``IN_FLIGHT`` for each place of a batch.
        endless: number of tokens after which a run ends; requests under way then go on in the next
            run, so batches stay full. 0: a run ends when all is answered. All runs have the same
            prompts, which are asked for over and over. The first run ends only once the batch is
            full. It fills up at random times: answers of the same length would else begin and end
            together for ever. The models must work in sequence.
        seed: of those times.
        schedule: other settings of ``ScheduleConfig``.

    Attributes:
        machine, target: what they have noted of the last run.
        drafts_held: (time [s], bytes of the KV caches of all draft models) after each of their
            passes in the last run.
    """

    def __init__(
        self,
        family: Family,
        drafts: Sequence[int],
        batch: int,
        max_tokens: int,
        length: LengthConfig | None = None,
        *,
        weights: WeightsConfig | None = None,
        pipelined: bool = False,
        in_threads: bool = False,
        draft_batch: int = 0,
        in_flight: int = 0,
        endless: int = 0,
        seed: int = 0,
        **schedule: Any,
    ) -> None:
        if endless and (pipelined or in_threads):
            raise ValueError("an endless method works in sequence")
        self._endless = endless
        self._family, self._drafts = family, drafts
        self._pipelined, self._in_threads = pipelined, in_threads
        self._batch, self._max_tokens = batch, max_tokens
        self._in_flight = in_flight or IN_FLIGHT * batch
        self.machine = WatchedMachine(
            len(drafts),
            family.target.eos,
            schedule=ScheduleConfig(
                draft_batch=draft_batch or batch,
                target_batch=batch,
                max_active=self._in_flight,
                draft_timeout_s=DRAFT_TIMEOUT_S,
                **schedule,
            ),
            weights=weights,
            length=length or LengthConfig(FIXED, initial=S),
            pipelined=pipelined,
        )
        self.target = WatchedTarget(family.target)
        self.machine.watch()
        self.target.held = []
        self.drafts_held: list[tuple[float, int]] = []
        # A draft model's thread must not have to make the target's passes.
        threads = pipelined or in_threads
        self._gate = self.target.gate
        self._runner = Runner(
            self.machine,
            self.target,
            self._noting,
            pipelined=threads,
            log=_LOG,
            clock=self._gate.clock,
        )
        self._results: queue.SimpleQueue[_Asked | CollabError | None] = queue.SimpleQueue()
        self._gate.on_wait = lambda: self._results.put(None)
        self._lock = threading.Lock()  # of all below
        self._prompts: Iterator[Ids] = iter(())
        self._wanted = 0 if endless else self._in_flight  # requests under way
        self._under_way = 0
        self._begun = 0
        self._tokens = 0
        self._random = random.Random(seed)
        self._gap = 0  # tokens of the newest answer after which another request joins

    def _noting(self, proposed: Proposed, failed: Failed) -> list[DraftWorker]:
        """Return the draft models at work; each of their answers notes their memory."""

        def noted(draw: Draw, proposals: list[Proposal | None]) -> None:
            held = sum(worker.held_bytes for worker in workers)
            self.drafts_held.append((self._gate.clock(), held))
            proposed(draw, proposals)

        workers = self._workers(noted, failed)
        return workers

    def _workers(self, proposed: Proposed, failed: Failed) -> list[DraftWorker]:
        eos = self._family.target.eos
        chosen = [self._family.drafts[i] for i in self._drafts]
        if self._in_threads:
            return [
                LocalDraft(Drafts([draft], eos, [own]), InThread(f"draft-{own}"), proposed, failed)
                for own, draft in enumerate(chosen)
            ]
        if not self._pipelined:
            drafts = Drafts(chosen, eos, range(len(chosen)))
            return [LocalDraft(drafts, Inline(), proposed, failed)]
        folders = [str(self._family.folders[i]) for i in self._drafts]
        models = [ModelConfig(path=path, threads=1) for path in folders]
        workers = [
            DraftProcess({i: models[i] for i in own}, eos, proposed, failed)
            for own in divide_models(len(models), 0)
        ]
        for worker in workers:
            worker.vocabularies()  # returns once the models are loaded
        return [*workers]

    def run(self, prompts: Sequence[Ids]) -> Run:
        started = self._gate.clock()
        self.machine.watch()
        self.target.held, self.drafts_held = [], []
        with self._lock:
            self._tokens = 0
            if not self._endless:
                self._prompts = iter(prompts)
            elif not self._begun:
                self._prompts = cycle(prompts)
                self._join()
            self._fill()
        self._gate.open()
        ended: list[_Asked] = []
        while self._endless or len(ended) < len(prompts):
            asked = self._next()
            if asked is None:
                break
            ended.append(asked)
        seconds = self._gate.clock() - started
        ended.sort(key=lambda asked: asked.number)
        metrics = [asked.grown.metrics for asked in ended]
        return Run(
            tuple(asked.prompt for asked in ended),
            tuple(asked.grown.tokens for asked in ended),
            self._tokens,
            seconds,
            tuple(asked.latency_s for asked in ended),
            sum(each.drafted for each in metrics),
            sum(each.accepted for each in metrics),
            len(self.machine.verifying),
            sum(end - begin for begin, end in self.machine.verifying),
            dict(self.machine.overhead_s),
        )

    def _fill(self) -> None:
        """Ask for more answers, if fewer than wanted are under way."""
        for prompt in islice(self._prompts, self._wanted - self._under_way):
            asked = _Asked(self._begun, prompt, self._gate.clock())
            self._begun += 1
            self._under_way += 1
            self._gap = self._random.randint(1, 2 * self._max_tokens // self._batch)
            job = Job(str(asked.number), prompt, _GREEDY, self._max_tokens)
            self._runner.submit(job, partial(self._on_news, asked))

    def _join(self) -> None:
        """Want one more request under way; once the batch is full, all."""
        self._wanted += 1
        if self._wanted >= self._batch:
            self._wanted = self._in_flight

    def _on_news(self, asked: _Asked, news: AnswerUpdate | Ended) -> None:
        """Take in news of a request; the thread that makes the passes calls this."""
        with self._lock:
            if isinstance(news, AnswerUpdate):
                self._tokens += len(news.tokens) - len(asked.grown.tokens)
                asked.grown = news
                newest = asked.number == self._begun - 1
                if newest and self._wanted < self._batch and len(news.tokens) >= self._gap:
                    self._join()
                full = self._wanted == self._in_flight
                if self._endless and full and self._tokens >= self._endless:
                    self._gate.shut()
            elif news.error is not None:
                self._results.put(news.error)
                return
            else:
                asked.latency_s = self._gate.clock() - asked.began
                self._under_way -= 1
                self._results.put(asked)
            self._fill()

    def _next(self) -> _Asked | None:
        """Wait for an answer to end; None: the gate is shut.

        Raises:
            CollabError: an answer has failed, or none is complete in time.
        """
        try:
            result = self._results.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise DeadlineExceeded(
                f"no answer was complete within {DEADLINE_S:g} s",
                remedy="ask for fewer tokens, or use a faster machine",
            ) from None
        if isinstance(result, CollabError):
            raise result
        return result

    def close(self) -> None:
        self._gate.open(for_good=True)
        self._runner.close()


@dataclass
class _Asked:
    """A request of ours, and what has come of it.

    Attributes:
        began: time at which it was asked [s].
        grown: its answer so far.
        latency_s: time until the answer ended [s].
    """

    number: int
    prompt: Ids
    began: float
    grown: AnswerUpdate = AnswerUpdate("", (), (), CollectiveMetrics())
    latency_s: float = 0.0


@dataclass
class _Growing:
    """An answer under way."""

    number: int
    prompt: Ids
    session: Session
    began: float
    answer: list[int] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.number)


class Tree:
    """SpecInfer: the drafts are merged into a tree, and the target verifies all of it."""

    def __init__(self, family: Family, batch: int, max_tokens: int) -> None:
        self._engine = family.target
        self._batch, self._max_tokens = batch, max_tokens
        self._drafts = [DraftModel(e, self._engine.eos, i) for i, e in enumerate(family.drafts)]

    def run(self, prompts: Sequence[Ids]) -> Run:
        started = time.monotonic()
        waiting = deque(enumerate(prompts))
        running: deque[_Growing] = deque()
        answers: dict[int, Ids] = {}
        latencies: dict[int, float] = {}
        while waiting or running:
            while waiting and len(running) < IN_FLIGHT * self._batch:
                number, prompt = waiting.popleft()
                session = self._engine.open(EncodedPrompt(prompt))
                running.append(_Growing(number, prompt, session, time.monotonic()))
            batch = [running.popleft() for _ in range(min(self._batch, len(running)))]
            self._round(batch)
            for one in batch:
                if one.answer[-1] in self._engine.eos or len(one.answer) == self._max_tokens:
                    answers[one.number] = tuple(one.answer)
                    latencies[one.number] = time.monotonic() - one.began
                    self._release(one)
                else:
                    running.append(one)
        numbers = range(len(prompts))
        return Run(
            tuple(prompts),
            tuple(answers[i] for i in numbers),
            sum(map(len, answers.values())),
            time.monotonic() - started,
            tuple(latencies[i] for i in numbers),
        )

    def _round(self, batch: Sequence[_Growing]) -> None:
        """Make each answer longer; the first round of an answer reads its prompt."""
        old = [one for one in batch if one.answer]
        asks = [
            Ask(
                one.id,
                one.prompt,
                tuple(one.answer),
                min(S, self._max_tokens - len(one.answer) - 1),
                _GREEDY,
            )
            for one in old
        ]
        proposals = [model.draw(asks) for model in self._drafts] if asks else []
        trees: dict[int, DraftTree] = {}
        for row, one in enumerate(old):
            paths = [given[row] for given in proposals]
            drafts = [path.tokens for path in paths if path is not None]
            trees[one.number] = merged(one.answer[-1], drafts)
        rows = self._engine.run([self._feed(one, trees.get(one.number)) for one in batch])
        for one, logits in zip(batch, rows, strict=True):
            if isinstance(logits, Exception):
                raise logits
            best, tree = most_likely(logits), trees.get(one.number)
            if tree is None:
                one.answer.append(best[0])
                continue
            path = tree.walk(best, self._engine.eos)
            one.session.retain(one.session.length + path[-1])
            one.session.length = len(one.prompt) + len(one.answer) + len(path) - 1  # drops others
            one.answer += [best[node] for node in path]

    def _feed(self, one: _Growing, tree: DraftTree | None) -> Feed:
        if tree is None:
            return Feed(one.session, one.prompt, last=1)
        root = one.session.length
        return Feed(one.session, tree.tokens, parents=[root + parent for parent in tree.parents])

    def _release(self, one: _Growing) -> None:
        one.session.close()
        for model in self._drafts:
            model.sessions.release(one.id)

    def close(self) -> None:
        """Do nothing: what an answer holds is freed with it."""


@dataclass(frozen=True)
class DraftTree:
    """Drafts of one request that share their common beginnings.

    Attributes:
        tokens: of the nodes; node 0 is the last token of the answer.
        parents: node that each follows; -1 for the root.
        children: of each node, by their tokens.
    """

    tokens: list[int]
    parents: list[int]
    children: list[dict[int, int]]

    def walk(self, best: Sequence[int], eos: frozenset[int]) -> list[int]:
        """Return the accepted nodes: the root, and each child that the target chooses itself.

        Args:
            best: [nodes] the target's token after each node.
        """
        path = [0]
        while best[path[-1]] not in eos and best[path[-1]] in self.children[path[-1]]:
            path.append(self.children[path[-1]][best[path[-1]]])
        return path


def merged(root: int, drafts: Sequence[Ids]) -> DraftTree:
    """Return the tree of ``drafts`` that follow the token ``root``."""
    tree = DraftTree([root], [-1], [{}])
    for draft in drafts:
        node = 0
        for token in draft:
            if token not in tree.children[node]:
                tree.children[node][token] = len(tree.tokens)
                tree.tokens.append(token)
                tree.parents.append(node)
                tree.children.append({})
            node = tree.children[node][token]
    return tree


class Transformers:
    """Transformers' generate: a batch at a time, or one prompt at a time with an assistant.

    Args:
        threads: of its passes; 0: as many as the passes of the other methods have.
    """

    def __init__(
        self,
        family: Family,
        batch: int,
        max_tokens: int,
        assistant: LoadedModel | None = None,
        threads: int = 0,
    ) -> None:
        self._family, self._max_tokens, self._threads = family, max_tokens, threads
        self._batch = batch if assistant is None else 1
        self._assistant = assistant

    def run(self, prompts: Sequence[Ids]) -> Run:
        usual = torch.get_num_threads()
        torch.set_num_threads(self._threads or usual)
        try:
            return self._run(prompts)
        finally:
            torch.set_num_threads(usual)

    def _run(self, prompts: Sequence[Ids]) -> Run:
        started = time.monotonic()
        answers: list[Ids] = []
        latencies: list[float] = []
        begun: deque[float] = deque(maxlen=IN_FLIGHT)  # a batch is asked for while others run
        for first in range(0, len(prompts), self._batch):
            batch = prompts[first : first + self._batch]
            begun.append(time.monotonic())
            answers += transformers_answers(self._family, batch, self._max_tokens, self._assistant)
            latencies += [time.monotonic() - begun[0]] * len(batch)
        return Run(
            tuple(prompts),
            tuple(answers),
            sum(map(len, answers)),
            time.monotonic() - started,
            tuple(latencies),
        )

    def close(self) -> None:
        """Do nothing: nothing is held between runs."""
