"""Ledger of the texts that leave this machine: bytes by round and kind, a hard cap, the audit."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from collab_llm_nodes.errors import InvalidInput

CHOICE = "choice"
"""Kind of what a message tells beside its texts, by which of them are there."""


class LeavesTooMuch(InvalidInput):
    """A text must not leave: with it, more bytes would have left than the cap allows."""


@dataclass(frozen=True)
class Departure:
    """One text that left.

    Attributes:
        round: of the protocol, from 1.
        kind: what it is, in the protocol's words, such as "question" or "extraction".
        receiver: name of the model that got it.
        bytes: its length in UTF-8 [byte].
        sha256: of those bytes, to recognise the text without keeping it; empty with ``CHOICE``,
            which is no text.
        times: how often it was sent: 1, and more with retries.
    """

    round: int
    kind: str
    receiver: str
    bytes: int
    sha256: str
    times: int = 1

    def audit_line(self) -> str:
        """Return the record as one line of JSON, without line end."""
        return json.dumps(asdict(self), ensure_ascii=True)


@dataclass
class PrivacyLedger:
    """The texts of one answer that left, in order.

    Ask :meth:`depart` before anything is sent: what it refuses must stay here.

    Args:
        max_bytes: cap on all texts together; a text counts once, however often it is sent again.
    """

    max_bytes: int
    departures: list[Departure] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of the texts that have left."""
        return sum(each.bytes for each in self.departures if each.kind != CHOICE)

    @property
    def room(self) -> int:
        """Bytes that may still leave."""
        return self.max_bytes - self.bytes

    def depart(self, round: int, kind: str, receiver: str, text: str) -> Departure:
        """Enter ``text``, which is about to be sent.

        Raises:
            LeavesTooMuch: it must not be; nothing is entered.
        """
        (departure,) = self.depart_together(round, receiver, [(kind, text)])
        return departure

    def depart_together(
        self,
        round: int,
        receiver: str,
        texts: Iterable[tuple[str, str]],
        record: Callable[[tuple[Departure, ...]], None] = lambda departures: None,
        choice_bits: int = 0,
    ) -> tuple[Departure, ...]:
        """Enter the texts of one request, each with its kind: all of them or none.

        Args:
            record: writes them down elsewhere; what it raises keeps them here.
            choice_bits: told by the choice of the texts; whole bytes are entered.

        Raises:
            LeavesTooMuch: they must not be sent; nothing is entered.
        """
        entered = tuple(_departure(round, kind, receiver, text) for kind, text in texts)
        total = sum(departure.bytes for departure in entered)
        if total > self.room:
            kinds = ", ".join(dict.fromkeys(departure.kind for departure in entered))
            raise LeavesTooMuch(
                f"{total} bytes of {kinds}, {self.room} of {self.max_bytes} may still leave",
                field="max_bytes_out",
                remedy="raise it, or send less",
            )
        if choice_bits:
            entered += (Departure(round, CHOICE, receiver, math.ceil(choice_bits / 8), ""),)
        record(entered)
        self.departures += entered
        return entered

    def sent_again(self, departure: Departure, attempts: int) -> None:
        """Note that ``departure`` took ``attempts`` attempts in all."""
        place = next(i for i, known in enumerate(self.departures) if known is departure)
        self.departures[place] = Departure(**{**asdict(departure), "times": attempts})

    def by_round(self) -> dict[int, dict[str, int]]:
        """Return the bytes of each kind, by round."""
        counts: dict[int, Counter[str]] = {}
        for departure in self.departures:
            counts.setdefault(departure.round, Counter())[departure.kind] += departure.bytes
        return {round: dict(kinds) for round, kinds in counts.items()}


def _departure(round: int, kind: str, receiver: str, text: str) -> Departure:
    content = text.encode("utf-8", "surrogatepass")
    return Departure(round, kind, receiver, len(content), hashlib.sha256(content).hexdigest())
