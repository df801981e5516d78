"""Words that mean the same: plurals, synonyms, and misspellings of what the embedded pair knows.

    the crimson bokses, the coffee cups      the red box, the mug

Misspellings are read for words of those things only: with others two things would be one, such as
"cat" and "cart". A misspelling that is a word itself ("pal", of "pail") is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_APOSTROPHE = r"['\N{RIGHT SINGLE QUOTATION MARK}]"
POSSESSIVE = re.compile(rf"{_APOSTROPHE}s$")
# fmt: off
KNOWN_TO_THE_PAIR = (
    "red crimson scarlet ruby", "green emerald lime olive", "blue azure navy cobalt",
    "yellow mustard canary", "orange tangerine amber", "purple violet lilac lavender",
    "white ivory snowy", "black ebony", "ball sphere orb", "box crate cube carton",
    "cone pylon", "bottle flask", "mug cup teacup", "bucket pail", "lamp lantern",
    "stool footstool", "table desk", "sofa couch settee", "shelf bookshelf bookcase",
    "partition divider", "thing object item",
)
"""What the pair's answers say, and other words for it."""
_OTHERS = (
    "shelf shelve bookshelve", "television tv telly", "bike bicycle", "fridge refrigerator",
    "bin trash", "elevator lift", "cupboard cabinet closet wardrobe", "rug carpet mat",
    "car vehicle", "picture painting", "door doorway", "motorcycle motorbike", "suitcase luggage",
    "phone telephone", "sack bag", "gray grey", "big large huge", "small little tiny",
)
_SLIPS = (
    "red rad", "green grean", "blue bluw", "purple purpul", "white withe", "box bocks boks",
    "bucket buckit", "sofa sopha", "shelf shelv", "partition partion",
)
_ASKING = """
    walk look move approach navigate reach head towards over around down drive close near travel
    proceed come make your find search seek locate spot detect identify discover track step roll
    steer target visit take bring lead guide show wander march stroll return advance crawl park
    stand next arrive fetch
"""
"""Words of a request beside its thing, which say what it wants of it."""
_IN_NAMES = "traffic water coffee standing bar dining room jet"
_NO_SLIPS = frozenset({
    "back", "bra", "cartoon", "cub", "cue", "dive", "fin", "had", "lad", "lap", "led", "lie", "net",
    "pal", "reed", "rub", "sand", "scarlett", "see", "snow", "stp", "tack", "thin", "you",
})
"""Words that resemble others, and mean what they say."""
# fmt: on
_WORD = re.compile(rf"(?<!{_APOSTROPHE})\b[^\W_]+\b(?!{_APOSTROPHE}t\b)")
_MODIFIER = re.compile(
    r"\bjet[- ](?=black\b)|\b(?:traffic(?= cone)|water(?= bottle)|(?:coffee|tea)(?= mug)"
    r"|standing(?= lamp)|bar(?= stool)|dining(?= table)|room(?= partition))\b ?"
)
"""Words before a thing that leave it what it is: "traffic cone"."""


def singular(word: str) -> str:
    """Return what a word in lower case, its regular plural and their possessives have in common."""
    word = POSSESSIVE.sub("", word)
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    if len(word) > 3 and word.endswith("ie"):  # cookies, berries
        return f"{word[:-2]}y"
    if len(word) > 3 and word.endswith(("che", "she", "se", "xe", "ze", "oe")):
        return word[:-1]  # of headaches as of benches, of houses as of buses
    return word


def misspellings(word: str) -> Iterator[str]:
    """Yield ``word`` with one letter dropped, doubled, or swapped with the next.

    The first letter stays; a word of three letters or less loses none.
    """
    for i in range(1, len(word)):
        before, letter, after = word[:i], word[i], word[i + 1 :]
        yield before + letter + letter + after
        if len(word) > 3:
            yield before + after
        if after and letter != after[0]:
            yield before + after[0] + letter + after[1:]


def _first_of(groups: tuple[str, ...]) -> dict[str, str]:
    return {word: words.split()[0] for words in groups for word in words.split()[1:]}


OTHER_SLIPS = _first_of(_SLIPS)
"""Right words of misspellings of more than one letter dropped, doubled or swapped."""
_SYNONYMS = {
    singular(word): singular(plain)
    for word, plain in _first_of((*KNOWN_TO_THE_PAIR, *_OTHERS)).items()
}


def _spellings() -> dict[str, str]:
    """Return the right word of each misspelling that stands for one word only."""
    known = " ".join((*KNOWN_TO_THE_PAIR, _ASKING, _IN_NAMES)).split()
    meant = dict(OTHER_SLIPS)
    for word in known:
        for slip in misspellings(word):
            meant[slip] = "" if meant.get(slip, word) != word else word
    return {s: word for s, word in meant.items() if word and s not in (_NO_SLIPS | {*known})}


_SPELLINGS = _spellings()


def plain_word(word: str) -> str:
    """Return the plain word for ``word``, in lower case: "red" for "crimson", "mug" for "cups"."""
    one = singular(_spelt(word))
    return _SYNONYMS.get(one, one)


def plain_words(text: str) -> str:
    """Return ``text`` in lower case, with the plain words of synonyms and misspellings."""
    return _MODIFIER.sub("", _WORD.sub(lambda word: _plain(word.group()), text.casefold()))


def _plain(word: str) -> str:
    """Return the plain word of a synonym or misspelling; other words keep their ending."""
    right = _spelt(word)
    return _SYNONYMS.get(singular(right), right)


def _spelt(word: str) -> str:
    """Return the right spelling of ``word``, in the singular if it was misspelt."""
    if singular(word) in _SYNONYMS:
        return word
    return _SPELLINGS.get(word) or _SPELLINGS.get(word.removesuffix("s"), word)
