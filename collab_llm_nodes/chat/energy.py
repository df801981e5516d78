"""Energy of this machine's processors, where Linux tells it (powercap: Intel and AMD RAPL)."""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Measures from one call of :meth:`joules` to the next, all processes together.

    Args:
        folder: Linux' powercap classes; tests give their own.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        # Packages only: the zones within them, such as cores, are counted there already.
        self._zones = sorted(z for z in folder.glob("*-rapl:*") if z.name.count(":") == 1)
        self._before = self._read()

    def joules(self) -> float | None:
        """Return the energy since the last call, or since this meter was made [J].

        None where there is nothing to read, or no permission to: often root alone has it.
        """
        before, self._before = self._before, self._read()
        if before is None or self._before is None:
            return None
        spent = 0
        for (then, _), (now, span) in zip(before, self._before, strict=True):
            spent += now - then if now >= then else now - then + span  # the counter begins anew
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
