"""Saved sessions go on as they were, and a file that does not fit is refused before a pass."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sessions import alone, opened
from tiny_models import VISION, tiny_folder, tiny_model

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.saved import FORMAT, checksum_of
from collab_llm_nodes.errors import InvalidInput, ModelError
from collab_llm_nodes.models.architectures import ARCHITECTURES, decoder_parts
from collab_llm_nodes.models.fingerprint import fingerprint
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sessions_go_from_one_backend_to_the_other(architecture: str, tmp_path: Path) -> None:
    file, loaded = tmp_path / "session", tiny_model(architecture)
    for first, second in ((False, True), (True, False)):
        session, prompt = opened(Engine(loaded, eager=first))
        for held in (3, len(prompt.ids) + 2):  # within the prompt, before its images; after it
            session.feed([*prompt.ids, 20, 21][session.length : held], last=0)
            session.save(file)
            engine = Engine(loaded, eager=second)
            restored = engine.restore(file)
            assert restored.length == held
            rest = [*prompt.ids, 20, 21, 22][held:]
            torch.testing.assert_close(
                restored.feed(rest, last=1)[0],
                alone(engine, prompt, [20, 21, 22]),
                atol=1e-4,
                rtol=1e-4,
            )
    assert os.listdir(tmp_path) == ["session"], "nothing is left beside it"


def test_a_restored_session_is_the_saved_one_to_the_last_bit(tmp_path: Path) -> None:
    engine = Engine(tiny_model("qwen2"))
    session, prompt = opened(engine, images=1)
    session.feed([*prompt.ids, 5, 6], last=0)
    session.save(tmp_path / "s")
    assert engine.restore(tmp_path / "s").feed([8]).equal(session.feed([8]))


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    engine, file = Engine(tiny_model("llama")), tmp_path / "session"
    session, prompt = opened(engine, images=1)
    with pytest.raises(InvalidInput, match="nothing has been fed"):
        session.save(file)
    session.feed(prompt.ids, last=0)
    with pytest.raises(InvalidInput, match="cannot write"):
        session.save(tmp_path / "no such folder" / "session")
    session.save(file)
    for other in (tiny_model("llama", seed=1), tiny_model("qwen2")):
        with pytest.raises(ModelError, match="with model"):
            Engine(other).restore(file)
    tensors, fit = load_file(file), engine._fit
    facts = {
        "format": FORMAT,
        "model": fit.model,
        "dtype": "torch.float32",
        "position": str(len(prompt.ids)),
        "position_delta": "0",
    }
    held = tensors["keys_values"]
    broken = tmp_path / "broken"
    for changed, named, error in (
        ({}, {"format": "another"}, InvalidInput),
        ({}, {"dtype": "torch.bfloat16"}, ModelError),
        ({}, {"position": str(len(prompt.ids) - 1)}, InvalidInput),
        ({}, {"position": "many"}, InvalidInput),
        ({}, {"checksum": "0" * 8}, InvalidInput),
        ({"keys_values": held[1:].contiguous()}, {}, InvalidInput),
        ({"keys_values": held.double()}, {}, InvalidInput),
        ({"prompt_ids": torch.tensor([engine.vocab_size])}, {}, InvalidInput),
        ({"prompt_ids": torch.tensor([-1])}, {}, InvalidInput),
        ({"position_ids": torch.zeros(3, 1, dtype=torch.int64)}, {}, InvalidInput),
    ):
        content = {**tensors, **changed}
        save_file(content, broken, {**facts, "checksum": checksum_of(content), **named})
        with pytest.raises(error) as caught:
            engine.restore(broken)
        assert caught.value.field == "file"
    save_file(tensors, broken, {**facts, "checksum": checksum_of(tensors)})
    assert engine.restore(broken).length == len(prompt.ids), "the file was right but for that"
    data = file.read_bytes()
    flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    for written in (b"", data[:100], data[:-1], b"\xff" * 64, flipped):
        broken.write_bytes(written)
        with pytest.raises(InvalidInput):
            engine.restore(broken)
    with pytest.raises(InvalidInput, match="not a readable session"):
        engine.restore(tmp_path / "none")


def test_a_fingerprint_is_of_the_model_and_not_of_its_layout() -> None:
    loaded = load(ModelConfig(str(tiny_folder("opt"))))  # its own, which it changes
    before = fingerprint(loaded.model)
    Engine(loaded)  # lays weights out anew
    assert fingerprint(loaded.model) == before
    layer: Any = decoder_parts(loaded.model).layers[0]
    with torch.no_grad():
        layer.fc1.weight[0, 0] += 1
        assert fingerprint(loaded.model) != before


# ---------------------------------------------------------------- images


@pytest.mark.parametrize("architecture", VISION)
def test_a_restored_session_can_go_back_to_before_its_images(
    architecture: str, tmp_path: Path
) -> None:
    engine = Engine(tiny_model(architecture))
    session, prompt = opened(engine, images=2)
    session.feed([*prompt.ids, 20], last=0)
    session.save(tmp_path / "s")
    restored = engine.restore(tmp_path / "s")
    restored.length = 1
    found = restored.feed([*prompt.ids[1:], 20], last=1)[0]
    torch.testing.assert_close(found, alone(engine, prompt, [20]), atol=5e-5, rtol=1e-4)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = torch.nan
    return changed


def without(tensor: torch.Tensor) -> None:
    return None


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[..., -1] += 1
    return changed


def wrapping(grid: torch.Tensor) -> torch.Tensor:
    """Return sizes whose product, in 64 bits, is that of the real ones."""
    changed = grid.clone()
    changed[0] = torch.tensor([1, 1 << 40, 1 << 40])
    changed[0, 0] = int(grid[0].prod())
    return changed


@pytest.mark.parametrize("architecture", VISION)
@pytest.mark.parametrize("held", ["half the prompt", "all of it"])
def test_images_that_do_not_fit_are_refused(architecture: str, held: str, tmp_path: Path) -> None:
    engine, file = Engine(tiny_model(architecture)), tmp_path / "session"
    session, prompt = opened(engine, images=2)
    placeholder = engine.loaded.model.config.image_token_id
    fed = 3 if held == "half the prompt" else len(prompt.ids)
    assert placeholder in prompt.ids[3:]
    session.feed(prompt.ids[:fed], last=0)
    session.save(file)
    tensors = load_file(file)
    with safe_open(file, "pt") as content:
        facts = content.metadata()
    text = tensors["prompt_ids"].clone()
    text[text == placeholder] = 7
    other = tensors["prompt_ids"].clone()
    other[(other == placeholder).nonzero()[0]] = 7
    wrong: list[tuple[str, Any]] = [
        ("image_features", without),
        ("image_features", with_nan),
        ("image_features", lambda t: t[:-1]),
        ("image_features", lambda t: t[:, :-1]),
        ("image_features", lambda t: t.flatten()),
        ("image_features", lambda t: t.double()),
        ("image_features", lambda t: t.long()),
        ("image_features", lambda t: torch.full_like(t, torch.inf)),
        ("image_grid_thw", without),
        ("image_grid_thw", lambda t: t[:1]),
        ("image_grid_thw", lambda t: t[0]),
        ("image_grid_thw", lambda t: t[:, :2]),
        ("image_grid_thw", lambda t: t.float()),
        ("image_grid_thw", lambda t: t.int()),
        ("image_grid_thw", lambda t: -t),
        ("image_grid_thw", lambda t: t * torch.tensor([4, 1, 1])),
        ("image_grid_thw", lambda t: torch.stack([t[:, 0] * t[:, 1], t[:, 2], t[:, 0]], 1)),
        ("image_grid_thw", wrapping),
        ("position_ids", without),
        ("position_ids", shifted),
        ("position_ids", lambda t: t + 1),
        ("position_ids", lambda t: t[:, :-1]),
        ("position_ids", lambda t: t.float()),
        ("position_ids", lambda t: t.int()),
        ("prompt_ids", lambda t: text),
        ("prompt_ids", lambda t: other),
        ("keys_values", with_nan),
    ]
    for name, change in wrong:
        changed = {**tensors, name: change(tensors[name])}
        save_file({n: t.contiguous() for n, t in changed.items() if t is not None}, file, facts)
        with pytest.raises(InvalidInput) as caught:
            engine.restore(file)
        assert caught.value.field == "file"
    for delta in ("0", "1000000", str(int(facts["position_delta"]) - 1)):
        save_file(tensors, file, {**facts, "position_delta": delta})
        with pytest.raises(InvalidInput):
            engine.restore(file)
    save_file(tensors, file, facts)
    rest = prompt.ids[fed:] or [7]
    restored = engine.restore(file).feed(rest, last=1)[0]
    assert restored.equal(session.feed(rest, last=1)[0]), "the file was right but for that"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("image_grid_thw", torch.tensor([[1, 2, 2]])),
        ("image_features", torch.zeros(1, 32)),
        ("position_ids", torch.arange(5).repeat(3, 1)),
    ],
)
def test_images_of_a_model_that_reads_text_only_are_refused(
    name: str, tensor: torch.Tensor, tmp_path: Path
) -> None:
    engine, file = Engine(tiny_model("llama")), tmp_path / "session"
    session = engine.open(EncodedPrompt((3, 4, 5, 6, 7)))
    session.feed([3, 4], last=0)
    session.save(file)
    with safe_open(file, "pt") as content:
        facts = content.metadata()
    save_file({**load_file(file), name: tensor}, file, facts)
    with pytest.raises(InvalidInput):
        engine.restore(file)


def test_no_bytes_of_a_file_can_break_a_pass(tmp_path: Path) -> None:
    """Any change of one byte is refused by name, or leaves a session that can be fed."""
    engine, file = Engine(tiny_model("qwen2_vl")), tmp_path / "session"
    session, prompt = opened(engine, images=1)
    session.feed(prompt.ids[:3], last=0)
    session.save(file)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    places = {*range(8), *rng.integers(8, header, 100), *rng.integers(header, len(whole), 100)}
    refused = 0
    for place in sorted(map(int, places)):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(changed)
        try:
            restored = engine.restore(file)
        except (InvalidInput, ModelError):
            refused += 1
            continue
        found = restored.feed([*restored._prompt.ids[restored.length :], 20], last=1)
        assert found.shape == (1, engine.vocab_size)
    assert refused > 50
