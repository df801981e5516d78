"""Cost and privacy ledgers of one answer, and the audit log of all answers."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from collab_llm_nodes.chat.base import Reply
from collab_llm_nodes.chat.ledger import Call, CostLedger, EnergyMeter, Price
from collab_llm_nodes.chat.privacy import CHOICE, Disclosure, PrivacyLedger
from collab_llm_nodes.errors import CollabError, ConfigError, Unavailable
from collab_llm_nodes.protocols.minions.messages import AskRemote


class AuditLog:
    """File with a line for each text before it is sent. Thread-safe.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, file: str) -> None:
        path = Path(file).expanduser()
        try:
            mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(path, mode, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}",
                field="privacy.audit_file",
                remedy="name a file in a folder that exists",
            ) from error
        self._lock = threading.Lock()

    def add(self, answer: str, disclosures: Iterable[Disclosure]) -> None:
        """Add a line for each disclosure of the answer with this id.

        Raises:
            Unavailable: the file cannot be written, so nothing must be sent.
        """
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        lines = "".join(
            json.dumps({"at": at, "answer": answer, **asdict(disclosure)}) + "\n"
            for disclosure in disclosures
        ).encode()
        try:
            with self._lock:
                written = os.write(self._file, lines)
                if written < len(lines):  # it must not list texts that are not sent
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                    raise _unwritten("the disk is full")
        except OSError as error:
            raise _unwritten(str(error.strerror)) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            os.close(self._file)


def _unwritten(why: str) -> Unavailable:
    return Unavailable(
        f"cannot write the audit log: {why}",
        field="privacy.audit_file",
        remedy="make room; nothing is sent without a record",
    )


@dataclass
class Accounts:
    """The ledgers of one answer.

    Attributes:
        answer: its id in the audit log.
        remote, local: names of the models.
        away: the remote runs on another machine.
        max_bytes: cap on disclosed bytes; 0: none.
        price: price of the remote's tokens; None: unknown.
        alpha: price of a reply's token, in prompt tokens.
        meter: meter of this machine's energy; None: not measured.
    """

    answer: str
    remote: str
    local: str
    away: bool
    max_bytes: int
    audit: AuditLog | None
    price: Price | None
    alpha: float
    meter: EnergyMeter | None
    cost: CostLedger = field(default_factory=CostLedger)

    def __post_init__(self) -> None:
        self.privacy = PrivacyLedger(self.max_bytes or sys.maxsize)
        self._bytes_up = self._bytes_down = 0
        self._choice_bits: Counter[int] = Counter()

    @property
    def bytes_up(self) -> int:
        """Bytes of texts sent to another machine, repeated ones included."""
        return self._bytes_up if self.away else 0

    @property
    def bytes_down(self) -> int:
        """Bytes of replies from another machine."""
        return self._bytes_down if self.away else 0

    def record_request(self, ask: AskRemote) -> tuple[Disclosure, ...]:
        """Enter all parts of a request before it is sent.

        Raises:
            DisclosureLimit: the request exceeds the cap.
            Unavailable: the audit log cannot be written.
        """
        texts = [(part.kind.value, part.text) for message in ask.messages for part in message.parts]
        entered = self.privacy.enter(ask.round, self.remote, texts, self._record, ask.choice_bits)
        self._choice_bits[ask.round] += ask.choice_bits
        return entered

    def record_reply(
        self, round: int, disclosures: Sequence[Disclosure], result: Reply | CollabError
    ) -> None:
        """Enter the remote's reply to a request with these disclosures."""
        self.cost.record(Call.of(round, self.remote, result, remote=True))
        sent = sum(disclosure.bytes for disclosure in disclosures if disclosure.kind != CHOICE)
        self._bytes_up += result.attempts * sent
        if isinstance(result, Reply):
            self._bytes_down += len(result.text.encode("utf-8", "replace"))
        if result.attempts > 1 or (self.away and not result.attempts):
            for disclosure in disclosures:
                self.privacy.set_times(disclosure, result.attempts)
            self._record(self.privacy.disclosures[-len(disclosures) :])

    def _record(self, disclosures: Iterable[Disclosure]) -> None:
        if self.audit is not None:
            self.audit.add(self.answer, disclosures)

    def record_jobs(self, round: int, results: Iterable[Reply | CollabError]) -> None:
        """Enter the local model's replies."""
        for result in results:
            self.cost.record(Call.of(round, self.local, result, remote=False))

    def record_energy(self, round: int) -> None:
        """Enter the energy since the last call, if it is measured."""
        joules = self.meter.joules() if self.meter is not None else None
        if joules is not None:
            self.cost.record_energy(round, joules)

    def figures(self) -> dict[str, float]:
        """Return both ledgers as figures, in total and by round (``name.ROUND``)."""
        found: dict[str, float] = {}
        for role, remote in (("remote", True), ("local", False)):
            found |= _tokens(role, "", self.cost, remote, None)
            for round in self.cost.by_round(remote=remote):
                found |= _tokens(role, f".{round}", self.cost, remote, round)
        found["weighted_tokens"] = self.cost.weighted_tokens(self.alpha)
        if self.price is not None:
            found["cost_usd"] = self.price.usd(self.cost.usage(remote=True))
        for round, joules in self.cost.energy_j.items():
            found["energy_j"] = found.get("energy_j", 0.0) + joules
            found[f"energy_j.{round}"] = joules
        found |= {f"replies_{name}": float(n) for name, n in asdict(self.cost.mishaps).items()}
        found["sent_bytes"] = float(self.privacy.bytes)
        found["choice_bits"] = float(self._choice_bits.total())
        found |= {f"choice_bits.{n}": float(bits) for n, bits in self._choice_bits.items() if bits}
        for round, kinds in self.privacy.by_round().items():
            for kind, count in kinds.items():
                if kind == CHOICE:  # counted above, in bits
                    continue
                found[f"sent_{kind}"] = found.get(f"sent_{kind}", 0.0) + count
                found[f"sent_{kind}.{round}"] = float(count)
        return found


def _tokens(
    role: str, suffix: str, ledger: CostLedger, remote: bool, round: int | None
) -> dict[str, float]:
    usage = ledger.usage(remote=remote, round=round)
    return {
        f"{role}_{name}_tokens{suffix}": float(getattr(usage, name))
        for name in ("prefill", "cached", "decode")
    }
