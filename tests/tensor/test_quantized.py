"""Packing, and what a Quantized is: transposed, copied, saved, taken apart; properties of every scheme."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import assert_same_bits
from support.variants import ALL, Variant
from torch import Tensor
from torch.utils import _pytree as pytree

import lowbit as lb
from lowbit.testing.inputs import element_formats, random_matrix, schemes

everywhere = pytest.mark.parametrize("variant", ALL)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


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
        with pytest.raises(ValueError, match=r"expected the shape of the codes that were packed, such as \(4, 64\)"):
            lb.unpack(torch.zeros(2, 4, dtype=torch.uint8), 4, shape)


# -- Quantized ---------------------------------------------------------------------------------------------------------
#: A transpose moves codes of so many bits and scales of such blocks: one scheme of each.
BITS_AND_BLOCKS = list({(s.format.bits, s.block, s.global_scale): s for s in schemes()}.values())


@pytest.mark.parametrize("s", BITS_AND_BLOCKS, ids=str)
def test_a_transposed_quantized_decodes_to_the_transpose(s):
    x = random_matrix(11, 37, seed=3, extremes=True)
    q = lb.quantize(x, s)
    if s.global_scale == "row":
        with pytest.raises(ValueError, match="'global_row' needs blocks of one row"):
            q.t()
        return
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
    assert (q.zero_point is not None) == s.affine and (q.global_scale is not None) == bool(s.global_scale)
    assert_same_bits(lb.fake_quantize(x, s), q.dequantize(), f"{s} {list(x.shape)} {x.dtype} {x.stride()}")


@given(st.sampled_from(schemes()), matrices())
def test_quantizing_what_was_decoded_with_the_same_scales_returns_the_codes(s, x):
    """Where nothing is lost on the way: in fp32, and no scale so small that a product is rounded as a subnormal."""
    x = x.float() * 2.0 ** (-float(x.float().abs().max().log2().floor()) if x.any() and x.isfinite().all() else 0)
    q = lb.quantize(x, s)
    again = lb.quantize(q.dequantize(), s, scale=q.scale, zero_point=q.zero_point, global_scale=q.global_scale)
    difference = q.codes != again.codes
    if s.format.kind == "codebook" or s.global_scale:  # -0 and zeros of blocks without scale
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
