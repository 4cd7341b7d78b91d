"""linear: a layer's forward pass in one op, from float input to float output.

With an ``input_scheme``, ``x`` is quantized first. The rest is bit-identical to ``scaled_mm``.
Source: docs/numerics.md sections 3, 5 and 9.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import reference, scaling
from lowbit.ops import matmul
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.spec import (
    FLOATS,
    Cost,
    Numerics,
    OpSpec,
    Out,
    as_rows,
    matrix_shape,
    require,
    require_codes,
    require_float,
    require_input,
    require_scales,
    stored_global,
    stored_scale,
    stored_zero,
)
from lowbit.tensor import packing
from lowbit.tensor.quantized import Scales


class Linear(NamedTuple):
    """The arguments of ``linear``.

    Attributes:
        x: ``[..., K]`` float, or 8-bit codes in ``input_scheme`` with ``input_scale``.
        weight: Stored codes ``[N, packed K]``. As in layers, floating-point scales may be integers with the same bits.
        input_scheme: The scheme in which x is quantized, with scales computed from x, or with ``input_scale``,
            ``input_zero_point`` and ``input_global_scale``.
        out_scheme: The scheme in which the result is quantized, with ``out_scale`` and ``out_zero_point``, into stored
            codes ``[..., packed N]``. ``out_dtype`` is then ignored.
    """

    x: Tensor
    weight: Tensor
    scheme: str
    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    bias: Tensor | None = None
    input_scheme: str | None = None
    out_dtype: torch.dtype = torch.bfloat16
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None
    input_global_scale: Tensor | None = None
    out_scheme: str | None = None
    out_scale: Tensor | None = None
    out_zero_point: Tensor | None = None


def scale_arguments(scales: Scales | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Scale, zero point and global scale of an operand; all None for a float operand."""
    return (None, None, None) if scales is None else scales


def weight_scales(call: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scale, zero point and global scale of the weight of a Linear or Conv, in the dtypes of its scheme."""
    zero_point = stored_zero(call.zero_point, call.scheme)
    return stored_scale(call.scale, call.scheme), zero_point, stored_global(call.global_scale)


def product(call: Linear, a: Tensor, scales: Scales | None = None) -> ScaledMM:
    """The matmul of ``a`` and the weight. ``a``: the rows of x, or with ``input_scheme`` their codes."""
    return ScaledMM(
        a, call.weight, call.x.shape[-1], call.input_scheme, call.scheme, *scale_arguments(scales),
        *weight_scales(call), call.bias,
        call.out_dtype if call.out_scheme is None else torch.float32,
    )  # fmt: skip


def input_scales(call: Any) -> Scales | None:
    """The given scales for ``x`` of a Linear or Conv, or None."""
    if call.input_scale is None:
        return None
    return Scales(call.input_scale, call.input_zero_point, call.input_global_scale)


def quantized(call: Linear) -> ScaledMM:
    """The matmul, with ``x`` quantized by the reference."""
    x = as_rows(call.x)
    if call.input_scheme is None:
        return product(call, x)
    scheme = scaling.scheme(call.input_scheme)
    scales = input_scales(call)
    if scales is not None and call.x.dtype == torch.uint8:
        return product(call, x, scales)
    if scales is not None:
        codes = reference.quantize_static(x, scheme, *scales, None)
    else:
        global_scale = reference.global_scale(x, scheme) if scheme.global_scale else None
        codes, scale, zero = reference.quantize(x, scheme, global_scale, None)
        scales = Scales(scale, zero, global_scale)
    return product(call, packing.pack(codes, scheme.format.bits), scales)


def _outputs(call: Linear) -> list[Out]:
    cols = call.weight.shape[0]
    if call.out_scheme is not None:
        return [((*call.x.shape[:-1], scaling.scheme(call.out_scheme).packed_cols(cols)), torch.uint8)]
    return [((*call.x.shape[:-1], cols), call.out_dtype)]


def _check(call: Linear) -> None:
    require_input("linear", call.x, call.input_scheme, call.input_scale)
    require(call.x.dim() >= 1, "lowbit.linear: x needs at least one axis")
    require_codes("linear", "weight", call.weight)
    scheme, cols = scaling.scheme(call.scheme), call.x.shape[-1]
    if call.weight.dim() != 2 or call.weight.shape[1] != scheme.packed_cols(cols):
        raise ValueError(
            f"lowbit.linear: x {list(call.x.shape)} and the weight must end in the same K; in {scheme} it must then be "
            f"[out features, {scheme.packed_cols(cols)}] bytes, got {list(call.weight.shape)}"
        )
    rows = call.weight.shape[0]
    scales = weight_scales(call)
    require_scales("linear", scheme, rows, cols, *scales)
    if call.out_dtype not in FLOATS:
        raise ValueError(f"lowbit.linear: out_dtype must be a 16- or 32-bit float, got {call.out_dtype}")
    if call.bias is not None:
        require_float("linear", "bias", call.bias)
        if tuple(call.bias.shape) != (rows,):
            raise ValueError(f"lowbit.linear: bias must be [{rows}], got {list(call.bias.shape)}")
    _check_scales(call, rows)


def _check_scales(call: Linear, out_cols: int) -> None:
    """Check that scales come with a scheme and fit it."""
    scales = (call.input_scale, call.input_zero_point, call.input_global_scale)
    scheme = None if call.input_scheme is None else scaling.scheme(call.input_scheme)
    if scheme is not None and call.input_scale is not None:
        require_scales("linear", scheme, *matrix_shape(call.x), call.input_scale, *scales[1:])
    else:
        require(
            all(scale is None for scale in scales),
            "lowbit.linear: input_scale, input_zero_point and input_global_scale are those of an input_scheme and come "
            f"together; got input_scheme={call.input_scheme!r} and "
            f"input_scale={'given' if call.input_scale is not None else None}",
        )
    if call.out_scheme is None:
        require(
            call.out_scale is None and call.out_zero_point is None,
            "lowbit.linear: out_scale and out_zero_point are those of an out_scheme; give that too",
        )
        return
    scheme = scaling.scheme(call.out_scheme)
    require(
        call.out_scale is not None and not scheme.global_scale,
        f"lowbit.linear: a result in {scheme} needs a given out_scale, and a scheme without a global scale; for scales "
        "made of the result, quantize what linear returns",
    )
    require_scales("linear", scheme, matrix_shape(call.x)[0], out_cols, call.out_scale, call.out_zero_point, None)  # type: ignore[arg-type]


def _cost(call: Linear) -> Cost:
    m, n, k = call.x.shape[:-1].numel(), call.weight.shape[0], call.x.shape[-1]
    moved = sum(t.numel() * t.element_size() for t in call if isinstance(t, Tensor))
    return Cost(2 * m * n * k, moved + m * n * call.out_dtype.itemsize)


def _tolerance(call: Linear, numerics: Numerics) -> Tensor:
    bound = matmul.tolerance(quantized(call), numerics)
    return bound.reshape(_outputs(call)[0][0]) if bound.dim() else bound


SPECS = (OpSpec("linear", Linear, ("out",), _outputs, _check, _cost, _tolerance),)
