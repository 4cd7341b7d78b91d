"""rms_norm, swiglu and rotary against float64 and torch, their gradients, and exp against every kind of argument.

Every kernel against the reference: tests/backends/test_kernels.py. Source: docs/numerics.md section 15.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.bits import assert_same_bits
from support.variants import ALL, threads
from torch import Tensor

import lowbit as lb
from lowbit import reference
from lowbit.ops.fused import ACTIVATIONS
from lowbit.reference import fused

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: Half of the least subnormal number.
LEAST = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}
everywhere = pytest.mark.parametrize(
    "variant", [p for p in ALL if p.values[0].backend in ("cpu", "reference") and p.values[0].device == "cpu"]
)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def activated(gate: Tensor, activation: str) -> Tensor:
    """The tanh of gelu as a sigmoid: float64 cancels in ``1 + tanh``."""
    if activation == "silu":
        return F.silu(gate)
    return gate * torch.sigmoid(math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3))


def close(actual: Tensor, exact: Tensor, magnitude: Tensor, roundings: int, least: Tensor | float = 2.0**-126) -> None:
    """Within that many fp32 roundings of ``magnitude``, the last rounding to the dtype, and what underflows."""
    bound = magnitude * roundings * 2.0**-24 + exact.abs() * UNIT[actual.dtype] * 1.01 + least + LEAST[actual.dtype]
    error = (actual.double() - exact).abs()
    assert bool((error <= bound).all()), f"{float((error / bound).max())} times the bound"


# -- rms_norm ----------------------------------------------------------------------------------------------------------
def exact_norm(x: Tensor, weight: Tensor, eps: float, offset: int) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


@everywhere
@dtypes
@pytest.mark.parametrize("offset", [0, 1])
def test_norms_are_those_of_float64(variant, dtype, offset):
    for rows, cols in ((7, 1), (3, 640), (5, 4097)):
        x, weight = numbers(rows, cols, dtype=dtype) * 3, numbers(cols, seed=1, dtype=dtype)
        with variant.use():
            y = lb.rms_norm(x, weight, 1e-5, offset)
        exact = exact_norm(x, weight, 1e-5, offset)
        close(y, exact, exact.abs() + (offset * weight.double()).abs(), 8 + cols.bit_length(), 2.0**-24)
        if offset == 0:
            torch.testing.assert_close(y, F.rms_norm(x, (cols,), weight, 1e-5), rtol=4 * UNIT[dtype], atol=1e-6)


@everywhere
@dtypes
def test_gradients_of_norms_are_those_of_float64(variant, dtype):
    """Of rows in several blocks of 64, with a weight in another dtype."""
    x, weight, grad = numbers(3, 50, 96, dtype=dtype), numbers(96, seed=1), numbers(3, 50, 96, seed=2, dtype=dtype)
    given = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    exact = [t.double().detach().requires_grad_() for t in given]
    with variant.use():
        got = torch.autograd.grad(lb.rms_norm(*given, 1e-5, 1), given, grad)
    wanted = torch.autograd.grad(exact_norm(*exact, 1e-5, 1), exact, grad.double())
    assert [g.dtype for g in got] == [dtype, torch.float32]
    rstd = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    scaled = (grad.double() * (weight.double() + 1)).abs()
    normed = (x.double() * rstd).abs()
    size = (scaled + normed * (scaled * normed).mean(-1, keepdim=True)) * rstd
    close(got[0], wanted[0], size, 24)
    close(got[1], wanted[1], (grad.double().abs() * normed).sum((0, 1)), 80)


def test_a_norm_saves_its_input_and_one_number_per_row():
    saved: list[Tensor] = []
    x, weight = numbers(4, 64, dtype=torch.bfloat16).requires_grad_(), numbers(64, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = lb.rms_norm(x, weight)
    assert [(t.dtype, tuple(t.shape)) for t in saved] == [
        (torch.bfloat16, (4, 64)), (torch.float32, (64,)), (torch.float32, (4,))
    ]  # fmt: skip
    y.sum().backward()
    assert x.grad is not None and weight.grad is not None


def test_a_frozen_weight_has_no_gradient_and_changes_none():
    x, weight, grad = numbers(70, 40), numbers(40, seed=1), numbers(70, 40, seed=2)
    both = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    lb.rms_norm(*both).backward(grad)
    alone = x.clone().requires_grad_()
    lb.rms_norm(alone, weight).backward(grad)
    assert_same_bits(alone.grad, both[0].grad)
    learned = weight.clone().requires_grad_()
    lb.rms_norm(x, learned).backward(grad)
    assert_same_bits(learned.grad, both[1].grad)


def test_sums_add_the_second_half_to_the_first():
    """By a loop over Python floats, each sum rounded to fp32."""
    for count in (1, 2, 3, 5, 8, 13, 33):
        terms = numbers(count, seed=count)
        left = [np.float32(v) for v in terms.tolist()]
        while len(left) > 1:
            half = 2 ** (math.ceil(math.log2(len(left))) - 1)
            left = [left[i] + left[i + half] if i + half < len(left) else left[i] for i in range(half)]
        assert float(reference.fused.sum_terms(terms)) == float(left[0])


# -- swiglu ------------------------------------------------------------------------------------------------------------
@everywhere
@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_are_those_of_float64(variant, dtype, activation):
    gate = torch.cat([numbers(5, 500, dtype=dtype) * 4, torch.linspace(-30, 30, 500).expand(2, 500).to(dtype)])
    up, grad = numbers(7, 500, seed=1, dtype=dtype), numbers(7, 500, seed=2, dtype=dtype)
    given = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    exact = [t.double().detach().requires_grad_() for t in given]
    with variant.use():
        y = lb.swiglu(*given, activation)
        got = torch.autograd.grad(y, given, grad)
    wanted = activated(exact[0], activation) * exact[1]
    # An error of z is one of s times z, where the sigmoid is about e^z.
    steep = 10 + 8 * gate.double().abs() * (1 + gate.double().square() * (activation == "gelu_tanh"))
    # Where exp overflows, s is 0 instead of a number below 2^-128.
    close(
        y.detach(), wanted.detach(), wanted.detach().abs() * steep, 1, (gate.double() * up.double()).abs() * 2.0**-128
    )
    expected = torch.autograd.grad(wanted, exact, grad.double())
    product = (grad.double() * up.double()).abs()
    s = (activated(exact[0], activation) / exact[0]).detach().nan_to_num(0.5)
    slope = s * (1 + gate.double().abs() * (3 + gate.double().square())) * steep
    close(got[0], expected[0], product * slope, 1, product * 2.0**-110)
    close(got[1], expected[1], expected[1].abs() * steep, 1, (grad.double() * gate.double()).abs() * 2.0**-128)


@everywhere
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_16_bit_gate_equals_the_reference(variant, activation):
    """Every pattern of bf16 and of fp16, and gradients: subnormal numbers, Inf and NaN among them."""
    patterns = torch.arange(1 << 16).to(torch.uint16).view(256, 256)
    for dtype in FLOATS[1:]:
        gate = patterns.view(dtype)
        up, grad = numbers(256, 256, dtype=dtype), numbers(256, 256, seed=1, dtype=dtype)
        with variant.use():
            got = [lb.swiglu(gate, up, activation)]
            got += torch.ops.lowbit.swiglu_backward(grad, gate, up, activation)
        expected = [reference.swiglu(gate, up, activation)]
        expected += reference.swiglu_backward(grad, gate, up, activation)
        for a, e in zip(got, expected, strict=True):
            assert_same_bits(a, e, activation)


@everywhere
def test_gates_of_many_fp32_patterns_equal_the_reference(variant):
    """Spread over all patterns, and dense where exp does not under- or overflow."""
    spread = torch.arange(-(1 << 31), 1 << 31, 40009, dtype=torch.int64).to(torch.int32).view(torch.float32)
    gate = torch.cat([spread, torch.linspace(-106, 106, 100003), numbers(100000)])
    up, grad = torch.ones_like(gate), torch.full_like(gate, -1.5)
    with variant.use():
        got = [lb.swiglu(gate, up), *torch.ops.lowbit.swiglu_backward(grad, gate, up)]
    expected = [reference.swiglu(gate, up, "silu"), *reference.swiglu_backward(grad, gate, up, "silu")]
    for a, e in zip(got, expected, strict=True):
        assert_same_bits(a, e)


def test_exp_is_within_one_unit_in_the_last_place():
    positive = torch.arange(0, 0x42D00001, 997, dtype=torch.int32).view(torch.float32)  # to 104
    y = torch.cat([positive, -positive, torch.tensor([104.0, -104.0, 88.722839, -103.97208, 0.0, -0.0])])
    exact, got = y.double().exp(), fused.exp(y).double()
    fits = exact < torch.finfo(torch.float32).max
    unit = 2.0 ** (exact.log2().floor().clamp(min=-126) - 23)
    assert bool(((got - exact).abs()[fits] <= unit[fits]).all())
    assert bool(got[~fits].isinf().all()) and fused.exp(torch.tensor([-104.0])).item() == 0
    assert bool(fused.exp(torch.tensor([torch.nan])).isnan())


def test_the_ends_of_gates_and_their_gradients():
    """Where torch's gradient is NaN, products of the limits are not: the derivative is 0 or 1."""
    gate = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0.0, -0.0])
    up = torch.ones(7)
    for activation in ACTIVATIONS:
        y = lb.swiglu(gate, up, activation)
        assert y[[0, 3, 5]].tolist() == [torch.inf, gate[3].item(), 0] and bool(y[[1, 2]].isnan().all())
        grad_gate, _ = torch.ops.lowbit.swiglu_backward(up, gate, up, activation)
        assert grad_gate[[0, 1, 3, 4, 5, 6]].tolist() == [1, 0, 1, 0, 0.5, 0.5] and bool(grad_gate[2].isnan())


def test_gates_save_only_gate_and_up():
    saved: list[Tensor] = []
    gate, up = numbers(4, 64).requires_grad_(), numbers(4, 64, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lb.swiglu(gate, up).sum().backward()
    assert [t.data_ptr() for t in saved] == [gate.data_ptr(), up.data_ptr()]


# -- rotary ------------------------------------------------------------------------------------------------------------
def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As complex numbers."""
    pairs = cos.shape[-1]
    turned = x[..., : 2 * pairs]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    z = torch.complex(a, b) * torch.complex(cos, sin)
    parts = torch.view_as_real(z).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    return torch.cat([parts, x[..., 2 * pairs :]], -1)


@everywhere
@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_and_their_gradients_are_those_of_float64(variant, dtype, interleaved):
    x = numbers(2, 9, 3, 40, dtype=dtype).transpose(1, 2)
    for table, pairs in (((9,), 20), ((2, 1, 9), 20), ((1,), 7), ((2, 3, 9), 13)):
        angles = numbers(*table, pairs, seed=3) * 5
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        given, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        grad = numbers(*x.shape, seed=4, dtype=dtype)
        with variant.use():
            y = lb.rotary(given, cos, sin, interleaved)
            (got,) = torch.autograd.grad(y, given, grad)
        wanted = rotated(exact, cos.double(), sin.double(), interleaved)
        (expected,) = torch.autograd.grad(wanted, exact, grad.double())
        assert y.is_contiguous()
        close(y.detach(), wanted.detach(), x.double().norm(dim=-1, keepdim=True), 3)
        close(got, expected, grad.double().norm(dim=-1, keepdim=True), 3)


def test_the_rotation_is_that_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = numbers(2, 4, 6, 16), numbers(2, 2, 6, 16, seed=1)
    angles = torch.arange(6)[:, None] * 0.7 ** torch.arange(8)
    cos, sin = (torch.cat([t, t], -1).expand(2, 6, 16) for t in (angles.cos(), angles.sin()))
    wanted = llama.apply_rotary_pos_emb(q, k, cos, sin)
    for x, y in zip((q, k), wanted, strict=True):
        torch.testing.assert_close(lb.rotary(x, cos[:, None, :, :8], sin[:, None, :, :8]), y, rtol=1e-6, atol=1e-6)


# -- all of them -------------------------------------------------------------------------------------------------------
def calls() -> list[tuple[object, object, list[Tensor]]]:
    """Functions of lowbit, the same in float64's ops, and their differentiable arguments."""
    angles = numbers(5, 4, seed=9)
    return [
        (
            lambda x, w: lb.rms_norm(x, w, 1e-5, 1),
            lambda x, w: exact_norm(x, w, 1e-5, 1),
            [numbers(3, 5, 9), numbers(9)],
        ),
        *(
            (
                lambda g, u, a=a: lb.swiglu(g, u, a),
                lambda g, u, a=a: activated(g, a) * u,
                [numbers(5, 9), numbers(5, 9, seed=1)],
            )
            for a in ACTIVATIONS
        ),
        (
            lambda x: lb.rotary(x, angles.cos(), angles.sin()),
            lambda x: rotated(x, angles.cos().double(), angles.sin().double(), False),
            [numbers(2, 5, 9)],
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("index", range(4))
def test_second_derivatives(index):
    """Of a gradient's norm, with respect to every argument and to the gradient that came in."""
    ours, theirs, args = calls()[index]

    def second(function, given: list[Tensor]) -> tuple[Tensor, ...]:
        given = [t.clone().requires_grad_() for t in given]
        weight = torch.linspace(-1, 1, given[0].numel(), dtype=given[0].dtype).view(given[0].shape).requires_grad_()
        first = torch.autograd.grad(function(*given), given, weight, create_graph=True)
        total = sum((g * g.cos()).sum() for g in first)
        return torch.autograd.grad(total, [*given, weight], allow_unused=True, materialize_grads=True)

    for a, e in zip(second(ours, args), second(theirs, [t.double() for t in args]), strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", range(4))
def test_transforms_of_torch_func_and_compiled_code_have_the_same_gradients(index):
    ours, _, args = calls()[index]
    given = [t.clone().requires_grad_() for t in args]
    y = ours(*given)
    wanted = torch.autograd.grad((y * y.detach().cos()).sum(), given)

    def loss(*given: Tensor) -> Tensor:
        y = ours(*given)
        return (y * y.detach().cos()).sum()

    got = torch.func.grad(loss, tuple(range(len(args))))(*args)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    again = torch.autograd.grad(compiled(*given), given)
    for a, b, e in zip(got, again, wanted, strict=True):
        assert_same_bits(a, e)
        assert_same_bits(b, e)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(count):
    x, weight, up = numbers(700, 300), numbers(300, seed=1), numbers(700, 300, seed=2)
    rstd = reference.rms_norm(x, weight, 1e-6, 0)[1]
    with threads(count):
        got = [*torch.ops.lowbit.rms_norm(x, weight, 1e-6), lb.swiglu(x, up)]
        got += torch.ops.lowbit.rms_norm_backward(up, x, weight, rstd)
    expected = [*reference.rms_norm(x, weight, 1e-6, 0), reference.swiglu(x, up, "silu")]
    expected += reference.rms_norm_backward(up, x, weight, rstd, 0, 64)
    for a, e in zip(got, expected, strict=True):
        assert_same_bits(a, e)


def test_calls_without_elements_have_gradients_of_zero():
    weight = numbers(8).requires_grad_()
    x = torch.empty(0, 8, requires_grad=True)
    lb.rms_norm(x, weight).sum().backward()
    assert x.grad.shape == (0, 8) and weight.grad.tolist() == [0] * 8
    assert lb.swiglu(torch.empty(3, 0), torch.empty(3, 0)).shape == (3, 0)
    assert lb.rotary(torch.empty(0, 5, 8), torch.ones(5, 4), torch.ones(5, 4)).shape == (0, 5, 8)


def test_what_does_not_fit_is_refused():
    x, w, table, longer = torch.ones(2, 6), torch.ones(6), torch.ones(2, 3), torch.ones(3, 3)
    for run, error, words in (
        (lambda: lb.rms_norm(x.double(), w), TypeError, "x must be float32, bfloat16 or float16, got float64"),
        (lambda: lb.rms_norm(x, w[:5]), ValueError, r"weight must be \[6\], one factor per column of x, got \[5\]"),
        (lambda: lb.rms_norm(x, w, 1e-6, 2), ValueError, "offset must be 0, or 1 for factors 1 \\+ weight, got 2"),
        (lambda: lb.rms_norm(x, w, -1.0), ValueError, "eps must be 0 or more, got -1.0"),
        (lambda: lb.rms_norm(x.sum(), w), ValueError, "x needs at least one axis"),
        (lambda: lb.swiglu(x, x[:1]), ValueError, r"up must have the shape of gate, \[2, 6\], got \[1, 6\]"),
        (lambda: lb.swiglu(x, x.half()), ValueError, "gate and up must have one dtype, got torch.float32 and"),
        (lambda: lb.swiglu(x, x, "relu"), ValueError, "activation must be 'silu' or 'gelu_tanh', got 'relu'"),
        (lambda: lb.rotary(x, x, x), ValueError, "cos must have a number for each pair, 1 to 3 of them, got"),
        (lambda: lb.rotary(x, table, table[:1]), ValueError, r"sin must have the shape of cos, \[2, 3\], got \[1, 3\]"),
        (lambda: lb.rotary(x, longer, longer), ValueError, r"\[3\], must broadcast to those of x, \[2\]"),
        (lambda: lb.rotary(w, table, table), ValueError, r"x must have 2 to 4 axes, \[..., tokens, n\], got \[6\]"),
        (lambda: lb.rotary(x, table.clone().requires_grad_(), table), RuntimeError, "cos requires grad"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            run()


def test_transforms_of_torch_func_accept_the_other_ops_with_gradients():
    """They go through the same registration."""
    x, w = numbers(4, 32), numbers(8, 32, seed=1)
    for function in (lambda x: lb.fake_quantize(x, "int8:row"), lambda x: lb.scaled_mm(x, lb.quantize(w, "int8:row"))):
        leaf = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(function(leaf).sin().sum(), leaf)
        assert_same_bits(torch.func.grad(lambda x, f=function: f(x).sin().sum())(x), wanted)
