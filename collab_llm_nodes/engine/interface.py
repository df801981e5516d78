"""An engine and its sessions as drafters, servers and benchmarks use them.

``engine.Engine`` runs a whole model in this process. Others with this interface run a model over
several machines, stand for a model in tests, or emulate a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt

OnExit = Callable[[int, Tensor], None]
AfterExit = Callable[[int, Callable[[], float]], None]
OnStates = Callable[[Tensor], None]
Check = Callable[[], None]
S = TypeVar("S")


@dataclass(frozen=True)
class Feed(Generic[S]):
    """New tokens for one session in a pass of several.

    Attributes:
        session: one of the engine that runs the pass.
        ids: token ids.
        on_exit: called as ``on_exit(layer, logits [last, V])`` DURING the forward pass, at each of
            the engine's exit layers.
        last: logits are wanted after this many of the last tokens; None: after all; 0: the cache
            is filled only.
        parents: the tokens become nodes of the session's tree, each after the column named here,
            see ``DecodingSession.grow``. None: they follow the trunk.
        on_states: called as ``on_states(states [last, width])`` when the pass is done, with the
            hidden states that the LM head has read (after the final norm).
    """

    session: S
    ids: Sequence[int]
    on_exit: OnExit | None = None
    last: int | None = None
    parents: Sequence[int] | None = None
    on_states: OnStates | None = None

    @property
    def keep(self) -> int:
        """Rows of logits."""
        return len(self.ids) if self.last is None else self.last


class DecodingSession(Protocol):
    """One prompt's KV cache. Not for two threads at a time.

    ``session.length = n`` is the only rollback: what was fed after the first n tokens is forgotten.
    Tokens within the prompt's length must be the prompt's own (its images belong to them).

    Several continuations can stand side by side as a tree: ``grow`` adds nodes after the trunk,
    ``retain`` makes the path to one of them the trunk. ``feed`` and ``length`` know the trunk only
    and drop all nodes.
    """

    @property
    def length(self) -> int:
        """Tokens held in the KV cache's trunk."""

    @length.setter
    def length(self, n: int) -> None: ...

    @property
    def columns(self) -> int:
        """Trunk and nodes."""

    @property
    def own_bytes(self) -> int:
        """Bytes of the KV cache that this session alone holds in this process."""

    def feed(
        self, ids: Sequence[int], on_exit: OnExit | None = None, last: int | None = None
    ) -> Tensor:
        """Append ``ids`` and return the logits [last, V] after each of the last ``last``.

        Args:
            ids: token ids.
            on_exit: as in :class:`Feed`. An exception it raises ends the pass.
            last: all by default; 0 only fills the cache.

        Raises:
            InvalidInput: ids outside the vocabulary, not the prompt's, or more than fit.
            ProtocolError: the session is closed. Whatever is raised, the trunk is as it was before.
        """

    def grow(self, ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Append tree nodes in one pass and return the logits [n, V] after each.

        A node attends to itself and its ancestors only, as if they alone had been fed.

        Args:
            ids: n token ids.
            parents: for each the column it follows: one of the trunk, or an earlier node, also of
                this call. New nodes are columns ``columns``, ``columns + 1``, ...

        Raises:
            InvalidInput: ids outside the vocabulary, bad parents, or more than fit.
            ModelError: the model grows no trees, see ``DecodingEngine``, and the nodes branch.
            ProtocolError: the session is closed, or its prompt has not been fed to its end.
                Whatever is raised, the session is as it was before.
        """

    def retain(self, column: int) -> dict[int, int]:
        """Make the path from the root to ``column`` the trunk; its descendants stay as nodes.

        Everything else is dropped.

        Returns:
            New columns by old ones, of all that is kept.

        Raises:
            ProtocolError: no such column, or its path leaves the prompt before the prompt's end.
        """

    def encode_images(self) -> None:
        """Read the prompt's images now; else the first ``feed`` that comes to them does.

        For a thread of its own beside the passes of other sessions.

        Raises:
            Unavailable: there is no memory for that.
        """

    def close(self) -> None:
        """Free the KV cache."""


class DecodingEngine(Protocol):
    """A model that decodes in sessions.

    Attributes:
        loaded: tokenizer and configuration; the weights may be elsewhere.
        vocab_size: columns of all logits: the tokenizer's size, without padding rows, and without
            tokens that the model has no rows for.
        vocabulary: hash of these tokens.
        eos: end tokens.
        context: tokens a session can hold.
        grows_trees: nodes of a session may branch; else they continue the trunk in a row.
        device: of logits.
    """

    loaded: LoadedModel
    vocab_size: int
    vocabulary: str
    eos: frozenset[int]
    context: int
    grows_trees: bool
    device: torch.device

    def open(self, prompt: EncodedPrompt, expected: int = 0) -> DecodingSession:
        """Start a session; nothing is computed before its first ``feed``.

        Args:
            expected: tokens that it will hold at most, if that is known: its KV cache then gets
                all its memory at once, and never needs old and new memory together to grow.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` without special ones."""


class ServingEngine(DecodingEngine, Protocol):
    """An engine whose sessions share passes, and whose caches have known sizes.

    Attributes:
        num_layers: decoder layers.
        exit_layers: exits that fire, counted in layers done.
    """

    num_layers: int
    exit_layers: tuple[int, ...]

    def run(
        self,
        feeds: Sequence[Feed[Any]],
        *,
        exits_until: float = math.inf,
        after_exit: AfterExit = lambda layer, took: None,
    ) -> list[Tensor | Exception]:
        """Run one forward pass over several sessions, see ``engine.Engine.run``."""

    def close(self) -> None:
        """Release the model, or the machines that hold it."""

    def warm_up(self, on_exit: OnExit) -> None:
        """Run passes of the usual shapes: kernels are chosen and loaded when first used.

        For the thread that will run the passes, since libraries keep their state by thread.

        Args:
            on_exit: is shown the logits of every exit, to process them as later ones will be.
        """

    def cache_bytes(self, tokens: int) -> int:
        """Return the bytes that a session of so many tokens takes."""

    def cache_room(self, *, rows: int, logits: int, pixels: int, share: float = 1.0) -> float:
        """Return the bytes that are free for all sessions beside the largest pass.

        Ask once, when no session is open and a first pass has been: on a GPU they are taken then.

        Args:
            rows: tokens of that pass.
            logits: those of them whose logits are wanted.
            pixels: of the largest picture, which may be encoded at the same time.
            share: part of the free memory that may be taken; another model needs the rest.
        """
