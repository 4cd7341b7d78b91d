"""fold_: BatchNorm in the layer before it, against fp64; what is found, and what stays with which reason."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.bits import assert_same_bits
from support.models import trained_
from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub, QuantStub, fuse_modules

import lowbit as lb
from lowbit.convert import fold_
from lowbit.nn import QuantConv2d

LAYERS = {
    "conv1d": (nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), (2, 4, 9)),
    "conv2d": (nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6, eps=0.1)), (2, 4, 7, 6)),
    "depthwise": (nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8, affine=False)), (2, 8, 5, 5)),
    "conv3d": (nn.Sequential(nn.Conv3d(3, 5, 2), nn.BatchNorm3d(5)), (2, 3, 4, 4, 4)),
    "linear": (nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5), nn.ReLU()), (6, 9)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_the_numbers_are_those_of_fp64_rounded_once(name: str, dtype: torch.dtype):
    model, shape = LAYERS[name]
    model = trained_(copy.deepcopy(model)).to(dtype)
    plain = copy.deepcopy(model).double()
    report = fold_(model)
    assert report.converted == ("0 + 1",) and not report.left and type(model[1]) is nn.Identity
    layer, norm = plain[0], plain[1]
    factor = 1 / (norm.running_var + norm.eps).sqrt() * (1 if norm.weight is None else norm.weight)
    weight = layer.weight * factor.view(-1, *[1] * (layer.weight.dim() - 1))
    bias = ((0 if layer.bias is None else layer.bias) - norm.running_mean) * factor
    bias = bias if norm.bias is None else bias + norm.bias
    # fp64 itself may be off by some units of 2^-53: less than a unit in the last place of the dtype it is rounded to.
    unit = torch.finfo(dtype).eps
    assert bool(((model[0].weight.double() - weight).abs() <= unit * 0.5001 * weight.abs() + 1e-7).all())
    assert bool(((model[0].bias.double() - bias).abs() <= unit * 0.5001 * bias.abs() + 1e-7).all())
    x = torch.randn(shape, dtype=torch.float64)
    exact = copy.deepcopy(model).double()
    torch.testing.assert_close(exact(x), plain(x), rtol=16 * unit, atol=16 * unit)


class Block(nn.Module):
    """A residual block that calls its layers by name."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.bn1(self.conv1(x))))
        z = self.bn2(y)
        return F.relu(x + z + y) if self.branches else F.relu(x + z)


class Untraceable(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > -1e9 else x


X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))


def assert_near(model: nn.Module, plain: nn.Module, x: Tensor = X) -> None:
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)


def test_pairs_are_found_by_tracing():
    model = trained_(nn.Sequential(Block(), Block(branches=True)))
    plain = copy.deepcopy(model)
    report = fold_(model)
    assert report.converted == ("0.conv1 + 0.bn1", "0.conv2 + 0.bn2", "1.conv1 + 1.bn1")
    assert list(report.left) == ["1.bn2"] and "1.conv2 is also used elsewhere" in report.left["1.bn2"]
    assert "0.conv1 + 0.bn1" in str(report)
    assert_near(model, plain)


def test_what_cannot_be_traced_is_found_in_sequentials_or_named():
    model = trained_(nn.Sequential(Untraceable(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())))
    plain = copy.deepcopy(model)
    report = fold_(model)
    assert report.converted == ("1.0 + 1.1",)
    assert "torch.fx cannot trace the model (TypeError)" in report.left["0.bn1"] and "pairs=" in report.left["0.bn2"]
    assert_near(model, plain)
    assert fold_(model, [("0.conv1", "0.bn1"), ("0.conv2", "0.bn2")]).converted == (
        "0.conv1 + 0.bn1",
        "0.conv2 + 0.bn2",
    )
    assert_near(model, plain)


def shared() -> nn.Module:
    conv, norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    return nn.Sequential(conv, norm, nn.ReLU(), conv, norm)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    model[2].weight = model[0].weight
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model[0].register_forward_hook(lambda *args: None)
    return model


LEFT = {
    "shared": (shared, "called more than once"),
    "tied": (tied, "0 shares its weight or bias with 2"),
    "hooks": (hooked, "hooks between 0 and it"),
    "no statistics": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
        "no running statistics",
    ),
    "other": (lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4)), "no convolution or Linear is right before it"),
    "first": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)), "no convolution or Linear"),
    "computed": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), nn.BatchNorm2d(4)), "computed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_has_a_reason_and_its_numbers(name: str):
    make, reason = LEFT[name]
    model = trained_(make())
    plain, state = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    report = fold_(model)
    assert not report.converted and all(reason in text for text in report.left.values()) and report.left
    assert all(torch.equal(model.state_dict()[key], state[key]) for key in state)
    assert_same_bits(model(X), plain(X))


def test_pairs_are_of_patterns():
    model = trained_(nn.Sequential(Block(), Block()))
    plain = copy.deepcopy(model)
    report = fold_(model, [("conv1", "bn1"), ("*.conv2", "*.bn2")])
    assert report.converted == tuple(f"{i}.conv{k} + {i}.bn{k}" for k in (1, 2) for i in (0, 1))
    assert_near(model, plain)
    model = trained_(nn.Sequential(Block(), Block()))
    assert fold_(model, [(r"re:1\.conv1", r"re:1\.bn1")]).converted == ("1.conv1 + 1.bn1",)
    model = trained_(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)))
    for pairs in ([("[13]", "[02]")], [("1", "[02]")]):  # the convolution comes after; two norms and one layer
        with pytest.raises(
            ValueError, match=r"matches 1.* and \[02\] matches 0, 2, but each layer needs the BatchNorm"
        ):
            fold_(model, pairs)


def test_what_is_asked_for_and_impossible_is_an_error():
    model = trained_(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)))
    state = copy.deepcopy(model.state_dict())
    for pairs, message in (
        ([("0", "3")], "no module '3'"),
        (
            [("1", "2")],
            r"\('1', '2'\): expected a convolution or Linear and a BatchNorm, got a BatchNorm2d",
        ),
        ([("0", "1"), ("0", "1")], "'0' is in two pairs"),
        (["01", "2"], "pairs are of two names"),
    ):
        with pytest.raises(ValueError, match=message):
            fold_(model, pairs)
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        fold_(model.train())
    model.eval()[1].train()
    assert fold_(model).left["1"] == "it is in training mode; call model.eval() first"
    assert all(torch.equal(model.state_dict()[key], state[key]) for key in state)
    with pytest.raises(ValueError, match="no BatchNorm"):
        fold_(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="got list"):
        fold_([])


def test_a_quantized_layer_is_named():
    model = trained_(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    lb.quantize_(model, "int8")
    with pytest.raises(ValueError, match="0 is quantized already; call fold_ before"):
        fold_(model, [("0", "1")])


# -- torch.ao.quantization's conventions -------------------------------------------------------------------------------
class Stubbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(self.quant(x))))
        return self.dequant(self.fc(y.mean((2, 3))))


@pytest.mark.parametrize("fused", [False, True])
def test_stubs_and_fused_modules_go_through(fused: bool):
    model = trained_(Stubbed())
    plain = copy.deepcopy(model)
    if fused:
        model = fuse_modules(model, ["conv", "bn", "relu"])
    else:
        assert fold_(model).converted == ("conv + bn",)
    assert_near(model, plain)
    x = torch.randn(16, 4, 8, 8)
    trained = copy.deepcopy(model)
    calibration = lb.calibrate(model, "int8-static", [x])
    lb.quantize_(model, "int8-static", calibration)
    assert any(isinstance(module, QuantConv2d) for module in model.modules())
    with torch.no_grad():
        expected = plain(x)
        assert float((model(x) - expected).norm() / expected.norm()) < 0.02
        lb.qat.prepare_(trained, "int8-static")
        trained.train()(x)
        y = trained.eval()(x)
        lb.qat.convert_(trained)
        assert_same_bits(trained(x), y)
