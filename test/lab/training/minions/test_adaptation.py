"""Rows say the same as single prompts; the training runs, resumes and repeats."""

from __future__ import annotations

import random
import shutil
import time
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from text_family import vocabulary, write_family
from transformers import AutoTokenizer

from collab_llm_lab.training.minions.chats import Group, planner_group, worker_group
from collab_llm_lab.training.minions.rows import (
    BRANCH,
    CLASS,
    IDS,
    POSITION,
    SOURCE,
    TEXT,
    Source,
    rows,
    tree,
    visible,
)
from collab_llm_lab.training.minions.trainer import TrainMinions, train_minions
from collab_llm_lab.training.text.forward import TextForward
from collab_llm_lab.training.text.models import TINY, build
from collab_llm_lab.training.text.rendering import ANSWERED, SHORT, Renderer, prompt_text
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.low_rank import LowRank
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.minions.embedded.remote import ROLE, open_planner
from collab_llm_nodes.protocols.minions.messages import CannotPlan
from collab_llm_nodes.protocols.minions.reading import worker_output


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family"))


def groups(count: int = 3) -> list[Group]:
    return [worker_group(random.Random(seed), 5, 4) for seed in range(count)]


def test_a_branch_in_a_row_computes_as_its_prompt_alone() -> None:
    tokenizer = vocabulary()
    renderer = Renderer(tokenizer)
    made = groups()
    row = torch.from_numpy(
        next(rows((tree(renderer, g) for g in made * 2), 1500, renderer.text_end))
    )
    row = row[None].long()
    forward = TextForward(build(TINY, tokenizer, 0).eval(), 2048)
    with torch.inference_mode():
        hidden, _ = forward.guided(
            row[:, IDS], (), row[:, POSITION], row[:, POSITION], visible(row)
        )
        packed = forward.logits(hidden)[0]
        checked = 0
        for text, group in enumerate(made, 1):
            for branch, chat in enumerate(group.chats, 1):
                place = (row[0, TEXT] == text) & (row[0, BRANCH] == branch)
                if not place.any():
                    continue
                whole = prompt_text(chat[:-1])
                (prompt,), (reply,) = (
                    renderer.encode([whole]),
                    renderer.encode([chat[-1].content + "<|im_end|>"]),
                )
                ids = torch.tensor([prompt + reply])
                alone = forward.logits(forward(ids)[-1])[0]
                own = packed[place]
                torch.testing.assert_close(own, alone[-len(own) :], atol=1e-4, rtol=1e-4)
                said = row[0, IDS][place & (row[0, CLASS] >= ANSWERED)]
                assert said.tolist() == reply
                checked += 1
    assert checked >= 8


def test_a_source_holds_the_next_token() -> None:
    tokenizer = vocabulary()
    batch, _ = Source(tokenizer, lambda n: groups(n % 7 + 1)[-1], 1200).batch(0, 2)
    known = 0
    for row in batch:
        for place in torch.nonzero(row[SOURCE] >= 0).flatten().tolist():
            source = int(row[SOURCE, place])
            assert source < place
            assert row[TEXT, source] == row[TEXT, place]
            assert row[BRANCH, source] == 0
            if row[CLASS, place] >= ANSWERED and row[IDS, source] == row[IDS, place + 1]:
                known += 1
    assert known > 50


def test_the_end_of_a_cited_line_looks_at_the_next_one_or_at_nothing() -> None:
    renderer = Renderer(vocabulary())
    followed = last = 0
    for seed in range(120):
        group = worker_group(random.Random(seed), 12, 6, role="job")
        made = tree(renderer, group)
        stem = renderer.encode_with_places([prompt_text(group.chats[0][:-1])])[0][1]
        text = prompt_text(group.chats[0][:-1])
        for chat, lines, branch in zip(group.chats, group.sources, made.branches, strict=True):
            if not lines or '"citation"' not in chat[-1].content:
                continue
            ((_, starts),) = renderer.encode_with_places([chat[-1].content + "<|im_end|>"])
            before = len(branch.ids) - len(starts) - 1
            cursor = 0
            for number, (line, _) in enumerate(lines):
                cursor = chat[-1].content.index(line, cursor) + len(line)
                ends = [i for i, start in enumerate(starts) if start < cursor][-1]
                assert branch.classes[before + 1 + ends] == SHORT
                looked = branch.sources[before + ends]
                if number + 1 == len(lines):
                    assert looked == 0
                    last += 1
                else:
                    other, quoted = lines[number + 1]
                    there = text.index(other)
                    assert there + quoted <= stem[looked] < there + len(other)
                    followed += 1
    assert followed > 5
    assert last > 20


def test_replies_are_what_the_machines_read() -> None:
    found = absent = 0
    for group in groups(40):
        for chat in group.chats:
            if "## Task" not in chat[0].content:
                continue
            output = worker_output(chat[-1].content, quotes=False, max_characters=2000)
            assert output is not None
            if output.answer is None:
                absent += 1
            else:
                found += 1
                assert output.citation is not None
                assert all(line in chat[0].content for line in output.citation.split("; "))
    assert found > 20
    assert absent > 20


def test_a_planners_questions_have_their_short_form() -> None:
    for chat in planner_group(random.Random(0), 20).chats:
        assert chat[0].content.startswith("Plan: ")
        assert chat[1].content.startswith('{"plan": ')


def train(family: Path, out: Path, stages: tuple[str, ...] = ("worker", "planner")) -> bool:
    return train_minions(TrainMinions(out, family, plan="tiny", stages=stages))


def test_the_training_repeats_to_the_bit_and_leaves_the_target_alone(
    family: Path, tmp_path: Path
) -> None:
    assert train(family, tmp_path / "a")
    assert train(family, tmp_path / "b")
    for name in ("text-worker/model.safetensors", f"text-target/collab_llm/{ROLE}.safetensors"):
        first, second = (tmp_path / each / "models" / name for each in "ab")
        assert first.read_bytes() == second.read_bytes()
    before = (family / "text-worker" / "model.safetensors").read_bytes()
    assert (tmp_path / "a/models/text-worker/model.safetensors").read_bytes() != before
    assert not (tmp_path / "a/models/text-target/model.safetensors").exists()
    target = load(ModelConfig(path=str(family / "text-target"))).model
    LowRank.load(tmp_path / "a/models/text-target", ROLE, target).merge()
    trained = tmp_path / "a/models/text-target"
    shutil.copytree(trained, family / "text-target", dirs_exist_ok=True)  # as it ships
    with (
        closing(open_planner(ModelConfig(path=str(family / "text-target")))) as planner,
        pytest.raises(CannotPlan),
    ):
        planner.understand("How are you?", Control(time.monotonic() + 60))


def test_a_stopped_training_goes_on(family: Path, tmp_path: Path) -> None:
    config = TrainMinions(tmp_path / "c", family, plan="tiny", stages=("worker",), hours=1e-9)
    assert not train_minions(config)
    assert train(family, tmp_path / "c", ("worker",))
    assert train(family, tmp_path / "d", ("worker",))
    first, second = (tmp_path / each / "models/text-worker/model.safetensors" for each in "cd")
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(ConfigError, match="--seed: .*begun with 0, not 5"):
        train_minions(replace(config, seed=5))
    with pytest.raises(ConfigError, match="--models: .*was begun with"):
        train_minions(replace(config, models=tmp_path))
    assert not train_minions(replace(config, out=tmp_path / "f", hours=0.0), lambda: True)


def test_wrong_settings_are_named(family: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean tiny"):
        TrainMinions(tmp_path, family, plan="tini")
    with pytest.raises(ConfigError, match="--stages"):
        TrainMinions(tmp_path, family, stages=("reader",))
    with pytest.raises(ConfigError, match="text-worker"):
        train_minions(TrainMinions(tmp_path / "e", tmp_path, plan="tiny"))


def test_rows_are_drawn_from_the_step_alone(family: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family / "text-worker")
    source = Source(tokenizer, lambda n: worker_group(random.Random(n), 4, 3), 600)
    first, again, other = source.batch(3, 2), source.batch(3, 2), source.batch(4, 2)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert list(islice(first[1].unique().tolist(), 3)) == [0.0, 1.0, 4.0]
