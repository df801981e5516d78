"""Strangers' pictures become pixels in processes of their own, which can be ended.

A decoder in C cannot be interrupted within the verifier, and what it allocates may never come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

from collab_llm_nodes.errors import CollabError, InvalidInput, Unavailable
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.pictures import Picture, measure
from collab_llm_nodes.models.prompt import scaled_size
from collab_llm_nodes.verifier import picture_worker
from collab_llm_nodes.verifier.admission import Peer
from collab_llm_nodes.verifier.background import within
from collab_llm_nodes.verifier.info import Limits
from collab_llm_nodes.verifier.picture_worker import ANSWER, DECODED, REQUEST
from collab_llm_nodes.verifier.settings import PictureConfig
from collab_llm_nodes.verifier.turns import Turns

_GONE_S = 0.2  # A new worker costs 0.15 s of CPU: most decodes end sooner.
_END_S = 1.0  # for a worker that has ended to be seen to have
_MAX_REFUSAL = 4096
_OVERHEAD_BYTES = 64 << 20
_BYTES_PER_PIXEL = 32  # coefficients of four channels, the image, and its copy in RGB


class PictureReader:
    """The pictures of a verifier's prompts. Belongs to one asyncio loop.

    Args:
        limits: ``max_image_pixels`` must not be 0.
    """

    def __init__(self, config: PictureConfig, limits: Limits, loaded: LoadedModel) -> None:
        self._limits = limits
        self._loaded = loaded
        self._turns = Turns(config.workers)
        self._free = [_Worker(config, limits) for _ in range(config.workers)]
        self._all = tuple(self._free)

    def start(self) -> None:
        """Start the processes."""
        for worker in self._all:
            worker.start()

    async def stop(self) -> None:
        """Kill the processes."""
        await asyncio.gather(*(worker.stop() for worker in self._all))

    async def read(self, data: bytes, peer: Peer, field: str) -> Picture:
        """Return the picture in ``data``, scaled for the model.

        Raises:
            InvalidInput: unreadable, beyond the limits, or it takes too long.
            Unavailable: the process that decoded it has died.
        """
        width, height = measure(data, self._limits.max_image_pixels, field)
        size = scaled_size(width, height, self._loaded, field)

        async def decode() -> Picture:
            worker = self._free.pop()  # as many as there are turns
            try:
                return await worker.decode(data, *size)
            finally:
                self._free.append(worker)

        try:
            return await self._turns.run(peer, width * height, decode, _GONE_S)
        except CollabError as error:
            error.field = field
            raise


class _Worker:
    """A process that decodes one picture at a time; replaced when it dies or has to be killed."""

    def __init__(self, config: PictureConfig, limits: Limits) -> None:
        memory = _BYTES_PER_PIXEL * limits.max_image_pixels + 4 * limits.max_image_bytes
        self._deadline_s = config.deadline_s
        self._command = [
            *(sys.executable, "-m", picture_worker.__name__),
            *("--max-pixels", str(limits.max_image_pixels)),
            *("--max-scans", str(limits.max_image_scans)),
            *("--memory", str(_OVERHEAD_BYTES + memory)),
            *("--cpu-s", str(config.cpu_s)),
        ]
        self._starting: asyncio.Future[asyncio.subprocess.Process] | None = None
        self._stopped = False

    def start(self) -> None:
        """Start a process, in the place of one that has ended."""
        # Modules come from where this process has them.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        starting = asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # nobody writes raw lines into the verifier's log
            env=environment,
        )
        self._starting = asyncio.ensure_future(starting)

    async def stop(self) -> None:
        """Kill the process for good."""
        self._stopped = True
        await self._kill()

    async def decode(self, data: bytes, width: int, height: int) -> Picture:
        """Return the picture in ``data``, scaled to ``width`` and ``height``."""
        request = REQUEST.pack(len(data), width, height) + data
        try:
            most = max(3 * width * height, _MAX_REFUSAL)
            status, body = await within(self._exchange(request, most), self._deadline_s)
        except asyncio.TimeoutError as error:
            await self._replace()
            raise _too_long() from error
        except asyncio.CancelledError:
            await self._replace()
            raise
        except (OSError, EOFError) as error:
            if await self._replace() == -signal.SIGPROF:
                raise _too_long() from error
            raise Unavailable("the image's decoder has died", remedy="try again") from error
        if status != DECODED:
            why, _, remedy = body.decode(errors="replace").partition("\n")
            raise InvalidInput(why, remedy=remedy)
        return Picture(width, height, body)

    async def _exchange(self, request: bytes, most: int) -> tuple[int, bytes]:
        process = await self._process()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request)
        await process.stdin.drain()
        status, length = ANSWER.unpack(await process.stdout.readexactly(ANSWER.size))
        if length > most:
            raise EOFError("nonsense")
        return status, await process.stdout.readexactly(length)

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
        """Kill the process, if there is one, and return the status that it ended with."""
        starting, self._starting = self._starting, None
        if starting is None:
            return None
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            process = await starting
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            return await within(process.wait(), _END_S)
        return None


def _too_long() -> InvalidInput:
    return InvalidInput("takes too long to decode", remedy="save it as a plain JPEG, or smaller")
