"""Rows of lowbit.convert.register, and the adapters of fine-tuning libraries, which are left to be trained."""

from __future__ import annotations

import copy

import pytest
import torch
from support.bits import same_bits
from torch import nn

import lowbit as lb
from lowbit.convert import ADAPTERS
from lowbit.nn import QuantLinear


@pytest.fixture(autouse=True)
def the_table_is_restored():
    before = dict(ADAPTERS)
    yield
    ADAPTERS.clear()
    ADAPTERS.update(before)


class Logged(nn.Linear):
    """Overrides forward, and computes what Linear does."""

    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("cls", [Logged, f"{__name__}.Logged"], ids=["class", "name"])
def test_a_class_that_overrides_forward_is_converted_once_it_is_registered(cls):
    model = nn.Sequential(Logged(32, 8), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    assert "lowbit.convert.register(Logged, Linear)" in lb.quantize_(copy.deepcopy(model), "int8").left["0"]
    lb.convert.register(cls, nn.Linear)
    assert lb.quantize_(model, "int8").converted == ("0", "1") and type(model[0]) is QuantLinear
    assert same_bits(model[0].weight.codes, lb.quantize(plain[0].weight.detach(), "int8:row").codes)
    lb.dequantize_(model)
    assert type(model[0]) is Logged


def test_what_is_no_row_is_refused():
    with pytest.raises(TypeError, match="cls must be a class or its full name, got int"):
        lb.convert.register(3, nn.Linear)
    with pytest.raises(TypeError, match=r"dict is not a subclass of nn\.Module"):
        lb.convert.register(dict, nn.Linear)
    with pytest.raises(TypeError, match="adapter must be an Adapter or a class in the table, got str"):
        lb.convert.register(Logged, "Linear")
    with pytest.raises(ValueError, match=r"torch\.nn\.modules\.conv\.ConvTranspose1d is not in the table"):
        lb.convert.register(Logged, nn.ConvTranspose1d)


class Wrapped(nn.Module):
    """As peft wraps a Linear."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(32, 32)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 32, bias=False)})


@pytest.mark.parametrize(
    "convert", [lambda m, *a, **k: lb.quantize_(m, *a, **k), lb.train.prepare_], ids=["q", "train"]
)
def test_adapters_stay_even_if_nothing_is_skipped(convert):
    model = nn.ModuleDict({"q": Wrapped(), "head": nn.ModuleDict({"modules_to_save": nn.Linear(32, 32)})})
    report = convert(model, "fp8", skip=())
    assert report.converted == ("q.base_layer",)
    assert list(report.left) == ["q.lora_A.default", "q.lora_B.default", "head.modules_to_save"]
    assert "a recipe for '*lora_A*' converts it" in report.left["q.lora_A.default"]


def test_only_a_pattern_that_spells_them_converts_adapters():
    model = nn.ModuleDict({"q": Wrapped()})
    assert lb.quantize_(copy.deepcopy(model), {"q.*": "int8"}).converted == ("q.base_layer",)
    report = lb.quantize_(model, {"*": "int8", "*.lora_A.*": "nf4"})
    assert {row.name: row.recipe for row in report.layers} == {"q.base_layer": "int8", "q.lora_A.default": "nf4"}


# -- with transformers and peft ---------------------------------------------------------------------------------------
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_peft_then_quantize_trains_and_merges_after_dequantize():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(llama(), config)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    report = lb.quantize_(model, "nf4")
    assert len(report.converted) == 14
    assert all("for training" in reason for name, reason in report.left.items() if "lora" in name)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    ids, losses = torch.randint(0, 64, (2, 7)), []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with pytest.raises(AttributeError, match=r"lowbit.dequantize_\(model\)"):
            copy.deepcopy(model).merge_and_unload()
        lb.dequantize_(model)
        assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert not any("lora" in name for name, _ in merged.named_modules())


def test_tied_output_layers_stay_whatever_their_name():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertForMaskedLM(config)
    with pytest.warns(UserWarning, match="position_embeddings"):
        report = lb.quantize_(model, "int8")
    assert "embedding bert.embeddings.word_embeddings" in report.left["cls.predictions.decoder"]
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_accelerate_hooks_are_named_with_the_call_that_removes_them():
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(8, 8))
    hooks.add_hook_to_module(model[1], hooks.ModelHook())
    assert "accelerate.hooks.remove_hook_from_module(model" in lb.quantize_(model, "int8").left["1"]
    hooks.remove_hook_from_module(model, recurse=True)
    assert lb.quantize_(model, "int8", skip=("0",)).converted == ("1",)
    model = nn.Sequential(nn.Linear(8, 8))
    hooks.add_hook_to_module(model[0], hooks.ModelHook())
    hooks.remove_hook_from_module(model, recurse=True)
    x, plain = torch.randn(2, 8), copy.deepcopy(model)
    lb.train.prepare_(model)
    assert not torch.equal(model(x), plain(x))
    lb.train.convert_(model)
    assert same_bits(model(x), plain(x))
