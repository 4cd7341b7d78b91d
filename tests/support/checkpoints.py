"""What tests of checkpoints compare, and a chain of blocks that keep much."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.bits import same_bits
from torch import Tensor, nn


def outcome(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor | None]:
    """The loss, the gradients, and the buffers afterwards."""
    torch.manual_seed(7)
    value = loss(model)
    value.backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [value.detach(), *grads, *(buffer.clone() for buffer in model.buffers())]


def assert_equal(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None and b is None) or (a is not None and b is not None and same_bits(a, b)), index


class Wide(nn.Module):
    """A block that keeps much more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)).sin())


def chain(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Wide() for _ in range(blocks)))
