"""Times of work on a device: medians after warm-up, and the bandwidth that limits them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3
"""Calls that are not measured: kernels are loaded and chosen, memory is allocated."""


def synchronize(device: torch.device) -> None:
    """Block until the work queued on ``device`` has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    device: torch.device, call: Callable[[], Any], repeats: int, warm_up: int = WARM_UP
) -> dict[str, float]:
    """Return the median times of ``call``.

    Returns:
        ``ms``, from the call until the device has finished; ``host_ms``, until the call returns;
        on CUDA ``device_ms`` as well, between two events around it; ``least_ms`` and ``most_ms``
        of ``ms``.
    """
    whole, host, events = [], [], []
    for turn in range(warm_up + repeats):
        synchronize(device)
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
        begun = time.perf_counter()
        call()
        returned = time.perf_counter()
        if device.type == "cuda":
            last.record()
        synchronize(device)
        ended = time.perf_counter()
        if turn >= warm_up:
            whole.append(1e3 * (ended - begun))
            host.append(1e3 * (returned - begun))
            if device.type == "cuda":
                events.append(first.elapsed_time(last))
    found = {
        "ms": statistics.median(whole),
        "host_ms": statistics.median(host),
        "least_ms": min(whole),
        "most_ms": max(whole),
    }
    if events:
        found["device_ms"] = statistics.median(events)
    return found


def copy_bytes_per_s(device: torch.device, size: int) -> float:
    """Return the bandwidth of a copy on ``device`` of ``size`` bytes, read and written."""
    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    took_ms = timed(device, lambda: target.copy_(source), 10)["least_ms"]
    return 2 * source.nbytes / took_ms * 1e3
