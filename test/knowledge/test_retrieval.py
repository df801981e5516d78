"""Retrieval: order, weights and scorers, and an encoder model with random weights."""

from __future__ import annotations

import json
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
from collab_llm_nodes.knowledge.cross_encoder import CrossEncoder, CrossEncoderConfig
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


@pytest.mark.parametrize(
    ("modes", "pooling", "wanted"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "auto", "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "auto", "mean"),
        ({"pooling_mode_mean_tokens": True}, "cls", "cls"),
        (None, "auto", "mean"),
    ],
)
def test_a_text_is_pooled_as_its_encoder_was_trained(
    tmp_path: Path, modes: dict[str, bool] | None, pooling: str, wanted: str
) -> None:
    folder = write_tiny_encoder(tmp_path / "encoder")
    if modes is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    encoder = TextEncoder(TextEncoderConfig(path=str(folder), pooling=pooling))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.no_grad():
        hidden = model(**tokenizer("a lamp", return_tensors="pt")).last_hidden_state[0]
    vector = hidden[0] if wanted == "cls" else hidden.mean(0)
    expected = (vector / vector.norm()).numpy()
    assert encoder.encode(["a lamp"])[0] == pytest.approx(expected, abs=1e-5)


def test_a_pooling_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path / "encoder")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelError, match="max_tokens"):
        TextEncoder(TextEncoderConfig(path=str(folder)))


def test_equal_words_are_equal_in_any_form(text_encoder: TextEncoder) -> None:
    """Ligatures, composed umlauts, and the soft hyphens of web pages."""
    plain, other = "find the caf\u00e9", "\ufb01nd the ca\u00adfe\u0301"
    for encoder in encoders(text_encoder):
        one, same = encoder.encode([plain, other])
        assert one == pytest.approx(same, abs=1e-6)
    with Store(None) as store:
        for name, text in (("plain", "a docu\u00adment"), ("other", "a picture")):
            document = Document(name, text)
            store.add(document, chunks(document, ChunkPlan()))
        assert [hit.name for hit in store.search("document", 1)] == ["plain"]
        assert [hit.name for hit in store.search("pic\u00adtures", 1)] == ["other"]
        store.remove("plain")
        assert store.search("document", 1) == ()


# --- Cross-encoders ------------------------------------------------------------------------------


def test_a_cross_encoder_puts_the_candidates_in_order(store: Store, tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path / "cross", scores=1)
    reranker = CrossEncoder(CrossEncoderConfig(path=str(folder), max_tokens=64))
    question = "battery in the kitchen"
    config = RetrievalConfig(method="rescored", chunks=2, candidates=50, temperature=0.5)
    found = retrieve(store, question, config, ENCODER, reranker)
    candidates = [hit.chunk.text for hit in store.search(question, 50)]
    scores = reranker.score(question, candidates)
    assert all(0 < score < 1 for score in scores)
    assert [hit.score for hit in found.hits] == pytest.approx(sorted(scores, reverse=True)[:2])
    assert found.weights == pytest.approx(softmax([h.score for h in found.hits], 0.5)[0])
    assert found.scorer == reranker.fingerprint != ENCODER.fingerprint
    for text, score in zip(candidates, scores, strict=True):  # the batch does not matter
        assert reranker.score(question, [text]) == pytest.approx([score], abs=1e-5)
    assert reranker.score(question, []) == []


def test_what_gives_no_score_is_no_cross_encoder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", write_tiny_encoder(tmp_path / "three", scores=3)):
        with pytest.raises(ModelError, match="cannot load the cross-encoder"):
            CrossEncoder(CrossEncoderConfig(path=str(path)))


# --- Fingerprints --------------------------------------------------------------------------------


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
