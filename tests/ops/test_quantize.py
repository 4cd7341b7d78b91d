"""quantize, dequantize and fake_quantize for every scheme, shape, stride and backend; their errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.bits import assert_same_bits
from support.variants import ALL, Variant, flush_denormal

import lowbit as lb
from lowbit.formats import FORMATS
from lowbit.testing.inputs import random_matrix, schemes
from lowbit.testing.quantize import ragged_matrices

everywhere = pytest.mark.parametrize("variant", ALL)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


# -- fake_quantize == quantize().dequantize() --------------------------------------------------------------------------
@pytest.mark.thinned(9)
@pytest.mark.parametrize("s", schemes(), ids=str)
def test_fake_quantize_is_quantize_then_dequantize(s):
    """Asked of the reference; these matrices are among the samples on which every kernel equals it."""
    for x in ragged_matrices():
        shape = x.shape
        with lb.use_backend("reference"):
            assert_same_bits(lb.fake_quantize(x, s), lb.quantize(x, s).dequantize(), f"{s} {shape}", source=x)
            rng = dict(rounding=lb.Rounding(3, 1, "w/input", offset=9, pitch=777))
            both = lb.fake_quantize(x, s, **rng), lb.quantize(x, s, **rng).dequantize()
            assert_same_bits(*both, f"{s} {shape} stochastic", source=x)
            q = lb.quantize(random_matrix(*shape, seed=50), s)
            static = dict(scale=q.scale, zero_point=q.zero_point, global_scale=q.global_scale)
            both = lb.fake_quantize(x, s, **static), lb.quantize(x, s, **static).dequantize()
            assert_same_bits(*both, f"{s} {shape} static", source=x)


# -- shapes, strides, empties ------------------------------------------------------------------------------------------
LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "offset": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 1))[1:-1, 3:-2],
    "reversed strides": lambda x: x.flip(0, 1).flip(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@everywhere
def test_strides_do_not_matter(variant: Variant, layout):
    x = random_matrix(13, 70, seed=2, extremes=True).to(variant.device)
    y = LAYOUTS[layout](x)
    with variant.use():
        for name, dtype in zip(
            ("fp8_e4m3:row", "mxfp4", "int4:group32:affine", "nvfp4", "int8:col"), FLOATS * 2, strict=False
        ):
            for wanted in [dtype] if variant.interpreted else FLOATS:
                a, b = lb.quantize(x.to(wanted), name), lb.quantize(LAYOUTS[layout](x.to(wanted)), name)
                for part in a.parts:
                    assert_same_bits(b.parts[part], a.parts[part], f"{name} {part}")
        assert_same_bits(lb.encode(y, "fp8_e5m2"), lb.encode(x, "fp8_e5m2"))
        assert_same_bits(lb.fake_quantize(y, "mxfp8"), lb.fake_quantize(x, "mxfp8"))


def test_expanded_inputs():
    x = torch.randn(5, 1)
    assert_same_bits(lb.quantize(x.expand(5, 40), "int8:row").codes, lb.quantize(x.repeat(1, 40), "int8:row").codes)
    assert_same_bits(lb.encode(torch.tensor(1.5).expand(3, 4), "fp4_e2m1"), torch.full((3, 4), 3, dtype=torch.uint8))


@everywhere
@pytest.mark.parametrize("shape", [(), (1,), (37,), (2, 3, 20), (2, 1, 3, 5)], ids=str)
def test_any_rank_is_the_matrix_it_stands_for(variant: Variant, shape):
    x = torch.randn(shape).to(variant.device)
    rows, cols = lb.scaling.as_matrix(shape)
    for name in ("int8:row", "mxfp4", "uint4:group7:affine", "nvfp4", "fp8_e4m3:tensor", "int4:col"):
        with variant.use():
            q, flat = lb.quantize(x, name), lb.quantize(x.reshape(rows, cols), name)
            y = q.dequantize()
        assert q.shape == x.shape and y.shape == x.shape and y.dtype == x.dtype
        assert tuple(q.codes.shape) == (
            (*shape[:-1], q.scheme.packed_cols(cols)) if shape else (1 * q.scheme.packed_cols(1),)
        )
        assert_same_bits(q.codes.reshape(rows, -1), flat.codes)
        assert_same_bits(q.scale, flat.scale)
        assert q.nbytes == q.scheme.nbytes(shape)
        assert_same_bits(lb.fake_quantize(x, name), y)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("s", schemes()[::9], ids=str)
def test_empty_tensors(s, shape):
    x = torch.empty(shape)
    q = lb.quantize(x, s)
    assert q.dequantize().shape == x.shape and lb.fake_quantize(x, s).shape == x.shape
    assert tuple(q.scale.shape) == s.scale_shape(*lb.scaling.as_matrix(shape))
    assert q.nbytes == s.nbytes(shape)
    assert lb.encode(x, s.format).shape == x.shape and lb.decode(lb.encode(x, s.format), s.format).shape == x.shape
    assert lb.unpack(lb.pack(lb.encode(x, s.format), s.format.bits), s.format.bits, shape).shape == x.shape


@everywhere
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("name", ["int8:tensor", "uint4:group32:affine", "nvfp4", "fp8_e4m3:col"])
def test_empty_tensors_are_the_same_on_every_backend(variant: Variant, name, shape):
    x = torch.empty(shape, device=variant.device)
    wanted = lb.quantize(x, name)
    with variant.use(), flush_denormal():
        q = lb.quantize(x, name)
        assert q.dequantize().shape == lb.fake_quantize(x, name).shape == x.shape
    for part in wanted.parts:
        assert_same_bits(q.parts[part], wanted.parts[part], part)


# -- out= --------------------------------------------------------------------------------------------------------------
@everywhere
@pytest.mark.parametrize("name", ["fp8_e4m3:row", "uint4:group32:affine", "nvfp4", "mxfp6:ceil", "nf4:e4m3"])
def test_out_is_filled_and_returned(variant: Variant, name):
    x, y = (torch.randn(9, 70, device=variant.device) for _ in range(2))
    with variant.use():
        wanted = lb.quantize(y, name)
        out = lb.quantize(x, name)
        storages = {part: t.data_ptr() for part, t in out.parts.items()}
        assert lb.quantize(y, name, out=out) is out
        for part in wanted.parts:
            assert_same_bits(out.parts[part], wanted.parts[part], part)
            assert out.parts[part].data_ptr() == storages[part]
        static = dict(scale=wanted.scale, zero_point=wanted.zero_point, global_scale=wanted.global_scale)
        again = lb.quantize(x, name)
        assert lb.quantize(y, name, **static, out=again) is again
        for part in wanted.parts:
            assert_same_bits(again.parts[part], wanted.parts[part], f"static {part}")


@everywhere
def test_out_of_the_codecs(variant: Variant):
    x = torch.randn(6, 30, device=variant.device)
    with variant.use():
        codes = torch.empty(6, 30, dtype=torch.uint8, device=variant.device)
        assert lb.encode(x, "fp8_e4m3", out=codes) is codes
        assert_same_bits(codes, lb.encode(x, "fp8_e4m3"))
        y = torch.empty(30, 6, dtype=torch.bfloat16, device=variant.device).t()  # an out of any strides
        assert lb.decode(codes, "fp8_e4m3", torch.bfloat16, out=y) is y
        assert_same_bits(y, lb.decode(codes, "fp8_e4m3", torch.bfloat16))
        scalar = torch.empty((), dtype=torch.uint8, device=variant.device)
        assert lb.encode(torch.tensor(3.0, device=variant.device), "fp4_e2m1", out=scalar) is scalar
    assert int(scalar) == 5


@everywhere
@pytest.mark.parametrize("name", ["nf4", "mxfp8", "uint4:group32:affine", "int8:tensor"])
def test_out_of_dequantize(variant: Variant, name):
    x = torch.randn(6, 33, device=variant.device)
    with variant.use():
        q = lb.quantize(x, name)
        turned = torch.empty(33, 6, device=variant.device).t()
        for out in (torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16), turned):
            assert q.dequantize(out=out) is out
            assert_same_bits(out, q.dequantize(out.dtype))
        scalar = torch.empty((), device=variant.device)
        assert lb.quantize(x[0, 0], "int8:tensor", scale=0.5).dequantize(out=scalar) is scalar
    assert float(scalar) == float(x[0, 0].div(0.5).round().mul(0.5))


def test_out_that_does_not_fit():
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"lowbit.dequantize: out must be of shape \[4, 8\], got \[8, 4\]"):
        lb.quantize(x, "mxfp8").dequantize(out=torch.empty(8, 4))
    with pytest.raises(ValueError, match=r"out must be torch.float16 \[4, 8\] on cpu, got torch.float32 \[4, 8\]"):
        lb.quantize(x, "mxfp8").dequantize(torch.float16, out=torch.empty(4, 8))
    with pytest.raises(RuntimeError, match=r"lowbit.dequantize: out requires grad"):
        lb.quantize(x, "mxfp8").dequantize(out=torch.empty(4, 8, requires_grad=True))
    q = lb.quantize(x, "int8:tensor")
    with pytest.raises(ValueError, match=r"out shares memory with scale"):
        q.map(lambda t: t if t.dtype == torch.uint8 else x[:1, :1]).dequantize(out=x)
    with pytest.raises(ValueError, match=r"out must be torch.uint8 \[4, 8\] on cpu, got torch.int8 \[4, 8\]"):
        lb.encode(x, "fp8_e4m3", out=torch.empty(4, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"out must be torch.uint8 \[4, 8\] on cpu, got torch.uint8 \[8, 4\]"):
        lb.encode(x, "fp8_e4m3", out=torch.empty(8, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"out holds int8:row \[4, 8\] of .*, but the result is int8:row \[2, 8\] of"):
        lb.quantize(x[:2], "int8:row", out=lb.quantize(x, "int8:row"))
    with pytest.raises(ValueError, match=r"of torch.float32, but the result is int8:row \[4, 8\] of torch.bfloat16"):
        lb.quantize(x.bfloat16(), "int8:row", out=lb.quantize(x, "int8:row"))
    with pytest.raises(ValueError, match=r"out must be torch.uint8 \[\] on cpu, got torch.uint8 \[1\]"):
        lb.encode(torch.tensor(1.0), "fp8_e4m3", out=torch.empty(1, dtype=torch.uint8))
    codes = torch.zeros(4, 8, dtype=torch.uint8)
    for out in (torch.empty(4, 8, requires_grad=True), torch.empty(4, 8, requires_grad=True)[:]):
        with pytest.raises(RuntimeError, match=r"lowbit.decode: out requires grad"):
            lb.decode(codes, "fp8_e4m3", out=out)
        with torch.no_grad():
            assert lb.decode(codes, "fp8_e4m3", out=out) is out


# -- static scales -----------------------------------------------------------------------------------------------------
def test_the_forms_in_which_users_give_scales():
    x = torch.randn(6, 64)
    one = lb.quantize(x, "int8:tensor", scale=0.5)
    for scale in (
        torch.tensor(0.5),
        torch.tensor([0.5]),
        torch.tensor([[0.5]]),
        torch.tensor(0.5, dtype=torch.float64),
        1 / 2,
    ):
        assert_same_bits(lb.quantize(x, "int8:tensor", scale=scale).codes, one.codes)
    scales = torch.rand(6) + 0.1
    rows = lb.quantize(x, "int8:row", scale=scales[:, None])
    assert_same_bits(lb.quantize(x, "int8:row", scale=scales).codes, rows.codes)
    assert tuple(rows.scale.shape) == (6, 1)
    assert lb.quantize(x, "int8:row", scale=0.25).scale.tolist() == [[0.25]] * 6
    powers = lb.quantize(x, "mxfp8", scale=torch.full((6, 2), 0.125))
    assert powers.scale.tolist() == [[124, 124]] * 6
    assert_same_bits(lb.quantize(x, "mxfp8", scale=powers.scale).codes, powers.codes)
    assert lb.quantize(x, "mxfp8", scale=2.0**-127).scale.unique().tolist() == [0]
    assert lb.quantize(x, "int8:tensor:bf16", scale=0.5).scale.dtype == torch.bfloat16
    affine = lb.quantize(x, "uint8:row:affine", scale=scales, zero_point=128)
    assert affine.zero_point.tolist() == [[128]] * 6
    for zero in (
        torch.full((6,), 128),
        torch.full((6, 1), 128, dtype=torch.uint8),
        torch.full((6,), 128, dtype=torch.int32),
    ):
        assert_same_bits(lb.quantize(x, "uint8:row:affine", scale=scales, zero_point=zero).codes, affine.codes)
    two = lb.quantize(x, "nvfp4")
    again = lb.quantize(x, "nvfp4", scale=two.scale, global_scale=float(two.global_scale))
    assert_same_bits(again.codes, two.codes)
    dynamic = lb.quantize(x, "nvfp4", global_scale=two.global_scale)
    assert_same_bits(dynamic.scale, two.scale)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(scheme="int8:row", scale=torch.ones(5)), ValueError, r"scale must have shape \[6, 1\], got \[5\]"),
        (dict(scheme="int8:row", zero_point=3), ValueError, "a zero_point needs its scale"),
        (dict(scheme="int8:row", scale=1.0, zero_point=3), ValueError, "has no zero point; add ':affine'"),
        (dict(scheme="int8:row:affine", scale=1.0), ValueError, "needs its zero_point"),
        (dict(scheme="uint4:row:affine", scale=1.0, zero_point=16), ValueError, r"integers in \[0, 15\]"),
        (dict(scheme="uint4:row:affine", scale=1.0, zero_point=1.5), ValueError, r"integers in \[0, 15\]"),
        (dict(scheme="int4:row:affine", scale=1.0, zero_point=torch.tensor(1j)), ValueError, r"integers in \[-8, 7\]"),
        (dict(scheme="int4:row:affine", scale=1.0, zero_point=-9), ValueError, r"integers in \[-8, 7\]"),
        (
            dict(scheme="mxfp8", scale=0.3),
            ValueError,
            "stores scales as e8m0, which cannot represent this scale exactly",
        ),
        (dict(scheme="int8:row:bf16", scale=0.3), ValueError, "stores scales as bf16, which cannot represent"),
        (dict(scheme="mxfp8", scale=-1.0), ValueError, "cannot represent this scale"),
        (dict(scheme="mxfp8", scale=0.0), ValueError, "cannot represent this scale"),
        (dict(scheme="nvfp4", scale=1.0), ValueError, "needs its global_scale"),
        (dict(scheme="int8:row", global_scale=1.0), ValueError, "has no global_scale"),
        (dict(scheme="int8:row", scale=1 + 0j), TypeError, "a scale must be a real number, got a complex one"),
        (dict(scheme="int8:row", scale=torch.ones(6, 1) * 1j), TypeError, "a scale must be a real number"),
        (dict(scheme="nvfp4", global_scale=torch.tensor(1j)), TypeError, "a scale must be a real number"),
        (dict(scheme="int9:row"), ValueError, "unknown format 'int9'"),
        (dict(scheme="int8:row", rounding="up"), ValueError, "rounding must be 'nearest' or 'stochastic', got 'up'"),
    ],
)
def test_errors_of_quantize(arguments, error, message):
    for function in (lb.quantize, lb.fake_quantize):
        with pytest.raises(error, match=message):
            function(torch.randn(6, 64), **arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn, torch.bool])
def test_dtypes_that_are_refused(dtype):
    x = torch.ones(4, 8).to(dtype)
    for call in (
        lambda: lb.encode(x, "fp8_e4m3"),
        lambda: lb.quantize(x, "int8:row"),
        lambda: lb.quantize(x, "nvfp4"),
        lambda: lb.fake_quantize(x, "int8:row"),
        lambda: lb.scaled_mm(x, lb.quantize(torch.ones(4, 8), "int8:row")),
    ):
        with pytest.raises(TypeError, match="must be float32, bfloat16 or float16, got"):
            call()


def test_codes_of_another_dtype_are_refused():
    for call in (lambda: lb.decode(torch.ones(3), "fp8_e4m3"), lambda: lb.pack(torch.ones(3, dtype=torch.int8), 4)):
        with pytest.raises(TypeError, match="must be uint8 codes, got"):
            call()


def test_formats_that_have_no_codes():
    x = torch.ones(3)
    with pytest.raises(ValueError, match="e8m0 holds scales, which are made by quantize"):
        lb.encode(x, "e8m0")
    with pytest.raises(ValueError, match="only formats of at most 8 bits have codes"):
        lb.encode(x, "bf16")
    with pytest.raises(ValueError, match=r"dtype must be float32, bfloat16 or float16, got torch\.float64"):
        lb.decode(torch.zeros(3, dtype=torch.uint8), "fp8_e4m3", torch.float64)


@pytest.mark.parametrize(
    ("scheme", "arguments", "message"),
    [
        ("int8:group8", {"scale": torch.rand(4, 8) + 0.5}, "must have shape"),  # [4, 8], where [8, 4] is asked for
        ("int8:tensor", {"scale": torch.tensor(0.1, dtype=torch.float64)}, "cannot represent"),
        ("int4:row:affine", {"scale": torch.rand(8, 1) + 0.5, "zero_point": torch.full((8, 1), 100, dtype=torch.int8)},
         "zero_point"),
        ("mxfp8:T", {"scale": torch.full((1, 32), 0.75)}, "cannot represent"),
        ("nvfp4", {"global_scale": torch.tensor(0.1, dtype=torch.float64)}, "cannot represent"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(scheme, arguments, message):
    with pytest.raises(ValueError, match=message):
        lb.quantize(torch.randn(8, 32), scheme, **arguments)


def test_objects_that_are_not_what_their_name_says_are_refused():
    with pytest.raises(ValueError, match="another scheme"):
        lb.quantize(torch.randn(2, 32), dataclasses.replace(lb.scheme("mxfp8"), rounding="ceil"))
    with pytest.raises(ValueError, match="another format"):
        lb.encode(torch.randn(2, 32), dataclasses.replace(FORMATS["fp8_e4m3"], bias=8))


# -- factors -----------------------------------------------------------------------------------------------------------
@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "scheme", ["fp8_e5m2:row", "fp8_e5m2:col", "int8:tensor", "mxfp8:ceil:T", "nvfp4", "int4:group7"]
)
@everywhere
def test_factors_multiply_in_fp32_before_anything_is_rounded(variant: Variant, scheme):
    for index, (rows, cols) in enumerate([(1, 1), (5, 67), (64, 2100)]):
        x = random_matrix(rows, cols, seed=index, extremes=index == 1).to(FLOATS[index]).to(variant.device)
        for shape in ((rows, 1), (1, cols)):
            factors = random_matrix(*shape, seed=7).to(variant.device)
            with variant.use():
                for rounding in ("nearest", lb.Rounding(3, 1, "w/input")):
                    got = lb.quantize(x, scheme, rounding=rounding, factors=factors)
                    want = lb.quantize(x.float() * factors, scheme, rounding=rounding)
                    for name, part in want.parts.items():
                        assert_same_bits(got.parts[name], part, f"{scheme} {name} {list(x.shape)} {shape}")


def test_factors_are_refused_by_shape_and_dtype():
    x = torch.randn(3, 5)
    for factors in (torch.ones(5), torch.ones(3, 5), torch.ones(1, 1), torch.ones(3, 1, dtype=torch.bfloat16)):
        for scheme in ("int8:row", "nvfp4"):
            with pytest.raises(ValueError, match=r"factors must be float32 \[3, 1\] or \[1, 5\]"):
                lb.quantize(x, scheme, factors=factors)


@pytest.mark.parametrize("scheme", ["int8:row", "nvfp4"])
def test_factors_are_of_the_rows_of_any_rank(scheme):
    x, factors = torch.randn(2, 3, 32), torch.rand(6, 1)
    got, want = lb.quantize(x, scheme, factors=factors), lb.quantize(x * factors.reshape(2, 3, 1), scheme)
    assert got.shape == want.shape and all(torch.equal(got.parts[name], part) for name, part in want.parts.items())
