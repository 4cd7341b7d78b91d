"""Triton kernels below the ops: tilings, tiles smaller than blocks, random bits, dividing by powers of two, products.

What every backend must do is tested elsewhere on all of them; here stands what only these kernels have.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
import triton
import triton.language as tl
from support.bits import assert_same_bits, describe

import lowbit as lb
from lowbit import reference, scaling
from lowbit.backends import triton as backend
from lowbit.kernels import dual_launch, launch, products, rng, scales, spec, weight_only
from lowbit.kernels.start import run
from lowbit.ops import OPS, matmul
from lowbit.ops.dual import QuantizeBoth
from lowbit.ops.optim import REPLACED, RULES
from lowbit.optim.states import STATES
from lowbit.tensor import packing
from lowbit.testing import SAMPLES
from lowbit.testing import optim as samples
from lowbit.testing.dual import PAIRS
from lowbit.testing.inputs import random_matrix
from lowbit.testing.matmul import make_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAREST = launch.Rounding()

#: Small tiles, so that small matrices meet every way of cutting: several blocks a tile, several tiles a block.
SMALL = spec.Target(whole=512, usual=256)


@pytest.fixture
def small_tiles(monkeypatch):
    whole = spec.tiling.__wrapped__
    monkeypatch.setattr(launch, "tiling", lambda rows, cols, block: whole(rows, cols, block, SMALL))
    monkeypatch.setattr(launch, "TARGET", SMALL)


# -- tilings -----------------------------------------------------------------------------------------------------------
def covered(axis: spec.Axis, size: int) -> list[tuple[int, int]]:
    """(position, block) of all that the tiles of an axis hold: the arithmetic of ``tiles.positions`` in Python."""
    found = []
    for pid in range(axis.tiles):
        for k in range(axis.span):
            group = pid // axis.pieces * axis.group + (k // axis.padded)
            if axis.exact:
                position, ok = pid * axis.span + k, True
            else:
                inner = pid % axis.pieces * axis.padded + k % axis.padded
                position, ok = group * axis.block + inner, inner < axis.block
            if ok and position < size:
                found.append((position, group))
    return found


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 320), st.integers(1, 320), st.integers(4, 12))
def test_tiles_hold_every_element_once_and_know_its_block(rows, cols, r, c, log):
    tiles = spec.tiling(rows, cols, (r, c), spec.Target(1 << log + 2, 1 << log))
    for axis, size, block in ((tiles.rows, rows, r), (tiles.cols, cols, c)):
        assert sorted(covered(axis, size)) == [(at, at // min(block, size)) for at in range(size)]
        assert axis.padded & (axis.padded - 1) == axis.group & (axis.group - 1) == 0
    assert tiles.rows.span * tiles.cols.span <= max(1 << log + 2, spec.SECTOR * 16)


def test_tiles_on_a_gpu():
    """One pass over memory for rows, groups and MX; blocks too large for a tile are reduced first."""
    gpu = spec.Target(1 << 14, 1 << 12)
    for block in ((1, 4096), (1, 128), (1, 32), (128, 128), (1, 16), (32, 1)):
        tiles = spec.tiling(8192, 4096, block, gpu)
        assert tiles.one_pass and tiles.cols.span >= spec.SECTOR and tiles.packs(4)
    for block in ((8192, 4096), (8192, 1)):
        assert not spec.tiling(8192, 4096, block, gpu).one_pass


@pytest.mark.thinned(7)
# -- blocks larger and smaller than tiles --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    [
        "fp8_e4m3:tensor", "uint8:tensor:affine", "int8:col", "fp8_e5m2:row:bf16", "int4:row:e8m0:ceil",
        "fp6_e2m3:block128x128", "fp6_e3m2:tensor", "mxfp4:T", "nvfp4", "nf4:e4m3", "int4:group7", "e3m3n:row:fp16",
        "nvfp4:global_row", "int8:row:e4m3:global_row:ceil", "int4:tensor:e4m3:full", "int8:row:full",
    ],
)  # fmt: skip
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_tiles_of_any_size_give_the_same_bits(small_tiles, name, stochastic):
    scheme = scaling.scheme(name)
    stochastic = stochastic and scheme.format.kind != "codebook"
    x = (
        random_matrix(7, 333, seed=3, extremes=True).bfloat16()
        if scheme.block[0] == 1
        else random_matrix(40, 70, extremes=True)
    )
    random = reference.Rng(2**63 - 5, 3, 2**32 - 1, -16, 1024) if stochastic else None
    global_scale = reference.global_scale(x, scheme) if scheme.global_scale else None
    codes, scale, zero_point = reference.quantize(x, scheme, global_scale, random)
    stored = packing.pack(codes, scheme.format.bits)
    expected = reference.dequantize(codes, scheme, scale, zero_point, global_scale, x.dtype)

    x, global_scale_there = x.to(DEVICE), None if global_scale is None else global_scale.to(DEVICE)
    rounding = launch.Rounding()
    if random is not None:
        seed_step = torch.tensor([random.seed, random.step], device=DEVICE)
        rounding = launch.Rounding(seed_step, random.stream, random.offset, random.pitch)
    outs = [torch.full_like(t, 77).to(DEVICE) for t in (stored, scale) + ((zero_point,) if scheme.affine else ())]
    run(launch.quantize_dynamic(x, scheme, global_scale_there, outs[0], outs[1], [*outs, None][2], rounding))
    for out, want in zip(outs, (stored, scale, zero_point), strict=False):
        assert_same_bits(out.cpu(), want, name)
    fake, back = torch.empty_like(x), torch.empty_like(x)
    run(launch.quantize_dynamic(x, scheme, global_scale_there, fake, None, None, rounding, fake=True))
    run(launch.dequantize(outs[0], scheme, outs[1], [*outs, None][2], global_scale_there, back))
    assert_same_bits(fake.cpu(), expected, f"fake {name}")
    assert_same_bits(back.cpu(), expected, f"dequantize {name}")
    if global_scale is not None:
        out = torch.empty_like(global_scale, device=DEVICE)
        run(launch.global_scale(x, out, scheme))
        assert_same_bits(out.cpu(), global_scale, f"global_scale {name}")


@pytest.mark.parametrize("name", ["int8:tensor", "uint4:row:affine", "fp8_e4m3:group16", "int4:col"])
def test_gradients_of_blocks_in_pieces(small_tiles, name):
    """Powers of two as gradients and scales, so that sums are exact and must agree in every bit."""
    scheme = scaling.scheme(name)
    x = (random_matrix(24, 40, seed=8) * 64).round() / 64
    x = x.clamp(-500, 500) * 2.0 ** torch.randint(-2, 3, (24, 40))
    grad = 2.0 ** torch.randint(-1, 2, x.shape)
    scale = torch.full(scheme.scale_shape(24, 40), 0.25)
    zero_point = torch.full(scale.shape, 5, dtype=torch.uint8) if scheme.affine else None
    expected, sums = reference.fake_quantize_backward(grad, x, scheme, scale, zero_point, None)
    out, out_sums = torch.empty_like(x, device=DEVICE), torch.empty_like(sums, device=DEVICE)
    there = [t if t is None else t.to(DEVICE) for t in (grad, x, scale, zero_point)]
    run(launch.fake_quantize_backward(*there[:2], scheme, *there[2:], None, out, out_sums))
    assert_same_bits(out.cpu(), expected, name)
    assert_same_bits(out_sums.cpu() + 0.0, sums + 0.0, name)
    run(launch.fake_quantize_backward(*there[:2], scheme, None, None, None, out, None))
    made = reference.block_scales(x, scheme, None)
    assert_same_bits(out.cpu(), reference.fake_quantize_backward(grad, x, scheme, *made, None)[0], f"dynamic {name}")


@pytest.mark.thinned(10)
# -- two schemes at once -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [96, 80, 256])
@pytest.mark.parametrize(("first", "second", "block"), PAIRS)
def test_two_schemes_in_one_reading(monkeypatch, first, second, block, rows):
    """Tiles that lie end to end, several in each direction, with blocks that are larger than they are."""
    monkeypatch.setattr(dual_launch, "TARGET", SMALL)
    x = random_matrix(rows, 144, seed=3, extremes=True).bfloat16()
    random = "nearest" if "nf4" in (first, second) else "stochastic"
    call = QuantizeBoth(
        x.to(DEVICE), first, second, block, "nearest", random, torch.tensor([5, 6], device=DEVICE), 1, 2
    )
    reason = dual_launch.supports(call)
    if reason is not None:
        assert "group7" in first or "full" in first or rows % block, reason
        pytest.skip(reason)
    spec = OPS["quantize_both"]
    outs, expected = (
        tuple(torch.full(shape, 77, dtype=dtype, device=device) for shape, dtype in spec.outputs(call))
        for device in (DEVICE, "cpu")
    )
    run(dual_launch.quantize_both(call, outs))
    by_reference = next(row for row in lb.impls("quantize_both") if row.name == "reference")
    by_reference.run(expected, call._replace(x=x, rng=call.rng.cpu()))
    for name, out, want in zip(spec.returns, outs, expected, strict=True):
        assert_same_bits(out.cpu(), want, f"{name} of {first}, {second}")


@pytest.mark.parametrize(
    "name", ["nvfp4:global_row", "int8:row:e4m3:global_row:ceil", "int4:group32:e4m3:ceil:full:global_row"]
)
def test_whole_rows_make_their_global_scales(monkeypatch, name):
    monkeypatch.setattr(launch, "TARGET", SMALL)
    scheme, x = scaling.scheme(name), random_matrix(11, 100, seed=3, extremes=True).bfloat16()
    global_scale = reference.global_scale(x, scheme)
    codes, scale, _ = reference.quantize(x, scheme, global_scale, None)
    expected = packing.pack(codes, scheme.format.bits), scale, global_scale
    outs = [torch.full_like(t, 77).to(DEVICE) for t in expected]
    launches = launch.quantize_rows(x.to(DEVICE), scheme, *outs)
    assert len(launches) == 1 and launches[0].grid[0] > 1
    run(launches)
    for out, want in zip(outs, expected, strict=True):
        assert_same_bits(out.cpu(), want, name)
    for rows, cols, text in ((4, 100, "nvfp4"), (4, 1000, name), (4, 100, "nf4:group7:e4m3:global_row")):
        assert launch.whole_rows(rows, cols, scaling.scheme(text)) is None


# -- random bits -------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=spec.GENERAL)
def random_kernel(
    each_ptr, eights_ptr, rng_ptr, stream_id: tl.int64, offset: tl.int64, pitch: tl.int64,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row, col = tl.arange(0, R), tl.arange(0, C)
    at = row[:, None] * C + col[None, :]
    tl.store(each_ptr + at, rng.each(row, col, rng_ptr, stream_id, offset, pitch))
    tl.store(eights_ptr + at, rng.eights(row, 0, rng_ptr, stream_id, offset, pitch, R, C))


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def test_philox_of_this_file_gives_the_published_numbers():
    """Known answers of Random123 for philox4x32-10."""
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize(
    ("seed", "step", "stream", "offset", "pitch"),
    [(0, 0, 0, 0, 16), (-1, 2**32 - 1, 7, -64, 24), (0x299F31D0A4093822, 1, 2**31, 2**63 - 8, 2**40)],
)
def test_random_bits_of_the_kernels(seed, step, stream, offset, pitch):
    each, eights = (torch.empty(4, 16, dtype=torch.int32, device=DEVICE) for _ in range(2))
    with np.errstate(over="ignore"):
        seed_step = torch.tensor([seed, step], device=DEVICE)
        random_kernel[(1,)](each, eights, seed_step, stream, offset, pitch, R=4, C=16)
    for r in range(4):
        for c in range(16):
            i = (offset + r * pitch + c) % 2**64
            words = philox(
                ((i >> 3) & 0xFFFFFFFF, i >> 35, step, stream), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
            )
            expected = words[(i & 7) // 2] >> (16 * (i & 1)) & 0xFFFF
            assert (int(each[r, c]), int(eights[r, c])) == (expected, expected)


# -- arithmetic --------------------------------------------------------------------------------------------------------
@triton.jit
def divide_kernel(x_ptr, code_ptr, out_ptr, SCALE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    scale = scales.widen(tl.load(code_ptr + at), 1.0, SCALE)
    _, magnitude = scales.divide(tl.zeros([SIZE], tl.int32), tl.load(x_ptr + at), scale, SCALE)
    tl.store(out_ptr + at, magnitude)


def test_multiplying_by_a_power_divides_by_its_inverse():
    """Every E8M0 scale, 2**-127 and 2**127 included, with subnormal and overflowing quotients."""
    codes = np.tile(np.arange(256, dtype=np.uint8), 64)
    x = np.random.default_rng(1).integers(0, 0x7F800000, codes.size, dtype=np.int32)
    x[:1024] = np.repeat(np.array([0, 1, 0x7FFFFF, 0x7F7FFFFF], np.int32), 256)
    with np.errstate(all="ignore"):
        power = np.where(codes == 255, np.nan, np.exp2(codes.astype(np.float64) - 127)).astype(np.float32)
        expected = x.view(np.float32) / power
        out = torch.empty(codes.size, dtype=torch.int32, device=DEVICE)
        mx = spec.scale_spec(scaling.scheme("mxfp8"))
        divide_kernel[(1,)](torch.from_numpy(x).to(DEVICE), torch.from_numpy(codes).to(DEVICE), out, mx, codes.size)
    actual = out.cpu().numpy().view(np.float32)
    np.testing.assert_array_equal(actual, expected)


def test_flushed_subnormals_are_refused_by_the_interpreter():
    if DEVICE != "cpu" or not torch.set_flush_denormal(True):
        pytest.skip("only the interpreter depends on the processor's mode")
    try:
        with lb.use_backend("triton"), pytest.raises(RuntimeError, match="set_flush_denormal"):
            lb.encode(torch.ones(3), "fp8_e4m3")
    finally:
        torch.set_flush_denormal(False)


# -- matrix product ----------------------------------------------------------------------------------------------------
def product(m: int, n: int, k: int, a: str, b: str, **more):
    call = make_call(random_matrix(m, k, DEVICE, 1), random_matrix(n, k, DEVICE, 2), a, b, **more)
    with lb.use_backend("triton"):
        return call, torch.ops.lowbit.scaled_mm(*call)


@pytest.mark.parametrize(
    ("a", "b"), [("int8:row", "int8:row"), ("int8:tensor", "int4:row:bf16"), ("int4:block16x512", "int8:row:e8m0")]
)
def test_integer_products_across_tiles_are_exact(a, b):
    call, y = product(131, 150, 300, a, b, bias=torch.randn(150, device=DEVICE), out_dtype=torch.float32)
    left, right = (matmul.operand(side, 300) for side in matmul.sides(call))
    assert_same_bits(y.cpu(), reference.scaled_mm(left, right, call.bias, torch.float32).cpu(), f"{a} x {b}")


@pytest.mark.parametrize(
    ("a", "b"),
    [("fp8_e4m3:row", "fp8_e4m3:row"), ("fp8_e5m2:tensor", "fp4_e2m1:row"), ("e2m1b3:row", "fp6_e2m3:row:fp16")],
)
def test_float_products_across_tiles_keep_their_bound(a, b):
    call, y = product(131, 150, 300, a, b, out_dtype=torch.float32)
    left, right = (matmul.operand(side, 300) for side in matmul.sides(call))
    impl = next(i for i in lb.impls("scaled_mm", DEVICE) if i.name == "triton")
    tolerance = OPS["scaled_mm"].tolerance(call, impl.numerics)
    exact = reference.scaled_mm(left, right, None, torch.float32).double()
    assert bool(((y.double() - exact).abs() <= tolerance).all())


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "b", ["fp8_e4m3:block128x128", "fp8_e4m3:row", "nf4", "mxfp4", "uint4:group64:affine", None, "int4:row",
          "nf4:group66", "fp6_e2m3:row", "fp6_e2m3:group66"],
)  # fmt: skip
@pytest.mark.parametrize(
    "a", ["fp8_e4m3:group128", "fp8_e5m2:block2x64", "uint8:group32:affine", "fp6_e2m3:group48", "fp8_e4m3:group33",
          "fp8_e4m3:group34", "int8:group64:e4m3:global_row"],
)  # fmt: skip
def test_scales_of_blocks_of_both_operands_are_multiplied_into_sums(a, b):
    """Blocks of which one divides the other are not decoded to fp32, which three terms would be; others are."""
    call, y = product(21, 35, 300, a, b, out_dtype=torch.float32)
    left, right = (matmul.operand(side, 300) for side in matmul.sides(call))
    tolerance = OPS["scaled_mm"].tolerance(call, lb.backends.registry.Numerics("fp32", "fp32"))
    exact = reference.scaled_mm(left, right, None, torch.float32).double()
    assert bool(((y.double() - exact).abs() <= tolerance).all())
    if products.are_integers(call):
        return
    one = next(one for one in products.scaled_mm(call, y) if one.kernel is weight_only.weight_only).arguments
    widths = [300 if s is None else min(scaling.scheme(s).block_of(1, 300)[1], 300) for s in (a, b)]
    if max(widths) >= 300 or max(widths) % min(widths) == 0:
        folded = b == "mxfp4" and one["GROUP"] == 32  # those of b are multiplied into its elements
        assert one["A_TERMS"] == 1 and one["block"] == (widths[0] if folded else min(widths))
    else:
        assert one["A_TERMS"] == 3 and one["A_BLOCKS"] is None


@pytest.mark.parametrize(("b", "dtype"), [("nf4:row", torch.bfloat16), ("nf4:group64", torch.bfloat16),
    ("fp8_e5m2:row", torch.float32), ("int8:row", torch.float32), ("fp8_e5m2:group32", torch.float16)])  # fmt: skip
def test_inf_is_inf_where_operands_are_cut_into_terms(b, dtype):
    """Terms that are 0 do not meet it; a NaN stays one."""
    a, w = torch.ones(3, 64, device=DEVICE), torch.ones(2, 64, device=DEVICE)
    a[0, 5], a[1, 7] = torch.inf, torch.nan
    call = make_call(a.to(dtype), w, None, b, out_dtype=torch.float32)
    if b.startswith("fp8_e5m2"):
        call.b[1, 9] = 0x7C
    with lb.use_backend("triton"):
        y = torch.ops.lowbit.scaled_mm(*call)
    with lb.use_backend("reference"):
        expected = torch.ops.lowbit.scaled_mm(*call)
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isinf(), expected.isinf())
    assert torch.equal(y.sign().nan_to_num(), expected.sign().nan_to_num())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("zero", [255, 0])
def test_sums_of_integers_at_the_limit_do_not_wrap(zero):
    """The largest codes that there are, up to the depth beyond which int32 would not hold them."""
    call = make_call(
        torch.ones(1, 65793, device=DEVICE), torch.ones(2, 65793, device=DEVICE), "uint8:row:affine", "int8:row"
    )
    call.a.fill_(255)
    call.b.fill_(0x80)
    call.a_zero_point.fill_(zero)
    with lb.use_backend("triton"):
        y = torch.ops.lowbit.scaled_mm(*call)
    with lb.use_backend("reference"):
        assert_same_bits(y, torch.ops.lowbit.scaled_mm(*call))


def test_segments_beyond_the_depth_read_no_scales():
    """The last block has fewer segments than the others; the scale of the row is one."""
    a, b = random_matrix(17, 1000, DEVICE, seed=1), random_matrix(5, 1000, DEVICE, seed=2)
    call = make_call(a, b, "int8:row", "int8:group768", out_dtype=torch.float32)
    with lb.use_backend("triton"):
        y = torch.ops.lowbit.scaled_mm(*call)
    with lb.use_backend("reference"):
        assert_same_bits(y, torch.ops.lowbit.scaled_mm(*call))


def test_products_take_codes_of_any_strides():
    call, y = product(20, 24, 64, "int8:row", "int8:row")
    turned = call._replace(a=call.a.t().contiguous().t(), b=call.b.repeat_interleave(2, 0)[::2])
    with lb.use_backend("triton"):
        assert_same_bits(torch.ops.lowbit.scaled_mm(*turned), y)


@pytest.mark.parametrize(
    ("a", "b", "k", "reason"),
    [
        ("int8:group32", "int8:group48", 96, "of which one divides the other"),
        ("uint8:row:affine", "int8:row", 70000, "int32 holds at most 65793 products"),
        ("int8:row", "int8:row", 131072, "int32 holds at most 131071 products"),
    ],
)
def test_products_refuse_with_a_reason(a, b, k, reason):
    call = make_call(torch.ones(1, k, device=DEVICE), torch.ones(2, k, device=DEVICE), a, b)
    with lb.use_backend("triton"), pytest.raises(RuntimeError, match=reason):
        torch.ops.lowbit.scaled_mm(*call)


# -- optimizers --------------------------------------------------------------------------------------------------------
@pytest.fixture
def small_steps(monkeypatch):
    """Tiles of about 256 elements, several a program where a codebook asks for that."""
    monkeypatch.setattr(launch, "step_tiles", lambda rows, cols, run: spec.step_tiles(rows, cols, run, 256))
    monkeypatch.setattr(launch, "PROGRAMS", 2)


@given(st.integers(1, 200), st.integers(1, 3000), st.integers(1, 2048), st.integers(6, 12))
def test_tiles_of_a_step_are_whole_runs_or_whole_rows(rows, cols, run, log):
    tiles = spec.step_tiles(rows, cols, run, 1 << log)
    assert tiles.rows & (tiles.rows - 1) == tiles.cols & (tiles.cols - 1) == 0 and tiles.cols >= tiles.span
    assert tiles.span % run == 0 or tiles.span >= cols
    assert tiles.rows * tiles.cols <= max(1 << log, spec.power_of_two(run)) and tiles.rows < 2 * rows
    for block in (b for b in (1, 7, 32, 33, 256, run) if run % b == 0):
        size, count, width = tiles.cut(block)
        assert size == min(block, tiles.cols) and count * size >= tiles.cols and size <= width < 2 * size
        assert count & (count - 1) == width & (width - 1) == 0


def check_step(call, in_place=False):
    """The Triton kernel's results against the reference's, in every bit."""
    triton_kernel, by_reference = (
        next(impl for impl in lb.impls("optimizer_step", DEVICE) if impl.name == name)
        for name in ("triton", "reference")
    )
    got, wanted = (
        tuple(torch.zeros(shape, dtype=dtype, device=DEVICE) for shape, dtype in OPS["optimizer_step"].outputs(call))
        for _ in range(2)
    )
    by_reference.run(wanted, call)
    if in_place:
        replaced = [getattr(call, name) for name in REPLACED]
        got = tuple(out if old is None else old for out, old in zip(got, replaced, strict=True))
    triton_kernel.run(got, call)
    for name, a, b in zip(OPS["optimizer_step"].returns, got, wanted, strict=True):
        assert_same_bits(a, b, f"{name} of {describe(call)}")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("part", range(3))
def test_steps_on_every_storage_and_weight_equal_the_reference(part):
    """Every sample but those of long rows, where test_kernels.py takes a few of the interpreted ones."""
    calls = [call for call in SAMPLES["optimizer_step"](DEVICE) if call.param.numel() < 3000][part::3]
    assert {call.rule for call in calls} == set(RULES)
    for call in calls:
        check_step(call)


@pytest.mark.slow
def test_steps_in_small_tiles_and_in_place_equal_the_reference(small_steps):
    """Rows of many tiles; blocks that no power of two divides and their last bytes; scales that a tile has many of."""
    calls = [c for c in SAMPLES["optimizer_step"](DEVICE) if c.rule == "adamw" and c.param.shape[-1] > 100]
    assert {(c.first_scheme, c.second_scheme) for c in calls} == set(samples.SCHEMES)
    for index, call in enumerate(calls):
        check_step(call, in_place=index % 2 == 1)


@pytest.mark.thinned(11)
@pytest.mark.parametrize("name", [name for name, row in STATES.items() if row.bits in (4, 8)])
@pytest.mark.parametrize("rule", list(RULES))
def test_a_step_is_one_launch(monkeypatch, small_steps, rule, name):
    """Of a parameter and a gradient with strides of their own, with random bits at any offset."""
    started = []
    monkeypatch.setattr(backend, "start", lambda launches, device: (started.extend(launches), run(launches)))
    numbers = [random_matrix(5, 600, DEVICE, seed=i) for i in range(3)]
    schemes = (STATES[name].signed, STATES[name].root)
    for weight, offset in ((samples.WEIGHTS[3], 1), (samples.WEIGHTS[6], 16), (samples.WEIGHTS[4], 8)):
        call = samples.sample(rule, numbers, schemes, weight, torch.bfloat16)
        call = OPS["optimizer_step"].args._make(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in call)
        call = call._replace(
            param=call.param.t().contiguous().t(), grad=call.grad.repeat_interleave(2, 1)[:, ::2],
            rounding="stochastic", offset=offset, pitch=1000,
        )  # fmt: skip
        started.clear()
        check_step(call)
        assert [one.kernel.__name__ for one in started] == ["step"]
