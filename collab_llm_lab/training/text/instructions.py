"""The sub-domain `instructions`: numbered how-to answers for house, workshop and robot.

A question names a task, its object and the situation: material, dirt, part, machine. The answer
lists tools, numbered steps, a warning and the sign that the work is done. The situation decides
which tools and steps are right. The sentences are in ``instructions.txt``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.phrasebook import Section
from collab_llm_lab.training.text.phrases import Grammar, Phrase, Voice, pick, say
from collab_llm_lab.training.text.situations import BOOK, SITUATIONS, WORDS, Situation, key
from collab_llm_lab.training.text.tasks import Part, Task, parts_of
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.models.turns import Turn

GRAMMAR = Grammar()
"""The words of the answers."""
GRAMMAR.add_words(*WORDS)


@dataclass(frozen=True)
class HowTo:
    """A family of how-to questions.

    Attributes:
        fields: draws the names and the situation; returns also the numbers that decide choices.
        questions: wordings of the question; the last is held out of training.
        intro, warning, done: lines around the steps.
        steps: all steps; which of the `optional` ones are given depends on the situation.
        must: fields that every answer names.
    """

    fields: Callable[[World], Situation]
    questions: tuple[Phrase, ...]
    intro: tuple[Phrase, ...]
    steps: tuple[Part, ...]
    optional: frozenset[int]
    warning: tuple[Phrase, ...]
    done: tuple[Phrase, ...]
    must: tuple[str, ...]


def _family(name: str, book: Section) -> HowTo:
    steps = book["steps"]
    return HowTo(
        SITUATIONS[name],
        book["questions"].phrases(),
        book["intro"].phrases(GRAMMAR),
        parts_of(steps, GRAMMAR),
        frozenset(i for i, title in enumerate(steps.sections) if title.startswith("[")),
        book["warning"].phrases(GRAMMAR),
        book["done"].phrases(GRAMMAR),
        book["must"].words,
    )


FAMILIES = tuple(_family(name, book) for name, book in BOOK["families"].sections.items())
_SYSTEM = BOOK["system"].phrases()


def draw(world: World, freedom: float = 0.1) -> Task:
    """Return a how-to question with its answer."""
    family = world.any(FAMILIES)
    fields, keys = family.fields(world)
    for name in ("thing", "noun"):
        if name in fields:
            fields[f"a_{name}"] = names.with_article(fields[name])
    if "vessel" in fields:
        fields["vessel_noun"] = fields["vessel"].split()[-1]
    writer, user = Voice(world.rng, keys, freedom), Voice(world.rng)
    turns = []
    if world.chance(0.4):
        turns.append(Turn("system", say(_SYSTEM, user, {})))
    turns.append(Turn("user", pick(family.questions, user, fields, world.new_wordings)))
    possible = tuple(step.say(writer, fields) for step in family.steps)
    points = tuple(
        point
        for i, point in enumerate(possible)
        if i not in family.optional or writer.choose(key(point.part.title[0].text) + 97 * i, 3)
    )
    intro = say(family.intro, writer, fields)
    end = say(family.warning, writer, fields) + "\n" + say(family.done, writer, fields)

    def join(texts: Sequence[str]) -> str:
        numbered = [f"{i}. {text}" for i, text in enumerate(texts, 1)]
        return "\n".join([intro, *numbered, end])

    mentions = tuple(fields[name] for name in family.must)
    least = len(possible) - len(family.optional)
    return Task(tuple(turns), points, join, mentions, possible, least)
