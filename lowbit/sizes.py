"""Sizes in bytes: parsing and printing of sizes, budgets, and changes such as ``46% less`` or ``1.50 MiB more``."""

from __future__ import annotations

import math
import re
from numbers import Integral
from typing import Any, NamedTuple

__all__ = ["Budget", "amount", "amount_changed", "budget_in", "bytes_in", "is_bytes", "share_changed"]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

#: A smaller number of bytes is not a budget: its unit was forgotten.
_LEAST_BUDGET = 1000


def bytes_in(text: str) -> int:
    """Parses a size such as ``80MB`` or ``1.5GiB`` to bytes.

    Raises:
        ValueError: ``text`` is not a size, or has no unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip(), re.ASCII | re.IGNORECASE)
    unit = None if match is None else next((unit for unit in _UNITS if unit.lower() == match[2].lower()), None)
    size = math.inf if match is None or unit is None else float(match[1]) * _UNITS[unit]
    if not math.isfinite(size):
        why = ", since it has no unit" if match is not None and not match[2] else ""
        raise ValueError(f"{text!r} is no size{why}; write for instance 80MB or 1.5GiB ({', '.join(_UNITS)})")
    return int(size)


class Budget(NamedTuple):
    """A memory limit: ``size`` in bytes, or if that is None a ``share`` of a total that is known later."""

    size: int | None
    share: float = 1.0

    def of(self, total: int) -> int:
        """The limit in bytes; a share is taken of ``total`` bytes."""
        return self.size if self.size is not None else max(int(total * self.share), 1)


def budget_in(value: str | int, who: str, shares: bool = True) -> Budget:
    """Parses a budget. Call it before planning, which may take minutes.

    Args:
        value: Bytes, a size such as ``"6GiB"``, or a share such as ``"60%"``.
        who: The calling function, for errors.
        shares: Whether a share is supported.

    Raises:
        ValueError: ``value`` is none of these, or so small that its unit must be missing.
    """
    share = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value.strip(), re.ASCII) if isinstance(value, str) and shares else None
    if share is not None and 0 < float(share[1]) < math.inf:
        return Budget(None, float(share[1]) / 100)
    also = ", or a share such as '60%'" if shares else ""
    expected = f"{who}: budget is bytes, a size such as '6GiB'{also}"
    size: Any = value
    if isinstance(value, str) and share is None:
        try:
            size = bytes_in(value)
        except ValueError as error:
            raise ValueError(f"{expected}; {error}") from None
    if not is_bytes(size):
        raise ValueError(f"{expected}, got {value!r}")
    if size < _LEAST_BUDGET:
        raise ValueError(f"{expected}, got {value!r}, and nothing fits into {int(size)} B; give the unit that is meant")
    return Budget(int(size))


def is_bytes(value: Any) -> bool:
    """Whether ``value`` is an integer of at least 0, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def amount(size: int) -> str:
    """A number of bytes as text with a binary unit."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if abs(size) >= _UNITS[unit]), "B")
    return f"{size} B" if unit == "B" else f"{size / _UNITS[unit]:.2f} {unit}"


def amount_changed(change: int) -> str:
    """A change of bytes in words.

    Args:
        change: Bytes after minus bytes before.

    Returns:
        ``"1.50 MiB less"``, ``"1.50 MiB more"`` or ``"the same"``.
    """
    return "the same" if not change else f"{amount(abs(change))} {_direction(change)}"


def share_changed(change: float, digits: int = 0) -> str:
    """A relative change in words.

    Args:
        change: Relative change: -0.46 for 54 instead of 100.
        digits: Decimal places of the percentage.

    Returns:
        ``"46% less"``, ``"12% more"``, ``"the same"`` if it rounds to 0%, or ``"unknown"`` for NaN.
    """
    if math.isnan(change):
        return "unknown"
    share = f"{abs(change):.{digits}%}"
    return f"{share} {_direction(change)}" if float(share[:-1]) else "the same"


def _direction(change: float) -> str:
    return "less" if change < 0 else "more"
