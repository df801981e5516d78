"""Caches of transformers as ``backend.Cache``: keys and values, and recurrent states as well."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import DynamicCache

from collab_llm_nodes.errors import ModelError

_SPACING = 4
"""Fewest columns between two snapshots; reading so few again costs a pass little."""
_SNAPSHOTS = 4
"""Latest snapshots that are kept: they reach back 16 columns or more."""


@dataclass
class EagerCache:
    """Keys and values of all columns.

    Attributes:
        held: its tensors are never written to, so forks share them until they are fed.
        pinned: the first columns, which a prompt's pictures take; they are never cut.
    """

    held: DynamicCache
    pinned: int = 0
    shared_bytes = 0

    @property
    def own_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._filled())

    @property
    def state_bytes(self) -> int:
        """Bytes that it holds whatever the number of columns."""
        return 0

    def begin(self, embedded: Tensor) -> Tensor:
        """Return the embedded tokens [rows, hidden_size] that the model reads for the new ones."""
        return embedded

    def move(self, kept: Sequence[int]) -> None:
        self._pick(torch.tensor(kept))

    def cut(self, columns: int) -> None:
        self._pick(slice(max(columns, self.pinned)))

    def fork(self, columns: int, used: int) -> EagerCache:
        twin = copy.copy(self)
        twin.held = copy.copy(self.held)
        twin.held.layers = [copy.copy(layer) for layer in self.held.layers]
        twin.cut(columns)
        return twin

    def parts(self, columns: int) -> list[Tensor]:
        both = [torch.cat((layer.keys[0], layer.values[0])) for layer in self._filled()]
        return [torch.stack(both)[:, :, :columns]] if both else []

    def _filled(self) -> list[Any]:
        """Return the layers that hold keys and values."""
        return [layer for layer in self.held.layers if getattr(layer, "keys", None) is not None]

    def _pick(self, columns: Tensor | slice) -> None:
        for layer in self._filled():
            layer.keys = layer.keys[..., columns, :]
            layer.values = layer.values[..., columns, :]


class Snapshot(NamedTuple):
    """Recurrent states, by layer, after the first ``columns`` tokens."""

    columns: int
    states: list[dict[str, Any]]


class RecurrentCache(EagerCache):
    """Keys, values and recurrent states; a rollback restores the states from a snapshot.

    Keys and values can be cut to any length, but a state has taken in every token. So snapshots of
    the states are made at the beginning of passes, and the embedded tokens are kept. A rollback
    restores the last snapshot before it. The next pass reads the tokens after it again, before its
    own::

        columns      0 ........ 39   40 ... 44   45 ... 49     three passes
        snapshots    ^               ^           ^
        length = 43                  restored: 40, 41 and 42 are read again

    The first two snapshots, mostly before and after the prompt, and the last ones are kept.

    Args:
        config: of the model.
        like: embedded tokens [0, hidden_size].
    """

    def __init__(self, config: Any, like: Tensor) -> None:
        super().__init__(DynamicCache(config=config))
        self._fed = like
        self._snapshots: tuple[Snapshot, ...] = (Snapshot(0, self._states()),)

    @property
    def own_bytes(self) -> int:
        return super().own_bytes + self._fed.nbytes + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states and of as many snapshots as are kept at most."""
        states = [each for layer in self._states() for each in layer.values()]
        tensors = [t for each in states for t in each.values() if isinstance(t, Tensor)]
        return (2 + _SNAPSHOTS) * sum(tensor.nbytes for tensor in tensors)

    def begin(self, embedded: Tensor) -> Tensor:
        read = self._read
        if read >= self._snapshots[-1].columns + _SPACING:
            taken = (*self._snapshots, Snapshot(read, self._states()))
            self._snapshots = (*taken[:2], *taken[2:][-_SNAPSHOTS:])
        self._fed = torch.cat((self._fed, embedded))
        return self._fed[read:]

    def move(self, kept: Sequence[int]) -> None:
        self.cut(len(kept))  # there are no trees, so the first ones are kept

    def cut(self, columns: int) -> None:
        self._fed = self._fed[:columns]
        if columns >= self._read:
            return
        self._snapshots = tuple(each for each in self._snapshots if each.columns <= columns)
        last = self._snapshots[-1]
        for layer, states in zip(self.held.layers, last.states, strict=True):
            vars(layer).update(states)
        self._pick(slice(last.columns))

    def parts(self, columns: int) -> list[Tensor]:
        refuse_saving()

    @property
    def _read(self) -> int:
        """Columns that the states have seen."""
        return self.held.get_seq_length()

    def _states(self) -> list[dict[str, Any]]:
        """Return the attributes of each layer that hold states, and facts about them."""
        return [
            {name: value for name, value in vars(layer).items() if isinstance(value, dict)}
            for layer in self.held.layers
        ]


def writable(layer: Any) -> Any:
    """Return a copy of a cache's layer whose recurrent states may be written in place."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            copied = {k: t.clone() if isinstance(t, Tensor) else t for k, t in value.items()}
            setattr(twin, name, copied)
    return twin


def refuse_saving() -> NoReturn:
    """Raise the error for a session with recurrent states that should be saved.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        "sessions of a model with recurrent states are not saved",
        field="path",
        remedy="feed the prompt again, or take a model with attention in all layers",
    )
