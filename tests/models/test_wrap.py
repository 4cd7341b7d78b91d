"""Wrappers of a module's forward: their order, what others set around them, and that they go without a trace."""

from __future__ import annotations

import copy
import inspect
import pickle
import weakref
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.models.wrap import (
    Wrapper,
    change_class,
    plain_class,
    replaced_forward,
    unwrap,
    unwrap_all,
    wrap,
    wrapped,
    wrapper_of,
    wrappers,
)


class Doubled(Wrapper):
    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        return 2 * forward(*args, **kwargs)


class Raised(Wrapper):
    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) + 1


class Outer(Wrapper):
    """As a checkpoint."""

    outermost, prefix = True, "Outer"

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) * 10


class Negative(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


def linear(cls: type = nn.Linear) -> nn.Linear:
    """Of whole numbers, whose sums are exact."""
    layer = cls(4, 4)
    for index, param in enumerate(layer.parameters()):
        nn.init.constant_(param, 1 + index)
    return layer


@pytest.fixture
def layer() -> nn.Linear:
    made = linear()
    wrap(made, Doubled())
    return made


X = torch.arange(12.0).view(3, 4)


def plain(layer: nn.Linear) -> torch.Tensor:
    return nn.functional.linear(X, layer.weight, layer.bias)


def plus(module: nn.Module, more: float) -> Any:
    """Sets a forward around the one of the module, as libraries do."""
    module.forward = partial(lambda before, x: before(x) + more, module.forward)
    return module.forward


# -- one wrapper -------------------------------------------------------------------------------------------------------
def test_the_class_keeps_its_name_and_is_the_plain_one_afterwards(layer):
    cls = type(layer)
    assert cls is not nn.Linear and isinstance(layer, nn.Linear) and plain_class(layer) is nn.Linear
    assert (cls.__module__, cls.__qualname__, cls.__name__) == (nn.Linear.__module__, "Linear", "Linear")
    assert cls.forward is nn.Linear.forward and "forward" not in vars(layer)
    assert torch.equal(layer(X), 2 * plain(layer))
    assert list(inspect.signature(layer.forward).parameters) == ["input"]
    unwrap(layer, wrapper_of(layer, Doubled))
    assert type(layer) is nn.Linear and not wrappers(layer) and torch.equal(layer(X), plain(layer))
    assert vars(layer).keys() == vars(linear()).keys()


def test_only_a_prefix_changes_the_name(layer):
    wrap(layer, Outer())
    assert type(layer).__name__ == type(layer).__qualname__ == "OuterLinear" and plain_class(layer) is nn.Linear
    unwrap(layer, wrapper_of(layer, Outer))
    assert type(layer).__name__ == "Linear" and torch.equal(layer(X), 2 * plain(layer))


def test_a_module_with_a_wrapper_is_freed_at_once():
    layer = linear()
    wrap(layer, Doubled())
    reference = weakref.ref(layer.weight)
    layer(X).sum().backward()
    del layer
    assert reference() is None


def test_change_of_class_keeps_wrappers(layer):
    wrap(layer, Raised())
    change_class(layer, Negative)
    assert torch.equal(layer(X), -2 * plain(layer) + 1) and plain_class(layer) is Negative
    unwrap_all(layer, "test", Wrapper)
    assert type(layer) is Negative


def test_change_of_class_drops_a_bound_method_of_the_class_before():
    """accelerate leaves one behind where it removes a hook."""
    for wrapper in (None, Doubled()):
        layer = linear()
        layer.forward = layer.forward
        if wrapper is not None:
            wrap(layer, wrapper)
        assert replaced_forward(layer) is None
        change_class(layer, Negative)
        assert torch.equal(layer(X), -plain(layer) * (1 if wrapper is None else 2))


def test_a_class_that_was_made_of_it_since_stays(layer):
    layer.__class__ = type("Sharded", (type(layer),), {})
    assert torch.equal(layer(X), 2 * plain(layer))
    unwrap(layer, wrapper_of(layer, Doubled))
    assert type(layer).__name__ == "Sharded" and torch.equal(layer(X), plain(layer))
    plus(layer, 5)
    assert torch.equal(layer(X), plain(layer) + 5)
    del layer.forward
    wrap(layer, Doubled())
    assert torch.equal(layer(X), 2 * plain(layer))


def test_a_lazy_module_keeps_its_wrapper_when_it_becomes_a_plain_one():
    layer = nn.LazyLinear(4)
    wrap(layer, Doubled())
    layer(X)
    assert type(layer).__name__ == "Linear" and torch.equal(layer(X), 2 * plain(layer))
    unwrap(layer, wrapper_of(layer, Doubled))
    assert type(layer) is nn.Linear


def test_tables_of_classes_do_not_get_those_of_wrapped_modules():
    table = []

    class Registered(nn.Linear):
        def __init_subclass__(cls) -> None:
            table.append(cls)

    layer = linear(Registered)
    wrap(layer, Doubled())
    assert not table and torch.equal(layer(X), 2 * plain(layer))


# -- several -----------------------------------------------------------------------------------------------------------
def test_later_ones_are_outside_but_for_the_outermost(layer):
    wrap(layer, Outer())
    wrap(layer, Raised())
    assert [type(wrapper) for wrapper in wrappers(layer)] == [Doubled, Raised, Outer]
    assert torch.equal(layer(X), (2 * plain(layer) + 1) * 10)
    assert wrapper_of(layer, Raised) is wrappers(layer)[1] and wrapper_of(linear(), Raised) is None


@pytest.mark.parametrize("gone", [Doubled, Raised, Outer])
def test_any_of_them_can_be_taken_away(layer, gone):
    for wrapper in (Raised(), Outer()):
        wrap(layer, wrapper)
    unwrap(layer, wrapper_of(layer, gone))
    expected = {
        Doubled: lambda y: (y + 1) * 10,
        Raised: lambda y: 2 * y * 10,
        Outer: lambda y: 2 * y + 1,
    }
    assert torch.equal(layer(X), expected[gone](plain(layer)))
    assert type(layer).__name__ == ("Linear" if gone is Outer else "OuterLinear")


def test_those_of_some_classes_go_from_a_whole_model():
    model = nn.Sequential(linear(), nn.Sequential(linear()))
    doubled, raised, outer = Doubled(), Raised(), Outer()
    wrap(model[0], doubled)
    wrap(model[1][0], outer)
    wrap(model[1][0], raised)
    assert unwrap_all(model, "test", Doubled, Outer) == [("0", doubled), ("1.0", outer)]
    assert not wrappers(model[0]) and wrappers(model[1][0]) == (raised,)
    assert unwrap_all(model, "test", Doubled) == []


@pytest.mark.parametrize("twin", [copy.deepcopy, copy.copy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_have_all(layer, twin):
    for wrapper in (Raised(), Outer()):
        wrap(layer, wrapper)
    made = twin(layer)
    assert type(made) is type(layer) and torch.equal(made(X), layer(X))
    unwrap_all(layer, "test", Wrapper)
    assert torch.equal(made(X), (2 * plain(layer) + 1) * 10)


def test_within_a_context_and_no_longer(layer):
    raised = [(layer, Raised()), (layer, Raised())]
    with pytest.raises(KeyError), wrapped(raised):
        assert torch.equal(layer(X), 2 * plain(layer) + 2)
        raise KeyError
    assert torch.equal(layer(X), 2 * plain(layer))
    with wrapped(iter(raised)):
        plus(layer, 5)
        assert torch.equal(layer(X), 2 * plain(layer) + 7)
    assert torch.equal(layer(X), 2 * plain(layer) + 5), "what others set meanwhile stays, and is around the rest"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_they_are_in_one_graph(layer, backend):
    model = nn.Sequential(layer, nn.ReLU())
    wrap(layer, Raised())
    wrap(layer, Outer())
    plus(layer, 5)
    for own in (False, True):
        if own:
            del layer.forward
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(X), model(X))


# -- what others set ---------------------------------------------------------------------------------------------------
def test_a_forward_from_before_is_inside_and_comes_back():
    layer = linear()
    before = plus(layer, 5)
    wrap(layer, Doubled())
    assert torch.equal(layer(X), 2 * (plain(layer) + 5)) and replaced_forward(layer) is before
    unwrap(layer, wrapper_of(layer, Doubled))
    assert vars(layer)["forward"] is layer.forward is before and type(layer) is nn.Linear
    wrap(layer, Doubled())
    del layer.forward
    assert torch.equal(layer(X), 2 * plain(layer)) and replaced_forward(layer) is None


def test_one_that_is_set_later_is_around_the_wrappers(layer):
    since = plus(layer, 5)
    assert layer.forward is since is replaced_forward(layer) and torch.equal(layer(X), 2 * plain(layer) + 5)
    wrap(layer, Raised())
    wrap(layer, Doubled())
    assert torch.equal(layer(X), 2 * (2 * plain(layer) + 6))
    unwrap(layer, wrapper_of(layer, Raised))
    with pytest.raises(ValueError, match="test: the forward of the model has been replaced since; undo that first"):
        unwrap(layer, wrappers(layer)[0], "test")
    with pytest.raises(ValueError, match="test: the forward of 0 has been replaced since; undo that first"):
        unwrap_all(nn.Sequential(layer), "test", Doubled)
    assert torch.equal(layer(X), 2 * (2 * plain(layer) + 5)), "untouched"
    del layer.forward
    assert torch.equal(layer(X), 4 * plain(layer))
    with pytest.raises(AttributeError):
        del layer.forward
    assert len(unwrap_all(layer, "test", Doubled)) == 2 and type(layer) is nn.Linear


def test_one_that_is_set_again_replaces_the_one_before(layer):
    for _ in range(3):
        plus(layer, 5)
    assert torch.equal(layer(X), 2 * plain(layer) + 15)
    layer.forward = lambda x: x
    assert layer(X) is X
    del layer.forward
    assert torch.equal(layer(X), 2 * plain(layer))


def test_one_that_is_set_later_is_inside_of_the_outermost(layer):
    wrap(layer, Outer())
    plus(layer, 5)
    assert torch.equal(layer(X), (2 * plain(layer) + 5) * 10), "the forward that was read has it too"
    plus(layer, 7)
    assert torch.equal(layer(X), (2 * plain(layer) + 12) * 10)
    unwrap(layer, wrapper_of(layer, Outer))
    assert torch.equal(layer(X), 2 * plain(layer) + 12)


def test_a_forward_that_was_read_runs_no_wrapper_that_is_gone(layer):
    before = layer.forward
    assert torch.equal(before(X), layer(X))
    unwrap(layer, wrapper_of(layer, Doubled))
    assert torch.equal(before(X), plain(layer))
    layer.forward = before
    assert torch.equal(layer(X), plain(layer)) and replaced_forward(layer) is None


@pytest.mark.parametrize("outermost", [False, True])
@pytest.mark.parametrize("method", [False, True])
def test_the_forward_from_before_is_set_again(layer, outermost, method):
    """As accelerate removes a hook, and undoes its mixed precision by a method of what was there."""
    if outermost:
        wrap(layer, Outer())
    before, expected = layer.forward, layer(X)
    plus(layer, 7)
    wrap(layer, Raised())
    layer.forward = MethodType(before, layer) if method else before
    assert torch.equal(layer(X), expected + (10 if outermost else 1))
    unwrap(layer, wrapper_of(layer, Raised))
    assert torch.equal(layer(X), expected) and replaced_forward(layer) is None


def test_one_from_before_wrappers_is_set_again():
    layer = linear()
    own = plus(layer, 5)
    wrap(layer, Doubled())
    plus(layer, 7)
    wrap(layer, Outer())
    layer.forward = own
    assert torch.equal(layer(X), 2 * (plain(layer) + 5) * 10) and replaced_forward(layer) is own


def test_hooks_of_accelerate_come_and_go(layer):
    hooks = pytest.importorskip("accelerate.hooks")

    class Plus(hooks.ModelHook):
        def post_forward(self, module, output):
            return output + 5

    wrap(layer, Outer())
    hooks.add_hook_to_module(layer, Plus())
    assert torch.equal(layer(X), (2 * plain(layer) + 5) * 10)
    wrap(layer, Raised())
    hooks.add_hook_to_module(layer, Plus(), append=True)
    assert torch.equal(layer(X), (2 * plain(layer) + 11) * 10)
    hooks.remove_hook_from_module(layer)
    assert torch.equal(layer(X), (2 * plain(layer) + 1) * 10) and replaced_forward(layer) is None
    unwrap_all(layer, "test", Wrapper)
    assert type(layer) is nn.Linear and torch.equal(layer(X), plain(layer))


@pytest.fixture
def accelerate():
    """Without the state of the process that a Trainer has made, or leaves to one."""
    library = pytest.importorskip("accelerate")
    library.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield library
    library.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_mixed_precision_of_accelerate_comes_and_goes(layer, accelerate):
    assert layer.forward == layer.forward
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(layer)
    assert torch.equal(prepared(X), 2 * plain(layer)) and replaced_forward(layer) is not None
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert torch.equal(layer(X), 2 * plain(layer)) and replaced_forward(layer) is None


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_have_what_others_set(layer, twin):
    wrap(layer, Outer())
    layer.forward = partial(added, layer.forward)
    wrap(layer, Raised())
    made = twin(layer)
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(made(X), (2 * plain(made) + 6) * 10), "the copy calls itself"
    del made.forward
    assert torch.equal(made(X), (2 * plain(made) + 1) * 10)


def added(before: Any, x: torch.Tensor) -> torch.Tensor:
    return before(x) + 5
