"""Invented houses: facts in documents of 64 tokens, and talks in which they come up again.

A house has a name, which its documents begin with and its talk mentions, so that the documents can
be found. The talk says the facts in other words than the documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from collab_llm_lab.phrases import Voice, pick, say
from collab_llm_lab.training.text.facts import Fields, Kind
from collab_llm_lab.training.text.passages import Writer
from collab_llm_lab.training.text.samples import SUB_DOMAINS
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.turns import Turn

_MENTION_EVERY = 4
"""Questions from one mention of the house to the next."""
_TRIES, _MOST_TRIES = 8, 400
"""Facts that are drawn for a document, and for one in which none fits at first; those that do not
fit are left out."""


@dataclass(frozen=True)
class Exchange:
    """A question and its answer.

    Attributes:
        value: the part of the answer that only a document tells.
        document: number of the document that states it.
    """

    question: str
    answer: str
    value: str
    document: int


@dataclass(frozen=True)
class House:
    """The documents of one house, and a talk about the facts in them."""

    name: str
    documents: tuple[str, ...]
    talk: tuple[Exchange, ...]

    def turns(self) -> tuple[Turn, ...]:
        """Return the talk as a chat."""
        return tuple(
            turn
            for exchange in self.talk
            for turn in (Turn("user", exchange.question), Turn("assistant", exchange.answer))
        )


def make_house(
    seed: str, documents: int, exchanges: int, fits: Callable[[str], bool], held_out: bool = True
) -> House:
    """Draw a house.

    Args:
        exchanges: of the talk; each fact comes up once before one comes up again.
        fits: returns False for a text that is too long for a document.
        held_out: draw names and wordings that the text models were never trained on.

    Raises:
        InvalidInput: the documents are too short for a fact.
    """
    rng = random.Random(seed)
    world = World(rng, held_out)
    writer = Writer(world, world.any(SUB_DOMAINS))
    name = f"the house {world.person().family}"
    stated: list[tuple[Kind, Fields, int]] = []
    texts = []
    for number in range(documents):
        text = f"In {name}:"
        held = len(stated)
        for attempt in range(_MOST_TRIES):
            if attempt >= _TRIES and len(stated) > held:
                break
            kind, fields = writer.first()
            longer = f"{text} {_sentence(say(kind.statements[writer.style], Voice(rng), fields))}"
            if fits(longer):
                text = longer
                stated.append((kind, fields, number))
        if len(stated) == held:
            raise InvalidInput(
                "no fact fits into a document", field="fits", remedy="allow longer documents"
            )
        texts.append(text)
    talk: list[Exchange] = []
    while len(talk) < exchanges:
        for kind, fields, number in rng.sample(stated, len(stated)):
            question = pick(kind.questions, Voice(rng), fields, held_out)
            if len(talk) % _MENTION_EVERY == 0:
                question = f"In {name}: {question}"
            answer = say(kind.reply, Voice(rng), fields)
            talk.append(Exchange(question, answer, fields[kind.value], number))
    return House(name, tuple(texts), tuple(talk[:exchanges]))


def _sentence(text: str) -> str:
    return text if text[-1] in ".!?" else text + "."
