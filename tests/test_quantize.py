"""quantize, dequantize and fake_quantize: every kernel against the reference, and what holds for every scheme."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from bits import assert_same_bits, describe
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree
from variants import ALL, HAS_GPU, Kernel, Variant, flush_denormal, kernels, params, threads, with_each

import lowbit as lb
from lowbit.backends import registry
from lowbit.formats import FORMATS
from lowbit.ops import OPS
from lowbit.ops.samples import element_formats, random_matrix, schemes

EXACT = [spec for spec in OPS.values() if spec.tolerance is None]
everywhere = pytest.mark.parametrize("variant", ALL)
every_scheme = pytest.mark.parametrize("variant, s", with_each(schemes()))
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


# -- every kernel equals the reference ---------------------------------------------------------------------------------
@functools.cache
def expected(op: str) -> list[tuple[Any, tuple[Tensor, ...]]]:
    """The samples of an op with what the reference makes of them."""
    reference = next(impl for impl in lb.impls(op, "cpu") if impl.name == "reference")
    made = []
    for call in OPS[op].samples("cpu"):
        outs = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in OPS[op].outputs(call))
        reference.run(outs, call)
        made.append((call, outs))
    return made


def moved(call: Any, device: str) -> Any:
    """The call with its tensors on a device, strides kept."""
    if device == "cpu":
        return call
    return type(call)(*(_moved(v, device) if isinstance(v, Tensor) else v for v in call))


def _moved(x: Tensor, device: str) -> Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return made.copy_(x)


def check_kernel(kernel: Kernel, every: int = 1) -> None:
    served, reasons = 0, set()
    for call, outs in expected(kernel.op)[::every]:
        got = kernel.run(moved(call, kernel.variant.device))
        if got is None:
            reasons.add(kernel.impl.supports(moved(call, kernel.variant.device)))
            continue
        served += 1
        for name, a, e in zip(OPS[kernel.op].returns, got, outs, strict=True):
            assert_same_bits(a.cpu(), e, f"{kernel}: {name} of {describe(call)}")
    assert all(isinstance(reason, str) and reason for reason in reasons), "a refusal without a reason"
    assert served, f"{kernel} refuses every sample: {reasons}"


@pytest.mark.parametrize("kernel", params([k for spec in EXACT for k in kernels(spec.name)]))
def test_every_kernel_equals_the_reference_in_every_bit(kernel: Kernel):
    check_kernel(kernel, every=23 if kernel.variant.interpreted else 1)


@pytest.mark.parametrize("kernel", [k for spec in EXACT for k in kernels(spec.name) if k.variant.native], ids=str)
def test_native_kernels_do_not_depend_on_the_number_of_threads(kernel: Kernel):
    for count in (1, 2, 3):
        with threads(count):
            check_kernel(kernel, every=11)


@pytest.mark.parametrize("kernel", params(kernels("fake_quantize_backward")))
def test_gradients_equal_the_reference_and_those_of_scales_within_their_bound(kernel: Kernel):
    spec = OPS[kernel.op]
    for call, (grad_x, grad_scale) in expected(kernel.op)[:: 23 if kernel.variant.interpreted else 1]:
        got = kernel.run(moved(call, kernel.variant.device))
        if got is None:
            continue
        assert_same_bits(got[0].cpu(), grad_x, f"{kernel}: {describe(call)}")
        error, bound = (got[1].cpu() - grad_scale).abs(), spec.tolerance(call, kernel.impl.numerics)
        same = (error <= bound) | (got[1].cpu() == grad_scale) | (got[1].cpu().isnan() & grad_scale.isnan())
        assert bool(same.all()), f"{kernel}: scales of {describe(call)}"


@pytest.mark.parametrize("name", ["int8:tensor", "uint4:row:affine", "fp8_e4m3:group24", "int4:col", "nf4"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("variant", [p for p in ALL if not p.values[0].interpreted and str(p.values[0]) != "reference"])
def test_sums_of_gradients_over_blocks_in_pieces(variant: Variant, count, name):
    """Few significant bits, so that sums are exact and agree in every bit; masked grads are Inf, NaN and -0."""
    s = lb.scheme(name)
    x = (random_matrix(140, 4203, seed=8) * 64).round().clamp(-3000, 3000) / 64
    grad = 2.0 ** torch.randint(-1, 2, x.shape) * torch.randint(0, 2, x.shape).mul(2).sub(1)
    scale = torch.full(s.scale_shape(*x.shape), 0.25)
    zero = torch.full(scale.shape, 5, dtype=torch.uint8) if s.affine else None
    call = OPS["fake_quantize_backward"].args(grad, x, name, scale, zero)
    wild = grad.where(x.abs() < 3, torch.tensor([torch.inf, -0.0, torch.nan])[torch.randint(0, 3, x.shape)])
    with lb.use_backend("reference"):
        wanted = torch.ops.lowbit.fake_quantize_backward(*call)
        masked = torch.ops.lowbit.fake_quantize_backward(wild.bfloat16(), x, name)[0]
    with variant.use(), threads(count):
        there = moved(call, variant.device)
        got = torch.ops.lowbit.fake_quantize_backward(*there)
        again = torch.ops.lowbit.fake_quantize_backward(wild.bfloat16().to(variant.device), there.x, name)[0]
    assert_same_bits(got[0].cpu(), wanted[0], name)
    if s.format.kind != "codebook":  # whose levels have many bits
        assert_same_bits(got[1].cpu() + 0.0, wanted[1] + 0.0, name)
    assert_same_bits(again.cpu(), masked, name)


@functools.cache
def large() -> list[tuple[str, Tensor, lb.Quantized, Tensor]]:
    """Schemes on a matrix large enough for every thread and every tail of a vector loop, by the reference."""
    x = random_matrix(67, 1031, damage=True, seed=8)
    made = []
    for name in ("fp8_e4m3:row", "fp8_e5m2:tensor", "int8:col", "int4:group128", "mxfp4:ceil:T", "nvfp4", "nf4:dq",
                 "uint4:group32:affine", "fp6_e3m2:block128x128", "int8:block64x32:affine:bf16"):  # fmt: skip
        for y in (x, x.bfloat16().t()):
            with lb.use_backend("reference"):
                q = lb.quantize(y, name)
                made.append((name, y, q, q.dequantize()))
    return made


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("variant", [p for p in ALL if not p.values[0].interpreted and str(p.values[0]) != "reference"])
def test_large_tensors_equal_the_reference(variant: Variant, count):
    for name, y, wanted, back in large():
        with variant.use(), threads(count):
            q = lb.quantize(y.to(variant.device), name)
            again = q.dequantize()
            faked = lb.fake_quantize(y.to(variant.device), name)
        for part, value in q.parts.items():
            assert_same_bits(value.cpu(), wanted.parts[part], f"{name}: {part}")
        assert_same_bits(again.cpu(), back, f"{name}: dequantize")
        assert_same_bits(faked.cpu(), back, f"{name}: fake_quantize")


# -- fake_quantize == quantize().dequantize() --------------------------------------------------------------------------
RAGGED = [(7, 45), (1, 129), (33, 3)]


@every_scheme
def test_fake_quantize_is_quantize_then_dequantize(variant: Variant, s):
    for index, shape in enumerate(RAGGED):
        x = random_matrix(*shape, seed=index, damage=True).to(FLOATS[index]).to(variant.device)
        if reason := variant.refuses("fake_quantize", x, s) or variant.refuses("quantize", x, s):
            pytest.skip(reason)
        with variant.use():
            assert_same_bits(lb.fake_quantize(x, s), lb.quantize(x, s).dequantize(), f"{s} {shape}", source=x)
            if s.format.kind != "codebook":
                rng = dict(rounding="stochastic", seed=3, step=1, stream="w/input", offset=9, pitch=777)
                both = lb.fake_quantize(x, s, **rng), lb.quantize(x, s, **rng).dequantize()
                assert_same_bits(*both, f"{s} {shape} stochastic", source=x)
            q = lb.quantize(random_matrix(*shape, seed=50).to(variant.device), s)
            static = dict(scale=q.scale, zero_point=q.zero_point, outer_scale=q.outer_scale)
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
    x = random_matrix(13, 70, seed=2, damage=True).to(variant.device)
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
@pytest.mark.parametrize("name", ["fp8_e4m3:row", "uint4:group32:affine", "nvfp4", "mxfp6:ceil", "nf4:dq"])
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
        static = dict(scale=wanted.scale, zero_point=wanted.zero_point, outer_scale=wanted.outer_scale)
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


def test_out_that_does_not_fit():
    x = torch.randn(4, 8)
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
    again = lb.quantize(x, "nvfp4", scale=two.scale, outer_scale=float(two.outer_scale))
    assert_same_bits(again.codes, two.codes)
    dynamic = lb.quantize(x, "nvfp4", outer_scale=two.outer_scale)
    assert_same_bits(dynamic.scale, two.scale)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(scheme="int8:row", scale=torch.ones(5)), ValueError, r"scale must have shape \[6, 1\], got \[5\]"),
        (dict(scheme="int8:row", zero_point=3), ValueError, "a zero_point needs its scale"),
        (dict(scheme="int8:row", scale=1.0, zero_point=3), ValueError, "has no zero point; add ':affine'"),
        (dict(scheme="int8:row:affine", scale=1.0), ValueError, "needs its zero_point too"),
        (dict(scheme="uint4:row:affine", scale=1.0, zero_point=16), ValueError, r"integers in \[0, 15\]"),
        (dict(scheme="uint4:row:affine", scale=1.0, zero_point=1.5), ValueError, r"integers in \[0, 15\]"),
        (dict(scheme="int4:row:affine", scale=1.0, zero_point=-9), ValueError, r"integers in \[-8, 7\]"),
        (
            dict(scheme="mxfp8", scale=0.3),
            ValueError,
            "stores scales as e8m0, which cannot hold the scale given exactly",
        ),
        (dict(scheme="int8:row:bf16", scale=0.3), ValueError, "stores scales as bf16, which cannot hold"),
        (dict(scheme="mxfp8", scale=-1.0), ValueError, "cannot hold the scale"),
        (dict(scheme="mxfp8", scale=0.0), ValueError, "cannot hold the scale"),
        (dict(scheme="nvfp4", scale=1.0), ValueError, "needs its outer_scale too"),
        (dict(scheme="int8:row", outer_scale=1.0), ValueError, "has no outer_scale"),
        (dict(scheme="int9:row"), ValueError, "unknown format 'int9'"),
        (dict(scheme="int8:row", rounding="up"), ValueError, "rounding must be 'nearest' or 'stochastic', got 'up'"),
        (dict(scheme="nf4", rounding="stochastic"), ValueError, "codebook and rounds to nearest only"),
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


# -- packing -----------------------------------------------------------------------------------------------------------
@everywhere
@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_is_one_little_endian_bit_stream(variant: Variant, bits):
    generator = torch.Generator().manual_seed(bits)
    for cols in (1, 7, 8, 13, 64, 67):
        codes = torch.randint(0, 1 << bits, (3, cols), generator=generator, dtype=torch.uint8)
        with variant.use():
            packed = lb.pack(codes.to(variant.device), bits)
            back = lb.unpack(packed, bits, codes.shape)
        for row in range(3):
            stream = sum(int(c) << (bits * j) for j, c in enumerate(codes[row]))
            assert bytes(packed[row].tolist()) == stream.to_bytes((cols * bits + 7) // 8, "little")
        assert_same_bits(back.cpu(), codes)


def test_unpack_of_a_shape_that_does_not_fit():
    with pytest.raises(ValueError, match=r"9 codes of 4 bits take 5 bytes a row, got 4"):
        lb.unpack(torch.zeros(2, 4, dtype=torch.uint8), 4, (2, 9))
    with pytest.raises(ValueError, match=r"holds \[2, 8\] codes of 4 bits, not \[3, 8\]"):
        lb.unpack(torch.zeros(2, 4, dtype=torch.uint8), 4, (3, 8))
    for shape in (8, ()):
        with pytest.raises(ValueError, match=r"shape must be that of the codes that were packed, such as \(4, 64\)"):
            lb.unpack(torch.zeros(2, 4, dtype=torch.uint8), 4, shape)


# -- Quantized ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("s", schemes(), ids=str)
def test_a_transposed_quantized_decodes_to_the_transpose(s):
    x = random_matrix(11, 37, seed=3, damage=True)
    q = lb.quantize(x, s)
    t = q.t()
    assert t.shape == (37, 11) and t.scheme == s.t()
    assert_same_bits(t.dequantize(), q.dequantize().t(), str(s))
    assert_same_bits(t.t().dequantize(), q.dequantize(), str(s))
    if s.format.bits == 8:
        assert t.codes.data_ptr() == q.codes.data_ptr(), "8-bit codes are a view"


@pytest.mark.parametrize("s", schemes()[::7], ids=str)
def test_quantized_is_a_pytree(s):
    q = lb.quantize(random_matrix(5, 40, seed=3).bfloat16(), s)
    leaves, spec = pytree.tree_flatten({"w": q})
    assert all(isinstance(leaf, Tensor) for leaf in leaves) and len(leaves) == len(q.parts)
    back = pytree.tree_unflatten(leaves, spec)["w"]
    assert (back.scheme, back.shape, back.dtype) == (q.scheme, q.shape, q.dtype)
    assert_same_bits(back.dequantize(), q.dequantize())
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_what_a_quantized_says_of_itself():
    q = lb.quantize(torch.randn(4, 64, dtype=torch.bfloat16), "uint4:group32:affine")
    assert repr(q) == ("Quantized(uint4:group32:affine, shape=[4, 64], dtype=torch.bfloat16, device=cpu, 168 bytes)")
    assert (q.ndim, q.numel(), q.nbytes) == (2, 256, 4 * 32 + 8 * 4 + 8)
    assert q.dequantize().dtype == torch.bfloat16 and q.dequantize(torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match=r"t\(\) needs a matrix, got shape \[2, 3, 4\]"):
        lb.quantize(torch.randn(2, 3, 4), "int8:row").t()
    assert not isinstance(q, Tensor)


def test_a_view_is_not_changed_by_quantizing():
    x = torch.randn(8, 32)
    before = x.clone()
    for s in schemes()[::11]:
        lb.fake_quantize(x, s)
        lb.quantize(x.t(), s)
    assert_same_bits(x, before)


# -- properties --------------------------------------------------------------------------------------------------------
@st.composite
def matrices(draw: Any) -> Tensor:
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 70))
    bits = draw(st.integers(0, 2**31 - 1))
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(rows, cols, generator=generator) * 2.0 ** draw(st.integers(-140, 100))
    dtype = draw(st.sampled_from(FLOATS))
    turned = draw(st.booleans())
    return x.to(dtype).t() if turned else x.to(dtype)


@given(st.sampled_from(schemes()), matrices())
def test_shapes_of_everything(s, x):
    q = lb.quantize(x, s)
    rows, cols = x.shape
    assert tuple(q.codes.shape) == (rows, s.packed_cols(cols)) and q.codes.dtype == torch.uint8
    assert tuple(q.scale.shape) == s.scale_shape(rows, cols)
    assert (q.zero_point is not None) == s.affine and (q.outer_scale is not None) == s.outer
    assert_same_bits(lb.fake_quantize(x, s), q.dequantize(), f"{s} {list(x.shape)} {x.dtype} {x.stride()}")


@given(st.sampled_from(schemes()), matrices())
def test_quantizing_what_was_decoded_with_the_same_scales_returns_the_codes(s, x):
    """Where nothing is lost on the way: in fp32, and no scale so small that a product is rounded as a subnormal."""
    x = x.float() * 2.0 ** (-float(x.float().abs().max().log2().floor()) if x.any() and x.isfinite().all() else 0)
    q = lb.quantize(x, s)
    again = lb.quantize(q.dequantize(), s, scale=q.scale, zero_point=q.zero_point, outer_scale=q.outer_scale)
    difference = q.codes != again.codes
    if s.format.kind == "codebook" or s.outer:  # -0 and zeros of blocks without scale
        assert_same_bits(again.dequantize(), q.dequantize(), str(s))
    else:
        assert not difference.any(), f"{s}: {q.codes[difference]} became {again.codes[difference]}"


@given(st.sampled_from(element_formats()), st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=50))
def test_encode_is_monotone(f, values):
    x = torch.tensor(values).sort().values
    y = lb.decode(lb.encode(x, f), f)
    assert (y[1:] >= y[:-1]).all(), f"{f}: {x.tolist()} -> {y.tolist()}"


@given(
    st.sampled_from([f for f in element_formats() if f.kind == "float"]),
    st.lists(st.integers(0, 2**31 - 1), min_size=1),
)
def test_encode_is_symmetric_in_sign(f, patterns):
    x = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    sign = 1 << (f.bits - 1)
    for saturate in (True, False):
        a, b = lb.encode(x, f, saturate=saturate), lb.encode(-x, f, saturate=saturate)
        known = ~x.isnan() if not f.has_nan else torch.ones_like(x, dtype=torch.bool)
        assert torch.equal(a[known] | sign, b[known])


@given(st.sampled_from([s for s in schemes() if not s.affine]), matrices(), st.integers(-20, 20))
def test_powers_of_two_pass_through(s, x, k):
    """Scaling the input by a power of two scales the result by it, where neither leaves the normal numbers."""
    x = x.float()
    x = x / 2.0 ** float(x.abs().max().log2().floor()) if x.any() else x
    a, b = lb.quantize(x, s), lb.quantize(x * 2.0**k, s)
    if s.scale_format.name != "fp16":
        assert_same_bits(b.codes, a.codes, str(s))
        assert_same_bits(b.dequantize(), a.dequantize() * 2.0**k, str(s))


# -- selection ---------------------------------------------------------------------------------------------------------
def test_every_op_has_a_kernel_on_every_device_it_must_run_on():
    for op in OPS:
        for device in ("cpu", "cuda"):
            assert any(impl.name == "reference" for impl in lb.impls(op, device))
        names = [(impl.name, impl.op) for impl in lb.impls(op, "cpu")]
        assert len(set(names)) == len(names)
        priorities = [impl.priority for impl in lb.impls(op, "cpu")]
        assert priorities == sorted(priorities, reverse=True)


def test_every_named_format_is_served_by_every_kernel_of_the_codec():
    """A refusal is for formats made at run time; the named ones are what a backend promises."""
    for name, f in FORMATS.items():
        if f.bits <= 8 and f.kind != "exponent":
            for op, call in (
                ("encode", OPS["encode"].args(torch.ones(4), name)),
                ("decode", OPS["decode"].args(torch.ones(4, dtype=torch.uint8), name)),
            ):
                for impl in lb.impls(op, "cpu"):
                    assert impl.supports(call) is None, f"{impl.name} refuses {op} of {name}"


@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
def test_tensors_on_different_devices_are_refused():
    q = lb.quantize(torch.randn(4, 8), "int8:row")
    with pytest.raises(ValueError, match=r"all tensors must be on one device, got x on cuda"):
        lb.quantize(torch.randn(4, 8, device="cuda"), "int8:row", scale=q.scale)


def test_absent_backends_say_why():
    for name, reason in registry.absent().items():
        with pytest.raises(lb.BackendError, match="is not available"), lb.use_backend(name):
            pass
        assert reason


@pytest.mark.parametrize(
    ("scheme", "arguments", "message"),
    [
        ("int8:group8", {"scale": torch.rand(4, 8) + 0.5}, "must have shape"),  # [4, 8], where [8, 4] is asked for
        ("int8:tensor", {"scale": torch.tensor(0.1, dtype=torch.float64)}, "cannot hold"),
        ("int4:row:affine", {"scale": torch.rand(8, 1) + 0.5, "zero_point": torch.full((8, 1), 100, dtype=torch.int8)},
         "zero_point"),
        ("mxfp8:T", {"scale": torch.full((1, 32), 0.75)}, "cannot hold"),
        ("nvfp4", {"outer_scale": torch.tensor(0.1, dtype=torch.float64)}, "cannot hold"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(scheme, arguments, message):
    with pytest.raises(ValueError, match=message):
        lb.quantize(torch.randn(8, 32), scheme, **arguments)


def test_objects_that_are_not_what_their_name_says_are_refused():
    with pytest.raises(ValueError, match="another scheme"):
        lb.quantize(torch.randn(2, 32), dataclasses.replace(lb.scheme("mxfp8"), ceil=True))
    with pytest.raises(ValueError, match="another format"):
        lb.encode(torch.randn(2, 32), dataclasses.replace(FORMATS["fp8_e4m3"], bias=8))


def test_a_quantized_moves_between_devices_and_not_between_dtypes():
    q = lb.quantize(torch.randn(2, 32), "mxfp4")
    assert_same_bits(q.cpu().codes, q.codes)
    assert (q.dim(), q.size(), q.size(1)) == (2, torch.Size((2, 32)), 32)
    for arguments in ((torch.bfloat16,), ("cpu", torch.bfloat16)):
        with pytest.raises(TypeError, match=r"call dequantize\(torch.bfloat16\)"):
            q.to(*arguments)


@pytest.mark.parametrize("name", ["mxfp4:T", "uint4:group32:affine", "nvfp4", "e3m1b2:row:bf16"])
def test_a_quantized_can_be_saved_and_copied(name, tmp_path):
    q = lb.quantize(torch.randn(4, 64).bfloat16(), name)
    torch.save({"w": q}, tmp_path / "q.pt")
    for again in (torch.load(tmp_path / "q.pt", weights_only=True)["w"], copy.deepcopy(q)):
        assert (again.scheme, again.shape, again.dtype) == (q.scheme, q.shape, q.dtype)
        assert_same_bits(again.dequantize(), q.dequantize())
        assert again.codes.data_ptr() != q.codes.data_ptr()


@pytest.mark.filterwarnings("error")
def test_what_quantize_returns_has_no_gradient():
    x, scale = torch.randn(4, 32, requires_grad=True), torch.full((4, 1), 0.1, requires_grad=True)
    for q in (lb.quantize(x, "int8:row"), lb.quantize(x, "nvfp4"), lb.quantize(x, "int8:row", scale=scale)):
        assert not any(part.requires_grad for part in q.parts.values())
        with pytest.raises(RuntimeError, match="does not require grad"):
            q.dequantize().sum().backward()
