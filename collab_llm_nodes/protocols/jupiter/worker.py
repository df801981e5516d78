"""A stage worker: some layers of a model, served to one coordinator at a time.

The coordinator assigns the layers (Load) and the next worker (Connect), and sends each pass to the
first worker. Hidden states flow from worker to worker; the last one answers the coordinator.

    coordinator ──Pass (ids)──▶ worker 0 ══Pass (states)══▶ worker 1 ══▶ ... worker n - 1
         ▲                                                                       │
         └──────────────────────────── Result ───────────────────────────────────┘

Streams are read and written in one event loop. A thread of its own loads layers and computes
passes, one after another in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from collab_llm_nodes.assets import version
from collab_llm_nodes.engine.device import synchronize
from collab_llm_nodes.engine.stage import Stage, check_stages
from collab_llm_nodes.errors import (
    Busy,
    CollabError,
    ConfigError,
    InvalidInput,
    ModelError,
    ProtocolError,
    Unavailable,
)
from collab_llm_nodes.models.heads import MedusaHeads, count_heads, holds_heads
from collab_llm_nodes.models.loading import model_folder
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.jupiter import codec
from collab_llm_nodes.protocols.jupiter.link import StageLink
from collab_llm_nodes.protocols.jupiter.messages import (
    Answer,
    Connect,
    Connected,
    Link,
    Linked,
    Load,
    Loaded,
    Order,
    Outcome,
    Pass,
    Ping,
    Pong,
    Report,
    Result,
    Span,
    Taken,
    Want,
    WorkerInfo,
)
from collab_llm_nodes.protocols.jupiter.stage_lanes import StageLanes
from collab_llm_nodes.protocols.jupiter.states import pack, unpack
from collab_llm_nodes.protocols.jupiter.worker_settings import WorkerConfig
from collab_llm_nodes.transport.server import serve_until_signal
from collab_llm_nodes.transport.streams import ClientSession, StreamService, Unary

log = logging.getLogger(__name__)

_FREE_S = 0.5  # at shutdown, for the compute thread to finish a pass
_FIRST_BYTES = 1 << 16
"""Largest first message: only members of a chain may have more parsed."""
_MOST_UNREAD = 256
"""Most reports that a coordinator has not read: a correct one has a few per lane."""

Client = ClientSession[Answer]


@dataclass(eq=False)
class _Chain:
    """This worker's part of a chain, from Load until its coordinator leaves.

    Attributes:
        coordinator: stream of the coordinator.
        previous: stream of the previous worker, once it is linked.
        next: link to the next worker.
        lanes: of the compute thread.
        waiting: bytes of the passes not computed yet.
        last_number: of the passes received.
        jobs_received, jobs_begun, jobs_computed: as in Pong.
        broken: a pass has failed, or the chain has ended; later passes are not computed.
    """

    load: Load
    coordinator: Client
    previous: Client | None = None
    next: StageLink | None = None
    lanes: StageLanes | None = None
    waiting: int = 0
    last_number: int = -1
    jobs_received: int = 1  # the Load
    jobs_begun: int = 0
    jobs_computed: int = 0
    broken: bool = False


class StageWorker(StreamService[Answer]):
    """The service without a network.

    Raises:
        ModelError: the checkpoint cannot be read or divided, its heads belong to another model, or
            the device does not exist.
    """

    name = "jupiter_worker"
    full_name = codec.SERVICE
    stream = "Work"
    most_wait_s = 0.4  # a longer silence would look like a lost worker (LinkConfig.silence_s)
    counts_sessions = False  # hidden states may come as fast as the link carries them

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.config = config
        self.max_unanswered_bytes = config.limits.max_waiting_bytes
        folder = model_folder(config.model)
        facts = read_facts(config.model)
        check_stages(facts)  # otherwise the first request would fail
        self._heads = _heads_folder(config.heads, folder)
        self.info = WorkerInfo(
            version(),
            Path(config.model.path).name,
            facts.weights,
            facts.num_layers,
            facts.context,
            facts.vocab_size,
            facts.width,
            config.limits.max_lanes,
            facts.eos,
            0 if self._heads is None else count_heads(self._heads),
            facts.vocabulary,
        )
        self.title = f"jupiter worker for {self.info.model}"
        self._chain: _Chain | None = None
        self._stage: Stage | None = None  # of the compute thread, like the heads
        self._trained: MedusaHeads | None = None
        # The running job, and the time.monotonic() of its start.
        self._job: tuple[_Chain, float] | None = None

    def start(self) -> None:
        super().start()
        self._loop = asyncio.get_running_loop()
        self._compute = ThreadPoolExecutor(1, "jupiter-worker")
        if self.config.emulated_slowdown > 1:
            log.warning("EMULATION: a pass takes %g times as long", self.config.emulated_slowdown)

    async def stop(self) -> bool:
        self._end_chain(Unavailable("the worker is shutting down"))
        ended = self._loop.run_in_executor(
            None, partial(self._compute.shutdown, cancel_futures=True)
        )
        done, _ = await asyncio.wait({ended}, timeout=_FREE_S)
        return bool(done)

    def unary(self) -> Mapping[str, Unary]:
        return {"Describe": self._describe}

    async def _describe(self, request: bytes) -> bytes:
        return codec.encode_info(self.info)

    def encode(self, message: Answer | CollabError) -> bytes:
        return codec.encode_report(message)

    def on_disconnected(self, client: Client) -> None:
        chain = self._chain
        if chain is None:
            return
        if client is chain.coordinator:
            self._end_chain(None)
        elif client is chain.previous:
            chain.previous = None

    async def serve_stream(self, client: Client) -> None:
        """Serve a stream: a Load or a Link, then the messages of its chain."""
        data = await self.read_first(client)
        if data is not None and len(data) > _FIRST_BYTES:
            raise ProtocolError(f"{len(data)} bytes to begin with", field="message")
        first = None if data is None else codec.decode_order(data)
        if isinstance(first, Load):
            self._take_load(client, first)
        elif isinstance(first, Link):
            self._take_link(client, first)
        elif first is not None:
            raise ProtocolError(
                "the first message must be Load or Link",
                field="message",
                remedy="open a new stream",
            )
        while (data := await self.read(client)) is not None:
            self._take(client, codec.decode_order(data), len(data))

    # In the event loop.

    def _take_load(self, client: Client, load: Load) -> None:
        info, own = self.info, self._chain
        if load.version != info.version:
            raise ConfigError(
                f"the coordinator is version {load.version[:40]}, this worker {info.version}",
                field="version",
                remedy="install one version everywhere",
            )
        if load.weights != info.weights:
            raise ModelError(
                f"the coordinator wants {load.weights[:12]}, these weights are"
                f" {info.short_weights}",
                field="weights",
                remedy="copy one checkpoint to all workers, with the same dtype and quantization",
            )
        if not 1 <= load.lanes <= info.most_lanes:
            raise ConfigError(
                f"{load.lanes} lanes", field="lanes", remedy=f"1 to {info.most_lanes}"
            )
        if own is not None and own.load.coordinator != load.coordinator:
            raise Busy(
                "the worker serves another coordinator",
                field="address",
                remedy="wait, or take another worker",
            )
        self._end_chain(Unavailable("another chain has replaced it"))
        self._chain = chain = _Chain(load, client)
        client.open()
        self._submit(self._load, chain)  # pings are answered meanwhile

    def _take_link(self, client: Client, link: Link) -> None:
        chain = self._chain
        if (
            chain is None
            or chain.previous is not None
            or not chain.load.first
            or not secrets.compare_digest(link.chain.encode(), chain.load.chain.encode())
        ):
            raise ProtocolError(
                "this worker expects no such link", field="chain", remedy="arrange a chain first"
            )
        chain.previous = client
        client.open()
        client.deliver(Linked())

    def _take(self, client: Client, order: Order, size: int) -> None:
        chain = self._chain
        if chain is None:
            raise Unavailable("the chain has ended", field="chain", remedy="arrange a new one")
        if max(client.unread, chain.coordinator.unread) > _MOST_UNREAD:
            self._end_chain(Busy("too many reports wait to be read", field="chain"))
            return
        if isinstance(order, Ping):
            job, busy_s = self._job, 0.0
            if job is not None and job[0] is not chain:
                busy_s = time.monotonic() - job[1]
            counts = (chain.jobs_received, chain.jobs_begun, chain.jobs_computed)
            client.deliver(Pong(*counts, busy_s))
            return
        if isinstance(order, Connect) and client is chain.coordinator:
            self._connect(chain, order)
        elif isinstance(order, Pass) and client is (chain.previous or chain.coordinator):
            self._take_pass(chain, client, order, size)
        else:
            raise ProtocolError(
                f"{type(order).__name__} was not expected",
                field="message",
                remedy="open a new stream",
            )

    def _connect(self, chain: _Chain, order: Connect) -> None:
        if chain.next is not None or chain.load.last == self.info.num_layers:
            raise ProtocolError("there is no next worker, or it is connected", field="address")

        def on_report(report: Report) -> None:
            if isinstance(report, Linked):
                chain.coordinator.deliver(Connected())

        def on_lost(error: CollabError) -> None:
            reason = f"the previous worker lost the link: {error.args[0]}"
            chain.coordinator.deliver(
                Unavailable(reason, field=order.address, remedy="check that worker and the link")
            )

        first = Link(chain.load.chain)
        chain.next = StageLink(self.config.link_to_next, order.address, first, on_report, on_lost)

    def _take_pass(self, chain: _Chain, client: Client, order: Pass, size: int) -> None:
        logits = sum(step.rows for step in order.steps if step.want is Want.LOGITS)
        if 4 * logits * self.info.vocab_size > self.config.limits.max_message_bytes:
            raise InvalidInput(
                f"logits after {logits} tokens are larger than one message",
                field="steps.rows",
                remedy="ask for fewer, or raise limits.max_message_bytes and the coordinator's",
            )
        if order.number <= chain.last_number:
            raise ProtocolError("passes must come in ascending order", field="number")
        chain.last_number = order.number
        chain.waiting += size
        if chain.waiting > self.config.limits.max_waiting_bytes:
            raise Busy(
                f"passes of {chain.waiting} bytes wait",
                field="states",
                remedy="send fewer at a time, or raise limits.max_waiting_bytes",
            )
        chain.jobs_received += 1
        self._submit(self._run, chain, client, order, size)

    def _end_chain(self, reason: CollabError | None) -> None:
        chain, self._chain = self._chain, None
        if chain is None:
            return
        chain.broken = True
        if chain.next is not None:
            chain.next.close()
        for client in (chain.coordinator, chain.previous):
            if client is not None and reason is not None and not client.gone.is_set():
                client.deliver(reason)
        if chain.previous is not None and reason is None:
            chain.previous.deliver(Unavailable("the coordinator has left", field="chain"))
        with contextlib.suppress(RuntimeError):  # after the shutdown of the executor
            self._submit(_close_lanes, chain)

    def _computed(self, chain: _Chain, size: int, passed_on: Pass | None) -> None:
        """Record in the event loop that a pass is computed, and send its states on."""
        chain.waiting -= size
        if passed_on is not None and chain.next is not None:
            chain.next.send(passed_on)
        chain.jobs_computed += 1

    def _submit(self, job: Callable[..., None], chain: _Chain, *args: object) -> None:
        """Queue ``job(chain, *args)`` for the compute thread."""
        self._compute.submit(self._do, job, chain, *args)

    # In the compute thread.

    def _do(self, job: Callable[..., None], chain: _Chain, *args: object) -> None:
        self._job = chain, time.monotonic()
        try:
            job(chain, *args)
        finally:
            self._job = None

    def _load(self, chain: _Chain) -> None:
        """Load the layers of ``chain``, and report it to the coordinator."""
        if chain.broken:
            return
        chain.jobs_begun += 1
        try:
            stage = self._stage_for(chain.load)
            chain.lanes = StageLanes(stage, chain.load.lanes, self.info.eos, self._trained)
        except Exception as error:  # noqa: BLE001 - the coordinator must learn of it
            self._fail(chain, error)
            return
        chain.jobs_computed += 1
        self.bridge.post(chain.coordinator, Loaded(stage.bytes))

    def _stage_for(self, load: Load) -> Stage:
        """Return the stage of ``load``, which stays loaded until another is wanted."""
        stage = self._stage
        if stage is None or (stage.first, stage.last) != (load.first, load.last):
            self._stage = self._trained = stage = None  # there may be too little memory for both
            begun = time.perf_counter()
            self._stage = stage = Stage(self.config.model, load.first, load.last)
            if stage.gives_logits and self._heads is not None:
                self._trained = MedusaHeads.load(self._heads, stage.parts).to(stage.device)
            log.info(
                "layers %d to %d: %.1f MB of tensors in %.2f s",
                load.first,
                load.last - 1,
                stage.bytes / 1e6,
                time.perf_counter() - begun,
            )
        return stage

    def _run(self, chain: _Chain, origin: Client, order: Pass, size: int) -> None:
        """Compute one pass, and report its result."""
        if chain.broken:
            return
        chain.jobs_begun += 1
        last = chain.load.last == self.info.num_layers
        begin, used = time.monotonic(), time.thread_time()
        try:
            states, outcomes = self._compute_pass(chain, order)
            packed = b"" if last else pack(states, chain.load.states)
            # The last stage has not synchronised if no step wants a result.
            synchronize(torch.device(self.config.model.device))
        except Exception as error:  # noqa: BLE001 - lanes now differ between the stages
            self._fail(chain, error)
            return
        self._slow_down(begin, time.thread_time() - used)
        spans = (*order.spans, Span(begin, time.monotonic()))
        passed_on = None
        if last:
            self.bridge.post(chain.coordinator, Result(order.number, tuple(outcomes), spans))
        else:
            passed_on = replace(order, states=packed, spans=spans)
        self.bridge.post(origin, Taken(order.number))
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._computed, chain, size, passed_on)

    def _compute_pass(self, chain: _Chain, order: Pass) -> tuple[Tensor, list[Outcome]]:
        assert chain.lanes is not None
        first = chain.load.first == 0
        rows = sum(step.features if first else len(step.ids) for step in order.steps)
        width = chain.lanes.feature_width if first else self.info.width
        states = unpack(order.states, rows, width, chain.load.states)
        return chain.lanes.run(order.steps, states)

    def _fail(self, chain: _Chain, error: Exception) -> None:
        """End a chain that cannot continue, and report the reason to its coordinator."""
        chain.broken = True
        if not isinstance(error, CollabError):
            log.exception("a pass failed", exc_info=error)
            error = CollabError(f"a pass failed: {error!r}", remedy="see the worker's log")
        self.bridge.post(chain.coordinator, error)

    def _slow_down(self, begin: float, used_s: float) -> None:
        """Emulate a slower device by multiplying the CPU time of this thread."""
        left = begin + self.config.emulated_slowdown * used_s - time.monotonic()
        if self.config.emulated_slowdown > 1 and left > 0:
            time.sleep(left)


def _close_lanes(chain: _Chain) -> None:
    if chain.lanes is not None:
        chain.lanes.close()


def _heads_folder(heads: str, folder: Path) -> Path | None:
    """Return the folder of the configured heads; None for no heads."""
    if heads != "beside":
        return Path(heads).expanduser() if heads else None
    return folder if holds_heads(folder) else None


def serve(config: WorkerConfig, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Serve like ``serve_until_signal``.

    Raises:
        ModelError: the checkpoint cannot be read.
    """

    def make_service() -> StageWorker:
        set_threads(config.model)
        return StageWorker(config)

    serve_until_signal(config, make_service, on_listening)
