"""Quantised workers behind Jupiter's server: their answers, and workers that do not fit."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec

import pytest
from jupiter_bed import control, folder, prompt, workers
from served_jupiter import profile, served_config

from collab_llm_lab.reference import generate
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import ConfigError, ModelError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.base import Resources
from collab_llm_nodes.protocols.jupiter.generation import answer
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig
from collab_llm_nodes.protocols.jupiter.profiler import model_facts
from collab_llm_nodes.protocols.jupiter.running import start

pytestmark = pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")
PLAIN = ModelConfig(str(folder()))
INT8 = ModelConfig(PLAIN.path, quantization="int8")


def test_quantised_workers_answer_as_the_whole_quantised_model() -> None:
    ids = prompt(30)
    eos = read_facts(INT8).eos
    right = generate(load(INT8), EncodedPrompt(tuple(ids)), SamplingConfig(), 24, eos)
    with workers(3, model=INT8) as (_, addresses):
        made = start(served_config(addresses, model=INT8), Resources())
        found = answer(made.pipeline, ids, DecodeConfig(24), control())
        chain = made.pipeline.current
        assert chain is not None
        assert sum(chain.bytes) < sum(
            model_facts(PLAIN).weight_bytes(a, b) for a, b in ((0, 1), (1, 2), (2, 4))
        )
        made.close()
    assert found.tokens == right


@pytest.mark.parametrize("quantised", ["the workers", "the server"])
def test_workers_of_another_quantisation_than_the_server_s_are_refused(quantised: str) -> None:
    here, there = (PLAIN, INT8) if quantised == "the workers" else (INT8, PLAIN)
    with workers(2, model=there) as (_, addresses):
        with pytest.raises(ConfigError, match="int8") as refused:
            start(served_config(addresses, model=here), Resources())
        assert refused.value.field == "model.quantization"
        assert f"model.quantization to {there.quantization}" in refused.value.remedy


def test_workers_of_two_quantisations_are_refused() -> None:
    with ExitStack() as stack:
        _, first = stack.enter_context(workers(1, model=PLAIN))
        _, second = stack.enter_context(workers(1, model=INT8))
        with pytest.raises(ModelError, match="float32 int8 by torchao") as refused:
            start(served_config([*first, *second], model=INT8), Resources())
        assert "the same package" in refused.value.remedy


def test_a_profile_of_another_quantisation_is_refused() -> None:
    with pytest.raises(ModelError, match="the profile is of model"):
        profile(1.0, 1.0).check_model(model_facts(INT8))
