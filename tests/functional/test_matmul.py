"""The public function scaled_mm: shapes, errors, outputs, gradients."""

from __future__ import annotations

import pytest
import torch
from support.bits import assert_same_bits
from support.variants import ALL, Variant, best, serving
from torch import Tensor

import lowbit as lb
from lowbit.testing.inputs import random_matrix

everywhere = pytest.mark.parametrize("variant", ALL)


# -- the public function -----------------------------------------------------------------------------------------------
@everywhere
def test_leading_axes_and_transposed_operands(variant: Variant):
    x, w = torch.randn(2, 3, 64, device=variant.device), torch.randn(10, 64, device=variant.device)
    if variant.refuses("scaled_mm", lb.quantize(x, "int8:row"), lb.quantize(w, "int8:row")):
        pytest.skip("not served")
    with variant.use():
        y = lb.scaled_mm(lb.quantize(x, "int8:row"), lb.quantize(w, "int8:row"))
        flat = lb.scaled_mm(lb.quantize(x.reshape(6, 64), "int8:row"), lb.quantize(w, "int8:row"))
        turned = lb.scaled_mm(lb.quantize(x, "int8:row"), lb.quantize(w.t(), "int8:col").t())
    assert y.shape == (2, 3, 10) and y.dtype == torch.bfloat16
    assert_same_bits(y.reshape(6, 10), flat)
    assert_same_bits(turned, y)


@pytest.mark.parametrize("out", ["fp8_e4m3:row", "int8:tensor", "nvfp4", "uint4:group32:affine"])
def test_an_output_scheme_is_quantize_of_the_fp32_result(out):
    a, b = lb.quantize(torch.randn(6, 40), "int8:row"), lb.quantize(torch.randn(33, 40), "int4:group8")
    y = lb.scaled_mm(a, b, bias=torch.ones(33), out_dtype=torch.float32)
    wanted, got = lb.quantize(y, out), lb.scaled_mm(a, b, bias=torch.ones(33), out_scheme=out)
    for part in wanted.parts:
        assert_same_bits(got.parts[part], wanted.parts[part], part)
    again = lb.quantize(torch.zeros(6, 33), out)
    assert lb.scaled_mm(a, b, bias=torch.ones(33), out_scheme=out, out=again) is again
    assert_same_bits(again.codes, wanted.codes)


def test_an_output_scale():
    a, b = lb.quantize(torch.randn(6, 40), "fp8_e4m3:row"), lb.quantize(torch.randn(33, 40), "fp8_e4m3:row")
    y = lb.scaled_mm(a, b, out_dtype=torch.float32)
    got = lb.scaled_mm(a, b, out_scheme="fp8_e4m3:tensor", out_scale=0.25)
    assert got.scale.tolist() == [[0.25]]
    assert_same_bits(got.codes, lb.encode(y / 0.25, "fp8_e4m3"))


@pytest.mark.parametrize("shape", [(0, 5, 8), (4, 0, 8), (4, 5, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", ["int8:row", "mxfp4", "fp8_e4m3:block128x128", "uint4:group32:affine", "nvfp4", None])
def test_empty_products(name, shape):
    m, n, k = shape
    a, b, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    left, right = (lb.quantize(a, name), lb.quantize(b, name)) if name else (a, b)
    assert_same_bits(lb.scaled_mm(left, right, out_dtype=torch.float32), torch.zeros(m, n))
    assert_same_bits(lb.scaled_mm(left, right, bias, torch.float32), bias.expand(m, n) if k == 0 else torch.zeros(m, n))


def test_out_is_filled_and_returned():
    a, b = lb.quantize(torch.randn(6, 40), "int8:row"), lb.quantize(torch.randn(33, 40), "int8:row")
    out = torch.empty(6, 33)
    assert lb.scaled_mm(a, b, out_dtype=torch.float32, out=out) is out
    assert_same_bits(out, lb.scaled_mm(a, b, out_dtype=torch.float32))
    strided = torch.empty(33, 6).t()
    assert lb.scaled_mm(a, b, out_dtype=torch.float32, out=strided) is strided
    assert_same_bits(strided, out)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(b=torch.randn(33)), ValueError, r"b must be a matrix \[N, K\], got shape \[33\]"),
        (dict(b=torch.randn(40, 33)), ValueError, r"must end in the same K; b is \[N, K\]"),
        (dict(bias=torch.randn(6)), ValueError, r"bias must be \[33\], got \[6\]"),
        (dict(bias=torch.ones(33, dtype=torch.int32)), TypeError, "bias must be float32, bfloat16 or float16"),
        (dict(out_dtype=torch.float64), ValueError, "out_dtype must be a 16- or 32-bit float"),
        (dict(out=torch.empty(33, 6)), ValueError, "must be"),
        (dict(out=torch.empty(6, 33, dtype=torch.float32)), ValueError, "out must be torch.bfloat16"),
    ],
)
def test_errors(change, error, message):
    arguments = dict(a=lb.quantize(torch.randn(6, 40), "int8:row"), b=torch.randn(33, 40))
    with pytest.raises(error, match=message):
        lb.scaled_mm(**{**arguments, **change})


# -- gradients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["int8:row", "int4:group32", "fp8_e4m3:block128x128", "nf4", "nvfp4", "uint4:group32:affine"]
)
def test_gradient_of_a_float_operand(name, dtype):
    """d/dx of x @ w.T is grad @ decoded w; within the bound of a product in the gradient's dtype."""
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    bias = torch.randn(9, dtype=dtype, requires_grad=True)
    q = lb.quantize(torch.randn(9, 64), name)
    y = lb.scaled_mm(x, q, bias=bias, out_dtype=dtype)
    grad = torch.randn_like(y)
    y.backward(grad)
    wanted = grad.double() @ q.dequantize(torch.float32).double()
    size = grad.double().abs() @ q.dequantize(torch.float32).double().abs()
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[dtype]
    assert ((x.grad.double() - wanted).abs() <= size * unit * (2 if dtype == torch.bfloat16 else 16)).all()
    assert torch.allclose(bias.grad.double(), grad.double().sum((0, 1)), rtol=8 * unit, atol=16 * unit)
    assert x.grad.dtype == dtype and bias.grad.dtype == dtype


def test_gradients_of_two_float_operands():
    a, b = torch.randn(4, 16, requires_grad=True), torch.randn(5, 16, requires_grad=True)
    lb.scaled_mm(a, b, out_dtype=torch.float32).square().sum().backward()
    c, d = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    (c @ d.T).square().sum().backward()
    assert torch.allclose(a.grad.double(), c.grad, rtol=1e-5, atol=1e-5)
    assert torch.allclose(b.grad.double(), d.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("forward", "backward"), [("reference", None), (None, "reference")])
def test_a_gradient_runs_on_the_backend_of_its_forward(forward, backward):
    """Which kernel serves each op of the backward pass, whatever backend is asked for meanwhile."""
    x = torch.randn(4, 16, requires_grad=True)
    scale = (torch.rand(4, 1) + 0.5).requires_grad_()
    q = lb.quantize(torch.randn(5, 16), "int8:row")
    with lb.use_backend(forward):
        y = lb.scaled_mm(x, q, out_dtype=torch.float32)
        z = lb.fake_quantize(x, "int8:row") + lb.fake_quantize(x.detach(), "int8:row", scale=scale)
    with lb.use_backend(backward), serving() as served:
        (y.sum() + z.sum()).backward()
    ops = ("dequantize", "fake_quantize_backward")
    assert served == (dict.fromkeys(ops, forward) if forward else best(ops))
    assert x.grad.isfinite().all() and scale.grad.isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_with_every_argument_at_its_default(compiled):
    """torch drops trailing defaults from what autograd sees: no bias and bf16 out is the most common call."""
    w = lb.quantize(torch.linspace(-1, 2, 240).reshape(6, 40), "int8:row")
    run = torch.compile(lb.scaled_mm, backend="aot_eager", fullgraph=True) if compiled else lb.scaled_mm
    a = random_matrix(3, 40, seed=2).requires_grad_()
    run(a, w).float().sum().backward()
    assert torch.allclose(a.grad, w.dequantize().sum(0).expand(3, 40), rtol=2e-2, atol=5e-2)


def test_a_frozen_weight_keeps_no_activation():
    w = lb.quantize(random_matrix(6, 40, seed=1), "int4:group32")
    a = random_matrix(3, 40, seed=2).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        lb.scaled_mm(a, w)
    assert a.shape not in [t.shape for t in kept]


def test_out_of_every_layout_is_filled():
    a, w = torch.randn(2, 5, 16), lb.quantize(torch.randn(3, 16), "int8:row")
    out = torch.full((5, 2, 3), 7.0, dtype=torch.bfloat16).transpose(0, 1)
    assert lb.scaled_mm(a, w, out=out) is out
    assert_same_bits(out.contiguous(), lb.scaled_mm(a, w))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda a, w: {"out": torch.empty(3, 2, 4, dtype=torch.bfloat16)}, ValueError, "out must be of shape"),
        (lambda a, w: {"out": lb.quantize(torch.randn(2, 3, 4), "int8:row")}, TypeError, "out must be a Tensor"),
        (lambda a, w: {"out": torch.empty(2, 3, 4), "out_scheme": "int8:row"}, TypeError, "out must be a Quantized"),
        (lambda a, w: {"out": torch.empty(2, 3, 4, dtype=torch.bfloat16), "bias": torch.randn(4, requires_grad=True)},
         RuntimeError, "automatic differentiation"),
    ],
)  # fmt: skip
def test_out_that_cannot_be_filled(make, error, message):
    a, w = torch.randn(2, 3, 16), lb.quantize(torch.randn(4, 16), "int8:row")
    with pytest.raises(error, match=message):
        lb.scaled_mm(a, w, **make(a, w))


def test_an_output_scale_without_its_scheme_is_refused():
    with pytest.raises(ValueError, match="out_scale needs an out_scheme"):
        lb.scaled_mm(torch.randn(2, 16), torch.randn(4, 16), out_scale=1.0)


@everywhere
def test_a_product_over_no_elements_is_the_bias_on_every_backend(variant: Variant):
    a, b, bias = (torch.ones(shape, device=variant.device) for shape in ((2, 0), (3, 0), (3,)))
    with variant.use():
        assert lb.explain("scaled_mm", a, b).chosen.name == "reference"
        assert_same_bits(lb.scaled_mm(a, b, bias, torch.float32), torch.ones(2, 3, device=variant.device))
