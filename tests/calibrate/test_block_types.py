"""GGUF's block types through calibration and quantization-aware training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.datafree import DATA_FREE

RECIPES = ["q4_0", "q8_0", "q5_0", "q4_1", "q5_1", "q4_k", "q5_k", "q6_k", "mxfp4-weight-only"]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(256, 48), nn.ReLU(), nn.Linear(48, 16))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(256, 256, generator=generator) * torch.linspace(0.1, 3, 256)
    return [torch.randn(32, 256, generator=generator) @ mixed / 16 for _ in range(4)]


def output_error(model: nn.Module, plain: nn.Module) -> float:
    with torch.no_grad():
        return sum(float((model(x) - plain(x)).square().sum() / plain(x).square().sum()) for x in batches())


@pytest.mark.parametrize("recipe", RECIPES)
def test_gptq_lowers_the_output_error(recipe, tmp_path):
    plain = net()
    nearest, calibrated = copy.deepcopy(plain), copy.deepcopy(plain)
    lb.quantize_(nearest, recipe, method="nearest", skip=())
    found = lb.calibrate(plain, recipe, batches(), method="guided-gptq", skip=())
    lb.quantize_(calibrated, recipe, found, skip=())
    assert output_error(calibrated, plain) < 0.8 * output_error(nearest, plain)
    found.save(tmp_path / "calibration")
    again = copy.deepcopy(plain)
    lb.quantize_(again, recipe, lb.Calibration.load(tmp_path / "calibration"), skip=())
    for name, part in calibrated.state_dict().items():
        assert torch.equal(part, again.state_dict()[name]), name


@pytest.mark.parametrize("method", ["search", "magnitude"])
@pytest.mark.parametrize("recipe", ["q4_1", "q4_k", "q6_k"])
def test_other_methods_lose_no_more_than_nearest(recipe, method):
    plain = net()
    nearest, calibrated = copy.deepcopy(plain), copy.deepcopy(plain)
    lb.quantize_(nearest, recipe, method="nearest", skip=())
    lb.quantize_(calibrated, recipe, lb.calibrate(plain, recipe, batches(), method=method, skip=()), skip=())
    assert output_error(calibrated, plain) < 1.05 * output_error(nearest, plain)


def test_searched_scales_are_never_worse():
    weight = torch.randn(24, 600)
    for scheme in ("uint4:group32:fp16:min", "uint4:col:bf16:min", "q4_k", "q5_k", "q6_k"):
        nearest, searched = (DATA_FREE[name].solve(weight, lb.scheme(scheme)) for name in ("nearest", "mse"))
        losses = [float((q.dequantize() - weight).square().sum()) for q in (nearest, searched)]
        assert losses[1] < losses[0], scheme


@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_prepared_model_has_the_weights_of_the_converted_one(recipe, learn_scale):
    model, x = net(), batches()[0]
    lb.qat.prepare_(model, recipe, learn_scale=learn_scale, skip=())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first = None
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
    assert (model(x) - 1).square().mean().item() < first
    if learn_scale:
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    weights = [layer.quantized_weight for layer in (model[0], model[2])]
    y = model(x)
    lb.qat.convert_(model)
    for layer, weight in zip((model[0], model[2]), weights, strict=True):
        for name, part in weight.parts.items():
            assert torch.equal(layer.weight.parts[name], part), name
    assert torch.equal(model(x), y)


def test_bits_choose_among_block_types():
    plain = net()
    found = lb.sensitivity(plain, ["q4_k", "q6_k", "q8_0"], batches(), skip=())
    chosen = found.choose(bits=6.8)
    assert {row.name for row in chosen.values()} <= {"q4-k", "q6-k", "q8-0"}
    lb.quantize_(plain, chosen, skip=())
