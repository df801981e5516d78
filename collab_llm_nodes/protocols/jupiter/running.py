"""Jupiter as a protocol: answers of one model whose layers are on several workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

from collab_llm_nodes.errors import (
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Unavailable,
)
from collab_llm_nodes.models.partial import load_vision, read_facts
from collab_llm_nodes.models.prompt import Prompt, check_prompt, encode
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Answer, Control, Progress, Request, Resources
from collab_llm_nodes.protocols.jupiter.arrangement import Arrangement
from collab_llm_nodes.protocols.jupiter.drafters import DRAFTERS
from collab_llm_nodes.protocols.jupiter.gantt import Rows, measured_rows
from collab_llm_nodes.protocols.jupiter.generation import answer, answer_in_points
from collab_llm_nodes.protocols.jupiter.lane import CachedPrefix, DecodeConfig
from collab_llm_nodes.protocols.jupiter.messages import WorkerInfo
from collab_llm_nodes.protocols.jupiter.outline import (
    MOST_POINTS,
    OUTLINE_FORM,
    OutlinePrompts,
    outline_question,
    with_directive,
)
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.pictures import ShownPrompt, show
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline, check_model
from collab_llm_nodes.protocols.jupiter.planner import JupiterPlan, plan
from collab_llm_nodes.protocols.jupiter.profile import Profile
from collab_llm_nodes.protocols.jupiter.profiler import model_facts
from collab_llm_nodes.protocols.jupiter.reports import AnswerReporter
from collab_llm_nodes.protocols.jupiter.route import route
from collab_llm_nodes.protocols.jupiter.settings import ALWAYS, AUTO, JupiterConfig
from collab_llm_nodes.protocols.prompts import name_prompt, prompt_of

if TYPE_CHECKING:  # llguidance is loaded where guides are used
    from collab_llm_nodes.models.guided_text import GuidedText

_PAUSE_S = 0.2  # between two searches for missing workers at the start
_PROBES = (("Why?", ()), ("and", ()), ("Why?", (Turn("system", "Be brief."),)))
"""Questions with earlier turns, whose chats have only a directive in common."""


def check(request: Request) -> None:
    """Refuse a request that is invalid for any model.

    Raises:
        InvalidInput: ``field`` is the field of the request.
    """
    config: JupiterConfig = request.config
    check_prompt(prompt_of(request), config.prompt, field="prompt")
    request.length(config.max_tokens)


def start(config: JupiterConfig, resources: Resources) -> Jupiter:
    """Read profile and plan, and arrange the workers; missing ones may join later.

    Raises:
        ConfigError: no model or no worker is named, or plan or profile do not fit the devices.
        ModelError: the workers hold different weights or another model, or it does not fit.
    """
    if not config.model.path:
        raise ConfigError("no model", field="model.path", remedy="name its folder or hub id")
    made = Jupiter(config)
    for warning in made.warnings:
        resources.log.warning(warning)
    pipeline, due = made.pipeline, time.monotonic() + config.start_s
    try:
        pipeline.chain(due)
        while pipeline.missing and time.monotonic() < due:
            time.sleep(_PAUSE_S)
            pipeline.renew()
        if pipeline.missing:
            resources.log.warning(f"missing workers: {', '.join(pipeline.missing)}")
    except (Unavailable, DeadlineExceeded) as error:
        resources.log.warning(f"the workers are not arranged yet: {error}")
    except BaseException:
        made.close()
        raise
    return made


class Jupiter:
    """See the module docstring.

    Raises:
        ConfigError: as :func:`start`.
        ModelError: as :func:`start`.
    """

    def __init__(self, config: JupiterConfig) -> None:
        self._config = config
        self._facts = read_facts(config.model)
        self._loaded, self._vision_bytes = load_vision(self._facts)
        planning = config.planning
        self._arrangement = Arrangement(
            config.device_names,
            model_facts(config.model),
            config.planner(),
            Profile.load(Path(planning.profile).expanduser()) if planning.profile else None,
            JupiterPlan.load(Path(planning.plan).expanduser()) if planning.plan else None,
        )
        chats = bool(self._loaded.tokenizer.chat_template)
        self._prompts = (
            OutlinePrompts(self._loaded.tokenizer, self.begun_thought) if chats else None
        )
        self.pipeline = Pipeline(config.pipeline, self._stages, kept=len(config.guides))
        self._directives = {
            task: CachedPrefix(lane, self._directive_ids(text))
            for lane, (task, text) in enumerate(config.directives.items(), config.pipeline.lanes)
        }
        self.parallel = config.pipeline.lanes

    def run(self, request: Request, emit: Callable[[Progress], None], control: Control) -> Answer:
        """Make one answer, in sequence or point by point."""
        config: JupiterConfig = request.config
        decode = DecodeConfig(
            request.length(config.max_tokens),
            request.sampling,
            DRAFTERS[config.drafter],
            self._arrangement.lengths,
            config.groups,
        )
        reporter = AnswerReporter(
            self.pipeline,
            request,
            decode=self.decode,
            begun_thought=self.begun_thought,
            limit=decode.max_tokens,
            emit=emit,
        )
        if self._wants_outline(request, decode.max_tokens):
            found = self._answer_in_points(request, decode, control, reporter)
            if found is not None:
                return found
        ids, shown = self._encode(request, prompt_of(request))
        lane = answer(self.pipeline, ids, decode, control, reporter.on_tokens, shown)
        return Answer(**vars(reporter.in_sequence(lane, final=True)))

    @property
    def warnings(self) -> list[str]:
        """Reasons why plans are unreliable, one sentence each."""
        profile = self._arrangement.profile
        return profile.warnings(self._config.device_names.values()) if profile is not None else []

    @property
    def begun_thought(self) -> str:
        """Marker of a thought in which every answer to a chat begins; usually empty."""
        return self._loaded.begun_thought

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` without special ones."""
        return str(self._loaded.tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def profile(self) -> Profile:
        """The profile of the devices.

        Raises:
            ConfigError: there is none.
        """
        profile = self._arrangement.profile
        if profile is None:
            raise ConfigError(
                "there is no profile to plan with",
                field="planning.profile",
                remedy="measure one: collab-llm jupiter profile",
            )
        return profile

    def plan(
        self,
        control: Control,
        *,
        prompt_tokens: int = 0,
        answer_tokens: int = 0,
        lanes: int = 0,
        devices: Sequence[str] = (),
    ) -> JupiterPlan:
        """Plan for the given requests and devices, without changing the stages in use.

        Args:
            prompt_tokens, answer_tokens, lanes: of these requests; 0: as configured.
            devices: names of the devices to use; empty: all.

        Raises:
            ConfigError: there is no profile, or it does not know a device.
            InvalidInput: the prompt exceeds the model's context.
            ModelError: the model does not fit into the devices' memory.
            CollabError: as ``control.check``.
        """
        self.profile.check_prompt(prompt_tokens)
        wanted = self._arrangement.config
        config = replace(
            wanted,
            prompt_tokens=prompt_tokens or wanted.prompt_tokens,
            answer_tokens=answer_tokens or wanted.answer_tokens,
            lanes=lanes or wanted.lanes,
        )
        names = list(devices) or list(self._config.device_names.values())
        return plan(self.profile, config, names, check=control.check)

    def planned_timeline(self) -> Rows:
        """Return the predicted prefill of the typical prompt on the stages in use."""
        return self._arrangement.timeline()

    def measured_timeline(self) -> Rows:
        """Return the measured times of the last passes; empty before the first pass."""
        chain = self.pipeline.current
        if chain is None:
            return []
        return measured_rows([self.stage_name(part) for part in chain.parts], chain.passes)

    def stage_name(self, part: Placement) -> str:
        """Return the name of a stage: its device and layers."""
        return f"{self._config.device_names[part.device]} {part.first}-{part.last - 1}"

    def health(self) -> Mapping[str, object]:
        """Return the figures of the diagnostics: stages, missing workers, lanes and losses."""
        chain, pipeline = self.pipeline.current, self.pipeline
        sound = chain is not None and chain.failed is None
        figures: dict[str, object] = {
            "model": self._config.model.path,
            "stages": len(chain.parts) if chain is not None and sound else 0,
            "missing": " ".join(self._config.device_names[worker] for worker in pipeline.missing),
            "lanes_in_use": f"{pipeline.lanes_in_use} of {self._config.pipeline.lanes}",
            "losses": len(pipeline.losses),
        }
        if self._vision_bytes:
            figures["vision encoder"] = f"{self._vision_bytes / 1e6:.1f} MB of tensors"
        if chain is not None and sound:
            for part, size in zip(chain.parts, chain.bytes, strict=True):
                figures[self.stage_name(part)] = f"{size / 1e6:.1f} MB of tensors"
        if pipeline.losses:
            figures["last_loss"] = pipeline.losses[-1].why
        return figures

    def close(self) -> None:
        """Let the workers go."""
        self.pipeline.close()

    def _stages(self, addresses: Sequence[str], info: WorkerInfo) -> Sequence[Placement]:
        check_model(info, self._facts)
        return self._arrangement.stages(addresses, info)

    def _wants_outline(self, request: Request, max_tokens: int) -> bool:
        """Return True if the question shall be answered along an outline.

        Raises:
            InvalidInput: the request demands an outline, but none is possible.
        """
        config: JupiterConfig = request.config
        able = self._prompts is not None and not request.raw and self._config.pipeline.lanes > 1
        if config.outline == ALWAYS and not able:
            raise InvalidInput(
                "an outline needs a chat template, turns and several lanes",
                field="outline",
                remedy="leave it out, or ask without raw",
            )
        if config.outline == AUTO:
            return able and route(request.prompt, max_tokens).outline
        return config.outline == ALWAYS

    def _answer_in_points(
        self, request: Request, decode: DecodeConfig, control: Control, reporter: AnswerReporter
    ) -> Answer | None:
        """Return the answer along an outline; None without a usable outline, or room for it."""
        prompts = self._prompts
        assert prompts is not None  # checked by _wants_outline
        config: JupiterConfig = request.config
        try:
            directive, question, shown = self._outline_prompt(request)
        except InvalidInput:  # the question may fit without the directive
            return None
        outline = replace(
            decode,
            max_tokens=min(config.outline_tokens, decode.max_tokens),
            stop=prompts.ended,
            guide=self._guide(config),
        )
        _, lanes = answer_in_points(
            self.pipeline,
            question,
            outline,
            prompts.requests,
            replace(decode, stop=prompts.point_ended),
            control,
            directive=directive,
            shown=shown,
            most=MOST_POINTS,
            budget=decode.max_tokens,
            on_outline=reporter.on_outline,
            on_tokens=reporter.on_points,
        )
        return Answer(**vars(reporter.points(lanes, final=True))) if lanes else None

    def _guide(self, config: JupiterConfig) -> GuidedText | None:
        """Return the limit on an outline, unless answers begin in a thought."""
        guided = config.outline_guided and not self.begun_thought
        return self._loaded.guides.open(OUTLINE_FORM) if guided else None

    def _outline_prompt(
        self, request: Request
    ) -> tuple[CachedPrefix | None, tuple[int, ...], ShownPrompt | None]:
        """Return the directive that the stages keep, if any, the ids after it, and the pictures."""
        config: JupiterConfig = request.config
        before, images = request.turns[:-1], request.images
        if not config.task:
            question = Prompt(outline_question(request.prompt), images, turns=before)
            return None, *self._encode(request, question)
        turns = with_directive(config.directives[config.task], before)
        ids, shown = self._encode(request, Prompt(request.prompt, images, turns=turns))
        directive = self._directives[config.task]
        kept = len(directive.ids)
        if ids[:kept] != directive.ids:
            return None, ids, shown
        return directive, ids[kept:], shown

    def _directive_ids(self, directive: str) -> tuple[int, ...]:
        """Return the ids with which all chats with ``directive`` begin.

        Raises:
            ConfigError: the model's chat template takes no system turn, or places it elsewhere.
        """
        try:
            chats = [
                encode(Prompt(text, turns=with_directive(directive, before)), self._loaded).ids
                for text, before in _PROBES
            ]
        except CollabError as error:
            raise ConfigError(
                f"the model takes no directive: {error}", field="guides", remedy="leave them out"
            ) from None
        common = tuple(commonprefix(chats))
        if not common:
            raise ConfigError(
                "the model's chats do not begin with a directive",
                field="guides",
                remedy="leave them out",
            )
        return common

    def _encode(
        self, request: Request, prompt: Prompt
    ) -> tuple[tuple[int, ...], ShownPrompt | None]:
        """Return the ids of ``prompt``, and its encoded pictures, if it has any."""
        try:
            encoded = encode(prompt, self._loaded, request.config.prompt)
        except InvalidInput as error:
            name_prompt(error)
            raise
        if encoded.pixel_values is None:  # then positions are indices, also those of M-RoPE
            return encoded.ids, None
        form = self._config.pipeline.states
        return encoded.ids, show(self._loaded, encoded, self._facts.placeholder, form)
