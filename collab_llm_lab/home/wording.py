"""Requests in words: plain, with the words that training shows, or with words held out from it.

``wording.txt`` lists verbs, frames and unknown words, ``robot/words.py`` synonyms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np

from collab_llm_lab import phrasebook
from collab_llm_lab.home.requests import NOTHING, QUESTIONS, SIDES, About, Kind
from collab_llm_nodes.robot.stop_words import STOP_WORDS, asks_to_stop
from collab_llm_nodes.robot.words import KNOWN_TO_THE_PAIR, OTHER_SLIPS, misspellings
from collab_llm_nodes.sim.rooms import COLOURS, NAMED_FURNITURE, SHAPES

_BOOK = phrasebook.read(Path(__file__).with_suffix(".txt"))
_SHOWN, _KEPT, _WORDS = _BOOK["trained"], _BOOK["held-out"], _BOOK["words"]


NAMES = (*COLOURS, *SHAPES, *NAMED_FURNITURE, "thing")
"""Plain words that synonyms and misspellings stand for."""
_COMPOUNDS = _WORDS["compounds"].table
SYNONYMS = {
    word: (*others, *_COMPOUNDS.get(word, ()))
    for word, *others in map(str.split, KNOWN_TO_THE_PAIR)
}
"""Other words for a colour, a shape or furniture. All are trained: no model can guess them."""

ANSWER_WORDS, START_WORDS = _WORDS["answer"].words, _WORDS["start"].words
"""Words of prompts and answers beside the names, and those that a text begins with."""

_ARTICLES = ("the ", "the ", "the ", "a ", "that ", "")
_INDEFINITE = ("a ", "a ", "any ")
_MARKS = ("", "", ".", "!", "?")
_ONSETS = (*_WORDS["onset"].words, "")
_VOWELS = _WORDS["vowel"].words
_CODAS = (*_WORDS["coda"].words, *[""] * 10)
"""Parts of the syllables of made-up words."""
_AFTER_VERB = ("", "", " to", " to", " for", " up to", " over to", " down", " out")
_BETWEEN = ("", "", ",", ".", "!")
_SYNONYM = 0.25
"""Share of the names that are said by a synonym."""
_OPENED = 0.2
"""Share of the questions that begin with an opening."""
_COLOURED = 0.3
"""Share of the unknown things that are said with a colour."""
_THINGS = _SHOWN["thing"].texts
_SIDES = {side: _SHOWN[side].texts for side in SIDES}
_WITHOUT_NAME = (Kind.STOP, Kind.WHAT_DO_YOU_SEE)


def _number(text: str) -> int:
    """Return a number of ``text`` by which a share of all texts is held out."""
    return crc32(text.encode())


def _texts(section: phrasebook.Section) -> Iterator[str]:
    yield from section.texts
    for part in section.sections.values():
        yield from _texts(part)


def _parts(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text)


_NAME_WORDS = [word for text in (*NAMES, *sum(SYNONYMS.values(), ())) for word in _parts(text)]
_WORDS_OF_REQUESTS = {
    *_NAME_WORDS,
    *(w for text in (*_texts(_SHOWN), *_texts(_KEPT), *STOP_WORDS) for w in _parts(text)),
}


def _slips() -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return misspellings of names, synonyms and verbs by the right word: trained, held out.

    None of them is itself a word of any request or stands for two words.
    """
    verbs = [word for text in _SHOWN["verb"].texts for word in _parts(text) if len(word) > 3]
    meant: dict[str, set[str]] = {}
    for word in dict.fromkeys((*_NAME_WORDS, *verbs)):
        for slip in misspellings(word):
            meant.setdefault(slip, set()).add(word)
    for slip, word in OTHER_SLIPS.items():
        meant.setdefault(slip, set()).add(word)
    trained: dict[str, list[str]] = {}
    for slip, words in meant.items():
        if len(words) == 1 and slip not in _WORDS_OF_REQUESTS and not asks_to_stop(slip):
            trained.setdefault(words.pop(), []).append(slip)
    held_out = {}
    for word, slips in trained.items():
        slips.sort(key=_number)
        held_out[word] = tuple(slips.pop() for _ in range(1 + len(slips) // 5))
    return {word: tuple(slips) for word, slips in trained.items() if slips}, held_out


SLIPS, HELD_OUT_SLIPS = _slips()
"""Misspellings by the right word."""


@dataclass(frozen=True)
class Wordings:
    """Words to say requests with."""

    verbs: tuple[str, ...]
    frames: Mapping[Kind, tuple[str, ...]]
    stops: tuple[str, ...]
    nouns: tuple[str, ...]
    """Things that no model can know; ``About.name`` of UNKNOWN requests."""
    plain: bool = False
    """Said without synonyms, misspellings, marks and capitals."""
    combinations: bool = False
    """Only combinations of a frame with synonyms or misspellings that training never shows."""
    slips: float = 0.12
    """Share of the texts with a misspelt word."""
    misspelt: bool = False
    """Always with a misspelling that training never shows."""
    made_up: float = 0.0
    """Share of the requests, and of the unknown things, with words of no language: what training
    never says is none to the model either."""

    def noun(self, rng: np.random.Generator) -> str:
        """Return a thing that no model can know."""
        if not self.made_up or rng.random() >= self.made_up:
            return _chosen(rng, self.nouns)
        word = _made_up(rng)
        return word if rng.random() < 0.5 else f"{word} {_chosen(rng, SHAPES)}"

    def draw(self, rng: np.random.Generator, kind: Kind, about: About = NOTHING) -> str:
        """Return a request in words; equal generators give equal texts."""
        while True:
            frame = _chosen(rng, self.frames[kind])
            text, unusual = self._say(rng, kind, about, frame)
            if kind is Kind.STOP and not asks_to_stop(text):
                continue
            if kind in _WITHOUT_NAME or about.name in HELD_OUT_NOUNS:
                return text  # new frames, stops or nouns suffice
            if self.misspelt:
                fits = bool(unusual) and unusual[-1] in _HELD_OUT_MISSPELT
            else:
                fits = _held_out(frame, unusual) == self.combinations
            if fits:
                return text

    def _say(
        self, rng: np.random.Generator, kind: Kind, about: About, frame: str
    ) -> tuple[str, list[str]]:
        """Return a text and its unusual words: the synonyms, and last the misspelling, if any."""
        verb = _chosen(rng, self.verbs) if "{verb}" in frame else ""
        if self.made_up and rng.random() < self.made_up:
            verb, frame = _with_made_up(rng, verb, frame, kind)
        name = about.name
        if kind is Kind.UNKNOWN and not self.plain and " " not in name and rng.random() < _COLOURED:
            name = f"{_chosen(rng, COLOURS)} {name}"
        if kind is Kind.HOW_MANY and not name.endswith(SHAPES):
            name = f"{name} thing".strip()
        said = {word: self._synonym(rng, word) for word in f"{name} {about.landmark}".split()}
        unusual = [other for word, other in said.items() if other != word]
        if self.misspelt or (not self.plain and rng.random() < self.slips):
            slips = HELD_OUT_SLIPS if self.misspelt else SLIPS
            texts = (verb, *said.values())
            right = [word for text in texts for word in text.split() if word in slips]
            if right:
                word = _chosen(rng, right)
                slip = _chosen(rng, slips[word])
                verb = _replaced(verb, word, slip)
                said = {plain: _replaced(text, word, slip) for plain, text in said.items()}
                unusual.append(slip)
        words = [said[word] for word in name.split()]
        thing = self._thing(rng, words)
        if about.side:
            landmark = self._thing(rng, [said[word] for word in about.landmark.split()])
            side = _chosen(rng, self._of(_SIDES[about.side]))
            thing = f"{thing} {side} {self._article(rng, _ARTICLES, landmark)}"
        text = frame.format(
            verb=verb,
            thing=self._article(rng, _ARTICLES, thing),
            a=self._article(rng, _INDEFINITE, thing),
            things=" ".join((*words[:-1], _plural("".join(words[-1:])))),
            stop=_chosen(rng, self.stops),
        )
        if self.plain:
            return text, unusual
        if kind in QUESTIONS and rng.random() < _OPENED:
            text = f"{_chosen(rng, _SHOWN['opening'].texts)} {text}"
        text += _chosen(rng, _MARKS)
        return (text[0].upper() + text[1:] if rng.random() < 0.5 else text), unusual

    def _of(self, options: Sequence[str]) -> Sequence[str]:
        """Return the options of these wordings: all, or the first for plain ones."""
        return options[:1] if self.plain else options

    def _synonym(self, rng: np.random.Generator, word: str) -> str:
        if self.plain or word not in SYNONYMS or rng.random() >= _SYNONYM:
            return word
        return _chosen(rng, SYNONYMS[word])

    def _thing(self, rng: np.random.Generator, words: Sequence[str]) -> str:
        """Return "red ball" or "ball that is red"."""
        if len(words) < 2:
            return "".join(words)
        colour, shape = words
        return _chosen(rng, self._of(_THINGS)).format(colour=colour, shape=shape)

    def _article(self, rng: np.random.Generator, articles: Sequence[str], thing: str) -> str:
        """Return ``thing`` with an article, or without."""
        article = _chosen(rng, self._of(articles))
        return f"an {thing}" if article == "a " and thing[:1] in tuple("aeiou") else article + thing


def _held_out(frame: str, unusual: Sequence[str]) -> bool:
    """Return True for one combination of a frame with unusual words in eight."""
    words = re.sub(r"[,.:!]", "", frame.replace("{a}", "{thing}"))
    return bool(unusual) and _number("|".join((words, *sorted(unusual)))) % 8 == 0


def _chosen(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def _replaced(text: str, word: str, slip: str) -> str:
    return " ".join(slip if each == word else each for each in text.split())


def _made_up(rng: np.random.Generator) -> str:
    """Return a word that no request has: "sporaki"."""
    while True:
        syllables = (
            _chosen(rng, _ONSETS) + _chosen(rng, _VOWELS) + _chosen(rng, _CODAS)
            for _ in range(rng.integers(1, 3))
        )
        word = "".join(syllables)
        if len(word) > 2 and word not in _NOT_MADE_UP and not asks_to_stop(word):
            return word


def _with_made_up(rng: np.random.Generator, verb: str, frame: str, kind: Kind) -> tuple[str, str]:
    """Return a verb and a frame with made-up words where the meaning bears them."""
    place = rng.random()
    words = [word for word in frame.split() if word.isalpha()]
    if verb and place < 0.4:
        return f"{_made_up(rng)}{_chosen(rng, _AFTER_VERB)}", frame
    if kind is Kind.GO and words and place < 0.7:
        return verb, _replaced(frame, _chosen(rng, words), _made_up(rng))
    phrase = " ".join(_made_up(rng) for _ in range(rng.integers(1, 4)))
    if kind not in (Kind.GO, Kind.UNKNOWN) or place < 0.85:
        return verb, f"{phrase}{_chosen(rng, _BETWEEN)} {frame}"
    return verb, f"{frame}{_chosen(rng, _BETWEEN)} {phrase}"


def _plural(word: str) -> str:
    return f"{word}es" if word.endswith(("x", "s", "ch", "sh")) else f"{word}s"


def _frames(part: phrasebook.Section) -> dict[Kind, tuple[str, ...]]:
    """Return the frames of a part of the file by kind; unknown things have those of known ones."""
    frames = {kind: part[kind.value].texts for kind in Kind if kind is not Kind.UNKNOWN}
    return frames | {Kind.UNKNOWN: frames[Kind.GO] + frames[Kind.IS_THERE]}


def _with_verb(frames: Sequence[str]) -> tuple[str, ...]:
    return tuple(frame for frame in frames if "{verb}" in frame)


def _nouns(part: phrasebook.Section) -> tuple[str, ...]:
    """Return the unknown things of a part: nouns, and known shapes in unknown colours."""
    colours = part["unknown colour"].words
    return part["unknown"].words + tuple(
        f"{colour} {shape}" for colour in colours for shape in SHAPES
    )


NOUNS, HELD_OUT_NOUNS = _nouns(_SHOWN), _nouns(_KEPT)
"""Things that no model can know; names of UNKNOWN requests."""
_HELD_OUT_MISSPELT = {slip for slips in HELD_OUT_SLIPS.values() for slip in slips}
_NOT_MADE_UP = _WORDS_OF_REQUESTS.union(_HELD_OUT_MISSPELT, *SLIPS.values())
_ASCII_STOPS = [" ".join(phrase.split()) for phrase in STOP_WORDS if phrase.isascii()]
_STOPS = tuple(phrase for phrase in _ASCII_STOPS if _number(phrase) % 6)
_HELD_OUT_STOPS = tuple(phrase for phrase in _ASCII_STOPS if not _number(phrase) % 6)
_VERBS, _HELD_OUT_VERBS = _SHOWN["verb"].texts, _KEPT["verb"].texts
_FRAMES, _HELD_OUT_FRAMES = _frames(_SHOWN), _frames(_KEPT)
_NAMELESS = {kind: _HELD_OUT_FRAMES[kind] for kind in _WITHOUT_NAME}

PLAIN = Wordings(
    _VERBS[:1],
    {kind: frames[:1] for kind, frames in _FRAMES.items()}
    | {Kind.DO_NOT: ("do not go to {thing}",)},
    _STOPS[:1],
    NOUNS,
    plain=True,
)
"""One wording for each request."""
TRAINED = Wordings(_VERBS, _FRAMES, _STOPS, NOUNS)
"""Requests as people say them; ``PLAIN`` has the plain words beside."""
LEARNT = replace(TRAINED, slips=0.4, made_up=0.3)
"""The wordings of the training: ``TRAINED`` with more of what no list can hold."""
HELD_OUT = {
    "verb": Wordings(
        _HELD_OUT_VERBS,
        {kind: _with_verb(_FRAMES[kind]) or _HELD_OUT_FRAMES[kind] for kind in Kind},
        _HELD_OUT_STOPS,
        HELD_OUT_NOUNS,
    ),
    "frame": Wordings(_VERBS, _HELD_OUT_FRAMES, _HELD_OUT_STOPS, HELD_OUT_NOUNS),
    "combination": Wordings(
        _VERBS, _FRAMES | _NAMELESS, _HELD_OUT_STOPS, HELD_OUT_NOUNS, combinations=True
    ),
    "misspelling": Wordings(
        _VERBS, _FRAMES | _NAMELESS, _HELD_OUT_STOPS, HELD_OUT_NOUNS, misspelt=True
    ),
}
"""Wordings that training never shows, by what is new about them.

Unknown things and words for stop are new in all of them. A kind without a verb has new frames
instead, one without a name too.
"""


def plain(kind: Kind, about: About = NOTHING) -> str:
    """Return the plain wording: ``"find the red ball"``."""
    return PLAIN.draw(np.random.default_rng(0), kind, about)
