"""Retrieval: order, weights and scorers, and an encoder model with random weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_encoder import write_tiny_encoder
from transformers import AutoModel, AutoTokenizer

from collab_llm_nodes.errors import ConfigError, ModelError
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import Encoder, WordHashes
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig, retrieve, softmax
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.knowledge.text_encoder import TextEncoder, TextEncoderConfig

LINES = [
    "the battery of the robot lasts two hours",
    "the charger is in the kitchen",
    "doors open to the left",
    "the robot weighs fifteen kilograms",
    "battery battery battery",
    "charge the battery in the kitchen near the doors",
]
ENCODER = WordHashes(4096)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(None) as made:
        for i, line in enumerate(LINES):
            document = Document(f"d{i}", line)
            made.add(document, chunks(document, ChunkPlan()))
        yield made


# --- Weights -------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e5, 1e5), max_size=8), st.sampled_from([1e-4, 0.1, 1.0, 50.0]))
def test_weights_are_a_distribution_for_any_score(scores: list[float], temperature: float) -> None:
    weights, log_mass = softmax(scores, temperature)
    assert weights.shape == (len(scores),)
    if not scores:
        assert log_mass == -math.inf
        return
    assert weights.sum() == pytest.approx(1)
    assert np.isfinite(weights).all()
    assert log_mass >= max(scores) / temperature - 1e-6
    assert (
        int(weights.argmax()) == int(np.argmax(scores))
        or weights.max() == weights[int(np.argmax(scores))]
    )


def test_masses_of_two_sides_give_the_weights_of_all_documents() -> None:
    """DRAGON: p = sum of eta_s * p_s over both sides equals the mixture over all documents."""
    left, right, temperature = [0.3, 0.9], [0.5, 0.1, 0.7], 0.25
    (w_left, m_left), (w_right, m_right) = (softmax(s, temperature) for s in (left, right))
    eta = 1 / (1 + math.exp(m_right - m_left))
    everything, _ = softmax(left + right, temperature)
    assert np.concatenate([eta * w_left, (1 - eta) * w_right]) == pytest.approx(everything)


def test_a_low_temperature_has_the_best_chunk_count_alone() -> None:
    scores = [0.9, 0.5, 0.1]
    assert softmax(scores, 1e-3)[0] == pytest.approx([1, 0, 0])
    assert softmax(scores, 1e4)[0] == pytest.approx([1 / 3] * 3, abs=1e-4)


# --- Methods -------------------------------------------------------------------------------------


def test_bm25_names_its_store_as_scorer(store: Store) -> None:
    found = retrieve(store, "robot battery", RetrievalConfig(chunks=3))
    assert found.hits == store.search("robot battery", 3)
    assert found.weights[0] == found.weights.max()
    assert store.id in found.scorer
    with Store(None) as other:
        assert retrieve(other, "robot", RetrievalConfig()).scorer != found.scorer
        empty = retrieve(other, "robot", RetrievalConfig())
    assert (empty.hits, len(empty.weights), empty.log_mass) == ((), 0, -math.inf)
    document = Document("more", "robot battery")
    store.add(document, chunks(document, ChunkPlan()))  # other statistics
    assert retrieve(store, "robot battery", RetrievalConfig()).scorer != found.scorer


def test_dense_scores_are_products_of_vectors(store: Store) -> None:
    config = RetrievalConfig(method="dense", chunks=4, temperature=0.5)
    with pytest.raises(ConfigError, match="no vectors"):
        retrieve(store, "robot", config, ENCODER)
    assert store.embed(ENCODER, 99) == 0
    with pytest.raises(ConfigError, match="not word hashes"):
        retrieve(store, "robot", config, WordHashes(64))
    with Store(None) as empty:
        assert retrieve(empty, "robot", config, ENCODER).hits == ()
    found = retrieve(store, "battery robot", config, ENCODER)
    vectors = ENCODER.encode(LINES) @ ENCODER.encode(["battery robot"])[0]
    order = np.argsort(-vectors, kind="stable")[:4]
    assert [hit.name for hit in found.hits] == [f"d{i}" for i in order]
    assert [hit.score for hit in found.hits] == pytest.approx(vectors[order].tolist())
    assert found.weights == pytest.approx(softmax(vectors[order].tolist(), 0.5)[0])
    assert found.scorer == ENCODER.fingerprint


def test_rescored_needs_no_vectors_in_the_store(store: Store) -> None:
    """The candidates by words come in the order and with the scores of dense."""
    config = RetrievalConfig(method="rescored", candidates=99, chunks=99)
    question = "battery in the kitchen"
    found = retrieve(store, question, config, ENCODER)
    assert store.encoder == ""
    by_words = {hit.name for hit in store.search(question, 99)}
    assert {hit.name for hit in found.hits} == by_words
    store.embed(ENCODER, 99)
    dense = retrieve(store, question, RetrievalConfig(method="dense", chunks=99), ENCODER)
    expected = [(hit.name, hit.score) for hit in dense.hits if hit.name in by_words]
    assert [hit.name for hit in found.hits] == [name for name, _ in expected]
    assert [hit.score for hit in found.hits] == pytest.approx([score for _, score in expected])
    few = RetrievalConfig(method="rescored", candidates=2, chunks=1)
    best_words = {hit.name for hit in store.search(question, 2)}
    assert {hit.name for hit in retrieve(store, question, few, ENCODER).hits} < best_words


def test_vectors_need_an_encoder(store: Store) -> None:
    for method in ("dense", "rescored"):
        with pytest.raises(ConfigError, match="needs an encoder"):
            retrieve(store, "robot", RetrievalConfig(method=method))
    with pytest.raises(ConfigError, match="temperature"):
        RetrievalConfig(temperature=0.0)


def test_a_swept_count_returns_the_first_of_the_longer_list(store: Store) -> None:
    store.embed(ENCODER, 99)
    for method in ("bm25", "dense", "rescored"):
        lists = [
            retrieve(store, LINES[5], RetrievalConfig(method=method, chunks=k), ENCODER).hits
            for k in (1, 2, 4, 50)
        ]
        assert all(short == lists[-1][: len(short)] for short in lists)
        assert len(lists[1]) == 2


# --- Encoders ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def text_encoder(folder: Path) -> TextEncoder:
    return TextEncoder(TextEncoderConfig(path=str(folder), max_tokens=32))


def encoders(text_encoder: TextEncoder) -> list[Encoder]:
    return [text_encoder, WordHashes(256)]


def test_vectors_have_length_1_and_do_not_depend_on_the_batch(text_encoder: TextEncoder) -> None:
    texts = [*LINES, "battery " * 500]
    for encoder in encoders(text_encoder):
        vectors = encoder.encode(texts)
        assert vectors.dtype == np.float32
        assert vectors.shape == (len(texts), encoder.width)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
        for text, vector in zip(texts, vectors, strict=True):
            assert encoder.encode([text])[0] == pytest.approx(vector, abs=1e-5)
        assert encoder.encode([]).shape == (0, encoder.width)
        assert np.isfinite(encoder.encode(["", "?!", "漢字"])).all()


def test_the_mean_is_that_of_a_plain_forward_pass(folder: Path, text_encoder: TextEncoder) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    for text in LINES:
        with torch.no_grad():
            read = tokenizer(text, return_tensors="pt", truncation=True, max_length=32)
            hidden = model(**read).last_hidden_state[0]
        mean = hidden.mean(0).numpy()
        assert text_encoder.encode([text])[0] == pytest.approx(
            mean / np.linalg.norm(mean), abs=1e-5
        )


def test_the_fingerprint_tells_encoders_apart(folder: Path, tmp_path: Path) -> None:
    def fingerprint(path: Path, max_tokens: int = 32) -> str:
        return TextEncoder(TextEncoderConfig(path=str(path), max_tokens=max_tokens)).fingerprint

    same = write_tiny_encoder(tmp_path / "same")
    other = write_tiny_encoder(tmp_path / "other", seed=1)
    assert fingerprint(folder) == fingerprint(same)
    assert len({fingerprint(folder), fingerprint(other), fingerprint(folder, 16)}) == 3
    assert WordHashes(64).fingerprint != WordHashes(128).fingerprint


def test_what_is_no_encoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in ("", "absent", str(tmp_path / "empty")):
        with pytest.raises(ModelError, match="cannot load the encoder"):
            TextEncoder(TextEncoderConfig(path=path))


def test_an_encoder_runs_on_its_device(folder: Path) -> None:
    with pytest.raises(ModelError, match="no_device"):
        TextEncoder(TextEncoderConfig(path=str(folder), device="no_device"))


def test_words_decide_and_case_does_not() -> None:
    one, same, other = WordHashes().encode(["Battery low!", "low: battery", "doors open"])
    assert one @ same == pytest.approx(1)
    assert abs(one @ other) < 0.5
