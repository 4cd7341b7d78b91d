"""Reads registers, stack and matrix instructions from the machine code of kernels, without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from lowbit.kernels.aot import Compiled

__all__ = ["Usage", "matrix_instructions", "usage"]

#: A PTX matrix instruction with all its modifiers.
_INSTRUCTION = re.compile(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")
#: Operand types by their PTX names. ``f8f6f4`` and ``mxf4`` are kinds of tcgen05.
_TYPES = {
    "bf16": "bf16", "f16": "fp16", "s8": "int8", "u8": "int8", "i8": "int8", "e4m3": "fp8", "e5m2": "fp8",
    "f8f6f4": "fp8", "tf32": "tf32", "mxf8f6f4": "mxfp8", "mxf4": "mxfp4", "mxf4nvf4": "nvfp4", "e2m1": "fp4",
}  # fmt: skip
#: Machine-code instructions by PTX instruction and operand type.
_MACHINE = {
    "mma.sync": {"int8": "IMMA", "fp8": "QMMA", "fp4": "OMMA"},
    "wgmma": {"int8": "IGMMA", "fp8": "QGMMA"},
    "tcgen05": {"int8": "UTCIMMA", "fp8": "UTCQMMA", "mxfp8": "UTCQMMA", "mxfp4": "UTCOMMA", "nvfp4": "UTCOMMA"},
}
#: Machine-code instructions for floats of 16 bits and more.
_FLOATS = {"mma.sync": "HMMA", "wgmma": "HGMMA", "tcgen05": "UTCHMMA"}


class Usage(NamedTuple):
    """Registers per thread, and bytes of stack for spilled registers."""

    registers: int
    spilled: int


def matrix_instructions(ptx: str) -> list[str]:
    """The matrix instructions of a kernel with operand types, most frequent first: ``wgmma bf16 (HGMMA)``."""
    return [name for name, _ in Counter(map(_named, _INSTRUCTION.findall(ptx))).most_common()]


def _named(text: str) -> str:
    words = re.split(r"[.:]+", text)
    family = {"mma": "mma.sync"}.get(words[0], words[0])
    scaled = "block_scale" in words
    types = [_TYPES[word] for word in words if word in _TYPES]
    if family == "tcgen05" and "f16" in words:
        types = ["bf16"]  # tcgen05 has one kind for both 16-bit formats; these kernels multiply bf16
    operand = types[-1] if types else "?"
    machine = _MACHINE[family].get(operand, _FLOATS[family])
    return f"{family}{' block-scaled' if scaled else ''} {operand} ({machine})"


def usage(compiled: Compiled) -> Usage:
    """Read the usage with ``cuobjdump``, which comes with Triton. Raises RuntimeError if that fails."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump tells nothing of a kernel's registers: {said.stdout}{said.stderr}")
    registers, stack, local = map(int, found.groups())
    return Usage(registers, stack + local)
