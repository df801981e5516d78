"""Ledger of the texts that leave this machine: bytes by round and kind, and a hard cap."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from collab_llm_nodes.errors import InvalidInput

CHOICE = "choice"
"""Kind of the information in a program's choice of jobs, which is no text (``minions.choice``)."""


class DisclosureLimit(InvalidInput):
    """Sending these texts would exceed the cap on disclosed bytes."""


@dataclass(frozen=True)
class Disclosure:
    """One text that was sent.

    Attributes:
        round: of the protocol, from 1.
        kind: origin of the text in the protocol's words, such as "question" or "extract".
        receiver: name of the model that got it.
        bytes: its length in UTF-8 [byte].
        sha256: hash of those bytes, which identifies the text without storing it; empty for
            ``CHOICE``.
        times: how often it was sent: 1, more with retries, 0 if the server could not be reached.
    """

    round: int
    kind: str
    receiver: str
    bytes: int
    sha256: str
    times: int = 1


@dataclass
class PrivacyLedger:
    """The texts of one answer that were sent, in order.

    Args:
        max_bytes: cap on all texts together; a text counts once, however often it is sent again.
    """

    max_bytes: int
    disclosures: list[Disclosure] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of the texts that were sent."""
        return sum(each.bytes for each in self.disclosures if each.times and each.kind != CHOICE)

    @property
    def room(self) -> int:
        """Bytes that may still be sent."""
        return self.max_bytes - self.bytes

    def enter(
        self,
        round: int,
        receiver: str,
        texts: Iterable[tuple[str, str]],
        record: Callable[[tuple[Disclosure, ...]], None] = lambda disclosures: None,
        choice_bits: int = 0,
    ) -> tuple[Disclosure, ...]:
        """Enter the texts of one request before it is sent: all of them or none.

        Args:
            texts: pairs of kind and text.
            record: writes the entries elsewhere; if it raises, nothing is entered.
            choice_bits: information in the choice of jobs; entered as whole bytes.

        Raises:
            DisclosureLimit: the texts must not be sent; nothing is entered.
        """
        entered = tuple(_disclosure(round, kind, receiver, text) for kind, text in texts)
        total = sum(disclosure.bytes for disclosure in entered)
        if total > self.room:
            kinds = ", ".join(dict.fromkeys(disclosure.kind for disclosure in entered))
            raise DisclosureLimit(
                f"{total} bytes of {kinds}, {self.room} of {self.max_bytes} may still be sent",
                field="privacy.max_bytes",
                remedy="raise it, or send less",
            )
        if choice_bits:
            entered += (Disclosure(round, CHOICE, receiver, math.ceil(choice_bits / 8), ""),)
        record(entered)
        self.disclosures += entered
        return entered

    def set_times(self, disclosure: Disclosure, attempts: int) -> None:
        """Set how often ``disclosure`` was sent in all; 0 if never."""
        place = next(i for i, known in enumerate(self.disclosures) if known is disclosure)
        self.disclosures[place] = replace(disclosure, times=attempts)

    def by_round(self) -> dict[int, dict[str, int]]:
        """Return the bytes of each kind, by round."""
        counts: dict[int, Counter[str]] = {}
        for disclosure in self.disclosures:
            if not disclosure.times:
                continue
            counts.setdefault(disclosure.round, Counter())[disclosure.kind] += disclosure.bytes
        return {round: dict(kinds) for round, kinds in counts.items()}


def _disclosure(round: int, kind: str, receiver: str, text: str) -> Disclosure:
    content = text.encode("utf-8", "surrogatepass")
    return Disclosure(round, kind, receiver, len(content), hashlib.sha256(content).hexdigest())
