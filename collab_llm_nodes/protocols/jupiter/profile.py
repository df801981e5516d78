"""Stored profiles of devices: measured times, memory and links (paper 004, section IV-B).

A profile belongs to one model. It has the times of one decoder layer, since all are alike, and of
embedding and head.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.durable import replacing
from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError, did_you_mean
from collab_llm_nodes.protocols.jupiter.states import packed_bytes

Seconds = NDArray[np.float64]
VERSION = 1
"""Version of the file format."""
STEADY = 0.25
"""Largest spread of times on a device without other load."""


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a model that a plan depends on.

    Attributes:
        fingerprint: hash of the names, shapes and types of its tensors.
        layers: decoder layers.
        context: tokens of the longest sequence.
        layer_bytes: weights of one decoder layer.
        embedding_bytes: weights of the embedding.
        head_bytes: weights of the final norm, the LM head and the drafting heads.
        shared_bytes: of an embedding that is also the LM head, else 0. Both counts above include
            it, since two devices hold it twice; one device with both ends holds it once.
        kv_bytes: keys and values of one token in one decoder layer.
        state_bytes: hidden state of one token on the wire, in float32.
        scratch_bytes: activations of one token in a pass.
        logits_bytes: logits of one token.
        vision_bytes: vision encoder, with the activations of a large picture. It is in the process
            that drives the stages; 0 for a text model.
        first_layers: fewest layers of the first stage.
    """

    fingerprint: str
    layers: int
    context: int
    layer_bytes: int
    embedding_bytes: int
    head_bytes: int
    shared_bytes: int
    kv_bytes: int
    state_bytes: int
    scratch_bytes: int
    logits_bytes: int
    vision_bytes: int = 0
    first_layers: int = 1

    def __post_init__(self) -> None:
        if self.layers < 1 or self.context < 1 or min(self.layer_bytes, self.state_bytes) < 1:
            raise ConfigError(
                "a model has layers, a context and weights",
                field="model",
                remedy="measure the profile again",
            )
        if any(value < 0 for value in vars(self).values() if isinstance(value, int)):
            raise ConfigError(
                "sizes must not be negative", field="model", remedy="measure the profile again"
            )
        if self.shared_bytes > min(self.embedding_bytes, self.head_bytes):
            raise ConfigError(
                "shared_bytes are part of the embedding and of the head",
                field="model",
                remedy="measure the profile again",
            )

    def weight_bytes(self, first: int, last: int) -> int:
        """Return the bytes of the weights of layers ``first`` to ``last - 1``, ends included."""
        begins, ends = first == 0, last == self.layers
        size = (last - first) * self.layer_bytes
        size += begins * self.embedding_bytes + ends * self.head_bytes
        return size - (begins and ends) * self.shared_bytes

    def stage_bytes(self, first: int, last: int, lanes: int, tokens: int) -> int:
        """Return the memory of a stage: weights, keys and values at full context, activations.

        Args:
            lanes: open sessions.
            tokens: in the longest pass.
        """
        kv = (last - first) * self.kv_bytes * self.context * lanes
        logits = self.logits_bytes * lanes if last == self.layers else 0
        return self.weight_bytes(first, last) + kv + self.scratch_bytes * tokens + logits


@dataclass(frozen=True)
class DeviceProfile:
    """Measurements of one device with one model, in seconds.

    Attributes:
        name: of the device.
        memory_bytes: available to a stage.
        mbps: speed of its link [10^6 bit/s].
        latency_s: its share of a message's delay.
        lengths: calibration lengths x, tokens of a pass, ascending from 1.
        befores: calibration lengths y, tokens before them, ascending from 0.
        layer_s: one decoder layer, [lengths][befores].
        pass_s: constant part of a pass, by length.
        embedding_s: embedding, by length.
        head_s: logits of that many tokens, by length. A guess of a drafting head takes as long as
            the logits of one more token.
        spread: relative spread of the times of equal passes. Above ``STEADY``, other programs
            were running, and the times are unreliable.
    """

    name: str
    memory_bytes: int
    mbps: float
    latency_s: float
    lengths: tuple[int, ...]
    befores: tuple[int, ...]
    layer_s: tuple[tuple[float, ...], ...]
    pass_s: tuple[float, ...]
    embedding_s: tuple[float, ...]
    head_s: tuple[float, ...]
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not self.name or not self.lengths or not self.befores:
            raise self._wrong("a name and calibration lengths are required")
        if self.lengths[0] != 1 or self.befores[0] != 0:
            raise self._wrong("lengths must begin with 1, befores with 0")
        if not (_ascends(self.lengths) and _ascends(self.befores)):
            raise self._wrong("calibration lengths must ascend")
        rows, columns = len(self.lengths), len(self.befores)
        if len(self.layer_s) != rows or any(len(row) != columns for row in self.layer_s):
            raise self._wrong(f"layer_s is not [{rows}][{columns}]")
        by_length = (self.pass_s, self.embedding_s, self.head_s)
        if any(len(times) != rows for times in by_length):
            raise self._wrong(f"pass_s, embedding_s and head_s have {rows} times each")
        times = np.concatenate([np.ravel(self.layer_s), *by_length])
        if not (np.isfinite(times).all() and (times >= 0).all() and np.min(self.layer_s) > 0):
            raise self._wrong("times must be finite, those of a layer positive")
        if not (self.memory_bytes > 0 and 0 < self.mbps < np.inf and 0 <= self.latency_s < np.inf):
            raise self._wrong("memory_bytes and mbps must be positive, latency_s not negative")
        if not 0 <= self.spread < np.inf:
            raise self._wrong("spread must not be negative")

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError(
            why, field=f"devices.{self.name}", remedy="measure the device's profile again"
        )

    @cached_property
    def _grid(self) -> tuple[Seconds, Seconds, Seconds]:
        """Calibration lengths and times of a layer, at least [2] and [2, 2]."""
        lengths, befores = (
            np.array(values if len(values) > 1 else (*values, values[0] + 1), float)
            for values in (self.lengths, self.befores)
        )
        table = np.array(self.layer_s, float)
        missing = [(0, len(lengths) - table.shape[0]), (0, len(befores) - table.shape[1])]
        return lengths, befores, np.pad(table, missing, mode="edge")

    def layer(self, x: ArrayLike, y: ArrayLike) -> Seconds:
        """Return q(x, y), the time of one decoder layer: ``x`` tokens after ``y`` others.

        Bilinear between calibration lengths, and extrapolated with the last slope where it rises.
        """
        lengths, befores, table = self._grid
        i, along = _place(lengths, x)
        j, across = _place(befores, y)
        low = _on_line(table[i, j], table[i, j + 1], across)
        high = _on_line(table[i + 1, j], table[i + 1, j + 1], across)
        return _on_line(low, high, along)

    def by_length(self, times: Sequence[float], x: ArrayLike) -> Seconds:
        """Return ``times`` per calibration length, interpolated at ``x``; 0 for no tokens."""
        lengths, _, _ = self._grid
        row = np.resize(np.array(times, float), len(lengths))
        i, along = _place(lengths, x)
        seconds: Seconds = _on_line(row[i], row[i + 1], along) * (np.asarray(x) > 0)
        return seconds

    def stage(
        self,
        layers: int,
        x: ArrayLike,
        y: ArrayLike,
        *,
        first: bool = False,
        rows: ArrayLike = 0,
    ) -> Seconds:
        """Return the time of a stage's pass over ``x`` tokens after ``y``; 0 for no tokens.

        Args:
            layers: decoder layers of the stage.
            first: include the embedding.
            rows: rows of logits, in the last stage.
        """
        seconds = layers * self.layer(x, y) + self.by_length(self.pass_s, x)
        if first:
            seconds = seconds + self.by_length(self.embedding_s, x)
        seconds = seconds + self.by_length(self.head_s, rows)
        whole: Seconds = seconds * (np.asarray(x) > 0)
        return whole

    def least_length(self, share: float) -> int:
        """Return the shortest pass with at least ``share`` of the best tokens per second."""
        x = np.arange(1, self.lengths[-1] + 1)
        speed = x / self.layer(x, 0)
        return int(x[np.argmax(speed >= share * speed.max())])


def _place(grid: Seconds, at: ArrayLike) -> tuple[NDArray[np.intp], Seconds]:
    """Return the cell of ``at`` in ``grid``, and the place in it: 0 to 1, more beyond the grid."""
    values = np.asarray(at, float)
    # Only 0 tokens are below the first value, and they take no time.
    cell = np.minimum(grid[1:-1].searchsorted(values, "right"), len(grid) - 2)
    return cell, np.maximum(0.0, (values - grid[cell]) / (grid[cell + 1] - grid[cell]))


def _on_line(low: Seconds, high: Seconds, place: Seconds) -> Seconds:
    """Return the value at ``place``, on a line from ``low`` at 0 to ``high`` at 1.

    Beyond 1 a falling line continues level: more tokens never take less, so the fall is noise.
    """
    rise = high - low
    beyond = np.maximum(rise, 0.0) * np.maximum(place - 1.0, 0.0)
    found: Seconds = low + rise * np.minimum(place, 1.0) + beyond
    return found


def _ascends(values: Sequence[int]) -> bool:
    return all(a < b for a, b in zip(values, values[1:], strict=False))


def transfer_s(
    sender: DeviceProfile, receiver: DeviceProfile, size_bytes: ArrayLike
) -> tuple[Seconds, float]:
    """Return how long a message occupies the link, and its delay after that.

    Both devices are on one network, so the slower link decides.
    """
    occupied: Seconds = np.asarray(size_bytes, float) * 8e-6 / min(sender.mbps, receiver.mbps)
    return occupied, sender.latency_s + receiver.latency_s


def least_length(devices: Sequence[DeviceProfile], share: float) -> int:
    """Return b of Eq. 3: the shortest sub-sequence that suits every device."""
    return max(device.least_length(share) for device in devices)


@dataclass(frozen=True)
class Profile:
    """A model and the devices that were measured with it."""

    model: ModelFacts
    devices: tuple[DeviceProfile, ...]
    version: int = VERSION

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if len(set(names)) < len(names):
            raise ConfigError(
                "two devices have one name", field="devices", remedy="rename one of them"
            )

    def device(self, name: str) -> DeviceProfile:
        """Return the device ``name``.

        Raises:
            ConfigError: it has not been measured with this model.
        """
        for device in self.devices:
            if device.name == name:
                return device
        names = [device.name for device in self.devices]
        known = f"measured: {', '.join(names)}" if names else "none is measured"
        raise ConfigError(
            f"no device {name!r} in the profile",
            field="devices",
            remedy=did_you_mean(name, names, f"{known}; run collab-llm jupiter profile there"),
        )

    def warnings(self, names: Collection[str] = ()) -> list[str]:
        """Return a sentence for each device that was measured under load.

        Args:
            names: of the devices to check; empty: all.
        """
        return [
            f"{device.name} was measured while other programs computed there: equal passes differ"
            f" by {device.spread:.0%}; stop them and run collab-llm jupiter profile again"
            for device in self.devices
            if device.spread > STEADY and (not names or device.name in names)
        ]

    def check_prompt(self, tokens: int) -> None:
        """Refuse a prompt of more tokens than the context.

        Raises:
            InvalidInput: ``field`` is ``prompt_tokens``.
        """
        if tokens > self.model.context:
            raise InvalidInput(
                f"{tokens} tokens, and the model's context has {self.model.context}",
                field="prompt_tokens",
                remedy="plan for shorter prompts",
            )

    def check_model(self, facts: ModelFacts) -> None:
        """Refuse a profile of another model.

        Raises:
            ModelError: ``facts`` are not those of the profile's model.
        """
        if self.model != facts:
            raise ModelError(
                f"the profile is of model {self.model.fingerprint[:12]}, this is"
                f" {facts.fingerprint[:12]}",
                field="profile",
                remedy="measure a profile with this model: collab-llm jupiter profile",
            )

    def sending(self, states: str) -> Profile:
        """Return this profile with the sizes of hidden states in the form ``states``."""
        sent = packed_bytes(1, self.model.state_bytes // 4, states)
        return replace(self, model=replace(self.model, state_bytes=sent))

    def beside_vision(self, coordinator: str) -> Profile:
        """Return this profile with the memory that the vision encoder leaves to a stage.

        Args:
            coordinator: name of the device that holds it; empty: none of these devices.

        Raises:
            ConfigError: this device has not been measured.
        """
        if not coordinator:
            return self
        device = self.device(coordinator)
        left = max(1, device.memory_bytes - self.model.vision_bytes)  # 1: no stage fits
        return self.with_device(replace(device, memory_bytes=left))

    def with_device(self, device: DeviceProfile) -> Profile:
        """Return a profile with ``device`` added, or in place of the one with its name."""
        devices = {**{d.name: d for d in self.devices}, device.name: device}
        return replace(self, devices=tuple(devices.values()))

    def save(self, file: Path) -> None:
        """Write the profile as JSON."""
        write_json(file, asdict(self))

    @classmethod
    def load(cls, file: Path) -> Profile:
        """Read a profile.

        Raises:
            ConfigError: it is unreadable, of another version, or has impossible figures.
        """
        return from_mapping(cls, read_json(file, "profile", VERSION))


def write_json(file: Path, content: object) -> None:
    """Write ``content`` atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as part:
        part.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_json(file: Path, kind: str, version: int) -> dict[str, object]:
    """Return the mapping in ``file``, a ``kind`` of format ``version``.

    Raises:
        ConfigError: it is unreadable, or of another version.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {file}: {error}", field=kind, remedy=f"write the {kind} again"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("version"), int):
        raise ConfigError(f"{file} is no {kind}", field=kind, remedy="name another file")
    if content["version"] != version:  # another version may have other keys
        raise ConfigError(
            f"{file} has version {content['version']}, this program reads {version}",
            field="version",
            remedy=f"write the {kind} again with this version",
        )
    return content
