"""``collab-llm``: the commands people type. Heavy imports happen inside the commands."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput

app = typer.Typer(
    name="collab-llm",
    help="Edge-cloud collaborative decoding for ROS 2 robots.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
train_app = typer.Typer(no_args_is_help=True, help="Train the models that ship with the package.")
eval_app = typer.Typer(no_args_is_help=True, help="Measure the shipped models.")
bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks; each writes JSON and a plot.")
check_app = typer.Typer(no_args_is_help=True, help="Checks that must hold on any machine.")
for name, sub in (
    ("train", train_app),
    ("eval", eval_app),
    ("bench", bench_app),
    ("check", check_app),
):
    app.add_typer(sub, name=name)

console = Console()


def _version(wanted: bool) -> None:
    if wanted:
        from collab_llm_nodes.protocols.edge_cloud.info import version

        console.print(f"collab-llm {version()}", highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_version
        ),
    ] = False,
) -> None:
    pass


def _writable(file: Path | None) -> Path | None:
    """Make the folder, and refuse before the work starts rather than lose its results."""
    if file is not None:
        if file.is_dir():
            raise typer.BadParameter(f"{file} is a folder; name a file")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"cannot write there: {error}") from error
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise typer.BadParameter(f"no permission to write {file}")
    return file


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write the results here as JSON.", callback=_writable),
]


def _picture(*suffixes: str) -> Callable[[Path | None], Path | None]:
    """As ``_writable``, for files whose name says of what kind they are."""

    def check(file: Path | None) -> Path | None:
        if file is not None and file.suffix not in suffixes:
            raise typer.BadParameter(f"{file} should end in {' or '.join(suffixes)}")
        return _writable(file)

    return check


PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", help="Write the plot here.", callback=_picture(".png", ".svg", ".pdf")),
]
ComputeOption = Annotated[
    float,
    typer.Option(
        help="Seconds a pass takes at least: an emulated larger model.", min=0.0, max=60.0
    ),
]
SeedOption = Annotated[  # what is made from a seed often takes the next ones as well
    int, typer.Option("--seed", help="Key of everything random.", min=0, max=2**32 - 1)
]


def _enough(samples: int) -> int:
    """Refuse fewer answers than the chi-square test of ``check lossless`` can judge.

    It asks for two tokens of four likely ones: of 16 answers one has a share of 1/16 or more, and
    is expected five times in 80.
    """
    if 0 < samples < 80:
        raise typer.BadParameter(f"{samples} are too few for the test: 80 or more, or 0 for none")
    return samples


def write_json(file: Path | None, results: dict[str, Any]) -> None:
    """Write ``results`` to ``file``, if one was asked for. Exits with 2 if that cannot be."""
    if file is None:
        return
    text = json.dumps(results, indent=2, sort_keys=True) + "\n"
    try:
        if file.exists():  # perhaps a device
            file.write_text(text, encoding="utf-8")
        else:  # at once: somebody may wait for it to appear
            building = file.with_name(f"{file.name}.part")
            building.write_text(text, encoding="utf-8")
            building.replace(file)
    except OSError as error:
        told = InvalidInput(str(error), field="--json", remedy="make room, or name another file")
        fail(told, 2)
    console.print(f"wrote {file}")


@app.command()
def demo(
    rooms: Annotated[int, typer.Option(help="Rooms to drive.", min=1, max=1000)] = 10,
    seed: SeedOption = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the results here.", callback=_writable),
    ] = Path("out/demo.json"),
    film: Annotated[
        Path, typer.Option(help="Animated GIF of the first rooms.", callback=_picture(".gif"))
    ] = Path("out/demo.gif"),
    config: Annotated[
        Path | None,
        typer.Option(
            help="ROS parameters, read after the shipped ones.", exists=True, dir_okay=False
        ),
    ] = None,
    emulated_compute_s: ComputeOption = 0.04,
    record: Annotated[
        Path | None, typer.Option(help="Record it as a bag in this folder.", file_okay=False)
    ] = None,
) -> None:
    """Drive simulated rooms through the whole system: camera, draft, verifier, motion.

    Starts the verifier and the ROS graph as processes of their own and exits with 0 only if at
    least 8 of 10 rooms end at the right thing.
    """
    from collab_llm_nodes.demo.drive import run_demo

    results = run_demo(
        rooms=rooms,
        seed=seed,
        film=film,
        params=config,
        compute_s=emulated_compute_s,
        console=console,
        record=record,
    )
    write_json(json_file, results)
    raise typer.Exit(0 if results["reached"] >= 0.8 * results["rooms"] else 1)


@app.command()
def verifier(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML with its settings: a file, or the name of a shipped one."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Target model: directory or hub id.")] = None,
    address: Annotated[str | None, typer.Option(help="host:port to listen on.")] = None,
    emulated_compute_s: ComputeOption = 0.0,
    ray: Annotated[
        bool, typer.Option("--ray", help="Several replicas, by Ray Serve (docs/cloud.md).")
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(help="Replicas, with --ray.", min=1, max=1024)
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write address, port and model here.", callback=_writable),
    ] = None,
) -> None:
    """Serve the target model (cloud side). Ends cleanly on SIGTERM.

    With neither --config nor --model: the small model of the demo, which ships with the package.
    """
    from collab_llm_nodes.transport.logs import QUIET, set_up_logging

    # Before they are imported: what they write to standard error has another form, or none.
    os.environ.setdefault("GRPC_VERBOSITY", QUIET)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from collab_llm_nodes.protocols.edge_cloud.settings import load_config

    if ray:
        from collab_llm_nodes.protocols.edge_cloud.ray_serve import serve
    else:
        from collab_llm_nodes.protocols.edge_cloud.service import serve

    unnamed = config is None and model is None
    settings = load_config(
        "verifier_embedded.yaml" if unnamed else config, model=model, address=address
    )
    set_up_logging(settings.log_format)
    if unnamed:
        logging.getLogger(__name__).warning(
            "no --model and no --config: serving %s, the small model of the demo, which knows"
            " nothing but its simulated rooms",
            settings.model.path,
        )
    if emulated_compute_s:
        settings = replace(settings, emulated_compute_s=emulated_compute_s)
    if replicas is not None:
        if not ray:
            raise typer.BadParameter("only with --ray", param_hint="--replicas")
        settings = replace(settings, ray=replace(settings.ray, replicas=replicas))

    def tell(port: int) -> None:
        host = settings.address.rpartition(":")[0]
        write_json(json_file, {"host": host, "port": port, "model": settings.model.path})

    serve(settings, tell)


@app.command()
def record(
    out: Annotated[Path, typer.Option(help="Folder for the bags.", file_okay=False)] = Path("bags"),
    storage: Annotated[str, typer.Option(help="mcap or sqlite3.")] = "mcap",
    topics: Annotated[
        list[str] | None, typer.Option("--topic", help="Instead of the usual ones; repeat.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Of the robot's nodes.")] = "",
    max_size: Annotated[
        float, typer.Option(help="Begin another bag after so many MB, uncompressed.", min=0.1)
    ] = 1000.0,
    keep: Annotated[int, typer.Option(help="Keep so many bags; 0 = all.", min=0)] = 0,
    sim_time: Annotated[bool, typer.Option(help="Take times from /clock.")] = False,
    mend: Annotated[
        Path | None,
        typer.Option(help="Do not record: make a whole bag of one that was never closed."),
    ] = None,
) -> None:
    """Record a drive until Ctrl-C or SIGTERM; `ros2 bag` and `collab-llm replay` read it."""
    if mend is not None:
        from collab_llm_nodes.replay.mend import mend as mended

        path, count = mended(mend)
        console.print(f"wrote {path}: {count} messages")
        return
    from collab_llm_nodes.nodes.recorder import Recorder
    from collab_llm_nodes.ros.program import run

    values = {
        "folder": str(out),
        "storage": storage,
        "max_size": max_size,
        "max_parts": keep,
        "use_sim_time": sim_time,
        **({"topics": topics} if topics else {}),
    }
    arguments = ["--ros-args"]
    for name, value in values.items():
        arguments += ["-p", f"{name}:={json.dumps(value)}"]
    if namespace:
        arguments += ["-r", f"__ns:=/{namespace.strip('/')}"]
    raise typer.Exit(run(Recorder, args=arguments))


@app.command()
def replay(
    bag: Annotated[Path, typer.Argument(help="A bag: its folder or its .mcap or .db3 file.")],
    model: Annotated[str, typer.Option(help="Draft model; as recorded if not given.")] = "",
    target_model: Annotated[str, typer.Option(help="Target model; as recorded if not given.")] = "",
    verifier: Annotated[str, typer.Option(help="A running verifier instead, host:port.")] = "",
    device: Annotated[str, typer.Option(help="Of the models: cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of their weights.")] = "float32",
    nodes: Annotated[bool, typer.Option("--nodes", help="Through the real ROS nodes.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="ROS parameters for --nodes, read after the recorded.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts", help="Another text is a difference, not only another action.")
    ] = False,
    speed: Annotated[
        float, typer.Option(help="Times the recorded pace at most; 0 = no limit.", min=0.0)
    ] = 0.0,
    namespace: Annotated[
        str | None, typer.Option(help="Of the robot, if the bag holds several.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Ask what was asked in a recorded drive again and compare, action by action.

    Exits with 0 if all actions are the same, 1 if one differs, 2 if it cannot be told.
    """
    from collab_llm_nodes.replay.command import run_replay
    from collab_llm_nodes.replay.replayers import Models

    try:
        models = Models(model, target_model, verifier, device, dtype)
        with told_without_ros():
            results = run_replay(
                bag,
                models,
                nodes=nodes,
                params=config,
                texts=texts,
                speed=speed,
                namespace=namespace,
                console=console,
            )
    except CollabError as error:
        fail(error, 2)
    write_json(json_file, results)
    raise typer.Exit(0 if results["same"] else 1)


@train_app.command("nav")
def train_nav(
    out: Annotated[Path, typer.Option(help="Where runs are kept; resumes from there.")] = Path(
        "runs/nav"
    ),
    hours: Annotated[
        float, typer.Option(help="Stop after this long; 0 = the whole plan.", min=0.0)
    ] = 0.0,
    seed: SeedOption = 0,
    pair: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a trained pair (`models`): only the wording stage and the exits."
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Train the embedded pair (target, draft, early-exit adapters) from seeds; resumable."""
    from collab_llm_nodes.training.trainer import train_all

    train_all(out, hours=hours, seed=seed, pair=pair)
    curves = {f.parent.name: json.loads(f.read_text("utf-8")) for f in out.glob("*/curve.json")}
    write_json(json_file, {"out": str(out), "curves": curves})


@eval_app.command("nav")
def eval_nav(
    rooms: Annotated[int, typer.Option(help="Fresh rooms to drive.", min=1)] = 200,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Closed-loop success, perception, losslessness and tau of the embedded pair."""
    from collab_llm_nodes.training.evaluate import EvalConfig, eval_nav

    found = eval_nav(EvalConfig(rooms=rooms, seed=seed))
    table = Table("figure", "measured")
    for name, value in (
        ("rooms solved, target", f"{found['target']['success_rate']:.1%}"),
        ("rooms solved, draft alone", f"{found['draft']['success_rate']:.1%}"),
        ("... asked in other trained words, target", f"{found['wording']['trained']:.1%}"),
        ("... in words never trained on, target", f"{found['wording']['held_out']:.1%}"),
        ("direction of things in view", f"{found['in_view_direction']:.3f}"),
        ('"not in view" right', f"{found['not_in_view']:.3f}"),
        ("invalid actions", str(found["invalid_actions"])),
        (
            "steps whose action differs from the target's alone",
            f"{found['action_mismatches']} of {found['steps_compared']}",
        ),
        ("tau", f"{found['tau']:.2f}"),
        ("tau on decision words", f"{found['tau_decision']:.2f}"),
    ):
        table.add_row(name, value)
    console.print(table)
    write_json(json_file, found)


@check_app.command("lossless")
def check_lossless(
    seed: SeedOption = 0,
    prompts: Annotated[int, typer.Option(help="Prompts per model pair and law.", min=1)] = 8,
    samples: Annotated[
        int,
        typer.Option(
            help="Answers per test of the rejection law, 80 or more; 0 = no such test.",
            min=0,
            callback=_enough,
        ),
    ] = 200,
    json_file: JsonOption = None,
) -> None:
    """Compare the edge-cloud path with ``transformers`` generate on the target alone.

    Greedy and seeded sampling, on generated scenes with the embedded pair and on random models of
    every supported architecture. Exits with 0 only without mismatches; near ties are counted.
    """
    from collab_llm_nodes.bench.lossless.run import check

    results = check(seed=seed, prompts=prompts, samples=samples, console=console)
    write_json(json_file, results)
    raise typer.Exit(0 if results["mismatches"] == 0 else 1)


@bench_app.command("link")
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
    from collab_llm_nodes.bench.link.report import run_link

    results = run_link(answers=answers, cuts=cuts, seed=seed, plot=plot, console=console)
    write_json(json_file, results)
    faults = ("wrong_tokens", "failed", "hangs")
    bad = sum(run[key] for run in results["runs"].values() for key in faults)
    raise typer.Exit(0 if bad == 0 else 1)


@bench_app.command("engine")
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
    from collab_llm_nodes.bench.engine import run_engine

    results = run_engine(
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


@bench_app.command("verifier")
def bench_verifier(
    clients: Annotated[str, typer.Option(help="Numbers of robots, separated by commas.")] = (
        "1,4,16,64"
    ),
    seconds: Annotated[float, typer.Option(help="Length of each measurement.", min=1.0)] = 10.0,
    hostile: Annotated[
        bool, typer.Option("--hostile", help="A few robots beside attackers instead.")
    ] = False,
    attack: Annotated[
        list[str] | None, typer.Option(help="With --hostile: only this one; repeat.")
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
    if hostile:
        from collab_llm_nodes.bench.hostile.attacks import ATTACKS
        from collab_llm_nodes.bench.hostile.report import run_hostile

        if unknown := set(attack or ()) - set(ATTACKS):
            raise typer.BadParameter(
                f"{', '.join(unknown)}; known: {', '.join(ATTACKS)}", param_hint="--attack"
            )
        results = run_hostile(
            attacks=attack or list(ATTACKS),
            seconds=seconds,
            seed=seed,
            front=front,
            console=console,
        )
        write_json(json_file, results)
        raise typer.Exit(0 if results["ok"] else 1)
    from collab_llm_nodes.bench.verifier import run_verifier

    try:
        counts = [int(count) for count in clients.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter("numbers >= 1, such as 1,4,16,64", param_hint="--clients")
    results = run_verifier(clients=counts, seconds=seconds, seed=seed, plot=plot, console=console)
    write_json(json_file, results)
    raise typer.Exit(0 if results["output_mismatches"] == 0 else 1)


@bench_app.command("edge-cloud")
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
    from collab_llm_nodes.bench.edge_cloud import run_edge_cloud

    results = run_edge_cloud(
        answers=answers, seed=seed, ablations=ablations, plot=plot, console=console
    )
    write_json(json_file, results)
    raise typer.Exit(0 if results["output_mismatches"] == 0 else 1)


@bench_app.command("ros")
def bench_ros(
    answers: Annotated[int, typer.Option(help="Answers per mode and verifier.", min=1)] = 60,
    rounds: Annotated[
        int, typer.Option(help="Rounds to watch for growth; 0: without.", min=0)
    ] = 10000,
    seed: SeedOption = 3,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """The graph in five processes against the same loop without ROS: time added, age, growth.

    Exits with 0 only if nothing grows over the rounds watched.
    """
    from collab_llm_nodes.bench.ros import run_ros

    results = run_ros(answers=answers, rounds=rounds, seed=seed, plot=plot, console=console)
    write_json(json_file, results)
    raise typer.Exit(0 if not rounds or results["growth"]["bounded"] else 1)


@bench_app.command("safety")
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
    from collab_llm_nodes.bench.safety.report import run_safety

    results = run_safety(trials=trials, soak_minutes=soak, seed=seed, plot=plot, console=console)
    write_json(json_file, results)
    raise typer.Exit(0 if results["ok"] else 1)


def fail(error: CollabError, status: int = 1) -> NoReturn:
    """Print a typed error and end with ``status``."""
    Console(stderr=True).print(f"[bold red]{error.code}[/]: {escape(str(error))}", highlight=False)
    sys.exit(status)


_OF_ROS = re.compile(r"rclpy|rosidl_\w+|ament_\w+|collab_llm|\w+_(?:msgs|interfaces|srvs)")
"""Packages that come with ROS 2, or are generated from this package's interfaces."""


@contextlib.contextmanager
def told_without_ros() -> Iterator[None]:
    """Make a typed error of ROS's absence, wherever in a command it is noticed.

    Raises:
        ConfigError: ROS 2, or the package's built interfaces, cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        if not _OF_ROS.fullmatch((error.name or "").partition(".")[0]):
            raise
        raise ConfigError(
            f"this needs ROS 2 and the package's built interfaces: {error}",
            remedy="source them, or use .venv/bin/collab-llm after `make setup`",
        ) from error


def main() -> None:
    """Entry point: typed errors become one clear line instead of a traceback."""
    # By an exception, so that nobody's child processes are left behind. (The verifier drains.)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the end is an exception now
    try:
        with told_without_ros():
            app()
    except CollabError as error:
        fail(error)


if __name__ == "__main__":
    main()
