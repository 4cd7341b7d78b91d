"""The limits that kernels are held against, measured in the same loop: a copy of as many bytes, torch's products."""

from __future__ import annotations

from typing import Any

import torch

from lowbit.bench.timing import Case
from lowbit.ops import Cost
from lowbit.ops.matmul import ScaledMM, sides
from lowbit.ops.spec import dtype_name
from lowbit.scaling import scheme


def limit(cost: Cost, call: Any) -> Case:
    """torch's own product for a product, in int8 where both operands are integers, else bf16; or else a copy."""
    if not isinstance(call, ScaledMM):
        return copy_of(cost.bytes)
    return linear(call.a.shape[0], call.b.shape[0], call.cols, torch.int8 if integers(call) else torch.bfloat16)


def integers(call: ScaledMM) -> bool:
    return all(side.scheme is not None and scheme(side.scheme).format.kind == "integer" for side in sides(call))


def copy_of(bytes_moved: int) -> Case:
    """A preallocated copy that reads half of ``bytes_moved`` and writes the other half."""
    source = torch.ones(max(1, bytes_moved // 8), dtype=torch.float32)
    target = torch.zeros_like(source)
    return Case("copy", lambda: target.copy_(source))


def linear(m: int, n: int, k: int, dtype: torch.dtype) -> Case:
    """torch's own product ``[m, k] @ [n, k].T`` in ``dtype`` (fp32, bf16, or int8 with int32 sums)."""
    if dtype == torch.int8:
        a8, b8 = (torch.randint(-127, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
        out8 = torch.empty(m, n, dtype=torch.int32)
        return Case("torch int8", lambda: torch._int_mm(a8, b8.t(), out=out8))
    a, b = (torch.randn(rows, k).to(dtype) for rows in (m, n))
    out = torch.empty(m, n, dtype=dtype)
    return Case(f"torch {dtype_name(dtype)}", lambda: torch.mm(a, b.t(), out=out))


def scaled_mm(m: int, n: int, k: int, dtype: torch.dtype) -> Case:
    """``torch._scaled_mm`` on fp8 operands with one scale a tensor."""
    a, b = (torch.randn(rows, k).to(dtype) for rows in (m, n))
    one = torch.ones(())
    return Case(
        "torch._scaled_mm", lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    )
