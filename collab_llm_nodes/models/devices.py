"""Devices that models run on: their names, their free memory, and the set-up of CUDA."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from collab_llm_nodes.errors import ModelError

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch 2.11 to 2.13 read at the first allocation on CUDA, whichever is set."""
_TEGRA_RELEASE = Path("/etc/nv_tegra_release")
_DEVICE_TREE = Path("/proc/device-tree/compatible")
_MEMORY = Path("/proc/meminfo")


def find_device(name: str) -> torch.device:
    """Return the device ``name``: cpu, cuda or cuda:N. CUDA is prepared (see ``prepare``).

    Raises:
        ModelError: this machine has none of this name.
    """
    try:
        device = torch.device(name)
        prepare(device)
        torch.ones(1, device=device).add(1).cpu()  # there are kernels for it
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise ModelError(
            f"device {name!r} cannot be used: {first_line}",
            field="device",
            remedy="use cpu, or install PyTorch with CUDA and a driver that is new enough for it",
        ) from error
    return device


def prepare(device: torch.device) -> None:
    """Set CUDA up for this process, before its first allocation; nothing on other devices.

    - Expandable segments: KV caches of all sizes come and go, and fixed segments would leave holes.
      Settings of the user's own win. Not on Tegra, whose driver fails such allocations.
    - No cuDNN attention: it plans for 23 to 37 ms for each new shape, which is each length of a
      cache, and it has given wrong output with few KV heads (pytorch#193893).
    """
    if device.type != "cuda":
        return
    if not is_tegra() and not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    torch.backends.cuda.enable_cudnn_sdp(False)


def is_tegra() -> bool:
    """Return True on a Jetson, also in a container; CUDA is not touched."""
    if _TEGRA_RELEASE.exists():
        return True
    try:
        return b"nvidia,tegra" in _DEVICE_TREE.read_bytes()
    except OSError:  # most machines have no device tree
        return False


def shares_host_memory(device: torch.device) -> bool:
    """Return True if the host's memory is the device's: CPUs, and GPUs such as a Jetson's."""
    if device.type != "cuda":
        return device.type == "cpu"
    return is_tegra() or bool(torch.cuda.get_device_properties(device).is_integrated)


def free_bytes(device: torch.device) -> float:
    """Return how much can be allocated on ``device``; infinite where the system does not say.

    On CUDA, memory that torch's allocator holds in reserve counts as free. Where memory is shared
    with the host, page cache that the system would give up counts as well, which CUDA leaves out.
    """
    if device.type != "cuda":
        return _available_on_host()
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if shares_host_memory(device):
        return _available_on_host() + reserve
    return torch.cuda.mem_get_info(device)[0] + reserve


def _available_on_host() -> float:
    try:
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
        facts = dict(line.split(":", 1) for line in lines)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return math.inf


def is_lost(error: Exception) -> bool:
    """Return True for an error after which this process cannot use its accelerator any more."""
    return isinstance(error, torch.AcceleratorError) and not lacks_memory(error)


_NO_MEMORY = (
    "can't allocate memory",  # of CPUs
    "CUDA error: out of memory",  # where it is not torch's allocator that asked
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def lacks_memory(error: Exception) -> bool:
    """Return True for the error of an allocation that failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
    )
