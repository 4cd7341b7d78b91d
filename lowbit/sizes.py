"""Numbers of bytes, read from text and written for people."""

from __future__ import annotations

import re
from numbers import Integral
from typing import Any

__all__ = ["amount", "bytes_in", "is_bytes"]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def bytes_in(text: str) -> int:
    """The bytes that a size such as ``80MB`` or ``1.5GiB`` stands for. Raises ValueError for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text)
    unit = None if match is None else next((u for u in _UNITS if u.lower() == (match[2] or "B").lower()), None)
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no size; write for instance 80MB or 1.5GiB ({', '.join(_UNITS)})")
    return int(float(match[1]) * _UNITS[unit])


def is_bytes(value: Any) -> bool:
    """Whether ``value`` is a number of bytes: a whole one from 0, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def amount(size: int) -> str:
    """A number of bytes in the binary unit that suits it."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if abs(size) >= _UNITS[unit]), "B")
    return f"{size} B" if unit == "B" else f"{size / _UNITS[unit]:.2f} {unit}"
