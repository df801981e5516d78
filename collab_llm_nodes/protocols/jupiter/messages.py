"""Messages between the coordinator and the stage workers (``stages.proto`` has the units)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.transport.wire import Failure

STATES = ("float32", "float16", "int8")
"""Forms of hidden states between two workers."""


class Want(IntEnum):
    """Result that the last stage computes from a step's last rows."""

    NOTHING = 0
    VERDICT = 1
    LOGITS = 2


@dataclass(frozen=True)
class Step:
    """One lane's part of a pass: its cache is corrected, then tokens are fed.

    A lane is a session with a key-value cache in every stage. It begins empty with the first step
    that names it.

    Attributes:
        start: tokens of the cache that remain; later ones, rejected drafts and tree nodes, are
            dropped.
        ids: new tokens after them; may be empty.
        parents: for a tree, the index of each new token's parent, without that of the first token.
            Empty: the tokens follow one another.
        retain: column of a node of the previous step's tree, whose path joins the linear part of
            the cache first.
        fork_of: the lane is new and shares its first ``start`` tokens with this one.
        want: result for the last ``rows`` tokens. For a verdict the first of these is the newest
            token of the answer, and the others are drafts.
        position: index of the next token in its answer, the key of its random numbers.
        sampling: the law of a verdict.
        guesses: number of tokens per Medusa head.
        close: the lane ends, and nothing is fed.
        positions: of the new tokens, unless they are their indices: that of the first one, which
            the others, or the nodes of a tree, follow; or M-RoPE's: all of time, then height, then
            width. Not for trees.
        features: number of leading picture placeholders among ``ids`` whose features come with the
            pass.
        allowed: of a verdict, the tokens that a guide allows after each of the ``rows``, one bit
            for each token from the lowest, whole bytes for each row; empty: all tokens.
    """

    lane: int
    start: int = 0
    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    retain: int | None = None
    fork_of: int | None = None
    want: Want = Want.NOTHING
    rows: int = 0
    position: int = 0
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    guesses: int = 0
    close: bool = False
    positions: tuple[int, ...] = ()
    features: int = 0
    allowed: bytes = b""


@dataclass(frozen=True)
class Span:
    """Time of one worker's work on a pass, by its own monotonic clock [s]."""

    begin: float
    end: float


PassTimes: TypeAlias = tuple[int, tuple[Span, ...]]
"""Number of a pass, and the span of each worker."""


@dataclass(frozen=True)
class Outcome:
    """Result of the last stage for a step.

    Attributes:
        path: accepted drafts, as ascending indices into the step's last ``rows`` tokens, from 1.
        next: the token that follows them; -1: the last one ends the answer, or ``want`` was no
            verdict.
        guesses: of each Medusa head in turn, the best first.
        logits: float32 [rows, vocab_size] in bytes; empty unless wanted.
    """

    path: tuple[int, ...] = ()
    next: int = -1
    guesses: tuple[int, ...] = ()
    logits: bytes = b""


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's answer to Describe; ``weights`` is as in ``models.partial.CheckpointFacts``."""

    version: str
    model: str
    weights: str
    num_layers: int
    context: int
    vocab_size: int
    width: int
    most_lanes: int
    eos: frozenset[int]
    heads: int
    vocabulary: str

    @property
    def numbers(self) -> str:
        """Type of the weights, and their quantisation while they load: "bfloat16 int4"."""
        return self.weights.partition(" ")[2].partition(" by ")[0]

    @property
    def short_weights(self) -> str:
        """The weights for people: the beginning of the hash, and the type."""
        digest, _, numbers = self.weights.partition(" ")
        return f"{digest[:12]} {numbers}"


@dataclass(frozen=True)
class Load:
    """Request to hold the layers ``first`` to ``last - 1`` for this chain."""

    coordinator: str
    chain: str
    version: str
    weights: str
    first: int
    last: int
    lanes: int
    states: str = "float32"


@dataclass(frozen=True)
class Loaded:
    """The layers are loaded; their tensors take ``bytes``."""

    bytes: int


@dataclass(frozen=True)
class Connect:
    """Request to send hidden states to the worker at ``address``, host:port."""

    address: str


@dataclass(frozen=True)
class Connected:
    """The next worker has accepted the link."""


@dataclass(frozen=True)
class Link:
    """Hidden states of ``chain`` come on this stream."""

    chain: str


@dataclass(frozen=True)
class Linked:
    """The link is accepted."""


@dataclass(frozen=True)
class Pass:
    """One pass through the stages.

    Attributes:
        number: ascending within a chain.
        steps: at most one per lane.
        states: packed hidden states of all new tokens; for the first stage the features of
            pictures, which replace the embeddings of the steps' placeholders.
        spans: of the previous workers.
    """

    number: int
    steps: tuple[Step, ...]
    states: bytes = b""
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Taken:
    """The pass has been computed."""

    number: int


@dataclass(frozen=True)
class Result:
    """Result of a pass: one outcome per step."""

    number: int
    outcomes: tuple[Outcome, ...]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Ping:
    """Request for a Pong."""


@dataclass(frozen=True)
class Pong:
    """Sign of life with the progress of the chain's jobs: the Load is the first, each Pass another.

    Attributes:
        received, begun, computed: jobs so far; a pass counts as computed once it is sent on.
        busy_s: time spent so far on a running job of another chain; 0: there is none.
    """

    received: int = 0
    begun: int = 0
    computed: int = 0
    busy_s: float = 0.0


Order: TypeAlias = Load | Connect | Link | Pass | Ping
Answer: TypeAlias = Loaded | Connected | Linked | Taken | Result | Pong
Report: TypeAlias = Answer | Failure
