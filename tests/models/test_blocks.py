"""Which blocks a model repeats, and a chain of them that is run one block at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowbit.memory import checkpoint_
from lowbit.models.blocks import Chain, find_blocks, restored_forwards


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.inner(x) * scale, scale


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.embed(x), torch.tensor(0.5)
        for block in self.blocks:
            x, _ = block(x, scale=scale)
        return self.head(x)


def test_blocks_are_the_largest_list_of_modules_of_one_class():
    model = Model()
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    assert find_blocks(nn.ModuleList([Block()])) == [], "one block is no repetition"
    block = Block()
    assert find_blocks(nn.ModuleList([block, block])) == [block, block]


def test_checkpointing_needs_blocks():
    with pytest.raises(ValueError, match=r"Linear has no ModuleList or Sequential .*pass a list of modules"):
        checkpoint_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got a list that chooses none"):
        checkpoint_(nn.Linear(2, 2), [])
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"a pattern is a string .*got int"):
        checkpoint_(model, [model[0], 0])
    with pytest.raises(ValueError, match="a Linear of the list is no module of the model"):
        checkpoint_(model, [model[0], nn.Linear(2, 2)])
    assert type(model[0]) is nn.Linear


def test_a_chain_gives_each_block_what_the_one_before_returned():
    model, batches = Model(), [torch.randn(3, 4), torch.randn(2, 4)]
    expected = [model(x) for x in batches]
    chain = Chain(model.blocks)
    assert chain.record(model, batches)
    assert [call.kwargs.keys() for call in chain.calls[0]] == [{"scale"}] * 3
    for index in range(3):
        chain.advance(index)
    for number, y in enumerate(expected):
        assert torch.equal(model.head(chain.hidden[number]), y)
        with chain.replayed(number):
            assert torch.equal(model(batches[number]), y)
    assert all("forward" not in vars(block) for block in model.blocks)


def test_blocks_that_are_not_called_in_order_are_no_chain():
    model = Model()
    assert not Chain(list(reversed(model.blocks))).record(model, [torch.randn(3, 4)])


def test_forwards_are_restored_also_where_blocks_have_their_own():
    plain, special = Block(), Block()
    own = special.forward = lambda x: x
    with pytest.raises(KeyError), restored_forwards([plain, special]):
        plain.forward = special.forward = lambda x: -x
        raise KeyError
    assert "forward" not in vars(plain)
    assert vars(special)["forward"] is own
