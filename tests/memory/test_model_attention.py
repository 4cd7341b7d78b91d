"""``lb.memory.attention`` in models of transformers, beside their eager attention in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.tiled.model_attention import _attend

transformers = pytest.importorskip("transformers", minversion="5")

SHAPE = {"vocab_size": 128, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96}  # fmt: skip
IDS = torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 36:] = 0

MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=9)),
    "soft cap": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SHAPE, head_dim=12, sliding_window=9, attn_logit_softcapping=0.5)
    ),
    "bidirectional": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=128, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
                                intermediate_size=96)
    ),
    "position bias": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=128, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
                              decoder_start_token_id=0)
    ),
}  # fmt: skip


def gpt_oss():
    """With attention sinks, and experts one after the other, which take fp64."""
    config = transformers.GptOssConfig(
        **SHAPE, head_dim=12, sliding_window=9, num_local_experts=2, num_experts_per_tok=1, layer_types=None,
        experts_implementation="eager",
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


MODELS["sinks"] = gpt_oss


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    model.set_attn_implementation("eager")
    return model


def trained(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A loss of the logits where there are tokens, in fp64 (transformers' own is in fp32), and its gradients."""
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=IDS, attention_mask=MASK, **more).logits[MASK == 1]
    loss = nn.functional.cross_entropy(logits, IDS[MASK == 1].roll(1))
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_all_scores(name):
    model = made(name)
    expected = trained(model)
    report = lb.memory.attention_(model)
    assert [layer.name for layer in report.layers] == [""] and model.config._attn_implementation == "lowbit"
    loss, gradients = trained(model)
    within = 1e-6 if name in ("llama", "window", "soft cap", "sinks") else 1e-12  # whose softmax is in fp32
    torch.testing.assert_close(loss, expected[0], rtol=within, atol=0)
    for mine, theirs in zip(gradients, expected[1], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=100 * within, atol=within)


def test_an_estimate_knows_that_scores_are_gone_and_leaves_the_model_as_it_was():
    model, batch = made("llama").float().train(), {"input_ids": IDS.repeat(1, 6), "labels": IDS.repeat(1, 6)}
    plain = lb.estimate(model, batch)
    less = lb.estimate(model, batch, prepare=lb.memory.attention_)
    assert model.config._attn_implementation == "eager"
    scores = 2 * 4 * 240 * 240 * 4
    assert plain.peak_bytes - less.peak_bytes > 2 * scores
    lb.memory.attention_(model)
    assert lb.estimate(model, batch).peak_bytes == less.peak_bytes


def test_generation_with_a_cache_gives_the_tokens_of_eager_attention():
    model = made("llama")
    other = copy.deepcopy(model)
    lb.memory.attention_(other)
    options = {"attention_mask": MASK[:, :9], "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    said = [one.generate(IDS[:, :9], **options) for one in (model, other)]
    assert torch.equal(*said)


def test_it_is_chosen_by_name_and_saved_in_configs(tmp_path):
    config = transformers.LlamaConfig(**SHAPE, attn_implementation="lowbit")
    model = transformers.LlamaForCausalLM(config)
    assert model.config._attn_implementation == "lowbit" and not lb.memory.attention_(model).layers
    lb.quantize_(model, "int8")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="lowbit").eval()
    assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)


def test_models_inside_of_a_module_are_found_and_others_refused():
    module = nn.ModuleDict({"a": made("llama"), "b": nn.Linear(3, 3)})
    assert [layer.name for layer in lb.memory.attention_(module).layers] == ["a"]
    with pytest.raises(ValueError, match=r"or a Hugging Face model .* got Linear; call lowbit.memory.attention"):
        lb.memory.attention_(module["b"])


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_unattention_gives_back_what_was_there(before):
    model = made("llama")
    model.set_attn_implementation(before)
    expected = trained(model)
    lb.memory.attention_(model)
    assert [layer.name for layer in lb.memory.unattention_(model).layers] == [""]
    assert model.config._attn_implementation == before and torch.equal(trained(model)[0], expected[0])
    with pytest.raises(ValueError, match="nothing to undo"):
        lb.memory.unattention_(model)


def test_what_attention_without_scores_cannot_say_is_an_error():
    model = made("llama")
    lb.memory.attention_(model)
    with pytest.raises(ValueError, match=r"output_attentions is True .*set_attn_implementation\('eager'\)"):
        _attend(model.model.layers[0].self_attn, *[torch.ones(1, 2, 3, 4)] * 3, None, output_attentions=True)


def two_of(make, config):
    """Two models of one config object, with the attention ``"sdpa"``."""
    config._attn_implementation = "sdpa"
    return make(config), make(config)


def configs(model):
    """Every config that a module holds, by path and attribute."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, transformers.PreTrainedConfig)
    }


SHARING = {
    "llama": (transformers.LlamaForCausalLM, lambda: transformers.LlamaConfig(**SHAPE)),
    "encoder and decoder": (
        transformers.T5ForConditionalGeneration,
        lambda: transformers.T5Config(vocab_size=128, d_model=48, d_kv=12, d_ff=96, num_layers=1, num_heads=4),
    ),
    "configs within": (
        transformers.LlavaForConditionalGeneration,
        lambda: transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                                       num_attention_heads=2, image_size=28, patch_size=14),
            text_config=transformers.LlamaConfig(**SHAPE),
        ),
    ),
    "in a wrapper": (
        lambda config: nn.ModuleDict({"model": transformers.LlamaForCausalLM(config)}),
        lambda: transformers.LlamaConfig(**SHAPE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARING)
def test_models_of_one_config_stay_as_they_are(name):
    make, config = SHARING[name]
    model, other = two_of(make, config())
    before, others = configs(model), configs(other)
    lb.memory.attention_(model)
    assert {config._attn_implementation for config in configs(model).values()} == {"lowbit"}
    assert {config._attn_implementation for config in configs(other).values()} == {"sdpa"}
    same = [[a is b for b in before.values()] for a in before.values()]
    assert [[a is b for b in configs(model).values()] for a in configs(model).values()] == same

    lb.memory.attention_(other)
    lb.memory.unattention_(model)
    assert all(one is before[place] for place, one in configs(model).items())
    assert {config._attn_implementation for config in configs(other).values()} == {"lowbit"}
    lb.memory.unattention_(other)
    assert all(one is others[place] for place, one in configs(other).items())


def test_part_of_a_model_is_switched_alone():
    model, other = two_of(transformers.LlamaModel, transformers.LlamaConfig(**SHAPE))
    both = nn.ModuleList([model, other])
    lb.memory.attention_(both[0])
    assert (model.config._attn_implementation, other.config._attn_implementation) == ("lowbit", "sdpa")
    assert [layer.name for layer in lb.memory.attention_(both).layers] == ["1"]
    lb.memory.unattention_(both)
    assert model.config._attn_implementation == other.config._attn_implementation == "sdpa"


def test_changes_of_a_config_are_not_lost():
    model, other = two_of(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SHAPE))
    lb.memory.attention_(model)
    model.config.use_cache = False
    lb.memory.unattention_(model)
    assert not model.config.use_cache and model.model.config is model.config and other.config.use_cache
    assert model.config._attn_implementation == "sdpa"


def test_loaded_models_of_one_config_stay_as_they_are():
    config = transformers.LlamaConfig(**SHAPE, attn_implementation="lowbit")
    model, other = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    lb.memory.unattention_(model)
    assert (model.config._attn_implementation, other.config._attn_implementation) == ("sdpa", "lowbit")
