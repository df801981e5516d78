"""Pictures are encoded without waits for the device, beside the passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_models import VISION, tiny_folder, tiny_model, tiny_prompt
from torch import Tensor

from collab_llm_nodes.engine import pictures
from collab_llm_nodes.engine.pictures import encode_pictures, insert_features
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import encode

CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("architecture", VISION)
def test_features_are_those_of_the_models_own_forward_pass(architecture: str, images: int) -> None:
    loaded = tiny_model(architecture)
    prompt = encode(tiny_prompt(architecture, images=images), loaded)
    like = loaded.model.get_input_embeddings().weight
    own = loaded.model.get_image_features(
        prompt.pixel_values, prompt.image_grid_thw, return_dict=True
    )
    levels = [own.pooler_output, *getattr(own, "deepstack_features", [])]
    expected = torch.cat([torch.vstack(tuple(level)) for level in levels], dim=1)
    assert torch.equal(encode_pictures(loaded, prompt, like), expected)


@pytest.mark.parametrize("architecture", VISION)
def test_the_encoder_reads_no_value_from_its_device(architecture: str) -> None:
    """Meta tensors have none: whatever would wait for a GPU raises."""
    loaded = tiny_model(architecture)
    prompt = encode(tiny_prompt(architecture, images=2), loaded)
    there = load(ModelConfig(str(tiny_folder(architecture))))
    there.model.to("meta")
    features = encode_pictures(there, prompt, torch.empty(0, device="meta"))
    here = encode_pictures(loaded, prompt, torch.empty(0))
    assert (features.shape, features.device.type) == (here.shape, "meta")


class Stream:
    """Stands in for a stream and its events; writes down what happens to them."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def record(self, stream: Stream) -> None:
        self._log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self._log.append("the thread waits for the event")


def test_on_cuda_a_picture_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of the passes waits for nothing."""
    log: list[str] = []
    own, passes = Stream("own", log), Stream("passes", log)

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        log.append(f"{stream.name} begins")
        yield
        log.append(f"{stream.name} ends")

    monkeypatch.setattr(pictures, "_encoder_stream", lambda device: own)
    monkeypatch.setattr(pictures, "_encode", lambda *_: log.append("encoder"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: passes)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Stream("event", log))
    anything = cast(Any, None)
    encode_pictures(anything, anything, cast(Tensor, SimpleNamespace(device=CUDA)))
    assert log == [
        "own waits for passes",
        "own begins",
        "encoder",
        "event on own",
        "own ends",
        "the thread waits for the event",
    ]


def test_on_cuda_features_outlive_the_pass_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next picture could be written over them while the pass still runs."""

    class Features(Tensor):
        is_cuda = True
        device = CUDA
        readers: list[object]

        def record_stream(self, stream: object) -> None:
            self.readers.append(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    features = torch.ones(2, 3).as_subclass(Features)
    features.readers = []
    embedded = torch.zeros(3, 3)
    insert_features(features, [7, 5, 7], 7, embedded)
    assert features.readers == ["stream of cuda:0"]
    assert embedded[:, 0].tolist() == [1, 0, 1]
