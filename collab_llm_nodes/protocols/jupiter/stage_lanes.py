"""The lanes of one stage, and the verification of drafts by the last stage. No I/O.

The state of a stage is a function of the passes it has run. All stages of a chain run the same
passes in the same order, so their lanes agree without further messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collab_llm_nodes.decoding.rejection import own_token
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution, masked, most_likely
from collab_llm_nodes.engine.kernels import Head
from collab_llm_nodes.engine.stage import Stage, StageFeed, StageSession
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.models.heads import MedusaHeads
from collab_llm_nodes.protocols.jupiter.messages import Outcome, Step, Want
from collab_llm_nodes.transport.wire import UPDATE


class StageLanes:
    """See the module docstring.

    Args:
        most: largest number of open lanes.
        eos: end tokens, for verdicts of the last stage.
        heads: for guesses of the last stage.
    """

    def __init__(
        self, stage: Stage, most: int, eos: frozenset[int], heads: MedusaHeads | None = None
    ) -> None:
        self._stage = stage
        self._most = most
        self._eos = eos
        self._heads = heads
        self._sessions: dict[int, StageSession] = {}

    @property
    def feature_width(self) -> int:
        """Width of a row of picture features."""
        return self._stage.feature_width

    @torch.inference_mode()
    def run(self, steps: Sequence[Step], states: Tensor | None) -> tuple[Tensor, list[Outcome]]:
        """Run one pass.

        Args:
            states: hidden states of all new tokens, in the order of the steps; in the first stage
                the features of pictures, or None.

        Returns:
            The hidden states for the next stage, and no outcomes. Of the last stage, no states
            [0, width], and one outcome per step.

        Raises:
            CollabError: the pass cannot be run; the lanes then differ from those of other stages.
        """
        fed: list[Step] = []
        feeds: list[StageFeed] = []
        seen: dict[int, Tensor] = {}  # input of the LM head in the last stage, by lane
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
        """Return the session of ``step``, rolled back to its start; None if the lane has ended."""
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
        if step.allowed:
            logits = masked(logits, _allowed(step, logits.shape[-1]))
        draft = step.ids[len(step.ids) - step.rows + 1 :]
        parents = step.parents or range(len(draft))
        path, token = judge(logits, draft, parents, step.sampling, step.position, self._eos)
        guesses: tuple[int, ...] = ()
        if step.guesses and self._heads is not None and token >= 0:
            state = states[path[-1] if path else 0]
            guesses = guess(self._heads, self._stage.head, state, step.guesses)
        return Outcome(path, token, guesses)


def _allowed(step: Step, size: int) -> NDArray[np.bool_]:
    """Return the mask [rows, size] of a step.

    Raises:
        InvalidInput: it is of another vocabulary.
    """
    bits = np.frombuffer(step.allowed, np.uint8).reshape(step.rows, -1)
    if bits.shape[1] != (size + 7) // 8:
        raise InvalidInput(
            f"{bits.shape[1]} bytes a row for {size} tokens", field="steps.allowed", remedy=UPDATE
        )
    return np.unpackbits(bits, axis=1, count=size, bitorder="little").view(np.bool_)


def _positions(step: Step) -> int | Tensor | None:
    """Return the positions of a step's tokens as ``StageFeed`` takes them."""
    if len(step.positions) > 1:
        return torch.tensor(step.positions).view(3, -1)
    return step.positions[0] if step.positions else None


def walk(
    own: Callable[[int, int], int],
    draft: Sequence[int],
    parents: Sequence[int],
    eos: frozenset[int],
) -> tuple[tuple[int, ...], int]:
    """Follow the model's own tokens through a tree of drafts.

    Args:
        own: returns the model's token after a row, as ``own(row, depth)``; row 0 is the newest
            token of the answer, row i + 1 is ``draft[i]``.
        parents: for each draft token, the row that it follows.
        eos: end tokens.

    Returns:
        The rows of the accepted drafts, ascending, and the token that follows them; -1 if the last
        one is an end token.
    """
    path: list[int] = []
    row = 0
    while True:
        token = own(row, len(path))
        children = (i for i, parent in enumerate(parents) if parent == row)
        child = next((i for i in children if draft[i] == token), None)
        if child is None:
            return tuple(path), token
        row = child + 1
        path.append(row)
        if token in eos:
            return tuple(path), -1


def judge(
    logits: Tensor,
    draft: Sequence[int],
    parents: Sequence[int],
    sampling: SamplingConfig,
    position: int,
    eos: frozenset[int],
) -> tuple[tuple[int, ...], int]:
    """Verify drafts (paper 004, figure 8): return the result of :func:`walk` for ``logits``.

    Drafts are proposals only: the token at a position is always the model's own, drawn with the
    random number of that position. So an answer depends neither on the drafter nor on the partition
    of the layers, and it can be continued elsewhere after a loss. For a certain proposal this is
    the rejection law (accept with p(token), else draw from the rest).

    Args:
        logits: [1 + drafts, V].
        position: of the first draft token in the answer.

    Raises:
        ModelError: the logits are not finite.
    """
    if sampling.greedy:
        tokens = most_likely(logits)
        return walk(lambda row, depth: tokens[row], draft, parents, eos)

    def own(row: int, depth: int) -> int:
        return own_token(distribution(logits[row], sampling), sampling, position + depth)

    return walk(own, draft, parents, eos)


@torch.inference_mode()
def guess(heads: MedusaHeads, head: Head, state: Tensor, count: int) -> tuple[int, ...]:
    """Return the ``count`` best tokens of each Medusa head in turn, for one ``state`` [width]."""
    logits = heads.logits(state, head)[..., : head.vocab_size]  # without rows of padding
    best = logits.topk(count, dim=-1).indices
    found: list[int] = best.flatten().tolist()
    return tuple(found)
