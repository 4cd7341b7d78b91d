"""The PTX that decodes codes of 4 bits, run here by its documentation, over every byte."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")
from lowbit import reference
from lowbit.formats import FORMATS, find
from lowbit.kernels import decode_4bit, operands

WORD = (1 << 32) - 1
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


def run(instructions: str, registers: dict[str, int]) -> dict[str, int]:
    """A block of instructions on registers, by name."""

    def value(word: str) -> int:
        return registers[word] if word in registers else int(word, 0)

    for line in filter(None, (part.strip() for part in instructions.strip("{}").split(";"))):
        if line.startswith(".reg"):
            continue
        op, rest = line.split(" ", 1)
        to, *words = (word.strip() for word in rest.split(","))
        given = [value(word) for word in words]
        registers[to] = {
            "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b, "xor.b32": lambda a, b: a ^ b,
            "shr.u32": lambda a, b: a >> b, "mov.b32": lambda a: a, "prmt.b32": prmt, "lop3.b32": lop3,
            "fma.rn.bf16x2": lambda *x: fma(torch.bfloat16, *x), "fma.rn.f16x2": lambda *x: fma(torch.float16, *x),
        }[op](*given) & WORD  # fmt: skip
    return registers


#: Formats, and what they are multiplied in: fp16 where it holds their numbers, bf16 in terms where it does not.
CASES = [
    (name, operand)
    for name, format in FORMATS.items()
    for operand in FLOATS
    if format.bits == 4 and (operand == "bf16" or operands.is_exact(format, operand))
]


@pytest.mark.parametrize(("name", "operand"), CASES)
def test_every_byte_decodes_to_its_two_codes(name, operand):
    format = find(name)
    instructions, constraints = operands.instructions(format, operand)
    outputs = constraints.count("=r")
    terms = outputs // 4
    assert terms == (1 if operands.is_exact(format, operand) else 3)
    values = reference.decode(torch.arange(16, dtype=torch.uint8), format)
    for first in range(0, 256, 4):
        source = sum((first + at) << 8 * at for at in range(4))
        made = run(instructions, {f"${outputs}": source})
        for byte in range(4):
            pairs = [made[f"${4 * term + byte}"] for term in range(terms)]
            for shift, code in ((0, (first + byte) & 15), (16, (first + byte) >> 4)):
                parts = [torch.tensor(p >> shift & 0xFFFF).to(torch.int16).view(FLOATS[operand]).float() for p in pairs]
                assert sum(parts) == values[code], f"{name} {operand} byte {first + byte:#x}"


def test_what_is_written_is_what_is_read():
    """The operands that instructions name are those that the block has."""
    for instructions, constraints in (decode_4bit.integers(True, "bf16"), decode_4bit.tables([[0] * 16] * 3)):
        names = {int(n) for n in re.findall(r"\$(\d+)", instructions)}
        assert names == set(range(len(constraints.split(","))))
