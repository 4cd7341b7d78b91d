"""Checkpointed blocks: the same bits, and less that is kept."""

import copy

import pytest
import torch
from support.runs import TINY
from support.variants import best, serving
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT
from lowbit.memory import checkpoint_
from lowbit.models import find_blocks

pytestmark = pytest.mark.filterwarnings("ignore:train.mixed_. this processor")


# -- checkpointing of blocks -------------------------------------------------------------------------------------------
class Noisy(nn.Module):
    """A block with dropout, so that recomputing needs the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.line(x)))


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Gradients, and the bytes that autograd kept for backward."""
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    model.zero_grad()
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    size = sum(kept.values())
    loss.backward()
    return [p.grad.clone() for p in model.parameters()], size


@pytest.mark.parametrize("kind", ["gpt", "sequential"])
def test_checkpointed_gradients_have_the_same_bits_and_keep_less(corpus, kind):
    if kind == "gpt":
        plain, x = GPT(TINY), corpus.batch(0, 2, 32, seed=0)[0]
    else:
        torch.manual_seed(1)
        plain, x = nn.Sequential(*(Noisy() for _ in range(4))), torch.randn(16, 8)
    again = copy.deepcopy(plain)
    names = list(again.state_dict())
    first, second = checkpoint_(again), checkpoint_(again)
    assert len(first.layers) == len(find_blocks(plain)) and first == second
    assert list(again.state_dict()) == names
    (expected, whole), (got, less) = gradients(plain, x), gradients(again, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert less < whole


def test_checkpointed_models_can_be_copied(corpus):
    model = GPT(TINY)
    checkpoint_(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].mlp.down.weight.fill_(0.0)
    x = corpus.batch(0, 1, 32, seed=0)[0]
    assert not torch.equal(model(x), twin(x)), "the copy must run its own weights"


@pytest.mark.parametrize(("forward", "backward"), [("reference", None), (None, "reference")])
def test_blocks_are_recomputed_on_the_backend_of_their_forward(forward, backward):
    model = nn.Sequential(*(lb.train.TrainLinear(8, 8) for _ in range(2)))
    checkpoint_(model)
    with lb.use_backend(forward):
        loss = model(torch.randn(4, 8)).sum()
    with lb.use_backend(backward), serving() as served:
        loss.backward()
    assert {"quantize", "scaled_mm"} <= set(served)
    assert served == (dict.fromkeys(served, forward) if forward else best(served))


def test_a_model_without_blocks_is_a_clear_error():
    with pytest.raises(ValueError, match="pass a list of modules"):
        checkpoint_(nn.Linear(2, 2))
