"""The lossless check: passes on the real path, and sees every way of losing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import scene, tiny_folder, tiny_model, tiny_prompt

from collab_llm_lab.bench.lossless.check import (
    Generate,
    check_distribution,
    check_lossless,
    compare_lossless,
    rounding,
    transformers_generate,
)
from collab_llm_lab.random_seeing_models import FAMILIES
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.architectures import ARCHITECTURES, decoder_parts
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner

GREEDY = SamplingConfig()
COUPLED = SamplingConfig(temperature=1.0, law="coupled", seed=2)
FEW = SamplingConfig(temperature=1.0, top_k=3, seed=5)


def in_process(draft: Engine, target: Engine) -> Generate:
    runner = InProcessRunner(draft, target, gamma=3)
    return lambda prompt, sampling, n: runner.generate(prompt, sampling, n).tokens


def test_the_edge_cloud_path_is_lossless_on_every_architecture(tmp_path: Path) -> None:
    prompts = [Prompt("go to the red box", (scene(0),))]
    report = check_lossless(in_process, prompts, tmp_path, max_tokens=8, samples=0)
    families = len(ARCHITECTURES) + len(FAMILIES) + 1  # and Qwen3.5
    assert report.answers == families * 3 * 3  # drafts, samplings
    assert report.tokens > 250
    assert report.mismatches == 0, report.differences
    assert report.near_ties == 0


@pytest.mark.parametrize("kind", ["noisy", "unrelated"])
def test_rejection_sampling_follows_the_targets_law(kind: str) -> None:
    target = Engine(tiny_model("qwen2"))
    draft = tiny_model("qwen2", head_noise=0.4) if kind == "noisy" else tiny_model("qwen2", seed=7)
    generate = in_process(Engine(draft), target)
    p = check_distribution(generate, target, tiny_prompt("qwen2"), FEW, samples=120)
    assert p > 1e-3


def test_a_draft_passed_off_as_the_target_is_seen() -> None:
    target, draft = Engine(tiny_model("qwen2")), Engine(tiny_model("qwen2", head_noise=0.4))
    draft_alone = in_process(draft, draft)
    prompts = [tiny_prompt("qwen2", i) for i in range(3)]
    report = compare_lossless(draft_alone, target, prompts, [GREEDY, COUPLED], max_tokens=12)
    assert report.mismatches == 6
    assert report.as_dict()["differences"][0]["case"] == "greedy"
    assert check_distribution(draft_alone, target, prompts[0], FEW, samples=120) < 1e-4


@pytest.mark.parametrize("spoil", ["cut", "extra", "flip"])
def test_answers_of_the_wrong_length_or_content_are_seen(spoil: str) -> None:
    target = Engine(tiny_model("llama"))
    honest = in_process(target, target)

    def spoiled(prompt: Prompt, sampling: SamplingConfig, n: int) -> Sequence[int]:
        tokens = list(honest(prompt, sampling, n))
        if spoil == "cut":
            return tokens[:-1]
        return [*tokens, 3] if spoil == "extra" else [*tokens[:4], tokens[4] ^ 1, *tokens[5:]]

    report = compare_lossless(spoiled, target, [tiny_prompt("llama")], [GREEDY], max_tokens=8)
    assert (report.mismatches, report.near_ties) == (1, 0)
    assert report.differences[0].index == {"cut": 7, "extra": 8, "flip": 4}[spoil]


def test_a_near_tie_is_reported_and_counted_apart() -> None:
    loaded = load(ModelConfig(str(tiny_folder("llama"))))
    prompt = tiny_prompt("llama")
    encoded = encode(prompt, loaded)
    tokens, _ = transformers_generate(loaded, encoded, GREEDY, 6, frozenset())
    twin = next(t for t in range(20, 60) if t not in tokens)
    head = decoder_parts(loaded.model).head
    with torch.no_grad():
        head.weight[twin] = head.weight[tokens[2]]  # two tokens with equal logits everywhere
    target = Engine(loaded)
    expected, _ = transformers_generate(loaded, encoded, GREEDY, 6, target.eos)
    swapped = [twin + tokens[2] - t if t in (twin, tokens[2]) else t for t in expected]
    report = compare_lossless(lambda *_: swapped, target, [prompt], [GREEDY], max_tokens=6)
    assert (report.mismatches, report.near_ties) == (0, 1)
    assert report.differences[0].near_tie
    assert abs(report.differences[0].gap) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "largest", "gap"),
    [
        (torch.bfloat16, 9.0, 0.125),
        (torch.bfloat16, 16.0, 0.25),
        (torch.bfloat16, 28.0, 0.25),
        (torch.bfloat16, -33.0, 0.5),
        (torch.float16, 28.0, 2**-5),
        (torch.float32, 28.0, 2**-10),
        (torch.float32, 1.5, 2**-14),
    ],
)
def test_a_tie_is_as_wide_as_the_logits_are_large(
    dtype: torch.dtype, largest: float, gap: float
) -> None:
    assert rounding(torch.tensor([1.0, largest, -0.5], dtype=dtype)) == gap


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingConfig(temperature=0.5, law="coupled", seed=2)],
    ids=["greedy", "coupled"],
)
@pytest.mark.parametrize(("ulps", "near_tie"), [(0, True), (1, True), (2, True), (6, False)])
def test_logits_that_rounding_may_swap_are_a_tie_at_their_own_size(
    ulps: int, near_tie: bool, sampling: SamplingConfig
) -> None:
    """Near 40 a bfloat16 has steps of 0.25, twice of which no fixed width for 16 allows."""
    loaded = load(ModelConfig(str(tiny_folder("llama")), dtype="bfloat16"))
    prompt, right, other = tiny_prompt("llama"), 21, 22
    logits = torch.full((1, len(loaded.tokenizer)), -10.0, dtype=torch.bfloat16)
    logits[0, right], logits[0, other] = 40.0, 40.0 - 0.25 * ulps
    target = Engine(loaded)
    original = loaded.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        found.logits = logits.expand(found.logits.shape[1], -1)[None].clone()
        return found

    functools.update_wrapper(forward, original)  # generate reads its signature
    loaded.model.forward = forward
    expected, scores = transformers_generate(
        loaded, encode(prompt, loaded), sampling, 1, target.eos
    )
    got = other if expected == [right] else right
    report = compare_lossless(lambda *_: [got], target, [prompt], [sampling], max_tokens=1)
    (difference,) = report.differences
    assert difference.gap == float(scores[0][expected[0]] - scores[0][got])
    if sampling.greedy:
        assert difference.gap == 0.25 * ulps
    assert difference.near_tie == (near_tie if sampling.greedy else difference.gap <= 0.5 / 0.5)


def test_the_peer_ignores_the_checkpoints_own_generation_settings() -> None:
    """Real Qwen checkpoints prescribe sampling and a repetition penalty."""
    loaded = load(ModelConfig(str(tiny_folder("qwen2_vl"))))
    prompt = encode(tiny_prompt("qwen2_vl"), loaded)
    plain, _ = transformers_generate(loaded, prompt, GREEDY, 12, frozenset())
    own = loaded.model.generation_config
    own.repetition_penalty, own.do_sample, own.top_k = 5.0, True, 1
    assert transformers_generate(loaded, prompt, GREEDY, 12, frozenset())[0] == plain
    assert loaded.model.generation_config is own


def test_the_rejection_law_cannot_be_compared_token_for_token() -> None:
    target = Engine(tiny_model("llama"))
    with pytest.raises(ValueError, match="check_distribution"):
        compare_lossless(in_process(target, target), target, [], [FEW])
