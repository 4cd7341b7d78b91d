"""Calls of the optimizers' steps: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from lowbit import reference, scaling
from lowbit.ops.optim import STATE_SCHEME, AdamW
from lowbit.ops.spec import FLOATS, as_rows, dtype_name
from lowbit.tensor import packing
from lowbit.testing.inputs import Workload, large_matrix, random_matrix, specials


def _stored(moment: Tensor, text: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of a moment that is given as numbers."""
    scheme = scaling.scheme(text)
    codes, scale, _ = reference.quantize(as_rows(moment), scheme, None, None)
    return packing.pack(codes, scheme.format.bits).reshape(*moment.shape[:-1], -1), scale


#: Schemes of both moments: narrow codes, codebooks, every format of scales, blocks that vectors do not divide.
_SAMPLED = (
    (STATE_SCHEME, STATE_SCHEME), ("fp8_e5m2:group32", "mxfp8"), ("int8:group64:bf16", "fp8_e4m3:group7"),
    ("mxfp4", "mxfp6:ceil"), ("fp6_e3m2:group96:fp16", "int4:group33"), ("nf4", "fp8_e4m3:group2048"),
)  # fmt: skip


def _samples(device: str) -> Iterator[AdamW]:
    dtypes = cycle(product(FLOATS, FLOATS))
    stochastic: dict[str, Any] = {
        "rounding": "stochastic", "step": 3, "rng": torch.tensor([7, 3], device=device), "stream": 11, "offset": 5,
        "pitch": 1000,
    }  # fmt: skip
    for index, (scheme, rms_scheme) in enumerate(_SAMPLED):
        for shape in ((1, 5), (3, 130), (2, 2, 2100), (9, 512), (1, 1)):
            rows = torch.Size(shape[:-1]).numel()
            numbers = [random_matrix(rows, shape[-1], seed=10 * index + j).reshape(shape) for j in range(3)]
            param, grad, avg = numbers
            if shape == (3, 130):  # Inf and NaN show in its element of the parameter, and in its block of the moments
                grad[1, : specials().numel()] = specials()[: shape[-1]]
            kind, grad_kind = next(dtypes)
            m, m_scale = (t.to(device) for t in _stored(avg, scheme))
            r, r_scale = (t.to(device) for t in _stored((avg * 1.5).abs(), rms_scheme))
            given = param.to(device, kind), grad.to(device, grad_kind)
            call = AdamW(*given, m, m_scale, r, r_scale, scheme, rms_scheme)
            yield call._replace(step=1 + 40 * index, weight_decay=0.1 * index)
            yield call._replace(**stochastic)
            yield call._replace(**{**stochastic, "pitch": None})


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    def make(dtype: torch.dtype, rounding: str) -> AdamW:
        grad = large_matrix(rows, cols, dtype)
        avg, rms = (torch.ops.lowbit.quantize(x, STATE_SCHEME)[:2] for x in (grad, grad.abs()))
        return AdamW(grad.clone(), grad, *avg, *rms)._replace(rounding=rounding, rng=torch.tensor([7, 1]))

    for dtype in (torch.float32, torch.bfloat16):
        for rounding in ("nearest", "stochastic"):
            yield Workload(rounding, f"{dtype_name(dtype)}, moments {STATE_SCHEME}", partial(make, dtype, rounding))


SAMPLES = {"adamw": _samples}
WORKLOADS = {"adamw": _workloads}
