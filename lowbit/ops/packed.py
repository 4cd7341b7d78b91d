"""linear_packed: ``linear`` with a weight in the packed layout, for integer weights and inputs.

Source: docs/numerics.md section 9; lowbit/tensor/prepack.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowbit.ops import linear
from lowbit.ops.linear import Linear
from lowbit.ops.spec import FLOATS, Cost, Numerics, OpSpec, Out, require, require_codes, require_float
from lowbit.tensor import prepack


class LinearPacked(NamedTuple):
    """The arguments of ``linear_packed``.

    Attributes:
        x: ``[..., K]`` float.
        packed: The result of ``prepack``: the weight ``[N, K]`` with the input scheme.
        out_features: N, which a tracer cannot read from ``packed``.
        out_dtype: None means the dtype of ``x``.
    """

    x: Tensor
    packed: Tensor
    out_features: int
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None


def _dtype(call: LinearPacked) -> torch.dtype:
    return call.x.dtype if call.out_dtype is None else call.out_dtype


def plain(call: LinearPacked) -> Linear:
    """The same call with the weight in the plain layout."""
    q = prepack.unpack(call.packed)
    return Linear(
        call.x, q.codes, q.scheme.name, q.scale, q.zero_point, q.global_scale, call.bias,
        prepack.input_of(call.packed).name, _dtype(call),
    )  # fmt: skip


def _outputs(call: LinearPacked) -> list[Out]:
    return [((*call.x.shape[:-1], call.out_features), _dtype(call))]


def _traced(packed: Tensor) -> bool:
    """Whether the tensor has no bytes to read."""
    return packed.is_meta or type(packed) not in (Tensor, nn.Parameter)


def _check(call: LinearPacked) -> None:
    require_float("linear_packed", "x", call.x)
    require(call.x.dim() >= 1, "lowbit.linear_packed: x needs at least one axis")
    require_codes("linear_packed", "packed", call.packed)
    rows = call.out_features
    if not _traced(call.packed):
        shape = prepack.shape_of(call.packed)
        require(
            (rows, call.x.shape[-1]) == shape,
            f"lowbit.linear_packed: the packed weight is {list(shape)}, got out_features {rows} and x "
            f"{list(call.x.shape)}; x [..., K] needs the K of the weight [N, K]",
        )
    require(
        _dtype(call) in FLOATS,
        f"lowbit.linear_packed: out_dtype must be a 16- or 32-bit float, got {call.out_dtype}",
    )
    if call.bias is not None:
        require_float("linear_packed", "bias", call.bias)
        require(
            tuple(call.bias.shape) == (rows,),
            f"lowbit.linear_packed: bias must be [{rows}], got {list(call.bias.shape)}",
        )


def _cost(call: LinearPacked) -> Cost:
    m, n, k = call.x.shape[:-1].numel(), call.out_features, call.x.shape[-1]
    moved = call.x.nbytes + call.packed.nbytes + m * n * _dtype(call).itemsize
    return Cost(2 * m * n * k, moved)


def _tolerance(call: LinearPacked, numerics: Numerics) -> Tensor:
    tolerance = linear.SPECS[0].tolerance
    assert tolerance is not None
    return tolerance(plain(call), numerics)


SPECS = (OpSpec("linear_packed", LinearPacked, ("out",), _outputs, _check, _cost, _tolerance),)
