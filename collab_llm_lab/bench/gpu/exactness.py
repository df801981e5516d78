"""Answers of the engine, its sessions and its stages beside those of transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from collab_llm_lab.bench.gpu.hardware import distance, worst
from collab_llm_lab.bench.gpu.lab import Lab, fewer_layers
from collab_llm_lab.bench.gpu.transformers_peer import full_pass, generate
from collab_llm_lab.bench.lossless.check import rounding
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.engine.stage import Stage, StageFeed, StageSession
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, load, no_progress_bar
from collab_llm_nodes.models.prompt import EncodedPrompt

LIMIT = 1e-4
"""Relative error of float32 logits: sums in another order, over tens of layers."""
ROWS = (1, 5, 64)
"""Rows of the passes whose rounding is compared."""
SHORT = (5, 9, 14, 20)
"""Tokens of short prompts: all columns of a session lie in one page."""
FORCED = 64
"""Tokens that are read in passes of so many rows."""
TIMES_AS_FAR = 1.5
"""Error in bfloat16 that is allowed, over that of transformers."""


def exact(lab: Lab) -> None:
    """Compare an engine with transformers, in float32 without TF32."""
    # Equal seeds, equal weights. The engine rearranges its own.
    peer = lab.build(lab.form.small, "float32")
    loaded = lab.held(lab.form.small, "float32")
    engine = lab.engine(loaded)
    text, shown = lab.text(48), lab.shown(loaded)
    lab.figure("picture_tokens", len(shown.ids))
    for name, prompt in (("text", text), ("picture", shown)):
        for part in (_answers, _continuations, _exits):
            call = partial(part, lab, name, engine, peer, prompt)
            lab.attempt(f"{name}: {part.__name__.strip('_')}", call)
    lab.attempt("sessions", partial(_together, lab, "long", engine, [text, shown], 11))
    short = [lab.text(tokens) for tokens in SHORT]
    lab.attempt("short sessions", partial(_together, lab, "short", engine, short, 0))
    lab.attempt("forks", partial(_forks, lab, engine))
    lab.attempt("buckets", partial(_buckets, lab, engine))


def _answers(lab: Lab, name: str, engine: Engine, peer: LoadedModel, prompt: EncodedPrompt) -> None:
    """Compare greedy answers, and the logits after each of their tokens."""
    own = greedy(engine, prompt, lab.form.answer)
    other = generate(peer, prompt, lab.form.answer)
    right, _ = full_pass(peer, prompt, own, len(own) + 1)
    differ = next((i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), None)
    gap = 0.0
    if differ is not None:
        gap = float(right[differ].max() - right[differ][[own[differ], other[differ]]].min())
    lab.verdict(
        f"{name}: greedy answer is that of generate",
        differ is None or gap <= rounding(right[differ]),
        tokens=len(own),
        differs_at=differ,
        gap=gap,
    )
    session = engine.open(prompt)
    logits = session.feed((*prompt.ids, *own), last=len(own) + 1)
    lab.near(f"{name}: logits of one pass", distance(logits, right), LIMIT)
    session.length = 0
    ids, pieces = (*prompt.ids, *own), list[Tensor]()
    for start in range(0, len(ids), 7):
        pieces.append(session.feed(ids[start : start + 7]))
    lab.near(
        f"{name}: logits of passes of 7 rows",
        distance(torch.cat(pieces)[-len(right) :], right),
        LIMIT,
    )
    session.close()


def _continuations(
    lab: Lab, name: str, engine: Engine, peer: LoadedModel, prompt: EncodedPrompt
) -> None:
    """Compare trees, forks and sessions that were rolled back with passes without a cache."""
    a, b = lab.ids(4, seed=1), lab.ids(4, seed=2)
    session = engine.open(prompt)
    session.feed(prompt.ids, last=0)
    root = session.length - 1
    first = session.columns
    # a0 a1 a2 a3, and b1 b2 b3 after a0
    ids, parents = (*a, *b[1:]), [root, first, first + 1, first + 2, first, first + 4, first + 5]
    grown = session.grow(ids, parents)
    branch = (a[0], *b[1:])
    right_a, _ = full_pass(peer, prompt, a, 4)
    right_b, _ = full_pass(peer, prompt, branch, 4)
    lab.near(f"{name}: first branch of a tree", distance(grown[:4], right_a), LIMIT)
    lab.near(f"{name}: second branch of a tree", distance(grown[4:], right_b[1:]), LIMIT)
    session.retain(first + 6)
    after = session.feed(lab.ids(3, seed=3))
    right, _ = full_pass(peer, prompt, (*branch, *lab.ids(3, seed=3)), 3)
    lab.near(f"{name}: after a retained branch", distance(after, right), LIMIT)
    session.length = len(prompt.ids)
    twin = session.fork()
    lab.near(f"{name}: rolled back", distance(session.feed(a), right_a), LIMIT)
    lab.near(f"{name}: forked", distance(twin.feed(branch), right_b), LIMIT)
    twin.close()
    session.close()


def _exits(lab: Lab, name: str, engine: Engine, peer: LoadedModel, prompt: EncodedPrompt) -> None:
    """Compare each exit's logits with adapter, norm and head over transformers' hidden states."""
    ids = lab.ids(5, seed=4)
    heard: dict[int, Tensor] = {}
    session = engine.open(prompt)
    session.feed(prompt.ids, last=0)
    session.feed(ids, on_exit=lambda layer, logits: heard.update({layer: logits.clone()}))
    session.close()
    _, states = full_pass(peer, prompt, ids, len(ids))
    parts, adapters = decoder_parts(peer.model), peer.adapters
    assert adapters is not None
    with torch.inference_mode():
        errors = [
            distance(
                heard[layer], parts.logits(adapters(layer, states[layer]))[:, : engine.vocab_size]
            )
            for layer in adapters.layers
        ]
    lab.near(f"{name}: exits", worst(errors), LIMIT, layers=adapters.layers)


def _together(
    lab: Lab, name: str, engine: Engine, prompts: Sequence[EncodedPrompt], more: int
) -> None:
    """Compare eight sessions of unlike lengths in one pass with each of them alone.

    Args:
        more: tokens by which each is longer than the one before.
    """
    sessions: list[Session] = []
    for number in range(8):
        prompt = prompts[number % len(prompts)]
        sessions.append(engine.open(prompt))
        sessions[-1].feed((*prompt.ids, *lab.ids(more * number, seed=number)), last=0)
    _compare(lab, f"8 {name} sessions in one pass", engine, sessions)


def _forks(lab: Lab, engine: Engine) -> None:
    """Compare forks that read a common prefix in one pass with each of them alone."""
    first = engine.open(lab.text(0))
    first.feed(lab.ids(200, seed=6), last=0)
    _compare(lab, "forks in one pass", engine, [first, first.fork(), first.fork()])


def _buckets(lab: Lab, engine: Engine) -> None:
    """Compare passes of one bucket of rows, to the last bit, launched one by one and from a graph.

    The pass that all sessions share has as many rows as that of one session and a filler.
    """
    for how in ("launched one by one", "from a graph"):
        sessions = [engine.open(lab.text(0)) for _ in range(4)]
        for number, session in enumerate(sessions):
            session.feed(lab.ids(40 + 150 * number, seed=number), last=0)
        feeds = [Feed(session, lab.ids(4, seed=number)) for number, session in enumerate(sessions)]
        together = _logits(engine, feeds)
        filler = Feed(engine.open(lab.text(0)), lab.ids(12, seed=9))
        same = [
            torch.equal(_logits(engine, [feed, filler])[0], own)
            for feed, own in zip(feeds, together, strict=True)
        ]
        lab.verdict(f"a row in a bucket, {how}, is as in another pass", all(same), same=same)
        for feed in (*feeds, filler):
            feed.session.close()
        engine.warm_up()


def _logits(engine: Engine, feeds: Sequence[Feed[Session]]) -> list[Tensor]:
    """Return the logits of a pass, and take its tokens back."""
    found: list[Tensor] = []
    for feed, result in zip(feeds, engine.run(feeds), strict=True):
        if isinstance(result, Exception):
            raise result
        found.append(result)
        feed.session.length -= len(feed.ids)
    return found


def _compare(lab: Lab, name: str, engine: Engine, sessions: Sequence[Session]) -> None:
    """Compare a pass of all sessions with passes of one each; close them."""
    lengths = [session.length for session in sessions]
    fed = [lab.ids(1 + number % 5, seed=50 + number) for number in range(len(sessions))]
    alone = [session.feed(ids) for session, ids in zip(sessions, fed, strict=True)]
    for session, length in zip(sessions, lengths, strict=True):
        session.length = length
    results = engine.run([Feed(s, ids) for s, ids in zip(sessions, fed, strict=True)])
    errors = []
    for found, expected in zip(results, alone, strict=True):
        if isinstance(found, Exception):
            raise found
        errors.append(distance(found, expected))
    lab.near(f"{name} are as alone", worst(errors), LIMIT, errors=errors)
    for session in sessions:
        session.close()


def stages(lab: Lab) -> None:
    """Divide a checkpoint of four layers into two stages and compare with all of it."""
    sizes = fewer_layers(lab.form.small, 4)
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        made = lab.build(sizes, "float32")
        with no_progress_bar():
            made.model.save_pretrained(folder)
        made.tokenizer.save_pretrained(folder)
        assert made.image_processor is not None
        made.image_processor.save_pretrained(folder)
        del made
        lab.tidy()
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        lab.figure("checkpoint_gib", size / 2**30)
        config = ModelConfig(path=folder, device=str(lab.device))
        whole = lab.engine(load(config))
        parts = [Stage(config, first, first + 2, paged=True) for first in (0, 2)]
    prompt, ids = lab.text(48), lab.ids(5, seed=1)
    session = whole.open(prompt)
    own = [part.open() for part in parts]

    def pass_on(rows: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
        states: Sequence[int] | Tensor = rows
        for part, each in zip(parts, own, strict=True):
            (states,) = part.run([StageFeed(each, states, parents=parents)])
        assert isinstance(states, Tensor)
        return states

    read, right = pass_on(prompt.ids), session.feed(prompt.ids)
    lab.near("prompt", distance(read, right), LIMIT)
    parents = [47, 48, 47, 50, 51]
    lab.near("tree", distance(pass_on(ids, parents), session.grow(ids, parents)), LIMIT)
    everybody: list[Session | StageSession] = [*own, session]
    for each in everybody:
        each.retain(51)
    lab.near("retained", distance(pass_on(ids), session.feed(ids)), LIMIT)
    for each in everybody:
        each.length = 48
    lab.near("rolled back", distance(pass_on(ids), session.feed(ids)), LIMIT)


def precision(lab: Lab) -> None:
    """Compare bfloat16 with float32 of the same weights, teacher-forced: random weights tie often.

    ``flips`` are rows whose likeliest token is not that of float32, of ``FORCED``.
    """
    loaded = lab.held(lab.form.large, "bfloat16")
    exact = lab.build(lab.form.large, "bfloat16")
    prompt = lab.shown(loaded)
    forced = lab.ids(FORCED, seed=5)
    theirs, _ = full_pass(exact, prompt, forced, FORCED)
    theirs = theirs.float()
    exact.model.float()
    right, _ = full_pass(exact, prompt, forced, FORCED)
    del exact
    lab.tidy()
    limit = distance(theirs, right)
    best = right.argmax(-1)
    top = right.topk(2).values
    lab.figure("transformers", {"error": limit, "flips": int((theirs.argmax(-1) != best).sum())})
    lab.figure("smallest_gap", float((top[:, 0] - top[:, 1]).min()))
    engine = lab.engine(loaded)
    session = engine.open(prompt)
    session.feed(prompt.ids, last=0)
    by_rows: dict[int, Tensor] = {}

    def read(rows: int) -> Tensor:
        session.length = len(prompt.ids)
        pieces = [session.feed(forced[start : start + rows]) for start in range(0, FORCED, rows)]
        return torch.cat(pieces).float()

    def compare(rows: int) -> None:
        by_rows[rows] = logits = read(rows)
        lab.near(
            f"{rows} rows: error over that of transformers",
            distance(logits, right) / limit,
            TIMES_AS_FAR,
            error=distance(logits, right),
            flips=int((logits.argmax(-1) != best).sum()),
            flips_beside_fewest=int((logits.argmax(-1) != by_rows[min(by_rows)].argmax(-1)).sum()),
        )
        lab.verdict(f"{rows} rows: the same passes round alike", torch.equal(logits, read(rows)))

    for rows in ROWS:
        lab.attempt(f"{rows} rows", partial(compare, rows))
    session.close()


def greedy(engine: Engine, prompt: EncodedPrompt, tokens: int) -> list[int]:
    """Decode so many tokens, one pass for each, which no token ends."""
    session = engine.open(prompt)
    answer = [int(session.feed(prompt.ids, last=1)[0].argmax())]
    while len(answer) < tokens:
        answer.append(int(session.feed(answer[-1:])[0].argmax()))
    session.close()
    return answer
