"""Quantized convolutions in models: results, gradients, training, calibration, files."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.bits import assert_same_bits
from support.covering import pairwise
from support.layers import DYNAMIC
from torch import Tensor, nn

import lowbit as lb
from lowbit.nn import QuantConv1d, QuantConv2d, QuantConv3d
from lowbit.recipes import Cast, Gemm, Recipe

torch.manual_seed(0)  # the same weights, whatever was imported before

#: Layers of every class, and an input of each.
LAYERS = {
    "1d": (nn.Conv1d(6, 8, 3, stride=2, padding=1, groups=2), (2, 6, 11)),
    "2d": (nn.Conv2d(5, 7, (3, 2), padding=(0, 2), dilation=(2, 1)), (2, 5, 9, 8)),
    "same": (nn.Conv2d(4, 6, 4, padding="same", bias=False), (1, 4, 7, 9)),
    "reflect": (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), (2, 4, 6, 7)),
    "depthwise": (nn.Conv2d(20, 20, 3, padding=1, groups=20), (2, 20, 6, 5)),
    "pointwise": (nn.Conv2d(20, 9, 1, stride=2), (2, 20, 7, 5)),
    "3d": (nn.Conv3d(4, 6, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 1), groups=2), (2, 4, 4, 5, 6)),
}
CLASSES = {nn.Conv1d: QuantConv1d, nn.Conv2d: QuantConv2d, nn.Conv3d: QuantConv3d}
each = pytest.mark.parametrize("name", LAYERS)


def made(name: str, recipe: str = "int8-static", seed: int = 0) -> tuple[nn.Sequential, nn.Sequential, Tensor]:
    """A model of one layer, the same one quantized, and a batch that it was calibrated with."""
    torch.manual_seed(seed)
    layer, shape = LAYERS[name]
    model, x = nn.Sequential(copy.deepcopy(layer)).eval(), torch.randn(shape)
    quantized = copy.deepcopy(model)
    static = lb.recipe(recipe).static
    plan = {"0": recipe}  # by name: depthwise convolutions stay plain where they would be slower
    lb.quantize_(quantized, plan, lb.calibrate(model, plan, [x], "nearest") if static else None)
    assert type(quantized[0]) is CLASSES[type(layer)]
    return model, quantized, x


def decoded(model: nn.Sequential) -> nn.Module:
    """The plain layer of what the codes stand for, in fp64."""
    model = copy.deepcopy(model)
    lb.dequantize_(model)
    return model.double()


@each
@pytest.mark.parametrize("recipe", ["int8-static", "int8-static-affine", "fp8-static"])
def test_static_scales(name: str, recipe: str):
    """The oracle: the input rounded by the layer's own scale, and torch's convolution in fp64."""
    _, model, x = made(name, recipe)
    scale, zero, _ = model[0].linear.input_scales
    rounded = (
        lb.quantize(x.reshape(1, -1), model[0].recipe.input, scale, zero)
        .dequantize(torch.float32)
        .double()
        .view(x.shape)
    )
    expected = decoded(model)(rounded)
    with torch.no_grad():
        y = model(x)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(x[0]), y[0], rtol=0, atol=0)
    axes = tuple(range(1, x.dim()))
    assert float((x.amin(axes) < 0).any())
    assert float(scale) == pytest.approx(
        float(x.max() - x.min()) / 255 if zero is not None else float(x.abs().max()) / model[0].recipe.input.format.max,
        rel=1e-5,
    )


#: Recipes by what forward computes with.
FORWARDS = {(lb.recipe(name).input, lb.recipe(name).weight): name for name in reversed(DYNAMIC)}


def forwards() -> list[tuple[str, str]]:
    """Layers and recipes: every layer meets every scheme of inputs and every one of weights, and each recipe is met."""

    def valid(row: dict[str, Any]) -> bool:
        return any(row.get("input", i) == i and row.get("weight", w) == w for i, w in FORWARDS)

    inputs, weights = (list(dict.fromkeys(schemes)) for schemes in zip(*FORWARDS, strict=True))
    rows = pairwise({"layer": list(LAYERS), "input": inputs, "weight": weights}, valid)
    return [(row["layer"], FORWARDS[row["input"], row["weight"]]) for row in rows]


@pytest.mark.parametrize(("name", "recipe"), forwards())
def test_every_recipe_is_near_the_plain_layer(name: str, recipe: str):
    plain, model, x = made(name, recipe)
    with torch.no_grad():
        y, expected = model(x), plain(x)
    error = (y - expected).norm() / expected.norm()
    four = plain and model[0].recipe.weight.format.bits == 4
    assert error < (0.25 if four else 0.06)
    if model[0].recipe.input is None:
        torch.testing.assert_close(y.double(), decoded(model)(x.double()), rtol=1e-4, atol=1e-5)


@each
def test_a_dynamic_scale_is_that_of_a_patch(name: str):
    _, model, x = made(name, "int8")
    layer, decoded_layer = LAYERS[name][0], decoded(model)[0]
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
    patches = model[0].window.unfold(x.movedim(1, -1))  # [N, *S', groups, taps * C / groups]
    rounded = lb.fake_quantize(patches.reshape(-1, patches.shape[-1]), "int8:row").view(patches.shape).double()
    matrix = decoded_layer.weight.detach().movedim(1, -1).flatten(1).unflatten(0, (layer.groups, -1))
    expected = torch.einsum("n...gk,gok->n...go", rounded, matrix).flatten(-2).movedim(-1, 1)
    if layer.bias is not None:
        expected += layer.bias.detach().double().view(-1, *[1] * (x.dim() - 2))
    with torch.no_grad():
        y = model[0].linear.conv(x.movedim(1, -1), model[0].window).movedim(-1, 1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_memory_format_is_that_of_the_input():
    _, model, x = made("2d")
    last = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        y = model(x)
        assert y.is_contiguous() and model(last).is_contiguous(memory_format=torch.channels_last)
        assert_same_bits(model(last).contiguous(), y)
        single = nn.Sequential(nn.Conv2d(1, 8, 3))
        lb.quantize_(single, "int8-weight-only")
        assert single(torch.randn(2, 1, 6, 6)).view(2, -1).shape == (2, 128)


def test_results_in_other_dtypes_and_autocast():
    _, model, x = made("2d")
    with torch.no_grad():
        y = model(x)
        assert model(x.bfloat16()).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(model(x), y.bfloat16())


@each
def test_files_copies_and_compiled_models_have_its_bits(name: str, tmp_path):
    plain, model, x = made(name)
    with torch.no_grad():
        y = model(x)
        assert_same_bits(copy.deepcopy(model)(x), y)
        lb.save_model(model, tmp_path)
        assert_same_bits(lb.load_model(tmp_path, copy.deepcopy(plain))(x), y)
        twin = made(name, seed=1)[1]
        twin.load_state_dict(model.state_dict())
        assert_same_bits(twin(x), y)
    if name in ("2d", "depthwise"):
        with torch.no_grad():
            assert_same_bits(torch.compile(model, backend="aot_eager", fullgraph=True)(x), y)


def test_a_state_with_columns_in_another_order_is_refused():
    _, model, _ = made("2d")
    state = model.state_dict()
    told = state.pop("0._extra_state")
    with pytest.raises(RuntimeError, match="_extra_state"):
        model.load_state_dict(state)
    for strict in (True, False):
        with pytest.raises(ValueError, match="a convolution's columns in another order"):
            model.load_state_dict({**state, "0._extra_state": told.flip(0)}, strict=strict)


@each
def test_the_gradient_of_an_input_is_that_of_the_decoded_layer(name: str):
    _, model, x = made(name)
    x, oracle = x.clone().requires_grad_(), x.double().requires_grad_()
    y = model(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    decoded(model)(oracle).backward(grad.double())
    torch.testing.assert_close(x.grad.double(), oracle.grad, rtol=1e-4, atol=1e-5)


# -- training ----------------------------------------------------------------------------------------------------------
@each
@pytest.mark.parametrize("recipe", ["int8-static", "int8-static-affine", "int8-weight-only"])
def test_training_has_the_deployed_bits_and_torchs_gradients(name: str, recipe: str):
    """The oracle of gradients: operands rounded, the differences cut off from autograd, and torch's convolution."""
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    model, x = nn.Sequential(copy.deepcopy(layer)), torch.randn(shape)
    lb.qat.prepare_(model, recipe)
    model.train()(x)
    if recipe != "int8-weight-only":
        lb.qat.freeze_observers_(model)
    inner = model[0].linear
    x = x.clone().requires_grad_()
    y = model(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    with torch.no_grad():
        weight = inner.quantized_weight.dequantize(torch.float32)
        scales = () if inner.input_scales is None else inner.input_scales
        flat = x.detach().reshape(1, -1)
        rounded = flat if not scales else lb.quantize(flat, inner.recipe.input, *scales).dequantize(torch.float32)
    matrix, input = weight.double().requires_grad_(), rounded.view(x.shape).double().requires_grad_()
    plain = copy.deepcopy(layer).double()
    filters = matrix.unflatten(1, (*layer.kernel_size, -1)).movedim(-1, 1)
    torch.func.functional_call(plain, {"weight": filters}, (input,)).backward(grad.double())
    torch.testing.assert_close(inner.weight.grad.double(), matrix.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), input.grad, rtol=1e-4, atol=1e-5)  # all of x is in range
    if layer.bias is not None:
        torch.testing.assert_close(inner.bias.grad.double(), plain.bias.grad, rtol=1e-4, atol=1e-4)
    lb.qat.convert_(model)
    with torch.no_grad():
        assert_same_bits(model.eval()(x), y.detach())


@pytest.mark.parametrize("name", ["2d", "depthwise"])
def test_scales_are_learned(name: str):
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    model, x = nn.Sequential(copy.deepcopy(layer)), torch.randn(shape)
    recipe = Recipe(Gemm(Cast("uint4:tensor:affine", scale="static"), "int4:row"), name="4 bits")
    lb.qat.prepare_(model, recipe, learn_scale=True, observe=1)
    target = layer(x).detach()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(30):
        loss = (model.train()(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    inner = model[0].linear
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert float(inner.input_scale.grad.abs()) > 0 and float(inner.weight_scale.grad.abs().sum()) > 0
    assert losses[-1] < losses[0]


def test_depthwise_convolutions_that_would_be_slower_stay_plain():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 3, groups=4), nn.Conv2d(1, 4, 3))
    report = lb.quantize_(copy.deepcopy(model), "int8")
    assert list(report.left) == ["0"] and "depthwise convolution is many times slower" in report.left["0"]
    for recipe in ({"0": "int8"}, {"*": "int8-weight-only"}):
        named = copy.deepcopy(model)
        lb.quantize_(named, recipe)
        assert type(named[0]) is lb.nn.QuantConv2d


def test_patches_with_scales_of_their_own_train_without_groups_alone():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=2))
    with pytest.raises(ValueError, match=r"layer '1': .*convolution in groups .*int8:tensor"):
        lb.qat.prepare_(model, "int8")
    lb.qat.prepare_(model, "int8", skip=("1",))
    x = torch.randn(2, 4, 8, 8)
    y = model.train()(x)
    y.sum().backward()
    assert bool(model[0].linear.weight.grad.isfinite().all())
    lb.qat.convert_(model)
    with torch.no_grad():
        assert_same_bits(model(x), y.detach())


# -- calibration -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["2d", "reflect"])
def test_gptq_sees_the_patches(name: str):
    """Its error on the outputs is smaller than that of rounding to nearest."""
    torch.manual_seed(0)
    layer, _ = LAYERS[name]
    model, x = nn.Sequential(copy.deepcopy(layer)).eval(), torch.randn(8, layer.in_channels, 12, 12).cumsum(-1)
    errors = {}
    for method in ("nearest", "gptq"):
        work = copy.deepcopy(model)
        recipe = "int4-weight-only:row"
        lb.quantize_(work, recipe, lb.calibrate(model, recipe, [x], method))
        with torch.no_grad():
            errors[method] = float((work(x) - model(x)).norm())
    assert errors["gptq"] < 0.9 * errors["nearest"]


@pytest.mark.parametrize("method", ["minmax", "moving-average", "percentile", "entropy", "mse"])
def test_input_scales_are_those_of_a_linear_layer_on_the_pixels(method: str):
    batches = [torch.randn(4, 3, 9, 9) + 1 for _ in range(3)]
    recipe = "int8-static-affine"
    of_conv = lb.calibrate(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), recipe, batches, method)
    pixels = [x.movedim(1, -1) for x in batches]
    of_linear = lb.calibrate(nn.Sequential(nn.Linear(3, 8)), recipe, pixels, method)
    for conv, linear in zip(of_conv.inputs["0"][0][:2], of_linear.inputs["0"][0][:2], strict=True):
        assert_same_bits(conv, linear)


def test_finer_static_scales_are_refused():
    model = nn.Sequential(nn.Conv2d(4, 8, 3)).eval()
    recipe = Recipe(Gemm(Cast("int8:col", scale="static"), "int8:row"), name="mine")
    with pytest.raises(
        ValueError, match=r"layer '0': .*one static input scale, and int8:col has several; use int8:tens"
    ):
        lb.quantize_(model, recipe, lb.calibrate(model, recipe, [torch.randn(2, 4, 6, 6)]))


def test_another_shape_is_refused():
    _, model, x = made("2d")
    with pytest.raises(
        ValueError, match=r"QuantConv2d: expected an input .* with C=5 and 2 axes S, got \[2, 4, 9, 8\]"
    ):
        model(x[:, :4])
    with pytest.raises(ValueError, match="2 axes S"):
        model(x[0, 0])
