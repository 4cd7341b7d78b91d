"""CUDA matmuls that torch computes: lowbit's kernels decode the operands before, and apply scales and bias after.

Operands are exact: int8 integers with int32 sums, or codes that bf16 represents, with fp32 sums. Two kinds run only
under ``torch.set_float32_matmul_precision("medium")``: FP8 operands, whose sums keep 14 bits on Hopper's tensor cores,
and float32 operands and codebooks, which are rounded to bf16 (docs/numerics.md section 9).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit import scaling
from lowbit.backends import triton
from lowbit.backends.registry import Impl, matmul_precision
from lowbit.ops import matmul
from lowbit.ops.spec import Numerics
from lowbit.torch_private import int_mm, scaled_mm

__all__ = ["IMPLS", "unavailable"]

#: Rows of ``a`` are multiplied in parts: the most elements of fp32 or int32 sums per part, and the multiple of rows.
_SUMS, _ROW_MULTIPLE = 1 << 27, 128


def _finish(
    outs: tuple[Tensor, ...], call: matmul.ScaledMM, scales: list[Any],
    multiply: Callable[[slice], Tensor],
) -> None:  # fmt: skip
    """Fill the output in parts. ``multiply`` returns the sums of some rows. ``scales``: row scales of both operands."""
    (out,) = outs
    left, right = (None if s is None else s.expand(size) for s, size in zip(scales, out.shape, strict=True))
    step = _rows_at_a_time(out.shape[1])
    for begin in range(0, out.shape[0], step):
        rows = slice(begin, begin + step)
        part = None if left is None else left[rows]
        triton.start(triton.products().epilogue(multiply(rows), part, right, call.bias, out[rows]), out.device)


def _rows_at_a_time(cols: int) -> int:
    """A multiple of whole blocks of scales."""
    return max(1, _SUMS // max(1, cols) // _ROW_MULTIPLE) * _ROW_MULTIPLE


# -- integers ----------------------------------------------------------------------------------------------------------
def _int8(outs: tuple[Tensor, ...], call: matmul.ScaledMM) -> None:
    a, b = (side.data.contiguous().view(torch.int8) for side in matmul.sides(call))
    scales = [triton.operands().row_scales(side, call.cols) for side in matmul.sides(call)]
    _finish(outs, call, scales, lambda rows: _int_mm(a[rows], b))


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """torch supports more than 16 rows only."""
    if a.shape[0] > 16:
        return int_mm(a, b.t())
    return int_mm(torch.nn.functional.pad(a, (0, 0, 0, 17 - a.shape[0])), b.t())[: a.shape[0]]


def _supports_int8(call: matmul.ScaledMM) -> str | None:
    for side in matmul.sides(call):
        if side.scheme is None or scaling.scheme(side.scheme).format.name != "int8" or side.zero_point is not None:
            return f"it multiplies int8 without zero points, and {side.name} is {side.scheme or side.data.dtype}"
    if not matmul.is_whole(call):
        return "it applies scales to whole rows, and these change within a row"
    if call.cols > matmul.INT32_DEPTH:
        return f"int32 holds at most {matmul.INT32_DEPTH} products of int8, got K = {call.cols}"
    return _multiples(call, 8)


def _multiples(call: matmul.ScaledMM, of: int) -> str | None:
    outputs = call.b.shape[0]
    if call.cols % of or outputs % of:
        return f"torch needs K and N that are multiples of {of}, got {call.cols} and {outputs}"
    return None


# -- codes that are exact in bf16 --------------------------------------------------------------------------------------
def _bf16(outs: tuple[Tensor, ...], call: matmul.ScaledMM) -> None:
    left, right = (triton.operands().in_bf16(side, call.cols) for side in matmul.sides(call))
    triton.start([*left.launches, *right.launches], outs[0].device)
    a, b = left.values, right.values.t()
    _finish(outs, call, [left.rows, right.rows], lambda rows: torch.mm(a[rows], b, out_dtype=torch.float32))


def _supports_bf16(call: matmul.ScaledMM) -> str | None:
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "it needs a CUDA device"
    a, b = matmul.sides(call)
    if triton.products().are_integers(call):
        return "products of integers are exact, which sums in fp32 are not"
    for side in (a, b):
        if not triton.operands().fits_bf16(side, call.cols):
            return f"{side.name} is not exact in bf16: {side.scheme or side.data.dtype}"
    return None


# -- floats and codebooks, rounded to bf16 -----------------------------------------------------------------------------
def _supports_rounded(call: matmul.ScaledMM) -> str | None:
    if matmul_precision() != "medium":
        return 'it rounds operands to bf16; torch.set_float32_matmul_precision("medium") allows that'
    if triton.products().are_integers(call):
        return "products of integers are exact, which sums in fp32 are not"
    if _supports_bf16(call) is None:
        return "both operands are exact in bf16"
    for side in matmul.sides(call):
        if not triton.operands().fits_bf16(side, call.cols) and not _is_rounded(side):
            return f"it rounds float32 and codebooks, and {side.name} is {side.scheme or side.data.dtype}"
    return None


def _is_rounded(side: matmul.Side) -> bool:
    if side.scheme is None:
        return side.data.dtype == torch.float32
    return scaling.scheme(side.scheme).format.kind == "codebook"


# -- FP8 ---------------------------------------------------------------------------------------------------------------
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def _fp8(outs: tuple[Tensor, ...], call: matmul.ScaledMM) -> None:
    sides = matmul.sides(call)
    a, b = (side.data.contiguous().view(_FP8[scaling.scheme(str(side.scheme)).format.name]) for side in sides)
    scales = [triton.operands().row_scales(side, call.cols) for side in sides]
    unit = _unit_scale(outs[0].device)
    _finish(
        outs, call, scales,
        lambda rows: scaled_mm(a[rows], b.t(), unit, unit, out_dtype=torch.float32),
    )  # fmt: skip


@cache
def _unit_scale(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _supports_wide_fp8(call: matmul.ScaledMM) -> str | None:
    if not triton.keeps_fp32(call.b.device):
        return "sums of FP8 keep 14 bits on this device"
    return _supports_any_fp8(call)


def _supports_fp8(call: matmul.ScaledMM) -> str | None:
    return _unless_medium() or _supports_any_fp8(call)


def _unless_medium() -> str | None:
    if matmul_precision() == "medium":
        return None
    return 'its sums keep 14 bits; torch.set_float32_matmul_precision("medium") allows that'


def _other_than_fp8(call: matmul.ScaledMM) -> str | None:
    names = [scaling.scheme(side.scheme).format.name for side in matmul.sides(call) if side.scheme is not None]
    if len(names) < 2 or not set(names) <= set(_FP8) or names == ["fp8_e5m2", "fp8_e5m2"]:
        return f"torch multiplies FP8 by FP8, one of them E4M3, got {names}"
    return None


def _supports_any_fp8(call: matmul.ScaledMM) -> str | None:
    reason = _other_than_fp8(call)
    if reason is not None:
        return reason
    if not matmul.is_whole(call):
        return "it applies scales to whole rows, and these change within a row"
    if triton.capability(call.b.device) < (8, 9):
        return "FP8 needs a device of compute capability 8.9 or later"
    return _multiples(call, 16)


def _unless_old(supports: Callable[[matmul.ScaledMM], str | None]) -> Callable[[matmul.ScaledMM], str | None]:
    return lambda call: triton.too_old(call.b.device) or supports(call)


#: Scale blocks that torch supports, and its names for them.
_BLOCKS: dict[tuple[int | None, int | None], Any] = {
    (1, 128): F.ScalingType.BlockWise1x128, (128, 128): F.ScalingType.BlockWise128x128,
}  # fmt: skip


def _fp8_blocks(outs: tuple[Tensor, ...], call: matmul.ScaledMM) -> None:
    left, right = matmul.sides(call)
    blocks = [scaling.scheme(str(side.scheme)).block for side in (left, right)]
    (a_recipe, b_recipe), tall = (_BLOCKS[block] for block in blocks), blocks[0][0] or 1
    a, b = (side.data.contiguous().view(_FP8[scaling.scheme(str(side.scheme)).format.name]) for side in (left, right))
    assert left.scale is not None and right.scale is not None
    a_scale, b_scale = left.scale, _laid_out(right.scale, b_recipe)

    def multiply(rows: slice) -> Tensor:
        part, scale = a[rows], a_scale[rows.start // tall : -(-rows.stop // tall)]
        count, short = part.shape[0], -part.shape[0] % 4
        if short:  # torch needs scales whose rows are multiples of 16 bytes
            part = F.pad(part.view(torch.uint8), (0, 0, 0, short)).view(part.dtype)
            scale = F.pad(scale, (0, 0, 0, short)) if tall == 1 else scale
        y = F.scaled_mm(
            part, b.t(), _laid_out(scale, a_recipe), a_recipe, b_scale, b_recipe, output_dtype=torch.float32
        )  # fmt: skip
        return y[:count]

    _finish(outs, call, [None, None], multiply)


def _laid_out(scale: Tensor, recipe: Any) -> Tensor:
    """Scales in torch's layout: column-major for blocks of one row; rows padded to multiples of 4 for 128 rows."""
    if recipe == F.ScalingType.BlockWise1x128:
        return scale.t().contiguous().t()
    return F.pad(scale, (0, -scale.shape[1] % 4)).t()


def _supports_fp8_blocks(call: matmul.ScaledMM) -> str | None:
    if triton.capability(call.b.device) != (9, 0):
        return "torch multiplies FP8 in blocks on devices of compute capability 9.0"
    reason = _unless_medium() or _other_than_fp8(call)
    if reason is not None:
        return reason
    schemes = [scaling.scheme(str(side.scheme)) for side in matmul.sides(call)]
    blocks = [scheme.block for scheme in schemes]
    if not set(blocks) <= set(_BLOCKS) or blocks == [(128, 128)] * 2:
        return f"torch needs scales of 1 x 128 elements and 1 x 128 or 128 x 128, got {schemes[0]} and {schemes[1]}"
    if any(scheme.scale_format.dtype != "float32" for scheme in schemes):
        return f"torch needs scales in float32, got {schemes[0]} and {schemes[1]}"
    if call.cols % 128:
        return f"torch needs whole blocks, got K = {call.cols}"
    partial = [
        size for size, block in zip((call.a.shape[0], call.b.shape[0]), blocks, strict=True) if size % (block[0] or 1)
    ]
    if partial:
        return f"torch needs whole blocks of 128 x 128 elements, got {partial[0]} rows or columns"
    return _multiples(call, 16)


#: The last column is the fewest rows of ``a`` for which each was faster than Triton's kernel on an H200. For rounded
#: operands and FP8 blocks it is estimated: the rows from which Triton's kernel is bound by tensor cores.
_PRODUCTS = tuple(
    Impl("scaled_mm", name, ("cuda",), run, _unless_old(supports), numerics, fewest_rows)
    for name, run, supports, numerics, fewest_rows in (
        ("delegated_fp8_wide", _fp8, _supports_wide_fp8, Numerics("fp8", "fp32"), 1024),
        ("delegated_fp8", _fp8, _supports_fp8, Numerics("fp8", "fp22"), 1),
        ("delegated_fp8_blocks", _fp8_blocks, _supports_fp8_blocks, Numerics("fp8", "fp22"), 128),
        ("delegated_int8", _int8, _supports_int8, Numerics("fp32", "fp32"), 4096),
        ("delegated_bf16", _bf16, _supports_bf16, Numerics("fp32", "fp32"), 1024),
        ("delegated_rounded", _bf16, _supports_rounded, Numerics("bf16", "fp32", codebooks=True), 512),
    )
)


IMPLS = triton.with_codecs(_PRODUCTS)


def unavailable() -> str | None:
    """Why this backend is absent, and the remedy; None if it is present."""
    if torch.version.cuda is None:
        return "this torch has no CUDA; install a CUDA build of torch"
    return triton.unavailable()
