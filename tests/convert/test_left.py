"""Layers that a conversion must leave, because they are more than their class says, and what it reports of them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from support.bits import same_bits
from torch import nn
from torch.nn.utils import parametrize, prune

import lowbit as lb
from lowbit.convert.quantize import replacements
from lowbit.memory import checkpoint_
from lowbit.models.wrap import replaced_forward
from lowbit.nn import QuantLinear
from lowbit.train import TrainLinear

CONVERSIONS = {"quantize_": lambda m: lb.quantize_(m, "int8"), "prepare_": lambda m: lb.train.prepare_(m, "fp8")}


def hooked(layer: nn.Module) -> None:
    """As accelerate's add_hook_to_module does it."""
    old = layer.forward
    layer.forward = functools.update_wrapper(functools.partial(lambda module, x: 2 * old(x), layer), old)


def pruned(name: str):
    return lambda layer: prune.random_unstructured(layer, name, amount=0.3)


class Half(nn.Module):
    def forward(self, w):
        return w / 2


# -- more than a Linear ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "its forward was replaced on the layer itself"),
        (lambda layer: setattr(layer, "forward", torch.tanh), "its forward was replaced"),
        (lambda layer: layer.register_module("adapter", nn.Linear(4, 4)), "it also holds adapter, which"),
        (lambda layer: layer.register_buffer("seen", torch.zeros(1)), "it also holds seen"),
        (lambda layer: layer.register_parameter("gain", nn.Parameter(torch.ones(4))), "it also holds gain"),
        (pruned("weight"), "its weight is computed from other tensors"),
        (pruned("bias"), "its bias is computed from other tensors"),
        (
            lambda layer: parametrize.register_parametrization(layer, "bias", Half()),
            "its bias is computed from other tensors",
        ),
    ],
)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_linears_that_are_more_are_left(conversion, change, reason):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    change(model[1])
    odd, x = model[1], torch.randn(3, 4)
    before = odd(x)
    report = CONVERSIONS[conversion](model)
    assert report.converted == ("0",) and list(report.left) == ["1"] and reason in report.left["1"]
    assert model[1] is odd and torch.equal(odd(x), before)
    assert f"left 1: {report.left['1']}" in str(report)


def test_a_model_of_such_layers_only_says_why_nothing_was_converted():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        hooked(layer)
    with pytest.raises(ValueError, match=r"nothing to convert(?s:.*)left 0, 1: its forward was replaced"):
        lb.quantize_(model, "int8")


def test_a_conv_with_a_pruned_bias_is_left():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
    pruned("bias")(model[0])
    assert "its bias is computed" in lb.quantize_(model, "int8").left["0"]


def test_nothing_is_loaded_into_a_layer_that_a_conversion_would_leave():
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 1))
    hooked(model[0])
    pruned("bias")(model[1])
    for name, reason in {"0": "its forward was replaced", "1": "its bias is computed"}.items():
        with pytest.raises(ValueError, match=f"'{name}' cannot be replaced by a quantized layer: .*{reason}"):
            replacements(model, {name: lb.recipe("int8")})


# -- attention -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (pruned("in_proj_weight"), "its in_proj_weight is computed"),
        (pruned("in_proj_bias"), "its in_proj_bias is computed"),
        (lambda m: pruned("weight")(m.out_proj), "of its out_proj: its weight is computed"),
        (lambda m: parametrize.register_parametrization(m, "in_proj_weight", Half()), "its in_proj_weight is computed"),
        (
            lambda m: parametrize.register_parametrization(m.out_proj, "weight", Half()),
            "of its out_proj: its weight is computed",
        ),
        (lambda m: setattr(m, "out_proj", nn.Sequential(m.out_proj)), "its out_proj is a Sequential, not a Linear"),
        (lambda m: m.out_proj.register_module("adapter", nn.Linear(8, 8)), "of its out_proj: it also holds adapter"),
        (lambda m: m.register_buffer("positions", torch.zeros(3)), "it also holds positions"),
        (lambda m: setattr(m, "forward", nn.MultiheadAttention(8, 2).forward), "its forward was replaced"),
    ],
)
def test_attention_that_is_more_is_left_whole(change, reason):
    model = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    change(model[1])
    kinds = [type(m) for m in model[1].modules()]
    report = lb.quantize_(model, "int8")
    assert report.converted == ("0",) and list(report.left) == ["1"] and reason in report.left["1"]
    assert kinds == [type(m) for m in model[1].modules()]


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_linear_whose_weight_attention_reads_is_not_trained_in_name_only():
    model = nn.Sequential(nn.Linear(8, 8), OwnForward(8, 2))
    model[1].out_proj = nn.Linear(8, 8)
    report = lb.train.prepare_(model)
    assert report.converted == ("0",) and "a OwnForward replaces forward" in report.left["1"]
    assert type(model[1].out_proj) is nn.Linear


# -- checkpointed layers ---------------------------------------------------------------------------------------------
def two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def outcome(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("first", ["checkpoint", "prepare"])
def test_checkpointed_layers_train_in_low_precision_and_come_back(first):
    x, plain, trained, model = torch.randn(4, 8), two(), two(), two()
    lb.train.prepare_(trained, "fp8")
    if first == "checkpoint":
        checkpoint_(model)
    assert lb.train.prepare_(model, "fp8").converted == ("0", "1")
    checkpoint_(model)
    recomputed = []
    forward = TrainLinear.forward
    TrainLinear.forward = lambda self, x: recomputed.append(1) or forward(self, x)
    try:
        got = outcome(model, x)
    finally:
        TrainLinear.forward = forward
    assert len(recomputed) == 4 and all(map(same_bits, got, outcome(trained, x)))
    twin = copy.deepcopy(model)
    assert lb.train.convert_(model).converted == ("0", "1")
    assert same_bits(model(x), plain(x)) and isinstance(twin[0], TrainLinear) and same_bits(twin(x), got[0])


def test_checkpointed_layers_stay_checkpointed_when_they_are_quantized():
    model, plain, x = two(), two(), torch.randn(4, 8)
    checkpoint_(model)
    for one in (model, plain):
        lb.quantize_(one, "int8")
    assert isinstance(model[0], QuantLinear) and type(model[0]).__name__ == "CheckpointedQuantLinear"
    assert all(map(same_bits, outcome(model, x), outcome(plain, x)))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(x), plain(x))


def test_checkpointing_keeps_the_forward_that_a_layer_was_given():
    model, plain, x = two(), two(), torch.randn(4, 8)
    hooked(model[0])
    hooked(plain[0])
    checkpoint_(model)
    assert checkpoint_(model).converted == ("0", "1") and replaced_forward(model[0]) is not None
    assert all(map(same_bits, outcome(model, x), outcome(plain, x)))
    report = lb.quantize_(model, "int8")
    assert report.converted == ("1",) and "its forward was replaced" in report.left["0"]


def test_a_forward_given_to_a_layer_in_training_is_named_before_it_is_turned_back():
    model = two()
    lb.train.prepare_(model)
    hooked(model[1])
    with pytest.raises(ValueError, match=r"the forward of 1 was replaced on the layer itself.*call convert_ again"):
        lb.train.convert_(model)
    assert type(model[0]) is type(model[1]) is TrainLinear
    del model[1].forward
    assert lb.train.convert_(model).converted == ("0", "1")


# -- the report, and arguments that are none -------------------------------------------------------------------------
class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, 4))
        self.line, self.norm, self.embed = nn.Linear(4, 4), nn.LayerNorm((3, 4)), nn.Embedding(4, 4)
        self.convs = nn.ModuleList(nn.ConvTranspose1d(4, 4, 1) for _ in range(6))
        self.up, self.rnn, self.pair = nn.ConvTranspose2d(4, 4, 1), nn.LSTM(4, 4), nn.Bilinear(4, 4, 4)
        self.slope = nn.PReLU()


def test_other_modules_with_weights_are_named_in_a_line_for_each_class():
    report = lb.quantize_(Many(), "int8")
    assert report.converted == ("line",)
    assert list(report.left) == ["", *(f"convs.{i}" for i in range(6)), "up", "rnn", "pair"]
    for line in (
        "left the model itself: the class Many is not supported",
        "left convs.0, convs.1, convs.2, convs.3 and 2 more: the class ConvTranspose1d is not supported",
        "left rnn: the class LSTM is not",
    ):
        assert line in str(report)
    report = lb.quantize_(Many(), "int8", skip=("convs", "up"))
    assert list(report.left) == ["", "rnn", "pair"] and report.skipped[-1] == "up" and len(report.skipped) == 7


@pytest.mark.parametrize("conversion", [lb.quantize_, lb.train.prepare_])
def test_what_is_no_model_or_no_recipe_is_a_clear_error(conversion):
    with pytest.raises(TypeError, match=r"the model must be an nn\.Module, got dict"):
        conversion({}, "fp8")
    with pytest.raises(TypeError, match=r"a recipe is a Recipe or one of .*int8, .*; got NoneType"):
        conversion(two(), None)


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_layer_without_a_shape_is_refused_until_it_has_seen_an_input(conversion):
    model = nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="1 is a LazyLinear whose weight has no shape yet; call the model on one inp"):
        CONVERSIONS[conversion](model)
    assert lb.quantize_(copy.deepcopy(model), "int8", skip=("1",)).converted == ("0",)
    model(torch.randn(2, 4))
    assert CONVERSIONS[conversion](model).converted == ("0", "1")


def test_a_layer_compiled_in_place_is_refused():
    model = two()
    model[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"1 is compiled by itself.*quantize first, then compile"):
        lb.quantize_(model, "int8")


def test_skip_that_is_no_collection():
    with pytest.raises(TypeError, match="skip: expected a pattern or several, got None"):
        lb.quantize_(nn.Sequential(nn.Linear(4, 4)), "int8", skip=None)


@pytest.mark.parametrize("convert", [lambda m: lb.quantize_(m, "int8"), lambda m: lb.train.prepare_(m, "fp8")])
def test_a_weight_in_float64_is_refused_with_its_name(convert):
    with pytest.raises(TypeError, match=r"layer '0': the weight is torch.float64.*call model.float\(\)"):
        convert(nn.Sequential(nn.Linear(4, 4).double()))


def test_attention_with_biases_of_key_and_value_shares_nothing(recwarn):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(64, 4, add_bias_kv=True)})
    lb.quantize_(model, "int8")
    assert not [w for w in recwarn if "shared its weight" in str(w.message)]


def test_dequantize_unpacks_and_unpack_leaves_what_is_not_packed():
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 8))
    lb.quantize_(model, {"0": "int8", "1": "nf4"})
    expected = [layer.weight.dequantize() for layer in model]
    lb.prepack_(model)
    assert list(lb.unprepack_(copy.deepcopy(model)).converted) in (["0"], [])
    lb.dequantize_(model)
    assert all(torch.equal(layer.weight, w) for layer, w in zip(model, expected, strict=True))
    plain = nn.Sequential(nn.Linear(8, 8))
    lb.quantize_(plain, "nf4")
    assert lb.unprepack_(plain).converted == () and type(plain[0]) is QuantLinear
