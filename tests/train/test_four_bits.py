"""Training in 4 bits: its backward products against fp64, gradients without bias, blocks that stay as they are."""

from __future__ import annotations

import re

import pytest
import torch
from support import oracles
from support.bits import same_bits
from support.layers import bound, exact, training_layer
from torch import Tensor, nn

import lowbit as lb
from lowbit.functional.rotation import signed_hadamard
from lowbit.train import State
from lowbit.train.eden import random_hadamard
from lowbit.train.kept_blocks import kept_blocks

RECIPES = ["nvfp4", "mxfp4"]
BLOCK = {"nvfp4": 16, "mxfp4": 32}
#: How the operand of grad_weight that is not the gradient is coded.
NEAREST = {"nvfp4": "nvfp4:T", "mxfp4": "mxfp4:nearest:T"}


def drawn(x: Tensor, scheme: str, role: str) -> lb.Quantized:
    """As the layer at the path "" rounds an operand in micro-batch 0 of step 0."""
    return lb.quantize(x, scheme, rounding=lb.Rounding(oracles.training_seed(0, 0, 0), 0, f"/{role}"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 17, 33])
@pytest.mark.parametrize("recipe", RECIPES)
def test_backward_products_are_within_the_bound_of_their_kernels(recipe, rows, dtype):
    """Of any number of tokens, and of sizes that blocks do not divide."""
    layer, block = training_layer(50, 21, recipe), BLOCK[recipe]
    x, g = torch.randn(rows, 50).to(dtype), torch.randn(rows, 21).to(dtype)
    inputs = x.clone().requires_grad_()
    grad_x, grad_w = torch.autograd.grad(layer(inputs), (inputs, layer.weight), g)
    w = lb.quantize(layer.weight.detach(), lb.recipe(recipe).trained.b.scheme)
    for_x = drawn(g, f"{recipe}:ceil", "grad_input.a"), w.t()
    turned = [signed_hadamard(t.t(), block).t() for t in (g, x)]
    for_w = drawn(turned[0], f"{recipe}:ceil:T", "grad_weight.a").t(), lb.quantize(turned[1], NEAREST[recipe]).t()
    assert bool(((grad_x.double() - exact(*for_x)).abs() <= bound(*for_x, None, dtype)).all())
    assert bool(((grad_w.double() - exact(*for_w)).abs() <= bound(*for_w, None, torch.float32)).all())


def along(found: Tensor, wanted: Tensor) -> Tensor:
    """The component of each matrix ``[..., rows, cols]`` along the one that is wanted: 1 where nothing shrinks."""
    return (found.double() * wanted).sum((-2, -1)) / wanted.double().square().sum()


def assert_mean_is_one(draws: list[Tensor], limit: float) -> None:
    """Of draws that are independent of each other, within six standard errors, which are below ``limit``."""
    every = torch.stack(draws)
    error = every.std() / every.numel() ** 0.5
    assert error < limit and abs(every.mean() - 1) < 6 * error


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_have_no_bias(recipe):
    """The mean over random bits is the product of the float gradient by the codes of the other operand. Scales that
    clip, as those rounded to nearest do, would shrink it by 0.3%, which is more than six standard errors.

    Bits depend on the place, so copies below each other draw their own: each has its rows of the input's gradient, and
    the weight's gradient is the sum over them.
    """
    torch.manual_seed(0)
    layer, block, copies, steps = training_layer(32, 16, recipe), BLOCK[recipe], 50, 30
    x, g = torch.randn(32, 32), torch.randn(32, 16)
    w = lb.quantize(layer.weight.detach(), lb.recipe(recipe).trained.b.scheme).dequantize()
    turned = [signed_hadamard(t.t(), block).t() for t in (g, x)]
    wanted_x, wanted_w = g @ w, turned[0].t() @ lb.quantize(turned[1], NEAREST[recipe]).dequantize()
    state, many_x, many_g = lb.train.state(layer), x.repeat(copies, 1).requires_grad_(), g.repeat(copies, 1)
    of_x, of_w = [], []
    for _ in range(steps):
        grad_x, grad_w = torch.autograd.grad(layer(many_x), (many_x, layer.weight), many_g)
        of_x.append(along(grad_x.unflatten(0, (copies, -1)), wanted_x))
        of_w.append(along(grad_w / copies, wanted_w))
        state.advance()
    assert_mean_is_one(of_x, 5e-4)
    assert_mean_is_one(of_w, 5e-4)


def test_eden_has_no_bias_and_half_the_error():
    """The mean over turns and random bits is the vector; against stochastic rounding the squared error is below 0.6.

    The copies of a step share its turn, so their mean is one draw.
    """
    torch.manual_seed(0)
    x, copies, steps = torch.randn(4, 200), 20, 150
    state, many, draws, wrong = State(), x.repeat(copies, 1), [], [0.0, 0.0]
    cast = lb.Cast("nvfp4", "eden", "random-hadamard")
    places = state.slots("", {"grad_input.a": cast})
    for _ in range(steps):
        view = state.view(places, x.device)
        signs = view.signs("grad_input.a", x.device)
        y = view.quantize(random_hadamard(many, signs), cast, "grad_input.a").dequantize()
        back = (lb.hadamard(y, 128) * signs.repeat(2))[:, :200]
        draws.append(along(back.unflatten(0, (copies, -1)), x).mean())
        wrong[0] += (back.double() - many).square().sum()
        drawn_too = lb.quantize(many, "nvfp4:ceil", rounding=lb.Rounding(state.step)).dequantize()
        wrong[1] += (drawn_too.double() - many).square().sum()
        state.advance()
    assert_mean_is_one(draws, 2e-4)
    assert wrong[0] < 0.6 * wrong[1]


def test_signs_are_those_of_pi_and_products_stay():
    eye = signed_hadamard(torch.eye(16), 16)
    assert torch.equal(eye[:, 0].sign(), torch.tensor([1, 1, -1, 1, 1, -1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1.0]))
    a, b = torch.randn(3, 50, dtype=torch.float64).float(), torch.randn(5, 50)
    torch.testing.assert_close(signed_hadamard(a, 32) @ signed_hadamard(b, 32).t(), a @ b.t())
    assert same_bits(signed_hadamard(a.bfloat16(), 16), lb.hadamard(a.bfloat16() * _signs(50), 16))


def _signs(count: int) -> Tensor:
    digits = "0010010000111111"  # the fraction of pi begins with 0.0010 0100 0011 1111 in binary
    return torch.tensor([1.0 - 2.0 * int(digits[i % 16]) for i in range(count)]).bfloat16()


# -- the first and last blocks -----------------------------------------------------------------------------------------
class Stack(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(blocks))
        self.out = nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("blocks", "share", "kept"),
    [
        (62, 0.16, {0, 1, *range(54, 62)}),  # as published for 12B parameters
        (12, 0.16, {0, 11}), (24, 0.16, {0, 21, 22, 23}), (3, 0.16, {0, 2}), (2, 0.16, {0, 1}), (8, 0.0, set()),
        (1, 0.16, {0}), (0, 0.16, set()), (10, 0.9, {0, 1, 3, 4, 5, 6, 7, 8, 9}),
    ],
)  # fmt: skip
def test_which_blocks_are_kept(blocks, share, kept):
    assert kept_blocks(blocks, share) == kept


def test_first_and_last_blocks_stay_unless_the_caller_says_otherwise():
    report = lb.train.prepare_(Stack(6), "nvfp4", skip=())
    assert list(report.left) == ["blocks.0.0", "blocks.5.0"] and "out" in report.converted
    reason = (
        r"block 6 of 6: the first and last blocks stay .* keep_blocks=0 of nvfp4, or a recipe for its name, converts it"
    )
    assert re.search(reason, report.left["blocks.5.0"])
    assert not lb.train.prepare_(Stack(6), "nvfp4:keep_blocks=0", skip=()).left
    assert not lb.train.prepare_(Stack(6), "fp8", skip=()).left
    named = lb.train.prepare_(Stack(6), {"*": "nvfp4", "blocks.0.0": "fp8", "blocks.5.0": "nvfp4"}, skip=())
    assert not named.left
    mixed = lb.train.prepare_(Stack(6), {"*": "fp8", "blocks.*": "mxfp4:keep_blocks=0.5"}, skip=())
    assert list(mixed.left) == ["blocks.0.0", "blocks.4.0", "blocks.5.0"]
    with pytest.raises(ValueError, match=r"(?s)nothing to convert.*block 2 of 2.*keep_blocks=0"):
        lb.train.prepare_(Stack(2), {"blocks.*": "nvfp4"})


def test_inference_multiplies_what_it_did():
    row = lb.recipe("nvfp4")
    assert (row.input, row.weight) == (lb.scheme("nvfp4:global_row"), lb.scheme("nvfp4"))
    assert row.trained == lb.Gemm("nvfp4:global_row", "fp4_e2m1:block16x16:e4m3")
    assert lb.recipe("fp8").trained is lb.recipe("fp8").output


@pytest.mark.parametrize("recipe", ["nvfp4:output=high", "mxfp4:output=high", "fp8:output=high", "mxfp8:output=high"])
def test_forward_in_high_precision(recipe):
    """Backward makes the codes that it multiplies, which are those that forward would have made."""
    torch.manual_seed(0)
    base = lb.recipe(recipe.partition(":")[0])
    layers = [training_layer(33, 5, one) for one in (base, recipe)]
    layers[1].load_state_dict(layers[0].state_dict())
    x, g = torch.randn(17, 33, requires_grad=True), torch.randn(17, 5)
    low, high = (torch.autograd.grad(layer(x), x, g)[0] for layer in layers)
    torch.testing.assert_close(layers[1](x), torch.nn.functional.linear(x, layers[1].weight, layers[1].bias))
    if base.name in RECIPES:
        assert same_bits(low, high)
    torch.testing.assert_close(high, g @ layers[1].weight.detach(), rtol=0, atol=0.6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: lb.recipe("nvfp4:keep_blocks=1"),
            r"keep_blocks='1' is not a share of blocks; .*from 0 to less than 1, got 1\.0",
        ),
        (lambda: lb.recipe("nvfp4:keep_blocks=few"), "keep_blocks='few' is not a share of blocks"),
        (lambda: lb.recipe("nvfp4:output=dequantized"), "output must be one of 'low', 'high', got 'dequantized'"),
        (lambda: lb.Recipe(lb.Gemm(None, "nvfp4"), keep_blocks=0.5), "forward and keep_blocks are for training"),
        (
            lambda: lb.Recipe(lb.Gemm(None, "nvfp4"), forward=lb.Gemm(None, None)),
            "forward and keep_blocks are for training",
        ),
        (lambda: lb.recipe("int4-weight-only:keep_blocks=0"), "is for inference only, and with_keep_blocks"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("recipe", ["nvfp4-eden", "nvfp4:rule=search"])
def test_watching_sees_every_operand_and_changes_no_bit(recipe):
    layer, x = training_layer(64, 32, recipe), torch.randn(40, 64, requires_grad=True)
    plain = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
    with lb.train.watch(layer, every=1) as watch:
        layer.state.set_micro_batch(-1)
        watched = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
    assert all(map(same_bits, plain, watched))
    assert {row.role for row in watch.rows} == set(layer.recipe.casts(training=True))
