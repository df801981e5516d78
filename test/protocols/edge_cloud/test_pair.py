"""Two models as draft and target: whether they fit, and which mode of decoding pays."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_folder, tiny_model

from collab_llm_lab.random_models import write_random_model
from collab_llm_nodes.decoding.draft_length import Acceptance
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import DeadlineExceeded
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.pair import PairReport, check_pair
from collab_llm_nodes.protocols.edge_cloud.pair_timing import (
    Link,
    MeasureConfig,
    Measurement,
    Prefill,
    assume,
    fastest,
    load_pair,
    predict,
    time_pair,
)
from collab_llm_nodes.protocols.edge_cloud.planner import Profile
from collab_llm_nodes.protocols.edge_cloud.runner import Generation, InProcessRunner
from collab_llm_nodes.protocols.means import Mean


def checked(target: str | Path, draft: str | Path) -> PairReport:
    return check_pair(ModelConfig(str(target)), ModelConfig(str(draft)))


def test_the_shipped_pair_fits() -> None:
    report = checked("nav-target", "nav-draft")
    assert report.fits, report.all_reasons
    assert report.same_chat
    assert report.first_difference is None
    assert report.target.exits is not None
    assert report.target.picture_tokens == report.draft.picture_tokens
    assert json.loads(json.dumps(report.as_json()))["fits"] is True


def test_two_families_with_one_tokenizer_fit() -> None:
    report = checked(tiny_folder("qwen2_5_vl", padding=7), tiny_folder("qwen2_vl"))
    assert report.fits, report.all_reasons
    assert report.target.vocabulary is not None
    assert report.draft.vocabulary is not None
    assert report.target.vocabulary.hash == report.draft.vocabulary.hash
    assert report.target.vocabulary.rows == report.draft.vocabulary.rows + 7


def test_a_target_with_further_added_tokens_fits_with_a_note(tmp_path: Path) -> None:
    added = ("<tool_call>", "<think>")
    target = write_random_model(tmp_path / "target", "qwen2_5_vl", added=added)
    report = checked(target, tiny_folder("qwen2_vl"))
    assert report.fits, report.all_reasons
    assert any("lacks 2 added tokens" in n and "'<tool_call>'" in n for n in report.notes)
    assert "shared" not in report.as_json()["target"]
    reverse = checked(tiny_folder("qwen2_vl"), target)
    assert [reason.code for reason in reverse.reasons] == ["VOCABULARY_MISMATCH"]


def test_two_vocabularies_do_not() -> None:
    report = checked("text-target", "nav-draft")
    assert not report.fits
    assert [(r.code, r.field) for r in report.reasons] == [
        ("VOCABULARY_MISMATCH", "vocabulary"),
        ("INVALID_CONFIG", "pictures"),
    ]
    assert all(reason.remedy for reason in report.reasons)
    difference = report.first_difference
    assert difference is not None
    assert report.target.tokens.get(difference.target or "") == difference.id
    assert report.draft.tokens.get(difference.draft or "") == difference.id
    for token, i in report.target.tokens.items():
        assert i >= difference.id or report.draft.tokens[token] == i


def test_two_chat_forms_fit_with_a_note(tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "draft"))
    (draft / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}", encoding="utf-8"
    )
    report = checked(tiny_folder("llama"), draft)
    assert report.fits, report.all_reasons
    assert report.same_chat is False
    assert any("templates differ" in note for note in report.notes)


def test_both_sides_say_what_they_lack(tmp_path: Path) -> None:
    report = checked(tmp_path, "nobody's-model")
    assert [reason.field for reason in report.all_reasons] == ["target.path", "draft.path"]
    assert report.same_chat is None
    json.dumps(report.as_json())


def profile(**figures: float) -> Profile:
    """A profile after rounds with drafts of four tokens, each accepted with chance 0.8."""
    known = {"t_p": 0.010, "step": 0.012, "t_q1": 0.100, "t_q": 0.110, "drafted": 4.0, **figures}
    means: dict[str, Any] = {name: Mean(value, count=10) for name, value in known.items()}
    return Profile(**means, acceptance=Acceptance.assumed(0.8), speculating=True)


def measured(**figures: float) -> Measurement:
    reading = Prefill(500, 0.4)
    return Measurement(profile(**figures), 4, reading, reading, 60_000, 150_000)


FAST = Link(0.0, 1e6, 1e6)


def test_an_assumed_acceptance_gives_the_geometric_series() -> None:
    for gamma in (1, 4, 8):
        expected = sum(0.8**i for i in range(gamma + 1))
        assert Acceptance.assumed(0.8).tokens(gamma) == pytest.approx(expected, rel=1e-3)
    assert Acceptance.assumed(0.0).tokens(8) == pytest.approx(1.0)
    assert Acceptance.assumed(1.0).tokens(8) == pytest.approx(9.0)


def test_the_modes_are_predicted_by_the_papers_formula() -> None:
    """Paper 003, Table 4, without a link: (gamma T_p + T_q) / tau, at the best gamma."""
    alone, plain, ahead = predict(measured(), FAST)
    assert (alone.mode, alone.speedup) == ("ar", 1.0)
    assert alone.token_ms == pytest.approx(100.0)
    times = {
        gamma: 1e3
        * (gamma * 0.010 + 0.100 + gamma * 0.0025)
        / sum(0.8**i for i in range(gamma + 1))
        for gamma in range(1, 9)
    }
    best = min(times, key=lambda gamma: times[gamma])
    assert plain.mode == f"sd({best})"
    assert plain.token_ms == pytest.approx(times[best], rel=1e-3)
    assert plain.speedup == pytest.approx(100.0 / plain.token_ms)
    assert ahead.token_ms < plain.token_ms  # nothing was unexpected


def test_a_slow_link_leaves_it_to_the_cloud() -> None:
    """2 T_c + gamma T_p > (tau - 1) T_q, and all verdicts unexpected."""
    slow = Link(rtt_ms=2000.0)
    predictions = predict(measured(unexpected=1.0), slow)
    assert fastest(predictions).mode == "ar"
    assert fastest(predict(measured(unexpected=1.0), FAST)).mode != "ar"


def test_bytes_take_time_on_a_narrow_link() -> None:
    wide, narrow = (predict(measured(), Link(0.0, mbit, mbit)) for mbit in (1000.0, 0.01))
    assert narrow[1].token_ms > wide[1].token_ms + 50
    assert narrow[0] == wide[0]
    link = Link(rtt_ms=100.0, up_mbit=1.0)
    assert measured().opening_s(link) == pytest.approx(0.1 + 60_120 * 8e-6 + 0.4)


def test_exits_have_a_row_of_their_own() -> None:
    predictions = predict(measured(unexpected=0.2, by_exit=0.3, exit_s=0.03), Link(rtt_ms=40.0))
    assert [each.exits for each in predictions] == [False, False, False, True]
    assert predictions[3].token_ms < predictions[2].token_ms


def test_figures_of_another_machine_take_their_place() -> None:
    other = assume(measured(), acceptance=0.3, draft_ms=40.0)
    assert other.profile.t_p.value == pytest.approx(0.040)
    assert other.profile.step.value == pytest.approx(0.048)
    assert other.profile.tau(1) == pytest.approx(1.3)
    assert measured().profile.t_p.value == 0.010


@pytest.mark.parametrize("architecture", ["llama", "qwen2_vl"])
def test_a_pair_is_timed(architecture: str) -> None:
    engine = Engine(tiny_model(architecture, exit_layers=(2,)))
    config = MeasureConfig(questions=("go to the red ball", "stop"))
    found = time_pair(engine, Engine(tiny_model(architecture)), config)
    figures = found.figures()
    times = {name: value for name, value in figures.items() if name.endswith("_ms")}
    assert all(value > 0 for value in times.values()), times
    assert figures["tau"] > 4.0  # a model that drafts for itself
    pictures = found.target.tokens if architecture == "qwen2_vl" else 0
    assert found.upload > 100 * bool(pictures)
    assert {each.mode.partition("(")[0] for each in predict(found, Link())} == {
        "ar",
        "sd",
        "push_ahead",
    }


def test_a_budget_that_is_spent_ends_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = (Engine(tiny_model("llama")), Engine(tiny_model("llama", seed=1)))
    asked: list[str] = []
    generate = InProcessRunner.generate

    def answer_two(self: InProcessRunner, prompt: Prompt, *arguments: Any) -> Generation:
        asked.append(prompt.text)
        if len(asked) > 2:
            raise DeadlineExceeded("too late")
        return generate(self, prompt, *arguments)

    monkeypatch.setattr(InProcessRunner, "generate", answer_two)
    found = time_pair(*engines, MeasureConfig(questions=("go", "stop", "on", "left")))
    assert asked == ["go", "stop", "on"]
    assert found.profile.tau(4) >= 1.0
    with pytest.raises(DeadlineExceeded):
        time_pair(*engines, MeasureConfig(questions=("go",)))


def test_the_exits_beside_a_target_are_loaded() -> None:
    report = checked("nav-target", "nav-draft")
    target, draft = load_pair(report)
    assert target.exit_layers == (report.target.exits and report.target.exits.layers)
    assert draft.exit_layers == ()
    plain = replace(report.target, exits=None)
    assert load_pair(replace(report, target=plain))[0].exit_layers == ()
