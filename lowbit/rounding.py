"""Rounding: the random bits of stochastic rounding as one value. No torch is needed here.

Source: docs/numerics.md section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Rounding"]


@dataclass(frozen=True)
class Rounding:
    """Stochastic rounding with the random bits that ``(seed, step, stream)`` and an element's place decide.

    ``seed``: an integer; or an int64 tensor ``[2]`` of seed and step, on the device of what is rounded, which compiled
    code reads in each call; or None: each call draws one from torch's generator of that device.
    ``stream``: an integer, or text, which stands for the CRC-32 of its UTF-8 bytes.
    ``seed``, ``offset`` and ``pitch`` are integers of 64 bits, ``step`` and ``stream`` of 32, each signed or unsigned.
    An element's place is ``offset + row * pitch + col``; for a slice, give the whole tensor's offset and pitch (its
    number of columns).
    Raises ValueError for integers of more bits, and for a step beside a tensor; TypeError for what is no integer.
    Source: docs/numerics.md section 7.
    """

    seed: Any = None
    step: int = 0
    stream: int | str = 0
    offset: int = 0
    pitch: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.seed, int):
            _word("seed", self.seed, 64)
        elif self.seed is not None and self.step:
            raise ValueError(f"Rounding: a tensor of seed and step holds the step; leave step={self.step} out")
        _word("step", self.step, 32)
        self.place()

    def seed_and_step(self) -> list[int]:
        """Both as the signed 64-bit integers that ops take, of an integer seed."""
        return [_word("seed", self.seed, 64), _word("step", self.step, 32)]

    def place(self) -> tuple[int, int, int | None]:
        """Stream, offset and pitch as the signed 64-bit integers that op schemas carry."""
        stream = _crc32(self.stream) if isinstance(self.stream, str) else self.stream
        pitch = None if self.pitch is None else _word("pitch", self.pitch, 64)
        return _word("stream", stream, 32), _word("offset", self.offset, 64), pitch


def _word(name: str, word: int, bits: int) -> int:
    """A word of 32 or 64 bits, signed or not, as a signed 64-bit integer."""
    if not isinstance(word, int) and not hasattr(word, "__index__"):  # SymInt is no int
        raise TypeError(f"{name}: expected an integer, got {type(word).__name__}")
    if not -(1 << bits - 1) <= word < 1 << bits:
        raise ValueError(f"{name}: expected an integer of {bits} bits, got {word}; take it modulo 2**{bits}")
    return word - (1 << 64) if word >= 1 << 63 else word


def _crc32(text: str) -> int:
    """The CRC-32 of the text's UTF-8 bytes, in operations that torch.compile follows: it knows none of zlib's."""
    crc = 0xFFFFFFFF
    for byte in text.encode():
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 & -(crc & 1))
    return crc ^ 0xFFFFFFFF
