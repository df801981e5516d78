"""Options that several ``collab-llm bench`` commands share, and how a command ends.

Each benchmark's command stands beside it (``command.py`` or ``<name>_command.py``) and imports what
is heavy only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from collab_llm_lab.bench.harness import on_this_machine
from collab_llm_nodes.cli.output import console, read_json, write_json
from collab_llm_nodes.errors import ConfigError

if TYPE_CHECKING:  # it loads gRPC
    from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig

ServerOption = Annotated[
    str | None,
    typer.Option("--server", help="URL of a stock server to use as the target, such as a vLLM's."),
]
KindOption = Annotated[str, typer.Option(help="Of the stock server: vllm or sglang.")]
TargetOption = Annotated[
    str,
    typer.Option(
        help="Model of the stock server, by folder, hub id or shipped name; its last part is the"
        " name that the server knows, unless --served-as names another."
    ),
]
ServedAsOption = Annotated[
    str | None, typer.Option("--served-as", help="Name of the model at the stock server.")
]
DraftOption = Annotated[str, typer.Option(help="Draft model, by folder, hub id or shipped name.")]
KeyOption = Annotated[
    str, typer.Option("--api-key-file", help="File that holds the stock server's API key.")
]
UnencryptedOption = Annotated[
    bool,
    typer.Option(
        "--unencrypted",
        help="Allow http:// to other machines, which exposes prompts, pictures and key.",
    ),
]
OF_SERVERS = ("kind", "target", "served_as", "draft", "api_key_file", "unencrypted")
"""Options that have an effect only with ``--server``."""
SecondsOption = Annotated[float, typer.Option(help="Length of each measurement.", min=1.0)]
STOCK_DEADLINE_S = 120.0
"""Time limit of a round at a stock server: one on a few cores may be slow at first."""
Results = dict[str, Any]
KeepResults = Callable[..., None]
"""Write the results so far; with ``done=True``, say so and draw them."""


def part_option(parts: Sequence[str]) -> Any:
    """Return the option ``--part`` of a benchmark with these parts."""
    return typer.Option(help=f"Only this part; repeat. Parts: {', '.join(parts)}.")


def stock_target(
    url: str,
    kind: str,
    target: str,
    served_as: str | None,
    key_file: str,
    *,
    unencrypted: bool,
) -> TargetLinkConfig:
    """Return the settings of the link to a stock server; raises ConfigError."""
    from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
    from collab_llm_nodes.protocols.edge_cloud.stock.settings import OURS, TargetLinkConfig

    if kind == OURS:
        raise ConfigError(
            f"{OURS} is no stock server", field="--kind", remedy="give vllm or sglang"
        )
    return TargetLinkConfig(
        kind=kind,
        url=url,
        model=served_as or Path(target).name,
        tokenizer=target,
        token_file=key_file,
        unencrypted=unencrypted,
        link=LinkConfig(verdict_deadline_s=STOCK_DEADLINE_S),
    )


def refuse_without_effect(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options that the user has set and that would have no effect.

    Args:
        context: of the running command.
        why: such as "without --server".
        names: parameters of the command.

    Raises:
        typer.BadParameter: one of them is set.
    """
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"has no effect {why}", param_hint=option.opts[0])


def given(**options: Any) -> dict[str, Any]:
    """Return the options that the user has set."""
    return {name: value for name, value in options.items() if value is not None}


def numbers(text: str | None, option: str, least: int) -> tuple[int, ...] | None:
    """Return the numbers in ``text``, sorted, each once; None for None.

    Raises:
        typer.BadParameter: There is none, or one is too small.
    """
    if text is None:
        return None
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < least:
        raise typer.BadParameter(
            f"numbers >= {least}, separated by commas, such as 1,4,16", param_hint=option
        )
    return tuple(found)


def measure(
    run: Callable[..., Results],
    json_file: Path | None,
    succeeded: Callable[[Results], bool] = lambda results: bool(results["ok"]),
    **options: Any,
) -> NoReturn:
    """Run a benchmark, write its JSON, and exit with 0 only if it has ``succeeded``."""
    results = on_this_machine(run, console=console, **options)
    write_json(json_file, results)
    raise typer.Exit(0 if succeeded(results) else 1)


def measure_parts(
    run: Callable[..., Results],
    keep: KeepResults,
    succeeded: Callable[[Results], bool] = lambda results: bool(results["ok"]),
    **options: Any,
) -> NoReturn:
    """Run a benchmark like :func:`measure`; it writes its JSON with ``keep`` after each part."""
    results = on_this_machine(run, console=console, keep=keep, **options)
    keep(results, done=True)
    raise typer.Exit(0 if succeeded(results) else 1)


def results_keeper(
    json_file: Path | None,
    plot: Path | None,
    parts: Sequence[str] | None,
    join: Callable[[Results, Results], Results],
    draw: Callable[[Results, Path], None],
) -> KeepResults:
    """Return a function that writes results to ``json_file`` and draws them into ``plot``.

    Args:
        parts: The parts that run; None means all. With some, the file keeps its other parts.
        join: Merge new results into earlier ones.

    Raises:
        InvalidInput: The file holds something else.
    """
    earlier = read_json(json_file) if parts else {}

    def keep(found: Results, *, done: bool = False) -> None:
        known = join(earlier, found) if earlier else found
        write_json(json_file, known, report=done)
        if done and plot is not None:
            draw(known, plot)

    return keep
