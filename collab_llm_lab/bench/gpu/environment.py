"""The packages and the room that the steps need; imports nothing but the standard library."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_DISK_BYTES = 8 << 30
"""For the checkpoint that the stages load."""
_MEMORY_BYTES = 16 << 30
"""For that checkpoint while it is loaded, and for CUDA's libraries."""


@dataclass(frozen=True)
class Need:
    """A package that the steps import.

    Attributes:
        module: the name it is imported by.
        least: oldest version that is known to do.
        wheel: version to carry where the machine has none, or an older one; empty: the machine's
            image must have it.
    """

    package: str
    module: str
    least: str = "0"
    wheel: str = ""


# What transformers' wheel asks for, it checks when it is imported: hence the versions of tokenizers
# and others.
NEEDS = (
    Need("torch", "torch", "2.11"),
    Need("transformers", "transformers", "5.17", "5.23.0"),
    Need("protobuf", "google.protobuf", "7.35.1", "7.36.2"),
    Need("grpcio", "grpc", "1.85.1", "1.85.1"),
    Need("grpcio-health-checking", "grpc_health", "1.85.1", "1.85.1"),
    Need("numpy", "numpy", "1.26"),
    Need("tokenizers", "tokenizers", "0.23.1"),
    Need("safetensors", "safetensors", "0.8.0"),
    Need("huggingface-hub", "huggingface_hub", "1.31.0"),
    Need("regex", "regex", "2025.10.22"),
    Need("pillow", "PIL", "10.2"),
    Need("jinja2", "jinja2", "3.1"),
    Need("PyYAML", "yaml", "6.0.1"),
    Need("prometheus-client", "prometheus_client", "0.20"),
)


def lacking() -> list[tuple[Need, str]]:
    """Return the needs that are not met, each with the version found; empty: there is none."""
    return [(need, found) for need in NEEDS if not _meets(need, found := _found(need))]


def describe() -> dict[str, Any]:
    """Return facts of this machine, and in ``warnings`` the reasons for which steps will fail."""
    free_disk = shutil.disk_usage(tempfile.gettempdir()).free
    free_memory = _free_memory()
    warnings = [
        f"{need.package}: {found or 'missing'}, wants >= {need.least}" for need, found in lacking()
    ]
    if free_disk < _DISK_BYTES:
        warnings.append(f"{tempfile.gettempdir()}: {free_disk / 2**30:.1f} GiB free")
    if free_memory < _MEMORY_BYTES:
        warnings.append(f"memory: {free_memory / 2**30:.1f} GiB free")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "free_memory_gib": free_memory / 2**30,
        "free_disk_gib": free_disk / 2**30,
        "packages": {need.package: _found(need) for need in NEEDS},
        "gpus": _gpus(),
        "warnings": warnings,
    }


def print_needs() -> None:
    """Print the packages, the versions here, and the command that fetches the wheels."""
    for need in NEEDS:
        found = _found(need)
        state = "ok" if _meets(need, found) else "MISSING"
        print(f"{need.package:<24} >= {need.least:<8} {found or '-':<10} {state}")
    wheels = " ".join(f"{need.package}=={need.wheel}" for need in NEEDS if need.wheel)
    print("\nOn a computer with a package index, for a machine without one:")
    print("  pip download -d .whl --no-deps --only-binary=:all: --python-version 3.12 \\")
    print(f"    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \\\n    {wheels}")


def _found(need: Need) -> str:
    with contextlib.suppress(PackageNotFoundError, ModuleNotFoundError):
        if importlib.util.find_spec(need.module) is not None:
            return version(need.package)
    return ""


def _meets(need: Need, found: str) -> bool:
    return bool(found) and _numbers(found) >= _numbers(need.least)


def _numbers(text: str) -> list[int]:
    """Return the leading numbers of a version: of 2.11.0+cu130 2, 11 and 0."""
    return [int(part) for part in re.match(r"[\d.]*", text)[0].split(".") if part]  # type: ignore[index]


def _free_memory() -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])
    return 0


def _gpus() -> list[str]:
    """Return a line of ``nvidia-smi`` for each GPU; none where it cannot be asked."""
    query = "name,driver_version,memory.total,memory.used,clocks.sm,temperature.gpu"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(
            asked, capture_output=True, text=True, timeout=20, check=True
        ).stdout.splitlines()
    return []
