"""Hand-written models whose loss is computed without logits, beside the same training with plain logits."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.models.wrap import wrapper_of, wrappers
from lowbit.tiled.fused_head import TiedTable
from lowbit.tiled.head_call import HeadCall, watched_calls
from lowbit.tiled.lazy_logits import LazyLogits, lazy_logits

V, T, B, D = 97, 11, 4, 16
IDS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
IGNORED = TARGETS.masked_fill(torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.3, -100)
WEIGHTS = torch.rand(V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Block(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Words(nn.Module):
    """The transformer of many articles: embedding, positions, blocks, and a last Linear."""

    def __init__(self, vocabulary: int = V, width: int = D, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)


def made(dtype: torch.dtype = torch.float64, **options: Any) -> Words:
    torch.manual_seed(0)
    return Words(**options).to(dtype).train()


def criterion(**options: Any) -> Callable[[Tensor], Tensor]:
    return lambda logits: nn.CrossEntropyLoss(**options)(logits.view(-1, V), IGNORED.view(-1))


def in_parts(logits: Tensor) -> Tensor:
    parts = zip(logits.view(-1, V).split(17), IGNORED.view(-1).split(17), strict=True)
    return torch.stack([F.cross_entropy(part, target, reduction="sum") for part, target in parts]).sum()


#: Losses of logits [B, T, V] that need no logits.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "flattened": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1)),
    "module": criterion(),
    "smoothed": criterion(label_smoothing=0.1),
    "summed": criterion(reduction="sum"),
    "ignoring a class": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1), ignore_index=3),
    "weighted": criterion(weight=WEIGHTS),
    "weighted sum": criterion(weight=WEIGHTS, reduction="sum"),
    "rows": lambda x: (criterion(reduction="none")(x) * torch.linspace(0, 1, B * T)).mean(),
    "weighted rows": lambda x: criterion(reduction="none", weight=WEIGHTS)(x).square().mean(),
    "shifted": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, V), IDS[:, 1:].reshape(-1)),
    "shifted and contiguous": lambda x: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, V), IDS[..., 1:].contiguous().view(-1)
    ),
    "transposed": lambda x: F.cross_entropy(x.transpose(1, 2), IGNORED),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), IGNORED, reduction="none").mean(),
    "moved": lambda x: F.cross_entropy(x.movedim(-1, 1)[:, :, 2:], IGNORED[:, 2:]),
    "mT": lambda x: F.cross_entropy(x.mT, IGNORED),
    "flatten and to": lambda x: F.cross_entropy(x.flatten(0, 1).to(x.dtype), TARGETS.flatten()),
    "last token": lambda x: F.cross_entropy(x[:, -1], TARGETS[:, -1]),
    "last token kept": lambda x: F.cross_entropy(x[:, -1:, :].squeeze(1), TARGETS[:, -1]),
    "masked": lambda x: F.cross_entropy(x[IGNORED != -100], IGNORED[IGNORED != -100]),
    "some tokens": lambda x: F.cross_entropy(x[torch.arange(B), torch.tensor([1, 5, 5, 2])], TARGETS[:, 0]),
    "every other": lambda x: F.cross_entropy(x[::2, 1::3].reshape(-1, V), TARGETS[::2, 1::3].reshape(-1)),
    "in parts": in_parts,
    "row by row": lambda x: torch.stack(list(map(F.cross_entropy, x.unbind(), TARGETS))).sum(),
    "one token": lambda x: F.cross_entropy(x[0, 0], TARGETS[0, 0]),
    "twice": lambda x: F.cross_entropy(x[:, 1], TARGETS[:, 1]) + 0.5 * F.cross_entropy(x[:, 2], TARGETS[:, 2]),
    "images": lambda x: F.cross_entropy(x.unflatten(1, (1, T)).movedim(-1, 1), TARGETS[:, None]),
    "accuracy": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1)) + (x.argmax(-1) == TARGETS).double().mean(),
    "clone": lambda x: F.cross_entropy(x.clone().view(-1, V), TARGETS.view(-1)),
    "batch of one": lambda x: F.cross_entropy(x[:1].transpose(1, 2), TARGETS[:1]),
    "no rows": lambda x: F.cross_entropy(x[:0].reshape(-1, V), TARGETS[:0].reshape(-1), reduction="sum"),
}  # fmt: skip


def written(x: Tensor) -> Tensor:
    x[..., 5:] = -30.0
    return F.cross_entropy(x.view(-1, V), TARGETS.view(-1))


def scaled_view(x: Tensor) -> Tensor:
    rows = x[:, :-1].view(B, T - 1, V)
    x.mul_(0.5)
    return F.cross_entropy(rows.transpose(1, 2), TARGETS[:, 1:])


def copy_before_write(x: Tensor) -> Tensor:
    rows = x[:, :-1].reshape(-1, V)
    x.mul_(0.5)
    return F.cross_entropy(rows, TARGETS[:, 1:].reshape(-1)) + x.square().mean()


def written_copy(x: Tensor) -> Tensor:
    rows = x[:, :-1].reshape(-1, V)
    rows[:, 3] = 2.0
    return F.cross_entropy(rows, TARGETS[:, 1:].reshape(-1)) + x.square().mean()


class Doubled(torch.autograd.Function):
    """A loss of another library, which autograd passes tensors without asking their class."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (2 * x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * torch.ones(B, T, V, dtype=grad.dtype)


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 3 * grad)
    return F.cross_entropy(x.view(-1, V), TARGETS.view(-1))


#: Losses that read logits.
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda x: F.nll_loss(x.log_softmax(-1).view(-1, V), TARGETS.view(-1)),
    "scaled": lambda x: F.cross_entropy((x / 0.7).view(-1, V), TARGETS.view(-1)),
    "capped": lambda x: F.cross_entropy((3 * torch.tanh(x / 3)).view(-1, V), TARGETS.view(-1)),
    "both": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1)) + 1e-2 * x.logsumexp(-1).square().mean(),
    "before": lambda x: 1e-2 * x.logsumexp(-1).square().mean() + F.cross_entropy(x.view(-1, V), TARGETS.view(-1)),
    "soft targets": lambda x: F.cross_entropy(x.view(-1, V), torch.full((B * T, V), 1 / V, dtype=x.dtype)),
    "weighted and smoothed": criterion(weight=WEIGHTS, label_smoothing=0.1),
    "part of the classes": lambda x: F.cross_entropy(x[..., :50].flatten(0, 1), TARGETS.flatten() % 50),
    "classes as rows": lambda x: F.cross_entropy(x.mT.reshape(-1, T), torch.zeros(B * V, dtype=torch.long)),
    "squares": lambda x: x.square().mean(),
    "joined": lambda x: F.cross_entropy(torch.cat([x[:, 0], x[:, 1]]), TARGETS[:, :2].T.reshape(-1)),
    "written": written,
    "written below a view": scaled_view,
    "copied before a write": copy_before_write,
    "written copy": written_copy,
    "autograd function": Doubled.apply,
    "hooked": hooked,
    "detached": lambda x: x.mean() + (x.detach() * x).mean(),
    "through numpy": lambda x: x.mean() * float(x.detach().numpy().mean()),
}  # fmt: skip


def trained(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    value = loss(model(IDS))
    value.backward()
    return value.detach(), {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_close(found: Any, expected: Any, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tied", [False, True], ids=["own weight", "tied"])
def test_losses_and_gradients_are_those_of_logits_which_are_not_computed(name, tied):
    model = made(tied=tied, bias=not tied)
    expected = trained(model, LOSSES[name])
    lb.memory.fuse_loss_(model, head="head")
    with watched_calls() as calls:
        assert_close(trained(model, LOSSES[name]), expected)
    assert [(call.fused, call.reader) for call in calls] == [(True, None)]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore:memory.fuse_loss_")
def test_any_other_operation_computes_the_logits(name):
    model = made()
    expected = trained(model, READERS[name])
    lb.memory.fuse_loss_(model, head="head")
    with watched_calls() as calls:
        assert_close(trained(model, READERS[name]), expected, 1e-12)
    assert calls[0].reader is not None


def halving(forward: Callable[[Any, Tensor], Tensor], dropped: int = 0) -> Callable[[Tensor], Tensor]:
    """An autograd function with this forward, which drops tokens from the end. It halves gradients."""

    class Halving(torch.autograd.Function):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 0.5 * F.pad(grad, (0, 0, 0, dropped))

    Halving.forward = staticmethod(forward)
    return Halving.apply


def in_place(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    x.mul_(2.0)
    return x


def saving(ctx: Any, x: Tensor) -> Tensor:
    result = x.clone()
    ctx.save_for_backward(x, result)
    return result


#: Autograd functions that halve gradients, by the result of their forward.
HALVING = {
    "itself": halving(lambda ctx, x: x),
    "a clone": halving(lambda ctx, x: x.clone()),
    "a view": halving(lambda ctx, x: x.view_as(x)),
    "a view of the same shape": halving(lambda ctx, x: x.view(x.shape)),
    "a part": halving(lambda ctx, x: x[:, :-1], 1),
    "a copy": halving(lambda ctx, x: x[:, :-1].contiguous(), 1),
    "detached": halving(lambda ctx, x: x.detach()),
    "written to": halving(in_place),
    "saved": halving(saving),
}


def rows_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.reshape(-1, V), TARGETS[:, : x.shape[1]].reshape(-1)


#: Losses of the results of such functions.
AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "cross-entropy": lambda x: F.cross_entropy(*rows_of(x)),
    "by keyword": lambda x: F.cross_entropy(input=x.transpose(1, 2), target=TARGETS[:, : x.shape[1]]),
    "twice": lambda x: F.cross_entropy(*rows_of(x)) + F.cross_entropy(x[:, 2], TARGETS[:, 2]),
    "again": lambda x: F.cross_entropy(*rows_of(HALVING["a clone"](x))),
    "squares": lambda x: x.square().mean() + x.argmax(-1).double().mean() + x.detach().mean(),
    "below autograd": lambda x: Doubled.apply(F.pad(x, (0, 0, 0, T - x.shape[1]))),
}


@pytest.mark.parametrize("result", HALVING)
@pytest.mark.filterwarnings("ignore:memory.fuse_loss_")
def test_autograd_functions_that_return_logits_keep_their_backward(result):
    model = made()
    fused = copy.deepcopy(model)
    lb.memory.fuse_loss_(fused, head="head")
    for after in AFTER.values():

        def loss(x, after=after):
            return after(HALVING[result](x.clone() if result == "written to" else x))

        with watched_calls() as calls:
            found = trained(fused, loss)
        assert_close(found, trained(model, loss), 1e-12)
        assert calls[0].reader is not None and not calls[0].fused


def test_logits_beside_a_function_stay_fused_and_its_reader_is_named():
    model = made()
    lb.memory.fuse_loss_(model, head="head")
    logits = model(IDS)
    halved = HALVING["a clone"](logits)
    with pytest.warns(UserWarning, match="HalvingBackward reads the logits of 'head' before"):
        found = torch.autograd.grad(AFTER["cross-entropy"](halved), model.head.bias)[0]
    whole = model(IDS)
    expected = torch.autograd.grad(AFTER["cross-entropy"](whole), model.head.bias)[0]
    torch.testing.assert_close(2 * found, expected, rtol=1e-12, atol=1e-12)
    halved.add_(1.0)
    with watched_calls() as calls:
        logits = model(IDS)
        HALVING["a clone"](logits)
        AFTER["cross-entropy"](logits)
    torch.testing.assert_close(halved, whole + 1.0)
    assert calls[0].fused and calls[0].reader is None


@st.composite
def views(draw: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Views and copies of logits, some of which do not fit their shape."""
    axis = st.integers(-3, 3)
    bound = st.one_of(st.none(), st.integers(-4, 4))
    part = st.builds(slice, bound, bound, st.sampled_from([None, 1, 2]))
    shapes = st.sampled_from([(-1, 7), (6, 7), (2, 3, 7), (3, 2, 7), (7, -1), (2, 7, -1)])
    others = st.sampled_from([(Ellipsis, 0), (None, 0), (0, Ellipsis), [1, 0, 0], torch.tensor([0, 1, 1])])
    step = st.one_of(
        st.tuples(st.just("transpose"), st.tuples(axis, axis)),
        st.tuples(st.just("movedim"), st.tuples(axis, axis)),
        st.tuples(st.just("unsqueeze"), st.tuples(axis)),
        st.tuples(st.just("squeeze"), st.tuples(axis)),
        st.tuples(st.just("select"), st.tuples(axis, st.integers(-2, 1))),
        st.tuples(st.just("flatten"), st.tuples(axis, axis)),
        st.tuples(st.sampled_from(["view", "reshape"]), shapes),
        st.tuples(st.just("contiguous"), st.just(())),
        st.tuples(st.just("clone"), st.just(())),
        st.tuples(st.just("__getitem__"), st.tuples(st.tuples(part, part))),
        st.tuples(st.just("__getitem__"), st.tuples(others)),
        st.tuples(st.just("mul_"), st.just((0.5,))),
        st.tuples(st.just("add"), st.just((1.0,))),
        st.tuples(st.just("detach"), st.just(())),
    )  # fmt: skip
    return draw(st.lists(step, max_size=5))


def outcome(logits: Tensor, steps: list[tuple[str, tuple[Any, ...]]], leaves: list[Tensor]) -> Any:
    """The shape, strides and loss after each step, and the gradients of all, or the kind of error."""
    seen, total = [logits], torch.zeros((), dtype=torch.float64)
    try:
        for name, arguments in steps:
            seen.append(getattr(seen[-1], name)(*arguments))
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return type(error)
    facts = [(tuple(x.shape), x.stride(), x.dtype, x.requires_grad, x.is_contiguous()) for x in seen]
    for x in seen:
        axis = min(1, x.dim() - 1)
        if x.dim() and x.shape[axis] and x.numel():
            shape = [*x.shape[:axis], *x.shape[axis + 1 :]]
            targets = (torch.arange(x.numel() // x.shape[axis]) % x.shape[axis]).view(shape)
            total = total + F.cross_entropy(x, targets, reduction="sum")
    gradients = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else []
    return facts, total.detach(), gradients


@given(views())
def test_chains_of_views_are_those_of_plain_logits(steps):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 5), (7, 5), (7,)
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    hidden, weight, bias = leaves
    expected = outcome(F.linear(*leaves), steps, leaves)
    found = outcome(lazy_logits(HeadCall(weight, bias, hidden.dtype), hidden), steps, leaves)
    if isinstance(expected, type):
        assert found is expected
        return
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-10, atol=1e-10)


def test_reading_before_the_loss_warns_once_and_after_it_never():
    model = made()
    lb.memory.fuse_loss_(model, head="head")
    logits = model(IDS)
    with pytest.warns(UserWarning, match=r"softmax reads the logits of 'head' .*unfuse_loss_\(model\)"):
        logits.softmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS).softmax(-1)
        LOSSES["flattened"](logits)
        model = made()
        lb.memory.fuse_loss_(model, head="head")
        logits = model(IDS)
        LOSSES["flattened"](logits).backward()
        assert logits.topk(2).values.shape == (B, T, 2) and "tensor(" in repr(logits)


def test_without_gradients_and_in_evaluation_logits_are_plain():
    model = made()
    expected = model(IDS)
    lb.memory.fuse_loss_(model, head="head")
    for logits in (model.eval()(IDS), torch.no_grad()(model.train())(IDS)):
        assert type(logits) is Tensor and torch.equal(logits, expected)
    assert type(model(IDS)) is LazyLogits and torch.is_tensor(model(IDS))
    with torch.inference_mode():
        assert torch.equal(model(IDS), expected)
    with pytest.warns(UserWarning):
        assert torch.equal(model(IDS) + 0, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_losses_inside_the_forward(tied):
    model = made(tied=tied)
    _, plain = model(IDS, IGNORED)
    plain.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    lb.memory.fuse_loss_(model, head=model.head)
    model.zero_grad()
    with watched_calls() as calls:
        _, loss = model(IDS, IGNORED)
    loss.backward()
    assert calls[0].fused and calls[0].reader is None
    assert_close((loss.detach(), {n: p.grad for n, p in model.named_parameters()}), (plain.detach(), expected))


def cosine(a: Tensor, b: Tensor) -> float:
    return F.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


def autocast(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Any:
    def run(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids)

    model.zero_grad()
    value = loss(run(IDS))
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def autocast_around_the_loss(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Any:
    def inside(logits: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(logits)

    with torch.autocast("cpu", torch.bfloat16):
        return autocast(model, inside)


def mixed(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Any:
    copied = copy.deepcopy(model)
    lb.train.mixed_(copied, "bf16")
    return trained(copied, loss)


def working_copies(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Any:
    copied = copy.deepcopy(model)
    lb.train.mixed_(copied, "bf16", working_copies=True)
    return trained(copied, loss)


def in_bf16(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Any:
    return trained(copy.deepcopy(model).bfloat16(), loss)


def in_bf16_cast(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Any:
    return in_bf16(model, lambda logits: loss(logits.float()))


PRECISIONS = [autocast, autocast_around_the_loss, mixed, working_copies, in_bf16, in_bf16_cast]


@pytest.mark.parametrize("run", PRECISIONS)
@pytest.mark.parametrize("tied", [False, True], ids=["own weight", "tied"])
@pytest.mark.filterwarnings("ignore:train.mixed_")
def test_low_precision_has_the_dtypes_and_values_of_logits(run, tied):
    model = made(torch.float32, tied=tied)
    expected = run(model, LOSSES["flattened"])
    lb.memory.fuse_loss_(model, head="head")
    with watched_calls() as calls:
        found = run(model, LOSSES["flattened"])
    assert all(call.fused and call.reader is None for call in calls) and calls
    assert found[0].dtype == expected[0].dtype
    torch.testing.assert_close(found[0], expected[0], rtol=2**-7 if found[0].dtype == torch.bfloat16 else 2e-3, atol=0)
    for name, gradient in expected[1].items():
        assert found[1][name].dtype == gradient.dtype and cosine(found[1][name], gradient) > 0.995, name


def test_the_mixed_wrapper_may_come_first():
    model = made(torch.float32)
    lb.train.mixed_(model, "bf16")
    expected = trained(model, LOSSES["shifted"])
    lb.memory.fuse_loss_(model, head="head")
    with watched_calls() as calls:
        found = trained(model, LOSSES["shifted"])
    assert calls[0].fused and calls[0].reader is None
    assert_close(found, expected, 1e-2)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda m: lb.memory.checkpoint_(m, "block"),
        lambda m: lb.memory.checkpoint_(m, [m.blocks[1], m.head]),
        lambda m: lb.memory.attention_(m),
        lambda m: m.register_full_backward_hook(lambda module, given, grad: None),
        lambda m: m.head.register_forward_hook(lambda module, args, output: None),
        lambda m: torch.nn.utils.parametrizations.weight_norm(m.head),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_techniques_and_hooks_change_nothing(prepare):
    model = made()
    prepare(model)
    expected = trained(model, LOSSES["flattened"])
    lb.memory.fuse_loss_(model, head="head")
    assert_close(trained(model, LOSSES["flattened"]), expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_around_the_model_or_with_the_loss(reentrant, tied):
    model, one = made(tied=tied), torch.ones((), requires_grad=True, dtype=torch.float64)

    def with_loss(module):
        return lambda ids: checkpoint(lambda one: one * LOSSES["shifted"](module(ids)), one, use_reentrant=reentrant)

    def step(module):
        module.zero_grad()
        value = with_loss(module)(IDS)
        value.backward()
        return value.detach(), {name: p.grad.clone() for name, p in module.named_parameters()}

    expected = step(model)
    lb.memory.fuse_loss_(model, head="head")
    assert_close(step(model), expected)
    if not reentrant:
        model.zero_grad()
        value = LOSSES["shifted"](checkpoint(model, IDS, use_reentrant=False))
        value.backward()
        assert_close((value.detach(), {n: p.grad for n, p in model.named_parameters()}), expected)


def test_micro_batches_and_accumulated_gradients_add_up():
    model = made(tied=True)

    def step(module):
        module.zero_grad()
        for (ids, targets), weight in lb.memory.micro_batches((IDS, TARGETS), 2):
            (F.cross_entropy(module(ids).view(-1, V), targets.view(-1)) * weight).backward()
        return torch.zeros(()), {name: p.grad.clone() for name, p in module.named_parameters()}

    expected = trained(model, LOSSES["flattened"])[1]
    lb.memory.fuse_loss_(model, head="head")
    assert_close(step(model), (torch.zeros(()), expected))


def test_a_tied_embedding_shares_its_gradient_bit_by_bit():
    model = made(torch.float32, tied=True)
    lb.memory.fuse_loss_(model, head="head")
    assert wrapper_of(model.embedding, TiedTable) and not wrapper_of(model.positions, TiedTable)
    separate = copy.deepcopy(model)
    lb.memory.unfuse_loss_(separate)
    separate.embedding.weight = nn.Parameter(separate.embedding.weight.detach().clone())
    lb.memory.fuse_loss_(separate, head="head")
    found, apart = trained(model, LOSSES["flattened"])[1], trained(separate, LOSSES["flattened"])[1]
    assert torch.equal(found["embedding.weight"], apart["head.weight"] + apart["embedding.weight"])


def test_frozen_heads_and_inputs():
    for freeze in (lambda m: m.head.requires_grad_(False), lambda m: m.blocks.requires_grad_(False)):
        model = made()
        freeze(model)
        expected = trained(model, LOSSES["flattened"])
        lb.memory.fuse_loss_(model, head="head")
        assert_close(trained(model, LOSSES["flattened"]), expected)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean((2, 3)))


def test_classifiers_of_images_and_unbatched_inputs():
    torch.manual_seed(0)
    model, images, labels = Net().double(), torch.randn(6, 3, 9, 9, dtype=torch.float64), torch.arange(6) * 100
    plain = F.cross_entropy(model(images), labels, label_smoothing=0.1)
    expected = torch.autograd.grad(plain, list(model.parameters()))
    lb.memory.fuse_loss_(model, head="fc", batch=(images,), loss=lambda x, batch: F.cross_entropy(x, labels))
    loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), expected)
    linear = nn.Linear(5, 9)
    lb.memory.fuse_loss_(linear, head="")
    row = torch.randn(5)
    torch.testing.assert_close(
        F.cross_entropy(linear(row), torch.tensor(3)),
        F.cross_entropy(F.linear(row, linear.weight, linear.bias), torch.tensor(3)),
    )


@pytest.mark.slow
def test_a_step_allocates_no_logits():
    model = made(torch.float32, vocabulary=3000)
    logits = B * T * 8 * 3000 * 4
    ids = IDS.repeat(8, 1)

    def loss(output, batch):
        return F.cross_entropy(output.view(-1, 3000).float(), batch.view(-1))

    def peak(module):
        return lb.memory.allocated_peak(lambda: loss(module(ids), ids).backward())

    plain, estimated = peak(model), lb.estimate(model, ids, loss)
    model.zero_grad()
    report = lb.memory.fuse_loss_(model, head="head", batch=ids, loss=loss)
    fused, less = peak(model), lb.estimate(model, ids, loss)
    assert plain - fused > 1.5 * logits and estimated.peak_bytes - less.peak_bytes > 1.5 * logits
    weights = sum(p.nbytes for p in model.parameters())
    assert lb.estimate(model, ids, loss, optimizer=None).peak_bytes - weights == pytest.approx(fused, rel=0.03)
    assert report.peak_before - report.peak_after > 1.5 * logits
    model.zero_grad()
    profiled = lb.memory.profile(model)
    with profiled as p:
        loss(model(ids), ids).backward()
    assert p.peak_bytes - p.by_kind.get("other", 0) - weights == pytest.approx(fused, rel=0.03)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_data_parallel_training_has_the_same_gradients(options, tied, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = made(tied=tied)
        expected = trained(model, LOSSES["flattened"])
        lb.memory.fuse_loss_(model, head="head")
        parallel = nn.parallel.DistributedDataParallel(model, **options)

        def doubled(state, bucket):
            """A reduction that shows in the gradients."""
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(2 * bucket.buffer())
            return done

        parallel.register_comm_hook(None, doubled)
        for _ in range(3):
            value, found = trained(parallel, LOSSES["flattened"])
            found = {name: 0.5 * gradient for name, gradient in found.items()}
            assert_close((value, {name.removeprefix("module."): g for name, g in found.items()}), expected)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.filterwarnings("ignore")
def test_sharded_training(strategy, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = made(torch.float32)
        expected = trained(model, LOSSES["shifted"])
        model.zero_grad()
        lb.memory.fuse_loss_(model, head="head")
        sharded, _ = lb.distributed.shard_(model, lb.optim.AdamW(model.parameters()), strategy)
        if strategy != "zero1":
            with pytest.raises(RuntimeError, match=r"cannot be combined with fully_shard.*unfuse_loss_\(model\)"):
                trained(sharded, LOSSES["shifted"])
            return
        with watched_calls() as calls:
            value, found = trained(sharded, LOSSES["shifted"])
    finally:
        torch.distributed.destroy_process_group()
    assert calls[0].fused
    assert_close((value, {key.removeprefix("module."): gradient for key, gradient in found.items()}), expected, 1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore:memory.fuse_loss_")
def test_replicated_training_reduces_gradients_without_logits(tied, tmp_path):
    def both_forwards_first(model):
        model.zero_grad()
        losses = [LOSSES[name](model(IDS)) for name in ("shifted", "last token")]
        for loss in losses:
            loss.backward()

    def both_outputs(model):
        model.zero_grad()
        logits, loss = model(IDS, IGNORED)
        (loss + LOSSES["last token"](logits)).backward()

    def aside(model):
        """The inner module's backward does not reduce gradients, even if a forward of the outer one has preceded."""
        model.zero_grad()
        loss = LOSSES["shifted"](model(IDS))
        LOSSES["last token"](getattr(model, "module", model)(IDS)).backward()
        assert not any(isinstance(p.grad, DTensor) for p in model.parameters())
        loss.backward()

    def read(model):
        trained(model, READERS["written below a view"])

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = made(tied=tied)
        runs, expected = (both_forwards_first, both_outputs, aside, read), []
        for run in runs:
            run(model)
            expected.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        lb.memory.fuse_loss_(model, head="head")
        sharded, _ = lb.distributed.shard_(model, torch.optim.SGD(model.parameters()), "zero2-replicated")
        for run, gradients in zip(runs, expected, strict=True):
            with watched_calls() as calls:
                run(sharded)
            assert run is read or all(call.fused and call.reader is None for call in calls)
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                assert isinstance(p.grad, DTensor)
                torch.testing.assert_close(p.grad.to_local(), gradient, rtol=1e-11, atol=1e-11)
    finally:
        torch.distributed.destroy_process_group()


def test_copies_pickles_states_and_the_way_back():
    model = made(tied=True)
    expected, state = trained(model, LOSSES["flattened"]), list(model.state_dict())
    report = lb.memory.fuse_loss_(model, head="head")
    assert [layer.name for layer in report.layers] == ["head"] and list(model.state_dict()) == state
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with watched_calls() as calls:
            assert_close(trained(copied, LOSSES["flattened"]), expected)
        assert calls[0].fused
    logits = model(IDS)
    with pytest.warns(UserWarning):
        assert torch.equal(pickle.loads(pickle.dumps(logits)), logits)
    with pytest.raises(ValueError, match="fused already"):
        lb.memory.fuse_loss_(model, head="head")
    assert [layer.name for layer in lb.memory.unfuse_loss_(model).layers] == ["head"]
    assert not any(wrappers(module) for module in model.modules())
    assert_close(trained(model, LOSSES["flattened"]), expected, 0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"head": "output"}, "expected head= to be a module of Words or its path, got 'output'; its last Linear"),
        ({"head": nn.Linear(2, 2)}, "expected head= to be a module of Words"),
        ({"head": "embedding"}, r"expected head= to be an nn.Linear, got 'embedding', a torch\S+Embedding"),
        (
            {"head": "head", "batch": IDS, "loss": lambda x, b: x.square().mean()},
            "square reads its output",
        ),
        ({"head": "blocks.0.mlp.0", "batch": IDS}, "gelu reads its output"),
        ({"head": "head", "batch": IDS, "loss": lambda x, b: x.no()}, "the model or its loss fails for this batch"),
    ],
)
def test_layers_without_a_cross_entropy_are_refused(options, why):
    model = made()
    with pytest.raises(ValueError, match=why):
        lb.memory.fuse_loss_(model, **options)
    assert not any(wrappers(module) for module in model.modules())


def test_a_layer_that_is_converted_later_warns_and_is_not_fused():
    model = made(torch.float32)
    lb.memory.fuse_loss_(model, head="head")
    lb.train.prepare_(model, {"head": "fp8"})
    with pytest.warns(UserWarning, match=r"the last layer 'head' has become a lowbit\S+TrainLinear"):
        trained(model, LOSSES["flattened"])
    with pytest.raises(ValueError, match=r"expected head= to be an nn.Linear, got 'head', a lowbit\S+TrainLinear"):
        lb.memory.fuse_loss_(lb.memory.unfuse_loss_(model) and model, head="head")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_models_and_steps_compute_plain_logits():
    model = made(torch.float32)
    expected = trained(model, LOSSES["flattened"])
    lb.memory.fuse_loss_(model, head="head")
    torch.testing.assert_close(trained(torch.compile(model), LOSSES["flattened"])[0], expected[0], rtol=1e-5, atol=0)
    step = torch.compile(lambda ids: LOSSES["flattened"](model(ids)))
    torch.testing.assert_close(step(IDS).detach(), expected[0], rtol=1e-5, atol=0)
    loss = torch.compile(LOSSES["flattened"])
    assert_close(trained(model, loss), expected, 1e-5)
