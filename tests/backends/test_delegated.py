"""Products that torch computes on CUDA. In place of torch's ops stand ones that obey their documentation.

Codecs and the epilogue are Triton's kernels, interpreted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.mm_oracle import check
from support.samples import samples
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lowbit as lb
from lowbit.backends import delegated, registry, triton
from lowbit.ops import OPS
from lowbit.testing.inputs import random_matrix
from lowbit.testing.matmul import make_call

pytestmark = pytest.mark.skipif(not triton.INTERPRETED, reason="Triton's kernels are not interpreted here")

IMPLS = {impl.name: impl for impl in delegated.IMPLS if impl.op == "scaled_mm"}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """torch._int_mm: more than 16 rows of int8, K and N multiples of 8."""
    assert a.dtype == b.dtype == torch.int8
    assert a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0
    return (a.double() @ b.double()).to(torch.int32)


def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """torch.mm with another output dtype: both operands in 16 bits, the output in fp32."""
    assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32
    return a.float() @ b.float()


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """torch._scaled_mm by tensor: FP8, one of them E4M3, b by columns, K and N multiples of 16."""
    assert a.dtype in FP8 and b.dtype in FP8 and FP8[0] in (a.dtype, b.dtype)
    assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0 and b.stride(0) == 1 and a.stride(1) == 1
    assert scale_a.numel() == scale_b.numel() == 1
    return ((a.double() * scale_a.double()) @ (b.double() * scale_b.double())).to(out_dtype)


def blocks(x: Tensor, scale: Tensor, recipe: object) -> Tensor:
    """FP8 times fp32 scales that lie as F.scaled_mm wants them, by the checks of torch 2.13."""
    rows, cols = x.shape
    if recipe == F.ScalingType.BlockWise1x128:
        assert scale.shape == (rows, cols // 128) and scale.stride(0) == 1
        assert scale.stride(1) == rows or cols == 128 == 128 * scale.stride(1)
        assert rows % 4 == 0
        return x.double() * scale.double().repeat_interleave(128, 1)
    assert recipe == F.ScalingType.BlockWise128x128
    along = -(-cols // 128 // 4) * 4
    assert scale.shape == (along, rows // 128) and scale.stride() == (1, along)
    return x.double() * scale.t()[:, : cols // 128].double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def scaled_blocks(
    a: Tensor, b: Tensor, a_scale: Tensor, a_recipe: object, b_scale: Tensor, b_recipe: object, *,
    output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_mm by blocks: FP8, one of them E4M3 and one with blocks of one row, b by columns."""
    assert a.dtype in FP8 and b.dtype in FP8 and FP8[0] in (a.dtype, b.dtype)
    assert b.stride(0) == 1 and a.stride(1) == 1 and F.ScalingType.BlockWise1x128 in (a_recipe, b_recipe)
    return (blocks(a, a_scale, a_recipe) @ blocks(b.t(), b_scale, b_recipe).T).to(output_dtype)


@pytest.fixture(autouse=True)
def in_place_of_torch(monkeypatch):
    monkeypatch.setattr(torch, "_int_mm", int_mm)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(F, "scaled_mm", scaled_blocks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(triton, "capability", lambda device: (9, 0))
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def product(name, call):
    impl = IMPLS[name]
    assert impl.supports(call) is None
    out = torch.empty(call.a.shape[0], call.b.shape[0], dtype=call.out_dtype)
    impl.run((out,), call)
    check(out, call, impl.numerics, f"{name}: {call.a_scheme} x {call.b_scheme}")
    return out


@pytest.mark.thinned(2)
@pytest.mark.parametrize("part", range(2))
def test_every_sample_that_is_served_is_right(part):
    torch.set_float32_matmul_precision("medium")
    served = dict.fromkeys(IMPLS, 0)
    for call in samples("scaled_mm")[part::16]:
        for name, impl in IMPLS.items():
            if impl.supports(call) is None:
                product(name, call)
                served[name] += 1
    assert served["delegated_bf16"] > 10 and served["delegated_rounded"] > 2


@pytest.mark.parametrize(("name", "a", "b"), [
    ("delegated_int8", "int8:row", "int8:row"), ("delegated_int8", "int8:tensor", "int8:row"),
    ("delegated_fp8", "fp8_e4m3:row", "fp8_e4m3:row"), ("delegated_fp8", "fp8_e5m2:tensor", "fp8_e4m3:row"),
    ("delegated_bf16", "mxfp8", "mxfp4"), ("delegated_bf16", "nvfp4", "nvfp4:global_row"),
    ("delegated_bf16", None, "int8:row"), ("delegated_rounded", None, "nf4"),
])  # fmt: skip
@pytest.mark.parametrize("rows", [3, 40])
def test_rows_are_multiplied_in_parts(monkeypatch, name, a, b, rows):
    torch.set_float32_matmul_precision("medium")
    left, right = random_matrix(rows, 96, "cpu", seed=1), random_matrix(32, 96, "cpu", seed=2)
    bias = random_matrix(1, 32, "cpu", seed=3)[0]
    left = left if a else left.bfloat16()
    whole = product(name, make_call(left, right, a, b, bias=bias))
    monkeypatch.setattr(delegated, "_ROW_MULTIPLE", 17)
    monkeypatch.setattr(delegated, "_SUMS", 1)
    torch.testing.assert_close(product(name, make_call(left, right, a, b, bias=bias)), whole, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "a", "b", "k", "n", "reason"), [
    ("delegated_int8", "int8:row", "int4:row", 64, 16, "it multiplies int8 without zero points"),
    ("delegated_int8", "int8:row:affine", "int8:row", 64, 16, "it multiplies int8 without zero points"),
    ("delegated_int8", "int8:row", "int8:group32", 64, 16, "change within a row"),
    ("delegated_int8", "int8:row", "int8:row", 60, 16, "multiples of 8, got 60 and 16"),
    ("delegated_bf16", "int8:row", "int8:row", 64, 16, "products of integers are exact"),
    ("delegated_bf16", None, "nf4", 64, 16, "b is not exact in bf16"),
    ("delegated_bf16", None, "int4:group32", 64, 16, "b is not exact in bf16"),
    ("delegated_rounded", "int8:row", "int8:row", 64, 16, "products of integers are exact"),
    ("delegated_rounded", "uint8:row:affine", "int4:row", 64, 16, "products of integers are exact"),
    ("delegated_rounded", None, "int8:row", 64, 16, "both operands are exact in bf16"),
    ("delegated_rounded", None, "int4:group32", 64, 16, "it rounds float32 and codebooks, and b is int4:group32"),
    ("delegated_fp8", "fp8_e5m2:row", "fp8_e5m2:row", 64, 16, "one of them E4M3"),
    ("delegated_fp8_blocks", None, "fp8_e4m3:block128x128", 128, 128, "FP8 by FP8"),
    ("delegated_fp8_blocks", "fp8_e4m3:group64", "fp8_e4m3:block128x128", 128, 128, "got fp8_e4m3:group64 and fp8"),
    ("delegated_fp8_blocks", "fp8_e4m3:group128:e8m0", "fp8_e4m3:block128x128", 128, 128, "scales in float32"),
    ("delegated_fp8_blocks", "fp8_e4m3:group128", "fp8_e4m3:block128x128", 192, 128, "whole blocks, got K = 192"),
    ("delegated_fp8_blocks", "fp8_e4m3:group128", "fp8_e4m3:block128x128", 256, 96, "got 96 rows or columns"),
    ("delegated_fp8", "fp8_e4m3:row", "fp8_e4m3:row", 64, 24, "multiples of 16, got 64 and 24"),
])  # fmt: skip
def test_what_torch_does_not_take_is_refused(name, a, b, k, n, reason):
    torch.set_float32_matmul_precision("medium")
    call = make_call(torch.ones(4, k, dtype=torch.bfloat16), torch.ones(n, k), a, b)
    assert reason in IMPLS[name].supports(call)


@pytest.mark.parametrize(("a", "b"), [
    ("fp8_e4m3:group128", "fp8_e4m3:block128x128"), ("fp8_e5m2:group128", "fp8_e4m3:group128"),
    ("fp8_e4m3:block128x128", "fp8_e5m2:group128"),
])  # fmt: skip
@pytest.mark.parametrize(("rows", "k"), [(256, 128), (256, 640), (7, 256)])
def test_fp8_in_blocks(monkeypatch, a, b, rows, k):
    torch.set_float32_matmul_precision("medium")
    if rows == 7 and a.startswith("fp8_e4m3:block"):
        pytest.skip("torch takes whole blocks")
    left, right = random_matrix(rows, k, "cpu", seed=1), random_matrix(128, k, "cpu", seed=2)
    call = make_call(left, right, a, b, bias=random_matrix(1, 128, "cpu", seed=3)[0])
    whole = product("delegated_fp8_blocks", call)
    monkeypatch.setattr(delegated, "_SUMS", 1)
    torch.testing.assert_close(product("delegated_fp8_blocks", call), whole, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(triton, "capability", lambda device: (10, 0))
    assert "compute capability 9.0" in IMPLS["delegated_fp8_blocks"].supports(call)


@pytest.mark.parametrize(("dtype", "b"), [
    (torch.bfloat16, "nf4"), (torch.float32, "nf4:row"), (torch.float32, "fp8_e4m3:row"), (torch.float32, None),
])  # fmt: skip
def test_what_is_rounded_is_within_the_bound_of_bf16_and_waits_for_medium_precision(dtype, b):
    a, w = random_matrix(24, 96, "cpu", seed=1).to(dtype), random_matrix(32, 96, "cpu", seed=2)
    call = make_call(a, w, None, b, out_dtype=torch.float32)
    assert 'torch.set_float32_matmul_precision("medium")' in IMPLS["delegated_rounded"].supports(call)
    torch.set_float32_matmul_precision("medium")
    y = product("delegated_rounded", call)
    with lb.use_backend("reference"):
        assert not torch.equal(y, torch.ops.lowbit.scaled_mm(*call))
    half = make_call(a.half(), w, None, "nf4")
    assert "it rounds float32 and codebooks, and a is torch.float16" in IMPLS["delegated_rounded"].supports(half)


def test_fp8_as_such_waits_for_medium_precision():
    call = make_call(torch.ones(4, 64), torch.ones(16, 64), "fp8_e4m3:row", "fp8_e4m3:row")
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        for name in ("delegated_fp8", "delegated_fp8_blocks"):
            assert 'torch.set_float32_matmul_precision("medium")' in IMPLS[name].supports(call)


def test_fp8_as_such_is_taken_where_its_sums_are_as_good_as_in_fp32(monkeypatch):
    call = make_call(torch.ones(4, 64), torch.ones(16, 64), "fp8_e4m3:row", "fp8_e4m3:row")
    assert "keep 14 bits on this device" in IMPLS["delegated_fp8_wide"].supports(call)
    monkeypatch.setattr(triton, "capability", lambda device: (10, 0))
    product("delegated_fp8_wide", call)


def test_few_rows_are_left_to_kernels_below(monkeypatch):
    few, many = (make_call(torch.ones(m, 64), torch.ones(16, 64), "int8:row", "int8:row") for m in (4, 4096))
    below = replace(IMPLS["delegated_int8"], name="triton", fewest_rows=1)
    monkeypatch.setitem(registry._table, ("scaled_mm", "cuda"), [IMPLS["delegated_int8"], below])
    assert registry.select("scaled_mm", "cuda", few, empty=False).name == "triton"
    assert registry.select("scaled_mm", "cuda", many, empty=False).name == "delegated_int8"
    monkeypatch.setitem(registry._table, ("scaled_mm", "cuda"), [IMPLS["delegated_int8"]])
    assert registry.select("scaled_mm", "cuda", few, empty=False).name == "delegated_int8"


@pytest.mark.parametrize(("name", "scheme"), [
    ("delegated_fp8", "fp8_e4m3:row"), ("delegated_int8", "int8:row"), ("delegated_bf16", "mxfp8"),
])  # fmt: skip
def test_layers_and_convolutions_ask_of_codes_that_are_not_made_yet(name, scheme):
    """As ``_supports`` of ``composed`` does, on meta tensors."""
    torch.set_float32_matmul_precision("medium")
    linear = next(impl for impl in delegated.IMPLS if impl.op == "linear" and impl.name == name)
    weight = lb.quantize(random_matrix(32, 64, "cpu"), scheme)
    x = random_matrix(24, 64, "cpu", seed=1)
    call = OPS["linear"].args(x, weight.codes, scheme, weight.scale, input_scheme=scheme, out_dtype=torch.float32)
    assert linear.supports(call) is None
    out = torch.empty(24, 32)
    linear.run((out,), call)
    with lb.use_backend("reference"):
        expected = torch.ops.lowbit.linear(*call)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


def test_a_choice_is_made_among_fake_tensors():
    """As an estimate does, before anything was decoded."""
    triton.operands()._decoded.cache_clear()
    triton.operands()._values_of.cache_clear()
    triton.operands().folds.cache_clear()
    call = make_call(torch.ones(64, 64), torch.ones(32, 64), "nvfp4", "nvfp4")
    with FakeTensorMode() as mode:
        fake = type(call)(*(mode.from_tensor(v) if isinstance(v, Tensor) else v for v in call))
        assert IMPLS["delegated_bf16"].supports(fake) is None


def test_absent_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a CUDA build of torch" in delegated.unavailable()
    assert "delegated" not in {impl.backend for impl in lb.impls("scaled_mm")}
