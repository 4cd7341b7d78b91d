"""Layers that bitsandbytes and torchao have quantized: the same codes, and values equal to their own decoding."""

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.interop import adopt_
from lowbit.nn import QuantLinear


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 192, bias=False)).to(dtype)


def check(model, exact, recipe):
    """``adopt_`` keeps the values, and the result is a quantized model of lowbit."""
    report = adopt_(model)
    assert [row.name for row in report.layers] == list(exact) and {row.recipe for row in report.layers} == {recipe}
    for name, value in exact.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantLinear) and torch.equal(layer.weight.dequantize(torch.float32), value.float())
    x = torch.randn(3, 128, dtype=next(model.parameters()).dtype if model[0].bias is None else model[0].bias.dtype)
    before = model(x)
    lb.prepack_(model)
    assert torch.equal(model(x), before)
    lb.dequantize_(model)
    assert all(type(layer) is nn.Linear for layer in (model[0], model[2]))
    with pytest.raises(ValueError, match="adopt_"):
        adopt_(model)


# -- bitsandbytes ------------------------------------------------------------------------------------------------------
def of_bitsandbytes(cls, **options):
    bnb = pytest.importorskip("bitsandbytes")
    model = net()
    for name in ("0", "2"):
        plain = model.get_submodule(name)
        layer = getattr(bnb.nn, cls)(plain.in_features, plain.out_features, plain.bias is not None, **options)
        layer.load_state_dict(plain.state_dict())
        model.set_submodule(name, layer)
    return bnb, model.to("cpu")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [64, 32])
def test_nf4(block, nested):
    options = {"quant_type": "nf4", "compress_statistics": nested, "compute_dtype": torch.float32}
    bnb, model = of_bitsandbytes("Linear4bit", **options)
    for layer in (model[0], model[2]):
        weight = bnb.nn.Params4bit(torch.randn(layer.weight.quant_state.shape), requires_grad=False, blocksize=block,
                                   compress_statistics=nested, quant_type="nf4")  # fmt: skip
        layer.weight = weight.to("cpu")
    decode = bnb.functional.dequantize_4bit
    exact = {name: decode(model[int(name)].weight.data, model[int(name)].weight.quant_state) for name in ("0", "2")}
    check(model, exact, "nf4" if block == 64 else f"nf4:group{block}")


def test_fp4_and_blocks_over_rows_are_refused():
    _, model = of_bitsandbytes("Linear4bit", quant_type="fp4", compute_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"layer '0': its format is 'fp4'.*load the model with nf4"):
        adopt_(model)
    assert type(model[0]).__name__ == "Linear4bit"
    bnb, model = of_bitsandbytes("Linear4bit", quant_type="nf4")
    model[0].weight = bnb.nn.Params4bit(torch.randn(64, 96), requires_grad=False, quant_type="nf4").to("cpu")
    with pytest.raises(ValueError, match="reach over rows"):
        adopt_(model)


def test_llm_int8():
    bnb, model = of_bitsandbytes("Linear8bitLt", has_fp16_weights=False, threshold=6.0)
    model(torch.randn(2, 128).half())
    exact = {}
    for name in ("0", "2"):
        state = model.get_submodule(name).state
        exact[name] = state.CB.float() * (state.SCB.float() / 127)[:, None]
        theirs = bnb.functional.int8_vectorwise_dequant(state.CB, state.SCB)
        torch.testing.assert_close(exact[name], theirs, rtol=2e-7, atol=0)  # (code * scale) / 127 there
    check(model, exact, "int8-weight-only")


# -- torchao -----------------------------------------------------------------------------------------------------------
def configs():
    torchao = pytest.importorskip("torchao.quantization")
    from torchao.quantization.granularity import PerAxis, PerGroup

    return {
        "int8-weight-only": torchao.Int8WeightOnlyConfig(version=2),
        "int8": torchao.Int8DynamicActivationInt8WeightConfig(version=2),
        "int4-weight-only:group32": torchao.IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
        "int3-weight-only:row": torchao.IntxWeightOnlyConfig(torch.int3, PerAxis(0)),
        "int2-weight-only:group32": torchao.IntxWeightOnlyConfig(torch.int2, PerGroup(32)),
        "uint4-weight-only:group32:affine": torchao.IntxWeightOnlyConfig(
            torch.int4, PerGroup(32), mapping_type=torchao.MappingType.ASYMMETRIC
        ),
        "fp8-weight-only": torchao.Float8WeightOnlyConfig(version=2),
    }


@pytest.mark.parametrize("recipe", [
    "int8-weight-only", "int8", "int4-weight-only:group32", "int3-weight-only:row", "int2-weight-only:group32",
    "uint4-weight-only:group32:affine", "fp8-weight-only",
])  # fmt: skip
def test_torchao(recipe):
    torchao = pytest.importorskip("torchao.quantization")
    model = net(torch.bfloat16 if recipe.startswith("fp8") else torch.float32)
    torchao.quantize_(model, configs()[recipe])
    exact = {}
    for name in ("0", "2"):
        weight = model.get_submodule(name).weight
        scale, size = weight.scale.float(), weight.block_size[1]
        zero = getattr(weight, "zero_point", None)
        codes = weight.qdata.float().unflatten(1, (-1, size))
        zero = 0 if zero is None else zero.float().reshape(codes.shape[0], -1, 1)
        exact[name] = ((codes - zero) * scale.reshape(codes.shape[0], -1, 1)).flatten(1)
        torch.testing.assert_close(exact[name].to(weight.dtype), weight.dequantize(), rtol=0.01, atol=0)
    check(model, exact, recipe)


def test_other_tensors_of_torchao_are_named():
    pytest.importorskip("torchao.quantization")
    from torchao.quantization import NF4Tensor

    model = net()
    model[0].weight = nn.Parameter(NF4Tensor.from_tensor(torch.randn(64, 128), 64, 8), requires_grad=False)
    with pytest.raises(ValueError, match="NF4Tensor, which lowbit does not read; it reads Int8Tensor"):
        adopt_(model)


# -- transformers ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_model_of_transformers_becomes_one_of_lowbit(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=options)
    ids = torch.arange(3, 15)[None]
    theirs = model(ids).logits
    adopt_(model)
    ours = model(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    lb.save_model(model, tmp_path / "ours")
    assert torch.equal(lb.load_model(tmp_path / "ours")(ids).logits, ours)
    model.save_pretrained(tmp_path / "again")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert torch.equal(back(ids).logits, ours)
