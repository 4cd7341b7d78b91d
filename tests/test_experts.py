"""Mixtures of transformers whose experts are stacked weights: against its own forward on decoded weights, and files."""

from __future__ import annotations

import copy

import pytest
import torch

import lowbit as lb
from lowbit.nn import QuantExperts, QuantLinear

transformers = pytest.importorskip("transformers", minversion="5")

SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3": (
        "Qwen3Moe", {"num_experts": 5, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "head_dim": 16}
    ),
}  # fmt: skip
IDS = torch.arange(3, 21).reshape(2, 9)
each = pytest.mark.parametrize("name", MODELS)


def made(name: str):
    torch.manual_seed(0)
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@each
@pytest.mark.parametrize("recipe", ["int4-weight-only:group32", "nvfp4-weight-only", "fp8-weight-only"])
@torch.no_grad()
def test_experts_compute_what_decoded_weights_do(name, recipe):
    model = made(name)
    plain = copy.deepcopy(model)
    report = lb.quantize_(model, recipe, method="nearest")
    experts = model.model.layers[0].mlp.experts
    assert type(experts) is QuantExperts and not any("experts" in left for left in report.left)
    stack = plain.model.layers[0].mlp.experts.gate_up_proj
    for expert, layer in enumerate(experts.gate_up):
        assert torch.equal(layer.codes, lb.quantize(stack[expert], layer.scheme).codes)
    decoded = copy.deepcopy(model)
    lb.dequantize_(decoded)
    assert type(decoded.model.layers[0].mlp.experts) is type(plain.model.layers[0].mlp.experts)
    torch.testing.assert_close(model(IDS).logits, decoded(IDS).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_tokens_go_to_their_experts():
    """Index E is padding; an expert that no token has is not called; weights are those of the place."""
    model = made("mixtral")
    plain = copy.deepcopy(model).model.layers[0].mlp.experts.double()
    lb.quantize_(model, "int8-weight-only")
    experts = model.model.layers[0].mlp.experts
    for stack, layers in ((plain.gate_up_proj, experts.gate_up), (plain.down_proj, experts.down)):
        stack.copy_(torch.stack([layer.weight.dequantize().double() for layer in layers]))
    experts.down[3].forward = None  # not called
    x, weights = torch.randn(7, 64), torch.rand(7, 2)
    index = torch.tensor([[0, 1], [1, 0], [2, 4], [4, 4], [2, 0], [0, 2], [1, 2]])
    expected = torch.zeros(7, 64, dtype=torch.float64)
    for token in range(7):
        for place in range(2):
            if (expert := int(index[token, place])) < 4:
                gate, up = (plain.gate_up_proj[expert] @ x[token].double()).chunk(2)
                y = plain.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                expected[token] += y * weights[token, place]
    torch.testing.assert_close(experts(x, index, weights).double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(experts(x[:0], index[:0], weights[:0]), x[:0])


@each
def test_files_packing_and_training(name, tmp_path):
    from lowbit.integrations.transformers import LowbitConfig

    plain, model = made(name), made(name)
    lb.quantize_(model, "int8")
    with torch.no_grad():
        y = model(IDS).logits
        lb.save_model(model, tmp_path / "lowbit")
        assert torch.equal(lb.load_model(tmp_path / "lowbit")(IDS).logits, y)
        model.save_pretrained(tmp_path / "hf")
        assert torch.equal(type(plain).from_pretrained(tmp_path / "hf")(IDS).logits, y)
        plain.save_pretrained(tmp_path / "plain")
        loaded = type(plain).from_pretrained(tmp_path / "plain", quantization_config=LowbitConfig("int8"))
        assert torch.equal(loaded(IDS).logits, y) and type(loaded.model.layers[1].mlp.experts) is QuantExperts
        lb.prepack_(model)
        assert torch.equal(model(IDS).logits, y)
    lb.qat.prepare_(plain, "int8")
    plain(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        prepared = plain.eval()(IDS).logits
        lb.qat.convert_(plain)
        assert torch.equal(plain(IDS).logits, prepared) and torch.equal(prepared, y)


def test_calibration_of_experts_that_no_token_reaches():
    model = made("qwen3")
    gate = model.model.layers[0].mlp.gate
    gate.weight.data.zero_()
    gate.weight.data[:2] = 1.0  # ties: only some experts are chosen
    with pytest.warns(UserWarning, match=r"no batch reaches model.layers.0.mlp.experts"):
        found = lb.calibrate(model, [IDS], "int4-weight-only:group32", "gptq")
    lb.quantize_(model, "int4-weight-only:group32", found)
    assert all(type(layer) is QuantLinear for layer in model.model.layers[0].mlp.experts.down)
    assert bool(model(IDS).logits.isfinite().all())
