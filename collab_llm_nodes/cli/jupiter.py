"""``collab-llm jupiter``: profiles of devices, and plans made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import JsonOption, PlotOption
from collab_llm_nodes.cli.output import console

app = typer.Typer(no_args_is_help=True, help="Divide a model over several devices.")

ProfileArgument = Annotated[Path, typer.Argument(help="File of the profile.")]


@app.command("profile")
def profile(
    model: Annotated[str, typer.Option(help="Folder, hub id or name of the model.")],
    name: Annotated[str, typer.Option(help="Name of this device in plans.")],
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "float32",
    quantization: Annotated[
        str, typer.Option(help="Quantise the weights: none, int8 or int4.")
    ] = "none",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as when serving.", min=0)] = 0,
    repeats: Annotated[int, typer.Option(help="Passes of each length.", min=1)] = 5,
    memory_mb: Annotated[
        float, typer.Option(help="Memory for a stage [10^6 byte]; 0: what is free.", min=0.0)
    ] = 0.0,
    mbps: Annotated[float, typer.Option(help="Speed of its link [10^6 bit/s].")] = 1000.0,
    latency_ms: Annotated[float, typer.Option(help="Its share of a message's delay [ms].")] = 0.5,
    link: Annotated[
        str, typer.Option(help="Measure both over the link to this worker, host:port.")
    ] = "",
    token_file: Annotated[str, typer.Option(help="File that holds that worker's token.")] = "",
    tls_ca: Annotated[str, typer.Option(help="Its certificate authority (PEM).")] = "",
    json_file: JsonOption = None,
) -> None:
    """Measure this device with a model; --json adds it to the profile in that file.

    Run it on each device, with one file that you copy from one to the next.
    """
    from collab_llm_nodes.models.loading import ModelConfig
    from collab_llm_nodes.models.threads import set_threads
    from collab_llm_nodes.protocols.jupiter.link import LinkConfig
    from collab_llm_nodes.protocols.jupiter.profile import Profile
    from collab_llm_nodes.protocols.jupiter.profiler import (
        ProfilerConfig,
        measure,
        measure_link,
        model_facts,
    )

    if link:
        settings = LinkConfig(tls=bool(tls_ca), tls_ca=tls_ca, token_file=token_file)
        mbps, delay_s = measure_link(settings, link)
        latency_ms = 1e3 * delay_s / 2  # the other half is the other device's
        console.print(f"{link}: {mbps:.0f} Mbit/s, {1e3 * delay_s:.2f} ms one way", highlight=False)
    config = ProfilerConfig(
        name, repeats=repeats, memory_mb=memory_mb, mbps=mbps, latency_s=latency_ms / 1e3
    )
    chosen = ModelConfig(
        path=model, dtype=dtype, device=device, quantization=quantization, threads=threads
    )
    facts = model_facts(chosen)
    known = Profile(facts, ())
    if json_file is not None and json_file.exists():
        known = Profile.load(json_file)
    known.check_model(facts)
    set_threads(chosen)
    measured = measure(config, chosen)
    if json_file is not None:
        known.with_device(measured).save(json_file)
    console.print(
        f"{name}: {1e3 * float(measured.layer(1, 0)):.2f} ms per layer for one token,"
        f" {1e3 * float(measured.layer(128, 0)):.1f} ms for 128;"
        f" {measured.memory_bytes / 1e6:.0f} MB for a stage",
        highlight=False,
    )
    for warning in Profile(facts, (measured,)).warnings():
        console.print(f"warning: {warning}", style="yellow", highlight=False)


@app.command("plan")
def plan(
    file: ProfileArgument,
    device: Annotated[
        list[str] | None, typer.Option(help="Use this device; repeat. Default: all.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Typical prompt.", min=1)] = 256,
    answer_tokens: Annotated[int, typer.Option(help="Typical answer; 0: none.", min=0)] = 64,
    lanes: Annotated[int, typer.Option(help="Lanes that decode together.", min=1)] = 1,
    drafts: Annotated[int, typer.Option(help="Tokens drafted for a pass.", min=0)] = 5,
    accepted: Annotated[float, typer.Option(help="Tokens that a pass adds.", min=1.0)] = 2.0,
    states: Annotated[
        str, typer.Option(help="Hidden states on the wire: float32, float16 or int8.")
    ] = "float32",
    coordinator: Annotated[
        str, typer.Option(help="Device that the server runs on: it holds the vision encoder, too.")
    ] = "",
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Plan stages and sub-sequences for the devices of a profile.

    --json writes the plan, --plot the predicted timeline of the typical prompt.
    """
    from collab_llm_nodes.protocols.jupiter.gantt import describe, draw_plan
    from collab_llm_nodes.protocols.jupiter.planner import PlannerConfig
    from collab_llm_nodes.protocols.jupiter.planner import plan as make
    from collab_llm_nodes.protocols.jupiter.profile import Profile

    profile = Profile.load(file)
    profile.check_prompt(prompt_tokens)
    config = PlannerConfig(
        prompt_tokens, answer_tokens, lanes, drafts, accepted, states, coordinator
    )
    made = make(profile, config, device or None)
    console.print(describe(made), highlight=False)
    for warning in profile.warnings([part.device for part in made.placements]):
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    if json_file is not None:
        made.save(json_file)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot.write_bytes(draw_plan(made, profile))
