"""round_to: against torch's casts, ml_dtypes and rounding in fp64, by bits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.formats import FORMATS

WIDE = {"fp16": torch.float16, "bf16": torch.bfloat16}
BYTES = ["fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp4_e2m1", "int8", "nf4", "e3m2b4"]


def patterns() -> Tensor:
    """Every upper half of fp32 with lower halves around every tie of tf32, bf16 and fp16."""
    upper = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper | lower).flatten()
    return bits.where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32).view(torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def in_fp64(x: Tensor, mantissa: int, saturate: bool) -> Tensor:
    """Rounded to a multiple of the step of the binade, in fp64, whose products by powers of two are exact."""
    wide = x.double().numpy()
    with np.errstate(invalid="ignore"):
        exponent = np.maximum(np.frexp(wide)[1] - 1, -126)
        step = np.ldexp(1.0, exponent - mantissa)
        rounded = np.rint(wide / step) * step
    largest = (2 - 2.0**-mantissa) * 2.0**127
    rounded = (
        np.clip(rounded, -largest, largest) if saturate else np.where(abs(rounded) > largest, wide * np.inf, rounded)
    )
    rounded = np.where(np.isfinite(wide) | saturate, rounded, wide)
    rounded = np.where(np.isnan(wide), np.nan, rounded)
    return torch.from_numpy(np.copysign(abs(rounded), 1.0)).float().copysign(x)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("name", ["tf32", "bf16", "fp32"])
def test_formats_with_the_exponents_of_fp32_round_as_fp64_does(name, saturate):
    x = patterns()
    assert same_bits(lb.round_to(x, name, saturate), in_fp64(x, FORMATS[name].mantissa, saturate))


@pytest.mark.parametrize("name", WIDE)
def test_fp16_and_bf16_are_casts_of_torch(name):
    x = patterns()
    rounded, cast = lb.round_to(x, name), x.to(WIDE[name]).float()
    number = ~x.isnan()
    assert same_bits(rounded[number], cast[number])
    assert bool(rounded[~number].isnan().all()) and torch.equal(rounded.signbit(), x.signbit())
    clipped = cast[number].clamp(-FORMATS[name].max, FORMATS[name].max)
    assert same_bits(lb.round_to(x, name, saturate=True)[number], clipped)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("name", BYTES)
def test_formats_of_8_bits_are_decoded_codes(name, saturate):
    x = torch.randn(64, 7) * torch.logspace(-6, 3, 7)
    assert same_bits(lb.round_to(x, name, saturate), lb.decode(lb.encode(x, name, saturate=saturate), name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tensors_keep_their_dtype(dtype):
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for name in ("tf32", "fp32"):
        y = lb.round_to(x, name)
        number = ~x.isnan()
        assert same_bits(y[number], x[number]) and torch.equal(y.signbit(), x.signbit())
        assert torch.equal(y.isnan(), x.isnan())
    other = "fp16" if dtype == torch.bfloat16 else "bf16"
    y, expected = lb.round_to(x, other), x.float().to(WIDE[other]).to(dtype)
    assert same_bits(y[number], expected[number])


def test_subnormals_are_rounded_while_torch_flushes_them():
    x = torch.tensor([1e-39, -3e-42, 2.0**-136, 2.0**-137])
    expected = in_fp64(x, 10, saturate=False)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        rounded = lb.round_to(x, "tf32")
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(rounded, expected)


def test_the_gradient_passes_straight_through_in_range():
    x = torch.tensor([1.0003, -65504.0, 65505.0, 1e30, torch.inf, torch.nan, -0.0], requires_grad=True)
    given = torch.tensor([2.0, torch.inf, 3.0, 4.0, 5.0, 6.0, 7.0])
    (grad,) = torch.autograd.grad(lb.round_to(x, "fp16"), x, given)
    assert grad.tolist() == [2.0, torch.inf, 0.0, 0.0, 0.0, 0.0, 7.0]
    weight = torch.randn(4, 8, requires_grad=True)
    rows = torch.randn(3, 8)
    (lb.round_to(rows, "tf32") @ lb.round_to(weight, "tf32").T).sum().backward()
    assert torch.equal(weight.grad, lb.round_to(rows, "tf32").sum(0).expand(4, 8))


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return lb.round_to(x, "tf32")


def test_transforms_and_graphs():
    x = torch.randn(3, 5)
    expected = lb.round_to(x, "tf32")
    assert same_bits(torch.vmap(lambda row: lb.round_to(row, "tf32"))(x), expected)
    assert same_bits(torch.compile(Rounded(), backend="aot_eager", fullgraph=True)(x), expected)
    assert same_bits(torch.export.export(copy.deepcopy(Rounded()), (x,)).module()(x), expected)
    assert lb.round_to(x.to("meta"), "tf32").shape == x.shape
    assert lb.round_to(torch.tensor(1.0), "tf32").shape == () and lb.round_to(torch.ones(0, 3), "tf32").shape == (0, 3)
    assert same_bits(lb.round_to(x.t(), "tf32"), expected.t())


def test_bad_input():
    with pytest.raises(TypeError, match=r"expected a float32, bfloat16 or float16 tensor, got torch\.float64"):
        lb.round_to(torch.ones(2, dtype=torch.float64), "tf32")
    with pytest.raises(TypeError, match="got float"):
        lb.round_to(1.0, "tf32")
    with pytest.raises(ValueError, match="unknown format 'tf19'"):
        lb.round_to(torch.ones(2), "tf19")
    with pytest.raises(ValueError, match="e8m0"):
        lb.round_to(torch.ones(2), "e8m0")
