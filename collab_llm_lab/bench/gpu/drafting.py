"""Cost of a robot's drafts: steps of one and of 16 continuations, predictions of verdicts."""

from __future__ import annotations

from collections.abc import Callable

from collab_llm_lab.bench.gpu.lab import Lab
from collab_llm_lab.bench.gpu.timing import timed
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter

GAMMA = 4
BRANCHES = (1, 16)
PREDICTED = 16
LAWS = {
    "greedy": SamplingConfig(),
    # With random weights the likeliest tokens are many; here they are as few as with trained ones.
    "sampled": SamplingConfig(temperature=0.1, top_p=0.9, seed=1),
}


def drafting(lab: Lab) -> None:
    """Draft with the small model in bfloat16: passes, laws, draws and bookkeeping together."""
    engine = Engine(lab.held(lab.form.small, "bfloat16"))
    engine.eos = frozenset()  # drafts of one length
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
