"""The native ``scaled_mm`` for CPUs: any pair of schemes and float matrices (csrc/cpu/mm.h).

Operands are multiplied in fp32, or in bf16 or integers where every value and product is exact in them, and summed in
fp32 or exactly; so the declared numerics are those of fp32. Source: docs/numerics.md section 9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.backends.native import scheme_number
from lowbit.backends.registry import Impl
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.spec import Numerics

__all__ = ["IMPLS"]


def _whole_rows(data: Tensor, scheme: str | None) -> Tensor:
    """Packed rows must be contiguous; 8-bit codes and floats may have any strides."""
    packed = scheme is not None and scaling.scheme(scheme).format.bits < 8
    return data.contiguous() if packed and data.stride(1) != 1 else data


def _run(outs: tuple[Tensor, ...], call: ScaledMM) -> None:
    torch.ops.lowbit_native.scaled_mm(
        _whole_rows(call.a, call.a_scheme), scheme_number(call.a_scheme),
        call.a_scale, call.a_zero_point, call.a_outer_scale,
        _whole_rows(call.b, call.b_scheme), scheme_number(call.b_scheme),
        call.b_scale, call.b_zero_point, call.b_outer_scale,
        call.bias, outs[0], call.cols,
    )  # fmt: skip


IMPLS = (Impl("scaled_mm", "cpu", ("cpu",), 10, _run, numerics=Numerics("fp32", "fp32")),)
