"""Host side of ``scaled``: selects the calls whose codes tensor cores multiply directly, and their tiles."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.kernels import scaled
from lowbit.kernels.arguments import dense, dtype_of, pattern
from lowbit.kernels.operands import codes_of, global_rows, maybe_pattern, of_left, row_scales
from lowbit.kernels.products import add_shares, for_experts, share_of, stacked, tiles_of
from lowbit.kernels.spec import Launch, power_of_two, scale_spec
from lowbit.ops.grouped import ScaledGroupedMM
from lowbit.ops.matmul import ScaledMM, Side, sides
from lowbit.scaling import Scheme, scheme

__all__ = ["scaled_grouped_mm", "scaled_mm", "supports"]

#: Formats that tensor cores multiply, and their PTX names.
_CODES = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "fp6_e2m3": "e2m3", "fp6_e3m2": "e3m2", "fp4_e2m1": "e2m1"}
#: Exponent of the power of two by which FP6 values exceed their patterns read as E4M3.
_EXPONENTS = {"e2m3": 6, "e3m2": 4}
#: Elements per hardware scale, by scale format.
_BLOCKS = {"e8m0": 32, "fp8_e4m3": 16}
#: More blocks than any row has.
_ALL = 1 << 30


class _Shape(NamedTuple):
    """Tiles, warps and stages for 8-bit codes, and for FP4 with one scale per 16.

    For the same number of registers K is twice as long for FP4 with one scale per 32, and half as long for FP6, which
    is unpacked.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int


#: By the most rows; the last entry also applies above.
_SHAPES = {16: _Shape(16, 128, 128, 4, 4), 64: _Shape(64, 128, 128, 8, 3), 128: _Shape(128, 128, 128, 8, 3)}


def _elements(found: Scheme, cols: int) -> int:
    """Elements per hardware scale for a scheme; 0 if hardware does not support it."""
    elements = _BLOCKS.get(found.scale_format.name, 0)
    block = found.block_of(1, cols)[1]
    if elements == 0 or (elements == 16 and found.format.bits != 4):
        return 0
    return elements if block >= cols or block % elements == 0 else 0


def _whole(found: Scheme, cols: int) -> bool:
    """Whether it is FP8 with row scales, which the epilogue applies."""
    return found.format.bits == 8 and found.block_of(1, cols)[1] >= cols


def supports(call: ScaledMM) -> str | None:
    """Why tensor cores cannot multiply the codes of a call directly, or None."""
    schemes = []
    for side in sides(call):
        found = None if side.scheme is None else scheme(side.scheme)
        if found is None or found.format.name not in _CODES:
            return f"it multiplies codes of {', '.join(_CODES)}, and {side.name} is {side.scheme or side.data.dtype}"
        if not _whole(found, call.cols) and not _elements(found, call.cols):
            return f"hardware applies E8M0 scales to 32 elements, E4M3 ones to 16 of FP4, and {side.name} is {found}"
        schemes.append(found)
    a, b = schemes
    if not (_whole(a, call.cols) and _whole(b, call.cols)) and _elements(a, call.cols) != _elements(b, call.cols):
        return f"scales of both operands must be of one kind, got {a} and {b}"
    return None


@lru_cache(maxsize=1024)
def _plan(
    sizes: tuple[int, int, int], a_scheme: str, b_scheme: str, experts: int
) -> tuple[dict[str, Any], _Shape, int, int]:
    """Arguments without tensors, tiles, programs and shares, for ``sizes`` (rows, columns, depth)."""
    rows, cols, depth = sizes
    each = -(-rows // max(experts, 1))
    shape = next((shape for most, shape in _SHAPES.items() if each <= most), _SHAPES[max(_SHAPES)])
    shape = shape._replace(m=min(shape.m, max(16, power_of_two(each))))
    found = scheme(a_scheme), scheme(b_scheme)
    names = [_CODES[one.format.name] for one in found]
    whole = _whole(found[0], depth) and _whole(found[1], depth)
    elements = 0 if whole else _elements(found[0], depth)
    more: dict[str, Any] = {"V": elements}
    for name, one, size in zip("ab", found, (rows, cols), strict=True):
        block_r, block_c = one.block_of(size, depth)
        more |= {
            f"{name}_block_r": block_r, f"{name}_block_c": _ALL if whole or block_c >= depth else block_c // elements,
            f"{name}_blocks": one.scale_shape(size, depth)[1],
        }  # fmt: skip
    if names == ["e2m1", "e2m1"] and elements == 32:
        shape = shape._replace(k=2 * shape.k)
    elif any(name in _EXPONENTS for name in names):
        shape = shape._replace(k=shape.k // 2)
    count = -(-depth // shape.k)
    programs = tiles_of(rows, shape.m, experts) * -(-cols // shape.n)
    share = share_of(count, programs, shape.m)
    more |= {
        "rows": rows, "cols": cols, "depth": depth, "count": count, "share": share, "A": names[0], "B": names[1],
        "b_block": found[1].block_of(cols, depth)[0], "FACTOR": 2.0 ** sum(_EXPONENTS.get(name, 0) for name in names),
        "B_SCALE": scale_spec(found[1]), "SCALED": "row" if whole else "block", "SPLIT": share < count,
        "GLOBAL": 0 if whole else scale_spec(found[1])[3], "M": shape.m, "N": shape.n, "K": shape.k,
    }  # fmt: skip
    return more, shape, programs, -(-count // share)


def scaled_mm(call: ScaledMM, out: Tensor) -> list[Launch]:
    """Fill ``out [M, N] = a [M, K] @ b [N, K].T``; see ``lowbit.ops.matmul``."""
    a, b = sides(call)
    return _multiplied(a, b, call.bias, out, call.cols)


def scaled_grouped_mm(call: ScaledGroupedMM, out: Tensor) -> list[Launch]:
    """Fill ``out [T, N]`` with the matmuls of experts; see ``lowbit.ops.grouped``."""
    a, b = stacked(call)
    return for_experts(_multiplied(a, b, call.bias, out, call.cols, len(call.b)), call)


def _multiplied(a: Side, b: Side, bias: Tensor | None, out: Tensor, depth: int, experts: int = 0) -> list[Launch]:
    rows, cols = out.shape
    plan, shape, programs, shares = _plan((rows, cols, depth), str(a.scheme), str(b.scheme), experts)
    after = row_scales(a, depth) if plan["V"] == 0 else global_rows(a)
    of_a, of_b = codes_of("a", a), codes_of("b", b)
    arguments = of_a | of_b | plan | {
        "a_blocks_ptr": of_a["a_scale_ptr"], "b_blocks_ptr": of_b["b_scale_ptr"], **of_left(after),
        "bias_ptr": maybe_pattern(bias),
        "out_ptr": pattern(out), "b_global_ptr": dense(b.global_scale),
        "BIAS": -1 if bias is None else dtype_of(bias), "DTYPE": dtype_of(out),
        "sums_ptr": out.new_empty((shares, rows, cols), dtype=torch.float32) if shares > 1 else None,
    }  # fmt: skip
    one = Launch(scaled.scaled, (programs, shares), arguments, shape.warps, shape.stages)
    return [one, *(add_shares(arguments, shares, experts) if shares > 1 else [])]
