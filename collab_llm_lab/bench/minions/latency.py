"""Latency model of paper 000, appendix C: remote only, Minion and MinionS.

Prefill and batched decoding are bound by computation, decoding of one sequence by memory bandwidth.
Letters are the paper's: L layers of width d; n tokens of document in c chunks, k instructions and s
samples each; a share p of the jobs does not abstain.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Side:
    """A model and the machine it runs on.

    Attributes:
        layers: L.
        width: d, the hidden dimension.
        flops: F, peak computation [1/s].
        bandwidth: M, peak memory bandwidth [byte/s].
    """

    layers: int
    width: int
    flops: float
    bandwidth: float

    @property
    def weight_bytes(self) -> float:
        """P: half-precision weights without embeddings and LM head, 2 * 12 * L * d**2 [byte]."""
        return 24.0 * self.layers * self.width**2

    def prefill_s(self, n: float, c: float = 1.0) -> float:
        """Return the time to read ``n`` tokens in ``c`` independent chunks [s]."""
        attention = 2.0 * self.layers * self.width * n**2 / c
        return (n * self.weight_bytes + attention) / self.flops

    def decode_s(self, n_out: float, n: float) -> float:
        """Return the time to decode ``n_out`` tokens, one by one, after ``n`` others [s]."""
        columns = 4.0 * self.layers * self.width * n
        return n_out * (self.weight_bytes + columns) / self.bandwidth

    def decode_together_s(self, n_out: float, n: float) -> float:
        """Return the time to decode ``n_out`` tokens of many jobs after ``n`` others each [s]."""
        attention = 2.0 * self.layers * self.width * n
        return n_out * (self.weight_bytes + attention) / self.flops


@dataclass(frozen=True)
class Task:
    """Sizes of one question.

    Attributes:
        n: tokens of the document.
        out_local, out_remote: tokens per reply of each model.
        chunks, instructions, samples: c, k and s of MinionS.
        share: p, of the jobs that do not abstain.
    """

    n: float
    out_local: float
    out_remote: float
    chunks: int = 1
    instructions: int = 1
    samples: int = 1
    share: float = 1.0

    @property
    def extracted(self) -> float:
        """Tokens of all replies of the local model that are sent on: p * c * k * s * n_out."""
        return self.share * self.chunks * self.instructions * self.samples * self.out_local


@dataclass(frozen=True)
class Latency:
    """Time of each side, one after the other [s]."""

    local_s: float
    remote_s: float

    @property
    def total_s(self) -> float:
        return self.local_s + self.remote_s


def remote_only(remote: Side, task: Task) -> Latency:
    """Return the latency of the large model alone (C.2.1)."""
    return Latency(0.0, remote.prefill_s(task.n) + remote.decode_s(task.out_remote, task.n))


def minion(local: Side, remote: Side, task: Task) -> Latency:
    """Return the latency of one round of Minion (C.2.2)."""
    return Latency(
        local.prefill_s(task.n) + local.decode_s(task.out_local, task.n),
        remote.prefill_s(task.out_local) + remote.decode_s(task.out_remote, task.out_local),
    )


def minions(local: Side, remote: Side, task: Task) -> Latency:
    """Return the latency of one round of MinionS (C.2.3)."""
    extracted = task.extracted
    return Latency(
        local.prefill_s(task.n, task.chunks)
        + local.decode_together_s(extracted, task.n / task.chunks),
        remote.prefill_s(extracted) + remote.decode_s(task.out_remote, extracted),
    )


def printed_bound(local: Side, remote: Side, a: float) -> float:
    """Return the bound of Proposition C.1 on MinionS' latency, as a multiple of remote-only's.

    Args:
        a: tokens extracted per token of the document, below 1.
    """
    layers_width = (local.layers * local.width) / (remote.layers * remote.width)
    return 1.0 + (1.0 + a) * remote.flops / local.flops * layers_width


def proved_bound(local: Side, remote: Side, a: float, chunks: int) -> float:
    """Return the tighter bound within the proof of Proposition C.1.

    The proof bounds the ratio of local to remote prefill by the larger of the ratios of weights and
    of attention; the printed bound replaces both by L_l d_l / (L_r d_r).
    """
    layers_width = (local.layers * local.width) / (remote.layers * remote.width)
    larger = max(local.width / remote.width, 1.0 / chunks) * layers_width
    return 1.0 + (1.0 + a) * remote.flops / local.flops * larger
