"""A second reading of the action grammar, written apart from the first and without regular
expressions: from the end of the text backwards, character by character, and slow.
"""

from __future__ import annotations

import math

from collab_llm_nodes.navigation.grammar import GrammarConfig, Kind

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
)
METRES = ("meter", "metre", "meters", "metres")
UNITS = {
    "{distance}": {"cm": 0.01, "m": 1.0}
    | {f"centi{name}": 0.01 for name in METRES}
    | dict.fromkeys(METRES, 1.0),
    "{angle}": dict.fromkeys(("degree", "degrees", "deg", "°"), math.pi / 180)
    | dict.fromkeys(("rad", "radian", "radians"), 1.0),
}
LOWER = {ord(c): ord(c.lower()) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


class Oracle:
    """What ``text`` orders, if all of it is in the grammar of ``config``."""

    def __init__(self, config: GrammarConfig) -> None:
        self.orders = [
            (name, phrase.lower().split())
            for name in ("forward", "left", "right", "stop")
            for phrase in getattr(config, name)
        ]
        self.markers = [marker.lower().split() for marker in config.markers]
        self.mentions = KNOWN + [
            (name, words)
            for name, words in self.orders
            if (name, [w for w in words if w[0] != "{"]) not in KNOWN
        ]
        self.verbs = VERBS | {next(w for w in words if w[0] != "{") for _, words in self.orders}

    def reads(self, text: str) -> tuple[Kind, float] | None:
        """Kind and value [m, rad] of the motion, without limits; None if there is none."""
        s = text.translate(LOWER)
        for name, words in self.orders:
            for begin in finds(s, words[0] if words[0][0] != "{" else ""):
                end, value = phrase(s, begin, words)
                if end < 0 or any(c not in SPACE + ".!\"'*" for c in s[end:]):
                    continue
                if not s[:begin].strip() or self.follows_a_marker(s, begin, name):
                    kind = {"forward": Kind.FORWARD, "stop": Kind.STOP}.get(name, Kind.TURN)
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
        """Nothing in ``reason`` speaks against ``name``."""
        for other, words in self.orders:
            if other != "stop" and any(phrase(reason, p, words)[0] >= 0 for p in finds(reason, "")):
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
        return True


def phrase(s: str, at: int, words: list[str], with_number: bool = True) -> tuple[int, float]:
    """Where ``words`` end that begin at ``at``, and the number in them; -1 if they do not."""
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
    """What may stand between marker and action: "to", a colon, quotes."""
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
    """Where ``word`` stands; every place for an empty one."""
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
