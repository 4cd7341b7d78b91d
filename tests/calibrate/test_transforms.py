"""Transforms before calibration: the model computes what it computed, and rounds better."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import gpt
from torch import Tensor, nn

import lowbit as lb
from lowbit.calibrate import MAPS, TRANSFORMS, Map
from lowbit.calibrate.calibration import Edit
from lowbit.calibrate.recording import Observed, Recorder, observed
from lowbit.calibrate.transforms import transform_
from lowbit.recipes import layer_recipes


def tokens(number: int = 3) -> list[Tensor]:
    return [torch.randint(60, (2, 32)) for _ in range(number)]


class Normed(nn.Module):
    """A block with LayerNorms, whose biases are scaled too, and a linear layer with a bias before another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 32), nn.Linear(32, 24)
        nn.init.normal_(self.norm.bias)
        nn.init.normal_(self.norm.weight, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)))


@pytest.fixture
def normed(monkeypatch):
    monkeypatch.setitem(MAPS, "Normed", (Map("norm", ("up",)), Map("up", ("down",))))
    return nn.Sequential(Normed(), Normed()).eval()


def transformed(model: nn.Module, x: Tensor, transform: str) -> tuple[nn.Module, list[Edit], list[Observed]]:
    """The copy of ``model`` that calibrate works on, after a transform and before any rounding."""
    work = observed(model, layer_recipes("int8-weight-only"), ())
    layers = [layer for layer in work.modules() if isinstance(layer, Observed)]
    recorder = Recorder(layers, "gram", None)
    recorder.count(0, x, lambda: work(x))
    recorder.finish()
    edits = transform_(work, TRANSFORMS[transform], {id(m): n for n, m in work.named_modules()})
    return work, edits, layers


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_transform_changes_the_weights_and_not_the_model(transform, dtype):
    model, x = gpt(dtype), tokens()[0]
    before = copy.deepcopy(model.state_dict())
    work, edits, layers = transformed(model, x, transform)
    assert {edit.name for edit in edits} == {f"blocks.{i}.norm{k}.weight" for i in (0, 1) for k in (1, 2)}
    assert all(not torch.equal(layer.weight, layer.plain) for layer in layers if layer.name != "lm_head")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for edit in edits:  # a norm of 16 bits is divided exactly, and the weights make up for what it cannot hold
        plain = model.get_parameter(edit.name).float()
        first = next(layer for layer in layers if layer.weight_name == edit.weights[0])
        factors = (first.weight[:8] / first.plain[:8].float()).nanmedian(0).values
        torch.testing.assert_close(edit.value.float() * factors, plain, rtol=1e-5, atol=1e-6)
    wide, expected = work.float()(x), copy.deepcopy(model).float()(x)
    torch.testing.assert_close(wide, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_biases_are_scaled_with_their_layers(normed, transform):
    x = torch.randn(64, 24)
    work, edits, _ = transformed(normed, x, transform)
    assert {edit.name.split(".", 1)[1] for edit in edits} == {"norm.weight", "norm.bias", "up.bias"}
    torch.testing.assert_close(work(x), normed(x), rtol=1e-5, atol=1e-5)


def test_smoothquant_shares_the_extremes(normed):
    x = [torch.randn(200, 24) for _ in range(2)]
    inputs = torch.cat([normed[0].norm(one) for one in x])
    weight = normed[0].up.weight.detach()
    made = lb.calibrate(normed, "int8", x, ("smoothquant", "nearest"))
    factors = (inputs.abs().amax(0) / weight.abs().amax(0)).sqrt()  # both extremes become their geometric mean
    edit = next(edit for edit in made.edits if edit.name == "0.norm.weight")
    torch.testing.assert_close(edit.value, normed[0].norm.weight / factors, rtol=1e-4, atol=1e-6)
    # up's rows are divided by the factors of down's inputs after that
    down = torch.cat([normed[0].up(normed[0].norm(one)) for one in x])
    later = (down.abs().amax(0) / normed[0].down.weight.abs().amax(0)).sqrt()
    expected = lb.quantize(weight * factors / later[:, None], "int8:row")
    torch.testing.assert_close(made.weights["0.up"].dequantize(), expected.dequantize(), rtol=1e-3, atol=1e-3)
    bias = next(edit for edit in made.edits if edit.name == "0.up.bias")
    torch.testing.assert_close(bias.value, normed[0].up.bias.detach() / later, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("transform", "recipe"), [("smoothquant", "int8"), ("awq", "int4-weight-only")])
def test_large_columns_round_better(transform, recipe):
    model, batches = gpt(), tokens()

    def error(method):
        other = copy.deepcopy(model)
        lb.quantize_(other, recipe, lb.calibrate(model, recipe, batches, method))
        with torch.no_grad():
            return sum(float((other(b) - model(b)).square().mean()) for b in batches)

    assert error((transform, "nearest")) < 0.8 * error("nearest")


def test_transforms_are_saved_and_go_with_all_of_their_weights(tmp_path):
    model, batches = gpt(), tokens()
    made = lb.calibrate(model, "int8", batches, ("smoothquant", "awq", "nearest"))
    made.save(tmp_path)
    again = lb.Calibration.load(tmp_path)
    one, other, part, edited = (copy.deepcopy(model) for _ in range(4))
    lb.quantize_(one, "int8", made)
    lb.quantize_(other, "int8", again)
    assert torch.equal(one(batches[0]), other(batches[0]))
    with pytest.raises(ValueError, match=r"changes blocks\.0\.norm2\.weight together with the weight of .*gate_up"):
        lb.quantize_(part, {"*": "int8", "*.gate_up": None, "lm_head": None}, made)
    edited.blocks[0].norm1.weight.data[0] += 1
    with pytest.raises(ValueError, match=r"parameter 'blocks\.0\.norm1\.weight' is not the one"):
        lb.quantize_(edited, "int8", made)
    assert type(part.blocks[0].attention.qkv) is type(edited.blocks[0].attention.qkv) is nn.Linear


def test_transforms_need_data_and_a_map():
    with pytest.raises(ValueError, match="smoothquant needs data; give batches"):
        lb.calibrate(gpt(), "int8", None, ("smoothquant", "search"))
    strange = nn.Sequential(Normed(), Normed())
    with pytest.raises(ValueError, match=r"awq needs to know which norm feeds.*MAPS; add its class"):
        lb.calibrate(strange, "int8", [torch.randn(4, 24)], ("awq", "search"))
