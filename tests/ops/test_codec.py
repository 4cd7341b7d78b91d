"""Every code decoded, every 16-bit pattern encoded, and fp32 at every rounding boundary, on every backend and ISA.

The oracle of encode is the table of exact rounding boundaries; it is itself held here against exact rationals and,
where it has the format, against ml_dtypes. All 2**32 patterns: ``make exhaustive``.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from support import boundaries, oracles
from support.bits import assert_same_bits
from support.oracles import BINARY, ML_DTYPES, SIGN, Fraction
from support.variants import ALL, Variant

import lowbit as lb
from lowbit.formats import FORMATS
from lowbit.testing.inputs import element_formats

#: Without mantissa the last bit kept is the hidden one, so every tie between normal numbers goes up.
NO_MANTISSA = [lb.float_format(4, 0), lb.float_format(3, 0, bias=3)]
ENCODED = [*element_formats(), *NO_MANTISSA]
CODED = [*ENCODED, FORMATS["e8m0"]]
FLOATING = [f for f in ENCODED if f.kind == "float"]
BOTH = pytest.mark.parametrize("saturate", [True, False], ids=["saturate", "overflow"])


def every(formats):
    return pytest.mark.parametrize("f", formats, ids=str)


@cache
def all_16bit(dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
    """Every pattern of a 16-bit dtype, and the fp32 patterns of the same numbers (widened by rationals, not torch)."""
    patterns = np.arange(65536, dtype=np.uint16)
    x = torch.from_numpy(patterns.view(np.int16)).view(dtype)
    if dtype == torch.bfloat16:
        return x, patterns.astype(np.uint32) << 16
    wide = patterns.view(np.float16).astype(np.float32).view(np.uint32)
    return x, wide


@cache
def fp32_sample(f: lb.Format) -> tuple[torch.Tensor, np.ndarray]:
    """Every boundary and value of the format +-2 ulp, and random patterns, both signs."""
    random = np.random.default_rng(5).integers(0, 2**32, 1 << 16, dtype=np.uint32)
    spread = np.random.default_rng(6).standard_normal(1 << 15).astype(np.float32) * np.float32(
        float(oracles.largest(f)) / 3
    )
    bits = np.concatenate([boundaries.neighbourhood(f), random, spread.view(np.uint32)])
    return torch.from_numpy(bits.view(np.float32)), bits


# -- the oracles against each other ------------------------------------------------------------------------------------
def test_widening_of_fp16_in_the_oracle():
    _, wide = all_16bit(torch.float16)
    for bits in [*range(0, 65536, 97), 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0xFC00, 0x8000, 0x8001]:
        value = oracles.from_bits(bits, oracles.FP16)
        if not (isinstance(value, float) and math.isnan(value)):
            assert int(wide[bits]) == oracles.to_bits(value, negative=bits >= 0x8000)


@BOTH
@every(ENCODED)
def test_boundaries_equal_rationals(f, saturate):
    bits = np.concatenate([boundaries.neighbourhood(f), fp32_sample(f)[1][-3000::3]])
    expected = np.array([oracles.encode(f, int(b), saturate) for b in bits], np.uint8)
    assert_same_bits(torch.from_numpy(boundaries.expected_codes(f, saturate, bits)), expected, str(f))


@BOTH
@every([f for f in FLOATING if f.name in ML_DTYPES])
def test_boundaries_equal_ml_dtypes(f, saturate):
    for bits in (all_16bit(torch.bfloat16)[1], all_16bit(torch.float16)[1], fp32_sample(f)[1]):
        numbers = bits[(bits & 0x7FFFFFFF) <= oracles.F32_INF]
        expected = oracles.ml_encode(f.name, numbers.view(np.float32), saturate)
        assert_same_bits(torch.from_numpy(boundaries.expected_codes(f, saturate, numbers)), expected, str(f))


def test_segments_fill_equals_lookup():
    f = FORMATS["fp8_e4m3"]
    for begin in (0, 0x3B7FF000, 0x43DFFF00, 0x7F7FFF00):
        filled = np.zeros(8192, np.uint8)
        boundaries.segments(f, False, True).fill(filled, begin)
        bits = (np.arange(begin, begin + 8192, dtype=np.int64).astype(np.uint32)) | np.uint32(SIGN)
        assert (filled == boundaries.expected_codes(f, False, bits)).all()


# -- decode ------------------------------------------------------------------------------------------------------------
@every(CODED)
@pytest.mark.parametrize("variant", ALL)
def test_decode_every_code(variant: Variant, f):
    codes = torch.arange(1 << f.bits, dtype=torch.uint8, device=variant.device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        binary = BINARY[str(dtype).removeprefix("torch.")]
        sign = f.bits - 1 if f.signed else 8
        expected = [
            oracles.to_bits(oracles.value_of(f, code), binary, bool(code >> sign) and f.kind == "float")
            for code in range(1 << f.bits)
        ]
        if reason := variant.refuses("decode", codes, f, dtype):
            assert f.name not in FORMATS, reason
            pytest.skip(reason)
        with variant.use():
            y = lb.decode(codes, f, dtype)
        assert_same_bits(y.cpu(), np.array(expected, np.int64), f"{f} to {dtype}")


@every([f for f in CODED if f.name in ML_DTYPES])
def test_decode_equals_ml_dtypes(f):
    codes = np.arange(1 << f.bits, dtype=np.uint8)
    y = lb.decode(torch.from_numpy(codes), f).numpy()
    theirs = codes.view(ML_DTYPES[f.name]).astype(np.float32)
    number = ~np.isnan(theirs)
    assert (np.isnan(y) == ~number).all()
    assert (y.view(np.uint32)[number] == theirs.view(np.uint32)[number]).all()


@pytest.mark.parametrize("variant", ALL)
def test_decode_ignores_bits_above_the_width(variant: Variant):
    codes = torch.arange(256, dtype=torch.uint8, device=variant.device)
    for f in element_formats():
        if f.bits < 8 and not variant.refuses("decode", codes, f):
            with variant.use():
                assert_same_bits(lb.decode(codes, f), lb.decode(codes & ((1 << f.bits) - 1), f), str(f))


# -- encode ------------------------------------------------------------------------------------------------------------
def check_encode(variant: Variant, f: lb.Format, saturate: bool, x: torch.Tensor, bits: np.ndarray) -> None:
    x = x.to(variant.device)
    if reason := variant.refuses("encode", x, f, saturate=saturate):
        assert f.name not in FORMATS, reason
        pytest.skip(reason)
    with variant.use():
        codes = lb.encode(x, f, saturate=saturate)
    assert_same_bits(codes.cpu(), boundaries.expected_codes(f, saturate, bits), f"{f} on {variant}", source=x.cpu())


@pytest.mark.thinned(3)
@every(ENCODED)
@pytest.mark.parametrize("variant", ALL)
def test_encode_every_16bit_pattern(variant: Variant, f):
    """On the interpreter, which is slow, of bf16 alone; it meets fp16 in the samples."""
    for dtype in (torch.bfloat16, *(() if variant.interpreted else (torch.float16,))):
        for saturate in (True, False):
            check_encode(variant, f, saturate, *all_16bit(dtype))


@pytest.mark.thinned(3)
@BOTH
@every(ENCODED)
@pytest.mark.parametrize("variant", ALL)
def test_encode_fp32_at_every_boundary(variant: Variant, f, saturate):
    check_encode(variant, f, saturate, *fp32_sample(f))


@every([f for f in CODED if f.kind != "exponent"])
@pytest.mark.parametrize("variant", ALL)
def test_encode_of_decode_is_the_code(variant: Variant, f):
    """Every finite code comes back, -0 included; NaN codes come back canonical."""
    codes = torch.arange(1 << f.bits, dtype=torch.uint8, device=variant.device)
    if reason := variant.refuses("encode", codes.float(), f):
        pytest.skip(reason)
    expected = codes.cpu().clone()
    for code in range(1 << f.bits):
        if isinstance(value := oracles.value_of(f, code), float) and math.isnan(value):
            expected[code] = oracles.nan_code(f, bool(code >> (f.bits - 1)))
    with variant.use():
        assert_same_bits(lb.encode(lb.decode(codes, f), f, saturate=False).cpu(), expected, str(f))


def test_published_rounding_of_overflow():
    x = torch.tensor([464.0, 464.1, 480.0, torch.inf])
    assert lb.encode(x, "fp8_e4m3", saturate=False).tolist() == [0x7E, 0x7F, 0x7F, 0x7F]
    assert lb.encode(x, "fp8_e4m3").tolist() == [0x7E] * 4
    y = torch.tensor([61439.0, 61440.0, -61440.0, -torch.inf])
    assert lb.encode(y, "fp8_e5m2", saturate=False).tolist() == [0x7B, 0x7C, 0xFC, 0xFC]
    assert lb.encode(y, "fp8_e5m2").tolist() == [0x7B, 0x7B, 0xFB, 0xFB]


def test_exact_rationals_of_some_values():
    """The oracle itself, on values that anyone can compute."""
    e4m3 = FORMATS["fp8_e4m3"]
    assert oracles.value_of(e4m3, 0b0_0110_100) == Fraction(3, 4)
    assert oracles.value_of(e4m3, 0b1_1010_011) == -11
    assert oracles.to_bits(Fraction(1, 10)) == 0x3DCCCCCD
    assert oracles.to_bits(Fraction(2) ** 128) == oracles.F32_INF
    assert oracles.to_bits(Fraction(1, 2**150)) == 0 and oracles.to_bits(Fraction(3, 2**151)) == 1
