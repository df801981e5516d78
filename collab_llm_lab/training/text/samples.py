"""Samples of the text domain: a prompt with its right answer, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from collab_llm_lab.training.text import skills
from collab_llm_lab.training.text.facts import STYLES
from collab_llm_lab.training.text.passages import Quoted
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.turns import Turn

SUB_DOMAINS = STYLES
_SHARES = {
    "plain": 0.40,
    "extract": 0.24,
    "recall": 0.06,
    "document": 0.10,
    "outline": 0.05,
    "point": 0.08,
    "copy": 0.07,
}
SKILLS = tuple(_SHARES)
DEFAULT_MIX: Mapping[tuple[str, str], float] = {
    (sub_domain, skill): _SHARES[skill] / 3 for sub_domain in SUB_DOMAINS for skill in SKILLS
}
"""Share of each kind of sample, counted in samples."""


@dataclass(frozen=True)
class Sample:
    """A prompt and its right answer.

    Attributes:
        turns: an optional system turn, then user and assistant in turn; the last is the answer.
        facts: input of the checker, for example ``{"answer": "3", "distractors": 5}``.
        quoted: the words that each assistant's turn copies from the prompt, as far as known.
    """

    sub_domain: str
    skill: str
    turns: tuple[Turn, ...]
    facts: Mapping[str, Any]
    quoted: Quoted = ()


def make_sample(
    rng: random.Random,
    sub_domain: str,
    skill: str,
    *,
    held_out: bool = False,
    new_wordings: bool | None = None,
) -> Sample:
    """Return a sample of one kind; a held-out one has names and wordings never trained on.

    Args:
        new_wordings: as ``held_out``, for the wordings alone.

    Raises:
        ConfigError: no such sub-domain or skill.
    """
    if sub_domain not in SUB_DOMAINS:
        raise ConfigError(
            repr(sub_domain), field="sub_domain", remedy=f"choose of {', '.join(SUB_DOMAINS)}"
        )
    if skill not in SKILLS:
        raise ConfigError(repr(skill), field="skill", remedy=f"choose of {', '.join(SKILLS)}")
    make: Callable[[World, str], skills.Made] = getattr(skills, skill)
    return Sample(sub_domain, skill, *make(World(rng, held_out, new_wordings), sub_domain))


def draw_sample(
    rng: random.Random,
    *,
    held_out: bool = False,
    mix: Mapping[tuple[str, str], float] = DEFAULT_MIX,
) -> Sample:
    """Return a sample of a kind drawn from `mix`."""
    sub_domain, skill = rng.choices(tuple(mix), weights=tuple(mix.values()))[0]
    return make_sample(rng, sub_domain, skill, held_out=held_out)


def vocabulary_text(rng: random.Random) -> Iterator[str]:
    """Yield endless texts in the proportions of the domain, to train a tokenizer on."""
    while True:
        for turn in draw_sample(rng).turns:
            yield turn.content
