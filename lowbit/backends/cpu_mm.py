"""Limits of the native CPU convolution, and ``cpu_bf16``: native CPU matmuls with operands rounded to bf16.

The native ``scaled_mm``, ``linear`` and ``conv`` (csrc/cpu) multiply in fp32, or in bf16 or integers if all values and
products are exact there. They sum in fp32 or exactly, so the declared numerics are fp32. ``cpu_bf16`` rounds fp32
operands to bf16 if torch's float32 matmul precision allows it and the processor is faster with it.
Source: docs/numerics.md section 9.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.backends.native import features
from lowbit.backends.registry import Impl, Run, matmul_precision
from lowbit.ops.conv import Conv, spans_tensor
from lowbit.ops.linear import Linear
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.spec import Numerics

__all__ = ["no_conv", "rounding"]


def no_conv(call: Conv) -> str | None:
    """Why csrc/cpu/conv does not support a call; ``composed.conv`` does then."""
    tall = scaling.scheme(call.scheme).block[0]
    if call.groups > 1 and tall is not None and call.weight.shape[0] // call.groups % tall:
        return f"groups of the weight share scales of {call.scheme}"
    if call.input_scheme is None:
        return None
    scheme = scaling.scheme(call.input_scheme)
    if spans_tensor(scheme):
        return None if scheme.format.bits == 8 else f"it quantizes x once to codes of 8 bits, not to {scheme}"
    return None if scheme.block[0] == 1 else f"patches share scales of {scheme}"


# -- float operands rounded to bf16 ------------------------------------------------------------------------------------
#: The most activation rows for which weights are multiplied as stored (kGemvRows in csrc/cpu/matmul/gemv.h).
_FEW_ROWS = 16


def bf16_products(rows: int) -> bool:
    """Whether the selected kernels multiply ``rows`` rows in bf16 directly, which is faster than fp32."""
    return bool(torch.ops.lowbit_native.spin(1, 1)) and (rows > _FEW_ROWS or "avx512_vbmi" in features())


def _operands(call: ScaledMM | Linear) -> dict[str, tuple[Tensor, str | None]]:
    """Both operands and their schemes, by argument name."""
    if isinstance(call, Linear):
        return {"x": (call.x, call.input_scheme), "weight": (call.weight, call.scheme)}
    return {"a": (call.a, call.a_scheme), "b": (call.b, call.b_scheme)}


def _wide(call: ScaledMM | Linear) -> list[str]:
    """Names of the operands that are rounded."""
    return [name for name, (data, scheme) in _operands(call).items() if scheme is None and data.dtype != torch.bfloat16]


def _no_bf16(call: ScaledMM | Linear) -> str | None:
    if not _wide(call):
        return "it rounds fp32 and fp16 operands to bf16, and the call has none"
    if matmul_precision() != "medium":
        return "rounding operands to bf16 needs torch.set_float32_matmul_precision('medium')"
    schemes = [scaling.scheme(text) for _, text in _operands(call).values() if text is not None]
    for scheme in schemes:
        if not scheme.format.in_bf16:
            return f"the values of {scheme.format} are not exact in bf16, so it would not be faster"
    rows = call[0].shape[:-1].numel()
    if rows <= _FEW_ROWS and any(s.affine or (s.format.kind, s.format.bits) == ("integer", 8) for s in schemes):
        return "with so few rows these weights are multiplied in fp32, so it would not be faster"
    return None if bf16_products(rows) else f"this processor has no bf16 matmul for {rows} rows"


def _in_bf16(run: Run, outs: tuple[Tensor, ...], call: ScaledMM | Linear) -> None:
    run(outs, call._replace(**{name: getattr(call, name).bfloat16() for name in _wide(call)}))


def rounding(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``cpu_bf16``: the matmuls among ``rows``, with operands rounded to bf16."""
    numerics = Numerics("bf16", "fp32")
    return tuple(
        replace(row, name="cpu_bf16", run=partial(_in_bf16, row.run), supports=_no_bf16, numerics=numerics)
        for row in rows
        if row.op in ("scaled_mm", "linear")
    )
