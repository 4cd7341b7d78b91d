"""ONNX files of quantized models, run by ONNX Runtime, next to lowbit's own results."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.interop import exportable
from lowbit.interop.onnx import TARGET
from lowbit.recipes import RECIPES, recipe
from tests.support.graphs import Many, Words, quantized

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.filterwarnings("ignore")

#: Recipes that ONNX can express: the named ones, and others by name.
WRITTEN = (
    *(name for name, row in RECIPES.items() if TARGET.refuses(row) is None and name != "fp8-delayed"),
    "int2-weight-only:group32", "int3-weight-only:group64", "uint4-weight-only:group48", "uint8-weight-only:row:affine",
    "int4-weight-only:row", "int6-weight-only:group16", "fp8-weight-only:tensor", "int4-weight-only:group64:bf16",
    "nf4:group32", "int4-weight-only:group256", "int4-weight-only:group32:affine", "int8-weight-only:row:affine",
    "int3-weight-only:group32:affine",
)  # fmt: skip


def net(*sizes):
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=index != 1) for index, (a, b) in enumerate(pairwise(sizes))]
    return nn.Sequential(layers[0], nn.GELU(), *layers[1:]).eval()


def run(path, *inputs, dtype=None):
    """The outputs of a file in ONNX Runtime."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return [torch.from_numpy(y) for y in session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))]


def close(found, expected, name):
    """Sums differ in order only; MatMulNBits of level 4 rounds inputs in its own blocks."""
    note = TARGET.row_of(recipe(name)).note
    bound = (2e-6 if note is None else 0.03) * expected.abs().max()
    assert (found - expected).abs().max() <= bound


@torch.no_grad()
def test_recipes(tmp_path):
    torch.manual_seed(0)
    model = Many(nn.Linear(192, 64, bias=index % 2 == 0) for index in range(len(WRITTEN))).eval()
    x, one = torch.randn(5, 192), torch.randn(1, 192)  # another batch size
    quantized(model, {f"layers.{index}": name for index, name in enumerate(WRITTEN)}, [x])
    report = lb.export(model, "onnx", tmp_path / "model.onnx", batch=x)
    assert len(report.layers) == len(WRITTEN)
    for rows in (x, one):
        for name, found, expected in zip(WRITTEN, run(tmp_path / "model.onnx", rows), model(rows), strict=True):
            close(found, expected, name)
    operators = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert {TARGET.row_of(recipe(name)).name for name in WRITTEN} <= operators


@pytest.mark.parametrize("name", [name for name, row in RECIPES.items() if TARGET.refuses(row) is not None])
def test_refused_recipes_name_one_that_works(name):
    refusal = TARGET.refuses(RECIPES[name])
    assert TARGET.refuses(recipe(refusal.nearest)) is None
    if RECIPES[name].static or RECIPES[name].dynamic is False:
        return
    model = net(64, 64, 64)
    try:
        lb.quantize_(model, name, skip=())
    except ValueError:
        return
    with pytest.raises(ValueError, match=f"layer '0'.*nearest recipe that works is '{refusal.nearest}'"):
        lb.export(model, "onnx", "never.onnx", batch=torch.randn(2, 64))


@torch.no_grad()
def test_codes_stay_compressed_and_equal(tmp_path):
    model, x = net(128, 96, 64), torch.randn(4, 128)
    lb.quantize_(model, "int4-weight-only:group32", skip=())
    lb.export(model, "onnx", tmp_path / "model.onnx", batch=x)
    file = onnx.load(tmp_path / "model.onnx")
    stored = {entry.name: onnx.numpy_helper.to_array(entry) for entry in file.graph.initializer}
    codes = [value for value in stored.values() if value.dtype == np.uint8]
    assert sum(value.nbytes for value in codes) == (128 * 96 + 96 * 64) // 2
    first = next(value for value in codes if value.shape == (96, 4, 16))
    integers = np.stack([first & 15, first >> 4], -1).reshape(96, 128).astype(np.float32) - 8
    weight = integers * model[0].weight.scale.numpy().repeat(32, 1)
    assert np.array_equal(weight, model[0].weight.dequantize().numpy())


@pytest.mark.parametrize("name", ["int8", "int8-static", "int8-static-affine"])
@torch.no_grad()
def test_integer_products_are_exact(name, tmp_path):
    """With weights of ones and power-of-two scales, results are equal bits even where 16-bit sums would saturate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64, bias=False))
    model[0].weight.copy_(torch.randint(-127, 128, (64, 512)).float())
    model[0].weight[:, 0] = 127.0
    x = torch.randint(-127, 128, (6, 512)).float()
    x[:, 0] = 127.0
    quantized(model, name, [x])
    lb.export(model, "onnx", tmp_path / "model.onnx", batch=x)
    assert torch.equal(run(tmp_path / "model.onnx", x)[0], model(x))


@pytest.mark.parametrize(("conv", "shape"), [
    (nn.Conv1d(8, 16, 5, stride=2, padding=2), (2, 8, 30)),
    (nn.Conv2d(6, 12, 3, padding="same", groups=3), (2, 6, 9, 11)),
    (nn.Conv2d(4, 8, (3, 5), padding=(1, 2), padding_mode="reflect", dilation=(1, 1), bias=False), (1, 4, 10, 12)),
    (nn.Conv3d(3, 6, 3, padding=1), (1, 3, 5, 6, 7)),
])  # fmt: skip
@torch.no_grad()
def test_convolutions(conv, shape, tmp_path):
    torch.manual_seed(0)
    names, x = ("int8-static", "int8-static-affine", "fp8-weight-only", "int8-weight-only"), torch.randn(shape)
    model = Many(copy.deepcopy(conv) for _ in names).eval()
    quantized(model, {f"layers.{index}": name for index, name in enumerate(names)}, [x])
    lb.export(model, "onnx", tmp_path / "model.onnx", batch=x)
    for found, expected in zip(run(tmp_path / "model.onnx", x), model(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-6 * expected.abs().max().item())


@torch.no_grad()
def test_embeddings_and_attention(tmp_path):
    torch.manual_seed(0)
    tables = ("int8-weight-only", "int4-weight-only:group32", "uint4-weight-only:group16", "fp8-weight-only",
              "nf4:group32", "mxfp4-weight-only", "int4-weight-only:group24", "int4-weight-only:tensor")  # fmt: skip
    model, ids = Words(len(tables)).eval(), torch.randint(50, (2, 7))
    recipes = {f"tables.{index}": name for index, name in enumerate(tables)}
    lb.quantize_(model, {"*": "int4-weight-only:group32", **recipes}, skip=())
    lb.export(model, "onnx", tmp_path / "model.onnx", batch=ids)
    torch.testing.assert_close(run(tmp_path / "model.onnx", ids)[0], model(ids), rtol=1e-4, atol=1e-5)
    longer = torch.randint(50, (3, 12))
    torch.testing.assert_close(run(tmp_path / "model.onnx", longer)[0], model(longer), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_trained_models_and_packed_ones(tmp_path):
    model, x = net(64, 96, 32), torch.randn(8, 64)
    lb.qat.prepare_(model, "int8-static-affine", skip=())
    with pytest.raises(ValueError, match=r"prepared for training; call lowbit.qat.convert_"):
        lb.export(model, "onnx", tmp_path / "model.onnx", batch=x)
    model.train()(x)
    prepared = model.eval()(x)
    lb.qat.convert_(model)
    lb.export(model, "onnx", tmp_path / "model.onnx", batch=x)
    assert torch.equal(model(x), prepared)
    close(run(tmp_path / "model.onnx", x)[0], prepared, "int8-static-affine")
    packed = net(64, 96, 32)
    lb.quantize_(packed, "int8", skip=())
    lb.prepack_(packed)
    lb.export(packed, "onnx", tmp_path / "packed.onnx", batch=x)
    close(run(tmp_path / "packed.onnx", x)[0], packed(x), "int8")


def test_bad_input(tmp_path):
    model, x = net(64, 64, 32), torch.randn(2, 64)
    with pytest.raises(ValueError, match="needs an example batch"):
        lb.export(model, "onnx", tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="'onnx' takes no tokenizer"):
        lb.export(model, "onnx", tmp_path / "model.onnx", tokenizer=object(), batch=x)
    with pytest.raises(ValueError, match="'gguf' takes no batch"):
        lb.export(model, "gguf", tmp_path / "model.gguf", batch=x)
    with pytest.raises(ValueError, match=r"expected fp32 on the CPU: call model.float"):
        lb.export(net(64, 64, 32).bfloat16(), "onnx", tmp_path / "model.onnx", batch=x.bfloat16())
    odd = net(96, 64, 32)
    lb.quantize_(odd, "nf4", skip=())
    with pytest.raises(ValueError, match="layer '0': it has 96 columns"):
        lb.export(odd, "onnx", tmp_path / "model.onnx", batch=torch.randn(2, 96))
    assert type(odd[0]).__name__ == "QuantLinear" and not (tmp_path / "model.onnx").exists()


# -- transformers ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4-weight-only:group32", "mxfp4-weight-only"])
@torch.no_grad()
def test_an_encoder(name, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=128)  # fmt: skip
    model = transformers.BertModel(config).eval()
    lb.quantize_(model, name)
    batch = {"input_ids": torch.randint(100, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    batch["attention_mask"][1, 5:] = 0
    lb.export(model, "onnx", tmp_path / "model.onnx", batch=batch)
    found = run(tmp_path / "model.onnx", *batch.values())[0]
    torch.testing.assert_close(found, model(**batch).last_hidden_state, rtol=1e-3, atol=1e-3)
    longer = {name: value.repeat(1, 2) for name, value in batch.items()}
    found = run(tmp_path / "model.onnx", *longer.values())[0]
    torch.testing.assert_close(found, model(**longer).last_hidden_state, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@torch.no_grad()
def test_a_causal_model_with_a_cache_by_the_exporter_of_transformers():
    exporters = pytest.importorskip("transformers.exporters.exporter_onnx")
    from transformers import LlamaConfig, LlamaForCausalLM

    from lowbit.integrations.kv_cache import cache_name

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    lb.quantize_(model, "int4-weight-only:group32")
    ids = torch.randint(3, 100, (1, 6))
    expected = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    with exportable(model):
        exported = exporters.OnnxExporter().export_for_generation(
            model, {"input_ids": ids}, exporters.OnnxConfig(dynamic=True)
        )
    operators = [node.op_type for part in exported.components.values() for node in part.program.graph]
    assert operators.count("MatMulNBits") == 2 * 14  # in the graph for prompts, and in that for the next token
    tokens, cache, name = ids, None, cache_name(model)
    for part in ["prefill"] + ["decode"] * 7:
        new = tokens if cache is None else tokens[:, -1:]
        place = torch.arange(tokens.shape[1] - new.shape[1], tokens.shape[1])[None]
        given = {} if cache is None else {name: cache}
        output = exported.runners[part](input_ids=new, position_ids=place, **given)
        cache = output[name]
        tokens = torch.cat([tokens, output["logits"][:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, expected)
