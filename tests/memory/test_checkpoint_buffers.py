"""Buffers that a forward moves are moved once where it is computed again, and backward sees them as forward did."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.checkpointing.calls import Buffers
from lowbit.checkpointing.frame import NotReplayed
from lowbit.memory import checkpoint_


class Block(nn.Module):
    """A counter, a mean that is written to, one that is assigned anew, and power iterations of a weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(dim, 2 * dim))
        self.down = nn.Linear(2 * dim, dim)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))
        self.register_buffer("mask", torch.ones(dim, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.scale = 0.9 * self.scale + 0.1 * x.std(0)
        y = (x - self.mean) / self.scale * (1 + 0.1 * self.seen)
        return x + self.down(F.gelu(self.up(y * self.mask)))


@pytest.mark.parametrize("policy", ["block", "save_matmuls", "segments:2", "every:2"])
def test_a_step_has_the_bits_of_one_that_keeps_all(policy):
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(16) for _ in range(4)))
    model, x = copy.deepcopy(plain), torch.randn(32, 16)
    checkpoint_(model, policy)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, model)]
    for _ in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
        for (name, expected), found in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(expected, found), name
    assert [block.seen.item() for block in model] == [3] * 4


def test_what_a_call_leaves_as_it_is_is_not_kept():
    block = Block(16)
    held = Buffers(block)
    held.called()
    assert not held._before
    held = Buffers(block)
    block(torch.randn(4, 16))
    held.called()
    assert {one.name for one in held._before} == {"seen", "mean", "scale", "_u", "_v"}


class Lazy(nn.Module):
    """A buffer that its first call makes, and one that each call takes away."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("made", None)
        self.register_buffer("once", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = x.detach().mean(0)
        y = self.inner(x).tanh() * self.made * (1 if self.once is None else self.once)
        self.once = None
        return y.tanh()


def test_buffers_that_a_call_makes_and_takes_away():
    torch.manual_seed(0)
    plain, x = nn.Sequential(Lazy(), Lazy()), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    checkpoint_(model, "block")
    for _ in range(2):
        for one in (plain, model):
            one(x).square().mean().backward()
        assert all(map(torch.equal, *([p.grad for p in one.parameters()] for one in (plain, model))))
        assert model[0].once is None and torch.equal(model[1].made, plain[1].made)


def test_a_table_that_a_call_changes_is_refused(monkeypatch):
    monkeypatch.setattr("lowbit.checkpointing.calls._TABLE", 4)
    model = nn.Sequential(Block(16), Block(16))
    checkpoint_(model, "block")
    with pytest.raises(NotReplayed, match=r"'0' is checkpointed and changes its buffer '.*', which is too large"):
        model(torch.randn(4, 16))
