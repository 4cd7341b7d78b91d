"""The CUDA backend: the kernels of csrc/cuda, which the native library contains if nvcc and a CUDA torch built it.

Availability is read from the library, never from a device: importing lowbit does not initialize a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit import formats, reference, scaling
from lowbit.backends import composed, native, native_ops, triton
from lowbit.backends.registry import Impl, Run
from lowbit.ops import matmul
from lowbit.ops.quantize import with_factors
from lowbit.ops.spec import Numerics

__all__ = ["IMPLS", "supports_mm", "unavailable"]

#: K of one bf16 tensor-core instruction; blocks along K must be multiples of it.
_STEP = 16


def _supports(call: Any) -> str | None:
    """Why the codec kernels do not support a call; csrc/cuda/codec/element.cuh has the same limit."""
    reason = triton.too_old(call[0].device)
    if reason is not None:
        return reason
    name = getattr(call, "format", None)
    format = scaling.scheme(call.scheme).format if hasattr(call, "scheme") else formats.find(name) if name else None
    if format is not None and format.kind == "codebook" and format.bits > 4:
        return f"its kernels support codebooks of at most 16 entries, and {format} has {1 << format.bits}"
    return None


def _refuses(side: matmul.Side, cols: int) -> str | None:
    """Why the tensor-core kernels do not support an operand."""
    if side.scheme is None:
        if side.data.dtype == torch.bfloat16:
            return None
        return f"its tensor cores multiply in bf16, but {side.name} is {side.data.dtype}; convert it"
    scheme = scaling.scheme(side.scheme)
    if scheme.affine:
        return f"its kernels do not support zero points, and {side.name} is {scheme}"
    if scheme.format.kind == "codebook":
        return f"{scheme.format} is not exact in bf16, in which its tensor cores multiply"
    block = scheme.block_of(side.data.shape[0], cols)[1]
    if block < cols and block % _STEP:
        return f"its blocks along K must be multiples of {_STEP}, and {scheme} has {block}"
    return None


def supports_mm(call: matmul.ScaledMM) -> str | None:
    """Why the tensor-core kernels do not support a call; csrc/cuda/matmul/scaled_mm.cu has the same limits."""
    left, right = matmul.sides(call)
    reason = triton.too_old(call.a.device) or _refuses(left, call.cols) or _refuses(right, call.cols)
    if reason is not None or call.a_scheme is None or call.b_scheme is None:
        return reason
    a, b = scaling.scheme(call.a_scheme), scaling.scheme(call.b_scheme)
    whole = all(s.block_of(d.shape[0], call.cols)[1] >= call.cols for s, d in ((a, call.a), (b, call.b)))
    if whole and a.format.kind == b.format.kind == "integer" and call.cols > matmul.INT32_DEPTH:
        return f"int32 holds at most {matmul.INT32_DEPTH} products of int8, got K = {call.cols}"
    if not whole and a.format.kind == b.format.kind == "integer":
        return _refuses_blocks(min(s.block_of(d.shape[0], call.cols)[1] for s, d in ((a, call.a), (b, call.b))))
    return None


def _refuses_blocks(block: int) -> str | None:
    """In blocks of at most one segment, fp32 sums of integers are exact and equal section 9 of docs/numerics.md."""
    if block <= reference.SEGMENT:
        return None
    return f"it adds integers block by block, which needs blocks of at most {reference.SEGMENT} along K, got {block}"


def _multiplied(run: Run) -> Run:
    """``quantize`` with factors, which the kernel does not take."""

    def run_quantize(outs: tuple[Tensor, ...], call: Any) -> None:
        run(outs, call._replace(x=with_factors(call), factors=None))

    return run_quantize


def _row(row: Impl) -> Impl:
    if row.op == "scaled_mm":
        return replace(row, supports=supports_mm, numerics=Numerics("bf16", "fp32"))
    return replace(row, supports=_supports, run=_multiplied(row.run) if row.op == "quantize" else row.run)


_ROWS = tuple(map(_row, native_ops.rows("cuda")))
IMPLS = composed.every(_ROWS)


def unavailable() -> str | None:
    """Why this backend is absent, and the remedy; None if it is present."""
    if torch.version.cuda is None:
        return "this torch has no CUDA; install a CUDA build of torch, then reinstall lowbit with nvcc on the PATH"
    error = native.loading_error()
    if error is not None:
        return error
    if not native_ops.has_kernel("quantize", "cuda"):
        return "lowbit was built without its CUDA kernels; put nvcc on the PATH, then reinstall lowbit (LOWBIT_CUDA=ON)"
    return None
