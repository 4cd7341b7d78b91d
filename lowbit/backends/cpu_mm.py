"""The native ``scaled_mm`` and ``linear`` for CPUs: any pair of schemes and float matrices (csrc/cpu/mm.h, linear.h).

Operands are multiplied in fp32, or in bf16 or integers where every value and product is exact in them, and summed in
fp32 or exactly; so the declared numerics are those of fp32. ``cpu_bf16`` rounds fp32 operands to bf16 where torch's
float32 matmul precision allows it and the processor gains by it.  Source: docs/numerics.md section 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.backends.native import features, loading_error
from lowbit.backends.native_ops import Argument, as_it_is, hold, prepared, scheme_number
from lowbit.backends.registry import Impl, Run, matmul_precision
from lowbit.ops.linear import Linear
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.spec import Numerics
from lowbit.panels import are_panels
from lowbit.scaling import Scheme

__all__ = ["IMPLS", "reads_panels"]


def _rows(data: Tensor, scheme: str | None) -> Callable[[Any], Any]:
    """What makes ``data`` fit for kernels: packed rows must be contiguous, all else may have any strides."""
    packed = scheme is not None and scaling.scheme(scheme).format.bits < 8
    return Tensor.contiguous if packed and data.stride(1) != 1 else as_it_is


def _scaled_mm(like: ScaledMM) -> tuple[Argument, ...]:
    def side(name: str, rows: Callable[[Any], Any]) -> tuple[Argument, ...]:
        parts = (Argument(f"{name}_{part}") for part in ("scale", "zero_point", "outer_scale"))
        return Argument(name, rows), Argument(f"{name}_scheme", scheme_number), *parts

    a, b = side("a", _rows(like.a, like.a_scheme)), side("b", _rows(like.b, like.b_scheme))
    return *a, *b, Argument("bias"), Argument(0), Argument("cols")


def _linear(like: Linear) -> tuple[Argument, ...]:
    x = like.x
    strided = x.dim() == 2 and (like.input is None or x.stride(1) == 1)
    x_rows = as_it_is if strided or x.is_contiguous() else Tensor.contiguous
    weight_rows = Tensor.contiguous if are_panels(like.weight) else _rows(like.weight, like.scheme)
    return (
        Argument("x", x_rows), Argument("input", scheme_number),
        Argument("weight", weight_rows), Argument("scheme", scheme_number),
        Argument("scale"), Argument("zero_point"), Argument("outer_scale"), Argument("bias"), Argument(0),
    )  # fmt: skip


def reads_panels(weight: Scheme, input: Scheme | None, cols: int) -> bool:
    """Whether ``linear`` is not slower on panels of a weight ``[N, cols]``: products of integers, of whole blocks.

    Every instruction set reads such panels; those are named here on which it was measured (docs/measured.md).
    """
    if input is None or {weight.format.kind, input.format.kind} != {"integer"} or weight.format.bits not in (4, 8):
        return False
    block, of_input = weight.block[1], input.block[1]
    if weight.block[0] != 1 or (block is not None and (block % 8 or cols % block)) or (of_input or 8) % 8:
        return False
    if loading_error() is not None:
        return False
    isa = torch.ops.lowbit_native.isa()
    if isa == "avx2":  # 4-bit codes are multiplied as they are packed by signed bytes without a zero point
        return weight.format.bits == 8 or (input.format.signed and not input.affine)
    return isa == "avx512" and "avx512_vnni" in features() and "amx_int8" not in features()


# -- float operands rounded to bf16 ------------------------------------------------------------------------------------
#: Rows of activations up to which weights are multiplied as they are stored (kFewRows in csrc/cpu/mm_few.h).
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


def _in_bf16(prepare: Callable[[Any], Run]) -> Callable[[Any], Run]:
    def rounded(call: Any) -> Any:
        return call._replace(**{name: getattr(call, name).bfloat16() for name in _wide(call)})

    def prepared(like: Any) -> Run:
        empty = {name: torch.empty_like(getattr(like, name), dtype=torch.bfloat16) for name in _wide(like)}
        run = prepare(like._replace(**empty))
        return lambda outs, call: run(outs, rounded(call))

    return prepared


def _impl(op: str, name: str, priority: int, prepare: Callable[[Any], Run], **more: Any) -> Impl:
    def run(outs: tuple[Tensor, ...], call: Any) -> None:
        prepare(call)(outs, call)

    return Impl(op, name, ("cpu",), priority, run, prepare=prepare, **more)


_PREPARE: dict[str, Callable[[Any], Run]] = {
    "scaled_mm": lambda like: prepared("scaled_mm", _scaled_mm(like), like),
    "linear": lambda like: prepared("linear", _linear(like), like),
}
_HOLD = {"linear": lambda like, moves: hold("linear", _linear(like), like, moves)}
_EXACT = Numerics("fp32", "fp32")
_ROUNDED = {"supports": _no_bf16, "numerics": Numerics("bf16", "fp32")}

IMPLS = (
    *(_impl(op, "cpu", 10, prepare, numerics=_EXACT, hold=_HOLD.get(op)) for op, prepare in _PREPARE.items()),
    *(_impl(op, "cpu_bf16", 11, _in_bf16(prepare), **_ROUNDED) for op, prepare in _PREPARE.items()),
)
