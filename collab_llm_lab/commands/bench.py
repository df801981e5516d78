"""``collab-llm bench``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from collab_llm_lab.bench.collective import PARTS as COLLECTIVE_PARTS
from collab_llm_lab.bench.collective import QUICK as COLLECTIVE_QUICK
from collab_llm_lab.bench.collective import QUICK_PARTS as COLLECTIVE_QUICK_PARTS
from collab_llm_lab.bench.collective import Sizes as CollectiveSizes
from collab_llm_lab.bench.harness import on_this_machine
from collab_llm_lab.bench.hostile import (
    ATTACK_NAMES,
    DRAGON_ATTACK_NAMES,
    JUPITER_ATTACK_NAMES,
)
from collab_llm_lab.bench.jupiter import PARTS as JUPITER_PARTS
from collab_llm_lab.bench.jupiter import QUICK, Sizes
from collab_llm_lab.bench.minions import PARTS as MINIONS_PARTS
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption
from collab_llm_nodes.cli.output import console, read_json, write_json

app = typer.Typer(no_args_is_help=True, help="Benchmarks; each writes JSON and a plot.")
SecondsOption = Annotated[float, typer.Option(help="Length of each measurement.", min=1.0)]


@app.command("link")
def bench_link(
    answers: Annotated[int, typer.Option(help="Answers per run.", min=1)] = 20,
    cuts: Annotated[int, typer.Option(help="Cuts in each run that has them.", min=1)] = 20,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Answers over an emulated bad link: cuts, loss, jitter, reordering, throttle, silence.

    Exits with 0 only if no token differs from the undisturbed answers, none fails, nothing hangs.
    """
    from collab_llm_lab.bench.link.report import run_link

    results = on_this_machine(
        run_link, answers=answers, cuts=cuts, seed=seed, plot=plot, console=console
    )
    write_json(json_file, results)
    faults = ("wrong_tokens", "failed", "hangs")
    bad = sum(run[key] for run in results["runs"].values() for key in faults)
    raise typer.Exit(0 if bad == 0 else 1)


@app.command("engine")
def bench_engine(
    answers: Annotated[int, typer.Option(help="Answers per comparison.", min=1)] = 20,
    repeats: Annotated[int, typer.Option(help="Timings per variant of a pass.", min=1)] = 100,
    threads: Annotated[
        list[int] | None, typer.Option(help="Numbers of threads; repeat.", min=1)
    ] = None,
    paper_layers: Annotated[
        int, typer.Option(help="Layers of the model with 152k tokens (3 GB); 0: without.", min=0)
    ] = 6,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """The engine against transformers: decoding, speculation, early exits, pre-drafts, batches.

    Exits with 0 only if both give the same answers.
    """
    from collab_llm_lab.bench.engine import run_engine

    results = on_this_machine(
        run_engine,
        answers=answers,
        repeats=repeats,
        threads=threads or (1, 2),
        seed=seed,
        paper_layers=paper_layers,
        plot=plot,
        console=console,
    )
    write_json(json_file, results)
    raise typer.Exit(0 if results["mismatches"] == 0 else 1)


@app.command("engine-host")
def bench_engine_host(
    repeats: Annotated[int, typer.Option(help="Rounds per law.", min=1)] = 50,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """A round's time on the host beside its forward passes, with 151,936 tokens."""
    from collab_llm_lab.bench.engine_host import run_engine_host

    results = on_this_machine(run_engine_host, repeats=repeats, plot=plot, console=console)
    write_json(json_file, results)


def _known_attacks(
    known: tuple[str, ...],
) -> Callable[[list[str] | None], list[str] | None]:
    """Return a check that all names given are ``known``; it raises ``typer.BadParameter``.

    The message tells the nearest and all known ones.
    """

    def check(names: list[str] | None) -> list[str] | None:
        for name in names or ():
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise typer.BadParameter(f"{name!r} is unknown; {hint}known: {', '.join(known)}")
        return names

    return check


def _withstand(
    server: Any, attacks: list[str], seconds: float, seed: int, front: bool, json_file: Path | None
) -> NoReturn:
    """Measure ``server`` under ``attacks``, and exit: with 0 if it stayed within its goals."""
    from collab_llm_lab.bench.hostile.report import run_hostile

    results = on_this_machine(
        run_hostile,
        server=server,
        attacks=attacks,
        seconds=seconds,
        seed=seed,
        front=front,
        console=console,
    )
    write_json(json_file, results)
    raise typer.Exit(0 if results["ok"] else 1)


@app.command("verifier")
def bench_verifier(
    clients: Annotated[str, typer.Option(help="Numbers of robots, separated by commas.")] = (
        "1,4,16,64"
    ),
    seconds: SecondsOption = 10.0,
    hostile: Annotated[
        bool, typer.Option("--hostile", help="A few robots beside attackers instead.")
    ] = False,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            callback=_known_attacks(ATTACK_NAMES),
            help=f"With --hostile: only this one; repeat. Names: {', '.join(ATTACK_NAMES)}.",
        ),
    ] = None,
    front: Annotated[
        bool, typer.Option("--front", help="With --hostile: HAProxy before the verifier.")
    ] = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """One verifier with the embedded target, many robots that replay recorded drafts.

    Exits with 0 only if every verdict is the one that a session alone gets; with --hostile only if
    the robots' waits, the verifier's memory, log and end stay within their goals as well.
    """
    if not hostile and (attack or front):
        raise typer.BadParameter("only with --hostile", param_hint="--attack, --front")
    if hostile:
        from collab_llm_lab.bench.hostile.verifier_server import VERIFIER

        _withstand(VERIFIER, attack or list(ATTACK_NAMES), seconds, seed, front, json_file)
    from collab_llm_lab.bench.verifier import run_verifier

    counts = _numbers(clients, "--clients", 1)
    results = on_this_machine(
        run_verifier, clients=counts, seconds=seconds, seed=seed, plot=plot, console=console
    )
    write_json(json_file, results)
    raise typer.Exit(0 if results["output_mismatches"] == 0 else 1)


@app.command("edge-cloud")
def bench_edge_cloud(
    answers: Annotated[int, typer.Option(help="Answers per point and mode.", min=1)] = 6,
    seed: SeedOption = 5,
    ablations: Annotated[
        bool, typer.Option(help="Also gamma, workers and queues (paper 003, Figure 4, Table 7).")
    ] = True,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Every way of decoding at four operating points, emulated; predicted beside measured."""
    from collab_llm_lab.bench.edge_cloud import run_edge_cloud

    results = on_this_machine(
        run_edge_cloud, answers=answers, seed=seed, ablations=ablations, plot=plot, console=console
    )
    write_json(json_file, results)
    raise typer.Exit(0 if results["output_mismatches"] == 0 else 1)


@app.command("collective")
def bench_collective(
    part: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this part; repeat. Parts: {', '.join(COLLECTIVE_PARTS)}."),
    ] = None,
    models: Annotated[Path, typer.Option(help="Folder of the text family's models.")] = Path(
        "models"
    ),
    batches: Annotated[
        str | None, typer.Option(help="Sizes of a batch, separated by commas.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="Fewest prompts of a run.", min=1)] = None,
    per_place: Annotated[
        int | None,
        typer.Option(
            help="Fewest prompts of a run for each place of a batch: of the ladder and the lengths"
            " on the mixed stream; all else takes half of them.",
            min=1,
        ),
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Measured turns.", min=2)] = None,
    tokens: Annotated[int | None, typer.Option(help="Longest answer.", min=2, max=512)] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Fixed speculation lengths to compare, separated by commas.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="All parts but the sub-domains, small.")
    ] = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Collective speculation step by step, beside trees and transformers (paper 002).

    All ways answer the same prompts, in turn. The JSON is written after each part. With --part, a
    file that is there keeps its other parts, and --plot draws them all. Exits with 0 only if every
    answer is the target's and no part has failed. With all defaults it takes hours.
    """
    from collab_llm_lab.bench.collective.plots import plot_all
    from collab_llm_lab.bench.collective.report import join, run_collective

    keep = _keeper(json_file, plot, part, join, plot_all)
    asked = {
        "batches": None if batches is None else tuple(_numbers(batches, "--batches", 1)),
        "prompts": prompts,
        "per_place": per_place,
        "repeats": repeats,
        "max_tokens": tokens,
        "lengths": None if lengths is None else tuple(_numbers(lengths, "--lengths", 0)),
    }
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    results = on_this_machine(
        run_collective,
        models=models,
        sizes=replace(COLLECTIVE_QUICK if quick else CollectiveSizes(), **given),
        seed=seed,
        keep=keep,
        console=console,
        parts=part or (COLLECTIVE_QUICK_PARTS if quick else COLLECTIVE_PARTS),
    )
    keep(results, done=True)
    raise typer.Exit(0 if results["ok"] else 1)


@app.command("jupiter")
def bench_jupiter(
    part: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this part; repeat. Parts: {', '.join(JUPITER_PARTS)}."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Text model with Medusa heads: directory or shipped name.")
    ] = "text-target",
    cases: Annotated[
        int | None,
        typer.Option(help="Small clusters to compare the planner with brute force on.", min=1),
    ] = None,
    questions: Annotated[
        int | None, typer.Option(help="Questions, decoded once in each way.", min=1)
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Questions of each category that are judged.", min=1)
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns of each prefill.", min=1)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every part, but small: to see that it runs.")
    ] = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """A model over several devices (paper 004): planner, emulated clusters, workers, quality.

    The JSON is written after each part. With --part, a file that is there keeps its other parts,
    and --plot draws them all. A part that fails is named in it, and the others go on.

    Exits with 0 only if no part fails, the planner equals brute force in all small cases, no
    prediction of an emulated run is wrong by more than 10 %, and workers give the answers of one
    device, also when some of them die.
    """
    from collab_llm_lab.bench.jupiter.plots import plot_all
    from collab_llm_lab.bench.jupiter.report import join, run_jupiter

    keep = _keeper(json_file, plot, part, join, plot_all)
    asked = {"cases": cases, "questions": questions, "samples": samples, "repeats": repeats}
    given: dict[str, Any] = {name: n for name, n in asked.items() if n is not None}
    results = on_this_machine(
        run_jupiter,
        keep=keep,
        parts=part or list(JUPITER_PARTS),
        sizes=replace(QUICK if quick else Sizes(), **given),
        model=model,
        seed=seed,
        console=console,
    )
    keep(results, done=True)
    raise typer.Exit(0 if results["ok"] else 1)


def _keeper(
    json_file: Path | None,
    plot: Path | None,
    part: list[str] | None,
    join: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]],
    draw: Callable[[dict[str, Any], Path], None],
) -> Callable[..., None]:
    """Return what writes the results of a run to ``json_file``.

    With ``done`` it says so, and draws them.

    Args:
        json_file, plot: None: nothing is written, or drawn.
        part: the parts that run; None: all. With some, the file keeps the others that it holds.
        join: takes earlier results and those found, and returns both.
        draw: takes results and the plot's file.

    Raises:
        InvalidInput: the file holds something else.
    """
    earlier = read_json(json_file) if part else {}

    def keep(found: dict[str, Any], *, done: bool = False) -> None:
        known = join(earlier, found) if earlier else found
        write_json(json_file, known, report=done)
        if done and plot is not None:
            draw(known, plot)

    return keep


def _numbers(text: str, option: str, least: int) -> list[int]:
    """Return the numbers in ``text``, sorted, each once.

    Raises:
        typer.BadParameter: there is none, or one is too small.
    """
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < least:
        raise typer.BadParameter(
            f"numbers >= {least}, separated by commas, such as 1,4,16", param_hint=option
        )
    return found


@app.command("dragon")
def bench_dragon(
    model: Annotated[str, typer.Option(help="Model of both sides: directory or hub id.")],
    rtts: Annotated[
        str, typer.Option(help="Added round trips [ms], separated by commas.")
    ] = "0,50,100,200,300",
    decode_ms: Annotated[
        tuple[float, float],
        typer.Option(help="EMULATION: a pass on device, on cloud, takes at least this time [ms]."),
    ] = (50.0, 50.0),
    mbit_s: Annotated[float, typer.Option(help="EMULATION: of the link, each way.", min=0.1)] = 5.0,
    questions: Annotated[int, typer.Option(help="Questions for each method.", min=1)] = 4,
    tokens: Annotated[int, typer.Option(help="Longest answer.", min=2, max=512)] = 20,
    documents: Annotated[int, typer.Option(help="Documents of each side.", min=1)] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="One question, two round trips, small samples.")
    ] = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """DRAGON beside its baselines: latency, scheduler, quality and privacy (paper 001).

    Exits with 0 only if all goals are met.
    """
    from collab_llm_lab.bench.dragon.latency import LatencyPlan
    from collab_llm_lab.bench.dragon.report import QUICK, Sizes, run_dragon

    found = _numbers(rtts, "--rtts", 0)
    results = on_this_machine(
        run_dragon,
        model=model,
        plan=LatencyPlan(
            rtts_ms=(found[0], found[-1]) if quick else tuple(found),
            decode_ms=decode_ms,
            questions=1 if quick else questions,
            tokens=tokens,
            mbit_s=mbit_s,
            seed=seed,
        ),
        documents=documents,
        sizes=QUICK if quick else Sizes(),
        plot=plot,
        console=console,
        keep=partial(write_json, json_file, report=False),
    )
    write_json(json_file, results)
    raise typer.Exit(0 if results["ok"] else 1)


@app.command("dragon-hostile")
def bench_dragon_hostile(
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            callback=_known_attacks(DRAGON_ATTACK_NAMES),
            help=f"Only this one; repeat. Names: {', '.join(DRAGON_ATTACK_NAMES)}.",
        ),
    ] = None,
    seconds: SecondsOption = 10.0,
    front: Annotated[bool, typer.Option("--front", help="HAProxy before the cloud.")] = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """DRAGON's cloud with a few devices beside attackers.

    Exits with 0 only if the devices' waits, the cloud's memory, log and end stay within goals.
    """
    from collab_llm_lab.bench.hostile.dragon_server import DRAGON

    _withstand(DRAGON, attack or list(DRAGON_ATTACK_NAMES), seconds, seed, front, json_file)


@app.command("jupiter-hostile")
def bench_jupiter_hostile(
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            callback=_known_attacks(JUPITER_ATTACK_NAMES),
            help=f"Only this one; repeat. Names: {', '.join(JUPITER_ATTACK_NAMES)}.",
        ),
    ] = None,
    seconds: SecondsOption = 10.0,
    front: Annotated[bool, typer.Option("--front", help="HAProxy before the worker.")] = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """A stage worker of Jupiter with its coordinator beside attackers.

    Exits with 0 only if the coordinator's waits, the worker's memory, log and end stay within
    goals.
    """
    from collab_llm_lab.bench.hostile.jupiter_server import JUPITER

    _withstand(JUPITER, attack or list(JUPITER_ATTACK_NAMES), seconds, seed, front, json_file)


@app.command("dragon-quality")
def bench_dragon_quality(
    model: Annotated[str, typer.Option(help="Model of both sides: directory or hub id.")],
    houses: Annotated[int, typer.Option(help="Talks, each about documents of its own.", min=1)] = 3,
    questions: Annotated[int, typer.Option(help="Questions of each kind.", min=1)] = 24,
    attacks: Annotated[int, typer.Option(help="Answers that are attacked.", min=1)] = 16,
    files: Annotated[
        Path | None,
        typer.Option(help="Folder of prose (.html, .md, .txt) instead of invented houses."),
    ] = None,
    encoder: Annotated[
        str, typer.Option(help="Folder of an encoder model that scores documents; with --files.")
    ] = "",
    texts: Annotated[
        int, typer.Option(help="Files that are held out and predicted; with --files.", min=1)
    ] = 4,
    room: Annotated[
        bool,
        typer.Option(
            help="Measure also in contexts with room for all documents; with --files, where it "
            "takes longer than the rest."
        ),
    ] = True,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure what documents on two sides are worth, and what an answer gives away (paper 001)."""
    if (files is None) != (not encoder):
        raise typer.BadParameter("--files and --encoder go together", param_hint="--files")
    import torch

    from collab_llm_lab.bench.dragon.answers import AnswersPlan
    from collab_llm_lab.bench.dragon.privacy import AttackPlan
    from collab_llm_lab.bench.dragon.quality import QualityPlan
    from collab_llm_lab.bench.dragon.quality_report import (
        FILES,
        FILES_UNSATURATED,
        run_files,
        run_quality,
    )
    from collab_llm_nodes.engine.engine import Engine
    from collab_llm_nodes.knowledge.text_encoder import TextEncoder, TextEncoderConfig
    from collab_llm_nodes.models.loading import ModelConfig, load

    torch.set_num_threads(threads)
    common = {
        "engine": Engine(load(ModelConfig(model))),
        "plot": plot,
        "console": console,
        "keep": partial(write_json, json_file, report=False),
    }
    if files is None:
        results = on_this_machine(
            run_quality,
            plan=QualityPlan(houses=houses, seed=seed),
            answers=AnswersPlan(questions=questions, seed=seed),
            attack=AttackPlan(houses=attacks, seed=seed),
            **common,
        )
    else:
        results = on_this_machine(
            run_files,
            folder=files,
            encoder=TextEncoder(TextEncoderConfig(encoder)),
            texts=texts,
            seed=seed,
            plans=(FILES, FILES_UNSATURATED if room else None),
            **common,
        )
    write_json(json_file, results)


@app.command("chat")
def bench_chat(
    chunks: Annotated[int, typer.Option(help="Chunks of the document.", min=1)] = 8,
    tasks: Annotated[int, typer.Option(help="Tasks on each chunk.", min=1)] = 4,
    samples: Annotated[int, typer.Option(help="Samples of each task.", min=1)] = 2,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk.", min=1)] = 600,
    reply_tokens: Annotated[int, typer.Option(help="Tokens of a reply.", min=2)] = 48,
    model: Annotated[
        str, typer.Option(help="Folder of a model; none: random weights of the text worker.")
    ] = "",
    max_batch: Annotated[int, typer.Option(help="Jobs per pass at most.", min=1)] = 32,
    prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens per pass.", min=1)] = 512,
    repeats: Annotated[int, typer.Option(help="Runs of each way.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """The jobs of MinionS on one engine: one by one, batched, with forked chunks, both.

    Exits with 0 only if all ways give the same replies.
    """
    from collab_llm_lab.bench.chat import JobsShape, run_chat

    results = on_this_machine(
        run_chat,
        shape=JobsShape(
            chunks, tasks, samples, chunk_tokens=chunk_tokens, reply_tokens=reply_tokens
        ),
        model=model,
        max_batch=max_batch,
        prefill_tokens=prefill_tokens,
        repeats=repeats,
        threads=threads,
        seed=seed,
        plot=plot,
        console=console,
    )
    write_json(json_file, results)
    raise typer.Exit(0 if results["mismatches"] == 0 else 1)


@app.command("minions")
def bench_minions(
    models: Annotated[Path, typer.Option(help="Folder of the text family's models.")] = Path(
        "models"
    ),
    questions: Annotated[
        int | None, typer.Option(help="Questions of the main table.", min=7)
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Length of its logs.", min=500)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few questions about short logs.")
    ] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this part; repeat. Parts: {', '.join(MINIONS_PARTS)}."),
    ] = None,
    pretrained: Annotated[
        Path | None,
        typer.Option(help="Folder of a model to be the worker of some questions too."),
    ] = None,
    pretrained_questions: Annotated[
        int | None, typer.Option(help="Questions that it is asked, about two logs.", min=2)
    ] = None,
    encoder: Annotated[
        Path | None,
        typer.Option(help="Folder of an encoder that finds the passages of RAG too."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps answers: a run that was ended goes on there."),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of each process.", min=1)] = 1,
    processes: Annotated[
        int, typer.Option(help="Processes that answer questions, about one log each.", min=1)
    ] = 1,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Minion, MinionS and baselines on long robot logs (paper 000): accuracy, tokens, cost.

    The JSON is written after each part. With --part, a file that is there keeps its other parts,
    and --plot draws them all.

    Exits with 0 only if no part fails and all goals are reached; with --quick if nothing leaks or
    escapes.
    """
    from collab_llm_lab.bench.minions.plots import plot_all
    from collab_llm_lab.bench.minions.report import QUICK, Sizes, join, run_minions

    keep = _keeper(json_file, plot, part, join, plot_all)
    sizes = QUICK if quick else Sizes()
    sizes = replace(
        sizes,
        questions=questions or sizes.questions,
        tokens=tokens or sizes.tokens,
        reality=pretrained_questions or sizes.reality,
    )
    results = on_this_machine(
        run_minions,
        models=models,
        sizes=sizes,
        parts=part or (),
        threads=threads,
        processes=processes,
        seed=seed,
        pretrained=pretrained,
        encoder=encoder,
        answers=answers,
        console=console,
        keep=keep,
    )
    keep(results, done=True)
    safe = ("no canary seen", "no attack escapes or hangs")
    wanted = [ok for goal, ok in results["goals"].items() if not quick or goal in safe]
    raise typer.Exit(0 if all(wanted) and not results["failed"] else 1)


@app.command("ros")
def bench_ros(
    answers: Annotated[int, typer.Option(help="Answers per mode and verifier.", min=1)] = 60,
    rounds: Annotated[
        int, typer.Option(help="Rounds to watch for growth; 0: without.", min=0)
    ] = 10000,
    standing: Annotated[
        float, typer.Option(help="Seconds to watch a graph that nobody asks anything.", min=1.0)
    ] = 30.0,
    seed: SeedOption = 3,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """The graph in six processes against the same loop without ROS: time added, age, growth; and
    what a standing graph takes of the processor.

    Exits with 0 only if nothing grows over the rounds watched.
    """
    from collab_llm_lab.bench.ros import run_ros

    results = on_this_machine(
        run_ros,
        answers=answers,
        rounds=rounds,
        standing_s=standing,
        seed=seed,
        plot=plot,
        console=console,
    )
    write_json(json_file, results)
    raise typer.Exit(0 if not rounds or results["growth"]["bounded"] else 1)


@app.command("safety")
def bench_safety(
    trials: Annotated[int, typer.Option(help="Of each fault; 0: only --soak.", min=0)] = 200,
    soak: Annotated[
        float, typer.Option(help="Minutes of driving under random faults; 0: without.", min=0.0)
    ] = 0.0,
    seed: SeedOption = 1,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time from a fault to zero velocity, with real nodes and a simulator in real time.

    Exits with 0 only if every trial is within 0.5 s and one control period, and nothing ever moved
    unasked. 200 trials take about 40 minutes.
    """
    if not trials and not soak:
        raise typer.BadParameter("0 without --soak measures nothing", param_hint="--trials")
    from collab_llm_lab.bench.safety.report import run_safety

    results = on_this_machine(
        run_safety, trials=trials, soak_minutes=soak, seed=seed, plot=plot, console=console
    )
    write_json(json_file, results)
    raise typer.Exit(0 if results["ok"] else 1)
