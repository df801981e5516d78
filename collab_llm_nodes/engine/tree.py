"""The order of the columns of a KV cache: a trunk, and nodes that branch off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from collab_llm_nodes.errors import InvalidInput, ProtocolError

Mask = npt.NDArray[np.bool_]


class TokenTree:
    """Columns 0..length-1 are the trunk, a chain; those after it are nodes, each with a parent.

    A column sees itself and its ancestors. Columns are numbered in the order they were added, so a
    parent comes before its children.

    Attributes:
        length: columns of the trunk.
    """

    def __init__(self) -> None:
        self.length = 0
        self._parents: list[int] = []  # of the nodes
        self._seen: list[Mask] = []  # of the nodes: [column + 1], the columns each attends to
        self._positions: list[int] = []  # of the nodes
        self._depths: list[int] = []  # of the nodes: lengths of their paths

    @property
    def columns(self) -> int:
        """Trunk and nodes."""
        return self.length + len(self._parents)

    def is_chain(self, parents: Sequence[int] = ()) -> bool:
        """Return True if the nodes, and new ones with ``parents``, continue the trunk in a row."""
        chain = [*self._parents, *parents]
        return chain == list(range(self.length - 1, self.length - 1 + len(chain)))

    def cut(self, length: int) -> None:
        """Drop all nodes and set the trunk's length, which may also grow."""
        self.length = length
        if self._parents:
            self._parents, self._seen, self._positions, self._depths = [], [], [], []

    def check(self, parents: Sequence[int]) -> None:
        """Refuse parents that are no earlier column.

        Raises:
            InvalidInput: naming the first bad one.
        """
        columns = self.columns
        for i, parent in enumerate(parents):
            column = columns + i
            if not 0 <= parent < column:
                raise InvalidInput(
                    f"column {parent} is not before column {column}",
                    field=f"parents[{i}]",
                    remedy="a node follows a column of the trunk or an earlier node",
                )

    def depths(self, parents: Sequence[int]) -> list[int]:
        """Return the lengths of the paths to nodes that would follow (checked) parents."""
        return self._one_more(parents, self._depths, lambda column: column + 1)

    def positions(self, parents: Sequence[int], of_trunk: Callable[[int], int]) -> list[int]:
        """Return the positions of nodes that would follow (checked) parents, one after each.

        Args:
            of_trunk: gives the position of a column of the trunk.
        """
        return self._one_more(parents, self._positions, of_trunk)

    def _one_more(
        self, parents: Sequence[int], of_nodes: Sequence[int], of_trunk: Callable[[int], int]
    ) -> list[int]:
        """Return for each node that would follow a parent one more than its parent has."""
        length, columns, found = self.length, self.columns, list[int]()
        for parent in parents:
            if parent < length:
                found.append(of_trunk(parent) + 1)
            elif parent < columns:
                found.append(of_nodes[parent - length] + 1)
            else:
                found.append(found[parent - columns] + 1)
        return found

    def grow(self, parents: Sequence[int], positions: Sequence[int]) -> Mask:
        """Append one node per (checked) parent; ``positions`` are kept for their children.

        Returns:
            [n, columns]: the columns each new node attends to.
        """
        first = self.columns
        self._depths += self.depths(parents)
        mask = np.zeros((len(parents), first + len(parents)), dtype=np.bool_)
        for i, (row, parent) in enumerate(zip(mask, parents, strict=True)):
            row[: parent + 1] = parent < self.length or self._seen[parent - self.length]
            row[first + i] = True
            self._seen.append(row[: first + i + 1])
        self._parents += parents
        self._positions += positions
        return mask

    def shrink(self, columns: int) -> None:
        """Take back the nodes from column ``columns`` on."""
        count = columns - self.length
        for kept in (self._parents, self._seen, self._positions, self._depths):
            del kept[count:]

    def seen(self, column: int) -> Mask:
        """Return [column + 1], true for the column itself and its ancestors."""
        if column < self.length:
            return np.ones(column + 1, dtype=np.bool_)
        return self._seen[column - self.length]

    def position(self, node: int) -> int:
        """Return the position that ``grow`` was given for a node."""
        return self._positions[node - self.length]

    def path(self, column: int) -> list[int]:
        """Return the columns from the root to ``column``.

        Raises:
            ProtocolError: there is no such column.
        """
        if not 0 <= column < self.columns:
            raise ProtocolError(f"no column {column} of {self.columns}", field="column")
        found: list[int] = self.seen(column).nonzero()[0].tolist()
        return found

    def retain(self, column: int, trunk_positions: Sequence[int]) -> list[int]:
        """Make the path to ``column`` the trunk, keep its descendants as nodes, drop the rest.

        Args:
            trunk_positions: of the trunk's columns after ``column``, which become nodes.

        Returns:
            The old columns that are kept, in their new order.
        """
        trunk = self.path(column)
        later = [c for c in range(column + 1, self.columns) if self.seen(c)[column]]
        kept = trunk + later
        new = {old: i for i, old in enumerate(kept)}
        positions = [
            self.position(c) if c >= self.length else trunk_positions[c - column - 1] for c in later
        ]
        parents = [
            new[self._parents[c - self.length]] if c >= self.length else new[c - 1] for c in later
        ]
        self.cut(len(trunk))
        self.grow(parents, positions)
        return kept
