"""Under torch.set_float32_matmul_precision("medium") fp32 activations are rounded to bf16, where that is faster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from support.bits import assert_same_bits
from support.variants import ROUNDING, serving

import lowbit as lb
from lowbit.backends import cpu, cpu_mm, registry

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason="the compiled extension is not built")


@pytest.fixture
def medium(monkeypatch) -> Iterator[None]:
    """Leave to round, on a processor that gains by it: one without multiplies the rounded numbers in fp32."""
    monkeypatch.setattr(cpu_mm, "bf16_products", lambda rows: True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    registry.announce(1)  # where the processor has no such products, C++ would not ask
    yield
    registry.announce(-1)
    torch.set_float32_matmul_precision(before)


X = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scheme", ["fp6_e2m3:row", "fp8_e4m3:row", "int4:group32", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_activations_are_rounded_once_and_results_are_not(medium, scheme, dtype):
    x, weight = X.to(dtype), lb.quantize(WEIGHT, scheme)
    with serving() as served:
        y = lb.scaled_mm(x, weight, out_dtype=torch.float32)
    assert served["scaled_mm"] == ROUNDING
    assert_same_bits(y, lb.scaled_mm(x.bfloat16(), weight, out_dtype=torch.float32))


def test_it_takes_torchs_leave(medium):
    weight = lb.quantize(WEIGHT, "fp8_e4m3:row")
    rounded = lb.scaled_mm(X, weight, out_dtype=torch.float32)
    torch.set_float32_matmul_precision("highest")  # the plan of the call before is none of this one's
    exact = lb.scaled_mm(X, weight, out_dtype=torch.float32)
    assert not torch.equal(rounded, exact)
    assert "needs torch.set_float32_matmul_precision('medium')" in str(lb.explain("scaled_mm", X, weight))


def test_nothing_is_rounded_where_nothing_is_gained(medium, monkeypatch):
    weight = lb.quantize(WEIGHT, "fp8_e4m3:row")
    assert "the call has none" in str(lb.explain("scaled_mm", X.bfloat16(), weight))
    assert "the call has none" in str(lb.explain("scaled_mm", lb.quantize(X, "int8:row"), weight))
    assert "nf4 are not exact in bf16" in str(lb.explain("scaled_mm", X, lb.quantize(WEIGHT, "nf4")))
    for scheme in ("int8:row", "uint4:row:affine"):
        assert "multiplied in fp32" in str(lb.explain("scaled_mm", X, lb.quantize(WEIGHT, scheme)))
        assert "cpu_bf16 would run" in str(lb.explain("scaled_mm", X.repeat(5, 1), lb.quantize(WEIGHT, scheme)))
    monkeypatch.setattr(cpu_mm, "bf16_products", lambda rows: False)
    assert "no bf16 matmul" in str(lb.explain("scaled_mm", X, weight))


@pytest.mark.parametrize("recipe", ["fp8-weight-only", "int8"])
def test_layers(medium, recipe):
    """Of one whose input is quantized nothing changes."""
    layer = torch.nn.Sequential(torch.nn.Linear(96, 7))
    lb.quantize_(layer, recipe)
    with torch.no_grad():
        y = layer(X)
        torch.set_float32_matmul_precision("highest")
        assert torch.equal(y, layer(X)) == (recipe == "int8")
        assert_same_bits(layer(X.bfloat16().float()) if recipe != "int8" else layer(X), y)


def test_the_gradient_errs_by_no_more_than_rounding_to_bf16_does(medium):
    x = X.clone().requires_grad_()
    weight = lb.quantize(WEIGHT, "fp8_e4m3:row")
    grad = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    lb.scaled_mm(x, weight, out_dtype=torch.float32).backward(grad)
    exact = grad.double() @ weight.dequantize(torch.float32).double()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact, rtol=2**-7, atol=2**-6)


@pytest.mark.slow
def test_torchs_newer_settings_do_not_stand_in_the_way():
    """They contradict the older one, which then raises when it is asked for; nothing is rounded."""
    program = (
        "import torch, lowbit as lb; torch.backends.mkldnn.matmul.fp32_precision = 'bf16';"
        "x = torch.randn(20, 64); w = lb.quantize(torch.randn(8, 64), 'fp8_e4m3:row');"
        "print(lb.explain('scaled_mm', x, w).chosen.name, lb.encode(x, 'fp8_e4m3').shape[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cpu", "20"]
