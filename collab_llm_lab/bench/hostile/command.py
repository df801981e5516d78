"""``collab-llm bench dragon-hostile``, ``bench jupiter-hostile`` and ``verifier --hostile``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from collab_llm_lab.bench.hostile.table import ATTACKS
from collab_llm_lab.bench.options import SecondsOption, measure
from collab_llm_nodes.cli.options import JsonOption, SeedOption


def attack_option(server: str, text: str) -> Any:
    """Return the option ``--attack`` with the attacks on ``server``."""
    known = ATTACKS[server]

    def check(names: list[str] | None) -> list[str] | None:
        for name in names or ():
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise typer.BadParameter(f"{name!r} is unknown; {hint}known: {', '.join(known)}")
        return names

    return typer.Option(metavar="NAME", callback=check, help=f"{text} Names: {', '.join(known)}.")


def withstand_attacks(
    server: Any,
    attacks: Sequence[str] | None,
    seconds: float,
    seed: int,
    front: bool,
    json_file: Path | None,
) -> NoReturn:
    """Measure ``server`` under ``attacks``, default all; exit with 0 if it meets its goals."""
    from collab_llm_lab.bench.hostile.report import run_hostile

    measure(
        run_hostile,
        json_file,
        server=server,
        attacks=list(attacks or ATTACKS[server.name]),
        seconds=seconds,
        seed=seed,
        front=front,
    )


def bench_dragon_hostile(
    attack: Annotated[list[str] | None, attack_option("dragon", "Only this one; repeat.")] = None,
    seconds: SecondsOption = 10.0,
    front: Annotated[bool, typer.Option("--front", help="HAProxy before the cloud.")] = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """DRAGON's cloud with a few devices beside attackers.

    Exits with 0 only if the devices' waits, the cloud's memory, log and end stay within goals.
    """
    from collab_llm_lab.bench.hostile.dragon_server import DRAGON

    withstand_attacks(DRAGON, attack, seconds, seed, front, json_file)


def bench_jupiter_hostile(
    attack: Annotated[list[str] | None, attack_option("jupiter", "Only this one; repeat.")] = None,
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

    withstand_attacks(JUPITER, attack, seconds, seed, front, json_file)
