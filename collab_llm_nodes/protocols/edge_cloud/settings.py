"""Configuration of ``collab-llm verifier``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from collab_llm_nodes.config import setting
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig
from collab_llm_nodes.protocols.jupiter.pipeline import PipelineConfig
from collab_llm_nodes.serving.pictures import PictureConfig
from collab_llm_nodes.serving.scheduler import BatchConfig
from collab_llm_nodes.transport.ray_serve import RayConfig
from collab_llm_nodes.transport.settings import ServerConfig, read_server_config


@dataclass(frozen=True)
class VerifierConfig(ServerConfig):
    """Settings of ``collab-llm verifier``. File names are PEM files.

    With ``stages.workers`` those stage workers (``collab-llm jupiter-worker``) hold the target's
    layers, and ``model`` provides the tokenizer and the vision encoder only. With ``draft.path``
    that model drafts here for robots that ask for it.
    """

    limits: Limits = field(default_factory=Limits)
    model: TargetConfig = field(default_factory=TargetConfig)
    draft: ModelConfig = field(default_factory=ModelConfig)
    stages: PipelineConfig = field(default_factory=PipelineConfig)
    pictures: PictureConfig = field(default_factory=PictureConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    exits: ExitConfig = field(default_factory=ExitConfig)
    exit_candidates: int = setting(
        0,
        "Score exits over candidates only, for large vocabularies: the first exit over frequent"
        " tokens and those of the prompt and the draft, later ones over this many best of them; 0:"
        " over all tokens.",
        low=0,
        high=4096,
    )
    emulated_compute_s: float = setting(
        0.0,
        "EMULATION of a larger model: least duration of a forward pass over any number of sessions,"
        " spread over the layers [s].",
        low=0.0,
        high=60.0,
    )
    emulated_draft_s: float = setting(
        0.0,
        "EMULATION of a larger draft model: least duration of one of its passes [s].",
        low=0.0,
        high=60.0,
    )
    ray: RayConfig = field(default_factory=RayConfig)


def load_config(
    file: str | Path | None = None, *, model: str | None = None, address: str | None = None
) -> VerifierConfig:
    """Return the configuration in ``file`` (YAML), with ``model`` and ``address`` if given.

    Args:
        file: a path, or the name of a shipped file such as ``verifier_embedded.yaml``.

    Raises:
        ConfigError: no such file, unknown keys, values out of range, or no model at all.
    """
    return read_server_config(VerifierConfig, file, model=model, address=address)
