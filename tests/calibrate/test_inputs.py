"""Static input scales: the layers and files that carry them."""

from __future__ import annotations

import copy

import pytest
import torch
from support.layers import STATIC
from torch import Tensor, nn

import lowbit as lb


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 8)).eval()


@pytest.mark.parametrize("recipe", STATIC)
def test_a_static_layer_multiplies_the_codes_of_its_scales(recipe):
    plain, x = model(), torch.randn(64, 24)
    made = lb.calibrate(plain, recipe, [x], "nearest")
    quantized = copy.deepcopy(plain)
    lb.quantize_(quantized, recipe, made)
    layer, rows = quantized[0], torch.randn(5, 24) * 2
    scheme = lb.scheme(layer.recipe.input)
    codes = lb.quantize(rows, scheme, *made.inputs["0"][0])
    expected = lb.scaled_mm(codes, layer.weight, bias=layer.bias, out_dtype=torch.float32)
    assert torch.equal(layer(rows), expected)
    ends = torch.stack([x.amin(), x.amax()])[:, None]
    assert torch.equal(made.inputs["0"][0].scale, lb.quantize(ends, scheme).scale)
    error = (quantized(x) - plain(x)).norm() / plain(x).norm()
    assert float(error) < (0.1 if "fp8" in recipe else 0.02)
    if "int8" in recipe:  # no bit depends on the rows beside it
        assert all(torch.equal(layer(rows[i : i + 1])[0], layer(rows)[i]) for i in range(5))


def test_static_scales_are_saved_copied_and_refused_where_they_do_not_fit(tmp_path):
    plain, x = model(), torch.randn(64, 24)
    made = lb.calibrate(plain, "int8-static-affine", [x], ("search", "mse"))
    assert {observer for _, observer in made.inputs.values()} == {"mse"}
    made.save(tmp_path / "calibration")
    quantized, again = copy.deepcopy(plain), copy.deepcopy(plain)
    lb.quantize_(quantized, "int8-static-affine", made)
    lb.quantize_(again, "int8-static-affine", lb.Calibration.load(tmp_path / "calibration"))
    y = quantized(x)
    assert torch.equal(again(x), y)
    lb.save_model(quantized, tmp_path / "model")
    assert torch.equal(lb.load_model(tmp_path / "model", model())(x), y)
    quantized.bfloat16()
    assert torch.equal(quantized[0].input_scales.scale, made.inputs["0"][0].scale)
    assert torch.equal(torch.compile(again, backend="aot_eager", fullgraph=True)(x), y)

    dynamic = copy.deepcopy(plain)
    lb.quantize_(dynamic, "int8")
    with pytest.raises(RuntimeError, match="input_scale"):
        dynamic.load_state_dict(again.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*input_scale"):
        again.load_state_dict(dynamic.state_dict())
    report = lb.prepack_(again)
    assert all("static" in reason for reason in report.left.values())


def test_tied_layers_have_input_scales_of_their_own():
    tied = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    tied[2].weight = tied[0].weight
    made = lb.calibrate(tied, "int8-static", [torch.randn(64, 16) * 5])
    lb.quantize_(tied, "int8-static", made)
    assert tied[0].codes is tied[2].codes
    assert not torch.equal(tied[0].input_scale, tied[2].input_scale)


def test_static_recipes_need_data_and_their_calibration():
    plain, x = model(), torch.randn(64, 24)
    with pytest.raises(ValueError, match="'int8-static' has static input scales, which need calibration data"):
        lb.quantize_(plain, "int8-static")
    with pytest.raises(ValueError, match=r"'int8-static' has static input scales.*give batches"):
        lb.calibrate(plain, "int8-static", None, "search")

    class Aside(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    with pytest.raises(ValueError, match=r"layer '1': no batch reaches it.*leave it out with skip"):
        lb.calibrate(Aside(nn.Linear(24, 4), nn.Linear(4, 4)), "int8-static", [x], "nearest")
    by_row = lb.Recipe(lb.Gemm(lb.Cast("int8:row", scale="static"), "int8:row"))
    with pytest.raises(ValueError, match="static scales are the same for every row"):
        lb.calibrate(plain, by_row, [x])
