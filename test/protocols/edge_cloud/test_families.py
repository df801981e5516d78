"""Draft and target of different families: one tokenizer, and own rules for pictures."""

from __future__ import annotations

import pytest
from tiny_models import scene, tiny_model

from collab_llm_lab.bench.lossless.check import transformers_generate
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient

TOKENS = 16
PROMPT = Prompt("go to the red ball", (scene(0), scene(1, 150, 90)))


@pytest.mark.parametrize(
    ("draft", "target"),
    [
        ("qwen2_vl", "qwen2_5_vl"),
        ("qwen2_5_vl", "qwen3_vl"),
        ("qwen3_vl", "qwen2_vl"),
        ("smolvlm", "qwen3_vl"),
        ("qwen2_vl", "gemma3"),
        ("internvl", "smolvlm"),
    ],
)
def test_the_answer_is_the_targets_own(draft: str, target: str) -> None:
    small = Engine(tiny_model(draft, seed=1, padding=5, layers=2))
    large = Engine(tiny_model(target, padding=37, exit_layers=(1, 2)))
    rows = [e.loaded.model.get_output_embeddings().out_features for e in (small, large)]
    assert rows[0] != rows[1], "padded to different sizes"
    assert small.vocabulary == large.vocabulary
    prompts = [encode(PROMPT, engine.loaded).ids for engine in (small, large)]
    assert prompts[0] != prompts[1], "each has as many placeholders as its own features"
    expected, _ = transformers_generate(
        large.loaded, encode(PROMPT, large.loaded), SamplingConfig(), TOKENS, large.eos
    )
    with start_server(VerifierConfig(address="127.0.0.1:0"), large) as server:
        link = ClientLinkConfig(address=f"127.0.0.1:{server.port}")
        with VerifierClient(link) as client:
            runner = RemoteRunner(small, client)
            answer = runner.generate(PROMPT, SamplingConfig(), TOKENS)
            assert list(answer.tokens) == expected
            with pytest.raises(InvalidInput, match="control token"):
                runner.generate(Prompt("a <|image_pad|>", PROMPT.images), SamplingConfig(), TOKENS)
            assert list(runner.generate(PROMPT, SamplingConfig(), TOKENS).tokens) == expected
