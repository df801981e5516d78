"""Instructions that ask to stop. No model is asked about them: they cancel, at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from unicodedata import category, normalize

from collab_llm_nodes.errors import ConfigError

STOP_WORDS = (
    *("stop", "stop moving", "stop turning", "stop driving", "stop walking"),
    *("emergency stop", "e-stop", "estop"),
    *("halt", "freeze", "wait", "pause", "cancel", "abort", "hold", "hold on", "whoa", "enough"),
    *("stand still", "hold still", "keep still", "stay", "stay put"),
    *("don't move", "do not move", "don't go", "do not go", "don't turn", "do not turn"),
    *("stopp", "anhalten", "halt an", "stehen bleiben", "bleib stehen", "warte"),  # German
    *("arrête", "arrêtez", "arrête toi", "arrêtez vous", "attends"),  # French
    *("para", "alto", "detente", "espera"),  # Spanish
    *("ferma", "fermo", "fermati", "aspetta"),  # Italian
    *("pare", "parar"),  # Portuguese
    *("стоп", "стой", "не двигайся"),  # Russian
    *("停", "停止", "停下", "别动"),  # Chinese
    *("止まれ", "止まって", "ストップ", "멈춰", "정지"),  # Japanese, Korean
)
"""What is taken for "stop", in any case, with any punctuation, with or without accents."""

_BESIDE_IT = """
    please now immediately at once right away robot hey ok okay no and here there it that this the
    everything all thanks thank you could can would will just bitte sofort svp por favor
"""
"""Words that change nothing about it: "could you please stop right now, robot"."""

_BESIDE = frozenset(_BESIDE_IT.split())
_APOSTROPHES = "'`\N{RIGHT SINGLE QUOTATION MARK}"


def asks_to_stop(instruction: str, stop_words: Sequence[str] = STOP_WORDS) -> bool:
    """Whether ``instruction`` says nothing but stop; "go to the bus stop" says more."""
    phrases = _known(tuple(stop_words))
    words = _words(instruction)
    longest = max(map(len, phrases))
    asked, at = False, 0
    while at < len(words):
        found = next((n for n in range(longest, 0, -1) if tuple(words[at : at + n]) in phrases), 0)
        if not found and words[at] not in _BESIDE:
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
    kept = (c for c in plain if c not in _APOSTROPHES and category(c) not in ("Mn", "Cf"))
    return ["".join(run) for is_word, run in groupby(kept, str.isalnum) if is_word]
