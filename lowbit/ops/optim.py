"""optimizer_step: one optimizer step on a tensor, with moments as codes or floats; square_sums: exact sums of squares.

A rule is a row of ``RULES``: its moments and its factors.
Source: docs/numerics.md section 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import torch
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

#: Default scheme for the moments of ``adamw_``.
STATE_SCHEME = "fp8_e4m3:group256"

#: The most elements that kernels process at once: whole blocks of both moments, and whole bytes of their codes.
MAX_RUN = 2048

#: Formats for moments without scales.
FLOAT_STATES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

#: Bits per term of ``square_sums``. A sum of up to ``2^(62 - SQUARE_BITS)`` terms fits 64 bits.
SQUARE_BITS = 38

#: Dtype of the master weight of a 16-bit parameter: the full weight, or the 8 of 24 mantissa bits that bf16 drops.
MASTERS: dict[str, torch.dtype] = {"fp32": torch.float32, "residual": torch.int8}


@dataclass(frozen=True)
class Rule:
    """An update rule: the names of its moments (at most two) and factors, in the order of section 11."""

    name: str
    moments: tuple[str, ...]
    factors: tuple[str, ...]


#: Every rule, by name.
RULES: dict[str, Rule] = {
    row.name: row
    for row in (
        Rule(
            "adamw",
            ("exp_avg", "exp_avg_sq_root"),
            ("decay", "mix", "keep", "mix_square", "correction", "eps", "rate"),
        ),
        Rule("lion", ("exp_avg",), ("decay", "mix", "mix_kept", "rate")),
        Rule("sgd", (), ("decay", "l2", "rate")),
        Rule("momentum", ("momentum_buffer",), ("l2", "keep", "mix", "grad_share", "momentum_share", "rate")),
    )
}


class OptimizerStep(NamedTuple):
    """The arguments of ``optimizer_step``.

    Attributes:
        param, grad: Float, with the same shape.
        master: The fp32 weight from which ``param`` is rounded, or int8: the 8 of 24 bits that a bf16 ``param`` lacks.
        first, second: The moments of ``rule``: packed codes with scales in a scheme, or a float tensor if the scheme is
            the name of a float format. With stochastic rounding both moments share their random bits.
        factors: The factors of the rule, in its order. Each is rounded to fp32 once.
        param_rounding: Stochastic rounding of ``param`` uses other random bits than the moments.
    """

    param: Tensor
    grad: Tensor
    master: Tensor | None
    first: Tensor | None
    first_scale: Tensor | None
    second: Tensor | None
    second_scale: Tensor | None
    rule: str
    factors: Sequence[float]
    first_scheme: str = STATE_SCHEME
    second_scheme: str = STATE_SCHEME
    rounding: str = "nearest"
    param_rounding: str = "nearest"
    rng: Tensor | None = None
    stream: int = 0
    offset: int = 0
    pitch: int | None = None


#: The tensors of a call that a step replaces, in the order of its outputs.
REPLACED = ("param", "master", "first", "first_scale", "second", "second_scale")


class StoredMoment(NamedTuple):
    """A moment of a call: its name, scheme or float format, codes (or floats) and scales."""

    name: str
    scheme: str
    codes: Tensor
    scale: Tensor | None


def moments(call: OptimizerStep) -> list[StoredMoment]:
    """The moments of the call's rule, in its order."""
    slots = ((call.first_scheme, call.first, call.first_scale), (call.second_scheme, call.second, call.second_scale))
    return [
        StoredMoment(name, scheme, codes, scale)
        for name, (scheme, codes, scale) in zip(RULES[call.rule].moments, slots, strict=False)
        if codes is not None
    ]


def adamw_factors(
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[float, ...]:
    """The factors of the rule ``adamw``, in double precision; ``step`` counts from 1."""
    return (
        1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** -0.5, eps, lr / (1 - beta1**step)
    )  # fmt: skip


def fp32_factors(call: OptimizerStep) -> tuple[float, ...]:
    """The call's factors, each rounded to fp32."""
    return tuple(formats.fp32_value(formats.fp32_bits(float(value))) for value in call.factors)


def state_refusal(scheme: scaling.Scheme) -> str | None:
    """Why a scheme does not support moments; None if it does."""
    rows, cols = scheme.block
    if rows != 1 or cols is None or cols > MAX_RUN:
        return f"its blocks must be one row of at most {MAX_RUN} elements"
    if scheme.both_ends or scheme.global_scale:
        return "moments have neither zero points, nor signed scales, nor a global scale"
    return None


def state_run(scheme: scaling.Scheme) -> int:
    """The fewest elements that are both whole blocks of a moment and whole bytes of its codes."""
    return lcm(scheme.block[1] or 1, 8 if scheme.format.bits < 8 else 1)


def _check_rule(call: OptimizerStep) -> Rule:
    rule = RULES.get(call.rule)
    require(rule is not None, f"lowbit.optimizer_step: rule must be one of {', '.join(RULES)}, got {call.rule!r}")
    assert rule is not None
    require(
        len(call.factors) == len(rule.factors),
        f"lowbit.optimizer_step: {rule.name} takes the factors {', '.join(rule.factors)}, got {len(call.factors)}",
    )
    present = [t is not None for t in (call.first, call.second)]
    require(
        sum(present) == len(rule.moments) and present == sorted(present, reverse=True),
        f"lowbit.optimizer_step: {rule.name} keeps {', '.join(rule.moments) or 'no moment'}, got {sum(present)} "
        "moments",
    )
    return rule


def _check_master(call: OptimizerStep) -> None:
    if call.param_rounding != "nearest":
        require(
            call.param_rounding == "stochastic" and call.param.dtype == torch.bfloat16 and call.master is None,
            "lowbit.optimizer_step: param_rounding is 'nearest', or 'stochastic' for a bfloat16 param without master; "
            f"got {call.param_rounding!r} for {call.param.dtype} with{'out' if call.master is None else ''} master",
        )
    master = call.master
    if master is None:
        return
    fits = (master.dtype == torch.float32 and call.param.dtype != torch.float32) or (
        master.dtype == torch.int8 and call.param.dtype == torch.bfloat16
    )
    require(
        fits and master.shape == call.param.shape,
        "lowbit.optimizer_step: master is float32 beside a param of 16 bits, or int8 beside a bfloat16 param, of its "
        f"shape; got {master.dtype} {list(master.shape)} beside {call.param.dtype} {list(call.param.shape)}",
    )


def _check_scheme(call: OptimizerStep, moment: StoredMoment) -> int:
    """Check a moment; return ``state_run`` of its scheme, or 1 for floats."""
    op, shape = "lowbit.optimizer_step", call.param.shape
    dtype = FLOAT_STATES.get(moment.scheme)
    if dtype is not None:
        require(
            moment.codes.dtype == dtype and moment.codes.shape == shape and moment.scale is None,
            f"{op}: {moment.name} in {moment.scheme} is a {dtype} tensor {list(shape)} without scales, "
            f"got {moment.codes.dtype} {list(moment.codes.shape)}",
        )
        return 1
    scheme = scaling.scheme(moment.scheme)
    refusal = state_refusal(scheme)
    require(refusal is None, f"{op}: {moment.name} cannot be {scheme}: {refusal}; use {STATE_SCHEME}")
    require_rounding("optimizer_step", call)
    require_codes("optimizer_step", moment.name, moment.codes)
    expected = (*shape[:-1], scheme.packed_cols(shape[-1]))
    require(
        tuple(moment.codes.shape) == expected,
        f"{op}: {moment.name} of param {list(shape)} takes codes {list(expected)} in {scheme}, "
        f"got {list(moment.codes.shape)}",
    )
    require(moment.scale is not None, f"{op}: {moment.name} in {scheme} has scales, got None")
    assert moment.scale is not None
    require_scales("optimizer_step", scheme, *matrix_shape(call.param), moment.scale, None, None)
    return state_run(scheme)


def _check(call: OptimizerStep) -> None:
    _check_rule(call)
    require_float("optimizer_step", "param", call.param)
    require_float("optimizer_step", "grad", call.grad)
    require(
        call.grad.shape == call.param.shape,
        f"lowbit.optimizer_step: grad is {list(call.grad.shape)}, param is {list(call.param.shape)}",
    )
    require(
        call.param.dim() >= 1, "lowbit.optimizer_step: param needs at least one axis; give a scalar as param.reshape(1)"
    )
    _check_master(call)
    if call.param_rounding != "nearest" or call.rounding != "nearest":
        word = call.param_rounding if call.rounding == "nearest" else call.rounding
        require_rounding("optimizer_step", call._replace(rounding=word))
    stored = moments(call)
    run = lcm(*(_check_scheme(call, moment) for moment in stored))
    require(
        run <= MAX_RUN,
        f"lowbit.optimizer_step: blocks of {' and '.join(m.scheme for m in stored)}, and whole bytes, meet after "
        f"{run} elements, which may be {MAX_RUN} at most; use blocks of powers of two",
    )


def _outputs(call: OptimizerStep) -> list[Out]:
    tensors = (getattr(call, name) for name in REPLACED)
    return [((0,), torch.uint8) if t is None else (tuple(t.shape), t.dtype) for t in tensors]


def _cost(call: OptimizerStep) -> Cost:
    replaced = sum(t.nbytes for t in (getattr(call, name) for name in REPLACED) if t is not None)
    return Cost(0, 2 * replaced + call.grad.nbytes)


class SquareSums(NamedTuple):
    """``x`` float ``[rows, cols]``; ``exponents`` int32, one per row (``axis`` 0) or column (1).

    The result (int64, one per exponent e) is the sum of ``x^2`` over the row or column, in units of
    ``2^(2 e - SQUARE_BITS)``. Each term is rounded to nearest. Elements of magnitude ``2^e`` or more count as 0.
    """

    x: Tensor
    exponents: Tensor
    axis: int


def _check_square_sums(call: SquareSums) -> None:
    require_float("square_sums", "x", call.x)
    require(call.x.dim() == 2, f"lowbit.square_sums: x must be a matrix [rows, cols], got {list(call.x.shape)}")
    require(call.axis in (0, 1), f"lowbit.square_sums: axis must be 0 (rows) or 1 (columns), got {call.axis}")
    exponents, expected = call.exponents, (call.x.shape[call.axis],)
    require(
        exponents.dtype == torch.int32 and tuple(exponents.shape) == expected,
        f"lowbit.square_sums: exponents must be int32 {list(expected)}, one for each {('row', 'column')[call.axis]} "
        f"of x, got {exponents.dtype} {list(exponents.shape)}",
    )


SPECS = (
    OpSpec(
        "optimizer_step", OptimizerStep, tuple(f"new_{name}" for name in REPLACED), _outputs, _check, _cost,
        in_place={f"new_{name}": name for name in REPLACED},
    ),
    OpSpec(
        "square_sums", SquareSums, ("sums",), lambda call: [(tuple(call.exponents.shape), torch.int64)],
        _check_square_sums, lambda call: Cost(0, call.x.nbytes + 12 * call.exponents.numel()),
    ),
)  # fmt: skip
