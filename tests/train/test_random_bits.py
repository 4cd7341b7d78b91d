"""The random bits of training: independent from replica to replica and micro-batch to micro-batch, else the same."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from support import oracles
from support.bits import same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.train.moves import DATA, WEIGHT, derive_


def stochastic(format: str) -> lb.Cast:
    return lb.Cast(f"{format}:tensor", rounding="stochastic")


ALL = lb.Recipe(
    lb.Gemm(stochastic("fp8_e4m3"), stochastic("fp8_e4m3")),
    lb.Gemm(stochastic("fp8_e5m2"), "reuse"),
    lb.Gemm(stochastic("fp8_e5m2"), "reuse", save="recompute"),
    name="all-stochastic",
)


# -- keys --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, -1, -(2**63)])
def test_keys_are_those_of_a_philox_in_python_integers(seed):
    for micro_batch, replica, step in [(0, 0, 0), (1, 0, 3), (0, 1, 3), (2**31, 2**32 - 1, 2**32 - 1), (7, 1000, 12)]:
        keys = torch.zeros(2, 2, dtype=torch.int64)
        derive_(keys, torch.tensor([seed, step]), torch.tensor(micro_batch), replica)
        expected = {DATA: oracles.training_seed(seed, micro_batch, replica), WEIGHT: oracles.training_seed(seed, 0, 0)}
        for row, wanted in expected.items():
            assert [keys[row, 0].item() % 2**64, keys[row, 1].item()] == [wanted, step]


def test_ops_declare_what_they_change():
    keys, rng, number = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([3, 4]), torch.tensor(0)
    amax, pending = torch.rand(3, 5), torch.rand(3)
    torch.library.opcheck(torch.ops.lowbit.train_derive_, (keys, rng, number, 1))
    torch.library.opcheck(torch.ops.lowbit.train_next_micro_batch_, (keys, rng, number, 1))
    torch.library.opcheck(torch.ops.lowbit.train_record_, (pending[:1], torch.rand(2)))
    torch.library.opcheck(torch.ops.lowbit.train_advance_, (keys, rng, number, amax, pending, 1))


# -- independent -------------------------------------------------------------------------------------------------------
OUTPUTS = 4096


def errors(of: str, count: int) -> Tensor:
    """Of the mean of ``count`` gradients of a weight ``[OUTPUTS, 1]``, in steps of the format, and the variance of one.

    ``x`` is exact, and so are the products, so a gradient errs by the rounding of ``g`` alone: by ``1 - f`` with
    probability ``f`` and else by ``-f``, where ``f`` is its fraction of a step.
    """
    layer = nn.Sequential(nn.Linear(1, OUTPUTS, bias=False))
    recipe = lb.Recipe(lb.RECIPES["fp8-tensor"].output, *[lb.Gemm(stochastic("fp8_e5m2"), "reuse")] * 2, name="mine")
    lb.train.prepare_(layer, recipe)
    state = lb.train.state(layer)
    generator = torch.Generator().manual_seed(3)
    fraction = 0.25 + torch.randint(0, 512, (1, OUTPUTS), generator=generator) / 1024  # 16 bits hold it
    g = 1 + (torch.randint(0, 4, fraction.shape, generator=generator) + fraction) / 4  # E5M2 has steps of 1/4 there
    fraction[0, 0], g[0, 0] = 0, 57344  # the largest number of E5M2, so the scale is 1
    for number in range(count):
        if of == "replicas":
            state.set_replica(number)
            state.set_micro_batch(-1)
        layer(torch.full((1, 1), 448.0)).backward(g)  # the largest of E4M3
    mean = layer[0].weight.grad[1:, 0] / 448 / count
    return (mean - g[0, 1:]) * 4 / (fraction * (1 - fraction))[0, 1:].sqrt()


@pytest.mark.parametrize("of", ["replicas", "micro-batches"])
def test_rounding_errors_average_out(of):
    """The variance of the mean of N falls as 1/N.

    An element's error has variance f (1 - f) / N. Over that, its square has mean 1 and, with f from 1/4 to 3/4, a
    variance of 2 + (1 - 6 f (1 - f)) / (N f (1 - f)) < 2. So the mean over the elements is within 6 sqrt(2 / elements)
    of 1, but once in 5e8 runs. With the same bits for all N it would be N.
    """
    for count in (1, 2, 4, 8, 16):
        assert (errors(of, count).square().mean() * count - 1).abs() < 6 * math.sqrt(2 / (OUTPUTS - 1))


# -- the same ----------------------------------------------------------------------------------------------------------
class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = (nn.Sequential(nn.Linear(20, 24), nn.SiLU(), nn.Linear(24, 20)) for _ in range(2))
        lb.train.prepare_(self, ALL)

    def forward(self, x: Tensor, reentrant: bool | None) -> Tensor:
        if reentrant is None:
            return self.second(self.first(x))
        return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=reentrant), use_reentrant=reentrant)


def two_micro_batches(reentrant: bool | None, together: bool) -> list[Tensor]:
    """Gradients of two forwards of a model, each followed by its backward or by the other and one for both."""
    model, losses = Blocks(), []
    for seed in range(2):
        x = torch.randn(6, 20, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        losses.append(model(x, reentrant).square().mean())
        if not together:
            losses[-1].backward()
    if together:
        sum(losses).backward()
    state = lb.train.state(model)
    assert int(state.micro_batch) == 1
    state.advance()
    assert (state.step, int(state.micro_batch)) == (1, -1)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_the_bits_of_its_forward(reentrant, together):
    plain = two_micro_batches(None, together)
    assert all(map(same_bits, two_micro_batches(reentrant, together), plain))


def test_an_element_has_its_bits_on_every_shard_replica_and_micro_batch():
    model = Blocks()
    state, weight = lb.train.state(model), model.first[0].weight.detach()

    def codes(part: Tensor, row: int, **place: int) -> Tensor:
        rounding = lb.Rounding(state.keys[row], stream="first.0/output.b", **place)
        return lb.quantize(part, "fp8_e4m3:tensor", 0.01, rounding=rounding).codes

    of_weight, of_data = codes(weight, WEIGHT), codes(weight, DATA)
    assert same_bits(codes(weight[5:, 3:], WEIGHT, offset=5 * 20 + 3, pitch=20), of_weight[5:, 3:])
    for change in (lambda: state.set_replica(3), lambda: (state.next_micro_batch(), state.next_micro_batch())):
        change()
        assert same_bits(codes(weight, WEIGHT), of_weight) and not torch.equal(codes(weight, DATA), of_data)
    state.advance()
    assert not torch.equal(codes(weight, WEIGHT), of_weight)


def test_evaluation_and_recomputation_take_no_micro_batch():
    model, x = Blocks(), torch.randn(6, 20)
    state = lb.train.state(model)
    with torch.no_grad():
        assert same_bits(model(x, None), model(x, None)) and int(state.micro_batch) == -1
    checkpoint(model, x.requires_grad_(), None, use_reentrant=False).sum().backward()
    assert int(state.micro_batch) == 0


@pytest.mark.parametrize("reentrant", [None, True])
def test_forwards_that_nothing_counts_are_told_of(reentrant):
    """A part of the model, and the whole of it in a reentrant checkpoint."""
    model, x = Blocks(), torch.randn(6, 20, requires_grad=True)
    with pytest.warns(UserWarning, match=r"same random bits; call lowbit.train.state\(model\).next_micro_batch\(\)"):
        y = model.first(x) if reentrant is None else checkpoint(model, x, None, use_reentrant=True)
        y.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.first(x).sum().backward()  # once
        model = Blocks()
        lb.train.state(model).next_micro_batch()
        model.first(x).sum().backward()


def test_a_training_that_takes_no_step_is_told_of():
    model = Blocks()
    state = lb.train.state(model)
    with pytest.warns(UserWarning, match=r"more than 1024 micro-batches began in step 0: .*attach\(optimizer\)"):
        for _ in range(1025):
            state.next_micro_batch()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "around", "blocks"])
def test_compiled_code_recomputes_the_bits_of_its_forward(where):
    """Checkpoints of the whole model inside compiled code, around compiled code, and around compiled blocks."""

    def recomputed(model: Blocks) -> Callable[[Tensor], Tensor]:
        whole = partial(torch.compile, backend="aot_eager", fullgraph=True)
        if where == "inside":
            return whole(lambda x: checkpoint(model, x, None, use_reentrant=False))
        if where == "around":
            return partial(checkpoint, whole(model), reentrant=None, use_reentrant=False)
        for block in (model.first, model.second):
            block.compile(backend="aot_eager", fullgraph=True)
        return partial(model, reentrant=False)

    def gradients(change: Callable[[Blocks], Callable[[Tensor], Tensor]]) -> list[Tensor]:
        torch._dynamo.reset()
        model = Blocks()
        forward = change(model)
        for seed in range(3):
            forward(torch.randn(6, 20, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        assert int(lb.train.state(model).micro_batch) == 2
        return [p.grad for p in model.parameters()]

    assert all(map(same_bits, gradients(recomputed), gradients(lambda model: partial(model, reentrant=None))))
