"""A model over several workers: their presence, their layers, and the lanes of requests.

    with Pipeline(PipelineConfig(workers=("a:50561", "b:50561"))) as pipeline:
        chain = pipeline.chain(due)     # rearranged if a worker has been lost

Requests share a chain: their passes follow one another through the stages, each in its own lanes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from collab_llm_nodes.config import check_address, check_ranges, setting
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.models.partial import CheckpointFacts
from collab_llm_nodes.protocols.jupiter.chain import (
    Chain,
    Check,
    WorkerLost,
    in_background,
    no_check,
    wait_until,
)
from collab_llm_nodes.protocols.jupiter.link import LinkConfig, describe
from collab_llm_nodes.protocols.jupiter.messages import STATES, Load, Step, WorkerInfo
from collab_llm_nodes.protocols.jupiter.partition import Placement, check_placements

log = logging.getLogger(__name__)

_PAUSE_S = 0.1  # between two rounds of Describe without any answer
_DESCRIBE_S = 2.0  # for a missing worker, which is asked again later
_ANSWER_S = 120.0  # for the first worker to answer, however long a request may take
_ARRANGE_S = 600.0  # without a request: loading that is stuck fails much earlier (ProgressMonitor)
_END_S = 5.0  # for the upkeep thread to end
_EXCLUDED_S = 60.0
"""Time for which a faulty worker is left out, unless it is restarted meanwhile."""
_UPKEEP_S = 1.0
"""Period at which an idle pipeline looks for returned and lost workers: a few bytes for each."""

Plan = Callable[[Sequence[str], WorkerInfo], Sequence[Placement]]
"""Returns the stages on the workers at these addresses, or on some of them, in order.

Raises CollabError if they cannot hold the model."""


@dataclass(frozen=True)
class PipelineConfig:
    """The workers of a pipeline, and how to reach them."""

    workers: tuple[str, ...] = setting((), "Addresses of the workers, host:port.", read_only=True)
    link: LinkConfig = field(default_factory=LinkConfig)
    states: str = setting(
        "float32",
        "Form of hidden states between two workers: float16 and int8 need a half or a quarter of"
        " the bytes; answers may then differ from those of one device.",
        choices=STATES,
        read_only=True,
    )
    lanes: int = setting(
        8, "Lanes, each with a KV cache in every stage.", low=1, high=1024, read_only=True
    )
    alone_s: float = setting(
        5.0,
        "How long a request waits for a worker when all are lost [s].",
        low=0.1,
        high=3600.0,
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if len(set(self.workers)) < len(self.workers):
            raise ConfigError("a worker is named twice", field="workers", remedy="name it once")
        for i, address in enumerate(self.workers):
            check_address(f"workers[{i}]", address)


@dataclass(frozen=True)
class Loss:
    """The loss of a worker.

    Attributes:
        found_at: ``time.monotonic()`` when the loss was detected.
        arranged_at: when the other workers held all layers again.
    """

    device: str
    why: str
    found_at: float
    arranged_at: float


def equal_parts(devices: Sequence[str], info: WorkerInfo, first: int = 1) -> list[Placement]:
    """Divide the layers evenly; with more devices than layers, the last ones get none.

    Args:
        first: the first device gets at least so many layers, the others at least one.
    """
    count = min(len(devices), info.num_layers - first + 1)
    ends = [0, *(max(first + i, info.num_layers * (i + 1) // count) for i in range(count))]
    return [Placement(d, a, b) for d, a, b in zip(devices, ends, ends[1:], strict=False)]


class Pipeline:
    """See the module docstring. Usable from any thread.

    When a worker is lost, the next pass goes through a chain of the others. When a worker returns,
    the chain is rearranged with it as soon as no request is in progress.

    Args:
        plan: assigns the layers; called again when a worker is lost or returns.
        kept: number of further lanes, after those of requests, for cached prefixes.

    Attributes:
        losses: workers lost so far.

    Raises:
        ConfigError: no worker is named.
    """

    def __init__(
        self,
        config: PipelineConfig,
        plan: Plan = equal_parts,
        kept: int = 0,
    ) -> None:
        if not config.workers:
            raise ConfigError("no worker is named", field="workers", remedy="name one at least")
        self.config = config
        self.losses: list[Loss] = []
        self._plan = plan
        self._coordinator = secrets.token_hex(16)
        self._arranging = threading.Lock()
        self._chain: Chain | None = None
        self._lost: set[str] = set()
        self._excluded_until: dict[str, float] = {}  # time.monotonic(), by faulty worker
        self._here: set[str] = set()  # those that answered at the last arrangement
        self._info: WorkerInfo | None = None
        self._wanted = False  # a chain has been requested
        self._refused: CollabError | None = None  # the same workers would refuse again
        self._away = False  # no worker has answered, which has been logged
        self._free = set(range(config.lanes))
        self._kept = kept
        self._freed = threading.Condition()
        self._closed = threading.Event()
        self._upkeep = threading.Thread(target=self._keep_up, name="jupiter-upkeep", daemon=True)
        self._upkeep.start()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def chain(self, due: float, check: Check = no_check) -> Chain:
        """Return the chain in use; arrange one if there is none, or after a loss.

        Args:
            due: deadline, in ``time.monotonic()``.

        Raises:
            Unavailable: no worker answers.
            DeadlineExceeded: the layers were not loaded in time.
            CollabError: the remaining workers cannot hold the model, or hold different ones.
        """
        if not wait_until(lambda s: self._arranging.acquire(timeout=s), due, check):
            raise DeadlineExceeded(
                "the workers were not arranged in time",
                field="deadline_s",
                remedy="raise the deadline",
            )

        def still_wanted() -> None:
            check()
            self._check_open()

        try:
            self._check_open()
            if self._chain is None or self._chain.failed is not None:
                self._wanted, self._refused = True, None
                self._chain = self._arrange(self._chain, due, still_wanted)
                self._info = self._chain.info
                self._away = False
            return self._chain
        except Unavailable as error:
            if not self._away and not self._closed.is_set():
                self._away = True
                log.warning("%s", error)
            raise
        except (DeadlineExceeded, Cancelled):
            raise
        except CollabError as error:
            self._refused = error
            raise
        finally:
            self._arranging.release()

    @property
    def current(self) -> Chain | None:
        """The chain in use, which may have failed; None if there is none."""
        return self._chain

    @property
    def missing(self) -> list[str]:
        """Addresses of the workers that are lost, or did not answer at the last arrangement."""
        return [worker for worker in self.config.workers if worker not in self._present()]

    @property
    def lanes_in_use(self) -> int:
        """Number of lanes held by requests."""
        return self.config.lanes - len(self._free)

    def renew(self) -> None:
        """Rearrange the chain if a worker has returned or was lost, and no request is in progress.

        Raises:
            CollabError: as :meth:`chain`.
        """
        chain = self._chain
        if not self._wanted:
            return
        sound = chain is not None and chain.failed is None
        present = self._present()
        asked = self.missing if sound else self.config.workers
        answering = self._answering(asked)
        for worker in set(self._excluded_until).intersection(asked).difference(answering):
            del self._excluded_until[worker]  # it is being restarted
        now = time.monotonic()
        back = {w for w in answering - present if self._excluded_until.get(w, now) <= now}
        if not answering or (not back and (sound or self._refused is not None)):
            return
        with self._arranging:
            self._lost.difference_update(back)
            with self._freed:
                if len(self._free) < self.config.lanes:
                    return
                if sound and self._chain is chain:  # otherwise another thread has replaced it
                    self._chain = None
            if sound and chain is not None and self._chain is None:
                chain.close()
        self.chain(time.monotonic() + _ARRANGE_S)

    def close(self) -> None:
        """Release the workers."""
        self._closed.set()
        with self._arranging:
            if self._chain is not None:
                self._chain.close()
                self._chain = None
        if self._upkeep.is_alive():
            self._upkeep.join(_END_S)

    @contextmanager
    def lanes(self, count: int, due: float, check: Check = no_check) -> Iterator[list[int]]:
        """Hold ``count`` lanes; see :meth:`acquire_lanes`."""
        held = self.acquire_lanes(count, due, check)
        try:
            yield held
        finally:
            self.release_lanes(held)

    def acquire_lanes(self, count: int, due: float, check: Check = no_check) -> list[int]:
        """Wait for ``count`` free lanes, and return them; end with :meth:`release_lanes`.

        Raises:
            InvalidInput: there are fewer lanes.
            Busy: they did not become free in time.
        """
        if count > self.config.lanes:
            raise InvalidInput(
                f"{count} lanes of {self.config.lanes}",
                field="lanes",
                remedy="ask for fewer, or raise lanes",
            )
        with self._freed:

            def enough(seconds: float) -> bool:
                return self._freed.wait_for(lambda: len(self._free) >= count, seconds)

            if not wait_until(enough, due, check):
                raise Busy(
                    "all lanes are in use", field="lanes", remedy="try again later, or raise lanes"
                )
            held = sorted(self._free)[:count]
            self._free.difference_update(held)
            return held

    def release_lanes(self, lanes: Sequence[int]) -> None:
        """Close ``lanes`` in all stages, and make them available."""
        chain = self._chain
        if chain is not None and chain.failed is None:
            steps = [Step(lane, close=True) for lane in lanes]
            chain.submit(steps, lambda result: None)  # before the passes of their next owner
        with self._freed:
            self._free.update(lanes)
            self._freed.notify_all()

    def _keep_up(self) -> None:
        logged = ""
        while not self._closed.wait(_UPKEEP_S):
            try:
                self.renew()
            except CollabError as error:
                if str(error) != logged and not self._closed.is_set():
                    logged = str(error)
                    log.warning("the workers are not arranged: %s", logged)

    def _present(self) -> set[str]:
        """Return the workers that answered at the last arrangement, and were not lost since."""
        failed = self._chain.failed if self._chain is not None else None
        return self._here - ({failed.device} if isinstance(failed, WorkerLost) else set())

    def _answering(self, workers: Sequence[str]) -> set[str]:
        """Return the workers that answer now and hold the model of the last chain."""
        if not workers:
            return set()
        link = replace(self.config.link, connect_s=min(self.config.link.connect_s, _DESCRIBE_S))
        answers = in_background(_describe(link, workers), 2 * link.connect_s, self._check_open)
        found = {w: a for w, a in zip(workers, answers, strict=True) if isinstance(a, WorkerInfo)}
        if self._info is None:
            return set(found)
        same = (self._info.version, self._info.weights)
        return {w for w, info in found.items() if (info.version, info.weights) == same}

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Unavailable("the pipeline is closed", field="workers", remedy="open another")

    def _arrange(self, old: Chain | None, due: float, check: Check) -> Chain:
        lost: list[tuple[WorkerLost, float]] = []
        if old is not None and isinstance(old.failed, WorkerLost):
            self._exclude(old.failed)
            lost.append((old.failed, old.failed_at))
        answer_s = _ANSWER_S if old is None else self.config.alone_s
        answers_due = min(due, time.monotonic() + answer_s)
        while True:
            infos = self._ask_all(answers_due, check, lost[-1][0] if lost else None)
            info = _one_model(infos)
            try:
                parts = self._plan(list(infos), info)
                _check_plan(parts, list(infos), info.num_layers)
                load = Load(
                    self._coordinator,
                    secrets.token_hex(16),
                    info.version,
                    info.weights,
                    0,
                    info.num_layers,
                    self.config.lanes + self._kept,
                    self.config.states,
                )
                chain = Chain(self.config.link, parts, info, load, due=due, check=check)
            except WorkerLost as error:
                log.warning("%s", error)
                self._exclude(error)
                lost.append((error, time.monotonic()))
                answers_due = min(answers_due, time.monotonic() + self.config.alone_s)
                continue
            for why, found_at in lost:
                self.losses.append(Loss(why.device, str(why), found_at, time.monotonic()))
                log.warning("%s; %s continue", why, ", ".join(part.device for part in chain.parts))
            return chain

    def _exclude(self, error: WorkerLost) -> None:
        self._lost.add(error.device)
        if error.at_fault:
            self._excluded_until[error.device] = time.monotonic() + _EXCLUDED_S

    def _ask_all(self, due: float, check: Check, lost: WorkerLost | None) -> dict[str, WorkerInfo]:
        """Return the descriptions of all workers that answer, at least one.

        Args:
            lost: the newest loss, for the error message.
        """
        away = str(lost) if lost is not None else "all were lost"
        while True:
            check()
            here = [worker for worker in self.config.workers if worker not in self._lost]
            # Each has connect_s to connect, and connect_s to answer.
            link = self.config.link
            answers = in_background(_describe(link, here), 2 * link.connect_s, check)
            found: dict[str, WorkerInfo] = {}
            for worker, answer in zip(here, answers, strict=True):
                if isinstance(answer, WorkerInfo):
                    found[worker] = answer
                elif isinstance(answer, (ConfigError, Unauthenticated)):
                    raise answer
                else:
                    self._lost.add(worker)
                    away = f"{worker}: {answer}"
            self._here = set(found)
            if found:
                return found
            self._lost.clear()  # no worker answers: perhaps this machine was cut off
            if time.monotonic() + _PAUSE_S >= due:
                raise Unavailable(
                    f"no worker answers: {away}",
                    field="workers",
                    remedy="start them (collab-llm jupiter-worker), and check their addresses",
                )
            time.sleep(_PAUSE_S)


def check_model(info: WorkerInfo, facts: CheckpointFacts) -> None:
    """Refuse workers that hold another model than the one of ``facts``.

    Raises:
        ConfigError: ``field`` is ``model.path``.
    """
    if (info.vocabulary, info.num_layers) != (facts.vocabulary, facts.num_layers):
        raise ConfigError(
            f"the workers hold {info.model}, this is {facts.config.path}",
            field="model.path",
            remedy="name the model that the workers hold",
        )


async def _describe(link: LinkConfig, workers: Sequence[str]) -> list[WorkerInfo | CollabError]:
    async def ask(worker: str) -> WorkerInfo | CollabError:
        try:
            return await describe(link, worker)
        except CollabError as error:
            return error

    return list(await asyncio.gather(*map(ask, workers)))


def _one_model(infos: dict[str, WorkerInfo]) -> WorkerInfo:
    """Return the description that all workers share.

    Raises:
        ConfigError: their versions differ.
        ModelError: their models differ.
    """
    first, *others = infos
    own = infos[first]
    for other in others:
        info = infos[other]
        if info.version != own.version:
            raise ConfigError(
                f"{first} is version {own.version}, {other} is {info.version}",
                field="workers",
                remedy="install one version everywhere",
            )
        if info.weights != own.weights:
            raise ModelError(
                f"{first} and {other} have different weights ({own.weights[:12]} and"
                f" {info.weights[:12]})",
                field="workers",
                remedy="copy one checkpoint to all workers",
            )
        facts = ("num_layers", "context", "vocab_size", "width", "eos", "vocabulary")
        if any(getattr(info, name) != getattr(own, name) for name in facts):
            raise ModelError(
                f"{first} and {other} describe the same weights differently",
                field="workers",
                remedy="install one version everywhere, and restart them",
            )
    return own


def _check_plan(parts: Sequence[Placement], present: Sequence[str], layers: int) -> None:
    """Refuse a plan that does not assign each layer to one of the workers present.

    Raises:
        ConfigError: ``field`` is ``plan``.
    """
    strange = sorted({part.device for part in parts} - set(present))
    if strange:
        raise ConfigError(
            f"unknown workers: {', '.join(strange)}",
            field="plan",
            remedy=f"use those present: {', '.join(present)}",
        )
    check_placements(parts, layers)
