"""``collab-llm bench verifier``."""

from __future__ import annotations

from typing import Annotated

import typer

from collab_llm_lab.bench.hostile.command import attack_option, withstand_attacks
from collab_llm_lab.bench.options import SecondsOption, measure, numbers
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption


def bench_verifier(
    clients: Annotated[str, typer.Option(help="Numbers of robots, separated by commas.")] = (
        "1,4,16,64"
    ),
    seconds: SecondsOption = 10.0,
    hostile: Annotated[
        bool, typer.Option("--hostile", help="A few robots beside attackers instead.")
    ] = False,
    attack: Annotated[
        list[str] | None, attack_option("verifier", "With --hostile: only this one; repeat.")
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
        from collab_llm_lab.bench.hostile import verifier_server

        withstand_attacks(verifier_server.VERIFIER, attack, seconds, seed, front, json_file)
    from collab_llm_lab.bench.verifier import run_verifier

    measure(
        run_verifier,
        json_file,
        lambda results: results["output_mismatches"] == 0,
        clients=numbers(clients, "--clients", 1),
        seconds=seconds,
        seed=seed,
        plot=plot,
    )
