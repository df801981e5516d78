"""DRAGON's cloud with the embedded model and a few documents, and devices that replay answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from collab_llm_lab.bench.dragon.material import make_house
from collab_llm_lab.bench.hostile.messages import Session
from collab_llm_lab.bench.hostile.server import Server
from collab_llm_lab.bench.verifier import Replay, Tally
from collab_llm_lab.bench.wire import Connection
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.aggregation import AggregationConfig, AggregationLaw, Party
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.models.loading import load
from collab_llm_nodes.processes import Process
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon import dragon_pb2 as pb
from collab_llm_nodes.protocols.dragon.client import CloudConfig, DragonClient
from collab_llm_nodes.protocols.dragon.device import identity_of
from collab_llm_nodes.protocols.dragon.generation import ModelSide
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.messages import Open, Target
from collab_llm_nodes.protocols.dragon.process import cloud_process, wait_for_cloud
from collab_llm_nodes.protocols.dragon.settings import DragonCloudConfig
from collab_llm_nodes.protocols.dragon.side import Side

_CONFIG = "dragon_cloud.yaml"
_DOCUMENTS, _QUESTIONS, _TOKENS = 8, 8, 24


@dataclass(frozen=True)
class CloudAnswer:
    """An answer in which the device takes over all that the cloud drafts, token by token.

    Attributes:
        opened: encoded Open.
        drafts: [tokens] that the cloud must draft.
        targets: [tokens - 1] encoded target tokens; each asks for the next draft.
    """

    opened: bytes
    drafts: tuple[int, ...]
    targets: tuple[bytes, ...]


def cloud_answer(side: Side, query: str, seed: int) -> CloudAnswer:
    """Return the answer of ``side`` to ``query``, written without a service."""
    opened = Open(
        query,
        _TOKENS,
        identity_of(side.info),
        AggregationConfig(),
        seed=seed,
        aggregate_on="device",
        max_ahead=1,
    )
    law = AggregationLaw(opened.law, side.info.vocab_size, opened.temperature, seed)
    decoder, drafts = side.decoder(query, _TOKENS), list[int]()
    while len(drafts) < _TOKENS and not (drafts and drafts[-1] in side.info.eos):
        p, log_weight = decoder.next()
        drafts.append(law.propose(p, log_weight, len(drafts), Party.CLOUD).token)
        decoder.push(drafts[-1])
    decoder.close()
    targets = [
        Target(position, token, (False, True), Party.DEVICE, False, (0.0, 0.0), 0.0, 0.0)
        for position, token in enumerate(drafts[:-1])
    ]
    encoded = (codec.encode_device(target) for target in targets)
    return CloudAnswer(codec.encode_device(opened), tuple(drafts), tuple(encoded))


class DeviceReplay(Replay):
    """A device's answer; a round is a target token (but for the first) and the cloud's draft."""

    def __init__(self, connection: Connection, answer: CloudAnswer) -> None:
        super().__init__(connection, len(answer.drafts))
        self._answer = answer

    async def begin(self) -> None:
        """Ask the question."""
        self._call = await self.stream(codec.ANSWER, self._answer.opened)

    async def round(self, number: int, tally: Tally) -> float:
        """Take over the draft before, and wait for the next one."""
        begun = time.perf_counter()
        if number:
            await self._call.write(self._answer.targets[number - 1])
        draft = await self.reply(pb.CloudMessage, "draft")
        token = sum(draft.gaps[: draft.index + 1])
        tally.mismatches += token != self._answer.drafts[number]
        return time.perf_counter() - begun


def _prepare(folder: Path, seed: int) -> tuple[dict[str, Any], Sequence[CloudAnswer]]:
    """Make the cloud's store, and have its side answer questions about it."""
    settings = yaml.safe_load(config_file(_CONFIG).read_text(encoding="utf-8"))
    settings["side"] |= {"store": str(folder / "public"), "answers": "free"}  # long answers
    config = from_mapping(DragonCloudConfig, settings)
    with Store(folder / "public", config.side.limits) as store:
        side = ModelSide(Engine(load(config.model)), store, config.side)
        index = Index(store, side.layout, side.encoder, config.side, side.caches)
        house = make_house(f"hostile {seed}", _DOCUMENTS, _QUESTIONS, side.layout.fits)
        for number, text in enumerate(house.documents):
            index.add(f"document {number}", text)
        questions = [exchange.question for exchange in house.talk]
        answers = [cloud_answer(side, query, number) for number, query in enumerate(questions)]
    return settings, [answer for answer in answers if answer.targets]  # others have no rounds


def _wait(process: Process, address: str, ca: str, token: str) -> None:
    link = CloudConfig(address=address, tls=True, tls_ca=ca, token=token)
    with DragonClient(link) as client:
        wait_for_cloud(client, process)


DRAGON = Server(
    name="dragon",
    method=codec.ANSWER,
    prepare=_prepare,
    converse=DeviceReplay,
    recorded=lambda answer: Session(answer.opened, answer.opened, answer.targets),
    start=cloud_process,
    wait=_wait,
    last_attack="long_questions",
    drain_s=DragonCloudConfig().drain_s,
)
