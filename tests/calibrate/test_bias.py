"""Bias correction, against the mean of what quantization loses, computed in fp64; and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from support.bits import assert_same_bits
from torch import Tensor, nn

import lowbit as lb
from lowbit.calibrate import MAPS, Map

torch.manual_seed(0)  # the same weights, whatever was imported before


def pair(*layers: nn.Module, recipe: str, batches: list[Tensor]) -> tuple[nn.Module, nn.Module]:
    """A model of these layers, and the same one quantized."""
    plain = nn.Sequential(*copy.deepcopy(layers)).eval()
    made = copy.deepcopy(plain)
    static = lb.recipe(recipe).static
    lb.quantize_(made, recipe, lb.calibrate(plain, recipe, batches, "nearest") if static else None, skip=())
    return made, plain


def mean_of(lost: Tensor, axis: int) -> Tensor:
    return lost.movedim(axis, -1).flatten(0, -2).mean(0)


def test_the_bias_takes_what_rounded_weights_lose():
    """Of weights alone the loss is linear: (W - Q(W)) E[x], exact in fp64, and of each layer by itself."""
    layers = nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 7)
    batches = [torch.rand(rows, 5, 40) for rows in (3, 8)]
    made, plain = pair(*layers, recipe="int4-weight-only", batches=batches)
    expected = {}
    given = torch.cat(batches).double()
    for name in ("0", "2"):
        given = given if name == "0" else copy.deepcopy(plain[0]).double()(given).relu()
        lost = plain[int(name)].weight.double() - made[int(name)].weight.dequantize().double()
        expected[name] = plain[int(name)].bias.double() + lost @ given.reshape(-1, given.shape[-1]).mean(0)
    report = lb.correct_bias_(made, plain, batches)
    assert report.converted == ("0", "2") and not report.left
    for name, bias in expected.items():
        torch.testing.assert_close(made[int(name)].bias.double(), bias, rtol=0, atol=1e-6)


def test_a_bias_that_two_layers_share_stays():
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.bias = first.bias
    made, plain = pair(first, second, nn.Linear(16, 4), recipe="int4-weight-only", batches=[])
    before = plain[0].bias.detach().clone()
    report = lb.correct_bias_(made, plain, [torch.rand(5, 16)])
    assert report.converted == ("2",) and set(report.left) == {"0", "1"}
    assert "shares its bias with another layer" in report.left["1"]
    assert made[0].bias is made[1].bias and torch.equal(made[0].bias, before)
    with pytest.raises(ValueError, match="shares its bias"):
        lb.correct_bias_(made[:2], plain[:2].eval(), [torch.rand(5, 16)])


@pytest.mark.parametrize("recipe", ["int8-static", "int8-static-affine:tensor", "int8"])
def test_convolutions_lose_nothing_in_the_mean(recipe: str):
    layers = nn.Conv2d(6, 8, 3, groups=2, padding=1), nn.ReLU6(), nn.Conv2d(8, 4, 1)
    batches = [torch.randn(n, 6, 7, 9) + 1 for n in (2, 5)]
    made, plain = pair(*layers, recipe=recipe, batches=batches)
    lb.correct_bias_(made, plain, batches)
    x = torch.cat(batches)
    with torch.no_grad():
        for index in (0, 2):
            layer = copy.deepcopy(plain[index]).double()
            lost = layer(x.double()) - made[index](x).double()
            torch.testing.assert_close(mean_of(lost, 1), torch.zeros(lost.shape[1]).double(), rtol=0, atol=1e-6)
            x = plain[index](x).clamp(0, 6)


def test_padding_does_not_count():
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 6)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.fc(x)

    plain = Padded().eval()
    made = copy.deepcopy(plain)
    lb.quantize_(made, "int4-weight-only")
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    x = torch.rand(2, 4, 16)
    garbage = torch.where(mask.bool()[..., None], x, 1e4)
    lb.correct_bias_(made, plain, [{"x": garbage, "attention_mask": mask}])
    lost = plain.fc.weight.double() - made.fc.weight.dequantize().double()
    expected = plain.fc.bias.double() + lost @ x[mask.bool()].double().mean(0)
    torch.testing.assert_close(made.fc.bias.double(), expected, rtol=0, atol=1e-6)


def test_it_is_saved_and_packed_with_the_model(tmp_path):
    batches = [torch.rand(8, 40)]
    made, plain = pair(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 7), recipe="int8", batches=batches)
    before = made(batches[0])
    lb.correct_bias_(made, plain, batches)
    y = made(batches[0])
    assert not torch.equal(y, before)
    lb.save_model(made, tmp_path)
    assert_same_bits(lb.load_model(tmp_path, copy.deepcopy(plain))(batches[0]), y)
    lb.prepack_(made)
    assert_same_bits(made(batches[0]), y)


def test_what_is_left_and_what_is_refused():
    batches = [torch.rand(8, 12)]
    made, plain = pair(nn.Linear(12, 12, bias=False), nn.Linear(12, 5), recipe="int8", batches=batches)
    state = copy.deepcopy(made.state_dict())
    with pytest.raises(ValueError, match="no batch reaches a quantized layer"):
        lb.correct_bias_(made, plain, [])
    with pytest.raises(ValueError, match="1 have NaN or Inf"):
        lb.correct_bias_(made, plain, [batches[0] / 0])
    with pytest.raises(TypeError, match="a batch is a tensor"):
        lb.correct_bias_(made, plain, ["text"])
    with pytest.raises(ValueError, match=r"call plain\.eval\(\) first"):
        lb.correct_bias_(made, plain.train(), batches)
    plain.eval()
    for other in (nn.Sequential(nn.ReLU()).eval(), copy.deepcopy(made).eval()):
        with pytest.raises(ValueError, match=r"from before quantize_; .*1: the plain model has no plain"):
            lb.correct_bias_(made, other, batches)
    assert all(torch.equal(made.state_dict()[key], state[key]) for key in state)
    assert not plain[1]._forward_hooks
    report = lb.correct_bias_(made, plain, batches)
    assert report.converted == ("1",) and list(report.left) == ["0"] and "it has no bias" in report.left["0"]
    with pytest.raises(ValueError, match=r"1\.bias differs from the plain model"):
        lb.correct_bias_(made, plain, batches)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x))


def test_a_model_that_was_calibrated_with_a_transform_is_refused(monkeypatch):
    """Its layers are given other inputs than the plain model's."""
    monkeypatch.setitem(MAPS, "Normed", (Map("norm", ("up",)),))
    plain, batches = nn.Sequential(Normed()).eval(), [torch.randn(32, 16)]
    made = copy.deepcopy(plain)
    lb.quantize_(made, "int8", lb.calibrate(plain, "int8", batches, ("smoothquant", "nearest")))
    assert not torch.equal(made[0].norm.weight, plain[0].norm.weight)
    with pytest.raises(ValueError, match=r"0\.norm\.weight differs from the plain model"):
        lb.correct_bias_(made, plain, batches)
