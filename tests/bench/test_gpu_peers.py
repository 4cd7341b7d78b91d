"""Peers of products on GPUs, as far as a CPU can run them: torch's own, and packages by what stands in for them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowbit.bench import gpu_bench, gpu_peers

FP8 = torch.float8_e4m3fn


@pytest.fixture
def operands():
    return torch.randn(32, 128).bfloat16(), [torch.randn(64, 128).bfloat16() for _ in range(3)]


@pytest.fixture
def alone(monkeypatch):
    """No package is installed."""
    for name in ("torchao", "torchao.quantization", "bitsandbytes", "marlin", gpu_peers._MX):
        monkeypatch.setitem(sys.modules, name, None)


def test_every_offer_is_of_a_product_that_is_measured():
    assert set(gpu_peers.OFFERS) <= set(gpu_bench.PRODUCTS)


@pytest.mark.usefixtures("alone")
def test_a_package_that_is_not_installed_is_absent(operands):
    found = {names: set(gpu_peers.of(*operands, names)) for names in gpu_peers.OFFERS}
    there = {names: who for names, who in found.items() if who}
    assert there == {
        ("int8:row", "int8:row"): {"torch._int_mm"},
        ("fp8_e4m3:row", "fp8_e4m3:row"): {"torch._scaled_mm"},
        ("fp8_e4m3:tensor", "fp8_e4m3:tensor"): {"torch._scaled_mm"},
    }


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("scheme", ["fp8_e4m3:row", "fp8_e4m3:tensor"])
def test_each_weight_is_multiplied_by_a_call_of_its_number(scheme, operands):
    x, weights = operands
    case = gpu_peers.of(x, weights, (scheme, scheme))["torch._scaled_mm"]
    for index, weight in enumerate(weights):
        expected = x.to(FP8).float() @ weight.to(FP8).float().t()
        torch.testing.assert_close(case(index).float(), expected, rtol=1e-2, atol=1e-2)


def test_marlin_gets_fp16_and_a_layer_of_codes(monkeypatch, operands):
    class Layer(nn.Module):
        def __init__(self, k, n, groupsize):
            super().__init__()
            self.register_buffer("B", torch.zeros(k // 16, n * 2, dtype=torch.int))
            self.register_buffer("s", torch.zeros(k // groupsize, n, dtype=torch.half))

        def forward(self, x):
            return x.dtype, len(self.B.unique()) > 1, bool(self.s.all())

    monkeypatch.setitem(sys.modules, "marlin", SimpleNamespace(Layer=Layer))
    case = gpu_peers.of(*operands, (None, "int4:group128"))["marlin, fp16"]
    assert case(2) == (torch.float16, True, True)


def test_a_peer_that_refuses_is_left_out_with_its_reason(monkeypatch, operands, capsys):
    def refuse(*_, **__):
        raise ValueError("compute capability 8.9 is needed")

    peer = SimpleNamespace(functional=SimpleNamespace(quantize_4bit=refuse))
    monkeypatch.setitem(sys.modules, "bitsandbytes", peer)
    assert gpu_peers.of(*operands, (None, "nf4")) == {}
    assert "bitsandbytes: left out: compute capability 8.9 is needed" in capsys.readouterr().err


def test_torchao_is_given_the_layer_and_its_configuration(monkeypatch, operands):
    given = []

    def quantize_(model, config):
        given.append(config)
        assert torch.equal(model[0].weight, operands[1][len(given) - 1])

    fake = SimpleNamespace(quantize_=quantize_, Int8WeightOnlyConfig=lambda: "config")
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    case = gpu_peers.of(*operands, (None, "int8:row"))["torchao"]
    assert given == ["config"] * 3
    torch.testing.assert_close(case(1), operands[0] @ operands[1][1].t())
