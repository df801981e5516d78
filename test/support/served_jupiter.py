"""Configurations of a served Jupiter over workers of this process, with made-up profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jupiter_bed import PATIENT, folder
from jupiter_profiles import device

from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.jupiter.pipeline import PipelineConfig
from collab_llm_nodes.protocols.jupiter.planner import JupiterPlan, PlannerConfig, plan
from collab_llm_nodes.protocols.jupiter.profile import ModelFacts, Profile
from collab_llm_nodes.protocols.jupiter.profiler import model_facts
from collab_llm_nodes.protocols.jupiter.settings import JupiterConfig, PlanningConfig

NAMES = ("robot", "laptop", "rover")


def facts(model: str = "") -> ModelFacts:
    """Sizes of the model that the workers hold; by default that of ``jupiter_bed``."""
    return model_facts(ModelConfig(model or str(folder())))


def profile(*slowness: float, model: str = "") -> Profile:
    """A profile of the model on devices that are named as in ``NAMES``."""
    devices = tuple(device(name, slow) for name, slow in zip(NAMES, slowness, strict=False))
    return Profile(facts(model), devices)


def plan_file(where: Path, made_for: Profile, **config: Any) -> JupiterPlan:
    """Write a plan to ``where``."""
    made = plan(made_for, PlannerConfig(**{"answer_tokens": 0, **config}))
    made.save(where)
    return made


def served_config(
    addresses: Sequence[str],
    planning: PlanningConfig | None = None,
    pipeline: dict[str, Any] | None = None,
    **changed: Any,
) -> JupiterConfig:
    """Return the configuration of a server over these workers."""
    return JupiterConfig(
        **{
            "model": ModelConfig(str(folder())),
            "pipeline": PipelineConfig(
                **{"workers": tuple(addresses), "link": PATIENT, "lanes": 4, **(pipeline or {})}
            ),
            "planning": planning or PlanningConfig(),
            "outline": "never",
            "max_tokens": 24,
            **changed,
        }
    )
