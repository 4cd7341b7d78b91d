"""Calls of ``scaled_mm``: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from lowbit import reference, scaling
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.spec import FLOATS
from lowbit.tensor import packing
from lowbit.testing.inputs import Workload, large_matrix, random_matrix, recipe_pairs, schemes


def make_call(a: Tensor, b: Tensor, a_scheme: str | None, b_scheme: str | None, **more: object) -> ScaledMM:
    """A call on the reference's quantization of two float matrices ``[M, K]`` and ``[N, K]`` (tests, benchmarks)."""
    arguments: dict[str, object] = {"cols": a.shape[1], **more}
    for name, x, text in (("a", a, a_scheme), ("b", b, b_scheme)):
        arguments[name], arguments[f"{name}_scheme"] = x, text
        if text is not None:
            scheme = scaling.scheme(text)
            global_scale = reference.global_scale(x.cpu(), scheme) if scheme.global_scale else None
            codes, scale, zero = reference.quantize(x.cpu(), scheme, global_scale, None)
            parts = {
                "": packing.pack(codes, scheme.format.bits),
                "_scale": scale,
                "_zero_point": zero,
                "_global_scale": global_scale,
            }
            arguments |= {name + k: None if v is None else v.to(x.device) for k, v in parts.items()}
    return ScaledMM(**arguments)  # type: ignore[arg-type]


def _samples(device: str) -> Iterator[ScaledMM]:
    """A walk in which every scheme meets itself, a float matrix and seven others, at ragged shapes."""
    texts: list[str | None] = [None, *(s.name for s in schemes())]
    shapes = cycle([(1, 5, 33), (4, 19, 64), (17, 3, 130), (2, 1, 7), (16, 33, 96)])
    dtypes = cycle(FLOATS)
    for step in (0, 1, 3, 10, 31, 57, 80, len(texts) - 1):
        for index, a_scheme in enumerate(texts):
            m, n, k = next(shapes)
            a = random_matrix(m, k, device, seed=index)
            b = random_matrix(n, k, device, seed=index + 1000)
            bias = random_matrix(1, n, device, seed=7)[0] if index % 2 else None
            yield make_call(a, b, a_scheme, texts[(index + step) % len(texts)], bias=bias, out_dtype=next(dtypes))


#: Rows of a that benchmarks multiply: a token, and a batch of them.
_BENCHED_ROWS = (1, 256)


def workload(m: int, n: int, k: int, a: str | None, b: str) -> Workload:
    """A product of Gaussian numbers, for benchmarks; of bf16 where a scheme is None."""

    def make() -> ScaledMM:
        return ScaledMM(**large_side("a", m, k, a), **large_side("b", n, k, b), cols=k)

    return Workload(f"{m}x{n}x{k}", f"{a or 'bf16'} x {b}", make)


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    """Every recipe's forward product with a weight ``[rows, cols]``; an input that is not quantized is bf16."""
    pairs = dict.fromkeys((input.name if input else None, weight.name) for input, weight in recipe_pairs())
    for m in _BENCHED_ROWS:
        for a, b in pairs:
            yield workload(m, rows, cols, a, b)


def large_side(name: str, rows: int, cols: int, text: str | None) -> dict[str, Any]:
    """One operand of a product of Gaussian numbers; of bf16 where its scheme is None."""
    if text is None:
        return {name: large_matrix(rows, cols, torch.bfloat16)}
    x, scheme = large_matrix(rows, cols), scaling.scheme(text)
    global_scale = torch.ops.lowbit.global_scale(x, text) if scheme.global_scale else None
    codes, scale, zero = torch.ops.lowbit.quantize(x, text, global_scale)
    parts = {
        "_scheme": text,
        "_scale": scale,
        "_zero_point": zero if scheme.affine else None,
        "_global_scale": global_scale,
    }
    return {name: codes, **{name + key: value for key, value in parts.items()}}


SAMPLES = {"scaled_mm": _samples}
WORKLOADS = {"scaled_mm": _workloads}
