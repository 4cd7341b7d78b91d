"""A function around a module's forward stays there, and goes without a trace."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.models.wrap import change_class, plain_class, surround, surrounding, unsurround


class Doubled:
    prefix = "Doubled"

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        return 2 * forward(*args, **kwargs)


class Negative(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


@pytest.fixture
def layer() -> nn.Linear:
    made = nn.Linear(4, 4)
    surround(made, Doubled())
    return made


X = torch.randn(3, 4)


def plain(layer: nn.Linear) -> torch.Tensor:
    return nn.functional.linear(X, layer.weight, layer.bias)


def test_the_class_is_a_subclass_and_goes_again(layer):
    assert type(layer).__name__ == "DoubledLinear" and isinstance(layer, nn.Linear)
    assert type(layer).forward is nn.Linear.forward and plain_class(layer) is nn.Linear
    assert torch.equal(layer(X), 2 * plain(layer))
    assert list(inspect.signature(layer.forward).parameters) == ["input"]
    surround(layer, Doubled())
    assert torch.equal(layer(X), 2 * plain(layer)), "what is around is replaced"
    unsurround(layer)
    unsurround(layer)
    assert type(layer) is nn.Linear and surrounding(layer) is None and torch.equal(layer(X), plain(layer))


def test_copies_and_pickles_have_it(layer):
    for twin in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer) and torch.equal(twin(X), layer(X))


def test_it_is_around_the_forward_that_the_module_has_at_the_call(layer):
    before = layer.forward
    layer.forward = lambda x: before(x) + 1  # as accelerate's hooks: the old forward is called inside
    assert torch.equal(layer(X), 2 * (2 * plain(layer) + 1))
    del layer.forward
    assert torch.equal(layer(X), 2 * plain(layer))
    with pytest.raises(AttributeError):
        del layer.forward
    change_class(layer, Negative)
    assert torch.equal(layer(X), -2 * plain(layer)) and plain_class(layer) is Negative


def test_a_class_that_was_made_of_it_since_stays(layer):
    layer.__class__ = type("Sharded", (type(layer),), {})
    assert torch.equal(layer(X), 2 * plain(layer))
    unsurround(layer)
    assert type(layer).__name__ == "Sharded" and torch.equal(layer(X), plain(layer))
    surround(layer, Doubled())
    assert torch.equal(layer(X), 2 * plain(layer))
