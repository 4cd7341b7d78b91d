"""Instructions of PTX that kernels write themselves, run by their documentation (PTX ISA)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

WORD = (1 << 32) - 1


def prmt(a: int, b: int, selectors: int) -> int:
    """Four bytes of eight; the uppermost bit of a selector copies the byte's sign."""
    pool, word = [(value >> 8 * at) & 0xFF for value in (a, b) for at in range(4)], 0
    for at in range(4):
        selector = (selectors >> 4 * at) & 0xF
        byte = pool[selector & 7]
        word |= ((0xFF if byte & 0x80 else 0) if selector & 8 else byte) << 8 * at
    return word


def lop3(a: int, b: int, c: int, table: int) -> int:
    """The bit of the table that the three bits are the number of."""
    bits = (table >> ((a >> at & 1) << 2 | (b >> at & 1) << 1 | (c >> at & 1)) & 1 for at in range(32))
    return sum(bit << at for at, bit in enumerate(bits))


def fma(kind: torch.dtype, a: int, b: int, c: int) -> int:
    """Both halves, rounded once."""
    word = 0
    for at in (0, 16):
        x, y, z = (torch.tensor(v >> at & 0xFFFF).to(torch.int16).view(kind).double() for v in (a, b, c))
        word |= (int((x * y + z).to(kind).view(torch.int16)) & 0xFFFF) << at
    return word


def e2m1(pattern: int) -> int:
    """The FP4 code of an fp32 pattern: to nearest even, what is too large and NaN to the largest number."""
    value = np.array(pattern, np.uint32).view(np.float32)
    if np.isnan(value):
        return 7
    return int(np.clip(value, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)) & 15


def run(instructions: str, registers: dict[str, int]) -> dict[str, int]:
    """A block of instructions on registers, by name."""

    def value(word: str) -> int:
        return registers[word] if word in registers else int(word, 0)

    for line in filter(None, (part.strip() for part in instructions.strip("{} ").split(";"))):
        if line.startswith(".reg"):
            continue
        op, rest = line.split(" ", 1)
        to, *words = (word.strip() for word in rest.replace("{", "").replace("}", "").split(","))
        given = [value(word) for word in words]
        if op == "mov.b32" and len(given) == 4:
            op = "pack"
        registers[to] = {
            "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b, "xor.b32": lambda a, b: a ^ b,
            "shr.u32": lambda a, b: a >> b, "mov.b32": lambda a: a, "prmt.b32": prmt, "lop3.b32": lop3,
            "pack": lambda *bytes: sum(one << 8 * at for at, one in enumerate(bytes)),
            "cvt.rn.satfinite.e2m1x2.f32": lambda a, b: e2m1(a) << 4 | e2m1(b),
            "fma.rn.bf16x2": lambda *x: fma(torch.bfloat16, *x), "fma.rn.f16x2": lambda *x: fma(torch.float16, *x),
        }[op](*given) & WORD  # fmt: skip
    return registers
