"""The table of formats: published values, derived properties against ml_dtypes and torch, custom ones, C++'s copy."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import oracles
from support.oracles import ML_DTYPES

from lowbit import formats
from lowbit.formats import FORMATS, Format, find, float_format
from lowbit.testing.inputs import element_formats

FLOATING = [f for f in FORMATS.values() if f.kind == "float"]
CODED = [f for f in [*FORMATS.values(), *element_formats()] if f.bits <= 8]


def named(rows):
    return pytest.mark.parametrize("f", rows, ids=str)


# -- published values --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, code, value",
    [
        ("fp8_e4m3", 0b0_0110_100, 0.75),
        ("fp8_e4m3", 0b1_1010_011, -11.0),
        ("fp8_e4m3", 0b0_0000_010, 2.0**-8),
        ("fp8_e4m3", 0b0_1111_110, 448.0),
        ("fp8_e4m3", 0b0_0000_001, 2.0**-9),
        ("fp8_e4m3", 0b0_0001_000, 2.0**-6),
        ("fp8_e5m2", 0b0_11110_11, 57344.0),
        ("fp8_e5m2", 0b0_11111_00, math.inf),
        ("fp8_e5m2", 0b1_11111_00, -math.inf),
        ("fp8_e5m2", 0b0_00000_01, 2.0**-16),
        ("fp6_e3m2", 0b0_111_11, 28.0),
        ("fp6_e3m2", 0b0_000_01, 0.0625),
        ("fp6_e2m3", 0b0_11_111, 7.5),
        ("fp6_e2m3", 0b0_00_001, 0.125),
        ("e8m0", 0, 2.0**-127),
        ("e8m0", 127, 1.0),
        ("e8m0", 254, 2.0**127),
        ("int8", 0x80, -128.0),
        ("uint8", 0x80, 128.0),
        ("int4", 0xF, -1.0),
        ("uint4", 0xF, 15.0),
        ("e2m1b3", 0b0_11_1, 1.5),
        ("e2m1b3", 0b0_00_1, 0.125),
    ],
)
def test_published_values(name, code, value):
    assert find(name).value(code) == value


def test_published_nan_codes():
    e4m3, e5m2 = find("fp8_e4m3"), find("fp8_e5m2")
    assert [c for c in range(256) if math.isnan(e4m3.value(c))] == [0x7F, 0xFF]
    assert [c for c in range(256) if math.isnan(e5m2.value(c))] == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert [c for c in range(256) if math.isnan(find("e8m0").value(c))] == [0xFF]
    assert not any(f.has_nan for f in (find("fp6_e3m2"), find("fp6_e2m3"), find("fp4_e2m1"), find("nf4")))


def test_fp4_is_the_whole_published_table():
    assert find("fp4_e2m1").table == (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def test_a_1_2_1_format_with_bias_3():
    f = float_format(2, 1, bias=3)
    assert f.name == "e2m1b3" and f.bits == 4
    assert f.table[:8] == (0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5)
    assert (f.max, f.min_normal, f.min_subnormal, f.epsilon, f.num_finite) == (1.5, 0.25, 0.125, 0.5, 16)


def test_nf4_is_the_table_of_qlora():
    nf4 = find("nf4")
    assert nf4.codebook == tuple(float(np.float32(v)) for v in nf4.codebook), "entries are fp32 numbers"
    assert nf4.zero_code == 7 and nf4.value(7) == 0.0 and nf4.value(0) == -1.0 and nf4.value(15) == 1.0
    assert sorted(nf4.codebook) == list(nf4.codebook)
    for bits, low, high in zip(nf4.thresholds, nf4.codebook, nf4.codebook[1:], strict=False):
        middle, found = (Fraction(low) + Fraction(high)) / 2, oracles.from_bits(bits)
        above = oracles.from_bits(bits + 1 if bits < oracles.SIGN else bits - 1)
        assert found <= middle < above


def dynamic_tree(bits, signed):
    """By the data type of arXiv 2110.02861, figure 2: a sign, zeros that count decades, a 1, the rest a fraction.

    The fraction's codes cut [0.1, 1] into equal parts, whose middles are the values. Without a sign, the first bit is
    one more of the fraction. The two codes without a 1 are 0 and 1.
    """
    found = {Fraction(0), Fraction(1)}
    for zeros in range(bits - 1):
        width = bits - 1 - zeros - 1 + (not signed)
        for code in range(2**width):
            middle = Fraction(1, 10) + Fraction(9, 10) * (code + Fraction(1, 2)) / 2**width
            found |= {sign * middle / 10**zeros for sign in ((1, -1) if signed else (1,))}
    return found


def companded(f):
    """By arXiv 2602.23349: equal steps of the compressed number, expanded again, that is solved for x."""
    codes = range(-128, 128) if f.signed else range(1, 257)
    levels = [Fraction(k, 256 if not f.signed else 128 if k < 0 else 127) for k in codes]
    found = {y / (2 - abs(y)) for y in levels}
    assert {2 * x / (1 + abs(x)) for x in found} == set(levels)
    return found


BOOKS = {
    "dynamic8": lambda f: dynamic_tree(8, True),
    "udynamic8": lambda f: dynamic_tree(8, False),
    "dynamic4": lambda f: dynamic_tree(4, True),
    "compand8": companded,
    "ucompand8": companded,
}


@pytest.mark.parametrize("name", BOOKS)
def test_codebooks_are_the_published_numbers_rounded_once(name):
    f = find(name)
    assert f.codebook == tuple(oracles.fp32(v) for v in sorted(BOOKS[name](f))) and len(f.codebook) == 1 << f.bits


def bitsandbytes_map(signed, decades, bits):
    """``bitsandbytes.functional.create_dynamic_map``, from its source: the same numbers in fp32 arithmetic."""
    values = [0.0, 1.0]
    for i in range(decades):
        edges = torch.linspace(0.1, 1, 2 ** (i + bits - 1 - decades + (not signed)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - decades + 1)
        values += [*middles.tolist(), *(-middles if signed else middles[:0]).tolist()]
    return sorted(values)


@pytest.mark.parametrize("name", ["dynamic8", "udynamic8", "dynamic4"])
def test_dynamic_trees_are_those_of_bitsandbytes(name):
    """Within what rounds in its fp32 arithmetic: ends, a middle and a product, each half a unit in the last place."""
    f = find(name)
    theirs = bitsandbytes_map(f.signed, f.bits - 1, f.bits)
    assert f.codebook == pytest.approx(theirs, rel=2.0**-22, abs=0)


def test_the_logarithmic_book_halves_every_two_steps():
    ulog4 = find("ulog4")
    assert ulog4.codebook[1::2] == tuple(2.0**-k for k in range(7, -1, -1))
    for value, k in zip(ulog4.codebook[::2], range(7, -1, -1), strict=True):
        assert oracles.to_bits(Fraction(value)) == oracles.to_bits(Fraction(math.isqrt(2 << 200), (1 << 100 + k) * 2))


@pytest.mark.parametrize(
    "name, signed, least, zero_code",
    [
        ("nf4", True, -1.0, 7), ("dynamic8", True, -0.99296875, 127), ("udynamic8", False, 0.0, 0),
        ("dynamic4", True, -0.8875, 7), ("ulog4", False, 2.0**-7.5, 0), ("compand8", True, -1.0, 128),
        ("ucompand8", False, 1 / 511, 0),
    ],
)  # fmt: skip
def test_ends_of_codebooks(name, signed, least, zero_code):
    f = find(name)
    assert (f.signed, f.value(0), f.max, f.zero_code) == (signed, np.float32(least), 1.0, zero_code)
    assert f.signed == (0.0 in f.codebook) or name == "udynamic8"


@named([f for f in FORMATS.values() if f.kind == "codebook"])
def test_weights_are_the_nearest_numbers(f):
    gaps = [high - low for low, high in zip(map(Fraction, f.codebook), map(Fraction, f.codebook[1:]), strict=False)]
    assert f.weights == (*(oracles.to_bits(65536 / gap) for gap in gaps), 0)


# -- derived properties ------------------------------------------------------------------------------------------------
@named(CODED)
def test_values_are_the_rationals(f):
    for code in range(1 << f.bits):
        expected, value = oracles.value_of(f, code), f.value(code)
        if isinstance(expected, float) and math.isnan(expected):
            assert math.isnan(value)
        else:
            assert value == expected
            assert value == np.float32(value), "every value is an fp32 number"
        bits = oracles.to_bits(expected, negative=f.signed and f.kind == "float" and bool(code >> (f.bits - 1)))
        assert f.bits_table[code] == bits


@named(CODED)
def test_derived_properties_follow_from_the_codes(f):
    values = [oracles.value_of(f, c) for c in range(1 << f.bits)]
    finite = [v for v in values if isinstance(v, Fraction)]
    positive = sorted(v for v in finite if v > 0)
    assert f.max == max(finite)
    assert f.min_subnormal == positive[0]
    assert f.num_finite == len(finite)
    assert f.has_inf == (math.inf in values)
    assert f.has_nan == any(isinstance(v, float) and math.isnan(v) for v in values)
    assert f.value(f.max_code) == f.max
    if f.kind == "float":
        assert f.min_normal == 2.0 ** (1 - f.bias) == 2.0**f.emin
        assert f.inf_code == (values.index(math.inf) if f.has_inf else -1)
    if f.kind == "integer":
        assert (f.qmin, f.qmax) == (min(finite), max(finite))


@named([f for f in FLOATING if f.name in ML_DTYPES])
def test_ml_dtypes_finfo(f):
    theirs = ml_dtypes.finfo(ML_DTYPES[f.name])
    assert f.max == float(theirs.max)
    assert f.min_normal == float(theirs.smallest_normal)
    assert f.min_subnormal == float(theirs.smallest_subnormal)
    assert f.epsilon == float(theirs.eps)
    assert (f.bits, f.mantissa, f.exponent) == (theirs.bits, theirs.nmant, theirs.nexp)


@named([f for f in FORMATS.values() if f.torch_dtype])
def test_torch_finfo(f):
    dtype = getattr(torch, f.torch_dtype)
    if f.kind == "integer":
        theirs = torch.iinfo(dtype)
        assert (f.qmin, f.qmax, f.bits) == (theirs.min, theirs.max, theirs.bits)
        return
    theirs = torch.finfo(dtype)
    assert (f.max, f.bits) == (theirs.max, theirs.bits)
    if f.kind == "float":
        assert (f.min_normal, f.epsilon) == (theirs.smallest_normal, theirs.eps)


@named([f for f in CODED if f.torch_dtype and f.kind != "integer"])
def test_torch_decodes_the_same_bits(f):
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(getattr(torch, f.torch_dtype)).float()
    ours = torch.tensor(f.table)
    assert torch.equal(theirs.isnan(), ours.isnan())
    assert torch.equal(theirs[~ours.isnan()], ours[~ours.isnan()])


def test_wide_rows():
    assert (find("tf32").bits, find("tf32").epsilon, find("tf32").max) == (
        19,
        2.0**-10,
        find("bf16").max + 2.0**120 * 0.875,
    )
    with pytest.raises(ValueError, match=r"fp16 has 16 bits; only formats of at most 8 bits have codes"):
        _ = find("fp16").table
    assert find("fp32").value(0x3F800000) == 1.0 and find("bf16").value(0xC000) == -2.0


# -- custom formats ----------------------------------------------------------------------------------------------------
def _attempt(exponent, mantissa, bias, kind) -> Format | None:
    try:
        return float_format(exponent, mantissa, bias, inf=kind == "inf", nan=True if kind == "nan" else None)
    except ValueError:
        return None


@given(
    st.integers(1, 7),
    st.integers(0, 6),
    st.none() | st.integers(-20, 140),
    st.sampled_from(["", "inf", "nan"]),
)
def test_custom_formats_round_trip_through_their_name(exponent, mantissa, bias, kind):
    f = _attempt(exponent, mantissa, bias, kind)
    if f is None:
        return
    assert find(f.name) is f or find(f.name) == f
    assert float_format(exponent, mantissa, f.bias, inf=f.nan == "ieee", nan=f.nan != "none" or None) == f
    assert f.bits == 1 + exponent + mantissa <= 8
    for code in range(1 << f.bits):
        expected, value = oracles.value_of(f, code), f.value(code)
        assert value == expected or (math.isnan(value) and math.isnan(expected))
    assert f.max == oracles.largest(f)


def test_custom_parameters_of_a_named_row_are_that_row():
    assert float_format(4, 3, nan=True) is FORMATS["fp8_e4m3"]
    assert float_format(5, 2, inf=True) is FORMATS["fp8_e5m2"]
    assert float_format(2, 1) is FORMATS["fp4_e2m1"]
    assert float_format(3, 2) is FORMATS["fp6_e3m2"]
    assert float_format(4, 3).name == "e4m3" and float_format(4, 3).max == 480.0


def test_a_format_is_a_name_and_no_dtype():
    with pytest.raises(TypeError, match=r"a Format or a name such as 'fp8_e4m3', got dtype"):
        find(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(exponent=5, mantissa=3), r"at most 8 bits with the sign; got 1-5-3 \(9 bits\)"),
        (dict(exponent=0, mantissa=3), r"exponent >= 1"),
        (dict(exponent=3, mantissa=-1), r"mantissa >= 0"),
        (dict(exponent=4, mantissa=3, inf=True, nan=False), r"inf=True reserves the top exponent"),
        (dict(exponent=1, mantissa=2, inf=True), r"inf=True reserves the top exponent"),
        (dict(exponent=4, mantissa=3, bias=200), r"choose another bias"),
        (dict(exponent=4, mantissa=3, bias=-120), r"choose another bias"),
    ],
)
def test_custom_formats_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        float_format(**arguments)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown format 'fp8'; expected one of fp8_e4m3, fp8_e5m2.*e2m1b3"):
        find("fp8")
    with pytest.raises(ValueError, match=r"fp8_e4m3 has codes 0..255, got 256"):
        find("fp8_e4m3").value(256)


# -- the copy that C++ has ---------------------------------------------------------------------------------------------
def test_the_generated_table_equals_this_one():
    native = pytest.importorskip("lowbit._native", reason="the compiled extension is not built")
    assert native.fingerprint == formats.fingerprint()
    rows = {row["name"]: row for row in native.format_table()}
    coded = {f.name: f for f in formats.FORMATS.values() if f.bits <= 8}
    assert list(rows) == list(coded)
    for name, f in coded.items():
        row = rows[name]
        assert row["params"] == f.params()
        assert tuple(row["values"]) == f.bits_table
        assert tuple(row["thresholds"]) == (f.thresholds if f.codebook else ())
        assert tuple(row["weights"]) == (f.weights if f.codebook else ())
        assert row["zero_code"] == f.zero_code


def test_a_library_built_from_another_table_is_not_used(monkeypatch):
    from lowbit.backends import native

    if native.loading_error() is not None:
        pytest.skip(native.loading_error())
    monkeypatch.setattr(formats, "FORMATS", {**formats.FORMATS, "fp7_e3m3": float_format(3, 3)})
    assert "was built with another table of formats" in native.loading_error.__wrapped__()
    assert native.loading_error.__wrapped__().endswith("rebuild: make build")
