"""Directories of GPTQ, AWQ, ModelOpt, DeepSeek's FP8 and gpt-oss, next to the programs' own decoding."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.producers import fp8, gptq, llama, nvfp4, shuffled, write

import lowbit as lb
from lowbit.interop import FORMATS, format_of
from lowbit.nn import QuantLinear
from lowbit.serialize.shards import Checkpoint

transformers = pytest.importorskip("transformers", minversion="5")

IDS = torch.arange(3, 27).view(2, 12)


def check(directory, model, exact, method, recipe):
    """The loaded model has the decoded weights, and computes with them."""
    assert format_of(directory).name == method
    loaded = lb.load_model(directory)
    layers = {name: layer for name, layer in loaded.named_modules() if isinstance(layer, QuantLinear)}
    assert set(layers) == set(exact)
    for name, layer in layers.items():
        assert layer.recipe.name == recipe
        assert torch.equal(layer.weight.dequantize(torch.float32), exact[name])
    for name, value in exact.items():
        model.get_submodule(name).weight.data.copy_(value)
    got, plain = loaded(IDS).logits.float(), model(IDS).logits.float()
    assert (got - plain).norm() < 0.15 * plain.norm()  # inputs may be FP4
    return loaded


# -- GPTQ --------------------------------------------------------------------------------------------------------------
@pytest.mark.thinned(4)
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 64), (4, 32), (4, -1), (8, 64)])
@torch.no_grad()
def test_gptq(bits, group, symmetric, version, tmp_path):
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    if version is not None:
        config["checkpoint_format"] = version
    model = llama()
    exact = write(tmp_path / "in", model, gptq(bits, group, symmetric, version != "gptq_v2"), config)
    kind = f"int{bits}-weight-only" if symmetric else f"uint{bits}-weight-only"
    scaling = "row" if group == -1 else f"group{group}"
    name = f"{kind}:{scaling}{'' if symmetric else ':affine'}:fp16"
    check(tmp_path / "in", model, exact, "gptq", "q4-0" if (bits, group, symmetric) == (4, 32, True) else name)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(3, 32), (4, 64), (8, 128)])
@torch.no_grad()
def test_gptq_in_the_order_of_activations(bits, group, symmetric, tmp_path):
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": True}
    model = llama()
    exact = write(tmp_path / "in", model, gptq(bits, group, symmetric, 1, shuffled), config)
    loaded = lb.load_model(tmp_path / "in")
    for name, value in exact.items():
        layer = loaded.get_submodule(name)
        assert layer.recipe.reordered and torch.equal(layer.plain_weight(torch.float32), value)
        model.get_submodule(name).weight.data.copy_(value)
    logits = loaded(IDS).logits
    torch.testing.assert_close(logits, model(IDS).logits, rtol=0.02, atol=0.01)
    ways = (lambda: lb.save_model(loaded, tmp_path / "a"), lambda: loaded.save_pretrained(tmp_path / "b"),
            )  # fmt: skip
    for way in ways:
        way()
    back = (lb.load_model(tmp_path / "a"),
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto"))  # fmt: skip
    for other in back:
        assert torch.equal(other(IDS).logits, logits)
    for format in ("gguf", "compressed-tensors"):
        with pytest.raises(ValueError, match="order of activations"):
            lb.export(loaded, format, tmp_path / "d")
    lb.dequantize_(loaded)
    for name, value in exact.items():
        assert torch.equal(loaded.get_submodule(name).weight, value.half())
    torch.testing.assert_close(loaded(IDS).logits, logits, rtol=0.02, atol=0.01)


@torch.no_grad()
def test_compressed_tensors_in_the_order_of_activations(tmp_path):
    model = llama()
    lb.quantize_(model, "int4-weight-only:group64")
    lb.export(model, "compressed-tensors", tmp_path / "in")
    stored = Checkpoint(tmp_path / "in")
    tensors = {name: stored.read(name) for name in stored.entries}
    exact = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            cols = layer.in_features
            groups = torch.from_numpy(shuffled(cols, 64).astype(np.int32))
            tensors[f"{name}.weight_g_idx"] = groups
            plain, scale = layer.weight.dequantize(torch.float32), layer.weight.scale
            codes = (plain / scale.repeat_interleave(64, 1)).round()
            exact[name] = codes * scale[:, groups.long()]
    save_file(tensors, tmp_path / "in/model.safetensors")
    config = json.loads((tmp_path / "in/config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    loaded = lb.load_model(tmp_path / "in")
    for name, value in exact.items():
        assert torch.equal(loaded.get_submodule(name).plain_weight(torch.float32), value)


def test_adapters_train_on_reordered_columns(tmp_path):
    peft = pytest.importorskip("peft")
    config = {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True, "desc_act": True}
    write(tmp_path / "in", llama(), gptq(8, 32, True, 1, shuffled), config)
    model = lb.load_model(tmp_path / "in").float()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    adapted(IDS, labels=IDS).loss.backward()
    before = adapted(IDS).logits
    for name, parameter in adapted.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    changed = adapted(IDS).logits
    merged = adapted.merge_and_unload()
    error, change = merged(IDS).logits - changed, changed - before
    assert error.norm() < 0.2 * change.norm()


def test_gptq_refuses_false_claims(tmp_path):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    write(tmp_path / "mixed", llama(), gptq(4, 32, True, 1, shuffled), config)
    with pytest.raises(ValueError, match="desc_act"):
        lb.load_model(tmp_path / "mixed")
    uneven = gptq(4, 32, True, 1, lambda cols, size: np.minimum(np.arange(cols) // 16, cols // size - 1))
    write(tmp_path / "uneven", llama(), uneven, {**config, "desc_act": True})
    with pytest.raises(ValueError, match="g_idx is damaged: expected groups of 32 columns"):
        lb.load_model(tmp_path / "uneven")
    write(tmp_path / "zeros", llama(), gptq(4, 32, False, 1), config)
    with pytest.raises(ValueError, match=r"model\.safetensors.*its config says sym"):
        lb.load_model(tmp_path / "zeros")


# -- AWQ ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (128, True), (64, False)])
@torch.no_grad()
def test_awq(group, zeros, tmp_path):
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    package = pytest.importorskip("compressed_tensors.compressors")
    converter = converters.AutoAWQConverter(group_size=group, zero_point=zeros)
    scheme = converter.update_config(None).config_groups["config_group_0"]

    def quantize(name, weight):
        rows, cols = weight.shape
        torch.manual_seed(len(name))
        words = torch.iinfo(torch.int32)
        parts = {
            "qweight": torch.randint(words.min, words.max, (cols, rows // 8), dtype=torch.int32),
            "scales": (torch.rand(cols // group, rows) / 100).half(),
        }
        if zeros:
            parts["qzeros"] = torch.randint(words.min, words.max, (cols // group, rows // 8), dtype=torch.int32)
        theirs = converter.process({f"layer.{part}": tensor for part, tensor in parts.items()})
        local = {key.removeprefix("layer."): value for key, value in theirs.items()}
        local["weight_scale"] = local["weight_scale"].float()  # so that the product is not rounded to fp16
        reader = package.BaseCompressor.get_value_from_registry("pack-quantized")
        return parts, reader.decompress(local, scheme)["weight"].float()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zeros, "version": "gemm"}
    model = llama()
    exact = write(tmp_path / "in", model, quantize, config)
    name = f"uint4-weight-only:group{group}:affine:fp16" if zeros else f"int4-weight-only:group{group}:fp16"
    check(tmp_path / "in", model, exact, "awq", name)


# -- ModelOpt ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(("algorithm", "quantize", "recipe"), [
    ("NVFP4", nvfp4, "nvfp4"), ("W4A16_NVFP4", nvfp4, "nvfp4-weight-only"), ("FP8", fp8, "fp8-static:tensor"),
])  # fmt: skip
@torch.no_grad()
def test_modelopt(algorithm, quantize, recipe, file, tmp_path):
    config = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    if file == "config.json":
        config["quant_method"] = "modelopt"
    else:
        config = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": config}
    model = llama(torch.bfloat16)
    exact = write(tmp_path / "in", model, quantize, config, file)
    if algorithm != "FP8":  # the order of two factors
        loaded = lb.load_model(tmp_path / "in")
        for name, value in exact.items():
            layer = loaded.get_submodule(name)
            torch.testing.assert_close(layer.weight.dequantize(torch.float32), value, rtol=1.2e-7, atol=0)
            exact[name] = layer.weight.dequantize(torch.float32)
    loaded = check(tmp_path / "in", model, exact, "modelopt", recipe)
    if algorithm == "FP8":
        layers = [layer for layer in loaded.modules() if isinstance(layer, QuantLinear)]
        assert {layer.input_scales.scale.item() for layer in layers} == {torch.tensor(0.01).item()}


def test_the_converter_of_modelopt_has_the_same_values():
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    parts, _ = nvfp4("", torch.randn(64, 64))
    theirs = converters.ModelOptNvfp4Converter(targets=["re:.*"]).process({f"x.{k}": v for k, v in parts.items()})
    assert torch.equal(theirs["x.weight_packed"], parts["weight"])
    torch.testing.assert_close(1 / theirs["x.weight_global_scale"], parts["weight_scale_2"], rtol=1.2e-7, atol=0)


# -- FP8 ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [(128, 128), (64, 32), None])
@torch.no_grad()
def test_fp8(block, tmp_path):
    def quantize(name, weight):
        rows, cols = block or weight.shape
        count = [-(-size // part) for size, part in zip(weight.shape, (rows, cols), strict=True)]
        scale = torch.rand(count) / 1000 + 1e-4
        wide = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale if block else scale.reshape(())}, codes.float() * wide

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    model = llama(torch.bfloat16)
    exact = write(tmp_path / "in", model, quantize, config)
    name = {(128, 128): "fp8-block", None: "fp8-tensor"}.get(block)
    layers = check(tmp_path / "in", model, exact, "fp8", name) if name else lb.load_model(tmp_path / "in")
    for layer_name, value in exact.items():
        assert torch.equal(layers.get_submodule(layer_name).weight.dequantize(torch.float32), value)


# -- gpt-oss -----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_gpt_oss(tmp_path):
    decode = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        layer_types=["full_attention"],
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval().bfloat16()
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    experts, path = model.model.layers[0].mlp.experts, "model.layers.0.mlp.experts"
    exact = {}
    for stack in ("gate_up_proj", "down_proj"):
        count, cols, rows = getattr(experts, stack).shape
        blocks = torch.randint(256, (count, rows, cols // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (count, rows, cols // 32), dtype=torch.uint8)
        del tensors[f"{path}.{stack}"]
        tensors |= {f"{path}.{stack}_blocks": blocks, f"{path}.{stack}_scales": scales}
        exact[stack] = decode(blocks, scales)  # [E, K, N], as the model has it
        getattr(experts, stack).copy_(exact[stack])
        getattr(experts, f"{stack}_bias").normal_()
        tensors[f"{path}.{stack}_bias"] = getattr(experts, f"{stack}_bias").clone()
    (tmp_path / "in").mkdir()
    config.dtype, config.architectures = torch.bfloat16, ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path / "in")
    described = json.loads((tmp_path / "in/config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "in/config.json").write_text(json.dumps(described))
    save_file(tensors, tmp_path / "in/model.safetensors")
    loaded = lb.load_model(tmp_path / "in")
    quantized = loaded.get_submodule(path)
    for stack, layers in (("gate_up_proj", quantized.gate_up), ("down_proj", quantized.down)):
        for index, layer in enumerate(layers):
            assert torch.equal(layer.weight.dequantize(torch.float32), exact[stack][index].t().float())
            assert torch.equal(layer.bias, getattr(experts, f"{stack}_bias")[index])
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0.05, atol=0.02)


# -- all ---------------------------------------------------------------------------------------------------------------
def test_formats_that_are_only_read_say_so(tmp_path):
    model = llama()
    lb.quantize_(model, "int4-weight-only:group32")
    for name in ("awq", "fp8", "mxfp4"):
        assert FORMATS[name].write is None
        with pytest.raises(ValueError, match=f"{name} is only read; expected one of gguf"):
            lb.export(model, name, tmp_path / "out")


def stored(directory):
    """The tensors of a directory."""
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.read(name) for name in checkpoint.entries}


def config_of(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("symmetric", "order"), [(True, None), (False, None), (True, shuffled)])
def test_gptq_is_written_as_it_was_read(bits, symmetric, order, tmp_path):
    config = {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": symmetric, "desc_act": order is not None,
              "checkpoint_format": "gptq" if symmetric else "gptq_v2"}  # fmt: skip
    write(tmp_path / "in", llama(), gptq(bits, 64, symmetric, int(symmetric), order), config)
    model = lb.load_model(tmp_path / "in")
    lb.export(model, "gptq", tmp_path / "out")
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name
    assert config.items() <= config_of(tmp_path / "out").items()
    assert torch.equal(lb.load_model(tmp_path / "out")(IDS).logits, model(IDS).logits)


def test_gptq_of_lowbit(tmp_path):
    model = llama()
    lb.quantize_(model, {"*": "int4-weight-only:group32:fp16", "*.o_proj": None})
    lb.export(model, "gptq", tmp_path / "out")
    assert set(config_of(tmp_path / "out")["dynamic"]) == {r"-:^model\.layers\.0\.self_attn\.o_proj$"}
    same_weights(model, lb.load_model(tmp_path / "out"))
    for recipe, told in (("int4-weight-only", "scales are fp16"), ("nf4", "integers of 2, 3, 4 and 8 bits"),
                         ("int8", "no quantized inputs"), ("q4_1", "integers of 2, 3, 4 and 8 bits")):  # fmt: skip
        other = llama()
        lb.quantize_(other, recipe)
        with pytest.raises(ValueError, match=f"{told}.*nearest recipe that works is") as raised:
            lb.export(other, "gptq", tmp_path / "never")
        nearest = str(raised.value).partition("works is '")[2].partition("'")[0]
        assert FORMATS["gptq"].refuses(lb.recipe(nearest)) is None
    mixed = llama()
    lb.quantize_(mixed, {"*": "int4-weight-only:group32:fp16", "*.o_proj": "int8-weight-only:group32:fp16"})
    with pytest.raises(ValueError, match="one scheme for all layers"):
        lb.export(mixed, "gptq", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def same_weights(model, other):
    """Both models have the same quantized layers. (Casting a model in memory also casts its rotary frequencies.)"""
    layers = [{n: m for n, m in one.named_modules() if isinstance(m, QuantLinear)} for one in (model, other)]
    assert layers[0].keys() == layers[1].keys()
    for name, layer in layers[0].items():
        assert layer.recipe.weight == layers[1][name].recipe.weight
        assert torch.equal(layer.weight.dequantize(torch.float32), layers[1][name].weight.dequantize(torch.float32))
    torch.testing.assert_close(model(IDS).logits, other(IDS).logits, rtol=0.05, atol=0.01)


def without_input(quantize):
    def changed(name, weight):
        parts, exact = quantize(name, weight)
        del parts["input_scale"]
        return parts, exact

    return changed


@pytest.mark.parametrize(("algorithm", "quantize"), [("W4A16_NVFP4", without_input(nvfp4)), ("FP8", fp8)])
def test_modelopt_is_written_as_it_was_read(algorithm, quantize, tmp_path):
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    write(tmp_path / "in", llama(torch.bfloat16), quantize, config)
    model = lb.load_model(tmp_path / "in")
    lb.export(model, "modelopt", tmp_path / "out")
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and torch.equal(value.float(), after[name].float()), name
    assert config.items() <= config_of(tmp_path / "out").items()
    assert torch.equal(lb.load_model(tmp_path / "out")(IDS).logits, model(IDS).logits)


def test_modelopt_of_lowbit(tmp_path):
    model = llama(torch.bfloat16)
    lb.quantize_(model, {"*": "nvfp4-weight-only", "*.o_proj": "fp8", "*.q_proj": "mxfp8", "*.k_proj": None})
    lb.export(model, "modelopt", tmp_path / "out")
    layers = config_of(tmp_path / "out")["quantized_layers"]
    assert {row["quant_algo"] for row in layers.values()} == {"W4A16_NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"}
    same_weights(model, lb.load_model(tmp_path / "out"))
    for recipe in ("int8", "nvfp4", "mxfp4", "fp8-block"):
        other = llama()
        lb.quantize_(other, recipe)
        with pytest.raises(ValueError, match="nearest recipe that works is") as raised:
            lb.export(other, "modelopt", tmp_path / "never")
        nearest = str(raised.value).partition("works is '")[2].partition("'")[0]
        assert FORMATS["modelopt"].refuses(lb.recipe(nearest)) is None
