"""Programs such as a good remote writes: the paper's own, and idioms of models that can code."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from textwrap import dedent, indent

import pytest
from minions_world import PATIENT

from collab_llm_nodes.protocols.minions.choice import RUN_BITS, Bounds, canonical
from collab_llm_nodes.protocols.minions.jobs import (
    Cut,
    Fault,
    Job,
    JobList,
    JobManifest,
    JobOutput,
    ProgramJobs,
)
from collab_llm_nodes.protocols.minions.sandbox.host import Sandbox
from collab_llm_nodes.protocols.minions.sandbox.limits import (
    MAX_CALLS,
    MAX_CHUNK,
    MAX_SOURCE,
)

_REPORT = "\f".join(
    [
        "# Income statement\nTotal revenue 2015: $3,991 million.",
        "# Cash flow\nDepreciation and amortization: $167 million.",
        "# Notes\nNothing of interest.",
    ]
)
_LAST = (
    Job(JobManifest("# Cash flow\nDepreciation", "t", "", 2, 1), JobOutput("e", "c", "167")),
    Job(JobManifest("# Notes\nNothing", "t", "", 3, 1), JobOutput()),
)


def test_only_the_cuts_that_gave_a_chunk_are_made_again(sandbox: Sandbox) -> None:
    program = """
def prepare_jobs(context, last_jobs):
    chunk_by_section(context[0], 200)
    for page in chunk_by_page(context[0]):
        chunk_by_paragraph(page, 100)
    return [JobManifest(page, 'Look.') for page in chunk_by_page(context)[:1]]
"""
    wanted = sandbox.run(program, ["\f".join(f"{i} " + "word " * 60 for i in range(3))])
    assert isinstance(wanted, ProgramJobs)
    assert wanted.cuts == (Cut("chunk_by_page", 1),)


# Section 5.1 of paper 000, with the names of its appendix F.
_PAPER = """
def prepare_jobs(context: List[str], last_jobs: List[Job]) -> List[JobManifest]:
    jobs = []
    instructions = ["Extract the total revenue.", "In the statement of cash flow, find D&A."]
    for document in context:
        chunks = chunk_on_multiple_pages(doc=document, pages_per_chunk=1)
        for chunk in chunks:
            for instr in instructions:
                for _ in range(5):
                    jobs.append(JobManifest(chunk=chunk, task=instr, advice=""))
    return jobs
"""
# Appendix F, LongHealth: with its list of jobs, which the example there forgets.
_APPENDIX = """
def prepare_jobs(context, last_jobs):
    job_manifests = []
    task_id = 1  # Unique identifier for the task
    for doc_id, document in enumerate(context):
        chunks = chunk_by_page(document)
        for chunk_id, chunk in enumerate(chunks):
            # Create a task for extracting mentions of specific keywords
            task = (
                "Extract all mentions of the following keywords: "
                "'revenue', 'amortization', 'million'."
            )
            job_manifest = JobManifest(
                chunk_id=f"{doc_id}_{chunk_id}",
                task_id=task_id,
                chunk=chunk,
                task=task,
                advice="Focus on extracting the specific keywords.",
            )
            job_manifests.append(job_manifest)
    return job_manifests
"""
_ZOOM = '''
from typing import List, Optional
import re

def is_relevant(job: Job) -> bool:
    return job.output.answer is not None and bool(re.search(r"\\d+", job.output.answer))

def prepare_jobs(context: List[str], last_jobs: Optional[List[Job]] = None) -> List[JobManifest]:
    """Look closer where something was found."""
    wanted = {job.manifest.chunk_id: job.manifest for job in last_jobs or [] if is_relevant(job)}
    return [
        JobManifest(piece, f"Check the number in chunk {number}.")
        for number, manifest in sorted(wanted.items())
        for piece in chunk_by_paragraph(manifest.chunk, max_chunk_size=500)
    ]
'''
_FILTER = """
from collections import defaultdict
import json, math

KEYWORDS = ["revenue", "amortization"]

def score(chunk: str) -> float:
    words = chunk.lower().split()
    counts = defaultdict(int)
    for word in words:
        counts[word.strip(".,:$#")] += 1
    return sum(math.log1p(counts[keyword]) for keyword in KEYWORDS)

def prepare_jobs(context, last_jobs):
    chunks = [c for doc in context for c in chunk_by_section(doc, max_chunk_size=1000)]
    ranked = sorted(chunks, key=lambda c: (-score(c), chunks.index(c)))[:2]
    try:
        limit = int(json.loads('{"n": 2}')["n"])
    except (KeyError, ValueError):
        limit = 1
    jobs = []
    for i, chunk in enumerate(ranked):
        if i >= limit or not any(k in chunk.lower() for k in KEYWORDS):
            continue
        title, *_ = chunk.splitlines()
        jobs.extend([JobManifest(chunk=chunk, task="Extract the amount.", advice=title)] * 2)
    return jobs
"""


def _run(sandbox: Sandbox, program: str) -> JobList:
    result = sandbox.run(program, [_REPORT], _LAST)
    assert isinstance(result, JobList), result
    return result


def test_the_papers_program(sandbox: Sandbox) -> None:
    jobs = _run(sandbox, "from typing import List\n" + _PAPER).jobs
    assert len(jobs) == 3 * 2 * 5
    assert len({(job.chunk, job.task) for job in jobs}) == 6


def test_the_papers_program_needs_no_import_of_types(sandbox: Sandbox) -> None:
    assert len(_run(sandbox, _PAPER).jobs) == 30


def test_the_appendixs_program(sandbox: Sandbox) -> None:
    jobs = _run(sandbox, _APPENDIX).jobs
    assert [job.chunk.split("\n")[0] for job in jobs] == [
        "# Income statement",
        "# Cash flow",
        "# Notes",
    ]
    assert {job.advice for job in jobs} == {"Focus on extracting the specific keywords."}


def test_a_second_round_looks_closer(sandbox: Sandbox) -> None:
    (job,) = _run(sandbox, _ZOOM).jobs
    assert job.task == "Check the number in chunk 2."
    assert "Depreciation" in job.chunk


def test_a_program_may_choose_by_what_a_chunk_holds(sandbox: Sandbox) -> None:
    jobs = _run(sandbox, _FILTER).jobs
    assert [job.advice for job in jobs] == ["# Income statement"] * 2 + ["# Cash flow"] * 2


@pytest.mark.parametrize(
    ("call", "chunks"),
    [
        ("chunk_by_page(context)", 3),
        ("chunk_by_page(context[0])", 3),
        ("chunk_by_page(doc=context[0])", 3),
        ("chunk_on_multiple_pages(context[0], 2)", 2),
        ("chunk_on_multiple_pages(doc=context, pages_per_chunk=2)", 2),
        ("chunk_on_multiple_pages(context, pages_per_chunk=-5)", 3),
        ("chunk_by_section(context)", 3),
        ("[c for c in chunk_by_page(context) if 'revenue' in c]", 1),
    ],
)
def test_calls_of_chunkers(sandbox: Sandbox, call: str, chunks: int) -> None:
    program = (
        f"def prepare_jobs(context, last_jobs):\n    return [JobManifest(c, 't') for c in {call}]"
    )
    assert len(_run(sandbox, program).jobs) == chunks


@pytest.mark.parametrize(
    "call", ["chunk_by_page()", "chunk_by_page(3)", "chunk_by_page(context, 'a')"]
)
def test_wrong_calls_of_chunkers(sandbox: Sandbox, call: str) -> None:
    program = f"def prepare_jobs(context, last_jobs):\n    return {call}"
    assert sandbox.run(program, [_REPORT]) is Fault.RAISED


def test_the_size_that_the_host_sets_prevails(sandbox: Sandbox) -> None:
    program = (
        "def prepare_jobs(context, last_jobs):\n"
        "    return [JobManifest(c, 't') for c in chunk_on_multiple_pages(context, 1)]"
    )
    result = sandbox.run(program, [_REPORT], chunk_size=3)
    assert isinstance(result, JobList)
    assert len(result.jobs) == 1


def test_only_the_chunkers_that_are_offered_exist(sandbox: Sandbox) -> None:
    program = "def prepare_jobs(context, last_jobs):\n    return chunk_by_page(context)"
    assert sandbox.run(program, [_REPORT], chunkers=["chunk_by_section"]) is Fault.RAISED


def test_limits_of_chunks_and_source(sandbox: Sandbox) -> None:
    long = MAX_CHUNK + 1
    program = (
        f"def prepare_jobs(c, l):\n    return [JobManifest('a' * n, 't') for n in (1, {long})]"
    )
    result = sandbox.run(program, [_REPORT])
    assert isinstance(result, JobList)
    assert (len(result.jobs), result.left_out) == (1, 1)
    assert sandbox.run("#" * MAX_SOURCE + program, [_REPORT]) is Fault.TOO_LONG


@pytest.mark.parametrize("limit", ["calls", "cut_s"])
def test_calls_and_time_of_chunkers_are_limited_even_if_their_error_is_caught(limit: str) -> None:
    limits = replace(PATIENT, cut_s=5.0 if limit == "calls" else 0.05)
    once = "chunk_by_page([context[0]] * {times})"
    program = (
        "def prepare_jobs(context, last_jobs):\n"
        "    for _ in range({calls}):\n"
        f"        try: {once}\n"
        "        except Exception: pass\n"
        f"    return {once} or [JobManifest('a', 'b')]"
    )
    small = program.format(calls=2, times=0)
    calls, times = (MAX_CALLS + 1, 0) if limit == "calls" else (4, 10_000)
    large = program.format(calls=calls, times=times)
    with closing(Sandbox(limits)) as running:
        assert isinstance(running.run(small, [_REPORT]), JobList)
        assert running.run(large, [_REPORT]) is Fault.CALLS


def test_time_of_chunkers_counts_though_they_raise() -> None:
    """The last document is none, so each call fails, after it has cut the first one."""
    program = (
        "def prepare_jobs(context, last_jobs):\n"
        "    for _ in range(200):\n"
        "        try: chunk_by_section([context[0], 3])\n"
        "        except TypeError: pass\n"
        "    return [JobManifest('a', 'b')]"
    )
    with closing(Sandbox(replace(PATIENT, cut_s=0.05))) as running:
        assert running.run(program, ["word word. " * 20_000]) is Fault.CALLS


def test_a_late_interruption_does_not_crash_the_next_program() -> None:
    program = "def prepare_jobs(context, last_jobs):\n    return [JobManifest('a', 'b')]"
    with closing(Sandbox(PATIENT)) as running:
        for _ in range(3):
            assert isinstance(running.run(program, [_REPORT]), JobList)
            running.interrupt()  # the program has just ended


# ---------------------------------------------------------------- idioms of the authors' code


def _canonical(sandbox: Sandbox, program: str, last: tuple[Job, ...] = ()) -> JobList | Fault:
    """Return what the host makes of the jobs of ``program``."""
    result = sandbox.run(program, [_REPORT], last)
    assert isinstance(result, ProgramJobs), result
    chunks = [job.manifest.chunk for job in last]
    return canonical(result, Bounds([_REPORT], chunks, 0, 1, 100), 64)[0]


def _program(body: str) -> str:
    return "def prepare_jobs(context, last_jobs):\n" + indent(dedent(body), "    ")


@pytest.mark.parametrize(
    "task",
    [
        "f'Extract the {metric} of {2000 + 15}.'",
        "'Extract the {} of {}.'.format(metric, 2015)",
        "'Extract the %s of %d.' % (metric, 2015)",
        "'Extract the ' + metric + ' of ' + '2015.'",
        "' '.join(['Extract the', metric, 'of', '2015.'])",
        "T[metric]['task']",
    ],
)
def test_tasks_are_built_from_constants(sandbox: Sandbox, task: str) -> None:
    program = _program(
        f"""
        T = {{m: dict(task='Extract the %s of 2015.' % m) for m in ['revenue', 'profit']}}
        return [
            JobManifest(page, {task}, advice='Look for ' + 'a table.')
            for metric in ['revenue', 'profit']
            for page in chunk_by_page(context[0])
        ]
        """
    )
    jobs = _canonical(sandbox, program)
    assert isinstance(jobs, JobList)
    assert {(job.task, job.advice) for job in jobs.jobs} == {
        (f"Extract the {metric} of 2015.", "Look for a table.") for metric in ("revenue", "profit")
    }
    assert len(jobs.jobs) == 6


def test_sizes_are_built_from_constants(sandbox: Sandbox) -> None:
    pieces = "[JobManifest(c, 't') for c in chunk_by_section(context[0], {size})]"
    assert isinstance(
        _canonical(sandbox, _program(f"return {pieces.format(size='50 * 4')}")), JobList
    )
    by_length = _program(f"return {pieces.format(size='101 + len(context[0])')}")
    assert _canonical(sandbox, by_length) is Fault.NOT_A_PIECE


@pytest.mark.parametrize(
    "task",
    [
        "f'About {page[:9]}.'",
        "'word ' + page.split()[0]",
        "f'Part {number} of {len(pages)}'",
        "'Look.' if page == 'x' else 'Look: ' + str(hash(page))",
    ],
)
def test_tasks_that_depend_on_the_text_are_refused(sandbox: Sandbox, task: str) -> None:
    program = _program(
        f"""
        pages = chunk_by_page(context[0])
        return [JobManifest(page, {task}) for number, page in enumerate(pages, 7)]
        """
    )
    assert _canonical(sandbox, program) is Fault.NOT_WRITTEN


def test_a_choice_among_built_tasks_is_charged(sandbox: Sandbox) -> None:
    """A hostile program shows all tasks for blank documents, and one for the document at hand."""
    program = _program(
        """
        tasks = [f'Look for {number}.' for number in range(256)]
        chosen = tasks if context[0] == 'x' else [tasks[ord(context[0][0])]]
        return [JobManifest(context[0], task) for task in chosen]
        """
    )
    result = sandbox.run(program, [_REPORT])
    assert isinstance(result, ProgramJobs)
    assert len(result.jobs) == 1
    bounds = Bounds([_REPORT], [], 0, 1, 100)
    _, bits = canonical(result, bounds, 64)
    assert bits >= RUN_BITS + 8
    assert canonical(result, bounds, RUN_BITS + 8)[0] is Fault.CHOICE


def test_tasks_of_the_last_round_may_be_used_again(sandbox: Sandbox) -> None:
    program = _program(
        """
        return [
            JobManifest(job.manifest.chunk, f'{job.manifest.task} again, in {2015}')
            for job in last_jobs if job.output.answer
        ]
        """
    )
    jobs = _canonical(sandbox, program, _LAST)
    assert isinstance(jobs, JobList)
    assert {job.task for job in jobs.jobs} == {"t again, in 2015"}


def test_jobs_are_dicts_or_come_from_a_generator(sandbox: Sandbox) -> None:
    program = _program(
        """
        if not context:
            return
        for page in chunk_by_page(context[0]):
            yield {"chunk": page, "task": "Look.", "advice": "Well."}
        yield from (JobManifest(chunk=page, task="Look.") for page in chunk_by_page(context[0]))
        """
    )
    jobs = _run(sandbox, program).jobs
    assert [job.advice for job in jobs] == ["Well."] * 3 + [""] * 3


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("['revenue'], pages, k=1", ["# Income statement"]),
        ("['Depreciation', 'revenue'], pages, k=2", ["# Income statement", "# Cash flow"]),
        ("keywords=['of', 'cash'], chunks=pages, weights={'of': 9.0}, k=1", ["# Notes"]),
        ("['nowhere'], pages, k=0", []),
    ],
)
def test_chunks_are_retrieved_by_keywords(
    sandbox: Sandbox, arguments: str, found: list[str]
) -> None:
    program = _program(
        f"""
        pages = chunk_by_page(context[0])
        found = retrieve_top_k_chunks({arguments})
        return [JobManifest(page, 'Look.') for page in found] + [JobManifest(context[0], 'Look.')]
        """
    )
    *jobs, _ = _run(sandbox, program).jobs
    assert [job.chunk.split("\n")[0] for job in jobs] == found


def test_wrong_retrievals_are_a_programs_own_errors(sandbox: Sandbox) -> None:
    for arguments in ("'revenue', context", "['revenue'], [3]", "['revenue']"):
        program = _program(f"return retrieve_top_k_chunks({arguments})")
        assert sandbox.run(program, [_REPORT]) is Fault.RAISED


# ---------------------------------------------------------------- aggregation

_SUM = """
def transform_outputs(jobs):
    numbers = [float(job.output.answer) for job in jobs if job.output.answer]
    return f"The sum is {sum(numbers)}; chunks: {''.join(job.manifest.chunk for job in jobs)}"
"""


def test_a_program_aggregates_outputs(sandbox: Sandbox) -> None:
    kept = [job.without_chunk for job in _LAST]
    assert sandbox.aggregate(_SUM, kept) == "The sum is 167.0; chunks: "


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("x = 1", Fault.SYNTAX),
        ("def transform_outputs(jobs): return 3", Fault.NOT_JOBS),
        ("def transform_outputs(jobs): return context[0]", Fault.RAISED),
        ("def transform_outputs(jobs): return open('/etc/passwd').read()", Fault.RAISED),
        ("#" * MAX_SOURCE + _SUM, Fault.TOO_LONG),
    ],
)
def test_an_aggregation_fails_with_a_code(sandbox: Sandbox, program: str, fault: Fault) -> None:
    assert sandbox.aggregate(program, []) is fault
