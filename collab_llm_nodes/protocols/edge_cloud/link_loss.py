"""The policy for an answer when the verifier cannot be reached: no I/O, no clock.

``hold``: the answer fails with a typed error, and its caller may try again.
``draft_only``: the draft model finishes the answer alone. Its tokens are marked as not verified and
follow its own law, not the target's; whether a robot may move on them is the navigator's policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collab_llm_nodes.config import ANY, check_ranges, setting
from collab_llm_nodes.errors import CollabError, DeadlineExceeded, Unavailable
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClient

_LOST = (Unavailable.code, DeadlineExceeded.code)
"""Errors of a verifier that cannot be reached; any other would recur once the link is back."""


@dataclass(frozen=True)
class LinkLossConfig:
    """Policy for answers whose verifier cannot be reached."""

    policy: str = setting(
        "hold",
        "hold: the answer fails; draft_only: the draft model finishes it, marked as unverified.",
        choices=("hold", "draft_only"),
        per_request=ANY,
    )
    after_s: float = setting(
        2.0,
        "draft_only: longest wait for a verdict before the draft model continues alone; for the"
        " first verdict it includes the verifier's prefill [s].",
        low=0.05,
        high=600.0,
    )
    max_unverified: int = setting(
        64,
        "draft_only: most unverified tokens at the end of an answer; a longer end fails [tokens].",
        low=1,
        high=8192,
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def finishes_alone(self, error: CollabError) -> bool:
        """Return True if the draft model is to finish the answer that ``error`` has ended."""
        return self.policy == "draft_only" and error.code in _LOST


class Patience:
    """The time for which a verdict has been awaited. Times are of one monotonic clock [s]."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None  # None: nothing is awaited

    def on_sent(self, now: float) -> None:
        """Record that a draft is being sent to the verifier."""
        if self._since is None:
            self._since = now

    def on_heard(self, now: float, *, waiting: bool) -> None:
        """Record a message of the verifier; ``waiting``: another one is awaited."""
        self._since = now if waiting else None

    def over(self, now: float) -> bool:
        """Return True if the verifier has been silent for too long."""
        return self._since is not None and now - self._since > self._limit_s


def finish_alone(
    client: EdgeClient,
    next_token: Callable[[tuple[int, ...]], int],
    eos: frozenset[int],
    max_unverified: int,
    *,
    check: Callable[[], None],
    on_tokens: Callable[[tuple[int, ...]], None],
) -> None:
    """Have the draft model complete the answer that ``client`` holds.

    Args:
        next_token: the draft model's own token after an answer (``Drafter.next_token``).
        check: called before each token; raises once the answer is cancelled or its time is over.
        on_tokens: called with each token.

    Raises:
        Unavailable: it is not complete after ``max_unverified`` tokens. Half a sentence could be
            read as an order that its end would have revoked, so it must not be used.
    """
    for _ in range(max_unverified):
        check()
        token = next_token(tuple(client.generated))
        client.on_unverified(token, end=token in eos)
        on_tokens((token,))
        if client.finished:
            return
    raise Unavailable(
        f"the verifier is out of reach, and the draft model alone did not come to an end within"
        f" {max_unverified} tokens",
        field="link_loss.max_unverified",
        remedy="raise it, or check the link",
    )
