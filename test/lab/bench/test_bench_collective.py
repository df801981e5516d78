"""The benchmark of collective speculation, with tiny random models."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collective_world import recorded
from rich.console import Console
from text_family import write_family
from typer.testing import CliRunner

from collab_llm_lab.bench import rendering
from collab_llm_lab.bench.collective import (
    PARTS,
    QUICK_PARTS,
    Sizes,
    measure,
    methods,
    plots,
    report,
    watch,
)
from collab_llm_lab.bench.collective.emulation import Pace, paced
from collab_llm_lab.bench.collective.goals import goals_of
from collab_llm_lab.bench.collective.material import (
    DRAFTS,
    MIXED,
    STREAMS,
    Family,
    TargetAnswers,
    load_family,
    partial_prompts,
)
from collab_llm_lab.bench.collective.measure import (
    GENERALIST,
    GENERATE,
    LADDER,
    ON_ALL_CORES,
    PIPELINE,
    RIVALS_TURNS,
    Bench,
    fixed,
    ladder,
    lengths,
)
from collab_llm_lab.bench.collective.methods import (
    Collective,
    Method,
    Run,
    Transformers,
    Tree,
    merged,
)
from collab_llm_lab.bench.collective.report import run_collective
from collab_llm_lab.bench.collective.tables import BESIDE, _adaptive
from collab_llm_lab.bench.harness import beside
from collab_llm_lab.random_models import write_random_model
from collab_llm_nodes.cli import app, output
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError, DeadlineExceeded
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.protocols.collective.messages import Claim, Ids, Verdict
from collab_llm_nodes.protocols.collective.models import Drafts
from collab_llm_nodes.protocols.collective.workers import Failed, InThread, LocalDraft, Proposed

TOKENS = 12
ALL = range(len(DRAFTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def family(folder: Path) -> Family:
    return load_family(folder)


@pytest.fixture(scope="module")
def prompts(family: Family) -> list[Ids]:
    return partial_prompts(family, 7, seed=1)[MIXED]


@pytest.fixture
def drafts_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "DraftProcess", ThreadDraft)


METHODS: dict[str, Callable[[Family], Method]] = {
    "default": lambda family: Collective(family, [1], 2, TOKENS),
    "majority": lambda family: Collective(family, ALL, 2, TOKENS),
    "autoregressive": lambda family: Collective(family, [], 2, TOKENS, fixed(0)),
    "pipeline": lambda family: Collective(family, ALL, 2, TOKENS, pipelined=True),
    "in threads": lambda family: Collective(family, ALL, 2, TOKENS, in_threads=True),
    "small drafts": lambda family: Collective(family, ALL, 2, TOKENS, draft_batch=1),
    "generalist": lambda family: Collective(family.with_generalist(), [0], 2, TOKENS),
    "tree": lambda family: Tree(family, 2, TOKENS),
    "generate": lambda family: Transformers(family, 2, TOKENS),
    "assisted": lambda family: Transformers(family, 2, TOKENS, family.peer_drafts[1]),
}


def check_answers(run: Run, right: TargetAnswers) -> None:
    for prompt, answer in zip(run.prompts, run.answers, strict=True):
        assert answer == right.of(prompt) or right.is_near_tie(prompt, answer)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "pipeline")) for name in METHODS],
)
@pytest.mark.timeout(300)  # one of them starts three processes, perhaps on a busy machine
def test_every_method_gives_the_targets_answers(
    name: str, family: Family, prompts: list[Ids]
) -> None:
    right = TargetAnswers(family, TOKENS)
    with closing(METHODS[name](family)) as method:
        first, again = method.run(prompts), method.run(prompts)
    for run in (first, again):
        assert run.prompts == tuple(prompts)
        check_answers(run, right)
        assert len(run.latencies) == len(prompts)
        assert 0 < max(run.latencies) <= run.seconds


def test_what_a_run_notes_is_consistent(
    family: Family, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Collective(family, [1, 2], 2, TOKENS)) as method:  # without the target's copy
        verify, drafted = method.target.verify, list[bool]()

        def watched(claims: Sequence[Claim]) -> list[Verdict]:
            drafted.append(any(claim.draft for claim in claims))
            return verify(claims)

        monkeypatch.setattr(method.target, "verify", watched)
        run = method.run(prompts)
        assert run.verifications == len(method.machine.verifying) == len(drafted)
        assert len(method.machine.drafting) == sum(drafted), (
            "the last token of an answer has no draft"
        )
        assert max(active for _, _, active in method.machine.pool) == 2, "in sequence, others wait"
        assert method.target.held[-1][1] > 0
        draws = len(method.machine.drafting)
        assert draws < len(method.drafts_held) <= 2 * draws, "a model that is sure drafts alone"
        assert min(held for _, held in method.drafts_held) > 0
    assert 0 < run.accepted < run.drafted
    assert 0 < run.llm_s < run.seconds
    assert all(0 < spent < run.seconds for spent in run.overhead_s.values())


def test_an_endless_method_never_drains(family: Family, prompts: list[Ids]) -> None:
    right, batch, turns, tokens = TargetAnswers(family, TOKENS), 2, 4, 5 * TOKENS
    with closing(Collective(family, [1], batch, TOKENS, fixed(2), endless=tokens)) as method:
        runs, active = [], []
        for _ in range(turns):
            runs.append(method.run(prompts))
            active.append([active for *_, active in method.machine.pool])
    for run in runs:
        check_answers(run, right)
        assert tokens <= run.tokens < tokens + batch * (2 + 1), "all that the last pass gives"
    taken = Counter(prompt for run in runs for prompt in run.prompts)
    assert set(taken) == set(prompts), "all prompts, not the first ones of each run"
    assert active[0][0] == 1, "the batch fills up"
    assert {each for own in active[1:] for each in own} == {batch}
    under_way = batch * (TOKENS - 1)  # at most, at the end
    answered = sum(map(len, (answer for run in runs for answer in run.answers)))
    assert answered < sum(run.tokens for run in runs) <= answered + under_way
    assert sum(run.llm_s for run in runs) < sum(run.seconds for run in runs)


def test_an_endless_method_cannot_stop_a_pipeline(family: Family) -> None:
    for option in ({"pipelined": True}, {"in_threads": True}):
        with pytest.raises(ValueError, match="in sequence"):
            Collective(family, ALL, 2, TOKENS, endless=60, **option)  # type: ignore[arg-type]


def test_time_between_runs_does_not_count(
    family: Family, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    shifted = SimpleNamespace(
        monotonic=lambda: time.monotonic() + passed, thread_time=time.thread_time
    )
    monkeypatch.setattr(watch, "time", shifted)
    selector = recorded(monkeypatch, s=2)
    with closing(Collective(family, [1], 2, TOKENS, endless=60)) as method:
        began = method._gate.clock()
        runs = []
        for _ in range(3):
            runs.append(method.run(prompts))
            passed += 1000.0
        after = method._gate.clock()
    assert after - began < 1000.0
    assert sum(run.seconds for run in runs) <= after - began
    assert max(max(run.latencies) for run in runs) < after - began
    assert 0 < sum(each.step_s for each in selector.seen) < after - began


def test_an_endless_method_can_be_closed_in_the_middle_of_a_run(
    family: Family, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "DEADLINE_S", 0.0)
    method = Collective(family, [1], 2, TOKENS, endless=60)
    with pytest.raises(DeadlineExceeded, match="no answer was complete"):
        method.run(prompts)
    method.close()
    assert not method._runner._thread.is_alive()


def test_all_that_a_machine_notes_is_by_the_clock_of_its_gate(
    family: Family, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = SimpleNamespace(
        monotonic=lambda: time.monotonic() - 1000.0, thread_time=time.thread_time
    )
    monkeypatch.setattr(watch, "time", late)
    began = late.monotonic()
    with closing(Collective(family, [1], 2, TOKENS)) as method:
        method.run(prompts)
        machine, spans = method.machine, [*method.machine.drafting, *method.machine.verifying]
        noted = [t for span in spans for t in span] + [t for t, *_ in machine.pool]
        noted += [t for t, _ in (*method.target.held, *method.drafts_held)]
    assert began <= min(noted) <= max(noted) <= late.monotonic()


def test_emulated_passes_take_the_time_of_a_large_model(family: Family, prompts: list[Ids]) -> None:
    slow = paced(family, target=Pace(0.05, 0.02), draft=Pace(0.001, 0.0))
    with closing(Collective(slow, [0], 1, 2, fixed(1))) as method:
        run = method.run(prompts[:1])
    first, *_ = method.machine.verifying
    assert run.answers == (TargetAnswers(family, 2).of(prompts[0]),)
    assert first[1] - first[0] >= 0.02 * len(prompts[0]), "bound by arithmetic"
    assert run.llm_s >= 0.05 * run.verifications
    assert slow.target.eos == family.target.eos


def test_the_figures_of_a_run() -> None:
    run = Run(((5,), (6,)), ((1, 2, 3), (4,)), 4, 2.0, (0.3, 0.5), drafted=4, accepted=3)
    assert run.tokens_per_s == 2.0
    assert run.normalised_latency_ms == pytest.approx((100 + 500) / 2)
    assert run.acceptance == 0.75


def test_generate_may_have_more_threads_than_the_others(
    family: Family, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def answer(_: Family, asked: list[Ids], *__: Any) -> list[Ids]:
        threads.append(torch.get_num_threads())
        return [(1,) for _ in asked]

    monkeypatch.setattr(methods, "transformers_answers", answer)
    usual = torch.get_num_threads()
    for wanted in (0, usual + 1):
        Transformers(family, 2, TOKENS, threads=wanted).run(prompts[:2])
    assert threads == [usual, usual + 1]
    assert torch.get_num_threads() == usual


def test_a_batch_of_transformers_waits_for_the_one_before(
    family: Family, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def answer(_: Family, asked: list[Ids], *__: Any) -> list[Ids]:
        nonlocal now
        now += 1.0
        return [(1,) for _ in asked]

    monkeypatch.setattr(methods, "transformers_answers", answer)
    monkeypatch.setattr(methods, "time", SimpleNamespace(monotonic=lambda: now))
    run = Transformers(family, 2, TOKENS).run(prompts[:6])
    assert run.latencies == (1.0, 1.0, 2.0, 2.0, 2.0, 2.0)
    assert run.seconds == 3.0


def test_drafts_share_their_beginnings_in_a_tree() -> None:
    tree = merged(9, [(1, 2, 3), (1, 4), (5,), (1, 2, 3)])
    assert tree.tokens == [9, 1, 2, 3, 4, 5]
    assert tree.parents == [-1, 0, 1, 2, 1, 0]
    best = {9: 1, 1: 4, 2: 3, 3: 8, 4: 7, 5: 6}
    behind = [best[token] for token in tree.tokens]
    assert [tree.tokens[node] for node in tree.walk(behind, frozenset())] == [9, 1, 4]
    assert tree.walk(behind, frozenset({1})) == [0], "nothing is accepted behind an end token"


def test_prompts_are_beginnings_and_the_mixed_stream_takes_turns(family: Family) -> None:
    found = partial_prompts(family, 6, seed=1)
    assert tuple(found) == STREAMS
    own = [found[stream] for stream in STREAMS[:3]]
    assert found[MIXED] == [own[i % 3][i // 3] for i in range(6)]
    assert found == partial_prompts(family, 6, seed=1)
    assert found != partial_prompts(family, 6, seed=2)
    more = partial_prompts(family, 8, seed=1)
    assert all(more[stream][:6] == found[stream] for stream in STREAMS), "longer runs go on"


def test_a_wrong_answer_is_a_mismatch(family: Family, prompts: list[Ids]) -> None:
    class Wrong:
        def run(self, asked: Any) -> Run:
            right = TargetAnswers(family, TOKENS)
            answers = [right.of(prompt) for prompt in asked]
            answers[0] = (*answers[0][:-1], (answers[0][-1] + 1) % 300)
            return Run(tuple(asked), tuple(answers), 7, 1.0, (0.5,) * len(asked))

        def close(self) -> None:
            pass

    right = TargetAnswers(family, TOKENS)
    sizes = Sizes(prompts=7, repeats=1, max_tokens=TOKENS)
    bench = Bench(family, {MIXED: prompts}, right, sizes, lambda text: None)
    bench.in_turn("test", MIXED, 1, {"ours": Wrong, "generate": Wrong}, repeats=2)
    assert bench.mismatches + bench.near_ties == 3, "one in each turn"
    assert bench.peer_differences == 3


class ThreadDraft(LocalDraft):
    """A draft model in a thread, where the benchmark starts a process, which takes seconds."""

    def __init__(
        self,
        models: Mapping[int, ModelConfig],
        eos: frozenset[int],
        proposed: Proposed,
        failed: Failed,
    ) -> None:
        drafts = Drafts([Engine(load(each)) for each in models.values()], eos, [*models])
        super().__init__(drafts, InThread("drafts"), proposed, failed)

    def vocabularies(self) -> list[str]:
        return []


@pytest.mark.usefixtures("drafts_in_threads")
def test_methods_take_turns(
    family: Family, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[int, bool]] = []
    counts: list[int] = []
    run = Collective.run

    def noted(self: Collective, asked: Any) -> Run:
        turns.append((id(self), self._pipelined))
        counts.append(len(asked))
        return run(self, asked)

    monkeypatch.setattr(Collective, "run", noted)
    right = TargetAnswers(family, TOKENS)
    sizes = Sizes(prompts=4, per_place=4, repeats=2, max_tokens=TOKENS)
    bench = Bench(family, {MIXED: prompts}, right, sizes, lambda text: None)
    bench.best_draft, bench.worst_draft = {MIXED: 0}, {MIXED: 2}
    runs = ladder(bench, MIXED, 1, repeats=2)
    assert set(runs) == {*LADDER, *BESIDE}
    assert {len(own) for own in runs.values()} == {2}
    ours = len(turns) // 3
    forth = turns[:ours]
    assert turns == [*forth, *reversed(forth), *forth]
    assert counts == [2] * ours + [4] * 2 * ours, "the first turn warms up with what is in flight"
    assert Counter(piped for _, piped in forth) == {False: 6, True: 1}


@pytest.mark.usefixtures("drafts_in_threads")
def test_one_part_by_command(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "collective.json"
    options = ["--quick", "--part=drafts", "--tokens", "4", "--models", str(folder)]
    done = CliRunner().invoke(app, ["bench", "collective", *options, "--json", str(file)])
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert set(found["acceptance"]) == set(STREAMS)
    assert all(row[GENERALIST] == 1.0 for row in found["acceptance"].values())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("drafts_in_threads")
def test_the_command_measures_what_it_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.console, "_width", 200)  # so that heads of tables stand on one line
    figures, plot = tmp_path / "collective.json", tmp_path / "collective.png"
    parts = [f"--part={name}" for name in PARTS]
    options = ["--quick", *parts, "--batches", "2", "--tokens", "10"]
    files = ["--json", str(figures), "--plot", str(plot), "--models", str(folder)]
    done = CliRunner().invoke(
        app, ["bench", "collective", *options, "--lengths", "0,2,4", *files], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert found["mismatches"] == 0
    assert set(found["acceptance"]) == set(STREAMS)
    for row in found["acceptance"].values():
        assert set(row) == {*DRAFTS, GENERALIST, "vote"}
        assert row[GENERALIST] == 1.0, "it is the target itself"
        assert row["ssm_conversation"] == 1.0, "it is the target itself"
        assert row["ssm_reports"] < row["vote"]
    assert found["failed"] == {}
    assert (
        found["variants"]["every_token"]["acceptance"] >= found["acceptance"][MIXED]["ssm_reports"]
    )
    for row in found["variants"].values():
        assert 0 < row["acceptance"] <= 1 < row["tokens_per_s"]
    assert set(found["answer_tokens"]) == set(STREAMS)
    assert 0 < max(found["answer_tokens"].values()) <= 10
    assert found["goals"]["mismatches"] == {"wanted": 0, "measured": 0, "reached": True}
    emulated = found["emulated"]["2"]
    assert emulated["autoregressive"]["tokens_per_s"] < 2 / found["emulated"]["passes"]["least_s"]
    assert emulated["majority"]["tokens_per_s"] > emulated["autoregressive"]["tokens_per_s"]
    for by_length in found["acceptance_by_length"].values():
        assert set(by_length["ssm_conversation"].values()) == {1.0}
        assert set(by_length["ssm_reports"]) == {"2", "4"}
    assert set(found["ladder"]) == set(found["adaptive"]) == {"2"}
    assert set(found["ladder_by_stream"]) == set(STREAMS[:3])
    for rows in (found["ladder"], *found["ladder_by_stream"].values()):
        for row in rows.values():
            assert set(row) == {*LADDER, *BESIDE}
            assert min(x for method in row.values() for x in method.values()) > 0
    for batch, total in found["ladder_total"].items():
        row = found["ladder"][batch]
        ratio = row[PIPELINE]["tokens_per_s"] / row["default"]["tokens_per_s"]
        assert total == pytest.approx(ratio)
    for row in found["adaptive"].values():
        assert row["best_fixed_s"] in (0, 2, 4)
        assert row["regret"] == pytest.approx(
            1 - row["adaptive_tokens_per_s"] / row["best_fixed_tokens_per_s"]
        )
    assert 0 < found["overhead_share"] < 1
    for lines in found["time_lines"].values():
        assert lines["verifying"][0][0] == 0.0
        assert all(a <= b for spans in lines.values() for a, b in spans)
    pools = found["pool"]
    assert pools["controlled"]["peak_drafts_waiting"] <= 3, "the high water mark, less 1, a batch"
    assert pools["controlled"]["peak_requests_active"] <= 5, "and a batch under verification"
    assert pools["uncontrolled"]["peak_drafts_waiting"] >= 1
    for own in pools.values():
        for key in ("kv_bytes", "drafts_kv_bytes"):
            assert own[f"peak_{key}"] >= max(size for _, size in own[key]) > 0
    assert plot.stat().st_size > 10_000
    assert "monitor: us per verification, share" in " ".join(done.output.split())
    assert "1.99x OPT-13B, 2.63x Llama2-70B-chat" in " ".join(done.output.split())


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_results_that_are_not_all_right_are_an_error_status(
    ok: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "run_collective", lambda **_: {"ok": ok})
    assert CliRunner().invoke(app, ["bench", "collective"]).exit_code == status


@pytest.mark.usefixtures("drafts_in_threads")
def test_the_ladder_on_the_mixed_stream_takes_twice_the_prompts(family: Family) -> None:
    sizes = Sizes(prompts=2, per_place=3, repeats=2, max_tokens=2, lengths=(0,))
    prompts = partial_prompts(family, sizes.count(2), 0)
    bench = Bench(family, prompts, TargetAnswers(family, 2), sizes, lambda text: None)
    bench.best_draft = bench.worst_draft = dict.fromkeys(STREAMS, 0)
    taken = {stream: ladder(bench, stream, 2, 2) for stream in ("reports", MIXED)}
    assert {name: len(runs[PIPELINE][0].answers) for name, runs in taken.items()} == {
        "reports": 3,
        MIXED: 6,
    }


def test_the_best_fixed_length_is_scored_beside_the_rules_alone(family: Family) -> None:
    told: list[str] = []
    sizes = Sizes(prompts=2, per_place=2, repeats=2, max_tokens=2, lengths=(0, 1))
    prompts = partial_prompts(family, sizes.count(1), 0)
    bench = Bench(family, prompts, TargetAnswers(family, 2), sizes, told.append)
    found = lengths(bench, 1)
    assert told[-1] == "adaptive lengths, mixed, batch 1: 12 of 12 turns"
    assert "lengths, mixed, batch 1: 2 of 2 turns" in told
    assert set(found["by_length"]) == {"0", "1"}


def test_turns_of_both_instances_count_but_not_those_that_choose_or_learn(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(tokens: int, seconds: float) -> Run:
        return Run((), (), tokens, seconds, (), llm_s=seconds)

    turns = {
        "lengths": {"0": [run(9, 1.0)], "2": [run(10, 1.0)], "4": [run(8, 1.0)]},
        "adaptive lengths": {
            "2 one": [run(8, 1.0), run(8, 3.0)],  # 4 tokens/s
            "2 other": [run(24, 1.0), run(24, 1.0)],  # 24
            "adaptive one": [run(10, 1.0), run(20, 1.0)],  # 15
            "adaptive other": [run(9, 1.0), run(9, 1.0)],  # 9
            "printed one": [run(4, 1.0)] * 2,
        },
    }
    for runs in turns["adaptive lengths"].values():
        runs.insert(0, run(2, 1.0))  # learning
    monkeypatch.setattr("collab_llm_lab.bench.collective.measure.RIVALS_TURNS", 2)
    monkeypatch.setattr("collab_llm_lab.bench.collective.measure.PART_TOKENS", 10_000)
    monkeypatch.setattr(Bench, "in_turn", lambda self, title, *args, **options: turns[title])
    sizes = Sizes(repeats=2, lengths=(0, 2, 4))
    found = lengths(Bench(family, {}, TargetAnswers(family, 2), sizes, print), 1)
    assert found["best_fixed_s"] == 2
    assert found["best_fixed_tokens_per_s"] == pytest.approx(64 / 6)
    assert found["adaptive_tokens_per_s"] == pytest.approx(12.0)
    assert found["printed_tokens_per_s"] == pytest.approx(4.0)
    assert found["regret"] == pytest.approx(1 - 12 * 6 / 64)
    assert found["printed_regret"] == pytest.approx(1 - 4 * 6 / 64)
    assert found["learning"] == {"2": 2.0, "adaptive": 2.0, "printed": 2.0}
    assert found["twins"] == {"2": [4.0, 24.0], "adaptive": [15.0, 9.0], "printed": [4.0]}
    assert found["by_length"]["4"] == pytest.approx(
        {"tokens_per_s": 8.0, "llm_ms_per_token": 125.0}
    )


def test_lengths_are_compared_in_parts_of_turns(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the prompts are 3,072 tokens, which are three parts at a batch of 8."""
    told: dict[str, int] = {}

    def in_turn(
        self: Bench, title: str, _: str, batch: int, methods: Any, repeats: int, **options: Any
    ) -> dict[str, list[Run]]:
        told[title] = repeats
        return {name: [Run((), (), 1, 1.0, ())] * repeats for name in methods}

    monkeypatch.setattr(Bench, "in_turn", in_turn)
    sizes = Sizes(prompts=24, per_place=6, repeats=4, max_tokens=128, lengths=(0, 2))
    lengths(Bench(family, {}, TargetAnswers(family, 2), sizes, print), 8)
    assert told == {"lengths": 2 * 2 * 3, "adaptive lengths": RIVALS_TURNS * 2 * 3 * 3 // 2}


def test_lengths_of_an_earlier_version_can_be_printed() -> None:
    """Their rows have neither ``learning`` nor ``twins``."""
    row = {
        "best_fixed_s": 4,
        "best_fixed_tokens_per_s": 10.0,
        "regret": 0.25,
        "printed_regret": 0.5,
    }
    now = {"learning": {"4": 8.0, "adaptive": 6.0}, "twins": {"4": [9.0, 11.0]}}
    console = Console(record=True, width=200)
    _adaptive({"adaptive": {"1": row, "8": {**row, **now}}}, console)
    old, new = (
        [cell.strip() for cell in line.strip("│ ").split("│")]
        for line in console.export_text().splitlines()
        if "0.750" in line
    )
    assert old[:5] == ["1", "4", "10", "0.750", "0.500"]
    assert new == ["8", "4", "10", "0.750", "0.500", "0.750", "9 11"]


def run_with(folder: Path, parts: Sequence[str] = QUICK_PARTS, **changed: Any) -> dict[str, Any]:
    """Run the benchmark, as small as it can be; the results must be those that were saved last."""
    plain: dict[str, Any] = {
        "batches": (1,),
        "prompts": 2,
        "per_place": 1,
        "repeats": 2,
        "max_tokens": 4,
        "lengths": (0, 2),
    }
    saved: list[dict[str, Any]] = []
    results = run_collective(
        models=folder,
        sizes=Sizes(**{**plain, **changed}),
        seed=0,
        keep=lambda found: saved.append(copy.deepcopy(found)),
        console=Console(quiet=True),
        parts=parts,
    )
    assert results == saved[-1]
    assert len(saved) == len(results["seconds"]), "after each part"
    return results


@pytest.mark.usefixtures("drafts_in_threads")
def test_a_part_that_fails_leaves_the_others_their_results(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any) -> Any:
        raise MemoryError("no room")

    for part in ("ladder", "variants", "time_lines"):
        monkeypatch.setattr(measure, part, broken)
    found = run_with(folder)
    told = "MemoryError: no room"
    assert found["failed"] == dict.fromkeys(("ladder, batch 1", "variants", "time_lines"), told)
    assert set(found["adaptive"]) == {"1"}
    assert set(found["failed"]) < set(found["seconds"])
    assert found["pool"]["controlled"]["peak_kv_bytes"] > 0
    assert found["overhead_share"] is None
    assert not found["ok"]
    plots.plot_all(found, tmp_path / "what_there_is.png")


def test_results_from_a_file_are_drawn_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = {"tokens_per_s": 1.0, "llm_ms_per_token": 1.0}
    speeds = dict.fromkeys(("adaptive", "printed", "best_fixed"), 1.0)
    lengths_of = {str(s): own for s in range(13)}
    row = {
        "by_length": lengths_of,
        "best_fixed_s": 4,
        **{f"{name}_tokens_per_s": v for name, v in speeds.items()},
    }
    parts: dict[str, Any] = {key: {} for key, _ in plots._PANELS.values()}
    results = {**parts, "batch": 8, "adaptive": dict.fromkeys(("1", "8", "16"), row)}
    drawn: list[Any] = []
    monkeypatch.setattr(rendering, "save_plot", lambda figure, _: drawn.append(figure))
    earlier = json.loads(json.dumps(results, sort_keys=True))
    both = beside(earlier, {"seconds": {}, "failed": {}}, lambda _: True)
    plots.plot_all(both, tmp_path / "plot.png")
    times, fixed_and_adaptive, *_ = drawn[0].axes
    curves = [line for line in times.get_lines() if line.get_label().startswith("batch")]
    assert [line.get_label() for line in curves] == ["batch 1", "batch 8", "batch 16"]
    assert all([*line.get_xdata()] == [*range(13)] for line in curves)
    ticks = [label.get_text() for label in fixed_and_adaptive.get_xticklabels()]
    assert ticks == [*map(str, range(13)), "adaptive", "printed"]


@pytest.mark.usefixtures("drafts_in_threads")
def test_parts_may_be_measured_one_after_the_other(folder: Path) -> None:
    first = {**run_with(folder, ["drafts", "time_lines"]), "machine": {"cores": 2}}
    assert first["ok"]
    assert first["ladder"] == first["pool"] == {}
    second = {**run_with(folder, ["ladder"], prompts=3), "machine": {"cores": 4}}
    second["differences"]["ladder, batch 1"]["mismatches"] = 1
    both = report.join(first, second)
    assert both["acceptance"] == first["acceptance"]
    assert both["ladder"] == second["ladder"]
    assert both["ladder_total"].keys() == {"1"}
    assert set(both["seconds"]) == {"drafts", "time_lines", "ladder, batch 1"}
    assert both["machine"] == {"cores": 2}
    later = both["later"]["ladder, batch 1"]
    assert (later["machine"], later["sizes"]["prompts"]) == ({"cores": 4}, 3)
    assert both["mismatches"] == 1
    assert not both["ok"]
    by_stream = [
        {**one, "ladder_by_stream": {"reports": {n: {}}}}
        for one, n in ((first, "1"), (second, "8"))
    ]
    assert report.join(*by_stream)["ladder_by_stream"] == {"reports": {"1": {}, "8": {}}}
    assert "pipeline over autoregressive" in both["goals"]
    assert "vote above every draft, mixed" in both["goals"]


def test_a_part_that_there_is_not_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no part 'pools'") as refused:
        run_with(folder, ["pools"])
    assert refused.value.field == "--part"
    assert "pool" in refused.value.remedy


def test_goals_follow_from_the_figures() -> None:
    methods = ("selector", PIPELINE, "autoregressive", GENERATE, ON_ALL_CORES)
    rows = {"1": (90.0, 100.0, 75.0, 50.0, 50.0), "16": (100.0, 119.0, 123.0, 40.0, 60.0)}
    speeds = {
        batch: {method: {"tokens_per_s": n} for method, n in zip(methods, row, strict=True)}
        for batch, row in rows.items()
    }
    results: dict[str, Any] = {
        "acceptance": {
            "reports": {"ssm_reports": 0.8, GENERALIST: 0.9, "vote": 0.795},
            MIXED: {"ssm_reports": 0.4, GENERALIST: 0.5, "vote": 0.5},
        },
        "ladder": speeds,
        "adaptive": {
            "16": {"adaptive_tokens_per_s": 97.0, "best_fixed_tokens_per_s": 100.0},
        },
        "overhead_share": None,
        "mismatches": 1,
    }
    found = goals_of(results)
    assert {name: row["reached"] for name, row in found.items()} == {
        "vote as good as the best draft, reports": True,
        "vote above every draft, mixed": False,
        "pipeline over selector, batch 8 or 16": False,
        "pipeline over autoregressive": False,
        "pipeline over autoregressive, batch 1": True,
        "pipeline over generate, batch 16": True,
        "pipeline over generate on all cores, batch 16": False,
        "adaptive over the best fixed length, batch 16": True,
        "mismatches": False,
    }
    assert found["pipeline over autoregressive"]["measured"] == 119 / 123
    results["ladder"] = {}
    assert not any("pipeline" in name for name in goals_of(results)), "nothing is known of them"


def test_models_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks text-target, ssm-conversation") as refused:
        run_with(tmp_path)
    assert refused.value.field == "--models"


def test_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    for own in folder.iterdir():
        (tmp_path / own.name).symlink_to(own)
    (tmp_path / "ssm-reports").unlink()
    write_random_model(tmp_path / "ssm-reports", "llama")
    with pytest.raises(ConfigError, match="ssm-reports .* have different tokenizers"):
        run_with(tmp_path)


@pytest.mark.parametrize(
    ("changed", "field"), [({"repeats": 1}, "--repeats"), ({"lengths": (13,)}, "--lengths")]
)
def test_numbers_that_make_no_sense_are_refused(
    changed: dict[str, Any], field: str, folder: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        run_with(folder, **changed)
    assert refused.value.field == field


@pytest.mark.parametrize("option", ["--batches=0", "--batches=a", "--lengths=-1", "--repeats=1"])
def test_options_that_make_no_sense_are_refused(option: str) -> None:
    done = CliRunner().invoke(
        app, ["bench", "collective", option], env={"COLUMNS": "300", "TERM": "dumb"}
    )
    assert done.exit_code == 2
    assert option.partition("=")[0] in done.output
