"""``collab-llm dragon-cloud`` as a process: documents of a store, one answer, SIGTERM."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from dragon_bed import QUESTION, TEXTS, config_of, engine_of, side_with
from tiny_models import tiny_folder

from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.dragon.client import CloudConfig, DragonClient
from collab_llm_nodes.protocols.dragon.device import DeviceAnswer, Question, Rules
from collab_llm_nodes.protocols.dragon.link import PatienceConfig
from collab_llm_nodes.protocols.dragon.process import cloud_process, wait_for_cloud


def test_the_cloud_runs_as_a_process(tmp_path: Path) -> None:
    folder = tmp_path / "public"
    with Store(folder) as store:
        for name in ("lamp", "pump"):
            document = Document(name, TEXTS[name])
            store.add(document, chunks(document, ChunkPlan()))
    address = f"127.0.0.1:{free_port()}"
    config = tmp_path / "cloud.yaml"
    settings = {
        "address": address,
        "token": "secret",
        "model": {"path": str(tiny_folder("llama"))},
        "side": {
            "store": str(folder),
            "retrieval": {"method": "dense", "chunks": 2, "temperature": 0.3},
        },
    }
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    device = side_with({"ball": TEXTS["ball"]}, engine_of(), config_of(documents=2))
    rules = Rules(patience=PatienceConfig(patience_s=60.0, silence_s=30.0))
    compute = ThreadPoolExecutor(1)
    with (
        cloud_process(config) as process,
        DragonClient(CloudConfig(address=address, token="secret")) as client,
    ):
        wait_for_cloud(client, process)
        info = client.describe(30.0)
        assert info.identity.vocabulary == device.info.vocabulary
        asked = DeviceAnswer(device, compute, client, rules, Question(QUESTION, 6, 1.0, 2))
        told = asked.run(lambda so_far: None, Control(), 0.0)
        assert told.metrics.unverified == 0
        assert len(told.tokens) == 6 or told.tokens[-1] in device.info.eos
        assert process.stop(60.0) < 60.0
    compute.shutdown()
    assert not any(thread.name == "dragon-answer" for thread in threading.enumerate())
