"""The messages between edge client and verifier (paper 003, Algorithms 1 and 2).

Frozen dataclasses, which the gRPC codec, the ROS nodes, the in-process runner and the tests share.
A stream is one session, so only ``Opened`` names it. ``round`` counts the verifications of a
session from 0, by which stale messages are recognised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.transport.wire import Failure

if TYPE_CHECKING:  # it would load torch in processes that run no model
    from collab_llm_nodes.models.prompt import Prompt

MAX_DRAFT = 64
"""Longest draft [tokens]."""


@dataclass(frozen=True)
class Open:
    """Start a session: prompt and images travel once.

    Attributes:
        text: the user turn, before the chat template; with ``raw``, what the model reads.
        images: JPEG bytes.
        sampling: the output law; seed and temperature are the same on both sides.
        max_tokens: generated tokens at most.
        vocabulary: ``vocabulary_hash`` of the draft's tokenizer.
        replay: tokens already confirmed by an earlier stream (reconnect); the session continues
            after them as if it had never been lost.
        round: the round that the first draft on this stream will carry.
        turns: the turns before ``text`` (``models.prompt.Prompt``).
        raw: no chat template is applied.
        for_motion: the robot is to move by the answer: the session comes first among its client's.
        guide: limit on the answer's text.
        co_located: draft tokens a round that the verifier's own draft model is to propose in place
            of drafts without tokens, if it has one; 0: none.
    """

    text: str
    images: tuple[bytes, ...]
    sampling: SamplingConfig
    max_tokens: int
    vocabulary: str
    replay: tuple[int, ...] = ()
    round: int = 0
    turns: tuple[Turn, ...] = ()
    raw: bool = False
    for_motion: bool = False
    guide: Guide | None = None
    co_located: int = 0


def open_message(
    prompt: Prompt,
    sampling: SamplingConfig,
    max_tokens: int,
    vocabulary: str,
    *,
    for_motion: bool = False,
    guide: Guide | None = None,
    co_located: int = 0,
) -> Open:
    """Return the message that opens a session for ``prompt``."""
    return Open(
        prompt.text,
        prompt.images,
        sampling,
        max_tokens,
        vocabulary,
        turns=prompt.turns,
        raw=prompt.raw,
        for_motion=for_motion,
        guide=guide,
        co_located=co_located,
    )


@dataclass(frozen=True)
class Opened:
    """The session is open.

    Attributes:
        prompt_tokens: by which the client checks that both sides encode alike.
        guided: the guide of ``Open`` limits the answer. A verifier that knows no guides ignores it.
    """

    session_id: str
    prompt_tokens: int
    guided: bool = False


@dataclass(frozen=True)
class Draft:
    """``gamma`` proposed tokens (may be none: then the verifier decodes one token by itself).

    Attributes:
        round: round this draft belongs to.
        start: generated tokens before it (0 for the first draft): guards against a lost verdict.
        tokens: [gamma] token ids.
        probs: [gamma] distributions the tokens were drawn from; None for greedy and coupled laws.
        cached: it was pre-drafted (for metrics only).
        after: None for a draft after the confirmed answer. A draft that is pushed ahead of the
            verdicts it depends on names the tokens, one at least, that the answer must end with
            when its round comes; otherwise the draft is void.
        autoregressive_rounds: further rounds, one token each, that the verifier is to decode alone
            after this one, without waiting for drafts.
    """

    round: int
    start: int
    tokens: tuple[int, ...]
    probs: tuple[SparseDistribution, ...] | None = None
    cached: bool = False
    after: tuple[int, ...] | None = None
    autoregressive_rounds: int = 0


@dataclass(frozen=True)
class EarlyExit:
    """A preview of the verdict from an intermediate layer; priority = ``confidence`` (Eq. 4).

    ``tokens``, ``accepted`` and ``finished`` are what the verdict's would be.
    """

    round: int
    layer: int
    tokens: tuple[int, ...]
    accepted: int
    finished: bool
    confidence: float


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verification: the answer grows by ``tokens``.

    Attributes:
        tokens: the accepted draft tokens, then one recovered or bonus token (none if an end token
            is among the accepted ones). They are included although the client knows its draft, so
            that a listener without the draft can follow the answer.
        accepted: number of ``tokens`` that are draft tokens, or that the guide or the verifier's
            own draft model put in place of a draft without tokens.
        finished: the answer is complete.
        compute_s: the verifier's time for the forward pass, for the planner and the metrics.
        queue_s: wait of the draft for its turn at the verifier.
        draft_s: time that the verifier's own draft model took.
    """

    round: int
    tokens: tuple[int, ...]
    accepted: int
    finished: bool
    compute_s: float = 0.0
    queue_s: float = 0.0
    draft_s: float = 0.0


@dataclass(frozen=True)
class Close:
    """The client is done with the session."""


ClientMessage = Open | Draft | Close
ServerMessage = Opened | EarlyExit | Verdict | Failure
