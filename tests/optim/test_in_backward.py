"""Steps in the backward pass: the same bits as steps after it, and gradients that are gone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.bits import same_bits
from torch import nn

import lowbit as lb


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 96), nn.Tanh(), nn.Linear(96, 64), nn.Linear(64, 64, bias=False))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 80, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


@pytest.mark.parametrize(
    "cls",
    [
        lb.optim.AdamW, lb.optim.Lion, lb.optim.Muon, partial(lb.optim.GaLore, rank=48, refresh=2),
        partial(lb.optim.Apollo, rank=8, refresh=2),
    ],
    ids=["AdamW", "Lion", "Muon", "GaLore", "Apollo"],
)  # fmt: skip
def test_same_bits_as_steps_after_the_pass(cls):
    model, other = network(), network()
    released = lb.optim.in_backward_(model, cls, lr=1e-2)
    after = cls(other.named_parameters(), lr=1e-2)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (released, after)]
    for step in range(4):
        loss(model, step).backward()
        assert all(p.grad is None for p in model.parameters())
        released.step()
        loss(other, step).backward()
        after.step()
        after.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    mine, theirs = released.state_dict()["state"], after.state_dict()["state"]
    assert all(same_bits(v, theirs[i][k]) for i, s in mine.items() for k, v in s.items())


def test_goes_on_after_a_state_is_loaded():
    model, other = network(), network()
    released = lb.optim.in_backward_(model, lb.optim.AdamW(model.parameters()))
    loss(model, 0).backward()
    resumed = lb.optim.in_backward_(other, lb.optim.AdamW)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(released.state_dict())
    for m in (model, other):
        loss(m, 1).backward()
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_few_gradients_exist_at_a_time():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    optimizer = lb.optim.in_backward_(model, lb.optim.SGD)
    alive = []
    original = optimizer.advance

    def counting(places):
        alive.append(sum(p.grad is not None for p in model.parameters()))
        original(places)

    optimizer.advance = counting
    model(torch.randn(2, 64)).sum().backward()
    assert alive == [1] * 8


def test_frozen_parameters_stay():
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    lb.optim.in_backward_(model, lb.optim.AdamW)
    loss(model, 0).backward()
    assert same_bits(model[0].weight.detach(), before)


def test_what_it_cannot_be_combined_with():
    model = network()
    with pytest.raises(TypeError, match=r"lowbit\.optim, got AdamW"):
        lb.optim.in_backward_(model, torch.optim.AdamW)
    optimizer = lb.optim.in_backward_(model, lb.optim.AdamW)
    with pytest.raises(TypeError, match="lr are for a class"):
        lb.optim.in_backward_(model, lb.optim.AdamW(model.parameters()), lr=1.0)
    for again in (optimizer, lb.optim.Lion):
        with pytest.raises(ValueError, match="steps in the backward pass already"):
            lb.optim.in_backward_(model, again)
    other = network()
    with pytest.raises(ValueError, match=r"it lacks 2\.weight, 2\.bias, 3\.weight"):
        lb.optim.in_backward_(other, lb.optim.AdamW(other[0].parameters()))
    with pytest.raises(ValueError, match="it lacks"):
        lb.optim.in_backward_(other, lb.optim.AdamW(network().parameters()))
