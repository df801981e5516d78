"""The work of a thread on its device: uploads of a pass, waiting, timing, priority.

Each copy to an accelerator costs some 10 us and, from pageable memory, a wait. Token ids,
positions, slots and masks of a pass are known before its first layer runs, so they travel
together::

    upload = Upload(device)
    ids = upload.add([4, 8, 15])          # nothing is copied yet
    mask = upload.add(torch.eye(3) > 0)
    rows = table[ids()]                   # the first call copies all that was added
    scores.masked_fill_(mask(), 0.0)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED = 16  # bytes, for vector loads of kernels

OnDevice = Callable[[], Tensor]
"""Returns an array on the device; the first call of any sends all that were added."""


def round_up(number: int, step: int) -> int:
    """Return the next multiple of ``step``."""
    return -(-number // step) * step


class Upload:
    """Small arrays on their way to the device in one copy; on the CPU nothing is copied.

    Args:
        device: of the pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[Tensor] = []
        self._sent: list[Tensor] = []

    def add(self, values: Sequence[int] | Tensor) -> OnDevice:
        """Take integers (as int64) or a tensor on the CPU, and return how to get it there."""
        array = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.long)
        if self._device.type == "cpu":
            return lambda: array
        self._waiting.append(array)
        number = len(self._sent) + len(self._waiting) - 1

        def on_device() -> Tensor:
            if number >= len(self._sent):
                self._send()
            return self._sent[number]

        return on_device

    def _send(self) -> None:
        arrays = [array.contiguous() for array in self._waiting]
        self._waiting.clear()
        begins = [0, *accumulate(round_up(array.nbytes, _ALIGNED) for array in arrays)]
        pinned = self._device.type != "meta"  # where nothing is copied
        packed = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=pinned)
        for array, begin in zip(arrays, begins, strict=False):
            packed[begin : begin + array.nbytes] = array.view(-1).view(torch.uint8)
        # torch's allocator of pinned memory keeps the buffer until the copy has been made.
        there = packed.to(self._device, non_blocking=True)
        for array, begin in zip(arrays, begins, strict=False):
            own = there[begin : begin + array.nbytes]
            self._sent.append(own.view(array.dtype).view(array.shape))


def synchronize(device: torch.device) -> None:
    """Block until the work this thread has queued on ``device`` has finished."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.current_stream(device).synchronize()


def selected(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` this thread's, on which Triton and CUDA graphs launch; elsewhere nothing.

    They do not look where their tensors lie, and a kernel on the first GPU that reads the memory of
    the second one ends the process.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def high_priority(device: torch.device) -> AbstractContextManager[object]:
    """Let the work this thread queues on ``device`` run before that of other threads.

    On CUDA it is a stream of its own, of high priority; elsewhere nothing.
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.current_stream(device))  # weights may still be uploading
    return torch.cuda.stream(stream)


def stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Start to time the work that this thread queues on ``device``.

    Returns:
        A function that stops, and returns one that waits for the end and gives the seconds.
    """
    if device.type in ("cpu", "meta"):
        begun = time.perf_counter()

        def stop() -> Callable[[], float]:
            took_s = time.perf_counter() - begun
            return lambda: took_s

        return stop
    stream = torch.cuda.current_stream(device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record(stream)

    def record() -> Callable[[], float]:
        last.record(stream)

        def seconds() -> float:
            last.synchronize()
            return first.elapsed_time(last) / 1e3

        return seconds

    return record
