"""Draft models and a target that are functions of the tokens before; for the collective machine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from enumeration import rows_of

from collab_llm_nodes.decoding.rejection import verify_chain
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.protocols.collective import machine as machine_module
from collab_llm_nodes.protocols.collective.length import Verification
from collab_llm_nodes.protocols.collective.machine import (
    Action,
    AnswerUpdate,
    Draw,
    Ended,
    Incident,
    Job,
    Machine,
    Release,
)
from collab_llm_nodes.protocols.collective.messages import Ask, Claim, Proposal, Verdict, Verify

VOCABULARY = 20
EOS = frozenset({0})
GREEDY = SamplingConfig()


def target_token(context: Sequence[int]) -> int:
    """The target's token after ``context``."""
    return random.Random(f"target {list(context)}").randrange(VOCABULARY)


def draft_token(model: int, context: Sequence[int], share: float = 0.7) -> int:
    """The token of a draft model that mostly agrees with the target."""
    own = random.Random(f"{model} {list(context)}")
    return target_token(context) if own.random() < share else own.randrange(VOCABULARY)


def alone(job: Job) -> tuple[int, ...]:
    """The target's own answer to ``job``."""
    answer: list[int] = []
    while len(answer) < job.max_tokens and not (answer and answer[-1] in EOS):
        answer.append(target_token((*job.prompt, *answer)))
    return tuple(answer)


def endless_prompts() -> Iterator[tuple[int, ...]]:
    """Yield prompts whose answers have 60 tokens or more."""
    for i in itertools.count():
        if len(alone(Job("", (7, i), GREEDY, 60))) == 60:
            yield (7, i)


def propose(model: int, ask: Ask) -> Proposal:
    """The answer of a draft model to ``ask``."""
    tokens: list[int] = []
    while len(tokens) < ask.count and not (tokens and tokens[-1] in EOS):
        tokens.append(draft_token(model, (*ask.prompt, *ask.answer, *tokens)))
    return Proposal(tuple(tokens))


def judge(claim: Claim) -> Verdict:
    """The target's verdict on ``claim``."""
    before = (*claim.prompt, *claim.answer)
    own = [target_token((*before, *claim.draft[:i])) for i in range(len(claim.draft) + 1)]
    rows = rows_of(np.eye(VOCABULARY)[own])
    return verify_chain(rows, claim.draft, claim.q, claim.sampling, len(claim.answer), EOS)


class RecordingSelector:
    """A speculation length that a test sets, in place of a rule.

    Attributes:
        s, best: as in ``LengthSelector``.
        seen: what it has observed.
    """

    def __init__(self, s: int, best: int | None = None) -> None:
        self.s = s
        self.best = s if best is None else best
        self.seen: list[Verification] = []

    def observe(self, verification: Verification) -> None:
        self.seen.append(verification)


def recorded(
    monkeypatch: pytest.MonkeyPatch, s: int = 3, best: int | None = None
) -> RecordingSelector:
    """Have all machines use one selector, and return it."""
    selector = RecordingSelector(s, best)
    monkeypatch.setattr(machine_module, "selector", lambda config: selector)
    return selector


class World:
    """Carries a machine's actions out, one at a time, in the order that a test chooses.

    Attributes:
        answers, ended: results of the machine, by request.
        released: requests whose KV caches are freed.
        held: most requests that held KV caches at a time.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0
        self.answers: dict[str, tuple[int, ...]] = {}
        self.ended: dict[str, Ended] = {}
        self.released: set[str] = set()
        self.incidents: list[Incident] = []
        self.updates: list[AnswerUpdate] = []
        self.seen: set[str] = set()
        self.held = 0
        self.drawing: list[Draw] = []
        self.verifying: Verify | None = None

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.machine.submit(job, self.now)
            self.answers[job.id] = ()
        self.poll()

    def poll(self) -> None:
        for action in self.machine.poll(self.now):
            self._do(action)

    def _do(self, action: Action) -> None:
        if isinstance(action, Draw):
            self.drawing.append(action)
            self._hold(action.asks)
        elif isinstance(action, Verify):
            assert self.verifying is None, "the target is asked for one verification at a time"
            self.verifying = action
            self._hold(action.claims)
        elif isinstance(action, AnswerUpdate):
            assert action.tokens[: len(self.answers[action.id])] == self.answers[action.id]
            self.answers[action.id] = action.tokens
            self.updates.append(action)
        elif isinstance(action, Ended):
            assert action.id not in self.ended, "an answer ends once"
            self.ended[action.id] = action
        elif isinstance(action, Release):
            self.seen.add(action.id)  # it may have ended before any model met it
            self.released.add(action.id)
        else:
            self.incidents.append(action)

    def _hold(self, those: Sequence[Ask] | Sequence[Claim]) -> None:
        self.seen |= {each.id for each in those}
        assert not self.seen & self.released & {each.id for each in those}
        self.held = max(self.held, len(self.seen - self.released))

    def answer_draft(self, index: int = 0, drop: Callable[[Ask], bool] = lambda ask: False) -> None:
        """Have one of the models that are drawing answer."""
        draw = self.drawing.pop(index)
        self.answer(draw, [None if drop(ask) else propose(draw.model, ask) for ask in draw.asks])

    def answer(self, draw: Draw, proposals: Sequence[Proposal | None]) -> None:
        """Have a model answer a draw with these proposals."""
        self.machine.on_proposals(draw.model, draw.batch, draw.step, proposals, self.now)
        self.poll()

    def answer_target(self) -> None:
        """Have the target answer."""
        asked, self.verifying = self.verifying, None
        assert asked is not None
        self.machine.on_verdicts(asked.batch, [judge(claim) for claim in asked.claims], self.now)
        self.poll()

    def run(self, passes: int = 100_000) -> None:
        """Answer everything in turn until nothing is under way."""
        while self.drawing or self.verifying:
            passes -= 1
            assert passes, "it never ends"
            self.now += 0.01
            if self.drawing:
                self.answer_draft()
            if self.verifying:
                self.answer_target()
