"""Calls of the optimizers' steps: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from lowbit import reference, scaling
from lowbit.ops.optim import FLOAT_STATES, MASTERS, RULES, STATE_SCHEME, OptimizerStep
from lowbit.ops.spec import FLOATS, as_rows, dtype_name
from lowbit.tensor import packing
from lowbit.testing.inputs import Workload, large_matrix, random_matrix, specials


def _stored(moment: Tensor, text: str) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of a moment that is given as numbers; or the numbers in a float format."""
    if text in FLOAT_STATES:
        return moment.to(FLOAT_STATES[text]), None
    scheme = scaling.scheme(text)
    codes, scale, _ = reference.quantize(as_rows(moment), scheme, None, None)
    return packing.pack(codes, scheme.format.bits).reshape(*moment.shape[:-1], -1), scale


#: Schemes of both moments: narrow codes, codebooks, every format of scales, blocks that vectors do not divide, floats.
_SAMPLED = (
    (STATE_SCHEME, STATE_SCHEME), ("fp8_e5m2:group32", "mxfp8"), ("int8:group64:bf16", "fp8_e4m3:group7"),
    ("mxfp4", "mxfp6:ceil"), ("fp6_e3m2:group96:fp16", "int4:group33"), ("nf4", "fp8_e4m3:group2048"),
    ("dynamic8:group256", "udynamic8:group64:bf16"), ("dynamic4:group128", "ulog4:group128"),
    ("fp32", "fp32"), ("bf16", "bf16"), ("mxfp8", "bf16"),
)  # fmt: skip

#: Factors of every rule, in its order.
_FACTORS = {
    "adamw": (0.9999, 0.1, 0.99, 0.01, 1.75, 1e-8, 2e-3),
    "lion": (0.9999, 0.1, 0.01, 1e-3),
    "sgd": (0.999, 0.01, 0.1),
    "momentum": (0.01, 0.9, 1.0, 1.0, 0.9, 0.1),
    "nesterov": (0.05, 0.95),
}


#: The arguments after the schemes, as they are unless another is asked for.
_REST = tuple(OptimizerStep._field_defaults[name] for name in OptimizerStep._fields[11:])


def _master(param: Tensor, kind: str | None) -> tuple[Tensor, Tensor | None]:
    """A parameter with the master of that kind."""
    if kind is None or param.dtype == torch.float32:
        return param, None
    wide = param.float() * 1.001
    if kind == "fp32":
        return wide.to(param.dtype), wide
    return reference.split24(wide) if param.dtype == torch.bfloat16 else (param, None)


def _samples(device: str) -> Iterator[OptimizerStep]:
    dtypes, rules, masters = cycle(product(FLOATS, FLOATS)), cycle(RULES.values()), cycle((None, *MASTERS))
    random: dict[str, Any] = {
        "rng": torch.tensor([7, 3], device=device), "stream": 11, "offset": 5, "pitch": 1000,
    }  # fmt: skip
    for index, schemes in enumerate(_SAMPLED):
        for shape in ((1, 5), (3, 130), (2, 2, 2100), (9, 512), (1, 1)):
            rows = torch.Size(shape[:-1]).numel()
            numbers = [random_matrix(rows, shape[-1], seed=10 * index + j).reshape(shape) for j in range(3)]
            param, grad, avg = numbers
            if shape == (3, 130):  # Inf and NaN show in its element of the parameter, and in its block of the moments
                grad[1, : specials().numel()] = specials()[: shape[-1]]
            kind, grad_kind = next(dtypes)
            for rule in (RULES["adamw"], next(rules)):
                weight, master = _master(param.to(kind), next(masters))
                kept = [_stored(m, s) for m, s in zip((avg, (avg * 1.5).abs()), schemes, strict=True)]
                parts = [part for moment in kept[: len(rule.moments)] for part in moment] + [None] * 4
                tensors = [weight, grad.to(grad_kind), master, *parts[:4]]
                given = [None if t is None else t.to(device) for t in tensors]
                call = OptimizerStep._make((*given, rule.name, _FACTORS[rule.name], *schemes, *_REST))
                yield call
                yield call._replace(rounding="stochastic", **random)
                yield call._replace(rounding="stochastic", **{**random, "pitch": None})
                if weight.dtype == torch.bfloat16 and master is None:
                    yield call._replace(param_rounding="stochastic", **random)


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    def make(dtype: torch.dtype, rounding: str) -> OptimizerStep:
        grad = large_matrix(rows, cols, dtype)
        avg, rms = (torch.ops.lowbit.quantize(x, STATE_SCHEME)[:2] for x in (grad, grad.abs()))
        given = (grad.clone(), grad, None, *avg, *rms, "adamw", _FACTORS["adamw"])
        call = OptimizerStep._make((*given, STATE_SCHEME, STATE_SCHEME, *_REST))
        return call._replace(rounding=rounding, rng=torch.tensor([7, 1]))

    for dtype in (torch.float32, torch.bfloat16):
        for rounding in ("nearest", "stochastic"):
            yield Workload(rounding, f"{dtype_name(dtype)}, moments {STATE_SCHEME}", partial(make, dtype, rounding))


SAMPLES = {"optimizer_step": _samples}
WORKLOADS = {"optimizer_step": _workloads}
