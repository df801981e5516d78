"""Collective speculation over tiny models: the target's own answers, however it is run."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from collective_models import (
    MAX_TOKENS,
    PROMPTS,
    alone,
    ask_all,
    config,
    drafts,
    ignore,
    in_time,
    request,
    running,
    target,
)
from waiting import wait_for

from collab_llm_lab import reference
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
)
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.base import Control, Progress, Resources
from collab_llm_nodes.protocols.collective import machine, runner
from collab_llm_nodes.protocols.collective.length import FIXED, LengthConfig
from collab_llm_nodes.protocols.collective.messages import Ask, Claim, Draw, Proposal
from collab_llm_nodes.protocols.collective.models import DraftModel, Drafts, Target
from collab_llm_nodes.protocols.collective.running import Collective
from collab_llm_nodes.protocols.collective.schedule import ScheduleConfig
from collab_llm_nodes.protocols.collective.settings import DraftsConfig
from collab_llm_nodes.protocols.collective.workers import InThread, LocalDraft

COUPLED = SamplingConfig(temperature=0.8, seed=3, law="coupled")
REJECTION = SamplingConfig(temperature=0.8, seed=3)


def small(**fields: Any) -> ScheduleConfig:
    return ScheduleConfig(**{"draft_batch": 3, "target_batch": 4, **fields})


@pytest.mark.parametrize("pipeline", ["off", "thread"])
@pytest.mark.parametrize("every_token", [False, True])
def test_a_batch_gets_the_targets_answers(pipeline: str, every_token: bool) -> None:
    made = config(pipeline=pipeline, schedule=small(vote_every_token=every_token))
    with running(made) as collective:
        answers = ask_all(collective, [request(i) for i in range(10)])
        health = collective.health()
    assert [answer.tokens for answer in answers] == [alone(prompt) for prompt in PROMPTS]
    assert [answer.text for answer in answers] == [
        target().decode(alone(prompt)) for prompt in PROMPTS
    ]
    assert all(answer.verified and answer.error is None for answer in answers)
    assert sum(answer.metrics.figures()["accepted"] for answer in answers) > 0
    assert (health["active"], health["incidents"], health["drafts_in_service"]) == (0, 0, 3)
    assert health["failure"] == ""


@pytest.mark.parametrize("s", [0, 1, 12])
def test_any_speculation_length_gives_them(s: int) -> None:
    made = config(length=LengthConfig(FIXED, initial=s))
    with running(made) as collective:
        answers = ask_all(collective, [request(i, max_tokens=5 * i + 1) for i in range(6)])
    assert [answer.tokens for answer in answers] == [
        alone(PROMPTS[i], count=5 * i + 1) for i in range(6)
    ]


def test_the_coupled_law_gives_the_targets_own_samples() -> None:
    with running(config()) as collective:
        answers = ask_all(collective, [request(i, sampling=COUPLED) for i in range(4)])
    assert [answer.tokens for answer in answers] == [alone(p, COUPLED) for p in PROMPTS[:4]]
    assert sum(answer.metrics.figures()["accepted"] for answer in answers) > 0


def test_the_shipped_pair_answers_text_as_its_target_does() -> None:
    paths = ("nav-target", "nav-draft")
    large, small_ = (Engine(load(ModelConfig(path=path))) for path in paths)
    questions = ("turn left", "go to the red ball", "stop at the blue box")
    collective = Collective(large, [small_], config(), Resources())
    asked = [request(i, turns=(Turn("user", text),)) for i, text in enumerate(questions)]
    answers = ask_all(collective, asked)
    collective.close()
    for text, answer in zip(questions, answers, strict=True):
        encoded = encode(Prompt(text), large.loaded)
        own = reference.generate(large.loaded, encoded, SamplingConfig(), MAX_TOKENS, large.eos)
        assert answer.tokens == tuple(own)


def test_sampled_answers_are_complete_and_verified() -> None:
    with running(config()) as collective:
        answers = ask_all(collective, [request(i, sampling=REJECTION) for i in range(6)])
    assert all(answer.verified and answer.error is None for answer in answers)
    assert all(len(answer.tokens) == MAX_TOKENS for answer in answers)
    assert any(a.tokens != alone(p) for a, p in zip(answers, PROMPTS, strict=False))


def test_the_papers_rule_draws_from_the_drafts() -> None:
    made = config(schedule=small(paper_faithful=True), length=LengthConfig(FIXED))
    with running(made) as collective:
        answers = ask_all(collective, [request(i, sampling=REJECTION) for i in range(4)])
        greedy = collective.run(request(5), ignore, in_time())
    assert all(answer.error is None for answer in answers)
    assert greedy.tokens == alone(PROMPTS[5]), "greedy decoding is exact under either rule"


def test_the_answer_is_emitted_as_it_grows() -> None:
    emitted: list[Progress] = []
    with running(config()) as collective:
        answer = collective.run(request(0), emitted.append, in_time())
    assert len(emitted) > 1
    for before, after in zip(emitted, emitted[1:], strict=False):
        assert after.tokens[: len(before.tokens)] == before.tokens
        assert after.share_done > before.share_done
    assert emitted[-1].tokens == answer.tokens[: len(emitted[-1].tokens)]
    assert len(answer.sources) == len(answer.ends) == len(answer.tokens)
    assert set(answer.metrics.figures()) >= {"tau", "acceptance"}


def test_cancel_keeps_what_was_verified_and_others_go_on() -> None:
    control = in_time()

    def give_up(progress: Progress) -> None:
        control.cancel()

    with running(config()) as collective:
        long = request(0, max_tokens=900)
        answer = collective.run(long, give_up, control)
        assert isinstance(answer.error, Cancelled)
        assert not answer.verified
        assert 0 < len(answer.tokens) < 900
        other = collective.run(request(1), ignore, in_time())
    assert other.tokens == alone(PROMPTS[1])


class Clock:
    """A clock that can be put forward."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


class Slow(Engine):
    """An engine whose third pass takes an hour of ``clock``."""

    clock: Clock
    passes = 0

    def run(self, *arguments: Any, **options: Any) -> Any:
        self.passes += 1
        if self.passes == 3:
            self.clock.ahead_s = 3600.0
        return super().run(*arguments, **options)


def test_a_deadline_returns_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(target().loaded)
    slow.clock = Clock()
    monkeypatch.setattr(runner, "time", slow.clock)
    collective = Collective(slow, drafts(), config(), Resources())
    answer = collective.run(request(0), ignore, Control(time.monotonic() + 600.0))
    assert isinstance(answer.error, DeadlineExceeded)
    assert not answer.verified
    assert answer.tokens == alone(PROMPTS[0])[: len(answer.tokens)]
    assert 0 < len(answer.tokens) < MAX_TOKENS
    with pytest.raises(DeadlineExceeded):
        collective.run(request(1), ignore, Control(time.monotonic() - 1.0))
    collective.close()


def test_more_than_may_wait_are_busy() -> None:
    made = config(schedule=small(max_active=1, max_waiting=1))
    with running(made) as collective:
        assert collective.parallel == 2
        under_way = threading.Event()
        holding, waiting = in_time(), in_time()
        results: list[Any] = []

        def hold() -> None:
            long = request(0, max_tokens=900)
            results.append(collective.run(long, lambda emitted: under_way.set(), holding))

        def wait() -> None:
            try:
                results.append(collective.run(request(1), ignore, waiting))
            except Cancelled as error:
                results.append(error)

        threads = [threading.Thread(target=hold), threading.Thread(target=wait)]
        threads[0].start()
        assert under_way.wait(60)
        threads[1].start()
        wait_for(lambda: collective.health()["waiting"] == 1 or len(results) == 2)
        if len(results) < 2:
            with pytest.raises(Busy):
                collective.run(request(2), ignore, in_time())
        waiting.cancel()
        holding.cancel()
        for thread in threads:
            thread.join(60)
    assert len(results) == 2


def test_prompts_that_cannot_be_read_are_refused() -> None:
    check = registry.find("collective").check
    with pytest.raises(InvalidInput, match="prompt"):
        check(request(0, turns=(Turn("user", ""),)))
    with running(config()) as collective:
        with pytest.raises(InvalidInput) as caught:
            collective.run(request(0, turns=(Turn("user", "ball " * 2000),)), ignore, in_time())
        assert caught.value.field == "prompt"
        answer = collective.run(request(1), ignore, in_time())
    assert answer.tokens == alone(PROMPTS[1])


def test_an_answer_ends_where_the_context_does() -> None:
    with running(config()) as collective:
        asked = request(0, turns=(Turn("user", "ball " * 480),), max_tokens=5000, raw=True)
        answer = collective.run(asked, ignore, in_time())
    assert answer.error is None
    assert 0 < len(answer.tokens) <= 1024


# ---------------------------------------------------------------- models in trouble


class Broken(Engine):
    """An engine whose passes fail."""

    def run(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no memory")


class Stuck(Engine):
    """An engine that hangs until it is let go."""

    go_on = threading.Event()

    def run(self, *arguments: Any, **options: Any) -> Any:
        self.go_on.wait(60)
        return super().run(*arguments, **options)


def test_a_draft_model_that_fails_is_reported_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = [Broken(drafts()[0].loaded), drafts()[1]]
    with caplog.at_level(logging.WARNING), running(config(), engines) as collective:
        answers = ask_all(collective, [request(i) for i in range(4)])
        health = collective.health()
    assert [answer.tokens for answer in answers] == [alone(p) for p in PROMPTS[:4]]
    assert health["incidents"] == 1
    assert health["drafts_in_service"] == 1
    assert "draft model 0 is left out: RuntimeError: no memory" in caplog.text
    assert sum(answer.metrics.figures()["accepted"] for answer in answers) > 0


def test_a_draft_model_that_hangs_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    Stuck.go_on.clear()
    engines = [Stuck(drafts()[0].loaded), drafts()[1]]
    made = config(
        pipeline="thread",
        schedule=small(draft_timeout_s=0.3),
        drafts=DraftsConfig(workers=2),
    )
    with caplog.at_level(logging.WARNING), running(made, engines) as collective:
        answers = ask_all(collective, [request(i) for i in range(4)])
        # On a busy machine the other one may have been late, too: its answer brings it back.
        wait_for(lambda: collective.health()["drafts_in_service"] == 1)
        Stuck.go_on.set()
        wait_for(lambda: collective.health()["drafts_in_service"] == 2)
    assert [answer.tokens for answer in answers] == [alone(p) for p in PROMPTS[:4]]
    assert "draft model 0 is silent for 0.3 s" in caplog.text


def test_a_target_that_fails_ends_the_answers_with_its_error() -> None:
    collective = Collective(
        Broken(target().loaded), drafts(), config(), Resources(log=logging.getLogger())
    )
    with pytest.raises(ModelError, match="no memory"):
        collective.run(request(0), ignore, in_time())
    collective.close()


def test_a_machine_that_fails_ends_all_answers_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(config()) as collective:

        def broken(*now: float) -> Any:
            raise ValueError("a bug")

        monkeypatch.setattr(collective.machine, "poll", broken)
        monkeypatch.setattr(collective.machine, "wake_at", broken)
        for number in range(2):
            with pytest.raises(ModelError, match="a bug"):
                collective.run(request(number), ignore, in_time())
        monkeypatch.undo()
        assert collective.health()["failure"] == "ValueError: a bug (see the log)"


@pytest.mark.parametrize("pipeline", ["off", "thread"])
def test_closing_ends_all_threads(pipeline: str) -> None:
    before = set(threading.enumerate())
    with running(config(pipeline=pipeline)) as collective:
        ask_all(collective, [request(0)])
    assert set(threading.enumerate()) <= before


def test_closing_frees_all_models_of_a_thread() -> None:
    """Two that share no passes have one thread."""
    engines = [drafts()[0], Broken(drafts()[1].loaded)]
    own = Drafts(engines, frozenset(), [0, 1])
    worker = LocalDraft(own, InThread("drafts"), lambda *_: None, lambda *_: None)
    ask = Ask("a", (5, 6), (), 2, SamplingConfig())
    worker.draw([Draw(0, 0, 0, (ask,))])
    wait_for(lambda: worker.held_bytes > 0)
    worker.close()
    assert worker.held_bytes == 0


def test_another_tokenizer_is_refused_by_name() -> None:
    other = Engine(drafts()[0].loaded)
    other.vocabulary = "another"
    with pytest.raises(ConfigError) as caught:
        Collective(target(), [drafts()[0], other], config(), Resources())
    assert caught.value.field == "drafts.paths[1]"
    assert other.loaded.config.path in str(caught.value)
    assert target().loaded.config.path in str(caught.value)


def test_a_target_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"target\.path"):
        registry.find("collective").start(config(target=ModelConfig()), Resources())
    with pytest.raises(ModelError, match="nav-target") as caught:  # what ships is listed
        registry.find("collective").start(config(target=ModelConfig("nowhere")), Resources())
    assert caught.value.field == "target.path"


# ---------------------------------------------------------------- sessions of one model


def test_drafts_roll_back_and_catch_up() -> None:
    """A draft model continues any verdict like one that reads the answer for the first time."""
    used = DraftModel(drafts()[0], frozenset(), 0)
    prompt, plain = tuple(range(5, 12)), SamplingConfig()
    answer: tuple[int, ...] = ()
    for more in ((), (3,), (4, 5, 6, 7), (), (8,), (9, 9, 9, 9, 9, 9, 9)):
        answer += more
        ask = Ask("a", prompt, answer, 4, plain)
        fresh = DraftModel(drafts()[0], frozenset(), 0)
        assert used.draw([ask]) == fresh.draw([ask])
        assert used.draw([ask]) == fresh.draw([ask]), "it can be asked twice"
        fresh.sessions.close()
    assert used.sessions.peak_bytes >= used.sessions.held_bytes > 0
    used.sessions.release("a")
    assert used.sessions.held_bytes == 0
    assert used.sessions.peak_bytes > 0


def test_a_prompt_too_long_for_a_draft_model_fails_alone() -> None:
    model = DraftModel(drafts()[0], frozenset(), 0)
    plain = SamplingConfig()
    asks = [
        Ask("long", (5,) * 1023, (), 4, plain),
        Ask("short", (5, 6), (), 2, plain),
        Ask("none", (5, 6), (), 0, plain),
    ]
    long, short, none = model.draw(asks)
    assert long is None
    assert short is not None
    assert len(short.tokens) == 2
    assert none == Proposal(())
    model.sessions.close()


def test_the_target_frees_rejected_tokens() -> None:
    judge = Target(target())
    prompt = tuple(range(5, 12))
    (outcome,) = judge.verify([Claim("a", prompt, (), SamplingConfig(), (1,) * 200, None)])
    assert not isinstance(outcome, Exception)
    held = judge.sessions.held_bytes
    answer = (outcome.next_token,) if not outcome.accepted else (1, outcome.next_token)
    judge.verify([Claim("a", prompt, answer, SamplingConfig(), (), None)])
    assert judge.sessions._held["a", 0].session.length == len(prompt) + len(answer)
    assert judge.sessions.held_bytes <= held
    judge.sessions.close()


# ---------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def in_processes() -> Any:
    made = config(pipeline="process", schedule=small(draft_timeout_s=60.0))
    with pytest.MonkeyPatch.context() as patch, running(made, ()) as collective:
        patch.setattr(machine, "RETRY_S", 0.0)
        yield collective


def test_draft_models_in_processes_of_their_own(in_processes: Collective) -> None:
    answers = ask_all(in_processes, [request(i) for i in range(10)])
    assert [answer.tokens for answer in answers] == [alone(prompt) for prompt in PROMPTS]
    sampled = ask_all(in_processes, [request(i, sampling=COUPLED) for i in range(3)])
    assert [answer.tokens for answer in sampled] == [alone(p, COUPLED) for p in PROMPTS[:3]]
    assert sum(answer.metrics.figures()["accepted"] for answer in answers) > 0
    wait_for(lambda: in_processes.health()["drafts_kv_mib"] == "0.00")


def test_the_memory_of_draft_processes_is_reported(in_processes: Collective) -> None:
    held: list[object] = []
    in_processes.run(
        request(0), lambda progress: held.append(in_processes.health()["drafts_kv_mib"]), in_time()
    )
    assert max(held, key=str) != "0.00"


def test_a_process_that_is_killed_is_reported_and_replaced(in_processes: Collective) -> None:
    children = descendants()
    assert len(children) == 2
    os.kill(children[0], signal.SIGKILL)
    wait_for(lambda: in_processes.health()["incidents"] == 1)
    answers = ask_all(in_processes, [request(i) for i in range(4)])
    assert [answer.tokens for answer in answers] == [alone(p) for p in PROMPTS[:4]]
    wait_for(lambda: len(descendants()) == 2)
    answers = ask_all(in_processes, [request(i) for i in range(4)])
    assert [answer.tokens for answer in answers] == [alone(p) for p in PROMPTS[:4]]
    assert in_processes.health()["drafts_in_service"] == 2


def test_a_model_that_a_process_cannot_load_is_named() -> None:
    made = config(pipeline="process", drafts=DraftsConfig(("/nowhere",)))
    before = descendants()
    with pytest.raises(ModelError, match=r"drafts\.paths\[0\].*nowhere"), running(made, ()):
        pass
    assert descendants() == before


def descendants() -> list[int]:
    """Processes of draft models."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(folder.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            command = folder.joinpath("cmdline").read_text()
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and "collective.child" in command:
            found.append(int(folder.name))
    return sorted(found)


def test_the_protocol_is_found_by_its_name() -> None:
    entry = registry.find("collective")
    assert entry.takes == {"chat"}
    made = replace(config(), drafts=DraftsConfig())
    collective = entry.start(made, Resources())
    answer = collective.run(request(0), ignore, in_time())
    collective.close()
    assert answer.tokens == alone(PROMPTS[0]), "without draft models the target goes on alone"


def test_all_drafts_have_the_settings_of_drafts() -> None:
    chosen = DraftsConfig(("a", "b"), "bfloat16", "cuda:1", threads=3)
    assert chosen.models() == [
        ModelConfig(path, "bfloat16", "cuda:1", threads=3) for path in ("a", "b")
    ]
