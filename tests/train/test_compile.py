"""Training under torch.compile: every recipe, in one graph that serves all steps, in the bits of eager."""

from __future__ import annotations

import copy

import pytest
import torch
from support.bits import same_bits
from support.layers import TRAINING
from support.stateful import DELAYED, STOCHASTIC
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import lowbit as lb


class Model(nn.Module):
    """One layer whose backward takes what it saved, one that a checkpoint recomputes, and one that stays float."""

    def __init__(self, recipe: lb.Recipe | str) -> None:
        super().__init__()
        self.up, self.down, self.lm_head = nn.Linear(33, 48), nn.Linear(48, 33, bias=False), nn.Linear(33, 4)
        lb.train.prepare_(self, recipe)

    def second(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(x + checkpoint(self.second, self.up(x), use_reentrant=False))


@pytest.mark.thinned(12)
@pytest.mark.parametrize("recipe", [*TRAINING, STOCHASTIC, DELAYED], ids=str)
def test_one_compilation_serves_all_steps_in_the_bits_of_eager(recipe):
    """Three steps of two micro-batches, which grow, so that delayed scales differ from current ones."""
    counter = CompileCounterWithBackend("aot_eager")

    def trained(compiled: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model, seen = Model(recipe), []
        optimizer, state = torch.optim.SGD(model.parameters(), lr=0.1), lb.train.state(model)
        state.attach(optimizer)

        def forward(x: Tensor) -> Tensor:
            return model(x)

        if compiled:
            forward = torch.compile(forward, backend=counter, fullgraph=True)
        for number in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                x = torch.randn(2, 5, 33) * 2**number
                y = forward(x.requires_grad_())
                y.square().mean().backward()
                seen += [y.detach(), x.grad]
            seen += [p.grad for p in model.parameters()]
            optimizer.step()
        return [*seen, *model.state_dict().values(), *state.state_dict().values()]

    expected, found = trained(False), trained(True)
    assert len(found) == len(expected) and all(map(same_bits, found, expected))
    assert counter.frame_count == 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("recipe", ["fp8", STOCHASTIC, DELAYED], ids=str)
def test_compiled_code_takes_any_number_of_rows(recipe):
    model, counter = nn.Sequential(nn.Linear(17, 5)), CompileCounterWithBackend("aot_eager")
    lb.train.prepare_(model, recipe)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for rows in (5, 6, 9):
        x = torch.randn(rows, 17)
        y, expected = compiled(x), eager(x)
        for one in (y, expected):
            one.square().sum().backward()
        assert same_bits(y.detach(), expected.detach())
        assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
    assert counter.frame_count == 1


def test_frozen_layers_compile_where_nothing_wants_a_gradient():
    model, x = nn.Sequential(nn.Linear(33, 20), nn.Linear(20, 8)), torch.randn(4, 33)
    lb.train.prepare_(model, "fp8", skip=())
    model.requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
