"""``collab-llm bench engine``: the engine against transformers, one run, same models, same machine.

Compared variants take turns, and medians are given, so that other load of the machine meets all of
them alike. Times include everything between the encoded prompt and the last token: images, prompt,
decoding. The peer's models are loaded apart from the engine's, which rearranges weights.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from collab_llm_lab.bench.harness import medians, save_plot, subplots
from collab_llm_lab.bench.lossless.check import generate_inputs
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.random_models import random_tokenizer
from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SamplingConfig,
    previews_of,
    to_wire,
)
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.exits import SHORTLIST
from collab_llm_nodes.engine.session import Feed, OnExit, Session
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, TargetConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, encode
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob
from collab_llm_nodes.protocols.edge_cloud.drafter import MAX_SUPPORT, Drafter
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.edge_cloud.server import VerifierSession
from collab_llm_nodes.protocols.edge_cloud.settings import load_config

GAMMA = 4
MAX_TOKENS = 64
BRANCHES = (1, 2, 4, 8)
SESSIONS = (1, 4, 16)
LANES = (32, 2048)  # sessions or forks, and cached columns of each
PICTURE = 430
"""Tokens of a prompt with a picture: 391 of 640 x 480 pixels by Qwen2-VL, and a question."""
PAPER_EXITS = (1, 2, 3, 4)
RECURRENT_LAYERS = 8  # of 24 of Qwen3.5-0.8B; every fourth one attends
SAMPLED = SamplingConfig(temperature=0.8, seed=1)
PAPER_CONFIG = "verifier_qwen2_vl_7b.yaml"
Timed = Mapping[str, Callable[[], Any]]


def run_engine(
    *,
    answers: int,
    repeats: int,
    threads: Sequence[int],
    seed: int,
    paper_layers: int,
    plot: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Measure all of it for each number of threads.

    Args:
        answers: scenes per decoding comparison.
        repeats: timings per variant in the others.
        paper_layers: of the model with a vocabulary of 152k; 0 leaves it out (it needs 6 GB).

    Returns:
        ``threads.<n>`` with ``autoregressive``, ``speculation``, ``exits``, ``predraft``,
        ``drafter``, ``sessions``, ``pictures``, ``lanes``, ``forks``, ``rollbacks`` and
        ``paper_sized``; times in ms. ``lanes`` and ``forks`` once more, with the most threads.
        ``mismatches`` over all of it.
    """
    prompts = scene_prompts(answers, seed)
    results: dict[str, Any] = {"threads": {}, "gamma": GAMMA, "dtype": "float32"}
    for count in threads:
        models = _Models(count, seed)
        row: dict[str, Any] = {}
        with console.status("") as status:
            for name, measure in (
                ("autoregressive", partial(_autoregressive, models, prompts)),
                ("speculation", partial(_speculation, models, prompts)),
                ("exits", partial(_exits, models, repeats)),
                ("predraft", partial(_predraft, models, repeats, prompts[0])),
                ("drafter", partial(_drafter, models, repeats, prompts[0])),
                ("sessions", partial(_sessions, models, repeats, prompts)),
                ("pictures", partial(_pictures, models, repeats, paper_layers)),
                ("lanes", partial(_lanes, models, repeats)),
                ("forks", partial(_forks, models, repeats)),
                ("rollbacks", partial(_rollbacks, models, repeats)),
                ("paper_sized", partial(_paper_sized, models, repeats, paper_layers)),
            ):
                if name != "paper_sized" or paper_layers:
                    status.update(f"{count} threads: {name} ...")
                    row[name] = measure()
        results["threads"][str(count)] = row
    for name in ("lanes", "forks"):
        results[name] = results["threads"][str(max(threads))][name]
    results["mismatches"] = sum(
        case["mismatches"]
        for row in results["threads"].values()
        for case in (*row["autoregressive"].values(), row["speculation"])
    )
    _print(results, console)
    if plot is not None:
        _plot(results, plot)
    return results


# ---------------------------------------------------------------- decoding


def _autoregressive(models: _Models, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Measure whole answers of the embedded target, and of a random text model."""
    found = {}
    for name, make, eos in (
        ("nav_target", partial(models.shipped, "nav-target"), None),
        ("llama_12x384", models.text, frozenset[int]()),  # random models do not end by themselves
    ):
        engine, peer = Engine(make()), make()
        shown = [p if peer.sees else Prompt(p.text) for p in prompts]
        pairs = [(encode(p, engine.loaded), encode(p, peer)) for p in shown]
        found[name] = _decoding(engine, peer, pairs, engine.eos if eos is None else eos)
    return found


def _decoding(
    engine: Engine,
    peer: LoadedModel,
    pairs: Sequence[tuple[EncodedPrompt, EncodedPrompt]],
    eos: frozenset[int],
) -> dict[str, Any]:
    ours, theirs, steps = [], [], []
    tokens = mismatches = 0
    greedy(engine, pairs[0][0], eos)
    transformers_greedy(peer, pairs[0][1], eos)
    for own, other in pairs:
        started = time.perf_counter()
        answer, first_s = greedy(engine, own, eos)
        ours.append(time.perf_counter() - started)
        steps.append((ours[-1] - first_s) / max(1, len(answer) - 1))
        started = time.perf_counter()
        expected = transformers_greedy(peer, other, eos)
        theirs.append(time.perf_counter() - started)
        tokens += len(answer)
        mismatches += answer != expected
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    mean = tokens / len(pairs)
    return {
        "answers": len(pairs),
        "tokens": tokens,
        "mismatches": mismatches,
        "ours_tokens_per_s": mean / statistics.median(ours),
        "transformers_tokens_per_s": mean / statistics.median(theirs),
        "ours_ms_per_later_token": 1e3 * statistics.median(steps),
        "ratio": ratio,
    }


def greedy(engine: Engine, prompt: EncodedPrompt, eos: frozenset[int]) -> tuple[list[int], float]:
    """Decode token by token; return the answer, and the seconds until its first token."""
    started = time.perf_counter()
    session = engine.open(prompt)
    answer = [int(session.feed(prompt.ids, last=1)[0].argmax())]
    first_s = time.perf_counter() - started
    while len(answer) < MAX_TOKENS and answer[-1] not in eos:
        answer.append(int(session.feed(answer[-1:])[0].argmax()))
    session.close()
    return answer, first_s


def transformers_greedy(
    loaded: LoadedModel,
    prompt: EncodedPrompt,
    eos: frozenset[int],
    assistant: LoadedModel | None = None,
) -> list[int]:
    """Decode with ``generate`` as its documentation shows it; ``assistant`` is a draft model."""
    inputs = generate_inputs(loaded, prompt)
    if assistant is not None:
        inputs["assistant_model"] = assistant.model
    config = GenerationConfig(
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=sorted(eos) or None,
        pad_token_id=loaded.tokenizer.pad_token_id,
    )
    output = loaded.model.generate(**inputs, generation_config=config)
    answer: list[int] = output[0, len(prompt.ids) :].tolist()
    return answer


def _speculation(models: _Models, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The embedded pair in one process; both sides encode the prompt within their time.

    Early exits and pre-drafts are off: they hide a network, and here is none. The peer has its
    default schedule of draft lengths; constant ones of 4 to 20 tokens were within a few per cent.
    """
    draft, target = (Engine(models.shipped(name)) for name in ("nav-draft", "nav-target"))
    peer_draft, peer_target = (models.shipped(name) for name in ("nav-draft", "nav-target"))
    runner = InProcessRunner(draft, target, gamma=GAMMA, predraft=PreDraftConfig(0))
    times: dict[str, list[float]] = {"ours": [], "transformers": [], "ours_autoregressive": []}
    tokens = rounds = mismatches = 0
    verify_s = 0.0
    for turn, prompt in enumerate((prompts[0], *prompts)):
        started = time.perf_counter()
        answer = runner.generate(prompt, max_tokens=MAX_TOKENS)
        ended = time.perf_counter()
        expected = transformers_greedy(
            peer_target, encode(prompt, peer_target), target.eos, peer_draft
        )
        peer_ended = time.perf_counter()
        alone, _ = greedy(target, encode(prompt, target.loaded), target.eos)
        if turn == 0:
            continue  # warms up
        times["ours"].append(ended - started)
        times["transformers"].append(peer_ended - ended)
        times["ours_autoregressive"].append(time.perf_counter() - peer_ended)
        tokens += len(expected)
        rounds += answer.metrics.rounds
        verify_s += answer.metrics.verify_s
        mismatches += not list(answer.tokens) == expected == alone
    mean = tokens / len(prompts)
    session = _filled(draft, encode(prompts[0], draft.loaded))
    draft_s = medians({"feed": lambda: session.feed([9])}, 50)["feed"]
    rates = {f"{name}_tokens_per_s": mean / statistics.median(t) for name, t in times.items()}
    ratios = [b / a for a, b in zip(times["ours"], times["transformers"], strict=True)]
    return {
        **rates,
        "answers": len(prompts),
        "tokens": tokens,
        "tau": tokens / rounds,
        "mismatches": mismatches,
        "draft_ms": 1e3 * draft_s,
        "verify_ms": 1e3 * verify_s / rounds,
        "ratio": statistics.median(ratios),
    }


# ---------------------------------------------------------------- one pass


def _exits(models: _Models, repeats: int) -> dict[str, Any]:
    """A verification of gamma + 1 tokens with more and more exits, each of them previewed."""
    nav, text = models.shipped("nav-target", exits="beside"), models.text()
    text_exits = ExitAdapters(384, range(1, 12)).eval().requires_grad_(False)
    found = {}
    for name, loaded, adapters in (
        ("nav_target", nav, nav.adapters),
        ("llama_12x384", text, text_exits),
    ):
        assert adapters is not None
        layers = adapters.layers
        chosen = {
            n: layers[len(layers) // n - 1 :: len(layers) // n][:n] if n else ()
            for n in sorted({0, 2, 4, len(layers)})
        }
        verify = {}
        for n, some in chosen.items():
            fewer = adapters.restrict(some)
            engine = Engine(with_adapters(loaded, fewer))
            verify[str(n)] = _verification(engine, _any_prompt(loaded), _preview(engine))
        found[name] = {n: 1e3 * s for n, s in medians(verify, repeats).items()}
    return found


def _predraft(models: _Models, repeats: int, prompt: Prompt) -> dict[str, Any]:
    """The passes alone: continuations of ``GAMMA`` tokens, side by side in one tree.

    ``feed`` is the single chain.
    """
    engine = Engine(models.shipped("nav-draft"))
    session = _filled(engine, encode(prompt, engine.loaded))
    root = session.length - 1

    def grow(branches: int) -> Callable[[], None]:
        def draft() -> None:
            session.length = root + 1
            parents = [root] * branches
            for _ in range(GAMMA):
                first = session.columns
                session.grow([9] * branches, parents)
                parents = list(range(first, first + branches))

        return draft

    def chain() -> None:
        session.length = root + 1
        for _ in range(GAMMA):
            session.feed([9])

    timed: dict[str, Callable[[], Any]] = {str(k): grow(k) for k in BRANCHES}
    found = {k: 1e3 * s for k, s in medians({**timed, "feed": chain}, repeats).items()}
    return {"ms": found, "ratio": {k: found[k] / found["1"] for k in timed}}


def _drafter(models: _Models, repeats: int, prompt: Prompt) -> dict[str, Any]:
    """Pre-drafts of ``GAMMA`` tokens as a robot makes them: passes, laws, draws and bookkeeping."""
    engine = Engine(models.shipped("nav-draft"))
    engine.eos = frozenset()  # drafts of one length
    encoded = encode(prompt, engine.loaded)
    found = {}
    for name, sampling in (("greedy", SamplingConfig()), ("sampled", SAMPLED)):
        drafter = Drafter(engine, encoded, sampling)
        drafter.draft(DraftJob(0, (), GAMMA))

        def predraft(branches: int, drafter: Drafter = drafter) -> Callable[[], None]:
            def draft() -> None:
                drafter.advance((9,))  # no branch begins so: all are forgotten
                lines = [drafter.begin(DraftJob(1, (10 + i,), GAMMA)) for i in range(branches)]
                while unfinished := [line for line in lines if line.draft is None]:
                    drafter.step(unfinished)

            return draft

        times = medians({str(k): predraft(k) for k in BRANCHES}, repeats)
        found[name] = {
            "ms": {k: 1e3 * s for k, s in times.items()},
            "ratio": {k: s / times["1"] for k, s in times.items()},
        }
    return found


def _sessions(models: _Models, repeats: int, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """One pass over several sessions, ``GAMMA`` + 1 new tokens each, with and without exits."""
    loaded = models.shipped("nav-target", exits="beside")
    engine = Engine(loaded)
    several = list(itertools.islice(itertools.cycle(prompts), max(SESSIONS)))
    sessions = [_filled(engine, encode(p, loaded)) for p in several]
    lengths = [session.length for session in sessions]

    states = [_verifying(engine) for _ in sessions]

    def verify(count: int, exits: bool) -> Callable[[], None]:
        shown: list[Tensor] = []

        def judge(layer: int, took: Callable[[], float]) -> None:
            every = previews_of(shown, [state.sampling for state in states[: len(shown)]])
            for state, logits, seen in zip(states, shown, every, strict=False):
                state.preview(layer, logits, seen)
            shown.clear()

        def run() -> None:
            for session, length in zip(sessions, lengths, strict=True):
                session.length = length
            show = (lambda layer, logits: shown.append(logits)) if exits else None
            feeds = [Feed(session, [9] * (GAMMA + 1), show) for session in sessions[:count]]
            engine.run(feeds, after_exit=judge)

        return run

    timed = {f"{n}": verify(n, exits=False) for n in SESSIONS}
    heard = {f"{n} exits": verify(n, exits=True) for n in SESSIONS}
    found = {k: 1e3 * s for k, s in medians({**timed, **heard}, repeats).items()}
    return {
        "ms": {k: found[k] for k in timed},
        "ms_with_exits": {k: found[f"{k} exits"] for k in timed},
        "ratio": {k: found[k] / found["1"] for k in timed},
        "tokens_per_s": {k: 1e3 * int(k) * (GAMMA + 1) / found[k] for k in timed},
    }


def _pictures(models: _Models, repeats: int, paper_layers: int) -> dict[str, Any]:
    """One pass over several sessions, ``GAMMA`` + 1 new tokens each, after prompts with a picture.

    Of the embedded target, and of a model as wide as Qwen2-VL-2B. ``over_one`` is how many times as
    many tokens a second such a pass verifies as a pass of one session.
    """
    makes = {"nav_target": partial(models.shipped, "nav-target")}
    if paper_layers:
        makes["paper_sized"] = partial(models.paper_sized, paper_layers)
    found = {}
    for name, make in makes.items():
        engine = Engine(make())
        sessions = _copies(engine, max(SESSIONS))
        timed = {f"{n}": partial(_verify, engine, sessions[:n]) for n in SESSIONS}
        ms = {k: 1e3 * s for k, s in medians(timed, max(5, repeats // 5)).items()}
        found[name] = {
            "kv_mib": sessions[0].own_bytes / 2**20,
            "ms": ms,
            "over_one": {k: int(k) * ms["1"] / ms[k] for k in ms},
        }
    return found


def _copies(engine: Engine, count: int) -> list[Session]:
    """Return sessions with ``PICTURE`` columns of their own; they are read but once."""
    prompt = EncodedPrompt(tuple(10 + i % 100 for i in range(PICTURE)))
    first = engine.open(prompt)
    first.feed(prompt.ids, last=0)
    with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder:
        first.save(Path(folder) / "session")
        return [engine.restore(Path(folder) / "session") for _ in range(count)]


def _verify(engine: Engine, sessions: Sequence[Session]) -> None:
    """Verify a draft after the prompt of each session, in one pass."""
    for session in sessions:
        session.length = PICTURE
    engine.run([Feed(session, [9] * (GAMMA + 1)) for session in sessions])


def _lanes(models: _Models, repeats: int) -> dict[str, dict[str, float]]:
    """One decode step of many sessions with long contexts, over the least it has to read.

    ``read_once_ms`` is a plain sum over their keys and values and over the model's weights.
    """
    count, columns = LANES
    engine = Engine(models.text(context=columns + 1))
    sessions = [_long(engine, number) for number in range(count)]
    held = [*engine.loaded.model.parameters()]
    held += [part for session in sessions for part in session.keys_values()]

    def read_once() -> None:
        for tensor in held:
            tensor.sum()

    timed: Timed = {"step": partial(_step, engine, sessions), "read_once": read_once}
    found = medians(timed, max(5, repeats // 10))
    return {
        f"{count}x{columns}": {
            **{f"{name}_ms": 1e3 * s for name, s in found.items()},
            "over_limit": found["step"] / found["read_once"],
        }
    }


def _forks(models: _Models, repeats: int) -> dict[str, dict[str, float]]:
    """One decode step of many forks of one prefix, over that of sessions with copies of their own.

    ``together`` is one pass of all forks, ``one_by_one`` a pass for each of them, ``copies`` one
    pass of all sessions. The caches of forks hold ``forks_mb``, those of the sessions
    ``copies_mb``.
    """
    count, columns = LANES
    engine = Engine(models.text(context=columns + 1))
    prefix = _long(engine)
    forks = [prefix.fork() for _ in range(count)]
    copies = [_long(engine) for _ in range(count)]

    def one_by_one() -> None:
        for fork in forks:
            _step(engine, [fork])

    timed: Timed = {
        "together": partial(_step, engine, forks),
        "one_by_one": one_by_one,
        "copies": partial(_step, engine, copies),
    }
    found = medians(timed, max(5, repeats // 10))
    forks_bytes = prefix.shared_bytes + sum(session.own_bytes for session in (prefix, *forks))
    return {
        f"{count}x{columns}": {
            **{f"{name}_ms": 1e3 * s for name, s in found.items()},
            "over_copies": found["together"] / found["copies"],
            "over_one_by_one": found["together"] / found["one_by_one"],
            "forks_mb": forks_bytes / 1e6,
            "copies_mb": sum(session.own_bytes for session in copies) / 1e6,
        }
    }


def _rollbacks(models: _Models, repeats: int) -> dict[str, Any]:
    """Verifications by a model with recurrent states, after others that a rollback followed.

    ``1`` and ``GAMMA + 1`` are passes over as many tokens, with no rollback before them.
    ``after i`` is the latter where ``i`` tokens of the pass before stood: it reads these again.
    ``rollback`` restores the states, without a pass.
    """
    engine = Engine(models.recurrent())
    session = engine.open(EncodedPrompt(tuple(range(5, 69))))
    session.feed(session.prompt.ids, last=0)
    session.feed([9] * (GAMMA + 1), last=0)

    def verify(rolled: int, new: int) -> Callable[[], None]:
        def run() -> None:
            twin = session.fork()
            twin.length -= rolled
            if new:
                twin.feed([9] * new)

        return run

    timed = {
        "1": verify(0, 1),
        f"{GAMMA + 1}": verify(0, GAMMA + 1),
        **{f"after {i}": verify(GAMMA + 1 - i, GAMMA + 1) for i in range(1, GAMMA + 1)},
        "rollback": verify(GAMMA, 0),
    }
    found = {name: 1e3 * s for name, s in medians(timed, max(5, repeats // 5)).items()}
    return {"ms": found, "ratio": {k: found[k] / found[f"{GAMMA + 1}"] for k in found}}


def _long(engine: Engine, first: int = 0) -> Session:
    """Return a session whose cache holds the columns of ``LANES``, all of them prompt."""
    prompt = EncodedPrompt(tuple((first + i) % 100 for i in range(LANES[1])))
    session = engine.open(prompt)
    session.feed(prompt.ids, last=0)
    return session


def _step(engine: Engine, sessions: Sequence[Session]) -> None:
    """Read one token after the prompt of each session, in one pass."""
    for session in sessions:
        session.length = LANES[1]
    engine.run([Feed(session, [9]) for session in sessions])


def _paper_sized(models: _Models, repeats: int, layers: int) -> dict[str, Any]:
    """Exits of a model with Qwen2's vocabulary and width: full heads against candidates.

    ``full_heads`` and ``candidates`` are greedy, ``candidates_sampled`` is not; all with what the
    verifier makes of the logits, the outcome and its confidence. ``candidates_scored`` is without.

    ``predicted_overhead`` is the share of additional weights read: adapters, and the first exit's
    shortlist. (Attention, norms and the gathered candidates are left out: they are small.)
    """
    loaded = models.paper_sized(layers)
    hidden, prompt = loaded.model.config.hidden_size, EncodedPrompt(tuple(range(5, 69)))
    adapters = ExitAdapters(hidden, PAPER_EXITS, width=64).eval().requires_grad_(False)
    exits = with_adapters(loaded, adapters)
    candidates = load_config(PAPER_CONFIG).exit_candidates
    full, few = Engine(exits), Engine(exits, candidates=candidates)
    timed = {
        "no_exits": _verification(Engine(loaded), prompt),
        "full_heads": _verification(full, prompt, _preview(full)),
        "candidates_scored": _verification(few, prompt, lambda layer, logits: None),
        "candidates": _verification(few, prompt, _preview(few)),
        "candidates_sampled": _verification(few, prompt, _preview(few, SAMPLED)),
    }
    found = medians(timed, max(5, repeats // 5))
    head = loaded.model.config.vocab_size * hidden
    body = sum(p.numel() for p in loaded.model.model.layers.parameters())
    small = sum(p.numel() for p in adapters.parameters())
    shortlist = SHORTLIST * hidden
    return {
        "vocabulary": loaded.model.config.vocab_size,
        "hidden_size": hidden,
        "layers": layers,
        "exits": len(PAPER_EXITS),
        "candidates": candidates,
        **{f"{name}_ms": 1e3 * s for name, s in found.items()},
        "overhead": {n: found[n] / found["no_exits"] - 1 for n in found if n != "no_exits"},
        "predicted_overhead": {
            "full_heads": (len(PAPER_EXITS) * head + small) / (body + head),
            "candidates": (shortlist + small) / (body + head),
        },
    }


def _verification(
    engine: Engine, prompt: EncodedPrompt, on_exit: OnExit | None = None
) -> Callable[[], None]:
    """Measure verifications of one draft, each after another token and so with other candidates."""
    session = _filled(engine, prompt)
    length = session.length
    pending = itertools.cycle(range(10, 100))

    def verify() -> None:
        session.length = length
        session.feed([next(pending), *[9] * GAMMA], on_exit=on_exit)

    return verify


def _preview(engine: Engine, sampling: SamplingConfig = SamplingConfig()) -> OnExit:  # noqa: B008
    """Compute a session's outcome and its confidence at an exit, as a verifier does."""
    state = _verifying(engine, sampling)

    def preview(layer: int, logits: Tensor) -> None:
        state.preview(layer, logits)

    return preview


def _verifying(engine: Engine, sampling: SamplingConfig = SamplingConfig()) -> VerifierSession:  # noqa: B008
    """Return a session with a draft of ``GAMMA`` tokens under verification."""
    opened = Open("", (), sampling, MAX_TOKENS, vocabulary="")
    state = VerifierSession(opened, eos=engine.eos, vocab_size=engine.vocab_size)
    any_token = Distribution.from_dense(np.full(engine.vocab_size, 1 / engine.vocab_size))
    law = to_wire(any_token, MAX_SUPPORT)
    probs = (law,) * GAMMA if sampling.sends_probabilities else None
    state.offer(Draft(0, 0, (9,) * GAMMA, probs))
    state.begin()
    return state


def _filled(engine: Engine, prompt: EncodedPrompt) -> Session:
    """Return a session in the middle of an answer."""
    session = engine.open(prompt)
    session.feed([*prompt.ids, *range(10, 20)], last=0)
    return session


# ---------------------------------------------------------------- models


class _Models:
    """Fresh models for a number of threads, which each load sets."""

    def __init__(self, threads: int, seed: int) -> None:
        self._threads = threads
        self._seed = seed

    def shipped(self, name: str, exits: str | None = None) -> LoadedModel:
        """Load one of the embedded pair."""
        torch.set_num_threads(self._threads)
        return load(TargetConfig(path=name, exits=exits))

    def text(self, context: int = 1024) -> LoadedModel:
        """Return a random Llama-style model, 12 layers of width 384."""
        tokenizer = random_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=12,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=context,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        return self._random(LlamaForCausalLM, config, tokenizer)

    def recurrent(self) -> LoadedModel:
        """Return a random model of layers as wide as Qwen3.5-0.8B's, with a small vocabulary."""
        tokenizer = random_tokenizer()
        config = Qwen3_5TextConfig(
            vocab_size=len(tokenizer),
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=RECURRENT_LAYERS,
            num_attention_heads=8,
            num_key_value_heads=2,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            max_position_embeddings=1024,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        return self._random(Qwen3_5ForCausalLM, config, tokenizer)

    def paper_sized(self, layers: int) -> LoadedModel:
        """Return a random model with the widths and the vocabulary of Qwen2-VL-2B's decoder."""
        rows = 151_936
        words = Tokenizer(WordLevel({str(i): i for i in range(rows)}, unk_token="0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")
        config = Qwen2Config(
            vocab_size=rows,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=layers,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            eos_token_id=1,
            pad_token_id=2,
            bos_token_id=None,
        )
        return self._random(Qwen2ForCausalLM, config, tokenizer)

    def _random(self, kind: Any, config: Any, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
        torch.manual_seed(self._seed)
        torch.set_num_threads(self._threads)
        model = kind(config).eval().requires_grad_(False)
        return LoadedModel(model, tokenizer, None, None, ModelConfig(path="random"))


def with_adapters(loaded: LoadedModel, adapters: ExitAdapters) -> LoadedModel:
    """Return the same model with other exits."""
    return LoadedModel(
        loaded.model, loaded.tokenizer, loaded.image_processor, adapters, loaded.config
    )


def _any_prompt(loaded: LoadedModel) -> EncodedPrompt:
    return encode(Prompt("go to the red ball"), loaded)


# ---------------------------------------------------------------- timing and output


def _print(results: Mapping[str, Any], console: Console) -> None:
    table = Table(title="the engine against transformers, float32, medians")
    for name in ("threads", "what", "engine", "base", "ratio"):
        left = name == "what"
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    for threads, row in results["threads"].items():
        for what, ours, base, ratio in _rows(row):
            table.add_row(threads, what, ours, base, f"{ratio:.2f}")
    console.print(table)


def _rows(row: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """Return the rows of the table: name, ours, the other's, and the goal for their ratio."""
    for name, found in (*row["autoregressive"].items(), ("speculation", row["speculation"])):
        rates = (f"{found[f'{who}_tokens_per_s']:.0f}/s" for who in ("ours", "transformers"))
        yield f"tokens, {name}", *rates, found["ratio"]
    for part, what in (("predraft", "branches"), ("sessions", "sessions")):
        ms, ratio = row[part]["ms"], row[part]["ratio"]
        for n in ratio:
            yield f"{n} {what}", f"{ms[n]:.2f} ms", f"{ms['1']:.2f} ms", ratio[n]
    for name, found in row["pictures"].items():
        for n, over in found["over_one"].items():
            base = f"{found['ms']['1']:.2f} ms"
            yield f"{n} sessions with a picture, {name}", f"{found['ms'][n]:.2f} ms", base, over
    for name, found in row["lanes"].items():
        times = (f"{found[f'{what}_ms']:.0f} ms" for what in ("step", "read_once"))
        yield f"step of {name}, over one reading", *times, found["over_limit"]
    for name, found in row["forks"].items():
        for base in ("copies", "one_by_one"):
            times = (f"{found[f'{what}_ms']:.0f} ms" for what in ("together", base))
            yield f"step of {name} forks, over {base}", *times, found[f"over_{base}"]
    found = row["rollbacks"]
    for name, ms in found["ms"].items():
        base = f"{found['ms'][f'{GAMMA + 1}']:.0f} ms"
        yield f"recurrent states, {name}", f"{ms:.1f} ms", base, found["ratio"][name]
    for law, found in row["drafter"].items():
        for n, ms in found["ms"].items():
            base = f"{found['ms']['1']:.2f} ms"
            yield f"{n} pre-drafts, {law}", f"{ms:.2f} ms", base, found["ratio"][n]
    for model, by_count in row["exits"].items():
        none = by_count["0"]
        for n, ms in by_count.items():
            yield f"{n} exits, {model}", f"{ms:.2f} ms", f"{none:.2f} ms", ms / none
    if paper := row.get("paper_sized"):
        none = paper["no_exits_ms"]
        for name, over in paper["overhead"].items():
            yield (
                f"152k tokens, {name}",
                f"{paper[f'{name}_ms']:.0f} ms",
                f"{none:.0f} ms",
                1 + over,
            )


def _plot(results: Mapping[str, Any], file: Path) -> None:
    figure, axes = subplots(1, 4, figsize=(15, 3.6))
    for number, (threads, row) in enumerate(results["threads"].items()):
        compared = {**row["autoregressive"], "speculation": row["speculation"]}
        places = [i + 0.4 * number for i in range(len(compared))]
        label = f"{threads} threads"
        axes[0].bar(places, [c["ratio"] for c in compared.values()], 0.38, label=label)
        axes[0].set_xticks(range(len(compared)), list(compared), fontsize=7)
        for axis, found, name in (
            *((axes[1], found, f"{law}, {label}") for law, found in row["drafter"].items()),
            (axes[2], row["sessions"], label),
        ):
            ratio = found["ratio"]
            axis.plot([int(k) for k in ratio], list(ratio.values()), "o-", label=name)
        for model, by_count in row["exits"].items():
            over = [ms / by_count["0"] for ms in by_count.values()]
            axes[3].plot([int(n) for n in by_count], over, "o-", label=f"{model}, {label}")
    for axis, title, x in zip(
        axes,
        ("times as fast as transformers", "time / one branch", "time / one session", "time / none"),
        ("", "branches pre-drafted together", "sessions in a pass", "exits of a verification"),
        strict=True,
    ):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(x, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)
    save_plot(figure, file)
