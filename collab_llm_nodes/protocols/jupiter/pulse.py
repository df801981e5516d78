"""Silence of a peer, counted in ticks of one's own. No I/O, no clock."""

from __future__ import annotations


class Pulse:
    """Finds a peer lost that has said nothing for some ticks.

    A tick is counted when it happens. After a pause of this process, whatever its cause, the peer
    has as many ticks left to be heard as before: the pause was not its silence.

    Args:
        misses: ticks without a word after which the peer is lost.
    """

    def __init__(self, misses: int) -> None:
        self._misses = misses
        self._missed = 0

    def heard(self) -> None:
        """Note that the peer has said something."""
        self._missed = 0

    def tick(self, more: float = 0.0) -> bool:
        """Count a tick; return True if the peer is lost.

        Args:
            more: further ticks that it has, because it cannot have heard everything yet.
        """
        self._missed += 1
        return self._missed > self._misses + more
