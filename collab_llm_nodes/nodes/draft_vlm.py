"""The draft VLM on the robot: the edge client of paper 003 (Algorithm 1), offered to every node.

Hosts the action ``generate``, its service twin ``edge_cloud_generate``, and ``predraft`` for the
cache. Each answer is an ``EdgeLoop`` in the model's own thread; the callbacks only post to it.
"""

from __future__ import annotations

import math
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Lock
from typing import Any

import torch
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.task import Future
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import Header

from collab_llm.action import Generate
from collab_llm.msg import Draft, EarlyExit, GeneratedText, Verdict
from collab_llm.srv import CloseSession, EdgeCloudGenerate, OpenSession, PreDraft
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    DeadlineExceeded,
    Inactive,
    InvalidInput,
    Unavailable,
)
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, PromptLimits, check_length, encode
from collab_llm_nodes.models.vocabulary import vocabulary_hash
from collab_llm_nodes.protocols.edge_cloud import messages
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import ClientConfig, EdgeClient
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter, DrafterConfig
from collab_llm_nodes.protocols.edge_cloud.link_loss import LinkLossConfig, Patience, finish_alone
from collab_llm_nodes.protocols.edge_cloud.loop import Cancel, EdgeLoop, PreDraftRequest
from collab_llm_nodes.protocols.edge_cloud.planner import Planner, PlannerConfig, settings_of
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.ros.convert import (
    code_of,
    draft_to_msg,
    exit_from_msg,
    images_from,
    metrics_to_msg,
    of_a_request,
    sampling_from,
    status_of,
    verdict_from_msg,
)
from collab_llm_nodes.ros.health import AnswerLimits, Answers, Level, Status
from collab_llm_nodes.ros.node import REQUESTS, RESULT, STEADY, ManagedNode, guarded, run

PROTOCOLS = ("edge_cloud",)
MAX_DEADLINE_S = 86400.0
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_RESULT_S = 15
"""How long a result waits for its caller, who should ask for it when the goal is accepted [s].
rclpy's default of 15 minutes would keep the pictures of all goals of that time; and announcing a
goal leaks memory in proportion to the goals that are kept."""
_WATCH_S = 0.05
"""How often deadlines and the silence of the verifier are looked at."""


@dataclass(frozen=True)
class DraftVlmConfig:
    """Parameters of the node."""

    model: ModelConfig = field(default_factory=ModelConfig)
    prompt: PromptLimits = field(default_factory=PromptLimits)
    client: ClientConfig = field(default_factory=ClientConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    predraft: PreDraftConfig = field(default_factory=PreDraftConfig)
    ahead: AheadConfig = field(default_factory=AheadConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    link_loss: LinkLossConfig = field(default_factory=LinkLossConfig)
    health: AnswerLimits = field(default_factory=AnswerLimits)
    deadline_s: float = setting(
        10.0, "One answer, when the request names no deadline [s].", low=0.05, high=3600.0
    )
    open_deadline_s: float = setting(
        1.0, "Wait for the bridge's services at most [s].", low=0.01, high=60.0
    )
    max_waiting: int = setting(
        4, "Answers in progress or waiting; more are refused as BUSY.", low=1, high=256
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class _Request:
    """One answer asked for, by action or service."""

    header: Header
    for_motion: bool
    prompt: Prompt
    sampling: SamplingConfig
    client: ClientConfig
    asked_at: float  # time.monotonic
    due: float
    images: list[CompressedImage]


class _Answer:
    """One answer under way: what the callbacks need to reach it, and what became of it."""

    def __init__(self, request: _Request, patience_s: float) -> None:
        self.request = request
        self.patience = Patience(patience_s)
        self.session_id = uuid.uuid4().hex
        self.loop: EdgeLoop | None = None
        self.cancelled = False
        self.error: CollabError | None = None
        self.text = ""
        self.ends: list[int] = []  # of the tokens' texts, as far as they were told
        self.untold = 0  # tokens that no message has told of yet
        self.abandon: Callable[[CollabError], None] = lambda error: None
        self._claimed = Lock()

    @property
    def verified(self) -> bool:
        """The target stands for every token."""
        return self.error is None and (self.loop is None or self.loop.client.verified)

    def claim(self) -> bool:
        """True for the first who asks: the model's thread, or who gives up before its turn."""
        return self._claimed.acquire(blocking=False)

    def cancel(self) -> None:
        """Give up: at once before its turn, else between two forward passes."""
        self.cancelled = True
        self.abandon(Cancelled("the caller gave the answer up"))
        if self.loop is not None:
            self.loop.post(Cancel())


class DraftVlm(ManagedNode[DraftVlmConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("draft_vlm", DraftVlmConfig, **node_arguments)
        self._engine: Engine | None = None
        self._answers: dict[str, _Answer] = {}  # by session id
        self._goals: dict[bytes, _Answer] = {}
        self._waiting: list[_Answer] = []
        self._health = Answers()
        self._mode = ""  # of decoding, of the last answer
        self.answered = 0
        self.failed = 0

    # Lifecycle.

    def configure(self) -> None:
        """Load the model and offer the interfaces; the load blocks the transition."""
        loaded = load(self.config.model)
        self._engine = Engine(loaded)
        parts = (*loaded.model.parameters(), *loaded.model.buffers())
        self._weights = sum(part.numel() * part.element_size() for part in parts)
        self._device = loaded.device
        self._vocabulary = vocabulary_hash(loaded.tokenizer)
        gamma, depth = self.config.client.gamma, self.config.ahead.push_depth
        self._planner = Planner(self.config.planner, gamma, depth)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="draft-model")
        self._drafts = self.create_publisher(Draft, "draft", RESULT)
        self._texts = self.create_publisher(GeneratedText, "generated_text", RESULT)
        self._open_client = self.create_client(OpenSession, "open_session", qos_profile=REQUESTS)
        self._close_client = self.create_client(CloseSession, "close_session", qos_profile=REQUESTS)
        self._heard = [
            self.create_subscription(Verdict, "verdict", self._on_verdict, RESULT),
            self.create_subscription(EarlyExit, "early_exit", self._on_early_exit, RESULT),
        ]
        # An awaiting service callback occupies its callback group: in the node's own, exclusive
        # one it would block the very responses it waits for.
        self._group = ReentrantCallbackGroup()
        self._offered = [
            self.create_service(
                kind, name, callback, qos_profile=REQUESTS, callback_group=self._group
            )
            for kind, name, callback in (
                (EdgeCloudGenerate, "edge_cloud_generate", self._serve),
                (PreDraft, "predraft", self._serve_predraft),
            )
        ]
        self._watching = self.create_timer(_WATCH_S, self._watch, clock=STEADY)
        self._action = ActionServer(
            self,
            Generate,
            "generate",
            self._execute,
            goal_callback=self._on_goal,
            cancel_callback=self._on_cancel,
            goal_service_qos_profile=REQUESTS,
            result_service_qos_profile=REQUESTS,
            cancel_service_qos_profile=REQUESTS,
            result_timeout=_RESULT_S,
        )

    def deactivate(self) -> None:
        for answer in list(self._waiting):
            answer.cancel()

    def cleanup(self) -> None:
        for answer in list(self._waiting):
            answer.cancel()
        self._worker.shutdown(wait=True)  # at most one forward pass: cancelled above
        for publisher in (self._drafts, self._texts):
            self.destroy_publisher(publisher)
        self.destroy_timer(self._watching)
        self._engine = None
        # Callers still get their results: what answers them goes when they have them.
        offered, heard, action = [*self._offered], [*self._heard], self._action
        clients = self._open_client, self._close_client
        due = time.monotonic() + 1.0

        def retire() -> None:
            if self._waiting and time.monotonic() < due:
                return
            self.destroy_timer(timer)
            action.destroy()
            for service in offered:
                self.destroy_service(service)
            for subscription in heard:
                self.destroy_subscription(subscription)
            for client in clients:
                self.destroy_client(client)

        timer = self.create_timer(0.02, retire, clock=STEADY)

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        values = {
            "model": self.config.model.path,
            "in_progress": len(self._waiting),
            "answered": self.answered,
            "failed": self.failed,
        }
        return level, message, values

    def details(self, now: float) -> list[Status]:
        """The last answers, and what the model takes."""
        limits, recent = self.config.health, self.common.diagnostics.recent
        decoding = self._health.status("decoding", limits, now, recent)
        decoding.values["mode"] = self._mode
        values = {"weights_mib": f"{self._weights / 2**20:.1f}", "device": str(self._device)}
        if self._device.type == "cuda":
            values["allocated_mib"] = f"{torch.cuda.memory_allocated(self._device) / 2**20:.1f}"
        told = f"{self._weights / 2**20:.0f} MiB of weights"
        return [decoding, Status("model", Level.OK, told, values)]

    # Requests. Callbacks of actions and services must answer in any state.

    def _on_goal(self, request: Generate.Goal) -> GoalResponse:
        """Refuse what cannot be answered, as far as that is known without reading the picture."""
        try:
            self._read(request, protocol=request.protocol)
        except CollabError as error:
            return self.refuse_goal("generate", error)
        return GoalResponse.ACCEPT

    async def _execute(self, goal: ServerGoalHandle) -> Generate.Result:
        result = Generate.Result(header=goal.request.header)

        def feedback(msg: GeneratedText, tokens: int) -> None:
            update = Generate.Feedback(header=msg.header, session_id=msg.session_id)
            update.text, update.delta, update.metrics = msg.text, msg.delta, msg.metrics
            told = len(msg.tokens) - tokens
            update.tokens, update.sources = msg.tokens[told:], msg.sources[told:]
            goal.publish_feedback(update)

        try:
            request = goal.request  # checked before, but the node may be busy or inactive by now
            answer = self._read(request, protocol=request.protocol, for_motion=request.for_motion)
            self._goals[bytes(goal.goal_id.uuid)] = answer
            if goal.is_cancel_requested:  # it came before this coroutine began
                answer.cancel()
            try:
                await self._submit(answer, feedback)
            finally:
                del self._goals[bytes(goal.goal_id.uuid)]
            self._fill(result, answer)
        except CollabError as error:
            result.status, result.error_msg = status_of(error.code), str(error)
        if result.status == result.OK:
            goal.succeed()
        elif goal.is_cancel_requested:
            goal.canceled()
        else:
            goal.abort()
        return result

    def _on_cancel(self, goal: ServerGoalHandle) -> CancelResponse:
        answer = self._goals.get(bytes(goal.goal_id.uuid))
        if answer is not None:
            answer.cancel()
        return CancelResponse.ACCEPT

    async def _serve(
        self, request: EdgeCloudGenerate.Request, response: EdgeCloudGenerate.Response
    ) -> EdgeCloudGenerate.Response:
        try:
            answer = self._read(request)
            await self._submit(answer, lambda msg, tokens: None)
            self._fill(response, answer)
        except CollabError as error:
            response.status, response.error_msg = status_of(error.code), str(error)
        return response

    def _read(
        self, request: Any, *, protocol: str = PROTOCOLS[0], for_motion: bool = False
    ) -> _Answer:
        """Check a request, which the service's lacks two fields of; raises CollabError."""
        if not self.active:
            raise Inactive("draft_vlm is not active", remedy="activate it (lifecycle)")
        if len(self._waiting) >= self.config.max_waiting:
            raise Busy(
                f"{len(self._waiting)} answers are in progress",
                remedy="retry, or raise max_waiting",
            )
        if not 0.0 <= request.deadline_s <= MAX_DEADLINE_S:
            raise InvalidInput(
                f"must be in 0..{MAX_DEADLINE_S:g} s",
                field="deadline_s",
                remedy="0 = the node's default",
            )
        if protocol not in PROTOCOLS:
            raise InvalidInput(
                f"unknown protocol {protocol!r}",
                field="protocol",
                remedy=f"one of {', '.join(PROTOCOLS)}",
            )
        check_length(request.prompt, self.config.prompt, field="prompt")
        prompt = Prompt(request.prompt, images_from(request))
        asked_at = time.monotonic()
        due = asked_at + (request.deadline_s or self.config.deadline_s)
        with of_a_request():
            max_tokens = request.max_tokens or self.config.client.max_tokens
            client = ClientConfig(self.config.client.gamma, max_tokens)
        return _Answer(
            _Request(
                request.header,
                for_motion,
                prompt,
                sampling_from(request),
                client,
                asked_at,
                due,
                list(request.images),
            ),
            self.config.link_loss.after_s,
        )

    async def _submit(
        self, answer: _Answer, feedback: Callable[[GeneratedText, int], None]
    ) -> None:
        """Have the model's thread decode ``answer``; returns when it is over, however it ends."""
        over = Future()

        def abandon(error: CollabError) -> None:
            if answer.claim():
                answer.error = error
                self.post(over.set_result, None)

        answer.abandon = abandon
        self.get_logger().debug(f"answer {answer.session_id[:8]}: asked for")
        self._waiting.append(answer)
        self._watching.reset()
        done = partial(self.post, over.set_result, None)
        self._worker.submit(self._decode, answer, feedback, done)
        try:
            await over
        finally:
            self._waiting.remove(answer)
            self._answers.pop(answer.session_id, None)

    def _watch(self) -> None:
        """Look after the answers in progress. One timer for all: rclpy keeps something of each
        timer that was ever made."""
        if not self._waiting:
            self._watching.cancel()  # until the next one
        now = time.monotonic()
        for answer in self._waiting:
            if now >= answer.request.due:  # once its turn has come it sees to that itself
                answer.abandon(
                    DeadlineExceeded(
                        "other answers were in progress", field="deadline_s", remedy="raise it"
                    )
                )
            alone = self.config.link_loss.policy == "draft_only"
            if alone and answer.loop is not None and answer.patience.over(now):
                # The verifier is silent for too long: no need to wait for the link's deadline.
                limit = self.config.link_loss.after_s
                silent = messages.Failure(Unavailable.code, f"no verdict within {limit:g} s")
                answer.loop.post(silent)

    def _fill(self, result: Any, answer: _Answer) -> None:
        """What the action's result and the service's response have in common."""
        if answer.error is not None:
            self.failed += 1
            result.status, result.error_msg = status_of(answer.error.code), str(answer.error)
            if answer.error.code != Cancelled.code:  # which is the caller's wish
                self._health.faults.add(answer.error.code, str(answer.error), time.monotonic())
        else:
            self.answered += 1
        name = f"answer {answer.session_id[:8]}"
        if answer.loop is None:
            self.get_logger().debug(f"{name}: ended before its turn: {answer.error}")
            return
        client = answer.loop.client
        self.get_logger().debug(
            f"{name}: {answer.error or 'complete'}; {len(client.generated)} tokens in"
            f" {client.metrics.rounds} rounds ({self._mode}), {client.metrics.accepted} of"
            f" {client.metrics.drafted} drafted tokens accepted, {client.metrics.total_s:.2f} s"
        )
        result.session_id, result.text = answer.session_id, answer.text
        result.tokens, result.sources = client.generated, [int(s) for s in client.sources]
        result.verified = answer.verified
        result.metrics = metrics_to_msg(client.metrics)
        if answer.error is None:
            self._health.on_answer(client.metrics)

    async def _serve_predraft(
        self, request: PreDraft.Request, response: PreDraft.Response
    ) -> PreDraft.Response:
        answer = self._answers.get(request.session_id)
        if answer is None or answer.loop is None:
            response.status = response.INVALID_INPUT
            response.error_msg = "session_id: no answer of this session is under way"
            return response
        done = Future()
        answer.loop.post(
            PreDraftRequest(
                request.round,
                tuple(request.outcome),
                reply=lambda ready: self.post(done.set_result, ready),
                due=time.monotonic() + request.deadline_s if request.deadline_s else math.inf,
            )
        )
        if not await done:
            response.status, response.error_msg = response.CANCELLED, "the verdict came first"
        return response

    # What the other nodes publish goes into the loop of its session.

    @guarded
    def _on_verdict(self, msg: Verdict) -> None:
        answer = self._answers.get(msg.session_id)
        if answer is not None and answer.loop is not None:
            metrics = answer.loop.client.metrics
            metrics.bytes_up, metrics.bytes_down = msg.bytes_up, msg.bytes_down
        self._post(msg.session_id, verdict_from_msg(msg))

    @guarded
    def _on_early_exit(self, msg: EarlyExit) -> None:
        if (answer := self._answers.get(msg.session_id)) is not None:
            answer.patience.on_heard(time.monotonic(), waiting=True)
        self._post(msg.session_id, exit_from_msg(msg))

    def _post(self, session_id: str, event: Any) -> None:
        answer = self._answers.get(session_id)
        if answer is not None and answer.loop is not None:
            answer.loop.post(event)

    # In the model's thread.

    def _decode(
        self,
        answer: _Answer,
        feedback: Callable[[GeneratedText, int], None],
        over: Callable[[], None],
    ) -> None:
        """Decode one answer; every way out publishes a final text and calls ``over``."""
        if not answer.claim():
            return  # given up while it waited for its turn
        try:
            self._run(answer, feedback)
        except CollabError as error:
            answer.error = error
        except Exception as error:  # noqa: BLE001 - whatever a model raises must reach the caller
            answer.error = CollabError(f"{type(error).__name__}: {error}")
            self.get_logger().error(str(answer.error), throttle_duration_sec=1.0)
        try:
            if answer.error is not None:
                self._close_client.call_async(CloseSession.Request(session_id=answer.session_id))
            msg = self._publish_text(answer, final=True)
            if msg.delta:  # half a character that nothing completed
                feedback(msg, 0)
        except Exception as error:  # noqa: BLE001 - the caller waits for ``over`` in any case
            self.get_logger().error(f"{type(error).__name__}: {error}", throttle_duration_sec=1.0)
        finally:
            over()

    def _run(self, answer: _Answer, feedback: Callable[[GeneratedText, int], None]) -> None:
        """Algorithm 1 for one answer. Raises whatever ends it early."""
        request, engine = answer.request, self._engine
        if answer.cancelled or engine is None:
            raise Cancelled("the caller gave the answer up")
        try:
            # Refuses what cannot be used.
            encoded = encode(request.prompt, engine.loaded, self.config.prompt)
        except InvalidInput as error:
            if error.field == "text":
                error.field = "prompt"  # as its requests call it
            raise
        mode = self._planner.choose()
        self._mode = mode.name
        predraft, ahead = settings_of(mode, self.config.predraft, self.config.ahead)
        client = EdgeClient(replace(request.client, gamma=mode.gamma))
        drafter = Drafter(engine, encoded, request.sampling, self.config.drafter)
        answer.loop = EdgeLoop(
            client,
            drafter,
            send=partial(self._send, answer),
            predraft=predraft,
            ahead=ahead,
            profile=self._planner.profile,
            exits=False,  # predraft_cache asks for what they suggest
            on_tokens=partial(self._on_tokens, answer),
            on_under_way=partial(self._tell, answer, feedback),
        )
        try:
            self._answers[answer.session_id] = answer  # before anything can be said about it
            self._open(answer)
            if answer.cancelled:
                raise Cancelled("the caller gave the answer up")
            try:
                answer.loop.run(request.due - time.monotonic(), asked_at=request.asked_at)
                self._planner.on_answer(mode, client.metrics)
            finally:
                self._tell(answer, feedback)
        except CollabError as error:
            if not self.config.link_loss.finishes_alone(error):
                raise
            self._finish_alone(answer, drafter, feedback, error)
        finally:
            drafter.close()

    def _finish_alone(
        self,
        answer: _Answer,
        drafter: Drafter,
        feedback: Callable[[GeneratedText, int], None],
        error: CollabError,
    ) -> None:
        """The verifier is out of reach: the draft model goes on, in what time is left."""
        assert answer.loop is not None
        assert self._engine is not None

        def check() -> None:
            if answer.cancelled:
                raise Cancelled("the caller gave the answer up")
            if time.monotonic() >= answer.request.due:
                raise error

        check()
        self.get_logger().warning(
            f"the draft model finishes the answer alone: {error}", throttle_duration_sec=2.0
        )
        self._close_client.call_async(CloseSession.Request(session_id=answer.session_id))
        finish_alone(
            answer.loop.client,
            drafter.alone,
            self._engine.eos,
            self.config.link_loss.max_unverified,
            check=check,
            on_tokens=partial(self._on_unverified, answer, feedback),
        )

    def _open(self, answer: _Answer) -> None:
        """Open the session at the bridge."""
        request = answer.request
        wait = min(self.config.open_deadline_s, request.due - time.monotonic())
        if not self._open_client.wait_for_service(timeout_sec=max(0.0, wait)):
            raise Unavailable(
                "the service open_session is not there",
                field="cloud_verifier_bridge",
                remedy="start and activate the bridge",
            )
        call = OpenSession.Request(
            header=request.header,
            session_id=answer.session_id,
            text=request.prompt.text,
            images=request.images,
            temperature=request.sampling.temperature,
            top_k=request.sampling.top_k,
            top_p=request.sampling.top_p,
            seed=request.sampling.seed,
            law=request.sampling.law,
            max_tokens=request.client.max_tokens,
            vocabulary=self._vocabulary,
            deadline_s=max(0.001, request.due - time.monotonic()),
        )
        answered = Event()
        future = self._open_client.call_async(call)
        future.add_done_callback(lambda _: answered.set())
        if not answered.wait(max(0.0, wait)):
            self._open_client.remove_pending_request(future)
            raise DeadlineExceeded("open_session did not answer", field="cloud_verifier_bridge")
        response = future.result()
        if response is None or response.status != response.OK:
            told = response.error_msg if response else "open_session gave no response"
            code = code_of(response.status) if response else CollabError.code
            raise messages.error_of(messages.Failure(code, told))

    def _send(self, answer: _Answer, draft: messages.Draft) -> None:
        answer.patience.on_sent(time.monotonic())
        self._drafts.publish(draft_to_msg(draft, answer.request.header, answer.session_id))

    def _on_tokens(self, answer: _Answer, tokens: tuple[int, ...]) -> None:
        assert answer.loop is not None
        awaited = answer.loop.client.in_flight is not None
        answer.patience.on_heard(time.monotonic(), waiting=awaited)
        answer.untold += len(tokens)

    def _on_unverified(
        self,
        answer: _Answer,
        feedback: Callable[[GeneratedText, int], None],
        tokens: tuple[int, ...],
    ) -> None:
        answer.untold += len(tokens)
        self._tell(answer, feedback)

    def _tell(self, answer: _Answer, feedback: Callable[[GeneratedText, int], None]) -> None:
        """Publish what is new, while the verifier works: it wakes half the graph, for whose sake
        the next draft must not wait."""
        if answer.untold:
            msg = self._publish_text(answer, final=False)
            feedback(msg, answer.untold)
            answer.untold = 0

    def _publish_text(self, answer: _Answer, *, final: bool) -> GeneratedText:
        engine, client = self._engine, answer.loop.client if answer.loop else None
        assert engine is not None
        generated = client.generated if client else []
        # A ROS string ends at its first NUL, which a byte-level vocabulary can produce.
        text = engine.decode(generated).replace("\0", _REPLACEMENT)
        if not final and text.endswith(_REPLACEMENT):
            text = answer.text  # half a character: its other bytes come with the next token
        msg = GeneratedText(
            header=answer.request.header,
            session_id=answer.session_id,
            prompt=answer.request.prompt.text,
            text=text,
            delta=text[len(answer.text) :],
            tokens=array("i", generated),
            sources=array("B", [int(s) for s in client.sources] if client else []),
            ends=array("I", _ends(engine, answer, generated, text)),
            final=final,
            for_motion=answer.request.for_motion,
            verified=answer.verified,
        )
        if answer.error is not None:
            msg.status, msg.error_msg = status_of(answer.error.code), str(answer.error)
        if client is not None:
            msg.metrics = metrics_to_msg(client.metrics)
        answer.text = text
        self._texts.publish(msg)
        return msg


def _ends(engine: Engine, answer: _Answer, tokens: Sequence[int], text: str) -> list[int]:
    """Where the text of each token ends in ``text``. A character of several tokens is the last
    one's. Only tokens that were not told of yet are decoded, each with what is before it."""
    for n in range(len(answer.ends) + 1, len(tokens)):
        begun = engine.decode(tokens[:n])
        before = answer.ends[-1] if answer.ends else 0
        answer.ends.append(before if begun.endswith(_REPLACEMENT) else min(len(begun), len(text)))
    return [*answer.ends, len(text)] if tokens else []


def main() -> int:
    """Run the node."""
    return run(DraftVlm)


if __name__ == "__main__":
    raise SystemExit(main())
