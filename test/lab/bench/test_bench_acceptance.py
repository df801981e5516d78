"""Drafts that err as often as wanted."""

from __future__ import annotations

from collab_llm_lab.bench.acceptance import Acceptance


def test_noise_lowers_tau_to_what_is_wanted() -> None:
    acceptance = Acceptance(12, seed=3, gamma=4)
    own = acceptance.tau(0.0)
    assert acceptance.blur_to(own + 0.1) == 0.0
    wanted = 1.0 + (own - 1.0) / 2
    noise = acceptance.blur_to(wanted)
    assert noise > 0.0
    assert wanted - 0.5 < acceptance.tau(noise) <= wanted
