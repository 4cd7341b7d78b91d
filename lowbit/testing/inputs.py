"""Inputs that tests and benchmarks feed to every kernel of every op, made from the tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.formats import FORMATS, Format, float_format
from lowbit.recipes import RECIPES
from lowbit.scaling import SCALINGS, Scheme, find_scaling, scheme


class Workload(NamedTuple):
    """Something that a benchmark measures: what of the op it is ("" or, say, "stochastic"), of what, and the call."""

    variant: str
    subject: str
    call: Callable[[], Any]


#: What breaks numerics in any format: zeros, subnormals, values next to powers of two, the ends of fp32.
SPECIALS = (
    0.0, -0.0, 1e-45, -1e-39, 2.0**-126, 2.0**-127, 1.0, -1.0, 0.9999999, 1.0000001, 2.5, 3.5, 0.25,
    torch.finfo(torch.float32).max, torch.finfo(torch.float32).min,
)  # fmt: skip


def element_formats() -> list[Format]:
    """Every format that elements can be encoded to, and two custom ones."""
    rows = [f for f in FORMATS.values() if f.bits <= 8 and f.kind != "exponent"]
    return [*rows, float_format(2, 1, bias=3), float_format(3, 4, nan=True)]


def distinct_formats() -> list[Format]:
    """Of ``element_formats`` all but the codebooks that differ in their numbers alone: one of each width stays."""
    widths = {f.bits: f for f in reversed(element_formats()) if f.kind == "codebook"}
    return [f for f in element_formats() if f.kind != "codebook" or widths[f.bits] == f]


def schemes() -> list[Scheme]:
    """Every format with every kind of scaling and every option, once each at least.

    Integers of other widths than 4 and 8 bits, and codebooks that are not distinct, have some scalings each: the code
    is that of the others.
    """
    plain, small = _scalings("fp32"), [f"{s}{turn}" for s in _scalings("e8m0", "fp8_e4m3") for turn in ("", ":T")]
    distinct = distinct_formats()
    elements = [f for f in distinct if f.kind != "integer" or f.bits in (4, 8)]
    texts = [f"{f}:{s}" for f in elements if f.signed or f.kind != "integer" for s in (*plain, *small)]
    texts += [f"{f}:{s}:affine" for f in elements if f.kind == "integer" for s in plain]
    texts += [f"{f}:{s}" for f in element_formats() if f not in distinct for s in ("row", "group7", "mx")]
    texts += _OPTIONS
    return list(dict.fromkeys(scheme(text) for text in texts))


def _scalings(*scale_formats: str) -> list[str]:
    """Rows of the table with such scales; of a family, blocks that vectors divide and ragged ones."""
    names = dict.fromkeys(re.sub(r"{\w}", size, pattern) for pattern in SCALINGS for size in ("32", "7"))
    return [name for name in names if (s := find_scaling(name)) and s.scale_format in scale_formats]


_OPTIONS = [
    "mxfp8:ceil", "mxfp6:ceil", "mxfp4:ceil", "mxfp4:ceil:T", "fp6_e3m2:mx:ceil", "fp8_e5m2:mx:ceil", "int8:mx:ceil",
    "int8:tensor:e8m0", "int4:row:e8m0:ceil", "fp8_e4m3:row:bf16", "fp8_e5m2:group32:fp16", "int8:group128:bf16",
    "int4:group32:fp16", "uint4:group32:affine:bf16", "uint8:row:affine:fp16", "int4:group32:affine:e8m0",
    "uint4:group16:affine:e8m0:ceil", "nf4:e4m3", "nf4:group32:bf16", "nf4:group128:e4m3", "nf4:group64:T",
    "dynamic8:group256", "udynamic8:group128:bf16",
    "fp4_e2m1:group32:e8m0", "fp8_e4m3:block128x128", "int4:group32:e4m3", "fp4_e2m1:block16x16:e4m3",
    "nvfp4:global_row", "int8:row:e4m3:global_row", "nvfp4:ceil", "mxfp4:nearest", "mxfp4:nearest:T",
    "int4:group32:full", "int8:row:full", "int4:group7:bf16:full", "int8:group128:fp16:full",
    "int4:group32:e4m3:ceil:full:global_row",
    "int6:row", "int6:group16:fp16", "int6:mx", "uint6:group7:affine", "uint6:tensor:affine",
    "int5:group32:fp16", "int5:tensor", "int5:group7:bf16:full", "uint5:row:affine:bf16", "uint5:group32:affine",
    "int3:tensor", "int3:group32", "int3:mx", "int3:block7x7:full", "uint3:group7:affine", "uint3:row:affine:bf16",
    "int2:row", "int2:group32:full", "int2:nvfp4", "int2:group7:bf16", "uint2:col:affine", "uint2:group32:affine",
]  # fmt: skip


def overflows() -> list[float]:
    """Around each format's largest number: itself, where overflow begins, and just beyond, of either sign."""
    found: list[float] = []
    for format in element_formats():
        if format.kind != "codebook":
            before, last = sorted(v for v in format.table if math.isfinite(v))[-2:]
            middle = last + (last - before) / 2
            found += [last, middle, -middle, middle * (1 + 2.0**-12)]
    return list(dict.fromkeys(found))


def specials(device: str = "cpu") -> Tensor:
    return torch.tensor([*SPECIALS, *overflows(), torch.inf, -torch.inf, torch.nan, -torch.nan], device=device)


def random_matrix(rows: int, cols: int, device: str = "cpu", seed: int = 0, extremes: bool = False) -> Tensor:
    """Gaussian rows of very different magnitude; ``extremes`` adds zeros, subnormals, Inf and NaN here and there."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 13, (rows, 1), generator=generator))
    if extremes:
        special = specials()
        where = torch.randint(0, max(rows * cols, 1), (max(rows * cols // 50, 1),), generator=generator)
        x.view(-1)[where] = special[torch.randint(0, len(special), where.shape, generator=generator)]
        x[rows // 2] = 0.0
    return x.to(device)


def recipe_pairs() -> list[tuple[Scheme | None, Scheme]]:
    """The schemes of input and weight of every recipe whose scales are made of each input: what benchmarks measure.

    Without those that only the reference supports.
    """
    return list(
        dict.fromkeys(
            (row.input, row.weight) for row in RECIPES.values() if row.dynamic and not row.weight.reference_only
        )
    )


def recipe_schemes() -> list[Scheme]:
    """Every scheme of ``recipe_pairs``."""
    return list(dict.fromkeys(s for input, weight in recipe_pairs() for s in (weight, input) if s is not None))


@lru_cache(maxsize=4)
def large_matrix(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian numbers for benchmarks, on the CPU."""
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(dtype)


def sample_matrices(device: str) -> Iterator[Tensor]:
    """Ragged, strided, low-precision and special matrices; small enough for the slowest kernel."""
    yield specials(device)
    yield random_matrix(5, 67, device, extremes=True)
    yield random_matrix(33, 40, device, seed=1).t()
    yield random_matrix(3, 130, device, seed=2, extremes=True).bfloat16()
    yield random_matrix(4, 96, device, seed=3, extremes=True).half()[:, ::2]
    yield random_matrix(1, 1, device, seed=4)
    yield random_matrix(6, 35, device, seed=5).reshape(2, 3, 35)
    yield random_matrix(21, 1, device, seed=7)  # rows of a byte each, whatever the format
    yield random_matrix(41, 96, device, seed=6, extremes=True)  # rows of whole blocks: one row of several runs
