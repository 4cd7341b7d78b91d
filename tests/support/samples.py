"""The samples of an op, made once; and calls that hold only numbers, for checks that compare with ``==``."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowbit.testing import SAMPLES
from lowbit.testing.inputs import random_matrix
from lowbit.testing.matmul import make_call


@cache
def samples(op: str) -> tuple[Any, ...]:
    """Those of ``lowbit.testing`` on the CPU, the same for every test: what writes to their tensors takes copies."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return tuple(SAMPLES[op]("cpu"))


def plain(call: Any) -> bool:
    """Whether these tensors hold only numbers: opcheck compares with ``==``."""
    return all(bool(v.isfinite().all()) for v in call if isinstance(v, Tensor) and v.is_floating_point())


def checked_samples(op: str, count: int) -> list[Any]:
    """Calls spread over the op's samples, which neither take nor return Inf or NaN."""
    calls = list(samples(op) if op != "scaled_mm" else products())
    found: list[Any] = []
    for call in random.Random(0).sample(calls, len(calls)):
        results = getattr(torch.ops.lowbit, op)(*call)
        if plain(call) and plain(results if isinstance(results, tuple) else (results,)):
            found.append(call)
        if len(found) == count:
            break
    assert found, f"no sample of {op} is free of Inf and NaN"
    return found


def products():
    a, b = random_matrix(3, 40, seed=1), random_matrix(5, 40, seed=2)
    for left, right, bias in (
        (None, "int8:row", None),
        ("mxfp4", "nvfp4", torch.randn(5)),
        ("uint8:row:affine", "int8:row", None),
    ):
        yield make_call(a, b, left, right, bias=bias, out_dtype=torch.float32)
