"""Sizes and lengths of the text family's training: for a GPU, for a CPU, for a quick check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.text.models import (
    DRAFT,
    TARGET,
    TINY,
    TINY_DRAFT,
    WORKER,
    Size,
)
from collab_llm_lab.training.text.samples import SUB_DOMAINS
from collab_llm_nodes.errors import ConfigError

MODELS = ("text-target", "text-worker", *(f"ssm-{sub_domain}" for sub_domain in SUB_DOMAINS))
"""The folders of the family, as they ship."""
STAGES = ("tokenizer", "target", "base", *MODELS[2:], "worker", "guesses")
"""All stages in their order; ``guesses`` are the target's early exits and Medusa heads."""
_RECIPES = ("target", "base", "draft", "worker", "guesses")
"""Fields of a plan that say how models are trained; all drafts have one."""


@dataclass(frozen=True)
class Answers:
    """The target's own answers that one draft is distilled on."""

    units: int
    """Greedy and sampled (temperature 0.7) units in turn."""
    prompts: int
    """Prompts of one unit."""
    most: int = 288
    """Tokens of an answer."""
    prompt_tokens: int = 512
    """Longer prompts are left out."""


@dataclass(frozen=True)
class TextPlan:
    """Sizes, data and stages of the whole family."""

    name: str
    """A key of ``PLANS``."""
    vocabulary: int
    vocabulary_texts: int
    """Samples of the grammar's vocabulary text that the tokenizer is trained on."""
    shards: int
    short_shards: int
    """Shards of each length of ``Recipe.growing``."""
    rows: int
    """Rows of a shard; short ones hold as many tokens in more rows."""
    first_shards: int
    """Training begins when this many are made; all of them if it must be repeatable."""
    length: int
    target_size: Size
    worker_size: Size
    draft_size: Size
    exit_layers: tuple[int, ...]
    target: Recipe
    base: Recipe
    """The common beginning of the drafts: short, so that each knows its own sub-domain only."""
    draft: Recipe
    worker: Recipe
    guesses: Recipe
    answers: Answers
    held_out: int = 64
    """Held-out documents of a point of the learning curve, per sub-domain."""
    processes: int = field(default=0)
    """Processes that make data; 0: one per core but two, at least one."""

    def recipe(self, stage: str) -> Recipe:
        """Return how the model of a stage is trained."""
        found: Recipe = getattr(self, stage if stage in _RECIPES else "draft")
        return found

    def lasting(self) -> dict[str, Any]:
        """Return the settings that must stay the same from a run's first call to its last.

        Others may change: times and steps, since a run may go on longer; the measurements during
        the training; and how the machine at hand computes.
        """
        free = {"name", "first_shards", "held_out", "processes"}
        free_of_recipe = {"steps", "minutes", "measure_every", "compile", "bfloat16"}
        found = {key: value for key, value in asdict(self).items() if key not in free}
        for stage in _RECIPES:
            found[stage] = {k: v for k, v in found[stage].items() if k not in free_of_recipe}
        return found

    def with_minutes(self, minutes: Mapping[str, float]) -> TextPlan:
        """Return the plan with other times; a stage that is named has no limit of steps.

        Raises:
            ConfigError: an unknown stage, or a time that is not positive.
        """
        plan = self
        for name, value in minutes.items():
            if name not in _RECIPES or not value > 0:
                raise ConfigError(
                    f"{name}={value}",
                    field="--minutes",
                    remedy=f"STAGE=MINUTES with a positive time; stages: {', '.join(_RECIPES)}",
                )
            recipe = replace(getattr(plan, name), minutes=value, steps=0)
            plan = replace(plan, **{name: recipe})
        return plan


GROWING = ((128, 600), (320, 800))
GUIDANCE = 0.5


def _gpu(batch: int, rate: float, minutes: float, warmup: int) -> Recipe:
    return Recipe(
        batch,
        rate,
        minutes=minutes,
        warmup=warmup,
        muon=0.02,
        compile=True,
        bfloat16=True,
        measure_every=1000,
    )


GPU = TextPlan(
    name="gpu",
    vocabulary=3072,
    vocabulary_texts=6_000,
    shards=4_000,
    short_shards=64,
    rows=256,
    first_shards=56,
    length=1024,
    target_size=TARGET,
    worker_size=WORKER,
    draft_size=DRAFT,
    exit_layers=(2, 3, 4, 5),
    target=replace(_gpu(96, 2.5e-3, 9.0, 400), growing=GROWING, guidance=GUIDANCE),
    base=Recipe(64, 3e-3, steps=150, warmup=50, compile=True, bfloat16=True),
    draft=_gpu(64, 3e-3, 0.6, 50),
    worker=replace(_gpu(96, 2.5e-3, 2.2, 200), growing=GROWING, guidance=GUIDANCE),
    guesses=_gpu(32, 2e-3, 1.0, 50),
    answers=Answers(units=6, prompts=4096),
)
"""One data-centre GPU and 16 cores: 25 minutes are planned, not tried. Stops and resumes."""


def _cpu(steps: int) -> Recipe:
    """Return a stage for few tokens: after 80 steps the loss was 3.4 with Muon, 4.9 with AdamW."""
    return Recipe(8, 3e-3, steps=steps, warmup=20, muon=0.02, compile=True, bfloat16=True)


CPU = replace(
    GPU,
    name="cpu",
    shards=160,
    short_shards=16,
    first_shards=160,
    target=replace(_cpu(3_200), growing=GROWING, guidance=GUIDANCE),
    base=_cpu(400),
    draft=_cpu(1_200),
    worker=replace(_cpu(1_600), growing=GROWING, guidance=GUIDANCE),
    guesses=Recipe(4, 2e-3, steps=500, warmup=50, bfloat16=True),
    answers=Answers(units=24, prompts=256),
)
"""Two cores, some six hours by estimate; two runs of it give the same models.

The shipped ones are of earlier plans: models/README.md."""

TINY_PLAN = TextPlan(
    name="tiny",
    vocabulary=512,
    vocabulary_texts=40,
    shards=4,
    short_shards=1,
    rows=4,
    first_shards=4,
    length=1024,
    target_size=TINY,
    worker_size=TINY,
    draft_size=TINY_DRAFT,
    exit_layers=(1, 2),
    target=Recipe(2, 3e-3, steps=4, warmup=1, measure_every=2, growing=((256, 1),)),
    base=Recipe(2, 3e-3, steps=2, warmup=1),
    draft=Recipe(2, 3e-3, steps=2, warmup=1),
    worker=Recipe(2, 3e-3, steps=2, warmup=1),
    guesses=Recipe(1, 2e-3, steps=2, warmup=1),
    answers=Answers(units=2, prompts=32, most=24),
    held_out=2,
    processes=1,
)
"""Seconds: every stage, nothing learnt. To check a machine, and for tests."""

PLANS = {plan.name: plan for plan in (GPU, CPU, TINY_PLAN)}
