"""bench dragon: each method's predictions are those of the decoders, and of whole contexts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dragon_bed import row_of
from rich.console import Console
from text_family import vocabulary

from collab_llm_lab.bench.dragon.answers import (
    COMPARE,
    SINGLE,
    AnswersPlan,
    greedy,
    likelihood,
    make_puzzle,
    measure_answers,
)
from collab_llm_lab.bench.dragon.corpus import Window, corpus_of_files, prose, talk_of
from collab_llm_lab.bench.dragon.exchange import ExchangePlan, measure_exchange
from collab_llm_lab.bench.dragon.material import make_house
from collab_llm_lab.bench.dragon.privacy import AttackPlan
from collab_llm_lab.bench.dragon.quality import (
    BASELINES,
    CLOUD,
    CRCG_DEVICE,
    DEVICE,
    DRAGON,
    DRAGON_LIKELIHOOD,
    DRCG,
    METHODS,
    NONE,
    Quality,
    QualityPlan,
    Score,
    gain,
    measure_quality,
    plot_quality,
    print_quality,
    second_share,
)
from collab_llm_lab.bench.dragon.quality_report import run_files, run_quality
from collab_llm_lab.training.text.models import TINY, build
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.knowledge.encoders import WordHashes
from collab_llm_nodes.knowledge.retrieval import Retrieved, retrieve, softmax
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig
from collab_llm_nodes.protocols.dragon.generation import DocumentsDecoder
from collab_llm_nodes.protocols.dragon.layout import Layout

PLAN = QualityPlan(houses=2, windows=(96,), documents=(0, 2), budget=600, own=60, stride=20)


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = vocabulary()
    model = build(TINY, tokenizer, 0).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return Engine(LoadedModel(model, tokenizer, None, None, ModelConfig("tiny")))


def the_window(quality: Quality) -> tuple[Window, Retrieved, str]:
    window = next(quality.windows(96))
    query = quality._engine.decode(window.ids[: window.query])
    found = retrieve(quality._store, query, quality._config.retrieval, quality._encoder)
    assert len(found.hits) == 4
    return window, found, query


def nats_of(score: Score) -> float:
    return score.nats / score.tokens


@pytest.mark.parametrize(
    ("method", "rule", "part"),
    [
        (DRAGON, "static", slice(0, 4)),
        (DRAGON_LIKELIHOOD, "likelihood", slice(0, 4)),
        (CLOUD, "static", slice(0, 2)),
        (DEVICE, "static", slice(2, 4)),
    ],
)
def test_output_aggregation_is_what_the_decoder_predicts(
    engine: Engine, method: str, rule: str, part: slice
) -> None:
    quality = Quality(engine, PLAN)
    window, found, query = the_window(quality)
    score = quality.scores([window])[2][method]
    hits = found.hits[part]
    documents = Retrieved(hits, *softmax([h.score for h in hits], 0.1), found.scorer)
    relevance = quality._relevance(documents, query, rule)
    decoder = DocumentsDecoder(engine, quality._caches, relevance)
    decoder.open([*quality._layout.between, *window.ids[: window.query]], documents)
    wanted = 0.0
    for token in window.ids[window.query :]:
        wanted -= math.log(decoder.next()[0][token])
        decoder.push(token)
    assert score.tokens == 96 - 12
    assert score.nats == pytest.approx(wanted, rel=1e-4)
    decoder.close()
    quality.close()


@pytest.mark.parametrize("method", [NONE, DRCG, CRCG_DEVICE])
@pytest.mark.parametrize("budget", [600, 140])
def test_context_aggregation_is_what_one_context_predicts(
    engine: Engine, method: str, budget: int
) -> None:
    quality = Quality(engine, QualityPlan(**{**vars(PLAN), "budget": budget}))
    window, found, _ = the_window(quality)
    score = quality.scores([window])[2][method]
    texts = [hit.chunk.text for hit in found.hits]
    layout = quality._layout
    if method == NONE:
        begin = [*layout.begin]
    else:
        chosen = texts if method == DRCG else texts[2:]
        if budget == 140:  # two documents leave less than 60 tokens for the text
            chosen = chosen[:1]
        begin = [*layout.documents(chosen), *layout.between]
    wanted, right = 0.0, 0
    for i in range(window.query, 96):
        block_end = min(96, window.query + (i - window.query) // 20 * 20 + 20)
        start = max(0, block_end - (budget - len(begin)))
        row = row_of(engine, [*begin, *window.ids[start:i]])
        wanted -= math.log(row[window.ids[i]])
        right += int(row.argmax() == window.ids[i])
    assert score.nats == pytest.approx(wanted, rel=1e-4)
    assert score.right == right
    quality.close()


def test_the_talk_marks_the_tokens_that_only_documents_tell(engine: Engine) -> None:
    layout = Layout(engine.loaded, 64)
    for number in range(2):
        house = make_house(f"talk {number}", 4, 8, layout.fits)
        talk = talk_of(house, engine.loaded.tokenizer, layout)
        ids, facts = talk.ids, talk.facts
        spans = np.split(np.array(ids), np.flatnonzero(np.diff(facts)) + 1)
        told = [engine.decode(span.tolist()) for span in spans[1 - facts[0] :: 2]]
        assert len(told) == len(house.talk)
        for text, exchange in zip(told, house.talk, strict=True):
            assert exchange.value in text
            assert exchange.value in exchange.answer
        assert house.talk[0].question.startswith(f"In {house.name}:")
        assert all(text.startswith(f"In {house.name}:") for text in house.documents)
        assert {exchange.document for exchange in house.talk} <= set(range(4))


def test_each_short_document_of_a_house_states_a_fact_of_its_own() -> None:
    most = 44  # characters behind the house's name: most facts are longer

    def fits(text: str) -> bool:
        return len(text.partition(":")[2]) <= most

    house = make_house("short", 16, 32, fits)
    assert len(set(house.documents)) == 16
    assert all(fits(text) for text in house.documents)
    assert all(text.partition(":")[2] for text in house.documents)
    assert {exchange.document for exchange in house.talk} == set(range(16))
    with pytest.raises(InvalidInput, match="no fact fits"):
        make_house("short", 1, 1, lambda text: False)


def test_scores_and_gains_by_hand() -> None:
    score = Score()
    rows = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.4, 0.4]])
    score.add(rows, torch.tensor([1, 2, 0]), torch.tensor([False, True, True]))
    figures = score.figures()
    assert figures["perplexity"] == pytest.approx((0.25 * 0.8 * 0.2) ** (-1 / 3))
    assert figures["accuracy"] == pytest.approx(1 / 3)
    assert figures["fact_perplexity"] == pytest.approx((0.8 * 0.2) ** -0.5)
    assert figures["fact_accuracy"] == 0.5
    table = {name: {"perplexity": 20.0} for name in METHODS}
    table[DRAGON] = {"perplexity": 14.0}
    assert gain(table, DRAGON) is None
    assert second_share(table, DRAGON) == 0
    table[DRCG] = {"perplexity": 18.0}
    assert gain(table, DRAGON) == 3.0
    table[DEVICE] = {"perplexity": 17.0}
    assert gain(table, DRAGON) == 3.0
    assert second_share(table, DRAGON) == pytest.approx(1 / 2)
    assert second_share({**table, DRAGON: table[NONE]}, DRAGON) is None
    assert gain(table, DRAGON, (*BASELINES, DEVICE)) == 2.0


def test_the_results_have_their_places(engine: Engine, tmp_path: Path) -> None:
    results: dict[str, Any] = measure_quality(engine, PLAN)
    assert set(results["96"]) == {"0", "2"}
    assert set(results["96"]["2"]) == set(METHODS)
    zero = results["96"]["0"]
    assert {tuple(figures.items()) for figures in zero.values()} == {tuple(zero[NONE].items())}
    assert set(results["gain"]["96"]) == {"2"}
    console = Console(record=True, width=200)
    print_quality(results, console)
    assert "dragon_likelihood" in console.export_text()
    plot_quality(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_puzzles_need_the_facts_they_say(engine: Engine) -> None:
    plan = AnswersPlan(stored=3)
    for number in range(4):
        single, compare = (make_puzzle(kind, number, plan) for kind in (SINGLE, COMPARE))
        assert single.right in (single.device, single.cloud)[number % 2][0]
        assert compare.right in compare.question
        assert compare.wrong in compare.question
        firsts = compare.device[0] + compare.cloud[0]
        assert compare.right.lower() in firsts.lower()
        assert compare.wrong.lower() in firsts.lower()
        assert len(compare.device) == len(compare.cloud) == 3


def test_every_method_answers(engine: Engine) -> None:
    found = measure_answers(engine, AnswersPlan(questions=2, stored=2, documents=1, max_tokens=4))
    assert set(found) == {SINGLE, COMPARE}
    for shares in found.values():
        assert set(shares) == set(METHODS)
        assert all(share in (0, 0.5, 1) for share in shares.values())


def test_greedy_and_likelihood_follow_equation_4() -> None:
    class Fixed:
        """A side that knows what follows after so many tokens."""

        def __init__(self, rows: list[list[float]], log_weight: float) -> None:
            self.rows, self.log_weight, self.pushed = rows, log_weight, list[int]()

        def next(self) -> tuple[np.ndarray, float]:
            return np.array(self.rows[len(self.pushed)], np.float32), self.log_weight

        def push(self, token: int) -> None:
            self.pushed.append(token)

        def close(self) -> None:
            self.rows = []

    def pair() -> Any:
        left = Fixed([[0.6, 0.4, 0.0], [0.5, 0.0, 0.5]], 0.0)
        right = Fixed([[0.1, 0.9, 0.0], [0.6, 0.0, 0.4]], math.log(3.0))
        return [left, right]

    mixed = 0.25 * 0.4 + 0.75 * 0.9, 0.25 * 0.5 + 0.75 * 0.6
    decoders = pair()
    assert greedy(decoders, 2, frozenset({9})) == [1, 0]
    assert decoders[0].rows == []
    assert greedy(pair(), 2, frozenset({1})) == [1]
    assert likelihood(pair(), [1, 0]) == pytest.approx(math.log(mixed[0] * mixed[1]), rel=1e-6)


def test_one_call_measures_all(engine: Engine, tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    results = run_quality(
        engine,
        plan=QualityPlan(houses=1, windows=(96, 48), documents=(0, 2), own=60, stride=20),
        unsaturated=QualityPlan(houses=1, windows=(48,), documents=(2,), own=60, budget=900),
        answers=AnswersPlan(questions=1, stored=2, documents=1, max_tokens=2),
        attack=AttackPlan(houses=1, candidates=4, held=2, retrieved=1, tokens=2),
        plot=tmp_path / "plot.png",
        console=console,
    )
    assert results["quality"]["2"][DRAGON]["tokens"] == 84
    assert results["quality_48"]["0"][NONE]["tokens"] == 2 * 42
    assert results["unsaturated"]["48"]["2"][DRCG]["perplexity"] > 1
    assert set(results["answers"]) == {SINGLE, COMPARE}
    assert results["attack"]["chance"] == 0.25
    assert (tmp_path / "plot.png").is_file()
    assert "guessed right by" in console.export_text()
    json.dumps(results, allow_nan=False)


def test_prose_is_what_remains_of_a_page() -> None:
    page = """<html><head><title>not this one, though it has more than eight words</title></head>
    <body><ul><li>Home</li></ul><p>A package is a file that holds a program &amp; its
    <em>documentation</em>, ready to be installed.</p>
    <pre>$ apt install x and six words more of it</pre><div>See below.</div></body></html>"""
    told = "A package is a file that holds a program & its documentation, ready to be installed."
    assert prose(page, html=True) == told
    plain = "Title\n\n" + told.replace("its ", "its\n")
    assert prose(plain) == told


def folder_of_prose(folder: Path) -> Path:
    for number in range(6):
        words = [f"house {number} has a red door and a blue window" for _ in range(3 + 6 * number)]
        (folder / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\0")
    return folder


def test_files_are_held_out_and_the_others_are_found(engine: Engine, tmp_path: Path) -> None:
    tokenizer = engine.loaded.tokenizer
    folder = folder_of_prose(tmp_path)
    found = corpus_of_files(folder, tokenizer, texts=2, tokens=96, seed=0)
    assert [len(text.ids) for text in found.texts] == [96, 96]
    held = {engine.decode(text.ids).split()[1] for text in found.texts}
    assert len(held) == 2
    assert set(found.documents) == {f"{n}.txt" for n in range(6) if str(n) not in held}
    again = corpus_of_files(folder, tokenizer, texts=2, tokens=96, seed=0)
    assert [text.ids for text in again.texts] == [text.ids for text in found.texts]
    with pytest.raises(InvalidInput, match="6 to be predicted"):
        corpus_of_files(folder, tokenizer, texts=6, tokens=96, seed=0)
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InvalidInput, match="iconv"):
        corpus_of_files(folder, tokenizer, texts=2, tokens=96, seed=0)


def test_files_are_predicted_within_both_budgets(engine: Engine, tmp_path: Path) -> None:
    plan = QualityPlan(windows=(96,), documents=(0, 1), own=60, stride=20, retrieval="dense")
    console, kept = Console(record=True, width=200), list[set[str]]()
    results = run_files(
        engine,
        folder_of_prose(tmp_path),
        WordHashes(),
        texts=1,
        plans=(plan, replace(plan, budget=900)),
        console=console,
        keep=lambda part: kept.append(set(part)),
    )
    assert results["quality"]["1"][DRAGON]["tokens"] == 84
    assert "facts" not in results["quality"]["1"][DRAGON]
    assert results["unsaturated"]["96"]["1"][DRCG]["perplexity"] > 1
    assert "unsaturated" not in kept[0]
    assert kept[-1] == set(results)
    assert "answers" not in results
    json.dumps(results, allow_nan=False)


def test_the_context_with_room_for_all_documents_can_be_left_out(
    engine: Engine, tmp_path: Path
) -> None:
    plan = QualityPlan(windows=(96,), documents=(0, 1), own=60, stride=28, retrieval="dense")
    folder, console = folder_of_prose(tmp_path), Console(record=True)
    results = run_files(engine, folder, WordHashes(), texts=1, plans=(plan, None), console=console)
    assert results["quality"]["1"][DRAGON]["perplexity"] > 1
    assert "unsaturated" not in results


def test_what_is_exchanged_by_law_and_what_truncation_costs(engine: Engine) -> None:
    plan = ExchangePlan(questions=2, tokens=4, gammas=(0.0, 0.5, 1.0))
    found = measure_exchange(engine, plan)
    device, cloud = found["acceptance_device"], found["acceptance_cloud"]
    assert set(device) == {"shared", "coin_0", "coin_0.5", "coin_1"}
    assert device["coin_0"] < device["coin_0.5"] < device["coin_1"] <= 1
    assert cloud["coin_0"] > cloud["coin_0.5"] > cloud["coin_1"]
    # Eq. 5 is linear in gamma.
    assert 2 * device["coin_0.5"] == pytest.approx(device["coin_0"] + device["coin_1"])
    wire = found["wire"]
    assert wire["vector"] == 2 * engine.vocab_size
    assert wire["json_ratio"] == wire["json"] / wire["draft"] > 1
    assert 0 < found["truncation"]["total_variation"] < 0.5
    whole = measure_exchange(engine, replace(plan, top_p=1.0))
    assert whole["truncation"]["total_variation"] < 1e-3  # fp16
    assert whole["wire"]["draft"] > wire["draft"]
    json.dumps(found, allow_nan=False)
