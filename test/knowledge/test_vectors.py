"""Approximate search by vectors (faiss), beside exact search."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collab_llm_nodes.knowledge import vectors
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import WordHashes
from collab_llm_nodes.knowledge.store import Store

pytest.importorskip("faiss", reason="pip install -r requirements/faiss.txt")
ENCODER = WordHashes(64)
COUNT = 2000


def add(store: Store, number: int) -> None:
    document = Document(f"d{number}", f"pump {number} stands in hall {number % 40}")
    store.add(document, chunks(document, ChunkPlan()))


def embed(store: Store, encoder: WordHashes = ENCODER) -> None:
    while store.embed(encoder, 1000):
        pass


def nearest(store: Store, question: str, encoder: WordHashes = ENCODER) -> list[str]:
    (vector,) = encoder.encode([question])
    return [hit.name for hit in store.nearest(vector, encoder.fingerprint, 5)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(vectors, "MANY", COUNT)
    with Store(None) as made:
        for number in range(COUNT):
            add(made, number)
        embed(made)
        yield made


def test_the_nearest_is_found_and_changes_are_followed(store: Store) -> None:
    question = "pump 700 stands in hall 20"
    assert nearest(store, question)[0] == "d700"
    store.remove("d700")
    assert "d700" not in nearest(store, question)
    add(store, 20_700)
    add(store, 700)
    embed(store)
    assert nearest(store, question)[0] == "d700"
    assert nearest(store, "pump 20700 stands in hall 20")[0] == "d20700"


def test_another_encoder_makes_the_index_anew(store: Store) -> None:
    assert nearest(store, "pump 7 stands in hall 7")[0] == "d7"
    store.forget_vectors()
    other = WordHashes(128)
    embed(store, other)
    assert nearest(store, "pump 7 stands in hall 7", other)[0] == "d7"


def test_a_store_that_shrinks_is_searched_exactly_again(store: Store) -> None:
    assert nearest(store, "pump 7 stands in hall 7")[0] == "d7"
    for number in range(100, 110):
        store.remove(f"d{number}")
    assert nearest(store, "pump 7 stands in hall 7")[0] == "d7"
