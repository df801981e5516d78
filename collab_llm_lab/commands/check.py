"""``collab-llm check``."""

from __future__ import annotations

from typing import Annotated

import typer

from collab_llm_lab.bench.options import (
    OF_SERVERS,
    DraftOption,
    KeyOption,
    KindOption,
    ServedAsOption,
    ServerOption,
    TargetOption,
    UnencryptedOption,
    refuse_without_effect,
    stock_target,
)
from collab_llm_nodes.cli.options import JsonOption, SeedOption
from collab_llm_nodes.cli.output import console, write_json

app = typer.Typer(no_args_is_help=True, help="Checks that must hold on any machine.")


def _enough(samples: int) -> int:
    """Refuse fewer answers than the chi-square test of ``check lossless`` can judge.

    It asks for two tokens of four likely ones: of 16 answers one has a share of 1/16 or more, and
    is expected five times in 80.
    """
    if 0 < samples < 80:
        raise typer.BadParameter(f"{samples} are too few for the test: 80 or more, or 0 for none")
    return samples


@app.command("lossless")
def check_lossless(
    context: typer.Context,
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
    server: ServerOption = None,
    kind: KindOption = "vllm",
    target: TargetOption = "nav-target",
    served_as: ServedAsOption = None,
    draft: DraftOption = "nav-draft",
    api_key_file: KeyOption = "",
    unencrypted: UnencryptedOption = False,
    json_file: JsonOption = None,
) -> None:
    """Compare the edge-cloud path with ``transformers`` generate on the target alone.

    Greedy and seeded sampling, on generated scenes with the embedded pair and on random models of
    every supported architecture. Exits with 0 only without mismatches; near ties are counted.
    With --server: greedy answers of that server, against those that it gives alone.
    """
    if server is not None:
        refuse_without_effect(context, "with --server", "samples")
        from collab_llm_lab.bench.lossless.server import check_server

        config = stock_target(
            server, kind, target, served_as, api_key_file, unencrypted=unencrypted
        )
        results = check_server(config, draft=draft, prompts=prompts, seed=seed, console=console)
    else:
        refuse_without_effect(context, "without --server", *OF_SERVERS)
        from collab_llm_lab.bench.lossless.run import check

        results = check(seed=seed, prompts=prompts, samples=samples, console=console)
    write_json(json_file, results)
    raise typer.Exit(0 if results["mismatches"] == 0 else 1)
