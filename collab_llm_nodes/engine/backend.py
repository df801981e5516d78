"""The interface between sessions and the code that computes a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from collab_llm_nodes.engine.device import Upload
from collab_llm_nodes.models.architectures import decoder_parts, layer_parts

AfterLayer = Callable[[int, Tensor], None]
"""(layers done, hidden states [rows, hidden_size]), valid only during the call."""


@dataclass(frozen=True)
class Heads:
    """Numbers of heads, and their width."""

    query: int
    key: int
    dim: int

    @classmethod
    def of(cls, model: Any) -> Heads:
        """Return the heads of a model's decoder layers."""
        config = model.config.get_text_config()
        query = config.num_attention_heads
        key = getattr(config, "num_key_value_heads", None) or query
        attention: Any = decoder_parts(model).layers[0].self_attn
        return cls(query, key, int(attention.head_dim))

    @property
    def shared(self) -> int:
        """Query heads per key-value head."""
        return self.query // self.key


def plain_weight(model: Any) -> Tensor:
    """Return a weight of the layers' type and place, which no quantisation touches."""
    norm: Any = layer_parts(decoder_parts(model).layers[0]).attention_norm
    weight: Tensor = norm.weight.detach()
    return weight


class Cache(Protocol):
    """Keys and values of one session, by column."""

    @property
    def own_bytes(self) -> int:
        """Bytes that it holds alone."""

    @property
    def shared_bytes(self) -> int:
        """Bytes that it may share with forks."""

    def move(self, kept: Sequence[int]) -> None:
        """Move column ``kept[i]`` to column ``i``, and free the others."""

    def cut(self, columns: int) -> None:
        """Free the columns from ``columns`` on."""

    def fork(self, columns: int, used: int) -> Cache:
        """Return a cache that begins with the same ``columns`` of the ``used`` ones."""

    def parts(self, columns: int) -> list[Tensor]:
        """Return the first columns, [layers, 2 * kv_heads, some, head_dim] each, in order."""


class Rows(NamedTuple):
    """Input of a pass: the new tokens of all chunks, in order.

    Attributes:
        embedded: [rows, hidden_size], with the features of pictures in their places.
        added: [rows, hidden_size] for each of the first layers, added to the states after it
            (DeepStack); empty where no picture is shown.
        ids: [rows] the tokens themselves, which some layers of other models read, too (Gemma 4).
    """

    embedded: Tensor
    added: Sequence[Tensor] = ()
    ids: Tensor | None = None


class Output(NamedTuple):
    """The last rows of one chunk.

    Attributes:
        logits: [keep, vocabulary].
        states: [keep, width], which the LM head has read: after the final norm.
    """

    logits: Tensor
    states: Tensor


@dataclass
class Chunk:
    """New tokens of one session in a pass.

    Attributes:
        cache: the session's, from ``Backend.new_cache``; its columns before ``start`` are read,
            ``start`` to ``start + k`` are written.
        new: their number, k >= 1.
        positions: of the first token, when the others follow it; or all, [k] or M-RoPE [3, k].
        mask: bool [k, start + k] on the CPU, the columns each token attends to; None is causal.
        keep: the last tokens that are wanted after the last layer: their logits, or, for another
            stage, their states.
        end: first column after the chunk.
        group: key of the chunks that attend together, set by ``Backend.arrange``.
    """

    cache: Any
    start: int
    new: int
    positions: int | Tensor
    mask: Tensor | None
    keep: int
    end: int = field(init=False)
    group: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.end = self.start + self.new


class Backend(Protocol):
    """Runs chunks through the decoder.

    Attributes:
        batches: one pass takes several chunks; else they come one by one.
        session_bytes: of a session beside its columns, as seen in the last pass: recurrent states.
        block: columns by which a cache grows.
        scratch_bytes: that it keeps beside caches and the activations of a pass.
    """

    batches: bool
    session_bytes: int
    block: int

    @property
    def scratch_bytes(self) -> int: ...

    def arrange(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return the numbers of the chunks in the order in which a pass should take them."""

    def new_cache(self, expected: int = 0) -> Cache:
        """Return an empty cache for one session, of ``expected`` columns at most if not 0."""

    def plan(self, chunks: Sequence[Chunk], upload: Upload) -> Any:
        """Make room in the caches, and add the arrays of the pass to ``upload``."""

    def forward(self, plan: Any, rows: Rows, after_layer: AfterLayer | None) -> list[Output]:
        """Run the pass of :meth:`plan` and return each chunk's last rows.

        ``after_layer`` is called after each layer but the last, with the rows of all chunks in
        order; an exception ends the pass. The caches then hold what they held before ``start``.
        """

    def capture(self) -> None:
        """Prepare the passes of usual shapes, in the thread that will run them."""

    def keep_room(self, room: float) -> float:
        """Hold ``room`` more bytes for caches, if they are held in advance; return all of them."""

    def filled(self, keys_values: Tensor) -> Cache:
        """Return a cache that holds columns as ``Cache.parts`` gives them."""

    def close(self) -> None:
        """Leave the model as it was found."""


class LayerLoop(Backend, Protocol):
    """A backend of hand-written layers, which may be some of a model's only (``stage.py``).

    Attributes:
        device, dtype: of hidden states.
    """

    device: torch.device
    dtype: torch.dtype

    def hidden(
        self, plan: Any, rows: Rows, after_layer: AfterLayer | None, /, *, enter: bool = True
    ) -> Tensor:
        """Run the pass of :meth:`plan` and return the states [wanted rows, hidden] after it.

        Args:
            rows: embedded tokens; or, if not ``enter``, the states after an earlier stage's layers.
        """

    def outputs(self, x: Tensor, chunks: Sequence[Chunk]) -> list[Output]:
        """Return each chunk's logits, from the states of the wanted rows, and maybe more."""
