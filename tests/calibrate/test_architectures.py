"""Calibration of tiny models of many architectures, and what the models compute that are quantized with it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.nn import QuantExperts

transformers = pytest.importorskip("transformers")

RECIPE = "int4-weight-only:group32"

#: The sizes of every transformer here; a config takes the names that it knows.
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_heads=2,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    d_model=32, num_layers=2, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=64, decoder_ffn_dim=64, decoder_start_token_id=1, image_size=16, patch_size=4, num_labels=8,
)  # fmt: skip
ATTENTION = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
DEEPSEEK = dict(
    first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=16, head_dim=8,
)  # fmt: skip
MAMBA = dict(state_size=16, n_groups=2, expand=2, num_heads=4, chunk_size=8)
FALCON = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=16, mamba_chunk_size=8)
GPT2 = dict(n_embd=32, n_layer=2, n_head=2, n_positions=64)
T5 = dict(d_kv=16, d_ff=64, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
WHISPER = dict(num_mel_bins=32, max_source_positions=16, max_target_positions=32)
SWIN = dict(image_size=16, patch_size=2, window_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 2], num_labels=8)
CONVNEXT = dict(depths=[1, 1], hidden_sizes=[32, 64], num_stages=2, image_size=16, num_labels=8)
CLIP = dict(text_config=dict(SIZES, projection_dim=32), vision_config=SIZES, projection_dim=32)


def tokens(*names: str) -> Callable[[int], dict[str, Tensor]]:
    return lambda length: {name: torch.randint(3, 64, (2, length)) for name in names or ("input_ids",)}


def images(length: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, 16, 16)}


def sounds(length: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 32, 32), **tokens("decoder_input_ids")(length)}


def pairs(length: int) -> dict[str, Tensor]:
    return {**tokens()(length), "pixel_values": torch.randn(2, 3, 16, 16)}


TEXTS = tokens("input_ids", "decoder_input_ids")

#: Class of model, its config, what it is called with.
MODELS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Tensor]]]] = {
    "MixtralForCausalLM": (SIZES, tokens()),
    "Qwen3MoeForCausalLM": (SIZES, tokens()),
    "DeepseekV3ForCausalLM": (SIZES | DEEPSEEK, tokens()),
    "GptOssForCausalLM": (SIZES | ATTENTION, tokens()),
    "Mamba2ForCausalLM": (SIZES | MAMBA, tokens()),
    "FalconH1ForCausalLM": (SIZES | FALCON, tokens()),
    "GPT2LMHeadModel": (SIZES | GPT2, tokens()),
    "Gemma3ForCausalLM": (SIZES | ATTENTION, tokens()),
    "T5ForConditionalGeneration": (SIZES | T5, TEXTS),
    "BartForConditionalGeneration": (SIZES, TEXTS),
    "WhisperForConditionalGeneration": (SIZES | WHISPER, sounds),
    "ViTForImageClassification": (SIZES, images),
    "SwinForImageClassification": (SWIN, images),
    "ConvNextForImageClassification": (CONVNEXT, images),
    "CLIPModel": (CLIP, pairs),
}
CASES = pytest.mark.parametrize("name", MODELS)


def built(name: str) -> nn.Module:
    """The model, with weights large enough that its layers matter."""
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**MODELS[name][0])).eval()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return model


def answers(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    with torch.no_grad():
        outputs = [model(**batch) for batch in batches]
    return [output["logits_per_text" if "logits_per_text" in output else "logits"] for output in outputs]


@torch.no_grad()
def decoded_(model: nn.Module, names: Iterable[str], found: lb.Calibration) -> None:
    """Give the plain layers of ``model`` with these names the weights that their codes stand for."""
    for name in names:
        layer, weight = model.get_submodule(name), found.weights[name].dequantize()
        if hasattr(layer, "gate_up_proj"):
            for number in range(2 * layer.num_experts):
                weight = found.weights[f"{name}#{number}" if number else name].dequantize()
                stack = layer.gate_up_proj if number < layer.num_experts else layer.down_proj
                stack[number % layer.num_experts] = weight.t() if layer.is_transposed else weight
        elif isinstance(layer, nn.Linear):
            layer.weight.copy_(weight)
        elif isinstance(layer, nn.Conv1d | nn.Conv2d):
            layer.weight.copy_(weight.unflatten(1, (*layer.kernel_size, -1)).movedim(-1, 1))
        else:
            assert type(layer).__name__ == "Conv1D"
            layer.weight.copy_(weight.t())


def called(model: nn.Module, run: Callable[[], object]) -> set[str]:
    """The modules that ``run`` calls."""
    seen: set[str] = set()
    handles = [
        module.register_forward_hook(lambda m, a, y, name=name: seen.add(name))
        for name, module in model.named_modules()
    ]
    run()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.thinned(5)
@CASES
def test_a_model_is_calibrated_and_computes_what_its_codes_stand_for(name):
    plain = built(name)
    batches = [MODELS[name][1](length) for length in (9, 12)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = lb.calibrate(plain, RECIPE, batches)
    unreached = {str(w.message).split("reaches ")[1].split(";")[0] for w in caught if "reaches" in str(w.message)}
    assert not any("takes the place of" in str(w.message) for w in caught)

    model = copy.deepcopy(plain)
    report = lb.quantize_(model, RECIPE, found)
    results: list[Tensor] = []
    seen = called(model, lambda: results.extend(answers(model, batches)))

    expected = copy.deepcopy(plain)
    decoded_(expected, report.converted, found)
    for result, exact, before in zip(results, answers(expected, batches), answers(plain, batches), strict=True):
        assert bool(result.isfinite().all())
        assert float((result - exact).norm() / exact.norm()) < 1e-4
        assert float(F.cosine_similarity(result.flatten(), before.flatten(), 0)) > 0.8

    for layer in report.converted:
        module, weights = model.get_submodule(layer), {layer}
        if isinstance(module, QuantExperts):
            stacks = [f"{layer}.{stack}.{expert}" for stack in ("gate_up", "down") for expert in range(4)]
            weights = {f"{layer}#{number}" if number else layer for number in range(8)}
            silent = {f"{layer}#{number}" if number else layer for number, at in enumerate(stacks) if at not in seen}
            assert silent == unreached & weights
        else:
            assert layer in seen
        assert {found.rows[weight].method for weight in weights - unreached} == {
            "gptq" if isinstance(module, QuantExperts) else "guided-gptq"
        }
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, transformers.pytorch_utils.Conv1D)
    for layer, module in model.named_modules():
        if isinstance(module, kinds):
            assert layer in report.skipped or report.left[layer], layer
    mixture = name.startswith(("Mixtral", "Qwen3Moe", "Deepseek", "GptOss"))
    assert mixture == any(isinstance(module, QuantExperts) for module in model.modules())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "WhisperForConditionalGeneration"])
def test_the_loss_of_a_decoder_is_that_of_its_tokens(name):
    def next_tokens(output: Any, batch: dict[str, Tensor]) -> Tensor:
        targets = batch["decoder_input_ids"].masked_fill(batch["decoder_attention_mask"] == 0, -100)
        return F.cross_entropy(output["logits"][:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")

    model = built(name)
    batch = MODELS[name][1](9)
    batch["decoder_attention_mask"] = torch.ones(2, 9, dtype=torch.int64).tril(6)
    found, expected = (lb.calibrate(model, RECIPE, [batch], loss=loss) for loss in (None, next_tokens))
    for layer, weight in found.weights.items():
        assert torch.equal(weight.codes, expected.weights[layer].codes), layer


# -- written in place -------------------------------------------------------------------------------------------------
def add(x: Tensor, y: Tensor, inplace: bool) -> Tensor:
    return x.add_(y) if inplace else x + y


class BasicBlock(nn.Module):
    """As torchvision's."""

    def __init__(self, before: int, width: int, stride: int, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu, self.inplace = nn.ReLU(inplace), inplace
        self.downsample = (
            None if stride == 1 else nn.Sequential(nn.Conv2d(before, width, 1, stride), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(add(self.bn2(self.conv2(y)), identity, self.inplace))


class ResNet(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(inplace)
        self.layer1 = nn.Sequential(BasicBlock(16, 16, 1, inplace), BasicBlock(16, 16, 1, inplace))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2, inplace), BasicBlock(32, 32, 1, inplace))
        self.fc = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class PreNorm(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace), nn.Linear(64, 32))
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = add(x, self.attention(h, h, h, need_weights=False)[0], self.inplace)
        return add(x, self.mlp(self.norm2(x)), self.inplace)


class Transformer(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.position = nn.Parameter(torch.randn(1, 12, 32))
        self.blocks, self.inplace = nn.ModuleList(PreNorm(inplace) for _ in range(3)), inplace

    def forward(self, tokens: Tensor) -> Tensor:
        x = add(self.embed(tokens), self.position[:, : tokens.shape[1]], self.inplace)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("network", [ResNet, Transformer])
def test_what_is_written_in_place_gets_the_codes_of_what_is_not(network):
    torch.manual_seed(1)
    images = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    batches = images if network is ResNet else [torch.randint(64, (3, length)) for length in (9, 12)]
    calibrations, outputs = [], []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = network(inplace).eval()
        found = lb.calibrate(model, RECIPE, batches, skip=())
        report = lb.quantize_(model, RECIPE, found, skip=())
        assert not report.left and ("conv1" if network is ResNet else "head") in report.converted
        calibrations.append(found)
        with torch.no_grad():
            outputs.append([model(batch) for batch in batches])
    plain, inplace = calibrations
    assert plain.rows.keys() == inplace.rows.keys()
    assert {row.method for found in calibrations for row in found.rows.values()} == {"guided-gptq"}
    for name, weight in plain.weights.items():
        for part, tensor in weight.parts.items():
            assert torch.equal(tensor, inplace.weights[name].parts[part]), (name, part)
    assert all(map(torch.equal, *outputs))
