"""Scales: next to every power of two, rounded up, affine beside ONNX Runtime, two levels, damaged blocks, flush mode.

Oracle: exact rationals (oracles.py), and onnxruntime for what ONNX defines.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from support import oracles
from support.bits import assert_same_bits, pattern
from support.oracles import Fraction
from support.variants import ALL, NATIVE, Variant, flush_denormal

import lowbit as lb
from lowbit.formats import find
from lowbit.testing.inputs import random_matrix, schemes
from lowbit.testing.quantize import damaged_matrices

everywhere = pytest.mark.parametrize("variant", ALL)


def numbers(bits) -> torch.Tensor:
    return torch.from_numpy(np.asarray(bits, np.uint32).view(np.int32)).view(torch.float32)


@functools.cache
def near_powers_of_two(f: lb.Format) -> list[int]:
    """fp32 patterns of every 2**k, subnormals included, of the format's maximum times it, one ulp to either side."""
    found = {0x7F7FFFFF, 0x7F7FFFFE}
    largest = oracles.largest(f)
    for k in range(-149, 128):
        for factor in (Fraction(1), largest / oracles.power(oracles.floor_log2(largest))):
            middle = oracles.to_bits(factor * oracles.power(k))
            found |= {middle - 1, middle, middle + 1}
    return sorted(b for b in found if 0 < b < oracles.F32_INF)


@functools.cache
def expected_scales(name: str) -> np.ndarray:
    s = lb.scheme(name)
    return np.array([oracles.block_scale([b, 0], s, None).stored for b in near_powers_of_two(s.format)], np.int64)


E8M0 = [f"{f}:{scaling}{option}" for f in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8", "nf4")
        for scaling, option in (("mx", ""), ("mx", ":ceil"))] + ["mxfp4:nearest"]  # fmt: skip
ROUNDED = [
    "int8:group32:bf16",
    "int8:group32:fp16",
    "fp8_e4m3:group32:bf16",
    "nf4:group32:fp16",
    "int8:group32",
    "ulog4:group32",
    "ulog4:group32:bf16",
    "ulog4:group32:fp16",
]


@pytest.mark.thinned(3)
@everywhere
@pytest.mark.parametrize("name", [*E8M0, *ROUNDED])
def test_scales_next_to_every_power_of_two(variant: Variant, name):
    """One block a pattern; the amax stands anywhere in it, with either sign."""
    s = lb.scheme(name)
    amax = numbers(near_powers_of_two(s.format))
    row = torch.arange(len(amax))
    x = torch.zeros(len(amax), 32)
    x[row, row * 7 % 32] = amax * torch.where(row % 2 == 0, 1, -1)
    x = x.to(variant.device)
    if reason := variant.refuses("quantize", x, s):
        pytest.skip(reason)
    with variant.use():
        q = lb.quantize(x, s)
    assert_same_bits(q.scale[:, 0].cpu(), expected_scales(name), f"{name} on {variant}", source=amax)


@pytest.mark.parametrize("name", [n for n in E8M0 if n.endswith("ceil")])
def test_ceil_never_clips_and_is_the_least_that_does_not(name):
    s = lb.scheme(name)
    limit = oracles.largest(s.format)
    for bits, code in zip(near_powers_of_two(s.format), expected_scales(name).tolist(), strict=True):
        amax, scale = oracles.from_bits(bits), oracles.power(code - 127)
        assert amax / scale <= limit or code == 254
        assert amax / (scale / 2) > limit or code == 0


@pytest.mark.parametrize("name", ROUNDED[:4])
def test_rounded_up_scales_never_clip(name):
    s = lb.scheme(name)
    for bits, stored in zip(near_powers_of_two(s.format), expected_scales(name).tolist(), strict=True):
        scale = oracles.scale_of(stored, s, None)
        largest = stored == {"bf16": 0x7F7F, "fp16": 0x7BFF}[s.scale_format.name]
        assert Fraction(oracles.fp32(oracles.from_bits(bits) / oracles.largest(s.format))) <= scale or largest


@pytest.mark.thinned(7)
@pytest.mark.parametrize("s", schemes(), ids=str)
def test_every_scheme_on_damaged_blocks_equals_rationals(s):
    """Codes, scales, zero points, global scale and decoded bits of ragged matrices with 0, subnormals, Inf and NaN.

    Asked of the reference; the matrices are among the samples on which every kernel equals it.
    """
    for bits, expected in damaged(s.name):
        x = numbers(bits)
        with lb.use_backend("reference"):
            q = lb.quantize(x, s)
            y = q.dequantize()
            codes = lb.unpack(q.codes, s.format.bits, x.shape)
        check(q, codes, y, expected, str(s), x)


def check(q: lb.Quantized, codes: torch.Tensor, y: torch.Tensor, expected: oracles.Expected, what: str, x) -> None:
    if expected.global_scale is not None:
        assert pattern(q.global_scale).flatten().tolist() == expected.global_scale, f"{what}: global scale"
    assert_same_bits(q.scale.cpu(), expected.scale.astype(np.int64), f"{what}: scale")
    if q.zero_point is not None:
        assert q.zero_point.cpu().long().tolist() == expected.zero_point.tolist(), f"{what}: zero point"
    assert_same_bits(codes.cpu(), expected.codes, f"{what}: codes", source=x.cpu())
    assert_same_bits(y.cpu(), expected.decoded.astype(np.int64), f"{what}: decoded", source=x.cpu())


@functools.cache
def damaged(name: str) -> list[tuple[np.ndarray, oracles.Expected]]:
    """The damaged samples, as patterns, with what rationals make of them."""
    made = []
    for x in damaged_matrices():
        bits = x.contiguous().view(torch.int32).numpy().view(np.uint32)
        made.append((bits, oracles.quantize(bits, lb.scheme(name))))
    return made


#: Flushing acts on instructions: one scheme of each format and rounding of scales, kind of elements, affine or not.
OF_EACH_KIND = list({(s.scale_format, s.rounding, s.format.kind, s.affine): s for s in reversed(schemes())}.values())


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("s", OF_EACH_KIND, ids=str)
def test_native_kernels_are_immune_to_flush_denormal(variant: Variant, s):
    """Scales and codes of subnormal blocks, on one thread and on two, where torch itself would flush."""
    for bits, expected in damaged(s.name)[:2]:
        x = numbers(bits)
        with variant.use(), flush_denormal():
            q = lb.quantize(x, s)
            y = q.dequantize()
            codes = lb.unpack(q.codes, s.format.bits, x.shape)
            f = lb.fake_quantize(x, s)
        check(q, codes, y, expected, f"{s} on {variant}, flushing", x)
        assert_same_bits(f, y, f"{s} on {variant}, flushing: fake_quantize")


@pytest.mark.parametrize("variant", NATIVE)
def test_large_tensors_under_flush_denormal_on_every_thread(variant: Variant):
    """Enough work for every thread of the pool: a flag set on some threads only would show in part of the tensor."""
    x = torch.randn(64, 1 << 15).mul_(2.0**-130)
    expected = {
        name: lb.quantize(x, name) for name in ("fp8_e4m3:row", "mxfp8", "int8:tensor", "nvfp4", "int4:group32:affine")
    }
    codes = lb.encode(x, "e5m2b40")
    for name, q in expected.items():
        y = q.dequantize()
        with variant.use(), flush_denormal():
            again = lb.quantize(x, name)
            back = again.dequantize()
        assert_same_bits(again.codes, q.codes, name)
        assert_same_bits(again.scale, q.scale, name)
        assert_same_bits(back, y, name)
    with variant.use(), flush_denormal():
        assert_same_bits(lb.encode(x, "e5m2b40"), codes, "encode")


def test_the_reference_refuses_to_run_where_torch_flushes():
    x = torch.ones(4, 4)
    with lb.use_backend("reference"):
        q = lb.quantize(x, "int8:row")
        with flush_denormal():
            for call in (
                lambda: lb.quantize(x, "int8:row"),
                lambda: lb.encode(x, "fp8_e4m3"),
                lambda: lb.fake_quantize(x, "mxfp4"),
                lambda: q.dequantize(),
                lambda: lb.scaled_mm(q, q),
                lambda: lb.quantize(x, "int8:row", scale=1.0),
                lambda: lb.quantize(x, "nvfp4"),
            ):
                with pytest.raises(RuntimeError, match=r"reference backend cannot run under torch.set_flush_denormal"):
                    call()
            values = lb.decode(torch.arange(256, dtype=torch.uint8), "e8m0")
    assert float(values[0]) == 2.0**-127, "decode moves bits and computes nothing"


# -- affine: ONNX's words ----------------------------------------------------------------------------------------------
def session(nodes, inputs, outputs):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@functools.cache
def dynamic_quantize_linear():
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"])
    return session(
        [node], [("x", TensorProto.FLOAT, [None])],
        [("y", TensorProto.UINT8, [None]), ("scale", TensorProto.FLOAT, []), ("zero", TensorProto.UINT8, [])],
    )  # fmt: skip


@functools.cache
def linear(code: int, per_row: bool):
    shape = ["R"] if per_row else []
    args = {"axis": 0} if per_row else {}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], **args),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], **args),
    ]
    inputs = [("x", TensorProto.FLOAT, ["R", "C"]), ("scale", TensorProto.FLOAT, shape), ("zero", code, shape)]
    return session(nodes, inputs, [("q", code, ["R", "C"]), ("y", TensorProto.FLOAT, ["R", "C"])])


@everywhere
def test_affine_uint8_equals_dynamic_quantize_linear(variant: Variant):
    generator = torch.Generator().manual_seed(3)
    cases = [
        torch.randn(257, generator=generator) * 10.0**e + shift
        for e in (-20, -3, 0, 3, 20)
        for shift in (0.0, 0.5, -2.0)
    ]
    cases += [torch.rand(64, generator=generator) + 5, -torch.rand(64, generator=generator) - 5]
    cases += [torch.tensor([0.0, 1.0, 2.5, -0.5]), torch.tensor([1.0, 1.0]), torch.tensor([-3.0])]
    for x in cases:
        codes, scale, zero = dynamic_quantize_linear().run(None, {"x": x.numpy()})
        with variant.use():
            q = lb.quantize(x.to(variant.device), "uint8:tensor:affine")
        assert_same_bits(q.scale.cpu(), scale.reshape(1, 1).view(np.uint32).astype(np.int64), "scale")
        assert int(q.zero_point) == int(zero)
        assert_same_bits(q.codes.cpu(), codes, "codes", source=x)


@everywhere
@pytest.mark.parametrize("affine", [False, True], ids=["symmetric", "affine"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("name", ["int8", "uint8"])
def test_static_scales_equal_quantize_and_dequantize_linear(variant: Variant, name, granularity, affine):
    if name == "uint8" and not affine:
        pytest.skip("an unsigned format without zero point is refused")
    x = random_matrix(9, 500, seed=4)
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    scheme = f"{name}:{granularity}{':affine' if affine else ''}"
    made = lb.quantize(x[1:].repeat(2, 1)[:9], scheme)
    code = TensorProto.INT8 if name == "int8" else TensorProto.UINT8
    scale = made.scale.reshape(-1)
    zero = torch.zeros_like(scale, dtype=torch.int8) if made.zero_point is None else made.zero_point.reshape(-1)
    feed = {"x": x.numpy(), "scale": scale.numpy(), "zero": zero.numpy()}
    if granularity == "tensor":
        feed |= {"scale": scale[0].numpy(), "zero": zero[0].numpy()}
    codes, y = linear(code, granularity == "row").run(None, feed)
    with variant.use():
        q = made.map(lambda t: t.to(variant.device))
        q = lb.quantize(x.to(variant.device), scheme, scale=q.scale, zero_point=q.zero_point)
        back = q.dequantize()
    assert_same_bits(q.codes.cpu(), codes.view(np.uint8), "codes", source=x)
    plain = torch.from_numpy(y)
    back = back.cpu()
    assert torch.equal(back, plain)
    assert_same_bits(back.where(back != 0, 0.0), plain.where(plain != 0, 0.0), "decoded")


def test_symmetric_codes_use_all_of_the_range():
    q = lb.quantize(torch.tensor([[-200.0, 127.0]]), "int8:row", scale=1.0)
    assert q.codes.view(torch.int8).tolist() == [[-128, 127]]


# -- shapes of damage --------------------------------------------------------------------------------------------------
@pytest.mark.thinned(4)
@pytest.mark.parametrize("s", schemes(), ids=str)
def test_damage_shows_and_only_in_its_block(s):
    """Asked of the reference, which every kernel equals on damaged samples."""
    x = random_matrix(9, 70, seed=6)
    x[5, 40], x[0, 3] = torch.inf, -torch.nan
    rows, cols = x.shape
    r, c = s.block_of(rows, cols)
    hit = torch.zeros(rows, cols, dtype=torch.bool)
    for i, j in ((5, 40), (0, 3)):
        hit[i // r * r : i // r * r + r, j // c * c : j // c * c + c] = True
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with lb.use_backend("reference"):
            y = lb.fake_quantize(x.to(dtype), s)
        assert torch.equal(y.isnan(), hit), f"{s}: NaN where it should not be, or none where it should"
        nan = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[dtype]
        assert set(pattern(y)[hit].tolist()) == {nan}
        assert not y[~hit].isinf().any() or dtype == torch.float16


BOOKS = [f for f in lb.FORMATS.values() if f.kind == "codebook"]


@pytest.mark.thinned(3)
@everywhere
@pytest.mark.parametrize("f", BOOKS, ids=str)
def test_blocks_of_zeros_are_zeros_beside_others(variant: Variant, f):
    """In codebooks that have no entry 0 too, with scales of every format that has a 0."""
    x = torch.zeros(3, 300, device=variant.device)
    x[0, 3], x[1, 130:200], x[2, 299] = -0.0, torch.linspace(0.5, 8, 70), 1e-30
    others = torch.zeros(3, 3, dtype=torch.bool, device=variant.device)
    others[1, 1] = others[2, 2] = True
    for options in ("group128", "group128:bf16", "group128:fp16", "group128:e4m3:global_row"):
        name = f"{f}:{options}"
        if reason := variant.refuses("quantize", x, name):
            pytest.skip(reason)
        for rounding in ("nearest", lb.Rounding(seed=3)):
            with variant.use():
                q = lb.quantize(x, name, rounding=rounding)
                both = q.dequantize(), lb.fake_quantize(x, name, rounding=rounding)
            for y in both:
                zeros = ~others.repeat_interleave(128, 1)[:, :300]
                assert not pattern(y)[zeros].any(), f"{name} on {variant}"
                assert y[1, 199] == pytest.approx(8, rel=0.1), "the largest number of its block"
            if options == "group128":
                assert ((q.scale == 0) == (~others if 0 not in f.codebook else False)).all()


@everywhere
@pytest.mark.parametrize("f", BOOKS, ids=str)
def test_states_begin_at_zero(variant: Variant, f):
    """Codes nearest zero under scales of 0, as states of optimizers are before the first step."""
    for options in ("group128", "group128:bf16"):
        q = lb.quantize(torch.ones(2, 256, device=variant.device), f"{f}:{options}")
        zero = f.zero_code * (17 if f.bits == 4 else 1)
        start = replace(q, codes=torch.full_like(q.codes, zero), scale=torch.zeros_like(q.scale))
        if reason := variant.refuses("dequantize", start):
            pytest.skip(reason)
        with variant.use():
            assert not pattern(start.dequantize()).any(), f"{start.scheme} on {variant}"


@everywhere
@pytest.mark.parametrize("name", ["nvfp4", "nf4:e4m3", "int4:group32:e4m3", "fp4_e2m1:row:e4m3"])
def test_two_levels(variant: Variant, name):
    """A block far below the tensor's largest gets scale 0 and zeros with their signs; the global scale is finite."""
    x = torch.full((2, 64), 3.0)
    x[0] *= 1e-9
    x[0, 1::2] *= -1
    with variant.use():
        q = lb.quantize(x.to(variant.device), name)
        y = q.dequantize().cpu()
    assert set(q.scale[0].tolist()) == {0} and q.scale[1, 0] == 0x7E
    assert torch.equal(y[0], torch.zeros(64)), "what decodes is zero"
    if q.scheme.format.kind == "float":
        assert_same_bits(y[0], torch.where(x[0] < 0, -0.0, 0.0), "signs of zeros")
    with variant.use():
        empty = lb.quantize(torch.zeros(3, 32, device=variant.device), name)
        broken = lb.quantize(torch.full((1, 32), torch.nan, device=variant.device), name)
    assert float(empty.global_scale) == 1.0 and not empty.scale.any()
    assert float(broken.global_scale) == 1.0 and broken.scale.unique().tolist() == [find("fp8_e4m3").nan_code]
