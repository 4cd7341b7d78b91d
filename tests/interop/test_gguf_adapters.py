"""LoRA adapters for llama.cpp, which is the oracle: merged into quantized layers, and as a file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.llama_cpp import log_probabilities
from torch import nn

import lowbit as lb
from lowbit.convert.engine import quantized_layers
from lowbit.interop.gguf import write_adapters

gguf = pytest.importorskip("gguf")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5")

IDS = [3, 17, 200, 45, 99, 12, 7, 64, 250, 31]


def causal(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes | more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return model


def adapted(model: nn.Module, **settings: Any) -> Any:
    """A PeftModel whose adapters change the logits."""
    config = peft.LoraConfig(**{"target_modules": "all-linear", "r": 4, "lora_alpha": 6} | settings)
    wrapped = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return wrapped


@torch.no_grad()
def next_token(model: nn.Module) -> torch.Tensor:
    return model(input_ids=torch.tensor([IDS])).logits[0, -1].log_softmax(-1)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(path).tensors}


# -- adapters alone ----------------------------------------------------------------------------------------------------
def test_the_file_has_factors_that_multiply_to_the_difference_of_the_merged_weight(tmp_path):
    """The rows of a Llama's queries and keys are in llama.cpp's order, as in the file of the model."""
    model = adapted(causal("Llama"), use_rslora=True, rank_pattern={"k_proj": 2}, alpha_pattern={"up_proj": 1})
    report = write_adapters(model, tmp_path / "adapters.gguf")
    assert len(report.layers) == 14 and "model.layers.0.self_attn.q_proj" in report.converted
    lb.export(model.unload(), "gguf", tmp_path / "base.gguf")
    merged = adapted(causal("Llama"), use_rslora=True, rank_pattern={"k_proj": 2}, alpha_pattern={"up_proj": 1})
    lb.export(merged.merge_and_unload(), "gguf", tmp_path / "merged.gguf")
    base, after, factors = (tensors(tmp_path / f"{name}.gguf") for name in ("base", "merged", "adapters"))
    fields = gguf.GGUFReader(tmp_path / "adapters.gguf").fields
    alpha = fields["adapter.lora.alpha"].contents()
    assert fields["general.type"].contents() == "adapter" and fields["general.architecture"].contents() == "llama"
    assert len(factors) == 28
    for name in {name.rpartition(".")[0] for name in factors}:
        a, b = factors[f"{name}.lora_a"], factors[f"{name}.lora_b"]
        torch.testing.assert_close(b @ a * (alpha / len(a)), after[name] - base[name], rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
@pytest.mark.parametrize("settings", [
    {}, {"use_rslora": True, "r": 8}, {"rank_pattern": {"q_proj": 2}}, {"target_modules": ["embed_tokens", "lm_head"]},
])  # fmt: skip
def test_llama_cpp_adds_the_adapters(name: str, settings: dict[str, Any], words: Any, tmp_path):
    pytest.importorskip("xllamacpp")
    base = causal(name)
    lb.export(base, "gguf", tmp_path / "base.gguf", words)
    plain = next_token(base)
    model = adapted(base, **settings)
    write_adapters(model, tmp_path / "adapters.gguf")
    expected = next_token(model)
    assert (expected - plain).abs().max() > 0.3
    result = log_probabilities(tmp_path / "base.gguf", IDS, 320, tmp_path / "adapters.gguf")
    assert len(result) >= 256
    assert max(abs(value - float(expected[number])) for number, value in result.items()) < 0.02  # its cache is fp16


@pytest.mark.slow
def test_llama_cpp_adds_the_adapters_to_a_quantized_base(words: Any, tmp_path):
    pytest.importorskip("xllamacpp")
    base = causal("Llama")
    lb.quantize_(base, "q8_0")
    lb.export(base, "gguf", tmp_path / "base.gguf", words)
    plain, model = next_token(base), adapted(base)
    write_adapters(model, tmp_path / "adapters.gguf")
    expected = next_token(model)
    result = log_probabilities(tmp_path / "base.gguf", IDS, 320, tmp_path / "adapters.gguf")
    differences = torch.tensor([abs(value - float(expected[number])) for number, value in result.items()])
    assert differences.max() < 0.1 < 0.3 < (expected - plain).abs().max()  # it rounds inputs to 8 bits


def test_a_model_with_an_injected_adapter_is_written_too(tmp_path):
    model, wrapped = causal("Qwen3"), adapted(causal("Qwen3"), target_modules=["q_proj"])
    write_adapters(wrapped, tmp_path / "wrapped.gguf")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], r=4, lora_alpha=6), model, "own")
    state = {key.removeprefix("base_model.model."): value for key, value in wrapped.state_dict().items()}
    model.load_state_dict({key.replace(".default.", ".own."): value for key, value in state.items()})
    write_adapters(model, tmp_path / "own.gguf", "own")
    assert (tmp_path / "own.gguf").read_bytes() == (tmp_path / "wrapped.gguf").read_bytes()


@pytest.mark.parametrize("settings, reason", [
    ({"use_dora": True}, "use_dora=True"),
    ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "all"}, "bias='all'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"init_lora_weights": "pissa"}, "'pissa'.*path_initial_model_for_weight_conversion"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
])  # fmt: skip
def test_adapters_that_llama_cpp_cannot_express_are_refused(settings: dict[str, Any], reason: str, tmp_path):
    model = adapted(causal("Llama", attention_bias=True), **settings)
    with pytest.raises(ValueError, match=rf"{reason}(.|\n)*merge_and_unload"):
        write_adapters(model, tmp_path / "adapters.gguf")
    assert not list(tmp_path.iterdir())


def test_adapters_in_a_wrong_state_are_refused(tmp_path):
    path = tmp_path / "adapters.gguf"
    with pytest.raises(ValueError, match="expected a PeftModel, got a LlamaForCausalLM"):
        write_adapters(causal("Llama"), path)
    model = adapted(causal("Llama"))
    with pytest.raises(ValueError, match="adapter of default, got 'other'"):
        write_adapters(model, path, "other")
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        write_adapters(model, path)
    tied = adapted(causal("Llama", tie_word_embeddings=True), target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match="both the embedding and the output layer"):
        write_adapters(tied, path)
    other = peft.get_peft_model(causal("Llama"), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match="IA3"):
        write_adapters(other, path)
    assert not list(tmp_path.iterdir())


# -- merged adapters ---------------------------------------------------------------------------------------------------
def test_merged_adapters_are_exported_with_the_codes_of_the_merged_layers(tmp_path):
    base = causal("Llama")
    lb.quantize_(base, "q4_0")
    model = adapted(base)
    before = next_token(model)
    merged = model.merge_and_unload()
    assert {layer.recipe.name for layer in quantized_layers(merged).values()} == {"q4-0"}
    lb.export(merged, "gguf", tmp_path / "merged.gguf")
    back = lb.load_model(tmp_path / "merged.gguf")
    state = merged.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in back.state_dict().items())
    assert torch.corrcoef(torch.stack([next_token(back), before]))[0, 1] > 0.9


@pytest.mark.parametrize("format, alone", [("gguf", "gguf.write_adapters"), ("compressed-tensors", "save_pretrained")])
@pytest.mark.parametrize("merged", [False, True])
def test_a_model_with_adapters_is_refused_with_both_remedies(format: str, alone: str, merged: bool, tmp_path):
    model = adapted(causal("Llama"))
    if merged:
        model.merge_adapter()
    for refused in (model, model.get_base_model()):
        with pytest.raises(ValueError, match=rf"merge_and_unload\(\)(.|\n)*alone: .*{alone}"):
            lb.export(refused, format, tmp_path / "out")
    assert not list(tmp_path.iterdir())
