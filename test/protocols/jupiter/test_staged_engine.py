"""A verifier whose target is held by stage workers answers as if it held the target itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from jupiter_bed import ARCHITECTURE, LAYERS, PATIENT, alone, folder, prompt, workers
from tiny_models import VISION, tiny_folder, tiny_model, tiny_prompt

from collab_llm_lab.reference import generate
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.errors import Busy, ConfigError, InvalidInput, ModelError, ProtocolError
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.prompt import EncodedPrompt, encode
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, load_engine, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.protocols.jupiter import staged_engine
from collab_llm_nodes.protocols.jupiter.pipeline import PipelineConfig
from collab_llm_nodes.protocols.jupiter.staged_engine import StagedEngine, StagedSession
from collab_llm_nodes.serving.scheduler import BatchConfig

TOKENS = 14


@contextmanager
def staged(
    count: int, *, lanes: int = 4, sessions: int = 4, model: Path | None = None
) -> Iterator[StagedEngine]:
    config = ModelConfig(str(model or folder()))
    with workers(count, model=config) as (_, addresses):
        stages = PipelineConfig(tuple(addresses), PATIENT, lanes=lanes)
        engine = StagedEngine(config, stages, sessions=sessions)
        try:
            yield engine
        finally:
            engine.close()


def fed(session: StagedSession, ids: Sequence[int], **options: Any) -> Feed:
    """Return a feed of a session that stands for an engine's own."""
    return Feed(cast(Session, session), ids, **options)


def opened(engine: StagedEngine, ids: list[int]) -> StagedSession:
    return engine.open(EncodedPrompt(tuple(ids)))


@pytest.mark.parametrize("architecture", [ARCHITECTURE, *VISION])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.8, seed=5, law="coupled")])
def test_a_verifier_over_stages_answers_as_one_that_holds_the_target(
    sampling: SamplingConfig, architecture: str
) -> None:
    draft = tiny_model(architecture, layers=LAYERS, head_noise=0.3)
    model = ModelConfig(str(tiny_folder(architecture, layers=LAYERS)))
    with workers(3, model=model) as (_, addresses):
        config = VerifierConfig(
            address="127.0.0.1:0",
            model=model,
            stages=PipelineConfig(tuple(addresses), PATIENT),
            batch=BatchConfig(prefill_tokens=16),  # a prompt comes in pieces that cut its picture
        )
        engine = load_engine(config)
        with start_server(config, engine) as server:
            link = ClientLinkConfig(address=f"127.0.0.1:{server.port}")
            with VerifierClient(link) as client:
                runner = RemoteRunner(Engine(draft), client)
                answers = [
                    runner.generate(tiny_prompt(architecture, seed), sampling, TOKENS).tokens
                    for seed in range(3)
                ]
        engine.close()
    target = tiny_model(architecture, layers=LAYERS)
    for seed, found in enumerate(answers):
        ids = encode(tiny_prompt(architecture, seed), target)
        assert list(found) == generate(target, ids, sampling, TOKENS, Engine(target).eos)


def test_logits_are_those_of_the_whole_model_also_behind_a_rollback() -> None:
    whole = Engine(tiny_model(ARCHITECTURE, layers=LAYERS))
    texts = [prompt(12, seed) for seed in range(3)]
    with staged(2) as engine:
        mine = [opened(engine, text) for text in texts]
        theirs = [whole.open(EncodedPrompt(tuple(text))) for text in texts]
        for round_ in range(3):
            feeds = [text if not round_ else prompt(4, round_) for text in texts]
            found = engine.run([fed(s, ids, last=2) for s, ids in zip(mine, feeds, strict=True)])
            for other, ids, logits in zip(theirs, feeds, found, strict=True):
                assert isinstance(logits, torch.Tensor)
                torch.testing.assert_close(logits, other.feed(ids, last=2), atol=5e-5, rtol=1e-4)
            if round_:
                for ours, other in zip(mine, theirs, strict=True):
                    ours.length -= 1
                    other.length -= 1
        assert {session.length for session in mine} == {12 + 2 * (4 - 1)}


def test_sessions_with_and_without_pictures_share_a_pass() -> None:
    whole = Engine(tiny_model("qwen2_vl"))
    asked = [tiny_prompt("qwen2_vl", seed, images=seed) for seed in range(3)]
    with staged(2, model=tiny_folder("qwen2_vl")) as engine:
        prompts = [encode(each, engine.loaded) for each in asked]
        mine = [engine.open(each) for each in prompts]
        theirs = [whole.open(encode(each, whole.loaded)) for each in asked]
        for start, end in ((0, 9), (9, 30), (30, None)):
            ids = [each.ids[start:end] for each in prompts]
            found = engine.run([fed(s, i, last=1) for s, i in zip(mine, ids, strict=True) if i])
            for other, i in zip(theirs, ids, strict=True):
                if i:
                    logits = found.pop(0)
                    assert isinstance(logits, torch.Tensor)
                    torch.testing.assert_close(logits, other.feed(i, last=1), atol=5e-5, rtol=1e-4)


def test_pictures_are_fed_again_to_the_chain_that_takes_the_place_of_a_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staged_engine, "_PIECE", 8)
    model = ModelConfig(str(tiny_folder("qwen2_vl")))
    whole = Engine(tiny_model("qwen2_vl"))
    with workers(3, model=model) as (handles, addresses):
        engine = StagedEngine(model, PipelineConfig(tuple(addresses), PATIENT), sessions=4)
        asked = tiny_prompt("qwen2_vl", images=2)
        prompt_ = encode(asked, engine.loaded)
        session, other = engine.open(prompt_), whole.open(encode(asked, whole.loaded))
        session.feed([*prompt_.ids, 7], last=0)
        other.feed([*prompt_.ids, 7], last=0)
        handles[2].stop()
        found = session.feed([8, 9])
        torch.testing.assert_close(found, other.feed([8, 9]), atol=5e-5, rtol=1e-4)
        assert [loss.device for loss in engine.pipeline.losses] == [addresses[2]]
        engine.close()


def test_pictures_that_no_link_can_carry_end_their_own_session_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with staged(2, model=tiny_folder("qwen2_vl")) as engine:
        session = engine.open(encode(tiny_prompt("qwen2_vl"), engine.loaded))

        def infinite(*_: object) -> torch.Tensor:
            return torch.full((4, 32), torch.inf)

        monkeypatch.setattr(staged_engine, "encode_pictures", infinite)
        with pytest.raises(ModelError, match="not finite"):
            session.encode_images()


def test_the_head_holds_the_vision_encoder_and_the_workers_the_rest() -> None:
    model = tiny_model("qwen2_vl").model
    with staged(2, model=tiny_folder("qwen2_vl")) as engine:
        encoder = sum(p.nbytes for p in model.model.visual.parameters())
        assert engine.bytes == encoder
        held = {n for n, p in engine.loaded.model.named_parameters() if p.device.type != "meta"}
        assert {n.rpartition("visual.")[0] for n in held} == {"model."}
        chain = engine.pipeline.current
        assert chain is not None
        embedding = model.get_input_embeddings().weight.nbytes  # its twin is the LM head
        everything = sum(p.nbytes for p in model.parameters())
        assert sum(chain.bytes) == everything - encoder + embedding
        assert max(chain.bytes) < everything / 2 + embedding
    with staged(2) as engine:
        assert engine.bytes == 0


def test_a_lost_worker_changes_no_logits() -> None:
    ids = prompt(20)
    with workers(3) as (handles, addresses):
        stages = PipelineConfig(tuple(addresses), PATIENT)
        engine = StagedEngine(ModelConfig(str(folder())), stages, sessions=4)
        session, other = opened(engine, ids), opened(engine, ids[:5])
        said = [int(session.feed(ids, last=1).argmax())]
        other.feed(ids[:5], last=0)
        stopping = threading.Thread(target=handles[1].stop)
        stopping.start()
        while len(said) < 8:
            said.append(int(session.feed([said[-1]]).argmax()))
        stopping.join()
        while not engine.pipeline.losses:  # the last passes may have gone through
            session.length -= 1
            assert int(session.feed([said[-2]]).argmax()) == said[-1]
        assert said == alone(ids, 8)
        assert int(other.feed([ids[5]]).argmax()) == alone(ids[:6], 1)[0]
        engine.close()


def test_what_a_session_cannot_do_is_refused_and_disturbs_no_other() -> None:
    with staged(1, lanes=2, sessions=2) as engine:
        first, second, third = (opened(engine, []) for _ in range(3))
        second.feed([1, 2])
        found = engine.run(
            [
                fed(first, [1, 2]),
                fed(second, [engine.vocab_size]),
                fed(third, [1]),  # there are two lanes
                fed(opened(engine, []), [1] * (engine.context + 1)),
                fed(opened(engine, []), [1], parents=[0]),
                fed(opened(engine, [5, 6, 7]), [5, 6, 8]),  # not its prompt
            ]
        )
        assert isinstance(found[0], torch.Tensor)
        kinds = [type(error) for error in found[1:]]
        assert kinds == [InvalidInput, Busy, *[InvalidInput] * 3]
        with pytest.raises(ProtocolError):
            first.length = 3
        second.close()
        assert third.feed([1]).shape == (1, engine.vocab_size)
        with pytest.raises(ProtocolError):
            second.feed([1])


def test_settings_that_cannot_work_are_refused() -> None:
    with workers(1) as (_, addresses):
        stages = PipelineConfig(tuple(addresses), PATIENT, lanes=2)
        model = ModelConfig(str(folder()))
        with pytest.raises(ConfigError, match="lanes") as refused:
            StagedEngine(model, stages, sessions=3)
        assert refused.value.field == "stages.lanes"
        with pytest.raises(ConfigError, match="exits"):
            StagedEngine(ModelConfig(str(folder()), exit_layers=(1,)), stages, sessions=2)
        with pytest.raises(ConfigError, match="quantised") as refused:
            StagedEngine(ModelConfig(str(folder()), quantization="int8"), stages, sessions=2)
        assert refused.value.field == "model.quantization"
        other = tiny_model(ARCHITECTURE, layers=2).config.path
        with pytest.raises(ConfigError, match="workers hold"):
            StagedEngine(ModelConfig(other), stages, sessions=2)
    seeing = ModelConfig(str(tiny_folder("qwen2_vl")))
    with workers(1, model=seeing) as (_, addresses):
        stages = PipelineConfig(tuple(addresses), PATIENT)
        others = [
            ("model.path", "other weights", ModelConfig(str(tiny_folder("qwen2_vl", 1)))),
            ("model.dtype", "float32", replace(seeing, dtype="bfloat16")),
        ]
        for field, words, other_config in others:
            with pytest.raises(ConfigError, match=words) as refused:
                StagedEngine(other_config, stages, sessions=2)
            assert refused.value.field == field
            assert refused.value.remedy
    with pytest.raises(ConfigError, match="'nonsense' is no address") as refused:
        PipelineConfig(("127.0.0.1:1", "nonsense"))
    assert refused.value.field == "workers[1]"
    assert not VerifierConfig().stages.workers
    assert Limits().max_sessions <= PipelineConfig().lanes
