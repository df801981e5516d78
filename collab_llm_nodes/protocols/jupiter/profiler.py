"""Measurement of a device's profile with a model's own stages (paper 004, IV-B)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.engine.device import synchronize
from collab_llm_nodes.engine.stage import Stage
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.models.architectures import context_length, first_layers
from collab_llm_nodes.models.checkpoint import quantisation_of, stored_tensors
from collab_llm_nodes.models.devices import find_device, free_bytes
from collab_llm_nodes.models.footprint import column_bytes, picture_bytes
from collab_llm_nodes.models.heads import count_head_weights, count_heads, holds_heads
from collab_llm_nodes.models.loading import DTYPES, ModelConfig, architecture_in, model_folder
from collab_llm_nodes.models.partial import empty_model
from collab_llm_nodes.models.quantised import quantized_bytes
from collab_llm_nodes.protocols.jupiter.link import LinkConfig, time_messages
from collab_llm_nodes.protocols.jupiter.profile import STEADY, DeviceProfile, ModelFacts
from collab_llm_nodes.transport.background import background_loop

_DEEP = 5  # layers of the deeper one of two stages, whose difference gives the time of a layer
_LEAST_S = 1e-9  # of a layer, where noise gives less
_ATTEMPTS = 3  # measurements of a device under load
_PARTS = {
    "layer": re.compile(r"(^|\.)layers\.\d"),
    "vision": re.compile(r"(^|\.)visual\."),
    "embedding": re.compile(r"(^|\.)(embed_\w+|project_in)\."),
}
"""Names of the tensors in each part of a model; all others belong to the head."""


@dataclass(frozen=True)
class ProfilerConfig:
    """Calibration lengths, and the properties of a device that are not measured."""

    name: str = setting("", "Name of this device in the profile.")
    lengths: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
        "Tokens of a pass; those beyond half the context are left out.",
    )
    befores: tuple[int, ...] = setting(
        (0, 64, 256, 512, 1024), "Tokens before a pass; those beyond half the context are left out."
    )
    repeats: int = setting(
        5, "Passes of each length, of which the median is taken.", low=1, high=1000
    )
    memory_mb: float = setting(
        0.0, "Memory available to a stage [10^6 byte]; 0: what is free now.", low=0.0
    )
    mbps: float = setting(1000.0, "Speed of this device's link [10^6 bit/s].", low=1e-3, high=1e9)
    latency_s: float = setting(
        0.0005, "This device's share of a message's delay [s].", low=0.0, high=60.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.name:
            raise ConfigError("a device has no name", field="name", remedy="give --name")


def model_facts(config: ModelConfig) -> ModelFacts:
    """Return the sizes of a model as it is loaded, without reading its weights.

    Raises:
        ModelError: it cannot be found, or is of an unknown architecture.
    """
    folder = model_folder(config)
    facts = architecture_in(folder)
    text, vision = facts.get_text_config(), getattr(facts, "vision_config", None)
    dtype = DTYPES[config.dtype]
    model = empty_model(facts, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = quantisation_of(facts)
    tied = bool(model.all_tied_weights_keys)
    table = int(np.prod(model.get_input_embeddings().weight.shape)) * dtype.itemsize
    if stored is None:
        sizes = _part_bytes(_loaded_bytes(shapes, config))
    else:
        headers = stored_tensors(folder)
        sizes = _part_bytes({name: tensor.bytes for name, tensor in headers.items()})
        sizes["head"] += table if tied and "lm_head.weight" not in headers else 0
    heads = 0
    if holds_heads(folder):
        heads = count_heads(folder)
        sizes["head"] += count_head_weights(folder) * dtype.itemsize
    hashed = [sorted(shapes.items()), str(dtype), heads, text.num_attention_heads]
    if config.quantization != "none" or stored is not None:
        hashed.append([config.quantization, stored])
    between = getattr(text, "intermediate_size", None) or text.ffn_dim
    layers: int = text.num_hidden_layers
    return ModelFacts(
        fingerprint=hashlib.sha256(json.dumps(hashed).encode()).hexdigest(),
        layers=layers,
        context=context_length(text),
        layer_bytes=int(sizes["layer"]) // layers,
        embedding_bytes=int(sizes["embedding"]),
        head_bytes=int(sizes["head"]),
        shared_bytes=table if tied else 0,
        kv_bytes=column_bytes(text, dtype) // layers,
        state_bytes=4 * text.hidden_size,
        # States, their norm, queries, keys, values, attention output; gate, up and product.
        scratch_bytes=(6 * text.hidden_size + 3 * between) * dtype.itemsize,
        logits_bytes=text.vocab_size * 4,
        vision_bytes=0 if vision is None else int(sizes["vision"]) + picture_bytes(vision, dtype),
        first_layers=first_layers(facts),
    )


def _loaded_bytes(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, float]:
    """Return the bytes of each tensor, quantised as ``config`` says."""
    dtype, kind = DTYPES[config.dtype], config.quantization

    def each(name: str, dimensions: int) -> float:
        if kind == "none":
            return dtype.itemsize
        # Either package quantises the maps of layers.
        return quantized_bytes(kind, "torchao", name, dimensions, dtype)

    return {name: math.prod(shape) * each(name, len(shape)) for name, shape in shapes.items()}


def _part_bytes(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes of all layers, of the vision encoder, and of both ends."""
    parts = dict.fromkeys((*_PARTS, "head"), 0.0)
    for name, size in sizes.items():
        parts[next((part for part, found in _PARTS.items() if found.search(name)), "head")] += size
    return parts


StageOf = Callable[[int, int], Any]
"""Loads layers ``first`` to ``last - 1`` as an ``engine.Stage``."""


def measure(
    config: ProfilerConfig,
    model: ModelConfig,
    *,
    stage_of: StageOf | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> DeviceProfile:
    """Measure this device with ``model``. Takes seconds for small models, minutes for large ones.

    Four stages are timed: the shortest first one, a longer one, one layer without the embedding,
    and one with the head. Their differences give the times of a layer, the constant part of a pass,
    embedding and head. If equal passes take unequal times, other programs are running: the
    measurement is repeated, up to three times, and the one with the smallest ``spread`` is
    returned.

    Args:
        stage_of: loads a stage; by default of ``model``.

    Raises:
        ConfigError: the model has only one layer, or no calibration length fits its context.
        ModelError: it cannot be loaded, or the device does not exist.
    """
    facts = model_facts(model)
    if facts.layers <= facts.first_layers:
        raise ConfigError(
            f"{facts.layers} layers, of which the first stage has {facts.first_layers} or more,"
            " cannot be divided",
            field="path",
            remedy="take a larger model",
        )
    load = stage_of or (lambda first, last: Stage(model, first, last))
    half = facts.context // 2
    lengths = _calibration((1, *config.lengths), half)
    befores = _calibration((0, *config.befores), half)
    memory = int(config.memory_mb * 1e6) or free_memory(find_device(model.device))

    found: list[DeviceProfile] = []
    while len(found) < _ATTEMPTS and not any(each.spread <= STEADY for each in found):
        measurement = _Measurement(load, facts, clock, lengths, befores, config.repeats)
        layer, constant, embedding, head = measurement.parts()
        found.append(
            DeviceProfile(
                name=config.name,
                memory_bytes=memory,
                mbps=config.mbps,
                latency_s=config.latency_s,
                lengths=lengths,
                befores=befores,
                layer_s=tuple(_floats(row) for row in layer),
                pass_s=_floats(constant),
                embedding_s=_floats(embedding),
                head_s=_floats(head),
                spread=measurement.spread,
            )
        )
    return min(found, key=lambda each: each.spread)


@dataclass
class _Measurement:
    """One measurement of a device.

    Attributes:
        spread: as in ``DeviceProfile``, set by ``parts``.
    """

    load: StageOf
    facts: ModelFacts
    clock: Callable[[], float]
    lengths: Sequence[int]
    befores: Sequence[int]
    repeats: int
    spread: float = 0.0

    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the times of a layer [lengths, befores], the constant part, embedding and head."""
        layers, few = self.facts.layers, self.facts.first_layers
        more = min(_DEEP - 1, layers - few)
        shallow = self._stage(0, few, self.befores)
        deep = self._stage(0, few + more, self.befores)
        inner = self._stage(few, few + 1, (0,))[:, 0]  # the head, if it is there, gives no logits
        end = self._stage(layers - 1, layers, (0,), rows=True)[:, 0]
        again = self._stage(0, few, self.befores)
        # A changing load shows where the same stage differs, or more layers take no longer.
        self._note(np.abs(again - shallow) / np.minimum(again, shallow))
        self.spread = max(self.spread, float(np.mean(deep <= shallow)))
        layer = np.maximum((deep - shallow) / more, _LEAST_S)
        constant = np.maximum(inner - layer[:, 0], 0.0)
        embedding = np.maximum(shallow[:, 0] - inner - (few - 1) * layer[:, 0], 0.0)
        return layer, constant, embedding, np.maximum(end - inner, 0.0)

    def _stage(
        self, first: int, last: int, befores: Sequence[int], rows: bool = False
    ) -> np.ndarray:
        """Return the median times of passes of one stage with random input, [lengths, befores].

        Args:
            rows: compute the logits of all tokens, in the last stage.
        """
        stage, random = self.load(first, last), np.random.default_rng(0)

        def tokens(count: int) -> list[int] | Tensor:
            if first == 0:
                return [int(i) for i in random.integers(0, stage.vocab_size, count)]
            width = self.facts.state_bytes // 4
            return torch.from_numpy(random.standard_normal((count, width), np.float32))

        def timed(session: Any, length: int) -> float:
            fed, before = tokens(length), session.length
            synchronize(stage.device)
            begun = self.clock()
            session.feed(fed, length if rows else 0)
            synchronize(stage.device)
            seconds = self.clock() - begun
            session.length = before
            return seconds

        rounds = np.zeros((len(self.lengths), len(befores), self.repeats))
        with closing(stage.open()) as session:
            for j, before in enumerate(befores):
                session.length = min(session.length, before)
                if session.length < before:
                    session.feed(tokens(before - session.length), 0)
                for i, length in enumerate(self.lengths):
                    timed(session, length)  # warm-up
                    rounds[i, j] = [timed(session, length) for _ in range(self.repeats)]
        times: np.ndarray = np.median(rounds, axis=-1)
        self._note(times / np.min(rounds, axis=-1) - 1.0)
        return times

    def _note(self, spreads: np.ndarray) -> None:
        """Add the spreads of some times; the median ignores single interrupts."""
        self.spread = max(self.spread, float(np.median(spreads)))


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _calibration(values: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the distinct values up to ``most``, ascending."""
    found = tuple(sorted({value for value in values if value <= most}))
    if found[0] < 0 or most < 1:
        raise ConfigError(
            f"{values} for a context of {2 * most}",
            field="lengths",
            remedy="give lengths up to half the context",
        )
    return found


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on ``device``.

    Raises:
        ConfigError: the system does not report it.
    """
    free = free_bytes(device)
    if math.isinf(free):
        raise ConfigError(
            "this system does not report its free memory",
            field="memory_mb",
            remedy="give --memory-mb",
        )
    return int(free)


def measure_link(config: LinkConfig, address: str) -> tuple[float, float]:
    """Return speed [10^6 bit/s] and one-way delay [s] of the link to a worker on another device.

    Raises:
        CollabError: the worker does not answer, or the times give no speed.
    """
    timing = asyncio.run_coroutine_threadsafe(time_messages(config, address), background_loop())
    speed, there_and_back = link_speed(timing.result())
    return speed, there_and_back / 2


def link_speed(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return speed [10^6 bit/s] and delay [s] of a link, by least squares.

    Args:
        samples: sizes of messages [byte] and their times one way [s]; at least two sizes.

    Raises:
        InvalidInput: all have one size, or larger ones are not slower.
    """
    if len({size for size, _ in samples}) < 2:
        raise InvalidInput(
            "messages of one size give no speed", field="samples", remedy="send several sizes"
        )
    sizes, seconds = np.array(samples, float).T
    slope, delay = np.polyfit(sizes, seconds, 1)
    if slope <= 0:
        raise InvalidInput(
            "larger messages did not take longer", field="samples", remedy="send larger ones"
        )
    return float(8e-6 / slope), float(max(delay, 0.0))
