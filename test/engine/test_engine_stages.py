"""A model divided into stages equals the whole, and each stage loads its own tensors only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sessions import near
from tiny_models import VISION, tiny_folder, tiny_model, tiny_prompt

from collab_llm_nodes.engine import attention
from collab_llm_nodes.engine.backend import Chunk
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.pictures import encode_pictures, features_within
from collab_llm_nodes.engine.stage import Stage, StageFeed, StageSession
from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError, ProtocolError
from collab_llm_nodes.models.architectures import ARCHITECTURES
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.partial import load_vision, read_facts
from collab_llm_nodes.models.prompt import Prompt, encode

TEXT = [name for name, found in ARCHITECTURES.items() if not found.vision]
SEEING = VISION


def divided(architecture: str, cuts: list[int], paged: bool | None = None) -> list[Stage]:
    config = ModelConfig(str(tiny_folder(architecture)))
    ends = zip([0, *cuts], [*cuts, 4], strict=True)
    return [Stage(config, first, last, paged=paged) for first, last in ends]


@pytest.mark.parametrize(
    ("architecture", "paged"),
    [*((name, None) for name in TEXT), ("qwen2", True), ("gemma3_text", True)],
)
def test_any_division_and_any_operations_equal_the_whole_model(
    architecture: str, paged: bool | None
) -> None:
    engine = Engine(tiny_model(architecture))
    prompt = encode(tiny_prompt(architecture), engine.loaded)
    tokens = st.integers(0, engine.vocab_size - 1)

    @settings(max_examples=12)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        cuts = sorted(data.draw(st.sets(st.integers(1, 3)), label="cuts"))
        stages = divided(architecture, cuts, paged)
        whole, parts = engine.open(prompt), [stage.open() for stage in stages]

        def run(rows: list[int], parents: list[int] | None) -> torch.Tensor:
            passed: list[int] | torch.Tensor = rows
            for stage, part in zip(stages, parts, strict=True):
                (passed,) = stage.run([StageFeed(part, passed, None, parents)])
            assert isinstance(passed, torch.Tensor)
            return passed

        near(run(list(prompt.ids), None), whole.feed(prompt.ids))
        for _ in range(data.draw(st.integers(1, 6), label="steps")):
            action = data.draw(st.sampled_from(["feed", "grow", "roll back", "retain", "fork"]))
            ids = data.draw(st.lists(tokens, min_size=1, max_size=4), label="ids")
            if action == "feed":
                near(run(ids, None), whole.feed(ids))
            elif action == "grow" and whole.length >= len(prompt.ids):
                first = whole.columns
                parents = [data.draw(st.integers(0, first + i - 1)) for i in range(len(ids))]
                near(run(ids, parents), whole.grow(ids, parents))
            elif action == "roll back":
                n = data.draw(st.integers(len(prompt.ids), whole.length), label="length")
                whole.length = n
                for part in parts:
                    part.length = n
            elif action == "retain" and whole.columns > whole.length:
                column = whole.columns - 1
                try:
                    whole.retain(column)
                except ProtocolError:  # its path leaves the prompt
                    continue
                for part in parts:
                    part.retain(column)
            elif action == "fork":
                parts = [part.fork() for part in parts]
                whole = whole.fork()
        near(run([7], None), whole.feed([7]))

    check()


class Front:
    """Drives stages as the holder of the vision encoder does, which holds nothing else."""

    def __init__(
        self, architecture: str, prompt: Prompt, cuts: list[int], paged: bool | None = None
    ) -> None:
        loaded, _ = load_vision(read_facts(ModelConfig(str(tiny_folder(architecture)))))
        self.prompt = encode(prompt, loaded)
        self._stages = divided(architecture, cuts, paged)
        self._parts = [stage.open() for stage in self._stages]
        self._placeholder = loaded.model.config.image_token_id
        self._features = torch.empty(0, self._stages[0].feature_width)
        if self.prompt.pixel_values is not None:
            self._features = encode_pictures(loaded, self.prompt, self._features)

    def feed(self, ids: Sequence[int]) -> torch.Tensor:
        start = self._parts[0].length
        within = features_within(self.prompt, self._placeholder, start, len(ids))
        positions = self.prompt.positions(start, len(ids))
        rows: Sequence[int] | torch.Tensor = ids
        for stage, part in zip(self._stages, self._parts, strict=True):
            features = self._features[within] if stage.takes_ids else None
            feed = StageFeed(part, rows, positions=positions, features=features)
            (rows,) = stage.run([feed])
        assert isinstance(rows, torch.Tensor)
        return rows

    def cut(self, length: int) -> None:
        for part in self._parts:
            part.length = length


@pytest.mark.parametrize("paged", [None, True])
@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("architecture", SEEING)
def test_stages_of_a_model_that_sees_equal_the_whole_one(
    architecture: str, images: int, paged: bool | None
) -> None:
    """Prompts come in pieces that cut pictures; a generated placeholder is a token like others."""
    engine = Engine(tiny_model(architecture))
    asked = tiny_prompt(architecture, images=images)
    whole = engine.open(encode(asked, engine.loaded))
    front = Front(architecture, asked, [2, 3], paged)
    ids = front.prompt.ids
    placeholder = engine.loaded.model.config.image_token_id
    for start in range(0, len(ids), 7):
        near(front.feed(ids[start : start + 7]), whole.feed(ids[start : start + 7]))
    near(front.feed([9, placeholder, 11]), whole.feed([9, placeholder, 11]))
    for length in (len(ids) + 1, len(ids) // 2):
        front.cut(length)
        whole.length = length
        rest = [*ids[length:], 12, 13]
        near(front.feed(rest), whole.feed(rest))


@pytest.mark.parametrize("architecture", SEEING)
def test_the_vision_encoder_is_held_in_front_of_the_stages_and_nowhere_else(
    architecture: str,
) -> None:
    model = tiny_model(architecture).model
    encoder = sum(p.nbytes for p in model.model.visual.parameters())
    loaded, size = load_vision(read_facts(ModelConfig(str(tiny_folder(architecture)))))
    held = {n for n, p in loaded.model.named_parameters() if p.device.type != "meta"}
    assert size == encoder
    assert held == {n for n, _ in model.named_parameters() if n.startswith("model.visual.")}
    for stage in divided(architecture, [2, 3]):
        tensors = stage.parts.layers.parameters()
        assert all(p.device.type != "meta" for p in tensors)
    total = sum(p.nbytes for p in model.parameters()) - encoder
    shared = model.get_input_embeddings().weight.nbytes  # held by the first and the last stage
    assert sum(stage.bytes for stage in divided(architecture, [2, 3])) == total + shared


def test_tensors_are_found_by_their_old_and_their_new_names(tmp_path: Path) -> None:
    """Published checkpoints of Qwen2-VL have names of classes that transformers has no more."""
    old = tiny_folder("qwen2_vl")
    new = shutil.copytree(old, tmp_path / "new")
    file = new / "model.safetensors"
    named = {_new_name(name): tensor for name, tensor in load_file(file).items()}
    save_file(named, file, {"format": "pt"})
    for folder in (old, new):
        stage = Stage(ModelConfig(str(folder)), 1, 4)
        assert stage.bytes == divided("qwen2_vl", [1])[1].bytes
        assert load_vision(read_facts(ModelConfig(str(folder))))[1]


def _new_name(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize("architecture", TEXT)
def test_a_stage_loads_its_own_tensors_only(architecture: str) -> None:
    model = tiny_model(architecture).model
    layers = sum(p.nbytes for p in model.get_decoder().layers.parameters()) // 4
    total = sum(p.nbytes for p in model.parameters())  # tied ones once
    shared = model.get_input_embeddings().weight.nbytes if model.config.tie_word_embeddings else 0
    (whole,) = divided(architecture, [])
    assert whole.bytes == total
    first, middle, last = divided(architecture, [1, 3])
    assert middle.bytes == 2 * layers
    assert first.bytes + middle.bytes + last.bytes == total + shared
    held = [p for p in middle.parts.layers.parameters() if p.device.type != "meta"]
    assert sum(p.nbytes for p in held) == middle.bytes


def test_several_sessions_share_a_pass_of_a_stage() -> None:
    stages = divided("llama", [2])
    news = [[3, 4, 5], [6], [7] * 20]
    alone: list[torch.Tensor] = []
    for ids in news:
        hidden = stages[0].open().feed(ids)
        alone.append(stages[1].open().feed(hidden, last=1))
    first = stages[0].run([StageFeed(stages[0].open(), ids) for ids in news])
    both = stages[1].run([StageFeed(stages[1].open(), hidden, 1) for hidden in first])
    for found, expected in zip(both, alone, strict=True):
        near(found, expected)


@pytest.mark.parametrize("turned", [False, True])
def test_nodes_inside_a_shared_prefix_are_dropped_before_a_pass_is_arranged(
    turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "GATHERED", 1 << 16)
    stage = Stage(ModelConfig(str(tiny_folder("llama"))), 0, 4)

    def forks() -> list[StageSession]:
        prefix = stage.open()
        prefix.feed([i % 100 for i in range(200)], 0)
        back, on = prefix.fork(), prefix.fork()
        back.feed([1], 0)
        on.feed([2, 3], 0)
        back.retain(180)  # columns of the shared prefix after it are nodes now
        return [on, back] if turned else [back, on]

    alone = [stage.run([StageFeed(session, [7], 1)])[0] for session in forks()]
    together = stage.run([StageFeed(session, [7], 1) for session in forks()])
    for found, expected in zip(together, alone, strict=True):
        near(found, expected)


@pytest.mark.parametrize("fails", ["a", "b", "c", "the layers"])
def test_a_pass_of_a_stage_that_fails_leaves_all_sessions_as_they_were(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sessions before and after the one that cannot begin are as before."""
    stage = divided("llama", [])[0]

    def grown() -> tuple[StageSession, StageSession, StageSession]:
        found = stage.open(), stage.open(), stage.open()
        for number, session in enumerate(found):
            session.feed([3, 4, 5 + number])
            session.grow([8, 9], [1, 2])
        return found

    def feeds(sessions: tuple[StageSession, ...]) -> list[StageFeed]:
        a, b, c = sessions
        return [
            StageFeed(a, [20, 21], parents=[3, 5]),
            StageFeed(b, [22], parents=[4]),
            StageFeed(c, [23, 24, 25]),
        ]

    class Failed(Exception):
        pass

    sessions = grown()
    with monkeypatch.context() as patch:
        if fails == "the layers":
            backend: Any = stage._backend
            attend = backend._attend

            def failing(layer: int, *rest: Any) -> torch.Tensor:
                if layer == 2:
                    raise Failed
                return attend(layer, *rest)

            patch.setattr(backend, "_attend", failing)
        else:
            begin, failing_one = StageSession._begin, sessions["abc".index(fails)]

            def begins(self: StageSession, feed: StageFeed) -> Chunk:
                chunk = begin(self, feed)  # what it has done so far is undone, too
                if self is failing_one:
                    raise Failed
                return chunk

            patch.setattr(StageSession, "_begin", begins)
        with pytest.raises(Failed):
            stage.run(feeds(sessions))
    nodes_of_c = 0 if fails == "the layers" else 2  # they have been written over
    assert [s.columns for s in sessions] == [5, 5, 3 + nodes_of_c]
    assert [s.length for s in sessions] == [3, 3, 3]
    if nodes_of_c:
        (found,) = stage.run([StageFeed(sessions[2], [7], parents=[4])])
        near(found, grown()[2].grow([7], [4]))
    for found, expected in zip(stage.run(feeds(sessions)), stage.run(feeds(grown())), strict=True):
        near(found, expected)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("phi3", "known architectures"), ("internvl", "known architectures"), ("resnet", "unknown")],
)
def test_architectures_whose_layers_are_not_known_are_not_divided(
    architecture: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}))
    with pytest.raises(ModelError, match=words) as refused:
        Stage(ModelConfig(str(tmp_path)), 0, 1)
    assert refused.value.field == "path"
    assert refused.value.remedy


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 2), (1, 4)])
def test_deepstack_stays_within_one_stage(first: int, last: int) -> None:
    """Pictures are added after the first two layers, and stages hand on hidden states only."""
    with pytest.raises(ModelError, match=r"first 2 layers \(DeepStack\)") as refused:
        Stage(ModelConfig(str(tiny_folder("qwen3_vl"))), first, last)
    assert "at least 2 layers" in refused.value.remedy


def test_features_and_positions_that_do_not_fit_are_refused() -> None:
    first, second = divided("qwen2_vl", [2])
    text = divided("llama", [])[0]
    assert first.placeholder is not None
    shown = [3, first.placeholder, 7]
    three = torch.zeros(3, 3, dtype=torch.int64)
    wrong: list[tuple[str, StageFeed]] = [
        ("features", StageFeed(first.open(), shown, features=torch.zeros(2, 32))),
        ("features", StageFeed(first.open(), shown, features=torch.zeros(1, 31))),
        ("features", StageFeed(second.open(), torch.zeros(3, 32), features=torch.zeros(1, 32))),
        ("features", StageFeed(text.open(), [3, 4, 5], features=torch.zeros(1, 32))),
        ("positions", StageFeed(first.open(), shown, positions=three[:, :2])),
        ("positions", StageFeed(first.open(), shown, positions=three - 1)),
        ("positions", StageFeed(first.open(), shown, positions=three + first.context)),
        ("positions", StageFeed(first.open(), shown, positions=1)),  # the lane is empty
        ("positions", StageFeed(text.open(), [3, 4, 5], positions=three)),
        ("positions", StageFeed(first.open(), [3], parents=[0], positions=three[:, :1])),
    ]
    for field, feed in wrong:
        with pytest.raises(InvalidInput) as refused:
            feed.session._stage.run([feed])
        assert refused.value.field == field
        assert feed.session.columns == 0


def test_wrong_divisions_and_feeds_are_refused() -> None:
    config = ModelConfig(str(tiny_folder("llama")))
    for first, last in ((-1, 2), (2, 2), (3, 5)):
        with pytest.raises(ConfigError, match="no layers"):
            Stage(config, first, last)
    first_stage, second = divided("llama", [2])
    ids, states = first_stage.open(), second.open()
    wrong: list[tuple[StageSession, list[int] | torch.Tensor]] = [
        (ids, torch.zeros(1, 32)),
        (ids, [first_stage.vocab_size]),
        (ids, []),
        (ids, [1] * (first_stage.context + 1)),
        (states, [1]),
        (states, torch.zeros(1, 31)),
    ]
    for session, rows in wrong:
        with pytest.raises(InvalidInput):
            session.feed(rows)
        assert session.columns == 0
    with pytest.raises(ProtocolError, match="own stage"):
        second.run([StageFeed(ids, torch.zeros(1, 32))])
    with pytest.raises(ProtocolError, match="once"):
        first_stage.run([StageFeed(ids, [1]), StageFeed(ids, [1])])
    ids.close()
    with pytest.raises(ProtocolError, match="closed"):
        ids.feed([1])
