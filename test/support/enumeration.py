"""Exact laws of random programs by enumeration: every branch, with its probability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from collab_llm_nodes.decoding.sampling import Distribution

EOS = 0


def rows_of(p: Iterable[np.ndarray]) -> list[Distribution]:
    """Return the distributions with the probabilities ``p`` [n, V]."""
    return [Distribution.from_dense(row) for row in p]


def dense(laws: Iterable[Distribution]) -> np.ndarray:
    """Return the probabilities [n, V] of distributions."""
    rows = []
    for law in laws:
        rows.append(np.zeros(law.size))
        rows[-1][law.ids] = law.probs
    return np.stack(rows)


class Branch(Exception):
    """The script has ended: these are the choices, with their probabilities."""

    def __init__(self, choices: list[tuple[object, float]]) -> None:
        self.choices = choices


class Scripted:
    """Draws that follow a script of choices and ask for branching where it ends."""

    def __init__(self, script: tuple[object, ...]) -> None:
        self.left = iter(script)

    def _choose(self, choices: list[tuple[object, float]]) -> object:
        try:
            return next(self.left)
        except StopIteration:
            raise Branch([c for c in choices if c[1] > 0]) from None

    def accept(self, probability: float, position: int, purpose: str) -> bool:
        yes = min(1.0, probability)
        return bool(self._choose([(True, yes), (False, 1.0 - yes)]))

    def pick(self, p: Distribution, position: int, purpose: str) -> int:
        choices = zip(p.ids.tolist(), p.probs / p.probs.sum(), strict=True)
        return int(self._choose(list(choices)))  # type: ignore[call-overload]


def enumerate_program(program: Callable[[Scripted], object]) -> Iterator[tuple[float, object]]:
    """Yield (probability, result) of every branch of ``program``."""
    stack: list[tuple[float, tuple[object, ...]]] = [(1.0, ())]
    while stack:
        weight, script = stack.pop()
        try:
            result = program(Scripted(script))
        except Branch as branch:
            stack += [(weight * w, (*script, choice)) for choice, w in branch.choices]
        else:
            yield weight, result


class TableModel:
    """A random conditional distribution for every prefix; some entries are exactly 0."""

    def __init__(self, vocab: int, seed: int, sharpness: float = 1.5) -> None:
        self.vocab, self.seed, self.sharpness = vocab, seed, sharpness
        self.rows: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in self.rows:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            p = np.exp(self.sharpness * rng.normal(size=self.vocab))
            p[rng.integers(self.vocab)] *= rng.integers(2)
            self.rows[prefix] = p / p.sum()
        return self.rows[prefix]


def autoregressive_law(
    target: Callable[[tuple[int, ...]], np.ndarray], length: int, prefix: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """Law of the continuation of ``prefix`` to ``length`` tokens; EOS ends early."""
    if len(prefix) == length or EOS in prefix:
        return {prefix: 1.0}
    law: dict[tuple[int, ...], float] = {}
    for token, p in enumerate(target(prefix)):
        for tail, weight in autoregressive_law(target, length, (*prefix, token)).items():
            law[tail] = law.get(tail, 0.0) + p * weight
    return law


def total_variation(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    return 0.5 * sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys())
