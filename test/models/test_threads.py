"""Threads are set where a process begins, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_models import tiny_folder
from transformers.utils import logging as transformers_logging

from collab_llm_nodes.models import threads
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.threads import set_threads


@pytest.fixture(autouse=True)
def five_threads() -> Iterator[None]:
    """A number that nobody sets; what was before is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("asked", [0, 3])
def test_loading_changes_nothing_process_wide(asked: int) -> None:
    def state() -> tuple[object, ...]:
        return (
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_rng_state().tolist(),
            transformers_logging.get_verbosity(),
            transformers_logging.is_progress_bar_enabled(),
        )

    before = state()
    load(ModelConfig(str(tiny_folder("llama")), threads=asked))
    assert state() == before


@pytest.mark.parametrize(
    ("asked", "small", "expected"), [((0,), 2**60, 1), ((0,), 0, 5), ((3,), 0, 3), ((0, 2), 0, 2)]
)
def test_small_models_get_one_thread(
    asked: tuple[int, ...], small: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "SMALL", small)
    folder = str(tiny_folder("llama"))
    set_threads(*(ModelConfig(folder, threads=each) for each in asked))
    assert torch.get_num_threads() == expected


def test_a_large_model_beside_a_small_one_keeps_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = (str(tiny_folder("llama", layers=layers)) for layers in (1, 4))
    monkeypatch.setattr(threads, "SMALL", threads.count_weights(tiny_folder("llama", layers=4)))
    set_threads(ModelConfig(small), ModelConfig(large))
    assert torch.get_num_threads() == 5
    set_threads(ModelConfig(small))
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("path", ["", "/nowhere/at/all", "nobody/no-such-model"])
def test_a_model_that_is_not_here_is_left_to_the_loader(path: str) -> None:
    set_threads(ModelConfig(path))
    assert torch.get_num_threads() == 5
