"""The continuations of one answer that one draft model has read.

Tokens after the confirmed answer are kept as a tree in the model's KV cache: continuations of many
likely answers are read side by side, in one forward pass per token, and nothing is computed twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from collab_llm_nodes.decoding.sampling import Distribution
from collab_llm_nodes.engine.interface import DecodingEngine
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.contexts import common_length

Answer = tuple[int, ...]
Laws = Callable[[Tensor, Sequence[Answer]], list[Distribution]]
"""Return the distributions of the next tokens for logits [n, V] after n answers, in the host's
memory."""
_PIECE = 256
"""Prompt tokens read in one pass at most: an answer for motion waits for one pass."""
OwnToken = Callable[[Distribution, int], int]
"""Return the token that a model chooses of its distribution, at a position in the answer."""


@dataclass
class Node:
    """A token in the tree: its column of the KV cache and the distribution of what follows it.

    Attributes:
        read: that distribution, once the token has been read.
        own: the model's own choice of the next token; -1 until it is needed.
    """

    column: int
    read: Distribution | None = None
    own: int = -1
    children: dict[int, Node] = field(default_factory=dict)

    @property
    def law(self) -> Distribution:
        """The distribution of a node that has been read."""
        assert self.read is not None
        return self.read

    def walk(self) -> Iterator[Node]:
        """Yield this node and all its descendants."""
        yield self
        for child in self.children.values():
            yield from child.walk()


class Continuations:
    """One draft model's tree.

    Args:
        laws: turns logits into distributions, which alone are kept.
        own: chooses the model's own token; needed for :meth:`own_tokens`.
        between_pieces: called between two passes over a prompt that takes several.
    """

    def __init__(
        self,
        engine: DecodingEngine,
        prompt: EncodedPrompt,
        laws: Laws,
        own: OwnToken | None = None,
        between_pieces: Callable[[], None] = lambda: None,
    ) -> None:
        self._kv = engine.open(prompt)
        self._prompt_ids = tuple(prompt.ids)
        self._laws = laws
        self._own = own
        self._between_pieces = between_pieces
        self._trunk: tuple[int, ...] = ()  # ids that all continuations share
        self._root = Node(-1)  # its last one
        self._passed: list[int] = []  # own choices at the answer's tokens in the trunk

    def read(self, answers: Sequence[tuple[int, ...]]) -> tuple[list[Node], int, float]:
        """Read the unread tokens of ``answers`` in one pass.

        Returns:
            The nodes at their ends, the number of tokens read, and the time until their
            distributions are known [s].
        """
        contexts = [(*self._prompt_ids, *answer) for answer in answers]
        self._roll_back(contexts)
        ids: list[int] = []
        parents: list[int] = []
        new: list[tuple[Node, int, Node]] = []  # parent, token, node
        read: list[Answer] = []  # that end in the new nodes
        ends = []
        for context in contexts:
            node = self._root
            for depth, token in enumerate(context[len(self._trunk) :], len(self._trunk) + 1):
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = Node(self._kv.columns + len(new))
                    ids.append(token)
                    parents.append(node.column)
                    new.append((node, token, child))
                    read.append(context[len(self._prompt_ids) : depth])
                node = child
            ends.append(node)
        if not new:
            return ends, 0, 0.0
        started = time.perf_counter()
        try:
            laws = self._laws(self._kv.grow(ids, parents), read)
        except CollabError:
            for parent, token, _ in new:
                del parent.children[token]
            raise
        took_s = time.perf_counter() - started
        for (_, _, node), law in zip(new, laws, strict=True):
            node.read = law
        return ends, len(new), took_s

    def own_at(self, node: Node, position: int) -> int:
        """Return the model's own choice after ``node``, at ``position`` of the answer."""
        if node.own < 0:
            assert self._own is not None
            node.own = self._own(node.law, position)
        return node.own

    def own_tokens(self, answer: tuple[int, ...], start: int = 0) -> list[int]:
        """Return the model's own choices in ``answer``, which must be read, from ``start`` on."""
        passed = len(self._trunk) - len(self._prompt_ids)
        own = self._passed[start : len(answer)]
        node = self._root
        for position in range(passed, len(answer)):
            if position >= start:
                own.append(self.own_at(node, position))
            node = node.children[answer[position]]
        return own

    def advance(self, answer: tuple[int, ...]) -> None:
        """Drop the continuations of other answers than ``answer``, which is confirmed."""
        if not self._trunk:
            return
        wanted = (*self._prompt_ids, *answer)
        if wanted[: len(self._trunk)] != self._trunk:
            return  # the next read rolls back
        node, depth = self._root, len(self._trunk)
        while depth < len(wanted) and wanted[depth] in node.children:
            if self._own is not None:
                self._passed.append(self.own_at(node, depth - len(self._prompt_ids)))
            node, depth = node.children[wanted[depth]], depth + 1
        if node is not self._root:
            moved = self._kv.retain(node.column)
            for kept in node.walk():
                kept.column = moved[kept.column]
            self._trunk, self._root = wanted[:depth], node
        if depth < len(wanted):  # the answer continues with an unread token
            node.children.clear()
            self._kv.length = len(self._trunk)

    def close(self) -> None:
        """Free the KV cache."""
        self._kv.close()

    def _roll_back(self, contexts: Sequence[tuple[int, ...]]) -> None:
        """Make the trunk a common beginning of ``contexts``: read the prompt, or roll back."""
        shared = min(common_length(context, self._trunk) for context in contexts)
        if shared == len(self._trunk) > 0:
            return
        # The distribution after the last shared token is not kept: read that token again.
        keep = max(shared - 1, 0)
        end = max(shared, len(self._prompt_ids))
        self._kv.length = keep
        self._trunk = contexts[0][:end]
        while end - keep > _PIECE:
            self._kv.feed(self._trunk[keep : keep + _PIECE], last=0)
            keep += _PIECE
            self._between_pieces()
        logits = self._kv.feed(self._trunk[keep:], last=1)
        (law,) = self._laws(logits, [self._trunk[len(self._prompt_ids) :]])
        self._root = Node(end - 1, law)
        del self._passed[end - len(self._prompt_ids) :]
