"""Continuous batching of chats over one engine: no thread and no clock, one pass per call.

A pass feeds one token to every job that decodes, and reads on in prompts by a bounded number of
tokens (chunked prefill, as in ``serving.scheduler``)::

    add -> queue -> reading (its prompt) -> decoding -> ended
             ^        |
             |        +--> followers: prompts with the same prefix wait until this one is read
             +-------------+   and then fork it

``serving.compute`` makes such passes for network clients that answer between two tokens. Here no
client is asked and prompts wait for each other, so the loop is smaller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from collab_llm_nodes.chat.base import Finish, Usage
from collab_llm_nodes.chat.prefixes import Ids, Prefixes, group_by_prefix
from collab_llm_nodes.chat.quoting import Quoting
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.decoding.rejection import own_token
from collab_llm_nodes.decoding.sampling import SamplingConfig, distributions_of, masked
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.errors import Cancelled, CollabError, ModelError, as_collab_error
from collab_llm_nodes.models.guide import MOST_FORCED
from collab_llm_nodes.models.prompt import EncodedPrompt

if TYPE_CHECKING:  # llguidance is loaded where guides are used
    from collab_llm_nodes.models.guided_text import GuidedText


@dataclass(frozen=True)
class BatchConfig:
    """Limits of the passes and of memory.

    At most ``max_batch`` times the model's context, plus ``kept_tokens``, KV columns are held.
    """

    max_batch: int = setting(32, "Requests that hold a KV cache at a time.", low=1, high=4096)
    prefill_tokens: int = setting(
        512, "Prompt tokens per forward pass at most.", low=1, high=1 << 20
    )
    kept_tokens: int = setting(
        32768,
        "KV columns kept of earlier prompts, for later ones with the same prefix; 0: no prefix is"
        " shared [tokens].",
        low=0,
        high=1 << 30,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(eq=False)
class Job:
    """One prompt and its reply so far.

    Attributes:
        owner: owners take turns; the jobs of one owner are ended together.
        ids: prompt, int32 [n], n >= 1.
        quoting: constrains quotes in the reply to the text.
        prompt: the same with pictures, which shares no prefix with others; None: ids alone.
        guide: limits the reply; the tokens that it forces need no pass.
        tokens: reply so far, its end token included.
        cached: prompt tokens that were not computed for this job.
    """

    owner: Hashable
    ids: Ids
    sampling: SamplingConfig
    max_tokens: int
    quoting: Quoting | None = None
    prompt: EncodedPrompt | None = None
    guide: GuidedText | None = None
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    _session: Session | None = None
    _followers: list[Job] = field(default_factory=list)

    @property
    def unread(self) -> list[int]:
        """Tokens of the reply that the model has not read."""
        return self.tokens[_session(self).length - len(self.ids) :]

    @property
    def usage(self) -> Usage:
        """Tokens spent on this job so far."""
        read = 0 if self._session is None else min(self._session.length, len(self.ids))
        return Usage(read - self.cached, self.cached, len(self.tokens))


class Ended(NamedTuple):
    """A finished job; ``reason`` is an error if it has no reply."""

    job: Job
    usage: Usage
    reason: Finish | CollabError


class Batch:
    """Continuous batch of jobs (see the module docstring). Not thread-safe.

    Attributes:
        passes: forward passes made.
    """

    def __init__(self, engine: Engine, config: BatchConfig) -> None:
        self._engine = engine
        self._config = config
        self._prefixes = Prefixes(config.kept_tokens)
        self._queues: dict[Hashable, deque[Job]] = {}
        self._reading: list[Job] = []
        self._decoding: list[Job] = []
        self.passes = 0

    @property
    def idle(self) -> bool:
        """True if no job is left."""
        return not (self._queues or self._reading or self._decoding)

    @property
    def active(self) -> int:
        """Jobs that hold a KV cache."""
        return len(self._reading) + len(self._decoding)

    @property
    def kept_tokens(self) -> int:
        """KV columns kept for later prompts."""
        return self._prefixes.tokens

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue ``jobs``, all of one owner."""
        texts = [job for job in jobs if self._shares(job)]
        leaders = [job for job in jobs if not self._shares(job)]
        groups = group_by_prefix([job.ids for job in texts], self._prefixes.known)
        for leader, followers in groups:
            texts[leader]._followers = [texts[i] for i in followers]
            leaders.append(texts[leader])
        for job in reversed(leaders):
            # In front: the prefix that they share was just read, and is still held then.
            self._queues.setdefault(job.owner, deque()).appendleft(job)

    def _shares(self, job: Job) -> bool:
        """Return True if ``job`` may begin with the prefix of another one."""
        return job.prompt is None and self._config.kept_tokens > 0

    def end(self, owner: Hashable, reason: Finish | CollabError) -> list[Ended]:
        """End all unfinished jobs of ``owner`` and return them."""
        jobs = [*self._queues.pop(owner, ())]
        for held in (self._reading, self._decoding):
            jobs += [job for job in held if job.owner == owner]
            held[:] = [job for job in held if job.owner != owner]
        ended: list[Ended] = []
        for job in jobs:
            jobs += _released(job)  # extends the list under iteration
            ended.append(Ended(job, job.usage, reason))
            _close(job)
        return ended

    def step(self, check: Callable[[], None] = lambda: None) -> list[Ended]:
        """Make one pass and return the jobs that it ended.

        Args:
            check: called between two layers; if it raises Cancelled, so does this, and no job
                has changed.
        """
        feeds = [Feed(_session(job), job.unread, last=1) for job in self._decoding]
        feeds += self._reads()
        jobs = self._decoding + self._reading
        results = self._pass(feeds, check)
        ended: list[Ended] = []
        ready: list[tuple[Job, Tensor]] = []
        for job, feed, result in zip(jobs, feeds, results, strict=True):
            if isinstance(result, CollabError):
                ended.append(self._end_one(job, result))
            elif feed.keep:
                if not job.tokens:
                    self._have_read(job)
                try:
                    ready.append((job, _limited(job, result[-1])))
                except CollabError as error:  # the guide takes too much work
                    ended.append(self._end_one(job, error))
        for (job, _), token in zip(ready, _next_tokens(ready), strict=True):
            reason = token if isinstance(token, CollabError) else self._append(job, token)
            if reason is not None:
                ended.append(self._end_one(job, reason))
        return ended

    def _append(self, job: Job, token: int) -> Finish | CollabError | None:
        """Append ``token`` and those that the guide forces; return why the reply ends, or None."""
        job.tokens.append(token)
        if job.guide is not None:
            room = min(MOST_FORCED, self._limit(job) - len(job.tokens))
            try:
                job.tokens += job.guide.forced(job.tokens, room)
            except CollabError as error:
                return error
        if job.tokens[-1] in self._engine.eos:
            return Finish.STOP
        return Finish.LENGTH if len(job.tokens) == self._limit(job) else None

    def close(self) -> None:
        """Free everything."""
        for owner in {*self._queues, *(job.owner for job in self._reading + self._decoding)}:
            self.end(owner, Finish.DEADLINE)
        self._prefixes.clear()

    def _reads(self) -> list[Feed]:
        """Return the feeds of this pass's prompts; ``_reading`` then holds just their jobs."""
        feeds: list[Feed] = []
        budget = self._config.prefill_tokens
        for number in range(self._config.max_batch):
            if not budget or (number == len(self._reading) and not self._start_one()):
                break
            job = self._reading[number]
            start = _session(job).length
            ids = job.ids[start : start + budget].tolist()
            feeds.append(Feed(_session(job), ids, last=int(start + len(ids) == len(job.ids))))
            budget -= len(ids)
        return feeds

    def _start_one(self) -> bool:
        """Give the next queued job a session; return False if there is none, or no room."""
        if not self._queues or self.active >= self._config.max_batch:
            return False
        held = [job.owner for job in self._reading + self._decoding]
        owner = min(self._queues, key=held.count)
        job = self._queues[owner].popleft()
        if not self._queues[owner]:
            del self._queues[owner]
        if job.prompt is not None:
            job._session = self._engine.open(job.prompt)
        else:  # its text is fed as if it were generated, so that a fork may go on with another one
            job._session = self._prefixes.fork(job.ids) or self._engine.open(EncodedPrompt(()))
        job.cached = job._session.length
        self._reading.append(job)
        return True

    def _pass(
        self, feeds: Sequence[Feed], check: Callable[[], None]
    ) -> Sequence[Tensor | CollabError]:
        self.passes += 1
        try:
            results = self._engine.run(feeds, check=check)
        except Cancelled:
            raise
        except Exception as error:  # noqa: BLE001 - such as no memory: ends the jobs of this pass
            results = [error] * len(feeds)
        return [r if isinstance(r, Tensor) else as_collab_error(r) for r in results]

    def _have_read(self, job: Job) -> None:
        """Move ``job`` to decoding after its prompt, and queue its followers."""
        self._reading.remove(job)
        self._decoding.append(job)
        if job.prompt is None:
            self._prefixes.keep(job.ids, _session(job), awaited=bool(job._followers))
        self.add(_released(job))

    def _limit(self, job: Job) -> int:
        """Return the length limit of a reply; its last token is never fed."""
        return min(job.max_tokens, self._engine.context - len(job.ids) + 1)

    def _end_one(self, job: Job, reason: Finish | CollabError) -> Ended:
        (self._reading if job in self._reading else self._decoding).remove(job)
        ended = Ended(job, job.usage, reason)
        _close(job)
        self.add(_released(job))
        return ended


def _next_tokens(ready: Sequence[tuple[Job, Tensor]]) -> list[int | CollabError]:
    """Return the next token of each job, from its logits [V].

    The random numbers of a token depend on the seed and on its position in the reply, so a reply
    does not depend on the other jobs of the batch.
    """
    laws = distributions_of(
        [logits[None] for _, logits in ready], [job.sampling for job, _ in ready]
    )
    return [
        law if isinstance(law, ModelError) else own_token(law[0], job.sampling, len(job.tokens))
        for (job, _), law in zip(ready, laws, strict=True)
    ]


def _limited(job: Job, logits: Tensor) -> Tensor:
    """Return ``logits`` [V] over the tokens that the guide allows and that break no quote.

    Raises:
        InvalidInput: the guide takes too much work.
    """
    quotable = [] if job.quoting is None else sorted(job.quoting.next_tokens(job.tokens))
    if job.guide is None and not quotable:
        return logits
    allowed = np.ones(len(logits), np.bool_)
    if job.guide is not None:
        allowed = job.guide.allowed(job.tokens)
        quotable = [token for token in quotable if allowed[token]]
    if quotable:
        allowed = np.isin(np.arange(len(logits)), quotable)
    return masked(logits[None], allowed[None])[0]


def _session(job: Job) -> Session:
    assert job._session is not None
    return job._session


def _released(job: Job) -> list[Job]:
    followers, job._followers = job._followers, []
    return followers


def _close(job: Job) -> None:
    if job._session is not None:
        job._session.close()
        job._session = None
