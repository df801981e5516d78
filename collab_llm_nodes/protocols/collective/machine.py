"""The machine of collective speculation (paper 002, figures 4 and 7). No I/O, no clock, no threads.

A request cycles until its answer is complete:

    waiting ─▶ running ─▶ drafting ─▶ pool ─▶ verifying ─┐
                  ▲      (k models,  (waits for          │
                  │       a vote)     the target)        │
                  └──────────────────────────────────────┘

Events arrive through the ``on_`` methods; :meth:`Machine.poll` returns the actions to take: a
``Draw`` for the draft models, a ``Verify`` for the target, and news for the callers. At most one
draw and one verification are under way; in sequence, only one of both. Every answer names its
batch, so a late one is recognised and dropped.

Where drafting is quicker than verification, drafts pile up in the pool, and each holds its
request's KV caches. So drafting pauses while the pool is at the high water mark, and resumes below
the low one: the pool never holds more than ``high - 1 + draft_batch`` drafts.

In a pipeline, drafting and verification overlap where more requests are under way than one batch
holds. Fewer go together: on most devices a pass over half a batch takes more than half the time.
A target that is free before the next drafts are ready reads the prompts of waiting requests, or
decodes running ones (``waits.py``).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from collab_llm_nodes.config import check_max_tokens
from collab_llm_nodes.decoding.rejection import Outcome
from collab_llm_nodes.decoding.vote import deciding, proposal
from collab_llm_nodes.decoding.weights import (
    VOTED,
    Weights,
    WeightsConfig,
    agreement,
    average,
    hit_rate,
)
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Unavailable,
)
from collab_llm_nodes.protocols.base import Source
from collab_llm_nodes.protocols.collective.drawing import Drawing, sends_q
from collab_llm_nodes.protocols.collective.length import LengthConfig, Verification, selector
from collab_llm_nodes.protocols.collective.messages import (
    Claim,
    Draw,
    Ids,
    Proposal,
    Release,
    Verdict,
    Verify,
)
from collab_llm_nodes.protocols.collective.metrics import CollectiveMetrics
from collab_llm_nodes.protocols.collective.requests import Draft, Job, RequestState, State
from collab_llm_nodes.protocols.collective.schedule import ScheduleConfig
from collab_llm_nodes.protocols.collective.waits import Waits

RETRY_S = 5.0
"""Time for which a draft model that has failed is left out: its process may have to start again."""


@dataclass(frozen=True)
class AnswerUpdate:
    """The answer ``id`` so far, reported after each verification."""

    id: str
    tokens: Ids
    sources: tuple[Source, ...]
    metrics: CollectiveMetrics


@dataclass(frozen=True)
class Ended:
    """The answer ``id`` has ended; the last update holds all of it."""

    id: str
    error: CollabError | None = None


@dataclass(frozen=True)
class Incident:
    """A draft model is left out.

    Attributes:
        silent: it has not answered in time; else it has reported the error.
    """

    model: int
    error: CollabError
    silent: bool = False


Action = Draw | Verify | Release | AnswerUpdate | Ended | Incident


@dataclass
class _Model:
    """The health of a draft model."""

    out_until: float = 0.0
    silent: bool = False

    def serves(self, now: float) -> bool:
        return not self.silent and now >= self.out_until


class Machine:
    """The schedule of all requests, as the module's text draws it.

    All times are of one clock of the caller's [s].

    Args:
        models: number of draft models.
        eos: end tokens of the target.
        pipelined: drafting and verification may be under way at the same time.

    Raises:
        ConfigError: settings that exclude each other.

    Attributes:
        pool_peak: most drafts that have waited in the pool at a time.
        incidents: times that a draft model was left out.
    """

    def __init__(
        self,
        models: int,
        eos: frozenset[int],
        *,
        schedule: ScheduleConfig | None = None,
        weights: WeightsConfig | None = None,
        length: LengthConfig | None = None,
        pipelined: bool = False,
    ) -> None:
        self._schedule = schedule or ScheduleConfig()
        self._weights_config = weights or WeightsConfig()
        if self._schedule.vote_every_token and self._weights_config.rule == VOTED:
            raise ConfigError(
                "has no single voted model, which weights.rule 'voted' scores",
                field="vote_every_token",
                remedy="set weights.rule to per_request",
            )
        self._weights = Weights.equal(self._weights_config, models)
        self._length = length or LengthConfig()
        self._selector = selector(self._length)
        self._selectors = {1: self._selector}  # by the binary digits of the batch's size
        self._learns = self._selector  # from the verification under way
        self._pipelined = pipelined
        self._eos = eos
        self._models = [_Model() for _ in range(models)]
        self._requests: dict[str, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._running: deque[RequestState] = deque()
        self._pool: deque[Draft] = deque()
        self._drawing: Drawing | None = None
        self._verifying: list[Draft] = []
        self._undrafted = False  # the target decodes without drafts
        self._waits = Waits()
        self._verification = 0  # number of the one under way, or of the last one
        self._verified_from = 0.0
        self._step_from = 0.0  # the last verdict on drafts, or the begin of work after a pause
        self._step_draft_s = 0.0  # time since then in which drafts were made
        self._step_extra = 0  # tokens since then without drafts
        self._step_read = 0  # prompt tokens that the target has read since then
        self._began_steady = False  # the verification under way
        self._batches = 0
        self._paused = False
        self._level = 0  # active requests at the last admission
        self._news: list[Action] = []
        self.pool_peak = 0
        self.incidents = 0

    # ------------------------------------------------------------------ figures

    @property
    def s(self) -> int:
        """The speculation length of the next draft.

        A batch that drains teaches nothing, so no other length is tried on it.
        """
        return self._selector.s if self._steady else self._selector.best

    @property
    def _steady(self) -> bool:
        """True while batches are as full as they can be: one that drains has other times."""
        return bool(self._waiting) or self.active >= min(self._level, self._full)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights with which a new request begins, [k]."""
        return self._weights.values

    @property
    def active(self) -> int:
        """Requests that hold KV caches."""
        return len(self._requests) - len(self._waiting)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    @property
    def pooled(self) -> int:
        """Drafts that wait for the target."""
        return len(self._pool)

    def serving(self, now: float) -> tuple[int, ...]:
        """Return the draft models that are in service."""
        return tuple(i for i, model in enumerate(self._models) if model.serves(now))

    # ------------------------------------------------------------------ events

    def submit(self, job: Job, now: float) -> None:
        """Take a request in.

        Raises:
            Busy: too many wait already.
            InvalidInput: an answer of this name is under way, or there is no prompt.
        """
        if job.id in self._requests:
            raise InvalidInput(f"{job.id!r} is under way", field="id", remedy="choose another name")
        if not job.prompt:
            raise InvalidInput("has no token", field="prompt", remedy="ask something")
        check_max_tokens(job.max_tokens)
        room = self._schedule.max_active - self.active
        if len(self._waiting) >= self._schedule.max_waiting + max(room, 0):
            raise Busy(
                f"{self.active} answers are under way and {len(self._waiting)} wait",
                remedy="ask later, or raise schedule.max_waiting",
            )
        request = RequestState(job, self._weights, now)
        self._requests[job.id] = request
        self._waiting.append(request)

    def cancel(self, id: str) -> None:
        """Cancel an answer; one that has already ended is no error."""
        request = self._requests.get(id)
        if request is not None:
            self._end(request, Cancelled("the caller gave the answer up"))

    def on_proposals(
        self, model: int, batch: int, step: int, proposals: Sequence[Proposal | None], now: float
    ) -> None:
        """Record the proposals of ``model``, one for each ``Ask``; None where it has failed."""
        self._models[model].silent = False
        if self._drawing is not None:
            self._drawing.on_proposals(model, batch, step, proposals)
            self._go_on(now)

    def on_draft_failure(self, model: int, error: CollabError, now: float) -> None:
        """Leave ``model`` out for ``RETRY_S``; the others continue."""
        self._models[model].silent = False
        self._models[model].out_until = now + RETRY_S
        self._leave_out(model, error)
        self._go_on(now)

    def on_verdicts(self, batch: int, verdicts: Sequence[Verdict], now: float) -> None:
        """Apply the verdict of the target on each claim of a ``Verify``."""
        if batch != self._verification or not self._verifying:
            return
        drafts, self._verifying = self._verifying, []
        pairs = list(zip(drafts, verdicts, strict=True))
        verified = [(each, verdict) for each, verdict in pairs if isinstance(verdict, Outcome)]
        read = sum(len(d.request.job.prompt) for d in drafts if not d.request.metrics.rounds)
        self._step_read += read
        if self._undrafted:
            if not read:
                self._waits.on_undrafted(now - self._verified_from)
            self._step_extra += len(verified)
        else:
            self._monitor(verified, now)
            self._reweigh(verified)
            self._begin_step(now)
        for draft, verdict in pairs:
            request = draft.request
            if request.state is State.ENDED:
                continue
            if isinstance(verdict, CollabError):
                self._end(request, verdict)
            else:
                self._grow(draft, verdict, now)

    def on_target_failure(self, error: CollabError) -> None:
        """End all answers with ``error``."""
        self._verifying = []
        for request in list(self._requests.values()):
            self._end(request, error)

    def poll(self, now: float) -> list[Action]:
        """Return the actions to take now, in order."""
        for request in list(self._requests.values()):
            if now >= request.job.due:
                self._end(request, _late())
        self._notice_silence(now)
        self._watch_pool()
        while self._verify(now) or self._draw(now):  # without speculation, drafts are ready at once
            self._watch_pool()
        news, self._news = self._news, []
        return news

    def wake_at(self) -> float:
        """Return the time of the next deadline, at which :meth:`poll` must be called."""
        times = [request.job.due for request in self._requests.values()]
        if self._drawing is not None and self._drawing.awaited:
            times.append(self._drawing.asked_at + self._schedule.draft_timeout_s)
        return min(times, default=math.inf)

    # ------------------------------------------------------------------ drafting

    def _draw(self, now: float) -> bool:
        """Begin a draft for the next requests if the pool has room; return True if one began."""
        if self._drawing is not None or not self._draftable:
            return False
        if self._verifying and not self._overlaps(self._schedule.draft_batch):
            return False
        if not self._pool and not self._verifying:
            self._begin_step(now)  # nothing is under way
        serving = set(self.serving(now))
        requests = list(self._next_requests(now))
        asked = self.s if serving else 0
        drafts = []
        for request in requests:
            request.state = State.DRAFTING
            models = self._asked(request, serving)
            wanted = min(asked, request.left - 1)
            learns = self._only_learns(request, models)
            if learns:
                wanted = min(wanted, 1)
            request.drafts += 1
            own: list[list[int] | None] = [
                [] if model in models else None for model in range(self._k)
            ]
            unread = request.unread(models)
            if wanted:
                request.read |= dict.fromkeys(models, request.context + wanted)
            run = None if learns else request.run
            drafts.append(Draft(request, asked, wanted, own, unread, run))
        self._drawing = Drawing(
            self._batches,
            drafts,
            now,
            self._k,
            self._eos,
            every_token=self._schedule.vote_every_token,
            paper_faithful=self._schedule.paper_faithful,
        )
        self._batches += 1
        self._ask(now)
        return True

    def _asked(self, request: RequestState, serving: set[int]) -> set[int]:
        """Return the models to ask: those that can change the vote, and now and then all.

        A model that last proposed nothing, because it loads or its context is full, does not count.
        """
        if self._schedule.asks_all(request.drafts):
            return serving
        return deciding(serving - request.mute or serving, request.weights.values)

    def _only_learns(self, request: RequestState, models: set[int]) -> bool:
        """Return True if a draft only finds out which models are right.

        All models make the first draft of a request, and few of its tokens are right: one token is
        enough to score them.
        """
        scored = self._weights_config.rule != VOTED and self._schedule.ask_all_every > 1
        return scored and not request.read and len(models) > 1

    def _overlaps(self, batch: int) -> bool:
        """Return True if drafting and verification may overlap."""
        return self._pipelined and len(self._requests) > batch

    def _watch_pool(self) -> None:
        """Pause drafting at the high water mark, resume it below the low one."""
        if len(self._pool) >= self._schedule.high:
            self._paused = True
        elif len(self._pool) < self._schedule.low:
            self._paused = False

    @property
    def _draftable(self) -> bool:
        """True if a request may be drafted for now."""
        return not self._paused and bool(self._running or self._admits)

    def _next_requests(self, now: float) -> Iterator[RequestState]:
        """Take the next requests to be drafted for: those that run, then those that wait.

        In sequence, those that join others are no more than one verification takes.
        """
        count = self._schedule.draft_batch
        if self._pool and not self._pipelined:
            count = min(count, self._schedule.target_batch - len(self._pool))
        while count and self._running:
            count -= 1
            yield self._running.popleft()
        yield from self._admit(count, now)

    @property
    def _admits(self) -> bool:
        """True if a request waits and there is a place for it."""
        return bool(self._waiting) and self.active < self._schedule.max_active

    def _admit(self, most: int, now: float) -> Iterator[RequestState]:
        """Give places to requests that wait."""
        while most and self._admits:
            most -= 1
            request = self._waiting.popleft()
            request.weights = self._new_weights()
            request.metrics.waited_s = now - request.since
            self._admitted()
            yield request

    def _new_weights(self) -> Weights:
        shared = self._weights_config.rule == VOTED
        return self._weights if shared else self._weights.copy()

    def _admitted(self) -> None:
        self._level = self.active
        size = min(self._level, self._schedule.target_batch).bit_length()
        if size not in self._selectors:
            self._selectors[size] = selector(self._length)
        self._selector = self._selectors[size]

    def _ask(self, now: float) -> None:
        """Request the next tokens; end the draw if none is wanted or no model is left."""
        assert self._drawing is not None
        draws = self._drawing.next_step(now)
        if draws:
            self._news += draws
        else:
            self._finish(now)

    def _go_on(self, now: float) -> None:
        """Vote once all proposals have arrived, and request the next tokens."""
        if self._drawing is not None and self._drawing.settled:
            self._vote(self._drawing)
            self._ask(now)

    def _vote(self, drawing: Drawing) -> None:
        drawing.vote()

    def _finish(self, now: float) -> None:
        """Put the drafts into the pool."""
        drawing, self._drawing = self._drawing, None
        assert drawing is not None
        if any(draft.tokens for draft in drawing.drafts):
            self._waits.on_drafted(now - drawing.since)
            self._step_draft_s += now - drawing.since
        for draft in drawing.drafts:
            if draft.request.state is State.DRAFTING:
                draft.request.state = State.POOLED
                self._pool.append(draft)
        self.pool_peak = max(self.pool_peak, len(self._pool))

    def _notice_silence(self, now: float) -> None:
        drawing = self._drawing
        if drawing is None or now < drawing.asked_at + self._schedule.draft_timeout_s:
            return
        for model in sorted(drawing.awaited):
            self._models[model].silent = True
            limit = self._schedule.draft_timeout_s
            error = Unavailable(f"draft model {model} is silent for {limit:g} s")
            self._leave_out(model, error, silent=True)
        self._go_on(now)

    def _leave_out(self, model: int, error: CollabError, *, silent: bool = False) -> None:
        self.incidents += 1
        self._news.append(Incident(model, error, silent))
        if self._drawing is not None:
            self._drawing.leave_out(model)

    # ------------------------------------------------------------------ verification

    def _verify(self, now: float) -> bool:
        """Give the target the oldest drafts of the pool; return True if there were some."""
        if self._verifying:
            return False
        if not self._pool:
            return self._decode(now)
        if self._drawing is not None and not self._overlaps(self._schedule.target_batch):
            return False
        # Others join at once where they need no drafting; in sequence, nothing else is under way.
        joins = self._drawing is None and (not self._pipelined or not self.s)
        if joins and self._draftable and len(self._pool) < self._schedule.target_batch:
            return False
        drafts = [
            self._pool.popleft() for _ in range(min(len(self._pool), self._schedule.target_batch))
        ]
        self._undrafted = False
        self._began_steady = self._steady
        self._have_verified(drafts, now)
        return True

    def _decode(self, now: float) -> bool:
        """Have the target decode without drafts while it would wait; return True if it does.

        It reads the prompts of new requests first, which it has to do anyway.
        """
        drawing, schedule = self._drawing, self._schedule
        if drawing is None or not schedule.fill_waits:
            return False
        if not self._overlaps(schedule.target_batch):
            return False
        if self._admits:
            chosen = list(self._admit(schedule.target_batch, now))
        else:
            # Where enough requests run for both, the next draft does not wait for these.
            spare = len(self._running) >= schedule.target_batch + schedule.draft_batch
            if not self._running or not (spare or self._waits.pays(now - drawing.since)):
                return False
            count = min(len(self._running), schedule.target_batch)
            chosen = [self._running.popleft() for _ in range(count)]
        none: list[list[int] | None] = [None] * self._k
        drafts = [Draft(request, 0, 0, none) for request in chosen]
        self._undrafted = True
        self._have_verified(drafts, now)
        return True

    def _begin_step(self, now: float) -> None:
        """Start to measure the time of the next verdict on drafts."""
        self._step_from, self._step_draft_s = now, 0.0
        self._step_extra = self._step_read = 0

    def _have_verified(self, drafts: list[Draft], now: float) -> None:
        """Give drafts to the target."""
        for draft in drafts:
            draft.request.state = State.VERIFYING
        self._verifying = drafts
        self._learns = self._selector  # another one may be in place when the verdict comes
        self._verification += 1
        self._verified_from = now
        claims = tuple(self._claim(draft) for draft in drafts)
        self._news.append(Verify(self._verification, claims))

    def _claim(self, draft: Draft) -> Claim:
        job, tokens = draft.request.job, tuple(draft.tokens)
        theirs = sends_q(job, self._schedule.paper_faithful)
        q = draft.q if theirs else proposal(tokens, job.sampling)
        answer = tuple(draft.request.answer)
        return Claim(
            job.id, job.prompt, answer, job.sampling, tokens, None if q is None else tuple(q)
        )

    def _monitor(self, verified: Sequence[tuple[Draft, Outcome]], now: float) -> None:
        """Let the length selector learn from a verification of a steady batch."""
        llm_s = now - self._verified_from
        if not self._step_read and any(draft.tokens for draft, _ in verified):
            tokens = 1.0 + statistics.fmean(outcome.accepted for _, outcome in verified)
            self._waits.on_verified(llm_s, tokens)
        if not verified or not self._began_steady:
            return
        hidden = self._overlaps(self._schedule.target_batch)
        self._learns.observe(
            Verification(
                [draft.asked for draft, _ in verified],
                [len(draft.tokens) for draft, _ in verified],
                [outcome.accepted for _, outcome in verified],
                llm_s,
                now - self._step_from,
                draft_s=0.0 if hidden else self._step_draft_s,
                extra=self._step_extra,
                read=self._step_read,
                unread=sum(draft.unread for draft, _ in verified) / max(self._k, 1),
                runs=[draft.run for draft, _ in verified],
            )
        )

    def _reweigh(self, verified: Sequence[tuple[Draft, Outcome]]) -> None:
        """Reward and punish the draft models by the tokens that the target accepted."""
        rates = [self._rates(draft, outcome) for draft, outcome in verified]
        if self._weights_config.rule == VOTED:
            self._weights.update(average(rates, self._k))
            return
        for (draft, _), own in zip(verified, rates, strict=True):
            draft.request.weights.update(own)

    def _rates(self, draft: Draft, outcome: Outcome) -> list[float | None]:
        """Return each model's acceptance rate in one verification, None where it has none."""
        if self._weights_config.rule == VOTED:
            share = outcome.accepted / len(draft.tokens) if draft.tokens else None
            return [share if model == draft.voted else None for model in range(self._k)]
        verified = draft.tokens[: outcome.accepted]
        if outcome.next_token >= 0:
            verified = [*verified, outcome.next_token]
        rate = hit_rate if self._schedule.vote_every_token else agreement
        return [rate(own, verified) for own in draft.own]

    def _grow(self, draft: Draft, outcome: Outcome, now: float) -> None:
        """Append the verified tokens, and queue the request for its next round, or end it."""
        request, job, metrics = draft.request, draft.request.job, draft.request.metrics
        request.answer += draft.tokens[: outcome.accepted]
        request.sources += [Source.ACCEPTED] * outcome.accepted
        if outcome.next_token >= 0:
            rejected = outcome.accepted < len(draft.tokens)
            request.answer.append(outcome.next_token)
            request.sources.append(Source.RECOVERED if rejected else Source.BONUS)
        request.on_verdict(len(draft.tokens), outcome.accepted)
        metrics.rounds += 1
        metrics.drafted += len(draft.tokens)
        metrics.accepted += outcome.accepted
        metrics.tokens = len(request.answer)
        metrics.total_s = now - request.since
        if metrics.rounds == 1:
            metrics.time_to_first_token_s = metrics.total_s
        self._news.append(
            AnswerUpdate(job.id, tuple(request.answer), tuple(request.sources), replace(metrics))
        )
        if request.answer[-1] in self._eos or request.left <= 0:
            self._end(request, None)
        else:
            request.state = State.RUNNING
            self._running.append(request)

    # ------------------------------------------------------------------ the end of a request

    def _end(self, request: RequestState, error: CollabError | None) -> None:
        """Remove a request from wherever it is; results of passes under way for it are dropped."""
        del self._requests[request.job.id]
        if request.state is State.WAITING:
            self._waiting.remove(request)
        elif request.state is State.RUNNING:
            self._running.remove(request)
        elif request.state is State.POOLED:
            self._pool = deque(draft for draft in self._pool if draft.request is not request)
        if request.state is not State.WAITING:
            if request.metrics.rounds and self._weights_config.rule != VOTED:
                self._weights.drift(request.weights)
            self._news.append(Release(request.job.id))
        request.state = State.ENDED
        self._news.append(Ended(request.job.id, error))

    @property
    def _k(self) -> int:
        return len(self._models)

    @property
    def _full(self) -> int:
        """Active requests from which on all batches are full."""
        drafted = self._schedule.draft_batch if self._pipelined else 0
        return self._schedule.target_batch + drafted


def _late() -> CollabError:
    return DeadlineExceeded(
        "the answer was not complete within its deadline",
        field="deadline_s",
        remedy="raise deadline_s, or lower max_tokens",
    )
