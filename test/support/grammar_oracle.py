"""A second reading of the action grammar, written apart from the first and without regular
expressions: from the end of the text backwards, character by character, and slow.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from collab_llm_nodes.robot.grammar import GrammarConfig, Kind
from collab_llm_nodes.robot.observations import QUALITIES, THINGS

SPACE = " \t\n\r\f\v"
WORD = "abcdefghijklmnopqrstuvwxyz0123456789_"
DIGITS = "0123456789"
CLAUSE_ENDS = ".!?;:,\n"
SENTENCE_ENDS = ".!?;\n"
CONNECTIVES = ("so", "thus", "hence", "then", "therefore")
NEGATIONS = {"not", "never", "no", "without", "avoid", "cannot"}
CONDITIONS = {"if", "unless", "until", "once", "when", "before", "after"}
VERBS = {"drive", "driving", "stop", "stopping", "halt", "halting"}
TURNS = ("turn", "turning", "rotate", "rotating", "go", "going")
GOES = ("move", "moving", "go", "going", "walk", "walking")
VERBS |= {*TURNS, *GOES}
KNOWN = (
    [("left", [verb, "left"]) for verb in TURNS]
    + [("right", [verb, "right"]) for verb in TURNS]
    + [("forward", [verb, "forward"]) for verb in GOES]
    + [("back", [verb, way]) for verb in GOES for way in ("back", "backward", "backwards")]
    + [("stop", [word]) for word in ("stop", "stopping", "halt", "halting")]
    + [("give_up", [verb, "up"]) for verb in ("give", "giving")]
    + [("reply", [word]) for word in ("reply", "replying")]
)
ENDS = {"stop": Kind.STOP, "give_up": Kind.GIVE_UP, "reply": Kind.REPLY}
METRES = ("meter", "metre", "meters", "metres")
UNITS = {
    "{distance}": {"cm": 0.01, "m": 1.0}
    | {f"centi{name}": 0.01 for name in METRES}
    | dict.fromkeys(METRES, 1.0),
    "{angle}": dict.fromkeys(("degree", "degrees", "deg", "°"), math.pi / 180)
    | dict.fromkeys(("rad", "radian", "radians"), 1.0),
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
APOSTROPHES = "'\N{RIGHT SINGLE QUOTATION MARK}"
SHORT = {
    "cannot": ["can", "not"],
    "can't": ["can", "not"],
    "don't": ["do", "not"],
    "isn't": ["is", "not"],
    "aren't": ["are", "not"],
    "it's": ["it", "is"],
    "there's": ["there", "is"],
    "i'm": ["i", "am"],
}
JOINTS = {"and", "but", *CONNECTIVES}
SIGHT = {"view", "sight", "visible"}
SEE = {"see", "notice", "spot"}
LOOK = {"look", "looking", "search", "searching"}
BE = {"is", "are", "am", "was", "stands", "lies", "sits", "hangs"}


def words(text: str) -> set[str]:
    """The words of ``text``."""
    return set(text.split())


PREPOSITIONS = words(
    "on in at to of from behind beside near next by under above below between inside outside with"
)
DETERMINERS = words("the a an this my its one two three four five six both several")
ADVERBS = words(
    "left right ahead far nearby close closer distant off away straight directly slightly"
    " very quite just about roughly almost partly <distance>"
)
NOUNS = words(
    "front center centre middle side end top bottom distance background foreground <sign>"
)
JOINABLE = words(QUALITIES)
GROUND = words("bridge floor ground path road room street way")
GROUND |= {name + "s" for name in GROUND}
PRONOUNS = {"it", "they", "me"}
RESERVED = {"i", "we", "can", "do", "not", "no", "there", "keep", *JOINTS, *SIGHT, *SEE, *LOOK, *BE}
RESERVED |= PRONOUNS | PREPOSITIONS | DETERMINERS | ADVERBS
LOWER = {ord(c): ord(c.lower()) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


class Oracle:
    """The order in a text, if all of it is in the grammar of ``config``."""

    def __init__(self, config: GrammarConfig) -> None:
        self.orders = [
            (name, phrase.lower().split())
            for name in ("forward", "left", "right", *ENDS)
            for phrase in getattr(config, name)
        ]
        self.markers = [marker.lower().split() for marker in config.markers]
        self.mentions = KNOWN + [
            (name, words)
            for name, words in self.orders
            if (name, [w for w in words if w[0] != "{"]) not in KNOWN
        ]
        names = [*THINGS.split(), *QUALITIES.split(), *" ".join(config.things).lower().split()]
        self.nouns = {n + ending for n in names for ending in ("", "s", "es")} - RESERVED | NOUNS
        self.plain = config.reason == "plain"
        self.verbs = VERBS | {next(w for w in words if w[0] != "{") for _, words in self.orders}

    def reads(self, text: str) -> tuple[Kind, float] | None:
        """Kind and value [m, rad] of the motion, without limits; None if there is none."""
        s = text.translate(LOWER)
        for name, words in self.orders:
            for begin in finds(s, words[0] if words[0][0] != "{" else ""):
                end, value = phrase(s, begin, words)
                if end < 0 or any(c not in SPACE + ".!\"'*" for c in s[end:]):
                    continue
                alone = not s[:begin].strip() and name != "reply"
                if alone or self.follows_a_marker(s, begin, name):
                    kind = {"forward": Kind.FORWARD, **ENDS}.get(name, Kind.TURN)
                    return kind, -value if name == "right" else value
        return None

    def follows_a_marker(self, s: str, begin: int, name: str) -> bool:
        """``s[:begin]`` is a reason that allows ``name``, and a marker."""
        for marker in self.markers:
            for at in finds(s[:begin], marker[0]):
                end, _ = phrase(s, at, marker)
                if end < 0 or not opens(s[end:begin]) or not starts_a_clause(s[:at]):
                    continue
                others = [
                    p
                    for m in [*self.markers, ["next", "action"]]
                    for p in finds(s, m[0])
                    if phrase(s, p, m)[0] >= 0 and not inside_word(s, p) and not at <= p < end
                ]
                if not others and self.allows(s[:at], name):
                    return True
        return False

    def allows(self, reason: str, name: str) -> bool:
        """Nothing in ``reason`` speaks against ``name``; without a motion nothing can."""
        if name == "give_up":
            return True
        if name == "reply":
            rest = without_connective(reason)
            said = rest if starts_a_clause(rest) else reason
            return any(c.isalnum() for c in said)
        for other, words in self.orders:
            if other not in ENDS and any(
                phrase(reason, p, words)[0] >= 0 for p in finds(reason, "")
            ):
                return False
        last_sentence = pieces(reason, SENTENCE_ENDS)[-1]
        if CONDITIONS & set(split(last_sentence)):
            return False
        for clause in pieces(reason, CLAUSE_ENDS):
            words = split(clause)
            if self.verbs & set(words) and (NEGATIONS & set(words) or has_nt(clause)):
                return False
            for other, mention in self.mentions:
                for at in finds(clause, mention[0] if mention[0][0] != "{" else ""):
                    end, _ = phrase(clause, at, mention, with_number=False)
                    if end < 0 or inside_word(clause, at) or other == name:
                        continue
                    rest = clause[end:]
                    of_a_sign = rest[:1] in SPACE and rest.lstrip(SPACE).startswith("sign")
                    if not (mention[0] in ("stop", "stopping") and of_a_sign):
                        return False
        return not self.plain or (self.observes(reason, name) and agrees(reason, name))

    def observes(self, reason: str, name: str) -> bool:
        """``reason`` is made of plain observations; a search goes where ``name`` does."""
        sentence: list[list[str]] = [[]]
        first_and = True
        for word in [*spoken(reason), "."]:
            if word == ".":
                parts = [part for part in sentence if part]
                if parts and not self.is_clause(parts[0], name):
                    return False
                if not all(self.is_clause(p, name) or self.is_place(p) for p in parts):
                    return False
                if any(GROUND & set(p) and {"no", "not", "off"} & set(p) for p in parts):
                    return False
                sentence, first_and = [[]], True
            elif word == "and" and len(sentence) == 1 and first_and and self.is_place(sentence[0]):
                first_and = False
            elif word in (",", *JOINTS):
                sentence.append([])
            else:
                sentence[-1].append(word)
        return True

    def describes(self, words: list[str]) -> bool:
        """Things and places, at least one."""
        known = self.nouns | PRONOUNS | PREPOSITIONS | DETERMINERS | ADVERBS | SIGHT
        return bool(words) and known.issuperset(words)

    def is_place(self, words: list[str]) -> bool:
        """Begins with a place or "the ...", and names further things after prepositions only."""
        leading = words[: self.first_preposition(words)]
        named = bool(leading) and leading[0] in DETERMINERS
        return self.names(words) and (named or (SIGHT | ADVERBS).issuperset(leading))

    def names(self, words: list[str]) -> bool:
        """Between prepositions at most two determiners, then things; "it" behind one only."""
        at = self.first_preposition(words)
        group, rest = words[:at], words[at:]
        allowed = self.nouns | ADVERBS | SIGHT
        while True:
            start = 0
            while start < min(2, len(group)) and group[start] in DETERMINERS:
                start += 1
            if not allowed.issuperset(group[start:]):
                return False
            if not rest:
                return True
            at = 1 + self.first_preposition(rest[1:])
            group, rest = rest[1:at], rest[at:]
            allowed = self.nouns | ADVERBS | SIGHT | PRONOUNS

    def first_preposition(self, words: list[str]) -> int:
        return next((i for i, word in enumerate(words) if word in PREPOSITIONS), len(words))

    def is_subject(self, words: list[str]) -> bool:
        return words in (["it"], ["they"], ["me"]) or (bool(words) and self.names(words))

    def is_clause(self, words: list[str], name: str) -> bool:
        """Tells what is where, or what is seen, or where is searched."""
        is_rest = self.describes
        if words[0] in ("i", "we"):
            rest = words[1:]
            for start in (["can"], ["can", "not"], ["do", "not"], []):
                if (
                    rest[: len(start)] == start
                    and rest[len(start) :][:1]
                    and rest[len(start)] in SEE
                ):
                    seen = rest[len(start) + 1 :]
                    return is_rest(seen) or (not start and seen[:1] == ["no"] and is_rest(seen[1:]))
            for start in ([], ["keep"], *([verb] for verb in BE)):
                if (
                    rest[: len(start)] == start
                    and rest[len(start) :][:1]
                    and rest[len(start)] in LOOK
                ):
                    sides = {"left", "right"} & set(rest)
                    return is_rest(rest[len(start) + 1 :]) and sides <= {name}
            return rest[:1] != [] and rest[0] in BE and is_rest(rest[1:])
        if "no" in words:
            at = words.index("no")
            return (
                at == 0 or (at == 2 and words[0] == "there" and words[1] in BE)
            ) and self.is_out_of_sight(words[at + 1 :], subject=True)
        verbs = [i for i, word in enumerate(words) if word in BE]
        if len(verbs) != 1:
            return False
        subject, told = words[: verbs[0]], words[verbs[0] + 1 :]
        if subject[-1:] == ["there"]:
            where = subject[:-1]
            named = bool(where) and where[0] in DETERMINERS
            return is_rest(told) and self.is_place(where) and not named
        if told[:1] == ["not"]:
            return self.is_subject(subject) and self.is_out_of_sight(told[1:], subject=False)
        return self.is_subject(subject) and is_rest(told)

    def is_out_of_sight(self, words: list[str], subject: bool) -> bool:
        """Behind "no": "ball in sight", "ball is visible"; behind "is not": "in view"."""
        at = next((i for i, word in enumerate(words) if word in SIGHT), -1)
        if at < 0 or (words[at + 1 :] and not self.describes(words[at + 1 :])):
            return False
        before = words[:at]
        if not subject:
            return at <= 2 and (not before or self.describes(before)) and not PRONOUNS & set(before)
        verbs = [i for i, word in enumerate(before) if word in BE]
        if PRONOUNS & set(before):
            return False
        if not verbs:
            return self.describes(before)
        thing, rest = before[: verbs[0]], before[verbs[0] + 1 :]
        return self.describes(thing) and (not rest or self.describes(rest))


def agrees(reason: str, name: str) -> bool:
    """A turn goes to a side that the reason names, if it names one."""
    sides = {"left", "right"} & set(spoken(reason))
    return name not in ("left", "right") or not sides or name in sides


def spoken(s: str) -> list[str]:
    """Words and signs; "?" for what nobody may say, "." for every end of a sentence."""
    said, at = [], 0
    while at < len(s):
        if s[at] in LETTERS:
            end = run(s, at, LETTERS)
            if s[end : end + 1] in APOSTROPHES and s[end + 1 : end + 2] in LETTERS and s[end + 1 :]:
                end = run(s, end + 1, LETTERS)
            word = s[at:end].replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
            if word == "some" and follows(s, end, ["way"]):
                word, end = "<distance>", end + 4
            elif word == "stop" and follows(s, end, ["sign", "signs"]):
                word, end = "<sign>", run(s, end + 1, LETTERS)
            while word in JOINABLE and follows(s, end, ["and"]) and follows(s, end + 4, JOINABLE):
                end = run(s, end + len(" and "), LETTERS)
            said += SHORT.get(word, [word])
        elif s[at] in DIGITS:
            end = distance(s, at)
            said.append("<distance>" if end > at else "?")
            end = max(end, at + 1)
        else:
            end = at + 1
            if s[at] in ".!;\n,":
                said.append("," if s[at] == "," else ".")
            elif s[at] not in SPACE:
                said.append("?")
        at = end
    return said


def follows(s: str, at: int, words: Collection[str]) -> bool:
    """One of ``words`` stands at ``at``, after one space."""
    return s[at : at + 1] == " " and s[at + 1 : run(s, at + 1, WORD)] in words


def distance(s: str, at: int) -> int:
    """Return where "2.5 m" ends that begins at ``at``; ``at`` if there is none."""
    end = run(s, at, DIGITS)
    if end - at > 4:
        return at
    if s[end : end + 1] == ".":
        end, whole = run(s, end + 1, DIGITS), end
        if not 1 <= end - whole - 1 <= 2:
            return at
    unit = end + 1 if s[end : end + 1] == " " else end
    end = run(s, unit, WORD)
    return end if s[unit:end] in ("cm", "m", "feet", *METRES) else at


def phrase(s: str, at: int, words: list[str], with_number: bool = True) -> tuple[int, float]:
    """Return where ``words`` that begin at ``at`` end, and the number in them; -1 if nowhere."""
    value = 0.0
    for i, word in enumerate(words):
        start = skip(s, at) if i else at
        if word in UNITS:
            end, value = quantity(s, start, word)
            if end < 0 and not with_number:
                continue
        else:
            end = start + len(word) if s.startswith(word, start) else -1
            if end >= 0 and word[-1] != ":" and s[end : end + 1] in WORD and s[end : end + 1]:
                end = -1
        if end < 0 or (i and start == at):
            return -1, 0.0
        at = end
    return at, value


def quantity(s: str, at: int, slot: str) -> tuple[int, float]:
    """A number with a unit, perhaps after "by"."""
    if s.startswith("by", at) and s[at + 2 : at + 3] and s[at + 2] in SPACE:
        at = skip(s, at + 2)
    end = at
    for part in range(2):
        digits = run(s, end + part, DIGITS)
        if not 1 <= digits - end - part <= 9:
            return -1, 0.0
        end = digits
        if s[end : end + 1] != ".":
            break
    unit = skip(s, end)
    stop = unit + 1 if s.startswith("°", unit) else run(s, unit, WORD)
    if s[unit:stop] not in UNITS[slot] or run(s, stop, WORD) > stop:
        return -1, 0.0
    return stop, float(s[at:end]) * UNITS[slot][s[unit:stop]]


def opens(between: str) -> bool:
    """Return True for what may stand between marker and action: "to", a colon, quotes."""
    for rest in (between, between.lstrip(SPACE)[2:] if leads_with_to(between) else between):
        rest = rest.lstrip(SPACE)
        rest = rest[1:].lstrip(SPACE) if rest.startswith(":") else rest
        if not rest.strip("\"'*"):
            return True
    return False


def leads_with_to(between: str) -> bool:
    stripped = between.lstrip(SPACE)
    return len(stripped) < len(between) and split(stripped)[:1] == ["to"] and stripped[:2] == "to"


def starts_a_clause(before: str) -> bool:
    for rest in (before, without_connective(before)):
        rest = rest.rstrip(SPACE.replace("\n", ""))
        if not rest or rest[-1] in CLAUSE_ENDS:
            return True
    return False


def without_connective(before: str) -> str:
    rest = before.rstrip(SPACE)
    if len(rest) == len(before):
        return before
    rest = rest.removesuffix(",")
    for word in CONNECTIVES:
        if rest.endswith(word):
            return rest[: -len(word)]
    return before


def finds(s: str, word: str) -> list[int]:
    """Return the places of ``word``; every place for an empty one."""
    if not word:
        return list(range(len(s)))
    found, at = [], s.find(word)
    while at >= 0:
        found.append(at)
        at = s.find(word, at + 1)
    return found


def pieces(s: str, ends: str) -> list[str]:
    parts = [""]
    for c in s:
        parts[-1] += c
        if c in ends:
            parts.append("")
    return parts


def split(s: str) -> list[str]:
    """The words of ``s``."""
    return "".join(c if c in WORD else " " for c in s).split()


def has_nt(clause: str) -> bool:
    """ "don't" and the like."""
    return any(
        not inside_word(clause, p + 3) or clause[p + 3 : p + 4] == ""
        for sign in ("n't", "n’t")
        for p in finds(clause, sign)
    )


def inside_word(s: str, at: int) -> bool:
    """Between two characters of one word."""
    return 0 < at < len(s) and s[at - 1] in WORD and s[at] in WORD


def skip(s: str, at: int) -> int:
    return run(s, at, SPACE)


def run(s: str, at: int, characters: str) -> int:
    while at < len(s) and s[at] in characters:
        at += 1
    return at
