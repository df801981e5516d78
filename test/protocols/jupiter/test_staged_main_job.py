"""The main job with its target over stage workers: `collab-llm verifier`, pictures, real processes.

The answers to compare with are those of a verifier that holds the whole target.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import yaml
from jupiter_bed import WAIT_S

from collab_llm_lab.bench.jupiter.local_workers import LocalWorker, local_workers
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.reference import generate
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import DeadlineExceeded
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig, load
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process, wait_for_verifier
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient

TOKENS = 24
GREEDY = SamplingConfig()
LAWS = [GREEDY, SamplingConfig(0.9, seed=3, law="coupled"), SamplingConfig(0.9, seed=4)]


@cache
def draft() -> Engine:
    return Engine(load(ModelConfig("nav-draft")))


@cache
def target() -> Engine:
    return Engine(load(ModelConfig("nav-target")))


@cache
def question() -> Prompt:
    """Return what the robot asks in one of the simulator's rooms, with its camera's picture."""
    return scene_prompts(1, seed=11)[0]


def asked(
    client: VerifierClient,
    sampling: SamplingConfig,
    on_tokens: Callable[[tuple[int, ...]], None] = lambda tokens: None,
) -> Sequence[int]:
    """Return the answer of edge and cloud together."""
    runner = RemoteRunner(draft(), client)
    return runner.generate(question(), sampling, TOKENS, WAIT_S, on_tokens).tokens


@contextmanager
def verifier_over(running: Sequence[LocalWorker], file: Path) -> Iterator[VerifierClient]:
    """Run `collab-llm verifier` with its shipped settings, but for addresses and patience."""
    settings = yaml.safe_load(config_file("verifier_stages.yaml").read_text())
    settings["stages"] |= {
        "workers": [one.address for one in running],
        "link": {"silence_s": 3.0},
    }
    file.write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    with (
        verifier_process(address, config=file) as process,
        VerifierClient(ClientLinkConfig(address)) as client,
    ):
        wait_for_verifier(client, process)
        yield client


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_target_over_workers_answers_as_the_whole_one_and_goes_on_without_one_of_them(
    tmp_path: Path,
) -> None:
    config = VerifierConfig(address="127.0.0.1:0", model=TargetConfig("nav-target"))
    with start_server(config, target()) as server:
        link = ClientLinkConfig(f"127.0.0.1:{server.port}")
        with VerifierClient(link) as client:
            right = [asked(client, law) for law in LAWS]
    ids = encode(question(), target().loaded)
    for law, found in list(zip(LAWS, right, strict=True))[:2]:
        assert list(found) == generate(target().loaded, ids, law, TOKENS, target().eos)

    with (
        local_workers(2, "nav-target") as running,
        verifier_over(running, tmp_path / "verifier.yaml") as client,
    ):
        assert client.describe(WAIT_S).model == "nav-target"
        assert [asked(client, law) for law in LAWS] == right
        victims = [one.process.pid for one in running]

        def strike(tokens: tuple[int, ...]) -> None:
            if len(victims) == 2:
                os.kill(victims.pop(), signal.SIGKILL)

        assert asked(client, GREEDY, strike) == right[0]
        assert len(victims) == 1, "the other worker holds all layers now"
        assert asked(client, LAWS[1]) == right[1]
        os.kill(victims.pop(), signal.SIGKILL)
        with pytest.raises(DeadlineExceeded, match="no worker answers"):
            asked(client, GREEDY)
