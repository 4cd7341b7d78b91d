"""The limits that kernels are held against, measured in the same loop: a copy of as many bytes, torch's products."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.timing import Case


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
    return Case(f"torch {_short(dtype)}", lambda: torch.mm(a, b.t(), out=out))


def scaled_mm(m: int, n: int, k: int, dtype: torch.dtype) -> Case:
    """``torch._scaled_mm`` on fp8 operands with one scale a tensor."""
    a, b = (torch.randn(rows, k).to(dtype) for rows in (m, n))
    one = torch.ones(())
    return Case(
        "torch._scaled_mm", lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    )


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
