"""The work that one thread has given a device: its end, its duration, its precedence."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def wait_for(device: torch.device) -> None:
    """Block until ``device`` has done what this thread has given it; other streams go on."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.current_stream(device).synchronize()


def ahead_of_others(device: torch.device) -> AbstractContextManager[object]:
    """Let what this thread gives ``device`` run before what other threads gave it.

    On CUDA it is a stream of its own, of high priority; elsewhere nothing.
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.current_stream(device))  # weights may be on their way
    return torch.cuda.stream(stream)


def stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Start to time what this thread gives ``device``.

    Returns:
        A function that stops. What it returns gives the seconds, and waits until they are over.
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
