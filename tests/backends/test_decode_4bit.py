"""The PTX that decodes codes of 4 bits, run here by its documentation, over every byte."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")
from support.ptx import run

from lowbit import reference
from lowbit.formats import FORMATS, find
from lowbit.kernels import decode_4bit, operands

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}

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
