"""Prices that an API would charge: paper 003, Table 1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prices:
    """Dollars per million tokens, read and written, of a draft and a target model.

    Prices as the paper found them in May 2025.
    """

    pair: str
    draft_in: float
    draft_out: float
    target_in: float
    target_out: float


PROVIDERS = (
    Prices("Qwen1.5-0.5B / 72B", 0.1, 0.1, 0.9, 0.9),
    Prices("Llama-3.1-8B / 405B", 0.02, 0.05, 0.9, 0.9),
    Prices("Llama3-8B / 70B", 0.05, 0.08, 0.59, 0.79),
    Prices("Qwen2-VL-7B / 72B", 0.2, 0.2, 0.7, 0.7),
)


def api_cost(
    prices: Prices, gamma: int, tau: float, *, prompt: int = 100, answer: int = 500
) -> dict[str, float]:
    """Dollars for a million requests of ``prompt`` tokens, answered by ``answer`` tokens.

    A target is charged for its forward passes: one per token alone (``cloud_ar``), one per ``tau``
    tokens with drafts. ``cloud_sd`` also pays for ``gamma`` draft tokens per pass; drafting on the
    robot (``edge_cloud_sd``) is free.
    """
    passes = answer / tau
    target = prompt * prices.target_in + passes * prices.target_out
    draft = prompt * prices.draft_in + gamma * passes * prices.draft_out
    return {
        "cloud_ar": prompt * prices.target_in + answer * prices.target_out,
        "cloud_sd": target + draft,
        "edge_cloud_sd": target,
    }
