"""Edge-cloud speculation as a protocol: the edge client of paper 003 (Algorithm 1).

Each answer is an ``EdgeLoop`` in the thread that calls :meth:`EdgeCloud.run`; the carrier's
messages are posted to it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.interface import DecodingEngine
from collab_llm_nodes.errors import (
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Unavailable,
)
from collab_llm_nodes.models.detokenising import Detokeniser
from collab_llm_nodes.models.guide import Guide, refused
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, PromptLimits, check_prompt, encode
from collab_llm_nodes.models.vocabulary import check_one_vocabulary
from collab_llm_nodes.protocols.base import Answer, Control, Progress, Request, Resources
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.carrier import Carrier, Session
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClient, EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.link_loss import LinkLossConfig, Patience, finish_alone
from collab_llm_nodes.protocols.edge_cloud.loop import Cancel, EdgeLoop, Event, Resume
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Opened,
    open_message,
)
from collab_llm_nodes.protocols.edge_cloud.motion_priority import MotionPriority
from collab_llm_nodes.protocols.edge_cloud.planner import Mode, Planner, PlannerConfig, settings_of
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.guides import AnswerConfig, guide_of
from collab_llm_nodes.protocols.prompts import name_prompt, prompt_of
from collab_llm_nodes.transport.wire import Failure

if TYPE_CHECKING:  # llguidance is loaded where guides are used
    from collab_llm_nodes.models.guided_text import GuidedText

_DRAFTING = {"client.gamma", "client.drafted_by"}
"""Options of a request that leave the planner no choice."""
_WATCH_S = 0.05
"""Period of checks of the verifier's silence, and of deadlines while an answer is paused [s]."""


@dataclass(frozen=True)
class EdgeCloudConfig:
    """Settings of the edge's side."""

    model: ModelConfig = field(default_factory=ModelConfig)
    drafts: tuple[str, ...] = setting(
        (),
        "Further draft models of the same tokenizer, by folder, hub id or shipped name: all vote on"
        " each draft token. Type, device and threads are those of model.",
        read_only=True,
    )
    prompt: PromptLimits = field(default_factory=PromptLimits)
    client: EdgeClientConfig = field(default_factory=EdgeClientConfig)
    predraft: PreDraftConfig = field(default_factory=PreDraftConfig)
    ahead: AheadConfig = field(default_factory=AheadConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    link_loss: LinkLossConfig = field(default_factory=LinkLossConfig)
    answer: AnswerConfig = field(default_factory=AnswerConfig)

    def __post_init__(self) -> None:
        check_ranges(self)

    def models(self) -> list[ModelConfig]:
        """Return the configuration of each draft model, ``model`` first."""
        return [self.model, *(replace(self.model, path=path) for path in self.drafts)]


def check(request: Request) -> None:
    """Check everything that needs no model.

    Raises:
        InvalidInput, ConfigError: ``field`` names the request's.
    """
    config: EdgeCloudConfig = request.config
    check_prompt(prompt_of(request), config.prompt, field="prompt")
    guide_of(request, config.answer)
    request.length(config.client.max_tokens)


def start(config: EdgeCloudConfig, resources: Resources) -> EdgeCloud:
    """Load the draft models.

    Raises:
        ConfigError: the host gives no carrier, or two draft models have different tokenizers.
        ModelError: a model cannot be loaded.
    """
    if resources.carrier is None:
        raise ConfigError(
            "edge_cloud needs a carrier to its verifier",
            field="carrier",
            remedy="give a VerifierCarrier, or run the node draft_vlm",
        )
    engine, *others = engines = [Engine(load(model)) for model in config.models()]
    for each in engines:
        each.warm_up()
    return EdgeCloud(engine, config, resources, others=others)


class EdgeCloud:
    """Edge-cloud speculation with its draft models loaded.

    Args:
        encode: turns prompts into the draft model's ids; by default as ``engine.loaded`` does.
        others: draft models that vote with ``engine`` on each token.

    Raises:
        ConfigError: one of ``others`` has another tokenizer than ``engine``.

    Attributes:
        mode: of the answer that began last.
        motion_priority: priority of answers for motion at the draft models.
    """

    parallel = 1  # the draft models do not batch answers; one for motion pauses the other

    def __init__(
        self,
        engine: DecodingEngine,
        config: EdgeCloudConfig,
        resources: Resources,
        encode: Callable[[Prompt], EncodedPrompt] | None = None,
        others: Sequence[DecodingEngine] = (),
    ) -> None:
        own, *further = ((e.loaded.config.path, e.vocabulary) for e in (engine, *others))
        check_one_vocabulary(own, further, "drafts[{}]")
        self._engine = engine
        self._others = tuple(others)
        self._config = config
        self._carrier: Carrier = resources.carrier
        self._log = resources.log
        self._own_encode = encode
        self.planner = Planner(config.planner, config.client.gamma, config.ahead.push_depth)
        self.mode: Mode | None = None
        self.motion_priority = MotionPriority()

    def run(
        self,
        request: Request,
        emit: Callable[[Progress], None],
        control: Control,
        on_tokens: Callable[[tuple[int, ...]], None] = lambda tokens: None,
    ) -> Answer:
        """Decode one answer; its law is the target's alone, whatever the draft and the link.

        Args:
            on_tokens: called with each verdict's new tokens, before the next draft is sent.
        """
        if request.for_motion:
            with self.motion_priority.held():
                return self._answer(request, emit, control, on_tokens)
        self.wait_for_motion(control)
        return self._answer(request, emit, control, on_tokens)

    def wait_for_motion(self, control: Control) -> None:
        """Wait until an answer that is not for motion may continue.

        Raises:
            CollabError: as ``control.check``.
        """
        while not self.motion_priority.wait(_WATCH_S):
            control.check()

    def _answer(
        self,
        request: Request,
        emit: Callable[[Progress], None],
        control: Control,
        on_tokens: Callable[[tuple[int, ...]], None],
    ) -> Answer:
        config: EdgeCloudConfig = request.config
        prompt = prompt_of(request)
        try:
            encoded = self._encode(prompt, config.prompt)
            others = [
                (other, encode(prompt, other.loaded, config.prompt)) for other in self._others
            ]
        except InvalidInput as error:
            name_prompt(error)
            raise
        guide = guide_of(request, config.answer)
        guided = None if guide is None else self._guided(request, guide)
        self.mode = mode = self._choose(request)
        drafter = Drafter(self._engine, encoded, request.sampling, others, guided)
        prompt_tokens = len(encoded.ids)
        generation = _Generation(
            self, request, mode, drafter, prompt_tokens, guide, emit, on_tokens
        )
        failure: CollabError | None = None
        try:
            generation.decode(control)
        except CollabError as caught:
            failure = caught
            name_prompt(failure)
        finally:
            drafter.close()
        return generation.answer(failure)

    def _guided(self, request: Request, guide: Guide) -> GuidedText:
        """Return the state of ``guide`` for the draft models.

        Raises:
            InvalidInput: it cannot be used, or answers begin in a thought.
        """
        loaded = self._engine.loaded
        if loaded.begun_thought and not request.raw:
            raise refused(
                "this model thinks before it answers, which a guide forbids", "none for this model"
            )
        return loaded.guides.open(guide)

    def _encode(self, prompt: Prompt, limits: PromptLimits) -> EncodedPrompt:
        if self._own_encode is not None:
            return self._own_encode(prompt)
        return encode(prompt, self._engine.loaded, limits)

    def _choose(self, request: Request) -> Mode:
        """Return the planner's choice, or the fixed mode if the request sets how to draft."""
        config: EdgeCloudConfig = request.config
        gamma, drafts = config.client.gamma, self._carrier.verifier_drafts
        asked = config.client.drafted_by == "verifier" and gamma > 0 and drafts
        fixed = Mode(gamma, co_located=True) if asked else Mode(gamma, ahead=True)
        if not config.planner.enabled or request.options & _DRAFTING:
            return fixed
        self.planner.configure(config.planner, gamma, config.ahead.push_depth)  # may have changed
        return self.planner.choose(co_located=drafts)

    def health(self) -> Mapping[str, object]:
        """Return mode of decoding, memory and device."""
        device = self._engine.loaded.device
        models = [engine.loaded.model for engine in (self._engine, *self._others)]
        parts = [part for model in models for part in (*model.parameters(), *model.buffers())]
        weights = sum(part.numel() * part.element_size() for part in parts)
        values: dict[str, object] = {
            "model": " ".join(model.path for model in self._config.models()),
            "mode": self.mode.name if self.mode else "",
            "weights_mib": f"{weights / 2**20:.1f}",
            "device": str(device),
        }
        if device.type == "cuda":
            values["allocated_mib"] = f"{torch.cuda.memory_allocated(device) / 2**20:.1f}"
        return values

    def close(self) -> None:
        """Free the models."""
        del self._engine, self._others


class _Generation:
    """One answer in progress."""

    def __init__(
        self,
        owner: EdgeCloud,
        request: Request,
        mode: Mode,
        drafter: Drafter,
        prompt_tokens: int,
        guide: Guide | None,
        emit: Callable[[Progress], None],
        on_tokens: Callable[[tuple[int, ...]], None],
    ) -> None:
        config: EdgeCloudConfig = request.config
        self._owner, self._request, self._mode, self._emit = owner, request, mode, emit
        self._report_tokens = on_tokens
        self._link_loss = config.link_loss
        self._drafter, self._prompt_tokens, self._guide = drafter, prompt_tokens, guide
        begun = "" if request.raw else owner._engine.loaded.begun_thought
        self._text = Detokeniser(owner._engine.decode, begun)
        self._reported = 0  # number of tokens emitted
        self._patience = Patience(config.link_loss.after_s)
        self._session: Session | None = None
        self._opening_bytes = 0  # to the first verdict, prompt and pictures included
        self._length = request.length(config.client.max_tokens)
        length = EdgeClientConfig(0 if mode.co_located else mode.gamma, self._length)
        filled = guide is not None or mode.co_located
        self._client = EdgeClient(length, drafter.room, filled=filled)
        predraft, ahead = settings_of(mode, config.predraft, config.ahead)
        self._loop = EdgeLoop(
            self._client,
            drafter,
            send=self._send,
            predraft=predraft,
            ahead=ahead,
            profile=owner.planner.profile,
            co_located=mode.gamma if mode.co_located else 0,
            exits=not owner._carrier.queues_exits,
            on_tokens=self._on_tokens,
            # Publish only while a verification runs, so that drafting never waits.
            on_under_way=self._report,
            may_run=(lambda: True) if request.for_motion else owner.motion_priority.may_run,
        )

    def decode(self, control: Control) -> None:
        """Decode until the answer is complete, by the draft model alone if the policy says so.

        Raises:
            CollabError: why it is not.
        """
        priority = self._owner.motion_priority
        unregister_cancel = control.on_cancel(lambda: self._loop.post(Cancel()))
        unregister_resume = priority.on_release(lambda: self._loop.post(Resume()))
        try:
            self._verified(control)
        except CollabError as error:
            if not self._link_loss.finishes_alone(error):
                raise
            self._alone(control, error)
        finally:
            unregister_cancel()
            unregister_resume()

    def answer(self, error: CollabError | None) -> Answer:
        """Return the answer, complete or with ``error``."""
        self._text.update(self._client.generated, final=True)
        verified = error is None and self._client.verified
        return Answer(**{**vars(self._progress()), "verified": verified}, error=error)

    def _verified(self, control: Control) -> None:
        """Run Algorithm 1."""
        request, owner = self._request, self._owner
        opened = open_message(
            prompt_of(request),
            request.sampling,
            self._length,
            owner._engine.vocabulary,
            for_motion=request.for_motion,
            guide=self._guide,
            co_located=self._mode.gamma if self._mode.co_located else 0,
        )
        with self._watching_silence():
            try:
                self._session = owner._carrier.open(request, opened, self._receive, control.due)
                control.check()
                left_s = control.due - time.monotonic()
                self._loop.run(left_s, asked_at=request.asked_at or None)
                if not self._loop.paused:
                    later = self._bytes - self._opening_bytes
                    owner.planner.on_answer(self._mode, self._client.metrics, later)
            finally:
                self._loop.close()  # it may not have run, but must answer requests for pre-drafts
                self._report()
                if self._session is not None:
                    self._session.close()

    def _alone(self, control: Control, error: CollabError) -> None:
        """Have the draft model finish the answer in the time that is left."""

        def check_() -> None:
            try:
                control.check()
                if not self._request.for_motion:
                    self._owner.wait_for_motion(control)
            except DeadlineExceeded:
                raise error from None

        check_()
        room = self._drafter.room - len(self._client.generated) + 1
        self._owner._log.warning(f"the draft model finishes the answer alone: {error}")
        finish_alone(
            self._client,
            self._drafter.next_token,
            self._owner._engine.eos,
            min(self._link_loss.max_unverified, room),
            check=check_,
            on_tokens=lambda tokens: self._report(),
        )

    def _receive(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, EarlyExit):
            self._patience.on_heard(now, waiting=True)
        if isinstance(event, Opened) and event.prompt_tokens != self._prompt_tokens:
            self._owner._log.warning(
                f"the prompt is {self._prompt_tokens} tokens here and {event.prompt_tokens} at the"
                " verifier: drafts will be poor"
            )
        self._loop.post(event)

    def _send(self, draft: Draft) -> None:
        assert self._session is not None
        self._patience.on_sent(time.monotonic())
        self._session.send(draft)

    @property
    def _bytes(self) -> int:
        """Bytes of the session so far, both ways."""
        return 0 if self._session is None else self._session.bytes_up + self._session.bytes_down

    def _on_tokens(self, tokens: tuple[int, ...]) -> None:
        self._opening_bytes = self._opening_bytes or self._bytes
        awaited = self._client.in_flight is not None
        self._patience.on_heard(time.monotonic(), waiting=awaited)
        self._report_tokens(tokens)

    def _report(self) -> None:
        if len(self._client.generated) > self._reported:
            self._reported = len(self._client.generated)
            self._text.update(self._client.generated)
            self._emit(self._progress())

    def _progress(self) -> Progress:
        client, session = self._client, self._session
        metrics = replace(client.metrics)
        if session is not None:
            metrics.bytes_up, metrics.bytes_down = session.bytes_up, session.bytes_down
        return Progress(
            self._text.text,
            tuple(client.generated),
            tuple(int(source) for source in client.sources),
            self._text.ends,
            client.verified,
            metrics=metrics,
        )

    @contextlib.contextmanager
    def _watching_silence(self) -> Iterator[None]:
        """End the loop when the verifier is silent for too long, if the draft model may continue.

        So the answer does not wait for the link's own deadline.
        """
        if self._link_loss.policy != "draft_only":
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_WATCH_S):
                if self._patience.over(time.monotonic()):
                    limit = self._link_loss.after_s
                    silent = Failure(Unavailable.code, f"no verdict within {limit:g} s")
                    self._loop.post(silent)
                    return

        watching = threading.Thread(target=watch, name="verifier-silence")
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()
