"""Minion and MinionS over real models: in this process, and behind a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from minions_world import final
from served_minions import HONEST, PAGES, ScriptedChat, asked, figures, in_turn, pages
from tiny_models import tiny_folder
from transformers_server import Served, transformers_server

from collab_llm_nodes.chat.batch import BatchConfig
from collab_llm_nodes.chat.in_process import InProcessConfig
from collab_llm_nodes.chat.remote import RemoteConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    NotFound,
)
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.base import Control, Progress, Resources
from collab_llm_nodes.protocols.minions.equipment import Equipment
from collab_llm_nodes.protocols.minions.metrics import MinionsMetrics
from collab_llm_nodes.protocols.minions.running import MINIONS, MinionsRunning
from collab_llm_nodes.protocols.minions.sandbox.limits import SandboxLimits
from collab_llm_nodes.protocols.minions.served import SERVER, ChatModelConfig, ServedMinions
from collab_llm_nodes.protocols.minions.settings import LocalConfig
from collab_llm_nodes.protocols.minions.settings import RemoteConfig as AskingConfig

SHORT = "The kettle weighs 7 kg."


def tiny() -> ServedMinions:
    """Both models in this process, the same random one; replies are short."""
    model = ChatModelConfig(model=ModelConfig(str(tiny_folder("llama"))))
    return ServedMinions(
        local_model=model,
        remote_model=model,
        planner="plan",
        remote=AskingConfig(max_tokens=8),
        local=LocalConfig(temperature=0.0, max_tokens=8),
        limits=SandboxLimits(run_s=30, wall_s=60),
    )


def ignore(progress: Progress) -> None:
    """Ignore the progress."""


@pytest.fixture(scope="module")
def embedded() -> Iterator[MinionsRunning]:
    running = registry.find("minions").start(tiny(), Resources())
    assert isinstance(running, MinionsRunning)
    yield running
    running.close()


def in_time() -> Control:
    return Control(time.monotonic() + 100)


def test_both_models_in_this_process_read_the_same_words(embedded: MinionsRunning) -> None:
    texts = []
    for way, role in (("remote_only", "remote"), ("local_only", "local")):
        request = asked(replace(tiny(), way=way), documents=(Document("a", SHORT),))
        answer = embedded.run(request, ignore, in_time())
        assert answer.error is None
        texts.append(answer.text)
        assert figures(answer)[f"{role}_decode_tokens"] == 8
        assert answer.metrics.bytes_up == 0, "nothing has left this machine"
    assert texts[0] == texts[1] != ""


def test_a_remote_with_too_short_a_context_is_named(embedded: MinionsRunning) -> None:
    answer = embedded.run(asked(tiny()), ignore, in_time())
    assert isinstance(answer.error, InvalidInput)
    assert answer.error.field == "prompt"
    assert figures(answer)["replies_failed"] == 1


def test_jobs_on_one_chunk_share_its_prefix() -> None:
    program = HONEST.replace("'Extract the weight.'", "t").replace(
        "for c in", "for t in ('Extract the weight.', 'Extract the song.') for c in"
    )

    def spent(kept_tokens: int) -> tuple[float, float]:
        remote = ScriptedChat("far", in_turn(program, final("7 kg")))
        limits = InProcessConfig(BatchConfig(kept_tokens=kept_tokens))
        config = replace(tiny(), local_model=replace(tiny().local_model, limits=limits))
        running = MinionsRunning(MINIONS, Equipment(config, Resources(), remote=remote))
        try:
            request = asked(
                replace(tiny(), planner="program"), documents=(Document("a", pages(3)),)
            )
            values = figures(running.run(request, ignore, in_time()))
        finally:
            running.close()
        assert values["jobs.1"] == 6
        return values["local_prefill_tokens"], values["local_cached_tokens"]

    (prefilled, cached), (alone, none) = spent(32768), spent(0)
    common = 80  # tokens at least of the instruction, which stands first
    assert cached > 5 * common
    assert none == 0
    assert prefilled + cached == alone


def test_a_small_worker_in_this_process_copies_sentences() -> None:
    """Even a random one, whose outputs in another form could never be read."""
    remote = ScriptedChat("far", in_turn(HONEST, final("7 kg")))
    config = replace(tiny(), planner="program", local=LocalConfig(max_tokens=64))
    running = MinionsRunning(MINIONS, Equipment(config, Resources(), remote=remote))
    try:
        answer = running.run(asked(config), ignore, in_time())
    finally:
        running.close()
    values = figures(answer)
    assert values["kept.1"] + values["abstained.1"] == values["jobs.1"] == PAGES
    assert "repaired.1" not in values
    assert isinstance(answer.metrics, MinionsMetrics)
    texts = [job.output.answer for job in answer.metrics.jobs if job.output.answer]
    assert all(text in pages() for text in texts)


@pytest.mark.parametrize("ending", ["cancel", "deadline"])
def test_a_model_that_writes_for_ever_is_ended(
    embedded: MinionsRunning, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Engine.run

    def slow(self: Engine, *args: Any, **options: Any) -> Any:
        time.sleep(0.02)  # so that its thousand tokens of context last for 20 s
        return run(self, *args, **options)

    monkeypatch.setattr(Engine, "run", slow)
    local = LocalConfig(temperature=2.0, max_tokens=60_000)
    request = asked(
        replace(tiny(), way="local_only", local=local), documents=(Document("a", SHORT),)
    )
    control = Control(time.monotonic() + (100 if ending == "cancel" else 3.0))

    def tell(progress: Progress) -> None:
        if progress.stage == "answer" and ending == "cancel":
            threading.Timer(0.2, control.cancel).start()

    answer = embedded.run(request, tell, control)
    if ending == "cancel":
        assert isinstance(answer.error, Cancelled)
    else:  # cut off: what there was is the answer
        assert isinstance(answer.error, DeadlineExceeded)
        assert figures(answer)["replies_late"] == 1
        assert answer.text


def test_a_text_that_the_model_cannot_hold_is_named(embedded: MinionsRunning) -> None:
    long = Document("a", "weight " * 50_000)
    answer = embedded.run(
        asked(replace(tiny(), way="local_only"), documents=(long,)), ignore, in_time()
    )
    assert isinstance(answer.error, InvalidInput)
    assert answer.error.field == "document_contents[0]"


def test_a_window_lets_a_small_model_read_a_long_text() -> None:
    windowed = replace(tiny().local_model, window=100)
    config = replace(tiny(), local_model=windowed, way="local_only")
    long = Document("a", "\n".join(f"Box {n} weighs {n} kg." for n in range(400)))
    running = MinionsRunning(MINIONS, Equipment(config, Resources()))
    try:
        answer = running.run(asked(config, documents=(long,)), ignore, in_time())
        assert isinstance(answer.error, NotFound), "each window's reply is cut off"
        assert figures(answer)["local_prefill_tokens"] > 1000, "more than the context holds"
        assert running.health()["local_jobs"] == 0, "none is under way"
    finally:
        running.close()


def test_a_planner_without_its_file_is_refused() -> None:
    config = replace(tiny(), remote_model=replace(tiny().remote_model, role="planner"))
    with pytest.raises(ModelError) as refused:
        registry.find("minions").start(config, Resources())
    assert refused.value.field == "remote_model.role"
    assert "holds no collab_llm/planner.safetensors" in str(refused.value)


@pytest.mark.parametrize("given", [{"role": "planner"}, {"window": 640}])
def test_roles_and_windows_are_for_models_in_this_process(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        ChatModelConfig(at=SERVER, **given)
    assert [refused.value.field] == list(given)


def test_a_model_that_is_not_named_is_asked_for() -> None:
    with pytest.raises(ConfigError) as refused:
        registry.find("minions").start(ServedMinions(), Resources())
    assert refused.value.field == "local_model.model.path"


def test_a_key_that_is_in_no_environment_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    server = RemoteConfig(model="m", token_variable="NO_SUCH_KEY")
    config = replace(tiny(), remote_model=ChatModelConfig(at=SERVER, server=server))
    with pytest.raises(ConfigError) as refused:
        registry.find("minions").start(config, Resources())
    assert refused.value.field == "remote_model.server.token_variable"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with transformers_server(tmp_path_factory.mktemp("serve")) as served:
        yield served


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_real_server_as_the_remote_answers_as_the_model_here(
    server: Served, embedded: MinionsRunning
) -> None:
    away = ChatModelConfig(at=SERVER, server=RemoteConfig(server.url, server.model))
    config = replace(tiny(), remote_model=away, way="remote_only")
    running = registry.find("minions").start(config, Resources())
    request = asked(config, documents=(Document("a", SHORT),))
    try:
        far = running.run(request, ignore, in_time())
        near = embedded.run(request, ignore, in_time())
    finally:
        running.close()
    assert far.error is None
    assert far.text.rstrip("\ufffd") == near.text, "the server tells half a character as well"
    names = [f"remote_{name}_tokens" for name in ("prefill", "decode")]
    assert [figures(far)[n] for n in names] == [figures(near)[n] for n in names]
    assert far.metrics.bytes_up == figures(far)["sent_bytes"] > 0
