"""State machines without I/O for a lane: an answer being decoded, or a prefix that lanes share.

They keep all token ids, while the stages hold only keys and values. So a lane that is lost with a
worker is rebuilt by feeding its tokens again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from collab_llm_nodes.config import check_max_tokens
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.models.guide import MOST_FORCED
from collab_llm_nodes.protocols.jupiter.drafters import Draft, Drafter, MedusaChain
from collab_llm_nodes.protocols.jupiter.messages import Outcome, Step, Want
from collab_llm_nodes.protocols.jupiter.pictures import ShownPrompt
from collab_llm_nodes.transport.wire import UPDATE

if TYPE_CHECKING:  # it would load transformers in processes that run no model
    from collab_llm_nodes.models.guided_text import GuidedText

Lengths = Callable[[int], Sequence[int]]
"""Divides a number of tokens into sub-sequences that follow one another through the stages."""


def undivided(tokens: int) -> Sequence[int]:
    """Return one sub-sequence of all tokens."""
    return (tokens,)


Stop = Callable[[Sequence[int]], bool]
"""Returns True if an answer with these tokens is complete."""


_FULL = 2.5
"""Initial estimate of the accepted tokens per draft."""
_NEWEST = 0.25
"""Weight of the newest verdict in the moving average of accepted tokens."""


def never_stop(tokens: Sequence[int]) -> bool:
    """Return False: only an end token or a limit ends the answer."""
    return False


@dataclass(frozen=True)
class DecodeConfig:
    """Settings of the decoding of an answer.

    Attributes:
        lengths: divides a prompt into the sub-sequences of the pipeline.
        groups: the points of an outline are decoded in this many passes at a time, each with its
            share of the lanes; 0: one pass per stage, 1: all lanes in one pass.
        stop: ends an answer early.
        guide: limits the text of the one answer that is decoded with these settings.
    """

    max_tokens: int
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drafter: Drafter = field(default_factory=MedusaChain)
    lengths: Lengths = undivided
    groups: int = 0
    stop: Stop = never_stop
    guide: GuidedText | None = None


class SharedPrefix:
    """A prefix that several lanes share; its keys and values are held once, in a lane of its own.

    Attributes:
        shown: the prompt that it begins with, if that shows pictures.
        cached_length: leading tokens of ``ids`` that the stages hold.
    """

    def __init__(self, lane: int, ids: Sequence[int], shown: ShownPrompt | None = None) -> None:
        if not ids:
            raise InvalidInput("no tokens", field="prompt", remedy="give a prompt")
        self.lane = lane
        self.ids = tuple(ids)
        self.shown = shown
        self.cached_length = 0

    @classmethod
    def from_answer(cls, answer: LaneAnswer) -> SharedPrefix:
        """Return the prefix of prompt and answer of ``answer``, in its lane."""
        prefix = cls(answer.lane, answer.known, answer.shown)
        prefix.cached_length = answer.cached_length
        return prefix

    def steps(self, lengths: Lengths = undivided) -> list[Step]:
        """Return the steps that feed the tokens not held yet, one per pass; may be empty."""
        start, self.cached_length = self.cached_length, len(self.ids)
        if start == len(self.ids):
            return []
        return _placed(self.shown, divide(Step(self.lane, start, self.ids[start:]), lengths))

    def feed(self, chain: object, submit: Callable[[Step], None], lengths: Lengths) -> None:
        """Submit the steps that feed what the stages of ``chain`` do not hold yet."""
        for step in self.steps(lengths):
            submit(step)

    def restart(self) -> None:
        """Note that the stages have lost the lane."""
        self.cached_length = 0


class CachedPrefix(SharedPrefix):
    """A directive before many questions (paper 004, section V-B), kept in its lane across requests.

    Requests share it from any thread. The first request on each chain feeds it.
    """

    def __init__(self, lane: int, ids: Sequence[int]) -> None:
        super().__init__(lane, ids)
        self._feeding = threading.Lock()
        self._chain: object = None

    def feed(self, chain: object, submit: Callable[[Step], None], lengths: Lengths) -> None:
        """Feed ``chain`` unless it has been fed; concurrent callers wait for the first one."""
        with self._feeding:
            if self._chain is not chain:
                self.cached_length = 0
                super().feed(chain, submit, lengths)
                self._chain = chain

    def restart(self) -> None:
        """Do nothing: a new chain is fed anyway, and the old one may serve other requests."""


class LaneAnswer:
    """One answer: its accepted tokens, and what is fed next.

    The lane's cache holds all tokens but the newest, which is fed with the next draft: its logits
    verify the first token of the draft.

    Args:
        prompt: token ids; with a ``prefix``, those after it.
        eos: end tokens.
        context: length of the model's context, which ends the answer as well.
        prefix: the lane is a fork of this one.
        shown: prompt and prefix together, if they show pictures.

    Attributes:
        tokens: the answer so far.
        accepted: for each of ``tokens``, whether it was drafted.
        finished: the answer is complete.
        passes: verdicts so far.
        drafted: draft tokens that were verified.

    Raises:
        InvalidInput: no prompt, or one that leaves no room for an answer.
    """

    def __init__(
        self,
        lane: int,
        prompt: Sequence[int],
        config: DecodeConfig,
        *,
        eos: frozenset[int],
        context: int,
        prefix: SharedPrefix | None = None,
        shown: ShownPrompt | None = None,
    ) -> None:
        self.lane = lane
        self.shown = shown or (prefix.shown if prefix is not None else None)
        self._prompt = (*(prefix.ids if prefix is not None else ()), *prompt)
        if not prompt:
            raise InvalidInput("no tokens", field="prompt", remedy="give a prompt")
        if len(self._prompt) >= context:
            raise InvalidInput(
                f"a prompt of {len(self._prompt)} tokens, the model reads {context}",
                field="prompt",
                remedy="shorten the prompt",
            )
        check_max_tokens(config.max_tokens)
        self.tokens: list[int] = []
        self.accepted: list[bool] = []
        self.finished = False
        self.passes = self.drafted = 0
        self._max_tokens = min(config.max_tokens, context - len(self._prompt))
        self._eos = eos
        self._config = config
        self._prefix = prefix
        self._guesses: tuple[int, ...] = ()
        self._draft = Draft()
        self._stood = _FULL  # drafted tokens of a chain that stand, on average of late
        self._retain: int | None = None
        self._fork_of: int | None = None
        # Leading tokens of prompt and answer that the stages hold; the last ones may be tree nodes.
        self._held = 0
        self._tree_nodes = 0
        self.restart()

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and answer so far."""
        return (*self._prompt, *self.tokens)

    @property
    def cached_length(self) -> int:
        """Leading tokens that the stages hold in the linear part of their caches."""
        return min(self._held - self._tree_nodes, len(self.known))

    def restart(self) -> None:
        """Note that the stages have lost the lane; the answer stays as it is."""
        self._held, self._tree_nodes = len(self._prefix.ids) if self._prefix is not None else 0, 0
        self._fork_of = self._prefix.lane if self._prefix is not None else None
        self._retain = None

    def steps(self, lengths: Lengths = undivided) -> list[Step]:
        """Return the next steps, one per pass; the last one asks for a verdict.

        Args:
            lengths: divides a prompt; a draft is always fed in one pass.
        """
        known = self.known
        pending = known[self._held :]
        self._draft = Draft()
        if len(pending) == 1:  # a prompt, or a lane fed again, comes without a draft
            self._draft = self._propose(known)
        drafted = len(self._draft.tokens)
        step = Step(
            self.lane,
            self._held,
            (*pending, *self._draft.tokens),
            self._draft.parents,
            self._retain,
            self._fork_of,
            Want.VERDICT,
            1 + drafted,
            len(self.tokens),
            self._config.sampling,
            self._config.drafter.guesses,
            allowed=self._allowed(),
        )
        self._held += len(pending)
        self._fork_of = None
        return _placed(self.shown, divide(step, lengths) if not drafted else [step])

    def _propose(self, known: tuple[int, ...]) -> Draft:
        """Return the draft after ``known``: the tokens that the guide forces, or the drafter's."""
        room = self._max_tokens - len(self.tokens) - 1
        if self._config.guide is not None:
            forced = self._config.guide.forced(self.tokens, min(room, MOST_FORCED))
            if forced:
                return Draft(forced)
        draft = self._config.drafter.propose(known, self._guesses, room)
        # Verifying a token that is rejected costs time, too.
        return draft if draft.parents else draft.cut(1 + round(2 * self._stood))

    def _allowed(self) -> bytes:
        """Return the mask of the present draft's rows, as ``Step`` has it."""
        if self._config.guide is None:
            return b""
        rows = self._config.guide.rows(self.tokens, self._draft.tokens, self._draft.parents)
        return np.packbits(rows, axis=1, bitorder="little").tobytes()

    def on_outcome(self, outcome: Outcome) -> None:
        """Add the tokens of the verdict on the last step, which ``check_result`` has accepted.

        Raises:
            ProtocolError: the guide does not allow them: the last worker knows no guides.
        """
        draft, path = self._draft, outcome.path
        start = self._held - 1  # column of the newest token, the root of the tree
        self._retain = start + (path[-1] if path else 0) if draft.parents else None
        self._tree_nodes = 1 + len(path) if draft.parents else 0
        self._held += len(path)
        new = [draft.tokens[row - 1] for row in path]
        if outcome.next >= 0:
            new.append(outcome.next)
        guide = self._config.guide
        if guide is not None and not guide.allows((*self.tokens, *new)):
            raise ProtocolError("a token against the guide", field="outcomes", remedy=UPDATE)
        self._guesses = outcome.guesses
        if draft.tokens:
            self._stood += _NEWEST * (len(path) - self._stood)
        self.passes += 1
        self.drafted += len(draft.tokens)
        for i, token in enumerate(new):
            self.tokens.append(token)
            self.accepted.append(i < len(path))
            full = len(self.tokens) >= self._max_tokens
            self.finished = full or token in self._eos or self._config.stop(self.tokens)
            if self.finished:
                break


def _placed(shown: ShownPrompt | None, steps: list[Step]) -> list[Step]:
    """Return steps with the positions and the pictures of their tokens."""
    return steps if shown is None else [shown.place(step) for step in steps]


def divide(step: Step, lengths: Lengths) -> list[Step]:
    """Divide ``step`` into one step per sub-sequence; only the last one asks for a verdict.

    Raises:
        InvalidInput: the lengths are not positive, or do not add up.
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
