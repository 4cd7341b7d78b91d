"""Host side of matmuls: selects the kernel, the tiles, and the number of programs that share a tile."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import reference
from lowbit.kernels import grouped, integers, operands, scaled, weight_only
from lowbit.kernels.arguments import dense, dtype_of, pattern
from lowbit.kernels.spec import INTERPRETED, Launch, format_spec, power_of_two, scale_spec
from lowbit.ops.grouped import ScaledGroupedMM, product
from lowbit.ops.matmul import ScaledMM, Side, sides
from lowbit.scaling import Scheme, scheme

__all__ = [
    "add_shares", "are_integers", "epilogue", "for_experts", "known", "multiply_floats", "multiply_integers",
    "result_of", "scaled_grouped_mm", "scaled_mm", "share_of", "stacked", "supports", "tiles_of",
]  # fmt: skip

#: The fewest programs per launch, if K can be split among them. With few rows, which are memory-bound, eight per
#: multiprocessor of a large GPU; with more rows two, because partial sums must be moved too.
_PROGRAMS, _TALL_PROGRAMS = 1056, 264


def are_integers(call: ScaledMM) -> bool:
    """Whether the call is an integer matmul that is exact in each segment."""
    if not operands.kind(sides(call)[0]) == operands.kind(sides(call)[1]) == "integer":
        return False
    blocks = [s.block_of(side.data.shape[0], call.cols)[1] for side in sides(call) for s in [scheme(str(side.scheme))]]
    return min(blocks) >= min(call.cols, reference.MIN_INTEGER_BLOCK)


def supports(call: ScaledMM) -> str | None:
    """Why no kernel supports the call, or None."""
    if are_integers(call):
        a, b = (scheme(str(side.scheme)) for side in sides(call))
        widths = sorted(s.block_of(d.shape[0], call.cols)[1] for s, d in ((a, call.a), (b, call.b)))
        if widths[1] < call.cols and widths[1] % widths[0]:
            return f"its kernel takes blocks along K of which one divides the other, got {a} and {b}"
        limit = (2**31 - 1) // (_largest(a) * _largest(b))
        if widths[0] >= call.cols > limit:
            return f"int32 holds at most {limit} products of these integers, got K = {call.cols}"
    return None


def _largest(scheme: Scheme) -> int:
    """The largest magnitude of a code minus its zero point."""
    least, most = scheme.format.qmin, scheme.format.qmax
    return most - least if scheme.affine else max(-least, most)


def scaled_mm(call: ScaledMM, out: Tensor) -> list[Launch]:
    """Fill ``out [M, N] = a [M, K] @ b [N, K].T``; see ``lowbit.ops.matmul``."""
    a, b = sides(call)
    if are_integers(call):
        return multiply_integers(a, b, call.bias, out, call.cols)
    left = _left(a, b, call.cols)
    return [*left.launches, *multiply_floats(left, b, call.bias, out, call.cols)]


def scaled_grouped_mm(call: ScaledGroupedMM, out: Tensor) -> list[Launch]:
    """Fill ``out [T, N]`` with the matmuls of experts; see ``lowbit.ops.grouped``."""
    a, b = stacked(call)
    experts = len(call.b)
    if operands.kind(a) == operands.kind(b) == "integer" and are_integers(product(call, 0, slice(None))):
        before, launches = [], multiply_integers(a, b, call.bias, out, call.cols, experts)
    else:
        left = _left(a, b, call.cols)
        before, launches = left.launches, multiply_floats(left, b, call.bias, out, call.cols, experts)
    return [*before, *for_experts(launches, call)]


def stacked(call: ScaledGroupedMM) -> tuple[Side, Side]:
    """Both operands: all rows, and the first expert's codes with the stacked scales of all experts."""
    a, b = sides(product(call, 0, slice(None)))
    return a, b._replace(scale=call.b_scale, zero_point=call.b_zero_point, global_scale=call.b_global_scale)


def for_experts(launches: list[Launch], call: ScaledGroupedMM) -> list[Launch]:
    """Convert the launches for one expert to launches for all experts."""
    more = {
        "b_ptr": call.b, "offsets_ptr": call.offsets, "experts": len(call.b), "b_stride_e": call.b.stride(0),
        "scale_stride_e": call.b_scale[0].numel(),
        "global_stride_e": 0 if call.b_global_scale is None else call.b_global_scale[0].numel(),
        "EXPERTS": power_of_two(len(call.b) + 1),
    }  # fmt: skip
    made = [one._replace(kernel=_GROUPED[one.kernel], arguments=one.arguments | more) for one in launches]
    return [one._replace(arguments=known(one)) for one in made]


#: The kernel for experts that corresponds to each kernel for one matrix.
_GROUPED = {
    weight_only.weight_only: grouped.grouped_weight_only,
    weight_only.add_shares: grouped.grouped_add_shares,
    integers.integers: grouped.grouped_integers,
    scaled.scaled: grouped.grouped_scaled,
}


def known(one: Launch) -> dict[str, Any]:
    """The arguments that the kernel of a launch takes."""
    return {name: one.arguments[name] for name in one.kernel.arg_names}


def result_of(bias: Tensor | None, out: Tensor, depth: int) -> dict[str, Any]:
    """Sizes and the arguments of an epilogue."""
    return {
        "bias_ptr": operands.maybe_pattern(bias), "out_ptr": pattern(out), "rows": out.shape[0], "cols": out.shape[1],
        "depth": depth, "BIAS": -1 if bias is None else dtype_of(bias), "DTYPE": dtype_of(out),
    }  # fmt: skip


class _Shape(NamedTuple):
    """Tiles, warps and stages of a matmul."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


#: Alignment of loads in elements: 16 bytes of the narrowest codes that are read in pairs.
_ALIGNED = 32

#: By operand kind and the most rows; the last entry also applies above. Operands in several terms, codes with zero
#: points, patches (for their addresses), segments of several steps, and codes of fewer than 4 bits ("heavy") need more
#: registers per element.
_SHAPES: dict[str, dict[int, _Shape]] = {
    "rows": {16: _Shape(16, 64, 256, 4, 4), 64: _Shape(64, 128, 128, 4, 3), 128: _Shape(128, 128, 128, 8, 3)},
    "segments": {16: _Shape(16, 64, 128, 4, 5), 64: _Shape(64, 128, 128, 8, 3)},
    "heavy segments": {16: _Shape(16, 64, 128, 4, 5), 64: _Shape(64, 64, 128, 4, 3)},
    "floats": {16: _Shape(16, 64, 128, 4, 3), 64: _Shape(64, 64, 64, 4, 4), 128: _Shape(128, 64, 64, 4, 3)},
    "floats in blocks": {16: _Shape(16, 64, 128, 4, 3), 64: _Shape(64, 64, 64, 4, 4), 128: _Shape(128, 64, 64, 8, 3)},
    "terms": {16: _Shape(16, 64, 64, 4, 4), 64: _Shape(64, 64, 32, 4, 4), 128: _Shape(128, 128, 32, 8, 3)},
    "rows of patches": {16: _Shape(16, 64, 64, 4, 4), 64: _Shape(64, 64, 64, 4, 4), 128: _Shape(128, 128, 64, 8, 3)},
    "segments of patches": {16: _Shape(16, 64, 64, 4, 4), 64: _Shape(64, 64, 64, 4, 4), 128: _Shape(128, 64, 64, 8, 3)},
    "floats of patches": {16: _Shape(16, 64, 64, 4, 4), 64: _Shape(64, 64, 32, 4, 4), 128: _Shape(128, 64, 32, 8, 3)},
}


#: Elements of a segment that tiles of "segments" multiply in one step.
_SEGMENT_AT_ONCE = 128


def _shape(kind: str, rows: int, cols: int) -> _Shape:
    most = next((most for most in _SHAPES[kind] if rows <= most), max(_SHAPES[kind]))
    shape = _SHAPES[kind][most]
    return shape._replace(m=min(shape.m, max(16, power_of_two(rows))), n=min(shape.n, max(16, power_of_two(cols))))


def tiles_of(rows: int, tall: int, experts: int) -> int:
    """The most tiles of ``tall`` rows: experts do not share tiles, also not with rows without an expert."""
    tiles = -(-rows // tall)
    return tiles if experts == 0 else min(rows, tiles + experts)


def share_of(count: int, programs: int, tall: int) -> int:
    """The steps per program, of ``count`` per tile. ``programs``: the number of tiles, which have ``tall`` rows."""
    wanted = _PROGRAMS if tall <= 16 else _TALL_PROGRAMS
    return -(-count // max(1, min(wanted // programs, count // 4)))


# -- integers by integers, exact in segments ---------------------------------------------------------------------------
def multiply_integers(
    a: Side, b: Side, bias: Tensor | None, out: Tensor, depth: int, experts: int = 0, groups: int = 1,
    patches: bool = False,
) -> list[Launch]:  # fmt: skip
    """Launch an integer matmul with one matrix, with those of experts, or with the stacked matrices of ``groups``.

    ``patches``: the rows of ``a`` are patches of images.
    """
    rows, cols = out.shape
    arguments = operands.codes_of("a", a) | operands.codes_of("b", b) | result_of(bias, out, depth)
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
    bits = min(scheme(str(side.scheme)).format.bits for side in (a, b))
    heavy = not patches and (length > _SEGMENT_AT_ONCE or bits < 4)
    named = ("rows" if whole else "heavy segments" if heavy else "segments") + (" of patches" if patches else "")
    shape = _shape(named, -(-rows // max(experts, 1)), cols // groups)
    k = min(shape.k, max(32, power_of_two(length)))
    segments, steps = -(-block // length), -(-length // k)
    arguments |= {
        "block": block, "segments": segments, "length": length, "steps": steps,
        "count": -(-depth // block) * segments * steps, "WHOLE": whole, "ONE": steps == 1,
        "ALIGNED": gcd(_ALIGNED, block, length, depth),
        "M": shape.m, "N": shape.n, "K": k,
    }  # fmt: skip
    grid = (tiles_of(rows, shape.m, experts) * -(-cols // groups // shape.n), 1, groups)
    return [Launch(integers.integers, grid, arguments, shape.warps, shape.stages)]


# -- floats by codes ---------------------------------------------------------------------------------------------------
#: The shortest blocks for which block sums are faster than scaling elements.
_SHORTEST_BLOCK = 32


def _left(a: Side, b: Side, depth: int) -> operands.Decoded:
    """The left operand. Its block scales are left for block sums if the blocks of one operand divide the other's."""
    widths = [
        depth if side.scheme is None else min(scheme(side.scheme).block_of(1, depth)[1], depth) for side in (a, b)
    ]
    by_block = min(widths) >= _SHORTEST_BLOCK and (max(widths) >= depth or max(widths) % min(widths) == 0)
    return operands.fp8_left(a, depth, by_block) or operands.values(a, depth, by_block)


class _Plan(NamedTuple):
    """A launch of ``weight_only`` without tensors: numbers, constants, tiles, and shares per tile."""

    arguments: dict[str, Any]
    shape: _Shape
    programs: int
    shares: int


@lru_cache(maxsize=1024)
def _plan(
    sizes: tuple[int, int, int], a_dtype: torch.dtype, a_fp8: str, a_blocks: str | None, b_dtype: torch.dtype,
    b_scheme: str | None, device: torch.device, experts: int, groups: int, patches: bool,
) -> _Plan:  # fmt: skip
    """The launch for ``sizes`` (rows, columns, depth), a left matrix (dtype or FP8 format) and a right matrix (dtype or
    scheme).

    ``a_blocks``: the scheme of the left matrix if its block scales are left. The right matrix may be one per expert, or
    the stacked matrices of ``groups``.
    """
    rows, cols, depth = sizes
    each = -(-rows // max(experts, 1)), cols // groups
    of_left = _of_left_blocks(a_blocks, rows, depth)
    if b_scheme is None:
        in_fp16 = a_dtype == b_dtype == torch.float16
        more: dict[str, Any] = {
            "B": (), "B_SCALE": (), "AFFINE": False, "PAIRS": False, "PTX": "", "REGISTERS": "", "FP8": "",
            "SCALED": "none", "GROUP": 1, "GLOBAL": 0, "b_block": 1, "b_block_c": depth, "blocks": 1,
            "B_TERMS": 1 if in_fp16 else operands.TERMS[b_dtype],
        }  # fmt: skip
    else:
        found = scheme(b_scheme)
        in_fp16 = a_dtype == torch.float16 and operands.is_exact(found.format, "fp16")
        most = min(_shape("floats", *each).k, of_left["a_block_c"])
        more = _of_codes(found, cols, depth, "fp16" if in_fp16 else "bf16", most, of_left["a_block_c"])
        more["FP8"] = operands.fp8(found, device)
    a_terms = 1 if in_fp16 or a_fp8 else operands.TERMS[a_dtype]
    heavy = max(a_terms, more["B_TERMS"]) > 1 or more["AFFINE"]
    in_blocks = a_blocks is not None or more["SCALED"] in ("block", "element")
    named = "terms" if heavy else "floats of patches" if patches else "floats in blocks" if in_blocks else "floats"
    shape = _shape(named, *each)
    block = min(of_left["a_block_c"], more["b_block_c"] if more["SCALED"] == "block" else depth)
    k = max(more["GROUP"], min(shape.k, max(16, power_of_two(block))))
    steps = -(-block // k)
    count = -(-depth // block) * steps
    programs = tiles_of(rows, shape.m, experts) * -(-cols // groups // shape.n)
    share = share_of(count, programs, shape.m) if groups == 1 else count
    shares = -(-count // share)
    more |= of_left | {
        "rows": rows, "cols": cols, "depth": depth, "block": block, "count": count, "share": share, "steps": steps,
        "OPERAND": "fp32" if INTERPRETED else "fp16" if in_fp16 else "bf16", "SPLIT": shares > 1,
        "A_FP8": a_fp8, "A_TERMS": a_terms, "M": shape.m, "N": shape.n, "K": k,
    }  # fmt: skip
    return _Plan(more, shape, programs, shares)


def _of_left_blocks(a_scheme: str | None, rows: int, depth: int) -> dict[str, Any]:
    """Arguments for the block scales that the left operand leaves."""
    if a_scheme is None:
        return {"A_BLOCKS": None, "a_block_r": 1, "a_block_c": depth, "a_blocks": 1}
    found = scheme(a_scheme)
    block_r, block_c = found.block_of(rows, depth)
    return {
        "A_BLOCKS": scale_spec(found), "a_block_r": block_r, "a_block_c": min(block_c, depth),
        "a_blocks": found.scale_shape(rows, depth)[1],
    }  # fmt: skip


def _of_codes(found: Scheme, cols: int, depth: int, operand: str, most: int, left: int) -> dict[str, Any]:
    """Arguments that say how codes become operands, and where their scales are applied.

    ``most``: elements per step. ``left``: elements per block of the left operand.
    """
    block_r, block = found.block_of(cols, depth)
    scaled, group = ("row" if block >= depth else "block"), 1
    if scaled == "block" and block == power_of_two(block) <= most and operands.folds(found, operand):
        scaled, group = "element", block
    together = {4: 2, 6: 4}.get(found.format.bits)  # the fewest codes that end at a byte boundary
    pairs = together is not None and all(width >= depth or width % together == 0 for width in (block, left))
    in_ptx = together == 2 and pairs and not INTERPRETED
    instructions, registers = operands.instructions(found.format, operand) if in_ptx else ("", "")
    return {
        "B": format_spec(found.format), "B_SCALE": scale_spec(found), "AFFINE": found.affine, "PAIRS": pairs,
        "PTX": instructions, "REGISTERS": registers, "SCALED": scaled, "GROUP": group,
        "GLOBAL": scale_spec(found)[3] if scaled == "element" else 0, "b_block": block_r,
        "b_block_c": min(block, depth),
        "blocks": found.scale_shape(cols, depth)[1],
        "B_TERMS": 1 if operand == "fp16" or operands.is_exact(found.format, "bf16") else 3,
    }  # fmt: skip


def multiply_floats(
    left: operands.Decoded, b: Side, bias: Tensor | None, out: Tensor, depth: int, experts: int = 0, groups: int = 1,
    patches: bool = False,
) -> list[Launch]:  # fmt: skip
    """``multiply_integers`` for floats by codes."""
    (rows, cols), a = out.shape, left.values
    blocks = left.blocks
    plan = _plan(
        (rows, cols, depth), a.dtype, left.fp8, None if blocks is None else blocks.scheme, b.data.dtype, b.scheme,
        out.device, experts, groups, patches,
    )  # fmt: skip
    table = operands.table_of(scheme(str(b.scheme)).format, out.device) if operands.kind(b) == "codebook" else None
    common = plan.arguments | {
        **operands.of_left(left.rows), "b_scale_ptr": operands.maybe_pattern(b.scale),
        "b_global_ptr": dense(b.global_scale), "bias_ptr": operands.maybe_pattern(bias), "out_ptr": pattern(out),
        "BIAS": -1 if bias is None else dtype_of(bias), "DTYPE": dtype_of(out),
        "sums_ptr": out.new_empty((plan.shares, rows, cols), dtype=torch.float32) if plan.shares > 1 else None,
    }  # fmt: skip
    arguments = common | {
        "a_ptr": a, "a_stride_r": a.stride(0), "a_stride_c": a.stride(1),
        "b_ptr": b.data, "b_stride_r": b.data.stride(0), "b_stride_c": b.data.stride(1), "b_bytes": b.data.shape[1],
        "b_zero_ptr": dense(b.zero_point), "table_ptr": table,
        "a_blocks_ptr": None if blocks is None else operands.maybe_pattern(blocks.scale),
    }  # fmt: skip
    grid, shape = (plan.programs, plan.shares, groups), plan.shape
    launches = [Launch(weight_only.weight_only, grid, arguments, shape.warps, shape.stages)]
    return launches + (add_shares(common, plan.shares, experts) if plan.shares > 1 else [])


def add_shares(common: dict[str, Any], shares: int, experts: int = 0) -> list[Launch]:
    """Launch the epilogue for sums of ``shares`` programs. ``common``: the arguments of the matmul."""
    rows, cols = common["rows"], common["cols"]
    finish = {name: common[name] for name in weight_only.add_shares.arg_names if name in common}
    finish |= {"shares": shares, "M": 16, "N": min(64, max(16, power_of_two(cols)))}
    return [Launch(weight_only.add_shares, (tiles_of(rows, 16, experts) * -(-cols // finish["N"]),), finish)]


def epilogue(
    sums: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None, out: Tensor
) -> list[Launch]:
    """Fill ``out`` from ``sums [M, N]`` (fp32 or int32) and the fp32 row scales of both operands."""
    return add_shares(
        result_of(bias, out, 0) | {
            "sums_ptr": sums, **operands.of_left(a_scale if a_scale is None else operands.fp32_rows(a_scale)),
            "b_scale_ptr": operands.maybe_pattern(b_scale), "SCALED": "none" if b_scale is None else "row",
            "b_global_ptr": None, "b_block": 1, "B_SCALE": scale_spec(scheme("int8:row")), "GLOBAL": 0,
        }, 1,
    )  # fmt: skip
