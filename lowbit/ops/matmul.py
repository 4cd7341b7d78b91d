"""scaled_mm: ``a [M, K] @ b [N, K].T`` for every pair of schemes and float matrices.

Source: docs/numerics.md section 9. ``tolerance`` derives the error bound of float matmuls.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit import reference, scaling
from lowbit.ops.spec import FLOATS, Cost, Numerics, OpSpec, require_codes, require_float, require_scales


class ScaledMM(NamedTuple):
    """``a``: stored codes ``[M, packed K]`` with scales, or a float matrix ``[M, K]`` without; ``b`` likewise."""

    a: Tensor
    b: Tensor
    cols: int
    a_scheme: str | None = None
    b_scheme: str | None = None
    a_scale: Tensor | None = None
    a_zero_point: Tensor | None = None
    a_global_scale: Tensor | None = None
    b_scale: Tensor | None = None
    b_zero_point: Tensor | None = None
    b_global_scale: Tensor | None = None
    bias: Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16


class Side(NamedTuple):
    """The arguments of one operand."""

    name: str
    data: Tensor
    scheme: str | None
    scale: Tensor | None
    zero_point: Tensor | None
    global_scale: Tensor | None


def sides(call: ScaledMM) -> tuple[Side, Side]:
    return (
        Side("a", call.a, call.a_scheme, call.a_scale, call.a_zero_point, call.a_global_scale),
        Side("b", call.b, call.b_scheme, call.b_scale, call.b_zero_point, call.b_global_scale),
    )


def operand(side: Side, cols: int) -> reference.Operand:
    """The operand for the reference: codes unpacked, scheme resolved."""
    if side.scheme is None:
        return reference.Operand(side.data)
    scheme = scaling.scheme(side.scheme)
    codes = reference.unpack(side.data, scheme, cols)
    return reference.Operand(codes, scheme, side.scale, side.zero_point, side.global_scale)


def _check(call: ScaledMM) -> None:
    for side in sides(call):
        if side.data.dim() != 2:
            raise ValueError(f"lowbit.scaled_mm: {side.name} must be a matrix, got {list(side.data.shape)}")
        expected = call.cols if side.scheme is None else _check_codes(side, side.scheme, call.cols)
        if side.scheme is None:
            require_float("scaled_mm", side.name, side.data)
            if side.scale is not None or side.zero_point is not None or side.global_scale is not None:
                raise ValueError(
                    f"lowbit.scaled_mm: {side.name} is a float matrix and takes no scales; give {side.name}_scheme"
                )
        if side.data.shape[1] != expected:
            raise ValueError(
                f"lowbit.scaled_mm: with K = {call.cols}, {side.name} must have {expected} columns, "
                f"got {side.data.shape[1]}; b is [N, K], as the weight of torch.nn.Linear"
            )
    if call.out_dtype not in FLOATS:
        raise ValueError(f"lowbit.scaled_mm: out_dtype must be a 16- or 32-bit float, got {call.out_dtype}")
    if call.bias is not None:
        require_float("scaled_mm", "bias", call.bias)
        if tuple(call.bias.shape) != (call.b.shape[0],):
            raise ValueError(f"lowbit.scaled_mm: bias must be [{call.b.shape[0]}], got {list(call.bias.shape)}")


def _check_codes(side: Side, name: str, cols: int) -> int:
    """Check an operand of codes; return the bytes its rows should have."""
    scheme = scaling.scheme(name)
    require_codes("scaled_mm", side.name, side.data)
    if side.scale is None:
        raise ValueError(f"lowbit.scaled_mm: {side.name} holds codes of {scheme} and needs its scales")
    require_scales("scaled_mm", scheme, side.data.shape[0], cols, side.scale, side.zero_point, side.global_scale)
    return scheme.packed_cols(cols)


def _cost(call: ScaledMM) -> Cost:
    m, n = call.a.shape[0], call.b.shape[0]
    moved = sum(t.numel() * t.element_size() for t in call if isinstance(t, Tensor))
    return Cost(2 * m * n * call.cols, moved + m * n * call.out_dtype.itemsize)


def is_whole(call: ScaledMM) -> bool:
    """Whether every row of both operands has one scale, which the epilogue can apply."""
    schemes = [(None if side.scheme is None else scaling.scheme(side.scheme), len(side.data)) for side in sides(call)]
    return all(s is None or (s.scale_shape(rows, call.cols)[1] == 1 and not s.minimum) for s, rows in schemes)


#: The largest K whose int8 products fit an int32 accumulator, for any codes.
INT32_DEPTH = (2**31 - 1) // (128 * 128)

#: Unit roundoff of the types that kernels compute in.
_UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 0.0, "int": 0.0}
#: Short accumulators: their unit roundoff, and the number of terms after which they are added to an fp32 sum.
_SHORT = {"fp22": (2.0**-13, 128)}
_TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


def is_exact(call: ScaledMM) -> bool:
    """Whether it is an integer matmul, in one block or in segments: all kernels are then bit-identical."""
    return reference.integer_segments(*(operand(side, call.cols) for side in sides(call))) is not None


def tolerance(call: ScaledMM, numerics: Numerics) -> Tensor:
    """Elementwise bound on |y - exact|, fp64 ``[M, N]``.

    Let A and B be the decoded operands and u the accumulator's unit roundoff. A sum of K rounded products in any order
    has an error of at most gamma_K |A||B|^T, gamma_K = K u / (1 - K u) (Higham 2002, section 3.1). Rounding one operand
    adds u_op; rounding both adds 2 u_op + u_op^2. Decoding (one fp32 product per element of each operand), block
    partial sums, and the epilogue's two products and sum add at most 6 u. The cast adds its own unit. Operands and
    products below 2**-126 may be flushed. A product of two scales may be subnormal, which costs each term 2**-150.
    """
    if is_exact(call):
        return torch.zeros((), dtype=torch.float64)
    left, right = (operand(side, call.cols).values(scaled=True) for side in sides(call))
    a, b = left.abs(), right.abs()
    unit = _UNIT.get(numerics.accumulator, _UNIT["fp32"])
    rounded = (1 + _UNIT[numerics.operand]) ** _rounded_operands(call, numerics)
    relative = rounded * (1 + _gamma(call.cols + 6, unit)) - 1
    if numerics.accumulator in _SHORT:
        short, terms = _SHORT[numerics.accumulator]
        relative += (1 + relative) * _gamma(min(call.cols, terms), short)
    size = a @ b.T
    bias = torch.zeros(1, device=a.device) if call.bias is None else call.bias.double()
    flushed = 2.0**-126 * (a.sum(1, keepdim=True) + b.sum(1, keepdim=True).T + call.cols * 2.0**-126)
    flushed = flushed + call.cols * (2.0**-126 + _largest_code_product(call) * 2.0**-150)
    dtype = str(call.out_dtype).removeprefix("torch.")
    cast = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    total = size * relative + flushed + bias.abs() * 2 * 2.0**-24
    return total + ((left @ right.T + bias).abs().nan_to_num(torch.inf) + total) * cast + _TINY[call.out_dtype]


def _gamma(terms: int, unit: float) -> float:
    return terms * unit / (1 - terms * unit)


def _largest_code_product(call: ScaledMM) -> float:
    """The largest product of two unscaled codes; 0 if one operand is a float matrix, whose scale is 1."""
    if call.a_scheme is None or call.b_scheme is None:
        return 0.0
    values = (operand(side, call.cols).values(scaled=False) for side in sides(call))
    return prod(float(v.where(v.isfinite(), 0.0).abs().max()) if v.numel() else 0.0 for v in values)


def _rounded_operands(call: ScaledMM, numerics: Numerics) -> int:
    """The number of operands that the kernel may round. Codes are exact, except those of codebooks."""
    if numerics.operand == "fp32":
        return 0
    exact = torch.bfloat16 if numerics.operand == "bf16" else torch.float16
    kinds = [None if side.scheme is None else scaling.scheme(side.scheme).format.kind for side in sides(call)]
    return sum(
        side.data.dtype != exact if kind is None else numerics.codebooks and kind == "codebook"
        for side, kind in zip(sides(call), kinds, strict=True)
    )


SPECS = (
    OpSpec(
        "scaled_mm", ScaledMM, ("out",), lambda call: [((call.a.shape[0], call.b.shape[0]), call.out_dtype)],
        _check, _cost, tolerance,
    ),
)  # fmt: skip
