"""Machines without I/O for what is in a lane: an answer being decoded, or a prompt to be shared.

They know all tokens; the stages only hold keys and values of a part of them. So a lane that is lost
with a worker is made anew by feeding its tokens again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from collab_llm_nodes.config import check_max_tokens
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.protocols.jupiter.drafters import Draft, Drafter, NoDrafter
from collab_llm_nodes.protocols.jupiter.messages import Outcome, Step, Want

Lengths = Callable[[int], Sequence[int]]
"""Divides so many tokens into sub-sequences that follow one another through the stages."""


def whole(tokens: int) -> Sequence[int]:
    """Divide nothing: one sub-sequence."""
    return (tokens,)


Stop = Callable[[Sequence[int]], bool]


_FULL = 2.5
"""Initial estimate of the accepted tokens per draft."""
_NEWEST = 0.25
"""Weight of the newest verdict in the moving average of accepted tokens."""


def never(tokens: Sequence[int]) -> bool:
    """Stop nothing."""
    return False


class Trunk:
    """A prompt that several lanes share; its keys and values are held once.

    Args:
        lane: its number.
    """

    def __init__(self, lane: int, ids: Sequence[int]) -> None:
        if not ids:
            raise InvalidInput("no tokens", field="prompt", remedy="give a prompt")
        self.lane = lane
        self.ids = tuple(ids)
        self.held = 0

    @classmethod
    def behind(cls, answer: LaneAnswer) -> Trunk:
        """Return a trunk that goes on in the lane of ``answer``: its prompt and all its tokens."""
        trunk = cls(answer.lane, answer.known)
        trunk.held = answer.firm
        return trunk

    def steps(self, lengths: Lengths = whole) -> list[Step]:
        """Return the steps that feed what is not held, one for each pass; there may be none."""
        if self.held == len(self.ids):
            return []
        steps = feed(Step(self.lane, self.held, self.ids[self.held :]), lengths)
        self.held = len(self.ids)
        return steps

    def feed(self, chain: object, submit: Callable[[Step], None], lengths: Lengths) -> None:
        """Have ``submit`` start the passes of all that the stages of ``chain`` do not hold."""
        for step in self.steps(lengths):
            submit(step)

    def restart(self) -> None:
        """Note that the stages have lost the lane."""
        self.held = 0


class Guide(Trunk):
    """A directive that stands before many questions (paper 004, section V-B): it stays in its lane.

    Requests share it, from any thread. It is fed once to each chain, by the first that needs it.
    """

    def __init__(self, lane: int, ids: Sequence[int]) -> None:
        super().__init__(lane, ids)
        self._feeding = threading.Lock()
        self._chain: object = None

    def feed(self, chain: object, submit: Callable[[Step], None], lengths: Lengths) -> None:
        """Have ``submit`` start the passes that ``chain`` has not seen; others wait for that."""
        with self._feeding:
            if self._chain is not chain:
                self.held = 0
                super().feed(chain, submit, lengths)
                self._chain = chain

    def restart(self) -> None:
        """Do nothing: another chain is fed anew, and this one may serve other requests."""


class LaneAnswer:
    """One answer: the tokens that stand, and what is fed next.

    The lane's cache holds all of them but the newest, which is fed with the next draft: its logits
    judge the draft's first token.

    Args:
        lane: its number.
        prompt: token ids; with a ``trunk``, those behind its own.
        max_tokens: of the answer.
        eos: end tokens.
        context: tokens that the model reads; the answer ends there, too.
        trunk: the lane begins with what this one holds.
        stop: tells of the tokens so far that no more are wanted.

    Attributes:
        tokens: the answer so far.
        accepted: of ``tokens``, those that were drafts.
        finished: the answer is complete.
        held: of all tokens, the first ones that the lane's caches hold and that stand.
        passes: verdicts so far.
        drafted: draft tokens that were judged.

    Raises:
        InvalidInput: no prompt, or one that leaves no room for an answer.
    """

    def __init__(
        self,
        lane: int,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        eos: frozenset[int],
        context: int,
        sampling: SamplingConfig | None = None,
        drafter: Drafter | None = None,
        trunk: Trunk | None = None,
        stop: Stop = never,
    ) -> None:
        self.lane = lane
        self._prompt = (*(trunk.ids if trunk is not None else ()), *prompt)
        if not prompt:
            raise InvalidInput("no tokens", field="prompt", remedy="give a prompt")
        if len(self._prompt) >= context:
            raise InvalidInput(
                f"a prompt of {len(self._prompt)} tokens, the model reads {context}",
                field="prompt",
                remedy="shorten the prompt",
            )
        check_max_tokens(max_tokens)
        self.tokens: list[int] = []
        self.accepted: list[bool] = []
        self.finished = False
        self.passes = self.drafted = 0
        self._max_tokens = min(max_tokens, context - len(self._prompt))
        self._eos = eos
        self._sampling = sampling or SamplingConfig()
        self._drafter = drafter or NoDrafter()
        self._trunk = trunk
        self._stop = stop
        self._guesses: tuple[int, ...] = ()
        self._draft = Draft()
        self._stood = _FULL  # drafted tokens of a chain that stand, on average of late
        self._retain: int | None = None
        self._grown = 0  # of the tokens held, those that are nodes of the last step's tree
        self._fork_of: int | None = None
        self.restart()

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and answer so far."""
        return (*self._prompt, *self.tokens)

    @property
    def firm(self) -> int:
        """Tokens that the caches hold in a row: those in the nodes of a tree do not count."""
        return min(self.held - self._grown, len(self.known))

    def restart(self) -> None:
        """Note that the stages have lost the lane; the answer stays as it is."""
        self.held, self._grown = len(self._trunk.ids) if self._trunk is not None else 0, 0
        self._fork_of = self._trunk.lane if self._trunk is not None else None
        self._retain = None

    def steps(self, lengths: Lengths = whole) -> list[Step]:
        """Return what is fed next, one step for each pass; the last one wants a verdict.

        Args:
            lengths: divides a prompt. A draft is never divided.
        """
        known = self.known
        pending = known[self.held :]
        self._draft = Draft()
        if len(pending) == 1:  # else a prompt is read, whose end says nothing of drafts
            room = self._max_tokens - len(self.tokens) - 1
            draft = self._drafter.propose(known, self._guesses, room)
            # Verifying a token that is rejected costs time, too.
            self._draft = draft if draft.parents else draft.cut(1 + round(2 * self._stood))
        drafted = len(self._draft.tokens)
        step = Step(
            self.lane,
            self.held,
            (*pending, *self._draft.tokens),
            self._draft.parents,
            self._retain,
            self._fork_of,
            Want.VERDICT,
            1 + drafted,
            len(self.tokens),
            self._sampling,
            self._drafter.guesses,
        )
        self.held += len(pending)
        self._fork_of = None
        return feed(step, lengths) if not drafted else [step]

    def on_outcome(self, outcome: Outcome) -> None:
        """Take the verdict on the last step.

        Raises:
            ProtocolError: it is none.
        """
        draft, path = self._draft, outcome.path
        parents = draft.parents or tuple(range(len(draft.tokens)))
        before = (0, *path)
        if any(
            not 1 <= row <= len(parents) or parents[row - 1] != parent
            for row, parent in zip(path, before, strict=False)
        ):
            raise ProtocolError("a verdict on another draft", field="path", remedy="update all")
        start = self.held - 1  # of the newest token, which is the tree's first node
        self._retain = start + (path[-1] if path else 0) if draft.parents else None
        self._grown = 1 + len(path) if draft.parents else 0
        self.held += len(path)
        stand = [draft.tokens[row - 1] for row in path]
        if outcome.next >= 0:
            stand.append(outcome.next)
        elif not stand or stand[-1] not in self._eos:
            raise ProtocolError("a verdict without a token", field="next", remedy="update all")
        self._guesses = outcome.guesses
        if draft.tokens:
            self._stood += _NEWEST * (len(path) - self._stood)
        self.passes += 1
        self.drafted += len(draft.tokens)
        for i, token in enumerate(stand):
            self.tokens.append(token)
            self.accepted.append(i < len(path))
            full = len(self.tokens) >= self._max_tokens
            self.finished = full or token in self._eos or self._stop(self.tokens)
            if self.finished:
                break


def feed(step: Step, lengths: Lengths) -> list[Step]:
    """Divide ``step`` into steps of several passes; only the last one wants what it wants.

    Raises:
        InvalidInput: the lengths are not those of parts.
    """
    parts = list(lengths(len(step.ids)))
    if sum(parts) != len(step.ids) or min(parts, default=1) < 1:
        raise InvalidInput(
            f"sub-sequences of {parts} tokens", field="lengths", remedy=f"{len(step.ids)} together"
        )
    ends = list(accumulate(parts))
    steps = [
        Step(step.lane, step.start + a, step.ids[a:b])
        for a, b in zip([0, *ends], ends, strict=False)
    ]
    steps[0] = replace(steps[0], retain=step.retain, fork_of=step.fork_of)
    last = steps[-1]
    steps[-1] = replace(
        step, start=last.start, ids=last.ids, retain=last.retain, fork_of=last.fork_of
    )
    return steps
