"""Hostile programs disclose no more by the choice of their jobs than they are charged."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from minions_world import World, final, found, more, paper, plan, run_in, text_of

from collab_llm_nodes.errors import Cancelled
from collab_llm_nodes.protocols.minions.choice import RUN_BITS, Bounds, canonical, padding_s
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.jobs import (
    Cut,
    Fault,
    JobList,
    JobManifest,
    Numbering,
    ProgramJobs,
    RequestedJob,
)
from collab_llm_nodes.protocols.minions.messages import LocalPrompt
from collab_llm_nodes.protocols.minions.minions import minions
from collab_llm_nodes.protocols.minions.sandbox.host import Sandbox
from collab_llm_nodes.protocols.minions.settings import MinionsConfig

_PAGES = 24
_ROUNDS = 3
_BITS = MinionsConfig().choice_bits
_TASKS = [f"Is it {i}?" for i in range(16)]
_HEAD = f"""```python
TASKS = {_TASKS}
def secret(context):
    text = context[0].split("SECRET ")[1].split()[0]
    return [int(b) for c in text for b in format(int(c, 16), "04b")]
def prepare_jobs(context, last_jobs):
    bits, pages, jobs = secret(context), chunk_by_page(context[0]), []
    page = pages[0]
    half = [sum(b << i for i, b in enumerate(bits[4 * j:4 * j + 4])) for j in range(len(bits) // 4)]
"""
_TAIL = "\n    return jobs\n```"

# Each body encodes the document in another part of its jobs.
ATTACKS: Mapping[str, str] = {
    "pairs": """
    jobs = [JobManifest(p, t) for i, p in enumerate(pages) for j, t in enumerate(TASKS[:3])
            if bits[(3 * i + j) % len(bits)]]""",
    "which pages": """
    jobs = [JobManifest(p, 'Extract.') for i, p in enumerate(pages) if bits[i]]""",
    "which tasks": """
    jobs = [JobManifest(p, TASKS[half[i]]) for i, p in enumerate(pages)]""",
    "task text": """
    jobs = [JobManifest(page, context[0].split('SECRET ')[1])]""",
    "task made of letters": """
    jobs = [JobManifest(page, ''.join(TASKS[h][6:-1] for h in half))]""",
    "advice": """
    jobs = [JobManifest(page, 'Repeat the advice.', context[0].split('SECRET ')[1])]""",
    "which advice": """
    jobs = [JobManifest(p, 'Extract.', TASKS[half[i]]) for i, p in enumerate(pages)]""",
    "order of pages": """
    order = sorted(range(len(pages)), key=lambda i: half[i])
    jobs = [JobManifest(pages[i], 'Extract.') for i in order]""",
    "order of tasks": """
    jobs = [JobManifest(page, t) for t in sorted(TASKS, key=lambda t: half[TASKS.index(t)])]""",
    "number of jobs": """
    jobs = [JobManifest(page, 'Extract.')] * sum(b << i for i, b in enumerate(bits[:10]))""",
    "samples of each": """
    jobs = [JobManifest(p, 'Extract.') for i, p in enumerate(pages) for _ in range(1 + half[i])]""",
    "ids": """
    jobs = [JobManifest(p, 'Extract.', '', context[0], context[0], context[0]) for p in pages]""",
    "made-up chunks": """
    jobs = [JobManifest('bit ' + str(b), 'Repeat the text.') for b in bits]""",
    "parts of the text": """
    jobs = [JobManifest(page[:1 + h], 'Repeat the text.') for h in half]""",
    "sizes of pieces": """
    jobs = [JobManifest(c, 'Extract.') for c in chunk_by_paragraph(context[0], 100 + half[0])]""",
    "chunking functions": """
    for h in half[:12]:
        cut = [chunk_by_page, chunk_by_section, chunk_by_paragraph, chunk_by_code][h % 4]
        jobs += [JobManifest(c, 'Extract.') for c in cut(context[0])]""",
    "errors": """
    [][0] if bits[0] else {}[0]""",
    "kinds of errors": """
    if half[0] < 4: raise ValueError(context[0])
    if half[0] < 8: return [1]
    if half[0] < 12: return []""",
    "printing": """
    print(context[0])
    jobs = [JobManifest(p, 'Extract.') for p in pages]""",
}


def _document(secret: str) -> str:
    pages = [f"Page {i}. The canary-{i} sings in the tree of page {i}." for i in range(_PAGES)]
    return "\f".join([f"Page. SECRET {secret} ", *pages])


def _drive(sandbox: Sandbox, attack: str, secret: str, config: MinionsConfig) -> World:
    """Have the remote write the same program in all rounds; a plan, once no program is run."""

    def remote() -> Iterator[str]:
        rounds = 0
        while True:
            if world.sent[-1].stage == "synthesize":
                rounds += 1
                yield final() if rounds == _ROUNDS else more(missing_info="more")
            elif "prepare_jobs(" in world.sent[-1].messages[0].text:
                yield _HEAD + ATTACKS[attack] + _TAIL
            else:
                yield plan("Extract.")

    def worker(prompt: LocalPrompt) -> str:
        """Repeat what it is told to, and else say only that there is something."""
        text = text_of(prompt)
        return found(text if "Repeat the" in text else "yes", citation="Page")

    world = World(remote(), worker=worker, run_program=run_in(sandbox))
    world.drive(minions("What sings?", [_document(secret)], config))
    return world


_SECRETS = [f"{i * 0x9E3779B97F4A7C15 % (1 << 384):096x}"[::-1] for i in range(1, 9)]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_program_discloses_no_more_than_its_bits(sandbox: Sandbox, attack: str) -> None:
    """Check that with few bits the remote reads the same about many documents, and never a byte."""
    config = paper(choice_bits=_ROUNDS * RUN_BITS, tasks=0, samples=0, rounds=_ROUNDS, attempts=1)
    wires = set()
    for secret in _SECRETS:
        world = _drive(sandbox, attack, secret, config)
        wires.add(world.wire)
        assert sum(ask.choice_bits for ask in world.sent) <= config.choice_bits
        assert secret[:8] not in world.wire
        assert "canary" not in world.wire
    ends = 4 if attack == "kinds of errors" else 1  # 16 of them are within RUN_BITS
    assert len(wires) <= ends


@pytest.mark.parametrize("attack", ATTACKS)
def test_by_default_an_answer_discloses_8_bytes_at_most(sandbox: Sandbox, attack: str) -> None:
    config = MinionsConfig(planner="program", tasks=0, samples=0, rounds=_ROUNDS)
    assert _BITS == 64
    for secret in _SECRETS[:2]:
        world = _drive(sandbox, attack, secret, config)
        assert sum(ask.choice_bits for ask in world.sent) <= _BITS


def test_an_honest_program_does_what_it_says_and_costs_little(sandbox: Sandbox) -> None:
    world = _drive(sandbox, "printing", _SECRETS[0], paper(rounds=_ROUNDS))
    first = [ask.choice_bits for ask in world.sent if ask.choice_bits][0]
    assert len(world.rounds[0].jobs) == _PAGES + 1
    assert first < _BITS * 3 / 4


# ---------------------------------------------------------------- the code, by enumeration

_DOCUMENTS = ("a\fb", "c")
_TEXTS = ("t", "u", "w")
_BY_PAGE: Mapping[str, Any] = {
    "chunkers": ("chunk_by_page",),
    "cuts": (Cut("chunk_by_page", 1),),
}


def _bounds(max_samples: int = 1) -> Bounds:
    return Bounds(_DOCUMENTS, ("x",), 0, max_samples, 2048)


def _outcomes(left: int) -> dict[object, int]:
    """Return what can become of all choices of pairs, and the fewest bits that it was charged."""
    chunks = ("a", "b", "c", "x", "a\fb")
    pairs = [RequestedJob(c, t) for c in chunks for t in _TEXTS[:2]]
    least: dict[object, int] = {}
    for count in range(1, len(pairs) + 1):
        for jobs in itertools.combinations(pairs, count):
            requested = ProgramJobs(jobs, texts=_TEXTS, **_BY_PAGE)
            result, bits = canonical(requested, _bounds(), left)
            assert bits <= max(left, RUN_BITS)
            least[result] = min(bits, least.get(result, bits))
    return least


@pytest.mark.parametrize("left", [RUN_BITS, 16, 20, 25, 64])
def test_the_bits_are_lengths_of_a_prefix_code(left: int) -> None:
    """Kraft's inequality: with b bits at most 2^b different outcomes, however they are spent."""
    least = {jobs: bits for jobs, bits in _outcomes(left).items() if not isinstance(jobs, Fault)}
    assert sum(2.0 ** -(bits - RUN_BITS) for bits in least.values()) <= 1
    assert len(least) <= 2 ** (left - RUN_BITS)


def test_the_code_has_room_for_each_end() -> None:
    assert len(Fault) + 2 <= 16
    assert RUN_BITS == 8


def test_order_and_repetition_change_nothing() -> None:
    jobs = [RequestedJob(c, t) for c in ("c", "a") for t in ("u", "t")]
    results = {
        canonical(ProgramJobs(order, texts=_TEXTS, **_BY_PAGE), _bounds(), 99)
        for order in itertools.permutations((*jobs, jobs[0]))
    }
    ((result, _),) = results
    assert isinstance(result, JobList)
    assert [(job.chunk, job.task) for job in result.jobs] == [
        ("a", "t"),
        ("a", "u"),
        ("c", "t"),
        ("c", "u"),
    ]


@pytest.mark.parametrize(
    ("job", "fault"),
    [
        (RequestedJob("a", "computed"), Fault.NOT_WRITTEN),
        (RequestedJob("a", "t", "computed"), Fault.NOT_WRITTEN),
        (RequestedJob("made up", "t"), Fault.NOT_A_PIECE),
        (RequestedJob("x", "t"), None),  # a chunk of the last round
        (RequestedJob("c", "t"), None),  # a document
    ],
)
def test_texts_that_a_program_makes_are_refused(job: RequestedJob, fault: Fault | None) -> None:
    result, bits = canonical(ProgramJobs((job,), texts=_TEXTS), _bounds(), 99)
    assert (result if isinstance(result, Fault) else None) is fault
    assert fault is None or bits == RUN_BITS


def test_a_size_that_stands_nowhere_in_the_program_gives_no_pieces() -> None:
    document = "word " * 100
    bounds = Bounds([document], [], 0, 1, 2048)
    piece = RequestedJob(CHUNKERS["chunk_by_paragraph"](document, 137)[0], "t")
    cuts, name = (Cut("chunk_by_paragraph", 137),), ("chunk_by_paragraph",)
    computed = ProgramJobs((piece,), texts=_TEXTS, chunkers=name, cuts=cuts)
    assert canonical(computed, bounds, 99)[0] is Fault.NOT_A_PIECE
    assert isinstance(canonical(replace(computed, sizes=(137,)), bounds, 99)[0], JobList)


_MANY = [f"Line {i}. " + "word " * 18 for i in range(1000)]


def _many_pairs(tasks: int) -> tuple[ProgramJobs, Bounds]:
    """A few kB of a program that make a million pairs of piece and task."""
    texts = tuple(f"t{i}" for i in range(tasks))
    bounds = Bounds(["\n\n".join(_MANY)], [], 0, 1, 2048)
    name, size = "chunk_by_paragraph", 100
    piece = CHUNKERS[name](bounds.documents[0], size)[0]
    jobs = tuple(RequestedJob(piece, text) for text in texts)
    cuts = (Cut(name, size),)
    return ProgramJobs(jobs, 0, texts, sizes=(size,), chunkers=(name,), cuts=cuts), bounds


@pytest.mark.parametrize(("left", "done"), [(1 << 20, 1000), (64, 2048)])
def test_pairs_that_are_not_done_are_not_made(left: int, done: int) -> None:
    requested, bounds = _many_pairs(1000)
    tracemalloc.start()
    try:
        result, bits = canonical(requested, bounds, left)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(result, JobList)
    assert (len(result.jobs), bits <= left) == (done, True)
    assert result.left_out == (0 if done == 1000 else len(_MANY) * 1000 - done)
    assert most < 20e6


def test_cutting_for_a_program_ends_when_nobody_waits_for_it() -> None:
    requested, bounds = _many_pairs(2)
    checks = iter(range(100))

    def check() -> None:
        if next(checks, None) is None:
            raise Cancelled("the caller gave it up")

    with pytest.raises(Cancelled):
        canonical(requested, bounds, 64, check)


def test_numbers_of_chunks_and_tasks_follow_the_documents() -> None:
    requested = ProgramJobs(
        (RequestedJob("c", "u"), RequestedJob("a", "t")),
        texts=_TEXTS,
        **_BY_PAGE,
    )
    chosen, _ = canonical(requested, _bounds(), 99)
    assert isinstance(chosen, JobList)
    jobs, _ = Numbering().number(chosen, tasks=0, samples=1, max_jobs=9, max_characters=99)
    assert [job.job_id for job in jobs] == ["c1_t1_s0", "c2_t2_s0"]
    assert isinstance(jobs[0], JobManifest)


@pytest.mark.parametrize("took_s", [0.0, 0.01, 0.1, 0.11, 2.5, 10.0, 299.0])
def test_the_remote_learns_of_an_end_at_few_times(took_s: float) -> None:
    learned_s = took_s + padding_s(took_s)
    assert learned_s >= took_s
    assert math.log2(learned_s / 0.1) == pytest.approx(round(math.log2(learned_s / 0.1)))
    assert learned_s < max(0.2, 2 * took_s)
