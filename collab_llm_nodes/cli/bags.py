"""``collab-llm record``, ``replay`` and ``bag``."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import JsonOption, ending_in, refuse_given, require, writable
from collab_llm_nodes.cli.output import console, fail, requiring_ros, write_json
from collab_llm_nodes.durable import replacing
from collab_llm_nodes.errors import CollabError, InvalidInput

app = typer.Typer()
bag_app = typer.Typer(help="Read bags.", no_args_is_help=True)

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", help="Of the robot, if there are several.")
]


@app.command()
def record(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the bags.", file_okay=False)] = Path("bags"),
    storage: Annotated[str, typer.Option(help="mcap or sqlite3.")] = "mcap",
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", help="Record this topic instead of the usual ones; repeat."),
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
        refuse_given(context, context.params.keys() - {"mend"}, "leave out --mend")
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
def foxglove(
    port: Annotated[int, typer.Option(help="On this machine only; 0: any.", min=0, max=65535)] = (
        8765
    ),
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", help="Show this topic instead of the usual ones; repeat."),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Of the robot's nodes.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the port here.", callback=writable)
    ] = None,
) -> None:
    """Show a running robot live in Foxglove, until Ctrl-C or SIGTERM; the view only listens."""
    require("foxglove", "foxglove-sdk")
    from collab_llm_nodes.nodes.recorder import TOPICS
    from collab_llm_nodes.replay.foxglove_live import LiveView

    usual = (*TOPICS, "image/compressed", "markers")
    with contextlib.suppress(KeyboardInterrupt), LiveView(topics or usual, port, namespace) as view:
        console.print(f"open in Foxglove: ws://127.0.0.1:{view.port}", highlight=False)
        write_json(json_file, {"host": "127.0.0.1", "port": view.port}, report=False)
        threading.Event().wait()


@app.command()
def replay(
    context: typer.Context,
    bag: Annotated[Path, typer.Argument(help="A bag: its folder or its .mcap or .db3 file.")],
    model: Annotated[str, typer.Option(help="Draft model; as recorded if not given.")] = "",
    target_model: Annotated[str, typer.Option(help="Target model; as recorded if not given.")] = "",
    verifier: Annotated[str, typer.Option(help="A running verifier instead, host:port.")] = "",
    device: Annotated[str, typer.Option(help="Of the models: cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of their weights.")] = "float32",
    nodes: Annotated[bool, typer.Option("--nodes", help="Through the real ROS nodes.")] = False,
    config: Annotated[
        str,
        typer.Option(
            help="ROS parameters for --nodes, read after the recorded, or for --ask: a file, or"
            " the name of a shipped one."
        ),
    ] = "",
    ask: Annotated[
        str | None,
        typer.Option(help="Ask this instruction about the pictures of any bag instead."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="With --ask: topic of the pictures, if there are several.")
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(help="With --ask: a picture every so many seconds; 1 if not given.", min=0.0),
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts", help="Another text is a difference, not only another action.")
    ] = False,
    speed: Annotated[
        float, typer.Option(help="Times the recorded pace at most; 0 = no limit.", min=0.0)
    ] = 0.0,
    rerun: Annotated[
        Path | None,
        typer.Option(
            help="Ask nothing: write the bag for Rerun, .rrd.", callback=ending_in(".rrd")
        ),
    ] = None,
    namespace: NamespaceOption = None,
    json_file: JsonOption = None,
) -> None:
    """Ask what was asked in a recorded drive again and compare, action by action.

    Exits with 0 if all actions are the same, 1 if one differs, 2 if that is unknown. With --ask,
    prints the models' answers to the pictures, and the actions; exits with 0. With --rerun, writes
    pictures, path, answers and plots for the viewer Rerun.
    """
    try:
        if rerun is not None:
            used = {"bag", "rerun", "namespace"}
            refuse_given(context, context.params.keys() - used, "leave out --rerun")
            _write_rerun(bag, rerun, namespace)
            return
        from collab_llm_nodes.assets import config_file
        from collab_llm_nodes.replay.asking import Question, run_ask
        from collab_llm_nodes.replay.command import run_replay
        from collab_llm_nodes.replay.replayers import Models

        if ask is None:
            refuse_given(context, ("image", "every"), 'add --ask "instruction"')
        else:
            refuse_given(context, ("texts", "speed"), "leave out --ask")
        models = Models(model, target_model, verifier, device, dtype)
        file = Path(config) if config else None
        if file is not None and not file.is_file():
            file = config_file(config)
        with requiring_ros():
            if ask is not None:
                question = Question(
                    ask,
                    image or "",
                    1.0 if every is None else every,
                    file or config_file("embedded.yaml"),
                    namespace,
                )
                results = run_ask(bag, question, models, nodes=nodes, console=console)
                write_json(json_file, results)
                return
            results = run_replay(
                bag,
                models,
                nodes=nodes,
                params=file,
                texts=texts,
                speed=speed,
                namespace=namespace,
                console=console,
            )
    except CollabError as error:
        fail(error, 2)
    write_json(json_file, results)
    raise typer.Exit(0 if results["same"] else 1)


def _write_rerun(bag: Path, out: Path, namespace: str | None) -> None:
    require("rerun", "rerun-sdk")
    from collab_llm_nodes.replay.rerun_file import write_rerun

    count = write_rerun(bag, out, namespace)
    console.print(f"wrote {out}: {count} messages; open it with: rerun {out}")


@bag_app.command()
def log(
    folder: Annotated[Path, typer.Argument(help="A bag, or a folder with bags.")],
    out: Annotated[
        Path, typer.Option(help="Write the document here, Markdown.", callback=writable)
    ] = Path("log.md"),
    places: Annotated[
        list[str] | None,
        typer.Option("--place", help="NAME=X1,Y1,X2,Y2: a part of the map [m]; repeat."),
    ] = None,
    days: Annotated[
        float, typer.Option(help="Only of the last so many days; 0 = all.", min=0.0)
    ] = 0.0,
    namespace: NamespaceOption = None,
    json_file: JsonOption = None,
) -> None:
    """Write what bags hold in words: questions, sightings, decisions, actions, times and places."""
    from collab_llm_nodes.replay.log import Place, bags_in, write_log

    known = [Place.read(place) for place in places or ()]
    bags = bags_in(folder)
    since = int(1e9 * (time.time() - 86400 * days)) if days else 0
    try:
        with replacing(out) as part:
            part.touch(0o600)  # the words are private
            with part.open("w", encoding="utf-8") as file:
                lines, left_out = write_log(
                    bags, file, namespace=namespace, places=known, since=since
                )
    except OSError as error:
        raise InvalidInput(str(error), field="--out", remedy="name a file elsewhere") from error
    for why in left_out:
        console.print(f"left out: {why}", highlight=False)
    console.print(f"wrote {out}: {lines} lines about {len(bags) - len(left_out)} bags")
    write_json(json_file, {"lines": lines, "bags": len(bags), "left_out": left_out})
