"""Memory and processor time of processes, and whether the memory grows."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_TICKS = os.sysconf("SC_CLK_TCK")
LEAK_MB_PER_HOUR = 20.0
"""A steeper growth of resident memory after warm-up counts as a leak."""
LEAST_S = 300.0
"""Growth over a shorter time cannot be distinguished from warm-up."""


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used so far [s]."""
    # The second field is a name in parentheses, which may hold blanks.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process [MB]."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize() / 2**20


def family_mb(pid: int) -> float:
    """Return the memory of a process and its descendants [MB]; shared pages count once."""
    own = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    pss_kb = next(int(line.split()[1]) for line in own.splitlines() if line.startswith("Pss:"))
    lists = [
        file.read_text(encoding="ascii") for file in Path(f"/proc/{pid}/task").glob("*/children")
    ]
    children = [int(child) for found in lists for child in found.split()]
    return pss_kb / 2**10 + sum(family_mb(child) for child in children)


class Usage:
    """Processor share of processes since this was made, and their memory now."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._began = time.monotonic()
        self._used = {name: cpu_seconds(pid) for name, pid in self._pids.items()}

    def rows(self) -> dict[str, dict[str, float]]:
        """``<process>.{cpu_percent, rss_mb}``; 100 % is one core."""
        elapsed = time.monotonic() - self._began
        return {
            name: {
                "cpu_percent": 100.0 * (cpu_seconds(pid) - self._used[name]) / elapsed,
                "rss_mb": rss_mb(pid),
            }
            for name, pid in self._pids.items()
        }


def growth(times_s: Sequence[float], sizes_mb: Sequence[float]) -> dict[str, Any]:
    """Return the slope of memory over time by least squares, and whether it is a leak.

    A heap that is still being filled levels off: growth in the first half of the time that has
    stopped in the second is none.
    """
    slope = _slope(times_s, sizes_mb)
    half = len(times_s) // 2
    late = _slope(times_s[half:], sizes_mb[half:])
    return {
        "mb_per_hour": slope,
        "mb_per_hour_late": late,
        "first_mb": sizes_mb[0],
        "last_mb": sizes_mb[-1],
        "leaks": times_s[-1] - times_s[0] >= LEAST_S and min(slope, late) > LEAK_MB_PER_HOUR,
    }


def _slope(times_s: Sequence[float], sizes_mb: Sequence[float]) -> float:
    return 3600.0 * float(np.polyfit(times_s, sizes_mb, 1)[0]) if len(times_s) > 2 else 0.0
