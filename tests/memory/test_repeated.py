"""Results of calls that are like earlier ones are those of torch's own rules."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.memory import estimate
from lowbit.memory.repeated import Repeated, signature, tensors_of


class Through(TorchDispatchMode):
    """Every op of aten is answered by a ``Repeated``; ``rules`` counts those that it asks torch about."""

    def __init__(self):
        super().__init__()
        self.repeated, self.calls, self.rules = Repeated(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        self.calls += 1
        known = self.repeated._known.get(signature(func, args, kwargs))
        self.rules += known is None
        return self.repeated(func, args, kwargs)


def results(x, y, whole):
    """Of views, ops in place, tuples, lists, broadcasts, other dtypes and shapes that depend on values."""
    split = x.split(2)
    kept = x.clone()
    kept[0].add_(y[0])
    return [
        x + y, x.t(), x[1:], x[..., None], x.select(1, 2), *split, *x.unbind(1), x.detach(), kept, kept.view(-1),
        x.expand(3, *x.shape), x.to(torch.bfloat16), x.max(dim=1)[0], x.max(dim=1)[1], x.double() @ y.t().double(),
        torch.empty_strided((3, 4), (1, 3)), x.new_zeros(0, 3), x.index_select(0, whole), x.real, x.reshape(-1)[::2],
        x.as_strided((2, 2), (1, 2), 3), torch.empty(2, 3).resize_(1), torch.tensor(1.5) * x,
        nn.functional.layer_norm(x, (6,)),
        torch.arange(3), torch.arange(3.0), x.sum(), x.float(), torch.ones(3).long(), torch.complex(x, y).conj(),
    ]  # fmt: skip


def traits(tensor):
    """What autograd and the class of fake tensors keep of it."""
    autograd = (tensor.requires_grad, tensor.grad_fn is None, tensor.is_leaf, tensor._is_view())
    return (*autograd, tensor.is_conj(), sorted(vars(tensor)))


def described(tensors):
    return [
        (type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.untyped_storage().nbytes(), traits(t))
        for t in tensors
    ]


def aliased(tensors):
    """For each tensor the first that has its storage."""
    storages = [t.untyped_storage()._cdata for t in tensors]
    return [storages.index(one) for one in storages]


@pytest.mark.parametrize("gradients", [False, True])
def test_repeated_results_are_those_of_torch(gradients):
    with FakeTensorMode():
        given = [torch.randn(4, 6, requires_grad=gradients), torch.randn(4, 6), torch.zeros(2, dtype=torch.long)]
        expected = results(*given)
        with Through() as mode:
            first, again = results(*given), results(*given)
    assert all(type(t) is FakeTensor for t in again)
    assert described(first) == described(again) == described(expected)
    assert aliased([*given, *first]) == aliased([*given, *again]) == aliased([*given, *expected])
    assert mode.rules < 0.7 * mode.calls


def test_strides_and_devices_are_told_apart():
    with FakeTensorMode():
        x, y = torch.randn(4, 6), torch.randn(6, 4).t()
        with Through():
            pairs = [(x * 2, y * 2), (x.view(-1), y.t().view(-1)), (x + 1, x + 1.0), (x.long() * 2, x.long() * 2.0)]
    assert all(a.stride() == (6, 1) and b.stride() == (1, 4) for a, b in pairs[:1])
    assert [a.dtype for pair in pairs[2:] for a in pair] == [torch.float32, torch.float32, torch.int64, torch.float32]


def test_versions_and_gradients_follow():
    with FakeTensorMode(), Through():
        for _ in range(3):
            x = torch.randn(4, 6, requires_grad=True)
            y = x.tanh()
            y.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
            (x * 2).sum().backward()
            assert x.grad.shape == x.shape


def test_tensors_of_finds_those_of_trees():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    pair = torch.return_types.max((a, b))
    assert [len(t) for t in tensors_of([a, (b, None)], {"x": [c]}, pair, 3, "s", slice(1))] == [1, 2, 3, 1, 2]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 12, proj_size=4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_rules_are_not_asked_again_for_each_time_step(monkeypatch):
    asked = []
    dispatch = FakeTensorMode.dispatch

    def noted(self, func, *given, **named):
        asked.append(func)
        return dispatch(self, func, *given, **named)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)

    def count(steps):
        asked.clear()
        ops = len(estimate(Recurrent(), torch.randn(steps, 2, 8), lambda out, _: out.sum(), optimizer=None).ops)
        return ops, len(asked)

    (few_ops, few), (many_ops, many) = count(8), count(24)
    assert many_ops - few_ops > 300
    assert many - few < 0.2 * (many_ops - few_ops)  # a view of each step has an offset of its own
