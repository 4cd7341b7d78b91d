"""Rules of scales: global scales of a tensor and of a row, E4M3 rounded up, the nearest E8M0, signed full range.

That codes and scales equal rationals on every backend is tested in test_scales.py, which every scheme of the samples
passes through; here stands what each rule promises.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import oracles
from support.bits import assert_same_bits
from support.oracles import Fraction
from support.variants import ALL, Variant

import lowbit as lb
from lowbit import reference
from lowbit.formats import find
from lowbit.reference.codec import integer_stochastic
from lowbit.scaling import scheme
from lowbit.testing.inputs import random_matrix

everywhere = pytest.mark.parametrize("variant", ALL)


# -- global scales -----------------------------------------------------------------------------------------------------
BY_ROW = ["nvfp4", "int4:group32:e4m3", "fp8_e4m3:row:e4m3", "nf4:e4m3", "nvfp4:ceil", "int4:group32:e4m3:full"]


@pytest.mark.thinned(5)
@everywhere
@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_under_its_own_global_scale_is_quantized_as_if_alone(variant: Variant, name, dtype):
    """Rows of very different magnitude, one of zeros, one with NaN: each equals the tensor scheme on that row alone."""
    x = random_matrix(7, 130, seed=3, extremes=True).to(variant.device, dtype)
    with variant.use():
        q = lb.quantize(x, f"{name}:global_row")
        y, fake = q.dequantize(), lb.fake_quantize(x, q.scheme)
        assert q.global_scale is not None and q.global_scale.shape == (7, 1)
        for row in range(len(x)):
            alone = lb.quantize(x[row : row + 1], name)
            for part, value in alone.parts.items():
                assert_same_bits(q.parts[part][row : row + 1].cpu(), value.cpu(), f"{part} of row {row}")
            assert_same_bits(y[row : row + 1].cpu(), alone.dequantize().cpu(), f"row {row}")
            assert_same_bits(fake[row : row + 1].cpu(), alone.dequantize().cpu(), f"fake row {row}")


@everywhere
def test_rows_wider_than_one_pass_have_their_own_global_scales(variant: Variant):
    x = random_matrix(3, 300_000, seed=5).to(variant.device)
    if variant.backend == "triton" and variant.device == "cpu":
        x = x[:, :2000]
    with variant.use():
        q = lb.quantize(x, "int8:row:e4m3:global_row")
        for row in range(3):
            alone = lb.quantize(x[row : row + 1], "int8:row:e4m3")
            assert_same_bits(q.codes[row : row + 1].cpu(), alone.codes.cpu(), f"row {row}")
            assert_same_bits(q.global_scale[row : row + 1].cpu(), alone.global_scale.cpu(), f"row {row}")


@everywhere
def test_nvfp4_weights_in_square_blocks_scale_both_ways_alike(variant: Variant):
    """16x16 blocks: the transposed weight has the transposed scales and codes."""
    w = random_matrix(48, 80, seed=1).to(variant.device)
    with variant.use():
        q, turned = lb.quantize(w, "fp4_e2m1:block16x16:e4m3"), lb.quantize(w.t(), "fp4_e2m1:block16x16:e4m3")
        assert_same_bits(q.scale.t().contiguous().cpu(), turned.scale.cpu(), "scale")
        assert_same_bits(q.dequantize().t().contiguous().cpu(), turned.dequantize().cpu(), "decoded")


def test_a_global_scale_a_row_belongs_to_the_rows():
    q = lb.quantize(torch.randn(4, 32), "nvfp4:global_row")
    assert q.nbytes == 4 * 16 + 4 * 2 + 4 * 4
    with pytest.raises(ValueError, match="'global_row' needs blocks of one row"):
        q.t()
    with pytest.raises(ValueError, match=r"global_scale must have shape \[4, 1\]"):
        lb.quantize(torch.randn(4, 32), "nvfp4:global_row", global_scale=torch.ones(3))
    with pytest.raises(ValueError, match="int8:row has no global_scale; add ':e4m3'"):
        lb.quantize(torch.randn(4, 32), "int8:row", global_scale=1.0)
    with pytest.raises((ValueError, RuntimeError), match=r"global_scale of a \[4, 32\] matrix as float32 \[4, 1\]"):
        torch.ops.lowbit.quantize(torch.randn(4, 32), "nvfp4:global_row", torch.ones(1, 1))


@everywhere
def test_no_row_of_a_product_depends_on_another(variant: Variant):
    x, w = random_matrix(5, 64, seed=8).to(variant.device), random_matrix(9, 64, seed=9).to(variant.device)
    louder = x.clone()
    louder[2] *= 1000
    with variant.use():
        weight, a = lb.quantize(w, "nvfp4"), lb.quantize(x, "nvfp4:global_row")
        if reason := variant.refuses("scaled_mm", a, weight):
            pytest.skip(reason)
        quiet, loud = lb.scaled_mm(a, weight), lb.scaled_mm(lb.quantize(louder, "nvfp4:global_row"), weight)
    keep = torch.tensor([0, 1, 3, 4])
    assert_same_bits(quiet[keep].cpu(), loud[keep].cpu(), "rows beside the louder one")


GLOBAL_SCALES = [-0.25, 0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-30, 1e30]


@pytest.mark.thinned(3)
@everywhere
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4:ceil", "int4:group32:e4m3:full", "nvfp4:global_row"])
def test_any_global_scale_may_be_given(variant: Variant, name):
    """Signs by xor, zero divides like Inf, a NaN keeps its sign: codes, and codes of blocks, equal the reference's."""
    x = random_matrix(4, 96, seed=4, extremes=True)
    x[3] = 0.0
    for global_scale in GLOBAL_SCALES:
        sign = (
            torch.tensor(-1.0)
            if str(global_scale).startswith("-") or torch.tensor(global_scale).signbit()
            else torch.tensor(1.0)
        )
        level = (
            torch.tensor(global_scale)
            .abs()
            .copysign(sign)
            .reshape(1, 1)
            .expand(scheme(name).global_scale_shape(4, 96))
            .contiguous()
        )
        with lb.use_backend("reference"):
            wanted = lb.quantize(x, name, global_scale=level)
            static = lb.quantize(x, name, scale=wanted.scale, global_scale=level)
            decoded = wanted.dequantize()
        with variant.use():
            there = level.to(variant.device)
            got = lb.quantize(x.to(variant.device), name, global_scale=there)
            again = lb.quantize(x.to(variant.device), name, scale=got.scale, global_scale=there)
            y = got.dequantize()
        assert_same_bits(got.scale.cpu(), wanted.scale, f"{name} scale under {global_scale}")
        assert_same_bits(got.codes.cpu(), wanted.codes, f"{name} codes under {global_scale}")
        assert_same_bits(again.codes.cpu(), static.codes, f"{name} static codes under {global_scale}")
        assert_same_bits(y.cpu(), decoded, f"{name} decoded under {global_scale}")


def test_the_sign_of_a_scale_is_that_of_the_product():
    """Words of section 5 on single numbers: 0 over any global scale of 0, and NaN codes of either sign."""
    nvfp4 = scheme("nvfp4")
    codes = torch.tensor([[0x7F, 0xFF, 0x00, 0x80]], dtype=torch.uint8)
    for global_scale, signs in ((2.0, [0, 1, 0, 1]), (-2.0, [1, 0, 1, 0]), (-0.0, [1, 0, 1, 0])):
        value = reference.scale_value(codes, nvfp4, torch.tensor([[global_scale]]))
        assert value.signbit().long().tolist() == [signs]
        assert value.isnan().tolist() == [[True, True, False, False]]
    zeros = torch.zeros(1, 16)
    for global_scale, code in ((0.0, 0x00), (-0.0, 0x80), (-1.0, 0x80), (float("nan"), 0x7F)):
        assert lb.quantize(zeros, "nvfp4", global_scale=torch.tensor([[global_scale]])).scale.tolist() == [[code]]


# -- E4M3 rounded up ---------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=16, max_size=16), st.floats(2.0**-10, 1024, width=32))
def test_e4m3_ceil_is_the_least_code_that_does_not_clip(values, global_scale):
    x = torch.tensor([values])
    scale = int(lb.quantize(x, "nvfp4:ceil", global_scale=global_scale).scale)
    amax = max(abs(Fraction(v)) for v in values)
    inner = oracles.fp32(Fraction(oracles.fp32(amax / 6)) / Fraction(global_scale))
    above = [code for code in range(0x7F) if oracles.value_of(find("fp8_e4m3"), code) >= inner]
    assert scale == min([*above, 0x7E])


@pytest.mark.slow
@pytest.mark.parametrize("name, unbiased", [("nvfp4:ceil", True), ("nvfp4", False), ("int4:group16:e4m3:ceil", True)])
def test_stochastic_codes_below_a_scale_rounded_up_are_unbiased(name, unbiased):
    """The mean over all 2^16 random words: x itself to 2^-16 of a step, where the nearest scale clips what is above."""
    s = scheme(name)
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    q = lb.quantize(x, s)
    scale = reference.scale_value(q.scale, s, q.global_scale)
    quotient = reference.divide(x, scale, s)
    words = torch.arange(1 << 16)[:, None]
    mean = torch.empty(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        v = quotient[row][None]
        if s.format.kind == "float":
            codes = reference.encode_magnitude(reference.to_bits(v), s.format, True, words)
        else:
            rounded = integer_stochastic(v, reference.to_bits(v), words)
            codes = rounded.clamp(s.format.qmin, s.format.qmax).long()
        mean[row] = reference.decode(codes.to(torch.uint8), s.format).double().mean(0)
    error = (mean * scale.double() - x.double()).abs()
    step = 2 * scale.double()  # the widest of FP4; that of integers is half of it
    bound = 2.0**-16 * step + 2.0**-22 * x.double().abs()
    assert bool((error <= bound).all()) is unbiased


# -- E8M0 to nearest ---------------------------------------------------------------------------------------------------
def test_nearest_e8m0_lies_between_floor_and_ceil_and_turns_at_seven_and_a_quarter():
    x = torch.zeros(5, 32)
    x[:, 0] = torch.tensor([4.0, 6.0, 7.25, 7.2500005, 7.9])
    codes = {rule: lb.quantize(x, f"mxfp4:{rule}").scale[:, 0].tolist() for rule in ("floor", "nearest", "ceil")}
    assert codes["floor"] == [127] * 5
    assert codes["nearest"] == [127, 127, 127, 128, 128]
    assert codes["ceil"] == [127, 127, 128, 128, 128]
    assert lb.quantize(x.ldexp(torch.tensor(-140)), "mxfp4:nearest").scale[:, 0].tolist() == [0, 0, 0, 0, 0]


# -- signed full range -------------------------------------------------------------------------------------------------
FULL = ["int4:group16:full", "int8:row:full", "int4:group16:bf16:full", "int8:group16:fp16:full", "int4:col:full"]


@everywhere
@pytest.mark.parametrize("name", FULL)
def test_the_largest_element_takes_the_least_code(variant: Variant, name):
    s = scheme(name)
    x = random_matrix(6, 16, seed=12)
    with variant.use():
        q = lb.quantize(x.to(variant.device), s)
        codes = lb.unpack(q.codes, s.format.bits, x.shape).cpu()
    signed = codes.long() - ((codes.long() >> (s.format.bits - 1)) << s.format.bits)
    block = s.block_of(*x.shape)
    scale = reference.spread(q.scale.float().cpu(), block, *x.shape)
    largest = x.abs() == reference.spread(reference.block_amax(x.abs(), s), block, *x.shape)
    assert bool((scale.sign() == -x.sign())[largest].all())
    if s.scale_format.name == "fp32":
        assert signed[largest].unique().tolist() == [s.format.qmin]
    assert bool(((signed * scale - x).abs() <= scale.abs() * 1.0001).all()), "less than a step where clamped"


@everywhere
def test_ties_and_zeros_have_positive_scales(variant: Variant):
    x = torch.tensor([[3.0, -3.0, 1.0], [0.0, -0.0, 0.0], [2.0, 1.0, -1.0], [-2.0, 1.0, 1.0]], device=variant.device)
    with variant.use():
        q = lb.quantize(x, "int8:row:full")
        broken = lb.quantize(
            torch.tensor([[torch.inf, 1.0], [-torch.nan, 5.0]], device=variant.device), "int8:row:full"
        )
    assert q.scale[:, 0].tolist() == [3 / 128, 1.0, -2 / 128, 2 / 128]
    assert q.codes.view(torch.int8).tolist() == [[127, -128, 43], [0, 0, 0], [-128, -64, 64], [-128, 64, 64]]
    assert_same_bits(broken.scale.cpu(), torch.full((2, 1), torch.nan), "canonical NaN")
    assert not broken.codes.any()


def test_full_range_halves_the_error_at_few_bits():
    """A symmetric scale leaves one of 16 codes unused; blocks of 16 Gaussian numbers gain by it."""
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    loss = {
        name: float((lb.fake_quantize(x, name) - x).square().mean()) for name in ("int4:group16", "int4:group16:full")
    }
    assert loss["int4:group16:full"] < loss["int4:group16"]


# -- ends of the range -------------------------------------------------------------------------------------------------
@everywhere
@pytest.mark.parametrize(
    "name", ["e2m1b9:row", "e2m1b9:group16:bf16", "e2m1b9:group16:fp16", "e2m1b9:mx", "e2m3b20:tensor"]
)
def test_scales_of_formats_with_a_maximum_below_one_stay_finite(variant: Variant, name):
    x = torch.tensor([[3.4e38, -1e38, 1.0, 0.0], [1e-3, 2.0, -5.0, 7.0]])
    with variant.use():
        q = lb.quantize(x.to(variant.device), name)
        y = q.dequantize().cpu()
    assert bool(y.isfinite().all())
    bits = x.view(torch.int32).numpy().view("uint32")
    assert_same_bits(y, oracles.quantize(bits, scheme(name)).decoded.astype("int64"), name)


# -- what quantize saw -------------------------------------------------------------------------------------------------
@everywhere
@pytest.mark.parametrize("name", ["int8:row", "int4:group32:full", "mxfp8", "nvfp4:global_row", "fp8_e4m3:block3x16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantize_returns_the_amax_of_each_block(variant: Variant, name, dtype):
    s = scheme(name)
    x = random_matrix(6, 70, seed=2).to(dtype)
    x[0, 3], x[5, 69] = torch.nan, -torch.inf
    with variant.use():
        q, amax = lb.quantize(x.to(variant.device), s, return_amax=True)
    assert_same_bits(q.scale.cpu(), lb.quantize(x, s).scale, "scale")
    for i in range(amax.shape[0]):
        for j in range(amax.shape[1]):
            block = whole_block(x, s, i, j)
            wanted = block.float().abs().max() if block.isfinite().all() else torch.tensor(torch.nan)
            assert_same_bits(amax[i, j].cpu(), wanted, f"block {i}, {j}")


@everywhere
@pytest.mark.parametrize("name", ["uint8:row:affine", "int4:group32:affine", "uint4:tensor:affine"])
def test_quantize_returns_minimum_and_maximum_of_affine_blocks(variant: Variant, name):
    s = scheme(name)
    x = random_matrix(6, 70, seed=2)
    x[1], x[2] = x[1].abs() + 1, -x[2].abs()
    x[3], x[4, :32] = 0.0, -0.0
    x[5, 5] = torch.inf
    with variant.use():
        q, low, high = lb.quantize(x.to(variant.device), s, return_amax=True)
        given, *seen = lb.quantize(x.to(variant.device), s, scale=1.0, zero_point=3, return_amax=True)
    for i in range(low.shape[0]):
        for j in range(low.shape[1]):
            block = whole_block(x, s, i, j)
            ends = (block.min().clamp(max=0.0) + 0.0, block.max().clamp(min=0.0) + 0.0)
            wanted = ends if block.isfinite().all() else (torch.tensor(torch.nan),) * 2
            assert_same_bits(low[i, j].cpu(), wanted[0], f"minimum of {i}, {j}")
            assert_same_bits(high[i, j].cpu(), wanted[1], f"maximum of {i}, {j}")
    assert_same_bits(q.codes.cpu(), lb.quantize(x, s).codes, "codes")
    assert set(given.scale.unique().tolist()) == {1.0}
    assert_same_bits(seen[0].cpu(), low.cpu(), "of a static scale too")


def whole_block(x: torch.Tensor, s: lb.Scheme, i: int, j: int) -> torch.Tensor:
    r, c = s.block_of(*x.shape)
    return x[i * r : (i + 1) * r, j * c : (j + 1) * c]


# -- the reference itself ----------------------------------------------------------------------------------------------
@everywhere
def test_one_fp16_nan_keeps_its_sign(variant: Variant):
    """torch widens single fp16 numbers another way than many, and drops the sign there."""
    nan = torch.full((3, 1), -512, dtype=torch.int16).view(torch.float16).to(variant.device)
    with variant.use():
        codes = [lb.encode(nan[:n], "fp8_e4m3").flatten().tolist() for n in (1, 3)]
    assert codes == [[0xFF], [0xFF] * 3]


@everywhere
def test_an_integer_product_of_one_term_has_no_negative_zero(variant: Variant):
    a = lb.quantize(torch.tensor([[-3.0], [0.0]]), "int8:row")
    b = lb.quantize(torch.tensor([[0.0], [2.0]]), "int8:row")
    with variant.use():
        y = lb.scaled_mm(*(q.to(variant.device) for q in (a, b))).cpu()
    assert not y[0, 0].signbit() and y[1].tolist() == [0.0, 0.0] and not y[1].signbit().any()
