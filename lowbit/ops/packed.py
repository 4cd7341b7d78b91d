"""linear_packed: ``linear`` on a weight in the packed layout, for integer weights and inputs.

Source: docs/numerics.md section 9; lowbit/tensor/prepack.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowbit.ops import linear
from lowbit.ops.linear import Linear
from lowbit.ops.samples import random_matrix
from lowbit.ops.spec import FLOATS, Cost, Numerics, OpSpec, Out, Workload, require, require_codes, require_float
from lowbit.recipes import RECIPES
from lowbit.scaling import Scheme, scheme
from lowbit.tensor import prepack
from lowbit.tensor.quantized import Quantized


class LinearPacked(NamedTuple):
    """``x [..., K]`` float; ``packed``: the weight ``[N, K]`` with the scheme of inputs, as ``prepack`` made it;
    ``out_features``: N, which a tracer cannot read in ``packed``; ``out_dtype``: that of ``x`` if None."""

    x: Tensor
    packed: Tensor
    out_features: int
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None


def _dtype(call: LinearPacked) -> torch.dtype:
    return call.x.dtype if call.out_dtype is None else call.out_dtype


def plain(call: LinearPacked) -> Linear:
    """The same product of the weight in rows."""
    q = prepack.unpack(call.packed)
    return Linear(
        call.x, q.codes, q.scheme.name, q.scale, q.zero_point, q.outer_scale, call.bias,
        prepack.input_of(call.packed).name, _dtype(call),
    )  # fmt: skip


def _outputs(call: LinearPacked) -> list[Out]:
    return [((*call.x.shape[:-1], call.out_features), _dtype(call))]


def _traced(packed: Tensor) -> bool:
    """Whether there are no bytes to look at."""
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


def make_call(x: Tensor, weight: Tensor, input: str, kind: str, **more: object) -> LinearPacked:
    """A call on the reference's quantization of a float weight ``[N, K]`` (tests, benchmarks)."""
    call = linear.make_call(x, weight, input, kind, **more)
    made = (call.weight, call.scale, call.zero_point, call.outer_scale)
    q = Quantized(*made, scheme(kind), weight.shape, weight.dtype)
    return LinearPacked(x, prepack.prepack(q, scheme(input)), weight.shape[0], call.bias, call.out_dtype)


#: Weights and inputs of every kind that has a packed layout.
_WEIGHTS = (
    "int8:row", "int4:row", "int4:group32", "int4:group128", "int8:group32:bf16", "uint8:row:affine",
    "uint4:group32:affine", "uint4:group16:affine:e8m0:ceil", "int4:group7",
)  # fmt: skip
_INPUTS = ("int8:row", "uint8:row:affine", "int8:group32", "int8:tensor")


def _samples(device: str) -> Iterator[LinearPacked]:
    """Panels with less than one row, dword or block, and with more than one of each; sums that int32 does not hold."""
    shapes = cycle((((3, 33), 5), ((2, 2, 256), 70), ((7,), 1), ((20, 96), 33), ((1, 300), 64)))
    pairs = [(next(shapes), pair) for pair in product(_INPUTS, _WEIGHTS) for _ in range(2)]
    for (shape, n), (input, kind) in (*pairs, (((2, 33000), 3), ("int8:row", "int8:row"))):
        x = random_matrix(torch.Size(shape[:-1]).numel(), shape[-1], device, seed=n).reshape(shape)
        weight, bias = random_matrix(n, shape[-1], device, seed=n + 1), random_matrix(1, n, device, seed=7)[0]
        dtype = FLOATS[(n + len(kind)) % 3]
        yield make_call(x.to(dtype), weight, input, kind, bias=bias, out_dtype=dtype)


def example(m: int, n: int, k: int, input: Scheme, kind: Scheme, dtype: torch.dtype) -> LinearPacked:
    """A layer ``[n, k]`` on ``x [m, k]`` of ``dtype``, both Gaussian, for benchmarks."""
    call = linear.example(m, n, k, input.name, kind.name, dtype)
    made = (call.weight, call.scale, call.zero_point, call.outer_scale)
    q = Quantized(*made, kind, torch.Size((n, k)), dtype)
    return LinearPacked(call.x, prepack.prepack(q, input), n, None, dtype)


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    """The layers of recipes with integer weights and inputs."""
    pairs = dict.fromkeys((row.input, row.weight) for row in RECIPES.values())
    for m, (input, kind) in product(linear.BENCHED_ROWS, pairs):
        if input is not None and prepack.refusal(kind, input) is None:
            make = partial(example, m, rows, cols, input, kind, torch.float32)
            yield Workload(f"{m}x{rows}x{cols}", f"fp32 -> {input} x {kind}, packed", make)


def _cost(call: LinearPacked) -> Cost:
    m, n, k = call.x.shape[:-1].numel(), call.out_features, call.x.shape[-1]
    moved = call.x.nbytes + call.packed.nbytes + m * n * _dtype(call).itemsize
    return Cost(2 * m * n * k, moved)


def _tolerance(call: LinearPacked, numerics: Numerics) -> Tensor:
    tolerance = linear.SPECS[0].tolerance
    assert tolerance is not None
    return tolerance(plain(call), numerics)


SPECS = (OpSpec("linear_packed", LinearPacked, ("out",), _outputs, _check, _samples, _cost, _workloads, _tolerance),)
