"""adamw: one step of AdamW whose two moments are kept as codes with scales.

Stored are the first moment and the *root* of the second one: a root spans half the binades, so that 8 bits of floating
point hold what a block's gradients differ by.  Source: docs/numerics.md section 11.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import NamedTuple

from torch import Tensor

from lowbit import formats, scaling
from lowbit.ops.spec import (
    Cost,
    OpSpec,
    Out,
    matrix_shape,
    require,
    require_codes,
    require_float,
    require_rounding,
    require_scales,
)

#: What the moments are kept in unless another scheme is asked for.
STATE_SCHEME = "fp8_e4m3:group256"

#: Elements that kernels hold at once at most: whole blocks of both moments, and whole bytes of their codes.
MAX_RUN = 2048


class AdamW(NamedTuple):
    """``param`` and ``grad`` float, of one shape; the moments: packed codes and scales of that shape in their schemes.

    ``step`` counts from 1. With stochastic rounding both moments share their random bits.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq_root: Tensor
    exp_avg_sq_root_scale: Tensor
    scheme: str = STATE_SCHEME
    rms_scheme: str = STATE_SCHEME
    rounding: str = "nearest"
    step: int = 1
    rng: Tensor | None = None
    stream: int = 0
    offset: int = 0
    pitch: int | None = None
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2


class Factors(NamedTuple):
    """What a step multiplies with, each rounded to fp32 once."""

    decay: float
    mix: float
    keep: float
    mix_square: float
    correction: float
    eps: float
    rate: float


def factors(call: AdamW) -> Factors:
    """From the hyperparameters and the step, in double precision. Raises ValueError for numbers that make none."""
    return _factors(call.step, call.lr, call.beta1, call.beta2, call.eps, call.weight_decay)


@lru_cache
def _factors(step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Factors:
    require(step >= 1, f"lowbit.adamw: step counts from 1, got {step}")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        require(value >= 0, f"lowbit.adamw: {name} must be 0 or more, got {value}")
    require(0 <= beta1 < 1 and 0 <= beta2 < 1, f"lowbit.adamw: betas must be in [0, 1), got {(beta1, beta2)}")
    exact = (
        1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** -0.5, eps, lr / (1 - beta1**step)
    )  # fmt: skip
    return Factors(*(formats.fp32_value(formats.fp32_bits(value)) for value in exact))


def state_refusal(scheme: scaling.Scheme) -> str | None:
    """Why moments cannot be kept in a scheme; None where they can."""
    rows, cols = scheme.block
    if rows != 1 or cols is None or cols > MAX_RUN:
        return f"its blocks must be one row of at most {MAX_RUN} elements"
    if scheme.both_ends or scheme.global_scale:
        return "moments have neither zero points, nor signed scales, nor a global scale"
    return None


def _check(call: AdamW) -> None:
    require_float("adamw", "param", call.param)
    require_float("adamw", "grad", call.grad)
    require(
        call.grad.shape == call.param.shape,
        f"lowbit.adamw: grad is {list(call.grad.shape)}, param is {list(call.param.shape)}",
    )
    require(call.param.dim() >= 1, "lowbit.adamw: param needs at least one axis; give a scalar as param.reshape(1)")
    moments = (
        ("exp_avg", call.scheme, call.exp_avg, call.exp_avg_scale),
        ("exp_avg_sq_root", call.rms_scheme, call.exp_avg_sq_root, call.exp_avg_sq_root_scale),
    )
    for name, text, codes, scale in moments:
        scheme = scaling.scheme(text)
        refusal = state_refusal(scheme)
        require(refusal is None, f"lowbit.adamw: {name} cannot be {scheme}: {refusal}; use {STATE_SCHEME}")
        require_rounding("adamw", call, scheme.format)
        require_codes("adamw", name, codes)
        expected = (*call.param.shape[:-1], scheme.packed_cols(call.param.shape[-1]))
        require(
            tuple(codes.shape) == expected,
            f"lowbit.adamw: {name} of param {list(call.param.shape)} takes codes {list(expected)} in {scheme}, "
            f"got {list(codes.shape)}",
        )
        require_scales("adamw", scheme, *matrix_shape(call.param), scale, None, None)
    schemes = [scaling.scheme(text) for text in (call.scheme, call.rms_scheme)]
    together = lcm(*(s.block[1] or 1 for s in schemes), 8 if min(s.format.bits for s in schemes) < 8 else 1)
    require(
        together <= MAX_RUN,
        f"lowbit.adamw: blocks of {call.scheme} and {call.rms_scheme}, and whole bytes, meet after {together} "
        f"elements, which may be {MAX_RUN} at most; use blocks of powers of two",
    )


def _outputs(call: AdamW) -> list[Out]:
    return [(tuple(t.shape), t.dtype) for t in (call.param, *call[2:6])]


def _cost(call: AdamW) -> Cost:
    sizes = [t.numel() * t.element_size() for t in call[:6]]
    return Cost(0, 2 * sum(sizes) - sizes[1])


SPECS = (
    OpSpec(
        "adamw", AdamW,
        ("new_param", "new_exp_avg", "new_exp_avg_scale", "new_exp_avg_sq_root", "new_exp_avg_sq_root_scale"),
        _outputs, _check, _cost,
        in_place={f"new_{name}": name for name in ("param", *AdamW._fields[2:6])},
    ),
)  # fmt: skip
