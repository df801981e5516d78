"""Medusa heads: their law, their files, and the models that they refuse."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_models import tiny_folder, tiny_model
from transformers import LlamaForCausalLM

from collab_llm_nodes.engine.kernels import Head
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.architectures import DecoderParts, decoder_parts
from collab_llm_nodes.models.heads import (
    NAME,
    PUBLISHED,
    MedusaHeads,
    count_head_weights,
    count_heads,
    head_fingerprint,
)
from collab_llm_nodes.models.trained import trained_files
from collab_llm_nodes.protocols.jupiter.stage_lanes import guess


def parts(seed: int = 0) -> DecoderParts:
    return decoder_parts(tiny_model("llama", seed).model)


def shaken(seed: int = 0) -> MedusaHeads:
    own = parts(seed)
    heads = MedusaHeads(own.hidden_size, fingerprint=head_fingerprint(own))
    torch.manual_seed(3)
    with torch.no_grad():
        heads.weight.normal_(std=0.5)
    return heads


def test_untrained_heads_say_what_the_model_says() -> None:
    own = parts()
    hidden = torch.randn(2, 7, own.hidden_size)
    drafts = MedusaHeads(own.hidden_size, 3).draft(hidden, own.head)
    assert drafts.shape == (2, 7, 3)
    assert torch.equal(drafts, own.head(hidden).argmax(-1)[..., None].expand(-1, -1, 3))


def test_each_head_is_a_residual_block_of_its_own() -> None:
    heads, own = shaken(), parts()
    hidden = torch.randn(5, own.hidden_size)
    for number, found in enumerate(heads(hidden).unbind(-2)):
        expected = F.silu(F.linear(hidden, heads.weight[number])) + hidden
        torch.testing.assert_close(found, expected)
        drafted = heads.draft(hidden, own.head)[:, number]
        assert torch.equal(drafted, own.head(expected).argmax(-1))


def test_saved_heads_are_the_same_in_float16(tmp_path: Path) -> None:
    heads = shaken()
    heads.save(tmp_path)
    read = MedusaHeads.load(tmp_path, parts())
    assert (read.heads, read.weight.dtype) == (5, torch.float32)
    torch.testing.assert_close(read.weight, heads.weight.half().float(), atol=0, rtol=0)


def test_the_fingerprint_is_of_the_model_not_of_its_precision() -> None:
    halves = LlamaForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float16)
    same = head_fingerprint(decoder_parts(halves))
    halves.float()
    assert head_fingerprint(decoder_parts(halves)) == same
    assert head_fingerprint(parts(seed=1)) != same


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    shaken().save(tmp_path)
    with pytest.raises(ModelError, match="heads of model") as caught:
        MedusaHeads.load(tmp_path, parts(seed=1))
    assert caught.value.field == "heads"
    facts = json.loads(trained_files(tmp_path, NAME)[1].read_text())
    wide = MedusaHeads(facts["hidden_size"] * 2, fingerprint=facts["fingerprint"])
    wide.save(tmp_path)
    with pytest.raises(ModelError, match="width"):
        MedusaHeads.load(tmp_path, parts())


@pytest.mark.parametrize("content", ["", "{}", '{"hidden_size": 8, "heads": "x"}', None])
def test_unreadable_heads_are_a_typed_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        _, description = trained_files(tmp_path, NAME)
        description.parent.mkdir()
        description.write_text(content)
    with pytest.raises(ModelError, match="cannot read the Medusa heads"):
        MedusaHeads.load(tmp_path, parts())


def published(hidden: int, rows: int, count: int = 2) -> dict[str, torch.Tensor]:
    """Random heads in the layout of FasterDecoding/Medusa; ``rows`` 0: the model's LM head."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    found = {}
    for i in range(count):
        found[f"{i}.0.linear.weight"] = random(hidden, hidden)
        found[f"{i}.0.linear.bias"] = random(hidden)
        if rows:
            found[f"{i}.1.weight"] = random(rows, hidden)
    return found


@pytest.mark.parametrize("own", [True, False])
def test_published_heads_guess_with_their_own_lm_heads(tmp_path: Path, own: bool) -> None:
    model = parts()
    width, rows = model.hidden_size, model.head.out_features
    weights = published(width, rows if own else 0)
    save_file(weights, tmp_path / f"{PUBLISHED}.safetensors")
    # What medusa-vicuna-7b-v1.3 says of its five heads is wrong as well.
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 7}')
    heads = MedusaHeads.load(tmp_path, model)
    assert heads.heads == count_heads(tmp_path) == 2
    assert count_head_weights(tmp_path) == sum(w.numel() for w in weights.values())
    hidden = torch.randn(3, width)
    for i in range(2):
        linear = F.linear(hidden, weights[f"{i}.0.linear.weight"], weights[f"{i}.0.linear.bias"])
        state = hidden + F.silu(linear)
        expected = F.linear(state, weights[f"{i}.1.weight"]) if own else model.head(state)
        torch.testing.assert_close(heads.logits(hidden, model.head)[:, i], expected)
        assert torch.equal(heads.draft(hidden, model.head)[:, i], expected.argmax(-1))


def test_a_stage_guesses_with_published_lm_heads(tmp_path: Path) -> None:
    model = decoder_parts(tiny_model("llama", padding=16).model)
    width, rows = model.hidden_size, model.head.out_features
    save_file(published(width, rows), tmp_path / f"{PUBLISHED}.safetensors")
    heads = MedusaHeads.load(tmp_path, model)
    vocabulary = rows - 16
    state = torch.randn(width)
    found = guess(heads, Head(model, vocabulary), state, 3)
    best = heads.logits(state, model.head)[:, :vocabulary].topk(3).indices
    assert list(found) == best.flatten().tolist()


def test_published_heads_of_another_build_or_model_are_refused(tmp_path: Path) -> None:
    model = parts()
    width, rows = model.hidden_size, model.head.out_features
    file = tmp_path / f"{PUBLISHED}.safetensors"
    for weights, message in (
        (published(2 * width, rows), "heads of width"),
        (published(width, rows + 1), "heads of width"),
        (published(width, rows) | {"0.2.weight": torch.ones(1)}, "0.2.weight is not understood"),
        ({"0.0.linear.weight": torch.ones(width, width)}, "0.0.linear.bias"),
        ({"medusa_head.0": torch.ones(1)}, "cannot read the Medusa heads"),
    ):
        save_file(weights, file)
        with pytest.raises(ModelError, match=message):
            MedusaHeads.load(tmp_path, model)
    file.write_bytes(b"no tensors")
    for read in (count_heads, count_head_weights, lambda folder: MedusaHeads.load(folder, model)):
        with pytest.raises(ModelError, match="cannot read"):
            read(tmp_path)


def test_pickled_heads_are_refused_with_a_command_that_converts_them(tmp_path: Path) -> None:
    model = parts()
    weights = published(model.hidden_size, model.head.out_features)
    torch.save(weights, tmp_path / f"{PUBLISHED}.pt")
    with pytest.raises(ModelError, match="pickled") as caught:
        MedusaHeads.load(tmp_path, model)
    command = caught.value.remedy.partition(": ")[2].replace("python", sys.executable, 1)
    subprocess.run(shlex.split(command), cwd=tmp_path, check=True, timeout=100)
    assert MedusaHeads.load(tmp_path, model).own is not None
