"""Self-drafting (paper 004, section V-A): proposals for the next tokens without another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow the newest one.

    Attributes:
        tokens: a chain, or the nodes of a tree.
        parents: for a tree, the place of each token's parent, from 1; 0 is the newest token of the
            answer. Empty: the tokens follow one another.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def cut(self, most: int) -> Draft:
        """Return its first ``most`` tokens."""
        return Draft(self.tokens[:most], self.parents[:most])


class Drafter(Protocol):
    """A source of drafts; deterministic."""

    @property
    def guesses(self) -> int:
        """Number of tokens needed per Medusa head."""

    def propose(self, tokens: Sequence[int], guesses: Sequence[int], most: int) -> Draft:
        """Return a draft of at most ``most`` tokens.

        Args:
            tokens: prompt and answer so far.
            guesses: of each Medusa head in turn, the best first; may be empty.
        """


@dataclass(frozen=True)
class NoDrafter:
    """No drafts: one token per pass."""

    guesses: int = 0

    def propose(self, tokens: Sequence[int], guesses: Sequence[int], most: int) -> Draft:
        return Draft()


@dataclass(frozen=True)
class MedusaChain:
    """The best token of each Medusa head, one after another."""

    guesses: int = 1

    def propose(self, tokens: Sequence[int], guesses: Sequence[int], most: int) -> Draft:
        return Draft(tuple(guesses)).cut(most)


@dataclass(frozen=True)
class MedusaTree:
    """The likeliest combinations of the heads' best tokens.

    A node is a path of ranks, one per head: the smaller they are, the likelier it is.

    Attributes:
        guesses: number of tokens per head.
        nodes: number of tokens in a draft.
    """

    guesses: int = 3
    nodes: int = 16

    def propose(self, tokens: Sequence[int], guesses: Sequence[int], most: int) -> Draft:
        heads = len(guesses) // self.guesses
        ranks = range(self.guesses)
        paths = [path for depth in range(1, heads + 1) for path in product(ranks, repeat=depth)]
        # With this key a node follows its parent, whose sum and length are smaller.
        paths = sorted(paths, key=lambda path: (2 * sum(path) + len(path), path))
        paths = paths[: min(self.nodes, most)]
        places = {path: i + 1 for i, path in enumerate(paths)}
        return Draft(
            tuple(guesses[(len(path) - 1) * self.guesses + path[-1]] for path in paths),
            tuple(places.get(path[:-1], 0) for path in paths),
        )


@dataclass(frozen=True)
class PromptLookup:
    """The tokens that followed the last occurrence of the newest ones.

    Attributes:
        length: of a draft.
        longest: length of the longest match; shorter ones are tried after longer ones.
    """

    length: int = 5
    longest: int = 3
    guesses: int = 0

    def propose(self, tokens: Sequence[int], guesses: Sequence[int], most: int) -> Draft:
        known = list(tokens)
        for size in range(min(self.longest, len(known) - 1), 0, -1):
            wanted = known[-size:]
            for at in range(len(known) - size - 1, -1, -1):
                if known[at : at + size] == wanted:
                    follows = known[at + size : at + size + min(self.length, most)]
                    return Draft(tuple(follows))
        return Draft()


DRAFTERS: dict[str, Drafter] = {
    "medusa": MedusaChain(),
    "medusa_tree": MedusaTree(),
    "prompt_lookup": PromptLookup(),
    "none": NoDrafter(),
}
