"""Host side of products: which kernel multiplies, with which tiles, in how many steps."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import reference
from lowbit.formats import Format
from lowbit.kernels import matmul, scaled, weight_only
from lowbit.kernels.arguments import dense, dtype_of, pattern
from lowbit.kernels.launch import dequantize
from lowbit.kernels.spec import INTERPRETED, Launch, format_spec, power_of_two, scale_spec
from lowbit.ops.matmul import INT32_DEPTH, ScaledMM, Side, is_whole, sides
from lowbit.scaling import Scheme, scheme

__all__ = ["scaled_mm", "supports"]

#: Programs that a GPU should have at least, where there is a K to share among them.
_PROGRAMS = 264

#: Significant bits of operands, and of scales that may be multiplied into one.
_BITS = {"bf16": 8, "fp16": 11}
_SCALE_BITS = {"e8m0": 1, "fp8_e4m3": 4}

#: Terms of 8 bits that a float is cut into.
_TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def _kind(side: Side) -> str | None:
    return None if side.scheme is None else scheme(side.scheme).format.kind


def _are_integers(call: ScaledMM) -> bool:
    """Whether the product is exact in each segment."""
    blocks = [s.block_of(side.data.shape[0], call.cols)[1] for side in sides(call) for s in [scheme(str(side.scheme))]]
    return min(blocks) >= min(call.cols, reference.MIN_INTEGER_BLOCK)


def supports(call: ScaledMM) -> str | None:
    """Why no kernel serves the call."""
    if _kind(sides(call)[0]) == _kind(sides(call)[1]) == "integer" and _are_integers(call):
        a, b = (scheme(str(side.scheme)) for side in sides(call))
        widths = sorted(s.block_of(d.shape[0], call.cols)[1] for s, d in ((a, call.a), (b, call.b)))
        if widths[1] < call.cols and widths[1] % widths[0]:
            return f"its kernel takes blocks along K of which one divides the other, got {a} and {b}"
        limit = INT32_DEPTH if _is_signed(a) and _is_signed(b) else INT32_DEPTH // 4
        if widths[0] >= call.cols > limit:
            return f"int32 holds at most {limit} products of these integers, got K = {call.cols}"
    return None


def _is_signed(scheme: Scheme) -> bool:
    return scheme.format.signed and not scheme.affine


def scaled_mm(call: ScaledMM, out: Tensor) -> list[Launch]:
    """``out [M, N] = a [M, K] @ b [N, K].T``; see ``lowbit.ops.matmul``."""
    a, b = sides(call)
    kinds = _kind(a), _kind(b)
    affine = any(side.zero_point is not None for side in (a, b))
    if kinds[0] == kinds[1] and kinds[0] in ("integer", "float") and is_whole(call) and not affine:
        return _whole(a, b, call.bias, out, call.cols)
    if kinds == ("integer", "integer") and _are_integers(call):
        return _integers(a, b, call.bias, out, call.cols)
    left = _values(a, call.cols)
    return [*left.launches, *_weight_only(left, b, call.bias, out, call.cols)]


class _Left(NamedTuple):
    """The left matrix as floats, what fills it, and the fp32 scales of its rows, if they wait for the epilogue."""

    values: Tensor
    launches: list[Launch]
    scale: Tensor | None


def _values(side: Side, cols: int) -> _Left:
    if side.scheme is None:
        return _Left(side.data, [], None)
    found, rows = scheme(side.scheme), side.data.shape[0]
    assert side.scale is not None
    waits = found.format.kind != "codebook"
    scale, global_scale, row_scale = side.scale, side.global_scale, None
    if waits and found.scale_shape(rows, cols)[1] == 1:
        block = found.block_of(rows, cols)[0]
        row_scale = reference.scale_value(side.scale, found, side.global_scale)[:, 0].repeat_interleave(block)[:rows]
        scale, global_scale = _ones(side.scale, found), _maybe_ones(side.global_scale)
    elif waits and _folds(found, "bf16"):
        row_scale = None if global_scale is None else global_scale.flatten().expand(rows)
        global_scale = _maybe_ones(global_scale)
    else:
        waits = False
    dtype = torch.bfloat16 if waits else torch.float32
    values = torch.empty((rows, cols), dtype=dtype, device=side.data.device)
    launches = dequantize(side.data, found, scale, side.zero_point, global_scale, values)
    return _Left(values, launches, None if row_scale is None else row_scale.contiguous())


def _ones(scale: Tensor, scheme: Scheme) -> Tensor:
    """Stored scales of 1."""
    one = {"e8m0": 127, "fp8_e4m3": 0x38}.get(scheme.scale_format.name, 1)
    return torch.full_like(scale, one)


def _maybe_ones(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.ones_like(x)


@cache
def _values_of(format: Format) -> Tensor:
    """The finite values of a format's codes, fp32."""
    values = reference.decode(torch.arange(1 << format.bits, dtype=torch.uint8), format)
    return values[values.isfinite()]


@cache
def _is_exact(format: Format, operand: str) -> bool:
    if operand == "bf16":
        return format.kind != "codebook"
    values = _values_of(format)
    return bool((values.half().float() == values).all())


@cache
def _folds(scheme: Scheme, operand: str) -> bool:
    """Whether a code times its block's scale is exact in the operand."""
    scale = _SCALE_BITS.get(scheme.scale_format.name)
    if scale is None or scheme.affine or scheme.format.kind == "codebook":
        return False
    bits = scheme.format.bits if scheme.format.kind == "integer" else scheme.format.mantissa + 1
    if bits + scale > _BITS[operand] + (scale == 1):
        return False
    if operand == "bf16":
        return True
    values = _values_of(scheme.format).abs()
    least = values[values > 0].min() * 2.0**-9
    return scale > 1 and float(values.max()) * 448 < 65504 and bool(least >= 2.0**-24)


@cache
def _table(format: Format, device: torch.device) -> Tensor:
    return torch.tensor(format.codebook, dtype=torch.float32, device=device)


def _codes(name: str, side: Side) -> dict[str, Any]:
    data = side.data
    return {
        f"{name}_ptr": data, f"{name}_stride_r": data.stride(0), f"{name}_stride_c": data.stride(1),
        f"{name}_bytes": data.shape[1], f"{name}_scale_ptr": _maybe_pattern(side.scale),
        f"{name}_global_ptr": dense(side.global_scale),
    }  # fmt: skip


def _maybe_pattern(x: Tensor | None) -> Tensor | None:
    return None if x is None else pattern(x.contiguous())


def _result(bias: Tensor | None, out: Tensor, depth: int) -> dict[str, Any]:
    return {
        "bias_ptr": _maybe_pattern(bias), "out_ptr": pattern(out), "rows": out.shape[0], "cols": out.shape[1],
        "depth": depth, "BIAS": -1 if bias is None else dtype_of(bias), "DTYPE": dtype_of(out),
    }  # fmt: skip


class _Shape(NamedTuple):
    """Tiles, warps and stages of a product."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


#: By what is multiplied and the most rows that it is for; the last serves more.
_SHAPES: dict[str, dict[int, _Shape]] = {
    "codes": {16: _Shape(16, 128, 64, 4, 3), 64: _Shape(64, 128, 64, 4, 3), 128: _Shape(128, 128, 64, 8, 3)},
    "int8": {16: _Shape(16, 128, 128, 4, 3), 64: _Shape(64, 128, 128, 4, 3), 128: _Shape(128, 128, 128, 8, 3)},
    "segments": {16: _Shape(16, 64, 128, 4, 3), 64: _Shape(64, 128, 128, 4, 3)},
    "floats": {16: _Shape(16, 64, 128, 4, 4), 64: _Shape(64, 64, 64, 4, 4), 128: _Shape(128, 128, 64, 8, 3)},
}


def _shape(kind: str, rows: int, cols: int) -> _Shape:
    most = next((most for most in _SHAPES[kind] if rows <= most), max(_SHAPES[kind]))
    shape = _SHAPES[kind][most]
    return shape._replace(m=min(shape.m, max(16, power_of_two(rows))), n=min(shape.n, max(16, power_of_two(cols))))


# -- codes by codes, scales of whole rows ------------------------------------------------------------------------------
def _whole(a: Side, b: Side, bias: Tensor | None, out: Tensor, depth: int) -> list[Launch]:
    rows, cols = out.shape
    a_scheme, b_scheme = scheme(str(a.scheme)), scheme(str(b.scheme))
    integers = a_scheme.format.kind == "integer"
    shape = _shape("int8" if integers else "codes", rows, cols)
    arguments = _codes("a", a) | _codes("b", b) | _result(bias, out, depth)
    arguments["a_global_scale_ptr"] = arguments.pop("a_global_ptr")
    arguments["b_global_scale_ptr"] = arguments.pop("b_global_ptr")
    arguments |= {
        "a_block": a_scheme.block_of(rows, depth)[0], "b_block": b_scheme.block_of(cols, depth)[0],
        "A": format_spec(a_scheme.format), "A_SCALE": scale_spec(a_scheme),
        "B": format_spec(b_scheme.format), "B_SCALE": scale_spec(b_scheme),
        "OPERAND": "int8" if integers else "fp32" if INTERPRETED else "bf16",
        "M": shape.m, "N": shape.n, "K": shape.k,
    }  # fmt: skip
    grid = (-(-rows // shape.m) * -(-cols // shape.n),)
    return [Launch(matmul.scaled_mm, grid, arguments, shape.warps, shape.stages)]


# -- integers by integers, exact in segments ---------------------------------------------------------------------------
def _integers(a: Side, b: Side, bias: Tensor | None, out: Tensor, depth: int) -> list[Launch]:
    rows, cols = out.shape
    arguments = _codes("a", a) | _codes("b", b) | _result(bias, out, depth)
    widths = []
    for name, side, size in (("a", a, rows), ("b", b, cols)):
        found = scheme(str(side.scheme))
        block_r, block_c = found.block_of(size, depth)
        widths.append(min(block_c, depth))
        arguments |= {
            f"{name}_zero_ptr": dense(side.zero_point), f"{name}_block_r": block_r, f"{name}_block_c": widths[-1],
            f"{name}_blocks": found.scale_shape(size, depth)[1], name.upper(): format_spec(found.format),
            f"{name.upper()}_SCALE": scale_spec(found), f"{name.upper()}_AFFINE": found.affine,
        }  # fmt: skip
    block = min(widths)
    whole = block == depth
    length = depth if whole else min(block, reference.SEGMENT)
    for name, side in (("A", a), ("B", b)):
        arguments[f"{name}_PAIRS"] = scheme(str(side.scheme)).format.bits == 4 and (whole or block % 2 == 0)
    shape = _shape("segments", rows, cols)
    arguments |= {
        "block": block, "segments": -(-block // length), "length": length, "WHOLE": whole,
        "M": shape.m, "N": shape.n, "K": min(shape.k, max(32, power_of_two(length))),
    }  # fmt: skip
    grid = (-(-rows // shape.m) * -(-cols // shape.n),)
    return [Launch(scaled.integers, grid, arguments, shape.warps, shape.stages)]


# -- floats by codes ---------------------------------------------------------------------------------------------------
def _weight_only(left: _Left, b: Side, bias: Tensor | None, out: Tensor, depth: int) -> list[Launch]:
    (rows, cols), a = out.shape, left.values
    found = None if b.scheme is None else scheme(b.scheme)
    in_fp16 = a.dtype == torch.float16 and (
        b.data.dtype == torch.float16 if found is None else _is_exact(found.format, "fp16")
    )
    operand = "fp16" if in_fp16 else "bf16"
    shape, scaled, block, group = _shape("floats", rows, cols), "none", depth, 1
    if found is not None:
        block = min(found.block_of(cols, depth)[1], depth)
        scaled = "row" if block == depth else "block"
        if scaled == "block" and block == power_of_two(block) <= shape.k and _folds(found, operand):
            scaled, group = "element", block
    k = min(shape.k, max(16, power_of_two(block))) if scaled == "block" else min(shape.k, max(16, power_of_two(depth)))
    k = max(k, group)
    steps = -(-block // k)
    count = -(-depth // block) * steps if scaled == "block" else -(-depth // k)
    programs = -(-rows // shape.m) * -(-cols // shape.n)
    shares = max(1, min(_PROGRAMS // programs, count // 4))
    share = -(-count // shares)
    shares = -(-count // share)
    split = shares > 1
    sums = torch.empty((shares, rows, cols), dtype=torch.float32, device=out.device) if split else None
    exact = found is None or _is_exact(found.format, "bf16")
    common = _result(bias, out, depth) | {
        "a_scale_ptr": left.scale, "A_SCALED": left.scale is not None, "SCALED": scaled,
        "b_scale_ptr": _maybe_pattern(b.scale), "b_global_ptr": dense(b.global_scale), "sums_ptr": sums,
        "b_block": 1 if found is None else found.block_of(cols, depth)[0],
        "B_SCALE": () if found is None else scale_spec(found),
        "GLOBAL": scale_spec(found)[3] if found is not None and scaled == "element" else 0,
        "M": shape.m, "N": shape.n,
    }  # fmt: skip
    more = {
        "a_ptr": a, "a_stride_r": a.stride(0), "a_stride_c": a.stride(1),
        "b_ptr": b.data, "b_stride_r": b.data.stride(0), "b_stride_c": b.data.stride(1), "b_bytes": b.data.shape[1],
        "b_zero_ptr": dense(b.zero_point),
        "table_ptr": None if exact or found is None else _table(found.format, out.device),
        "blocks": 1 if found is None else found.scale_shape(cols, depth)[1], "block": block,
        "steps": steps if scaled == "block" else max(count, 1), "count": count, "share": share,
        "B": () if found is None else format_spec(found.format), "AFFINE": found is not None and found.affine,
        "PAIRS": found is not None and found.format.bits == 4 and (scaled != "block" or block % 2 == 0),
        "OPERAND": "fp32" if INTERPRETED else operand,
        "A_TERMS": 1 if operand == "fp16" else _TERMS[a.dtype],
        "B_TERMS": 1 if operand == "fp16" else _TERMS[b.data.dtype] if found is None else 1 if exact else 3,
        "SPLIT": split, "GROUP": group, "K": k,
    }  # fmt: skip
    launches = [Launch(weight_only.weight_only, (programs, shares), common | more, shape.warps, shape.stages)]
    if split:
        finish = {name: common[name] for name in weight_only.add_shares.arg_names if name in common}
        finish |= {"shares": shares, "M": min(shape.m, 16), "N": shape.n}
        grid = (-(-rows // finish["M"]) * -(-cols // shape.n),)
        launches.append(Launch(weight_only.add_shares, grid, finish))
    return launches
