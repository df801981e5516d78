"""Held-out figures on models whose figures are known."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_family import vocabulary, write_family

from collab_llm_lab.training.text.evaluate import (
    EvalText,
    accepted_in_rounds,
    eval_text,
    head_matches,
    is_absent,
    medusa_rounds,
    says_absent,
)
from collab_llm_lab.training.text.models import TINY, build, export
from collab_llm_lab.training.text.ngram import NGram
from collab_llm_lab.training.text.samples import make_sample
from collab_llm_nodes.errors import ConfigError, ModelError

SMALL = EvalText(
    documents=2,
    ngram_documents=8,
    extractions=2,
    copies=2,
    answers=2,
    tokens=12,
    prompts=6,
)


def test_half_a_model_is_reported(tmp_path: Path) -> None:
    write_family(tmp_path)
    file = tmp_path / "text-worker" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5_000])
    with pytest.raises(ModelError, match="cannot read .*text-worker") as error:
        eval_text(replace(SMALL, models=tmp_path))
    assert error.value.field == "--models"


def test_a_draft_equal_to_the_target_is_always_accepted(tmp_path: Path) -> None:
    write_family(tmp_path)
    reports: list[str] = []
    found = eval_text(
        replace(SMALL, models=tmp_path, device="cpu"),
        lambda activity, done, total, figures: reports.append(activity),
    )
    for figures in found["acceptance"].values():
        assert figures["ssm-conversation"] == 1.0
        assert max(figures["ssm-instructions"], figures["ssm-reports"]) < 1.0
    for figures in (found["perplexity"][s] for s in ("conversation", "instructions", "reports")):
        assert figures["text-target"] == pytest.approx(figures["text-worker"])
        assert 1 < figures["ngram"] < len(vocabulary())
    assert found["extraction"]["text-target"]["samples"] == 6
    assert found["extraction"]["text-target"] == found["extraction"]["text-worker"]
    assert set(found["copy"]["text-target"]["by_wording"]) == {"trained", "new"}
    assert set(found["guesses"]["exits"]) == {"1", "2"}
    assert 1 <= found["guesses"]["medusa"]["tokens_per_round"] <= 6
    assert found["distinct"]["prompts"] == 6
    assert reports[-1] == "done"
    shutil.rmtree(tmp_path / "text-worker")
    with pytest.raises(ModelError, match="text-worker"):
        eval_text(replace(SMALL, models=tmp_path, device="cpu"))
    export(build(TINY, vocabulary(350), 0), vocabulary(350), tmp_path / "text-worker")
    with pytest.raises(ConfigError, match=r"text-worker .* and text-target .* tokenizers"):
        eval_text(replace(SMALL, models=tmp_path, device="cpu"))


@pytest.mark.parametrize(
    ("matches", "accepted", "drafted"),
    [
        ([True] * 10, 8, 8),  # 4, the target's, 4, the target's
        ([False] * 6, 0, 18),  # 4 + 4 + 4 + 3 + 2 + 1 drafted, none right
        ([True, True, False, True, True, True], 5, 7),
        ([], 0, 0),
    ],
)
def test_acceptance_counts_rounds(matches: list[bool], accepted: int, drafted: int) -> None:
    assert accepted_in_rounds(matches, 4) == (accepted, drafted)


def test_acceptance_equals_drafting_token_by_token() -> None:
    """Against a draft that is really asked for its tokens, one after another."""
    rng = np.random.default_rng(0)
    table = rng.integers(0, 3, (3, 3))  # the draft's next token after the last two
    for _ in range(50):
        answer = [0, 0, *rng.integers(0, 3, 20).tolist()]
        place, accepted, drafted = 2, 0, 0
        while place < len(answer):
            text = answer[:place]
            for _ in range(min(4, len(answer) - place)):
                text.append(int(table[text[-2], text[-1]]))
            drafted += len(text) - place
            good = 0
            while place + good < len(text) and text[place + good] == answer[place + good]:
                good += 1
            accepted += good
            place += good + 1
        matches = [
            int(table[answer[p - 2], answer[p - 1]]) == answer[p] for p in range(2, len(answer))
        ]
        assert accepted_in_rounds(matches) == (accepted, drafted)


def test_heads_are_judged_by_the_token_that_they_guess() -> None:
    answer = torch.arange(10, 17)
    perfect = answer[:, None] + torch.arange(1, 4)
    right = head_matches(perfect, answer)
    assert [len(row) for row in right] == [6, 5, 4]
    assert all(all(row) for row in right)
    assert medusa_rounds(right, 7) == 2  # 1 + 3, then 1 + 2 to the end
    wrong = head_matches(perfect + 1, answer)
    assert not any(any(row) for row in wrong)
    assert medusa_rounds(wrong, 7) == 7


def test_absent_answers_are_known_in_both_forms() -> None:
    rng = random.Random(2)
    samples = [make_sample(rng, "reports", "extract") for _ in range(200)]
    assert 0.1 < sum(map(is_absent, samples)) / 200 < 0.5
    for sample in samples:
        assert is_absent(sample) == says_absent(sample.turns[-1].content)


def brute_force(texts: list[np.ndarray], vocabulary: int, context: tuple[int, ...], w: int) -> Any:
    """Return Witten-Bell's p(w | context) by its recursion, counted with dictionaries."""
    shorter = brute_force(texts, vocabulary, context[1:], w) if context else 1 / vocabulary
    n = len(context)
    after = Counter(
        int(text[k + n])
        for text in texts
        for k in range(len(text) - n)
        if tuple(text[k : k + n].tolist()) == context
    )
    if not after:
        return shorter
    return (after[w] + len(after) * shorter) / (sum(after.values()) + len(after))


def test_the_ngram_model_is_witten_bells() -> None:
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 5, 60).astype(np.uint16) for _ in range(3)]
    model = NGram(texts, 6, order=3)
    asked = rng.integers(0, 6, 12).astype(np.uint16)
    for place, p in enumerate(model.probabilities(asked)):
        context = tuple(asked[max(0, place - 2) : place].tolist())
        assert p == pytest.approx(brute_force(texts, 6, context, int(asked[place])))
    total = sum(float(model.probabilities(np.array([1, 2, w], np.uint16))[-1]) for w in range(6))
    assert total == pytest.approx(1.0)
    with pytest.raises(ValueError, match="64-bit"):
        NGram(texts, 5000)
