"""The signals that a process ignores, as Linux reports them."""

from __future__ import annotations

from pathlib import Path


def ignores(pid: int, number: int) -> bool:
    """Return True if the process ignores the signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
