"""Cost of a round beside its pass: the real verifier over gRPC, robots with scripted drafts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from torch import Tensor

from collab_llm_lab.bench.gpu.lab import Lab
from collab_llm_lab.bench.gpu.robots import Script
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server

SCRIPTS = 4
WORDS = 60
SAMPLED = SamplingConfig(temperature=0.1, top_p=0.9, seed=1)
"""With random weights the likeliest tokens are many; at this temperature they are as few as with
trained ones at 0.7."""
SAMPLED_ROBOTS = 8


def serving(lab: Lab) -> None:
    """Serve robots of a process of their own, and compare round trips with the passes in them.

    Their drafts are the target's own greedy answer, so that all tokens stand but where bfloat16
    rounds a batch in another way. In float32 none may differ. The next step gets another process:
    a server takes nine tenths of the memory.
    """
    loaded = lab.held(lab.form.large, "bfloat16" if lab.cuda else "float32")
    engine = lab.engine(loaded)
    engine.eos = frozenset()  # answers of one length
    texts = [" ".join(str(i) for i in lab.ids(WORDS, seed)) for seed in range(SCRIPTS)]
    answers = _answers(engine, texts, lab.form.answer)
    scripts = [Script(text, answer) for text, answer in zip(texts, answers, strict=True)]
    most = max(*lab.form.robots, SAMPLED_ROBOTS)
    limits = Limits(max_sessions=2 * most, max_streams=4 * most)
    config = VerifierConfig(address="127.0.0.1:0", limits=limits)
    lab.spoil()
    with start_server(config, engine) as server:
        loads = [(str(n), n, SamplingConfig()) for n in lab.form.robots]
        for name, robots, sampling in (*loads, ("sampled", SAMPLED_ROBOTS, SAMPLED)):
            job = {
                "address": f"127.0.0.1:{server.port}",
                "vocabulary": engine.vocabulary,
                "scripts": [asdict(script) for script in scripts],
                "robots": robots,
                "seconds": lab.form.serve_s,
                "sampling": asdict(sampling),
            }
            found = _robots(job)
            lab.figure(f"{name} robots" if name.isdigit() else f"{robots} robots, {name}", found)
            lab.verdict(f"{name}: rounds were verified", found["rounds"] > 0)
            if sampling.greedy and not lab.cuda:
                lab.verdict(f"{name}: answers are as scripted", found["other_answers"] == 0)


def _answers(engine: Engine, texts: Sequence[str], tokens: int) -> list[tuple[int, ...]]:
    """Return the greedy answers to all ``texts``, decoded side by side."""
    sessions, answers = [], []
    for text in texts:
        prompt = encode(Prompt(text), engine.loaded)
        sessions.append(session := engine.open(prompt))
        answers.append([int(session.feed(prompt.ids, last=1)[0].argmax())])
    while len(answers[0]) < tokens:
        feeds = [Feed(s, answer[-1:]) for s, answer in zip(sessions, answers, strict=True)]
        for answer, result in zip(answers, engine.run(feeds), strict=True):
            if not isinstance(result, Tensor):
                raise result
            answer.append(int(result[-1].argmax()))
    for session in sessions:
        session.close()
    return [tuple(answer) for answer in answers]


def _robots(job: dict[str, object]) -> dict[str, float]:
    """Run ``robots.py`` in a process of its own, which shares no interpreter with the server."""
    done = subprocess.run(
        [sys.executable, "-m", "collab_llm_lab.bench.gpu.robots"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
