"""The block Hadamard transform: its bits against NumPy's fp32, its matrix in float64, and recipes that use it."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad

import lowbit as lb
from lowbit.convert import prepack
from lowbit.functional import rotation
from lowbit.functional.rotation import signed_hadamard


def sylvester(size: int) -> torch.Tensor:
    """The normalized Hadamard matrix, float64, by its recursive definition."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def blocks_of(cols: int, block: int) -> list[int]:
    """The sizes of the blocks, by the text of docs/numerics.md."""
    whole, rest = divmod(cols, block)
    return [block] * whole + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


def in_order(x: np.ndarray, block: int) -> np.ndarray:
    """Rows of fp32, by the text of docs/numerics.md: each sum, difference and product rounds to fp32."""
    found, start = np.empty_like(x), 0
    for size in blocks_of(x.shape[1], block):
        y, half = x[:, start : start + size], 1
        while half < size:
            pairs = y.reshape(len(x), -1, 2, half)
            first, second = pairs[:, :, 0], pairs[:, :, 1]
            y = np.stack([first + second, first - second], 2).reshape(len(x), size)
            half *= 2
        found[:, start : start + size] = y * np.float32(1 / math.sqrt(size))
        start += size
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.sampled_from([1, 2, 16, 32, 64, 128]), st.integers(0, 2**32))
def test_every_bit_is_that_of_the_written_order(cols, block, seed):
    x = torch.randn(2, cols, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 7 - 3)
    expected = torch.from_numpy(in_order(x.numpy(), block))
    assert torch.equal(lb.hadamard(x, block), expected)
    assert torch.equal(lb.hadamard(x.bfloat16(), block), lb.hadamard(x.bfloat16().float(), block).bfloat16())


@pytest.mark.parametrize(("cols", "block"), [(128, 128), (96, 32), (100, 32), (7, 16), (1, 16), (272, 128)])
def test_it_is_the_matrix_and_its_own_inverse(cols, block):
    x = torch.randn(3, 2, cols, dtype=torch.float64)
    matrix = torch.block_diag(*(sylvester(size) for size in blocks_of(cols, block)))
    torch.testing.assert_close(lb.hadamard(x.float(), block).double(), x @ matrix, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lb.hadamard(lb.hadamard(x.float(), block), block).double(), x, rtol=1e-5, atol=1e-5)
    grad = torch.randn(3, 2, cols, dtype=torch.float64)
    leaf = x.float().requires_grad_()
    lb.hadamard(leaf, block).backward(grad.float())
    torch.testing.assert_close(leaf.grad.double(), grad @ matrix.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1, 16, 32, 128])
@pytest.mark.parametrize("turn", [lb.hadamard, signed_hadamard])
def test_rows_are_transformed_as_columns_are(turn, block, dtype):
    for rows, cols in ((1, 7), (0, 4), (37, 5), (16, 0), (100, 300), (700, 130)):
        x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).to(dtype)
        for y in (x, x.t().contiguous().t()):
            assert torch.equal(turn(y, block, 0), turn(x.t(), block).t()), (rows, cols)
        leaf = x.clone().requires_grad_()
        assert torch.equal(turn(leaf, block, 0), turn(x, block, 0))


@pytest.mark.parametrize("axis", [0, 1])
def test_on_gpus_an_op_transforms(monkeypatch, axis):
    """As on a device that is there; second derivatives and tangents too."""
    x, grad = torch.randn(48, 80).bfloat16(), torch.randn(48, 80).bfloat16()
    expected = [turn(y, 32, axis) for turn in (lb.hadamard, signed_hadamard) for y in (x, grad)]
    whole = lb.hadamard(x.view(4, 12, 80), 32)
    monkeypatch.setattr(rotation, "by_kernel", lambda x: True)
    assert torch.equal(signed_hadamard(x, 32, axis), expected[2])
    assert torch.equal(lb.hadamard(x.view(4, 12, 80), 32), whole)
    leaf, grad = x.clone().requires_grad_(), grad.requires_grad_()
    y = lb.hadamard(leaf, 32, axis)
    (found,) = torch.autograd.grad(y, leaf, grad, create_graph=True)
    assert torch.equal(y, expected[0]) and torch.equal(found, expected[1])
    (again,) = torch.autograd.grad(found, grad, x)
    assert torch.equal(again, expected[0])
    with forward_ad.dual_level():
        dual = lb.hadamard(forward_ad.make_dual(x, grad.detach()), 32, axis)
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, expected[1])


def test_no_columns_and_bad_input():
    assert lb.hadamard(torch.zeros(3, 0), 16).shape == (3, 0)
    for block in (0, 3, -2, 12, "16"):
        with pytest.raises(ValueError, match="power of two"):
            lb.hadamard(torch.zeros(3, 16), block)
    for wrong in (torch.zeros(3, dtype=torch.int32), torch.tensor(1.0)):
        with pytest.raises(TypeError, match=r"expected a float tensor \[..., K\]"):
            lb.hadamard(wrong, 16)


# -- recipes ----------------------------------------------------------------------------------------------------------
def model(width: int = 96) -> nn.Module:
    """Whose inputs have columns that stick out."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 80), nn.GELU(), nn.Linear(80, width))
    made[0].weight.data[::17] = 20.0
    return made.eval()


RECIPES = ["int4-weight-only:group32", "nvfp4", "mxfp4", "int8", "w4a8", "int8-static"]


def quantized(recipe: str, data: torch.Tensor) -> nn.Module:
    made = model()
    calibration = lb.calibrate(made, recipe, [data], "nearest") if lb.recipe(recipe).static else None
    lb.quantize_(made, recipe, calibration)
    return made


@pytest.mark.thinned(6)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_multiplies_transformed_operands(recipe):
    """The oracle: a QuantLinear of the plain recipe, made of the transformed weight, given the transformed input."""
    x = torch.randn(32, 96)
    found = quantized(f"{recipe}:hadamard", x)
    layer, plain = found[1], model()
    block = layer.rotation
    assert block == (
        lb.recipe(recipe).weight.block[1] if "group" in recipe or "fp4" in recipe or "w4" in recipe else 128
    )
    hand = nn.Linear(96, 80)
    hand.weight.data, hand.bias.data = lb.hadamard(plain[1].weight.data, block), plain[1].bias.data
    hand = nn.Sequential(hand)
    inputs = lb.hadamard(plain[0](x), block)
    calibration = lb.calibrate(hand, recipe, [inputs], "nearest") if lb.recipe(recipe).static else None
    lb.quantize_(hand, recipe, calibration)
    assert torch.equal(layer.codes, hand[0].codes)
    assert torch.equal(layer(plain[0](x)), hand[0](inputs))
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(plain[0](x)), layer(plain[0](x)))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_inductor_compiles_a_layer_that_transforms_its_input(recipe):
    layer, x = quantized(f"{recipe}:hadamard", torch.randn(32, 96))[1], torch.randn(32, 96)
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_it_helps_where_weights_stick_out_of_their_groups():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    weight[:, ::32] *= 20.0
    layer = nn.Sequential(nn.Linear(128, 64, bias=False))
    layer[0].weight.data = weight
    lost = {}
    for recipe in ("int4-weight-only:group32", "int4-weight-only:group32:hadamard"):
        made = copy.deepcopy(layer)
        lb.quantize_(made, recipe)
        lost[recipe] = float((made[0].plain_weight() - weight).norm())
    assert lost["int4-weight-only:group32:hadamard"] < 0.6 * lost["int4-weight-only:group32"]


@pytest.mark.parametrize("recipe", ["int8", "w4a8"])
def test_packed_saved_and_plain_again(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(prepack, "no_gain_by_packing", lambda weight, input, cols: None)
    x = torch.randn(32, 96)
    found = quantized(f"{recipe}:hadamard", x)
    y = found(x)
    lb.save_model(found, tmp_path / "saved")
    assert torch.equal(lb.load_model(tmp_path / "saved", model())(x), y)
    lb.prepack_(found)
    assert torch.equal(found(x), y) and (recipe != "int8" or type(found[1]).__name__ == "PackedLinear")
    state = found.state_dict()
    lb.unprepack_(found)
    assert torch.equal(found(x), y)
    other = quantized(recipe, x)
    with pytest.raises(RuntimeError, match=r"with a Hadamard transform in blocks of \d+, and this layer one without"):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match="without a Hadamard transform, and this layer one with"):
        found.load_state_dict(other.state_dict())
    exact = model()
    lb.dequantize_(found)
    wrong = ((found[1].weight - exact[1].weight).norm() / exact[1].weight.norm()).detach()
    assert type(found[1]) is nn.Linear and float(wrong) < (0.02 if recipe == "int8" else 0.2)


def test_calibration_adds_the_transform_and_methods_work_in_it():
    data = [torch.randn(64, 96) for _ in range(4)]
    x, exact = torch.cat(data), model()(torch.cat(data))
    lost = {}
    for method in (("hadamard", "nearest"), ("hadamard", "gptq")):
        found = model()
        calibration = lb.calibrate(found, "int4-weight-only:group32", data, method)
        lb.quantize_(found, "int4-weight-only:group32", calibration)
        assert found[1].recipe == lb.recipe("int4-weight-only:group32:hadamard")
        lost[method] = float((found(x) - exact).detach().norm())
    assert lost["hadamard", "gptq"] < 0.8 * lost["hadamard", "nearest"]
    same = model()
    lb.quantize_(same, "int4-weight-only:group32:hadamard", method="nearest")
    by_hand = model()
    lb.quantize_(
        by_hand,
        "int4-weight-only:group32",
        lb.calibrate(by_hand, "int4-weight-only:group32", data, ["hadamard", "nearest"]),
    )
    assert torch.equal(same[1].codes, by_hand[1].codes) and torch.equal(same(x), by_hand(x))


def test_what_does_not_transform_says_so():
    with pytest.raises(ValueError, match=r"does not support transform='hadamard'|is for inference"):
        lb.train.prepare_(model(), "int8:hadamard")
    with pytest.raises(ValueError, match="needs the same of the other"):
        lb.Recipe(lb.Gemm("int8:row", lb.Cast("int8:row", transform="hadamard")))
    assert lb.recipe("nvfp4:HADAMARD") == lb.recipe("nvfp4").rotated() == lb.recipe("nvfp4:hadamard").rotated()
    assert lb.Recipe.from_dict(lb.recipe("w4a8:hadamard").to_dict()) == lb.recipe("w4a8:hadamard")
    untouched = copy.deepcopy(lb.recipe("nvfp4"))
    assert untouched.rotation is None and lb.recipe("nvfp4:hadamard").rotation == 16
