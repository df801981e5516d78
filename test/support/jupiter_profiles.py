"""Profiles of made-up devices and models, for tests of Jupiter's planner."""

from __future__ import annotations

import numpy as np

from collab_llm_nodes.protocols.jupiter.profile import DeviceProfile, ModelFacts, Profile

LENGTHS, BEFORES = (1, 4, 16, 64), (0, 16, 64)


def facts(layers: int = 6, context: int = 64, *, tied: bool = True) -> ModelFacts:
    """A model whose layers weigh 1 MB, its embedding 3 MB and its head 4 MB."""
    return ModelFacts(
        fingerprint="a" * 64,
        layers=layers,
        context=context,
        layer_bytes=1_000_000,
        embedding_bytes=3_000_000,
        head_bytes=4_000_000,
        shared_bytes=3_000_000 if tied else 0,
        kv_bytes=1000,
        state_bytes=200,
        scratch_bytes=500,
        logits_bytes=4000,
    )


def device(
    name: str = "one", slowness: float = 1.0, memory_mb: float = 1000.0, mbps: float = 100.0
) -> DeviceProfile:
    """A device whose layer takes (x + 8 + x (y + x / 2) / 64) ``slowness`` / 10 ms."""
    x, y = np.array(LENGTHS)[:, None], np.array(BEFORES)[None, :]
    layer = (x + 8 + x * (y + x / 2) / 64) * slowness * 1e-4
    return DeviceProfile(
        name=name,
        memory_bytes=int(memory_mb * 1e6),
        mbps=mbps,
        latency_s=2e-4,
        lengths=LENGTHS,
        befores=BEFORES,
        layer_s=tuple(tuple(float(s) for s in row) for row in layer),
        pass_s=(1e-4 * slowness,) * len(LENGTHS),
        embedding_s=tuple(1e-6 * slowness * n for n in LENGTHS),
        head_s=tuple(2e-4 * slowness * (n + 4) for n in LENGTHS),
    )


def profile(*slowness: float, layers: int = 6, context: int = 64) -> Profile:
    """A profile of devices d0, d1, ... with ample memory."""
    devices = tuple(device(f"d{i}", slow) for i, slow in enumerate(slowness))
    return Profile(facts(layers, context), devices)
