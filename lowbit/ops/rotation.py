"""hadamard: the block Hadamard transform of a matrix. Source: docs/numerics.md section 13."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lowbit.ops.spec import Cost, OpSpec, require, require_float


class Hadamard(NamedTuple):
    """``x``: float ``[rows, cols]``. Blocks have ``block`` elements, a power of two, along ``axis`` 0 or 1.

    ``signed``: each element is first multiplied by a fixed sign that depends on its position in the block (128 signs).
    """

    x: Tensor
    block: int
    axis: int = 1
    signed: bool = False


def _check(call: Hadamard) -> None:
    require_float("hadamard", "x", call.x)
    require(call.x.dim() == 2, f"lowbit.hadamard: x must be a matrix [rows, cols], got {list(call.x.shape)}")
    require(call.axis in (0, 1), f"lowbit.hadamard: axis must be 0 (along rows) or 1 (along columns), got {call.axis}")
    power = call.block > 0 and call.block & (call.block - 1) == 0
    require(power, f"lowbit.hadamard: block must be a power of two, got {call.block}")
    require(
        not call.signed or call.block <= 128, f"lowbit.hadamard: there are signs for 128 places, got block {call.block}"
    )


SPECS = (
    OpSpec(
        "hadamard", Hadamard, ("out",), lambda call: [(tuple(call.x.shape), call.x.dtype)], _check,
        lambda call: Cost(0, 2 * call.x.nbytes),
    ),
)  # fmt: skip
