"""Decoding of untrusted pictures in separate processes, which can be killed.

A decoder in C cannot be interrupted within the server, and its memory may never be returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import CollabError, InvalidInput, Unavailable
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.pictures import Picture, measure
from collab_llm_nodes.models.prompt import scaled_size
from collab_llm_nodes.processes import module_environment
from collab_llm_nodes.serving import picture_worker
from collab_llm_nodes.serving.picture_worker import ANSWER, DECODED, READY, REQUEST
from collab_llm_nodes.serving.turns import Turns
from collab_llm_nodes.transport.admission import Peer
from collab_llm_nodes.transport.background import within

log = logging.getLogger(__name__)

_GONE_S = 0.2  # a worker of a client that has left; a new one costs 0.15 s of CPU time
_END_S = 1.0  # for the exit status of a worker that was killed
_QUIET_S = 10.0  # between two log lines about workers that have died
_LARGE_BYTES = 1 << 20  # of one message, after which memory is trimmed
_TRIM_S = 1.0
_MAX_REFUSAL = 4096
_MESSAGES = 8  # of the largest size, whose pictures may wait at a time; half for one address
_OVERHEAD_BYTES = 64 << 20
_BYTES_PER_PIXEL = 32  # coefficients of four channels, the image, and its copy in RGB


@dataclass(frozen=True)
class PictureConfig:
    """Number of processes that decode pictures, and limits on each picture."""

    workers: int = setting(
        3,
        "Processes that decode pictures, about 10 MB each. One address uses at most all but one of"
        " them at a time, one connection all but two.",
        low=1,
        high=64,
    )
    cpu_s: float = setting(2.0, "CPU time for decoding one picture [s].", low=0.01, high=60.0)
    deadline_s: float = setting(
        10.0,
        "Elapsed time for decoding one picture [s].",
        low=0.01,
        high=600.0,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class PictureLimits:
    """Bounds on the pictures of a message.

    Attributes:
        message_bytes: one message, pictures included. Waiting pictures may take eight times as
            much, half of it for one address.
        image_bytes: one encoded picture.
        pixels: one picture, width times height.
        scans: of a progressive JPEG.
    """

    message_bytes: int
    image_bytes: int
    pixels: int
    scans: int


class PictureReader:
    """Decodes the pictures of prompts. Belongs to one asyncio loop.

    Args:
        loaded: the model that they are scaled for.
        name: of the service, for messages.
    """

    def __init__(
        self,
        config: PictureConfig,
        limits: PictureLimits,
        loaded: LoadedModel,
        name: str = "server",
    ) -> None:
        self._name = name
        self._limits = limits
        self._loaded = loaded
        self._turns = Turns(config.workers)
        self._held: Counter[str] = Counter()  # bytes not decoded yet, by address
        self._trimming: asyncio.TimerHandle | None = None
        deaths = _Deaths()
        self._free = [_Worker(config, limits, deaths) for _ in range(config.workers)]
        self._all = tuple(self._free)

    def start(self) -> None:
        """Start the processes."""
        for worker in self._all:
            worker.start()

    async def stop(self) -> None:
        """Kill the processes."""
        if self._trimming is not None:
            self._trimming.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._all))

    async def read_all(
        self, images: Sequence[bytes], peer: Peer, *, urgent: bool = False
    ) -> tuple[Picture, ...]:
        """Return the pictures of one message, scaled for the model.

        Args:
            urgent: before the others of its connection.

        Raises:
            Unavailable: too many bytes wait already.
            CollabError: as for :meth:`read`.
        """
        with self._holding(sum(map(len, images)), peer.account):
            return tuple(
                [
                    await self.read(data, peer, f"images[{i}]", urgent=urgent)
                    for i, data in enumerate(images)
                ]
            )

    @contextlib.contextmanager
    def _holding(self, size: int, address: str) -> Iterator[None]:
        """Account for ``size`` bytes while they wait.

        Raises:
            Unavailable: too many bytes wait already.
        """
        room = _MESSAGES * self._limits.message_bytes
        of_address = self._held[address] + size if address else 0
        if sum(self._held.values()) + size > room or of_address > room // 2:
            raise Unavailable(
                "too many bytes of pictures wait to be decoded",
                field="images",
                remedy="send smaller ones or try again; or raise limits.max_message_bytes on the"
                f" {self._name}",
            )
        self._held[address] += size
        try:
            yield
        finally:
            self._held[address] -= size
            if not self._held[address]:
                del self._held[address]
            if size >= _LARGE_BYTES and self._trimming is None:
                loop = asyncio.get_running_loop()
                self._trimming = loop.call_later(_TRIM_S, self._trim)  # when it is free

    def _trim(self) -> None:
        self._trimming = None
        asyncio.get_running_loop().run_in_executor(None, _return_memory)

    async def read(self, data: bytes, peer: Peer, field: str, *, urgent: bool = False) -> Picture:
        """Return the picture in ``data``, scaled for the model.

        Raises:
            InvalidInput: unreadable, beyond the limits, or it takes too long.
            Unavailable: the worker has died.
        """
        width, height = measure(data, self._limits.pixels, field)
        size = scaled_size(width, height, self._loaded, field)

        async def decode() -> Picture:
            worker = self._free.pop()  # as many as there are turns
            try:
                return await worker.decode(data, *size)
            finally:
                self._free.append(worker)

        try:
            return await self._turns.run(peer, width * height, decode, _GONE_S, urgent=urgent)
        except CollabError as error:
            error.field = field
            raise


class _Deaths:
    """Logs workers that have died, at a limited rate."""

    def __init__(self) -> None:
        self._count = 0
        self._logged_at = -math.inf

    def report(self, why: object, *, began: bool) -> None:
        """Report a worker that has died, before or after it ``began``.

        Args:
            why: its exit status, or the error that prevented its start.
        """
        self._count += 1
        if time.monotonic() < self._logged_at + _QUIET_S:
            return
        self._logged_at = time.monotonic()
        if began:
            log.warning(
                "a process that decodes pictures has died: %s (%d so far)",
                *(why, self._count),
            )
        else:
            log.error(
                "a process that decodes pictures cannot start: %s (%d so far); run python -m"
                " %s --help to see why",
                *(why, self._count, picture_worker.__name__),
            )


class _Worker:
    """A process that decodes one picture at a time, and is replaced if it dies or is killed."""

    def __init__(self, config: PictureConfig, limits: PictureLimits, deaths: _Deaths) -> None:
        memory = _BYTES_PER_PIXEL * limits.pixels + 4 * limits.image_bytes
        self._deadline_s = config.deadline_s
        self._command = [
            *(sys.executable, "-m", picture_worker.__name__),
            *("--max-pixels", str(limits.pixels)),
            *("--max-scans", str(limits.scans)),
            *("--memory", str(_OVERHEAD_BYTES + memory)),
            *("--cpu-s", str(config.cpu_s)),
        ]
        self._deaths = deaths
        self._starting: asyncio.Future[asyncio.subprocess.Process] | None = None
        self._ready: asyncio.Future[bool] | None = None  # set as soon as the process is there
        self._stopped = False

    def start(self) -> None:
        """Start a process."""
        self._ready = None
        self._starting = asyncio.ensure_future(self._begin())

    async def _begin(self) -> asyncio.subprocess.Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # keep raw lines out of the log
                cwd="/",  # python -m imports from there first
                env=module_environment(),
            )
        except OSError as error:
            self._deaths.report(error, began=False)
            raise
        self._ready = asyncio.ensure_future(self._greet(process))
        return process

    async def _greet(self, process: asyncio.subprocess.Process) -> bool:
        """Return True once ``process`` is ready; log it and return False if it never is."""
        starting = self._starting
        assert process.stdout is not None
        if await process.stdout.read(len(READY)) == READY:
            return True
        if starting is self._starting is not None:  # it was not killed
            self._deaths.report(await process.wait(), began=False)
        return False

    async def stop(self) -> None:
        """Kill the process for good."""
        self._stopped = True
        await self._kill()

    async def decode(self, data: bytes, width: int, height: int) -> Picture:
        """Return the picture in ``data``, scaled to ``width`` and ``height``."""
        request = REQUEST.pack(len(data), width, height) + data
        try:
            most = max(3 * width * height, _MAX_REFUSAL)
            answer, body = await within(self._exchange(request, most), self._deadline_s)
        except asyncio.TimeoutError as error:
            await self._replace()
            raise _too_long() from error
        except asyncio.CancelledError:
            await self._replace()
            raise
        except (OSError, EOFError) as error:
            began = self._began
            status = await self._replace()
            if status == -signal.SIGPROF:
                raise _too_long() from error
            if began and not self._stopped:
                self._deaths.report(status, began=True)
            raise Unavailable("the image's decoder has died", remedy="try again") from error
        if answer != DECODED:
            why, _, remedy = body.decode(errors="replace").partition("\n")
            raise InvalidInput(why, remedy=remedy)
        return Picture(width, height, body)

    async def _exchange(self, request: bytes, most: int) -> tuple[int, bytes]:
        process = await self._process()
        assert self._ready is not None
        if not await asyncio.shield(self._ready):
            raise EOFError("it cannot start")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request)
        await process.stdin.drain()
        status, length = ANSWER.unpack(await process.stdout.readexactly(ANSWER.size))
        if length > most:
            raise EOFError("nonsense")
        return status, await process.stdout.readexactly(length)

    @property
    def _began(self) -> bool:
        return self._ready is not None and self._ready.done() and self._ready.result()

    async def _process(self) -> asyncio.subprocess.Process:
        if self._starting is not None:
            process = await asyncio.shield(self._starting)
            if process.returncode is None:
                return process
        if self._stopped:
            raise EOFError("stopped")
        self.start()  # the other died while it had nothing to do
        assert self._starting is not None
        return await asyncio.shield(self._starting)

    async def _replace(self) -> int | None:
        status = await self._kill()
        if not self._stopped:
            self.start()
        return status

    async def _kill(self) -> int | None:
        """Kill the process, if there is one, and return its exit status."""
        starting, self._starting = self._starting, None
        if starting is None:
            return None
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            process = await starting
            # Not process.kill(): Popen's would reap a process that has just ended, and asyncio,
            # which waits for it in a thread, would report its status as unknown.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            assert process.stdin is not None
            process.stdin.close()
            return await within(process.wait(), _END_S)
        return None


def _return_memory() -> None:
    """Return free memory to the system; glibc would keep it."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _too_long() -> InvalidInput:
    return InvalidInput("takes too long to decode", remedy="save it as a plain JPEG, or smaller")
