"""Settings of both sides of DRAGON."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from collab_llm_nodes.config import ANY, MAX_TOKENS, OFF, check_ranges, setting
from collab_llm_nodes.decoding.aggregation import AggregationConfig
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.dragon.client import CloudConfig
from collab_llm_nodes.protocols.dragon.device import Rules
from collab_llm_nodes.protocols.dragon.link import PatienceConfig
from collab_llm_nodes.protocols.dragon.machine import AheadConfig
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig
from collab_llm_nodes.protocols.dragon.service import CloudServiceConfig
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig
from collab_llm_nodes.transport.settings import read_server_config


@dataclass(frozen=True)
class DragonConfig:
    """The device's side, and its cloud."""

    model: ModelConfig = field(default_factory=ModelConfig)
    side: SideConfig = field(default_factory=SideConfig)
    cloud: CloudConfig = field(default_factory=CloudConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ahead: AheadConfig = field(default_factory=AheadConfig)
    patience: PatienceConfig = field(default_factory=PatienceConfig)
    use_cloud: bool = setting(
        True, "Off: answer from the device's own documents only.", per_request=OFF
    )
    max_answers: int = setting(
        2,
        "Answers at a time; they share the model, pass by pass."
        " Each takes the memory of its documents.",
        low=1,
        high=64,
        read_only=True,
    )
    max_query_chars: int = setting(
        8192,
        "Text of a question [character]. Raise it for questions that quote a text.",
        low=1,
        high=1 << 20,
        read_only=True,
    )
    max_tokens: int = setting(
        128, "Length limit of an answer [tokens].", low=1, high=MAX_TOKENS, per_request=ANY
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def rules(self, sampling: SamplingConfig) -> Rules:
        """Return the rules of an answer; the request's own truncation may keep less.

        The request's choice of a law is one of speculative decoding, and has no meaning here.
        """
        kept = self.aggregation
        kept = replace(
            kept,
            top_p=min(kept.top_p, sampling.top_p),
            max_support=min(kept.max_support, sampling.top_k or kept.max_support),
        )
        return Rules(kept, self.schedule, self.ahead, self.patience)


@dataclass(frozen=True)
class DragonCloudConfig(CloudServiceConfig):
    """Everything ``collab-llm dragon-cloud`` needs. File names are PEM files."""

    model: ModelConfig = field(default_factory=ModelConfig)
    side: SideConfig = field(default_factory=SideConfig)


def load_cloud_config(
    file: str | Path | None = None,
    *,
    model: str | None = None,
    store: str | None = None,
    address: str | None = None,
) -> DragonCloudConfig:
    """Return the configuration in ``file`` (YAML), with the other values in place of its own.

    Args:
        file: a path, or the name of a shipped file such as ``dragon_cloud.yaml``.

    Raises:
        ConfigError: no such file, unknown keys, values out of range, or no model at all.
    """
    config = read_server_config(DragonCloudConfig, file, model=model, address=address)
    if store is not None:
        config = replace(config, side=replace(config.side, store=store))
    return config
