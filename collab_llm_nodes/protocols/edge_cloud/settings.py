"""Everything ``collab-llm verifier`` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from collab_llm_nodes.config import setting
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig
from collab_llm_nodes.protocols.jupiter.pipeline import PipelineConfig
from collab_llm_nodes.serving.pictures import PictureConfig
from collab_llm_nodes.serving.scheduler import BatchConfig
from collab_llm_nodes.transport.ray_serve import RayConfig
from collab_llm_nodes.transport.settings import ServerConfig, read_server_config


@dataclass(frozen=True)
class VerifierConfig(ServerConfig):
    """Everything ``collab-llm verifier`` needs. File names are PEM files.

    With ``stages.workers`` the target's layers are not held here, but by those stage workers
    (``collab-llm jupiter-worker``); ``model`` then gives the tokenizer and the vision encoder only.
    """

    limits: Limits = field(default_factory=Limits)
    model: ModelConfig = field(default_factory=ModelConfig)
    stages: PipelineConfig = field(default_factory=PipelineConfig)
    pictures: PictureConfig = field(default_factory=PictureConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    exits: ExitConfig = field(default_factory=ExitConfig)
    exit_candidates: int = setting(
        0,
        "Score exits over candidates only, worth it for large vocabularies: the first over frequent"
        " tokens, the prompt's and the draft's, later ones over this many best of those; 0: over"
        " all.",
        low=0,
        high=4096,
    )
    emulated_compute_s: float = setting(
        0.0,
        "EMULATION: a forward pass, over however many sessions, takes at least this time, spread"
        " over the layers, to stand for a larger model [s].",
        low=0.0,
        high=60.0,
    )
    ray: RayConfig = field(default_factory=RayConfig)


def load_config(
    file: str | Path | None = None, *, model: str | None = None, address: str | None = None
) -> VerifierConfig:
    """The configuration in ``file`` (YAML), with ``model`` and ``address`` in place of its own.

    Args:
        file: a path, or the name of a shipped file such as ``verifier_embedded.yaml``.

    Raises:
        ConfigError: no such file, unknown keys, values out of range, or no model at all.
    """
    return read_server_config(VerifierConfig, file, model=model, address=address)
