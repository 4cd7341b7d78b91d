"""Directories of compressed-tensors, against the package's own decoding and transformers' loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowbit as lb
from lowbit.interop import compressed_tensors as ours
from lowbit.interop.compressed_tensors import layouts, schemes
from lowbit.interop.directories.recipes import recipe_of
from lowbit.nn import QuantLinear
from lowbit.recipes import RECIPES, Gemm, Recipe, recipe
from lowbit.serialize.shards import Checkpoint

compressed_tensors = pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import dequantize  # noqa: E402

#: Recipes that are written, with the format that has them.
RECIPES_WRITTEN = {
    **{f"int{bits}-weight-only:group32": "pack-quantized" for bits in (2, 3, 4, 5, 6, 8)},
    "int4-weight-only": "pack-quantized",
    "int4-weight-only:group32:fp16": "pack-quantized",
    "int4-weight-only:group64:bf16": "pack-quantized",
    "int3-weight-only:row": "pack-quantized",
    "int8-weight-only": "pack-quantized",
    "int8-weight-only:tensor": "pack-quantized",
    "uint4-weight-only": "pack-quantized",
    "uint3-weight-only:group32:affine": "pack-quantized",
    "uint8-weight-only:row:affine": "pack-quantized",
    "int8": "int-quantized",
    "int8-group": "int-quantized",
    "w4a8": "int-quantized",
    "fp8": "float-quantized",
    "fp8:block128x128": "float-quantized",
    "fp8-tensor": "float-quantized",
    "fp8-block": "float-quantized",
    "fp8-weight-only": "naive-quantized",
    "nvfp4-weight-only": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp4-weight-only": "mxfp4-pack-quantized",
    "mxfp6": "mxfp6-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "mxfp8-weight-only": "mxfp8-quantized",
}

#: Recipes that are not, with a word of the reason.
REFUSED = {
    "q4_1": "no format", "q4_k": "no format", "q6_k": "no format",
    "nf4": "no format", "int8:hadamard": "Hadamard", "nvfp4": "global scale", "fp8-pow2": "no format",
    "int4-weight-only:group32:full": "negative", "fp8_e5m2-weight-only:row": "no format",
    "int4-weight-only:group32:e4m3": "no format", "uint8-weight-only:tensor:affine": "zero points",
    "int8-weight-only:col": "no format",
}  # fmt: skip


def decoded(tensors: dict[str, torch.Tensor], group: dict) -> torch.Tensor:
    """The weight in fp32, decoded by compressed-tensors."""
    scheme = QuantizationScheme(targets=["Linear"], **group)
    wide = {
        name: value.float() if name == "weight_scale" and value.dtype in (torch.bfloat16, torch.float16) else value
        for name, value in tensors.items()
    }
    return BaseCompressor.get_value_from_registry(group["format"]).decompress(wide, scheme)["weight"].float()


def sizes(weight: lb.Scheme) -> tuple[int, int]:
    """What the rows and columns of a weight are multiples of."""
    rows, cols = weight.block
    return 1, cols if rows == 1 and cols is not None else 1


@pytest.mark.parametrize("name", RECIPES_WRITTEN)
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_each_layout_decodes_to_the_same_bits(name, data):
    row = recipe(name)
    cols = sizes(row.weight)[1]
    shape = data.draw(st.integers(1, 9)), cols * data.draw(st.integers(1, 3 if cols > 1 else 70))
    scale = data.draw(st.sampled_from((1e-3, 1.0, 50.0)))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * scale
    weight = lb.quantize(x, row.weight)
    format, group = schemes.group_of(row)
    assert format.name == RECIPES_WRITTEN[name]
    tensors = layouts.to_tensors(weight, format)
    assert {k: (v.dtype, tuple(v.shape)) for k, v in tensors.items()} == {
        k: tuple(kind) for k, kind in layouts.weight_kinds(format, row.weight, shape).items()
    }
    exact = weight.dequantize(torch.float32)
    if weight.global_scale is None:
        assert torch.equal(decoded(tensors, group), exact)
    else:
        torch.testing.assert_close(decoded(tensors, group), exact, rtol=2**-8, atol=0)  # the package decodes to bf16
        wide = dequantize(
            unpack_fp4_from_uint8(tensors["weight_packed"], *shape, torch.float32),
            tensors["weight_scale"].float(),
            args=QuantizationScheme(targets=["Linear"], **group).weights,
            global_scale=tensors["weight_global_scale"],
        )
        assert (wide - exact).norm() <= 1e-7 * exact.norm()  # a reciprocal and another order of two factors
    back = layouts.from_tensors(tensors, format, row.weight, shape, x.dtype)
    for part, value in weight.parts.items():
        if part == "global_scale":
            torch.testing.assert_close(back.parts[part], value, rtol=1.2e-7, atol=0)
        else:
            assert torch.equal(back.parts[part], value) and back.parts[part].dtype == value.dtype


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_code_survives(bits):
    """Also the lowest one, which lowbit's own quantization does not use."""
    row = recipe(f"int{bits}-weight-only:row")
    format, group = schemes.group_of(row)
    codes = torch.arange(1 << bits, dtype=torch.uint8)[None]
    weight = lb.Quantized(
        lb.pack(codes, bits), torch.ones(1, 1), None, None, row.weight, torch.Size(codes.shape), torch.float32
    )
    tensors = layouts.to_tensors(weight, format)
    signed = [code - (1 << bits) * (code >= 1 << (bits - 1)) for code in range(1 << bits)]
    assert decoded(tensors, group).tolist() == [signed]
    assert torch.equal(
        layouts.from_tensors(tensors, format, row.weight, codes.shape, torch.float32).codes, weight.codes
    )


@pytest.mark.parametrize("name", RECIPES_WRITTEN)
def test_the_config_names_the_recipe(name):
    """The package accepts it, and it is read as the same recipe."""
    row = recipe(name)
    format, group = schemes.group_of(row)
    QuantizationConfig.model_validate({"config_groups": {"group_0": {"targets": ["Linear"], **group}}})
    dtype = "float8_e4m3fn" if row.weight.global_scale else row.weight.scale_format.dtype
    assert schemes.scheme_of(json.loads(json.dumps(group["weights"])), format.name, dtype)[0].storage == format.storage
    _, weight = schemes.scheme_of(group["weights"], format.name, dtype)
    found = recipe_of(weight, schemes.input_of(group["input_activations"]))
    assert (found.weight, found.input, found.static) == (row.weight, row.input, row.static)
    assert found.name == row.name or row not in RECIPES.values()


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_a_recipe_that_works(name):
    base = name.replace(":full", "")
    row = recipe(base) if base != name else None
    row = recipe(name) if row is None else Recipe(Gemm(None, "int4:group32:full"))
    refusal = ours.refuses(row)
    assert refusal is not None and REFUSED[name] in refusal.why
    assert ours.refuses(recipe(refusal.nearest)) is None


# -- models ------------------------------------------------------------------------------------------------------------
def build(tied: bool = False, **more) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(12).reshape(2, 6)).logits.float()


def parts(model: nn.Module) -> dict[str, torch.Tensor]:
    """The codes and scales of all quantized layers."""
    return {
        f"{name}.{part}": value
        for name, layer in model.named_modules()
        if isinstance(layer, QuantLinear)
        for part, value in {**layer.weight.parts, "input": layer.input_scale}.items()
        if value is not None and part != "global_scale"
    }


def test_a_model_with_several_schemes_keeps_its_codes(tmp_path):
    model = build(tied=True, attention_bias=True)
    rows = {"*": "int8", "q_proj": "int4-weight-only:group32", "down_proj": "fp8", "o_proj": "int8-weight-only"}
    lb.quantize_(model, {**rows, "layers.1.mlp.up_proj": None})
    report = ours.write(model, tmp_path / "out")
    assert ours.detect(tmp_path / "out") and not ours.detect(tmp_path) and len(report.layers) == 13
    back = ours.read(tmp_path / "out")
    expected, actual = parts(model), parts(back)
    assert expected.keys() == actual.keys() and all(torch.equal(expected[k], actual[k]) for k in expected)
    assert torch.equal(logits(back), logits(model))
    assert back.lm_head.weight is back.model.embed_tokens.weight
    names = {name: layer.recipe.name for name, layer in back.named_modules() if isinstance(layer, QuantLinear)}
    assert names["model.layers.0.self_attn.q_proj"] == "int4-weight-only:group32"
    assert names["model.layers.1.mlp.down_proj"] == "fp8" and "model.layers.1.mlp.up_proj" not in names
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == ["model.layers.1.mlp.up_proj", "lm_head"]


def test_static_inputs_and_shards(tmp_path, monkeypatch):
    from lowbit.interop.directories import writing

    model = build()
    batches = [torch.arange(12).reshape(2, 6)]
    calibration = lb.calibrate(model, "int8-static-affine", batches)
    lb.quantize_(model, "int8-static-affine", calibration)
    monkeypatch.setattr(writing, "SHARD_BYTES", 20_000)
    ours.write(model, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    back = ours.read(tmp_path / "out")
    expected, actual = parts(model), parts(back)
    assert expected.keys() == actual.keys() and all(torch.equal(expected[k], actual[k]) for k in expected)
    assert torch.equal(logits(back), logits(model))


def test_tokenizers_are_saved_or_copied(tmp_path):
    model = build()
    lb.quantize_(model, "int8")
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    (tmp_path / "from" / "config.json").write_text("{}")
    ours.write(model, tmp_path / "a", tmp_path / "from")
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(FileNotFoundError, match="no tokenizer files"):
        ours.write(model, tmp_path / "b", tmp_path / "a" / "nothing")
    with pytest.raises(FileExistsError, match="not an empty directory"):
        ours.write(model, tmp_path / "a")

    class Tokenizer:
        def save_pretrained(self, directory: str) -> None:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        ours.write(model, tmp_path / "c", Tokenizer())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "from"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda model: lb.quantize_(model, "nf4"), r"no format has weights in nf4; the nearest .* 'int4-weight-only'"),
        (lambda model: lb.quantize_(model, "int4-weight-only"), r"in_features is 64, no multiple of its groups of 128"),
        (lambda model: lb.quantize_(model, "int8", skip=("layers",)), r"lm_head|was a"),
        (lambda model: None, "no quantized layer"),
        (lambda model: lb.qat.prepare_(model, "int8"), "prepared for training"),
    ],
    ids=["nf4", "group", "embedding", "plain", "qat"],
)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, make, told):
    model = build()
    make(model)
    if told.startswith("lm_head"):
        lb.quantize_(model, {"embed_tokens": "int8-weight-only"})
    with pytest.raises(ValueError, match=told):
        ours.write(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_output_layer_that_shared_its_weight_has_its_own(tmp_path):
    model = build(tied=True)
    with pytest.warns(UserWarning, match="lm_head shared its weight"):
        lb.quantize_(model, "int8", skip=())
    ours.write(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    back = ours.read(tmp_path / "out")
    assert isinstance(back.lm_head, QuantLinear) and torch.equal(logits(back), logits(model))


def test_packed_layers_are_written(tmp_path):
    model = build()
    lb.quantize_(model, "int8", prepack=True)
    ours.write(model, tmp_path / "out")
    assert torch.equal(logits(ours.read(tmp_path / "out")), logits(model))


def test_names_of_checkpoints_differ_from_names_in_memory(tmp_path):
    """vLLM reads the former, transformers both."""
    pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(vocab_size=100, **sizes),
        vision_config=transformers.CLIPVisionConfig(image_size=28, patch_size=14, **sizes),
        image_token_index=99,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    lb.quantize_(model, {"*": "int8-weight-only", "patch_embedding": None})
    ours.write(model, tmp_path / "out")
    assert "language_model.model.layers.0.mlp.up_proj.weight_scale" in Checkpoint(tmp_path / "out").entries
    back = ours.read(tmp_path / "out")
    assert torch.equal(logits(back), logits(model))
    theirs, info = type(model).from_pretrained(str(tmp_path / "out"), dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.thinned(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    ["int2-weight-only:group32", "int4-weight-only:group32", "int8-weight-only", "uint4-weight-only:group32", "int8",
     "w4a8:group32", "fp8", "fp8-tensor", "fp8-weight-only", "nvfp4-weight-only", "mxfp4-weight-only",
     "mxfp6-weight-only", "mxfp8-weight-only", "int8-static-affine", "fp8-static:tensor"],
)  # fmt: skip
def test_transformers_computes_the_same(tmp_path, name, dtype):
    model = build().to(dtype)
    batches = [torch.arange(12).reshape(2, 6)]
    lb.quantize_(model, name, lb.calibrate(model, name, batches) if recipe(name).static else None)
    ours.write(model, tmp_path / "out")
    affine = name.startswith("uint")  # transformers builds zero points of the wrong shape unless it decodes them
    kwargs = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if affine else {}
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path / "out"), dtype="auto", output_loading_info=True, **kwargs
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    model = model.to(theirs.dtype)
    actual = logits(theirs)  # decodes the weights
    quantized_inputs = recipe(name).input is not None
    expected = logits(model)
    lb.dequantize_(model)
    if not quantized_inputs:
        expected = logits(model)
    for layer, other in zip(model.model.layers, theirs.model.layers, strict=True):
        a, b = layer.mlp.down_proj.weight.float(), other.mlp.down_proj.weight.float()
        torch.testing.assert_close(b, a, rtol=0 if dtype == torch.float32 == theirs.dtype else 2**-7, atol=1e-6)
    error = (actual - expected).norm() / expected.norm()
    assert error < (5e-2 if quantized_inputs else 2e-2 if theirs.dtype == torch.bfloat16 else 1e-5)


# -- damaged files -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    model, directory = build(), tmp_path_factory.mktemp("original") / "out"
    lb.quantize_(model, "int4-weight-only:group32")
    ours.write(model, directory)
    return directory


@pytest.fixture
def written(tmp_path, original) -> Path:
    return Path(shutil.copytree(original, tmp_path / "out"))


def rewrite(directory: Path, change) -> None:
    """Change the tensors of a directory."""
    from safetensors.torch import save_file

    checkpoint = Checkpoint(directory)
    tensors = {name: checkpoint.read(name) for name in checkpoint.entries}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop(f"{Q}.weight_packed"), rf"lacks {Q}.weight_packed, which its config needs"),
        (lambda t: t.pop(f"{Q}.weight_scale"), rf"lacks {Q}.weight, which the model needs"),
        (lambda t: t.update({"more": torch.zeros(1)}), r"model.safetensors has 'more', which the model does not use"),
        (lambda t: t.pop("model.norm.weight"), "lacks model.norm.weight, which the model needs"),
        (lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(64)}), r"weight_g_idx.*actorder"),
        (lambda t: t.update({f"{Q}.weight_packed": torch.zeros(64, 9, dtype=torch.int32)}), r"int32 \[64, 9\]"),
        (lambda t: t.update({f"{Q}.weight_scale": torch.zeros(64, 3)}), r"\[64, 3\], expected"),
        (lambda t: t.update({f"{Q}.weight_scale": torch.zeros(64, 2, dtype=torch.int32)}), r"its scales are int32"),
        (lambda t: t.update({f"{Q}.weight_shape": torch.tensor([64, 65])}), r"weight_shape is \[64, 65\]"),
        (lambda t: t.update({"model.norm.weight_scale": torch.zeros(1)}), r"model.norm is a LlamaRMSNorm"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(65)}), r"shape \[65\], expected \[64\]"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(written, change, told):
    rewrite(written, change)
    with pytest.raises(ValueError, match=told):
        ours.read(written)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("config_groups",), [], "config_groups is"),
        (("config_groups", "group_0", "targets"), None, "expected a list of names"),
        (("config_groups", "group_0", "targets"), ["re:("], "is no regular expression"),
        (("config_groups", "group_0", "targets"), ["Conv2d"], r"no config group for model.layers.0.self_attn.q_proj"),
        (("config_groups", "group_0", "weights"), None, "a group needs weights"),
        (("config_groups", "group_0", "weights", "num_bits"), 9, "reads no weights of format 'pack-quantized'"),
        (("config_groups", "group_0", "weights", "num_bits"), 8, r"int32 \[64, 8\], expected .*\[64, 16\]"),
        (("config_groups", "group_0", "weights", "group_size"), -4, "expected positive integers"),
        (("config_groups", "group_0", "weights", "group_size"), 10**12, "may be 2147483648 at most"),
        (("config_groups", "group_0", "weights", "actorder"), "group", "lacks .*weight_g_idx"),
        (("config_groups", "group_0", "format"), "marlin-24", "reads no weights of format 'marlin-24'"),
        (("config_groups", "group_0", "input_activations"), {"strategy": "attn_head"}, "reads no inputs"),
        (("transform_config",), {"a": 1}, "rotated weights"),
        (("quant_method",), "gptq", "no quantization_config of compressed-tensors"),
    ],
)
def test_wrong_configs_are_refused(written, path, value, told):
    config = json.loads((written / "config.json").read_text())
    inner = config["quantization_config"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (written / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=told):
        ours.read(written)


def test_patterns_select_layers(written):
    """Targets and ignored layers may be regular expressions; a name comes before a pattern before a class."""
    config = json.loads((written / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    wrong = {**group, "weights": {**group["weights"], "num_bits": 8}}
    config["quantization_config"]["config_groups"] = {
        "a": {**wrong, "targets": ["Linear"]}, "b": {**group, "targets": [r"re:.*_proj$"]}
    }  # fmt: skip
    (written / "config.json").write_text(json.dumps(config))
    assert len(parts(ours.read(written))) == 28
    config["quantization_config"]["ignore"] = ["re:.*q_proj"]
    (written / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no config group for model.layers.0.self_attn.q_proj"):
        ours.read(written)


def test_damaged_bytes_give_an_error_or_a_model(written):
    """No other exception, whatever byte of the header changes."""
    file = written / "model.safetensors"
    whole = file.read_bytes()

    @settings(deadline=None, max_examples=12)
    @given(place=st.integers(0, 3000), byte=st.integers(0, 255))
    def check(place: int, byte: int) -> None:
        data = bytearray(whole)
        data[place] = byte
        file.write_bytes(data)
        try:
            ours.read(written)
        except (ValueError, FileNotFoundError) as error:
            assert str(written) in str(error)

    check()


# -- vLLM --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("recipe", "note"),
    [
        ("mxfp6", "does not read mxfp6 weights"),
        ("int8-group", "does not read inputs in groups"),
        ({"*": "int8", "k_proj": None}, "needs one recipe for q_proj, k_proj, v_proj"),
        ({"*": "int4-weight-only:group32", "up_proj": "int8"}, "needs one recipe for gate_proj, up_proj"),
        ("nvfp4-weight-only", "different global scales"),
        ("fp8", None),
    ],
)
def test_the_report_says_what_vllm_computes_otherwise(recipe, note, tmp_path):
    model = build()
    lb.quantize_(model, recipe)
    notes = [line for line in ours.write(model, tmp_path / "model").notes if "vLLM" in line]
    assert len(notes) == (note is not None) and (note is None or note in notes[0])


def test_a_quantized_output_layer_is_a_target_of_its_own(tmp_path):
    model = build()
    lb.quantize_(model, "int8", skip=())
    ours.write(model, tmp_path / "model")
    (group,) = json.loads((tmp_path / "model/config.json").read_text())["quantization_config"]["config_groups"].values()
    assert group["targets"] == ["Linear", "lm_head"]
