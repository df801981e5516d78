"""``collab-llm check lossless``: the edge-cloud path over real gRPC against the target alone."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from collab_llm_lab.bench.lossless.check import Generate, check_lossless
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient


def check(*, seed: int, prompts: int, samples: int, console: Console) -> dict[str, Any]:
    """Compare on ``prompts`` generated scenes; ``samples`` answers per distribution test.

    Returns:
        ``answers``, ``tokens``, ``mismatches``, ``near_ties``, every ``difference`` and the
        p-values of the distribution tests.
    """
    set_threads(ModelConfig(path="nav-draft"), ModelConfig(path="nav-target"))
    pair = _engine("nav-draft"), _engine("nav-target", exits="beside")
    with contextlib.ExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collab_llm_")))

        def connect(draft: Engine, target: Engine) -> Generate:
            server = stack.enter_context(
                start_server(VerifierConfig(address="127.0.0.1:0"), target)
            )
            link = ClientLinkConfig(address=f"127.0.0.1:{server.port}")
            runner = RemoteRunner(draft, stack.enter_context(VerifierClient(link)))

            def generate(prompt: Prompt, sampling: SamplingConfig, limit: int) -> Sequence[int]:
                return runner.generate(prompt, sampling, limit).tokens

            return generate

        with console.status("comparing answers token for token ..."):
            report = check_lossless(
                connect,
                scene_prompts(prompts, seed),
                work_dir,
                pairs=[("embedded pair", *pair)],
                seed=seed,
                samples=samples,
            )
    for difference in report.differences:
        kind = "near tie" if difference.near_tie else "MISMATCH"
        console.print(Text.assemble((kind, "red"), f" {difference}"))
    console.print(
        f"{report.answers} answers, {report.tokens} tokens: {report.mismatches} mismatches, "
        f"{report.near_ties} near ties"
    )
    return report.as_dict()


def _engine(path: str, exits: str | None = None) -> Engine:
    return Engine(load(TargetConfig(path=path, exits=exits)))
