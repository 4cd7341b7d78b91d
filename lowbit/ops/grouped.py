"""scaled_grouped_mm: the matmuls of a mixture of experts, each expert on its own rows, in one op.

It is bit-identical to ``scaled_mm`` per expert, with the same error bounds. ``offsets`` follow the convention of
torch's ``_grouped_mm``. Source: docs/numerics.md section 9.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.ops import matmul
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.spec import Cost, Numerics, OpSpec, require, require_codes

__all__ = ["SPECS", "ScaledGroupedMM", "has_rows_of_its_own", "product", "spans"]


class ScaledGroupedMM(NamedTuple):
    """The arguments of ``scaled_grouped_mm``.

    Attributes:
        a: Floats ``[T, K]``, or stored codes ``[T, packed K]`` with scales that each belong to one row.
        b: Stored codes ``[E, N, packed K]``. Its scales, zero points and global scales are stacked by expert.
        offsets: int32 ``[E]``, ascending, on the device. Expert e has the rows from ``offsets[e - 1]`` (0 for e = 0) to
            before ``offsets[e]``. Rows from ``offsets[E - 1]`` on belong to no expert; their results are zeros.
        bias: ``[E, N]``.
    """

    a: Tensor
    b: Tensor
    offsets: Tensor
    cols: int
    b_scheme: str
    b_scale: Tensor
    b_zero_point: Tensor | None = None
    b_global_scale: Tensor | None = None
    a_scheme: str | None = None
    a_scale: Tensor | None = None
    a_zero_point: Tensor | None = None
    a_global_scale: Tensor | None = None
    bias: Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16


def has_rows_of_its_own(scheme: scaling.Scheme) -> bool:
    """Whether every scale belongs to one row, so that rows can be quantized together or separately."""
    return scheme.block[0] == 1 and scheme.global_scale != "tensor"


def product(call: ScaledGroupedMM, expert: int, rows: slice) -> ScaledMM:
    """The matmul of one expert and some rows."""

    def of_rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[rows]

    def of_expert(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[expert]

    return ScaledMM(
        call.a[rows], call.b[expert], call.cols, call.a_scheme, call.b_scheme,
        of_rows(call.a_scale), of_rows(call.a_zero_point), of_rows(call.a_global_scale),
        call.b_scale[expert], of_expert(call.b_zero_point), of_expert(call.b_global_scale),
        of_expert(call.bias), call.out_dtype,
    )  # fmt: skip


def spans(call: ScaledGroupedMM) -> list[slice]:
    """The rows of each expert, read from the device."""
    ends = [0, *call.offsets.tolist()]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _check(call: ScaledGroupedMM) -> None:
    require_codes("scaled_grouped_mm", "b", call.b)
    require(
        call.a.dim() == 2 and call.b.dim() == 3 and len(call.b) > 0,
        "lowbit.scaled_grouped_mm: a must be [T, K] and b [E, N, packed K] with at least one expert, got "
        f"{list(call.a.shape)} and {list(call.b.shape)}",
    )
    experts = len(call.b)
    require(
        call.offsets.dtype == torch.int32 and tuple(call.offsets.shape) == (experts,),
        f"lowbit.scaled_grouped_mm: offsets must be int32 [{experts}], got {call.offsets.dtype} "
        f"{list(call.offsets.shape)}",
    )
    for name in ("b_scale", "b_zero_point", "b_global_scale", "bias"):
        stack = getattr(call, name)
        require(
            stack is None or (stack.dim() > 0 and len(stack) == experts),
            f"lowbit.scaled_grouped_mm: {name} must have a part for each of {experts} experts, got "
            f"{None if stack is None else list(stack.shape)}",
        )
    require(
        call.a_scheme is None or has_rows_of_its_own(scaling.scheme(call.a_scheme)),
        f"lowbit.scaled_grouped_mm: scales of a must belong to single rows, and those of {call.a_scheme} do not; use a "
        "scheme such as int8:row",
    )
    matmul.SPECS[0].check(product(call, 0, slice(None)))


def _cost(call: ScaledGroupedMM) -> Cost:
    rows, cols = call.a.shape[0], call.b.shape[1]
    moved = sum(t.numel() * t.element_size() for t in call if isinstance(t, Tensor))
    return Cost(2 * rows * cols * call.cols, moved + rows * cols * call.out_dtype.itemsize)


def _tolerance(call: ScaledGroupedMM, numerics: Numerics) -> Tensor:
    bound = torch.zeros(call.a.shape[0], call.b.shape[1], dtype=torch.float64, device=call.a.device)
    for expert, rows in enumerate(spans(call)):
        bound[rows] = matmul.tolerance(product(call, expert, rows), numerics)
    return bound


SPECS = (
    OpSpec(
        "scaled_grouped_mm", ScaledGroupedMM, ("out",),
        lambda call: [((call.a.shape[0], call.b.shape[1]), call.out_dtype)], _check, _cost, _tolerance,
    ),
)  # fmt: skip
