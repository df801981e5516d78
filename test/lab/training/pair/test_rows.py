"""Batches of prompts and answers: what the forward pass says of them is what it says of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from collected_answers import collect_answers
from tiny_models import tiny_model

from collab_llm_lab.random_seeing_models import FAMILIES
from collab_llm_lab.reference import next_logits
from collab_llm_lab.training.pair.data import read_data
from collab_llm_lab.training.pair.rows import Batch, choose_batch, encode_row
from collab_llm_nodes.models.architectures import ARCHITECTURES


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *FAMILIES])
def test_a_row_reads_the_same_in_a_batch_as_alone(tmp_path: Path, architecture: str) -> None:
    loaded = tiny_model(architecture, padding=8)
    data = read_data(collect_answers(tmp_path, architecture, 12))
    rows = [
        encode_row(data, sample, loaded).cut(n)
        for sample, n in zip(data.samples, (8, 3, 5), strict=False)
    ]
    with torch.inference_mode():
        batch = Batch.of(rows)
        logits = batch.logits(loaded.model, loaded.vocab_size)
        expected = [
            next_logits(loaded, row.prompt, row.answer[:place])
            for row in rows
            for place in range(len(row.answer))
        ]
    assert batch.answers[batch.said].tolist() == [token for row in rows for token in row.answer]
    torch.testing.assert_close(logits, torch.stack(expected), atol=2e-4, rtol=1e-3)


def test_a_row_is_read_once_in_each_pass_over_all_of_them() -> None:
    lengths = [3 * n % 50 for n in range(43)]
    epochs = [
        [choose_batch(lengths, 4, step, seed=1) for step in range(e, e + 10)] for e in (0, 10)
    ]
    for epoch in epochs:
        chosen = [number for batch in epoch for number in batch]
        assert len(set(chosen)) == len(chosen) == 40
    assert epochs[0] != epochs[1]
    assert choose_batch(lengths, 4, 3, seed=1) == epochs[0][3]
    assert choose_batch(lengths[:2], 4, 0, seed=1) in ([0, 1], [1, 0])
