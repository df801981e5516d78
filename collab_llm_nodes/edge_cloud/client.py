"""The edge client of paper 003 (Algorithm 1) as a state machine without I/O.

It owns the answer so far and the round number. The caller drafts, sends and receives:

    client = EdgeClient(config, max_tokens)
    job = client.next_draft()            # what to draft (lines 4-6, 19-21)
    client.on_sent(draft)                # the draft went out (lines 7, 23)
    tokens = client.on_verdict(verdict)  # the answer grows (line 15)

Drafts are drawn from randomness keyed by position, so a pre-drafted and a freshly drafted
continuation of the same prefix are the same tokens: whichever arrives first may be sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.edge_cloud.messages import Draft, EarlyExit, Verdict
from collab_llm_nodes.errors import ProtocolError
from collab_llm_nodes.metrics import GenerationMetrics


class Source(IntEnum):
    """Where a token of the answer comes from (the words of vLLM's rejection sampler)."""

    ACCEPTED = 0
    RECOVERED = 1
    BONUS = 2
    UNVERIFIED = 3


@dataclass(frozen=True)
class DraftJob:
    """Draft ``gamma`` tokens after ``prefix`` (generated tokens, prompt excluded)."""

    round: int
    prefix: tuple[int, ...]
    gamma: int


@dataclass(frozen=True)
class ClientConfig:
    """Knobs of the edge client."""

    gamma: int = setting(
        4, "Draft tokens per round; 0 lets the verifier decode alone.", low=0, high=64
    )
    max_tokens: int = setting(128, "Length limit of the answer [tokens].", low=1, high=8192)

    def __post_init__(self) -> None:
        check_ranges(self)


class EdgeClient:
    """One generation, from the first draft to the last verdict."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self.round = 0
        self.generated: list[int] = []
        self.sources: list[Source] = []
        self.finished = False
        self.metrics = GenerationMetrics()
        self._sent: Draft | None = None
        self._exits: dict[tuple[int, ...], int] = {}

    def next_draft(self) -> DraftJob:
        """What to draft for the current round."""
        return self._job(self.round, tuple(self.generated))

    def predraft(self, outcome: tuple[int, ...]) -> DraftJob | None:
        """What to draft for the next round if this round's verdict is ``outcome``.

        None when there is nothing to do: no draft is under verification, or the answer would be
        complete.
        """
        prefix = (*self.generated, *outcome)
        if self._sent is None or not outcome or len(prefix) >= self._config.max_tokens:
            return None
        return self._job(self.round + 1, prefix)

    def on_sent(self, draft: Draft) -> bool:
        """Record that ``draft`` goes to the verifier; False if it must not be sent.

        A second draft for the same round (the pre-draft cache and the drafter both answered) or
        one for another round is stale, not an error.
        """
        if self.finished or self._sent is not None or draft.round != self.round:
            return False
        self._sent = draft
        self._exits.clear()
        self.metrics.drafted += len(draft.tokens)
        return True

    def on_early_exit(self, exit_: EarlyExit) -> bool:
        """Count an exit; False if it is stale."""
        if exit_.round != self.round or self._sent is None:
            return False
        self.metrics.early_exits += 1
        self._exits.setdefault(exit_.tokens, exit_.layer)
        return True

    def on_verdict(self, verdict: Verdict) -> tuple[int, ...]:
        """Extend the answer; returns the new tokens (none if the verdict is stale).

        Raises:
            ProtocolError: the verdict does not fit the draft.
        """
        if verdict.round != self.round or self._sent is None:
            return ()
        draft, self._sent = self._sent, None
        tokens, accepted = verdict.tokens, verdict.accepted
        if not 0 <= accepted <= len(draft.tokens) or len(tokens) - accepted not in (0, 1):
            raise ProtocolError(
                f"verdict: {accepted} accepted, {len(tokens)} tokens, {len(draft.tokens)} drafted",
                field="accepted",
                remedy="the verifier speaks another protocol version; update both sides",
            )
        all_accepted = accepted == len(draft.tokens)
        extra = [Source.BONUS if all_accepted else Source.RECOVERED] * (len(tokens) - accepted)
        self.generated += tokens
        self.sources += [Source.ACCEPTED] * accepted + extra
        self.round += 1
        self.finished = verdict.finished or len(self.generated) >= self._config.max_tokens
        self._count(verdict)
        return tokens

    def _job(self, round_: int, prefix: tuple[int, ...]) -> DraftJob:
        room = self._config.max_tokens - len(prefix) - 1  # the verdict adds one token by itself
        return DraftJob(round_, prefix, max(0, min(self._config.gamma, room)))

    def _count(self, verdict: Verdict) -> None:
        m = self.metrics
        m.rounds += 1
        m.tokens += len(verdict.tokens)
        m.accepted += verdict.accepted
        m.verify_s += verdict.compute_s
        layer = self._exits.get(verdict.tokens)
        if layer is not None:
            m.exit_agreements += 1
            m.exit_layer_sum += layer
