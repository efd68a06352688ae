"""Amounts of memory as users write and read them."""

from __future__ import annotations

import re
from numbers import Integral, Real

Amount = int | float | str | None  # of a memory budget; None: no limit
LAYERS = "layers"  # in the place of an amount: every layer is computed again

MEMORY_BUDGET = (
    "in bytes (2 or more), or with a unit ('2GB', '512MiB', '1.5 GiB'), or a fraction as a "
    "float (above 0.0, up to 1.0)"
)
_UNITS = {"b": 1} | {
    f"{letter}{kind}": size ** (power + 1)
    for power, letter in enumerate("kmgt")
    for kind, size in (("b", 1000), ("ib", 1024))
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE)


def memory_amount(value: object) -> int | float | None:
    """Parses a budget to bytes (int) or a fraction (float); None where it is invalid.

    `1` could mean all or one byte, so it is invalid.
    """
    if isinstance(value, str):
        match = _AMOUNT.fullmatch(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        number = None if match is None or unit is None else int(float(match[1]) * unit)
        return None if number is None or number < 2 else number
    number = whole_number(value)
    if number is not None:
        return number if number >= 2 else None
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    share = float(value)
    return share if 0.0 < share <= 1.0 else None


def mib(nbytes: float, decimals: int = 1) -> str:
    """A number of bytes as text: `1,234.5 MiB`."""
    return f"{nbytes / 2**20:,.{decimals}f} MiB"


def whole_number(value: object) -> int | None:
    """Reads a whole number, also numpy's, as int; None for anything else, including booleans."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


__all__ = ["LAYERS", "MEMORY_BUDGET", "Amount", "memory_amount", "mib", "whole_number"]
