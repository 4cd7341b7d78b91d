"""Numbers of bytes, read from text and written for people, and changes in words: ``46% less``, ``1.50 MiB more``."""

from __future__ import annotations

import math
import re
from numbers import Integral
from typing import Any, NamedTuple

__all__ = ["Budget", "amount", "amount_changed", "budget_in", "bytes_in", "is_bytes", "share_changed"]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

#: A number of bytes below this is no budget but a number whose unit was forgotten: no model trains or generates in it.
_LEAST_BUDGET = 1000


def bytes_in(text: str) -> int:
    """The bytes that a size such as ``80MB`` or ``1.5GiB`` stands for.

    Raises:
        ValueError: For another text, and for a number without a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip(), re.ASCII | re.IGNORECASE)
    unit = None if match is None else next((unit for unit in _UNITS if unit.lower() == match[2].lower()), None)
    size = math.inf if match is None or unit is None else float(match[1]) * _UNITS[unit]
    if not math.isfinite(size):
        why = ", since it has no unit" if match is not None and not match[2] else ""
        raise ValueError(f"{text!r} is no size{why}; write for instance 80MB or 1.5GiB ({', '.join(_UNITS)})")
    return int(size)


class Budget(NamedTuple):
    """A limit of memory: ``size`` in bytes, or where that is None a ``share`` of a whole that is not known yet."""

    size: int | None
    share: float = 1.0

    def of(self, whole: int) -> int:
        """The limit in bytes, if it is a share one of ``whole`` bytes."""
        return self.size if self.size is not None else max(int(whole * self.share), 1)


def budget_in(value: str | int, who: str, shares: bool = True) -> Budget:
    """The budget that a caller gave. Callers read it before they plan anything, which may take minutes.

    Args:
        value: Bytes, a size such as ``"6GiB"``, or a share such as ``"60%"``.
        who: The function that was called, for errors.
        shares: Whether a share serves.

    Raises:
        ValueError: For anything else, and for a number so small that its unit must be missing.
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
    """Whether ``value`` is a number of bytes: a whole one from 0, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def amount(size: int) -> str:
    """A number of bytes in the binary unit that suits it."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if abs(size) >= _UNITS[unit]), "B")
    return f"{size} B" if unit == "B" else f"{size / _UNITS[unit]:.2f} {unit}"


def amount_changed(change: int) -> str:
    """A change of bytes in words.

    Args:
        change: The bytes after, less those before.

    Returns:
        ``"1.50 MiB less"``, ``"1.50 MiB more"`` or ``"the same"``.
    """
    return "the same" if not change else f"{amount(abs(change))} {_direction(change)}"


def share_changed(change: float, digits: int = 0) -> str:
    """A relative change in words.

    Args:
        change: The change as a fraction of what it is relative to: -0.46 for 54 in place of 100.
        digits: Digits after the point of the percentage.

    Returns:
        ``"46% less"``, ``"12% more"``, or ``"the same"`` for what rounds to 0%. Of NaN ``"unknown"``.
    """
    if math.isnan(change):
        return "unknown"
    share = f"{abs(change):.{digits}%}"
    return f"{share} {_direction(change)}" if float(share[:-1]) else "the same"


def _direction(change: float) -> str:
    return "less" if change < 0 else "more"
