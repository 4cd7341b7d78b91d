"""Rounding: the random bits of stochastic rounding as one value. No torch is needed here.

Source: docs/numerics.md section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

__all__ = ["Rounding"]


@dataclass(frozen=True)
class Rounding:
    """Stochastic rounding with the random bits that ``(seed, step, stream)`` and an element's place decide.

    Functions that take ``rounding="stochastic"`` take this instead, in place of their arguments of these names.
    ``seed``, ``offset`` and ``pitch`` are integers of 64 bits, ``step`` and ``stream`` of 32, each signed or unsigned;
    a stream given as text stands for the CRC-32 of its UTF-8 bytes. An element's place is
    ``offset + row * pitch + col``; for a slice, give the whole tensor's offset and pitch (its number of columns).
    Raises ValueError for integers of more bits. Source: docs/numerics.md section 7.
    """

    seed: int
    step: int = 0
    stream: int | str = 0
    offset: int = 0
    pitch: int | None = None

    def __post_init__(self) -> None:
        self.words()

    def words(self) -> tuple[int, int, int, int, int | None]:
        """Seed, step, stream, offset and pitch as the signed 64-bit integers that op schemas carry."""
        stream = crc32(self.stream.encode()) if isinstance(self.stream, str) else self.stream
        return (
            _word("seed", self.seed, 64), _word("step", self.step, 32), _word("stream", stream, 32),
            _word("offset", self.offset, 64), None if self.pitch is None else _word("pitch", self.pitch, 64),
        )  # fmt: skip


def _word(name: str, word: int, bits: int) -> int:
    """A word of 32 or 64 bits, signed or not, as a signed 64-bit integer."""
    if not -(1 << bits - 1) <= word < 1 << bits:
        raise ValueError(f"{name}: expected an integer of {bits} bits, got {word}; take it modulo 2**{bits}")
    return word - (1 << 64) if word >= 1 << 63 else word
