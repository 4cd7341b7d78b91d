"""Static FP8 scales of the KV cache: measured, used, saved, exported, and read back."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch

import lowbit as lb
from lowbit.nn.kv_cache import QuantizedRows
from lowbit.scaling import scheme as find_scheme
from lowbit.serialize import huggingface

transformers = pytest.importorskip("transformers", minversion="5")

from lowbit.integrations.kv_cache import cache_name, calibrate_cache_, quantized_cache  # noqa: E402


def decoded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x`` in FP8 with this scale, by ml_dtypes."""
    ratio = np.clip((x / scale).numpy(), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(ratio.astype(np.float32)) * scale


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.arange(3, 27).view(2, 12)


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1), (3, 1, 1)])
def test_rows_with_static_scales_decode_as_ml_dtypes(shape):
    torch.manual_seed(0)
    x, scale = torch.randn(2, 3, 9, 16), torch.rand(shape) / 100
    rows = QuantizedRows("fp8_e4m3:row", scale)
    for part in x.split([4, 1, 4], 2):
        rows.append(part)
    assert torch.equal(rows.read(), decoded(x, scale))
    rows.select(torch.tensor([1, 1, 0]))
    assert torch.equal(rows.read(), decoded(x[[1, 1, 0]], scale))
    assert rows.nbytes == 3 * 3 * 16 * (len(rows._buffers["codes"]))  # codes alone


@pytest.mark.parametrize("scheme", ["int8:group32", "nvfp4", "uint8:row:affine"])
def test_static_scales_need_a_scale_per_row(scheme):
    if find_scheme(scheme).global_scale:
        scheme = f"{scheme}:global_row"
    with pytest.raises(ValueError, match="static scales are per row"):
        QuantizedRows(scheme, torch.ones(1))


@pytest.mark.parametrize("per", ["tensor", "head"])
@torch.no_grad()
def test_measured_scales(per):
    model, plain = llama(), transformers.DynamicCache()
    scales = calibrate_cache_(model, [IDS[:1], {"input_ids": IDS[1:]}], per)
    model(IDS, **{cache_name(model): plain})
    assert list(scales) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for (name, pair), layer in zip(scales.items(), plain.layers, strict=True):
        for scale, states in zip(pair, (layer.keys, layer.values), strict=True):
            largest = states.abs().amax((0, 2, 3), keepdim=True)[0] if per == "head" else states.abs().max().view(1)
            torch.testing.assert_close(scale, largest / 448, rtol=1e-6, atol=0)
        assert model.get_submodule(name).k_scale is pair[0]
    cache = quantized_cache(model)
    model(IDS, **{cache_name(model): cache})
    first, pair = plain.layers[0], scales["model.layers.0.self_attn"]
    assert torch.equal(cache.layers[0].keys.read(), decoded(first.keys, pair[0]))
    assert torch.equal(cache.layers[0].values.read(), decoded(first.values, pair[1]))


def saved(model, path):
    lb.save_model(model, path)
    return lb.load_model(path)


def pretrained(model, path):
    model.save_pretrained(path)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")


def exported(model, path):
    lb.export(model, "compressed-tensors", path)
    return lb.load_model(path)


@pytest.mark.parametrize("way", [saved, pretrained, exported])
@pytest.mark.parametrize("per", ["tensor", "head"])
@torch.no_grad()
def test_scales_are_saved_and_loaded(per, way, tmp_path):
    model = llama()
    scales = calibrate_cache_(model, [IDS], per)
    lb.quantize_(model, "fp8-weight-only")
    other = way(model, tmp_path / "model")
    for name, (keys, values) in scales.items():
        assert torch.equal(other.get_submodule(name).k_scale, keys)
        assert torch.equal(other.get_submodule(name).v_scale, values)
    logits = [one(IDS, **{cache_name(one): quantized_cache(one)}).logits for one in (model, other)]
    assert torch.equal(*logits)
    assert not torch.equal(logits[0], model(IDS).logits)


@pytest.mark.parametrize("per", ["tensor", "head"])
@torch.no_grad()
def test_the_package_compressed_tensors_rounds_alike(per, tmp_path):
    package = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    model, plain = llama(), transformers.DynamicCache()
    scales = calibrate_cache_(model, [IDS], per)
    model(IDS, **{cache_name(model): plain})
    lb.quantize_(model, "fp8-weight-only")
    lb.export(model, "compressed-tensors", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert "kv_cache_scales" not in config
    arguments = package.QuantizationArgs(**config["quantization_config"]["kv_cache_scheme"])
    scale = scales["model.layers.0.self_attn"][0]
    rows = QuantizedRows("fp8_e4m3:row", scale)
    rows.append(plain.layers[0].keys)
    assert torch.equal(fake_quantize(plain.layers[0].keys, scale, None, arguments), rows.read())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits)  # it has no quantized cache


@pytest.mark.parametrize("scheme", [{"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float", "dynamic": True}])
def test_other_schemes_of_the_cache_warn(scheme, tmp_path):
    model = llama()
    lb.quantize_(model, "fp8-weight-only")
    lb.export(model, "compressed-tensors", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="the cache stays float"):
        assert torch.equal(lb.load_model(tmp_path / "model")(IDS).logits, model(IDS).logits)


def test_a_plain_model_of_transformers_loses_them_with_its_note(tmp_path):
    model = llama()
    calibrate_cache_(model, [IDS])
    model.save_pretrained(tmp_path / "plain")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")  # which drops unknown tensors
    lb.quantize_(other, "fp8-weight-only")
    lb.export(other, "compressed-tensors", tmp_path / "exported")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] is None
    assert quantized_cache(saved(other, tmp_path / "saved")).layer_class_to_replicate is not None


def test_bad_input():
    model = llama()
    with pytest.raises(ValueError, match="'tensor' or 'head'"):
        calibrate_cache_(model, [IDS], "row")
    with pytest.raises(ValueError, match="got 0 batches"):
        calibrate_cache_(model, [])
    with pytest.raises(ValueError, match="not finite"):
        broken = llama()
        broken.model.layers[1].self_attn.v_proj.weight.data.fill_(torch.inf)
        calibrate_cache_(broken, [IDS])
    described = huggingface.describe(model)
    described["config"]["kv_cache_scales"] = [1]
    with pytest.raises(ValueError, match="kv_cache_scales"):
        huggingface.build(described)
