"""Memory that many sessions leave, and the launches and waits of one pass."""

from __future__ import annotations

import gc
import resource

import torch
from torch.profiler import ProfilerActivity, profile

from collab_llm_lab.bench.gpu.lab import Lab
from collab_llm_lab.bench.gpu.speed import DRAFTED, again, filled
from collab_llm_lab.bench.gpu.timing import synchronize, timed
from collab_llm_nodes.engine.engine import Engine

_KEPT_BYTES = 1 << 20
"""May differ: the allocator's own rounding."""
_WAITS = ("Synchronize", "synchronize")
_COPIES = ("memcpy", "Memcpy", "_to_copy", "aten::copy_")


def memory(lab: Lab) -> None:
    """Open, fill and close many sessions; allocated memory must be the same after."""
    engine = lab.engine(lab.held(lab.form.large, "bfloat16"))
    _come_and_go(lab, engine, lab.form.opened)  # the engine keeps the memory of the longest one
    before = _held(lab)
    for extra in range(lab.form.opened):
        _come_and_go(lab, engine, extra)
    after = _held(lab)
    lab.figure("before", before)
    lab.figure("after", after)
    lab.figure("sessions", lab.form.opened)
    if lab.cuda:
        kept = after["allocated"] - before["allocated"]
        lab.verdict("allocated memory is given back", kept <= _KEPT_BYTES, kept_bytes=kept)


def _come_and_go(lab: Lab, engine: Engine, extra: int) -> None:
    """Open a session of ``Form.filled`` and some more tokens, verify, fork, and close both."""
    session = engine.open(lab.text(0))
    session.feed(lab.ids(lab.form.filled + extra, extra), last=0)
    session.feed(lab.ids(DRAFTED))
    twin = session.fork()
    twin.feed(lab.ids(1))
    session.close()
    twin.close()


def _held(lab: Lab) -> dict[str, int]:
    """Return bytes allocated and reserved on a GPU, or the most that the process has held."""
    gc.collect()
    if not lab.cuda:
        return {"peak_of_the_process": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    synchronize(lab.device)
    return {
        "allocated": torch.cuda.memory_allocated(lab.device),
        "reserved": torch.cuda.memory_reserved(lab.device),
    }


def launches(lab: Lab) -> None:
    """Count kernels, copies and waits of passes of 1 and 5 rows; operators on a CPU."""
    engine = lab.engine(lab.held(lab.form.large, "bfloat16"))
    _count(lab, engine, ", launched one by one")
    engine.warm_up()
    _count(lab, engine, "")


def _count(lab: Lab, engine: Engine, how: str) -> None:
    session = filled(lab, engine)
    for rows in (1, DRAFTED):
        call = again(session, lab.ids(rows))
        took_ms = timed(lab.device, call, lab.form.repeats)["ms"]
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if lab.cuda else [])]
        with profile(activities=activities) as profiler:
            call()
            synchronize(lab.device)
        events = profiler.key_averages()
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        busy_ms = sum(e.self_device_time_total for e in kernels) / 1e3
        lab.figure(
            f"{rows} rows{how}",
            {
                "ms": took_ms,
                "operators": sum(e.count for e in events if e.key.startswith("aten::")),
                "kernels": sum(e.count for e in kernels),
                "busy_share": busy_ms / took_ms if lab.cuda else None,
                "waits": {e.key: e.count for e in events if any(w in e.key for w in _WAITS)},
                "copies": {e.key: e.count for e in events if any(c in e.key for c in _COPIES)},
            },
        )
    session.close()
