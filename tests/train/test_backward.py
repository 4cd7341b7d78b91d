"""What backward multiplies: operands that are saved for it, recomputed, decoded or float, and torch.func over it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.bits import same_bits
from support.layers import TRAINING, training_layer
from support.stateful import DELAYED, STOCHASTIC, cast
from support.watching import WatchDispatch
from torch import Tensor

import lowbit as lb
from lowbit.train import TrainLinear

DRAWN = lb.Recipe(
    lb.Gemm(*[cast("fp8_e4m3", rounding="stochastic")] * 2), STOCHASTIC.grad_input, STOCHASTIC.grad_weight, name="drawn"
)


# -- what is saved for backward ----------------------------------------------------------------------------------------
def with_save(name: str | lb.Recipe, save: str) -> lb.Recipe:
    row = lb.recipe(name)
    return replace(
        row, name="mine", grad_input=replace(row.grad_input, save=save), grad_weight=replace(row.grad_weight, save=save)
    )


def saves(name: str) -> tuple[str, str]:
    row = lb.recipe(name)
    return row.grad_input.save, row.grad_weight.save


def backward(recipe: str | lb.Recipe) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of one layer, and what it saved for them."""
    torch.manual_seed(2)
    layer, x, saved = training_layer(130, 40, recipe), torch.randn(2, 3, 130, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    y.square().sum().backward()
    return [x.grad, layer.weight.grad, layer.bias.grad], saved


@pytest.mark.parametrize("name", [name for name in TRAINING if "operand" not in saves(name)])
def test_recomputing_codes_gives_the_bits_of_saving_them(name):
    recomputed, saved = backward(with_save(name, "recompute"))
    assert all(map(same_bits, recomputed, backward(name)[0]))
    assert [tuple(t.shape) for t in saved] == [(40, 130), (2, 3, 130)] and all(t.is_floating_point() for t in saved)


def test_an_operand_kept_high_is_quantized_once():
    """The same weight gradient as of codes made of the float operand by hand, and another than of codes twice.

    In groups of 32 with fp32 scales: of mxfp8's, which round up to powers of two, codes of codes are mostly the same.
    """
    along_k, along_m = "fp8_e4m3:group32", "fp8_e4m3:group32:T"
    twice = lb.Recipe(lb.Gemm(along_k, along_k), lb.Gemm(along_k, along_m), lb.Gemm(along_m, along_m))
    row = with_save(twice, "high")
    (grad_x, grad_w, _), _ = backward(row)
    torch.manual_seed(2)
    layer, x = training_layer(130, 40, row), torch.randn(2, 3, 130)
    weight, bias, flat = layer.weight.detach(), layer.bias.detach(), x.reshape(-1, 130)
    forward = [lb.quantize(t, cast.scheme) for t, cast in ((flat, row.output.a), (weight, row.output.b))]
    g = 2 * lb.scaled_mm(*forward, bias, out_dtype=torch.float32)

    def product(gemm: lb.Gemm, other: Tensor, turned: bool) -> Tensor:
        qg, q = lb.quantize(g, gemm.a.scheme), lb.quantize(other, gemm.b.scheme)
        return lb.scaled_mm(qg.t() if turned else qg, q.t(), out_dtype=torch.float32)

    assert same_bits(grad_x, product(row.grad_input, weight, False).reshape(x.shape))
    assert same_bits(grad_w, product(row.grad_weight, flat, True))
    assert not torch.equal(grad_w, backward(twice)[0][1])


def test_products_that_stay_float():
    """fp8 forward with exact gradients: those of torch, straight through the rounding of forward."""
    high = lb.Gemm(None, None, save="high")
    torch.manual_seed(2)
    layer, x = TrainLinear(17, 5, recipe=lb.Recipe(lb.RECIPES["fp8"].output, high, high)), torch.randn(4, 17)
    x.requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    g = 2 * y.detach()
    torch.testing.assert_close(x.grad, g @ layer.weight.detach())
    torch.testing.assert_close(layer.weight.grad, g.t() @ x.detach())
    weights = lb.Recipe(lb.Gemm(None, "fp8_e4m3:row"), lb.Gemm(None, "reuse"), high)
    layer = TrainLinear(17, 5, recipe=weights)
    y = layer(x)
    q = lb.quantize(layer.weight.detach(), "fp8_e4m3:row")
    torch.testing.assert_close(y, x @ q.dequantize().t() + layer.bias)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.ones(4, 5) @ q.dequantize())


def test_products_of_decoded_codes():
    """``dequantize``: the gradient stays float, and meets the numbers that forward multiplied."""
    torch.manual_seed(2)
    name = "fp8:grad_input=dequantized:grad_weight=dequantized"
    layer, x = TrainLinear(17, 5, recipe=name), torch.randn(4, 17, requires_grad=True)
    y = layer(x)
    g = torch.randn_like(y)
    grad_x, grad_w = torch.autograd.grad(y, (x, layer.weight), g)
    qx, qw = (lb.quantize(t.detach(), "fp8_e4m3:row").dequantize() for t in (x, layer.weight))
    assert same_bits(grad_x, g @ qw) and same_bits(grad_w, g.t() @ qx)


def test_an_operand_is_kept_as_the_codes_that_backward_multiplies():
    """Bits of ``save="high"``, which quantizes the same float operand, in the memory of codes."""
    along_k, along_m = "fp8_e4m3:group32", "fp8_e4m3:group32:T"
    once = lb.Recipe(
        lb.Gemm(along_k, along_k),
        lb.Gemm(along_k, along_m, save="operand"),
        lb.Gemm(along_m, lb.Cast(along_m, "stochastic"), save="operand"),
        name="once",
    )
    found, saved = backward(once)
    assert all(map(same_bits, found, backward(with_save(once, "high"))[0]))
    assert [(tuple(t.shape), t.dtype) for t in saved[::2]] == [((40, 130), torch.uint8), ((6, 130), torch.uint8)]
    layer, x = training_layer(130, 40, once), torch.randn(6, 130)
    with torch.no_grad(), WatchDispatch() as watch:
        layer(x)
    assert (
        sum("lowbit.quantize" in name for name in watch.seen) == 2
    )  # of what forward multiplies: without gradients nothing is kept


def test_what_training_does_not_do_is_refused():
    row = lb.recipe("fp8-tensor")
    turned = cast("fp8_e4m3", transform="hadamard")
    fixed = replace(row, grad_input=lb.Gemm(cast("fp8_e5m2", scale="static"), "reuse"))
    for wrong, message in [
        (fixed, "TrainLinear does not support static input scales, .* such as 'fp8-tensor'"),
        (
            replace(row, output=lb.Gemm(turned, turned)),
            "TrainLinear does not support transform='hadamard' of output.a",
        ),
    ]:
        with pytest.raises(ValueError, match=f"'mine': {message}"):
            TrainLinear(4, 4, recipe=replace(wrong, name="mine"))
    with pytest.raises(
        ValueError, match="one operand of grad_input needs the same of the other; got 'hadamard' and None"
    ):
        replace(row, grad_input=lb.Gemm(cast("fp8_e5m2", transform="hadamard"), "reuse"))


# -- torch.func, recipes by layer --------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", ["fp8", STOCHASTIC, DRAWN, DELAYED], ids=str)
def test_torch_func_gives_the_gradients_of_autograd(recipe):
    layer, x = training_layer(33, 5, recipe), torch.randn(4, 33)
    parameters, state = dict(layer.named_parameters()), lb.train.state(layer)

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, given, (x,)).square().sum()

    def first(f, *args):
        state.set_micro_batch(-1)  # as the first forward of the step
        return f(*args)

    found = first(torch.func.grad(loss), parameters, x)
    expected = torch.autograd.grad(first(loss, parameters, x), list(parameters.values()))
    assert all(map(same_bits, found.values(), expected))
    with pytest.warns(UserWarning, match="performance drop"):
        by_sample = first(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0)), parameters, x[:, None])
    for row in range(4):
        one = first(torch.func.grad(loss), parameters, x[row : row + 1])
        assert all(same_bits(by_sample[name][row], one[name]) for name in one)
    assert recipe is not DELAYED or state.pending[0] == x.abs().max()


def test_jacobians():
    layer, x = TrainLinear(33, 5), torch.randn(4, 33)
    with pytest.warns(UserWarning, match="performance drop"):
        assert same_bits(torch.func.jacrev(layer)(x), torch.autograd.functional.jacobian(layer, x))
