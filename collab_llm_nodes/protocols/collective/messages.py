"""The messages between the machine and the models."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.decoding.rejection import Outcome
from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution
from collab_llm_nodes.errors import CollabError

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """One request in a drafting step.

    Attributes:
        id: of the request.
        prompt: token ids of its prompt.
        answer: the verified tokens, followed by those voted in this draft so far.
        count: length of the draft that is wanted [tokens]; it is shorter if it ends with an end
            token.
        sampling: the request's output law.
        send_q: draw the tokens from the draft model's distribution, and return it: the paper's
            rule.
    """

    id: str
    prompt: Ids
    answer: Ids
    count: int
    sampling: SamplingConfig
    send_q: bool = False


@dataclass(frozen=True)
class Proposal:
    """Tokens that one draft model proposes.

    Attributes:
        tokens: ids.
        q: [tokens] distributions that they were drawn from, where they were asked for.
    """

    tokens: Ids
    q: tuple[SparseDistribution, ...] | None = None


@dataclass(frozen=True)
class Draw:
    """One draft model's part in a drafting step.

    Attributes:
        batch, step: names that the answer carries: a late one is recognised by them.
        model: index of the draft model.
        asks: one for each request of the step.
    """

    batch: int
    step: int
    model: int
    asks: tuple[Ask, ...]


@dataclass(frozen=True)
class Claim:
    """A voted draft to be verified.

    Attributes:
        id, prompt, answer, sampling: as in ``Ask``; ``answer`` is verified.
        draft: voted tokens.
        q: [draft] distributions that the tokens are claimed to be drawn from; None under the laws
            that judge without them.
    """

    id: str
    prompt: Ids
    answer: Ids
    sampling: SamplingConfig
    draft: Ids
    q: tuple[SparseDistribution, ...] | None


@dataclass(frozen=True)
class Verify:
    """A verification for the target.

    Attributes:
        batch: name that the answer carries.
        claims: one for each request.
    """

    batch: int
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Release:
    """The models may free the KV caches of the request ``id``."""

    id: str


Verdict = Outcome | CollabError
"""The target's judgement of a claim, or the error that prevented it."""
