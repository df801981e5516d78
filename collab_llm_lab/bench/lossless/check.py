"""The edge-cloud path compared with ``transformers`` generate on the target: is it lossless?

Greedy and coupled sampling must agree token for token: for the coupled law, generate runs with
transformers' own warpers and a logits processor that adds the keyed Gumbel noise. The rejection
law agrees in distribution only: a chi-square test on short answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from collab_llm_lab import reference
from collab_llm_lab.random_models import add_head_noise, write_random_model
from collab_llm_lab.random_seeing_models import FAMILIES
from collab_llm_nodes.decoding.randomness import gumbel
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution
from collab_llm_nodes.engine.eager import on_device
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.architectures import ARCHITECTURES
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, TargetConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, encode

# The path under test: (prompt, sampling, max_tokens) -> tokens of the answer.
Generate = Callable[[Prompt, SamplingConfig, int], Sequence[int]]

_ULPS = {torch.float32: 512, torch.float16: 2, torch.bfloat16: 2}
"""Units in the last place that two logits may come closer between a batched and a one-token pass.

In half precision each is rounded to a neighbour. In float32 the sums of all layers are rounded.
"""


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer leaves the target's own.

    Attributes:
        gap: how far the target scores the expected token above the one it got (nats).
        near_tie: rounding can bridge the gap (``rounding``).
    """

    case: str
    prompt: int
    index: int
    expected: int
    got: int
    gap: float
    near_tie: bool


@dataclass
class LosslessReport:
    """Counts over all comparisons; ``mismatches`` leaves out near ties, which stand beside it."""

    answers: int = 0
    tokens: int = 0
    mismatches: int = 0
    near_ties: int = 0
    differences: list[Difference] = field(default_factory=list)
    p_values: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the results for the JSON."""
        return asdict(self)


def compare_lossless(
    generate: Generate,
    target: Engine,
    prompts: Sequence[Prompt],
    samplings: Sequence[SamplingConfig],
    *,
    max_tokens: int = 32,
    case: str = "",
    report: LosslessReport | None = None,
) -> LosslessReport:
    """Compare answers token for token; samplings must be greedy or coupled.

    Args:
        generate: the edge-cloud path with ``target`` as its target model.
        case: name in the report's differences.
        report: added to, and returned.
    """
    report = report or LosslessReport()
    for sampling in samplings:
        if sampling.sends_probabilities:
            raise ValueError("the rejection law is compared by check_distribution")
        for number, prompt in enumerate(prompts):
            encoded = encode(prompt, target.loaded)
            expected, scores = transformers_generate(
                target.loaded, encoded, sampling, max_tokens, target.eos
            )
            got = list(generate(prompt, sampling, max_tokens))
            report.answers += 1
            report.tokens += len(expected)
            name = f"{case} {'greedy' if sampling.greedy else 'coupled'}".strip()
            tie = partial(_tie, target.loaded, encoded, expected, sampling)
            difference = _first_difference(name, number, expected, got, scores, tie)
            if difference is not None:
                report.differences.append(difference)
                report.near_ties += difference.near_tie
                report.mismatches += not difference.near_tie
    return report


def check_distribution(
    generate: Generate,
    target: Engine,
    prompt: Prompt,
    sampling: SamplingConfig,
    *,
    samples: int = 400,
    length: int = 2,
) -> float:
    """Return the p-value of a chi-square test of answers of ``length`` tokens.

    The law is computed exactly from the target alone, so ``sampling`` should keep few tokens
    (top_k). Answer ``i`` uses seed ``sampling.seed + i``.
    """
    law = _law(target, encode(prompt, target.loaded), sampling, length)
    counts: dict[tuple[int, ...], int] = {}
    for i in range(samples):
        seeded = SamplingConfig(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed + i, sampling.law
        )
        answer = tuple(generate(prompt, seeded, length))
        counts[answer] = counts.get(answer, 0) + 1
    if any(answer not in law for answer in counts):
        return 0.0  # impossible under the target
    cells: list[tuple[float, float]] = []  # (expected, counted); rare answers share one cell
    rest_expected, rest_counted = 0.0, 0.0
    for answer, p in law.items():
        if p * samples >= 5:
            cells.append((p * samples, float(counts.get(answer, 0))))
        else:
            rest_expected += p * samples
            rest_counted += counts.get(answer, 0)
    if rest_expected > 0:
        cells.append((rest_expected, rest_counted))
    if len(cells) < 2:
        raise InvalidInput(
            "one answer takes all", field="samples", remedy="take more, or a higher temperature"
        )
    chi2 = sum((counted - expected) ** 2 / expected for expected, counted in cells)
    freedom = len(cells) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(chi2 / 2)))


def check_lossless(
    connect: Callable[[Engine, Engine], Generate],
    prompts: Sequence[Prompt],
    work_dir: Path,
    *,
    pairs: Sequence[tuple[str, Engine, Engine]] = (),
    seed: int = 0,
    max_tokens: int = 32,
    samples: int = 200,
    alpha: float = 1e-4,
) -> LosslessReport:
    """Compare on random models of every architecture, and on the given pairs.

    Drafts: the target itself, an unrelated model, the target with noise on its LM head.

    Args:
        connect: builds the path under test from (draft, target).
        prompts: scenes; text-only models get their text.
        work_dir: for the random checkpoints.
        pairs: (name, draft, target) to compare besides, such as the embedded pair.
        seed: of weights and sampling.
        samples: answers per chi-square test (one per architecture); 0 leaves them out.
        alpha: a p-value below it counts as a mismatch.
    """
    report = LosslessReport()
    samplings = [
        SamplingConfig(),
        SamplingConfig(temperature=1.0, law="coupled", seed=seed),
        SamplingConfig(temperature=0.7, top_k=20, top_p=0.9, law="coupled", seed=seed + 1),
    ]
    few = SamplingConfig(temperature=1.0, top_k=4, seed=seed)
    for name, draft, target in pairs:
        compare_lossless(
            connect(draft, target),
            target,
            prompts,
            samplings,
            max_tokens=max_tokens,
            case=name,
            report=report,
        )
    for architecture in (*ARCHITECTURES, *FAMILIES, "qwen3_5_text"):
        target, drafts = random_pair(architecture, work_dir, seed)
        shown = [_for(target, prompt) for prompt in prompts]
        for kind, draft in drafts.items():
            compare_lossless(
                connect(draft, target),
                target,
                shown,
                samplings,
                max_tokens=max_tokens,
                case=f"{architecture}, {kind} draft",
                report=report,
            )
        if samples:
            generate = connect(drafts["noisy"], target)
            p = check_distribution(generate, target, shown[0], few, samples=samples)
            report.p_values[architecture] = p
            report.mismatches += p < alpha
    return report


def random_pair(architecture: str, work_dir: Path, seed: int) -> tuple[Engine, dict[str, Engine]]:
    """Return a random target and its drafts: "same", "unrelated" (smaller), "noisy" (LM head)."""
    folders = [
        write_random_model(work_dir / f"{architecture}-{n}", architecture, seed=n, layers=layers)
        for n, layers in ((seed, 4), (seed + 1, 2))
    ]
    config = TargetConfig(str(folders[0]), exit_layers=(1, 2, 3))
    target, noisy = load(config), load(config)
    add_head_noise(noisy.model, 0.4, seed)
    unrelated = load(ModelConfig(str(folders[1])))
    engine = Engine(target)
    return engine, {"same": engine, "unrelated": Engine(unrelated), "noisy": Engine(noisy)}


def transformers_generate(
    loaded: LoadedModel,
    prompt: EncodedPrompt,
    sampling: SamplingConfig,
    max_tokens: int,
    eos: frozenset[int],
) -> tuple[list[int], list[Tensor]]:
    """Decode with ``generate``: its own loop, cache and positions.

    Returns:
        Tokens, and for each the scores [V] (log p plus noise; logits when greedy) it maximises.
    """
    processors: list[Any] = [_CommonVocabulary(len(loaded.tokenizer))]
    if not sampling.greedy:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        processors.append(_KeyedGumbel(sampling.seed, len(prompt.ids)))
    config = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=sorted(eos) or None,
        pad_token_id=loaded.tokenizer.pad_token_id or 0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with reference.no_defaults(loaded.model):
        output = loaded.model.generate(
            **generate_inputs(loaded, prompt),
            generation_config=config,
            logits_processor=LogitsProcessorList(processors),
        )
    return output.sequences[0, len(prompt.ids) :].tolist(), [s[0] for s in output.scores]


def generate_inputs(loaded: LoadedModel, prompt: EncodedPrompt) -> dict[str, Any]:
    """Return the prompt as ``generate`` takes it."""
    ids = torch.tensor([prompt.ids], device=loaded.device)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if prompt.pixel_values is not None and prompt.image_grid_thw is not None:
        inputs["pixel_values"] = prompt.pixel_values.to(ids.device)
        inputs["image_grid_thw"] = prompt.image_grid_thw.to(ids.device)
        inputs["mm_token_type_ids"] = (ids == loaded.model.config.image_token_id).int()
    return inputs | on_device(prompt.processed or {}, ids.device)


class _CommonVocabulary(LogitsProcessor):
    """Padding rows are no tokens; float64 as in ``distribution``."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.double()
        scores[:, self._size :] = -torch.inf
        return scores


class _KeyedGumbel(LogitsProcessor):
    """Turns greedy search into sampling with the coupled law's noise."""

    def __init__(self, seed: int, prompt_tokens: int) -> None:
        self._seed = seed
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = gumbel(self._seed, input_ids.shape[1] - self._prompt_tokens, scores.shape[1])
        return scores.log_softmax(dim=-1) + torch.tensor(noise, device=scores.device)


def _first_difference(
    case: str,
    prompt: int,
    expected: list[int],
    got: list[int],
    scores: list[Tensor],
    tie: Callable[[int], float],
) -> Difference | None:
    """Compare two answers; ``tie(index)`` is what rounding can bridge between scores there."""
    if expected == got:
        return None
    for index in range(max(len(expected), len(got))):
        a = expected[index] if index < len(expected) else -1  # -1: the answer was over
        b = got[index] if index < len(got) else -1
        if a != b:
            gap = float(scores[index][a] - scores[index][b]) if min(a, b) >= 0 else float("inf")
            return Difference(case, prompt, index, a, b, gap, gap < math.inf and gap <= tie(index))
    raise AssertionError("unreachable: unequal lists differ somewhere")


def _tie(
    loaded: LoadedModel,
    prompt: EncodedPrompt,
    answer: Sequence[int],
    sampling: SamplingConfig,
    index: int,
) -> float:
    """Return the largest gap of scores after ``answer[:index]`` that rounding can bridge."""
    logits = reference.next_logits(loaded, prompt, answer[:index])
    return rounding(logits) / (1.0 if sampling.greedy else sampling.temperature)


def rounding(logits: Tensor) -> float:
    """Return the largest gap between two of the logits [V] that rounding can bridge.

    It grows with the logits: a unit in the last place is that of the largest, as all are sums over
    one hidden state. In bfloat16 that unit is 0.125 from 16 on, and 0.25 from 32 on.
    """
    _, exponent = math.frexp(float(logits.abs().max()))
    return _ULPS[logits.dtype] * 2.0 ** (exponent - 1) * torch.finfo(logits.dtype).eps


def _law(
    target: Engine, prompt: EncodedPrompt, sampling: SamplingConfig, length: int
) -> dict[tuple[int, ...], float]:
    """Return the exact law of the first ``length`` tokens of the target's answer."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for answer, weight in law.items():
            if answer and answer[-1] in target.eos:
                longer[answer] = weight
                continue
            p = distribution(reference.next_logits(target.loaded, prompt, answer), sampling)
            for token, probability in zip(p.ids.tolist(), p.probs.tolist(), strict=True):
                longer[(*answer, token)] = weight * probability
        law = longer
    return law


def _for(target: Engine, prompt: Prompt) -> Prompt:
    return prompt if target.loaded.sees else Prompt(prompt.text)
