"""Calls of ``scaled_grouped_mm``: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.ops.grouped import ScaledGroupedMM, has_rows_of_its_own
from lowbit.ops.spec import FLOATS
from lowbit.testing.inputs import Workload, random_matrix, recipe_pairs, schemes
from lowbit.testing.matmul import large_side, make_call

__all__ = ["SAMPLES", "WORKLOADS", "make_grouped"]

#: Rows of each expert, and those that no expert has.
_COUNTS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((3, 0, 17, 5), 4), ((1,), 0), ((0, 20, 0), 0), ((0, 0, 2, 0, 1), 3), ((0, 0), 2),
)  # fmt: skip


def make_grouped(
    a: Tensor, b: Sequence[Tensor], counts: Sequence[int], a_scheme: str | None, b_scheme: str, **more: Any
) -> ScaledGroupedMM:
    """A call on the reference's quantization of ``a [T, K]`` and of the experts' matrices ``[N, K]``, of which each has
    ``counts`` rows.
    """
    calls = [make_call(a, matrix, a_scheme, b_scheme) for matrix in b]

    def stack(name: str) -> Tensor | None:
        parts = [getattr(one, name) for one in calls]
        return None if parts[0] is None else torch.stack(parts)

    stacks: dict[str, Any] = {name: stack(name) for name in ("b", "b_scale", "b_zero_point", "b_global_scale")}
    given = {name: getattr(calls[0], name) for name in calls[0]._fields if name.startswith("a")}
    offsets = torch.tensor(counts, device=a.device).cumsum(0).int()
    return ScaledGroupedMM(**given, **stacks, b_scheme=b_scheme, offsets=offsets, cols=a.shape[1], **more)


def _samples(device: str) -> Iterator[ScaledGroupedMM]:
    """Every scheme of weights, by floats and by rows of codes, at ragged shapes."""
    lefts = (None, "int8:row", "mxfp8", None, "fp8_e4m3:row", "uint4:group32:affine", "nvfp4:global_row")
    shapes = ((5, 33), (19, 64), (3, 130), (33, 96))
    for index, scheme in enumerate(schemes()):
        (counts, rest), (n, k) = _COUNTS[index % len(_COUNTS)], shapes[index % len(shapes)]
        a = random_matrix(sum(counts) + rest, k, device, seed=index)
        a_scheme = lefts[index % len(lefts)]
        b = [random_matrix(n, k, device, seed=index + 9 + expert) for expert in range(len(counts))]
        bias = random_matrix(len(counts), n, device, seed=7) if index % 2 else None
        dtype = FLOATS[index % 3]
        yield make_grouped(a, b, counts, a_scheme, scheme.name, bias=bias, out_dtype=dtype)


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    """Eight experts of weights ``[rows, cols]``: a row of activations each, and 256."""
    for count in (1, 256):
        for input, weight in dict.fromkeys(recipe_pairs()):
            if input is None or has_rows_of_its_own(input):
                yield _workload(count, rows, cols, None if input is None else input.name, weight.name)


def _workload(count: int, n: int, k: int, a: str | None, b: str) -> Workload:
    def make() -> ScaledGroupedMM:
        one = large_side("b", n, k, b)
        stacks: dict[str, Any] = {
            name: torch.stack([value] * 8) if isinstance(value, Tensor) else value for name, value in one.items()
        }
        offsets = torch.arange(count, 8 * count + 1, count, dtype=torch.int32)
        return ScaledGroupedMM(**large_side("a", 8 * count, k, a), **stacks, offsets=offsets, cols=k)

    return Workload(f"8x{count}x{n}x{k}", f"{a or 'bf16'} x {b}", make)


SAMPLES = {"scaled_grouped_mm": _samples}
WORKLOADS = {"scaled_grouped_mm": _workloads}
