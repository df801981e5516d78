"""Draft and target of different families: shared tokens, and own rules for pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_models import scene, tiny_model

from collab_llm_lab.bench.lossless.check import compare_lossless, transformers_generate
from collab_llm_lab.random_models import write_random_model
from collab_llm_lab.random_seeing_models import FAMILIES
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput, VocabularyMismatch
from collab_llm_nodes.models.loading import LoadedModel, TargetConfig, load
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient

TOKENS = 16
PROMPT = Prompt("go to the red ball", (scene(0), scene(1, 150, 90)))


@contextmanager
def connected(draft: Engine, target: Engine) -> Iterator[RemoteRunner]:
    """The edge-cloud path of a pair."""
    with (
        start_server(VerifierConfig(address="127.0.0.1:0"), target) as server,
        VerifierClient(ClientLinkConfig(address=f"127.0.0.1:{server.port}")) as client,
    ):
        yield RemoteRunner(draft, client)


@pytest.mark.parametrize(
    ("draft", "target"),
    [
        ("qwen2_vl", "qwen2_5_vl"),
        ("qwen2_5_vl", "qwen3_vl"),
        ("qwen3_vl", "qwen2_vl"),
        ("smolvlm", "qwen3_vl"),
        ("qwen2_vl", "gemma3"),
        ("internvl", "smolvlm"),
        ("qwen2_vl", "gemma4"),
        ("qwen2_5_vl", "idefics3"),
    ],
)
def test_the_answer_is_the_targets_own(draft: str, target: str) -> None:
    small = Engine(tiny_model(draft, seed=1, padding=5, layers=2))
    large = Engine(tiny_model(target, padding=37, exit_layers=(1, 2)))
    rows = [e.loaded.model.get_output_embeddings().out_features for e in (small, large)]
    assert rows[0] != rows[1], "padded to different sizes"
    assert large.loaded.shared_sizes[small.vocabulary] == small.vocab_size
    if {draft, target} & FAMILIES.keys():
        prompts = [encode(PROMPT, engine.loaded).ids for engine in (small, large)]
        assert prompts[0] != prompts[1], "each has as many placeholders as its own features"
    expected, _ = transformers_generate(
        large.loaded, encode(PROMPT, large.loaded), SamplingConfig(), TOKENS, large.eos
    )
    with connected(small, large) as runner:
        answer = runner.generate(PROMPT, SamplingConfig(), TOKENS)
        assert list(answer.tokens) == expected
        with pytest.raises(InvalidInput, match="control token"):
            runner.generate(Prompt("a <|image_pad|>", PROMPT.images), SamplingConfig(), TOKENS)
        assert list(runner.generate(PROMPT, SamplingConfig(), TOKENS).tokens) == expected


TOOLS = ("<tool_call>", "</tool_call>", "<think>")
"""Tokens that later checkpoints of a line add, as Qwen2.5-VL's does to Qwen2-VL's."""


def later(folder: Path, name: str, added: Sequence[str] = TOOLS) -> LoadedModel:
    """A random model with further tokens, which it does not use of itself."""
    written = write_random_model(folder / name, name, added=added, padding=5)
    loaded = load(TargetConfig(str(written), exit_layers=(1,)))
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight[loaded.vocab_size - len(added) :] = 0
    return loaded


@pytest.mark.parametrize("target", ["qwen2_5_vl", "qwen3_vl"])
def test_a_target_with_further_tokens_answers_as_alone(target: str, tmp_path: Path) -> None:
    small = Engine(tiny_model("qwen2_vl", seed=1, padding=9, layers=2))
    large = Engine(later(tmp_path, target))
    assert large.vocab_size == small.vocab_size + len(TOOLS)
    samplings = [
        SamplingConfig(),
        SamplingConfig(temperature=1.0, law="coupled", seed=1),
        SamplingConfig(temperature=0.7, top_k=20, top_p=0.9, law="coupled", seed=2),
    ]
    with connected(small, large) as runner:
        report = compare_lossless(
            lambda *asked: runner.generate(*asked).tokens,
            large,
            [PROMPT, Prompt("go to the blue cone")],
            samplings,
            max_tokens=TOKENS,
        )
        answer = runner.generate(PROMPT, SamplingConfig(), TOKENS)
    assert (report.answers, report.mismatches) == (6, 0), report.differences
    assert answer.text == large.decode(answer.tokens)


def test_a_token_that_only_the_target_knows_is_an_error_and_no_other_text(tmp_path: Path) -> None:
    small = Engine(tiny_model("qwen2_vl", seed=1, layers=2))
    loaded = later(tmp_path, "qwen2_5_vl")
    asked = loaded, encode(PROMPT, loaded), SamplingConfig(), TOKENS, frozenset[int]()
    before, _ = transformers_generate(*asked)
    unknown, head = loaded.vocab_size - 1, loaded.model.get_output_embeddings()
    with torch.no_grad():
        head.weight[unknown] = 2 * head.weight[before[5]]
    right, _ = transformers_generate(*asked)
    known = right.index(unknown)
    assert known, "or nothing was decoded before it"
    found: list[int] = []
    with connected(small, Engine(loaded)) as runner:
        with pytest.raises(VocabularyMismatch, match=f"token {unknown}") as caught:
            runner.generate(PROMPT, SamplingConfig(), TOKENS, on_tokens=found.extend)
        assert (caught.value.field, bool(caught.value.remedy)) == ("vocabulary", True)
        assert found == right[: len(found)]
        answer = runner.generate(PROMPT, SamplingConfig(), known)
    assert list(answer.tokens) == right[:known]


@pytest.mark.parametrize(
    "added",
    [("<tool_call>", "</tool_call>", "<act>"), (*TOOLS, "</think>")],
    ids=["another_text", "more_than_the_target"],
)
def test_a_draft_with_other_added_tokens_is_refused(added: Sequence[str], tmp_path: Path) -> None:
    small, large = later(tmp_path, "qwen2_vl", added), later(tmp_path, "qwen3_vl")
    with (
        connected(Engine(small), Engine(large)) as runner,
        pytest.raises(VocabularyMismatch, match="different"),
    ):
        runner.generate(PROMPT, SamplingConfig(), TOKENS)
