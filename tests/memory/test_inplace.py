"""In-place activations: which are safe by torch's own refusals, and models whose bits stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lowbit.memory import inplace_, safe_inplace, saved_bytes
from lowbit.memory.inplace import _ACTIVATIONS


# -- a tensor ----------------------------------------------------------------------------------------------------------
def leaf() -> Tensor:
    return torch.randn(4, 6, requires_grad=True)


class Doubled(torch.autograd.Function):
    """Keeps its result."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


#: What makes a tensor of a leaf, and the word of the reason against it, None where it is safe.
MADE: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {
    "leaf": (lambda x: x, "a leaf that requires gradients"),
    "sum": (lambda x: x + 1, None),
    "linear": (lambda x: F.linear(x, torch.ones(3, 6)), None),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), None),
    "sigmoid": (torch.sigmoid, "keeps it for backward"),
    "softmax": (lambda x: x.softmax(-1), "keeps it for backward"),
    "exp": (torch.exp, "keeps it for backward"),
    "function": (Doubled.apply, "keeps it for backward"),
    "view": (lambda x: (x + 1).view(24), "a view"),
    "expanded": (lambda x: (x + 1)[:, :1].expand(4, 6), "an expanded tensor"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_tensor_is_safe_where_torch_takes_it_and_no_other_tensor_changes(name):
    make, word = MADE[name]
    verdict = safe_inplace(make(leaf()))
    assert bool(verdict) == (word is None) and (word is None or word in str(verdict))
    if name == "view":  # torch takes it, and the base changes
        return
    made = make(leaf())
    try:
        made.mul_(3).sum().backward()
        taken = True
    except RuntimeError:
        taken = False
    assert taken == bool(verdict)


def test_inference_tensors_and_plain_ones():
    with torch.inference_mode():
        made = torch.ones(3)
        assert safe_inplace(made)
    assert "an inference tensor" in str(safe_inplace(made))
    assert str(safe_inplace(torch.ones(3))) == "safe"
    with torch.no_grad():
        assert safe_inplace(leaf())


# -- the table ---------------------------------------------------------------------------------------------------------
class Called(TorchDispatchMode):
    """The names of the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", _ACTIVATIONS, ids=lambda kind: kind.__name__)
def test_the_table_says_what_backward_keeps(kind):
    activation = kind(0.1, 20.0) if kind is nn.Threshold else kind()
    with Called() as called:
        activation(leaf() + 1).sum().backward()
    assert _ACTIVATIONS[kind].backward in called.names
    activation.inplace = True
    y = activation(leaf() + 1)
    kept = [getattr(y.grad_fn, name) for name in dir(y.grad_fn) if name.startswith("_saved_")]
    storages = {t.untyped_storage().data_ptr() for t in kept if isinstance(t, Tensor)}
    assert (y.untyped_storage().data_ptr() in storages) == (_ACTIVATIONS[kind].needs == "output")


# -- a model -----------------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """An activation of each fate, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.lin = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))
        self.first, self.plain, self.normed, self.residual = nn.ReLU(), nn.LeakyReLU(), nn.ReLU(), nn.ReLU()
        self.kept, self.viewed, self.silu, self.unused, self.elu = nn.ReLU(), nn.ReLU(), nn.SiLU(), nn.ReLU(), nn.ELU()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin[0](self.first(x))
        x = self.plain(self.lin[1](x))
        x = self.normed(self.norm(self.lin[2](x)))
        y = self.lin[3](self.drop(x))
        x = y + self.residual(y)
        x = self.kept(self.lin[4](x).sigmoid())
        x = self.viewed(self.lin[5](x).view(2, -1)).view(-1, 8)
        return self.elu(self.lin[6](self.silu(x)))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def test_activations_are_in_place_where_that_is_safe_and_bits_stay():
    model, x = Net(), torch.randn(6, 8)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    report = inplace_(model, x)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and all(p.grad is None for p in model.parameters())
    assert report.converted == ("plain", "normed")
    assert {name for name, m in model.named_modules() if getattr(m, "inplace", False)} == {"plain", "normed"}
    reasons = {
        "first": "a tensor that the model is given",
        "residual": "its input is read again, by add",
        "kept": "the op that made it keeps it for backward",
        "viewed": "a view",
        "silu": "backward needs its input",
        "unused": "not called with this batch",
        "elu": "other bits",
    }
    assert set(report.left) == set(reasons)
    for name, words in reasons.items():
        assert words in report.left[name], (name, report.left[name])
    assert "plain writes over 192 B" in report.notes and "2 layers in place" in str(report)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    given = x.clone()
    for found, expected in zip(step(model, x), step(plain, x), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(x, given)
    # LeakyReLU's output is what the next layer keeps; ReLU keeps its output anyway, and frees its input sooner.
    assert saved_bytes(lambda: plain(x), plain) - saved_bytes(lambda: model(x), model) == 4 * 6 * 8


def test_an_activation_that_is_called_twice_is_safe_in_both_calls_or_in_none():
    class Shared(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.a, self.b, self.act, self.again = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), again

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.act(self.a(x)))
            return self.act(y) + y if self.again else self.act(y)

    assert inplace_(Shared(False), torch.randn(3, 4)).converted == ("act",)
    assert inplace_(Shared(True), torch.randn(3, 4)).left == {"act": "its input is read again, by add"}


def test_use_that_this_batch_does_not_show_in_its_bits_is_seen():
    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.act = nn.Linear(2, 2), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x)
            self.act(y)
            return y  # the same bits where nothing is negative

    model = Positive()
    nn.init.ones_(model.lin.weight)
    assert inplace_(model, torch.ones(1, 2)).converted == ()


def test_what_a_checkpoint_reads_again_stays():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.first, self.mid, self.inside = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda t: self.inside(self.mid(self.first(t))), self.lin(x), use_reentrant=False)

    report = inplace_(Checkpointed(), torch.randn(3, 4))
    assert report.converted == ("inside",) and "first" in report.left


def test_batches_losses_and_what_is_refused():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"y": self.act(self.lin(x)) * scale}

    x = torch.randn(3, 4)
    assert inplace_(Named(), {"x": x, "scale": 2.0}, loss=lambda out, _: out["y"].sum()).converted == ("act",)
    assert inplace_(Named(), (x,)).converted == ("act",)
    with pytest.raises(ValueError, match=r"before torch\.compile, got a compiled one"):
        inplace_(torch.compile(Named()), x)
    with pytest.raises(TypeError, match="a batch is a tensor, a tuple"):
        inplace_(Named(), "text")
