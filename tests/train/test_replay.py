"""Training can be repeated: no bit of losses and gradients depends on the run, on recomputation, or on threads.

Threads: of lowbit's ops, whose inputs are given. Sums of torch's own ops outside of them, as those of a loss over many
elements, may depend on the number of threads, and then all that follows does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.layers import TRAINING, training_layer
from support.stateful import STOCHASTIC_ROWS
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowbit as lb
from lowbit.memory import checkpoint_

RECIPES = pytest.mark.parametrize("recipe", [*TRAINING, STOCHASTIC_ROWS], ids=str)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(40), nn.Linear(40, 72), nn.Linear(72, 40)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def selective(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Keeps the products, and recomputes their operands."""
    kept = op in (torch.ops.lowbit.scaled_mm.default, torch.ops.aten.gelu.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


#: What runs a block.
WAYS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "plain": lambda block, x: block(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, selective)
    ),
    "checkpoint_": lambda block, x: block(x),
}


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks, self.way = nn.ModuleList([Block(), Block()]), way

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = WAYS[self.way](block, x)
        return x


def run(recipe: str | lb.Recipe, way: str) -> list[Tensor]:
    """Losses and gradients of two steps of two micro-batches, which grow, and the weights in the end."""
    torch.manual_seed(0)
    model, seen = Model(way), []
    lb.train.prepare_(model, {"*.up": recipe, "*.down": recipe})  # by name: two blocks are the first and the last
    if way == "checkpoint_":
        checkpoint_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for _ in range(2):
            x = torch.randn(3, 7, 40) * 2**step
            loss = model(x.requires_grad_()).square().mean() / 2
            loss.backward()
            seen += [loss.detach(), x.grad]
        seen += [param.grad for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *model.state_dict().values()]


@pytest.mark.thinned(3)
@RECIPES
def test_runs_and_every_way_of_checkpointing_give_the_same_bits(recipe):
    expected = run(recipe, "plain")
    for way in WAYS:
        assert all(map(same_bits, run(recipe, way), expected)), way


def test_selective_checkpointing_keeps_products():
    """It is not that all is recomputed: the products of the recomputed forward are those that were kept."""
    made = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            made.append(op)
            return op(*args, **(kwargs or {}))

    counts = {}
    for way in ("plain", "not reentrant", "selective"):
        made.clear()
        with Count():
            run("fp8", way)
        counts[way] = [made.count(op.default) for op in (torch.ops.lowbit.scaled_mm, torch.ops.lowbit.quantize)]
    (products, codes), again, kept = counts.values()
    assert again[0] > products and kept[0] == products and kept[1] == again[1] > codes


@pytest.mark.thinned(3)
@RECIPES
def test_no_bit_depends_on_threads(recipe):
    def products(threads: int) -> list[Tensor]:
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        layer = training_layer(390, 260, recipe)
        x, g = torch.randn(130, 390, requires_grad=True), torch.randn(130, 260)
        with torch.no_grad():
            seen = [layer(x[:1])]  # one row has a kernel of its own
        y = layer(x)
        y.backward(g)
        return [*seen, y.detach(), x.grad, layer.weight.grad]

    expected = products(1)
    for threads in (1, 2, 3):
        assert all(map(same_bits, products(threads), expected))
