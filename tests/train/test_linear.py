"""TrainLinear: its three products against the specification's formulas, and what training code does around it."""

from __future__ import annotations

import copy

import pytest
import torch
from support.bits import same_bits
from support.layers import TRAINING, bound, exact, training_layer
from support.training import backward_operands, forward_operands, product
from support.variants import serving
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.autograd import bias_gradient
from lowbit.memory import allocated_peak
from lowbit.train import TrainLinear
from lowbit.train.rules import ruled

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [((5,), 33, 7), ((2, 3), 17, 130), ((1,), 1, 1), ((150,), 140, 3), ((0,), 33, 5)]


# -- the three products -----------------------------------------------------------------------------------------------
@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("batch", "inputs", "outputs"), SHAPES, ids=str)
@pytest.mark.parametrize("recipe", TRAINING)
def test_the_three_products_are_those_of_the_specification(recipe, batch, inputs, outputs, dtype):
    layer = training_layer(inputs, outputs, recipe)
    x = torch.randn(*batch, inputs, dtype=dtype, requires_grad=True)
    g = (torch.randn(*batch, outputs) * torch.rand(*batch, 1) * 1e-3).to(dtype)
    with lb.use_backend("reference"):
        y = layer(x)
    y.backward(g)

    flat, g2, w = x.detach().reshape(-1, inputs), g.reshape(-1, outputs), layer.weight.detach()
    for_x, for_w = backward_operands(recipe, flat, w, g2)
    forward = product(forward_operands(recipe, flat, w), layer.bias.detach(), dtype)
    assert same_bits(y.detach(), forward.reshape(*batch, outputs))
    assert same_bits(x.grad, product(for_x, None, dtype).reshape(x.shape))
    assert same_bits(layer.weight.grad, product(for_w, None, torch.float32))
    torch.testing.assert_close(layer.bias.grad, g2.double().sum(0).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", TRAINING)
def test_the_kernels_chosen_by_default_stay_within_their_bound(recipe):
    layer = training_layer(70, 33, recipe)
    x = torch.randn(40, 70, requires_grad=True)
    sides = (x.detach(), layer.products.input), (layer.weight.detach(), layer.products.weight)
    a, w = (lb.quantize(t, how.scheme) if how.rule == "amax" else ruled(t, how) for t, how in sides)
    y = layer(x)
    limit = bound(a, w, layer.bias.detach(), torch.float32)
    assert bool(((y - exact(a, w, layer.bias)).abs() <= limit).all())
    g = torch.randn_like(y)
    y.backward(g)
    plain_x, plain_w = g @ layer.weight.detach(), g.t() @ x.detach()
    # m mantissa bits round with a relative error of 2**-m / sqrt(12) rms at most: 0.072 (E5M2) and 0.036 (E4M3). One
    # bit is 0.144 (E2M1), stochastic rounding errs by sqrt(2) times as much, and subnormal numbers by more.
    limit = 0.30 if layer.recipe.weight.format.bits == 4 else 0.12
    assert (x.grad - plain_x).norm() < limit * plain_x.norm()
    assert (layer.weight.grad - plain_w).norm() < limit * plain_w.norm()


@pytest.mark.parametrize("recipe", TRAINING)
def test_each_saved_operand_is_kept_once_as_codes(recipe):
    layer, x = training_layer(256, 128, recipe), torch.randn(384, 256, requires_grad=True)
    row, saved = lb.recipe(recipe), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        layer(x)
        whole = sum(saved)
        layer(x.detach())
    of_x = row.grad_weight.b.scheme if row.grad_weight.save == "operand" else row.trained.a.scheme
    of_w = row.grad_input.b.scheme if row.grad_input.save == "operand" else row.trained.b.scheme
    assert whole == of_x.nbytes((384, 256)) + of_w.nbytes((128, 256))
    assert sum(saved) - whole == of_x.nbytes((384, 256))  # nobody asks for the gradient of x: no weight is kept


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_only_gradients_that_are_asked_for(frozen):
    layer = TrainLinear(17, 5)
    x = torch.randn(3, 17, requires_grad=frozen != "input")
    if frozen != "input":
        getattr(layer, frozen).requires_grad_(False)
    layer(x).sum().backward()
    assert (x.grad is None) == (frozen == "input")
    assert (layer.weight.grad is None) == (frozen == "weight") and (layer.bias.grad is None) == (frozen == "bias")


class Model(nn.Module):
    def __init__(self, recipe: str | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down, self.lm_head = nn.Linear(33, 48), nn.Linear(48, 33, bias=False), nn.Linear(33, 4)
        self.to(dtype)
        if recipe:
            lb.train.prepare_(self, recipe)

    def inner(self, x):
        return x + self.down(nn.functional.silu(self.up(x)))

    def forward(self, x, recompute=False):
        return self.lm_head(checkpoint(self.inner, x, use_reentrant=False) if recompute else self.inner(x))


def gradients(model: nn.Module, x: Tensor, **options) -> list[Tensor]:
    lb.train.state(model).set_micro_batch(-1)  # every call draws the random bits of the first one
    x = x.clone().requires_grad_()
    y = model(x, **options)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("recipe", TRAINING)
def test_checkpointing_recomputes_the_same_bits(recipe, autocast):
    model, x = Model(recipe), torch.randn(2, 5, 33)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, again = gradients(model, x), gradients(model, x, recompute=True)
    assert all(map(same_bits, plain, again))


def test_autocast_answers_in_its_dtype_and_keeps_gradients_wide():
    layer, x = TrainLinear(33, 5), torch.randn(4, 33, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    a, w = lb.quantize(x.detach(), "fp8_e4m3:row"), lb.quantize(layer.weight.detach(), "fp8_e4m3:row")
    assert same_bits(y.detach(), lb.scaled_mm(a, w, layer.bias.detach(), out_dtype=torch.bfloat16))
    y.sum().backward()
    assert {t.dtype for t in (x.grad, layer.weight.grad, layer.bias.grad)} == {torch.float32}


def test_backward_runs_where_forward_ran():
    layer, x = TrainLinear(33, 5), torch.randn(4, 33, requires_grad=True)
    with lb.use_backend("reference"):
        y = layer(x)
    with serving() as served:
        y.sum().backward()
    assert "scaled_mm" in served and set(served.values()) == {"reference"}


def test_a_gradient_of_a_gradient_is_refused():
    """A gradient penalty's incoming gradient is a constant; without a refusal the weight silently got none."""
    layer, x = TrainLinear(33, 5), torch.randn(4, 33, requires_grad=True)
    for loss in (layer(x).square().sum(), layer(x).sum()):
        with pytest.raises(RuntimeError, match=r"create_graph=True: this gradient of lowbit\.train has no derivative"):
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("shape", [(8, 64), (2, 4, 64)])
def test_its_output_may_be_changed_in_place(shape):
    """As that of a Linear: ``nn.ReLU(inplace=True)`` may follow it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(inplace=True))
    lb.train.prepare_(model, "fp8", skip=())
    x = torch.randn(shape)
    y = model(x)
    y.backward(torch.ones_like(y))
    assert same_bits(y, model[0](x).relu())
    changed = model[0].weight.grad.clone()
    model[0].weight.grad = None
    model[0](x).relu().backward(torch.ones_like(y))
    assert same_bits(changed, model[0].weight.grad)


def test_nan_in_an_activation_shows_and_stays_in_its_row():
    layer, x = TrainLinear(33, 5), torch.randn(4, 33)
    x[2, 7] = torch.nan
    y = layer(x)
    assert bool(y[2].isnan().all()) and bool(y[[0, 1, 3]].isfinite().all())
    y.sum().backward()
    assert bool(layer.weight.grad.isnan().all())


# -- conversion ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", TRAINING)
def test_prepare_keeps_parameters_names_and_hooks(recipe):
    model = Model()
    before, seen = copy.deepcopy(model), []
    parameters = dict(model.named_parameters())
    model.up.register_forward_hook(lambda *args: seen.append(1))
    report = lb.train.prepare_(model, recipe)
    assert report.converted == ("up", "down") and list(report.left) == ["lm_head"]
    assert type(model.up) is TrainLinear and type(model.lm_head) is nn.Linear
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert f"recipe={recipe}" in repr(model.up)
    state = {name: value for name, value in model.state_dict().items() if "lowbit_state" not in name}
    remembers = model.up.products.stateful
    assert list(state) == list(before.state_dict()) and (len(state) < len(model.state_dict())) == remembers
    assert all(map(same_bits, state.values(), before.state_dict().values()))
    x = torch.randn(3, 33)
    assert not torch.equal(model(x), before(x)) and seen
    again = copy.deepcopy(model)
    assert same_bits(again(x), model(x))
    assert lb.train.convert_(model).converted == ("up", "down")
    assert type(model.up) is nn.Linear and same_bits(model(x), before(x))
    assert "recipe" not in vars(model.up)


@pytest.mark.parametrize(
    ("change", "recipe", "message"),
    [
        (
            lambda m: None,
            "int8-group",
            "'int8-group' is for inference only; recipes that train: int8, int8-stochastic, fp8, fp8-pow2, fp8-tensor",
        ),
        (
            lambda m: lb.train.prepare_(m),
            "fp8",
            r"up is being trained in low precision \(recipe fp8\); call lowbit.train.convert_",
        ),
        (lambda m: lb.quantize_(m, "int8"), "fp8", "up is quantized already"),
        (lambda m: None, "float8", "unknown recipe 'float8'"),
    ],
)
def test_refusals(change, recipe, message):
    model = Model()
    change(model)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        lb.train.prepare_(model, recipe)
    assert kinds == [type(m) for m in model.modules()]


def test_a_layer_that_was_parametrized_since_is_not_made_plain():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    lb.train.prepare_(model, "fp8", skip=())
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"1 \(ParametrizedTrainLinear\).*remove_parametrizations"):
        lb.train.convert_(model)
    assert type(model[0]) is lb.train.TrainLinear
    parametrize.remove_parametrizations(model[1], "weight")
    assert lb.train.convert_(model).converted == ("0", "1")


def test_scales_that_cannot_be_folded_are_refused():
    row = lb.recipe("mxfp8")
    with pytest.raises(ValueError, match=r"grad_input can only fold floating-point scales.*mxfp8:ceil has others"):
        lb.Recipe(row.output, lb.Gemm("fp8_e5m2:row", "fold"), row.grad_weight, name="mine")


def test_a_fused_kernel_is_left_alone_while_training_and_given_back():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        before = layer(x)
        lb.train.prepare_(layer, "fp8")
        assert not torch.equal(layer(x), before)
        lb.train.convert_(layer)
        assert torch.equal(layer(x), before)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("recipe", "dtype"), [*((name, torch.float32) for name in TRAINING), ("fp8", torch.bfloat16)], ids=str
)
def test_it_learns(recipe, dtype):
    """A regression whose loss falls as it does in fp32, to within the noise of the format."""
    inputs = torch.randn(48, 33)
    targets = torch.randn(48, 33) @ torch.randn(33, 4) / 6 + inputs[:, :4]

    def final(recipe):
        torch.manual_seed(1)
        model = Model(recipe, dtype)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(25):
            loss = (model(inputs.to(dtype)).float() - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    start = (Model(None)(inputs) - targets).square().mean().item()
    learned = final(recipe)
    assert learned < start / 2
    noise = 0.02 if lb.recipe(recipe).weight.format.bits == 8 else 0.05
    assert learned < 1.25 * final(None) + noise


def test_the_gradient_of_a_bias_is_summed_in_fp32_without_a_copy():
    grad = torch.randn(512, 3000).bfloat16()
    found = bias_gradient(grad.view(2, 256, 3000), torch.float32)
    assert torch.equal(found, grad.sum(0, dtype=torch.float32))
    torch.testing.assert_close(found, grad.double().sum(0).float(), rtol=1e-5, atol=1e-4)
    assert allocated_peak(lambda: bias_gradient(grad, torch.bfloat16)) < grad.numel() * 4 * 0.5
    assert bias_gradient(grad[:, :0], torch.float32).shape == (0,)
