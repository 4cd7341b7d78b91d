"""Dual quantization of operands, as on a GPU: a step is bit-identical to one with two calls of quantize."""

from __future__ import annotations

import pytest
import torch
from support.layers import training_layer

import lowbit as lb
from lowbit.functional import dual
from lowbit.functional.rotation import signed_hadamard
from lowbit.train import gemms

#: How many of input, weight and gradient are quantized by quantize_both.
RECIPES = {
    "mxfp8": 3, "mxfp4": 2, "nvfp4": 2, "fp8-pow2": 3, "fp8-block": 2, "fp8": 0, "fp8-delayed": 0, "nvfp4-eden": 0,
    "fp8-tensor": 0, "int8-stochastic": 0,
}  # fmt: skip


def step(recipe: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = training_layer(96, 40, recipe)
    x, g = torch.randn(64, 96).to(dtype).requires_grad_(), torch.randn(64, 40).to(dtype)
    y = layer(x)
    y.backward(g)
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_has_the_bits_of_two_readings(recipe, dtype, monkeypatch):
    expected, calls = step(recipe, dtype), []
    once = dual.call

    def noted(op, *args):
        calls.append(op)
        return once(op, *args)

    for module in (dual, gemms):
        monkeypatch.setattr(module, "by_kernel", lambda x: True)
    monkeypatch.setattr(dual, "call", noted)
    found = step(recipe, dtype)
    assert all(map(torch.equal, expected, found))
    assert calls == ["quantize_both"] * RECIPES[recipe]


def test_an_operand_that_needs_no_gradient_is_read_for_one_product(monkeypatch):
    for module in (dual, gemms):
        monkeypatch.setattr(module, "by_kernel", lambda x: True)
    torch.manual_seed(0)
    layer = training_layer(96, 40, "mxfp8")
    x, g = torch.randn(64, 96), torch.randn(64, 40)
    layer(x).backward(g)
    assert x.grad is None and layer.weight.grad is not None


@pytest.mark.parametrize("block", [None, 16])
def test_the_function_is_two_calls_of_quantize(block, monkeypatch):
    x, rng = torch.randn(48, 80), torch.tensor([3, 4])
    first, second = lb.scheme("mxfp8:ceil"), lb.scheme("nvfp4:T")
    turned = x if block is None else signed_hadamard(x, block, 0)
    expected = lb.quantize(x, first, rounding=lb.Rounding(rng, stream=5)), lb.quantize(turned, second)
    for by_kernel in (False, True):
        monkeypatch.setattr(dual, "by_kernel", lambda x, answer=by_kernel: answer)
        found = dual.quantize_both(x, first, second, block, rng, (5, None))
        for one, other in zip(found, expected, strict=True):
            assert (one.scheme, one.shape, one.dtype) == (other.scheme, other.shape, other.dtype)
            assert one.parts.keys() == other.parts.keys()
            assert all(torch.equal(one.parts[name], other.parts[name]) for name in one.parts)


def test_bad_calls_are_refused():
    x = torch.randn(4, 8)
    for changed, message in (
        ({"x": x[0]}, r"x must be a matrix \[rows, cols\]"),
        ({"scheme": "uint4:group4:affine"}, "has zero points; call quantize for it"),
        ({"block": 3}, "block must be a power of two up to 128, got 3"),
        ({"other_rounding": "up"}, "rounding must be 'nearest' or 'stochastic'"),
        ({"rounding": "stochastic"}, "stochastic rounding takes rng"),
    ):
        call = {"x": x, "scheme": "int8:row", "other": "int8:col", **changed}
        with pytest.raises(ValueError, match=message):
            torch.ops.lowbit.quantize_both(**call)
