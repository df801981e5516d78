"""Times of passes: decoding, verification, prompts, pictures, sessions, exits, answers, drafts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from collab_llm_lab.bench.gpu.exactness import greedy
from collab_llm_lab.bench.gpu.lab import Lab, weights_read
from collab_llm_lab.bench.gpu.timing import copy_bytes_per_s, synchronize, timed
from collab_llm_lab.bench.gpu.transformers_peer import generate
from collab_llm_nodes.decoding.sampling import SamplingConfig, previews_of
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, OnExit, Session
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter

VERIFIED = (1, 5, 9)
"""Rows of a pass: the last confirmed token, and drafts of 0, 4 and 8."""
DRAFTED = 5
CANDIDATES = 64
"""``exit_candidates`` of ``config/verifier_qwen2_vl_7b.yaml``."""

GAMMA = 4
BRANCHES = (1, 16)
PREDICTED = 16
LAWS = {
    "greedy": SamplingConfig(),
    # With random weights the likeliest tokens are many; here they are as few as with trained ones.
    "sampled": SamplingConfig(temperature=0.1, top_p=0.9, seed=1),
}


def passes(lab: Lab) -> None:
    """Time the large model's passes in bfloat16, from the call until the device has finished."""
    loaded = lab.held(lab.form.large, "bfloat16")
    engine = lab.engine(loaded)
    limit_ms = limit(lab, loaded)
    lab.figure("bandwidth_limit_ms", limit_ms)
    session = filled(lab, engine)

    def verify(rows: int, how: str = "") -> None:
        found = timed(lab.device, again(session, lab.ids(rows)), lab.form.repeats)
        lab.figure(f"{rows} rows{how}", {**found, "bandwidth_share": limit_ms / found["ms"]})

    for rows in VERIFIED:
        lab.attempt(f"{rows} rows", partial(verify, rows, ", launched one by one"))
    session.close()
    engine.warm_up()  # captures the passes of few rows
    session = filled(lab, engine)
    for rows in VERIFIED:
        lab.attempt(f"{rows} rows", partial(verify, rows))
    session.close()
    lab.attempt("prompts", partial(_prompts, lab, engine))
    lab.attempt("sessions", partial(_sessions, lab, engine, limit_ms))
    lab.attempt("exits", partial(_exits, lab, loaded))


def _prompts(lab: Lab, engine: Engine) -> None:
    """Read prompts of text, and one with a picture, which is encoded first."""
    for tokens in lab.form.prefills:
        session = engine.open(lab.text(0))
        read = again(session, lab.ids(tokens), last=1)
        lab.figure(f"prompt of {tokens}", timed(lab.device, read, max(3, lab.form.repeats // 4)))
        session.close()
    shown, encoded, read_ms = lab.shown(engine.loaded), list[float](), list[float]()
    for turn in range(4):
        session = engine.open(shown)
        synchronize(lab.device)
        begun = time.perf_counter()
        session.encode_images()
        synchronize(lab.device)
        between = time.perf_counter()
        session.feed(shown.ids, last=1)
        synchronize(lab.device)
        if turn:  # the first one warms up
            encoded.append(1e3 * (between - begun))
            read_ms.append(1e3 * (time.perf_counter() - between))
        session.close()
    found = {"tokens": len(shown.ids), "encode_ms": statistics.median(encoded)}
    lab.figure("picture 640x480", {**found, "read_ms": statistics.median(read_ms)})


def _sessions(lab: Lab, engine: Engine, limit_ms: float) -> None:
    """Verify the drafts of several sessions in one pass."""
    sessions = [filled(lab, engine, seed) for seed in range(max(lab.form.sessions))]
    lengths = [session.length for session in sessions]
    for count in lab.form.sessions:

        def verify(count: int = count) -> None:
            for session, length in zip(sessions[:count], lengths, strict=False):
                session.length = length
            for result in engine.run([Feed(s, lab.ids(DRAFTED)) for s in sessions[:count]]):
                if isinstance(result, Exception):
                    raise result

        found = timed(lab.device, verify, max(3, lab.form.repeats // 2))
        share = {"bandwidth_share": limit_ms / found["ms"]}
        lab.figure(f"{count} sessions of {DRAFTED} rows", {**found, **share})
    for session in sessions:
        session.close()


def _exits(lab: Lab, loaded: LoadedModel) -> None:
    """Verify with the exits' most likely tokens fetched at each of them, as a verifier does."""

    def fetch(layer: int, logits: Tensor) -> None:
        previews_of([logits], [SamplingConfig()])

    variants: dict[str, tuple[int, OnExit | None]] = {
        "none": (0, None),
        "whole vocabulary": (0, fetch),
        "candidates": (CANDIDATES, fetch),
    }
    for name, (candidates, on_exit) in variants.items():
        engine = lab.engine(loaded, candidates)
        engine.warm_up()
        session = filled(lab, engine)
        call = again(session, lab.ids(DRAFTED), on_exit=on_exit)
        lab.figure(f"exits: {name}", timed(lab.device, call, lab.form.repeats))
        session.close()


@torch.inference_mode()
def generation(lab: Lab) -> None:
    """Decode an answer with the engine and with transformers' ``generate``, equal weights."""
    loaded = lab.held(lab.form.large, "bfloat16")
    engine, limit_ms = lab.engine(loaded), limit(lab, loaded)
    engine.warm_up()
    peer = lab.build(lab.form.large, "bfloat16")  # the engine has rearranged its own
    prompt, tokens = lab.text(lab.form.filled), lab.form.answer
    calls: dict[str, Callable[[], list[int]]] = {
        "engine": lambda: greedy(engine, prompt, tokens),
        "transformers": lambda: generate(peer, prompt, tokens, padding=True),
    }
    rates = {}
    for name, call in calls.items():
        found = timed(lab.device, call, 3, warm_up=1)
        rates[name] = 1e3 * tokens / found["ms"]
        share = limit_ms * tokens / found["ms"]
        lab.figure(name, {"tokens_per_s": rates[name], "bandwidth_share": share, **found})
    lab.figure("engine over transformers", rates["engine"] / rates["transformers"])


def limit(lab: Lab, loaded: LoadedModel) -> float:
    """Return the least time of a pass [ms]: its weights, read at the bandwidth of a copy."""
    return 1e3 * weights_read(loaded) / copy_bytes_per_s(lab.device, lab.form.copied_bytes)


def filled(lab: Lab, engine: Engine, seed: int = 0) -> Session:
    """Return a session that holds ``Form.filled`` tokens."""
    session = engine.open(lab.text(0))
    session.feed(lab.ids(lab.form.filled, seed), last=0)
    return session


def again(
    session: Session, ids: tuple[int, ...], on_exit: OnExit | None = None, last: int | None = None
) -> Callable[[], Tensor]:
    """Return a call that reads ``ids`` after the tokens that the session holds now."""
    length = session.length

    def read() -> Tensor:
        session.length = length
        return session.feed(ids, on_exit, last)

    return read


def drafting(lab: Lab) -> None:
    """Draft with the small model in bfloat16: passes, laws, draws and bookkeeping together."""
    engine = lab.engine(lab.held(lab.form.small, "bfloat16"))
    engine.eos = frozenset()  # drafts of one length
    engine.warm_up()
    repeats = max(3, lab.form.repeats // 4)
    for name, sampling in LAWS.items():
        drafter = Drafter(engine, lab.text(lab.form.filled), sampling)
        for branches in BRANCHES:
            found = timed(lab.device, _drafts(lab, drafter, branches), repeats, warm_up=1)
            step_ms = found["ms"] / GAMMA
            lab.figure(f"{name}, {branches} branches", {"step_ms": step_ms, **found})
        job = DraftJob(2, lab.ids(2, seed=3), GAMMA)
        draft = drafter.draft(job)
        assert draft is not None
        lab.verdict(f"{name}: drafts are whole", len(draft.tokens) == GAMMA)
        drafter.predict(job, draft, PREDICTED)  # reads the draft's last token
        predict = timed(lab.device, lambda: drafter.predict(job, draft, PREDICTED), repeats)  # noqa: B023
        lab.figure(f"{name}, predict", predict)
        drafter.close()


def _drafts(lab: Lab, drafter: Drafter, branches: int) -> Callable[[], None]:
    """Return a call that makes drafts after so many different tokens, side by side."""
    starts = lab.ids(branches, seed=1)

    def draft() -> None:
        drafter.advance(lab.ids(1, seed=2))  # no branch begins so: all are forgotten
        lines = [drafter.begin(DraftJob(1, (start,), GAMMA)) for start in starts]
        while unfinished := [line for line in lines if line.draft is None]:
            drafter.step(unfinished)

    return draft
