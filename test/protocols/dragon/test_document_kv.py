"""KV of documents on disk: loaded, bounded, refused when damaged, and never another's."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from dragon_bed import QUESTION, TEXTS, config_of, engine_of, side_with

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import Cancelled
from collab_llm_nodes.protocols.dragon.generation import ModelSide

CONFIG = config_of(documents=4)


def kv_files(folder: Path) -> list[Path]:
    return sorted((folder / "kv").glob("*.safetensors"))


def first(side: ModelSide) -> np.ndarray:
    """The first distribution of an answer; the decoder is closed."""
    decoder = side.decoder(QUESTION, 4)
    found = decoder.next()[0]
    decoder.close()
    return found


@pytest.fixture
def engine() -> Engine:
    return engine_of()


def test_it_is_computed_once_and_loaded_by_the_next_process(tmp_path: Path, engine: Engine) -> None:
    side = side_with(TEXTS, engine, CONFIG, tmp_path)
    wanted = first(side)
    assert (side.caches.computed, side.caches.loaded) == (4, 0)
    np.testing.assert_array_equal(first(side), wanted)
    assert (side.caches.computed, side.caches.loaded) == (4, 4)
    side.close()
    again = side_with(TEXTS, engine, CONFIG, tmp_path)
    np.testing.assert_array_equal(first(again), wanted)
    assert (again.caches.computed, again.caches.loaded) == (0, 4)
    again.close()


@pytest.mark.parametrize("harm", ["flipped", "cut", "text", "swapped"])
def test_a_bad_file_is_refused_and_made_again(
    tmp_path: Path, engine: Engine, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = side_with(TEXTS, engine, CONFIG, tmp_path)
    wanted = first(side)
    files = kv_files(tmp_path)
    assert len(files) == 4
    data = bytearray(files[1].read_bytes())
    if harm == "flipped":  # one bit of one number, which stays a number
        data[-20] ^= 4
    elif harm == "cut":
        del data[len(data) // 2 :]
    elif harm == "text":
        data[:] = b"no session"
    else:  # another document's, whole and of this model
        data[:] = files[0].read_bytes()
    files[1].write_bytes(data)
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(first(side), wanted)
    assert files[1].name in caplog.text
    assert (side.caches.refused, side.caches.computed, side.caches.loaded) == (1, 5, 3)
    np.testing.assert_array_equal(first(side), wanted)
    assert (side.caches.refused, side.caches.loaded) == (1, 7)
    side.close()


def test_another_model_has_files_of_its_own(tmp_path: Path, engine: Engine) -> None:
    side = side_with(TEXTS, engine, CONFIG, tmp_path)
    first(side)
    side.close()
    other = side_with(TEXTS, engine_of("qwen2"), CONFIG, tmp_path)
    first(other)
    assert (other.caches.computed, other.caches.loaded, other.caches.refused) == (4, 0, 0)
    assert len(kv_files(tmp_path)) == 8
    other.close()


def test_the_disk_is_bounded_and_what_has_no_room_is_computed(
    tmp_path: Path, engine: Engine
) -> None:
    side = side_with(TEXTS, engine, CONFIG, tmp_path / "large")
    wanted = first(side)
    side.close()
    size = max(file.stat().st_size for file in kv_files(tmp_path / "large"))
    for most in (2 * size, size // 2):
        small = side_with(TEXTS, engine, CONFIG, tmp_path / str(most), kv_bytes=most)
        for _ in range(2):
            np.testing.assert_allclose(first(small), wanted, atol=1e-6)
        held = sum(file.stat().st_size for file in kv_files(tmp_path / str(most)))
        assert held <= most
        assert small.caches.computed >= 6
        small.close()


def test_preparation_fills_the_disk_and_stops(tmp_path: Path, engine: Engine) -> None:
    many = {f"d{i:02}": f"Document number {i} tells of room {i}." for i in range(40)}
    side = side_with(many, engine, CONFIG, tmp_path)
    store = side._store
    assert store is not None
    assert store.kv is not None
    hits = [hit for name in many for hit in store.chunks(name)]
    assert side.caches.prepare(hits[:20]) == 20
    assert side.caches.prepare(hits[:20]) == 0
    assert len(kv_files(tmp_path)) == 20
    store.kv.most_bytes = store.kv.size() + 1000
    assert 0 < side.caches.prepare(hits[20:]) <= 16
    assert store.kv.size() <= store.kv.most_bytes
    side.close()


def test_a_call_that_is_ended_leaves_no_session(tmp_path: Path, engine: Engine) -> None:
    side = side_with(TEXTS, engine, CONFIG, tmp_path)

    def stop() -> None:
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        side.caches.open(side.retrieve(QUESTION).hits, stop)
    assert kv_files(tmp_path) == []
    first(side)
    assert len(kv_files(tmp_path)) == 4
    side.close()
