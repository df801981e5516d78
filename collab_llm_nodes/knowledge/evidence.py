"""The evidence that a sentence answers a question: a small logistic over words and meaning.

    To what torque is the wheel nut tightened?      words that matter: torque, wheel, nut, tighten
    Tighten the wheel nuts to 210 Nm.               covers three of the four, "wheel nut" in order
    On day 4 transformer T7 reached 71 degrees.     for "... on day 5": a 4 where 5 is asked for

No part of it depends on the other documents, so two sides may compare their results. A word counts
by its rarity in English, not in the store: a store of three documents says nothing about which
words are rare. ``common_words.txt`` has the most frequent words in their order, as the vocabulary
of BERT has them (Apache-2.0).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

import yaml

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.config import from_mapping, setting
from collab_llm_nodes.errors import ConfigError, translate_errors
from collab_llm_nodes.knowledge.words import words

_MATTERLESS = 100
"""English's most frequent words, which tell nothing about what a question asks for."""
_GRAMMAR = frozenset(
    {"any", "does", "how", "much", "must", "should", "whom", "whose", "why"}
    | {"a", "d", "i", "ll", "m", "re", "s", "t", "ve"}  # "I", and what is left of "I'll"
)
"""Words of questions that tell as little, though they are less frequent."""
_UNKNOWN = 12_000
"""Rank of the words that are not in the list; numbers are among them."""
_ENDINGS = ("ing", "ed", "es", "s", "ly", "er")
_LEAST_STEM = 3
_NEAR = 2
"""Words of a pair stand at most this far apart in a sentence that keeps the pair."""
_LEAD, _TOPIC = 6, 1.0
"""Words at the begin of a sentence, numbers aside, and the rarity of one that is its topic."""
_KINDS = frozenset({"which", "what", "when"})
"""Words that ask for a value: a number, a name, an expression of the domain."""
_AUXILIARIES = frozenset(
    {"am", "are", "can", "come", "could", "did", "do", "does", "has", "have", "is", "may", "might"}
    | {"must", "shall", "should", "to", "was", "were", "will", "would"}
)
"""After them "how" asks for a manner ("how do I ..."), otherwise for a number ("how often")."""
_NUMBERS = frozenset(
    {"one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"}
    | {"twelve", "fifteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty"}
    | {"ninety", "hundred", "thousand", "half", "once", "twice"}
)
_LEAST_WORDS = 4
"""Words of a whole sentence; a shorter one is a heading or an item of a list."""


@dataclass(frozen=True)
class Features:
    """Features of a sentence. Rarity is the log of a word's rank, 0 for the commonest words.

    Attributes:
        coverage: share of the question's words, by rarity, that the sentence has.
        pairs: share of the question's neighbouring words, by rarity, that are neighbours in it.
        covered: rarity of all words covered.
        conflict: share of the question's words in whose place it has others ("day 4" for "day 5").
        leading: 1 if one of its first words is among the question's; then the sentence is about it.
        whole: 1 for a sentence, 0 for a heading, another fragment, or a question.
        similarity: product of the encoder's vectors of question and sentence; 0 without any.
    """

    coverage: float
    pairs: float
    covered: float
    conflict: float
    leading: float
    whole: float
    similarity: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Weights of the features, found on questions with known answers (``train evidence``)."""

    intercept: float = setting(0.0, "Log-odds of a sentence without any evidence.")
    coverage: float = setting(0.0, "As the other weights: log-odds for one unit of the feature.")
    pairs: float = setting(0.0, "See above.")
    covered: float = setting(0.0, "See above.")
    conflict: float = setting(0.0, "See above.")
    leading: float = setting(0.0, "See above.")
    whole: float = setting(0.0, "See above.")
    similarity: float = setting(0.0, "See above. 0: no encoder is asked.")

    def probability(self, features: Features) -> float:
        """Return the probability that a sentence with these features answers."""
        weights = asdict(self)
        found = asdict(features)
        log_odds = self.intercept + sum(weights[name] * value for name, value in found.items())
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, log_odds))))


def load_calibration(file: str) -> Calibration:
    """Return the calibration in a file, or in a shipped one of this name.

    Raises:
        ConfigError: no such file, or it holds something else.
    """
    path = Path(file).expanduser()
    path = path if path.is_file() else config_file(file)
    with translate_errors(
        ConfigError, f"cannot read {path}", field="evidence.calibration", remedy="give YAML"
    ):
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    return from_mapping(Calibration, found)


class Asked:
    """A question, to be compared with sentences."""

    def __init__(self, question: str) -> None:
        self._stems = stems(question)
        self._rarity = {stem: rarity(stem) for stem in self._stems}
        self._total = sum(self._rarity.values())
        self._pairs = [*pairwise(stem for stem in self._stems if self._rarity[stem])]
        asked = words(question)
        self._asks_number = any(a == "how" and b not in _AUXILIARIES for a, b in pairwise(asked))
        self._asks_value = self._asks_number or not _KINDS.isdisjoint(asked)
        adjacent = pairwise(self._stems)
        self._adjacent = [(a, b) for a, b in adjacent if self._rarity[a] and self._rarity[b]]

    def features(self, sentence: str, similarity: float = 0.0) -> Features:
        """Return the features of ``sentence``."""
        read = stems(sentence)
        there = set(read)
        coverage = self._coverage(there)
        lead = [stem for stem in read if not stem.isdigit()][:_LEAD]
        return Features(
            coverage=coverage,
            pairs=self._kept_pairs(read),
            covered=self._total * coverage,
            conflict=self._conflict(read, there),
            leading=float(any(self._rarity.get(stem, 0.0) > _TOPIC for stem in lead)),
            whole=float(is_whole(sentence)),
            similarity=similarity,
        )

    def lacks_value(self, sentence: str) -> bool:
        """Return True if the question asks for a value and ``sentence`` has none.

        "Set the port to listen on." has no answer to "Which port?". A value is a number or, unless
        the question is "how many", a word rarer than English's common ones; it is not a word of the
        question.
        """
        if not self._asks_value:
            return False
        new = [word for word in words(sentence) if stem_of(word) not in self._rarity]
        return not any(
            word in _NUMBERS
            or not word.isalpha()
            or (not self._asks_number and rarity(stem_of(word)) >= rarity(""))
            for word in new
        )

    def _coverage(self, there: set[str]) -> float:
        covered = sum(weight for stem, weight in self._rarity.items() if stem in there)
        return covered / self._total if self._total else 0.0

    def _kept_pairs(self, read: Sequence[str]) -> float:
        if not self._pairs:
            return self._coverage(set(read))
        near = {(a, b) for n, a in enumerate(read) for b in read[n + 1 : n + 1 + _NEAR]}
        kept = sum(self._weight(pair) for pair in self._pairs if pair in near)
        return kept / sum(map(self._weight, self._pairs))

    def _conflict(self, read: Sequence[str], there: set[str]) -> float:
        before, after = set[str](), set[str]()  # words with another one that matters beside them
        for a, b in pairwise(read):
            before |= {b} if rarity(a) else set()
            after |= {a} if rarity(b) else set()
        found = 0.0
        for a, b in self._adjacent:
            found += self._rarity[a] if a not in there and b in before else 0.0
            found += self._rarity[b] if b not in there and a in after else 0.0
        return found / self._total if self._total else 0.0

    def _weight(self, pair: Iterable[str]) -> float:
        return sum(self._rarity[stem] for stem in pair)


def is_whole(sentence: str) -> bool:
    """Return False for headings and other fragments, and for questions, which answer nothing."""
    ends = sentence.rstrip("\"')]\N{RIGHT DOUBLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK} ")
    return ends.endswith((".", "!")) and len(words(sentence)) >= _LEAST_WORDS


def rarity(stem: str) -> float:
    """Return the log of a stem's rank in English, 0 for the hundred most frequent words."""
    return max(0.0, math.log(_ranks().get(stem, _UNKNOWN) / _MATTERLESS))


def stems(text: str) -> list[str]:
    """Return the words of ``text`` without regular endings of English."""
    return [stem_of(word) for word in words(text)]


@lru_cache(maxsize=65_536)
def stem_of(word: str) -> str:
    """Return what a word in lower case and its regular forms have in common."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _LEAST_STEM:
            word = word if word.endswith("ss") else word[: -len(ending)]
            break
    if len(word) > _LEAST_STEM and word[-1] == word[-2] and word[-1] not in "ls":
        word = word[:-1]  # stopped, stop
    if len(word) > _LEAST_STEM and word[-1] == "e":
        word = word[:-1]
    return f"{word[:-1]}y" if len(word) > _LEAST_STEM and word[-1] == "i" else word


@cache
def _ranks() -> dict[str, int]:
    listed = Path(__file__).with_name("common_words.txt").read_text(encoding="utf-8").split()
    found: dict[str, int] = {}
    for rank, word in enumerate(listed, 1):
        found.setdefault(stem_of(word), rank)
    return found | {stem_of(word): 1 for word in _GRAMMAR}
