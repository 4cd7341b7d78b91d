"""peft on quantized layers: only adapters train, gradients against fp64, merging, saving, several adapters, DoRA."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.convert import prepack
from lowbit.datafree import default_data_free

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5")

from lowbit.integrations.peft import (  # noqa: E402
    LoraQuantLinear,
    MethodRefused,
    from_pretrained,
    get_peft_model,
    register,
)

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
RECIPES = ["nf4", "int4-weight-only:group32", "nvfp4-weight-only"]
TOKENS = torch.arange(12).reshape(2, 6)
LLAMA = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(recipe: object = "nf4") -> nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    lb.quantize_(model, recipe)
    return model


class Net(nn.Module):
    """One Linear layer, with a bias."""

    def __init__(self, cols: int = 64, rows: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(cols, rows)

    def forward(self, x):
        return self.first(x)


def net(recipe: str, adapter: str = "default", **config: object) -> nn.Module:
    """A quantized Net with an adapter that is not zero."""
    torch.manual_seed(0)
    model = Net()
    lb.quantize_(model, recipe)
    config = {"target_modules": ["first"], "r": 4, "lora_alpha": 6, **config}
    model = get_peft_model(model, peft.LoraConfig(**config), adapter)
    stir(model, adapter)
    return model


def stir(model: nn.Module, adapter: str) -> None:
    generator = torch.Generator().manual_seed(len(adapter))
    for name, value in model.named_parameters():
        if f"lora_B.{adapter}" in name:
            nn.init.normal_(value, std=0.1, generator=generator)
        if f"lora_magnitude_vector.{adapter}" in name:
            value.data.mul_(1.25)


def exact(layer: nn.Module, adapters: tuple[str, ...] = ("default",), dora: bool = False) -> dict[str, torch.Tensor]:
    """The tensors that the layer computes with, in fp64, those of adapters as leaves."""
    base = layer.base_layer
    found = {"weight": base.weight.dequantize(torch.float32).double(), "bias": base.bias.detach().double()}
    for name in adapters:
        for part in ("lora_A", "lora_B", *(["lora_magnitude_vector"] if dora else [])):
            value = getattr(layer, part)[name].weight.detach().double()
            found[f"{part}.{name}"] = value.requires_grad_()
    return found


def oracle(x, t, scaling: float, adapter: str = "default", dora: bool = False):
    """LoRA and DoRA by their papers, in the dtype of the tensors; DoRA's norm is a constant for the gradient."""
    delta = scaling * t[f"lora_B.{adapter}"] @ t[f"lora_A.{adapter}"]
    weight = t["weight"] + delta
    if dora:
        norm = weight.detach().norm(dim=1, keepdim=True)
        weight = t[f"lora_magnitude_vector.{adapter}"][:, None] / norm * weight
    return x @ weight.T + t["bias"]


def close(value, expected, bound: float = 1e-5) -> bool:
    return bool((value.double() - expected).norm() <= bound * expected.norm())


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_only_adapters_train_and_their_gradients_are_those_of_fp64(recipe, dora):
    model = net(recipe, use_dora=dora)
    layer = model.base_model.model.first
    assert type(layer) is LoraQuantLinear
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    parts = ["lora_A.default.weight", "lora_B.default.weight"]
    parts += ["lora_magnitude_vector.default.weight"] if dora else []
    assert trained == {f"base_model.model.first.{part}" for part in parts}

    x = torch.randn(3, 5, 64, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    y = model(x)
    t = exact(layer, dora=dora)
    expected = oracle(x64, t, layer.scaling["default"], dora=dora)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad.double())
    assert close(y, expected)
    assert close(x.grad, x64.grad)
    for part in parts:
        assert close(layer.get_parameter(part).grad, t[part.removesuffix(".weight")].grad), part


def test_dropout_reaches_the_adapter_alone():
    model = net("nf4", lora_dropout=0.5)
    x = torch.randn(4, 64)
    layer = model.base_model.model.first
    torch.manual_seed(3)
    y = model.train()(x)
    torch.manual_seed(3)
    dropped = torch.dropout(x, 0.5, True)
    delta = layer.lora_B["default"](layer.lora_A["default"](dropped)) * layer.scaling["default"]
    assert torch.equal(y, layer.base_layer(x) + delta)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_merging_quantizes_the_sum_and_unmerging_gives_every_bit_back(recipe, dora):
    model = net(recipe, use_dora=dora).eval()
    layer = model.base_model.model.first
    x = torch.randn(4, 64)
    before, state = model(x), {k: v.clone() for k, v in layer.base_layer.state_dict().items()}
    t = exact(layer, dora=dora)
    eye = oracle(torch.eye(64, dtype=torch.float64), {**t, "bias": 0}, layer.scaling["default"], dora=dora).T
    model.merge_adapter()
    merged = layer.base_layer.weight
    assert merged.scheme == lb.recipe(recipe).weight
    expected = default_data_free(merged.scheme).solve(eye.float(), merged.scheme)
    wrong = (merged.codes != expected.codes).float().mean()
    assert wrong < 0.02, "but for numbers at the border of two codes, fp64 gives the codes that fp32 gave"
    assert close(merged.dequantize(), expected.dequantize().double(), 0.02)
    assert torch.equal(model(x), layer.base_layer(x))
    model.unmerge_adapter()
    assert all(torch.equal(v, state[k]) for k, v in layer.base_layer.state_dict().items())
    assert torch.equal(model(x), before)

    merged_model = copy.deepcopy(model).merge_and_unload()
    assert type(merged_model.first) is lb.nn.QuantLinear and merged_model.first.recipe == lb.recipe(recipe)
    lb.dequantize_(model)
    plain = model.merge_and_unload()
    assert type(plain.first) is nn.Linear and close(plain.first.weight.detach(), eye.detach())
    assert close(plain(x), before.detach().double())


def test_several_adapters_are_merged_at_once_and_in_any_order():
    model = net("nf4").eval()
    model.add_adapter("second", register(peft.LoraConfig(target_modules=["first"], r=2, use_dora=True)))
    stir(model, "second")
    layer = model.base_model.model.first
    x = torch.randn(4, 64)
    one = model(x)
    model.set_adapter("second")
    two = model(x)
    assert not torch.allclose(one, two)
    t = exact(layer, ("second",), dora=True)
    assert close(two, oracle(x.double(), t, layer.scaling["second"], "second", dora=True))
    with model.disable_adapter():
        assert torch.equal(model(x), layer.base_layer(x))
    base = copy.deepcopy(layer.base_layer)
    model.merge_adapter(["default"])
    model.merge_adapter(["second"])
    assert layer.merged_adapters == ["default", "second"]
    in_steps = layer.base_layer.weight.dequantize()
    model.unmerge_adapter()
    assert torch.equal(layer.base_layer.codes, base.codes)
    model.merge_adapter(["default", "second"])
    assert torch.equal(layer.base_layer.weight.dequantize(), in_steps)
    with model.disable_adapter():
        assert torch.equal(model(x), base(x)) and not layer.merged


def test_a_merge_that_fails_leaves_the_layer_as_it_was():
    model = net("nf4").eval()
    x = torch.randn(4, 64)
    layer = model.base_model.model.first
    layer.lora_B["default"].weight.data[0, 0] = math.inf
    codes = layer.base_layer.codes.clone()
    for safe in (False, True):
        with pytest.raises(ValueError, match="NaN"):
            model.merge_adapter(safe_merge=safe)
        assert not layer.merged and torch.equal(layer.base_layer.codes, codes)
    model.disable_adapter_layers()
    assert model(x).isfinite().all()


# -- models -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_language_model_learns_and_its_adapter_is_saved_and_loaded(tmp_path, dora):
    model = llama()
    expected = model(TOKENS).logits.detach()
    config = peft.LoraConfig(target_modules="all-linear", r=4, use_dora=dora, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    assert len(config.target_modules) == 14, "all but the output layer"
    assert torch.equal(model(TOKENS).logits, expected)
    codes = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(p, codes[name]) for name, p in model.named_parameters() if name in codes)
    trained = model.eval()(TOKENS).logits
    model.save_pretrained(tmp_path)

    again = from_pretrained(llama(), tmp_path)
    assert torch.equal(again(TOKENS).logits, trained)
    assert not any(p.requires_grad for p in again.parameters())
    from_pretrained(again, tmp_path, "other", is_trainable=True)
    again.set_adapter("other")
    assert torch.equal(again(TOKENS).logits, trained)
    assert any(p.requires_grad for p in again.parameters())
    with again.disable_adapter():
        assert torch.equal(again(TOKENS).logits, expected)
    lb.prepack_(again)  # nf4 is not packed, and stays usable
    assert torch.equal(again(TOKENS).logits, trained)

    merged = again.merge_and_unload()
    logits = merged(TOKENS).logits
    merged.save_pretrained(tmp_path / "merged")
    import lowbit.integrations.transformers  # noqa: F401

    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(loaded(TOKENS).logits, logits)


def test_a_layer_of_the_other_orientation():
    """GPT-2's Conv1D holds its weight as [in, out]; a QuantLinear of it does not."""
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    lb.quantize_(model, "nf4")
    told = peft.LoraConfig(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, use_dora=True)
    model = get_peft_model(model, told).eval()
    stir(model, "default")
    expected = model(TOKENS).logits
    lb.dequantize_(model)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    merged = model.merge_and_unload()
    assert type(merged.transformer.h[0].attn.c_attn).__name__ == "Conv1D"
    torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)


# -- what is refused --------------------------------------------------------------------------------------------------
def test_what_cannot_have_adapters_says_so(monkeypatch):
    monkeypatch.setattr(prepack, "no_gain_by_packing", lambda weight, input, cols: None)
    model = Net()
    lb.quantize_(model, "int8", prepack=True)
    config = {"target_modules": ["first"]}
    with pytest.raises(ValueError, match=r"first is packed; call lowbit.unprepack_"):
        get_peft_model(model, peft.LoraConfig(**config))
    model = nn.Sequential()
    model.first = nn.Conv2d(4, 8, 3)
    lb.quantize_(model, "int8")
    with pytest.raises(ValueError, match="first is a convolution"):
        get_peft_model(model, peft.LoraConfig(**config))
    for init in ("pissa", "olora"):
        with pytest.raises(ValueError, match=f"'{init}' changes the weight of first"):
            net("nf4", init_lora_weights=init)
    with pytest.raises(ValueError, match="variant"):
        net("nf4", alora_invocation_tokens=[1])
    model = net("int8").eval()
    lb.prepack_(model)
    with pytest.raises(ValueError, match="merge: the layer is packed"):
        model.merge_adapter()
    with pytest.raises(RuntimeError, match="no backward pass"):
        model(torch.randn(2, 64, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("config", [
    peft.IA3Config(target_modules=["first"], feedforward_modules=[]), peft.OFTConfig(target_modules=["first"]),
    peft.VeraConfig(target_modules=["first"]), peft.LoHaConfig(target_modules=["first"]),
    peft.AdaLoraConfig(target_modules="all-linear", total_step=10),
], ids=lambda config: config.peft_type.value)  # fmt: skip
def test_other_methods_are_refused_with_what_to_do(config):
    model = Net()
    lb.quantize_(model, "nf4")
    with pytest.raises(MethodRefused, match=r"LoRA and DoRA work.*lowbit.dequantize_\(model\) first. peft says: \S+"):
        peft.get_peft_model(model, config)
    model = Net()
    lb.quantize_(model, "nf4")
    lb.dequantize_(model)
    assert peft.get_peft_model(model, config)(torch.randn(2, 64)).requires_grad


def test_embeddings_and_experts_are_refused_by_name():
    model = llama({"*": "nf4", "*embed_tokens": "int8-weight-only"})
    with pytest.raises(ValueError, match=r"model.embed_tokens is an embedding; leave it out of target_modules"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["embed_tokens"]))


# -- evaluation in the middle of training ------------------------------------------------------------------------------
def evaluate(model: nn.Module) -> None:
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(input_ids=TOKENS, labels=TOKENS)
        model.generate(input_ids=TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.train()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpoints"])
@pytest.mark.parametrize("recipe", [*RECIPES, "int8", "int8-weight-only", "nvfp4", "mxfp4"])
def test_evaluation_changes_no_bit_of_training(recipe, checkpointed):
    """Before the first step, between a forward and its backward, and between steps."""
    model = peft.get_peft_model(llama(recipe), peft.LoraConfig(target_modules="all-linear", r=2)).train()
    if checkpointed:
        lb.memory.checkpoint_(model, "block")
    stir(model, "default")
    other = copy.deepcopy(model)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    losses = {}
    for trained, evaluates in ((model, True), (other, False)):
        optimizer = lb.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2)
        losses[evaluates] = []
        for step in range(3):
            if evaluates:
                evaluate(trained)
            loss = trained(input_ids=TOKENS + step, labels=TOKENS + step).loss
            if evaluates:
                evaluate(trained)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[evaluates].append(loss.detach())
    assert torch.equal(torch.stack(losses[True]), torch.stack(losses[False]))
    same = dict(other.named_parameters())
    assert all(torch.equal(p, same[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


# -- calls of peft and trl, with nothing of lowbit but quantize_ ------------------------------------------------------
def test_peft_itself_knows_quantized_layers(tmp_path):
    model = llama()
    expected = model(TOKENS).logits
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM"))
    assert sum(type(module) is LoraQuantLinear for module in model.modules()) == 14
    model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    stir(model, "default")
    trained = model(TOKENS).logits
    assert not torch.equal(trained, expected)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(llama(), tmp_path)
    assert torch.equal(again(TOKENS).logits, trained)
    inside = peft.inject_adapter_in_model(peft.LoraConfig(target_modules="all-linear"), llama())
    assert sum(type(module) is LoraQuantLinear for module in inside.modules()) == 14


def test_trl_trains_adapters_on_quantized_layers(tmp_path):
    trl, datasets, tokenizers = (pytest.importorskip(name) for name in ("trl", "datasets", "tokenizers"))
    words = tokenizers.models.WordLevel({str(i): i for i in range(100)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="0", eos_token="2", unk_token="0"
    )
    args = trl.SFTConfig(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"input_ids": [list(range(3, 15))] * 2})
    config = peft.LoraConfig(target_modules="all-linear")
    trainer = trl.SFTTrainer(llama(), args, train_dataset=data, processing_class=tokenizer, peft_config=config)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert len(changed) == 14 and all("lora_B" in name for name in changed), "lora_A has no gradient while B is 0"


@pytest.mark.parametrize("fused", ["not", "before", "after"])
def test_fuse_loss_under_a_trainer_of_trl_that_fuses_the_loss_itself(tmp_path, fused):
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    if not hasattr(sft, "add_fused_lm_head"):
        pytest.skip("this trl does not fuse the loss")
    model = llama()
    plain = copy.deepcopy(model).train()
    if fused == "before":
        lb.memory.fuse_loss_(model)
    sft.add_fused_lm_head(model.train())
    sft.add_fused_lm_head(plain)
    if fused == "after":
        with pytest.raises(ValueError, match="whose forward is that of trl"):
            lb.memory.fuse_loss_(model)
    batch = {"input_ids": TOKENS, "labels": TOKENS, "fused_lm_head": True}
    assert torch.equal(model(**batch).loss, plain(**batch).loss)


@pytest.mark.slow
def test_lowbit_imported_before_peft_does_the_same():
    code = """
import lowbit as lb, sys
assert not {"peft", "transformers"} & sys.modules.keys()
from torch import nn
model = nn.Sequential(nn.Linear(64, 32))
lb.quantize_(model, "nf4")
import peft
model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
print(type(model.base_model.model[0]).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "LoraQuantLinear\n", done.stderr
