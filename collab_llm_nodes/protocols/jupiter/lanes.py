"""One stage's lanes: sessions by number, and what a pass does to them. No I/O.

The state of a stage is a function of the passes that it has run, in their order. All stages of a
chain run the same passes, so their lanes agree without any further message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collab_llm_nodes.engine.stage import Stage, StageFeed, StageSession
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.models.heads import MedusaHeads
from collab_llm_nodes.protocols.jupiter.judge import guess, judge
from collab_llm_nodes.protocols.jupiter.messages import Outcome, Step, Want


class StageLanes:
    """See the module docstring.

    Args:
        most: lanes that may be open at a time.
        eos: end tokens, for the last stage's verdicts.
        heads: for the last stage's guesses.
    """

    def __init__(
        self, stage: Stage, most: int, eos: frozenset[int], heads: MedusaHeads | None = None
    ) -> None:
        self._stage = stage
        self._most = most
        self._eos = eos
        self._heads = heads
        self._sessions: dict[int, StageSession] = {}

    def __len__(self) -> int:
        """Lanes that are open."""
        return len(self._sessions)

    @torch.inference_mode()
    def run(self, steps: Sequence[Step], states: Tensor | None) -> tuple[Tensor, list[Outcome]]:
        """Run one pass.

        Args:
            states: hidden states of all new tokens, in the order of the steps; in the first stage
                the features of pictures, None without.

        Returns:
            Hidden states for the next stage, and no outcomes; or, of the last stage, none [0,
            width] and an outcome for each step.

        Raises:
            CollabError: the pass cannot be run; lanes are then no longer as in other stages.
        """
        fed: list[Step] = []
        feeds: list[StageFeed] = []
        seen: dict[int, Tensor] = {}  # of the last stage, by lane: what the LM head has read
        first, row = self._stage.takes_ids, 0
        for step in steps:
            session = self._prepare(step)
            if session is None or not step.ids:
                continue
            count = step.features if first else len(step.ids)
            given = states[row : row + count] if states is not None and count else None
            row += count
            rows: Any = step.ids if first else given

            def keep(found: Tensor, lane: int = step.lane) -> None:
                seen[lane] = found

            parents = None
            if step.parents:  # of the tree's tokens, as columns
                parents = [step.start - 1, *(step.start + p for p in step.parents)]
            features = given if first else None
            feeds.append(
                StageFeed(session, rows, step.rows, parents, keep, _positions(step), features)
            )
            fed.append(step)
        outputs = self._stage.run(feeds)
        if not self._stage.gives_logits:
            return torch.cat(outputs) if outputs else torch.empty(0, self._stage.width), []
        logits = dict(zip([step.lane for step in fed], outputs, strict=True))
        return torch.empty(0, self._stage.width), [
            self._outcome(step, logits.get(step.lane), seen.get(step.lane)) for step in steps
        ]

    def close(self) -> None:
        """Close all lanes."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _prepare(self, step: Step) -> StageSession | None:
        """Return the session of ``step`` with its trunk as wanted; None if the lane has ended."""
        session = self._sessions.get(step.lane)
        if step.close:
            if session is not None:
                self._sessions.pop(step.lane).close()
            return None
        if session is None:
            if len(self._sessions) >= self._most:
                raise InvalidInput(f"more than {self._most} lanes", field="steps.lane")
            session = self._sessions[step.lane] = self._begin(step)
        elif step.fork_of is not None:
            raise ProtocolError("the lane exists", field="steps.fork_of")
        if step.retain is not None:
            session.retain(step.retain)
        session.length = step.start
        return session

    def _begin(self, step: Step) -> StageSession:
        if step.fork_of is None:
            return self._stage.open()
        source = self._sessions.get(step.fork_of)
        if source is None:
            raise ProtocolError(f"no lane {step.fork_of}", field="steps.fork_of")
        return source.fork()

    def _outcome(self, step: Step, logits: Tensor | None, states: Tensor | None) -> Outcome:
        if step.want is Want.NOTHING or logits is None or states is None:
            return Outcome()
        if step.want is Want.LOGITS:
            return Outcome(logits=logits.float().cpu().contiguous().numpy().tobytes())
        draft = step.ids[len(step.ids) - step.rows + 1 :]
        parents = step.parents or range(len(draft))
        path, token = judge(logits, draft, parents, step.sampling, step.position, self._eos)
        guesses: tuple[int, ...] = ()
        if step.guesses and self._heads is not None and token >= 0:
            state = states[path[-1] if path else 0]
            guesses = guess(self._heads, self._stage.head, state, step.guesses)
        return Outcome(path, token, guesses)


def _positions(step: Step) -> int | Tensor | None:
    """Return the positions of a step's tokens as ``StageFeed`` takes them."""
    if len(step.positions) > 1:
        return torch.tensor(step.positions).view(3, -1)
    return step.positions[0] if step.positions else None
