"""Checkpoints that keep the results of products: which they keep, and what becomes of those that are written into."""

from __future__ import annotations

import copy

import pytest
import torch
from support.bits import same_bits
from support.checkpoints import assert_equal, chain, outcome
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lowbit.checkpointing.frame import NotReplayed
from lowbit.checkpointing.selective import _draws
from lowbit.memory import checkpoint_


def products(model: nn.Module, x: Tensor) -> int:
    """How many products of matrices a step computes."""
    count = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal count
            count += op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return op(*args, **(kwargs or {}))

    with Count():
        model(x).sum().backward()
    return count


def test_kept_products_are_not_computed_again():
    x, counts = torch.randn(8, 16), {}
    for policy in (None, "block", "save_matmuls"):
        model = chain(3)
        if policy:
            checkpoint_(model, policy)
        counts[policy] = products(model, x)
    assert counts[None] == counts["save_matmuls"] < counts["block"]


class Writes(nn.Module):
    """Writes into the results of its products, itself and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.one(x)
        first.mul_(0.5).add_(x)
        second = self.two(first)
        second[:, :8].mul_(2)
        return self.three(second.tanh_()).relu_()


def test_a_product_that_the_module_writes_into_is_kept_as_it_was_computed():
    x, found, counts = torch.randn(8, 16), [], []
    for policy in (None, "save_matmuls"):
        torch.manual_seed(0)
        model = nn.Sequential(Writes(), Writes())
        if policy:
            checkpoint_(model, policy)
        found.append(outcome(model, lambda m: m(x).square().sum()))
        counts.append(products(model, x))
    assert_equal(*found)
    assert counts[0] == counts[1]


class Pair(nn.Module):
    """Returns the result of a product, and something that backward makes of it."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, (2 * y).sin()


@pytest.mark.parametrize("write", [Tensor.neg_, lambda y: y[..., 3:].zero_()], ids=["whole", "view"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8, 16), (2, 4, 16)], ids=str)
def test_a_product_that_is_written_into_after_the_module_returned_it_is_computed_again(write, bias, shape):
    x, found = torch.randn(shape), []
    for policy in ("block", "save_matmuls"):
        torch.manual_seed(0)
        model = nn.Sequential(Pair(bias), Pair(bias))
        checkpoint_(model, policy)
        y, z = model[0](x)
        with torch.no_grad():
            write(y)
        z.sum().backward()
        found.append(model[0].linear.weight.grad)
    assert same_bits(*found)


class Alternates(nn.Module):
    """Computes the same by another op when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        fused, w, b = self.calls == 1, self.linear.weight, self.linear.bias
        return (torch.addmm(b, x, w.t()) if fused else torch.mm(x, w.t()) + b).sin()


def test_a_module_that_computes_by_other_products_in_backward_is_refused():
    model = nn.Sequential(Alternates(), Alternates())
    checkpoint_(model, "save_matmuls")
    message = r"product 1 of a checkpointed module was aten\.addmm\.default in forward and is aten\.mm\.default"
    with pytest.raises(NotReplayed, match=message):
        model(torch.randn(16, 16)).sum().backward()


def test_kept_products_serve_a_graph_that_is_retained():
    x, found = torch.randn(8, 16), []
    for policy in (None, "save_matmuls"):
        model = chain(3)
        if policy:
            checkpoint_(model, policy)
        y = model(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        found.append([p.grad for p in model.parameters()])
    assert_equal(*found)


def test_attention_that_drops_is_not_kept():
    """What comes after it draws from the generator where it leaves it."""
    attention, rows = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, [torch.zeros(1, 1, 2, 16)] * 3
    assert _draws(attention, (*rows, 0.1), {}) and _draws(attention, rows, {"dropout_p": 0.1})
    assert not _draws(attention, rows, {}) and not _draws(attention, (*rows, 0.0, True), {})
    assert not _draws(torch.ops.aten.mm.default, rows[:2], {})


class Unusual(nn.Module):
    """Products into memory that is given, and of sparse matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = torch.empty(16, 16)
            torch.mm(self.linear.weight, self.linear.weight, out=out)
            sparse = torch.eye(16).to_sparse()
            sparse = torch.mm(sparse, sparse).mul_(2)
        return self.linear(x + sparse.to_dense()[0]).sin() @ out


def test_products_of_other_kinds():
    x, found = torch.randn(8, 16), []
    for policy in (None, "save_matmuls"):
        torch.manual_seed(0)
        model = nn.Sequential(Unusual(), Unusual())
        if policy:
            checkpoint_(model, policy)
        found.append(outcome(model, lambda m: m(x).square().sum()))
    assert_equal(*found)


def test_compiled_parts_of_a_block_stay_compiled():
    counter = CompileCounter()
    model, x = chain(2), torch.randn(8, 16)
    want = outcome(copy.deepcopy(model), lambda m: m(x).square().sum())
    checkpoint_(model, "save_matmuls")
    for block in model:
        block.up.compile(backend=counter)
    for got, expected in zip(outcome(model, lambda m: m(x).square().sum()), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert counter.frame_count > 0


def test_gpt_oss_whose_experts_write_into_their_products():
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    plain, ids = transformers.GptOssForCausalLM(config), torch.randint(64, (2, 16))
    model = copy.deepcopy(plain)
    checkpoint_(model, "save_matmuls")
    loss = lambda m: m(input_ids=ids, labels=ids).loss
    assert_equal(outcome(model, loss), outcome(plain, loss))
