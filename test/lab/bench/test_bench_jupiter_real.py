"""The real runs of the Jupiter benchmark, with workers in this process and tiny models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jupiter_bed import PATIENT, folder, in_this_process
from text_family import write_family

from collab_llm_lab.bench.jupiter import material, real
from collab_llm_lab.bench.jupiter.material import Questions
from collab_llm_lab.bench.link.proxy import LinkProxy
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.protocols.jupiter.messages import Span
from collab_llm_nodes.protocols.jupiter.outline import OUTLINE_DIRECTIVE, read_outline
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline, PipelineConfig


@pytest.fixture(autouse=True)
def _without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "local_workers", in_this_process)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_family(tmp_path_factory.mktemp("family")) / "text-target")


def quiet(words: str) -> None:
    """Tell nobody."""


def test_prefill_is_timed_against_one_core_and_its_ceiling() -> None:
    found = real.run_prefill(str(folder()), [40, 64], 1, quiet)
    for tokens in (40, 64):
        row = found[f"prefill_{tokens}"]
        assert sum(row["parts"]) == tokens
        assert len(row["parts"]) in real.PARTS_TRIED
        assert row["jupiter_s"] == min(row["tried_s"].values())
        assert row["of_ceiling"] == pytest.approx(row["ceiling_s"] / row["jupiter_s"])
        assert row["speedup"] == pytest.approx(row["single_s"] / row["jupiter_s"])
        assert min(row["two_threads_s"], row["pipeline_s"], row["ceiling_s"]) > 0
        assert row["crowded_s"] > 0
        assert row["handover_s"] > 0
    assert 0 <= found["max_abs_diff"] < 1e-4
    rounded = found["max_abs_diff_of"]
    assert found["max_abs_diff"] < rounded["float16"] < rounded["int8"]
    sizes = {n: row["largest_worker_tensor_mb"] for n, row in found["memory"].items()}
    assert 0 < sizes["2"] < sizes["1"]


def test_a_division_that_is_given_is_used() -> None:
    found = real.run_prefill(str(folder()), [30], 1, quiet, lambda tokens: [tokens - 9, 9])
    assert found["prefill_30"]["parts"] == [21, 9]
    assert found["slowdown"] == 1.0
    assert list(found["prefill_30"]["tried_s"]) == ["plan"]


def test_slower_devices_can_be_emulated() -> None:
    found = real.run_prefill(str(folder()), [30], 1, quiet, stages=3, slowdown=3.0)
    assert (found["stages"], found["slowdown"]) == (3, 3.0)
    assert "two_threads_s" not in found["prefill_30"]
    assert set(found["memory"]) == {"1", "3"}


def test_a_flow_shop_ends_when_its_last_job_does() -> None:
    assert real.makespan([[2.0, 3.0]]) == 5.0
    assert real.makespan([[2.0, 2.0], [2.0, 2.0]]) == 6.0
    assert real.makespan([[1.0, 5.0], [1.0, 5.0]]) == 11.0
    assert real.makespan([[5.0, 1.0], [5.0, 1.0]]) == 11.0


def test_a_handover_is_a_wait_for_states_that_are_computed() -> None:
    late = [Span(0.0, 2.0), Span(2.5, 4.0)]
    behind_another = [Span(2.0, 3.0), Span(4.0, 5.0)]
    not_computed_yet = [Span(3.0, 7.0), Span(7.25, 8.0)]
    assert real.handover([late]) == 0.5
    assert real.handover([late, behind_another]) == 0.5
    assert real.handover([late, behind_another, not_computed_yet]) == 0.75
    assert real.handover([[Span(0.0, 1.0)], [Span(1.5, 2.0)]]) == 0.0, (
        "one stage hands nothing over"
    )


def test_a_worker_that_is_cut_off_is_found_and_nothing_changes() -> None:
    model = str(folder())
    ids = real.random_ids(model, 20)
    with in_this_process(2, model) as (first, second), LinkProxy(second.address) as link:
        config = PipelineConfig((first.address, link.address), replace(PATIENT, silence_s=3.0))
        with Pipeline(config) as made:
            right = real.answer(made, ids, real.DecodeConfig(12), real.control()).tokens
            row = real.one_death(made, link.address, link.half_open, ids, right)
            assert row["identical"]
            assert 0 < row["detected_s"] < row["restored_s"]


def test_points_are_read_as_the_chat_template_has_them(text_model: str) -> None:
    tokenizer = read_facts(ModelConfig(text_model)).tokenizer
    reader = Questions(tokenizer)
    text = "1. first things\n2. the second\n3. the last\nno point\n4. no more"
    for ended in (True, False):
        outline = tokenizer(text, add_special_tokens=False).input_ids
        outline += [tokenizer.eos_token_id] if ended else []
        found = reader.prompts.requests(outline)
        assert len(found) == 3
        for point, ids in zip(read_outline(text).points, found, strict=True):
            whole = tokenizer.apply_chat_template(
                [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": point.request},
                ],
                tokenize=False,
                add_generation_prompt=True,
            )
            said = tokenizer.decode([*outline, *ids])
            assert str(whole).endswith(str(said))
    plain, directed = reader.outlined(3)[1]
    assert len(directed) > len(plain)
    assert OUTLINE_DIRECTIVE in tokenizer.decode(directed)


def test_a_random_model_is_written_whole(tmp_path: Path) -> None:
    facts = read_facts(ModelConfig(str(material.write_wide_model(tmp_path, 64))))
    assert (facts.num_layers, facts.context, facts.width) == (8, 64, 768)
