"""Directories that the package compressed-tensors itself has made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lowbit.interop import compressed_tensors as ours
from lowbit.nn import QuantLinear
from lowbit.serialize.shards import Checkpoint

compressed_tensors = pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

from compressed_tensors.compressors import BaseCompressor, ModelCompressor  # noqa: E402
from compressed_tensors.quantization import (  # noqa: E402
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

#: Presets, with the recipe that reads them and the scheme of the weights if scales are bf16.
PRESETS = {
    "W4A16": ("int4-weight-only:group128:bf16", "int4:group128:bf16"),
    "W3A16": ("int3-weight-only:group128:bf16", "int3:group128:bf16"),
    "W4A16_ASYM": ("uint4-weight-only:group128:affine:bf16", "uint4:group128:affine:bf16"),
    "W8A16": ("int8-weight-only:group128:bf16", "int8:group128:bf16"),
    "W8A8": ("int8:row:bf16", "int8:row:bf16"),
    "W4A8": ("w4a8:group128:bf16", "int4:group128:bf16"),
    "FP8": ("fp8-static:tensor:bf16", "fp8_e4m3:tensor:bf16"),
    "FP8_DYNAMIC": ("fp8:row:bf16", "fp8_e4m3:row:bf16"),
    "FP8_BLOCK": ("fp8-block:block128x128:bf16", "fp8_e4m3:block128x128:bf16"),
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4A16": ("nvfp4-weight-only", "nvfp4"),
    "MXFP4": ("mxfp4", "mxfp4"),
    "MXFP4A16": ("mxfp4-weight-only", "mxfp4"),
    "MXFP6A16": ("mxfp6-weight-only", "mxfp6"),
    "MXFP8": ("mxfp8", "mxfp8:ceil"),
}


def observe(layer: torch.nn.Module) -> None:
    """Fill the scales of a layer from its weight; inputs are taken to be in -4 to 4."""
    args, weight = layer.quantization_scheme.weights, layer.weight.float()
    rows, cols = weight.shape
    if args.strategy in ("group", "tensor_group"):
        blocks = weight.unflatten(1, (-1, args.group_size))
    elif args.strategy == "block":
        blocks = torch.nn.functional.pad(weight, (0, -cols % 128, 0, -rows % 128))
        blocks = blocks.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    else:
        blocks = weight[:, None] if args.strategy == "channel" else weight.reshape(1, -1)
    low, high = blocks.amin(-1), blocks.amax(-1)
    total = None
    if args.strategy == "tensor_group":
        total = generate_gparam(weight.min(), weight.max())
        layer.weight_global_scale.data.copy_(total)
    scale, zero = calculate_qparams(low, high, args, global_scale=total)
    layer.weight_scale.data = scale.reshape(layer.weight_scale.shape).to(layer.weight_scale.dtype)
    layer.weight_zero_point.data = zero.reshape(layer.weight_zero_point.shape).to(layer.weight_zero_point.dtype)
    for name, value in (("input_scale", 4 / 448), ("input_global_scale", 448 * 6 / 4)):
        if hasattr(layer, name):
            getattr(layer, name).data.fill_(value)


def made(directory: Path, preset: str) -> torch.nn.Module:
    """Write a directory as llm-compressor does, and return its model."""
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().bfloat16()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            observe(layer)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    directory.mkdir()
    model.config.dtype, model.config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    model.config.save_pretrained(directory)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, directory / "model.safetensors")
    compressor.update_config(str(directory))
    return model


@pytest.mark.thinned(4)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_keep_their_codes(tmp_path, preset):
    theirs = made(tmp_path / "out", preset)
    assert ours.detect(tmp_path / "out")
    model = ours.read(tmp_path / "out")
    recipe, scheme = PRESETS[preset]
    checkpoint = Checkpoint(tmp_path / "out")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    assert len(layers) == 7
    for name, layer in layers.items():
        assert (layer.recipe.name, layer.scheme.name) == (recipe, scheme)
        group = theirs.get_submodule(name).quantization_scheme
        local = {
            key.removeprefix(f"{name}."): checkpoint.read(key)
            for key in checkpoint.entries
            if key.startswith(f"{name}.")
        }
        wide = {key: value.float() if value.dtype == torch.bfloat16 else value for key, value in local.items()}
        exact = BaseCompressor.get_value_from_registry(group.format).decompress(wide, group)["weight"].float()
        tolerance = 2**-8 if layer.scheme.global_scale else 0  # the package decodes NVFP4 to bf16
        torch.testing.assert_close(layer.weight.dequantize(torch.float32), exact, rtol=tolerance, atol=0)
        if layer.input_scales is not None:
            assert layer.input_scales.scale.item() == local["input_scale"].float().item()
    with torch.no_grad():
        assert model(torch.arange(6)[None]).logits.isfinite().all()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" in config and not hasattr(model.config, "quantization_config")
