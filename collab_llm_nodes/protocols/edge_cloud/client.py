"""The edge client of paper 003 (Algorithm 1) as a state machine without I/O.

It owns the answer so far and the round number. The caller drafts, sends and receives:

    client = EdgeClient(config, max_tokens)
    job = client.next_draft()                # what to draft (lines 4-6, 19-21)
    client.on_sent(draft)                    # the draft was sent (lines 7, 23)
    ahead = client.push(job, draft, window)  # a draft for a later round, sent before its verdicts
    tokens = client.on_verdict(verdict)      # the answer grows (line 15)

After a verdict ``in_flight`` is set already if the verifier has the next draft.

Drafts are drawn from randomness keyed by position, so a pre-drafted and a freshly drafted
continuation of the same prefix are the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from collab_llm_nodes.config import ANY, MAX_TOKENS, check_ranges, setting
from collab_llm_nodes.errors import ProtocolError
from collab_llm_nodes.protocols.base import Source
from collab_llm_nodes.protocols.edge_cloud.ahead import PushedDrafts, may_come
from collab_llm_nodes.protocols.edge_cloud.messages import MAX_DRAFT, Draft, EarlyExit, Verdict
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.transport.wire import UPDATE


@dataclass(frozen=True)
class DraftJob:
    """A draft of ``gamma`` tokens to be made after ``prefix`` (generated tokens, without prompt).

    Attributes:
        autoregressive_rounds: rounds that the verifier is to decode alone after this draft.
        room: tokens of the draft at most, with those that a guide forces.
    """

    round: int
    prefix: tuple[int, ...]
    gamma: int
    autoregressive_rounds: int = 0
    room: int = MAX_DRAFT


@dataclass(frozen=True)
class EdgeClientConfig:
    """Settings of the edge client."""

    gamma: int = setting(
        4,
        "Draft tokens per round; 0: the verifier decodes alone and streams its tokens.",
        low=0,
        high=64,
        per_request=ANY,
    )
    max_tokens: int = setting(128, "Length limit of an answer [tokens].", low=1, high=MAX_TOKENS)
    drafted_by: str = setting(
        "robot",
        "Who drafts: the robot, or the verifier, if it has a draft model (its setting draft). The"
        " planner, if enabled, chooses by itself.",
        choices=("robot", "verifier"),
        per_request=ANY,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class EdgeClient:
    """One generation, from the first draft to the last verdict.

    Args:
        draft_room: tokens of the answer that the draft models can read; the verifier decodes later
            ones alone.
        filled: the verifier puts tokens of its own in place of drafts without tokens: a guide's or
            its draft model's. Verdicts may accept them.
    """

    def __init__(
        self, config: EdgeClientConfig, draft_room: int = MAX_TOKENS, *, filled: bool = False
    ) -> None:
        self._config = config
        self._draft_room = draft_room
        self._filled = filled
        self.round = 0
        self.generated: list[int] = []
        self.sources: list[Source] = []
        self.finished = False
        self.metrics = EdgeCloudMetrics()
        self.in_flight: Draft | None = None  # under verification, or about to be
        self._ahead = PushedDrafts()
        self._exits: dict[tuple[int, ...], int] = {}

    @property
    def speculates(self) -> bool:
        """True if there are drafts; else the verifier decodes alone."""
        return self._config.gamma > 0

    def next_draft(self) -> DraftJob:
        """Return what to draft for the current round."""
        return self._job(self.round, tuple(self.generated))

    def predraft(self, outcome: tuple[int, ...], of: DraftJob | None = None) -> DraftJob | None:
        """Return what to draft if ``outcome`` is the verdict on the draft for ``of``, or in flight.

        None if no draft is under verification, the answer would be complete, or the verifier
        decodes alone.
        """
        if self.in_flight is None or self.in_flight.autoregressive_rounds or not outcome:
            return None
        of = of or self.next_draft()
        job = self._job(of.round + 1, (*of.prefix, *outcome))
        return job if len(job.prefix) < self._config.max_tokens else None

    def on_sent(self, draft: Draft) -> bool:
        """Record that ``draft`` is being sent; return False if it must not be sent.

        A second draft for the same round, or one for another round, is stale, not an error.
        """
        if self.finished or self.in_flight is not None or draft.round != self.round:
            return False
        self._mark_in_flight(draft)
        return True

    def push(self, job: DraftJob, draft: Draft, window: int) -> Draft | None:
        """Return ``draft``, made for ``job``, in the form in which it is sent ahead of its round.

        None if it must not be sent: its round has come or is over, the answer has grown otherwise,
        or ``window`` drafts are ahead already.
        """
        if job.round <= self.round or len(self._ahead) >= window:
            return None
        if not self._ahead.has_room_for(draft):
            return None
        pushed = replace(draft, after=job.prefix[len(self.generated) :])
        if not may_come(pushed, self.round, self.generated):
            return None
        self._ahead.add(pushed)
        self.metrics.pushed += 1
        return pushed

    def on_early_exit(self, exit_: EarlyExit) -> bool:
        """Count an exit; return False if it is stale."""
        if exit_.round != self.round or self.in_flight is None:
            return False
        self.metrics.early_exits += 1
        self._exits.setdefault(exit_.tokens, exit_.layer)
        return True

    def on_verdict(self, verdict: Verdict) -> tuple[int, ...]:
        """Extend the answer; return the new tokens (none if the verdict is stale).

        Raises:
            ProtocolError: the verdict does not fit the draft.
        """
        if verdict.round != self.round or self.in_flight is None:
            return ()
        draft, self.in_flight = self.in_flight, None
        tokens, accepted = verdict.tokens, verdict.accepted
        most = len(draft.tokens) or (MAX_DRAFT if self._filled else 0)
        if not 0 <= accepted <= most or len(tokens) - accepted not in (0, 1):
            raise ProtocolError(
                f"verdict: {accepted} accepted, {len(tokens)} tokens, {len(draft.tokens)} drafted",
                field="accepted",
                remedy=UPDATE,
            )
        all_accepted = accepted >= len(draft.tokens)
        extra = [Source.BONUS if all_accepted else Source.RECOVERED] * (len(tokens) - accepted)
        self.generated += tokens
        self.sources += [Source.ACCEPTED] * accepted + extra
        self.round += 1
        self.finished = verdict.finished or len(self.generated) >= self._config.max_tokens
        self.metrics.drafted += max(0, accepted - len(draft.tokens))
        self._count(verdict)
        if not self.finished:
            due = self._ahead.next(draft, self.round, self.generated)
            if due is not None:
                self._mark_in_flight(due)
        return tokens

    def on_unverified(self, token: int, *, end: bool) -> None:
        """Append a token of the draft model alone while the verifier is out of reach."""
        self.generated.append(token)
        self.sources.append(Source.UNVERIFIED)
        self.finished = end or len(self.generated) >= self._config.max_tokens
        self.metrics.tokens += 1
        self.metrics.unverified += 1

    @property
    def verified(self) -> bool:
        """True if every token of the answer so far was verified."""
        return Source.UNVERIFIED not in self.sources

    def _mark_in_flight(self, draft: Draft) -> None:
        self.in_flight = draft
        self._exits.clear()
        self.metrics.drafted += len(draft.tokens)

    def _job(self, round_: int, prefix: tuple[int, ...]) -> DraftJob:
        # The verdict adds one token by itself.
        room = max(0, self._config.max_tokens - len(prefix) - 1)
        draft_room = max(0, min(room, self._draft_room - len(prefix), MAX_DRAFT))
        gamma = min(self._config.gamma, draft_room)
        return DraftJob(round_, prefix, gamma, 0 if gamma else room, draft_room)

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
