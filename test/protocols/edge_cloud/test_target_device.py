"""The verifier's judge on a (fake) GPU: what all sessions of a pass need comes in one copy."""

from __future__ import annotations

import pytest
import torch
from fake_device import FakeDevice
from tiny_models import tiny_folder

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import TargetConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig
from collab_llm_nodes.protocols.edge_cloud.target import TargetJudge, TargetSession

GREEDY = SamplingConfig()
LAWS = {
    "greedy": [GREEDY] * 3,
    "sampled": [SamplingConfig(0.7, top_p=0.9, law="coupled", seed=seed) for seed in range(3)],
    "mixed": [GREEDY, *(SamplingConfig(t, top_k=20, law="coupled") for t in (0.7, 1.3))],
}


@pytest.mark.parametrize("laws", LAWS.values(), ids=LAWS)
def test_verdicts_and_previews_of_a_pass_come_in_one_download(laws: list[SamplingConfig]) -> None:
    with FakeDevice() as device:
        config = TargetConfig(str(tiny_folder("qwen2")), device="cuda", exit_layers=(1,))
        engine = Engine(load(config))
        judge, sessions, feeds = TargetJudge(ExitConfig()), [], []
        shown: list[torch.Tensor] = []
        for law in laws:
            opened = Open("", (), law, 24, "")
            sessions.append(TargetSession(engine, EncodedPrompt((3, 4, 5)), opened))
            sessions[-1].prefill()
            sessions[-1].offer(Draft(0, 0, (6, 7)))
            feed = sessions[-1].begin(lambda layer, logits: shown.append(logits))
            assert feed is not None
            feeds.append(feed)
        results = [x for x in engine.run(feeds) if isinstance(x, torch.Tensor)]
        with device.watch() as ledger:
            previews = judge.preview(1, list(zip(sessions, shown, strict=True)))
        assert len(previews) == 3
        assert None not in previews
        copies = ledger.of("upload", "download")
        assert [entry.kind for entry in copies] == ["download"], ledger.show(copies)
        with device.watch() as ledger:
            findings = judge.find(list(zip(sessions, results, strict=True)))
            for session, logits, found in zip(sessions, results, findings, strict=True):
                assert session.conclude(logits, 0.0, 0.0, found).tokens
        copies = ledger.of("upload", "download")
        assert [entry.kind for entry in copies] == ["download"], ledger.show(copies)
