"""Bits about the documents that a program's choice of jobs tells the remote.

A program reads the documents, and the remote sees which of its jobs exist. A hostile one can encode
text in them: in the pairs of chunk and task, their order and number, in computed tasks or chunks,
in faults, or in the time it takes. So a program may only choose, and what it chooses is written in
a prefix code whose length is charged to the answer's budget (``choice_bits``):

- its end, a fault or none, and how long it took: ``RUN_BITS``;
- the instructions, among the strings that stand in the program;
- the cuts, among the chunking functions and the sizes that stand in the program;
- the pairs of piece and instruction, among all pairs of these.

Jobs are put in the order of documents and program. All pairs together cost one bit; where less is
left than the chosen pairs cost, all pairs are done in place of them. With b bits the remote can
distinguish at most 2^b documents, whatever the program does.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.jobs import Cut, Fault, JobList, ProgramJobs, WantedJob
from collab_llm_nodes.protocols.minions.sandbox.limits import SandboxLimits

_ENDS = 16
"""Ends of a program: each ``Fault``, or jobs, of which some were left out or none."""
_FIRST_S, _SLOTS = 0.1, 16
"""The remote may learn of an end after this time, its double, and so on."""
RUN_BITS = math.ceil(math.log2(_ENDS * _SLOTS))
_WHOLE = Cut("", 0)
_Order = tuple[str, str]
"""Task and advice."""


@dataclass(frozen=True)
class Bounds:
    """The choices that a program had.

    Attributes:
        documents, last_chunks: texts that jobs may be about, whole or cut.
        chunk_size: size of all pieces; 0: as the program asks.
        max_samples: most samples of a job; 1: as many as the configuration says.
    """

    documents: Sequence[str]
    last_chunks: Sequence[str]
    chunk_size: int
    max_samples: int
    limits: SandboxLimits


def canonical(
    wanted: ProgramJobs, bounds: Bounds, left: int, check: Callable[[], None] = lambda: None
) -> tuple[JobList | Fault, int]:
    """Return the jobs that are done for what a program wants, and the bits that they tell.

    The pairs of piece and instruction are counted, and only those that become jobs are made: there
    may be a hundred million.

    Args:
        left: bits that may be told, at least ``RUN_BITS``.
        check: called again and again; what it raises ends this.
    """
    orders = _instructions(wanted)
    if orders is None:
        return Fault.NOT_WRITTEN, RUN_BITS
    grids = _grids(wanted, bounds, check)
    if grids is None:
        return Fault.NOT_A_PIECE, RUN_BITS
    texts = len(wanted.texts)
    plain = not any(advice for _, advice in orders)
    cuts = 2 * (1 + len(wanted.chunkers) * (1 + len(wanted.sizes)))
    common = RUN_BITS + 1 + _bits(texts if plain else texts * (texts + 1), len(orders))
    common += _bits(cuts, len(grids)) + math.log2(bounds.max_samples)

    counts: Counter[tuple[str, str, str]] = Counter()
    for job in wanted.jobs:
        counts[job.chunk, job.task, job.advice] += job.times
    place = {order: i for i, order in enumerate(orders)}
    chosen: dict[str, list[_Order]] = {}
    for piece, task, advice in sorted(counts, key=lambda pair: place[pair[1:]]):
        chosen.setdefault(piece, []).append((task, advice))
    told = common
    for grid in grids:
        pairs = sum(len(chosen.get(piece, ())) for piece in grid)
        told += _bits(len(grid) * len(orders), pairs)
    pieces = dict.fromkeys(itertools.chain.from_iterable(grids))
    if told > left:
        chosen, told = dict.fromkeys(pieces, orders), common + len(grids)
    if told > left:
        return Fault.CHOICE, RUN_BITS
    times = min(max(counts.values()), bounds.max_samples)
    all_jobs = (WantedJob(p, *order, times) for p in pieces for order in chosen.get(p, ()))
    jobs = tuple(itertools.islice(all_jobs, bounds.limits.jobs))
    left_out = sum(map(len, chosen.values())) - len(jobs)
    return JobList(jobs, wanted.cut + left_out), math.ceil(told)


def slot_s(took_s: float) -> float:
    """Return how long to wait after a program that took so long, so that its time tells little."""
    slots = (_FIRST_S * 2**i for i in range(_SLOTS))
    return next(slot - took_s for slot in slots if slot >= took_s)


def _bits(n: int, k: int) -> float:
    """Return the length of the code word for ``k`` of ``n`` things: one bit for all of them."""
    if k == n:
        return 1.0
    combinations = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return 1 + math.log2(n) + combinations / math.log(2)


def _instructions(wanted: ProgramJobs) -> list[_Order] | None:
    """Return task and advice of all jobs in the order of the program; None if it computed one."""
    place = {"": -1} | {text: i for i, text in enumerate(wanted.texts)}
    orders = {(job.task, job.advice) for job in wanted.jobs}
    if not {text for order in orders for text in order} <= place.keys():
        return None
    return sorted(orders, key=lambda order: (place[order[0]], place[order[1]]))


def _grids(
    wanted: ProgramJobs, bounds: Bounds, check: Callable[[], None]
) -> list[dict[str, None]] | None:
    """Return all pieces of each cut that gave a chunk; None if no cut has given one of them.

    A cut is made of all documents, or of all chunks of the last round, whichever the program has
    cut. A chunk belongs to the cut that gave most of them.
    """
    left = {job.chunk for job in wanted.jobs}
    cuts = [_WHOLE, *(cut for cut in sorted(wanted.cuts) if _is_written(cut, wanted, bounds))]
    known = [
        _pieces(source, cut, bounds.limits, check)
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


def _is_written(cut: Cut, wanted: ProgramJobs, bounds: Bounds) -> bool:
    sizes = map(CHUNKERS[cut.chunker].size_of, (bounds.chunk_size, *wanted.sizes))
    return cut.chunker in wanted.chunkers and cut.size in sizes


def _pieces(
    texts: Sequence[str], cut: Cut, limits: SandboxLimits, check: Callable[[], None]
) -> dict[str, None]:
    """Return the different pieces of ``texts`` that a worker can read, in order."""
    pieces = (
        itertools.chain.from_iterable(CHUNKERS[cut.chunker].cut(text, cut.size) for text in texts)
        if cut.chunker
        else texts
    )
    found: dict[str, None] = {}
    for piece in pieces:
        check()
        if piece.strip() and len(piece) <= limits.chunk_characters:
            found[piece] = None
    return found
