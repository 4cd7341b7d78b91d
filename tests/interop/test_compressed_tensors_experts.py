"""Mixtures of experts in directories of compressed-tensors: a Linear per matrix of each expert."""

from __future__ import annotations

import json

import pytest
import torch

import lowbit as lb
from lowbit.interop import compressed_tensors as ours
from lowbit.nn import QuantLinear
from lowbit.serialize.shards import Checkpoint

transformers = pytest.importorskip("transformers", minversion="5")

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

#: Models, with the name of the first matrix of an expert in checkpoints.
MODELS = {
    "Mixtral": ("model.layers.0.block_sparse_moe.experts.0.w1", {"num_local_experts": 4}),
    "Qwen3Moe": (
        "model.layers.0.mlp.experts.0.gate_proj",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    ),
}


def build(name: str) -> torch.nn.Module:
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name][1])
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(12).reshape(2, 6)).logits.float()


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if not name.endswith("global_scale")}


@pytest.mark.parametrize(
    "recipe", ["int4-weight-only:group32", "int8", "uint4-weight-only:group32", "nvfp4-weight-only"]
)
@pytest.mark.parametrize("name", MODELS)
def test_experts_keep_their_codes(tmp_path, name, recipe):
    model = build(name)
    if recipe.startswith("nvfp4"):  # readers run it in bf16 only
        model.bfloat16()
    lb.quantize_(model, recipe)
    ours.write(model, tmp_path / "out")
    stored = Checkpoint(tmp_path / "out").entries
    first = MODELS[name][0]
    assert f"{first}.weight_scale" in stored and not any("gate_up" in key for key in stored)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == list(
        dict.fromkeys([f"{first.split('.experts')[0]}.gate", "model.layers.0.mlp.gate", "lm_head"])
    )
    back = ours.read(tmp_path / "out")
    expected, actual = state(model), state(back)
    assert expected.keys() == actual.keys() and all(torch.equal(expected[key], actual[key]) for key in expected)
    error = (logits(back) - logits(model)).norm() / logits(model).norm()
    assert error == 0 or (recipe.startswith("nvfp4") and error < 1e-2)  # the last bit of a global scale, in bf16


@pytest.mark.parametrize("name", MODELS)
def test_float_experts_stay(tmp_path, name):
    model = build(name)
    lb.quantize_(model, "int8", skip=("experts", "lm_head"))
    ours.write(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert any(row.startswith("re:") and "experts" in row for row in config["ignore"])
    back = ours.read(tmp_path / "out")
    assert all(torch.equal(value, state(back)[key]) for key, value in state(model).items())
    assert torch.equal(logits(back), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same(tmp_path, name):
    pytest.importorskip("compressed_tensors")
    model = build(name)
    lb.quantize_(model, "int4-weight-only:group32")
    ours.write(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path / "out"), dtype="auto", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    )
    lb.dequantize_(model)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)


def test_experts_of_several_schemes_are_refused(tmp_path):
    model = build("Qwen3Moe")
    lb.quantize_(model, "int8-weight-only")
    ours.write(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    groups["more"] = {**groups["group_0"], "targets": [r"re:.*experts\.1\."], "input_activations": token}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"several schemes within model.layers.0.mlp.experts"):
        ours.read(tmp_path / "out")


def test_blocks_across_gate_and_up_are_refused(tmp_path):
    model = build("Qwen3Moe")
    lb.quantize_(model, {"experts": "fp8-block", "self_attn": "int8"})
    assert any(isinstance(layer, QuantLinear) for layer in model.modules())
    with pytest.raises(ValueError, match=r"row 32 begins a matrix within a block of 128 rows"):
        ours.write(model, tmp_path / "out")
