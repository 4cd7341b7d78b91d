"""Schemes with minima and superblocks: GGUF's block types, with gguf's own decoder as oracle, and kernel selection."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.bits import assert_same_bits
from torch import nn

import lowbit as lb
from lowbit.backends import registry
from lowbit.ops import OPS
from lowbit.reference import minimum_value, scale_value, spread
from lowbit.tensor.packing import pack, unpack
from lowbit.tensor.quantized import Quantized, Scales

MINIMA = ["uint4:group32:fp16:min", "uint5:group32:fp16:min", "uint4:group7:min", "uint8:row:bf16:min", "uint4:col:min"]
SUPERBLOCKS = ["q4_k", "q5_k", "q6_k"]
SCHEMES = [*MINIMA, *SUPERBLOCKS]


def matrix(rows=5, cols=600, seed=0):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    x[:, 40:80] *= 50
    x[1] = 0.25
    x[2, :300] = 0.0
    x[3] = x[3].abs() + 3
    return x


# -- GGUF: bytes of each block type, from the layout in ggml-common.h --------------------------------------------------
def halves(x):
    return x.numpy().astype(np.float16).view(np.uint8).reshape(-1, 2)


def nibbles(codes, run):
    """Two 4-bit codes a byte: ``run`` codes, then the next ``run`` in the high halves."""
    pairs = codes.reshape(len(codes), -1, 2, run)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(codes), -1).astype(np.uint8)


def high_bits(codes):
    """The fifth bits of 32 codes, the first one in the lowest bit."""
    return np.packbits(codes >> 4 & 1, axis=1, bitorder="little")


def of_32(q, bits, minimum):
    """Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0."""
    codes = unpack(q.codes, bits, q.shape[1]).numpy().reshape(-1, 32)
    parts = [halves(q.scale), *([halves(q.zero_point)] if minimum else [])]
    if bits == 8:
        return np.concatenate([*parts, codes], 1)
    codes = codes if minimum else codes ^ (1 << (bits - 1))  # two's complement to an offset
    return np.concatenate([*parts, *([high_bits(codes)] if bits == 5 else []), nibbles(codes & 15, 16)], 1)


def of_256(q, bits):
    """Q4_K and Q5_K."""
    codes = unpack(q.codes, bits, q.shape[1]).numpy().reshape(-1, 256)
    d, dmin = (halves(part.contiguous()) for part in q.global_scale.chunk(2, 1))
    sc, m = (part.numpy().reshape(-1, 8) for part in (q.scale, q.zero_point))
    six = [sc[:, :4] | sc[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4]
    fifth = (codes >> 4 & 1).reshape(-1, 8, 32)
    high = [sum(fifth[:, j] << j for j in range(8)).astype(np.uint8)] if bits == 5 else []
    return np.concatenate([d, dmin, *six, *high, nibbles(codes & 15, 32)], 1)


def of_256_signed(q):
    """Q6_K."""
    codes = (unpack(q.codes, 6, q.shape[1]).numpy() ^ 32).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15) | (codes[:, :, 2:] & 15) << 4
    high = sum(codes[:, :, j] >> 4 << (2 * j) for j in range(4))
    scales, d = q.scale.numpy().reshape(-1, 16), halves(q.global_scale)
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64).astype(np.uint8), scales, d], 1)


TYPES = {
    "Q4_0": ("int4:group32:fp16", lambda q: of_32(q, 4, False)),
    "Q5_0": ("int5:group32:fp16", lambda q: of_32(q, 5, False)),
    "Q8_0": ("int8:group32:fp16", lambda q: of_32(q, 8, False)),
    "Q4_1": ("uint4:group32:fp16:min", lambda q: of_32(q, 4, True)),
    "Q5_1": ("uint5:group32:fp16:min", lambda q: of_32(q, 5, True)),
    "Q4_K": ("q4_k", lambda q: of_256(q, 4)),
    "Q5_K": ("q5_k", lambda q: of_256(q, 5)),
    "Q6_K": ("q6_k", of_256_signed),
}


def arbitrary(scheme, rows=4, cols=768):
    """A Quantized of random parts, also such as quantize never makes: scales of 0, negative and subnormal ones."""
    s, generator = lb.scheme(scheme), torch.Generator().manual_seed(3)

    def numbers(shape):
        wide = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-24, 8, shape, generator=generator))
        return wide.half()

    def integers(shape, most):
        return torch.randint(0, most, shape, generator=generator, dtype=torch.uint8)

    scales, codes = s.scale_shape(rows, cols), pack(integers((rows, cols), 1 << s.format.bits), s.format.bits)
    if not s.superblocks:
        minimum = numbers(scales) if s.minimum else None
        return Quantized(codes, numbers(scales), minimum, None, s, torch.Size((rows, cols)), torch.float32)
    unit = numbers(s.global_scale_shape(rows, cols)).float()
    most = 1 << lb.formats.find(s.scale_format.name).bits
    minimum = integers(scales, most) if s.minimum else None
    return Quantized(codes, integers(scales, most), minimum, unit, s, torch.Size((rows, cols)), torch.float32)


@pytest.mark.parametrize("name", TYPES)
def test_decoding_is_that_of_gguf(name):
    gguf = pytest.importorskip("gguf")
    scheme, to_bytes = TYPES[name]
    for q in (lb.quantize(matrix(4, 768), scheme), arbitrary(scheme)):
        data = to_bytes(q)
        expected = gguf.dequantize(data.reshape(-1), gguf.GGMLQuantizationType[name]).reshape(tuple(q.shape))
        assert_same_bits(q.dequantize(), torch.from_numpy(expected), name)


# -- encoding, against numpy in fp32 -----------------------------------------------------------------------------------
def f16_up(x):
    """Non-negative fp32 rounded up to fp16."""
    y = x.astype(np.float16)
    return np.where(y.astype(np.float32) < x, np.nextafter(y, np.float16(np.inf)), y).astype(np.float16)


def f16_down(x):
    """fp32 rounded towards -Inf to fp16."""
    y = x.astype(np.float16)
    return np.where(y.astype(np.float32) > x, np.nextafter(y, np.float16(-np.inf)), y).astype(np.float16)


@pytest.mark.parametrize("bits", [4, 5])
def test_minima_as_specified(bits):
    x = matrix(5, 640)
    q = lb.quantize(x, f"uint{bits}:group32:fp16:min")
    blocks, qmax = x.numpy().reshape(5, 20, 32), np.float32(2**bits - 1)
    low, high = blocks.min(2), blocks.max(2)
    minimum = f16_down(low)
    span = np.maximum(high - minimum.astype(np.float32), np.float32(0))
    scale = np.where(span > 0, f16_up(span / qmax), np.float16(1))
    codes = np.clip(
        np.rint((blocks - minimum.astype(np.float32)[..., None]) / scale.astype(np.float32)[..., None]), 0, qmax
    )
    assert np.array_equal(q.zero_point.numpy(), minimum) and np.array_equal(q.scale.numpy(), scale)
    assert np.array_equal(unpack(q.codes, bits, 640).numpy(), codes.reshape(5, 640))


@pytest.mark.parametrize(("scheme", "bits"), [("q4_k", 4), ("q5_k", 5)])
def test_superblocks_with_minima_as_specified(scheme, bits):
    x = matrix(5, 768)
    q, blocks, qmax = lb.quantize(x, scheme), x.numpy().reshape(5, 3, 8, 32), np.float32(2**bits - 1)
    low, high = np.minimum(blocks.min(3), 0), blocks.max(3)

    def unit(amounts):
        largest = amounts.max(2)
        return np.where(largest > 0, f16_up(largest / np.float32(63)), np.float16(1)).astype(np.float32)

    dmin = unit(-low)
    m = np.clip(np.rint(-low / dmin[..., None]), 0, 63).astype(np.float32)
    minimum = -(dmin[..., None] * m)
    step = np.maximum(high - minimum, np.float32(0)) / qmax
    d = unit(step)
    sc = np.clip(np.rint(step / d[..., None]), 1, 63).astype(np.float32)
    scale = d[..., None] * sc
    codes = np.clip(np.rint((blocks - minimum[..., None]) / scale[..., None]), 0, qmax)
    assert np.array_equal(q.global_scale.numpy(), np.concatenate([d, dmin], 1))
    assert np.array_equal(q.zero_point.numpy(), m.reshape(5, 24)) and np.array_equal(q.scale.numpy(), sc.reshape(5, 24))
    assert np.array_equal(unpack(q.codes, bits, 768).numpy(), codes.reshape(5, 768))


def test_superblocks_of_signed_integers_as_specified():
    x = matrix(5, 768)
    q, blocks = lb.quantize(x, "q6_k"), x.numpy().reshape(5, 3, 16, 16)
    step = np.abs(blocks).max(3) / np.float32(31)
    largest = step.max(2)
    d = np.where(largest > 0, f16_up(largest / np.float32(127)), np.float16(1)).astype(np.float32)
    sc = np.clip(np.rint(step / d[..., None]), 1, 127).astype(np.float32)
    codes = np.clip(np.rint(blocks / (d[..., None] * sc)[..., None]), -32, 31).astype(np.int64) & 63
    assert np.array_equal(q.global_scale.numpy(), d) and np.array_equal(q.scale.numpy(), sc.reshape(5, 48))
    assert np.array_equal(unpack(q.codes, 6, 768).numpy(), codes.reshape(5, 768))


# -- properties --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_shape_and_static_scales(scheme):
    for x in (matrix(), matrix(5, 256).bfloat16(), torch.randn(3, 1), torch.randn(7), torch.randn(()), torch.ones(0, 4),
              torch.ones(4, 0), torch.randn(2, 3, 40).half()):  # fmt: skip
        q = lb.quantize(x, scheme)
        assert_same_bits(lb.fake_quantize(x, scheme), q.dequantize(), f"{scheme} {x.shape}", source=x)
        again = lb.quantize(x, scheme, *Scales.of(q))
        assert_same_bits(again.dequantize(), q.dequantize(), f"{scheme} {x.shape} static", source=x)
        assert sum(part.nbytes for part in q.parts.values()) == q.nbytes and q.dequantize().isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_and_inf_stay_in_their_block(scheme):
    x = matrix()
    clean = lb.quantize(x, scheme).dequantize()
    x[0, 3], x[4, 599] = torch.nan, -torch.inf
    s = lb.scheme(scheme)
    rows, cols = (1, 256) if s.superblocks else s.block_of(5, 600)
    broken = torch.zeros(5, 600, dtype=torch.bool)
    for i, j in ((0, 3), (4, 599)):
        broken[i // rows * rows : i // rows * rows + rows, j // cols * cols : j // cols * cols + cols] = True
    decoded = lb.quantize(x, scheme).dequantize()
    assert torch.equal(decoded.isnan(), broken)
    assert_same_bits(decoded[~broken], clean[~broken], scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_is_small(scheme):
    x, s = torch.randn(8, 512, generator=torch.Generator().manual_seed(1)), lb.scheme(scheme)
    error = (lb.quantize(x, scheme).dequantize() - x).norm() / x.norm()
    assert error < {4: 0.09, 5: 0.045, 6: 0.022, 8: 0.02}[s.format.bits] * (2 if s.block[1] in (None, 1) else 1)


@pytest.mark.parametrize("scheme", ["uint4:group32:fp16:min", "q4_k", "q6_k"])
def test_only_the_reference_runs_them(scheme):
    x, w = torch.randn(3, 300), lb.quantize(matrix(6, 300), scheme)
    reason = "only the reference supports"
    for backend in {row.backend for op in OPS for row in registry.impls(op)} - {"reference"}:
        with lb.use_backend(backend), pytest.raises(lb.BackendError, match=reason):
            w.dequantize()
        with lb.use_backend(backend), pytest.raises(lb.BackendError, match=reason):
            lb.linear(x, w)
    y = lb.linear(x, w)
    exact = x.double() @ w.dequantize().double().t()
    assert torch.allclose(y.double(), exact, rtol=1e-6, atol=1e-6)
    assert_same_bits(lb.scaled_mm(x, w, out_dtype=torch.float32), y, scheme)


@pytest.mark.parametrize("scheme", ["uint8:row:min", "q4_k", "q6_k"])
def test_products_of_two_quantized_operands(scheme):
    a, b = lb.quantize(torch.randn(3, 16), "int8:row"), lb.quantize(torch.randn(4, 16) + 1, scheme)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    assert torch.allclose(lb.scaled_mm(a, b, out_dtype=torch.float32).double(), exact, rtol=1e-5, atol=1e-5)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_autograd(scheme):
    """Of a product and a sum with a straight-through rounding; of the scales and minima as decoding uses them."""
    s, x, other = lb.scheme(scheme), matrix().double(), matrix(seed=1).float() * 0.7
    q = lb.quantize(other, scheme)
    block = s.block_of(*x.shape)
    step = scale_value(q.scale, s, q.global_scale).double().requires_grad_()
    low = torch.zeros_like(step) if q.zero_point is None else minimum_value(q.zero_point, s, q.global_scale).double()
    low.requires_grad_()
    x.requires_grad_()
    wide, base = (spread(part, block, *x.shape) for part in (step, low))
    y = _Round.apply((x - base) / wide).clamp(s.format.qmin, s.format.qmax) * wide + base
    grad = torch.randn_like(y)
    y.backward(grad)
    of_x, of_scales = torch.ops.lowbit.fake_quantize_backward(grad.float(), x.detach().float(), scheme, *Scales.of(q))
    assert torch.equal(of_x, x.grad.float())
    expected = step.grad if q.zero_point is None else torch.stack([step.grad, low.grad])
    size = expected.abs().amax() + 1
    assert torch.allclose(of_scales.double() / size, expected / size, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4:group32:min", "a minimum needs an unsigned integer"),
        ("uint4:group32:affine:min", "a minimum needs an unsigned integer"),
        ("fp8_e4m3:row:min", "a minimum needs an unsigned integer"),
        ("uint4:group32:e8m0:min", "stored like a scale, which cannot be e8m0"),
        ("int4:super32", "super32 needs unsigned integers"),
        ("uint4:super16", "super16 needs signed integers"),
        ("q4_k:T", "super32 takes no options, got T"),
        ("q6_k:full", "super16 takes no options, got full"),
    ],
)
def test_schemes_that_do_not_exist(name, message):
    with pytest.raises(ValueError, match=message):
        lb.scheme(name)


def test_names():
    assert lb.scheme("uint4:super32").name == "q4_k" and lb.scheme("int6:super16").name == "q6_k"
    assert lb.scheme("uint4:group32:min:fp16").name == "uint4:group32:fp16:min"
    with pytest.raises(ValueError, match="no transposed form"):
        lb.quantize(torch.randn(4, 256), "q4_k").t()
    assert_same_bits(
        lb.quantize(matrix(), MINIMA[0]).t().dequantize(), lb.quantize(matrix(), MINIMA[0]).dequantize().t()
    )
    with pytest.raises(ValueError, match=r"a scale needs its zero_point \(the minimum\)"):
        lb.quantize(torch.randn(4, 32), MINIMA[0], scale=1.0)
    with pytest.raises(ValueError, match="static scales need a scheme without minima"):
        lb.Cast("uint8:tensor:min", scale="static")


def test_layers_keep_every_bit(tmp_path):
    for scheme in ("q4_1", "q4_k", "q6_k"):
        model = nn.Sequential(nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 20))
        lb.quantize_(model, scheme, skip=(), method="nearest")
        x = torch.randn(3, 300)
        y = model(x)
        assert model[0].weight.zero_point is None or model[0].zero_point.dtype in (torch.int16, torch.uint8)
        other = nn.Sequential(nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 20))
        lb.quantize_(other, scheme, skip=(), method="nearest")
        other.load_state_dict(model.state_dict())
        assert_same_bits(other(x), y, scheme)
        assert_same_bits(model.bfloat16()[0].weight.dequantize(torch.float32), other[0].weight.dequantize(), scheme)
        x.requires_grad_()
        other(x).sum().backward()
        assert x.grad is not None


def test_embeddings_and_grouped_convolutions():
    for scheme in ("q4_1", "q4_k"):
        table = nn.Sequential(nn.Embedding(10, 64))
        lb.quantize_(table, {"0": scheme}, skip=())
        assert_same_bits(table(torch.arange(10)), table[0].weight.dequantize(), scheme)
        conv = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2))
        lb.quantize_(conv, scheme, skip=())
        assert type(conv[0]) is not nn.Conv2d and conv(torch.randn(1, 4, 5, 5)).isfinite().all()
