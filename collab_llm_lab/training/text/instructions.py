"""The sub-domain `instructions`: numbered how-to answers for house, workshop and robot.

A question names what is to be done to what, and the situation: material, dirt, part, machine. The
answer lists tools, numbered steps, a warning and the sign that the work is done. Which tools and
steps are right follows from the situation.
"""

from __future__ import annotations

from collections.abc import Sequence

from collab_llm_lab.training.text import how_to, names
from collab_llm_lab.training.text.how_to import FAMILIES, ask
from collab_llm_lab.training.text.phrases import Voice, pick, say
from collab_llm_lab.training.text.situations import key
from collab_llm_lab.training.text.tasks import Task
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.models.turns import Turn

GRAMMAR = how_to.GRAMMAR

_SYSTEM = ask(
    "Answer with numbered steps.",
    "You write instructions for house and workshop.",
    "You are a manual. Give tools, steps and warnings.",
    "Explain the work step by step.",
)


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
