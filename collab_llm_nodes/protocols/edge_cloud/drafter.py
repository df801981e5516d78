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
    """Knobs of the drafter."""

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
    """One draft in the making; ``draft`` when it is complete."""

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
        on_pass: told of each forward pass the tokens it read and its seconds.
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
        """A draft of up to ``gamma`` tokens for ``job``; :meth:`step` makes it."""
        line = DraftInProgress(job, cached)
        if not job.gamma:
            self._finish(line)
        return line

    def step(self, lines: Sequence[DraftInProgress], read: Sequence[tuple[int, ...]] = ()) -> None:
        """One forward pass: every (unfinished) line gets its next token.

        A line may rest for some passes: what was read for it is kept.

        Args:
            read: answers to be read in the same pass, for :meth:`predict`.
        """
        ends = self._read([*(line.answer for line in lines), *read])
        chosen = self._choose(lines, ends[: len(lines)]) if lines else []
        for line, (token, q) in zip(lines, chosen, strict=True):
            line.tokens.append(token)
            if q is not None:
                line.probs.append(q)
            if len(line.tokens) == line.job.gamma or token in self._eos:
                self._finish(line)

    def draft(
        self, job: DraftJob, *, cached: bool = False, stop: Callable[[], bool] = lambda: False
    ) -> Draft | None:
        """Make one draft; ``stop`` is asked before each forward pass, None when it said so."""
        line = self.begin(job, cached=cached)
        while line.draft is None:
            if stop():
                return None
            self.step([line])
        return line.draft

    def predict(
        self, job: DraftJob, draft: Draft, count: int, temperature: float = 1.0
    ) -> Prediction:
        """The ``count`` likeliest verdicts on ``draft``, made for ``job``.

        Reads the draft to its end, unless :meth:`step` has done so.
        """
        ends = [(*job.prefix, *draft.tokens[:i]) for i in range(len(draft.tokens) + 1)]
        rows = [_logits(node) for node in self._read(ends)]
        position = len(job.prefix)
        return predict(rows, draft.tokens, self._sampling, position, self._eos, count, temperature)

    def alone(self, answer: tuple[int, ...]) -> int:
        """The token with which the draft model, asked by itself, continues ``answer``."""
        (end,) = self._read([answer])
        law = distribution(_logits(end), self._sampling)
        return own_token(law, self._sampling, len(answer))

    def advance(self, answer: tuple[int, ...]) -> None:
        """The answer is confirmed as far as ``answer``: forget what continues another."""
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
        self, lines: Sequence[DraftInProgress], ends: Sequence[_Node]
    ) -> list[tuple[int, SparseDistribution | None]]:
        """The next token of each line and what goes upstream with it, for all lines together."""
        logits = np.stack([_logits(end) for end in ends])
        if self._sampling.greedy:
            return [(token, None) for token in most_likely(torch.from_numpy(logits))]
        positions = [len(line.job.prefix) + len(line.tokens) for line in lines]
        laws = distribution(logits, self._sampling)
        return propose_rows(laws, self._sampling, positions, self._config.max_support)

    def _finish(self, line: DraftInProgress) -> None:
        """A draft is complete at ``gamma`` tokens or at an end token."""
        job = line.job
        probs = tuple(line.probs) if self._sampling.sends_probabilities else None
        tokens = tuple(line.tokens)
        line.draft = Draft(
            job.round,
            len(job.prefix),
            tokens,
            probs,
            line.cached,
            autoregressive_rounds=job.autoregressive_rounds,
        )

    def _read(self, answers: Sequence[tuple[int, ...]]) -> list[_Node]:
        """The nodes at the ends of ``answers``, after one pass over what was not read before."""
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
