"""The native ``scaled_mm`` and ``linear`` for CPUs: any pair of schemes and float matrices (csrc/cpu/mm.h, linear.h).

Operands are multiplied in fp32, or in bf16 or integers where every value and product is exact in them, and summed in
fp32 or exactly; so the declared numerics are those of fp32. Source: docs/numerics.md section 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.backends.native import scheme_number
from lowbit.backends.registry import Impl, Run
from lowbit.ops.linear import Linear
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.spec import Numerics

__all__ = ["IMPLS"]


def _as_it_is(data: Tensor) -> Tensor:
    return data


def _rows(data: Tensor, scheme: str | None) -> Callable[[Tensor], Tensor]:
    """What makes ``data`` fit for kernels: packed rows must be contiguous, all else may have any strides."""
    packed = scheme is not None and scaling.scheme(scheme).format.bits < 8
    return Tensor.contiguous if packed and data.stride(1) != 1 else _as_it_is


def _scaled_mm(like: ScaledMM) -> Run:
    native = torch.ops.lowbit_native.scaled_mm.default
    a_rows, b_rows = _rows(like.a, like.a_scheme), _rows(like.b, like.b_scheme)
    a_scheme, b_scheme = scheme_number(like.a_scheme), scheme_number(like.b_scheme)

    def run(outs: tuple[Tensor, ...], call: ScaledMM) -> None:
        a, b, cols, _, _, a_scale, a_zero_point, a_outer_scale, b_scale, b_zero_point, b_outer_scale, bias, _ = call
        native(
            a_rows(a), a_scheme, a_scale, a_zero_point, a_outer_scale,
            b_rows(b), b_scheme, b_scale, b_zero_point, b_outer_scale, bias, outs[0], cols,
        )  # fmt: skip

    return run


def _linear(like: Linear) -> Run:
    native = torch.ops.lowbit_native.linear.default
    x = like.x
    strided = x.dim() == 2 and (like.input is None or x.stride(1) == 1)
    x_rows = _as_it_is if strided or x.is_contiguous() else Tensor.contiguous
    weight_rows = _rows(like.weight, like.scheme)
    input_scheme, weight_scheme = scheme_number(like.input), scheme_number(like.scheme)

    def run(outs: tuple[Tensor, ...], call: Linear) -> None:
        x, weight, _, scale, zero_point, outer_scale, bias, _, _ = call
        native(
            x_rows(x), input_scheme, weight_rows(weight), weight_scheme, scale, zero_point, outer_scale, bias, outs[0]
        )

    return run


def _impl(op: str, prepare: Callable[[Any], Run]) -> Impl:
    def run(outs: tuple[Tensor, ...], call: Any) -> None:
        prepare(call)(outs, call)

    return Impl(op, "cpu", ("cpu",), 10, run, numerics=Numerics("fp32", "fp32"), prepare=prepare)


IMPLS = (_impl("scaled_mm", _scaled_mm), _impl("linear", _linear))
