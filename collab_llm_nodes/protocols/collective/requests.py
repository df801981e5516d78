"""The state of a request and of its draft in the machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution
from collab_llm_nodes.decoding.weights import Weights
from collab_llm_nodes.protocols.base import Source
from collab_llm_nodes.protocols.collective.messages import Ids
from collab_llm_nodes.protocols.collective.metrics import CollectiveMetrics


@dataclass(frozen=True)
class Job:
    """A request for one answer.

    Attributes:
        id: unique among the answers under way.
        prompt: token ids.
        sampling: the answer's output law.
        max_tokens: length limit of the answer [tokens].
        due: time by which it must be complete, by the machine's clock [s].
    """

    id: str
    prompt: Ids
    sampling: SamplingConfig
    max_tokens: int
    due: float = math.inf


class State(Enum):
    """The stage of a request."""

    WAITING = "waiting"  # holds no KV cache
    RUNNING = "running"
    DRAFTING = "drafting"
    POOLED = "pooled"
    VERIFYING = "verifying"
    ENDED = "ended"


@dataclass
class RequestState:
    """The state of a request.

    Attributes:
        weights: of the draft models, for its votes.
        since: time at which it came [s].
        answer, sources: verified tokens, and the rule that produced each.
        drafts: how many were begun for it.
        read: tokens of prompt and answer that each draft model has read, by its index.
        run: draft tokens accepted since the last rejected one; None if unknown, because the target
            has decoded tokens without drafts.
        mute: models that proposed nothing when they were last asked.
    """

    job: Job
    weights: Weights
    since: float
    state: State = State.WAITING
    drafts: int = 0
    read: dict[int, int] = field(default_factory=dict)
    run: int | None = 0
    mute: set[int] = field(default_factory=set)
    answer: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    metrics: CollectiveMetrics = field(default_factory=CollectiveMetrics)

    @property
    def left(self) -> int:
        """Tokens that the answer may still get."""
        return self.job.max_tokens - len(self.answer)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.job.prompt) + len(self.answer)

    def unread(self, models: Iterable[int]) -> int:
        """Return the tokens of prompt and answer that ``models`` have not read, all together."""
        return sum(max(self.context - self.read.get(model, 0), 0) for model in models)

    def on_verdict(self, drafted: int, accepted: int) -> None:
        """Note the verdict on a draft, whose verified tokens are in ``answer``."""
        self.read = {model: min(read, self.context - 1) for model, read in self.read.items()}
        if accepted < drafted:
            self.run = 0
        elif not drafted:
            self.run = None
        elif self.run is not None:
            self.run += accepted


@dataclass
class Draft:
    """A draft of one request, under way or in the pool.

    Attributes:
        asked: the length s that the selector asked for [tokens].
        wanted: the length that the request has room for [tokens].
        unread: tokens of prompt and answer that the draft models have not read before, all
            together.
        own: [k] each model's tokens; None if it is not asked, or has given none.
        run: draft tokens of the request that were accepted since the last rejected one; None if
            unknown, or if the draft only finds out which models are right.
        tokens: those that were voted so far.
        q: distributions of the voted tokens, under the paper's rule.
        voted: model of the last vote; -1: none.
    """

    request: RequestState
    asked: int
    wanted: int
    own: list[list[int] | None]
    unread: int = 0
    run: int | None = 0
    tokens: list[int] = field(default_factory=list)
    q: list[SparseDistribution] = field(default_factory=list)
    voted: int = -1

    @property
    def models(self) -> list[int]:
        """The models that are asked, and have not failed."""
        return [model for model, own in enumerate(self.own) if own is not None]
