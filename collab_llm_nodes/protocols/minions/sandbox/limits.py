"""Limits of the remote's programs."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, fixed

MAX_SOURCE = 20_000
"""Length of a program; the paper's have 1,000 [characters]."""
MAX_TASK = 2000
"""Length of a task, and of its advice; a worker is given one simple instruction [characters]."""
MAX_CHUNK = 200_000
"""Length of a chunk; jobs on longer ones, which no small model reads, are left out [characters]."""
MAX_TEXT = 64 << 20
"""Text of a program's jobs, each chunk counted once, and of a round's prompts: a bound on memory
[characters]."""
MAX_CALLS = 1000
"""Calls of chunking functions by a program; their time is limited by ``cut_s``."""
PROCESS_MB = 2048
"""Address space of each sandbox process, in which the interpreter itself maps 1 GB [MB]."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program, which ends with a fixed code where it exceeds one."""

    run_s: float = fixed(
        2.0,
        "Computing time of a program, chunking functions excluded [s]. Raise it on a slow machine.",
        low=0.05,
        high=60.0,
    )
    wall_s: float = fixed(
        10.0,
        "Wall time of a program, its start and all calls included [s]. Raise it on a busy machine.",
        low=0.1,
        high=300.0,
    )
    memory_mb: int = fixed(
        256,
        "Memory of the program's own values [MB]. Raise it for documents of many MB.",
        low=16,
        high=8192,
    )
    cut_s: float = fixed(
        5.0,
        "Computing time of the chunking functions in a program [s]."
        " Raise it for long documents on a slow machine.",
        low=0.05,
        high=60.0,
    )
    jobs: int = fixed(
        2048,
        "Jobs of a program; further ones are left out. Lower it to bound the time of an answer.",
        low=1,
        high=100_000,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
