"""Weights of rows by the gradient of the loss: against autograd in float64, and what guided-gptq makes of them."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.calibrate.importance import weigh
from lowbit.calibrate.recording import observed, observed_layers
from lowbit.calibrate.statistics import Statistics
from lowbit.models.wrap import wrappers
from lowbit.recipes import layer_recipes

RECIPE = "int4-weight-only:group32"


class Model(nn.Module):
    """Tokens that look at one another; ``shared`` is called twice, and ``idle`` not at all."""

    def __init__(self, width: int = 32, words: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.first, self.shared, self.idle = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.embed(tokens)))
        x = self.shared(x + x.mean(1, keepdim=True))
        return self.out(torch.tanh(self.shared(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x + x.cumsum(1) / x.shape[1])))


class Stack(nn.Module):
    """Blocks, which are checkpointed."""

    def __init__(self, width: int = 32, words: int = 16) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(words, width), nn.ModuleList(Block(width) for _ in range(3))
        self.out = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(16, (2, length), generator=generator) for length in (9, 12)]


def expected(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, list[list[Tensor]]]:
    """What autograd says in float64, layer by layer, batch by batch, call by call, with a mean of 1."""
    model = copy.deepcopy(model).double()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    found: dict[str, list[list[Tensor]]] = {name: [] for name in layers}
    for batch in batches():
        outputs: dict[str, list[Tensor]] = {name: [] for name in layers}
        handles = [
            layer.register_forward_hook(lambda m, a, y, of=outputs[name]: of.append(y))
            for name, layer in layers.items()
        ]
        value = loss(model(batch), batch)
        for handle in handles:
            handle.remove()
        for name, of in outputs.items():
            grads = torch.autograd.grad(value, of, retain_graph=True) if of else ()
            found[name].append([g.square().sum(-1) for g in grads])
    for name, of in found.items():
        rows = [row for batch in of for row in batch]
        if rows:
            mean = torch.cat([row.flatten() for row in rows]).mean()
            found[name] = [[row / mean for row in batch] for batch in of]
    return found


def next_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize("kind", [Model, Stack])
@pytest.mark.parametrize("loss", [None, lambda y, x: y[..., 0].square().sum()], ids=["default", "given"])
def test_rows_count_by_the_squared_gradient_of_the_loss(loss, kind):
    torch.manual_seed(0)
    model = kind()
    weigh_model = observed(model, layer_recipes(RECIPE), ())
    layers = {layer.name: layer for layer in observed_layers(weigh_model)}
    weigh(weigh_model, list(layers.values()), batches(), loss)
    for name, rows in expected(model, loss or next_tokens).items():
        found = layers[name].importance
        if name == "idle":
            assert found is None
            continue
        for of, exact in zip(found, rows, strict=True):
            for one, other in zip(of, exact, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=2e-4, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())
    assert not any(wrappers(module) for module in weigh_model.modules())


def test_sums_of_products_count_rows_by_their_weights():
    torch.manual_seed(0)
    x, plain, weight = torch.randn(3, 5, 8), torch.randn(3, 5, 8), torch.rand(3, 5)
    statistics = Statistics(8, "cross")
    for part in range(3):
        statistics.update(x[part], plain[part], weight[part])
    x, plain, weight = (t.double().reshape(15, -1) for t in (x, plain, weight))
    for found, exact in (
        (statistics.gram, x.T @ (weight * x)),
        (statistics.cross, plain.T @ (weight * x)),
        (statistics.squares, (weight * x * x).sum(0)),
    ):
        torch.testing.assert_close(found.double(), exact / 15, rtol=1e-5, atol=1e-6)


def test_what_no_loss_depends_on_does_not_count():
    """Only the first half of each row is looked at; guided-gptq spends the codes on it, and gptq on both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    data = [torch.randn(1, 32, 64) * torch.linspace(1, 3, 64) for _ in range(8)]
    for x in data:
        x[:, 16:] = x[:, 16:].flip(-1)  # what is not looked at uses the columns otherwise

    def looked_at(y: Tensor, x: Tensor) -> Tensor:
        return y[:, :16].square().sum()

    lost: dict[str, float] = {}
    for method in ("gptq", "guided-gptq"):
        options = {"loss": looked_at} if method == "guided-gptq" else {}
        found = copy.deepcopy(model)
        lb.quantize_(found, RECIPE, lb.calibrate(model, RECIPE, data, method, **options))
        with torch.no_grad():
            lost[method] = sum(float((found(x) - model(x))[:, :16].square().sum()) for x in data)
    assert lost["guided-gptq"] < 0.9 * lost["gptq"]


def test_a_run_that_saves_its_blocks_finds_the_same_bits(tmp_path):
    torch.manual_seed(0)
    model = Model()
    whole = lb.calibrate(model, RECIPE, batches(), "guided-gptq", skip=())
    again = lb.calibrate(model, RECIPE, batches(), "guided-gptq", skip=(), directory=tmp_path)
    for name, weight in whole.weights.items():
        assert torch.equal(weight.codes, again.weights[name].codes)
        assert torch.equal(weight.scale, again.weights[name].scale)


def test_what_is_refused():
    model = Model()
    with pytest.raises(ValueError, match="only method='guided-gptq' uses a loss"):
        lb.calibrate(model, RECIPE, batches(), "gptq", loss=next_tokens)
    with pytest.raises(ValueError, match=r"gradient of the loss at layer 'first' has NaN or Inf in batch 0"):
        lb.calibrate(model, RECIPE, batches(), "guided-gptq", skip=(), loss=lambda y, x: (y.sum() - y.sum()).sqrt())
    with pytest.raises(ValueError, match="needs data"):
        lb.calibrate(model, RECIPE, None, "guided-gptq")


class Detached(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).detach()


class Into(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return torch.add(x, y, out=torch.empty_like(x))


@pytest.mark.parametrize("method", ["guided-gptq", "signround"])
def test_what_torch_cannot_differentiate_is_said_with_what_to_do(method):
    model = Stack()
    model.blocks = nn.ModuleList(Into(32) for _ in range(2))
    with pytest.raises(RuntimeError, match=f"{method} needs gradients of the model.*out=.*; method='gptq' needs none"):
        lb.calibrate(model, RECIPE, batches(), method, skip=())


def test_without_a_gradient_the_default_is_gptq():
    torch.manual_seed(0)
    model = Detached()
    with pytest.warns(UserWarning, match="using gptq instead of guided-gptq"):
        made = lb.calibrate(model, RECIPE, batches(), skip=())
    plain = lb.calibrate(model, RECIPE, batches(), "gptq", skip=())
    assert {row.method for row in made.rows.values()} == {"gptq"}
    assert all(torch.equal(made.weights[name].codes, q.codes) for name, q in plain.weights.items())
    with pytest.raises(ValueError, match=r"is there a no_grad in the model.*method='gptq'"):
        lb.calibrate(model, RECIPE, batches(), "guided-gptq", skip=())


def test_the_default_is_guided():
    torch.manual_seed(0)
    model = Stack()
    made = lb.calibrate(model, RECIPE, batches(), skip=())
    guided = lb.calibrate(model, RECIPE, batches(), "guided-gptq", skip=())
    assert all(torch.equal(made.weights[name].codes, q.codes) for name, q in guided.weights.items())


#: Resident memory after batches 4 and 16, in a process whose heap nothing else has used.
_RESIDENT = """
import sys
import torch
import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory.rss import resident_bytes

torch.manual_seed(0)
torch.set_num_threads(1)
model = GPT(GPTConfig(vocab=2048, context=512, layers=8, heads=4, dim=256, hidden=768)).eval()
held = []

def loss(output, batch):
    held.append(resident_bytes())
    if len(held) == 16:
        print(held[4], held[15])
        sys.exit()
    return output.float().logsumexp(-1).sum()

batches = [torch.randint(2048, (1, 512)) for _ in range(16)]
lb.calibrate(model, "q4_0", batches, "guided-gptq", loss=loss, progress=False)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_batches():
    done = subprocess.run([sys.executable, "-c", _RESIDENT], capture_output=True, text=True, check=True)
    early, late = map(int, done.stdout.split())
    assert late < 1.05 * early
