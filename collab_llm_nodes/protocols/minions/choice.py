"""Budget for the information about the documents in a program's choice of jobs.

A program reads the documents, and the remote sees which of its jobs exist. A hostile one can encode
text in them: in the pairs of chunk and task, their order and number, in computed tasks or chunks,
in faults, or in its run time. So a program may only choose, and its choice is encoded in a prefix
code whose length is charged to the answer's budget (``choice_bits``):

- its end, a fault or none, and its run time: ``RUN_BITS``;
- the instructions, among the strings in the program's source;
- the cuts, among the chunking functions and the sizes in the program's source;
- the pairs of piece and instruction, among all pairs of these.

Jobs are sorted in the order of documents and program. All pairs together cost one bit; if the
chosen pairs cost more than is left, all pairs are done instead. With b bits the remote can
distinguish at most 2^b documents, whatever the program does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.jobs import Cut, Fault, JobList, ProgramJobs, RequestedJob
from collab_llm_nodes.protocols.minions.sandbox.limits import MAX_CHUNK

_ENDS = 16
"""Ends of a program: each ``Fault``, or jobs with or without some left out."""
_FIRST_S, _SLOTS = 0.1, 16
"""The remote learns of an end after this time, its double, and so on."""
RUN_BITS = math.ceil(math.log2(_ENDS * _SLOTS))
_WHOLE = Cut("", 0)
_Instruction = tuple[str, str]
"""Task and advice."""


@dataclass(frozen=True)
class Bounds:
    """The choices that a program has.

    Attributes:
        documents, last_chunks: texts that jobs may be about, whole or cut.
        chunk_size: size of all pieces; 0: as the program requests.
        max_samples: number of possible counts of samples; 1 if the configuration fixes it.
        max_jobs: further jobs are left out.
    """

    documents: Sequence[str]
    last_chunks: Sequence[str]
    chunk_size: int
    max_samples: int
    max_jobs: int


def canonical(
    requested: ProgramJobs, bounds: Bounds, left: int, check: Callable[[], None] = lambda: None
) -> tuple[JobList | Fault, int]:
    """Return the jobs to do for those that a program requests, and the bits of its choice.

    Pairs of piece and instruction are counted, and only those that become jobs are created: there
    may be a hundred million.

    Args:
        left: bits left in the budget, at least ``RUN_BITS``.
        check: called for each piece; if it raises, so does this.
    """
    instructions = _instructions(requested)
    if instructions is None:
        return Fault.NOT_WRITTEN, RUN_BITS
    grids = _grids(requested, bounds, check)
    if grids is None:
        return Fault.NOT_A_PIECE, RUN_BITS
    texts = len(requested.texts)
    plain = not any(advice for _, advice in instructions)
    cuts = 2 * (1 + len(requested.chunkers) * (1 + len(requested.sizes)))
    common = RUN_BITS + 1 + _bits(texts if plain else texts * (texts + 1), len(instructions))
    common += _bits(cuts, len(grids)) + math.log2(bounds.max_samples)

    counts = requested.counts
    place = {instruction: i for i, instruction in enumerate(instructions)}
    chosen: dict[str, list[_Instruction]] = {}
    for piece, task, advice in sorted(counts, key=lambda pair: place[pair[1:]]):
        chosen.setdefault(piece, []).append((task, advice))
    bits = common
    for grid in grids:
        pairs = sum(len(chosen.get(piece, ())) for piece in grid)
        bits += _bits(len(grid) * len(instructions), pairs)
    pieces = dict.fromkeys(itertools.chain.from_iterable(grids))
    if bits > left:
        chosen, bits = dict.fromkeys(pieces, instructions), common + len(grids)
    if bits > left:
        return Fault.CHOICE, RUN_BITS
    times = min(max(counts.values()), bounds.max_samples)
    all_jobs = (
        RequestedJob(p, *instruction, times) for p in pieces for instruction in chosen.get(p, ())
    )
    jobs = tuple(itertools.islice(all_jobs, bounds.max_jobs))
    left_out = sum(map(len, chosen.values())) - len(jobs)
    return JobList(jobs, requested.left_out + left_out), math.ceil(bits)


def padding_s(took_s: float) -> float:
    """Return the wait that pads a program's run time to the next slot [s]."""
    slots = (_FIRST_S * 2**i for i in range(_SLOTS))
    return next(slot - took_s for slot in slots if slot >= took_s)


def _bits(n: int, k: int) -> float:
    """Return the code length of a choice of ``k`` out of ``n``; all of them cost one bit."""
    if k == n:
        return 1.0
    combinations = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return 1 + math.log2(n) + combinations / math.log(2)


def _instructions(requested: ProgramJobs) -> list[_Instruction] | None:
    """Return the distinct instructions in the order of the program; None if it computed one."""
    place = {"": -1} | {text: i for i, text in enumerate(requested.texts)}
    instructions = {(job.task, job.advice) for job in requested.jobs}
    if not {text for instruction in instructions for text in instruction} <= place.keys():
        return None
    return sorted(
        instructions, key=lambda instruction: (place[instruction[0]], place[instruction[1]])
    )


def _grids(
    requested: ProgramJobs, bounds: Bounds, check: Callable[[], None]
) -> list[dict[str, None]] | None:
    """Return all pieces of each cut that gave a chunk; None if a chunk is a piece of no cut.

    A cut applies to all documents or to all chunks of the last round. A chunk belongs to the cut
    that gave most of them.
    """
    left = {job.chunk for job in requested.jobs}
    cuts = [_WHOLE, *(cut for cut in sorted(requested.cuts) if _is_written(cut, requested, bounds))]
    known = [
        _pieces(source, cut, check)
        for cut, source in itertools.product(cuts, (bounds.documents, bounds.last_chunks))
    ]
    used: set[int] = set()
    while left:
        best = max(range(len(known)), key=lambda i: len(left & known[i].keys()))
        if not left & known[best].keys():
            return None
        used.add(best)
        left -= known[best].keys()
    return [known[i] for i in sorted(used)]


def _is_written(cut: Cut, requested: ProgramJobs, bounds: Bounds) -> bool:
    sizes = map(CHUNKERS[cut.chunker].size_of, (bounds.chunk_size, *requested.sizes))
    return cut.chunker in requested.chunkers and cut.size in sizes


def _pieces(texts: Sequence[str], cut: Cut, check: Callable[[], None]) -> dict[str, None]:
    """Return the distinct pieces of ``texts`` that a worker can read, in order."""
    pieces = (
        itertools.chain.from_iterable(CHUNKERS[cut.chunker].cut(text, cut.size) for text in texts)
        if cut.chunker
        else texts
    )
    found: dict[str, None] = {}
    for piece in pieces:
        check()
        if piece.strip() and len(piece) <= MAX_CHUNK:
            found[piece] = None
    return found
