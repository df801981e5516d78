"""Limits of what a program of the remote may use."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, fixed


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program, which ends with a fixed code where it exceeds one."""

    run_s: float = fixed(
        2.0, "Computing time of a program, chunking functions aside [s].", low=0.05, high=60.0
    )
    wall_s: float = fixed(
        10.0, "Time of a program with its start and all that it calls [s].", low=0.1, high=300.0
    )
    memory_mb: int = fixed(256, "Memory of the program's own values [MB].", low=16, high=8192)
    process_mb: int = fixed(
        2048, "Address space of each sandbox process [MB].", low=1024, high=65536
    )
    calls: int = fixed(1000, "Calls of chunking functions.", low=1, high=100_000)
    cut_s: float = fixed(
        5.0, "Computing time of the chunking functions in a program [s].", low=0.05, high=60.0
    )
    source_characters: int = fixed(20_000, "Length of a program.", low=100, high=1_000_000)
    task_characters: int = fixed(
        2000, "Length of a task, and of its advice.", low=100, high=100_000
    )
    chunk_characters: int = fixed(
        200_000, "Length of a chunk; jobs on longer ones are left out.", low=1000, high=10_000_000
    )
    output_mb: int = fixed(
        64,
        "Text of all jobs of a program, each chunk counted once, and of all that the worker reads"
        " in a round; jobs beyond the latter are left out [MB].",
        low=1,
        high=1024,
    )
    jobs: int = fixed(
        2048, "Jobs of a program; those after them are left out.", low=1, high=100_000
    )

    def __post_init__(self) -> None:
        check_ranges(self)
