"""Messages between the coordinator and the stage workers (``stages.proto`` has the units)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.transport.wire import Failure

STATES = ("float32", "float16", "int8")
"""Forms of a hidden state between two workers."""
PATHS = ("grpc", "gloo")
"""Ways of hidden states between two workers."""


class Want(IntEnum):
    """Finding that the last stage makes from a step's last rows."""

    NOTHING = 0
    VERDICT = 1
    LOGITS = 2


@dataclass(frozen=True)
class Step:
    """One lane's part of a pass: its cache is put right, then tokens are fed.

    A lane is a session with a key-value cache in every stage. One that no step has named before
    begins empty.

    Attributes:
        lane: its number.
        start: tokens of the trunk that stand; what follows is dropped, rejected drafts and nodes.
        ids: new tokens behind them; may be none.
        parents: the new tokens are a tree: for each but the first, the index of an earlier one that
            it follows. Empty: they follow one another.
        retain: column of a node of the last step's tree whose path joins the trunk first.
        fork_of: the lane is new and shares its first ``start`` tokens with this one.
        want: what is read after the last ``rows`` tokens. A verdict takes the first of these as
            given and the others as drafts.
        position: of the next token in its answer, the key of its random numbers.
        sampling: the law of a verdict.
        guesses: tokens wanted of each Medusa head.
        close: the lane ends, and nothing is fed.
        positions: of the new tokens, where they are not their indices: of the first, which the
            others follow; or M-RoPE's, first all of time, then height, then width. Not of a tree.
        features: of so many of the first picture placeholders among ``ids`` the features come with
            the pass.
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


@dataclass(frozen=True)
class Span:
    """One worker's work on a pass, by its own monotonic clock [s]."""

    begin: float
    end: float


PassTimes: TypeAlias = tuple[int, tuple[Span, ...]]
"""Number of a pass, and the time of each worker by that worker's own clock."""


@dataclass(frozen=True)
class Outcome:
    """Finding of the last stage about a step.

    Attributes:
        path: drafts that stand, as indices into the step's last ``rows`` tokens, ascending from 1.
        next: the token that follows them; -1: the last one ends the answer, or no verdict was
            wanted.
        guesses: of each Medusa head in turn, the best first.
        logits: float32 [rows, vocab_size] in bytes; empty unless wanted.
    """

    path: tuple[int, ...] = ()
    next: int = -1
    guesses: tuple[int, ...] = ()
    logits: bytes = b""


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's answer to Describe."""

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


@dataclass(frozen=True)
class Load:
    """Hold the layers ``first`` to ``last - 1``, for this chain."""

    coordinator: str
    chain: str
    version: str
    weights: str
    first: int
    last: int
    lanes: int
    states: str = "float32"
    path: str = "grpc"


@dataclass(frozen=True)
class Loaded:
    """The layers are there; their tensors take ``bytes``."""

    bytes: int


@dataclass(frozen=True)
class Connect:
    """Send hidden states to the worker at ``address``, host:port."""

    address: str


@dataclass(frozen=True)
class Connected:
    """The next worker has taken the link."""


@dataclass(frozen=True)
class Link:
    """Hidden states of ``chain`` come on this stream; with a ``port``, by gloo, headers here."""

    chain: str
    port: int = 0


@dataclass(frozen=True)
class Linked:
    """The link is taken."""


@dataclass(frozen=True)
class Pass:
    """One pass through the stages.

    Attributes:
        number: ascending within a chain.
        steps: each lane once.
        states: hidden states of all new tokens, packed; on the way to the first stage the features
            of pictures, which it puts into the embeddings of the steps' placeholders.
        spans: of the workers before.
    """

    number: int
    steps: tuple[Step, ...]
    states: bytes = b""
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Taken:
    """The pass has been computed; its sender may send another."""

    number: int


@dataclass(frozen=True)
class Result:
    """The end of a pass: one outcome for each step."""

    number: int
    outcomes: tuple[Outcome, ...]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Ping:
    """A question for a sign of life."""


@dataclass(frozen=True)
class Pong:
    """A sign of life, with the progress of the chain's jobs: Load is the first, each Pass another.

    Attributes:
        received, begun, computed: jobs so far; a pass counts as computed once it is sent on.
        busy_s: time spent so far on a job of another chain; 0: on none.
    """

    received: int = 0
    begun: int = 0
    computed: int = 0
    busy_s: float = 0.0


Order: TypeAlias = Load | Connect | Link | Pass | Ping
Answer: TypeAlias = Loaded | Connected | Linked | Taken | Result | Pong
Report: TypeAlias = Answer | Failure
