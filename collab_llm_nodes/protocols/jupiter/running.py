"""Jupiter as a protocol: answers of one model whose layers are on several workers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path

from collab_llm_nodes.errors import (
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Unavailable,
)
from collab_llm_nodes.models.detokenising import Detokeniser
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.models.prompt import Prompt, check_prompt, encode
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Answer, Control, Progress, Request, Resources, Source
from collab_llm_nodes.protocols.jupiter.arrangement import Arrangement
from collab_llm_nodes.protocols.jupiter.chain import Layers, Part
from collab_llm_nodes.protocols.jupiter.drafters import drafter_named
from collab_llm_nodes.protocols.jupiter.gantt import Lanes, measured_lanes
from collab_llm_nodes.protocols.jupiter.generation import Asked, answer, outlined
from collab_llm_nodes.protocols.jupiter.lane import Guide, LaneAnswer
from collab_llm_nodes.protocols.jupiter.messages import WorkerInfo
from collab_llm_nodes.protocols.jupiter.metrics import JupiterMetrics
from collab_llm_nodes.protocols.jupiter.outline import (
    MOST_POINTS,
    guided_turns,
    join_points,
    outline_question,
    read_point,
    route,
)
from collab_llm_nodes.protocols.jupiter.outline_prompts import OutlinePrompts
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline
from collab_llm_nodes.protocols.jupiter.planner import JupiterPlan, plan
from collab_llm_nodes.protocols.jupiter.profile import Profile
from collab_llm_nodes.protocols.jupiter.profiler import model_facts
from collab_llm_nodes.protocols.jupiter.settings import ALWAYS, AUTO, JupiterConfig
from collab_llm_nodes.protocols.prompts import name_prompt, prompt_of

_PAUSE_S = 0.2  # before workers that are missing at the start are asked again
_PROBES = (("Why?", ()), ("and", ()), ("Why?", (Turn("system", "Be brief."),)))
"""Questions, with what is said before, whose chats have nothing but a directive in common."""
_HALF_A_NUMBER = re.compile(r"\s*\d{0,2}[.)]?\s*")


def check(request: Request) -> None:
    """Refuse what can be refused without the model.

    Raises:
        InvalidInput: ``field`` names the request's.
    """
    config: JupiterConfig = request.config
    check_prompt(prompt_of(request), config.prompt, field="prompt")
    request.length(config.max_tokens)


def start(config: JupiterConfig, resources: Resources) -> Jupiter:
    """Read profile and plan, and arrange the workers, which may come later.

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


@dataclass(frozen=True)
class Planned:
    """A plan for certain requests, which nothing has been changed by.

    Attributes:
        lengths: sub-sequences of the typical prompt.
    """

    plan: JupiterPlan
    profile: Profile
    lengths: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        """Length of the typical prompt, as far as the model reads it."""
        return sum(self.lengths)


class Jupiter:
    """See the module docstring.

    Raises:
        ConfigError: as :func:`start`.
        ModelError: as :func:`start`.
    """

    def __init__(self, config: JupiterConfig) -> None:
        self._config = config
        self._loaded = read_facts(config.model).without_weights()
        self._vocabulary = self._loaded.vocabulary
        planning = config.planning
        self._facts = model_facts(config.model)
        self._arrangement = Arrangement(
            config.device_of,
            self._facts,
            config.planner(),
            Profile.load(Path(planning.profile).expanduser()) if planning.profile else None,
            JupiterPlan.load(Path(planning.plan).expanduser()) if planning.plan else None,
        )
        chats = bool(self._loaded.tokenizer.chat_template)
        self._prompts = (
            OutlinePrompts(self._loaded.tokenizer, self.begun_thought) if chats else None
        )
        self.pipeline = Pipeline(config.pipeline, self._stages, kept=len(config.guides))
        self._guides = {
            task: Guide(lane, self._before_questions(text))
            for lane, (task, text) in enumerate(config.guide_of.items(), config.pipeline.lanes)
        }
        self.parallel = config.pipeline.lanes

    def run(self, request: Request, emit: Callable[[Progress], None], control: Control) -> Answer:
        """Make one answer, in sequence or point by point."""
        config: JupiterConfig = request.config
        asked = Asked(
            request.length(config.max_tokens),
            request.sampling,
            drafter_named(config.drafter),
            self._arrangement.lengths,
            config.groups,
        )
        telling = _Telling(self, request, asked.max_tokens, emit)
        if self._outlines(request, asked.max_tokens):
            told = self._outlined(request, asked, control, telling)
            if told is not None:
                return told
        ids = self._encode(request, prompt_of(request))
        made = answer(self.pipeline, ids, asked, control, telling.on_tokens)
        return Answer(**vars(telling.in_sequence(made, final=True)))

    @property
    def warnings(self) -> list[str]:
        """Return what makes plans unreliable, one sentence each."""
        profile = self._arrangement.profile
        return profile.warnings(self._config.device_of.values()) if profile is not None else []

    @property
    def begun_thought(self) -> str:
        """Marker of a thought in which every answer to a chat begins; mostly none."""
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
    ) -> Planned:
        """Plan for certain requests and devices; nothing is run, and the workers stay as they are.

        Args:
            prompt_tokens, answer_tokens, lanes: of these requests; 0: as configured.
            devices: names of those that may be used; none: all.

        Raises:
            ConfigError: there is no profile, or it does not know a device.
            InvalidInput: the model does not read so long a prompt.
            ModelError: the model does not fit into their memory.
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
        names = list(devices) or list(self._config.device_of.values())
        made = plan(self.profile, config, names, check=control.check)
        return Planned(made, self.profile, made.lengths(min(config.prompt_tokens, made.context)))

    def planned_timeline(self) -> Lanes:
        """Return the predicted prefill of the typical prompt on the stages in use."""
        return self._arrangement.timeline()

    def measured_timeline(self) -> Lanes:
        """Return the times of the last passes in each stage, as measured; none before the first."""
        chain = self.pipeline.current
        if chain is None:
            return []
        return measured_lanes([self.stage_name(part) for part in chain.parts], chain.passes)

    def stage_name(self, part: Part) -> str:
        """Return the device of a stage, and its layers."""
        return f"{self._config.device_of[part.device]} {part.first}-{part.last - 1}"

    def health(self) -> Mapping[str, object]:
        """Return who holds what, and who is missing."""
        chain, pipeline = self.pipeline.current, self.pipeline
        sound = chain is not None and chain.failed is None
        figures: dict[str, object] = {
            "model": self._config.model.path,
            "stages": len(chain.parts) if chain is not None and sound else 0,
            "missing": " ".join(self._config.device_of[worker] for worker in pipeline.missing),
            "lanes_in_use": f"{pipeline.lanes_in_use} of {self._config.pipeline.lanes}",
            "losses": len(pipeline.losses),
        }
        if chain is not None and sound:
            for part, size in zip(chain.parts, chain.bytes, strict=True):
                figures[self.stage_name(part)] = f"{size / 1e6:.1f} MB of tensors"
        if pipeline.losses:
            figures["last_loss"] = pipeline.losses[-1].why
        return figures

    def close(self) -> None:
        """Let the workers go."""
        self.pipeline.close()

    def _stages(self, addresses: Sequence[str], info: WorkerInfo) -> Sequence[Layers]:
        if (info.vocabulary, info.num_layers) != (self._vocabulary, self._facts.layers):
            raise ConfigError(
                f"the workers hold {info.model}, this is {self._config.model.path}",
                field="model.path",
                remedy="name the model that the workers hold",
            )
        return self._arrangement.stages(addresses, info)

    def _outlines(self, request: Request, max_tokens: int) -> bool:
        """Return whether the question is to be answered along an outline.

        Raises:
            InvalidInput: that is asked for, but cannot be done.
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

    def _outlined(
        self, request: Request, asked: Asked, control: Control, telling: _Telling
    ) -> Answer | None:
        """Return the answer along an outline; None if there is no usable one, or no room for it."""
        prompts = self._prompts
        assert prompts is not None  # as _outlines has found
        config: JupiterConfig = request.config
        try:
            guide, question = self._ask_outline(request)
        except InvalidInput:  # without the directive it may fit; else it is refused there
            return None
        outline = replace(
            asked, max_tokens=min(config.outline_tokens, asked.max_tokens), stop=prompts.ended
        )
        each = replace(asked, stop=prompts.point_ended)
        _, found = outlined(
            self.pipeline,
            question,
            outline,
            prompts.requests,
            each,
            control,
            guide=guide,
            most=MOST_POINTS,
            budget=asked.max_tokens,
            on_outline=telling.on_outline,
            on_tokens=telling.on_points,
        )
        if not found:
            return None
        return Answer(**vars(telling.points(found, final=True)))

    def _ask_outline(self, request: Request) -> tuple[Guide | None, tuple[int, ...]]:
        """Return the directive that the stages keep, if any, and the ids behind it."""
        config: JupiterConfig = request.config
        before = request.turns[:-1]
        if not config.task:
            question = Prompt(outline_question(request.prompt), turns=before)
            return None, self._encode(request, question)
        guided = Prompt(request.prompt, turns=guided_turns(config.guide_of[config.task], before))
        guide, ids = self._guides[config.task], self._encode(request, guided)
        kept = len(guide.ids)
        return (guide, ids[kept:]) if ids[:kept] == guide.ids else (None, ids)

    def _before_questions(self, directive: str) -> tuple[int, ...]:
        """Return the ids that chats with ``directive`` have in common.

        Raises:
            ConfigError: the model's chat template takes no system turn, or places it elsewhere.
        """
        try:
            chats = [
                encode(Prompt(text, turns=guided_turns(directive, before)), self._loaded).ids
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

    def _encode(self, request: Request, prompt: Prompt) -> tuple[int, ...]:
        try:
            return encode(prompt, self._loaded, request.config.prompt).ids
        except InvalidInput as error:
            name_prompt(error)
            raise


class _Telling:
    """Makes reports of an answer from the lanes that write it."""

    def __init__(
        self, owner: Jupiter, request: Request, limit: int, emit: Callable[[Progress], None]
    ) -> None:
        self._owner = owner
        self._limit = limit
        self._emit = emit
        self._begun = request.asked_at or time.monotonic()
        self._losses = len(owner.pipeline.losses)
        self._first_s = 0.0
        self._begun_thought = "" if request.raw else owner.begun_thought
        self._text = Detokeniser(owner.decode, self._begun_thought)
        self._outline: list[LaneAnswer] = []

    def on_tokens(self, lanes: Sequence[LaneAnswer]) -> None:
        """Tell an answer that is written in sequence."""
        self._emit(self.in_sequence(lanes[0]))

    def on_outline(self, lanes: Sequence[LaneAnswer]) -> None:
        """Tell that an outline grows; it is no part of the answer."""
        self._outline = [*lanes]
        self._emit(Progress(stage="outline", metrics=self._metrics([])))

    def on_points(self, lanes: Sequence[LaneAnswer]) -> None:
        """Tell an answer that is written point by point."""
        self._emit(self.points(lanes))

    def in_sequence(self, lane: LaneAnswer, *, final: bool = False) -> Progress:
        """Return the report of an answer that one lane writes."""
        self._text.update(lane.tokens, final=final)
        sources = (Source.ACCEPTED if drafted else Source.RECOVERED for drafted in lane.accepted)
        return Progress(
            self._text.text,
            tuple(lane.tokens),
            tuple(int(source) for source in sources),
            self._text.ends,
            stage="answer",
            share_done=min(1.0, len(lane.tokens) / self._limit),
            metrics=self._metrics([lane]),
        )

    def points(self, lanes: Sequence[LaneAnswer], *, final: bool = False) -> Progress:
        """Return the report of an answer in points: those that are complete, and the next one.

        Points grow side by side, but the text may grow at its end only.
        """
        texts: list[str] = []
        for lane in lanes:
            decoded = self._owner.decode(lane.tokens).rstrip("\N{REPLACEMENT CHARACTER}")
            text = self._begun_thought + decoded
            under_way = not (lane.finished or final)
            if not (under_way and _HALF_A_NUMBER.fullmatch(text)):  # may be left out later
                texts.append(read_point(text)[0])
            if under_way:
                break
        done = sum(lane.finished for lane in lanes)
        return Progress(
            join_points(texts),
            stage="points",
            share_done=done / len(lanes),
            metrics=self._metrics(lanes, points=len(lanes)),
        )

    def _metrics(self, lanes: Sequence[LaneAnswer], points: int = 0) -> JupiterMetrics:
        pipeline = self._owner.pipeline
        every, now = [*self._outline, *lanes], time.monotonic() - self._begun
        if lanes and not self._first_s:
            self._first_s = now
        chain = pipeline.current
        return JupiterMetrics(
            rounds=sum(lane.passes for lane in every),
            tokens=sum(len(lane.tokens) for lane in every),
            time_to_first_token_s=self._first_s,
            total_s=now,
            drafted=sum(lane.drafted for lane in every),
            accepted=sum(sum(lane.accepted) for lane in every),
            outline_tokens=sum(len(lane.tokens) for lane in self._outline),
            points=points,
            stages=len(chain.parts) if chain is not None else 0,
            losses=len(pipeline.losses) - self._losses,
        )
