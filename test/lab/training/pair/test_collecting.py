"""``pair collect``: what is asked, the answers, stops and kills, unusable prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import scene, tiny_folder, tiny_model
from typer.testing import CliRunner

from collab_llm_lab import reference
from collab_llm_lab.training.pair.collecting import CollectConfig, Collected, collect
from collab_llm_lab.training.pair.data import SAMPLES, read_data
from collab_llm_lab.training.pair.sources import QUESTIONS, prompts_of
from collab_llm_nodes.cli import app
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.turns import Turn

PASSAGE = " ".join(f"word{i}" for i in range(30))


def questions(folder: Path, *lines: dict[str, Any] | str) -> Path:
    """Write a file of questions."""
    file = folder / "questions.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts))
    return file


def config(tmp_path: Path, *sources: Path, model: str = "llama", **changed: Any) -> CollectConfig:
    target = ModelConfig(str(tiny_folder(model)))
    whole = CollectConfig(target, sources, tmp_path / "data", max_tokens=8, batch=3)
    return replace(whole, **changed)


def numbered(tmp_path: Path, count: int) -> Path:
    return questions(tmp_path, *({"text": f"question {i}"} for i in range(count)))


def prompts(source: Path) -> list[Prompt]:
    return [asked.read() for asked in prompts_of(source)]


# ------------------------------------------------------------ sources


def test_questions_of_a_file_have_turns_and_pictures(tmp_path: Path) -> None:
    (tmp_path / "room.jpg").write_bytes(scene(0))
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    asked = prompts(
        questions(
            tmp_path,
            {"text": "what is this?", "images": ["room.jpg"]},
            {"text": "and now?", "turns": turns},
            "",
            {"text": "Once upon", "raw": True},
        )
    )
    assert asked == [
        Prompt("what is this?", (scene(0),)),
        Prompt("and now?", turns=(Turn("user", "hello"), Turn("assistant", "hi"))),
        Prompt("Once upon", raw=True),
    ]


def test_pictures_are_asked_about_and_texts_are_begun(tmp_path: Path) -> None:
    (tmp_path / "b.JPG").write_bytes(scene(1))
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "a.md").write_text(f"# Short\n\n{PASSAGE}\n\n{PASSAGE}\n")
    (tmp_path / "notes.csv").write_text("nothing to ask")
    begun = Prompt(" ".join(PASSAGE.split()[:10]), raw=True)
    asked = [Prompt(question, (scene(1),)) for question in QUESTIONS]
    assert prompts(tmp_path) == [*asked, begun, begun]
    assert prompts(tmp_path / "deeper" / "a.md") == [begun, begun]
    assert prompts_of(tmp_path, ("why?",))[0].read() == Prompt("why?", (scene(1),))


@pytest.mark.parametrize("name", ["absent", "empty", "picture.gif", "other.txt"])
def test_a_source_that_holds_nothing_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.gif").write_bytes(b"GIF89a")
    (tmp_path / "other.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput) as caught:
        prompts_of(tmp_path / name)
    assert caught.value.field == "SOURCE"


def test_a_bag_that_was_never_closed_is_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "drives" / "one").mkdir(parents=True)
    (tmp_path / "drives" / "one" / "one_0.mcap").write_bytes(b"")
    with pytest.raises(InvalidInput, match="was not closed"):
        prompts_of(tmp_path / "drives")


@pytest.mark.ros
def test_a_drive_is_asked_what_the_navigator_asked(tmp_path: Path) -> None:
    from array import array

    from bag_content import drive, write_bag

    messages = drive(3)
    for topic, message in messages:
        if topic == "observation":
            message.image.data = array("B", scene(message.sequence))
    write_bag(tmp_path / "drives", messages)
    asked = prompts(tmp_path / "drives")
    assert asked == [Prompt(f"find the red ball. history: {n}.", (scene(n),)) for n in range(1, 4)]


@pytest.mark.ros
def test_a_drive_without_pictures_is_refused(tmp_path: Path) -> None:
    from bag_content import drive, write_bag

    from collab_llm.msg import Observation

    messages = [
        (topic, Observation() if topic == "observation" else message) for topic, message in drive()
    ]
    bag = write_bag(tmp_path, messages)
    with pytest.raises(InvalidInput, match="4 questions and no picture"):
        prompts_of(bag)


# ------------------------------------------------------------ answers


@pytest.mark.parametrize("model", ["llama", "qwen2_vl"])
def test_answers_are_the_target_s_own(tmp_path: Path, model: str) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(scene(number))
    lines: list[dict[str, Any]] = [{"text": f"question {i}"} for i in range(3)]
    lines.append({"text": "Go", "raw": True})
    if model == "qwen2_vl":
        lines += [{"text": "what is this?", "images": [f"{i}.jpg"]} for i in range(2)]
    collected = collect(config(tmp_path, questions(tmp_path, *lines), model=model))
    assert collected == Collected(len(lines), 0, True)
    loaded = tiny_model(model)
    engine = Engine(loaded)
    data = read_data(tmp_path / "data")
    for sample in data.samples:
        encoded = encode(data.prompt(sample), loaded)
        right = reference.generate(loaded, encoded, SamplingConfig(), 8, engine.eos)
        assert list(sample.answer) == right
        assert sample.ended == (right[-1] in engine.eos)


def test_answers_keep_to_a_guide(tmp_path: Path) -> None:
    guided = config(tmp_path, numbered(tmp_path, 4), guide="choice", guide_source="left\nright")
    assert collect(guided) == Collected(4, 0, True)
    data, loaded = read_data(tmp_path / "data"), tiny_model("llama")
    assert data.facts.limit == Guide("choice", "left\nright")
    assert {loaded.decode(sample.answer) for sample in data.samples} <= {"left", "right"}
    with pytest.raises(InvalidInput, match="guide"):
        collect(replace(guided, guide="none", guide_source=""))
    with pytest.raises(InvalidInput) as caught:
        collect(replace(guided, out=tmp_path / "other", guide="regex", guide_source="("))
    assert caught.value.field == "answer.guide"
    assert not (tmp_path / "other").exists()


def test_a_stopped_or_killed_call_is_gone_on_with(tmp_path: Path) -> None:
    source = numbered(tmp_path, 7)
    whole = config(tmp_path, source, temperature=0.7, seed=3)
    assert collect(replace(whole, out=tmp_path / "at once")).finished
    passes = iter(range(12))
    stopped = collect(whole, stop=lambda: next(passes, None) is None)
    assert not stopped.finished
    assert 0 < stopped.answers < 7
    file = tmp_path / "data" / SAMPLES
    file.write_bytes(file.read_bytes()[:-5])  # a kill
    counts: list[tuple[int, int]] = []
    collected = collect(whole, lambda activity, done, total, _: counts.append((done, total)))
    assert collected == Collected(7, 0, True)
    assert counts[-1] == (7, 7)
    both = [read_data(tmp_path / name).samples for name in ("data", "at once")]
    assert {s.text: s.answer for s in both[0]} == {s.text: s.answer for s in both[1]}


def test_unusable_prompts_are_named_and_left_out(tmp_path: Path) -> None:
    source = questions(
        tmp_path, {"text": "good"}, "{", {"text": "x", "image": "y"}, {"text": ""}, {"text": "fine"}
    )
    lines: list[str] = []
    collected = collect(config(tmp_path, source), on_refused=lines.append)
    assert collected == Collected(2, 3, True)
    assert [line.split(":")[1] for line in lines] == [
        f" questions.jsonl, line {number}" for number in (2, 3, 4)
    ]
    with pytest.raises(InvalidInput, match=r"3 prompts cannot be used.*line 4"):
        collect(config(tmp_path, source, max_refused=2))
    assert len(read_data(tmp_path / "data").samples) == 2


def test_pictures_for_a_model_that_reads_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "room.jpg").write_bytes(scene(0))
    with pytest.raises(InvalidInput, match="this model reads text only"):
        collect(config(tmp_path, tmp_path, max_refused=4))
    with pytest.raises(InvalidInput, match="none of 5 prompts can be used"):
        collect(config(tmp_path, tmp_path))


def test_the_command_says_how_many_answers_there_are(tmp_path: Path) -> None:
    source, out = numbered(tmp_path, 2), tmp_path / "data"
    words = ["--target", str(tiny_folder("llama")), "--max-tokens", "4", "--device", "cpu"]
    command = ["pair", "collect", str(source), *words, "--out", str(out)]
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    assert "holds 2 answers" in done.output
    assert json.loads((tmp_path / "found.json").read_text())["answers"] == 2
