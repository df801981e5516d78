"""Low-rank changes: they begin as nothing, are merged exactly, and belong to one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_folder

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.low_rank import LowRank

IDS = torch.arange(10, 30)[None]


def changed(rank: int = 3) -> tuple[torch.nn.Module, LowRank]:
    model: torch.nn.Module = load(ModelConfig(str(tiny_folder("llama")))).model
    role = LowRank(model, rank, head_fingerprint(decoder_parts(model)))
    return model, role


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def disturb(role: LowRank) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in role.parameters():
            parameter.copy_(torch.randn_like(parameter).half())


def test_untrained_changes_change_nothing_and_trained_ones_do() -> None:
    model, role = changed()
    before = logits(model)
    role.attach()
    assert torch.equal(logits(model), before)
    disturb(role)
    assert not torch.allclose(logits(model), before, atol=1e-2)


def test_merged_changes_compute_as_attached_ones(tmp_path: Path) -> None:
    model, role = changed()
    role.attach()
    disturb(role)
    role.save(tmp_path, "role")
    plain, _ = changed()
    LowRank.load(tmp_path, "role", plain).merge()
    torch.testing.assert_close(logits(plain), logits(model))


def test_only_the_changes_are_trained() -> None:
    model, role = changed()
    model.requires_grad_(False)
    role.requires_grad_(True)
    role.attach()
    disturb(role)
    model(IDS).logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in role.parameters())
    assert decoder_parts(model).head.weight.grad is None


def test_changes_of_another_model_are_refused(tmp_path: Path) -> None:
    _, role = changed()
    role.save(tmp_path, "role")
    other = load(ModelConfig(str(tiny_folder("llama")))).model
    with torch.no_grad():
        decoder_parts(other).head.weight.add_(0.1)
    with pytest.raises(ModelError, match="changes of model"):
        LowRank.load(tmp_path, "role", other)


def test_missing_files_are_named(tmp_path: Path) -> None:
    model, _ = changed()
    with pytest.raises(ModelError, match=r"role\.safetensors"):
        LowRank.load(tmp_path, "role", model)
