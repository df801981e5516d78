"""The judge of answers along outlines, and the figures made of its judgements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jupiter_bed import in_this_process
from text_family import write_family

from collab_llm_lab.bench.jupiter import quality
from collab_llm_lab.bench.jupiter.material import Questions
from collab_llm_lab.bench.jupiter.quality import Answered, Asker, judge, questions
from collab_llm_lab.bench.jupiter.real import pipeline
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.protocols.jupiter.outline import OutlinePrompts, join_points
from collab_llm_nodes.protocols.jupiter.route import route

PLANNED = [name for name in quality.CATEGORIES if name != "coding"]


@pytest.mark.parametrize("category", quality.CATEGORIES)
def test_the_right_answer_is_judged_right(category: str) -> None:
    for question in questions(category, 20, 3):
        found = judge(question, question.right)
        assert found.right, (category, question.right)
        assert found.grammar == 1.0
        assert found.coverage >= 0.9, (category, question.right)


@pytest.mark.parametrize("category", PLANNED)
def test_coverage_falls_with_each_point_that_is_missing(category: str) -> None:
    for question in questions(category, 10, 5):
        texts = [point.text for point in question.points]
        found = [judge(question, join_points(texts[:n])).coverage for n in range(len(texts) + 1)]
        assert found[0] == 0.0
        assert found == sorted(found)
        assert found[-1] > found[1] > 0.0


def test_words_that_nobody_knows_lower_the_share_of_sound_sentences() -> None:
    (question,) = questions("knowledge", 1, 0)
    first, second = (point.text.split(". ")[0].rstrip(".") for point in question.points[:2])
    assert judge(question, f"{first}. {second}.").grammar == 1.0
    assert judge(question, f"{first}. {second} xyzzy.").grammar == 0.5
    assert judge(question, "").value == 0.0


def test_an_exact_text_is_covered_as_far_as_its_words_come_in_order() -> None:
    (question,) = (q for q in questions("coding", 20, 0)[:1])
    question = replace(question, sample=_with_answer(question.sample, "a b c d"))
    assert judge(question, "a b c d").coverage == 1.0
    assert judge(question, "a b x d").coverage == 0.75
    assert judge(question, "d").coverage == 0.25


def _with_answer(sample: quality.Sample, text: str) -> quality.Sample:
    *before, last = sample.turns
    return replace(sample, turns=(*before, quality.Turn(last.role, text)))


def test_a_counterfactual_question_is_the_plain_one_with_a_supposition() -> None:
    for question in questions("counterfactual", 10, 1):
        said = question.turns[-1].content
        assert said.startswith("There is no ")
        assert "suppose there were" in said
        assert route(said).outline


def test_the_router_errs_where_the_other_way_scores_better() -> None:
    accepted = [q for q in questions("knowledge", 20, 2) if route(q.turns[-1].content).outline][:4]
    right = accepted[0].right
    answers = [
        Answered(accepted[0], naive=right, outline="", usable=True),  # an error
        Answered(accepted[0], naive=right, outline=right, usable=True),
        Answered(accepted[0], naive="", outline=right, usable=False),
    ]
    found = quality.figures(answers)
    assert found["router"] == {"declined": 0, "errors": 1, "score": pytest.approx(2 / 3, abs=0.1)}
    assert found["naive"]["right"] == pytest.approx(2 / 3)
    assert (found["questions"], found["unusable"]) == (3, 1)
    declined = next(q for q in questions("coding", 20, 2) if not route(q.turns[-1].content).outline)
    worse = [Answered(declined, naive="", outline=declined.right, usable=True)]
    assert quality.figures(worse)["router"] == {"declined": 1, "errors": 1, "score": 0.0}


def test_a_model_is_asked_in_both_ways(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(write_family(tmp_path_factory.mktemp("quality")) / "text-target")
    monkeypatch.setattr(quality, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(quality, "POINT_TOKENS", 6)
    reader = Questions(read_facts(ModelConfig(model)).tokenizer)
    points = [reader.tokenizer("Expand it.").input_ids] * 3
    (question,) = questions("knowledge", 1, 0)
    with in_this_process(1, model) as running, pipeline(running, lanes=9) as made:
        monkeypatch.setattr(OutlinePrompts, "requests", lambda self, outline: points)
        found = Asker(made, reader).ask(question)
        assert found.usable
        assert found.outline.count("\n") == 2
        monkeypatch.setattr(OutlinePrompts, "requests", lambda self, outline: [])
        found = Asker(made, reader).ask(question)
    assert not found.usable
    assert found.outline == found.naive
