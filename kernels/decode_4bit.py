"""Decodes 4-bit codes to 16-bit numbers in registers, two at a time, in PTX.

Triton has neither ``prmt`` nor ``lop3``. ``prmt`` selects four of eight bytes by four 3-bit selectors, which are the
low bits of packed codes. A table of 16 numbers is two halves of 8 per byte; the high bit of a code selects the half.
Integers need no table: a code in the mantissa of a power of two increases the power by its value.

Source: PTX ISA, prmt and fma; docs/numerics.md section 3.
"""

from collections.abc import Sequence

import triton
import triton.language as tl

__all__ = ["integers", "look_up", "multiply_add", "tables", "twice", "unpaired"]

#: By operand: the pattern of the power of two whose ulp is 1, its value, and the pattern of 1.
_MAGIC = {"bf16": (0x4300, 128, 0x3F80), "fp16": (0x6400, 1024, 0x3C00)}

#: Selectors that combine the low and high bytes of the numbers of two codes.
_PAIRS = ("0x5140", "0x7362")


def _block(lines: list[str], outputs: int) -> tuple[str, str]:
    """The asm and its constraints: one input register of four bytes, ``outputs`` output registers."""
    return "{" + " ".join(lines) + "}", ",".join(["=r"] * outputs + ["r"])


def integers(signed: bool, operand: str) -> tuple[str, str]:
    """Four bytes of two codes each to pairs of numbers, the low code in the low half: three instructions per byte.

    The sum of the power of two and the code is exact, and so is the difference.
    """
    power, whole, one = _MAGIC[operand]
    flip = 8 if signed else 0
    less = _pattern(-(whole + flip), operand)
    kind = "bf16x2" if operand == "bf16" else "f16x2"
    lines = [".reg .b32 upper, pair;", "shr.u32 upper, $4, 4;"]
    for byte in range(4):
        lines += [
            f"prmt.b32 pair, $4, upper, {hex(byte | byte << 4 | (4 + byte) << 8 | (4 + byte) << 12)};",
            f"lop3.b32 pair, pair, 0x000f000f, {hex((power | flip) * 0x10001)}, 0x6a;",  # (pair & mask) ^ power
            f"fma.rn.{kind} ${byte}, pair, {hex(one * 0x10001)}, {hex(less * 0x10001)};",
        ]
    return _block(_in_registers(lines), 4)


def _pattern(value: int, operand: str) -> int:
    """The pattern of a whole number of at most 11 bits below 2048, negative."""
    size = -value
    exponent = size.bit_length() - 1
    bits, bias = (7, 127) if operand == "bf16" else (10, 15)
    return 0x8000 | (exponent + bias) << bits | (size << bits >> exponent) & ((1 << bits) - 1)


def _in_registers(lines: list[str]) -> list[str]:
    """Move packed constants into registers, because ``fma`` does not support them as immediates."""
    found = dict.fromkeys(
        word.rstrip(";,") for line in lines if line.startswith("fma") for word in line.split() if word.startswith("0x")
    )
    names = {word: f"number{index}" for index, word in enumerate(found)}
    made = [f".reg .b32 {', '.join(names.values())};", *(f"mov.b32 {name}, {word};" for word, name in names.items())]
    for word, name in names.items():
        lines = [line.replace(word, name) if line.startswith("fma") else line for line in lines]
    return [*made, *lines]


def tables(patterns: Sequence[Sequence[int]]) -> tuple[str, str]:
    """Four bytes of two codes each to pairs of numbers of each table, the low code in the low half.

    ``patterns``: the 16-bit patterns of 16 codes. If the upper half of a table is the lower half negated, it is
    computed from it.
    """
    source = f"${4 * len(patterns)}"
    lines = [
        ".reg .b32 code<2>, upper<2>, low<2>, byte<2>;",
        f"and.b32 code0, {source}, 0x77777777;",
        f"and.b32 upper0, {source}, 0x88888888;",
        "xor.b32 upper1, upper0, 0x88888888;",
        "shr.u32 upper1, upper1, 3;",
        "or.b32 upper0, upper0, upper1;",  # 8 for a set high bit, else 1
        "shr.u32 code1, code0, 16;",
        "shr.u32 upper1, upper0, 16;",
        # Selector 8 replicates the sign of byte 0, which is set; selector 1 takes byte 1.
        "prmt.b32 upper0, 0x80, 0, upper0;",
        "prmt.b32 upper1, 0x80, 0, upper1;",
    ]
    for index, table in enumerate(patterns):
        for half in (0, 1):
            lines += _bytes_of(table, half)
            to = 4 * index + 2 * half
            lines += [f"prmt.b32 ${to + pair}, byte0, byte1, {_PAIRS[pair]};" for pair in (0, 1)]
    return _block(lines, 4 * len(patterns))


def _bytes_of(table: Sequence[int], half: int) -> list[str]:
    """Instructions for the low and the high byte of the numbers of four codes."""
    symmetric = all(table[8 + code] == table[code] ^ 0x8000 for code in range(8))
    lines = []
    for byte in (0, 1):
        a, b, c, d = (_word(table[at : at + 4], byte) for at in (0, 4, 8, 12))
        if symmetric:
            lines.append(f"prmt.b32 byte{byte}, {a}, {b}, code{half};")
        else:
            lines += [
                f"prmt.b32 low0, {a}, {b}, code{half};",
                f"prmt.b32 low1, {c}, {d}, code{half};",
                f"lop3.b32 byte{byte}, upper{half}, low1, low0, 0xca;",  # upper ? low1 : low0
            ]
    return [*lines, f"lop3.b32 byte1, upper{half}, 0x80808080, byte1, 0x6a;"] if symmetric else lines


def _word(patterns: Sequence[int], byte: int) -> str:
    """One byte of each of four entries as a 32-bit number."""
    return hex(sum(((pattern >> (8 * byte)) & 0xFF) << (8 * at) for at, pattern in enumerate(patterns)))


@triton.jit
def twice(value, OPERAND: tl.constexpr):
    """A pair that has one fp32 number twice. The number is exact in the operand."""
    if OPERAND == "fp16":
        pattern = value.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        pattern = value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return (pattern.to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def multiply_add(pairs, factors, addends, OPERAND: tl.constexpr):
    """``pairs * factors + addends``, rounded once."""
    if OPERAND == "fp16":
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [pairs, factors, addends], tl.int32, True, 1
        )
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [pairs, factors, addends], tl.int32, True, 1
        )


@triton.jit
def unpaired(pair, OPERAND: tl.constexpr):
    """Pairs of patterns [N, C] as numbers [N, 2 * C]."""
    both = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16))
    both = tl.reshape(both, [pair.shape[0], 2 * pair.shape[1]])
    if OPERAND == "fp16":
        return both.to(tl.float16, bitcast=True)
    else:
        return both.to(tl.bfloat16, bitcast=True)


@triton.jit
def look_up(packed, PTX: tl.constexpr, REGISTERS: tl.constexpr, TERMS: tl.constexpr):
    """Decode bytes [N, C] of two codes to pairs, one tensor per term. PTX: from ``integers`` or ``tables``."""
    if TERMS == 1:
        return tl.inline_asm_elementwise(PTX, REGISTERS, [packed], tl.int32, True, 4)
    else:
        return tl.inline_asm_elementwise(PTX, REGISTERS, [packed], (tl.int32, tl.int32, tl.int32), True, 4)
