"""Limits of the machine, measured in the same loop as kernels: memory bandwidth and register arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from lowbit.backends import native
from lowbit.bench.timing import CACHES, Case, rotating
from lowbit.ops import Cost
from lowbit.ops.linear import Linear
from lowbit.ops.matmul import ScaledMM, sides
from lowbit.ops.spec import dtype_name
from lowbit.scaling import scheme

#: Arithmetic of ``lowbit_native::spin``, in its order.
_ARITHMETIC = ("fp32", "bf16", "int8")


def limits(cost: Cost, call: Any) -> tuple[Case, ...]:
    """A copy of as many bytes; for matmuls, a read of the bytes and the operations in registers."""
    if not isinstance(call, (ScaledMM, Linear)):
        return (copy_of(cost.bytes),)
    if native.loading_error() is not None:
        return (read_of(cost.bytes),)
    return read_of(cost.bytes), peak_of(arithmetic(call), cost.flops)


def arithmetic(call: ScaledMM | Linear) -> str:
    """The arithmetic of the fastest kernel with the declared numerics on this processor."""
    if integers(call):
        return "int8"
    first = call.x if isinstance(call, Linear) else call.a
    wide = first.dtype in (torch.float32, torch.float16) and not (isinstance(call, Linear) and call.input_scheme)
    return "fp32" if wide or not torch.ops.lowbit_native.spin(1, 1) else "bf16"


def integers(call: ScaledMM | Linear) -> bool:
    pair = (call.input_scheme, call.scheme) if isinstance(call, Linear) else [side.scheme for side in sides(call)]
    return all(text is not None and scheme(text).format.kind == "integer" for text in pair)


def peak_of(kind: str, operations: int) -> Case:
    """As many multiply-adds in registers, on all threads."""
    number = _ARITHMETIC.index(kind)
    return Case(f"{kind} peak", lambda: torch.ops.lowbit_native.spin(number, operations))


def read_of(bytes_read: int) -> Case:
    """A read of as many bytes from memory, not from a cache."""
    parts = max(1, -(-CACHES // max(bytes_read, 1)))
    held = torch.ones(max(1, parts * bytes_read // 8), dtype=torch.int64).tensor_split(parts)
    if native.loading_error() is not None:
        return rotating([Case("read", lambda part=part: part.sum()) for part in held])  # type: ignore[misc]
    run = torch.ops.lowbit_native.read
    return rotating([Case("read", lambda part=part: run(part)) for part in held])  # type: ignore[misc]


def copy_of(bytes_moved: int) -> Case:
    """A preallocated copy that reads half of ``bytes_moved`` and writes the other half."""
    source = torch.ones(max(1, bytes_moved // 8), dtype=torch.float32)
    target = torch.zeros_like(source)
    return Case("copy", lambda: target.copy_(source))


def linear(m: int, n: int, k: int, dtype: torch.dtype) -> Case:
    """torch's matmul ``[m, k] @ [n, k].T`` in ``dtype`` (fp32, bf16, or int8 with int32 sums)."""
    if dtype == torch.int8:
        a8, b8 = (torch.randint(-127, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
        out8 = torch.empty(m, n, dtype=torch.int32)
        return Case("torch int8", lambda: torch._int_mm(a8, b8.t(), out=out8))
    a, b = (torch.randn(rows, k).to(dtype) for rows in (m, n))
    out = torch.empty(m, n, dtype=dtype)
    return Case(f"torch {dtype_name(dtype)}", lambda: torch.mm(a, b.t(), out=out))


def medium(case: Case) -> Case:
    """The case under ``torch.set_float32_matmul_precision("medium")``, which may round fp32 operands to bf16."""

    def run() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            case.run()
        finally:
            torch.set_float32_matmul_precision(before)

    return Case(f"{case.who}, medium", run)


def scaled_mm(m: int, n: int, k: int, a_dtype: torch.dtype, b_dtype: torch.dtype) -> Case:
    """``torch._scaled_mm`` with FP8 operands and one scale per tensor."""
    a, b = torch.randn(m, k).to(a_dtype), torch.randn(n, k).to(b_dtype)
    one = torch.ones(())
    return Case(
        "torch._scaled_mm", lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    )
