"""The flow of torch.ao.quantization's eager mode: stubs, BatchNorm folded, calibrated, static int8, in every bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.bits import assert_same_bits
from support.models import trained_
from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub, QuantStub, fuse_modules

import lowbit as lb
from lowbit.convert import fold_
from lowbit.nn import QuantLinear
from lowbit.nn.conv import QuantConv

GROUPS = [["conv", "bn", "relu"], ["depthwise", "bn2", "relu2"], ["fc", "bn3"]]


class Network(nn.Module):
    """A network as its documentation has one: every layer with its BatchNorm, between two stubs."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Conv2d(3, 12, 3, stride=2, padding=1, bias=False)
        self.bn, self.relu = nn.BatchNorm2d(12), nn.ReLU()
        self.depthwise = nn.Conv2d(12, 12, 5, padding=2, groups=12)
        self.bn2, self.relu2 = nn.BatchNorm2d(12), nn.ReLU()
        self.fc, self.bn3, self.relu3 = nn.Linear(12, 20, bias=False), nn.BatchNorm1d(20), nn.ReLU()
        self.out = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(self.quant(x))))
        y = self.relu2(self.bn2(self.depthwise(y)))
        y = self.relu3(self.bn3(self.fc(y.mean((2, 3)))))
        return self.dequant(self.out(y))


def network() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return trained_(Network()), [torch.randn(6, 3, 11, 9) for _ in range(3)]


def folded_weight(plain: nn.Module, layer: str, norm: str | None) -> np.ndarray:
    """The weight with the BatchNorm in it, in fp64 rounded once, ``[O, ...]``."""
    weight = getattr(plain, layer).weight.detach().double()
    if norm is not None:
        bn = getattr(plain, norm)
        factor = bn.weight.detach().double() / (bn.running_var.double() + bn.eps).sqrt()
        weight = weight * factor.view(-1, *[1] * (weight.dim() - 1))
    return weight.float().numpy()


def extremes(model: nn.Module, name: str, batches: list[Tensor]) -> tuple[np.float32, np.float32]:
    """The least and the greatest number that a layer of the plain model is given, 0 among them."""
    given: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda layer, args: given.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    hook.remove()
    numbers = torch.cat([x.flatten() for x in given]).numpy()
    return min(np.float32(0), numbers.min()), max(np.float32(0), numbers.max())


def multiplied(layer: nn.Module, plain: nn.Module, weight: np.ndarray, ends: tuple[np.float32, np.float32], x: Tensor):
    """Docs/numerics.md sections 3 and 9: codes by division, exact sums of integers, one epilogue in fp32.

    The input's scale is that of the ends but for what float layers before it round differently in calibration.
    """
    low, high = ends
    found = (layer.linear if isinstance(layer, QuantConv) else layer).input_scales
    scale = np.float32(found.scale.item())
    if layer.recipe.input.affine:
        np.testing.assert_allclose(scale, (high - low) / np.float32(255), rtol=1e-6)
        zero = np.clip(np.rint(np.float32(0) - low / scale), 0, 255)
        assert int(found.zero_point) == zero
        values = np.clip(np.rint(x.numpy() / scale) + zero, 0, 255) - zero
    else:
        np.testing.assert_allclose(scale, max(-low, high) / np.float32(127), rtol=1e-6)
        values = np.clip(np.rint(x.numpy() / scale), -128, 127)
    rows = (slice(None), *[None] * (weight.ndim - 1))
    scales = np.abs(weight).reshape(len(weight), -1).max(1) / np.float32(127)
    codes = np.rint(weight / scales[rows])
    a, b = torch.from_numpy(values).long().double(), torch.from_numpy(codes).long().double()
    if isinstance(plain, nn.Linear):
        sums = F.linear(a, b)
    else:
        sums = F.conv2d(a, b, None, plain.stride, plain.padding, 1, plain.groups)
    assert float(sums.abs().max()) < 2**31 and bool((sums == sums.round()).all())
    each = (None, slice(None), *[None] * (sums.dim() - 2))
    return torch.from_numpy(sums.float().numpy() * (scale * scales)[each] + layer.bias.detach().numpy()[each])


@pytest.mark.parametrize("recipe", ["int8-static", "int8-static-affine"])
@pytest.mark.parametrize("fused", [False, True], ids=["fold_", "fuse_modules"])
def test_every_layer_is_its_integers(fused: bool, recipe: str):
    model, batches = network()
    original = copy.deepcopy(model)
    if fused:
        model = fuse_modules(model, GROUPS)
    else:
        assert fold_(model).converted == ("conv + bn", "depthwise + bn2", "fc + bn3")
    plain = copy.deepcopy(model)
    torch.testing.assert_close(plain(batches[0]), original(batches[0]), rtol=1e-4, atol=1e-4)

    report = lb.quantize_(model, recipe, lb.calibrate(model, recipe, batches, ("nearest", "minmax")))
    assert not report.left and len(report.converted) == 4
    norms = {"conv": "bn", "depthwise": "bn2", "fc": "bn3", "out": None}
    seen: list[str] = []

    def check(name: str, layer: nn.Module, x: Tensor, y: Tensor) -> None:
        key = name.partition(".")[0]
        own = plain.get_submodule(name).weight.detach().numpy()  # fuse_modules folds in fp32, by arithmetic of its own
        weight = own if fused else folded_weight(original, key, norms[key])
        ends = extremes(plain, name, batches)
        assert_same_bits(y, multiplied(layer, getattr(original, key), weight, ends, x))
        seen.append(key)

    for name, layer in model.named_modules():
        if isinstance(layer, QuantConv) or (isinstance(layer, QuantLinear) and not name.endswith("linear")):
            layer.register_forward_hook(lambda layer, args, y, name=name: check(name, layer, args[0], y))
    x = torch.randn(4, 3, 11, 9) * 2  # beyond what calibration saw, so that some codes saturate
    with torch.no_grad():
        y = model(x)
        assert seen == list(norms)
        expected = original(batches[0])
        assert float((model(batches[0]) - expected).norm() / expected.norm()) < 0.05
        for layer in model.modules():
            layer._forward_hooks.clear()
        lb.prepack_(model)
        assert_same_bits(model(x), y)


def test_the_flow_of_training():
    """prepare_qat: the ranges of the batches, frozen; what is deployed has the bits that were trained."""
    model, batches = network()
    fold_(model)
    lb.qat.prepare_(model, "int8-static-affine", observe=len(batches))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x in batches:
        model.train()(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    y = model.eval()(batches[0])
    lb.qat.convert_(model)
    assert_same_bits(model(batches[0]), y)
