"""A folder of a target's answers: written, killed, gone on with, read, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import scene, tiny_model

from collab_llm_lab.training.pair.data import (
    FACTS,
    PICTURES,
    SAMPLES,
    Data,
    Facts,
    Target,
    read_data,
    writing,
)
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.turns import Turn

TARGET = Target("a model", "f" * 64, "v" * 64, "t" * 64)
FACTS_OF = Facts(TARGET, temperature=0.0, max_tokens=8, seed=0)
PROMPTS = (
    Prompt("where is the ball?", (scene(0), scene(1))),
    Prompt("and now?", turns=(Turn("user", "go on"), Turn("assistant", "gladly"))),
    Prompt("Once upon\na \u2028 time \ud800", raw=True),
)


def write(folder: Path, prompts: tuple[Prompt, ...] = PROMPTS) -> Data:
    with writing(folder, FACTS_OF) as writer:
        for number, prompt in enumerate(prompts):
            writer.add(prompt, (number, 7), ended=True, source="test")
    return read_data(folder)


def test_prompts_come_back_as_they_were(tmp_path: Path) -> None:
    data = write(tmp_path)
    assert data.facts == FACTS_OF
    assert [data.prompt(sample) for sample in data.samples] == list(PROMPTS)
    assert [sample.answer for sample in data.samples] == [(0, 7), (1, 7), (2, 7)]
    assert all(sample.ended and sample.source == "test" for sample in data.samples)


def test_a_known_prompt_is_not_added_again(tmp_path: Path) -> None:
    write(tmp_path)
    with writing(tmp_path, FACTS_OF) as writer:
        assert len(writer) == 3
        assert PROMPTS[0] in writer
        assert Prompt("where is the ball?", (scene(0),)) not in writer
        assert replace(PROMPTS[2], raw=False) not in writer
    assert len(write(tmp_path).samples) == 3


def test_one_prompt_of_ten_is_held_out_whatever_else_is_there(tmp_path: Path) -> None:
    prompts = tuple(Prompt(f"question {i}") for i in range(400))
    train, held_out = write(tmp_path / "all", prompts).parts()
    assert 20 <= len(held_out) <= 60
    assert len(train) + len(held_out) == 400
    _, fewer = write(tmp_path / "half", prompts[::-2]).parts()
    assert {s.text for s in fewer} == {s.text for s in held_out} & {p.text for p in prompts[::-2]}


def test_too_few_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="0 held out") as caught:
        write(tmp_path, (Prompt("question 0"),)).parts()
    assert caught.value.field == "--data"


def test_a_kill_at_any_byte_costs_the_last_answer_at_most(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / SAMPLES
    whole = file.read_bytes()
    begin_of_last = whole[:-1].rindex(b"\n") + 1
    for end in range(begin_of_last, len(whole)):
        file.write_bytes(whole[:end])
        assert len(read_data(tmp_path).samples) == 2
        with writing(tmp_path, FACTS_OF) as writer:
            assert PROMPTS[2] not in writer
            writer.add(PROMPTS[2], (2, 7), ended=True, source="test")
        assert file.read_bytes() == whole


def test_a_kill_before_the_first_answer_is_gone_on_from(tmp_path: Path) -> None:
    with writing(tmp_path, FACTS_OF):
        pass
    (tmp_path / SAMPLES).unlink()
    with pytest.raises(InvalidInput, match="holds no answers"):
        read_data(tmp_path)
    assert len(write(tmp_path).samples) == 3


@pytest.mark.parametrize("changed", ["fingerprint", "vocabulary", "template"])
def test_another_target_is_refused(tmp_path: Path, changed: str) -> None:
    data = write(tmp_path)
    other = replace(TARGET, **{changed: "0" * 64})
    with pytest.raises(InvalidInput, match="holds answers of a model") as reading:
        data.check_target(other)
    assert reading.value.field == "--data"
    with pytest.raises(InvalidInput) as caught, writing(tmp_path, replace(FACTS_OF, target=other)):
        pass
    assert caught.value.field == "--out"
    data.check_target(replace(TARGET, path="the same at another place"))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"temperature": 0.5}, "--temperature"),
        ({"max_tokens": 9}, "--max-tokens"),
        ({"seed": 1}, "--seed"),
    ],
)
def test_a_folder_asked_otherwise_is_refused(
    tmp_path: Path, changed: dict[str, float], field: str
) -> None:
    write(tmp_path)
    with (
        pytest.raises(InvalidInput, match="was begun with") as caught,
        writing(tmp_path, replace(FACTS_OF, **changed)),  # type: ignore[arg-type]
    ):
        pass
    assert caught.value.field == field


def test_two_writers_of_one_folder_are_refused(tmp_path: Path) -> None:
    with (
        writing(tmp_path, FACTS_OF),
        pytest.raises(ConfigError, match="another process"),
        writing(tmp_path, FACTS_OF),
    ):
        pass


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"text": "x"}', "null", '{"answer": []}', "\udcff", "x" * 10_000]
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path)
    file = tmp_path / SAMPLES
    file.write_bytes(file.read_bytes() + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(InvalidInput, match="damaged in line 4"):
        read_data(tmp_path)
    with pytest.raises(InvalidInput, match="damaged in line 4"), writing(tmp_path, FACTS_OF):
        pass


@pytest.mark.parametrize("answer", ["[]", "[-1]", "[0.5]", '["a"]', "7"])
def test_an_answer_that_is_no_list_of_tokens_is_refused(tmp_path: Path, answer: str) -> None:
    write(tmp_path)
    file = tmp_path / SAMPLES
    file.write_text(file.read_text().replace("[0, 7]", answer))
    with pytest.raises(InvalidInput, match="damaged in line 1"):
        read_data(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"target": 3}'])
def test_damaged_facts_are_a_typed_error(tmp_path: Path, content: str) -> None:
    write(tmp_path)
    (tmp_path / FACTS).write_text(content)
    with pytest.raises(InvalidInput, match="cannot read"):
        read_data(tmp_path)


@pytest.mark.parametrize("folder", ["", "absent"])
def test_another_folder_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(InvalidInput, match="holds no data.json"):
        read_data(tmp_path / folder)


def test_a_picture_that_changed_or_is_missing_is_a_typed_error(tmp_path: Path) -> None:
    data = write(tmp_path)
    file = tmp_path / PICTURES / data.samples[0].images[1]
    file.write_bytes(scene(2))
    with pytest.raises(InvalidInput, match="its content is not"):
        data.prompt(data.samples[0])
    file.unlink()
    with pytest.raises(InvalidInput, match="cannot read"):
        data.prompt(data.samples[0])


def test_a_picture_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    data = write(tmp_path / "data")
    (tmp_path / "secret").write_bytes(scene(0))
    stranger = replace(data.samples[0], images=("../../secret",))
    with pytest.raises(CollabError, match="cannot read"):
        data.prompt(stranger)


def test_a_target_is_known_by_its_weights_and_its_template() -> None:
    own, again = Target.of(tiny_model("llama")), Target.of(tiny_model("llama", exit_layers=(1,)))
    assert own == again
    other = Target.of(tiny_model("llama", seed=1))
    assert other.fingerprint != own.fingerprint
    assert (other.vocabulary, other.template) == (own.vocabulary, own.template)
