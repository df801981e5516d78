"""The verifier with the embedded target, and robots that replay the embedded pair's answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from collab_llm_lab.bench.hostile.messages import Session
from collab_llm_lab.bench.hostile.server import Server
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.bench.verifier import PROMPTS, Answer, Load, Recording, record
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.processes import Process
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process, wait_for_verifier
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient


def _prepare(folder: Path, seed: int) -> tuple[dict[str, Any], Sequence[Recording]]:
    text = config_file("verifier_embedded.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text), record(scene_prompts(PROMPTS, seed))


def _start(config: Path) -> AbstractContextManager[Process]:
    address = yaml.safe_load(config.read_text(encoding="utf-8"))["address"]
    return verifier_process(address, config=config)


def _wait(process: Process, address: str, ca: str, token: str) -> None:
    link = ClientLinkConfig(address=address, tls=True, tls_ca=ca, token=token)
    with VerifierClient(link) as client:
        wait_for_verifier(client, process)


def recorded(recording: Recording) -> Session:
    """Return the messages of a recording; the cheap first one has no picture."""
    light = pb.ClientMessage.FromString(recording.opened)
    del light.open.images[:]
    drafts = [draft for draft, _ in recording.drafts]
    return Session(recording.opened, light.SerializeToString(), drafts)


VERIFIER = Server(
    name="verifier",
    method=codec.SESSION,
    prepare=_prepare,
    converse=lambda connection, recording: Answer(connection, recording, Load()),
    recorded=recorded,
    start=_start,
    wait=_wait,
    last_attack="progressive_scans",
    drain_s=VerifierConfig().drain_s,
)
