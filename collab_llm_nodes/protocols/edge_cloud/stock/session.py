"""The verifier's side of a session at a server that only scores, as a state machine without I/O.

A stock server keeps no session and judges no draft. It returns the target's distribution after any
prefix, so the verdict on a draft takes the distributions after the confirmed tokens and after each
draft token. The caller performs the returned actions and reports their results:

    for action in session.on_draft(draft): perform(action)  # Score, Stream, or a Verdict to send
    ... session.on_scores(score, laws, seconds), on_lost(score)

Drafts that were pushed ahead are scored before their round, so that their verdicts need not wait
for another round trip. ``VerifierSession`` has the rules of rounds and verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from collab_llm_nodes.decoding.sampling import Distribution
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open, Verdict
from collab_llm_nodes.protocols.edge_cloud.server import VerifierSession

if TYPE_CHECKING:  # llguidance is loaded where guides are used
    from collab_llm_nodes.models.guided_text import GuidedText


@dataclass(frozen=True)
class Score:
    """Find the target's distributions after ``prefix`` and after each of ``tokens``.

    Attributes:
        prefix: tokens of the answer before the draft.
        tokens: [gamma] the draft's.
    """

    prefix: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Stream:
    """Have the server decode ``count`` tokens alone after ``prefix``; free greedy answers only.

    Report each token as the scores of a draft without tokens.
    """

    prefix: tuple[int, ...]
    count: int


Action = Score | Stream | Verdict


@dataclass(frozen=True)
class _Scores:
    laws: Sequence[Distribution]
    seconds: float


class StockSession:
    """One session, from ``Open`` to the last verdict.

    Args:
        eos: end tokens of the target.
        vocab_size: token ids are below this.
        room: tokens that fit into the target's context after the prompt.
        ahead: drafts to score before their round, at a time; each costs the server a round.
        guide: limits the answer; the distributions that are reported are within it.
    """

    def __init__(
        self,
        opened: Open,
        *,
        eos: frozenset[int],
        vocab_size: int,
        room: int,
        ahead: int,
        guide: GuidedText | None = None,
    ) -> None:
        self._state = VerifierSession(
            replace(opened, text="", images=()),
            eos=eos,
            vocab_size=vocab_size,
            room=room,
            guide=guide,
        )
        self._streams = opened.sampling.greedy and guide is None
        self._most_ahead = ahead
        self._due: Score | None = None  # for the verdict of this round
        self._awaited: set[Score] = set()
        self._scores: dict[Score, _Scores] = {}
        self._streamed_to = 0  # length of the answer at the end of the present stream

    @property
    def finished(self) -> bool:
        """True if the answer is complete."""
        return self._state.finished

    def on_draft(self, draft: Draft) -> list[Action]:
        """Handle a draft for this round or a later one; raises as ``VerifierSession.offer``."""
        self._state.offer(draft)
        return self._advance()

    def on_scores(self, score: Score, laws: Sequence[Distribution], seconds: float) -> list[Action]:
        """Handle the distributions [gamma + 1] that ``score`` asked for, found in ``seconds``."""
        self._awaited.discard(score)
        if self._may_serve(score):
            self._scores[score] = _Scores(laws, seconds)
        return self._advance()

    def on_lost(self, score: Score) -> bool:
        """Handle a failed request; return True if this round's verdict needs it."""
        self._awaited.discard(score)
        return score == self._due

    def _advance(self) -> list[Action]:
        """Conclude the rounds whose scores are known, and ask for what the next ones need."""
        actions: list[Action] = []
        while (due := self._begin()) is not None:
            found = self._scores.pop(due, None)
            if found is None:
                return [*actions, *self._ask(due), *self._ask_ahead()]
            actions.append(self._state.decide(found.laws, found.seconds))
            self._due = None
            self._scores = {s: r for s, r in self._scores.items() if self._may_serve(s)}
            self._awaited = {s for s in self._awaited if self._may_serve(s)}
        return [*actions, *self._ask_ahead()]

    def _begin(self) -> Score | None:
        """Return what this round's verdict needs; None without a draft."""
        if self._due is None:
            tokens = self._state.begin()
            if tokens is not None:
                self._due = Score(tuple(self._state.generated), tokens)
        return self._due

    def _may_serve(self, score: Score) -> bool:
        """Return True if the answer may still come to the prefix of ``score``."""
        so_far = tuple(self._state.generated)
        return not self.finished and score.prefix[: len(so_far)] == so_far

    def _ask(self, due: Score) -> list[Action]:
        streamed = not due.tokens and len(due.prefix) < self._streamed_to
        if streamed or due in self._awaited:
            return []
        alone = self._state.autoregressive_rounds
        if due.tokens or not alone or not self._streams:
            return self._request(due)
        self._streamed_to = len(due.prefix) + 1 + alone
        return [Stream(due.prefix, 1 + alone)]

    def _request(self, score: Score) -> list[Action]:
        self._awaited.add(score)
        return [score]

    def _ask_ahead(self) -> list[Action]:
        """Ask for the scores of drafts for later rounds, the likeliest of which come first."""
        asked: list[Action] = []
        if self.finished:
            return asked
        for draft in self._state.ahead:
            early = {*self._awaited, *self._scores} - {self._due}
            if len(early) >= self._most_ahead:
                break
            score = self._score_of(draft)
            if score is not None and score != self._due and score not in early:
                asked += self._request(score)
        return asked

    def _score_of(self, draft: Draft) -> Score | None:
        """Return what ``draft`` needs if its round comes; None while its prefix is open."""
        after = draft.after or ()
        known = draft.start - len(after)
        if known > len(self._state.generated):
            return None
        return Score((*self._state.generated[:known], *after), draft.tokens)
