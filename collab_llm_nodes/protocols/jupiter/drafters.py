"""Self-drafting (paper 004, section V-A): what may come next, without another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow the newest one.

    Attributes:
        tokens: a chain, or a tree.
        parents: for a tree: of each token the place of the one that it follows, counted from 1; 0
            is the newest token of the answer. Empty: they follow one another.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def cut(self, most: int) -> Draft:
        """Return its first ``most`` tokens."""
        return Draft(self.tokens[:most], self.parents[:most])


class Drafter(Protocol):
    """Proposes drafts; its answers are the same for the same arguments."""

    @property
    def guesses(self) -> int:
        """Tokens that it wants of each Medusa head."""

    def propose(self, tokens: Sequence[int], guesses: Sequence[int], most: int) -> Draft:
        """Return ``most`` tokens at most.

        Args:
            tokens: prompt and answer.
            guesses: of each Medusa head in turn, the best first; may be empty.
        """


@dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing: one token per pass."""

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
    """Combinations of the heads' best tokens: for so many nodes, those of the smallest ranks.

    A node is one rank for each head before it; it is the more likely, the smaller they are.

    Attributes:
        guesses: tokens taken of each head.
        nodes: tokens of a draft.
    """

    guesses: int = 3
    nodes: int = 16

    def propose(self, tokens: Sequence[int], guesses: Sequence[int], most: int) -> Draft:
        heads = len(guesses) // self.guesses
        ranks = range(self.guesses)
        paths = [path for depth in range(1, heads + 1) for path in product(ranks, repeat=depth)]
        # By this key a node comes behind its parent, whose sum and length are smaller.
        paths = sorted(paths, key=lambda path: (2 * sum(path) + len(path), path))
        paths = paths[: min(self.nodes, most)]
        places = {path: i + 1 for i, path in enumerate(paths)}
        return Draft(
            tuple(guesses[(len(path) - 1) * self.guesses + path[-1]] for path in paths),
            tuple(places.get(path[:-1], 0) for path in paths),
        )


@dataclass(frozen=True)
class PromptLookup:
    """Proposes the tokens that followed the last occurrence of the newest ones.

    Attributes:
        length: of a draft.
        longest: tokens that must have occurred before; shorter matches are tried after longer ones.
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


DRAFTERS = ("medusa", "medusa_tree", "prompt_lookup", "none")


def drafter_named(name: str) -> Drafter:
    """Return the drafter of this name, one of ``DRAFTERS``."""
    made: dict[str, Drafter] = {
        "medusa": MedusaChain(),
        "medusa_tree": MedusaTree(),
        "prompt_lookup": PromptLookup(),
        "none": NoDrafter(),
    }
    return made[name]
