"""EMULATED devices, models and clusters: those of paper 004's tables III and IV, by data sheet.

A device computes at a share of its peak and reads memory at a share of its bandwidth; reading
weights and computing do not overlap, and each layer costs some launches of kernels. That is crude.
No figure here is fitted to the paper's results, so ratios show how the methods compare on such
devices, and absolute times show nothing about a Jetson.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from collab_llm_nodes.protocols.jupiter.profile import (
    DeviceProfile,
    ModelFacts,
    Profile,
    Seconds,
)

COMPUTE_SHARE, MEMORY_SHARE = 0.4, 0.6
"""Shares of peak arithmetic and of peak bandwidth that kernels reach."""
LAUNCH_S = 3e-4
"""Launches of a layer's kernels."""
LATENCY_S = 2.5e-4
"""A device's share of the delay: a message is under way for twice this."""
NOISE = 0.03
"""Standard deviation of the logarithm of each time."""
CONTEXT = 1024
STATE_BYTES = 2  # hidden states cross the wire as fp16
WEIGHT_BYTES = 0.5  # int4, as in the paper; embedding and LM head are fp16
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BEFORES = (0, 64, 128, 256, 512)


@dataclass(frozen=True)
class Llm:
    """The widths of a Llama model without grouped heads."""

    name: str
    layers: int
    hidden: int
    between: int
    vocabulary: int = 32000

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's attention."""
        return 4 * self.hidden**2

    @property
    def mlp_weights(self) -> int:
        """Weights of a layer's feed-forward part."""
        return 3 * self.hidden * self.between

    @property
    def head_weights(self) -> int:
        """Weights of the LM head, and of the embedding."""
        return self.hidden * self.vocabulary

    @property
    def state_bytes(self) -> int:
        """A token's hidden state on the wire."""
        return self.hidden * STATE_BYTES

    @property
    def facts(self) -> ModelFacts:
        """The sizes that a plan depends on."""
        layer = int((self.attention_weights + self.mlp_weights) * WEIGHT_BYTES)
        return ModelFacts(
            fingerprint=f"emulated {self.name}",
            layers=self.layers,
            context=CONTEXT,
            layer_bytes=layer,
            embedding_bytes=2 * self.head_weights,
            head_bytes=2 * self.head_weights,
            shared_bytes=0,
            kv_bytes=2 * self.hidden * 2,
            state_bytes=self.state_bytes,
            scratch_bytes=(6 * self.hidden + 3 * self.between) * 2,
            logits_bytes=4 * self.vocabulary,
        )


LLAMA_7B = Llm("Llama2-7B", 32, 4096, 11008)
LLAMA_13B = Llm("Llama2-13B", 40, 5120, 13824)


@dataclass(frozen=True)
class Hardware:
    """A device by its data sheet.

    Attributes:
        flops: peak of fp16 arithmetic without tensor cores.
        bytes_per_s: peak of the memory.
        memory_bytes: that a model may use; the rest of 8 GB is the system's.
    """

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: int = 6_000_000_000

    def attention(self, model: Llm, x: ArrayLike, y: ArrayLike, share: float = 1.0) -> Seconds:
        """Return the time of ``share`` of a layer's attention: ``x`` tokens after ``y``."""
        new, before = np.asarray(x, float), np.asarray(y, float)
        reads = model.attention_weights * WEIGHT_BYTES + 4 * model.hidden * (before + new)
        works = 2 * model.attention_weights * new + 4 * model.hidden * new * (before + new / 2)
        return self._time(reads * share, works * share) + LAUNCH_S / 2

    def mlp(self, model: Llm, x: ArrayLike, share: float = 1.0) -> Seconds:
        """Return the time of ``share`` of a layer's feed-forward part over ``x`` tokens."""
        reads, works = (
            model.mlp_weights * WEIGHT_BYTES,
            2 * model.mlp_weights * np.asarray(x, float),
        )
        return self._time(reads * share, works * share) + LAUNCH_S / 2

    def head(self, model: Llm, rows: ArrayLike) -> Seconds:
        """Return the time of logits after ``rows`` tokens; 0 for none."""
        wanted = np.asarray(rows, float)
        seconds: Seconds = self._time(
            2.0 * model.head_weights * (wanted > 0), 2 * model.head_weights * wanted
        )
        return seconds

    def stage(
        self, model: Llm, layers: int, x: ArrayLike, y: ArrayLike, rows: ArrayLike = 0
    ) -> Seconds:
        """Return the time of a pass through ``layers`` layers, with logits after ``rows``."""
        each = self.attention(model, x, y) + self.mlp(model, x)
        return layers * each + self.head(model, rows)

    def _time(self, reads: ArrayLike, works: ArrayLike) -> Seconds:
        seconds: Seconds = np.asarray(reads) / (MEMORY_SHARE * self.bytes_per_s) + np.asarray(
            works
        ) / (COMPUTE_SHARE * self.flops)
        return seconds


XAVIER_NX = Hardware("NX", 1.69e12, 59.7e9)
TX2 = Hardware("TX2", 1.33e12, 59.7e9)
NANO = Hardware("Nano", 0.472e12, 25.6e9)


@dataclass(frozen=True)
class Cluster:
    """Devices on one network with a model.

    Attributes:
        mbps: of each device's link [10^6 bit/s].
    """

    name: str
    model: Llm
    hardware: tuple[Hardware, ...]
    mbps: float

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the devices in the profile."""
        return tuple(f"{h.name.lower()}_{i}" for i, h in enumerate(self.hardware))

    @property
    def bytes_per_s(self) -> float:
        """Speed of a link."""
        return self.mbps * 1e6 / 8

    def first(self, count: int) -> Cluster:
        """Return the cluster of the first ``count`` devices."""
        return replace(self, name=f"{self.name}_{count}", hardware=self.hardware[:count])

    def profile(self, seed: int) -> Profile:
        """Return what profiling the devices gives: medians of five noisy passes of each length."""
        rng = np.random.default_rng(seed)

        def measured(seconds: Seconds) -> Seconds:
            noisy = seconds * np.exp(NOISE * rng.standard_normal((5, *seconds.shape)))
            return np.asarray(np.median(noisy, 0))

        devices = []
        x, y = np.array(LENGTHS)[:, None], np.array(BEFORES)[None, :]
        for name, hardware in zip(self.names, self.hardware, strict=True):
            layer = measured(hardware.attention(self.model, x, y) + hardware.mlp(self.model, x))
            devices.append(
                DeviceProfile(
                    name=name,
                    memory_bytes=hardware.memory_bytes,
                    mbps=self.mbps,
                    latency_s=LATENCY_S,
                    lengths=LENGTHS,
                    befores=BEFORES,
                    layer_s=tuple(tuple(float(s) for s in row) for row in layer),
                    pass_s=(0.0,) * len(LENGTHS),
                    embedding_s=(0.0,) * len(LENGTHS),
                    head_s=tuple(
                        float(s) for s in measured(hardware.head(self.model, np.array(LENGTHS)))
                    ),
                )
            )
        return Profile(self.model.facts, tuple(devices))


ENV_A = (XAVIER_NX,) * 4
ENV_B = (XAVIER_NX, TX2, TX2, NANO)


def clusters(mbps: float) -> tuple[Cluster, ...]:
    """Return the paper's clusters with its two models, at one network speed."""
    return tuple(
        Cluster(f"{name}{suffix}", model, hardware, mbps)
        for model, suffix in ((LLAMA_7B, ""), (LLAMA_13B, "_13b"))
        for name, hardware in (("env_a", ENV_A), ("env_b", ENV_B))
    )
