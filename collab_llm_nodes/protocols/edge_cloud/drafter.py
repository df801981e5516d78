"""The draft model behind one session: drafts and pre-drafts alike (paper 003, Eq. 1 and 7).

Everything the model has read beyond the confirmed answer is kept as a tree of tokens in its KV
cache, so that continuations of many likely answers are drafted side by side, one forward pass per
token for all of them, and nothing is computed twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.decoding.rejection import own_token, propose_rows
from collab_llm_nodes.decoding.sampling import (
    SamplingConfig,
    SparseDistribution,
    distribution,
    most_likely,
)
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob
from collab_llm_nodes.protocols.edge_cloud.messages import Draft
from collab_llm_nodes.protocols.edge_cloud.prediction import Prediction, predict


@dataclass(frozen=True)
class DrafterConfig:
    """Settings of the drafter."""

    max_support: int = setting(
        64, "Entries of each distribution sent upstream at most.", low=1, high=4096
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass
class _Node:
    """A token in the tree: its column of the KV cache and the logits [V] after it."""

    column: int
    logits: NDArray[np.float32] | None = None
    children: dict[int, _Node] = field(default_factory=dict)

    def walk(self) -> Iterator[_Node]:
        yield self
        for child in self.children.values():
            yield from child.walk()


@dataclass
class DraftInProgress:
    """A partial draft; ``draft`` is set when it is complete."""

    job: DraftJob
    cached: bool = False
    tokens: list[int] = field(default_factory=list)
    probs: list[SparseDistribution] = field(default_factory=list)
    draft: Draft | None = None

    @property
    def answer(self) -> tuple[int, ...]:
        """The answer with what is drafted so far."""
        return (*self.job.prefix, *self.tokens)


class Drafter:
    """Draws drafts after any prefixes of one answer.

    Attributes:
        on_pass: called after each forward pass with the tokens that it read and its seconds.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: EncodedPrompt,
        sampling: SamplingConfig,
        config: DrafterConfig | None = None,
    ) -> None:
        self._kv = engine.open(prompt)
        self._eos = engine.eos
        self._prompt_ids = tuple(prompt.ids)
        self._sampling = sampling
        self._config = config or DrafterConfig()
        self.on_pass: Callable[[int, float], None] = _to_nobody
        self._trunk: tuple[int, ...] = ()  # ids that all continuations share
        self._root = _Node(-1)  # its last one

    def begin(self, job: DraftJob, *, cached: bool = False) -> DraftInProgress:
        """Begin a draft of up to ``gamma`` tokens for ``job``; :meth:`step` continues it."""
        partial = DraftInProgress(job, cached)
        if not job.gamma:
            self._finish(partial)
        return partial

    def step(
        self, partials: Sequence[DraftInProgress], read: Sequence[tuple[int, ...]] = ()
    ) -> None:
        """Make one forward pass: each of the (incomplete) ``partials`` gets its next token.

        A partial draft may rest for some passes: what was read for it is kept.

        Args:
            read: answers to be read in the same pass, for :meth:`predict`.
        """
        ends = self._read([*(partial.answer for partial in partials), *read])
        chosen = self._choose(partials, ends[: len(partials)]) if partials else []
        for partial, (token, q) in zip(partials, chosen, strict=True):
            partial.tokens.append(token)
            if q is not None:
                partial.probs.append(q)
            if len(partial.tokens) == partial.job.gamma or token in self._eos:
                self._finish(partial)

    def draft(
        self, job: DraftJob, *, cached: bool = False, stop: Callable[[], bool] = lambda: False
    ) -> Draft | None:
        """Make one draft; None if ``stop``, which is asked before each forward pass, said so."""
        partial = self.begin(job, cached=cached)
        while partial.draft is None:
            if stop():
                return None
            self.step([partial])
        return partial.draft

    def predict(
        self, job: DraftJob, draft: Draft, count: int, temperature: float = 1.0
    ) -> Prediction:
        """Return the ``count`` likeliest verdicts on ``draft``, made for ``job``.

        Reads the draft to its end, unless :meth:`step` has done so.
        """
        ends = [(*job.prefix, *draft.tokens[:i]) for i in range(len(draft.tokens) + 1)]
        rows = [_logits(node) for node in self._read(ends)]
        position = len(job.prefix)
        return predict(rows, draft.tokens, self._sampling, position, self._eos, count, temperature)

    def alone(self, answer: tuple[int, ...]) -> int:
        """Return the token with which the draft model by itself continues ``answer``."""
        (end,) = self._read([answer])
        law = distribution(_logits(end), self._sampling)
        return own_token(law, self._sampling, len(answer))

    def advance(self, answer: tuple[int, ...]) -> None:
        """Forget what continues another answer than ``answer``, which is confirmed."""
        if not self._trunk:
            return
        wanted = (*self._prompt_ids, *answer)
        if wanted[: len(self._trunk)] != self._trunk:
            return  # the next draft will go back
        node, depth = self._root, len(self._trunk)
        while depth < len(wanted) and wanted[depth] in node.children:
            node, depth = node.children[wanted[depth]], depth + 1
        if node is not self._root:
            moved = self._kv.retain(node.column)
            for kept in node.walk():
                kept.column = moved[kept.column]
            self._trunk, self._root = wanted[:depth], node
        if depth < len(wanted):  # the answer goes on as nobody expected
            node.children.clear()
            self._kv.length = len(self._trunk)

    def close(self) -> None:
        """Free the KV cache."""
        self._kv.close()
        self.on_pass = _to_nobody  # whoever listened may hold us

    def _choose(
        self, partials: Sequence[DraftInProgress], ends: Sequence[_Node]
    ) -> list[tuple[int, SparseDistribution | None]]:
        """Choose the next token of each draft, and what goes upstream with it, for all together."""
        logits = np.stack([_logits(end) for end in ends])
        if self._sampling.greedy:
            return [(token, None) for token in most_likely(torch.from_numpy(logits))]
        positions = [len(partial.job.prefix) + len(partial.tokens) for partial in partials]
        laws = distribution(logits, self._sampling)
        return propose_rows(laws, self._sampling, positions, self._config.max_support)

    def _finish(self, partial: DraftInProgress) -> None:
        """Complete a draft: it has ``gamma`` tokens or an end token."""
        job = partial.job
        probs = tuple(partial.probs) if self._sampling.sends_probabilities else None
        tokens = tuple(partial.tokens)
        partial.draft = Draft(
            job.round,
            len(job.prefix),
            tokens,
            probs,
            partial.cached,
            autoregressive_rounds=job.autoregressive_rounds,
        )

    def _read(self, answers: Sequence[tuple[int, ...]]) -> list[_Node]:
        """Return the nodes at the ends of ``answers``, after a pass over what was not read yet."""
        if not answers:
            return []
        contexts = [(*self._prompt_ids, *answer) for answer in answers]
        self._go_back(contexts)
        ids: list[int] = []
        parents: list[int] = []
        new: list[tuple[_Node, int, _Node]] = []  # parent, token, node
        ends = []
        for context in contexts:
            node = self._root
            for token in context[len(self._trunk) :]:
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = _Node(self._kv.columns + len(new))
                    ids.append(token)
                    parents.append(node.column)
                    new.append((node, token, child))
                node = child
            ends.append(node)
        if not new:
            return ends
        started = time.perf_counter()
        try:
            rows = self._kv.grow(ids, parents).float().cpu().numpy()
        except CollabError:
            for parent, token, _ in new:
                del parent.children[token]
            raise
        self.on_pass(len(new), time.perf_counter() - started)
        for (_, _, node), row in zip(new, rows, strict=True):
            node.logits = row
        return ends

    def _go_back(self, contexts: Sequence[tuple[int, ...]]) -> None:
        """Make the trunk a common beginning of ``contexts``: read the prompt, or roll back."""
        shared = len(self._trunk)
        for context in contexts:
            while context[:shared] != self._trunk[:shared]:
                shared -= 1
        if shared == len(self._trunk) > 0:
            return
        # The logits after the last shared token are not kept: read it again.
        keep = max(shared - 1, 0)
        end = max(shared, len(self._prompt_ids))
        self._kv.length = keep
        self._trunk = contexts[0][:end]
        rows = self._kv.feed(self._trunk[keep:], last=1)
        self._root = _Node(end - 1, rows[-1].float().cpu().numpy())


def _logits(node: _Node) -> NDArray[np.float32]:
    assert node.logits is not None
    return node.logits


def _to_nobody(tokens: int, seconds: float) -> None:
    pass
