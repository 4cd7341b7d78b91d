"""Every kernel of every exact op against the reference, and which kernel serves what."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from support import grad_oracle
from support.bits import assert_same_bits, describe
from support.samples import samples
from support.variants import ALL, HAS_GPU, Kernel, Variant, kernels, params, threads
from torch import Tensor

import lowbit as lb
from lowbit.backends import registry
from lowbit.formats import FORMATS
from lowbit.ops import OPS
from lowbit.testing.inputs import random_matrix

EXACT = [spec for spec in OPS.values() if spec.tolerance is None]


# -- every kernel equals the reference ---------------------------------------------------------------------------------
#: An op of no more samples than these is tested on all of them, unless it is interpreted.
FEW = 1000


class Some(NamedTuple):
    """A kernel is tested on each ``every``-th sample of its op, where it is interpreted on each ``interpreted``-th."""

    every: int
    interpreted: int

    def of(self, kernel: Kernel) -> range:
        count = len(samples(kernel.op))
        if kernel.variant.interpreted:
            return range(0, count, self.interpreted)
        return range(0, count, 1 if count <= FEW else self.every)


def amounts(every: int) -> pytest.MarkDecorator:
    """Some samples of an op in the fast tests, all of them in the slow ones."""
    all_of_them = pytest.param(Some(1, 23), id="all", marks=pytest.mark.slow)
    return pytest.mark.parametrize("some", [pytest.param(Some(every, 61), id="some"), all_of_them])


#: By op with many samples: strides that meet every scheme.
STRIDES = {"quantize": 5, "quantize_static": 5, "fake_quantize": 5, "fake_quantize_backward": 3}


@pytest.mark.parametrize("op", [spec.name for spec in OPS.values() if spec.tolerance is None or spec.name in STRIDES])
def test_some_samples_have_every_scheme(op: str):
    schemes = [getattr(call, "scheme", None) for call in samples(op)]
    assert len(schemes) <= FEW or set(schemes[:: STRIDES[op]]) == set(schemes)


@functools.cache
def expected(op: str, index: int) -> tuple[Any, tuple[Tensor, ...]]:
    """A sample of an op with the results of the reference."""
    reference = next(impl for impl in lb.impls(op, "cpu") if impl.name == "reference")
    call = samples(op)[index]
    outs = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in OPS[op].outputs(call))
    reference.run(outs, call)
    return call, outs


def moved(call: Any, device: str) -> Any:
    """The call with its tensors on a device, strides kept."""
    if device == "cpu":
        return call
    return type(call)(*(_moved(v, device) if isinstance(v, Tensor) else v for v in call))


def _moved(x: Tensor, device: str) -> Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return made.copy_(x)


def check_kernel(kernel: Kernel, some: Some) -> None:
    served, reasons = 0, set()
    for index in some.of(kernel):
        call, outs = expected(kernel.op, index)
        got = kernel.run(moved(call, kernel.variant.device))
        if got is None:
            reasons.add(kernel.impl.supports(moved(call, kernel.variant.device)))
            continue
        served += 1
        for name, a, e in zip(OPS[kernel.op].returns, got, outs, strict=True):
            assert_same_bits(a.cpu(), e, f"{kernel}: {name} of {describe(call)}")
    assert all(isinstance(reason, str) and reason for reason in reasons), "a refusal without a reason"
    assert served, f"{kernel} refuses every sample: {reasons}"


@amounts(5)
@pytest.mark.parametrize("kernel", params([k for spec in EXACT for k in kernels(spec.name)]))
def test_every_kernel_equals_the_reference_in_every_bit(kernel: Kernel, some: Some):
    check_kernel(kernel, some)


# -- gradients of scales -----------------------------------------------------------------------------------------------
BACKWARD = next(impl for impl in lb.impls("fake_quantize_backward", "cpu") if impl.name == "reference")
WITH_REFERENCE = [Kernel("fake_quantize_backward", BACKWARD, Variant("reference")), *kernels("fake_quantize_backward")]


@amounts(STRIDES["fake_quantize_backward"])
@pytest.mark.parametrize("kernel", params(WITH_REFERENCE))
def test_gradients_equal_the_reference_and_those_of_scales_are_within_their_bound(kernel: Kernel, some: Some):
    served = 0
    for index in some.of(kernel):
        call, (grad_x, _) = expected(kernel.op, index)
        got = kernel.run(moved(call, kernel.variant.device))
        if got is None:
            continue
        served += 1
        assert_same_bits(got[0].cpu(), grad_x, f"{kernel}: {describe(call)}")
        if call.scale is not None:
            grad_oracle.check(got[1], call, str(kernel))
    assert served, f"{kernel} refuses every sample"


@pytest.mark.slow
def test_a_gradient_of_a_scale_beyond_its_bound_is_refused():
    """In every block, by twice the bound either way; half of it passes. The bound is that of the oracle."""
    refused = 0
    for call in samples("fake_quantize_backward"):
        if call.scale is None:
            continue
        exact, bound = map(torch.from_numpy, grad_oracle.scale_gradient(call))
        assert grad_oracle.same_bound(call), describe(call)
        grad_oracle.check(exact + 0.5 * bound.nan_to_num(posinf=0.0), call, "half")
        for at in (bound.isfinite() & (bound > 1e-9 * exact.abs())).nonzero()[:: 1 + bound.numel() // 3].tolist():
            for factor in (-2, 2):
                wrong = exact.clone()
                wrong[tuple(at)] += factor * bound[tuple(at)]
                with pytest.raises(AssertionError, match="bound"):
                    grad_oracle.check(wrong, call, "twice")
                refused += 1
    assert refused > 100


def test_damage_shows_in_the_gradient_of_its_block_alone():
    x = random_matrix(4, 96, seed=2) / 64
    x[1, 40], grad = torch.nan, torch.ones(4, 96)
    grad[2, 70] = torch.inf
    call = OPS["fake_quantize_backward"].args(grad, x, "fp8_e4m3:group32", torch.rand(4, 3) + 0.5)
    bound = OPS["fake_quantize_backward"].tolerance(call, BACKWARD.numerics)
    exact, _ = grad_oracle.scale_gradient(call)
    broken = torch.zeros(4, 3, dtype=torch.bool)
    broken[1, 1] = broken[2, 2] = True
    assert torch.equal(~torch.from_numpy(exact).isfinite(), broken) and torch.equal(bound == 0, broken)
    whole = torch.from_numpy(exact).where(~broken, 0.0)
    with pytest.raises(AssertionError, match="bound"):
        grad_oracle.check(whole, call, "damage lost")
    assert not OPS["fake_quantize_backward"].tolerance(call._replace(scale=None), BACKWARD.numerics).any()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["int8:tensor", "uint4:row:affine", "fp8_e4m3:group24", "int4:col", "nf4"])
@pytest.mark.parametrize("count", [1, 2, 3])
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
    x = random_matrix(67, 1031, extremes=True, seed=8)
    made = []
    for name in ("fp8_e4m3:row", "fp8_e5m2:tensor", "int8:col", "int4:group128", "mxfp4:ceil:T", "nvfp4", "nf4:e4m3",
                 "uint4:group32:affine", "fp6_e3m2:block128x128", "int8:block64x32:affine:bf16"):  # fmt: skip
        for y in (x, x.bfloat16().t(), x[:, :1024].contiguous(), x[:, 3:387]):
            with lb.use_backend("reference"):
                q = lb.quantize(y, name)
                made.append((name, y, q, q.dequantize()))
    return made


@pytest.mark.parametrize("count", [1, 3])
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


# -- selection ---------------------------------------------------------------------------------------------------------
def test_every_op_has_a_kernel_on_every_device_it_must_run_on():
    for op in OPS:
        for device in ("cpu", "cuda"):
            assert any(impl.name == "reference" for impl in lb.impls(op, device))
        names = [(impl.name, impl.op) for impl in lb.impls(op, "cpu")]
        assert len(set(names)) == len(names)


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
