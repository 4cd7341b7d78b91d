"""Calls of the optimizers' steps and sums: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from lowbit import reference, scaling
from lowbit.ops.optim import FLOAT_STATES, RULES, STATE_SCHEME, OptimizerStep, SquareSums
from lowbit.ops.spec import FLOATS, as_rows, dtype_name
from lowbit.tensor import packing
from lowbit.testing.inputs import Workload, large_matrix, random_matrix, sample_matrices, specials


def _stored(moment: Tensor, text: str) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of a moment that is given as numbers; or the numbers in a float format."""
    if text in FLOAT_STATES:
        return moment.to(FLOAT_STATES[text]), None
    scheme = scaling.scheme(text)
    codes, scale, _ = reference.quantize(as_rows(moment), scheme, None, None)
    return packing.pack(codes, scheme.format.bits).reshape(*moment.shape[:-1], -1), scale


#: Schemes of both moments: narrow codes, codebooks, every format of scales, blocks that vectors do not divide, floats.
SCHEMES = (
    (STATE_SCHEME, STATE_SCHEME), ("fp8_e5m2:group32", "mxfp8"), ("int8:group64:bf16", "fp8_e4m3:group7"),
    ("mxfp4", "mxfp6:ceil"), ("fp6_e3m2:group96:fp16", "int4:group33"), ("nf4", "fp8_e4m3:group2048"),
    ("dynamic8:group256", "udynamic8:group64:bf16"), ("dynamic4:group128", "ulog4:group128"),
    ("fp32", "fp32"), ("bf16", "bf16"), ("mxfp8", "bf16"), ("fp8_e4m3:group128", "fp32"),
)  # fmt: skip

#: Weights: what a parameter is, its master, and how it is rounded.
WEIGHTS: tuple[tuple[torch.dtype, str | None, str], ...] = (
    (torch.float32, None, "nearest"), (torch.bfloat16, None, "nearest"), (torch.float16, None, "nearest"),
    (torch.bfloat16, None, "stochastic"), (torch.bfloat16, "fp32", "nearest"), (torch.float16, "fp32", "nearest"),
    (torch.bfloat16, "residual", "nearest"),
)  # fmt: skip

#: One element, few, rows that nothing divides, rows longer than a run, a convolution's weight, and that flat.
SHAPES: tuple[tuple[int, ...], ...] = (
    (1, 1),
    (1,),
    (1, 5),
    (3, 130),
    (2, 2, 2100),
    (9, 512),
    (8, 5, 3, 3),
    (32 * 16 * 9,),
    (5000,),
)

#: How moments are rounded, and whether the pitch of the random bits is given.
ROUNDED = (("nearest", 1000), ("stochastic", 1000), ("stochastic", None))

#: Factors of every rule, in its order.
_FACTORS = {
    "adamw": (0.9999, 0.1, 0.99, 0.01, 1.75, 1e-8, 2e-3),
    "lion": (0.9999, 0.1, 0.01, 1e-3),
    "sgd": (0.999, 0.01, 0.1),
    "momentum": (0.01, 0.9, 1.0, 1.0, 0.9, 0.1),
}

#: What samples differ in: the rule, and a row of each table.
AXES: tuple[Sequence[Any], ...] = (tuple(RULES), SCHEMES, WEIGHTS, FLOATS, SHAPES, ROUNDED)

#: The arguments after the schemes, as they are unless another is asked for.
_REST = tuple(OptimizerStep._field_defaults[name] for name in OptimizerStep._fields[11:])


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Every two positions of a row, each with its axis."""
    return set(combinations(enumerate(row), 2))


@cache
def covering() -> tuple[tuple[int, ...], ...]:
    """Rows of positions on ``AXES`` in which every two positions of different axes meet, found greedily."""
    sizes = [len(axis) for axis in AXES]
    places = [[(axis, at) for at in range(size)] for axis, size in enumerate(sizes)]
    left = {pair for two in combinations(places, 2) for pair in product(*two)}
    rows = []
    while left:
        (axis, at), (other, beside) = min(left)
        row: dict[int, int] = {axis: at, other: beside}
        for free in sorted(set(range(len(sizes))) - set(row), key=lambda i: -sizes[i]):
            met = [
                sum(tuple(sorted(((free, i), pair))) in left for pair in row.items()) for i in range(sizes[free])
            ]  # fmt: skip
            row[free] = met.index(max(met))
        rows.append(tuple(row[i] for i in range(len(sizes))))
        left -= _pairs(rows[-1])
    return tuple(rows)


def _master(param: Tensor, kind: str | None) -> tuple[Tensor, Tensor | None]:
    """A parameter of 16 bits with the master of that kind."""
    if kind is None:
        return param, None
    wide = param.float() * 1.001
    return reference.split24(wide) if kind == "residual" else (wide.to(param.dtype), wide)


def sample(rule: str, numbers: list[Tensor], schemes: tuple[str, str], weight: Any, grad_dtype: torch.dtype) -> Any:
    """A call on a parameter, a gradient and a moment that are given as numbers; ``weight``: a row of ``WEIGHTS``."""
    param, grad, avg = numbers
    kind, master_kind, param_rounding = weight
    param, master = _master(param.to(kind), master_kind)
    kept = [_stored(m, s) for m, s in zip((avg, (avg * 1.5).abs()), schemes, strict=True)]
    parts = [part for moment in kept[: len(RULES[rule].moments)] for part in moment] + [None] * 4
    call = OptimizerStep._make(
        (param, grad.to(grad_dtype), master, *parts[:4], rule, _FACTORS[rule], *schemes, *_REST)
    )  # fmt: skip
    return call._replace(param_rounding=param_rounding, rng=torch.tensor([7, 3]), stream=11, offset=5)


def _samples(device: str) -> Iterator[OptimizerStep]:
    for seed, row in enumerate(covering()):
        rule, schemes, weight, grad_dtype, shape, (rounding, pitch) = (
            axis[i] for axis, i in zip(AXES, row, strict=True)
        )  # fmt: skip
        rows = torch.Size(shape[:-1]).numel()
        numbers = [random_matrix(rows, shape[-1], seed=10 * seed + j).reshape(shape) for j in range(3)]
        if shape == (3, 130):  # Inf and NaN show in its element of the parameter, and in its block of the moments
            numbers[1][1, : specials().numel()] = specials()[: shape[-1]]
        call = sample(rule, numbers, schemes, weight, grad_dtype)._replace(rounding=rounding, pitch=pitch)
        yield OptimizerStep._make(x.to(device) if isinstance(x, Tensor) else x for x in call)


#: What benchmarks measure: the rule, what both moments are kept in, how they are rounded, the weight.
_MEASURED = (
    *(("adamw", STATE_SCHEME, rounding, WEIGHTS[i]) for i in (0, 1) for rounding in ("nearest", "stochastic")),
    ("adamw", "fp32", "nearest", WEIGHTS[0]), ("adamw", "bf16", "stochastic", WEIGHTS[0]),
    ("adamw", STATE_SCHEME, "stochastic", WEIGHTS[3]), ("adamw", STATE_SCHEME, "stochastic", WEIGHTS[4]),
    ("adamw", STATE_SCHEME, "stochastic", WEIGHTS[6]),
    *((rule, STATE_SCHEME, "stochastic", WEIGHTS[0]) for rule in ("lion", "momentum")),
    ("sgd", "fp32", "nearest", WEIGHTS[0]),
)  # fmt: skip


def _subject(rule: str, moments: str, weight: Any) -> str:
    kind, master, rounding = weight
    told = ("", f", master {master}")[master is not None] + ("", f", {rounding} param")[rounding != "nearest"]
    return f"{rule} {dtype_name(kind)}" + (f", moments {moments}" if RULES[rule].moments else "") + told


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    def make(rule: str, moments: str, rounding: str, weight: Any) -> OptimizerStep:
        grad = large_matrix(rows, cols, torch.float32)
        param, master = _master(grad.to(weight[0]), weight[1])
        kept: list[Tensor | None] = []
        for moment in (grad, grad.abs())[: len(RULES[rule].moments)]:
            float_dtype = FLOAT_STATES.get(moments)
            kept += [moment.to(float_dtype, copy=True), None] if float_dtype else _codes(moment, moments)
        kept += [None] * (4 - len(kept))
        grad = grad.to(weight[0], copy=True)
        call = OptimizerStep._make((param, grad, master, *kept, rule, _FACTORS[rule], moments, moments, *_REST))
        return call._replace(rounding=rounding, param_rounding=weight[2], rng=torch.tensor([7, 1]))

    for rule, moments, rounding, weight in _MEASURED:
        yield Workload(rounding, _subject(rule, moments, weight), partial(make, rule, moments, rounding, weight))


def _codes(moment: Tensor, scheme: str) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = torch.ops.lowbit.quantize(moment, scheme)[:2]
    return made


def _exponents(x: Tensor, axis: int) -> Tensor:
    """Of the largest finite magnitude of each row (0) or column (1): all finite elements are below."""
    return torch.frexp(x.float().nan_to_num(0.0, 0.0, 0.0).abs().amax(1 - axis))[1]


def _square_sums_samples(device: str) -> Iterator[SquareSums]:
    """Exponents as they should be; some by which elements are too large, and of any size."""
    for x in (*sample_matrices(device), random_matrix(70, 2100, device, seed=8, extremes=True)):
        matrix = as_rows(x)
        for axis in (0, 1):
            exponents = _exponents(matrix, axis)
            yield SquareSums(matrix, exponents, axis)
            odd = exponents.clone()
            odd[::3] -= 2
            odd[1::4] = torch.iinfo(torch.int32).max
            odd[2::4] = torch.iinfo(torch.int32).min
            odd[3::4] += 19
            yield SquareSums(matrix, odd, axis)


def _square_sums_workloads(rows: int, cols: int) -> Iterator[Workload]:
    def make(dtype: torch.dtype, axis: int) -> SquareSums:
        x = large_matrix(rows, cols, dtype)
        return SquareSums(x, _exponents(x, axis), axis)

    for dtype, (axis, lines) in product(FLOATS[:2], enumerate(("rows", "columns"))):
        yield Workload("", f"{lines} of {dtype_name(dtype)}", partial(make, dtype, axis))


SAMPLES = {"optimizer_step": _samples, "square_sums": _square_sums_samples}
WORKLOADS = {"optimizer_step": _workloads, "square_sums": _square_sums_workloads}
