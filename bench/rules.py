"""Reasons for some rules of docs/numerics.md: how often the alternative gives another result.

``python -m bench.rules`` prints the table of docs/measured.md. Deterministic: fixed seeds, no timing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import lowbit as lb
from lowbit import reference
from lowbit.tables import markdown

COUNT = 1 << 22


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _share(different: Tensor) -> str:
    return f"{int(different.sum())} of {different.numel()} ({100 * different.double().mean():.2g}%)"


def reciprocal() -> str:
    """int8 codes by a multiplication with the scale's reciprocal differ from those by division"""
    x = _normal(0, COUNT // 128, 128)
    scale = x.abs().amax(1, keepdim=True) / 127
    return _share((x / scale).round() != (x * (1 / scale)).round())


def reciprocal_halves() -> str:
    """the same, of quotients that lie at a tie (x = (k + 1/2) * scale, rounded)"""
    scale = _normal(1, COUNT // 128, 1).abs()
    x = (torch.arange(128) + 0.5) * scale
    return _share((x / scale).round() != (x * (1 / scale)).round())


def two_levels() -> str:
    """code * block * global_scale, multiplied one after the other, differs from code * fp32(block * global_scale)"""
    code, block, global_scale = _e4m3(2), _e4m3(3), _normal(4, COUNT).abs()
    return _share((code * block) * global_scale != code * (block * global_scale))


def epilogue() -> str:
    """acc * scale_a * scale_b, one after the other, differs from acc * fp32(scale_a * scale_b)"""
    acc = (_normal(5, COUNT) * 2**16).round()
    a, b = _normal(6, COUNT).abs(), _normal(7, COUNT).abs()
    return _share((acc * a) * b != acc * (a * b))


def floor_clips() -> str:
    """blocks of 32 Gaussian numbers whose largest exceeds the maximum of mxfp4 with a floored scale"""
    kind = lb.scheme("mxfp4")
    x = _normal(8, COUNT // 32, 32)
    scale, _ = reference.block_scales(x, kind, None)
    return _share(x.abs().amax(1, keepdim=True) > reference.scale_value(scale, kind, None) * kind.format.max)


def logarithm() -> str:
    """floor(log2(x)) in fp32 is wrong, of the fp32 numbers just below each power of two"""
    below = torch.nextafter(torch.exp2(torch.arange(-126.0, 128.0)), torch.zeros(()))
    return _share(below.log2().floor() != (torch.frexp(below)[1] - 1))


def nf4_in_bf16() -> str:
    """entries of nf4 that bf16 cannot hold"""
    table = torch.tensor(lb.FORMATS["nf4"].codebook)
    return _share(table.bfloat16().float() != table)


def _e4m3(seed: int) -> Tensor:
    codes = torch.randint(1, 0x7F, (COUNT,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return lb.decode(codes, "fp8_e4m3")


FACTS: tuple[Callable[[], str], ...] = (
    reciprocal, reciprocal_halves, two_levels, epilogue, floor_clips, logarithm, nf4_in_bf16,
)  # fmt: skip


def table() -> str:
    return markdown(("what", "how often"), ((fact.__doc__, fact()) for fact in FACTS))


if __name__ == "__main__":
    print(table())
