"""The loss of causal language models without their logits, beside transformers' own in fp64."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.models.wrap import wrappers
from lowbit.plan.settings import TrainingSettings, prepare_model_
from lowbit.tiled.head_call import watched_calls

transformers = pytest.importorskip("transformers", minversion="5")

SHAPE = {"vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96}  # fmt: skip
IDS = torch.randint(1, 320, (2, 40), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.3, -100)

MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "tied": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "bias": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SHAPE)),
    "soft cap": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SHAPE, head_dim=12, final_logit_softcapping=0.3)
    ),
    "experts": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **SHAPE, num_local_experts=3, output_router_logits=True, experts_implementation="eager"
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=320, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    ),
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double().train()


def trained(model: nn.Module, **options) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(input_ids=IDS, labels=LABELS, **options)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_logits(model: nn.Module, options: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss in fp64, where transformers' own is in fp32, and its gradients."""
    model.zero_grad()
    output = model(input_ids=IDS)
    targets = options.get("shift_labels", torch.nn.functional.pad(LABELS, (0, 1), value=-100)[:, 1:])
    rows = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = rows / options.get("num_items_in_batch", (targets != -100).sum())
    if "aux_loss" in output:
        loss = loss + model.router_aux_loss_coef * output.aux_loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(77)}, {"shift_labels": IDS.roll(3, 1)}])
def test_losses_and_gradients_are_those_of_the_logits(name, options):
    model = made(name)
    loss, expected = by_logits(model, options)
    lb.memory.fuse_loss_(model)
    fused, gradients = trained(model, **options)
    assert fused.logits is None
    torch.testing.assert_close(fused.loss.detach(), loss, rtol=1e-12, atol=0)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-13)


def test_evaluation_and_calls_without_labels_are_as_before():
    model = made("soft cap")
    without = model(IDS).logits
    evaluated = model.eval()(IDS, labels=LABELS)
    lb.memory.fuse_loss_(model)
    again = model(IDS, labels=LABELS)
    assert torch.equal(again.logits, evaluated.logits) and torch.equal(again.loss, evaluated.loss)
    assert torch.equal(model.train()(IDS).logits, without)
    assert model(IDS, None, labels=LABELS).logits is None and model.config.final_logit_softcapping == 0.3
    loss, *rest = model(IDS, labels=LABELS, use_cache=False, return_dict=False)
    assert loss.dim() == 0 and not rest


def test_unfused_the_model_is_as_it_was():
    model = made("llama")
    plain, _ = trained(model)
    report = lb.memory.fuse_loss_(model)
    assert [layer.name for layer in report.layers] == ["lm_head"]
    copied = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"fused already; call lowbit\.memory\.unfuse_loss_ first"):
        lb.memory.fuse_loss_(model)
    lb.memory.unfuse_loss_(model)
    assert not any(wrappers(module) for module in model.modules())
    assert torch.equal(trained(model)[0].loss, plain.loss) and trained(model)[0].logits is not None
    assert trained(copied)[0].logits is None, "a copy stays fused"


def test_a_step_holds_no_logits():
    model = made("llama").float()
    batch = {"input_ids": IDS.repeat(4, 12), "labels": LABELS.repeat(4, 12)}
    plain = lb.estimate(model, batch)
    less = lb.estimate(model, batch, prepare=lb.memory.fuse_loss_)
    logits = 8 * 480 * 320 * 4
    assert plain.peak_bytes - less.peak_bytes > 2 * logits
    lb.memory.fuse_loss_(model)
    held = lb.memory.allocated_peak(lambda: model(**batch).loss.backward())
    assert held < lb.memory.allocated_peak(lambda: copy_of(model)(**batch).loss.backward()) - 2 * logits


@pytest.mark.thinned(3)
@pytest.mark.parametrize("apply", [lambda model: None, lb.memory.fuse_loss_], ids=["plain", "fused"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_an_estimate_knows_which_gradients_of_a_tied_weight_add_up_in_place(apply, precision):
    """The last layer's gradient and the embedding's are as large as the table: in place, two are held, else three."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{**SHAPE, "vocab_size": 20000, "num_hidden_layers": 1}, tie_word_embeddings=True
    )
    model, batch = transformers.LlamaForCausalLM(config).train(), {"input_ids": IDS[:1, :8], "labels": IDS[:1, :8]}

    def prepare(model):
        apply(model)
        if precision is not None:
            lb.train.mixed_(model, precision, working_copies=True)

    def passes(model, batch, loss):
        loss(model(**batch), batch).backward()

    estimated = lb.estimate(model, batch, optimizer=None, prepare=prepare, accumulate=passes)
    prepare(model)
    held = lb.memory.allocated_peak(lambda: model(**batch).loss.backward())
    assert held + sum(p.nbytes for p in model.parameters()) == pytest.approx(estimated.peak_bytes, rel=0.01)


def copy_of(model):
    copied = copy.deepcopy(model)
    lb.memory.unfuse_loss_(copied)
    return copied


def test_adapters_mixed_precision_and_checkpoints_go_with_it():
    peft = pytest.importorskip("peft")
    plain = peft.get_peft_model(
        made("llama").float(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    other = copy.deepcopy(plain)
    lb.memory.fuse_loss_(other)
    for model in (plain, other):
        lb.train.mixed_(model, "bf16")
        lb.memory.checkpoint_(model, "block")
    (expected, theirs), (output, mine) = trained(plain), trained(other)
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, expected.loss, rtol=2e-3, atol=0)
    assert mine.keys() == theirs.keys() and all(
        torch.nn.functional.cosine_similarity(mine[k].flatten(), theirs[k].flatten(), 0) > 0.99 for k in mine
    )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Linear(3, 3), "got Linear; call lowbit.memory.linear_cross_entropy"),
        (lambda: quantized(made("llama").float()), r"the last layer of \w+ is a lowbit\S+QuantLinear"),
    ],
)  # fmt: skip
def test_other_models_are_refused(make, why):
    with pytest.raises(ValueError, match=why):
        lb.memory.fuse_loss_(make())


def t5():
    config = transformers.T5Config(
        vocab_size=160,
        d_model=48,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        dropout_rate=0.0,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).train()


def bart():
    shape = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 32),
             ("attention_heads", 2))}  # fmt: skip
    config = transformers.BartConfig(vocab_size=160, d_model=32, pad_token_id=0, decoder_start_token_id=1, **shape)
    return transformers.BartForConditionalGeneration(config).train()


def bert():
    config = transformers.BertConfig(
        vocab_size=160, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return transformers.BertForMaskedLM(config).train()


@pytest.mark.parametrize("make", [t5, bert])
def test_models_that_compute_their_loss_in_their_forward_return_logits_that_are_not_computed(make):
    torch.manual_seed(0)
    model, labels = make().double(), LABELS.clamp(max=159)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0
    plain = model(input_ids=IDS % 160, labels=labels).loss
    expected = torch.autograd.grad(plain, list(model.parameters()), allow_unused=True)
    lb.memory.fuse_loss_(model)
    with watched_calls() as calls:
        output = model(input_ids=IDS % 160, labels=labels)
    assert [(call.fused, call.reader) for call in calls] == [(True, None)]
    torch.testing.assert_close(output.loss, plain, rtol=1e-12, atol=0)
    found = torch.autograd.grad(output.loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    assert output.logits.shape == (2, 40, 160)


def test_a_model_that_adds_to_its_logits_before_the_loss_computes_them():
    model, labels = bart().eval(), LABELS.clamp(max=159)
    for module in (model, model.lm_head):
        module.training = True
    plain = model(input_ids=IDS % 160, labels=labels).loss
    lb.memory.fuse_loss_(model)
    with pytest.warns(UserWarning, match="add reads the logits of 'lm_head' before"):
        assert torch.equal(model(input_ids=IDS % 160, labels=labels).loss, plain)
    lb.memory.unfuse_loss_(model)
    with pytest.raises(ValueError, match="add reads its output, and not"):
        lb.memory.fuse_loss_(model, batch={"input_ids": IDS % 160, "labels": labels})


def test_threads_do_not_disturb_each_other():
    model = made("soft cap").float()
    expected, logits = model(IDS, labels=LABELS).loss.item(), model(IDS).logits
    lb.memory.fuse_loss_(model)
    with ThreadPoolExecutor(4) as pool:
        losses = [pool.submit(lambda: model(IDS, labels=LABELS).loss.item()) for _ in range(12)]
        others = [pool.submit(lambda: model(IDS).logits) for _ in range(12)]
        assert {round(one.result(), 4) for one in losses} == {round(expected, 4)}
        assert all(torch.equal(one.result(), logits) for one in others)
    assert model.config.final_logit_softcapping == 0.3


def test_adapters_on_the_last_layer_are_refused_whenever_they_come():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["lm_head"])
    model = made("llama").float()
    with pytest.raises(ValueError, match=r"the last layer of LlamaForCausalLM is a peft\.\S+Linear, not an nn\.Linear"):
        lb.memory.fuse_loss_(peft.get_peft_model(copy.deepcopy(model), config))
    lb.memory.fuse_loss_(model)
    adapted = peft.get_peft_model(model, config)
    with pytest.raises(ValueError, match=r"has become a peft\.\S+Linear; call lowbit\.memory\.unfuse_loss_"):
        adapted(input_ids=IDS, labels=LABELS)


#: As trl's trainers put a fused loss on a model: by a function with the names of the model's own.
FOREIGN = """
import functools, types
def add(model):
    original = model.forward
    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, **kwargs):
        return original(*args, **kwargs)
    model.forward = types.MethodType(forward, model)
"""


@pytest.mark.parametrize("library", ["trl.trainer.utils", "liger_kernel.transformers", "unsloth"])
@pytest.mark.parametrize("around", [None, "offload hook", "autocast"])
def test_losses_that_another_library_fuses_are_not_fused_again(library, around):
    model, names = made("llama").float(), {"__name__": library}
    exec(FOREIGN, names)
    names["add"](model)
    if around == "offload hook":
        hooks = pytest.importorskip("accelerate.hooks")
        hooks.add_hook_to_module(model, hooks.ModelHook())
    elif around == "autocast":
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    forward = model.forward
    for inside in (model, nn.Sequential(model)):
        with pytest.raises(ValueError, match=f"whose forward is that of {library.split('.')[0]}.*leave fuse_loss_ out"):
            lb.memory.fuse_loss_(inside)
    assert model.forward == forward
    with pytest.warns(UserWarning, match="already computes the loss without logits"):
        prepare_model_(model, TrainingSettings(fused_loss=True))
    assert model.forward == forward


def test_models_with_hooks_and_wrappers_of_other_libraries_are_fused():
    hooks = pytest.importorskip("accelerate.hooks")
    model = made("llama")
    hooks.add_hook_to_module(model, hooks.ModelHook())
    lb.memory.fuse_loss_(model)
    assert trained(model)[0].logits is None


def quantized(model):
    lb.quantize_(model, {"lm_head": "int8"})
    return model


def test_logits_that_are_cast_to_fp32_before_the_loss_are_those_of_the_last_layer():
    class Casts(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, factor=1.0):
            hidden = self.model(input_ids).last_hidden_state
            logits = self.lm_head(hidden).float() * factor if factor != 1 else self.lm_head(hidden).float()
            loss = self.loss_function(logits, labels, self.config.vocab_size) if labels is not None else None
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    torch.manual_seed(0)
    model = Casts(transformers.LlamaConfig(**SHAPE)).bfloat16().train()
    plain, expected = trained(model)
    lb.memory.fuse_loss_(model)
    fused, gradients = trained(model)
    assert fused.logits is None
    torch.testing.assert_close(fused.loss, plain.loss, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=2**-7, atol=2**-7 * largest)
    with pytest.raises(ValueError, match="changes its logits"):
        model(IDS, labels=LABELS, factor=2.0)


def test_models_that_scale_their_logits_and_layers_that_change_later_are_refused():
    torch.manual_seed(0)
    model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**SHAPE, logits_scaling=2.0)).train()
    lb.memory.fuse_loss_(model)
    with pytest.raises(ValueError, match=r"changes its logits .* call lowbit.memory.unfuse_loss_\(model\)"):
        model(IDS, labels=LABELS)
    assert model.eval()(IDS, labels=LABELS).logits is not None
    model = made("llama").float()
    lb.memory.fuse_loss_(model)
    model.set_output_embeddings(nn.Sequential(nn.Linear(48, 320)))
    with pytest.raises(ValueError, match="the last layer has become a torch"):
        model(IDS, labels=LABELS)
