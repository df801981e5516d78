"""A verifier whose target is held by stage workers answers as if it held the target itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from jupiter_bed import ARCHITECTURE, LAYERS, PATIENT, alone, folder, prompt, workers
from tiny_models import tiny_model, tiny_prompt

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.reference import generate
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.errors import Busy, ConfigError, InvalidInput, ProtocolError
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.prompt import EncodedPrompt, encode
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, load_engine, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.protocols.jupiter.pipeline import PipelineConfig
from collab_llm_nodes.protocols.jupiter.staged_engine import StagedEngine, StagedSession

TOKENS = 14


@contextmanager
def staged(count: int, *, lanes: int = 4, sessions: int = 4) -> Iterator[StagedEngine]:
    with workers(count) as (_, addresses):
        stages = PipelineConfig(tuple(addresses), PATIENT, lanes=lanes)
        engine = StagedEngine(ModelConfig(str(folder())), stages, sessions=sessions)
        try:
            yield engine
        finally:
            engine.close()


def fed(session: StagedSession, ids: Sequence[int], **options: Any) -> Feed:
    """Return a feed of a session that stands for an engine's own."""
    return Feed(cast(Session, session), ids, **options)


def opened(engine: StagedEngine, ids: list[int]) -> StagedSession:
    return engine.open(EncodedPrompt(tuple(ids)))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.8, seed=5, law="coupled")])
def test_a_verifier_over_stages_answers_as_one_that_holds_the_target(
    sampling: SamplingConfig,
) -> None:
    draft = tiny_model(ARCHITECTURE, layers=LAYERS, head_noise=0.3)
    with workers(3) as (_, addresses):
        config = VerifierConfig(
            address="127.0.0.1:0",
            model=ModelConfig(str(folder())),
            stages=PipelineConfig(tuple(addresses), PATIENT),
        )
        engine = load_engine(config)
        with start_server(config, engine) as server:
            link = ClientLinkConfig(address=f"127.0.0.1:{server.port}")
            with VerifierClient(link) as client:
                runner = RemoteRunner(Engine(draft), client)
                answers = [
                    runner.generate(tiny_prompt(ARCHITECTURE, seed), sampling, TOKENS).tokens
                    for seed in range(3)
                ]
        engine.close()
    target = tiny_model(ARCHITECTURE, layers=LAYERS)
    for seed, found in enumerate(answers):
        ids = encode(tiny_prompt(ARCHITECTURE, seed), target)
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
        first, second, third = (opened(engine, prompt(4)) for _ in range(3))
        second.feed([1, 2])
        found = engine.run(
            [
                fed(first, [1, 2]),
                fed(second, [engine.vocab_size]),
                fed(third, [1]),  # there are two lanes
                fed(opened(engine, prompt(4)), [1] * (engine.context + 1)),
                fed(opened(engine, prompt(4)), [1], parents=[0]),
            ]
        )
        assert isinstance(found[0], torch.Tensor)
        kinds = [type(error) for error in found[1:]]
        assert kinds == [InvalidInput, Busy, InvalidInput, InvalidInput]
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
        other = tiny_model(ARCHITECTURE, layers=2).config.path
        with pytest.raises(ConfigError, match="workers hold"):
            StagedEngine(ModelConfig(other), stages, sessions=2)
    assert not VerifierConfig().stages.workers
    assert Limits().max_sessions <= PipelineConfig().lanes
