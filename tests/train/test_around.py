"""What models do around a layer in training: strides, rows, tied weights, accumulation, autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.bits import same_bits
from support.layers import TRAINING, training_layer
from support.stateful import STOCHASTIC_ROWS
from torch import Tensor, nn

import lowbit as lb
from lowbit.train import TrainLinear

RECIPES = pytest.mark.parametrize("recipe", [*TRAINING, STOCHASTIC_ROWS], ids=str)


def results(layer: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """The output and the gradients of the input and of each parameter, as in the first forward of a step."""
    lb.train.state(layer).set_micro_batch(-1)
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], g)]


# -- strides and rows --------------------------------------------------------------------------------------------------
#: Views ``[6, columns]`` of other memory.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded from one number": lambda t: t[:1, :1].expand_as(t),
    "expanded from one row": lambda t: t[:1].expand_as(t),
    "expanded from one column": lambda t: t[:, :1].expand_as(t),
    "transposed": lambda t: t.t().contiguous().t(),
    "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
    "every other column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "with an offset": lambda t: torch.cat([t, t])[3:9],
    "overlapping": lambda t: t.flatten().as_strided(t.shape, (3, 1)),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@RECIPES
def test_no_bit_depends_on_strides(recipe, dtype):
    layer = training_layer(33, 48, recipe)
    x, g = torch.randn(6, 33, dtype=dtype), torch.randn(6, 48, dtype=dtype)
    for view in STRIDES.values():
        for other_x, other_g in ((x, view(g)), (view(x), g), (view(x), view(g))):
            expected = results(layer, other_x.contiguous(), other_g.contiguous())
            assert all(map(same_bits, results(layer, other_x, other_g), expected))


def test_gradients_of_reductions_and_permutations():
    """``mean`` expands its gradient, ``transpose`` turns it; the numbers are those of the same gradient made whole."""
    layer, x = training_layer(33, 48, "fp8"), torch.randn(2, 3, 33)
    for loss, g in (
        (lambda y: y.mean(), torch.full((2, 3, 48), 1 / 288)),
        (lambda y: y.transpose(1, 2).flatten(1).sum(0)[5:9].sum(), None),
    ):
        y = layer(x)
        if g is None:
            g = torch.zeros(2, 48, 3).flatten(1)
            g[:, 5:9] = 1
            g = g.unflatten(1, (48, 3)).transpose(1, 2).contiguous()
        (found,) = torch.autograd.grad(loss(y), layer.weight)
        assert same_bits(found, torch.autograd.grad(layer(x), layer.weight, g)[0])


@pytest.mark.thinned(5)
@pytest.mark.parametrize("rows", [1, 7, 17, 33])
@RECIPES
def test_any_number_of_rows(recipe, rows):
    """Products of the kernels that run by default, against those of the specification of the same codes."""
    layer = training_layer(70, 48, recipe)
    x, g = torch.randn(rows, 70), torch.randn(rows, 48) * 1e-3
    found = results(layer, x, g)
    with lb.use_backend("reference"):
        expected = results(layer, x, g)
    for mine, other in zip(found, expected, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()


# -- models ------------------------------------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(nn.functional.silu(self.hidden(self.embed(tokens))))


def test_a_tied_weight_has_the_gradients_of_both():
    tied, untied = Tied(), Tied()
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    tokens = torch.randint(20, (4, 5))
    for model in (tied, untied):
        lb.train.prepare_(model, "fp8", skip=())
        assert type(model.head) is TrainLinear
        model(tokens).square().mean().backward()
    assert tied.head.weight is tied.embed.weight
    torch.testing.assert_close(tied.embed.weight.grad, untied.embed.weight.grad + untied.head.weight.grad)
    assert same_bits(tied.hidden.weight.grad, untied.hidden.weight.grad)


# -- steps -------------------------------------------------------------------------------------------------------------
@RECIPES
def test_accumulated_gradients_are_sums_and_are_clipped_as_any(recipe):
    """Of micro-batches one by one, with the random bits and scales that each has in its place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 48), nn.SiLU(), nn.Linear(48, 9))
    lb.train.prepare_(model, recipe, skip=())
    batches, state = torch.randn(3, 5, 33), lb.train.state(model)
    parts = []
    for number, x in enumerate(batches):
        state.set_micro_batch(number - 1)
        parts.append(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))
    state.set_micro_batch(-1)
    for x in batches:
        model(x).square().mean().backward()
    sums = [first + second + third for first, second, third in zip(*parts, strict=True)]
    assert all(same_bits(param.grad, total) for param, total in zip(model.parameters(), sums, strict=True))
    norm = torch.stack([total.double().square().sum() for total in sums]).sum().sqrt()
    found = nn.utils.clip_grad_norm_(model.parameters(), norm.item() / 2)
    torch.testing.assert_close(found.double(), norm)
    for param, total in zip(model.parameters(), sums, strict=True):
        torch.testing.assert_close(param.grad, total / 2)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", STOCHASTIC_ROWS, "fp8-delayed"], ids=str)
def test_compiled_blocks_under_autocast_have_the_bits_of_eager(recipe):
    """Blocks that are compiled one by one, inside a model that is not, under bf16 autocast."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(33, 33), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(33, 9))
    lb.train.prepare_(model, recipe, skip=())
    x, g = torch.randn(7, 33), torch.randn(7, 9).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(model, x, g)
        for block in blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        found = results(model, x, g)
    assert found[0].dtype == torch.bfloat16 and {grad.dtype for grad in found[1:]} == {torch.float32}
    assert all(map(same_bits, found, expected))
    lb.train.state(model).advance()
    assert lb.train.state(model).step == 1 and not lb.train.state(model).pending.any()
