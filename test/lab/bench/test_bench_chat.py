"""The benchmark of chat jobs runs, does the same work each way, and is consistent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import tiny_folder, tiny_model
from typer.testing import CliRunner

from collab_llm_lab.bench.chat import JobsShape, measure_parallel, random_worker
from collab_llm_lab.training.text.models import WORKER
from collab_llm_nodes.cli import app
from collab_llm_nodes.engine.engine import Engine

SHAPE = JobsShape(
    chunks=2,
    tasks=2,
    samples=2,
    instruction_tokens=20,
    chunk_tokens=150,
    task_tokens=20,
    reply_tokens=3,
)


def test_each_way_does_its_share_of_the_work() -> None:
    engine = Engine(tiny_model("llama"))
    engine.eos = frozenset()
    results = measure_parallel(engine, SHAPE, max_batch=4, prefill_tokens=64, repeats=1)
    assert results["mismatches"] == 0
    computed = results["prefill_tokens"]
    assert computed["one_by_one"] == computed["batched"] == 8 * 190
    # The instruction once, each chunk, both tasks on it, the last token of each second sample.
    assert computed["forked"] == computed["both"] == 20 + 2 * (150 + 2 * (20 + 1))
    parallel = results["parallel"]
    assert parallel["share"] == parallel["both_s"] / parallel["one_by_one_s"]
    assert set(results["predicted"]) == set(results["processor"]) == set(parallel) - {"share"}
    assert all(seconds > 0 for seconds in [*parallel.values(), *results["predicted"].values()])
    assert results["shape"]["jobs"] == 8


def test_replies_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_model("llama"))
    engine.eos = frozenset()
    runs = 0
    decode = engine.run

    def changed(*args: object, **options: object) -> object:
        nonlocal runs
        runs += 1
        results = decode(*args, **options)  # type: ignore[arg-type]
        return [-result if runs % 7 == 0 else result for result in results]  # type: ignore[operator]

    monkeypatch.setattr(engine, "run", changed)
    assert measure_parallel(engine, SHAPE, max_batch=4, repeats=1)["mismatches"] > 0


def test_the_random_worker_has_the_workers_size() -> None:
    model = random_worker(0).model
    assert model.config.hidden_size == WORKER.hidden
    assert model.config.num_hidden_layers == WORKER.layers
    assert model.config.vocab_size == 3072


def test_the_command_writes_json_and_a_plot(tmp_path: Path) -> None:
    file, plot = tmp_path / "chat.json", tmp_path / "chat.png"
    small = ["--chunks", "1", "--tasks", "2", "--chunk-tokens", "140", "--reply-tokens", "2"]
    files = ["--json", str(file), "--plot", str(plot), "--repeats", "1"]
    model = str(tiny_folder("llama"))
    done = CliRunner().invoke(app, ["bench", "chat", *small, *files, "--model", model])
    assert done.exit_code == 0, done.output
    results = json.loads(file.read_text())
    assert results["model"] == model
    assert results["machine"]["cores"] >= 1
    assert plot.stat().st_size > 1000
