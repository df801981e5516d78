"""A model over several workers: which of them are there, who holds which layers, lanes to share.

    with Pipeline(PipelineConfig(workers=("a:50561", "b:50561"))) as pipeline:
        chain = pipeline.chain(due)     # arranged anew if a worker has been lost

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
from collab_llm_nodes.protocols.jupiter.chain import (
    Chain,
    Layers,
    Part,
    WorkerLost,
    go_on,
    in_background,
    wait_until,
)
from collab_llm_nodes.protocols.jupiter.link import LinkConfig, describe
from collab_llm_nodes.protocols.jupiter.messages import PATHS, STATES, Step, WorkerInfo

log = logging.getLogger(__name__)

_PAUSE_S = 0.1  # before workers of which none has answered are asked again
_ASKED_S = 2.0  # for a missing worker to answer: it will be asked again
_END_S = 5.0  # for the thread of the upkeep
_BARRED_S = 60.0
"""A worker that answers, but was found at fault, is left out so long, unless it starts anew."""

Workers = Callable[[], Sequence[str]]
"""Names the addresses of the workers, as they are now."""

Plan = Callable[[Sequence[str], WorkerInfo], Sequence[Part]]
"""Says which of the workers at these addresses hold which layers, in the order of the layers.

Raises CollabError if they cannot hold the model."""


@dataclass(frozen=True)
class PipelineConfig:
    """The workers of a pipeline, and the way to speak to them."""

    workers: tuple[str, ...] = setting((), "Addresses of the workers, host:port.", read_only=True)
    link: LinkConfig = field(default_factory=LinkConfig)
    states: str = setting(
        "float32",
        "Form of hidden states between two workers: float16 and int8 need a half or a quarter of"
        " the bytes; answers may then differ from those of one device.",
        choices=STATES,
        read_only=True,
    )
    path: str = setting(
        "grpc",
        "Way of hidden states between two workers: gloo is torch.distributed's, for networks where"
        " everybody is trusted; workers need allow_gloo.",
        choices=PATHS,
        read_only=True,
    )
    lanes: int = setting(
        8, "Lanes, each with a KV cache in every stage.", low=1, high=1024, read_only=True
    )
    arrange_s: float = setting(
        120.0,
        "Time for workers to answer and to load their layers [s].",
        low=0.1,
        high=3600.0,
        read_only=True,
    )
    alone_s: float = setting(
        5.0,
        "A request whose workers have all been lost waits so long for one to come back [s].",
        low=0.1,
        high=3600.0,
        read_only=True,
    )
    upkeep_s: float = setting(
        1.0,
        "While no request is under way, look this often for workers that have come back, or that"
        " were lost [s]; 0: never.",
        low=0.0,
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
    """A worker that was lost, and what became of it.

    Attributes:
        found_at: ``time.monotonic()`` when it was known to be lost.
        arranged_at: when the others held all layers again.
    """

    device: str
    why: str
    found_at: float
    arranged_at: float


def equal_parts(devices: Sequence[str], info: WorkerInfo) -> list[Layers]:
    """Divide the layers evenly; of more devices than layers, the last ones are left out."""
    count = min(len(devices), info.num_layers)
    ends = [info.num_layers * i // count for i in range(count + 1)]
    return [Layers(d, a, b) for d, a, b in zip(devices, ends, ends[1:], strict=False)]


def fixed_parts(parts: Sequence[Part], otherwise: Plan = equal_parts) -> Plan:
    """Return a plan that uses ``parts`` while all their workers are there, else another one."""

    def plan(devices: Sequence[str], info: WorkerInfo) -> Sequence[Part]:
        whole = all(part.device in devices for part in parts)
        return parts if whole else otherwise(devices, info)

    return plan


class Pipeline:
    """See the module docstring. Usable from any thread.

    When a worker is lost, the next pass goes through a chain of the others. When a worker comes
    back, the chain is arranged anew with it as soon as no request is under way.

    Args:
        plan: who holds which layers; asked again when a worker is lost or comes back.
        workers: their addresses, where they change; None: those of ``config``.
        kept: further lanes, numbered behind those of requests, that hold what many requests share.

    Attributes:
        losses: of workers, so far.

    Raises:
        ConfigError: no worker is named.
    """

    def __init__(
        self,
        config: PipelineConfig,
        plan: Plan = equal_parts,
        workers: Workers | None = None,
        kept: int = 0,
    ) -> None:
        if workers is None and not config.workers:
            raise ConfigError("no worker is named", field="workers", remedy="name one at least")
        self.config = config
        self.losses: list[Loss] = []
        self._plan = plan
        self._workers = workers or (lambda: config.workers)
        self._coordinator = secrets.token_hex(16)
        self._arranging = threading.Lock()
        self._chain: Chain | None = None
        self._lost: set[str] = set()
        self._barred: dict[str, float] = {}  # time.monotonic() until then, of workers at fault
        self._here: set[str] = set()  # those that answered at the last arrangement
        self._info: WorkerInfo | None = None
        self._wanted = False  # somebody has asked for a chain
        self._refused: CollabError | None = None  # by it: asking the same workers again is no use
        self._away = False  # no worker has answered, and the log says so
        self._free = set(range(config.lanes))
        self._kept = kept
        self._freed = threading.Condition()
        self._closed = threading.Event()
        self._upkeep = threading.Thread(target=self._keep_up, name="jupiter-upkeep", daemon=True)
        if config.upkeep_s:
            self._upkeep.start()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def chain(self, due: float, check: Callable[[], None] = go_on) -> Chain:
        """Return the chain in use; without one, or after a loss, arrange it.

        Args:
            due: ``time.monotonic()`` by which it must be there.
            check: is called while this waits; what it raises ends the wait.

        Raises:
            Unavailable: no worker answers.
            DeadlineExceeded: the layers were not loaded in time.
            CollabError: the workers that are left cannot do it, or do not belong together.
        """
        due = min(due, time.monotonic() + self.config.arrange_s)
        if not wait_until(lambda s: self._arranging.acquire(timeout=s), due, check):
            raise _too_late()

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
        """The chain in use, which may have failed; None while there is none."""
        return self._chain

    @property
    def missing(self) -> list[str]:
        """Addresses of workers that did not answer when a chain was last arranged, or are lost."""
        return [worker for worker in self._workers() if worker not in self._present()]

    @property
    def lanes_in_use(self) -> int:
        """Lanes that requests hold."""
        return self.config.lanes - len(self._free)

    def renew(self) -> None:
        """Arrange a chain anew if a worker has come back or was lost, and no request is under way.

        Raises:
            CollabError: as :meth:`chain`.
        """
        chain = self._chain
        if not self._wanted:
            return
        sound = chain is not None and chain.failed is None
        present = self._present()
        asked = self.missing if sound else self._workers()
        answering = self._answering(asked)
        for worker in set(self._barred).intersection(asked).difference(answering):
            del self._barred[worker]  # it is being started anew
        now = time.monotonic()
        back = {w for w in answering - present if self._barred.get(w, now) <= now}
        if not answering or (not back and (sound or self._refused is not None)):
            return
        with self._arranging:
            self._lost.difference_update(back)
            with self._freed:
                if len(self._free) < self.config.lanes:
                    return
                if sound and self._chain is chain:  # else somebody has arranged one meanwhile
                    self._chain = None
            if sound and chain is not None and self._chain is None:
                chain.close()
        self.chain(time.monotonic() + self.config.arrange_s)

    def close(self) -> None:
        """Let the workers go."""
        self._closed.set()
        with self._arranging:
            if self._chain is not None:
                self._chain.close()
                self._chain = None
        if self._upkeep.is_alive():
            self._upkeep.join(_END_S)

    @contextmanager
    def lanes(
        self, count: int, due: float, check: Callable[[], None] = go_on
    ) -> Iterator[list[int]]:
        """Hold ``count`` lanes; see :meth:`take_lanes`."""
        held = self.take_lanes(count, due, check)
        try:
            yield held
        finally:
            self.give_back(held)

    def take_lanes(self, count: int, due: float, check: Callable[[], None] = go_on) -> list[int]:
        """Return ``count`` lanes for :meth:`give_back`; waits until other requests give theirs.

        Args:
            check: is called while this waits; what it raises ends the wait.

        Raises:
            InvalidInput: there are not so many.
            Busy: they were not free in time.
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

    def give_back(self, lanes: Sequence[int]) -> None:
        """End what is in ``lanes``; others may take them."""
        chain = self._chain
        if chain is not None and chain.failed is None:
            steps = [Step(lane, close=True) for lane in lanes]
            chain.submit(steps, lambda result: None)  # ahead of the next owner's passes
        with self._freed:
            self._free.update(lanes)
            self._freed.notify_all()

    def _keep_up(self) -> None:
        told = ""
        while not self._closed.wait(self.config.upkeep_s):
            try:
                self.renew()
            except CollabError as error:
                if str(error) != told and not self._closed.is_set():
                    told = str(error)
                    log.warning("the workers are not arranged: %s", told)

    def _present(self) -> set[str]:
        """Return the workers that answered at the last arrangement and were not lost since."""
        failed = self._chain.failed if self._chain is not None else None
        return self._here - ({failed.device} if isinstance(failed, WorkerLost) else set())

    def _answering(self, workers: Sequence[str]) -> set[str]:
        """Return those of ``workers`` that answer now and hold the model of the last chain."""
        if not workers:
            return set()
        link = replace(self.config.link, connect_s=min(self.config.link.connect_s, _ASKED_S))
        answers = in_background(_describe(link, workers), 2 * link.connect_s, self._check_open)
        found = {w: a for w, a in zip(workers, answers, strict=True) if isinstance(a, WorkerInfo)}
        if self._info is None:
            return set(found)
        same = (self._info.version, self._info.weights)
        return {w for w, info in found.items() if (info.version, info.weights) == same}

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Unavailable("the pipeline is closed", field="workers", remedy="open another")

    def _arrange(self, old: Chain | None, due: float, check: Callable[[], None]) -> Chain:
        lost: list[tuple[WorkerLost, float]] = []
        if old is not None and isinstance(old.failed, WorkerLost):
            self._leave_out(old.failed)
            lost.append((old.failed, old.failed_at))
        answers_due = due if old is None else min(due, time.monotonic() + self.config.alone_s)
        while True:
            infos = self._ask_all(answers_due, check, lost[-1][0] if lost else None)
            info = _one_model(infos)
            try:
                parts = self._plan(list(infos), info)
                _check_parts(parts, list(infos), info)
                chain = Chain(
                    self.config.link,
                    self._coordinator,
                    parts,
                    info,
                    lanes=self.config.lanes + self._kept,
                    states=self.config.states,
                    path=self.config.path,
                    due=due,
                    check=check,
                )
            except WorkerLost as error:
                log.warning("%s", error)
                self._leave_out(error)
                lost.append((error, time.monotonic()))
                answers_due = min(answers_due, time.monotonic() + self.config.alone_s)
                continue
            for why, found_at in lost:
                self.losses.append(Loss(why.device, str(why), found_at, time.monotonic()))
                log.warning("%s; %s go on", why, ", ".join(part.device for part in chain.parts))
            return chain

    def _leave_out(self, error: WorkerLost) -> None:
        self._lost.add(error.device)
        if error.at_fault:
            self._barred[error.device] = time.monotonic() + _BARRED_S

    def _ask_all(
        self, due: float, check: Callable[[], None], lost: WorkerLost | None
    ) -> dict[str, WorkerInfo]:
        """Return what the workers say that are there, one at least; ``lost`` is the newest loss."""
        away = str(lost) if lost is not None else "all were lost"
        while True:
            check()
            here = [worker for worker in self._workers() if worker not in self._lost]
            # Each is given the time to connect, and as much to answer.
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
            self._lost.clear()  # nobody is there: perhaps it is we who were away
            if time.monotonic() + _PAUSE_S >= due:
                raise Unavailable(
                    f"no worker answers: {away}",
                    field="workers",
                    remedy="start them (collab-llm jupiter-worker), and check their addresses",
                )
            time.sleep(_PAUSE_S)


async def _describe(link: LinkConfig, workers: Sequence[str]) -> list[WorkerInfo | CollabError]:
    async def ask(worker: str) -> WorkerInfo | CollabError:
        try:
            return await describe(link, worker)
        except CollabError as error:
            return error

    return list(await asyncio.gather(*map(ask, workers)))


def _one_model(infos: dict[str, WorkerInfo]) -> WorkerInfo:
    """Return what the workers have in common.

    Raises:
        ConfigError: they differ in version.
        ModelError: they have different weights.
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
        facts = [
            (i.num_layers, i.context, i.vocab_size, i.width, i.eos, i.vocabulary)
            for i in (own, info)
        ]
        if facts[0] != facts[1] and info.weights == own.weights:
            raise ModelError(
                f"{first} and {other} have the same weights, and say different things of them",
                field="workers",
                remedy="install one version everywhere, and start them again",
            )
        if info.weights != own.weights:
            raise ModelError(
                f"{first} and {other} have different weights ({own.weights[:12]} and"
                f" {info.weights[:12]})",
                field="workers",
                remedy="copy one checkpoint to all workers",
            )
    return own


def _check_parts(parts: Sequence[Part], here: Sequence[str], info: WorkerInfo) -> None:
    """Refuse a plan that does not give each layer to one of the workers that are there.

    Raises:
        ConfigError: ``field`` is ``plan``.
    """
    devices = [part.device for part in parts]
    strange = sorted(set(devices) - set(here))
    if strange or len(set(devices)) < len(devices):
        raise ConfigError(
            f"unknown or repeated workers: {', '.join(strange or devices)}",
            field="plan",
            remedy=f"those that are there: {', '.join(here)}",
        )
    ends = [0, *(part.last for part in parts)]
    whole = ends[-1] == info.num_layers and all(p.first < p.last for p in parts)
    if not whole or [part.first for part in parts] != ends[:-1]:
        raise ConfigError(
            f"layers {[(part.first, part.last) for part in parts]} of {info.num_layers}",
            field="plan",
            remedy="each layer once, in order",
        )


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the workers were not arranged in time", field="deadline_s", remedy="raise the deadline"
    )
