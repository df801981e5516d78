"""Medusa heads: their law, their files, and the models that they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_folder, tiny_model
from transformers import LlamaForCausalLM

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.architectures import DecoderParts, decoder_parts
from collab_llm_nodes.models.heads import NAME, MedusaHeads, head_fingerprint


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
    facts = json.loads((tmp_path / f"{NAME}.json").read_text())
    wide = MedusaHeads(facts["hidden_size"] * 2, fingerprint=facts["fingerprint"])
    wide.save(tmp_path)
    with pytest.raises(ModelError, match="width"):
        MedusaHeads.load(tmp_path, parts())


@pytest.mark.parametrize("content", ["", "{}", '{"hidden_size": 8, "heads": "x"}', None])
def test_unreadable_heads_are_a_typed_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / f"{NAME}.json").write_text(content)
    with pytest.raises(ModelError, match="cannot read the Medusa heads"):
        MedusaHeads.load(tmp_path, parts())
