"""The configuration of collective speculation."""

from __future__ import annotations

from dataclasses import dataclass, field

from collab_llm_nodes.config import ANY, MAX_TOKENS, check_ranges, setting
from collab_llm_nodes.decoding.weights import WeightsConfig
from collab_llm_nodes.models.loading import DTYPES, ModelConfig
from collab_llm_nodes.models.prompt import PromptLimits
from collab_llm_nodes.protocols.collective.length import LengthConfig
from collab_llm_nodes.protocols.collective.schedule import ScheduleConfig

IN_SEQUENCE, THREADS, PROCESSES = "off", "thread", "process"


@dataclass(frozen=True)
class DraftsConfig:
    """The draft models: all of the target's vocabulary."""

    paths: tuple[str, ...] = setting(
        (), "Folder, hub id or shipped name of each; none: the target alone.", read_only=True
    )
    dtype: str = setting("float32", "Type of the weights.", choices=tuple(DTYPES), read_only=True)
    device: str = setting("cpu", "cpu, cuda or cuda:N.", read_only=True)
    workers: int = setting(
        0,
        "Processes or threads that share the draft models; 0: one for each core beside the"
        " target's (a container's quota is not seen). Models of one shape that share a process"
        " share their passes, and all that share one hang together.",
        low=0,
        high=1024,
        read_only=True,
    )
    threads: int = setting(
        1, "CPU threads of each draft process.", low=1, high=1024, read_only=True
    )
    load_s: float = setting(
        120.0,
        "Time for a draft process to load each of its models, perhaps from the hub [s].",
        low=1.0,
        high=86_400.0,
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def models(self) -> list[ModelConfig]:
        """Return the configuration of each model."""
        return [
            ModelConfig(path, self.dtype, self.device, threads=self.threads) for path in self.paths
        ]


@dataclass(frozen=True)
class CollectiveConfig:
    """The target, its drafts, and the rules between them."""

    target: ModelConfig = field(default_factory=ModelConfig)
    drafts: DraftsConfig = field(default_factory=DraftsConfig)
    prompt: PromptLimits = field(default_factory=PromptLimits)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    length: LengthConfig = field(default_factory=LengthConfig)
    pipeline: str = setting(
        PROCESSES,
        "process: the draft models run in processes (drafts.workers), and draft while the target"
        " verifies; thread: likewise, in threads of this process; off: one after the other.",
        choices=(IN_SEQUENCE, THREADS, PROCESSES),
        read_only=True,
    )
    max_tokens: int = setting(
        128, "Length limit of an answer [tokens].", low=1, high=MAX_TOKENS, per_request=ANY
    )

    def __post_init__(self) -> None:
        check_ranges(self)
