"""``Rounding``: the random bits of stochastic rounding as a value. Works without torch.

Source: docs/numerics.md section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Rounding"]


@dataclass(frozen=True)
class Rounding:
    """Stochastic rounding whose random bits depend only on ``(seed, step, stream)`` and the element's position.

    An element's position is ``offset + row * pitch + col``. To round a slice like a part of its tensor, pass the
    slice's offset and the tensor's pitch. Integers may be signed or unsigned.

    Attributes:
        seed: 64-bit integer; or an int64 tensor ``[2]`` of seed and step on the input's device, which compiled code
            reads in each call; or None, which draws a seed from torch's generator of that device in each call.
        step: 32-bit integer; not with a tensor as seed.
        stream: 32-bit integer, or a string, which stands for the CRC-32 of its UTF-8 bytes.
        offset: 64-bit integer, the position of the first element.
        pitch: 64-bit integer, positions per row; by default the number of columns.

    Raises:
        TypeError: A number is not an integer.
        ValueError: An integer has too many bits, or a step is passed with a tensor as seed.

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
            raise ValueError(f"Rounding: a tensor of seed and step contains the step; leave step={self.step} out")
        _word("step", self.step, 32)
        self.place()

    def seed_and_step(self) -> list[int]:
        """An integer seed and the step as the signed 64-bit integers that ops take."""
        return [_word("seed", self.seed, 64), _word("step", self.step, 32)]

    def place(self) -> tuple[int, int, int | None]:
        """Stream, offset and pitch as the signed 64-bit integers that ops take."""
        stream = _crc32(self.stream) if isinstance(self.stream, str) else self.stream
        pitch = None if self.pitch is None else _word("pitch", self.pitch, 64)
        return _word("stream", stream, 32), _word("offset", self.offset, 64), pitch


def _word(name: str, word: int, bits: int) -> int:
    """A signed or unsigned word of ``bits`` bits as a signed 64-bit integer."""
    if not isinstance(word, int) and not hasattr(word, "__index__"):  # SymInt is no int
        raise TypeError(f"{name}: expected an integer, got {type(word).__name__}")
    if not -(1 << bits - 1) <= word < 1 << bits:
        raise ValueError(f"{name}: expected an integer of {bits} bits, got {word}; take it modulo 2**{bits}")
    return word - (1 << 64) if word >= 1 << 63 else word


def _crc32(text: str) -> int:
    """The CRC-32 of the text's UTF-8 bytes, in operations that torch.compile can trace, unlike zlib's."""
    crc = 0xFFFFFFFF
    for byte in text.encode():
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 & -(crc & 1))
    return crc ^ 0xFFFFFFFF
