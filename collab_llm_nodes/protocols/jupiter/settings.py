"""Configuration of Jupiter's server."""

from __future__ import annotations

from dataclasses import dataclass, field

from collab_llm_nodes.config import ANY, MAX_TOKENS, check_ranges, setting
from collab_llm_nodes.errors import ConfigError, did_you_mean
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.prompt import PromptLimits
from collab_llm_nodes.protocols.jupiter.drafters import DRAFTERS
from collab_llm_nodes.protocols.jupiter.pipeline import PipelineConfig
from collab_llm_nodes.protocols.jupiter.planner import PlannerConfig

AUTO, ALWAYS, NEVER = "auto", "always", "never"


@dataclass(frozen=True)
class PlanningConfig:
    """The profile of the devices, and the requests to plan for."""

    profile: str = setting(
        "",
        "File of the devices' profile (collab-llm jupiter profile); empty: all workers get equally"
        " many layers, and prompts are not divided.",
        read_only=True,
    )
    plan: str = setting(
        "",
        "File of a stored plan (collab-llm jupiter plan), used while all its devices are present;"
        " empty: planned with the profile.",
        read_only=True,
    )
    devices: tuple[str, ...] = setting(
        (),
        "Name of each worker in profile and plan, in the order of pipeline.workers; empty: their"
        " addresses.",
        read_only=True,
    )
    coordinator: str = setting(
        "",
        "Name in profile and plan of the device that this server runs on, if it has a worker, too:"
        " the vision encoder of a model that sees takes memory there.",
        read_only=True,
    )
    prompt_tokens: int = setting(
        256,
        "Typical length of a prompt [tokens]. The stages are planned for it.",
        low=1,
        high=1 << 20,
        read_only=True,
    )
    answer_tokens: int = setting(
        64,
        "Typical length of an answer [tokens]. The longer, the more decoding counts in the plan.",
        low=0,
        high=1 << 20,
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if len(set(self.devices)) < len(self.devices):
            raise ConfigError("a device is named twice", field="devices", remedy="name it once")


@dataclass(frozen=True)
class JupiterConfig:
    """The model, the workers that hold it, and how answers are written."""

    model: ModelConfig = field(default_factory=ModelConfig)  # no weights are loaded
    prompt: PromptLimits = field(default_factory=PromptLimits)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    start_s: float = setting(
        30.0,
        "At the start, wait this long for all workers [s]; missing ones may join later.",
        low=0.0,
        high=3600.0,
        read_only=True,
    )
    drafter: str = setting(
        "medusa", "Method of proposing the next tokens.", choices=tuple(DRAFTERS), per_request=ANY
    )
    outline: str = setting(
        AUTO,
        "Answer point by point along an outline, which changes the answer; auto: for questions"
        " that suit it, by their wording.",
        choices=(AUTO, ALWAYS, NEVER),
        per_request=ANY,
    )
    outline_guided: bool = setting(
        False,
        "Limit outlines to numbered lines, for a model that is not trained to write them.",
        per_request=ANY,
    )
    outline_tokens: int = setting(
        96, "Length limit of an outline [tokens].", low=8, high=4096, per_request=ANY
    )
    guides: tuple[str, ...] = setting(
        (),
        "Directives that ask for an outline, each for one kind of task, as 'task: text'. The text"
        " precedes the question as a system turn; all stages keep its keys and values.",
        read_only=True,
    )
    task: str = setting(
        "",
        "Task whose directive in guides asks for the outline; empty: the directive of the"
        " embedded model, after the question.",
        per_request=ANY,
    )
    groups: int = setting(
        0,
        "Passes among which the points of an outline are divided; 0: one per stage.",
        low=0,
        high=64,
        per_request=ANY,
    )
    max_tokens: int = setting(
        256, "Length limit of an answer [tokens].", low=1, high=MAX_TOKENS, per_request=ANY
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        devices, workers = self.planning.devices, self.pipeline.workers
        if devices and len(devices) != len(workers):
            raise ConfigError(
                f"{len(devices)} names for {len(workers)} workers",
                field="planning.devices",
                remedy="one for each of pipeline.workers, or none",
            )
        directives = self.directives
        if self.task and self.task not in directives:
            raise ConfigError(
                f"no directive for {self.task!r}",
                field="task",
                remedy=did_you_mean(self.task, directives, "add it to guides"),
            )

    @property
    def directives(self) -> dict[str, str]:
        """Directives by task.

        Raises:
            ConfigError: one has not the form 'task: text', or a task has two.
        """
        found: dict[str, str] = {}
        for guide in self.guides:
            task, _, text = (part.strip() for part in guide.partition(":"))
            if not task or not text or task in found:
                raise ConfigError(
                    f"{guide!r}", field="guides", remedy="write 'task: text', each task once"
                )
            found[task] = text
        return found

    @property
    def device_names(self) -> dict[str, str]:
        """Names of the devices, by the workers' addresses."""
        workers = self.pipeline.workers
        return dict(zip(workers, self.planning.devices or workers, strict=True))

    def planner(self) -> PlannerConfig:
        """Return the requests to plan for, with the lanes of the pipeline."""
        planning = self.planning
        return PlannerConfig(
            planning.prompt_tokens,
            planning.answer_tokens,
            self.pipeline.lanes,
            states=self.pipeline.states,
            coordinator=planning.coordinator,
        )
