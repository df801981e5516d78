"""Passages that state facts among others of the same kind, and questions about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_llm_lab import phrasebook
from collab_llm_lab.phrases import Voice, pick, say
from collab_llm_lab.training.text.facts import KINDS, KINDS_BY_NAME, Fields, Kind, named
from collab_llm_lab.training.text.world import World, clock

_BOOK = phrasebook.read(Path(__file__).with_suffix(".txt"))
FILLERS = _BOOK["fillers"].phrases_by_name()
_SIGHTINGS, _ALARMS = _BOOK["sightings"].phrases_by_name(), _BOOK["alarms"].phrases_by_name()
REQUESTS = {
    name: _BOOK[name].phrases()
    for name in ("last where", "last when", "how often", "dearer", "cheaper", "earlier")
}
"""Wordings of questions on several lines; the last of each is held out of training."""
_TRIES = 8
"""Tries to find a wording with the key first."""
_OPPOSED = {"job": "work", "work": "job"}  # each states the fact that the other asks for


@dataclass(frozen=True)
class Quote:
    """Words of an answer that a network may copy from a `line` of the prompt."""

    words: str
    line: str


Quoted = tuple[tuple[Quote, ...], ...]
"""The quotes of each answer of a chat, as far as they are known."""


@dataclass(frozen=True)
class Question:
    """A question on a passage.

    Attributes:
        kind: name of the kind of fact, or "last seen", "count" or "compare".
        about: the names in the question, for an explanation.
        answer: the right answer, "None" if the passage has none.
        lines: the lines that hold the answer; none if there is no answer.
        distractors: how many other facts of the same kind the passage states.
    """

    kind: str
    text: str
    about: str
    answer: str
    lines: tuple[str, ...]
    distractors: int

    def quotes(self, *, whole_line: bool) -> tuple[Quote, ...]:
        """Return the quotes of an answer: its words and, in a citation, the whole last line."""
        found = [Quote(self.answer, line) for line in self.lines if self.answer in line][-1:]
        cited = [Quote(line, line) for line in self.lines[-1:] if whole_line]
        return (*cited, *found)


@dataclass(frozen=True)
class Passage:
    """Lines, their text in one layout, and questions on it."""

    lines: tuple[str, ...]
    text: str
    questions: tuple[Question, ...]

    def distance(self, line: str) -> int:
        """Return how many words of the passage follow `line`."""
        return sum(len(text.split()) for text in self.lines[self.lines.index(line) + 1 :])


class Writer:
    """Writes one passage: facts first, then fillers up to a length, at last all in random order.

    Args:
        key_first: prefer wordings that name the key before the value, so that the answer follows
            the key in the text.
    """

    def __init__(self, world: World, style: str, key_first: bool = False) -> None:
        self.world = world
        self._key_first = key_first
        self.style = style
        self._voice = Voice(world.rng)
        self._speakers = [world.first_name() for _ in range(2)]
        self._prefixed = style == "conversation" and world.chance(0.6)
        self._groups: list[list[str]] = []  # lines of one group keep their order
        self._known: set[tuple[str, ...]] = set()
        self._kinds: set[str] = set()
        self._words = 0
        self._characters = 0

    def _line(self, text: str, speaker: str = "") -> str:
        if self._prefixed and not text.startswith(f"{speaker}:"):
            text = f"{self.world.any(self._speakers)}: {text}"
        return text

    def _add(self, *lines: str) -> None:
        self._groups.append(list(lines))
        self._words += sum(len(line.split()) for line in lines)
        self._characters += sum(len(line) for line in lines)

    def state(self, kind: Kind, fields: Fields) -> str:
        """State a fact; return its line."""
        line = self._statement(kind, fields)
        self._add(line)
        self.reserve(kind, fields)
        return line

    def _statement(self, kind: Kind, fields: Fields) -> str:
        for _ in range(_TRIES if self._key_first else 1):
            text = say(kind.statements[self.style], self._voice, fields)
            if all(text.find(fields[key]) < text.find(fields[kind.value]) for key in kind.key):
                break
        return self._line(text, fields.get("person", fields.get("robot", "")))

    def fact(self, kind: Kind, near: Fields | None = None) -> Fields | None:
        """Draw a fact whose key is new in this passage, close to `near` or anywhere.

        Returns None if the kind has hardly any key left.
        """
        for _ in range(50):
            fields = kind.near(self.world, near) if near else kind.draw(self.world)
            if (kind.name, *(fields[name] for name in kind.key)) not in self._known:
                return fields
        return None

    def first(self, kind: Kind | None = None) -> tuple[Kind, Fields]:
        """Draw a fact whose key no other fact of this passage has; reserve its key.

        Args:
            kind: the wanted kind, if any of its keys is left; None: any.
        """
        kind = kind or self.kind()
        while (fields := self.fact(kind)) is None:
            kind = self.kind()
        self.reserve(kind, fields)
        return kind, fields

    def _distract(self, kind: Kind, count: int, near: Fields | None) -> int:
        """State up to `count` other facts of a kind, some `near` one; return how many."""
        for i in range(count):
            fields = self.fact(kind, near if i < 3 or self.world.chance(0.3) else None)
            if fields is None:
                return i
            self.state(kind, fields)
        return count

    def reserve(self, kind: Kind, fields: Fields) -> None:
        """Exclude the key of a fact from later draws, without stating the fact."""
        self._known.add((kind.name, *(fields[name] for name in kind.key)))
        self._kinds.add(kind.name)

    def other_kind(self) -> Kind:
        """Return a kind of which nothing has been stated or reserved."""
        while True:
            kind = self.kind()
            if kind.name not in self._kinds:
                return kind

    def kind(self) -> Kind:
        """Return a kind whose facts cannot answer questions on the facts stated so far."""
        while True:
            kind = self.world.any(KINDS)
            if _OPPOSED.get(kind.name) not in self._kinds:
                return kind

    def ask(self, distractors: int, absent: bool, kind: Kind | None = None) -> Question:
        """State a fact, unless it is `absent`, and distractors; return a question about it."""
        kind, fields = self.first(kind)
        lines = () if absent else (self.state(kind, fields),)
        distractors = self._distract(kind, distractors, fields)
        return Question(
            kind.name,
            pick(kind.questions, self._voice, fields, self.world.new_wordings),
            kind.about(fields),
            "None" if absent else fields[kind.value],
            lines,
            distractors,
        )

    def _asked(self, request: str, fields: Fields) -> str:
        return pick(REQUESTS[request], self._voice, fields, self.world.new_wordings)

    def _timed(self, count: int) -> list[str]:
        times = sorted(self.world.rng.sample(range(360, 1320, 5), count))
        return [clock(time) for time in times]

    def last_seen(self, distractors: int, absent: bool) -> Question:
        """State several sightings of things in order of time; ask for the last of one of them."""
        world = self.world
        thing = world.thing().name
        seen = 0 if absent else world.whole(2, 5)
        others = [world.like(thing)] + [world.thing().name for _ in range(distractors // 4)]
        of = [thing] * seen + [world.any(others) for _ in range(distractors)]
        world.rng.shuffle(of)
        lines, last = [], {}
        for name, time in zip(of, self._timed(len(of)), strict=True):
            fields = {"thing": name, "room": world.room(), "time": time}
            lines.append(self._line(say(_SIGHTINGS[self.style], self._voice, fields)))
            if name == thing:
                last = fields | {"line": lines[-1]}
        self._add(*lines)
        where = world.chance(0.6)
        return Question(
            "last seen",
            self._asked("last where" if where else "last when", {"thing": thing}),
            f"the {thing}",
            "None" if absent else last["room" if where else "time"],
            () if absent else (last["line"],),
            distractors,
        )

    def count(self, distractors: int) -> Question:
        """State alarms in several rooms in order of time; ask how many one room had."""
        world = self.world
        room, number = world.room(), world.whole(1, 5)
        rooms = [room] * number + [world.room() for _ in range(distractors)]
        world.rng.shuffle(rooms)
        lines = [
            self._line(say(_ALARMS[self.style], self._voice, {"room": name, "time": time}))
            for name, time in zip(rooms, self._timed(len(rooms)), strict=True)
        ]
        self._add(*lines)
        text = self._asked("how often", {"room": room})
        found = tuple(line for line, name in zip(lines, rooms, strict=True) if name == room)
        return Question("count", text, f"the {room}", str(number), found, distractors)

    def compare(self, distractors: int) -> Question:
        """State two facts among others; ask which is larger or earlier."""
        world = self.world
        if world.chance(0.6):
            kind = KINDS_BY_NAME["price"]
            first, second = kind.draw(world), kind.draw(world)
            dearer = world.chance(0.6)
            more = float(first["price"]) > float(second["price"])
            answer = (first if more == dearer else second)["thing"]
            fields = {"thing": first["thing"], "other": second["thing"]}
            request = "dearer" if dearer else "cheaper"
        else:
            kind = KINDS_BY_NAME["when"]
            first, second = kind.draw(world), kind.draw(world)
            second["event"] = first["event"]
            answer = (first if first["time"] < second["time"] else second)["person"]
            fields = {"person": first["person"], "other": second["person"]}
            fields["event"] = first["event"]
            request = "earlier"
        lines = (self.state(kind, first), self.state(kind, second))
        distractors = self._distract(kind, distractors, None)
        text = self._asked(request, fields)
        about = " and ".join(named(kind.key[0], fact) for fact in (first, second))
        return Question("compare", text, about, answer, lines, distractors)

    def fill(self, words: int, characters: int) -> None:
        """Add unrelated facts and fillers up to a number of words or of characters."""
        fillers = FILLERS[self.style]
        while self._words < words and self._characters < characters:
            if self.world.chance(0.65):
                kind = self.other_kind()  # a fact of a reserved kind would be a distractor
                self._add(self._statement(kind, kind.draw(self.world)))
            else:
                self._add(self._line(say(fillers, self._voice, {})))

    def passage(self, questions: Sequence[Question]) -> Passage:
        """Return all lines in random order, in one of the layouts of the style."""
        world = self.world
        places = [i for i, group in enumerate(self._groups) for _ in group]
        world.rng.shuffle(places)
        rest = [iter(group) for group in self._groups]
        lines = tuple(next(rest[i]) for i in places)
        if self._prefixed or (self.style == "reports" and world.chance(0.8)):
            text = "\n".join(lines)
        elif self.style == "instructions" and world.chance(0.4):
            text = "\n".join(f"- {line}" for line in lines)
        else:
            text = " ".join(line if line[-1] in ".!?" else line + "." for line in lines)
        return Passage(lines, text, tuple(questions))
