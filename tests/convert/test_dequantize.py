"""dequantize_: plain layers that hold what the codes stand for, and are otherwise the layers that were quantized."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.bits import same_bits
from torch import nn

import lowbit as lb
from lowbit.memory import checkpoint_, uncheckpoint_
from lowbit.nn import QuantLinear


class Tagged(nn.Linear):
    """Computes what Linear does, and has something else to say."""

    def __init__(self, *args, tag):
        super().__init__(*args)
        self.tag = tag


class Conv1D(nn.Module):
    """As in transformers: weight [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def fake_(model: nn.Module, scheme: str) -> nn.Module:
    """The oracle: each matrix replaced by its fake-quantized numbers, as the layer lays it out."""
    with torch.no_grad():
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is None or p.dim() < 2 or name.startswith("bias"):
                    continue
                turned = isinstance(module, Conv1D)
                parts = p.chunk(3) if name == "in_proj_weight" else (p.t() if turned else p.movedim(1, -1).flatten(1),)
                made = torch.cat([lb.fake_quantize(part.contiguous(), scheme) for part in parts])
                p.copy_(made.t() if turned else made.reshape(p.movedim(1, -1).shape).movedim(-1, 1))
    return model


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(33, 16), nn.Linear(16, 5, bias=False)),
    "subclass": lambda: nn.Sequential(Tagged(33, 16, tag={"a": 1})),
    "conv2d": lambda: nn.Sequential(nn.Conv2d(3, 5, (3, 2), stride=2, padding=1), nn.Conv2d(5, 4, 1, bias=False)),
    "conv1d, conv3d": lambda: nn.Sequential(nn.Conv1d(6, 9, 3, groups=3), nn.Conv3d(4, 6, (2, 1, 3), bias=False)),
    "transformers' conv1d": lambda: nn.Sequential(Conv1D(6, 33)),
    "attention": lambda: nn.Sequential(nn.MultiheadAttention(16, 4, add_bias_kv=True)),
    "attention of three widths": lambda: nn.Sequential(nn.MultiheadAttention(16, 4, kdim=8, vdim=24, bias=False)),
    "encoder": lambda: nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["int8-weight-only", "nf4", "nvfp4", "uint4-weight-only"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_come_back_with_the_numbers_of_their_codes(name, recipe, dtype):
    model = MODELS[name]().to(dtype).eval()
    expected = fake_(copy.deepcopy(model), str(lb.recipe(recipe).weight))
    lb.quantize_(model, recipe, skip=(), method="nearest")
    report = lb.dequantize_(model)
    assert report.converted and kinds(model) == kinds(expected) and repr(model) == repr(expected)
    state, wanted = model.state_dict(), expected.state_dict()
    assert list(state) == list(wanted) and all(same_bits(state[key], wanted[key]) for key in wanted)
    assert all(p.requires_grad for p in model.parameters()) and not model[0].training
    plain = {key: value for key, value in vars(model[0]).items() if not key.startswith("_")}
    assert plain.keys() == {key for key in vars(expected[0]) if not key.startswith("_")}


def test_the_bias_is_the_same_parameter_and_what_was_frozen_stays_so():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    biases = [layer.bias for layer in model]
    lb.quantize_(model, "int8")
    lb.dequantize_(model)
    assert all(layer.bias is bias for layer, bias in zip(model, biases, strict=True))
    assert [layer.weight.requires_grad for layer in model] == [False, True]


def test_a_dtype_that_the_model_was_cast_to_is_kept():
    model = nn.Sequential(nn.Linear(8, 8))
    lb.quantize_(model, "int8")
    codes = model[0].weight
    model.bfloat16()
    lb.dequantize_(model)
    assert same_bits(model[0].weight.detach(), codes.dequantize(torch.bfloat16))


def test_shared_modules_and_tied_weights_stay_so():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model.alias = model[2]
    lb.quantize_(model, "nf4")
    lb.dequantize_(model)
    assert model[0].weight is model[1].weight and model[0].bias is not model[1].bias and model.alias is model[2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_know_what_they_were(copied):
    model = nn.Sequential(Tagged(8, 8, tag="mine"), nn.Conv2d(8, 4, 1))
    lb.quantize_(model, "int8")
    other = copied(model)
    lb.dequantize_(model)
    lb.dequantize_(other)
    assert kinds(other) == kinds(model) and other[0].tag == "mine"
    assert all(map(same_bits, other.state_dict().values(), model.state_dict().values()))


def test_loaded_models_come_back_as_well(tmp_path):
    make = lambda: nn.Sequential(Tagged(8, 8, tag="mine"), nn.MultiheadAttention(8, 2))
    model = make()
    lb.quantize_(model, "int8")
    lb.save_model(model, tmp_path)
    loaded = lb.load_model(tmp_path, make())
    lb.dequantize_(model)
    lb.dequantize_(loaded)
    assert kinds(loaded) == kinds(model) == kinds(make())
    assert all(map(same_bits, loaded.state_dict().values(), model.state_dict().values()))


def test_hooks_and_checkpointing_are_kept_through_both_conversions():
    model, x, seen = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8, requires_grad=True), []
    checkpoint_(model)
    handle = model[0].register_forward_hook(lambda module, args, y: seen.append(type(module)))
    lb.quantize_(model, "int8")
    lb.dequantize_(model)
    plain = copy.deepcopy(model)
    assert uncheckpoint_(plain).converted == ("0", "1") and type(plain[0]) is nn.Linear
    model(x).sum().backward()
    grad, x.grad = x.grad, None
    plain(x).sum().backward()
    assert same_bits(grad, x.grad) and type(model[1]).__name__ == "CheckpointedLinear"
    assert nn.Linear in seen
    handle.remove()


def test_fused_kernels_are_given_back():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()
    switches = lambda: (model.use_nested_tensor, *(layer.activation_relu_or_gelu for layer in model.layers))
    before = switches()
    lb.quantize_(model, "int8", skip=("layers.1",))
    assert switches() == (False, 0, before[2])
    lb.dequantize_(model)
    assert switches() == before


def test_a_layer_made_by_hand_stands_for_a_linear():
    made = QuantLinear(lb.quantize(torch.randn(4, 8), "int8:row"), None, lb.recipe("int8"))
    model = nn.Sequential(made)
    lb.dequantize_(model)
    assert type(model[0]) is nn.Linear and same_bits(model[0].weight.detach(), made.weight.dequantize())


def test_only_quantized_layers_are_touched_and_training_goes_on():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lb.quantize_(model, {"0": "int8"})
    plain = model[1]
    lb.dequantize_(model)
    assert model[1] is plain
    assert lb.train.prepare_(model).converted == ("0", "1")
    lb.train.convert_(model)
    assert lb.quantize_(model, "int8").converted == ("0", "1")


def test_refusals_leave_the_model_as_it_was():
    with pytest.raises(ValueError, match="dequantize_ found nothing to convert"):
        lb.dequantize_(nn.Sequential(nn.Linear(4, 4)))
    model = nn.Sequential(nn.Linear(4, 4))
    lb.quantize_(model, "int8")
    with pytest.raises(ValueError, match=r"the model itself is a QuantLinear.*nn.Sequential\(model\)"):
        lb.dequantize_(model[0])
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got dict"):
        lb.dequantize_({})
    assert type(model[0]) is QuantLinear
