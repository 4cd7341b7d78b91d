"""Layers whose weight the code of a model reads itself: found in its source, and left, in every architecture here."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowbit as lb

pytestmark = pytest.mark.filterwarnings("ignore:quantize_ converted")
WHY = "its model reads its weight itself"


class Reader(nn.Module):
    """Reads weights in several ways, of which some leave a quantized layer as good as the plain one."""

    def __init__(self, flag: bool = False) -> None:
        super().__init__()
        layers = ("called", "asked", "read", "named", "deep", "flagged", "measured", "tested", "unused", "shaped")
        for name in layers:
            setattr(self, name, nn.Sequential(nn.Linear(32, 32)) if name == "deep" else nn.Linear(32, 32))
        self.shaped = nn.Conv1d(32, 32, 1)
        self.listed = nn.ModuleList([nn.Linear(32, 32)])
        self.looped = nn.ModuleList([nn.Linear(32, 32)])
        self.flag = flag
        self.reset()

    def reset(self) -> None:
        nn.init.zeros_(self.unused.weight)

    @property
    def projection(self):
        return self.measured.weight

    def forward(self, x):
        x = self.called(x).to(self.asked.weight.dtype).to(self.asked.weight.device)
        x = self.asked(x) * self.asked.weight.shape[0] * self.shaped.weight.shape[-1]
        if isinstance(self.tested.weight, torch.Tensor) and self.tested.weight is not None:
            x = self.tested(x)
        x = F.linear(x, self.read.weight[:, :32]) + self.helper(x) + self.unused(x) + self.called.bias
        layer = self.named
        x = x @ layer.weight + x @ self.deep[0].weight + x @ self.listed[0].weight
        if self.flag and not self.training:
            x = x @ self.flagged.weight
        for layer in self.looped[:1]:
            x = F.linear(x, layer.weight)
        return self.flagged(x)

    def helper(self, x):
        return x @ self.projection


@pytest.mark.parametrize("flag", [False, True])
def test_reads_are_told_from_questions(flag):
    model = nn.Sequential(Reader(flag))
    report = lb.quantize_(model, "int8-weight-only")
    left = {name.removeprefix("0."): reason for name, reason in report.left.items()}
    expected = {"read", "named", "deep.0", "listed.0", "looped.0", "measured", "shaped", *(["flagged"] if flag else [])}
    assert set(left) == expected and all(reason.startswith(f"{WHY}, in Reader.") for reason in left.values())
    assert left["read"].endswith("Reader.forward") and left["measured"].endswith("Reader.projection")
    assert bool(model(torch.randn(2, 32)).isfinite().all())


def test_no_pattern_converts_what_would_crash():
    plan = {"*": "int8", "0.read": "nf4"}
    for prepare in (lb.quantize_, lb.qat.prepare_):
        assert WHY in prepare(nn.Sequential(Reader()), plan).left["0.read"]
    found = lb.calibrate(nn.Sequential(Reader()).eval(), "int4-weight-only:group32", [torch.randn(2, 32)])
    assert "0.called" in found.rows and "0.read" not in found.rows
    assert "0.read" in lb.train.prepare_(nn.Sequential(Reader()), "fp8").converted  # its weight stays a tensor


class Dtype(nn.Module):
    """Asks attention for a weight that it has under no name once it is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2)

    def forward(self, x):
        x = x.to(self.attention.in_proj_weight.dtype)
        return self.attention(x, x, x)[0]


def test_weights_inside_of_a_layer():
    report = lb.quantize_(nn.Sequential(Dtype(), nn.Linear(32, 32)), "int8-weight-only")
    assert report.converted == ("1",) and WHY in report.left["0.attention"]


def test_wrappers_that_answer_for_the_layer_inside():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        nn.Sequential(Reader(), nn.Linear(32, 32)), peft.LoraConfig(target_modules=["0.read", "0.called", "0.asked"])
    )
    report = lb.quantize_(model, "int8-weight-only")
    name = "base_model.model.0"
    assert WHY in report.left[f"{name}.read.base_layer"]
    assert {f"{name}.called.base_layer", f"{name}.asked.base_layer"} <= set(report.converted)
    assert bool(model(torch.randn(2, 32)).isfinite().all())


def test_what_has_no_source_is_converted():
    scope = {"nn": nn, "__name__": "nowhere"}
    exec("class Unknown(nn.Module):\n  def forward(self, x):\n    return x @ self.fc.weight", scope)
    model = scope["Unknown"]()
    model.fc = nn.Linear(32, 32)
    assert lb.quantize_(model, "int8").converted == ("fc",)
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(32, 32), nn.ReLU()))
    assert lb.quantize_(traced, "int8").converted == ("0",)


# -- architectures of transformers -------------------------------------------------------------------------------------
IDS = {"input_ids": torch.arange(3, 21).reshape(2, 9)}
SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
IMAGES = {"pixel_values": torch.randn(1, 3, 32, 32)}
SPEECH = {"input_features": torch.randn(1, 8, 20), "decoder_input_ids": IDS["input_ids"][:1]}

#: By class its config, the last words of the names of the layers that stay, and inputs.
MODELS = {
    "MambaForCausalLM": ({}, {"conv1d", "dt_proj"}, IDS),
    "Mamba2ForCausalLM": (
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "expand": 2}, {"conv1d"}, IDS
    ),
    "FalconMambaForCausalLM": ({}, {"conv1d", "dt_proj"}, IDS),
    "BambaForCausalLM": (
        {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
         "attn_layer_indices": [1]}, {"conv1d"}, IDS,
    ),
    "JambaForCausalLM": (
        {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
         "mamba_d_state": 8, "mamba_dt_rank": 8}, {"conv1d", "dt_proj"}, IDS,
    ),
    "Lfm2ForCausalLM": ({"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}, {"conv"}, IDS),
    "Qwen3NextForCausalLM": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
         "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
        {"conv1d"}, IDS,
    ),
    "RecurrentGemmaForCausalLM": (
        {"head_dim": 16, "lru_width": 64, "block_types": ["recurrent", "attention"]}, {"conv_1d"}, IDS
    ),
    "LlamaForCausalLM": ({}, set(), IDS),
    "GPT2LMHeadModel": ({"n_embd": 64, "n_head": 4, "n_layer": 2}, set(), IDS),
    "BertModel": ({}, set(), IDS),
    "BloomForCausalLM": ({}, set(), IDS),
    "MixtralForCausalLM": ({"num_local_experts": 4}, set(), IDS),
    "DeepseekV3ForCausalLM": (
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
         "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}, set(), IDS,
    ),
    "Gemma3ForCausalLM": ({"head_dim": 16}, set(), IDS),
    "T5ForConditionalGeneration": (
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}, set(),
        {**IDS, "decoder_input_ids": IDS["input_ids"]},
    ),
    "ViTModel": ({"image_size": 32, "patch_size": 16}, set(), IMAGES),
    "WhisperModel": (
        {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 8,
         "max_source_positions": 10}, set(), SPEECH,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_architectures_run_quantized_and_lose_no_layer(name):
    transformers = pytest.importorskip("transformers", minversion="5")
    more, expected, inputs = MODELS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    plain = cls(cls.config_class(**SHAPE | more)).eval()
    layers = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)}
    for recipe in ("int8", "int4-weight-only:group32", "nf4"):
        model = copy.deepcopy(plain)
        report = lb.quantize_(model, recipe)
        read = {name for name, reason in report.left.items() if reason.startswith(WHY)}
        assert read == {layer for layer in layers if layer.rpartition(".")[2] in expected}
        assert bool(model(**inputs)[0].isfinite().all())


def test_what_is_read_in_training_alone_stays_in_training_alone():
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.Mamba2Config(**SHAPE | MODELS["Mamba2ForCausalLM"][0])
    quantized, trained = (transformers.Mamba2ForCausalLM(config) for _ in range(2))
    name = "backbone.layers.0.mixer.out_proj"
    assert name in lb.quantize_(quantized, "int8").converted
    assert WHY in lb.qat.prepare_(trained, "int8").left[name]
