"""Jupiter as a protocol: what it answers, how it plans, and what it refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jupiter_bed import WAIT_S, alone, control, folder, prompt, workers
from served_jupiter import facts, plan_file, profile, served_config
from waiting import wait_for

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
)
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.base import Answer, Control, Progress, Request, Resources
from collab_llm_nodes.protocols.jupiter import pipeline
from collab_llm_nodes.protocols.jupiter.arrangement import Arrangement
from collab_llm_nodes.protocols.jupiter.chain import Chain
from collab_llm_nodes.protocols.jupiter.lane import CachedPrefix
from collab_llm_nodes.protocols.jupiter.link import LinkConfig
from collab_llm_nodes.protocols.jupiter.messages import Step, WorkerInfo
from collab_llm_nodes.protocols.jupiter.outline import OutlinePrompts, with_directive
from collab_llm_nodes.protocols.jupiter.planner import PlannerConfig
from collab_llm_nodes.protocols.jupiter.running import Jupiter, check, start
from collab_llm_nodes.protocols.jupiter.settings import JupiterConfig, PlanningConfig

QUESTION = "Explain how a robot finds its way home."


def request(config: JupiterConfig, text: str = QUESTION, **fields: Any) -> Request:
    given = {"id": "one", "config": config, "turns": (Turn("user", text),), **fields}
    return Request(**given)


def ids_of(text: str) -> tuple[int, ...]:
    """Return the question as the model reads it."""
    return encode(Prompt(text), read_facts(ModelConfig(str(folder()))).without_weights()).ids


@contextmanager
def jupiter(count: int = 2, **changed: Any) -> Iterator[tuple[Jupiter, JupiterConfig]]:
    """Run workers and the protocol over them."""
    with workers(count) as (_, addresses):
        config = served_config(addresses, **changed)
        made = start(config, Resources())
        try:
            yield made, config
        finally:
            made.close()


def run(
    made: Jupiter,
    asked: Request,
    reports: list[Progress] | None = None,
    until: Control | None = None,
) -> Answer:
    return made.run(asked, (reports if reports is not None else []).append, until or control())


def test_an_answer_grows_and_is_the_single_device_s() -> None:
    right = alone(ids_of(QUESTION), 24)
    reports: list[Progress] = []
    with jupiter() as (made, config):
        assert made.parallel == 4
        found = run(made, request(config), reports)
        chat = (Turn("user", "Hello"), Turn("assistant", "Yes?"), Turn("user", QUESTION))
        other = run(made, request(config, turns=chat, max_tokens=5))
    assert found.tokens == tuple(right)
    assert found.text == made.decode(right)
    assert found.error is None
    assert found.verified
    assert [found.text.startswith(each.text) for each in reports] == [True] * len(reports)
    assert [len(a.tokens) < len(b.tokens) for a, b in zip(reports, reports[1:], strict=False)]
    assert reports[-1].share_done == len(reports[-1].tokens) / 24
    figures = found.metrics.figures()
    assert found.metrics.tokens == len(right)
    assert figures["stages"] == 2
    assert figures["tau"] == len(right) / found.metrics.rounds
    assert 0 < found.metrics.time_to_first_token_s <= found.metrics.total_s
    assert len(other.tokens) <= 5
    assert other.tokens != found.tokens[:5]


@pytest.mark.parametrize("drafter", ["none", "medusa_tree", "prompt_lookup"])
def test_a_request_chooses_its_drafter_and_gets_the_same_answer(drafter: str) -> None:
    sampling = SamplingConfig(temperature=0.8, seed=5)
    with jupiter(outline="auto") as (made, config):
        plain = run(made, request(replace(config, outline="never"), sampling=sampling))
        chosen = replace(config, outline="never", drafter=drafter)
        assert run(made, request(chosen, sampling=sampling)).tokens == plain.tokens
    assert plain.tokens == tuple(alone(ids_of(QUESTION), 24, sampling))


def test_requests_at_the_same_time_are_answered_side_by_side() -> None:
    questions = [f"Where is box {i}?" for i in range(6)]  # two more than there are lanes
    with jupiter() as (made, config):
        found: dict[str, Answer] = {}

        def ask(text: str) -> None:
            found[text] = run(made, request(config, text))

        threads = [threading.Thread(target=ask, args=(text,)) for text in questions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        with made.pipeline.lanes(4, control().due):
            with pytest.raises((Busy, DeadlineExceeded)):
                run(made, request(config), until=Control(time.monotonic() + 0.2))
            until = control()
            threading.Timer(0.2, until.cancel).start()
            with pytest.raises(Cancelled):
                run(made, request(config), until=until)
    for text in questions:
        assert found[text].tokens == tuple(alone(ids_of(text), 24))


def test_an_answer_in_points_joins_them_and_its_text_only_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [prompt(3, 50 + i) for i in range(3)]
    monkeypatch.setattr(OutlinePrompts, "requests", lambda self, outline: requests)
    monkeypatch.setattr(OutlinePrompts, "ended", lambda self, outline: len(outline) == 9)
    reports: list[Progress] = []
    with jupiter(outline="always", max_tokens=60) as (made, config):
        found = run(made, request(config), reports)
    assert found.error is None
    assert found.tokens == ()
    lines = found.text.split("\n")
    assert 1 <= len(lines) <= 3
    assert [line.split(" ")[0] for line in lines] == ["1.", "2.", "3."][: len(lines)]
    assert all(
        b.text.startswith(a.text) for a, b in zip(reports, [*reports[1:], found], strict=True)
    )
    assert {each.stage for each in reports} == {"outline", "points"}
    figures = found.metrics.figures()
    assert (figures["points"], figures["outline_tokens"]) == (3, 9)
    assert found.metrics.tokens <= 9 + 60


def test_an_outline_without_points_is_answered_in_sequence() -> None:
    """A random model writes no outline."""
    reports: list[Progress] = []
    with jupiter(outline="auto", max_tokens=48) as (made, config):
        found = run(made, request(config), reports)
        short = run(made, request(config, max_tokens=8))
    assert found.tokens == tuple(alone(ids_of(QUESTION), 48))
    assert {each.stage for each in reports} == {"outline", "answer"}
    assert found.metrics.figures()["outline_tokens"] > 0
    assert short.metrics.figures()["outline_tokens"] == 0, "too short to be outlined"


def test_a_task_s_directive_is_read_once_by_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    directive = "List three to eight numbered points only."
    fed: list[Step] = []
    submit = Chain.submit
    seen: list[tuple[int, ...]] = []

    def note_passes(chain: Chain, steps: Sequence[Step], *rest: Any) -> None:
        fed.extend(steps)
        submit(chain, steps, *rest)

    def note_outline(prompts: OutlinePrompts, outline: Sequence[int]) -> list[list[int]]:
        seen.append(tuple(outline))
        return []

    monkeypatch.setattr(Chain, "submit", note_passes)
    monkeypatch.setattr(OutlinePrompts, "requests", note_outline)
    monkeypatch.setattr(OutlinePrompts, "ended", lambda self, outline: False)
    befores: tuple[tuple[Turn, ...], ...] = ((), (Turn("system", "Speak as a robot."),), ())
    with jupiter(
        outline="always", outline_tokens=8, guides=(f"explain: {directive}", "plan: Plan it.")
    ) as (made, config):
        guided = replace(config, task="explain")
        for turns in befores:
            asked = (*turns, Turn("user", QUESTION))
            assert len(run(made, request(guided, turns=asked)).tokens) > 0
        run(made, request(config))
        kept = [step for step in fed if step.lane >= config.pipeline.lanes]
    ((lane, length),) = ((step.lane, len(step.ids)) for step in kept)
    assert lane == config.pipeline.lanes
    assert length >= len(ids_of(directive)) - len(ids_of("x"))
    forks = [step for step in fed if step.fork_of is not None]
    assert [(step.fork_of, step.start) for step in forks] == [(lane, length)] * 3
    loaded = read_facts(ModelConfig(str(folder()))).without_weights()
    for outline, turns in zip(seen, befores, strict=False):
        whole = Prompt(QUESTION, turns=with_directive(directive, turns))
        assert outline == tuple(alone(encode(whole, loaded).ids, 8))
    assert seen[3] != seen[0], "without a task the directive follows the question"


def test_a_directive_is_fed_to_each_chain_once_however_many_ask() -> None:
    prefix = CachedPrefix(7, prompt(30))
    fed: list[tuple[object, Step]] = []
    chains = [object(), object()]

    def ask(chain: object) -> None:
        prefix.feed(chain, lambda step: fed.append((chain, step)), lambda n: (10, n - 10))
        prefix.restart()

    for chain in chains:
        threads = [threading.Thread(target=ask, args=(chain,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    reports = [(chain, step.lane, step.start, len(step.ids)) for chain, step in fed]
    assert reports == [(chain, 7, *part) for chain in chains for part in ((0, 10), (10, 20))]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"guides": ("no colon",)}, "guides"),
        ({"guides": ("a: b", "a: c")}, "guides"),
        ({"guides": ("explain: b",), "task": "explan"}, "task"),
    ],
)
def test_directives_and_tasks_that_do_not_fit_are_refused(
    changed: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(JupiterConfig(), **changed)
    assert refused.value.field == field


def test_an_outline_that_the_context_has_no_room_for_is_answered_in_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = facts().context
    sizes = [len(ids_of("word " * n)) for n in (1, 2)]
    text = "word " * (1 + (context - 3 - sizes[0]) // (sizes[1] - sizes[0]))
    room = context - len(ids_of(text))
    requests = [prompt(context, 50 + i) for i in range(3)]
    monkeypatch.setattr(OutlinePrompts, "requests", lambda self, outline: requests)
    reports: list[Progress] = []
    with jupiter(outline="always") as (made, config):
        long_question = run(made, request(config, text), reports)
        assert {each.stage for each in reports} == {"answer"}
        long_points = run(made, request(config), reports)
        assert made.pipeline.lanes_in_use == 0
    assert 0 < room < 24
    assert long_question.tokens == tuple(alone(ids_of(text), room))
    assert long_points.tokens == tuple(alone(ids_of(QUESTION), 24))
    assert {each.stage for each in reports} == {"answer", "outline"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "word " * 2000}, "prompt"),
        ({"text": " "}, "prompt"),
        ({"text": "", "raw": True}, "prompt"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(fields: dict[str, Any], field: str) -> None:
    def ask(made: Jupiter, asked: Request) -> None:
        check(asked)
        run(made, asked)

    with jupiter(1) as (made, config):
        asked = request(config, **fields)
        with pytest.raises(InvalidInput) as refused:
            ask(made, asked)
    assert refused.value.field == field


def test_an_outline_of_raw_text_is_refused() -> None:
    with jupiter(1, outline="always") as (made, config):
        with pytest.raises(InvalidInput) as refused:
            run(made, request(config, raw=True))
        assert refused.value.field == "outline"


def test_a_cancelled_answer_and_a_late_one_end() -> None:
    with jupiter(max_tokens=60, drafter="none") as (made, config):
        until = control()

        def cancel(progress: Progress) -> None:
            until.cancel()

        with pytest.raises(Cancelled):
            made.run(request(config), cancel, until)
        with pytest.raises(DeadlineExceeded):
            run(made, request(config), until=Control(time.monotonic()))
        assert made.pipeline.lanes_in_use == 0
        assert run(made, request(config, max_tokens=4)).error is None


# Plans.


def test_stages_are_planned_with_the_profile_and_again_when_a_device_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_UPKEEP_S", 3600.0)
    profile(1.0, 4.0).save(tmp_path / "lab.json")
    planning = PlanningConfig(str(tmp_path / "lab.json"), devices=("robot", "laptop"))
    with workers(2) as (handles, addresses):
        config = served_config(addresses, planning)
        made = start(config, Resources())
        try:
            first = run(made, request(config))
            chain = made.pipeline.current
            assert chain is not None
            names = [part.device for part in chain.parts]
            assert names[0] == addresses[0], "the fast one has the first layers"
            assert made.planned_timeline()
            handles[1].stop()
            again = run(made, request(config))
            assert again.tokens == first.tokens
            assert [part.device for part in made.pipeline.chain(control().due).parts] == [
                addresses[0]
            ]
        finally:
            made.close()


def test_a_stored_plan_is_used_while_its_devices_are_there(tmp_path: Path) -> None:
    stored = plan_file(tmp_path / "plan.json", profile(1.0, 1.0), lanes=4, prompt_tokens=64)
    assert len(stored.placements) == 2
    model = facts()
    names = {"a:1": "robot", "b:1": "laptop"}
    planner = PlannerConfig(answer_tokens=0, lanes=4)
    info = described()
    made = Arrangement(names, model, planner, profile(1.0, 1.0), stored)
    for address, device in names.items():
        assert [p.device for p in made.stages([address], info)] == [address]
        assert made.stored is not None
        assert device in {part.device for part in made.stored.placements}
    both = made.stages(list(names), info)
    assert [(names[p.device], p.first, p.last) for p in both] == [
        (p.device, p.first, p.last) for p in stored.placements
    ]
    assert tuple(made.lengths(50)) == stored.lengths(50)
    assert sum(made.lengths(model.context)) == model.context


def described() -> WorkerInfo:
    with workers(1) as (handles, _):
        return handles[0].service.info


def test_prompts_are_divided_for_stages_that_no_stored_plan_knows() -> None:
    names = {"a:1": "robot", "b:1": "laptop"}
    planner = PlannerConfig(prompt_tokens=64, answer_tokens=0)
    made = Arrangement(names, facts(), planner, profile(1.0, 1.0))
    assert tuple(made.lengths(50)) == (50,), "no stages yet"
    assert len(made.stages(list(names), described())) == 2
    for tokens in (1, 2, 37, 50, 129):
        parts = made.lengths(tokens)
        assert sum(parts) == tokens
        assert min(parts) > 0
    assert len(made.lengths(129)) > 1


def test_a_plan_is_made_without_running(tmp_path: Path) -> None:
    profile(1.0, 2.0, 1.5).save(tmp_path / "lab.json")
    planning = PlanningConfig(str(tmp_path / "lab.json"), devices=("robot", "laptop"))
    with jupiter(planning=planning) as (made, _):
        chain = made.pipeline.current
        found = made.plan(control(), prompt_tokens=100, answer_tokens=0, lanes=2)
        assert found.typical_prompt == 100
        with pytest.raises(InvalidInput, match="context has") as refused:
            made.plan(control(), prompt_tokens=10_000)
        assert refused.value.field == "prompt_tokens"
        assert {part.device for part in found.placements} <= {"robot", "laptop"}
        assert found.config.lanes == 2
        wider = made.plan(control(), devices=("rover",))
        assert [part.device for part in wider.placements] == ["rover"]
        with pytest.raises(ConfigError, match="no device 'rovr'.*did you mean rover"):
            made.plan(control(), devices=("rovr",))
        with pytest.raises(DeadlineExceeded):
            made.plan(Control(time.monotonic()))
        assert made.pipeline.current is chain


def test_without_a_profile_there_is_no_plan_and_all_stages_are_equal() -> None:
    with jupiter() as (made, _):
        with pytest.raises(ConfigError) as refused:
            made.plan(control())
        assert refused.value.field == "planning.profile"
        assert made.planned_timeline() == []
        chain = made.pipeline.current
        assert chain is not None
        assert [part.last - part.first for part in chain.parts] == [2, 2]


def test_the_last_passes_are_shown_with_clocks_aligned() -> None:
    with jupiter(3, drafter="none") as (made, config):
        assert made.measured_timeline() == []
        run(made, request(config, max_tokens=6))
        lanes = made.measured_timeline()
        health = made.health()
    assert [name.rpartition(" ")[2] for name, _ in lanes] == ["0-0", "1-1", "2-3"]
    stages = [spans for _, spans in lanes]
    assert len({len(spans) for spans in stages}) == 1
    assert len(stages[0]) >= 6
    assert stages[0][0][1] == 0.0
    for before, after in zip(stages, stages[1:], strict=False):
        delays = [b[1] - a[2] for a, b in zip(before, after, strict=True)]
        assert min(delays) == pytest.approx(0.0, abs=1e-9)
    assert health["stages"] == 3
    assert health["lanes_in_use"] == "0 of 4"
    assert all("MB of tensors" in str(health[name]) for name, _ in lanes)


# What is refused at the start.


def refused(config: JupiterConfig) -> CollabError:
    with pytest.raises(CollabError) as caught:
        start(config, Resources()).close()
    return caught.value


def test_another_model_than_the_workers_is_refused() -> None:
    with workers(1) as (_, addresses):
        config = replace(served_config(addresses), model=ModelConfig("text-target"))
        assert refused(config).field == "model.path"


def test_plans_and_profiles_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    lab, other, plan, few = (tmp_path / f"{n}.json" for n in ("lab", "other", "plan", "few"))
    profile(1.0, 1.0).save(lab)
    replace(profile(1.0), model=replace(facts(), fingerprint="b" * 64)).save(other)
    plan_file(plan, profile(1.0, 1.0, 1.0), lanes=4, prompt_tokens=200)
    plan_file(few, profile(1.0, 1.0), lanes=1)
    here = ("127.0.0.1:9",)

    def of(*names: str, **files: Path) -> CollabError:
        given: dict[str, Any] = {name: str(file) for name, file in files.items()}
        return refused(served_config(here, PlanningConfig(**given, devices=names)))

    assert of("rbot", profile=lab).remedy == "did you mean robot?"
    assert isinstance(of("robot", profile=other), ModelError)
    unknown = of("robot", plan=plan)
    assert isinstance(unknown, ConfigError)
    assert unknown.field == "planning.plan"
    assert "laptop" in str(unknown)
    with pytest.raises(ConfigError, match="names for 1 workers"):
        served_config(here, PlanningConfig(devices=("robot", "laptop")))
    assert isinstance(of("robot", profile=tmp_path / "none.json"), ConfigError)
    two = served_config(
        ("127.0.0.1:9", "127.0.0.1:10"), PlanningConfig(plan=str(few), devices=("robot", "laptop"))
    )
    assert "1 lanes" in str(refused(two))
    assert refused(replace(served_config(here), model=ModelConfig())).field == "model.path"


def test_workers_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_UPKEEP_S", 0.1)
    address = f"127.0.0.1:{free_port()}"
    config = served_config([address], start_s=0.0)
    made = start(config, Resources())
    with ExitStack() as stack:
        stack.callback(made.close)
        until = control()
        threading.Timer(0.2, until.cancel).start()
        with pytest.raises(Cancelled):
            run(made, request(config), until=until)
        assert made.health()["missing"] == address
        assert made.health()["stages"] == 0
        stack.enter_context(workers(1, address=address))
        wait_for(lambda: made.health()["stages"], WAIT_S)
        assert run(made, request(config)).tokens == tuple(alone(ids_of(QUESTION), 24))


def test_a_link_passes_its_settings_on() -> None:
    link = LinkConfig(
        tls=True, tls_ca="ca", tls_cert="cert", tls_key="key", connect_s=3.0, max_message_bytes=5000
    )
    client = link.client("host:1")
    assert (client.address, client.tls, client.tls_ca) == ("host:1", True, "ca")
    assert (client.tls_cert, client.tls_key) == ("cert", "key")
    assert (client.link.connect_deadline_s, client.max_message_bytes) == (3.0, 5000)
