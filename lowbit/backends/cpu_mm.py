"""The native ``scaled_mm``, ``linear`` and ``conv`` for CPUs: any pair of schemes and float matrices (csrc/cpu).

Operands are multiplied in fp32, or in bf16 or integers where every value and product is exact in them, and summed in
fp32 or exactly; so the declared numerics are those of fp32. ``cpu_bf16`` rounds fp32 operands to bf16 where torch's
float32 matmul precision allows it and the processor gains by it.  Source: docs/numerics.md section 9.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.backends.native import features
from lowbit.backends.native_ops import RUN, scheme_number
from lowbit.backends.registry import Impl, Run, matmul_precision
from lowbit.ops import matmul
from lowbit.ops.conv import Conv, spans_tensor
from lowbit.ops.linear import Linear, Scales, given_scales, product
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.packed import LinearPacked
from lowbit.ops.quantize import QuantizeStatic
from lowbit.ops.spec import Numerics, as_rows

__all__ = ["IMPLS"]


def _rows(data: Tensor, scheme: str | None) -> Tensor:
    """``data`` as kernels take it: packed rows must be contiguous, all else may have any strides."""
    packed = scheme is not None and scaling.scheme(scheme).format.bits < 8
    return data.contiguous() if packed and data.stride(1) != 1 else data


def _scaled_mm(outs: tuple[Tensor, ...], call: ScaledMM) -> None:
    operands: list[Any] = []
    for side in matmul.sides(call):
        scales = (side.scale, side.zero_point, side.global_scale)
        operands += [_rows(side.data, side.scheme), scheme_number(side.scheme), *scales]
    torch.ops.lowbit_native.scaled_mm(*operands, call.bias, outs[0], call.cols)


def _x_rows(x: Tensor, quantized: bool) -> Tensor:
    return x if x.dim() == 2 and (not quantized or x.stride(1) == 1) else x.contiguous()


def _linear(outs: tuple[Tensor, ...], call: Linear) -> None:
    if call.x.dtype == torch.uint8:
        return _linear_of_codes(outs, call)
    given = (call.input_scale, call.input_zero_point, call.input_global_scale)
    torch.ops.lowbit_native.linear(
        _x_rows(call.x, call.input is not None), scheme_number(call.input),
        *(None if t is None else t.contiguous() for t in given),
        _rows(call.weight, call.scheme), scheme_number(call.scheme), call.scale, call.zero_point, call.global_scale,
        call.bias, scheme_number(call.out_scheme),
        *(None if t is None else t.contiguous() for t in (call.out_scale, call.out_zero_point)), outs[0],
    )  # fmt: skip


def _linear_of_codes(outs: tuple[Tensor, ...], call: Linear) -> None:
    """The product alone; its result becomes codes as a whole."""
    x, out = as_rows(call.x), as_rows(outs[0])
    y = out if call.out_scheme is None else torch.empty((x.shape[0], call.weight.shape[0]))
    _scaled_mm((y,), product(call, x, given_scales(call) or Scales()))
    if call.out_scheme is not None:
        assert call.out_scale is not None
        static = QuantizeStatic(y, call.out_scheme, call.out_scale, call.out_zero_point)
        RUN["quantize_static"]((out,), static)


def _linear_packed(outs: tuple[Tensor, ...], call: LinearPacked) -> None:
    torch.ops.lowbit_native.linear_packed(_x_rows(call.x, True), call.packed.contiguous(), call.bias, outs[0])


def _conv(outs: tuple[Tensor, ...], call: Conv) -> None:
    given = (call.input_scale, call.input_zero_point, call.input_global_scale)
    torch.ops.lowbit_native.conv(
        call.x.contiguous(), scheme_number(call.input), *(None if t is None else t.contiguous() for t in given),
        _rows(call.weight, call.scheme), scheme_number(call.scheme), call.scale, call.zero_point, call.global_scale,
        call.bias, scheme_number(call.out_scheme),
        *(None if t is None else t.contiguous() for t in (call.out_scale, call.out_zero_point)), outs[0],
        *(list(numbers) for numbers in (call.kernel_size, call.stride, call.padding, call.dilation)), call.groups,
    )  # fmt: skip


def _no_conv(call: Conv) -> str | None:
    """What csrc/cpu/conv leaves to patches that Python lays out some at a time."""
    tall = scaling.scheme(call.scheme).block[0]
    if call.groups > 1 and tall is not None and call.weight.shape[0] // call.groups % tall:
        return f"groups of the weight share scales of {call.scheme}"
    if call.input is None:
        return None
    scheme = scaling.scheme(call.input)
    if spans_tensor(scheme):
        return None if scheme.format.bits == 8 else f"it quantizes x once to codes of 8 bits, not to {scheme}"
    return None if scheme.block[0] == 1 else f"patches share scales of {scheme}"


# -- float operands rounded to bf16 ------------------------------------------------------------------------------------
#: Rows of activations up to which weights are multiplied as they are stored (kGemvRows in csrc/cpu/matmul/gemv.h).
_FEW_ROWS = 16


def bf16_products(rows: int) -> bool:
    """Whether the kernels in use multiply ``rows`` rows of bf16 as such, and so faster than fp32."""
    return bool(torch.ops.lowbit_native.spin(1, 1)) and (rows > _FEW_ROWS or "avx512_vbmi" in features())


def _operands(call: ScaledMM | Linear) -> dict[str, tuple[Tensor, str | None]]:
    """Both operands and their schemes, by the argument that holds them."""
    if isinstance(call, Linear):
        return {"x": (call.x, call.input), "weight": (call.weight, call.scheme)}
    return {"a": (call.a, call.a_scheme), "b": (call.b, call.b_scheme)}


def _wide(call: ScaledMM | Linear) -> list[str]:
    """The operands that would be rounded."""
    return [name for name, (data, scheme) in _operands(call).items() if scheme is None and data.dtype != torch.bfloat16]


def _no_bf16(call: ScaledMM | Linear) -> str | None:
    if not _wide(call):
        return "it rounds fp32 and fp16 operands to bf16, and there is none"
    if matmul_precision() != "medium":
        return "rounding operands to bf16 takes torch.set_float32_matmul_precision('medium')"
    schemes = [scaling.scheme(text) for _, text in _operands(call).values() if text is not None]
    for scheme in schemes:
        if not scheme.format.in_bf16:
            return f"the values of {scheme.format} are not exact in bf16, so nothing would be gained"
    rows = call[0].shape[:-1].numel()
    if rows <= _FEW_ROWS and any(s.affine or (s.format.kind, s.format.bits) == ("integer", 8) for s in schemes):
        return "with so few rows these weights are multiplied by fp32, so nothing would be gained"
    return None if bf16_products(rows) else f"this processor has no products of bf16 numbers for {rows} rows"


def _in_bf16(run: Run) -> Run:
    def rounded(outs: tuple[Tensor, ...], call: Any) -> None:
        run(outs, call._replace(**{name: getattr(call, name).bfloat16() for name in _wide(call)}))

    return rounded


_RUN: dict[str, Run] = {"scaled_mm": _scaled_mm, "linear": _linear}
_EXACT = Numerics("fp32", "fp32")
_ROUNDED = Numerics("bf16", "fp32")

IMPLS = (
    *(Impl(op, "cpu", ("cpu",), 10, run, numerics=_EXACT) for op, run in _RUN.items()),
    *(Impl(op, "cpu_bf16", ("cpu",), 11, _in_bf16(run), _no_bf16, _ROUNDED) for op, run in _RUN.items()),
    Impl("conv", "cpu", ("cpu",), 10, _conv, _no_conv, _EXACT),
    Impl("linear_packed", "cpu", ("cpu",), 10, _linear_packed, numerics=_EXACT),
)
