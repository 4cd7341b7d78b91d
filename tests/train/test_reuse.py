"""The codes of a weight serve all micro-batches of a step, and never a weight that has changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.bits import assert_same_bits
from torch import Tensor, nn

import lowbit as lb
from lowbit.memory import checkpoint_
from lowbit.train import gemms

MICRO_BATCHES = 3
RECIPES = ["fp8", "fp8-delayed", "mxfp8", "nvfp4:keep_blocks=0", "fp8:output=high", "nvfp4-eden:keep_blocks=0"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 80), nn.Linear(80, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def model(recipe: str) -> nn.Sequential:
    torch.manual_seed(3)
    made = nn.Sequential(Block(), Block(), Block())
    lb.train.prepare_(made, recipe, skip=())
    return made


@contextmanager
def encodings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The weights that are encoded within, one entry each time."""
    made: list[str] = []
    encode = gemms.WeightOperands.of

    def noted(weight: Tensor, *args: object) -> gemms.WeightOperands:
        made.append(str(tuple(weight.shape)))
        return encode(weight, *args)

    monkeypatch.setattr(gemms.WeightOperands, "of", noted)
    yield made
    monkeypatch.undo()


def step(net: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        net(torch.randn(7, 48, generator=draw)).square().mean().backward()
    optimizer.step()


@pytest.mark.thinned(5)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_encoded_once_a_step_and_no_bit_changes(recipe, checkpointed, monkeypatch):
    net, other = model(recipe), model(recipe)
    for one in (net, other):
        if checkpointed:
            checkpoint_(one)
        for layer in one.modules():
            if one is other and isinstance(layer, lb.train.TrainLinear):
                layer.reuse.step_done = lambda sharded: None  # nothing is ever kept
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, other)]
    for number in range(3):
        with encodings(monkeypatch) as made:
            step(net, optimizers[0], MICRO_BATCHES, number)
        once, forwards = 6, 6 * MICRO_BATCHES * (2 if checkpointed else 1)
        turned = "eden" in recipe  # with random signs of each micro-batch
        assert len(made) == (once if number and not turned else forwards), number
        step(other, optimizers[1], MICRO_BATCHES, number)
        for got, want in zip(net.parameters(), other.parameters(), strict=True):
            assert_same_bits(got.grad, want.grad, f"{recipe} step {number}")
            assert_same_bits(got.detach(), want.detach(), f"{recipe} step {number}")


def test_steps_of_one_micro_batch_keep_no_codes():
    net = model("fp8")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(3):
        step(net, optimizer, 1, number)
        net(torch.randn(7, 48))
        assert all(layer.reuse._entry is None for layer in net.modules() if isinstance(layer, lb.train.TrainLinear))
        optimizer.step()


CHANGES = [
    "in place",
    "another parameter",
    "loaded",
    "more micro-batches than before",
    "data",
    "vector",
    "another dtype",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changed_is_encoded_again(change):
    net = model("fp8")
    layer, optimizer = net[0].up, torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer, 2, 0)
    x = torch.randn(7, 48)
    net(x)
    with torch.no_grad():
        if change == "in place":
            layer.weight.mul_(2)
        elif change == "another parameter":
            layer.weight = nn.Parameter(layer.weight * 2)
        elif change == "loaded":
            net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})
        elif change == "data":
            layer.weight.data.mul_(2)
        elif change == "vector":
            nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector(net.parameters()), net.parameters())
        elif change == "another dtype":
            net.bfloat16()
        else:
            with torch.enable_grad():
                net(x), net(x)
    fresh = copy.deepcopy(net)
    with torch.enable_grad():
        assert_same_bits(net(x).detach(), fresh(x).detach(), change)


def test_evaluation_takes_no_codes_of_training():
    """An average of weights is put in with ``.data``, which no version counts."""
    net = model("fp8")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer, 2, 0)
    x = torch.randn(7, 48)
    net(x)
    net[0].up.weight.data.mul_(2)
    fresh = copy.deepcopy(net)
    with torch.no_grad():
        assert_same_bits(net(x), fresh(x), "evaluation")


def kept(layer: nn.Module) -> bool:
    return layer.reuse._entry is not None


def test_codes_go_with_the_step_of_whichever_optimizer_holds_the_weight():
    """Fused optimizers raise no version of the weights, and on a GPU no sample of the numbers tells."""
    net = model("fp8")
    first, second = (torch.optim.SGD(block.parameters(), lr=0.1) for block in net[:2])
    x = torch.randn(7, 48)
    net(x), net(x)
    first.step()
    net(x)
    assert kept(net[0].up) and kept(net[1].up)
    second.step()
    assert kept(net[0].up) and not kept(net[1].up)
    first.step()
    assert not kept(net[0].up)


@pytest.mark.parametrize("setting", ["seed", "step", "loaded"])
def test_codes_go_with_the_random_bits_that_they_have(setting):
    net = model("fp8-delayed")
    state, optimizer = lb.train.state(net), torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer, 2, 0)
    net(torch.randn(7, 48))
    assert kept(net[0].up)
    if setting == "loaded":
        net.load_state_dict({name: value for name, value in net.state_dict().items() if "lowbit_state" in name}, False)
    else:
        setattr(state, setting, 5)
    assert not kept(net[0].up)


def test_weights_of_another_optimizer_are_kept_too(monkeypatch):
    """The State follows that of the first layer; both drop what is old."""
    net = model("fp8")
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (net[:1], net[1:])]
    for number in range(3):
        with encodings(monkeypatch) as made:
            for _ in range(MICRO_BATCHES):
                net(torch.randn(7, 48)).square().mean().backward()
        assert len(made) == (6 if number else 6 * MICRO_BATCHES), number
        for optimizer in optimizers:
            optimizer.step()
        fresh, x = copy.deepcopy(net), torch.randn(7, 48)
        with torch.no_grad():
            assert_same_bits(net(x), fresh(x), f"step {number}")
