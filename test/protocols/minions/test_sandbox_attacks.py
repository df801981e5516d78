"""Hostile programs of the remote: nothing escapes, nothing hangs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import comes_true, wait_for

from collab_llm_lab.bench.minions import attacks
from collab_llm_lab.bench.minions.attack_programs import BOMBS, LEAKS, WORKS, program
from collab_llm_lab.bench.minions.attacks import (
    BOMB_LIMITS,
    CANARY,
    LEAK_LIMITS,
    Host,
    lives,
)
from collab_llm_nodes.errors import Cancelled
from collab_llm_nodes.protocols.minions.jobs import (
    Fault,
    Job,
    JobList,
    JobManifest,
    JobOutput,
    ProgramJobs,
)
from collab_llm_nodes.protocols.minions.sandbox.host import Sandbox
from collab_llm_nodes.protocols.minions.sandbox.limits import SandboxLimits

_BANS_SOCKETS = ("x86_64", "aarch64")


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with attacks.host() as found:
        yield found


@pytest.fixture(scope="module")
def sandbox(host: Host) -> Iterator[Sandbox]:
    running = Sandbox(LEAK_LIMITS)
    yield running
    running.close()


@pytest.fixture(scope="module")
def impatient(host: Host) -> Iterator[Sandbox]:
    """A sandbox for programs without end."""
    running = Sandbox(BOMB_LIMITS)
    yield running
    running.close()


@pytest.mark.parametrize("name", LEAKS)
def test_nothing_escapes(host: Host, sandbox: Sandbox, name: str) -> None:
    result = sandbox.run(host.leak(name), ["text"])
    assert not host.leaked(str(result))
    if isinstance(result, JobList):  # whatever it found, it is no more than a word or two
        assert all(len(job.task) < 100 for job in result.jobs)


def test_in_plain_python_these_attacks_succeed(host: Host) -> None:
    """Show that the tests above would notice an escape."""
    harness = """
import dataclasses, json, sys
JobManifest = dataclasses.make_dataclass("JobManifest", ["chunk", "task"])
space = {"JobManifest": JobManifest}
exec(sys.stdin.read(), space)
print(space["prepare_jobs"](["text"], []))
"""
    failed = set()
    for name in WORKS:
        run = subprocess.run(
            [sys.executable, "-I", "-c", harness],
            input=host.leak(name),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if not host.leaked(run.stdout):
            failed.add(name)
        if host.trace.is_dir():
            host.trace.rmdir()
        host.trace.unlink(missing_ok=True)
    assert not failed


@pytest.mark.parametrize("name", BOMBS)
def test_nothing_hangs(impatient: Sandbox, name: str) -> None:
    """The test's time limit is the deadline; how soon programs end is a figure of the bench."""
    result = impatient.run(program(BOMBS[name]), ["text"])
    assert isinstance(result, Fault) or len(result.jobs) <= SandboxLimits().jobs
    assert lives(impatient)


@settings(max_examples=60)
@given(st.data())
def test_pieces_of_attacks_in_any_order(host: Host, sandbox: Sandbox, data: st.DataObject) -> None:
    """Splice programs, and cut them anywhere."""
    name = st.sampled_from(sorted(LEAKS))
    first, second = host.leak(data.draw(name)), host.leak(data.draw(name))
    cut = data.draw(st.integers(0, len(first))), data.draw(st.integers(0, len(second)))
    spliced = first[: cut[0]] + second[cut[1] :] + data.draw(st.text(max_size=5))
    result = sandbox.run(spliced, ["text \ud800"])
    assert CANARY not in str(result).replace(str(host.file), "")
    assert not host.trace.exists()
    assert not host.connected()


def test_memory_is_limited_where_the_process_has_more(sandbox: Sandbox) -> None:
    assert isinstance(sandbox.run(program("bytes(10 << 20)"), ["text"]), JobList)
    assert sandbox.run(program("bytes(100 << 20)"), ["text"]) is Fault.MEMORY


def test_one_program_leaves_nothing_to_the_next(sandbox: Sandbox) -> None:
    first = "JobManifest = None\nsecret = 'x'\n" + program("found = ''")
    sandbox.run(first, ["text"])
    assert sandbox.run(program("found = secret"), ["text"]) is Fault.RAISED
    assert isinstance(sandbox.run(program(""), ["text"]), JobList)


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError(context[0])",
        "raise SystemExit(context[0])",
        "raise KeyboardInterrupt(context[0])",
        "assert False, context[0]",
        "{}[context[0]]",
        "int(context[0])",
        "getattr('', context[0])",
        "exec(context[0])",
        "__import__(context[0])",
        "open(context[0])",
        "return context[0]",
        "return {'jobs': context}",
        "return [context[0]]",
        "return [JobManifest(chunk=1, task=context[0])]",
        "return [JobManifest(chunk='c', task=[context[0]])]",
        "return [JobManifest(chunk='c', task='t', advice=context)]",
    ],
)
def test_a_fault_has_no_text(sandbox: Sandbox, body: str) -> None:
    result = sandbox.run(program(body), [f"{CANARY} 'unreadable"])
    assert isinstance(result, Fault)
    assert CANARY not in result.message + result.value


def test_what_is_printed_goes_nowhere(sandbox: Sandbox, capfd: pytest.CaptureFixture[str]) -> None:
    assert isinstance(sandbox.run(program("print(context[0])"), [CANARY]), JobList)
    assert CANARY not in "".join(capfd.readouterr())


def test_ids_are_not_the_programs(sandbox: Sandbox) -> None:
    body = (
        "return [JobManifest(chunk='c', task='t', chunk_id=context[0], task_id=context[0],"
        " job_id=context[0])]"
    )
    result = sandbox.run(program(body), [CANARY])
    assert isinstance(result, JobList)
    assert CANARY not in str(result)


@pytest.mark.parametrize(
    ("task", "written"),
    [
        ("'Extract the date.'", True),
        ("'Extract ' 'the date.'", True),
        ("context[0]", False),
        ("f'Extract {context[0]}'", False),
        ("'%s' % context[0]", False),
        ("''.join(sorted(context[0]))", False),
        ("context[0].upper()", False),
        ("'word'[:3]", True),
        ("'word'[:len(context)]", False),
    ],
)
def test_tasks_that_depend_on_the_program_alone_are_recognised(
    sandbox: Sandbox, task: str, written: bool
) -> None:
    result = sandbox.run(program(f"return [JobManifest('c', {task})]"), [CANARY])
    assert isinstance(result, ProgramJobs)
    assert [job.task in result.texts for job in result.jobs] == [written]


def test_a_process_that_ends_while_it_is_idle_is_replaced(sandbox: Sandbox) -> None:
    sandbox.start()
    before, process = sandbox.replaced, sandbox.process
    sandbox.interrupt()
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert isinstance(sandbox.run(program(""), ["text"]), JobList)
    assert sandbox.replaced == before + 1


def test_a_program_can_be_interrupted() -> None:
    running = Sandbox(SandboxLimits(run_s=60, wall_s=60))
    running.start()
    process = running.process
    with ThreadPoolExecutor() as pool:
        result = pool.submit(running.run, program(BOMBS["loop"]), ["text"])
        wait_for(lambda: len(_members(process)) > 1)
        running.interrupt()
        assert result.result(30) is Fault.CRASHED
    assert isinstance(running.run(program(""), ["text"]), JobList)
    running.close()


def test_a_program_given_up_while_the_process_starts_is_not_run() -> None:
    starting = Sandbox(SandboxLimits(run_s=60, wall_s=60))

    def given_up() -> None:
        raise Cancelled("as it started")

    starting.interrupt()  # nothing is there that it could end
    with pytest.raises(Cancelled):
        starting.run(program(BOMBS["loop"]), ["text"], check=given_up)
    assert isinstance(starting.run(program(""), ["text"]), JobList)
    starting.close()


def test_the_log_has_each_program_but_no_text(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "collab_llm_nodes.protocols.minions"):
        sandbox.run(program(""), [CANARY])
        sandbox.run(program("raise ValueError(context[0])"), [CANARY])
    assert "1 jobs after" in caplog.text
    assert "RAISED after" in caplog.text
    assert "raise ValueError" in caplog.text
    assert CANARY not in caplog.text


def test_no_wall_time_left_is_a_fault_and_the_process_is_replaced(sandbox: Sandbox) -> None:
    slow = program("while True: pass")
    assert sandbox.run(slow, ["text"], due=time.monotonic() + 0.05) is Fault.TIME
    assert isinstance(sandbox.run(program(""), ["text"]), JobList)


def test_last_jobs_arrive_with_outputs_and_ids(sandbox: Sandbox) -> None:
    manifest = JobManifest("the chunk", "the task", "advice", 7, 3, 1)
    last = Job(manifest, JobOutput("because", "a quote", "42"))
    body = (
        "j = last_jobs[0]; m = j.manifest; o = j.output;"
        " found = [m.chunk, m.task, m.advice, m.chunk_id, m.task_id, m.job_id,"
        " o.explanation, o.citation, o.answer]"
    )
    result = sandbox.run(program(body), ["text"], [last])
    assert isinstance(result, JobList)
    expected = "['the chunk', 'the task', 'advice', 7, 3, 'c7_t3_s1', 'because', 'a quote', '42']"
    assert result.jobs[0].task == f"t{expected}"


def test_the_process_holds_no_right_to_files_or_network(host: Host) -> None:
    """Try the second layer without the first: what the process itself may do."""
    script = f"""
import json, socket, sys
from collab_llm_nodes.protocols.minions.sandbox import confinement
confinement.limit_resources(4096)
version = confinement.drop_rights()
done = []
def attempt(name, act):
    try:
        act()
        done.append(name)
    except OSError:
        pass
attempt("read", lambda: open({str(host.file)!r}).read())
attempt("write", lambda: open({str(host.trace)!r}, "w"))
attempt("connect", lambda: socket.create_connection({host.listener.getsockname()!r}, 1))
attempt("datagram", lambda: socket.socket(type=socket.SOCK_DGRAM))
attempt("unix", lambda: socket.socket(socket.AF_UNIX))
print(json.dumps([version, done]))
"""
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": paths},
        timeout=60,
        check=True,
    )
    landlock, done = json.loads(run.stdout)
    assert done == ([] if landlock else ["read", "write"])


def test_closing_leaves_no_process() -> None:
    running = Sandbox(SandboxLimits(run_s=60, wall_s=60))
    running.start()
    group = running.process
    worker = threading.Thread(target=running.run, args=(program(BOMBS["loop"]), ["text"]))
    worker.start()
    wait_for(lambda: len(_members(group)) > 1)
    for member in _members(group):  # the process, and the interpreter that it has started
        status = (Path("/proc") / member / "status").read_text()
        assert re.search(r"^NoNewPrivs:\s+1$", status, re.M)
        assert re.search(r"^Seccomp:\s+2$", status, re.M) or platform.machine() not in _BANS_SOCKETS
    assert running.run(program(""), ["text"], due=time.monotonic() + 0.1) is Fault.TIME  # waits
    running.close()
    worker.join(30)
    assert not worker.is_alive()
    assert comes_true(lambda: not _members(group), 30)


def _members(group: int) -> list[str]:
    """Return the processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                found.append(stat.parent.name)
    return found
