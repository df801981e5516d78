"""Samples of the text domain: deterministic, within limits, held-out apart, well formed."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
import statistics
import sys
from pathlib import Path

import pytest

from collab_llm_lab.training import text
from collab_llm_lab.training.text.checker import check
from collab_llm_lab.training.text.names import is_held_out
from collab_llm_lab.training.text.passages import Writer
from collab_llm_lab.training.text.samples import (
    DEFAULT_MIX,
    SKILLS,
    SUB_DOMAINS,
    Sample,
    draw_sample,
    make_sample,
    vocabulary_text,
)
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.jupiter import outline

KINDS = list(itertools.product(SUB_DOMAINS, SKILLS))


def samples(sub_domain: str, skill: str, count: int, held_out: bool = False) -> list[Sample]:
    """Return the first samples of one kind."""
    return [
        make_sample(random.Random(seed), sub_domain, skill, held_out=held_out)
        for seed in range(count)
    ]


def prompt(sample: Sample) -> str:
    """Return all turns but the answer."""
    return "\n".join(turn.content for turn in sample.turns[:-1])


@pytest.mark.parametrize(("sub_domain", "skill"), KINDS)
@pytest.mark.parametrize("held_out", [False, True])
def test_own_answers_are_right_and_within_the_limits(
    sub_domain: str, skill: str, held_out: bool
) -> None:
    for sample in samples(sub_domain, skill, 300, held_out):
        assert (sample.sub_domain, sample.skill) == (sub_domain, skill)
        answer = sample.turns[-1].content
        assert check(sample, answer) == "", answer
        contents = [turn.content for turn in sample.turns]
        assert sum(len(content.split()) for content in contents) <= 720
        assert sum(len(content) for content in contents) <= 4000
        assert not re.search(r"[{}\[\]]|  ", answer.replace("\\", "")) or answer.startswith("{")
        roles = [turn.role for turn in sample.turns if turn.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert "system" not in [turn.role for turn in sample.turns[1:]]


@pytest.mark.parametrize("sub_domain", SUB_DOMAINS)
def test_plain_answers_are_long_and_all_different(sub_domain: str) -> None:
    answers = [sample.turns[-1].content for sample in samples(sub_domain, "plain", 1000)]
    assert len(set(answers)) >= 980
    lengths = [len(answer.split()) for answer in answers]
    assert statistics.median(lengths) >= 110
    assert min(lengths) >= 40
    assert max(lengths) <= 250


@pytest.mark.parametrize("sub_domain", SUB_DOMAINS)
def test_recall_asks_for_each_line_of_a_passage(sub_domain: str) -> None:
    for sample in samples(sub_domain, "recall", 100):
        first, *later = sample.turns
        answers = [turn.content for turn in later if turn.role == "assistant"]
        if sample.facts["form"] == "json":
            answers = [json.loads(answer)["answer"] for answer in answers]
        assert len(answers) >= 2
        assert all(answer in first.content for answer in answers)


def test_passages_of_recall_name_keys_before_values() -> None:
    def share(key_first: bool) -> float:
        found = []
        for seed in range(200):
            writer = Writer(World(random.Random(seed)), "conversation", key_first=key_first)
            kind, fields = writer.first()
            line = writer.state(kind, fields)
            places = [line.find(fields[key]) for key in kind.key]
            found.append(max(places) < line.find(fields[kind.value]))
        return statistics.mean(found)

    assert share(True) > share(False) + 0.2


def test_a_seed_decides_the_sample() -> None:
    for seed in range(20):
        first, second = (draw_sample(random.Random(seed)) for _ in range(2))
        assert first == second
    assert len({draw_sample(random.Random(seed)).turns for seed in range(50)}) == 50


def test_the_mix_decides_the_kinds() -> None:
    assert sum(DEFAULT_MIX.values()) == pytest.approx(1)
    rng = random.Random(0)
    drawn = {(s.sub_domain, s.skill) for s in (draw_sample(rng) for _ in range(600))}
    assert drawn == set(KINDS)
    only = {("reports", "copy"): 1.0}
    sample = draw_sample(rng, mix=only)
    assert (sample.sub_domain, sample.skill) == ("reports", "copy")


@pytest.mark.parametrize(
    ("sub_domain", "skill", "field"),
    [("poems", "plain", "sub_domain"), ("reports", "sing", "skill")],
)
def test_an_unknown_kind_is_refused(sub_domain: str, skill: str, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_sample(random.Random(0), sub_domain, skill)
    assert error.value.field == field


def test_held_out_names_things_and_codes_are_never_trained_on() -> None:
    def drawn(held_out: bool) -> set[str]:
        found: set[str] = set()
        for seed in range(300):
            world = World(random.Random(seed), held_out)
            person = world.person()
            found |= {person.first, person.family, world.robot(), world.thing().name}
            found |= {world.code(), *(room for room in (world.room(),) if " " in room)}
        return found

    training, held_out = drawn(False), drawn(True)
    assert len(training) > 1000
    assert len(held_out) > 500
    assert not training & held_out
    assert not any(is_held_out(name) for name in training)


def test_held_out_questions_have_wordings_of_their_own() -> None:
    """The frames around a passage are the same text up to the fields."""
    frames = [
        {prompt(s).splitlines()[0] for s in samples("instructions", "copy", 200, held_out)}
        for held_out in (False, True)
    ]
    assert not frames[0] & frames[1]


def test_passages_vary_in_length_distance_and_distractors() -> None:
    drawn = [s for domain in SUB_DOMAINS for s in samples(domain, "extract", 400)]
    distances = [s.facts["distance_words"] for s in drawn]
    distractors = [s.facts["distractors"] for s in drawn]
    lengths = [len(prompt(s).split()) for s in drawn]
    assert min(lengths) < 50
    assert max(lengths) > 450
    assert min(distances) == 0
    assert max(distances) > 350
    assert min(distractors) == 0
    assert max(distractors) >= 20
    missing = sum(s.facts["answer"] == "None" for s in drawn) / len(drawn)
    assert 0.2 < missing < 0.35
    assert sum(s.facts["near_miss"] for s in drawn) > 0.1 * len(drawn)
    kinds = {s.facts["kind"] for s in drawn}
    assert {"where", "who", "when", "how many", "price", "door code", "colour"} <= kinds
    assert {"last seen", "count", "compare"} <= kinds


def test_an_extracted_fact_stands_in_the_passage() -> None:
    for sub_domain in SUB_DOMAINS:
        for sample in samples(sub_domain, "extract", 300):
            answer = sample.facts["answer"]
            if answer != "None" and sample.facts["kind"] != "count":
                assert answer.lower() in prompt(sample).lower()


def test_the_json_form_cites_the_passage_word_for_word() -> None:
    forms = {"found": 0, "missing": 0}
    for sample in samples("reports", "extract", 400):
        if sample.facts["form"] != "json":
            continue
        reply = json.loads(sample.turns[-1].content)
        if sample.facts["answer"] == "None":
            assert reply["answer"] is None
            assert reply["citation"] is None
            forms["missing"] += 1
        else:
            assert reply["citation"] in prompt(sample)
            assert reply["answer"].lower() in reply["citation"].lower()
            forms["found"] += 1
    assert min(forms.values()) > 10


def test_documents_are_forty_to_sixty_four_words_long() -> None:
    relevant = set()
    for sub_domain in SUB_DOMAINS:
        for sample in samples(sub_domain, "document", 200):
            relevant.add(sample.facts["relevant"])
            documents = re.findall(r"^Document: (.*)$", prompt(sample), re.MULTILINE)
            assert len(documents) in (1, 2)
            assert all(40 <= len(document.split()) <= 64 for document in documents)
    assert relevant == {True, False}


def test_a_point_expands_its_title_in_the_outline() -> None:
    for sub_domain in SUB_DOMAINS:
        for sample in samples(sub_domain, "point", 100):
            outline = sample.turns[-3].content.splitlines()
            number = sample.facts["point"]
            assert outline[number - 1] == f"{number}. {sample.facts['title']}"


def test_sums_of_reports_are_right() -> None:
    """Add up the tables again, in another way than the grammar does."""
    checked = 0
    for sample in samples("reports", "plain", 300):
        rows = [line for line in sample.turns[-1].content.splitlines() if " | " in line]
        if not rows[0].endswith("total | sum"):
            continue
        sums = [0]
        for row in rows[1:]:
            _, count, price, total, running = row.split(" | ")
            product = int(count) * int(price.replace(".", ""))
            assert product == int(total.replace(".", ""))
            sums.append(sums[-1] + product)
            assert sums[-1] == int(running.replace(".", ""))
        checked += 1
    assert checked > 20


def test_the_vocabulary_text_has_all_sub_domains() -> None:
    texts = list(itertools.islice(vocabulary_text(random.Random(0)), 400))
    joined = "\n".join(texts)
    for mark in ("Warning: ", "REPORT", "I'll "):
        assert mark in joined


def test_the_grammar_needs_the_standard_library_only() -> None:
    own = ["names", "world", "tasks", "facts"]
    own += ["passages", "skills", "samples", "checker", *SUB_DOMAINS]
    folder = Path(text.__file__).parent
    templates = [folder.parents[1] / f"{name}.py" for name in ("phrases", "phrasebook")]
    allowed = {
        "collab_llm_nodes.errors",
        "collab_llm_nodes.models.guide",
        "collab_llm_nodes.models.thoughts",
        "collab_llm_nodes.models.turns",
        "collab_llm_nodes.protocols.jupiter.outline",
        "collab_llm_lab",
        "collab_llm_lab.phrasebook",
        "collab_llm_lab.phrases",
        "collab_llm_lab.training.text",
    }
    own_files = [folder / f"{name}.py" for name in own]
    for path in [*own_files, *templates, Path(outline.__file__)]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:  # not within functions
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                inside = module in allowed or module.startswith("collab_llm_lab.training.text.")
                assert inside or module.split(".")[0] in sys.stdlib_module_names, module
