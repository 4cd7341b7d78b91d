"""The CUDA kernels, run on the host by support/cuda_emulator, against the reference: no GPU is needed."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator

import pytest
import torch
from support import grad_oracle, mm_oracle
from support.bits import assert_same_bits
from support.cuda_emulator.library import Emulated, compiler, place, view
from torch import Tensor

from lowbit import formats, reference, scaling
from lowbit.ops import Numerics, matmul
from lowbit.ops.codec import Encode
from lowbit.ops.quantize import FakeQuantizeBackward, Quantize
from lowbit.ops.spec import FLOATS, as_rows
from lowbit.tensor import packing
from lowbit.testing import SAMPLES
from lowbit.testing.inputs import element_formats, random_matrix, schemes
from lowbit.testing.matmul import make_call

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


def held(format: formats.Format) -> bool:
    """Whether the kernels can hold the format's entries: of a codebook 16 at most."""
    return not format.codebook or format.bits <= 4


HELD_FORMATS = [f for f in element_formats() if held(f)]
HELD_SCHEMES = [s for s in schemes() if held(s.format)]


@pytest.fixture(scope="module")
def cuda() -> Emulated:
    """Built by the first of several processes that ask; the others wait for it."""
    folder = place()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return Emulated(folder)


def matrix(x: Tensor) -> Tensor:
    """``[rows, cols]`` with unit column stride, as the wrappers make it."""
    rows = as_rows(x) if x.dim() else x.reshape(1, 1)
    return rows if rows.shape[1] <= 1 or rows.stride(1) == 1 else rows.contiguous()


def rng_of(call: object, cols: int) -> list[int]:
    pitch = call.pitch  # type: ignore[attr-defined]
    seed_step = [0, 0] if call.rng is None else call.rng.tolist()  # type: ignore[attr-defined]
    return [*seed_step, call.stream, call.offset, cols if pitch is None else pitch]  # type: ignore[attr-defined]


def reference_rng(call: object) -> reference.Rng | None:
    if call.rounding == "nearest":  # type: ignore[attr-defined]
        return None
    return reference.Rng(*call.rng.tolist(), call.stream, call.offset, call.pitch)  # type: ignore[attr-defined]


def poison(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.full(shape, 0x5A, dtype=torch.uint8).repeat_interleave(dtype.itemsize, -1).view(dtype)


# -- codecs ----------------------------------------------------------------------------------------------------------
def encode(cuda: Emulated, call: Encode) -> Tensor:
    x, format = matrix(call.x), formats.find(call.format)
    out = poison(*x.shape)
    stochastic = int(call.rounding == "stochastic")
    cuda("encode", view(x), view(out), format.params(), call.saturate, stochastic, rng_of(call, x.shape[1]))
    return out


@pytest.mark.thinned(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", HELD_FORMATS, ids=str)
def test_encode_of_all_16_bit_patterns(cuda: Emulated, format: formats.Format, dtype: torch.dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(64, 1024)
    for saturate in (True, False):
        out = encode(cuda, Encode(x, format.name, saturate=saturate))
        assert_same_bits(out, reference.encode(x, format, None, saturate), f"saturate={saturate}")


@pytest.mark.parametrize(
    "call",
    [call for call in SAMPLES["encode"]("cpu") if held(formats.find(call.format))],
    ids=lambda c: f"{c.format}-{list(c.x.shape)}-{c.rounding}",
)
def test_encode(cuda: Emulated, call: Encode) -> None:
    expected = reference.encode(matrix(call.x), formats.find(call.format), reference_rng(call), call.saturate)
    assert_same_bits(encode(cuda, call), expected, call.format)


def test_decode(cuda: Emulated) -> None:
    for call in SAMPLES["decode"]("cpu"):
        format = formats.find(call.format)
        if not held(format):
            continue
        out = poison(*call.codes.shape, dtype=call.dtype)
        cuda("decode", view(call.codes), view(out), format.params())
        assert_same_bits(out, reference.decode(call.codes, format, call.dtype), call.format)


def test_pack_and_unpack(cuda: Emulated) -> None:
    for call in SAMPLES["pack"]("cpu"):
        codes = matrix(call.codes)
        packed, back = poison(codes.shape[0], packing.packed_cols(codes.shape[1], call.bits)), poison(*codes.shape)
        cuda("pack", view(codes), view(packed, codes.shape[1]), call.bits)
        assert_same_bits(packed, packing.pack(codes, call.bits), f"pack {call.bits}")
        cuda("unpack", view(packed, codes.shape[1]), view(back), call.bits)
        assert_same_bits(back, codes, f"unpack {call.bits}")


@pytest.mark.parametrize("format", [f for f in element_formats() if not held(f)], ids=str)
def test_larger_codebooks_are_refused(cuda: Emulated, format: formats.Format) -> None:
    x, codes, scale = torch.zeros(2, 64), poison(2, 64), torch.ones(2, 1)
    params = numbers(scaling.scheme(f"{format}:row"), 2, 64)
    with pytest.raises(ValueError, match="codebooks of the format table with at most 16 entries"):
        encode(cuda, Encode(x, format.name))
    with pytest.raises(ValueError, match="with at most 16 entries"):
        cuda("decode", view(codes), view(x), format.params())
    with pytest.raises(ValueError, match="with at most 16 entries"):
        cuda("quantize", view(x), view(codes, 64), scale, None, None, params, 0, [0, 0, 0, 0, 64], 1)


# -- schemes ---------------------------------------------------------------------------------------------------------
def quantize_calls(scheme: scaling.Scheme) -> Iterator[Quantize]:
    """Ragged matrices; rows wide enough for a block of threads each; and blocks that are too large for one pass."""
    shapes = [(5, 67), (20, 70), (3, 1283)] + ([(290, 131)] if scheme.block == (None, None) else [])
    for index, (rows, cols) in enumerate(shapes):
        x = random_matrix(rows, cols, seed=index, extremes=index != 1).to(FLOATS[(index + len(scheme.name)) % 3])
        global_scale = reference.global_scale(x, scheme) if scheme.global_scale else None
        if index != 1:
            yield Quantize(x, scheme.name, global_scale)
        else:
            rng = torch.tensor([(9 << 33) + 5, 2])
            yield Quantize(x, scheme.name, global_scale, "stochastic", rng, 9, (1 << 33) + 3, 4099)


def numbers(scheme: scaling.Scheme, rows: int, cols: int) -> list[int]:
    """A scheme as kernels take it: blocks that span an axis have its length."""
    first = len(scheme.format.params())
    return [*scheme.params()[:first], *scheme.block_of(rows, cols), *scheme.params()[first + 2 :]]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("scheme", HELD_SCHEMES, ids=str)
def test_schemes(cuda: Emulated, scheme: scaling.Scheme) -> None:
    """quantize, quantize_static, dequantize and fake_quantize, dynamic and static."""
    for call in quantize_calls(scheme):
        x, global_scale = call.x, call.global_scale
        rows, cols = x.shape
        what = f"{scheme} {x.dtype} [{rows}, {cols}] {call.rounding}"
        codes, scale, zero = reference.quantize(x, scheme, global_scale, reference_rng(call))
        stored = packing.pack(codes, scheme.format.bits)
        params, rng, rounding = numbers(scheme, rows, cols), rng_of(call, cols), int(call.rounding == "stochastic")

        out, scale_out = poison(*stored.shape), poison(*scale.shape, dtype=scale.dtype)
        zero_out = None if zero is None else poison(*zero.shape, dtype=zero.dtype)
        cuda("quantize", view(x), view(out, cols), scale_out, zero_out, global_scale, params, rounding, rng, 1)
        assert_same_bits(scale_out, scale, f"{what} scale")
        if zero is not None and zero_out is not None:
            assert_same_bits(zero_out, zero, f"{what} zero_point")
        assert_same_bits(out, stored, f"{what} codes")

        y, expected = (
            poison(rows, cols, dtype=x.dtype),
            reference.dequantize(codes, scheme, scale, zero, global_scale, x.dtype),
        )
        cuda("dequantize", view(stored, cols), view(y), scale, zero, global_scale, params)
        assert_same_bits(y, expected, f"{what} dequantize")
        y = poison(rows, cols, dtype=x.dtype)
        cuda("fake_quantize", view(x), view(y), None, None, global_scale, params, rounding, rng)
        assert_same_bits(y, expected, f"{what} fake_quantize")

        other = random_matrix(rows, cols, seed=77)
        scale, zero = reference.block_scales(other, scheme, global_scale)
        codes = reference.quantize_static(x, scheme, scale, zero, global_scale, reference_rng(call))
        out = poison(*stored.shape)
        cuda("quantize", view(x), view(out, cols), scale, zero, global_scale, params, rounding, rng, 0)
        assert_same_bits(out, packing.pack(codes, scheme.format.bits), f"{what} static codes")
        y, expected = (
            poison(rows, cols, dtype=x.dtype),
            reference.dequantize(codes, scheme, scale, zero, global_scale, x.dtype),
        )
        cuda("fake_quantize", view(x), view(y), scale, zero, global_scale, params, rounding, rng)
        assert_same_bits(y, expected, f"{what} static fake_quantize")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("scheme", HELD_SCHEMES, ids=str)
def test_gradients(cuda: Emulated, scheme: scaling.Scheme) -> None:
    """Of x to the bit, dynamic and static; of given scales within the op's bound, over blocks in pieces too."""
    for index, call in enumerate(quantize_calls(scheme)):
        x, global_scale = call.x, call.global_scale
        grad = random_matrix(*x.shape, seed=5, extremes=index == 1).to(FLOATS[(index + len(scheme.name)) // 2 % 3])
        scale, zero = reference.block_scales(x, scheme, global_scale)
        expected, _ = reference.fake_quantize_backward(grad, x, scheme, scale, zero, global_scale)
        out, params = poison(*x.shape, dtype=grad.dtype), numbers(scheme, *x.shape)
        cuda("fake_quantize_backward", view(grad), view(x), view(out), None, None, global_scale, None, params)
        assert_same_bits(out, expected, f"{scheme} dynamic")

        scale, zero = reference.block_scales(random_matrix(*x.shape, seed=77), scheme, global_scale)
        expected, sums = reference.fake_quantize_backward(grad, x, scheme, scale, zero, global_scale)
        out, got = poison(*x.shape, dtype=grad.dtype), poison(*sums.shape, dtype=torch.float32)
        cuda("fake_quantize_backward", view(grad), view(x), view(out), scale, zero, global_scale, got, params)
        assert_same_bits(out, expected, f"{scheme} static")
        grad_oracle.check(got, FakeQuantizeBackward(grad, x, scheme.name, scale, zero, global_scale), f"{scheme}")


@pytest.mark.parametrize("name", ["nvfp4", "nf4:e4m3", "nvfp4:global_row"])
def test_global_scale(cuda: Emulated, name: str) -> None:
    scheme = scaling.scheme(name)
    for x in (
        random_matrix(70, 131, seed=3, extremes=True),
        random_matrix(5, 1283, seed=4),
        torch.zeros(3, 5),
        torch.full((2, 2), torch.nan),
    ):
        out = poison(*scheme.global_scale_shape(*x.shape), dtype=torch.float32)
        cuda("global_scale", view(x), out, numbers(scheme, *x.shape))
        assert_same_bits(out, reference.global_scale(x, scheme), name)


@pytest.mark.parametrize(
    "name", ["int8:row", "uint4:group32:affine", "int4:group7", "fp8_e4m3:block128x128", "int8:tensor"]
)
def test_block_range(cuda: Emulated, name: str) -> None:
    scheme = scaling.scheme(name)
    for dtype in FLOATS:
        x = random_matrix(20, 131, seed=3, extremes=True).to(dtype)
        low, high = (poison(*scheme.scale_shape(*x.shape), dtype=torch.float32) for _ in range(2))
        cuda("block_range", view(x), low, high, numbers(scheme, *x.shape))
        broken = reference.block_amax(~x.isfinite(), scheme)
        for got, wanted in zip((low, high), reference.block_range(x, scheme), strict=True):
            assert_same_bits(got, wanted.masked_fill(broken, torch.nan), name)


# -- matrix product --------------------------------------------------------------------------------------------------
def product(cuda: Emulated, call: matmul.ScaledMM, major: int) -> Tensor:
    out = poison(call.a.shape[0], call.b.shape[0], dtype=call.out_dtype)
    sides: list[object] = []
    for side in matmul.sides(call):
        if side.scheme is None:
            sides += [view(side.data), None, None, None]
        else:
            params = numbers(scaling.scheme(side.scheme), side.data.shape[0], call.cols)
            sides += [view(side.data, call.cols), params, side.scale, side.global_scale]
    cuda("scaled_mm", *sides, view(out), view(call.bias), call.cols, major)
    return out


PAIRS = [
    ("fp8_e4m3:row", "fp8_e4m3:row"), ("fp8_e5m2:tensor", "fp8_e4m3:row"), ("fp8_e4m3:row", "fp8_e5m2:tensor"),
    ("fp8_e5m2:row", "fp8_e5m2:row"), ("int8:row", "int8:row"), ("int8:tensor", "int4:row"),
    ("int4:row", "int8:row:bf16"),
    (None, "fp8_e4m3:row"), (None, "int4:group128"), ("fp8_e4m3:block1x128", "fp8_e4m3:block128x128"),
    ("mxfp8", "mxfp8"), ("mxfp6", "mxfp4"), ("nvfp4", "nvfp4"), ("int8:row", "int4:group32:bf16"), ("mxfp4", None),
    ("e2m1b3:row", "e3m4n:group16"), ("fp6_e3m2:row", "fp8_e4m3:mx"),
]  # fmt: skip


@pytest.mark.parametrize("a_scheme,b_scheme", PAIRS, ids=str)
def test_scaled_mm(cuda: Emulated, a_scheme: str | None, b_scheme: str | None) -> None:
    """Ragged in M, N and K, several tiles each way, aligned and not; both as Hopper and as Ada would run it."""
    for index, (m, n, k) in enumerate([(33, 65, 97), (130, 20, 256), (1, 129, 40)]):
        a, b = random_matrix(m, k, seed=index), random_matrix(n, k, seed=index + 50)
        a, b = (x if scheme else x.bfloat16() for x, scheme in ((a, a_scheme), (b, b_scheme)))
        bias = random_matrix(1, n, seed=7)[0] if index % 2 == 0 else None
        call = make_call(a, b, a_scheme, b_scheme, bias=bias, out_dtype=FLOATS[index])
        for major in (8, 9):
            mm_oracle.check(product(cuda, call, major), call, Numerics("bf16", "fp32"), f"as on {major}.0")


@pytest.mark.parametrize("scheme", ["uint8:row:affine", "nf4", "fp8_e4m3:group24"])
def test_scaled_mm_refuses(cuda: Emulated, scheme: str) -> None:
    call = make_call(random_matrix(4, 64).bfloat16(), random_matrix(4, 64), None, scheme)
    with pytest.raises(ValueError, match="scaled_mm on CUDA"):
        product(cuda, call, 9)
