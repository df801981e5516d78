"""Instructions that ask to stop. No model is asked about them: they cancel, at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from unicodedata import category, normalize

from collab_llm_nodes.errors import ConfigError

_VERBS = (
    *("move", "go", "turn", "drive", "walk", "run", "rotate", "spin", "roll"),
    *("proceed", "continue", "advance", "navigate", "follow", "look", "search"),
)
_DOING = (
    *("moving", "going", "turning", "driving", "walking", "running", "rotating", "spinning"),
    *("rolling", "proceeding", "continuing", "advancing", "navigating", "following", "looking"),
    *("searching",),
)
_SWITCHING_OFF = tuple(
    f"{verb} {what} {way}"
    for verb, way in (
        *(("turn", "off"), ("switch", "off"), ("shut", "off"), ("shut", "down")),
        *(("power", "off"), ("power", "down")),
    )
    for what in ("", "it", "it all", "yourself", "everything", "the robot", "the system")
    + ("the power", "power", "the engine", "the motor", "the motors", "all motors", "motors")
)
STOP_WORDS = (
    *("stop", "emergency stop", "emergency", "e-stop", "estop", "brake", "cease", "quit", "end"),
    *("halt", "freeze", "wait", "pause", "cancel", "abort", "hold", "hold on", "whoa", "enough"),
    *("stand still", "hold still", "keep still", "be still", "stay", "stay put", "do nothing"),
    *("come to a stop", "come to a halt", "stand down", "shutdown", "deactivate", "off"),
    *_SWITCHING_OFF,
    *(f"stop {doing}" for doing in _DOING),
    *(f"{no} {verb}" for no in ("don't", "don't you", "do not", "not", "never") for verb in _VERBS),
    *("stopp", "anhalten", "halt an", "stehen bleiben", "bleib stehen", "warte"),  # German
    *("nicht bewegen", "nicht fahren"),
    *("arrête", "arrêtez", "arrête toi", "arrêtez vous", "attends", "ne bouge pas"),  # French
    *("para", "alto", "detente", "espera", "no te muevas"),  # Spanish
    *("ferma", "fermo", "fermati", "aspetta", "non muoverti"),  # Italian
    *("pare", "parar", "não se mexa"),  # Portuguese
    *("стоп", "стой", "не двигайся"),  # Russian
    *("停", "停止", "停下", "别动", "不要动"),  # Chinese
    *("止まれ", "止まって", "ストップ", "動くな", "멈춰", "정지"),  # Japanese, Korean
)
"""Phrases that mean "stop", in any case, with any punctuation, with or without accents."""

_BESIDE_IT = """
    please now immediately instantly at once right away quickly already completely robot hey ok okay
    no and or else here there it that thats this the an a its is everything all
    thanks thank you your very much lot could can would will just must should have to i id me want
    need like said say so told do we lets us until time oh dead whatever current
    what where are youre doing
    forward forwards back backward backwards left around about further any
    mission task goal job trip navigation motion movement position place motor
    motors wheel wheels engine engines power yourself system
    in for while bit one two three four five six seven eight nine ten
    moment second seconds sec minute minutes min s
    bitte sofort svp por favor
"""
"""Words that change nothing about it: "could you please stop right now, robot"."""

_MOTIONS = frozenset((*_VERBS, *_DOING))
_BESIDE = frozenset((*_BESIDE_IT.split(), *_DOING))
_APOSTROPHES = "'`\N{RIGHT SINGLE QUOTATION MARK}"
_SIGNS = dict.fromkeys(map(ord, "\N{OCTAGONAL SIGN}\N{NO ENTRY}\N{RAISED HAND}"), " stop ")


def asks_to_stop(instruction: str, stop_words: Sequence[str] = STOP_WORDS) -> bool:
    """Return True if ``instruction`` says nothing but stop, or forbids a motion first.

    "Go to the bus stop" and "stop at the door" say more. Whatever follows "stop driving" or "do not
    go" does not matter: a model that is asked about "do not go to the door" goes there.
    """
    phrases = _known(tuple(stop_words))
    words = _words(instruction)
    longest = max(map(len, phrases))
    asked, at = False, 0
    while at < len(words):
        ahead = words[at : at + longest]
        found = next((n for n in range(len(ahead), 0, -1) if tuple(ahead[:n]) in phrases), 0)
        if found > 1 and words[at + found - 1] in _MOTIONS:
            return True
        if not found and words[at] not in _BESIDE and not words[at][0].isdigit():
            return False
        asked |= found > 0
        at += found or 1
    return asked


def check_stop_words(stop_words: Sequence[str]) -> None:
    """Raise ConfigError for what would take no instruction, or every one, for a stop."""
    if not stop_words:
        raise ConfigError("no words", field="stop_words", remedy="at least one, such as 'stop'")
    for phrase in stop_words:
        if not set(_words(phrase)) - _BESIDE:
            raise ConfigError(
                f"{phrase!r} is no phrase", field="stop_words", remedy="words that ask to stop"
            )


@lru_cache(maxsize=16)
def _known(stop_words: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(_words(phrase)) for phrase in stop_words)


def _words(text: str) -> list[str]:
    """The words of ``text`` without case, accents, apostrophes and invisible characters."""
    plain = normalize("NFKD", text).casefold()
    kept = (
        c
        for c in plain.translate(_SIGNS)
        if c not in _APOSTROPHES and category(c) not in ("Mn", "Cf")
    )
    return ["".join(run) for is_word, run in groupby(kept, str.isalnum) if is_word]
