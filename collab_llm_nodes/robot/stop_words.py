"""Detection of instructions to stop, which cancel at once, without asking a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from unicodedata import category, normalize

from collab_llm_nodes.errors import ConfigError

_VERBS = (
    *("move", "go", "turn", "drive", "walk", "run", "rotate", "spin", "roll"),
    *("proceed", "continue", "advance", "navigate", "follow", "look", "search"),
    *("come", "step", "enter", "approach", "cross", "start", "budge"),
)
_DOING = (
    *("moving", "going", "turning", "driving", "walking", "running", "rotating", "spinning"),
    *("rolling", "proceeding", "continuing", "advancing", "navigating", "following", "looking"),
    *("searching", "coming", "approaching"),
)
_NOUNS = ("movement", "movements", "motion")
_SWITCHING_OFF = tuple(
    f"{verb} {what} {way}"
    for verb, way in (
        *(("turn", "off"), ("switch", "off"), ("shut", "off"), ("shut", "down")),
        *(("power", "off"), ("power", "down"), ("cut", "off"), ("cut", ""), ("kill", "")),
        *(("disconnect", ""), ("disable", ""), ("unplug", ""), ("disengage", "")),
    )
    for what in ("", "it", "it all", "yourself", "everything", "the robot", "the system")
    + ("the power", "power", "the engine", "the motor", "the motors", "all motors", "motors")
)
STOP_WORDS = (
    *("stop", "emergency stop", "emergency", "e-stop", "estop", "brake", "cease", "quit", "end"),
    *("halt", "freeze", "wait", "pause", "cancel", "abort", "hold", "hold on", "whoa", "enough"),
    *("stand still", "hold still", "keep still", "be still", "stay", "stay put", "do nothing"),
    *("come to a stop", "come to a halt", "stand down", "shutdown", "deactivate", "off"),
    *("full stop", "dead stop", "kill switch", "brakes", "hit the brakes", "apply the brakes"),
    *("hit the brake", "apply the brake", "break", "desist", "cease and desist", "terminate"),
    *("discontinue", "suspend", "interrupt", "stopping", "stopped", "standstill", "stasis"),
    *("stand by", "standby", "hang on", "hold up", "hold it", "hold your horses", "time out"),
    *("wait up", "knock it off", "cut it out", "give up", "call it off", "call off", "let it be"),
    *("never mind", "nevermind", "forget it", "scratch that", "belay that", "avast", "drop it"),
    *("thatll do", "no more", "not another step", "not one more step", "woah", "whoah", "woa"),
    *("far enough", "close enough", "near enough", "good enough", "no closer", "no nearer"),
    *("not another inch", "not one inch", "not an inch", "not a step", "no steps"),
    *("don't you dare", "don't you dare move", "nobody move", "nobody moves", "no one moves"),
    *("no one move", "no more steps", "no further steps"),
    *(f"{no} {noun}" for no in ("no", "no more", "zero") for noun in _NOUNS),
    *(
        f"{no} {take} {more} step{what}"
        for no in ("don't", "don't you", "do not", "never")
        for take in ("take", "make")
        for more, what in (("another", ""), ("one more", ""), ("a further", ""), ("a", ""))
        + (("a single", ""), ("any more", "s"), ("any further", "s"), ("any", "s"))
    ),
    *("remain still", "remain", "stay still", "stay there", "stay here"),
    *("stand there", "sit", "sit down", "lie down", "go to sleep", "sleep", "back off", "stp"),
    *("come to a full stop", "come to a dead stop", "slam the brakes", "slam on the brakes"),
    *("no further", "go no further", "not any further", "don't do that", "don't do it"),
    *("shut up", "leave it", "leave me alone", "let go", "hands off", "get off", "get away"),
    *("back up", "stay back", "keep back", "get back", "stay away", "keep away"),
    *("red light", "watch out", "look out", "danger", "mayday", "panic", "sos", "e stop"),
    *_SWITCHING_OFF,
    *(f"{no} {doing}" for no in ("stop", "quit", "cease", "no", "no more") for doing in _DOING),
    *(f"{no} {verb}" for no in ("don't", "don't you", "do not", "not", "never") for verb in _VERBS),
    *("stopp", "anhalten", "halt an", "stehen bleiben", "bleib stehen", "warte"),  # German
    *("nicht bewegen", "nicht fahren", "stoppen", "halte an", "nicht weiter", "aufhören"),
    *("stillgestanden", "stillstehen", "stehenbleiben", "stillhalten", "keine bewegung"),
    *("keinen schritt weiter", "genug", "schluss", "bleibe stehen", "hör auf"),
    *("arrête", "arrêtez", "arrête toi", "arrêtez vous", "attends", "ne bouge pas"),  # French
    *("stoppe", "stoppez", "ne bougez pas"),
    *("para", "alto", "detente", "espera", "no te muevas", "quieto", "basta"),  # Spanish
    "deténgase",
    *("ferma", "fermo", "fermati", "aspetta", "non muoverti", "fermatevi"),  # Italian
    *("pare", "parar", "não se mexa"),  # Portuguese
    *("stój", "stać", "zatrzymaj się", "stanna", "stoppa", "dur"),  # Polish, Swedish, Turkish
    *("стоп", "стой", "стоять", "остановись", "не двигайся"),  # Russian
    *("停", "停止", "停下", "停下来", "停车", "站住", "别动", "不要动"),  # Chinese
    *("请停", "请停下"),
    *("止まれ", "止まって", "止まってください", "とまれ", "やめて"),  # Japanese
    *("ストップ", "動くな"),
    *("멈춰", "멈추세요", "정지", "그만"),  # Korean
    *("रुको", "रुकिए", "रुक जाओ", "توقف", "قف"),  # Hindi, Arabic
    *("berhenti", "berhentilah", "jangan bergerak", "henti"),  # Indonesian, Malay
    *("sta stil", "stilstaan", "ophouden", "blijf staan"),  # Dutch
    *("stans", "stå stille", "stå still", "pysähdy"),  # Danish, Norwegian, Finnish
    *("zastav", "zastavte", "stůj", "stani", "állj", "megállj", "opreste"),  # of central Europe
    *("σταμάτα", "στοπ", "спри", "стій", "зупинись"),  # Greek, Bulgarian, Ukrainian
    *("dừng lại", "dừng", "หยุด", "tigil", "hinto", "simama"),  # Asia, Africa
    *("עצור", "ایست", "থামো"),  # Hebrew, Persian, Bengali
)
"""Phrases that mean "stop", however they are spelt; see ``asks_to_stop``."""

_BESIDE_IT = """
    please now immediately instantly at once right away quickly already completely robot hey ok okay
    no and or else here there it that thats this the an a its is everything all
    thanks thank you your very much lot could can would will just must should have to i id me want
    need like said say so told beg do we lets us until time oh dead whatever current
    what where are youre doing
    forward forwards back backward backwards left around about any
    mission task goal job trip navigation motion movement position place motor
    motors wheel wheels engine engines power yourself system
    in for while bit one two three four five six seven eight nine ten
    moment second seconds sec minute minutes min s
    pls plz kindly asap instant may make bring him her them really dude man buddy mate boy good
    guys sir god gods damn hell sake fucking button machine dog
    bitte sofort jetzt sie svp por favor
"""
"""Words that change nothing about it: "could you please stop right now, robot"."""

_PLACING = """
    at in on by near next to before after behind beside besides between under over above below
    beneath inside outside within beyond past against along facing with when once if until till as
    where and then short close away half halfway cm m meter meters metre metres foot feet steps
    sign signs light line watch
"""
"""Words after "stop" that make it a place or a thing: "stop at the door", "stop sign"."""

_ORDERING = """
    find get fetch reach explore head visit bring take show tell see until then and to at bus tram
    train taxi truck coach pit next last first final non not never dont no nothing do
"""
"""Words before "stop" that make it a place, a thing, or forbidden: "the bus stop"."""

_STRONG = frozenset({"stop", "halt", "freeze", "abort", "estop"})
"""Phrases that mean it among any words but those of ``_PLACING`` or ``_ORDERING``: "stop, you
fool", "stop chasing the cat", "mind the child stop"."""

_LONGEST = 40
"""Letters of the longest phrase that is looked for."""
_READ = 1000
"""Characters that are read."""
_MOTIONS = frozenset((*_VERBS, *_DOING, *_NOUNS))
_BESIDE = frozenset((*_BESIDE_IT.split(), *_DOING))
_PLACES = frozenset(_PLACING.split())
_ORDERS = frozenset((*_ORDERING.split(), *_VERBS, *_DOING))
_SIGNS = "\N{OCTAGONAL SIGN}\N{NO ENTRY}\N{RAISED HAND}\N{NO ENTRY SIGN}\N{RAISED BACK OF HAND}"
_BUTTONS = "\N{BLACK SQUARE FOR STOP}\N{DOUBLE VERTICAL BAR}"
_LOOKALIKES = (
    ("аеорсухіјѕтнкмвԁһԛԝьгу", "aeopcyxijstnkmbdhqwbry"),  # Cyrillic; н is below
    ("αβεηικμνορτυχζσςγω", "abehikmvoptuxzssyw"),  # Greek
    ("օոսցհ", "onugh"),  # Armenian
    ("ᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡʏᴢ", "abcdefghijklmnoprstuvwyz"),  # small capitals
    ("øɵłđħŧıɑɡɩƨⲟסꓢꓔꓳꓑᏚᎢᏢᎪᎻᏞ", "ooldhtiagisoostopstpahl"),
    ("н", "h"),
    ("$@", "sa"),
)
_ALPHABETS = (0x1F150, 0x1F170, 0x1F1E6)
"""First code points of enclosed letters that are no compatibility characters."""
_SPELT = {
    **{ord(sign): " stop " for sign in _SIGNS + _BUTTONS},
    **{ord(a): b for these, those in _LOOKALIKES for a, b in zip(these, those, strict=True)},
    **{start + i: chr(97 + i) for start in _ALPHABETS for i in range(26)},
    **dict.fromkeys(map(ord, "'`\N{RIGHT SINGLE QUOTATION MARK}\u115f\u1160\u3164")),
}
"""Look-alikes and signs by what they stand for; apostrophes and blank letters by nothing."""
_DIGITS = tuple(str.maketrans("0134578", each) for each in ("oleastb", "oieastb"))
_TOKEN = re.compile(r"(?P<word>[^\W_]+)|(?P<end>[!?;:,\n]|\.(?:\s|$)|\.{2,})")
_REPEATED = re.compile(r"(.)\1{2,}")
_REFUSAL = re.compile(r"\b(?:no+|nope|nein|non|nej|nee|nie)\s*(?=!)")
"""A refusal that is called out; without its exclamation mark it may be the answer to anything."""
_SUGGESTION = re.compile(
    r"\bwhy\s+(?:(?:do|are|have|did)\s*(?:nt|(?:(?:you|we)\s+)?not)|wont|not)\b"
)
"""A request in the form of a question: in "why don't you stop" nothing is forbidden."""


def asks_to_stop(instruction: str, stop_words: Sequence[str] = STOP_WORDS) -> bool:
    """Return True if ``instruction`` asks to stop, or forbids a motion first.

    It does if it says nothing but stop up to the end of a clause ("Stop! There is a child."), or
    has a strong word for it in front or at the end, and no word that makes it a place, a time or a
    thing ("stop at the door", "go to the bus stop"). The words after "stop driving" or "do not go"
    do not matter: a model that is asked about "do not go to the door" goes there.

    Case, accents, punctuation and invisible characters do not matter. Letters that look alike, are
    spaced, repeated, swapped with their neighbour or written as digits are read as meant.
    """
    phrases = _known(tuple(stop_words))
    words, ends = _words(instruction)
    asked, at = "", 0  # the phrase that asked last
    while at < len(words):
        found, phrase = _phrase_at(words, at, phrases)
        if phrase and phrases[phrase]:
            return True
        ordinary = words[at] not in _BESIDE and not words[at][0].isdigit()
        if not found and ordinary:
            break
        asked = phrase or asked
        at += found or 1
        if asked and not ends.isdisjoint(range(at - (found or 1), at)):
            return True
    else:
        return bool(asked)
    began = next((i for i in range(at) if _phrase_at(words, i, phrases)[1] in _STRONG), None)
    if began is not None:
        return _PLACES.isdisjoint(words[began + 1 : at + 1])
    last = words[-1:] and _phrase_at(words, len(words) - 1, phrases)[1]
    return last in _STRONG and _ORDERS.isdisjoint(words[:-1])


def check_stop_words(stop_words: Sequence[str]) -> None:
    """Raise ConfigError for words that would take no instruction, or any, for a stop."""
    if not stop_words:
        raise ConfigError("no words", field="stop_words", remedy="at least one, such as 'stop'")
    for phrase in stop_words:
        words, _ = _words(phrase)
        if _BESIDE.issuperset(words) and not _forbids(words):
            raise ConfigError(
                f"{phrase!r} is no phrase", field="stop_words", remedy="words that ask to stop"
            )
        if len("".join(words)) > _LONGEST:
            raise ConfigError(
                f"{phrase!r} is too long", field="stop_words", remedy=f"at most {_LONGEST} letters"
            )


@lru_cache(maxsize=16)
def _known(stop_words: tuple[str, ...]) -> dict[str, bool]:
    """Return the phrases without spaces, each with whether it forbids a motion.

    A phrase of one word is known with two neighbouring letters swapped, too.
    """
    known: dict[str, bool] = {}
    for stop_word in stop_words:
        words, _ = _words(stop_word)
        phrase = "".join(words)
        known[phrase] = _forbids(words)
        if len(words) == 1 and len(phrase) >= 4:
            for i in range(len(phrase) - 1):
                swapped = phrase[:i] + phrase[i + 1] + phrase[i] + phrase[i + 2 :]
                known.setdefault(swapped, False)
    return known


def _forbids(words: Sequence[str]) -> bool:
    """Return True for "stop driving", "do not go" and "no movement"."""
    return len(words) > 1 and words[-1] in _MOTIONS


def _phrase_at(words: Sequence[str], at: int, phrases: Mapping[str, bool]) -> tuple[int, str]:
    """Return the number of words, and the text, of the longest phrase at the word ``at``."""
    compound = _in_a_compound(words[at])
    text, best = "", (1, compound) if compound in phrases else (0, "")
    for count, word in enumerate(words[at : at + _LONGEST], start=1):
        text += word
        if count > 1 and len(text) > _LONGEST:
            break
        phrase = next((each for each in _readings(text) if each in phrases), "")
        if phrase:
            best = count, phrase
    return best


def _readings(text: str) -> Iterator[str]:
    """Yield the words that ``text`` may stand for."""
    once = _REPEATED.sub(r"\1", text)
    yield from (text, once, _REPEATED.sub(r"\1\1", text))
    if not text.isdigit():
        yield from (once.translate(digits) for digits in _DIGITS)


def _in_a_compound(word: str) -> str:
    """Return "stop" for "stopnow", "pleasestop" and "stopstop", else ""."""
    rest = word.replace("stop", "")
    outside = word.startswith("stop") or word.endswith("stop")
    return "stop" if outside and (not rest or rest in _BESIDE) else ""


def _words(text: str) -> tuple[list[str], set[int]]:
    """Return the normalised words of ``text``, and the indices of those that end a clause.

    They are without case, accents, apostrophes and invisible characters.
    """
    plain = normalize("NFKD", normalize("NFKD", text[:_READ]).casefold()).translate(_SPELT)
    kept = "".join(c for c in plain if category(c) not in ("Mn", "Me", "Cf"))
    kept = _REFUSAL.sub(" stop ", _SUGGESTION.sub(" ", kept))
    words: list[str] = []
    ends: set[int] = set()
    for token in _TOKEN.finditer(kept):
        if token.lastgroup == "word":
            words.append(token.group())
        elif words:
            ends.add(len(words) - 1)
    return words, ends
