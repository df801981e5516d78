"""Answers in words: the sentences of a decision, and a decision read back from its sentences.

The form of a sentence depends on what is seen: with a fixed template a blind draft model would
guess most tokens, which would flatter speculative decoding.

A sentence is a plain observation of the action grammar. Things beside the one asked for are given
with their distance only, as the grammar refuses a turn to one side beside words of the other; a
way round an obstacle is named for the same reason: "the red ball is on the left and near, the way
is on the right".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collab_llm_lab.home.requests import Kind, Request, resolve
from collab_llm_nodes.robot.search import EIGHTHS, MARKER, PLACES, WAYS, Report, read_report
from collab_llm_nodes.sim.rooms import SHAPES
from collab_llm_nodes.sim.view import DIRECTIONS, DISTANCES, Sight, View, direction, distance

STOP, GIVE_UP, REPLY = ENDS = "stop", "give up", "reply"
MOVES = (
    "move forward 25 cm",
    "move forward 50 cm",
    "move forward 75 cm",
    "turn left 15 degree",
    "turn left 30 degree",
    "turn left 45 degree",
    "turn right 15 degree",
    "turn right 30 degree",
    "turn right 45 degree",
)
ACTIONS = (STOP, *MOVES, GIVE_UP, REPLY)
MAX_TOKENS = 72
"""Tokens of an answer at most: ``client.max_tokens`` of config/embedded.yaml."""
MOST_SCENE = 2
"""Other things in an answer at most."""
MOST_SEEN = 3
"""Things in the answer to "what do you see?" at most."""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

_SEEN = (
    "the {name} is {place} and {distance}{leg}",
    "i see the {name} {place}, {distance}{leg}",
    "{distance} and {place} there is the {name}{leg}",
    "{place} stands the {name}, {distance}{leg}",
)
_REMEMBERED = (
    "i cannot see the {name}, it is {place}{leg}",
    "the {name} is not in view, it is {place}{leg}",
)
_SEARCH = (
    "the {name} is not in view, the way is {way}",
    "i cannot see the {name}, the way is {way}",
    "no {name} in sight, the way is {way}",
    "the way is {way} and the {name} is not in view",
)
_ABSENT = "the {name} is not here"
_SCENES = ("i see {things}", "there is {things}")
_SCENE_RANGE = 4.0  # m
_DISTANCES = sorted(DISTANCES, key=len, reverse=True)


@dataclass(frozen=True)
class Decision:
    """An action, and the reason that its answer gives."""

    action: str
    """One of ``ACTIONS``."""
    report: Report = Report()
    """On the thing asked for."""
    scene: tuple[tuple[str, str], ...] = ()
    """Name and distance word of other things in view, nearest first."""
    reply: str = ""
    """The text of a ``reply``, without its final stop."""


def answer(decision: Decision) -> str:
    """Return the answer: "the red ball is straight ahead and near. the next action is ..."."""
    sentences = [_scene(decision.scene), decision.reply or _report(decision)]
    sentences.append(f"{MARKER} {decision.action}")
    return "".join(f"{said}. " for said in sentences if said).rstrip()


def read(text: str) -> Decision | None:
    """Return the decision of an answer; None if its action is none of ``ACTIONS``."""
    reason, _, action = text.rpartition(f"{MARKER} ")
    action = action.rstrip(".")
    if action not in ACTIONS:
        return None
    if action == REPLY:
        return Decision(action, reply=reason.rstrip(". "))
    first, _, rest = reason.partition(". ")
    return Decision(action, read_report(text), _read_scene(first) if rest else ())


def _report(decision: Decision) -> str:
    r = decision.report
    if not r.name:
        return ""
    if decision.action == GIVE_UP:
        return _ABSENT.format(name=r.name)
    if r.in_view:
        far = DISTANCES.index(r.distance)
        forms: tuple[str, ...] = _SEEN
        number = DIRECTIONS.index(r.direction) + max(0, far - 2) + bool(r.leg)
    elif r.direction:
        forms, number = _REMEMBERED, EIGHTHS.index(r.direction) + bool(r.leg)
    else:
        forms, number = _SEARCH, [*WAYS].index(r.way) + len(decision.scene)
    return forms[number % len(forms)].format(
        name=r.name,
        place=PLACES.get(r.direction, ""),
        distance=r.distance,
        way=WAYS.get(r.way, ""),
        leg=f", the way is {PLACES[r.leg]}" if r.leg else "",
    )


def _scene(scene: tuple[tuple[str, str], ...]) -> str:
    if not scene:
        return ""
    things = " and ".join(f"{a(name)} {distance}" for name, distance in scene)
    form = sum(DISTANCES.index(distance) for _, distance in scene)
    return _SCENES[form % len(_SCENES)].format(things=things)


def _read_scene(sentence: str) -> tuple[tuple[str, str], ...]:
    things = sentence.removeprefix("i see ").removeprefix("there is ").split(" and ")
    scene = []
    for thing in things:
        distance = next((word for word in _DISTANCES if thing.endswith(f" {word}")), "")
        name = thing.removesuffix(distance).strip().removeprefix("an ").removeprefix("a ")
        scene.append((name, distance))
    return tuple(scene)


def a(name: str) -> str:
    """Return a name with its indefinite article: "an orange ball"."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def scene(sights: Sequence[Sight], target: int | None) -> tuple[tuple[str, str], ...]:
    """Return name and distance of at most two other things in view beyond doubt, nearest first."""
    others = [
        sight
        for i, sight in enumerate(sights)
        if i != target and sight.in_view and not sight.borderline and sight.name != "person"
    ]
    near = [s for s in sorted(others, key=lambda s: s.range) if s.range < _SCENE_RANGE]
    return tuple((s.name, distance(s.range)) for s in near[:MOST_SCENE])


def reply(request: Request, view: View) -> str:
    """Return the answer in words to a request that wants no motion."""
    name, kind = request.about.name, request.kind
    sights = [s for s in (*view.things, *view.furniture) if s.in_view and s.name != "person"]
    sights.sort(key=lambda sight: sight.range)
    if kind is Kind.UNKNOWN:
        return f"i do not know what {a(name)} is"
    if kind is Kind.DO_NOT:
        return f"i will not go to the {name}"
    if kind is Kind.WHAT_DO_YOU_SEE:
        seen = [f"{a(s.name)} {PLACES[direction(s.bearing)]}" for s in sights[:MOST_SEEN]]
        return f"i see {' and '.join(seen) or 'nothing'}"
    if kind is Kind.HOW_MANY:
        count = sum(request.about.matches(s.name) for s in view.things if s.in_view)
        return f"i see {NUMBERS[count]} {_counted(name, count)}"
    found = resolve(request, view)
    if kind is Kind.WHAT_COLOUR:
        if found is None:
            return f"i see no {name}"
        colour, _, shape = view.things[found].name.partition(" ")
        return f"the {shape} is {colour}"
    if found is None:
        return f"no, i see no {name}"
    sight = (*view.things, *view.furniture)[found]
    return f"yes, {a(sight.name)} is {PLACES[direction(sight.bearing)]}"


def _counted(name: str, count: int) -> str:
    """Return what is counted, in the plural unless there is one: "boxes", "red things"."""
    noun = name if name in SHAPES else f"{name} thing".strip()
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("x") else f"{noun}s"
