"""The generated corpora are the same for a seed, sample for sample, whatever becomes of the code.

The shipped models were trained on them, and figures in docs/ were measured on them.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import astuple

import numpy as np
import pytest

from collab_llm_lab.home.corpus import corpus
from collab_llm_lab.home.requests import About, Kind
from collab_llm_lab.home.wording import HELD_OUT, PLAIN, TRAINED
from collab_llm_lab.training.minions.chats import planner_group, worker_group
from collab_llm_lab.training.minions.logs import LogWriter
from collab_llm_lab.training.minions.questions import CLASSES, draw
from collab_llm_lab.training.text.checker import lexicon
from collab_llm_lab.training.text.samples import SKILLS, make_sample


def plain(value: object) -> object:
    """Return ``value`` with its sets in order."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return sorted(value) if isinstance(value, frozenset) else value


def text(sub_domain: str) -> Iterator[object]:
    for skill, held_out, seed in itertools.product(SKILLS, (False, True), range(40)):
        rng = random.Random(f"{skill} {seed}")
        sample = make_sample(rng, sub_domain, skill, held_out=held_out)
        yield [plain(part) for part in astuple(sample)]
    yield sorted(lexicon(sub_domain))


def minions() -> Iterator[object]:
    for seed in range(60):
        rng, held_out = random.Random(seed), bool(seed % 2)
        yield astuple(worker_group(rng, 3 + seed % 20, 5, held_out=held_out))
        yield astuple(planner_group(rng, 8, held_out=held_out))
        writer = LogWriter(rng, held_out=held_out)
        asked = [draw(writer, group, held_out_wording=held_out) for group in CLASSES]
        planted = [entries for each in asked for entries in each.planted]
        yield [astuple(each) for each in asked]
        yield writer.log(planted, 400, lambda line: len(line.split())).text


def nav() -> Iterator[object]:
    yield corpus()
    for wordings in (PLAIN, TRAINED, *HELD_OUT.values()):
        rng = np.random.default_rng(7)
        yield [wordings.draw(rng, Kind.GO, About("red ball")) for _ in range(400)]


@pytest.mark.parametrize(
    ("made", "digest"),
    [
        pytest.param(lambda: text("conversation"), "7075946e1d45ec27", id="conversation"),
        pytest.param(lambda: text("instructions"), "dbcf93c57174c0b8", id="instructions"),
        pytest.param(lambda: text("reports"), "9948999bf93f06d8", id="reports"),
        pytest.param(minions, "00e5ba2d8d8e75ca", id="minions"),
        pytest.param(nav, "7b25cd4070153f15", id="nav"),
    ],
)
def test_a_seed_gives_the_corpus_it_always_gave(
    made: Callable[[], Iterator[object]], digest: str
) -> None:
    found = hashlib.sha256()
    for sample in made():
        found.update(repr(sample).encode())
    assert found.hexdigest()[:16] == digest
