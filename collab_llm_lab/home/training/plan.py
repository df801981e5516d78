"""``python -m collab_llm_lab.home.training.plan``: train the home's pair from seeds; resumable.

Stages: ``seeing`` (the target learns where named things are, and how far the way is free).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from collab_llm_lab.home.training.batches import WORDS, Batches, Lengths
from collab_llm_lab.home.training.evaluate import seeing_figures
from collab_llm_lab.home.training.models import SIZES, tokenizer_in
from collab_llm_lab.home.training.pictures import GRID, Pictures, make_shards, shard_folder
from collab_llm_lab.home.training.seeing import seeing_questions
from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.nav.learner import PictureLearner, Supervision
from collab_llm_lab.training.nav.models import build, export
from collab_llm_lab.training.run import MakeStage, make_stages
from collab_llm_lab.training.stopping import StopRequest, processes_ignoring_sigint
from collab_llm_nodes.errors import CollabError, ConfigError

SEEING_LENGTHS = Lengths(text=18, answer=8)


@dataclass(frozen=True)
class SeeingPlan:
    """The first stage of a model; with equal values it gives equal models on one machine."""

    recipe: Recipe = Recipe(
        32,
        1.5e-3,
        steps=12_000,
        warmup=300,
        beta2=0.98,
        compile=True,
        bfloat16=True,
        measure_every=500,
    )
    role: str = "target"
    shards: int = 40
    first_shards: int = 2
    """Shards that are rendered before the first step ..."""
    steps_per_shard: int = 60
    """... and the steps after which one more is used; a second process renders them meanwhile."""
    dense_weight: float = 4.0
    name_weight: float = 0.5
    seed: int = 0

    def used(self, step: int) -> int:
        """Return the number of shards that ``step`` draws from."""
        return min(self.shards, self.first_shards + step // self.steps_per_shard)


def train_seeing(
    plan: SeeingPlan,
    data: Path,
    run: Path,
    report: loop.Progress = loop.ignore_progress,
    stop: loop.Stop = lambda: False,
) -> bool:
    """Train the first stage, from where an earlier call stopped; return True when finished.

    The run folder holds ``state.pt``, ``curve.json`` and, at the end, ``model/``.
    """
    tokenizer = tokenizer_in(run.parent)
    learner = PictureLearner(
        build(SIZES[plan.role], tokenizer, plan.seed),
        tokenizer,
        plan.recipe,
        GRID,
        Supervision(WORDS, plan.dense_weight, plan.name_weight),
    )
    loop.restore(learner, run, learner.device)
    batches = Batches(tokenizer, plan.seed, seeing_questions, SEEING_LENGTHS)
    pictures: dict[int, Pictures] = {}

    def advance() -> dict[str, float]:
        used = plan.used(learner.step)
        if used not in pictures:
            pictures.clear()
            pictures[used] = Pictures([shard_folder(data, number) for number in range(used)])
        return learner.learn(*batches.make([(pictures[used], plan.recipe.batch)], learner.step))

    def measure() -> dict[str, float]:
        return seeing_figures(learner.model, tokenizer, data)

    with rendering(data, plan.shards) as renderer:

        def stopped() -> bool:
            return renderer.wait(plan.used(learner.step), stop)

        finished = loop.train(learner, run, advance, measure=measure, report=report, stop=stopped)
    if finished:
        learner.save_model(run / "model")
    return finished


class Rendering:
    """Shards that a second process renders."""

    def __init__(self, data: Path, count: int) -> None:
        self._data = data
        self._process = multiprocessing.get_context("spawn").Process(
            target=_render, args=(data, count)
        )
        if not shard_folder(data, count - 1).exists():
            with processes_ignoring_sigint():
                self._process.start()

    def wait(self, count: int, stop: loop.Stop) -> bool:
        """Wait until the first ``count`` shards are there; return True if ``stop`` did earlier."""
        while not stop():
            if shard_folder(self._data, count - 1).exists():
                return False
            self._process.join(1.0)
            if self._process.exitcode is not None:
                raise CollabError(
                    f"rendering ended with status {self._process.exitcode}",
                    field="--out",
                    remedy="see the error above; the same command goes on from here",
                )
        return True

    def end(self) -> None:
        """End the process; a later one goes on from the last whole shard."""
        if self._process.pid is not None:
            self._process.terminate()
            self._process.join()


def _render(data: Path, count: int) -> None:
    os.environ.setdefault("LP_NUM_THREADS", "1")
    make_shards(data, count)


@contextmanager
def rendering(data: Path, count: int) -> Iterator[Rendering]:
    """Render the first ``count`` shards beside what is done within the context."""
    process = Rendering(data, count)
    try:
        yield process
    finally:
        process.end()


def export_stage(name: str, out: Path, folder: Path) -> None:
    """Write the present model of a stage in float16.

    Raises:
        ConfigError: the stage has not saved anything yet.
    """
    state = out / name / loop.STATE
    if not state.exists():
        raise ConfigError(
            f"{state} does not exist", field="--export", remedy=f"train the stage {name} first"
        )
    tokenizer = tokenizer_in(out)
    model = build(SIZES[ROLES[name]], tokenizer, 0)
    saved = torch.load(state, weights_only=True, map_location="cpu")["model"]
    own = {key.removeprefix("model."): v for key, v in saved.items() if key.startswith("model.")}
    model.load_state_dict(own)
    export(model, tokenizer, folder, torch.float16, GRID)


STAGES: dict[str, Callable[[Path, Path, loop.Progress, loop.Stop], bool]] = {
    "seeing": partial(train_seeing, SeeingPlan()),
}
ROLES = {"seeing": "target"}
SHOWN = ("answer_loss", "dense_loss", "name_loss", "direction", "unseen", "pair_direction", "way")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the stages that are not done, or export the present state of one."""
    parser = argparse.ArgumentParser(description="Train the home's pair; resumable.")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs")
    parser.add_argument("--data", type=Path, help="folder of pictures; OUT/data if not given")
    parser.add_argument("--hours", type=float, default=0.0, help="stop after this long; 0: never")
    parser.add_argument("--stage", choices=STAGES, help="only this one")
    parser.add_argument("--export", type=Path, help="folder for the present model of --stage")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # models this small are slower on more
    data = options.data or options.out / "data"
    if options.export:
        export_stage(options.stage or next(iter(STAGES)), options.out, options.export)
        return
    chosen = [options.stage] if options.stage else list(STAGES)
    stages: dict[str, MakeStage] = {
        name: partial(STAGES[name], data, options.out / name) for name in chosen
    }
    with StopRequest() as stop:
        make_stages(options.out, stages, options={}, hours=options.hours, shown=SHOWN, stop=stop)
    stop.end()


if __name__ == "__main__":
    main()
