"""Bytes that a call takes, against tensors of known sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit as lb

MIB = 1 << 20


def some(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def test_a_peak_is_what_is_held_at_a_time():
    def run() -> None:
        a = some(1 * MIB)
        b = some(2 * MIB)
        del a
        c = some(MIB // 2)
        del b, c

    assert lb.memory.allocated_peak(run) == 3 * MIB


def test_a_peak_is_beyond_what_there_was():
    held = [some(4 * MIB)]
    assert lb.memory.allocated_peak(lambda: held.append(some(MIB))) == MIB
    assert lb.memory.allocated_peak(lambda: some(2 * MIB)) == 2 * MIB
    assert lb.memory.allocated_peak(lambda: None) == 0


def test_a_peak_has_what_backward_allocates():
    x = torch.ones(MIB // 4, requires_grad=True)

    def run() -> None:
        (x * 2.0).sum().backward()

    # x * 2 with the sum, then the gradient, which stays; the sum's gradient is expanded and takes nothing.
    assert MIB <= lb.memory.allocated_peak(run) < 2.1 * MIB
    assert x.grad is not None and x.grad.untyped_storage().nbytes() == MIB


def test_an_error_in_the_call_is_the_callers():
    def run() -> None:
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        lb.memory.allocated_peak(run)
    assert lb.memory.allocated_peak(lambda: some(MIB)) == MIB


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="counted on 'cpu' and 'cuda', got 'meta'"):
        lb.memory.allocated_peak(lambda: None, "meta")


def test_saved_bytes_are_those_of_each_storage_once():
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight.t()  # keeps x, and the weight, which does not count
            return y[:, :8] * y[:, 8:16]  # keeps y once, all of it

    model, x = Product(), torch.ones(16, 32, requires_grad=True)
    assert lb.memory.saved_bytes(lambda: model(x), model) == 4 * (16 * 32 + 16 * 64)
    with torch.no_grad():
        assert lb.memory.saved_bytes(lambda: model(x), model) == 0


def test_saved_bytes_have_the_copies_of_parameters():
    model, x = nn.Linear(32, 64, bias=False), torch.ones(16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert lb.memory.saved_bytes(lambda: model(x), model) == 2 * 16 * 32
        assert lb.memory.saved_bytes(lambda: model(x * x.new_ones(1).requires_grad_()), model) > 2 * (16 + 64) * 32


def test_saved_bytes_have_no_more_than_a_checkpoint_keeps():
    model = nn.Linear(32, 64, bias=False)
    x = torch.ones(16, 32, requires_grad=True)

    def run() -> Tensor:
        return checkpoint(lambda t: F.silu(model(t)), x, use_reentrant=False)

    assert lb.memory.saved_bytes(lambda: F.silu(model(x)), model) == 4 * 16 * (32 + 64)
    assert lb.memory.saved_bytes(run, model) == 4 * 16 * 32
