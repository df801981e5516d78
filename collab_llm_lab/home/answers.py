"""Answers in words: the sentences of a decision, and a decision read back from its sentences.

The form of a sentence depends on what is seen: with a fixed template a blind draft model would
guess most tokens, which would flatter speculative decoding.

A sentence is a plain observation of the action grammar. Things beside the one asked for are given
with their distance only, as the grammar refuses a turn to one side beside words of the other; a
way round an obstacle is named for the same reason: "the red ball is on the left and near, the way
is on the right".
"""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_lab.home.view import DIRECTIONS, DISTANCES
from collab_llm_nodes.robot.search import EIGHTHS, PLACES, WAYS, Report, read_report

STOP, GIVE_UP, REPLY = "stop", "give up", "reply"
ACTIONS = (
    STOP,
    "move forward 25 cm",
    "move forward 50 cm",
    "move forward 75 cm",
    "turn left 15 degree",
    "turn left 30 degree",
    "turn left 45 degree",
    "turn right 15 degree",
    "turn right 30 degree",
    "turn right 45 degree",
    GIVE_UP,
    REPLY,
)
MARKER = "the next action is"
MOST_SCENE = 2
"""Other things in an answer at most."""

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
        forms, number = _SEEN, DIRECTIONS.index(r.direction) + max(0, far - 2) + bool(r.leg)
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
