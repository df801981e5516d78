"""Requests drawn for a room, and questions about one view whose true answer is beyond doubt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from collab_llm_lab.home.requests import NOTHING, QUESTIONS, About, Kind, Request, relations
from collab_llm_lab.home.wording import PLAIN, Wordings
from collab_llm_nodes.sim.rooms import (
    COLOURS,
    HELD_OUT_PAIRS,
    KINDS,
    NAMED_FURNITURE,
    SHAPES,
    Room,
)
from collab_llm_nodes.sim.view import Sight, View, look

TRAINED_PAIRS = tuple(
    f"{colour} {shape}" for colour, shape in KINDS if (colour, shape) not in HELD_OUT_PAIRS
)
_SHARES = {Kind.GO: 0.65, Kind.STOP: 0.05, Kind.DO_NOT: 0.07, Kind.UNKNOWN: 0.1}
"""Shares of the kinds; the rest are questions about the view at the start."""
_ABSENT = 0.2
"""Share of the GO requests for something that the room lacks."""
_RELATIONS = 0.15
"""Share of the GO requests by a relation, where the view at the start has one."""
_QUESTIONS = dict(zip(QUESTIONS, (0.35, 0.25, 0.25, 0.15), strict=True))
_FORMS = (0.6, 0.2, 0.2)
"""Shares of colour and shape, of a shape alone, and of furniture among the names asked for."""


def draw_request(room: Room, rng: np.random.Generator, wordings: Wordings = PLAIN) -> Request:
    """Return a request to a robot at the start of ``room``.

    Questions are about the view from there. What is asked for is never one of ``HELD_OUT_PAIRS``
    unless it is in the room.
    """
    kind = _drawn(rng, _SHARES)
    if kind is None:
        return draw_for_view(room, look(room, room.start), rng, wordings)
    if kind is Kind.GO and rng.random() < _RELATIONS:
        about = _any(rng, relations(look(room, room.start))) or _there(rng, room)
    elif kind is Kind.GO:
        about = _absent(rng, room) if rng.random() < _ABSENT else _there(rng, room)
    elif kind is Kind.DO_NOT:
        about = _there(rng, room)
    else:
        about = About(wordings.noun(rng)) if kind is Kind.UNKNOWN else NOTHING
    return Request(kind, wordings.draw(rng, kind, about), about)


def draw_for_view(
    room: Room, view: View, rng: np.random.Generator, wordings: Wordings = PLAIN
) -> Request:
    """Return a question about ``view`` that no borderline sight makes ambiguous."""
    while True:
        kind = _drawn(rng, _QUESTIONS) or Kind.WHAT_DO_YOU_SEE
        about = _SUBJECTS[kind](room, view, rng)
        if about is not None:
            return Request(kind, wordings.draw(rng, kind, about), about)


def _is_there(room: Room, view: View, rng: np.random.Generator) -> About | None:
    """Return something that is certainly in view, or as often something that is not."""
    sights = (*view.things, *view.furniture)
    names = dict.fromkeys((*TRAINED_PAIRS, *_names(room), *SHAPES, *NAMED_FURNITURE))
    certain = {
        name: found for name in names if (found := _certain(About(name), sights)) is not None
    }
    yes = rng.random() < 0.5
    return _name(rng, [name for name, found in certain.items() if bool(found) == yes])


def _how_many(room: Room, view: View, rng: np.random.Generator) -> About | None:
    """Return a shape, a colour or all things, mostly such as are in view."""
    names = {name: _certain(About(name), view.things) for name in ("", *SHAPES, *COLOURS)}
    some = rng.random() < 0.8
    fits = [n for n, found in names.items() if found is not None and bool(found) == some]
    return _any(rng, [About(name) for name in fits])


def _what_colour(room: Room, view: View, rng: np.random.Generator) -> About | None:
    """Return the only thing of its shape in view, one by its relation, or a shape not in view."""
    if rng.random() < 0.3:
        return _any(rng, relations(view))
    count = int(rng.random() < 0.8)
    return _any(rng, [About(s) for s in SHAPES if _certain(About(s), view.things) == count])


def _all(room: Room, view: View, rng: np.random.Generator) -> About | None:
    """Return the subject of a question about all that is in view, people aside."""
    named = [sight for sight in (*view.things, *view.furniture) if sight.name != "person"]
    return None if _certain(NOTHING, named) is None else NOTHING


_SUBJECTS: dict[Kind, Callable[[Room, View, np.random.Generator], About | None]] = {
    Kind.IS_THERE: _is_there,
    Kind.HOW_MANY: _how_many,
    Kind.WHAT_COLOUR: _what_colour,
    Kind.WHAT_DO_YOU_SEE: _all,
}


def _certain(about: About, sights: Sequence[Sight]) -> int | None:
    """Return how many of ``sights`` in view are meant, or None if one of them is borderline."""
    meant = [sight for sight in sights if about.matches(sight.name)]
    if any(sight.borderline for sight in meant):
        return None
    return sum(sight.in_view for sight in meant)


def _names(room: Room) -> list[str]:
    """Return what is in ``room`` and may be asked for: each thing, and furniture but not people."""
    names = [thing.name for thing in room.things] + [part.name for part in room.furniture]
    return [name for name in names if name != "person"]


def _there(rng: np.random.Generator, room: Room) -> About:
    """Return something in ``room``; by its shape alone only where that means one thing."""
    shapes = [thing.shape for thing in room.things]
    unique = [shape for shape in shapes if shapes.count(shape) == 1]
    return _name(rng, [*_names(room), *unique]) or NOTHING


def _absent(rng: np.random.Generator, room: Room) -> About:
    """Return something that ``room`` lacks."""
    names, there = (*TRAINED_PAIRS, *SHAPES, *NAMED_FURNITURE), _names(room)
    lacking = [name for name in names if not any(map(About(name).matches, there))]
    return _name(rng, lacking) or NOTHING


def _name(rng: np.random.Generator, names: Sequence[str]) -> About | None:
    """Return one of ``names``: first its form is drawn, then the name."""
    forms = [
        [name for name in names if " " in name],
        [name for name in names if name in SHAPES],
        [name for name in names if name in NAMED_FURNITURE],
    ]
    shares = np.array([share if form else 0.0 for share, form in zip(_FORMS, forms, strict=True)])
    if not shares.any():
        return None
    return About(str(rng.choice(forms[int(rng.choice(3, p=shares / shares.sum()))])))


def _drawn(rng: np.random.Generator, shares: Mapping[Kind, float]) -> Kind | None:
    """Return a kind by its share, or None for what is left of 1."""
    drawn = rng.random()
    for kind, share in shares.items():
        drawn -= share
        if drawn < 0:
            return kind
    return None


def _any(rng: np.random.Generator, options: Sequence[About]) -> About | None:
    return options[int(rng.integers(len(options)))] if options else None
