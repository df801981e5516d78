"""Plain observations: the text allowed beside an action under ``grammar.reason: plain``.

    reason   = sentences, ended by "." "!" ";" or a line's end
    sentence = a clause, then clauses and places, joined by "," "and" "but" "so" ...
    clause   = "I see ...", "... is ...", "there is ...", "no ... in sight": see ``_CLAUSE``
    place    = "on the far left", "2 m ahead", "near", "the box": see ``_PLACE``

A list of words that forbid a motion would never end, so these are the words and forms that are
allowed. There is no verb of motion or of saying, no modal verb but "can see", no condition and no
time; "not" and "no" go with the sight of things only, not of the ground. There is no colon: a
quotation may follow one. Everything else is refused, a look-alike letter as well.

Observations are not judged for sense, with one exception: a reason that names one side only goes
with no turn to the other. "A wall is 10 cm ahead" is plain; obstacles are up to ``motion_guard``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

THINGS = """
    apple backpack bag ball banana barrel barrier basket bathtub bed bench bicycle bike bin blanket
    board book bookcase bookshelf bottle bowl box bridge broom bucket building bus bush cabinet car
    carpet cart ceiling chair clock closet column computer cone container corner corridor couch
    counter crate cube cup cupboard curtain cushion cylinder desk dish dishwasher door doorway
    drawer elevator entrance exit fan fence flag floor flower fridge furniture garden gate glass
    grass hall hallway hat house hydrant jacket jar kettle keyboard kitchen lamp laptop lift locker
    machine mat microwave mirror monitor motorcycle mug object office oven painting pallet panel
    paper partition pedestal pen phone picture pillar pillow pipe plant plate pole poster pot
    printer puddle rack radiator railing ramp refrigerator road rock room rug sack screen shelf
    shelves shoe shower sign sink socket sofa spoon stage stone stool stove street suitcase switch
    table target television thing tile toilet towel toy trash tray tree truck tv umbrella vase
    vehicle wall wardrobe washer way wheel whiteboard window
"""
"""Names of things; ``grammar.things`` adds to them.

People, animals, stairs, edges and lights are not among them: their presence speaks against motion.
"""
QUALITIES = """
    beige big black blue bright brown dark golden gray green grey large little long metal narrow
    open orange pink plastic purple red round short silver small square striped tall thick thin tiny
    transparent turquoise violet white wide wooden yellow
"""
"""Qualities of things. None of them orders a motion, so "and" may join them: "red and white"."""
_GROUND = frozenset(
    f"{name}{ending}"
    for name in ("bridge", "floor", "ground", "path", "road", "room", "street", "way")
    for ending in ("", "s")
)
"""Ground that carries the robot; not seeing it, or being off it, speaks against a motion."""

_WORDS = {
    "R": "it they me",
    "O": "front center centre middle side end top bottom distance background foreground",
    "D": "the a an this my its one two three four five six both several",
    "T": "left right ahead far nearby close closer distant off away straight directly slightly very"
    " quite just about roughly almost partly",
    "p": "on in at to of from behind beside near next by under above below between inside outside"
    " with",
    "V": "view sight visible",
    "i": "i we",
    "s": "see notice spot",
    "b": "is are am was stands lies sits hangs",
    "L": "look looking search searching",
    "k": "keep",
    "c": "can",
    "d": "do",
    "n": "not",
    "N": "no",
    "t": "there",
    "&": "and",
    ",": "but so thus hence then therefore",
    "cn": "cannot can't",
    "dn": "don't",
    "bn": "isn't aren't",
    "Rb": "it's",
    "tb": "there's",
    "ib": "i'm",
}
"""The words of each kind: pronouns, things, determiners, places, prepositions, sight ... A
contraction is of two kinds."""
_KINDS = {word: kind for kind, words in _WORDS.items() for word in words.split()}
FUNCTION_WORDS = frozenset(_KINDS)
"""Words that are part of an observation without naming a thing or its quality."""

_QUALITY = rf"(?:{'|'.join(QUALITIES.split())})\b"
_TOKEN = re.compile(
    r"(?P<T>some way\b|[0-9]{1,4}(?:\.[0-9]{1,2})? ?(?:cm|m|met(?:er|re)s?|feet)\b)"
    rf"|(?P<O>stop signs?\b|{_QUALITY}(?: and {_QUALITY})+)"
    "|(?P<word>[a-z]+(?:['\N{RIGHT SINGLE QUOTATION MARK}][a-z]+)?)"
    r"|(?P<full>[.!;\n])|(?P<comma>,)|(?P<space>\s)|(?P<other>.)",
    re.IGNORECASE | re.ASCII,
)
_FIXED = {"T": "T", "O": "O", "full": ".", "comma": ",", "space": "", "other": "?"}
"""The kinds of tokens that are no single words; "?" may not be said."""
_AT = "(?:pD{0,2}[TORV]*)*"
_SUBJECT = f"(?!b)(?:R|D{{0,2}}[TOV]*{_AT})"
_P = "[DTOpRV]+"
_CLAUSE = re.compile(
    "|".join(
        (  # each is read in linear time: what follows a repetition cannot begin it
            f"ic?s{_P}",  # I (can) see the red ball on the left
            f"i[cd]ns{_P}|isN{_P}",  # I cannot see the red ball; I see no ball
            f"{_SUBJECT}b{_P}",  # the red ball is ahead; on the left stands the box
            f"{_SUBJECT}bn[DTOp]{{0,2}}V(?:{_P})?",  # the red ball is not in view
            f"[TV]*{_AT}tb{_P}",  # near and on the left there is the box
            f"(?:tb)?N[DTOp]+(?:b[DTOp]*)?V(?:{_P})?",  # no red ball in sight
            f"ib{_P}",  # I am in front of the box
            f"i[bk]?L{_P}",  # I keep looking to the left
        )
    )
)
_PLACE = re.compile(f"(?:D{{1,2}}[TOV]*|[TV]*){_AT}")
_SIDES = frozenset({"left", "right"})

Span = tuple[int, int]


class _Part:
    """The words between two commas or conjunctions.

    Attributes:
        words: its words.
        span: where it stands, once it has words.
    """

    def __init__(self) -> None:
        self._kinds: list[str] = []
        self.words: set[str] = set()
        self.span = (0, 0)
        self._goes_on = False

    def may_go_on(self) -> bool:
        """Return True at the first "and" if the part is a place so far."""
        first, self._goes_on = not self._goes_on, True
        return first and _PLACE.fullmatch(self.kinds) is not None

    def add(self, kind: str, word: str, span: Span) -> None:
        """Append a word."""
        self.span = (self.span[0] if self._kinds else span[0], span[1])
        self._kinds.append(kind)
        self.words.add(word)

    @property
    def kinds(self) -> str:
        """One letter for each word."""
        return "".join(self._kinds)


class Observations:
    """Check of observations made of the known words and those of ``things``."""

    def __init__(self, things: Sequence[str] = ()) -> None:
        self._kinds: dict[str, str] = {}
        for word in " ".join((THINGS, QUALITIES, *things)).lower().split():
            self._kinds |= dict.fromkeys((word, f"{word}s", f"{word}es"), "O")
        self._kinds |= _KINDS

    def objection(self, text: str, begin: int, end: int, action: str) -> Span | None:
        """Return the span in ``text[begin:end]`` that is no plain observation; None if all is.

        Args:
            action: "left" or "right" for turns, to which a reason that names only the other side is
                an objection.
        """
        sentence = [_Part()]
        sides: dict[str, Span] = {}
        for token in _TOKEN.finditer(text, begin, end):
            word = token.group().lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
            kind = _FIXED.get(token.lastgroup or "", self._kinds.get(word, "?"))
            if kind == "?":
                return token.span()
            if word in _SIDES:
                sides[word] = token.span()
            if kind == ".":
                objection = _objection(sentence, action)
                if objection:
                    return objection
                sentence = [_Part()]
            elif kind == "&" and len(sentence) == 1 and sentence[0].may_go_on():
                continue  # "near and on the left there is the box": one part
            elif kind in (",", "&"):
                sentence.append(_Part())
            elif kind:
                sentence[-1].add(kind, word, token.span())
        if action in _SIDES and sides and action not in sides:
            return next(iter(sides.values()))
        return _objection(sentence, action)


def _objection(sentence: list[_Part], action: str) -> Span | None:
    """Return the span of a sentence that is no observation; None if it is one, or empty."""
    forms = [_CLAUSE]
    for part in sentence:
        sides = _SIDES & part.words
        elsewhere = "L" in part.kinds and sides and sides != {action}
        groundless = _GROUND & part.words and ({"n", "N"} & {*part.kinds} or "off" in part.words)
        plain = any(form.fullmatch(part.kinds) for form in forms)
        if part.kinds and (elsewhere or groundless or not plain):
            return part.span
        if part.kinds:
            forms = [_CLAUSE, _PLACE]
    return None
