"""Stochastic rounding: the bits of Philox, the element's index, the same everywhere, exact in the mean."""

from __future__ import annotations

import functools
import zlib
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import boundaries, oracles
from support.bits import assert_same_bits
from support.variants import ALL, NATIVE, Variant

import lowbit as lb
from lowbit import reference
from lowbit.testing.inputs import element_formats, random_matrix, specials

everywhere = pytest.mark.parametrize("variant", ALL)
ROUNDED = element_formats()
SCHEMES = [
    "fp8_e4m3:row",
    "fp8_e5m2:tensor",
    "mxfp4:ceil",
    "mxfp6",
    "nvfp4",
    "int8:row",
    "int4:group32",
    "uint8:row:affine",
    "nf4",
    "dynamic8:group256",
]


# -- Philox ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "counter, key, words",
    [  # the known answers that Salmon et al. publish for philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_known_answers(counter, key, words):
    assert oracles.philox(counter, key) == words
    made = reference.philox4x32([torch.tensor([c]) for c in counter], key)
    assert tuple(int(w) for w in made) == words


@everywhere
@pytest.mark.parametrize(
    "rng",
    [
        dict(seed=0),
        dict(seed=1, step=2, stream=3),
        dict(seed=2**64 - 1, step=2**32 - 1, stream=2**32 - 1),
        dict(seed=0x299F31D0A4093822, step=0x13198A2E, stream=0x03707344, offset=0x85A308D3243F6A88 * 8 % 2**64),
        dict(seed=-5, offset=2**35 - 9, pitch=1000),
        dict(seed=7, offset=2**64 - 30, pitch=2**61 + 5),
        dict(seed=9, pitch=3),
        dict(seed=9, pitch=0, offset=4),
        dict(seed=11, stream="layers.3.mlp.up/input"),
    ],
    ids=str,
)
def test_every_bit_of_the_noise(variant: Variant, rng):
    """16 encodes with thresholds 2**-k apart read the whole 16-bit number off each element."""
    rows, cols = 4, 19
    arguments = dict(rng)
    stream = arguments.get("stream", 0)
    words = zlib.crc32(stream.encode()) if isinstance(stream, str) else stream
    pitch, offset = arguments.get("pitch", cols), arguments.get("offset", 0)
    key = (arguments["seed"], arguments.get("step", 0), words)
    wanted = torch.tensor(
        [[oracles.noise(offset + r * pitch + c, *key) for c in range(cols)] for r in range(rows)]
    )  # fmt: skip
    low = torch.zeros(rows, cols, dtype=torch.int64)  # binary search for the noise: up iff fraction + noise carries
    high = torch.full_like(low, 65535)
    with variant.use():
        for _ in range(16):
            middle = (low + high + 1) // 2  # is noise >= middle? a fraction of 65536 - middle carries exactly then
            x = 1.0 + (65536 - middle).float() / 65536 / 8
            up = lb.encode(x.to(variant.device), "fp8_e4m3", lb.Rounding(**arguments)).cpu() == 0x39
            low, high = torch.where(up, middle, low), torch.where(up, high, middle - 1)
    assert_same_bits(low, wanted, str(rng))


# -- the rule ----------------------------------------------------------------------------------------------------------
@pytest.mark.thinned(7)
@everywhere
@pytest.mark.parametrize("f", ROUNDED, ids=str)
def test_codes_equal_exact_rationals(variant: Variant, f):
    near = boundaries.neighbourhood(f)[::7]
    random = np.random.default_rng(3).standard_normal(200).astype(np.float32) * np.float32(f.max / 2)
    bits = np.concatenate([near, random.view(np.uint32), specials().view(torch.int32).numpy().view(np.uint32)])
    x = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    for saturate in (True, False):
        if reason := variant.refuses("encode", x.to(variant.device), f, "stochastic", saturate):
            pytest.skip(reason)
        with variant.use():
            codes = lb.encode(x.to(variant.device), f, lb.Rounding(seed=5, step=1, stream=2, offset=3), saturate)
        expected = [
            oracles.encode(f, int(b), saturate, noise=oracles.noise(3 + i, 5, 1, 2)) for i, b in enumerate(bits)
        ]
        assert_same_bits(codes.cpu(), np.array(expected, np.uint8), f"{f} on {variant}", source=x)


@pytest.mark.thinned(3)
@everywhere
@pytest.mark.parametrize("f", ROUNDED, ids=str)
def test_exact_values_never_move(variant: Variant, f):
    codes = torch.arange(1 << f.bits, dtype=torch.uint8)
    codes = codes[lb.decode(codes, f).isfinite()].repeat(20).to(variant.device)
    if reason := variant.refuses("encode", lb.decode(codes, f), f, "stochastic"):
        pytest.skip(reason)
    with variant.use():
        for step in range(3):
            again = lb.encode(lb.decode(codes, f), f, rounding=lb.Rounding(seed=1, step=step))
            assert_same_bits(again, codes, str(f))


@pytest.mark.parametrize("f", ROUNDED, ids=str)
def test_unbiased_within_the_derived_bound(f):
    """The mean over n draws: bias in (-2**-16, 0] quantum, and at most 6 standard errors of a Bernoulli variable away.

    A single element goes up with probability p = floor(fraction * 2**16) / 2**16; the standard error of the mean of n
    is sqrt(p (1 - p) / n) quanta, and 6 of them are exceeded with probability 2e-9.
    """
    n = 1 << 16
    values = sorted({v for v in f.table if 0 <= v < float("inf")})
    picks = [
        (values[i], values[i + 1]) for i in sorted({0, 1, len(values) // 2, len(values) - 2}) if i + 1 < len(values)
    ]
    for low, high in picks:
        for fraction in (1 / 3, 0.5, 0.9, 2.0**-14):
            x = np.float32(low + (high - low) * fraction)
            at = (float(x) - low) / (high - low)
            codes = lb.encode(torch.full((n,), float(x)), f, rounding=lb.Rounding(seed=int(fraction * 1000) + f.bits))
            y = lb.decode(codes, f).double()
            assert set(y.unique().tolist()) <= {low, high}
            mean = (float(y.mean()) - low) / (high - low)
            error = 6 * (at * (1 - at) / n) ** 0.5
            assert -(2.0**-16) - error <= mean - at <= error, f"{f} between {low} and {high} at {at}: {mean}"


@pytest.mark.parametrize("f", [f for f in ROUNDED if f.kind == "codebook"], ids=str)
def test_codebooks_are_unbiased_over_every_random_word(f):
    """The exact mean over all 65,536 words; three roundings to fp32 move the fraction by 0.012 of 2**-16 at most."""
    words = torch.arange(1 << 16)
    for code, (low, high) in enumerate(pairwise(map(Fraction, f.codebook))):
        if len(f.codebook) > 16 and code % 15 and low and high:
            continue
        for part in (1 / 3, 0.5, 0.9, 2.0**-14, 1 - 2.0**-20):
            x = float(np.float32(low + (high - low) * Fraction(part)))
            codes = reference.encode_codebook(torch.full((1 << 16,), x), f, words)
            ups = int((codes == code + 1).sum())
            assert ups + int((codes == code).sum()) == 1 << 16
            bias = (low + (high - low) * Fraction(ups, 1 << 16) - Fraction(x)) / (high - low) * (1 << 16)
            assert Fraction(-1012, 1000) < bias < Fraction(12, 1000), f"{x} between {low} and {high}: {float(bias)}"


def test_codebooks_at_and_beyond_their_ends():
    x = torch.tensor([-torch.inf, -1.0, -0.9, -1e-45, -0.0, 0.0, 1.0, 1.5, torch.inf, torch.nan])
    for word in (0, 65535):
        codes = [reference.encode_codebook(x, lb.FORMATS[f], torch.tensor(word)).tolist() for f in ("nf4", "ulog4")]
        up = int(word > 0)
        assert codes == [[0, 0, up, 6 + up, 7, 7, 15, 15, 15, 7], [0] * 6 + [15] * 3 + [0]]


def test_signs_round_alike():
    x = torch.randn(1000)
    a = lb.encode(x, "fp8_e4m3", rounding=lb.Rounding(seed=4))
    b = lb.encode(-x, "fp8_e4m3", rounding=lb.Rounding(seed=4))
    assert_same_bits(a ^ 0x80, b)


# -- the same bits everywhere ------------------------------------------------------------------------------------------
@functools.cache
def whole(name: str) -> lb.Quantized:
    with lb.use_backend("reference"):
        return lb.quantize(
            random_matrix(37, 210, seed=1), name, rounding=lb.Rounding(seed=77, step=5, stream="w/weight")
        )


@everywhere
@pytest.mark.parametrize("name", SCHEMES)
def test_same_bits_on_every_backend(variant: Variant, name):
    x = random_matrix(37, 210, seed=1).to(variant.device)
    with variant.use():
        q = lb.quantize(x, name, rounding=lb.Rounding(seed=77, step=5, stream="w/weight"))
    for part, value in q.parts.items():
        assert_same_bits(value.cpu(), whole(name).parts[part], f"{name}: {part}")


@pytest.mark.parametrize("variant", NATIVE)
def test_large_matrices_equal_the_reference(variant: Variant):
    x = random_matrix(130, 3001, seed=2)
    with variant.use():
        codes = lb.encode(x, "fp8_e5m2", rounding=lb.Rounding(seed=1, offset=13))
    with lb.use_backend("reference"):
        assert_same_bits(codes, lb.encode(x, "fp8_e5m2", rounding=lb.Rounding(seed=1, offset=13)))


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_one_subnormal_among_normals_wherever_it_is(variant: Variant, name):
    """Kernels take vectors of normals apart; the least normal, what is below it, zeros and specials in each place."""
    f = lb.FORMATS[name]
    least = float(lb.decode(torch.tensor([1 << f.mantissa], dtype=torch.uint8), f))
    odd = torch.tensor([least, least * (1 - 2**-24), least / 2, least * 2**-7, 1e-40, 0.0, torch.inf, torch.nan])
    odd = torch.stack([odd, -odd], 1).view(-1, 1)
    normals = (torch.rand(64 * len(odd), 64, generator=torch.Generator().manual_seed(1)) + 1) * 8 * least
    normals[::2] *= -1
    x = torch.where(torch.eye(64, dtype=torch.bool).repeat(len(odd), 1), odd.repeat_interleave(64, 0), normals)
    x[range(len(x)), [(row + 1) % 64 for row in range(len(x))]] = f.max  # whose scale is 1
    rounding, scheme = lb.Rounding(seed=4), f"{name}:row"
    with lb.use_backend("reference"):
        codes, quantized = lb.encode(x, f, rounding), lb.quantize(x[x.isfinite().all(1)], scheme, rounding=rounding)
    with variant.use():
        assert_same_bits(lb.encode(x, f, rounding), codes, name)
        again = lb.quantize(x[x.isfinite().all(1)], scheme, rounding=rounding)
    for part, value in again.parts.items():
        assert_same_bits(value, quantized.parts[part], f"{scheme}: {part}")


@functools.cache
def coded() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(29, 83, generator=torch.Generator().manual_seed(8))
    with lb.use_backend("reference"):
        return x, lb.encode(x, "fp8_e4m3", rounding=lb.Rounding(seed=6))


@given(st.data(), st.sampled_from([p.values[0] for p in ALL if not p.values[0].interpreted]))
def test_any_slice_with_offset_and_pitch(data, variant):
    """The slice rounds as it does inside the whole tensor, whatever the kernel's vectors and tails."""
    x, codes = coded()
    top, left = data.draw(st.integers(0, 28)), data.draw(st.integers(0, 82))
    bottom, right = data.draw(st.integers(top + 1, 29)), data.draw(st.integers(left + 1, 83))
    where = (slice(top, bottom), slice(left, right))
    with variant.use():
        part = lb.encode(
            x[where].to(variant.device), "fp8_e4m3", rounding=lb.Rounding(seed=6, offset=top * 83 + left, pitch=83)
        )
    assert_same_bits(part.cpu(), codes[where], str(where))


@everywhere
def test_rows_quantized_apart_are_the_rows_quantized_together(variant: Variant):
    """Sharded by rows, as data-parallel training does."""
    x = random_matrix(24, 200, seed=3).to(variant.device)
    for name in ("fp8_e4m3:row", "mxfp4:ceil", "int8:group128", "int4:row"):
        with variant.use():
            together = lb.quantize(x, name, rounding=lb.Rounding(seed=5))
            parts = [lb.quantize(x[i : i + 8], name, rounding=lb.Rounding(seed=5, offset=i * 200)) for i in (0, 8, 16)]
        assert_same_bits(torch.cat([p.codes for p in parts]), together.codes, name)


def test_a_seed_is_drawn_from_torch_where_none_is_given():
    x = torch.full((1000,), 1.05)
    torch.manual_seed(3)
    a, b = (lb.encode(x, "fp8_e4m3", rounding="stochastic") for _ in range(2))
    torch.manual_seed(3)
    c = lb.encode(x, "fp8_e4m3", rounding="stochastic")
    assert not torch.equal(a, b) and torch.equal(a, c)


def test_words_that_do_not_fit():
    with pytest.raises(ValueError, match="expected an integer of 64 bits"):
        lb.encode(torch.ones(3), "fp8_e4m3", rounding=lb.Rounding(seed=2**64))


def test_nearest_rounding_ignores_the_seed():
    x = torch.randn(100)
    given = torch.ops.lowbit.encode(x, "fp8_e4m3", "nearest", True, torch.tensor([2, 9]), 3, 4, 5)
    assert_same_bits(lb.encode(x, "fp8_e4m3"), given)
