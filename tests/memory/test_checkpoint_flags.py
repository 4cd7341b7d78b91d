"""What is set anew between forward and backward: the second run of a checkpoint has it as forward had."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowbit.checkpointing.frame import Frame
from lowbit.memory import checkpoint_


class Block(nn.Module):
    """Computes otherwise by mode, by a number in an attribute, by dropout, and by the kernel of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.norm, self.scale = nn.Linear(8, 8), nn.Dropout(0.25), nn.BatchNorm1d(8), 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.inner(x)).tanh()) * (self.scale if self.training else 1.0)
        heads = y.view(1, 2, -1, 4)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).view_as(x)


def evaluated(model: nn.Module) -> None:
    model.eval()


def drops_more(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.75


def scaled(model: nn.Module) -> None:
    for block in model:
        block.scale = 3.0


def frozen(model: nn.Module) -> None:
    model.requires_grad_(False)


def one_frozen(model: nn.Module) -> None:
    model[1].inner.weight.requires_grad_(False)


def in_double(model: nn.Module) -> None:
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("policy", ["block", "segments:1", "save_matmuls", "every:2"])
@pytest.mark.parametrize("change", [evaluated, drops_more, scaled, frozen, one_frozen, in_double])
def test_what_is_set_after_forward_changes_no_bit(policy: str, change: Callable[[nn.Module], None]):
    torch.manual_seed(0)
    plain, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(6, 8)
    model = copy.deepcopy(plain)
    checkpoint_(model, policy)
    found = []
    for one in (plain, model):
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        loss = one(given).square().mean()
        change(one)
        settings = (
            [(m.training, getattr(m, "p", None)) for m in one.modules()],
            [p.requires_grad for p in one.parameters()],
        )
        try:
            loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)
        now = [(m.training, getattr(m, "p", None)) for m in one.modules()], [p.requires_grad for p in one.parameters()]
        assert now == settings, "backward leaves what has been set since"
        found.append([given.grad, *(p.grad for p in one.parameters()), *one.buffers()])
    for expected, got in zip(*found, strict=True):
        assert (expected is None) == (got is None) and (expected is None or torch.equal(expected, got))


def test_a_part_in_another_mode_and_a_forward_in_eval_mode_are_recomputed_as_they_were():
    torch.manual_seed(0)
    plain, x = nn.Sequential(Block(), Block()), torch.randn(6, 8)
    model = copy.deepcopy(plain)
    checkpoint_(model)
    for one in (plain, model):
        one.eval()[1].drop.train()
        torch.manual_seed(1)
        loss = one(x).sum()
        one.train()
        loss.backward()
    assert all(map(torch.equal, *([p.grad for p in one.parameters()] for one in (plain, model))))
    assert model.training and model[1].training


def test_a_kernel_of_attention_that_is_chosen_for_forward_alone_is_chosen_again(monkeypatch):
    """The kernels save other tensors, so another choice would be noticed; here it would also be other bits."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(Block(), Block()), torch.randn(6, 8)
    model = copy.deepcopy(plain)
    checkpoint_(model)
    for one in (plain, model):
        torch.manual_seed(1)
        with sdpa_kernel(SDPBackend.MATH):
            loss = one(x).sum()
        loss.backward()
    assert all(map(torch.equal, *([p.grad for p in one.parameters()] for one in (plain, model))))
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_counter_of_the_forward_itself_is_still_not_replayed():
    """What a call changes by itself is no setting: its second run is told to be another, where it is one."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.count = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.inner(x).tanh()

    model = nn.Sequential(Counting(), Counting())
    checkpoint_(model)
    model(torch.randn(2, 8)).sum().backward()
    assert [block.count for block in model] == [2, 2]


def test_frames_hold_no_graph_of_what_a_forward_replaced():
    """A tensor with a graph in an attribute, which each forward replaces, does not chain the graphs of all forwards."""

    class Stashing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.seen = nn.Linear(8, 8), None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.inner(x).tanh()
            return self.seen.sin()

    import gc
    import weakref

    frames = []
    made = Frame.__init__

    def noted(self: Frame, *args: object) -> None:
        made(self, *args)
        frames.append(weakref.ref(self))

    model = nn.Sequential(Stashing(), Stashing())
    checkpoint_(model)
    patch = pytest.MonkeyPatch()
    patch.setattr(Frame, "__init__", noted)
    try:
        for _ in range(4):
            model(torch.randn(2, 8))
    finally:
        patch.undo()
    gc.collect()
    assert sum(frame() is not None for frame in frames) <= 2
