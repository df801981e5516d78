"""The cost of a protocol's calls to chat models: tokens by round, money, energy, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from collab_llm_nodes.chat.base import Finish, Reply, Usage
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import CollabError, ConfigError, did_you_mean

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Price:
    """Prices of one model, in US dollars per million tokens."""

    model: str = setting("", "Name of the model, as its server knows it.")
    input_usd: float = setting(0.0, "A million prompt tokens.", low=0.0)
    cached_usd: float = setting(0.0, "A million prompt tokens that the server had cached.", low=0.0)
    output_usd: float = setting(0.0, "A million tokens of replies.", low=0.0)

    def __post_init__(self) -> None:
        check_ranges(self)

    def usd(self, usage: Usage) -> float:
        """Return the price of ``usage``."""
        return 1e-6 * (
            usage.prefill * self.input_usd
            + usage.cached * self.cached_usd
            + usage.decode * self.output_usd
        )


@dataclass(frozen=True)
class PriceTable:
    """Prices by model: ``config/prices.yaml``, or a file of the user's own."""

    prices: tuple[Price, ...] = ()

    def of(self, model: str) -> Price:
        """Return the price of ``model``.

        Raises:
            ConfigError: the table does not know it.
        """
        known = {price.model: price for price in self.prices}
        if model not in known:
            raise ConfigError(
                f"no price of {model!r}",
                field="prices",
                remedy=did_you_mean(model, known, "add it to the price table"),
            )
        return known[model]


@dataclass(frozen=True)
class Call:
    """One request to a model, and its outcome.

    Attributes:
        round: of the protocol, from 1.
        remote: the model runs elsewhere: its tokens cost money.
        usage: None where it is unknown: after an error, a deadline, or from some servers.
        outcome: a value of ``Finish``, or the code of an error.
        attempts: times that the request was sent.
        seconds: until the reply [s].
    """

    round: int
    model: str
    remote: bool
    usage: Usage | None
    outcome: str
    attempts: int = 1
    seconds: float = 0.0

    @classmethod
    def of(cls, round: int, model: str, result: Reply | CollabError, *, remote: bool) -> Call:
        """Return the record of one result of ``ChatModel.ask``."""
        if isinstance(result, CollabError):
            return cls(round, model, remote, None, result.code, result.attempts)
        finish = result.finish.value
        return cls(round, model, remote, result.usage, finish, result.attempts, result.seconds)


@dataclass(frozen=True)
class Mishaps:
    """Calls that did not end with a whole reply of known cost.

    Attributes:
        truncated: cut off at the length limit.
        refused: by the model or its server's filter.
        late: cut off at the deadline.
        failed: ended by an error.
        retried: attempts beyond the first.
        unmetered: replies without a token count; the cost does not include them.
    """

    truncated: int = 0
    refused: int = 0
    late: int = 0
    failed: int = 0
    retried: int = 0
    unmetered: int = 0


@dataclass
class CostLedger:
    """The calls of one answer, in order.

    Attributes:
        energy_j: energy that this machine used, by round, where it was measured [J].
    """

    calls: list[Call] = field(default_factory=list)
    energy_j: dict[int, float] = field(default_factory=dict)

    def record(self, call: Call) -> None:
        """Add one call."""
        self.calls.append(call)

    def record_energy(self, round: int, joules: float) -> None:
        """Add the energy that this machine used in a round, or in a part of it [J]."""
        self.energy_j[round] = self.energy_j.get(round, 0.0) + joules

    def usage(self, *, remote: bool, round: int | None = None) -> Usage:
        """Return the tokens of remote or of local calls, of one round or of all."""
        return _sum(
            call.usage
            for call in self.calls
            if call.remote == remote and round in (None, call.round)
        )

    def by_round(self, *, remote: bool) -> dict[int, Usage]:
        """Return the tokens of remote or of local calls by round."""
        rounds = dict.fromkeys(call.round for call in self.calls if call.remote == remote)
        return {round: self.usage(remote=remote, round=round) for round in rounds}

    def weighted_tokens(self, alpha: float) -> float:
        """Return the cost of the remote calls in prompt tokens: n_prefill + alpha * n_decode.

        Cached tokens count in full, since the model of paper 000 (section 3) has no cache.

        Args:
            alpha: cost of a token of a reply, 1 to 5 prompt tokens.

        Raises:
            ValueError: ``alpha`` is outside that range.
        """
        if not 1 <= alpha <= 5:
            raise ValueError(f"alpha {alpha} is not within 1 to 5")
        usage = self.usage(remote=True)
        return usage.prefill + usage.cached + alpha * usage.decode

    def usd(self, table: PriceTable) -> float:
        """Return the price of the remote calls; local ones are free.

        Raises:
            ConfigError: ``table`` lacks a model.
        """
        remote = [call for call in self.calls if call.remote and call.usage is not None]
        return sum(table.of(call.model).usd(call.usage) for call in remote if call.usage)

    @property
    def mishaps(self) -> Mishaps:
        """Counts of the calls that failed in some respect."""
        outcomes = Counter(call.outcome for call in self.calls)
        finishes = {finish.value for finish in Finish}
        ended = [call for call in self.calls if call.outcome in finishes]
        return Mishaps(
            truncated=outcomes[Finish.LENGTH.value],
            refused=outcomes[Finish.REFUSAL.value],
            late=outcomes[Finish.DEADLINE.value],
            failed=len(self.calls) - len(ended),
            retried=sum(max(0, call.attempts - 1) for call in self.calls),
            unmetered=sum(call.usage is None for call in ended),
        )


def _sum(usages: Iterable[Usage | None]) -> Usage:
    return sum((usage for usage in usages if usage is not None), Usage())


class EnergyMeter:
    """Meter of the energy of this machine's processors, all processes together (Intel, AMD RAPL).

    Args:
        folder: Linux' powercap classes.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        # Packages only: the zones within them, such as cores, are counted there already.
        self._zones = sorted(z for z in folder.glob("*-rapl:*") if z.name.count(":") == 1)
        self._before = self._read()

    def joules(self) -> float | None:
        """Return the energy since the last call, or since this meter was made [J].

        Returns None without a readable counter: often only root may read it.
        """
        before, self._before = self._before, self._read()
        if before is None or self._before is None:
            return None
        spent = 0
        for (then, _), (now, span) in zip(before, self._before, strict=True):
            spent += now - then if now >= then else now - then + span  # or the counter wrapped
        return 1e-6 * spent

    def _read(self) -> list[tuple[int, int]] | None:
        """Return counter and span of each zone [uJ]."""
        try:
            return [
                (_number(zone / "energy_uj"), _number(zone / "max_energy_range_uj"))
                for zone in self._zones
            ] or None
        except (OSError, ValueError):
            return None


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
